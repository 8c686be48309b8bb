"""Runners for CPU and CUDA sessions, with CPU sessions in place of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD, Device
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import io_binding as binding
from attnserve.runtime.by_load import IS_ALONE
from attnserve.runtime.cuda import Cuda
from attnserve.runtime.interface import RunFailed, SessionOptions
from attnserve.runtime.session import open_session
from attnserve.serving import backends
from attnserve.serving.backends import RunnerOptions, open_runner
from attnserve.serving.cuda_graphs import GraphRunner
from graph_passes.analysis.workload import Workload
from graph_passes.errors import InvalidModel
from tests.attnserve.runtime.recording import RecordingSession


@pytest.fixture
def patch_open_session(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Cuda]]:
    """Open CPU sessions instead of CUDA sessions; returns the list of requested options."""

    def install(refuse_graphs: bool = False) -> list[Cuda]:
        requested: list[Cuda] = []

        def open_on_cpu(source: Any, device: Device, options: SessionOptions) -> Any:
            assert device.provider == "cuda"
            requested.append(options.cuda)
            if refuse_graphs and options.cuda.graphs:
                raise InvalidModel("model.onnx: ONNX Runtime refuses the graph: control flow", "")
            return open_session(source, options=options)

        monkeypatch.setattr(backends, "open_session", open_on_cpu)
        return requested

    return install


Patch = Callable[..., list[Cuda]]


@pytest.mark.parametrize("concurrency", [1, 2])
def test_sessions_of_the_service_store_no_memory_pattern_for_each_shape(
    encoder: ir.Model, concurrency: int, monkeypatch: pytest.MonkeyPatch
):
    opened: list[Any] = []

    def recorded(*given: Any) -> Any:
        opened.append(open_session(*given))
        return opened[-1]

    monkeypatch.setattr(backends, "open_session", recorded)
    monkeypatch.setattr(backends, "available_cores", lambda: 2)
    open_runner(encoder, RunnerOptions(concurrency=concurrency))
    options = [session.native.get_session_options() for session in opened]
    assert [each.enable_mem_pattern for each in options] == [False] * concurrency


def test_open_runner_without_graphs_opens_one_session(encoder: ir.Model, patch_open_session: Patch):
    requested = patch_open_session()
    open_runner(encoder, RunnerOptions(Device("cuda"), cuda=Cuda(tf32=True), concurrency=4))
    assert requested == [Cuda(tf32=True)]


def test_open_runner_with_graphs_opens_one_session_per_concurrent_run(
    encoder: ir.Model, patch_open_session: Patch, monkeypatch: pytest.MonkeyPatch
):
    requested = patch_open_session()
    concurrency, barrier = 3, Barrier(3)
    options = RunnerOptions(
        Device("cuda"), cuda=Cuda(memory_bytes=2**30), cuda_graphs=4, concurrency=concurrency
    )
    runner = open_runner(encoder, options)
    assert requested == [Cuda(memory_bytes=2**30, graphs=True)] * concurrency
    for one in runner.runners:  # type: ignore[attr-defined]
        monkeypatch.setattr(one, "run", lambda names, feed: barrier.wait(5))
    with ThreadPoolExecutor(concurrency) as threads:  # the barrier needs all three runs at once
        for _ in range(2):
            turns = threads.map(lambda _: runner.run(None, {}), range(concurrency))
            assert sorted(turns) == [0, 1, 2]


def test_open_runner_refused_graphs_warns_and_runs_without_graphs(
    encoder: ir.Model, patch_open_session: Patch, caplog: pytest.LogCaptureFixture
):
    requested = patch_open_session(refuse_graphs=True)
    runner = open_runner(encoder, RunnerOptions(Device("cuda"), cuda_graphs=4, concurrency=2))
    assert requested == [Cuda(graphs=True), Cuda()]
    assert not isinstance(runner, GraphRunner)
    assert [record.getMessage() for record in caplog.records] == [
        "running without CUDA graphs: model.onnx: ONNX Runtime refuses the graph: control flow"
    ]


# Input buffers on the device, with the CPU in its place


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of every allocated buffer."""
    shapes: list[tuple[int, ...]] = []

    def placed(array: np.ndarray, place: Any) -> Any:
        shapes.append(array.shape)
        return real(array.copy(), place)  # on the CPU a value may be a view of its array

    real = binding.placed
    monkeypatch.setattr(binding, "placed", placed)
    return shapes


def test_io_binding_runner_equals_session_run(encoder: ir.Model):
    session = RecordingSession(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    for seed, shape in enumerate([(2, 9), (1, 32), (2, 9), (3, 1), (2, 9)]):
        feed = example_inputs(encoder, Workload.of(*shape), seed, padded=True)
        for names in (None, ["last_hidden_state"]):
            expected = session.plain_session.run(names, feed)
            for ours, theirs in zip(runner.run(names, feed), expected, strict=True):
                np.testing.assert_array_equal(ours, theirs)
    assert len(session.bound) == 10 and not session.plain


def test_io_binding_runner_same_shape_reuses_buffers_and_keeps_outputs(
    encoder: ir.Model, allocated: list[tuple[int, ...]]
):
    runner = backends.IoBindingRunner(RecordingSession(encoder), "cpu")
    feeds = [example_inputs(encoder, Workload.of(2, 9), seed) for seed in range(3)]
    first = runner.run(None, feeds[0])[0]
    kept = first.copy()
    others = [runner.run(None, feed)[0] for feed in feeds[1:]]
    np.testing.assert_array_equal(first, kept)
    assert all((first != other).any() for other in others)
    assert allocated == [(2, 9)] * 2  # ids and mask


def test_input_buffers_are_separate_per_shape_and_type():
    """A buffer of another shape or type would be read as other numbers."""
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


@pytest.mark.parametrize(("shapes", "allocations"), [(8, 8), (9, 18)])
def test_input_buffers_number_of_shapes_is_bounded(
    shapes: int, allocations: int, allocated: list[tuple[int, ...]]
):
    buffers = binding.InputBuffers("cpu", most=8)
    for _ in range(2):  # with nine shapes, each is evicted before it is used again
        for length in range(1, shapes + 1):
            buffers.filled({"x": np.zeros(length)})
    assert len(allocated) == allocations


def test_io_binding_runner_concurrent_runs_use_separate_buffers(
    encoder: ir.Model, allocated: list[tuple[int, ...]]
):
    concurrency, barrier = 3, Barrier(3)

    class Meeting(RecordingSession):
        def run_bound(self, binding: Any, options: Any) -> None:
            barrier.wait(10)  # until all runs have filled their buffers
            super().run_bound(binding, options)

    session = Meeting(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    feeds = [example_inputs(encoder, Workload.of(2, 9), seed) for seed in range(6)]
    expected = [session.plain_session.run(None, feed)[0] for feed in feeds]
    with ThreadPoolExecutor(concurrency) as threads:
        for got, wanted in zip(
            threads.map(lambda f: runner.run(None, f), feeds), expected, strict=True
        ):
            np.testing.assert_array_equal(got[0], wanted)
    assert len(allocated) == 2 * concurrency


def test_io_binding_runner_failed_allocation_warns_once_and_copies(
    encoder: ir.Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def placed(array: np.ndarray, place: Any) -> Any:
        raise RuntimeError("CUDA failure 2: out of memory\nmore")

    real, session, feed = (
        binding.placed,
        RecordingSession(encoder),
        example_inputs(encoder, Workload.of(2, 9)),
    )
    runner = backends.IoBindingRunner(session, "cpu")
    expected = session.plain_session.run(None, feed)[0]
    monkeypatch.setattr(binding, "placed", placed)
    for _ in range(2):
        np.testing.assert_array_equal(runner.run(None, feed)[0], expected)
    monkeypatch.setattr(binding, "placed", real)
    np.testing.assert_array_equal(runner.run(None, feed)[0], expected)
    assert (len(session.plain), len(session.bound)) == (2, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "run without GPU input buffers: CUDA failure 2: out of memory"
    ]


def test_io_binding_runner_failed_run_is_not_repeated(encoder: ir.Model):
    session = RecordingSession(encoder)
    runner = backends.IoBindingRunner(session, "cpu")
    with pytest.raises(RunFailed):
        runner.run(None, {"input_ids": np.ones((1, 40), np.int64),  # of 32 positions
                          "attention_mask": np.ones((1, 40), np.int64)})  # fmt: skip
    assert (len(session.bound), len(session.plain)) == (1, 0)
    runner.run(None, example_inputs(encoder, Workload.of(2, 9)))
    assert (len(session.bound), len(session.plain)) == (2, 0)


def test_io_binding_runner_empty_input_uses_plain_run():
    model = ir.from_onnx_text(
        """<ir_version: 8, opset_import: ["" : 17]> g (float[n] x, float[m] past) => (float[k] y)
           { y = Concat <axis = 0> (past, x) }"""
    )
    session = RecordingSession(model)
    runner = backends.IoBindingRunner(session, "cpu")
    for size, (bound, plain) in ((0, (0, 1)), (1, (1, 1))):
        feed = {"x": np.ones(2, np.float32), "past": np.zeros(size, np.float32)}
        assert runner.run(None, feed)[0].size == 2 + size
        assert (len(session.bound), len(session.plain)) == (bound, plain)


def test_io_binding_runner_after_peak_shrinks_arena_and_drops_buffers(
    allocated: list[tuple[int, ...]],
):
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (int8[n] x) => (int8[n] y) { y = Identity(x) }'
    )

    class WithoutShrinking(RecordingSession):
        def run_bound(self, binding: Any, options: Any) -> None:
            self.bound.append(options)
            self.plain_session.native.run_with_iobinding(binding)  # the CPU has no GPU arena

    session = WithoutShrinking(model)
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
    assert allocated == [(1000,), (10,), (10,)]


def test_open_runner_on_cpu_equals_session(encoder: ir.Model):
    feed = example_inputs(encoder, Workload.of(2, 9))
    runner = open_runner(encoder, RunnerOptions(ONE_THREAD, cuda_graphs=4, concurrency=2))
    expected = open_session(encoder, ONE_THREAD).run(None, feed)[0]
    np.testing.assert_array_equal(runner.run(["last_hidden_state"], feed)[0], expected)
    assert [value.name for value in runner.get_inputs()] == list(feed)
    assert [value.name for value in runner.get_outputs()] == ["last_hidden_state"]


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("threads", [0, 1])
def test_concurrent_runs_on_cpu_give_what_a_run_alone_gives(
    encoder: ir.Model, runtime: str, threads: int
):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    runner = open_runner(encoder, RunnerOptions(Device("cpu", threads, runtime), concurrency=2))
    feeds = [example_inputs(encoder, Workload.of(1 + row % 3, 4 + row % 5)) for row in range(12)]

    def run(feed: Any) -> np.ndarray:
        IS_ALONE.set(False)
        return runner.run(None, feed)[0]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(run, feeds))
    for feed, output in zip(feeds, found, strict=True):
        np.testing.assert_allclose(output, runner.run(None, feed)[0], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "weight_bytes", "runs"),
    [
        (RunnerOptions(concurrency=0), 0, 4),
        (RunnerOptions(concurrency=0), backends.MOST_COPIED_BYTES + 1, 1),
        (RunnerOptions(Device("cpu", 1), concurrency=0), 0, 1),
        (RunnerOptions(Device("cpu", 8), concurrency=0), 0, 4),
        (RunnerOptions(Device("cuda"), concurrency=0), 0, 1),
        (RunnerOptions(concurrency=3), 0, 3),
    ],
    ids=["small", "large", "one thread", "all threads", "gpu", "set"],
)
def test_number_of_concurrent_runs(
    options: RunnerOptions, weight_bytes: int, runs: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(backends, "available_cores", lambda: 8)
    assert options.with_concurrency(weight_bytes).concurrency == runs
