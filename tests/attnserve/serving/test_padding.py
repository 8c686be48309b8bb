"""PaddingRunner: outputs equal those of the session, in few sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.interface import Feed
from attnserve.runtime.session import RUNTIMES, open_session
from attnserve.serving.backends import RunnerOptions, open_runner
from attnserve.serving.padding import PaddingRunner, run_overhead
from graph_passes.analysis.workload import Workload


class Recorded:
    """A session that records (rows, tokens) of its runs."""

    def __init__(self, model: ir.Model) -> None:
        self.session = open_session(model, ONE_THREAD)
        self.get_inputs, self.get_outputs = self.session.get_inputs, self.session.get_outputs
        self.bind = self.session.bind
        self.shapes: list[tuple[int, ...]] = []

    def run(self, names: Sequence[str] | None, feed: Feed) -> list[np.ndarray]:
        self.shapes.append(next(iter(feed.values())).shape[:2])
        return self.session.run(names, feed)


def runner_of(model: ir.Model, longest: int = 32) -> tuple[PaddingRunner, Recorded]:
    session = Recorded(model)
    runner = PaddingRunner(session, multiple=8, longest=longest)
    runner.allow_padding(rows=True, tokens=True)
    return runner, session


def test_runs_equal_session_in_sizes_that_are_multiples(encoder: ir.Model):
    """Within 1e-5: the order of a sum may depend on the length."""
    runner, session = runner_of(encoder)
    plain = open_session(encoder, ONE_THREAD)
    for rows, length in product((1, 2, 3, 4, 8), (1, 7, 8, 13, 30)):
        feed = example_inputs(encoder, Workload.of(rows, length), length, padded=True)
        (got,) = runner.run(["last_hidden_state"], feed)
        (expected,) = plain.run(None, feed)
        assert got.shape == expected.shape and got.flags.c_contiguous
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)
        assert session.shapes[-1][0] == rows
        assert rows * session.shapes[-1][1] % 8 == 0


@pytest.mark.parametrize(("rows", "length", "run"), [(4, 13, 14), (8, 13, 13), (3, 13, 16)])
def test_rows_get_the_fewest_tokens(encoder: ir.Model, rows: int, length: int, run: int):
    runner, session = runner_of(encoder)
    runner.run(None, example_inputs(encoder, Workload.of(rows, length)))
    assert session.shapes == [(rows, run)]


def test_the_maximum_length_is_not_exceeded(encoder: ir.Model):
    runner, session = runner_of(encoder, longest=30)
    for length in (29, 30, 32):
        runner.run(None, example_inputs(encoder, Workload.of(1, length)))
    assert [tokens for _, tokens in session.shapes] == [29, 30, 32]


def test_nothing_is_padded_before_it_is_allowed(encoder: ir.Model):
    session = Recorded(encoder)
    runner = PaddingRunner(session, multiple=8, longest=32)
    runner.run(None, example_inputs(encoder, Workload.of(1, 5)))
    runner.allow_padding(rows=True, tokens=False)
    runner.run(None, example_inputs(encoder, Workload.of(1, 5)))
    assert session.shapes == [(1, 5), (1, 5)]


def test_compile_sizes_runs_each_size_once(encoder: ir.Model):
    runner, session = runner_of(encoder)
    runner.compile_sizes(example_inputs(encoder, Workload.of(2, 3)), least=50)
    assert [rows * tokens for rows, tokens in session.shapes] == list(range(56, 513, 8))


def test_run_overhead_is_positive_and_bounded(encoder: ir.Model):
    session = Recorded(encoder)
    found = run_overhead(session, example_inputs(encoder, Workload.of(1, 5)))
    assert found is not None and 0 <= found <= 512
    assert set(session.shapes) == {(6, 5), (51, 5)}  # no longer than the example, which runs


def test_run_overhead_of_other_inputs_is_unknown():
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y)'
    model = ir.from_onnx_text(text + " { y = Exp(x) }")
    feed: dict[str, Any] = {"x": np.ones((1, 4), np.float32)}
    assert run_overhead(open_session(model, ONE_THREAD), feed) is None


@pytest.mark.parametrize("runtime", [runtime.name for runtime in RUNTIMES])
def test_open_runner_pads_for_runtimes_that_compile_sizes(encoder: ir.Model, runtime: str):
    if runtime == "openvino":
        pytest.importorskip("openvino")
    options = RunnerOptions(replace(ONE_THREAD, runtime=runtime))
    runner = open_runner(encoder, options, longest=32)
    assert isinstance(runner, PaddingRunner) == (RUNTIMES[runtime].size_multiple > 1)
    assert not isinstance(open_runner(encoder, options), PaddingRunner)
