"""Relevance lists of the reranker's benchmark, and what it takes from its measurements."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import rerank
from benchmarks.reranker import CANDIDATES, Pair, read_pairs, related, relevance_lists, sides
from tests.files import write_lines


def pairs(count: int, name: str = "s") -> list[Pair]:
    """Pairs of which each third one shares a sentence with the one before."""
    return [
        Pair(5.0 * (at % 2), f"{name}{at - (at % 3 == 2)}", f"{name}{at} again")
        for at in range(count)
    ]


def sentences(side: list[Pair]) -> set[str]:
    return {sentence for pair in side for sentence in pair[1:]}


def test_sides_share_no_sentence_and_keep_every_pair():
    first, last = pairs(600), [*pairs(60, "t"), Pair(4.0, "s7", "t7")]
    found = sides([first, last], seed=0)
    assert sum(map(len, found)) == 661
    for at, side in enumerate(found):
        assert side
        for other in found[at + 1 :]:
            assert not sentences(side) & sentences(other)
    assert set(last) <= set(found[2])
    assert 0.3 < len(found[1]) / len([*found[0], *found[1]]) < 0.5


def test_lists_have_one_relevant_document_and_no_related_one():
    given = pairs(300)
    groups = dict(zip(given, related(given), strict=True))
    group_of = {sentence: groups[pair] for pair in given for sentence in pair[1:]}
    lists = relevance_lists(given, CANDIDATES, seed=0)
    assert set(Counter(row.query for row in lists).values()) == {CANDIDATES}
    for start in range(0, len(lists), CANDIDATES):
        rows = lists[start : start + CANDIDATES]
        assert len({row.query for row in rows}) == 1
        assert len({row.document for row in rows}) == CANDIDATES
        (relevant,) = [row for row in rows if row.relevance]
        assert any(pair[1:] == relevant[:2] and pair.score >= 4 for pair in given)
        same = [row for row in rows if group_of[row.document] == group_of[row.query]]
        assert same == [relevant]
    by_words = relevance_lists([Pair(5, "a big cat", "cats"), Pair(0, "x", "a big dog"),
                                Pair(0, "y", "no"), Pair(0, "z", "big")], 3, seed=0,
                               by_words=True)  # fmt: skip
    assert {row.document for row in by_words} == {"cats", "a big dog", "big"}
    places = {at % CANDIDATES for at, row in enumerate(lists) if row.relevance}
    assert len(places) > CANDIDATES // 2  # a model cannot learn the place
    assert relevance_lists(given, CANDIDATES, seed=0) == lists


def test_read_pairs_of_sentences_with_quotes(tmp_path: Path):
    path = tmp_path / "sts.tsv"
    path.write_text('score\tsentence1\tsentence2\n4.5\t"A" cat \tb"\n', encoding="utf-8")
    assert read_pairs(path) == [Pair(4.5, '"A" cat', 'b"')]


@pytest.fixture
def requests(tmp_path: Path) -> list[rerank.Request]:
    lines = [f"q{q}\td{d}\t{int(d == 0)}" for q in range(40) for d in range(5)]
    path = write_lines(tmp_path / "test.tsv", ["query\tdocument\trelevance", *lines])
    return rerank.lists(path)


def test_orders_speeds_and_goals(requests: list[rerank.Request]):
    def system(seconds: float, factor: float, first: float = 5) -> rerank.System:
        scores = np.array([first, 4, 3, 2, 1]) * factor
        return lambda request: (seconds, scores[: len(request)])

    systems = {
        rerank.REFERENCE: system(0.03, 1),
        "sentence-transformers, openvino": system(0.02, 1),
        "attnserve, slow": system(0.01, 2),
        "attnserve, other order": system(0.001, 1, first=3.5),
    }
    rows = rerank.orders(systems, requests)
    found = {row["system"]: row for row in rows}
    assert found["attnserve, slow"]["tau"] == found["attnserve, slow"]["ndcg_at_10"] == 1
    assert found["attnserve, other order"]["top1"] == 0
    assert found["attnserve, other order"]["tau"] == pytest.approx(0.8)
    assert found["attnserve, other order"]["ndcg_at_10"] == pytest.approx(1 / np.log2(3))
    times = rerank.timed(systems, requests, rounds=2)
    assert {len(each) for each in times.values()} == {80}
    for row in rows:
        row.update(rerank.speed(row["system"], times))
    goals: dict[str, Any] = rerank.goals(rows)
    assert (goals["best"], goals["fastest_peer"]) == (
        "attnserve, slow",
        "sentence-transformers, openvino",
    )
    assert goals["over_fastest_peer"][0] == pytest.approx(2)
    assert goals["over_torch"][0] == pytest.approx(3)
    rerank.show(rows)
