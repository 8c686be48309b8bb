"""benchmarks/quality.py on a tiny model, and what it calls a disagreement."""

from __future__ import annotations

import json
import random
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.measured import Losses, Quality
from benchmarks import _common, classifier, draw, quality
from tests.attnserve.qualities import quality_of
from tests.conftest import WORDS

BERT = Path(__file__).parents[1] / "fixtures" / "bert" / "eager-dynamo-18-2"


def measured(value: float, half: float = 0.005, **changes: Any) -> Quality:
    """A quality whose interval is ``value`` plus or minus ``half``."""
    ends = (value - half, value + half)
    usual = {"lower": ends[0], "ci95": ends, "p5": 1.0, "rows": 99}
    return quality_of("kl", value, **{**usual, **changes})


@pytest.mark.parametrize(
    ("verified", "unseen", "expected"),
    [
        (measured(0.99), measured(0.99), []),
        (measured(0.99), measured(0.986), []),
        (measured(0.99), measured(0.984), ["promise"]),
        (measured(0.993), measured(0.984), ["promise", "proof"]),
        (measured(0.99), measured(0.998), ["proof"]),
        (measured(0.99), measured(0.991, losses=Losses(0.012, 0.012)), ["condition"]),
        (measured(0.99), measured(0.991, losses=Losses(0.02, 0.0)), ["condition"]),
        (measured(0.99), measured(0.986, losses=Losses(0.02, 0.0)), []),
        (measured(0.99), quality_of("kl", 0.9, p5=1.0, rows=20), []),
    ],
)
def test_disagreements_are_beyond_the_intervals(
    verified: Quality, unseen: Quality, expected: list[str]
):
    assert quality.disagreements(0.99, verified, unseen) == expected


def test_merged_replaces_the_row_of_the_same_goal_and_keeps_the_order():
    old = [{"model": "vit", "keep": 0.9, "seconds": 1}, {"model": "sst2", "keep": 0.99}]
    rows = quality.merged(old, {"model": "vit", "keep": 0.9, "seconds": 2})
    rows = quality.merged(rows, {"model": "sst2", "keep": 0.95})
    assert [(row["model"], row["keep"]) for row in rows] == [
        ("sst2", 0.95), ("sst2", 0.99), ("vit", 0.9),
    ]  # fmt: skip
    assert rows[-1]["seconds"] == 2


def test_texts_are_disjoint_and_distinct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(quality, "ROWS", 10)
    train = [f"sentence {i % 40}" for i in range(80)]
    calibration, unseen, other = (
        path.read_text(encoding="utf-8").splitlines()
        for path in quality._texts(tmp_path, train, ["another"])
    )
    assert len(calibration) <= 10 and other == ["another"]
    assert len(set(unseen)) == len(unseen) and set(unseen).isdisjoint(calibration)
    assert set(unseen) | set(calibration) == set(train)


@pytest.mark.timing(seconds=10)
def test_main_writes_each_run_and_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    choose = random.Random(0)
    texts = [" ".join(choose.choices(WORDS, k=8)) for _ in range(400)]
    runs: list[Path] = []

    def tiny(folder: Path, model: Path) -> quality.Case:
        runs.append(model)
        files = quality._texts(folder, texts, texts[:50])
        return quality.Case(model, *files, "none", lambda _: 1.0)

    monkeypatch.setattr(quality, "ROWS", 220)
    monkeypatch.setattr(quality, "MODELS", {"tiny": (("MODEL",), tiny)})
    for keep in ("0.9", "0.9", "0.8"):
        quality.main(["--tiny", str(BERT), "--resume", "--keep", keep])
    result = json.loads((tmp_path / "quality.json").read_text(encoding="utf-8"))
    assert len(runs) == 2 and [row["keep"] for row in result["rows"]] == [0.8, 0.9]
    assert result["command"] == f"python -m benchmarks.quality --tiny {BERT.name}"
    for row in result["rows"]:
        assert row["gain"] and row["speedup"] > 1 and row["task"]["new"] == 1.0
        assert row["unseen"]["measure"] == "similarity" and row["unseen"]["rows"] > 100
        assert row["proofs"][-1]["quality"]["value"] >= row["keep"]


def test_command_has_the_names_of_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    files = Namespace(
        a=[Path("/x/one"), Path("/x/two")], b=None, c_d=Path("/x/three"), flag=True, no=False,
        resume=True,
    )  # fmt: skip
    _common.write_result("some", files, rows=[{"keep": 1}])
    stored = json.loads((tmp_path / "some.json").read_text(encoding="utf-8"))
    assert stored["command"] == "python -m benchmarks.some --a one two --c-d three --flag"
    assert _common.stored_rows("some") == [{"keep": 1}] and _common.stored_rows("none") == []


def test_rows_of_another_machine_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_common, "RESULTS", tmp_path)
    old = {"machine": {"cpu": "old"}, "cpu_flags": ["avx2"], "rows": [{"keep": 1}]}
    (tmp_path / "some.json").write_text(json.dumps(old), encoding="utf-8")
    (row,) = _common.stored_rows("some")
    assert row == {"keep": 1, "machine": {"cpu": "old"}, "cpu_flags": ["avx2"]}
    _common.write_result("some", Namespace(), rows=[row, {"keep": 2}])
    assert _common.stored_rows("some") == [row, {"keep": 2}]


def test_batches_have_every_row_once_and_like_lengths():
    lengths = [3 + 7 * i % 50 for i in range(330)]
    groups = classifier.batches(lengths, seed=0)
    assert sorted(i for group in groups for i in group) == list(range(330))
    assert max(max(lengths[i] for i in g) - min(lengths[i] for i in g) for g in groups) <= 12


def test_rate_rises_and_falls_to_zero():
    rates = [classifier.rate(step, 100) for step in range(101)]
    assert rates[0] == pytest.approx(0.1) and max(rates) == 1.0 and rates[-1] == 0


def test_draw_follows_the_probabilities_of_the_model():
    probability = np.array([[0.1, 0.6, 0.3], [0.5, 0.0, 0.5], [0.2, 0.7, 0.1]])
    tokens = np.full((4000, 9), 1)
    with np.errstate(divide="ignore"):
        logits = np.log(probability)
    last = draw.draw((logits[tokens[:, t]] for t in range(9)), tokens, np.random.default_rng(0))
    assert (tokens[:, 0] == 1).all() and (last == logits[tokens[:, -1]]).all()
    for before in range(3):
        after = tokens[:, 1:][tokens[:, :-1] == before]
        share = np.bincount(after, minlength=3) / len(after)
        np.testing.assert_allclose(share, probability[before], atol=0.02)
