"""Timed runs: a session's own on the CPU, on memory of the device on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.example_inputs import example_inputs
from attnserve.runtime import io_binding as binding
from attnserve.runtime.io_binding import bound
from attnserve.runtime.session import open_session, require_runtime
from benchmarks.gpu.encoder import random_encoder


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)


def test_a_timed_run_is_the_session_s_own_on_the_cpu(encoder: ir.Model):
    feed = example_inputs(encoder, 2, 9)
    session = open_session(encoder, threads=1)
    np.testing.assert_array_equal(bound(session, feed)()[0], session.run(None, feed)[0])


def test_a_timed_run_on_cuda_stays_on_the_device(
    encoder: ir.Model, monkeypatch: pytest.MonkeyPatch
):
    """On the CPU in its place: the inputs are copied once, and each run waits for its outputs."""
    real = open_session(encoder, threads=1)
    places: list[str] = []
    waits: list[int] = []
    value_of = require_runtime().OrtValue.ortvalue_from_numpy

    class Bound:
        def __init__(self) -> None:
            self.own = real.io_binding()

        def bind_ortvalue_input(self, name: str, value: Any) -> None:
            self.own.bind_ortvalue_input(name, value)

        def bind_output(self, name: str, place: str, device: int) -> None:
            places.append(place)
            self.own.bind_output(name)

        def synchronize_outputs(self) -> None:
            waits.append(len(self.own.get_outputs()))

    class Session:
        def get_providers(self) -> Sequence[str]:
            return ["CUDAExecutionProvider"]

        def get_outputs(self) -> Any:
            return real.get_outputs()

        def io_binding(self) -> Bound:
            return Bound()

        def run_with_iobinding(self, bound: Bound) -> None:
            real.run_with_iobinding(bound.own)

    def placed(array: np.ndarray, place: str, device: int) -> Any:
        places.append(place)
        return value_of(array)

    monkeypatch.setattr(
        binding,
        "require_runtime",
        lambda: SimpleNamespace(OrtValue=SimpleNamespace(ortvalue_from_numpy=placed)),
    )
    run = bound(Session(), example_inputs(encoder, 2, 9))
    run()
    run()
    assert places == ["cuda"] * 3 and waits == [1, 1]
