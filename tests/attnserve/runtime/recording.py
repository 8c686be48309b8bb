"""A small encoder, and a CPU session that records how it was run."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.runtime.onnx_runtime import OnnxRuntime, OnnxSession
from benchmarks.gpu.encoder import random_encoder


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)


class RecordingSession(OnnxSession):
    """Runs on the CPU and records the options of the runs of the native session.

    Attributes:
        plain: Options of the calls of ``run``.
        bound: Options of the calls of ``run_with_iobinding``.
    """

    def __init__(self, model: ir.Model) -> None:
        self.plain_session = OnnxRuntime().open(model, ONE_THREAD)
        super().__init__(_Recording(self))
        self.plain: list[Any] = []
        self.bound: list[Any] = []

    def run_bound(self, binding: Any, options: Any) -> None:
        self.bound.append(options)
        self.plain_session.native.run_with_iobinding(binding, options)


class _Recording:
    """In place of the native session."""

    def __init__(self, session: RecordingSession) -> None:
        self._session, self._native = session, session.plain_session.native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def run(self, names: Any, feed: Any, options: Any) -> Any:
        self._session.plain.append(options)
        return self._native.run(names, feed, options)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self._session.run_bound(binding, options)
