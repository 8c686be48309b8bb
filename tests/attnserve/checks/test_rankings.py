"""The order of the documents of a query: tau, its measure, and lists in calibration data."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper

import attnserve
from attnserve.checks.measures import Scores
from attnserve.checks.quality import QualityMeter, check_measure, limited_losses
from attnserve.checks.rankings import Ranking, best_agrees, kendall_tau, measure_rankings
from attnserve.checks.relations import OrderMeter
from attnserve.data.datasets import Dataset, load_inputs
from attnserve.data.query_lists import Lists
from attnserve.data.row_batches import RowBatch, RowInfo, row_info
from attnserve.job import LIST_BATCH, served_workloads
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.options import Target
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData, MissingExtra
from tests.errors import raises
from tests.files import last_entry, read_record, write_lines
from tests.service.tiny import write_reranker
from tests.texts import WORDS

DOCUMENTS = 5


def by_hand(a: list[int], b: list[int]) -> float:
    """Tau-b by the signs of all pairs."""
    x, y = (np.sign(np.subtract.outer(values, values)) for values in (a, b))
    norms = np.sqrt(np.abs(x).sum() * np.abs(y).sum())
    return float((x * y).sum() / norms) if norms else float(np.abs(x).sum() == np.abs(y).sum())


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12))
def test_kendall_tau_equals_the_signs_of_all_pairs(rows: list[tuple[int, int]]) -> None:
    a, b = (list(column) for column in zip(*rows, strict=True))
    found = kendall_tau(np.array(a, float), np.array(b, float))
    assert found == pytest.approx(by_hand(a, b), abs=1e-12)


def test_best_agrees_with_any_of_equal_best() -> None:
    assert best_agrees(np.array([1.0, 2, 2]), np.array([0.0, 1, 3]))
    assert not best_agrees(np.array([3.0, 2, 2]), np.array([0.0, 1, 3]))


relevances = st.lists(
    st.one_of(st.integers(-1, 4), st.floats(0, 1), st.sampled_from([1e9, 1e300])),
    min_size=1, max_size=25,
)  # fmt: skip


@given(relevances, relevances, st.randoms())
def test_measures_of_rankings_equal_their_definitions(
    ranked: list[float], missed: list[float], random: Random
) -> None:
    """Documents that are judged and not ranked count in nDCG and recall."""
    relevance = {str(index): value for index, value in enumerate([*ranked, *missed])}
    documents = random.sample(list(relevance), len(ranked))
    ndcg, recall, reciprocal = (
        values.item()
        for values in measure_rankings([Ranking(documents, relevance)], "nDCG@10", "R@100", "RR@10")
    )
    gains = np.maximum([relevance[key] for key in documents], 0)
    ideal = np.sort(np.maximum(list(relevance.values()), 0))[::-1]
    discounts = 1 / np.log2(np.arange(10) + 2)
    best = ideal[:10] @ discounts[: len(ideal)]
    found = np.flatnonzero(gains > 0)
    relevant = np.count_nonzero(ideal)
    # fractions become grades of 1 / 100,000 of the best
    expected = gains[:10] @ discounts[: len(gains)] / best if relevant else 0.0
    assert ndcg == pytest.approx(expected, abs=1e-4)
    assert recall == pytest.approx(len(found) / relevant if relevant else 0.0, abs=1e-12)
    assert reciprocal == pytest.approx(1 / (found[0] + 1) if found.size and found[0] < 10 else 0.0)


def test_without_ir_measures_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ir_measures", None)
    with pytest.raises(MissingExtra) as found:
        next(measure_rankings([Ranking(["a"], {"a": 1})], "nDCG@10"))
    assert "pip install ir-measures" in str(found.value)


def scores(a: np.ndarray, b: np.ndarray, relevance: np.ndarray | None = None) -> Scores:
    """The scores of (queries, documents), in two batches that each have half of all lists."""
    meter = OrderMeter()
    query = np.repeat(np.arange(len(a))[:, None], a.shape[1], axis=1)
    relevance = np.full(a.shape, np.nan) if relevance is None else relevance
    for part in (np.s_[:, ::2], np.s_[:, 1::2]):
        lists = Lists(query[part].reshape(-1), relevance[part].reshape(-1))
        batch = RowBatch({}, RowInfo(lists=lists))
        meter.add(a[part].reshape(-1, 1), b[part].reshape(-1, 1), batch)
    return meter.scores()


def test_tau_of_equal_models_is_one_whatever_the_scale_of_a_query() -> None:
    a = np.random.default_rng(0).standard_normal((40, DOCUMENTS))
    found = scores(a, 3 * a + np.arange(40)[:, None])
    assert (found.value, found.also["top1"], found.p5) == (1, 1, 1)
    assert limited_losses(found) == (0, 0)
    assert scores(a, np.zeros_like(a)).value == found.constant == 0


def test_tau_and_best_are_means_over_queries_and_limit_the_loss() -> None:
    a = np.tile(np.arange(5.0), (40, 1))
    b = a.copy()
    b[:10, [3, 4]] = b[:10, [4, 3]]  # another best document, and one of ten pairs
    found = scores(a, b)
    assert found.value == pytest.approx(1 - 10 / 40 * 0.2)
    assert found.also["top1"] == 0.75
    assert len(found.influence) == 40
    assert limited_losses(found).measured == pytest.approx(0.25)
    assert "ndcg_at_10" not in found.also


def test_ndcg_of_both_models_needs_relevant_documents() -> None:
    a, b = np.array([[3.0, 2, 1]] * 2), np.array([[3.0, 2, 1], [2.0, 3, 1]])
    relevance = np.array([[0.0, 0, 0], [1, 0, np.nan]])  # only the second query has one
    also = scores(a, b, relevance).also
    assert also["ndcg_at_10_original"] == pytest.approx(1)
    assert also["ndcg_at_10"] == pytest.approx(1 / np.log2(3))


def test_lists_of_one_document_have_no_order() -> None:
    a = np.arange(6.0)[:, None]
    assert scores(a, a).value == 1
    assert scores(a, -a).value < 0  # R^2 of the scores


# Lists in data


def pair_lines(queries: int, documents: int, relevance: bool = False) -> list[str]:
    rows = [
        (" ".join("abcd"[query // 4**at % 4] for at in range(3)), " ".join("abc" * (1 + place)))
        for query in range(queries)
        for place in range(documents)
    ]
    lines = ["\t".join(row) for row in rows]
    if not relevance:
        return lines
    head = "query\tdocument\trelevance"
    return [head, *(f"{line}\t{int(at % documents == 1)}" for at, line in enumerate(lines))]


@pytest.fixture
def reranker(tmp_path: Path) -> Artifact:
    return open_artifact(write_reranker(tmp_path / "reranker", max_length=64))


def read(path: Path, artifact: Artifact, *, split: bool = True) -> Dataset:
    return load_inputs(path, load_model(artifact), artifact, split=split)


def lists_of(batch: Batch) -> Lists:
    lists = row_info(batch).lists
    assert lists is not None and len(lists.query) == len(batch["input_ids"])
    return lists


def queries_of(part: Sequence[Batch]) -> set[int]:
    return {query for batch in part for query in lists_of(batch).query.tolist()}


@pytest.mark.parametrize("labeled", [True, False])
def test_load_inputs_keeps_the_lists_of_a_query_in_one_part(
    labeled: bool, reranker: Artifact, tmp_path: Path
) -> None:
    path = write_lines(
        tmp_path / ("pairs.tsv" if labeled else "pairs.txt"), pair_lines(35, DOCUMENTS, labeled)
    )
    data = read(path, reranker)
    parts = [data.fit, data.choose, *data.verify]
    found = [queries_of(part) for part in parts]
    assert [len(queries) for queries in found] == [20, 5, 5, 5]
    assert len(set().union(*found)) == 35
    relevance = np.concatenate([lists_of(batch).relevance for batch in data.fit])
    assert np.nansum(relevance) == (20 if labeled else 0)
    assert np.isnan(relevance).all() != labeled
    assert data.length_edge is None
    network = load_model(reranker)
    assert {one.batch for one in served_workloads(network, Target(), data)} == {LIST_BATCH}
    assert {one.batch for one in served_workloads(network, Target(batch=3), data)} == {3}


def test_load_inputs_of_few_queries_or_documents_has_no_lists(
    reranker: Artifact, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.txt"
    for queries, documents in ((13, DOCUMENTS), (35, 1)):
        path.write_text("\n".join(pair_lines(queries, documents)))
        data = read(path, reranker)
        assert not data.has_lists
        with raises(InvalidData, "quality.no_lists", "pairs.txt"):
            check_measure("tau", data)
    assert not read(path, reranker, split=False).has_lists
    path.write_text("\n".join(pair_lines(2, DOCUMENTS)))
    check_measure("tau", read(path, reranker, split=False))  # verify needs no parts


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("query\tdocument\trelevance\na\tb\thigh\n", "evaluate.score_not_number"),
        ("query\tdocument\trelevance\na\tb\tnan\n", "evaluate.score_not_number"),
        ("query\tdocument\na\n", "evaluate.field_count"),
        ("query\tdocument\n\tb\n", "evaluate.empty_field"),
        ("query\tdocument\n", "evaluate.no_rows"),
    ],
)
def test_load_inputs_refuses_malformed_lists(
    content: str, code: str, reranker: Artifact, tmp_path: Path
) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text(content)
    with raises(InvalidData, code):
        read(path, reranker)


def test_verify_measures_the_order_of_lists_by_default(reranker: Artifact, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.tsv", pair_lines(35, DOCUMENTS, relevance=True))
    other = onnx.load(reranker.model)
    other.graph.node[-1].op_type = "Mul"  # a factor of 1 keeps the order
    (tmp_path / "other").mkdir()
    onnx.save(other, tmp_path / "other" / "model.onnx")
    found = attnserve.verify(reranker.model, tmp_path / "other" / "model.onnx", data=path)
    (quality,) = found.qualities
    assert (quality.measure, quality.value, quality.rows) == ("tau", 1, 35)
    assert quality.also["top1"] == 1
    assert quality.also["ndcg_at_10"] == quality.also["ndcg_at_10_original"]
    found = attnserve.verify(reranker.model, reranker.model, data=path, measure="r2")
    assert found.qualities[0].measure == "r2"


def test_tau_of_an_encoder_is_refused(tiny: Path, sentences: Path) -> None:
    with raises(InvalidData, "quality.no_lists"):
        attnserve.verify(tiny, tiny, data=sentences, measure="tau")


def test_rows_with_nan_in_the_original_leave_their_list(reranker: Artifact, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "pairs.txt", pair_lines(4, DOCUMENTS))
    data = read(path, reranker, split=False)
    meter = QualityMeter(load_model(reranker), reranker, data=data)
    for batch in data.fit:
        a = np.arange(len(batch["input_ids"]), dtype=np.float32)[:, None]
        a[0] = np.nan
        meter.add([a], [a + 1], batch)
    (quality,) = meter.results()
    assert (quality.measure, quality.value) == ("tau", 1)
    assert quality.excluded_rows


# Commands


@pytest.fixture
def cross_encoder(model: Path) -> Path:
    """The tiny BERT with a head of one logit on its first token."""
    graph = onnx.load(model / "model.onnx")
    hidden = graph.graph.output[0].name
    weight = np.random.default_rng(0).standard_normal((32, 1)).astype(np.float32)
    graph.graph.initializer.extend(
        [numpy_helper.from_array(weight, "head"), numpy_helper.from_array(np.array(0), "first")]
    )
    graph.graph.node.extend([
        helper.make_node("Gather", [hidden, "first"], ["of_first"], axis=1),
        helper.make_node("MatMul", ["of_first", "head"], ["logits"]),
    ])  # fmt: skip
    del graph.graph.output[:]
    graph.graph.output.append(
        helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, ["batch", 1])
    )
    onnx.save(graph, model / "model.onnx")
    record = read_record(model)
    record = {key: record[key] for key in ("max_length",) if key in record}
    (model / "attnserve.json").write_text(json.dumps({**record, "task": "rerank"}))
    return model


@pytest.fixture
def lists_file(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    lines: list[str] = []
    for _ in range(35):
        query = " ".join(random.choice(WORDS, 5))
        for place in range(DOCUMENTS):
            document = " ".join(random.choice(WORDS, random.integers(3, 12)))
            lines.append(f"{query}\t{document}\t{int(place == 2)}")
    return write_lines(tmp_path / "lists.tsv", ["query\tdocument\trelevance", *lines])


def test_search_verifies_the_order_and_states_it_in_record_and_card(
    cross_encoder: Path, lists_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new"
    attnserve.optimize(cross_encoder, output, calib=lists_file, keep=0.8)
    entry = last_entry(output)
    quality = entry["quality"]
    assert (quality["measure"], quality["split"], quality["rows"]) == ("tau", "prove", 5)
    assert quality["value"] >= 0.8 and quality["top1"] >= 0.8
    assert 0 < quality["ndcg_at_10"] <= 1 and 0 < quality["ndcg_at_10_original"] <= 1
    (row,) = [x for x in (output / "README.md").read_text().split("\n") if x.startswith("| tau |")]
    for name in ("top1", "ndcg_at_10", "ndcg_at_10_original"):
        assert f"{name} {quality[name]:.4f}" in row.replace("\\", "")


def test_conversion_by_hand_is_measured_by_the_order(
    cross_encoder: Path, lists_file: Path, tmp_path: Path
) -> None:
    output = tmp_path / "new"
    report = attnserve.optimize(cross_encoder, output, calib=lists_file, precision="int8")
    assert report.to_json()["quality"]["measure"] == "tau"
    with raises(InvalidData, "quality.no_lists", "few.txt"):
        (tmp_path / "few.txt").write_text("a\tthe dog\nthe\ta man\n")
        attnserve.optimize(
            cross_encoder, tmp_path / "x", calib=tmp_path / "few.txt", keep=0.9, measure="tau"
        )
    assert not (tmp_path / "x").exists()
