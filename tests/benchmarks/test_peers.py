"""The comparison with other tools: what is left out, and the ratios of models in turns."""

from __future__ import annotations

from functools import partial

import numpy as np
import psutil
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.runtime.interface import Batch
from benchmarks import peers, request_cost
from benchmarks.peers import Peers, Run, time_in_turns
from graph_passes.errors import InvalidData
from tests.fixtures.make import BERT


def repeat(times: int, feed: Batch) -> np.ndarray:
    return np.stack([np.sort(np.arange(20_000)[::-1]) for _ in range(times)])


def fail() -> Run:
    raise InvalidData("it is too old", "install a newer one", code="test.old")


def test_model_that_does_not_run_is_left_out_with_the_reason():
    found = Peers[Run]()
    found.add("old", fail)
    found.add("new", lambda: partial(repeat, 1))
    assert [*found.models] == ["new"]
    assert "it is too old" in found.left_out["old"]


def test_export_has_no_gain_of_removal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(peers, "serve_folder", lambda folder, choice: partial(repeat, 1))
    found = Peers[Run]()
    found.add_served("exported", lambda: BERT / "eager-torchscript-17-2")
    assert [*found.models] == ["exported, auto"] and found.removals == {}


def test_ratios_are_stated_over_the_first_and_over_named_models(monkeypatch: pytest.MonkeyPatch):
    ms = np.array([[4.0, 4.4], [2.0, 2.2], [1.0, 1.1]])  # models rounds
    monkeypatch.setattr(peers, "time_shapes", lambda runs, *_: [ms for _ in peers.LENGTHS])
    monkeypatch.setattr(peers, "time_functions", lambda functions, *_: ms)
    models = {name: partial(repeat, 1) for name in ("a", "b", "c")}
    artifact = open_artifact(BERT / "eager-torchscript-17-2")
    *_, last = time_in_turns(models, artifact, over=["b"])
    for kind in ("turns", "repeated"):
        assert [*last[kind]] == [str(length) for length in peers.LENGTHS]
        for cell in last[kind].values():
            assert cell["speedup"] == pytest.approx([4.0, 4.0, 4.0])
            assert cell["over"]["b"] == pytest.approx([2.0, 2.0, 2.0])
    assert "over" not in time_in_turns(models, artifact)[0]["turns"]["16"]


def test_processor_time_is_that_of_the_process():
    before = request_cost.cpu_seconds(psutil.Process())
    while request_cost.cpu_seconds(psutil.Process()) == before:
        repeat(10, {})
    assert 0 < request_cost.cpu_seconds(psutil.Process()) - before < 5
