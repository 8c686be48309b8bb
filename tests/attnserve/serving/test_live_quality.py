"""The live quality measure: guarantees, false alarms and detection."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.checks.measures import Scores
from attnserve.checks.relations import IndexMeter
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.serving import live_quality
from attnserve.serving.live_quality import WINDOW, LiveQuality, read_guarantee
from graph_passes.errors import InvalidModel
from tests.errors import raises

LOSSES: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "exponential": lambda random, n: random.exponential(1, n),
    "gamma": lambda random, n: random.gamma(0.5, 2, n),
    "log-normal": lambda random, n: random.lognormal(-0.5, 1, n),
    "normal": lambda random, n: 1 + 0.3 * random.standard_normal(n),
    "uniform": lambda random, n: random.uniform(0, 2, n),
}
"""Losses of rows with mean 1."""

GUARANTEED = 0.99


class Losses:
    """A meter of rows whose losses are given."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def add(self, a: np.ndarray, b: np.ndarray, batch: Any) -> None:
        self.losses.append(float(b[0]))

    def scores(self) -> Scores:
        influence = 1 - np.array(self.losses[-WINDOW:])
        return Scores("r2", float(influence.mean()), influence, influence, 0.0, {})


def alarms(losses: np.ndarray) -> list[int]:
    """The numbers of rows at which the state changes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_quality, "new_meter", lambda *_: Losses())
        live = LiveQuality("r2", GUARANTEED)
    return [at for at, loss in enumerate(losses, 1) if live.add(np.zeros(1), np.array([loss]), {})]


@pytest.mark.timing(seconds=6)
@pytest.mark.parametrize("kind", LOSSES)
def test_guarantee_that_is_met_raises_no_alarm_in_95_percent_of_long_runs(kind: str):
    """The losses have exactly the guaranteed mean, the worst case, at 21 looks to 1,000 rows."""
    random = np.random.default_rng(0)
    false = [bool(alarms((1 - GUARANTEED) * LOSSES[kind](random, 1000))) for _ in range(200)]
    assert np.mean(false) <= 0.05


@pytest.mark.parametrize("kind", LOSSES)
def test_guarantee_of_99_at_a_quality_of_95_is_found_violated_in_64_rows(kind: str):
    random = np.random.default_rng(1)
    found = [alarms(0.05 * LOSSES[kind](random, 64)) for _ in range(200)]
    assert np.mean([bool(one) for one in found]) >= 0.97


def test_alarm_is_raised_once_and_rearmed_when_the_guarantee_is_met_again():
    random = np.random.default_rng(2)
    kept, broken = (mean * random.exponential(1, 600) for mean in (0.005, 0.05))
    first, again, second = alarms(np.concatenate([kept, broken, kept, broken]))
    assert 600 < first <= 600 + WINDOW
    assert 1200 < again <= 1200 + 2 * WINDOW
    assert 1800 < second <= 1800 + WINDOW


def vectors(random: np.random.Generator, rows: int, noise: float) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings of 64 dimensions with falling variances, and the same with noise."""
    scale = np.arange(1, 65) ** -0.5
    a, b = random.standard_normal((2, rows, 64)) * scale
    return a, a + noise * b


def similarity(a: np.ndarray, b: np.ndarray, guarantee: float | None) -> LiveQuality:
    live = LiveQuality("similarity", guarantee)
    for row in range(len(a)):
        live.add(a[row : row + 1], b[row : row + 1], {})
    return live


def test_similarity_of_embeddings_is_measured_with_interval():
    live = similarity(*vectors(np.random.default_rng(3), 300, 0.0916), None)
    report = live.report
    assert report.value == pytest.approx(0.99, abs=0.003)
    assert report.ci95 is not None and report.ci95[0] < 0.99 < report.ci95[1]
    assert (report.rows, report.guaranteed, report.is_broken) == (WINDOW, None, False)


@pytest.mark.timing(seconds=7)
def test_similarity_alarms_follow_the_guarantee():
    random = np.random.default_rng(4)
    kept = [similarity(*vectors(random, 256, 0.0916), 0.989).report.is_broken for _ in range(10)]
    found = [similarity(*vectors(random, 64, 0.212), 0.99).report.is_broken for _ in range(10)]
    assert sum(kept) <= 1 and all(found)


@pytest.mark.parametrize("measure", ["r2", "kl", "top1", "cosine"])
def test_every_measure_is_one_for_equal_outputs_and_holds_a_window(measure: Any):
    random = np.random.default_rng(5)
    live = LiveQuality(measure, GUARANTEED)
    for _ in range(WINDOW + 70):
        a = random.standard_normal((1, 5, 8))
        live.add(a, a, {"attention_mask": np.array([[1, 1, 1, 1, 0]])})
    assert live.report.value == pytest.approx(1) and not live.report.is_broken
    assert live.report.rows == WINDOW


@pytest.mark.timing(seconds=7)
def test_index_alarms_follow_the_guarantee():
    """The rows of the window search each other, as those of the verification did."""
    random = np.random.default_rng(6)

    def broken(rows: int, noise: float, guarantee: float) -> bool:
        a, b = vectors(random, rows, noise)
        live = LiveQuality("index", guarantee, window=60)
        for row in range(rows):
            live.add(a[row : row + 1], b[row : row + 1], {})
        assert live.report.rows == min(rows, 60)
        assert 0 < (live.report.also["overlap"] or 0) < 1
        return live.report.is_broken

    values = [float(index_scores(*vectors(random, 60, 0.05)).value) for _ in range(40)]  # of proofs
    assert sum(broken(200, 0.05, float(np.mean(values))) for _ in range(20)) <= 2
    assert all(broken(120, 0.3, float(np.mean(values))) for _ in range(10))


def index_scores(a: np.ndarray, b: np.ndarray) -> Scores:
    meter = IndexMeter()
    meter.add(a, b, {})
    return meter.scores()


def artifact(folder: Path, *entries: dict[str, Any]) -> Any:
    folder.mkdir(exist_ok=True)
    (folder / "model.onnx").write_bytes(b"new")
    (folder / "attnserve.json").write_text(json.dumps({"lineage": list(entries)}))
    return open_artifact(folder)


def entry(source: str, value: float, **more: Any) -> dict[str, Any]:
    quality = {"measure": "similarity", "value": value, "output": "hidden", **more}
    return {"rewrite": "x", "source": {"sha256": source}, "quality": quality}


def test_guarantee_is_read_from_the_lineage(tmp_path: Path):
    (tmp_path / "original.onnx").write_bytes(b"original")
    original = open_artifact(tmp_path / "original.onnx")
    checksum = sha256(original.model)

    def guarantee(*entries: dict[str, Any]) -> tuple[str, float | None, str]:
        found = read_guarantee(artifact(tmp_path / "new", *entries), original)
        value = None if found.value is None else round(found.value, 9)
        return found.measure, value, found.output

    first = entry(checksum, 0.99)
    assert guarantee(first) == ("similarity", 0.99, "hidden")
    assert guarantee(entry(checksum, 0.99, ci95=[0.98, 0.995]))[1] == 0.98
    searched = {"gain": True, "asked": {"keep": 0.97, "measure": "auto"}}
    assert guarantee({**first, "search": searched})[1] == 0.97
    assert guarantee({**first, "search": {**searched, "gain": False}})[1] == 0.99
    assert guarantee(entry(checksum, 0.99, measure="tau")) == ("auto", None, "")  # of no single row
    scored = {"gain": True, "asked": {"keep": 0.97, "measure": "score"}}
    assert guarantee({**first, "search": scored})[1] == 0.99
    assert guarantee(first, entry("other", 0.98))[1] == 0.97  # losses add up
    assert guarantee(entry("other", 0.9), first)[1] == 0.99
    assert guarantee(first, entry("other", 0.98, measure="r2"))[1] is None
    assert guarantee(entry(checksum, 0.99, split="random"))[1] is None
    assert guarantee(entry(checksum, 1.0))[1] == 1 - live_quality.ROUNDING
    assert guarantee() == ("auto", None, "")
    assert guarantee({"rewrite": "x", "source": {"sha256": checksum}}) == ("auto", None, "")
    with raises(InvalidModel, "quality.other_original", "original.onnx"):
        guarantee(entry("other", 0.99))


@pytest.mark.parametrize(
    ("fields", "value", "window"),
    [
        ({"rows": 100}, 0.98, 100),
        ({"rows": 9}, 0.98, live_quality.FIRST_LOOK),
        ({"rows": 400}, 0.98, WINDOW),
        ({"rows": 100, "documents": 80}, None, WINDOW),
    ],
)
def test_guarantee_of_an_index_holds_for_as_many_documents(
    fields: dict[str, Any], value: float | None, window: int, tmp_path: Path
):
    """Live rows have no split into queries and documents, so that it is not tested."""
    (tmp_path / "original.onnx").write_bytes(b"original")
    original = open_artifact(tmp_path / "original.onnx")
    rewrite = entry(sha256(original.model), 0.98, measure="index", **fields)
    found = read_guarantee(artifact(tmp_path / "new", rewrite), original)
    assert (found.measure, found.value, found.window) == ("index", value, window)
