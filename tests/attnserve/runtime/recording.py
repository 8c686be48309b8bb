"""A small encoder, and a CPU session that records how it was run."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import pytest

from attnserve.runtime.session import open_session
from benchmarks.gpu.encoder import random_encoder


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)


class RecordingSession:
    """Runs on the CPU and records the run options.

    Attributes:
        plain: Options of the calls of ``run``.
        bound: Options of the calls of ``run_with_iobinding``.
    """

    def __init__(self, model: ir.Model) -> None:
        self.session: Any = open_session(model, threads=1)
        self.plain: list[Any] = []
        self.bound: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def run(self, names: Any, feed: Any, options: Any) -> Any:
        self.plain.append(options)
        return self.session.run(names, feed, options)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        self.bound.append(options)
        self.session.run_with_iobinding(binding, options)
