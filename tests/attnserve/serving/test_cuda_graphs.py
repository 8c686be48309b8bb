"""GraphRunner, with buffers on the CPU: outputs must equal those of a plain session."""

from __future__ import annotations

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.session import open_session
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from attnserve.serving.padding import Layout
from benchmarks.gpu.encoder import random_encoder
from graph_passes.analysis.workload import Workload
from tests.attnserve.runtime.recording import RecordingSession


class GraphSession(RecordingSession):
    """A CPU session; ``graphs`` holds the graph number of each run with buffers."""

    @property
    def graphs(self) -> list[int]:
        plain, bound = (
            [int(options.get_run_config_entry("gpu_graph_id")) for options in runs]
            for runs in (self.plain, self.bound)
        )
        assert set(plain) <= {-1}
        return bound


def runner_of(
    model: ir.Model, most: int = 8, *, padding: bool = True, longest: int | None = 32
) -> tuple[GraphRunner, GraphSession]:
    session = GraphSession(model)
    runner = GraphRunner(session, Buckets(most, longest=longest), device="cpu")
    runner.allow_padding(rows=padding, tokens=padding)
    return runner, session


@pytest.mark.parametrize(
    ("padding", "shapes", "captured", "graphs"),
    [
        (True, [(3, 20), (3, 20), (3, 17), (3, 24), (3, 20)], (3, 24), [-1, 1, 1, 1, 1]),
        (True, [(5, 16), (6, 16), (5, 16)], (6, 16), [-1, 1, 1]),
        (False, [(3, 20), (3, 20), (3, 19), (3, 20)], (3, 20), [-1, 1, 1]),
    ],
    ids=["tokens", "rows", "exact shape"],
)
def test_run_equals_session(
    encoder: ir.Model, padding: bool, shapes: Any, captured: Any, graphs: list[int]
):
    """Within 1e-5 with padding: the order of a sum may depend on the shape.

    The first run at a shape allocates buffers without capturing.
    """
    runner, session = runner_of(encoder, padding=padding)
    plain = open_session(encoder, ONE_THREAD)
    for seed, (batch, length) in enumerate(shapes):
        feed = example_inputs(encoder, Workload.of(batch, length), seed, padded=padding)
        (got,) = runner.run(["last_hidden_state"], feed)
        (expected,) = plain.run(None, feed)
        assert got.shape == expected.shape == (batch, length, 32)
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5 if padding else 0)
    assert list(runner.buckets.captured) == [captured] and session.graphs == graphs


def test_run_padded_rows_repeat_valid_ids():
    """The model takes ids from 1 to 8; it would refuse a row of zeros."""
    ids = "int64[n, s] x"
    body = "nine = Constant<value_int = 9>() t = Constant<value_floats = [0., 1., 2., 3., 4., 5.,"
    body += " 6., 7.]>() i = Sub(x, nine) y = Gather(t, i)"
    runner = GraphRunner(model_of(ids, "float[n, s] y", body), Buckets(4), device="cpu")
    runner.allow_padding(rows=True, tokens=False)
    for first in (1, 2, 3):
        feed = {"x": np.arange(first, first + 5)[:, None]}
        np.testing.assert_array_equal(runner.run(None, feed)[0], feed["x"] - 1)
    assert list(runner.buckets.captured) == [(6, 1)] and not runner.buckets.refused


def test_run_outputs_survive_later_runs(encoder: ir.Model):
    runner, _ = runner_of(encoder)
    feeds = [example_inputs(encoder, Workload.of(2, 16), seed) for seed in range(3)]
    kept = [runner.run(None, feed)[0] for feed in feeds]
    for feed, answer in zip(feeds, kept, strict=True):
        np.testing.assert_allclose(answer, runner.run(None, feed)[0], rtol=0, atol=1e-5)


def test_run_before_allow_padding_captures_nothing(encoder: ir.Model):
    session = GraphSession(encoder)
    runner = GraphRunner(session, Buckets(4), device="cpu")
    for _ in range(3):
        runner.run(None, example_inputs(encoder, Workload.of(1, 8)))
    assert not session.graphs and not runner.buckets.captured


def test_run_many_shapes_number_of_graphs_is_bounded(encoder: ir.Model):
    runner, session = runner_of(encoder, most=2)
    for length in (4, 8, 16, 24) * 3:
        runner.run(None, example_inputs(encoder, Workload.of(1, length)))
    assert set(session.graphs) <= {-1, 1, 2} and len(runner.buckets.captured) == 2


def test_unsupported_bucket_falls_back_to_uncaptured_run():
    """The model has 40 positions, and ``longest`` is unknown: 33 tokens need a bucket of 48."""
    model = random_encoder(layers=1, hidden=8, heads=2, positions=40)
    runner, _ = runner_of(model, longest=None)
    plain = open_session(model, ONE_THREAD)
    feed = example_inputs(model, Workload.of(1, 33))
    for _ in range(3):
        np.testing.assert_array_equal(runner.run(None, feed)[0], plain.run(None, feed)[0])
    assert runner.buckets.refused == {(1, 48)} and not runner.buckets.captured


def test_run_invalid_input_raises_the_error_of_onnx_runtime(encoder: ir.Model):
    runner, _ = runner_of(encoder)
    for _ in range(3):
        with pytest.raises(Exception, match=r"by 9|broadcast"):
            runner.run(None, example_inputs(encoder, Workload.of(1, 16)) | {
                "attention_mask": np.ones((1, 9), np.int64)})  # fmt: skip


def model_of(inputs: str, outputs: str, body: str) -> Any:
    text = f'<ir_version: 8, opset_import: ["" : 17]> g ({inputs}) => ({outputs}) {{ {body} }}'
    return open_session(ir.from_onnx_text(text))


X = "float[n, s] x"


@pytest.mark.parametrize(
    ("inputs", "outputs", "body", "expected"),
    [
        (X, "float[n, s] y", "y = Exp(x)", ("n", "s", True)),
        ("float[n, 3, 4, 4] x", "float[n, 3, 4, 4] y", "y = Exp(x)", ("n", "", True)),
        ("float[2, s] x", "float[2, s] y", "y = Exp(x)", (2, "s", True)),
        (
            "float[n, s, 4] x",
            "float[n] y",
            "y = ReduceMean<axes = [1, 2], keepdims = 0>(x)",
            ("n", "s", True),
        ),
        (X, "float[n, t] y", "y = Exp(x)", ("n", "s", False)),
        (X, "float y", "y = ReduceMean<keepdims = 0>(x)", ("n", "s", False)),
        ("float[n, s] x, float[n, t] z", "float[n, t] y", "y = Exp(z)", None),
        ("float[n, s] x, float[m, s] z", "float[m, s] y", "y = Exp(z)", None),
        ("float[n, s, p] x", "float[n, s, p] y", "y = Exp(x)", None),
        ("float[n, n] x", "float[n, n] y", "y = Exp(x)", None),
        ("float x", "float y", "y = Exp(x)", None),
    ],
)
def test_layout_of_finds_rows_and_tokens(inputs: str, outputs: str, body: str, expected: Any):
    layout = Layout.of(model_of(inputs, outputs, body))
    assert expected == (layout and (layout.rows, layout.tokens, layout.can_slice))


@pytest.mark.parametrize(
    ("inputs", "outputs", "body"),
    [
        (
            "float[n, s] x, float[n, t] z",
            "float[n, t] y",
            "y = Exp(z)",
        ),  # no common axes: nothing is captured
        (
            X,
            "float y",
            "y = ReduceMean<keepdims = 0>(x)",
        ),  # the output cannot be sliced: exact shapes
        ("float[3, s] x", "float[3, s] y", "y = Exp(x)"),  # a fixed number of rows
        ("float[n, 2, 3] x", "float[n, 2, 3] y", "y = Exp(x)"),  # no tokens
        ("float[n, s, 3] x, float[n, 3] z", "float[n, 3] y", "y = Exp(z)"),
    ],
)
def test_run_model_without_padding_axes_equals_session(inputs: str, outputs: str, body: str):
    session = model_of(inputs, outputs, body)
    runner = GraphRunner(session, Buckets(4), device="cpu")
    runner.allow_padding(rows=True, tokens=True)
    random = np.random.default_rng(0)
    for length in (5, 5, 7, 6, 5):
        sizes = {"n": 3, "s": length, "t": length + 1}
        feed = {
            value.name: random.random([sizes.get(a, a) for a in value.shape], np.float32)
            for value in session.get_inputs()
        }
        np.testing.assert_array_equal(runner.run(None, feed)[0], session.run(None, feed)[0])


def test_run_empty_input_is_not_captured():
    runner = GraphRunner(model_of(X, "float[n, s] y", "y = Exp(x)"), Buckets(4), device="cpu")
    runner.allow_padding(rows=True, tokens=True)
    for _ in range(3):
        assert runner.run(None, {"x": np.ones((2, 0), np.float32)})[0].shape == (2, 0)
    assert not runner.buckets.captured


def test_run_from_many_threads_equals_session(encoder: ir.Model):
    runner, session = runner_of(encoder, most=3)
    plain = open_session(encoder, ONE_THREAD)
    feeds = [example_inputs(encoder, Workload.of(1 + i % 3, 8 + i % 9), i) for i in range(40)]
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda feed: runner.run(None, feed)[0], feeds))
    for feed, answer in zip(feeds, answers, strict=True):
        np.testing.assert_allclose(answer, plain.run(None, feed)[0], rtol=0, atol=1e-5)
    assert max(session.graphs) == 3


def test_runner_deleted_ends_its_session_and_thread(encoder: ir.Model):
    before = {*threading.enumerate()}
    runner, session = runner_of(encoder)
    runner.run(None, example_inputs(encoder, Workload.of(1, 8)))
    (thread,) = {*threading.enumerate()} - before
    reference = weakref.ref(session)
    del runner, session
    gc.collect()
    thread.join(5)
    assert reference() is None and not thread.is_alive()
