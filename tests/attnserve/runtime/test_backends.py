"""Which kind of runner is opened, with a runtime that says it is CUDA's."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import backends
from attnserve.runtime import io_binding as binding
from attnserve.runtime.backends import open_runner
from attnserve.runtime.cuda import Cuda
from attnserve.runtime.cuda_graphs import GraphRunner
from attnserve.runtime.session import open_session
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
        monkeypatch.setattr(backends, "open_session", one)
        return one

    return install


def test_without_graphs_one_session_runs_all(encoder: ir.Model, made: Callable[..., Made]):
    asked = made().asked
    open_runner(encoder, provider="cuda", cuda=Cuda(tf32=True), concurrency=4)
    assert asked == [Cuda(tf32=True)]


def test_graphs_need_a_session_for_each_run_at_once(
    encoder: ir.Model, made: Callable[..., Made], monkeypatch: pytest.MonkeyPatch
):
    asked = made().asked
    concurrency, barrier = 3, Barrier(3)
    runner = open_runner(
        encoder, provider="cuda", cuda=Cuda(memory_bytes=2**30), buckets=4, concurrency=concurrency
    )
    assert asked == [Cuda(memory_bytes=2**30, graphs=True)] * concurrency
    for one in runner.runners:  # type: ignore[attr-defined]
        monkeypatch.setattr(one, "run", lambda names, feed: barrier.wait(5))
    with ThreadPoolExecutor(concurrency) as threads:  # each waits for the two others
        for _ in range(2):
            turns = threads.map(lambda _: runner.run(None, {}), range(concurrency))
            assert sorted(turns) == [0, 1, 2]


def test_a_model_that_cannot_be_captured_runs_without_graphs_and_says_so(
    encoder: ir.Model, made: Callable[..., Made], caplog: pytest.LogCaptureFixture
):
    asked = made(refuse=True).asked
    runner = open_runner(encoder, provider="cuda", buckets=4, concurrency=2)
    assert asked == [Cuda(graphs=True), Cuda()]
    assert not isinstance(runner, GraphRunner)
    assert [record.getMessage() for record in caplog.records] == [
        "running without CUDA graphs: model.onnx: ONNX Runtime refuses the graph: control flow"
    ]


# ---- buffers on the device, with the CPU in its place --------------------------------------------


class Noted:
    """A session on the CPU that notes how each run was asked for, and by what options."""

    def __init__(self, model: ir.Model) -> None:
        self.session: Any = open_session(model, threads=1)
        self.bound: list[Any] = []
        self.plain: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, names: Any, feed: Any, options: Any) -> Any:
        self.plain.append(options)
        return self.session.run(names, feed, options)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.bound.append(options)
        self.session.run_with_iobinding(binding, options)


@pytest.fixture
def made_buffers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every buffer that was made."""
    made: list[tuple[int, ...]] = []

    def placed(array: np.ndarray, place: Any) -> Any:
        made.append(array.shape)
        return real(array.copy(), place)  # on the CPU a value may be a view of its array

    real = binding.placed
    monkeypatch.setattr(binding, "placed", placed)
    return made


def test_answers_through_buffers_are_the_session_s_own(encoder: ir.Model):
    session = Noted(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    for seed, shape in enumerate([(2, 9), (1, 32), (2, 9), (3, 1), (2, 9)]):
        feed = example_inputs(encoder, *shape, seed, padded=True)
        for names in (None, ["last_hidden_state"]):
            expected = session.session.run(names, feed)
            for ours, theirs in zip(runner.run(names, feed), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert len(session.bound) == 10 and not session.plain


def test_buffers_of_a_shape_are_made_once_and_answers_are_not_written_over(
    encoder: ir.Model, made_buffers: list[tuple[int, ...]]
):
    runner = backends.IoBindingRunner(Noted(encoder), "cpu")
    feeds = [example_inputs(encoder, 2, 9, seed) for seed in range(3)]
    first = runner.run(None, feeds[0])[0]
    kept = first.copy()
    others = [runner.run(None, feed)[0] for feed in feeds[1:]]
    np.testing.assert_array_equal(first, kept)
    assert all((first != other).any() for other in others)
    assert made_buffers == [(2, 9)] * 2  # ids and mask


def test_a_buffer_is_of_a_shape_and_a_type():
    """A shape of as many elements, or smaller ones, would be read as something else."""
    buffers = binding.InputBuffers("cpu")
    arrays = [np.arange(6).reshape(2, 3), np.arange(6).reshape(3, 2), np.ones((2, 3), np.int32),
              np.arange(6)[::-1].reshape(3, 2).T]  # fmt: skip
    for array in arrays:
        value = buffers.filled({"x": array})["x"]
        np.testing.assert_array_equal(value.numpy(), array)
        assert value.numpy().dtype == array.dtype
    again = buffers.filled({"x": arrays[0]})["x"]
    np.testing.assert_array_equal(again.numpy(), arrays[0])
    assert again is not buffers.filled({"x": arrays[2]})["x"]


@pytest.mark.parametrize(("shapes", "made"), [(8, 8), (9, 18)])
def test_so_many_shapes_stay_on_the_device_and_no_more(
    shapes: int, made: int, made_buffers: list[tuple[int, ...]]
):
    buffers = binding.InputBuffers("cpu", most=8)
    for _ in range(2):  # in turns: with one too many, each has gone when it comes again
        for length in range(1, shapes + 1):
            buffers.filled({"x": np.zeros(length)})
    assert len(made_buffers) == made


def test_runs_at_once_have_buffers_of_their_own(
    encoder: ir.Model, made_buffers: list[tuple[int, ...]]
):
    concurrency, barrier = 3, Barrier(3)

    class Meeting(Noted):
        def run_with_iobinding(self, binding: Any, options: Any) -> None:
            barrier.wait(10)  # until the others have filled their buffers too
            super().run_with_iobinding(binding, options)

    session = Meeting(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    feeds = [example_inputs(encoder, 2, 9, seed) for seed in range(6)]
    expected = [session.session.run(None, feed)[0] for feed in feeds]
    with ThreadPoolExecutor(concurrency) as threads:
        for got, wanted in zip(threads.map(lambda f: runner.run(None, f), feeds), expected,
                               strict=True):  # fmt: skip
            np.testing.assert_array_equal(got[0], wanted)
    assert len(made_buffers) == 2 * concurrency


def test_without_a_buffer_the_session_copies_for_itself_and_it_is_said_once(
    encoder: ir.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def placed(array: np.ndarray, place: Any) -> Any:
        raise RuntimeError("CUDA failure 2: out of memory\nmore")

    real, session, feed = binding.placed, Noted(encoder), example_inputs(encoder, 2, 9)
    runner = backends.IoBindingRunner(session, "cpu")
    expected = session.session.run(None, feed)[0]
    monkeypatch.setattr(binding, "placed", placed)
    for _ in range(2):
        np.testing.assert_array_equal(runner.run(None, feed)[0], expected)
    monkeypatch.setattr(binding, "placed", real)
    np.testing.assert_array_equal(runner.run(None, feed)[0], expected)
    assert (len(session.plain), len(session.bound)) == (2, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "run without GPU input buffers: CUDA failure 2: out of memory"
    ]


def test_a_run_that_fails_fails_once_and_the_next_one_runs(encoder: ir.Model):
    session = Noted(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    with pytest.raises(Exception, match="Non-zero status code returned"):
        runner.run(None, {"input_ids": np.ones((1, 40), np.int64),  # of 32 positions
                          "attention_mask": np.ones((1, 40), np.int64)})  # fmt: skip
    assert (len(session.bound), len(session.plain)) == (1, 0)
    runner.run(None, example_inputs(encoder, 2, 9))
    assert (len(session.bound), len(session.plain)) == (2, 0)


def test_an_empty_input_needs_no_buffer():
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, float[m] past) => (float[k] y)
           { y = Concat <axis = 0> (past, x) }"""
    )
    session = Noted(model)
    runner = backends.IoBindingRunner(session, "cpu")
    for size, (bound, plain) in ((0, (0, 1)), (1, (1, 1))):
        feed = {"x": np.ones(2, np.float32), "past": np.zeros(size, np.float32)}
        assert runner.run(None, feed)[0].size == 2 + size
        assert (len(session.bound), len(session.plain)) == (bound, plain)


def test_after_a_peak_a_run_gives_memory_back_and_lets_buffers_go(
    made_buffers: list[tuple[int, ...]],
):
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (int8[n] x) => (int8[n] y) { y = Identity(x) }'
    )

    class Deaf(Noted):
        def run_with_iobinding(self, binding: Any, options: Any) -> None:
            self.bound.append(options)
            self.session.run_with_iobinding(binding)  # the CPU's arena is not the GPU's

    session = Deaf(model)
    runner = backends.IoBindingRunner(session, "cpu")
    for size in (1000, *[10] * 70):
        runner.run(None, {"x": np.zeros(size, np.int8)})

    def shrinks(options: Any) -> str:
        try:
            return options.get_run_config_entry("memory.enable_memory_arena_shrinkage")
        except RuntimeError:
            return ""

    assert [index for index, options in enumerate(session.bound) if shrinks(options)] == [64]
    assert shrinks(session.bound[64]) == "gpu:0"
    assert made_buffers == [(1000,), (10,), (10,)]


def test_on_the_cpu_a_runner_is_the_session(encoder: ir.Model):
    feed = example_inputs(encoder, 2, 9)
    runner = open_runner(encoder, provider="cpu", threads=1, buckets=4, concurrency=2)
    runner.allow_padding(rows=True, tokens=True)
    expected = open_session(encoder, threads=1).run(None, feed)[0]
    np.testing.assert_array_equal(runner.run(["last_hidden_state"], feed)[0], expected)
    assert [value.name for value in runner.get_inputs()] == list(feed)
    assert [value.name for value in runner.get_outputs()] == ["last_hidden_state"]
