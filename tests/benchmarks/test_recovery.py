"""The texts and the table of benchmarks/recovery.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import mixture, recovery
from tests.files import write_lines


def test_halves_share_no_paragraph_and_sentences_are_distinct(tmp_path: Path):
    words = " ".join(f"word{i}" for i in range(70))
    lines = [f"First sentence of number {i} here. Then {words}." for i in range(10)]
    source = write_lines(tmp_path / "text.txt", [*lines, "too short"])
    ours, theirs = mixture.halves(source)
    assert sorted([*ours, *theirs]) == sorted(lines)
    assert not set(ours) & set(theirs)
    assert sorted(mixture.sentences_of([*ours, *ours])) == sorted(
        f"First sentence of number {line.split()[4]} here." for line in ours
    )


def test_both_sentences_of_pairs_are_read_once(tmp_path: Path):
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("score\tsentence1\tsentence2\n1\ta b\tc d\n2\tc d\t\n", encoding="utf-8")
    assert recovery.both_sentences(pairs) == ["a b", "c d"]


def test_speeds_are_relative_to_the_fastest_other_model(capsys: pytest.CaptureFixture[str]):
    texts = {"value": 0.9, "overlap": 0.8, "r2": 0.7}
    quality = {"kept": 1.0, "mean_cosine": 0.98, "sentences": texts, "paragraphs": texts}
    row: dict[str, Any] = {
        "case": "half", "minutes": 20.0, "before": quality, "after": quality,
        "speedups": {
            "as exported": {"128": 1.0, "512": 1.0},
            "other": {"128": 1.25, "512": 0.5},
            "smaller": {"128": 2.5, "512": 3.0},
        },
    }  # fmt: skip
    recovery.show([row])
    shown = capsys.readouterr().out
    assert shown.count("2.00x") == 2 and shown.count("3.00x") == 2
