"""``bound``: plain runs on the CPU, runs on device memory on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import onnx_runtime
from attnserve.runtime.onnx_runtime import OnnxRuntime, OnnxSession, require_runtime
from attnserve.runtime.session import open_session
from graph_passes.analysis.workload import Workload


def test_bound_on_cpu_equals_session_run(encoder: ir.Model):
    feed = example_inputs(encoder, Workload.of(2, 9))
    session = open_session(encoder, ONE_THREAD)
    np.testing.assert_array_equal(session.bind(feed)()[0], session.run(None, feed)[0])


def test_bound_on_cuda_keeps_values_on_the_device(
    encoder: ir.Model, monkeypatch: pytest.MonkeyPatch
):
    """Inputs are copied once, and every run waits for its outputs (with the CPU as the device)."""
    real = OnnxRuntime().open(encoder, ONE_THREAD)
    places: list[str] = []
    waits: list[int] = []
    value_of = require_runtime().OrtValue.ortvalue_from_numpy

    class Bound:
        def __init__(self) -> None:
            self.own = real.native.io_binding()

        def bind_ortvalue_input(self, name: str, value: Any) -> None:
            self.own.bind_ortvalue_input(name, value)

        def bind_output(self, name: str, place: str, device: int) -> None:
            places.append(place)
            self.own.bind_output(name)

        def synchronize_outputs(self) -> None:
            waits.append(len(self.own.get_outputs()))

    class Native:
        def get_providers(self) -> Sequence[str]:
            return ["CUDAExecutionProvider"]

        def get_outputs(self) -> Any:
            return real.native.get_outputs()

        def io_binding(self) -> Bound:
            return Bound()

        def run_with_iobinding(self, bound: Bound) -> None:
            real.native.run_with_iobinding(bound.own)

    def placed(array: np.ndarray, place: str, device: int) -> Any:
        places.append(place)
        return value_of(array)

    monkeypatch.setattr(
        onnx_runtime,
        "require_runtime",
        lambda: SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_numpy=placed)),
    )
    run = OnnxSession(Native()).bind(example_inputs(encoder, Workload.of(2, 9)))
    run()
    run()
    assert places == ["cuda"] * 3 and waits == [1, 1]
