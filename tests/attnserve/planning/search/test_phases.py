"""Searches of decoders with a cache: prompts, tokens and sequences are timed as requested."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve import optimize, plan
from attnserve.cli.app import main
from attnserve.context import TimedModel
from attnserve.models.onnx_files import load_model
from attnserve.planning.plans.plan_file import SavedPlan
from graph_passes.errors import InvalidArgument
from tests.architectures import Cell
from tests.attnserve.costs import Count
from tests.errors import raises

LENGTH, VOCABULARY = 9, 61


@pytest.fixture(scope="session")
def llama() -> Path:
    """A tiny random Llama: past keys and values are inputs, the present ones outputs."""
    return Cell("Llama, cached", "sdpa", "torchscript", 17).committed


@pytest.fixture
def rows(llama: Path, tmp_path: Path) -> Path:
    """Whole sequences with empty caches."""
    rng, arrays = np.random.default_rng(1), dict[str, Any]()
    for value in load_model(llama).graph.inputs:
        name, shape = value.name or "", value.shape
        assert shape is not None
        if name == "input_ids":
            arrays[name] = rng.integers(0, VOCABULARY, (120, LENGTH))
        elif name == "attention_mask":
            arrays[name] = np.ones((120, LENGTH), np.int64)
        else:
            arrays[name] = np.zeros((120, shape[1], 0, shape[3]), np.float32)
    np.savez(tmp_path / "rows.npz", **arrays)
    return tmp_path / "rows.npz"


@pytest.mark.parametrize(
    ("options", "phase", "tokens"),
    [
        ({"precision": "int4"}, "token", 1),
        ({"precision": "int4", "phase": "prompt"}, "prompt", LENGTH),
        ({"phase": "token"}, "token", 1),
        ({}, "sequence", LENGTH),
    ],
    ids=["int4", "int4 of prompts", "token", "by default"],
)
def test_plan_of_a_decoder_times_the_phase(
    options: dict[str, Any], phase: str, tokens: int, llama: Path, rows: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, in_context: Callable[..., None],
):  # fmt: skip
    """int4 is timed one token at a time. A replay measures in the phase of the plan."""
    timed = set[int]()

    def timer(models: Sequence[TimedModel], seconds: float) -> list[np.ndarray]:
        feeds = [feed for model in models for feed in model.feeds if "input_ids" in feed]
        timed.update(feed["input_ids"].shape[1] for feed in feeds)
        return Count()(models)

    in_context(timer=timer)
    monkeypatch.setattr("attnserve.planning.search.search_input.CHECKED_LENGTHS", (LENGTH,))
    path = tmp_path / "plan.json"
    record = plan(llama, path, keep=0.5, calib=rows, threads=1, sequence=LENGTH, **options).record
    assert timed == {tokens}
    assert record.goal.phase == phase
    assert record.goal.sequences == (LENGTH,)
    assert {speed.sequence for speed in record.speeds} == ({LENGTH} if record.gain else set())
    assert SavedPlan.read(path).record.goal.phase == phase
    again = optimize(llama, tmp_path / "new", plan=path, calib=rows, threads=1)
    speed = again.record.speedups
    assert speed is not None and {workload.phase for workload in speed.workloads} == {phase}


def test_plan_phase_of_a_model_without_a_cache_is_refused(
    tiny: Path, sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with raises(InvalidArgument, "search.phase", "token"):
        optimize(tiny, tmp_path / "new", keep=0.9, calib=sentences, phase="token")
    code = main(["plan", str(tiny), "--keep", "0.9", "--calib", str(sentences), "--phase", "token"])
    assert code == 2 and "--phase" in capsys.readouterr().err
