"""Which kind of runner is opened, with a runtime that says it is CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import running
from attnserve.cuda_graphs import GraphRunner
from attnserve.device import Cuda
from attnserve.inputs import example_inputs
from attnserve.running import open_runner
from attnserve.session import open_session
from benchmarks.gpu.encoder import random_encoder
from graph_passes.errors import InvalidModel


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)


class Made:
    """In the place of ``open_session``: CPU sessions, and what was asked of each."""

    def __init__(self, refuse: bool = False) -> None:
        self.asked: list[Cuda] = []
        self.refuse = refuse

    def __call__(self, source: Any, *, provider: str, threads: int, cuda: Cuda) -> Any:
        assert provider == "cuda"
        self.asked.append(cuda)
        if self.refuse and cuda.graphs:
            raise InvalidModel("model.onnx: ONNX Runtime refuses the graph: control flow", "")
        return open_session(source, threads=threads)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Made]:
    def install(refuse: bool = False) -> Made:
        one = Made(refuse)
        monkeypatch.setattr(running, "open_session", one)
        return one

    return install


def test_without_graphs_one_session_runs_all(encoder: ir.Model, made: Callable[..., Made]):
    asked = made().asked
    open_runner(encoder, provider="cuda", cuda=Cuda(tf32=True), at_once=4)
    assert asked == [Cuda(tf32=True)]


def test_graphs_need_a_session_for_each_run_at_once(
    encoder: ir.Model, made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
):
    asked = made().asked
    at_once, barrier = 3, Barrier(3)
    runner = open_runner(
        encoder, provider="cuda", cuda=Cuda(memory_bytes=2**30), buckets=4, at_once=at_once
    )
    assert asked == [Cuda(memory_bytes=2**30, graphs=True)] * at_once
    for one in runner.runners:  # type: ignore[attr-defined]
        monkeypatch.setattr(one, "run", lambda names, feed: barrier.wait(5))
    with ThreadPoolExecutor(at_once) as threads:  # each waits for the two others
        for _ in range(2):
            assert sorted(threads.map(lambda _: runner.run(None, {}), range(at_once))) == [0, 1, 2]


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_so(
    encoder: ir.Model, made: Callable[..., Made], caplog: pytest.LogCaptureFixture
):
    asked = made(refuse=True).asked
    runner = open_runner(encoder, provider="cuda", buckets=4, at_once=2)
    assert asked == [Cuda(graphs=True), Cuda()]
    assert not isinstance(runner, GraphRunner)
    assert [record.getMessage() for record in caplog.records] == [
        "without CUDA graphs: model.onnx: ONNX Runtime refuses the graph: control flow"
    ]


def test_after_a_peak_a_run_gives_memory_back(monkeypatch: pytest.MonkeyPatch):
    told: list[Any] = []
    session = SimpleNamespace(run=lambda names, feed, options: told.append(options))
    runner = running._Returning(session)
    for size in (1000, *[10] * 70):
        runner.run(None, {"x": np.zeros(size, np.int8)})

    def shrinks(options: Any) -> str:
        try:
            return options.get_run_config_entry("memory.enable_memory_arena_shrinkage")
        except RuntimeError:
            return ""

    assert [index for index, options in enumerate(told) if shrinks(options)] == [64]
    assert shrinks(told[64]) == "gpu:0"


def test_on_the_cpu_a_runner_is_the_session(encoder: ir.Model):
    feed = example_inputs(encoder, 2, 9)
    runner = open_runner(encoder, provider="cpu", threads=1, buckets=4, at_once=2)
    runner.allow_padding(rows=True, tokens=True)
    expected = open_session(encoder, threads=1).run(None, feed)[0]
    np.testing.assert_array_equal(runner.run(["last_hidden_state"], feed)[0], expected)
    assert [value.name for value in runner.get_inputs()] == list(feed)
    assert [value.name for value in runner.get_outputs()] == ["last_hidden_state"]
