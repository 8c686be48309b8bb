"""A small encoder for tests of sessions and runners."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from benchmarks.gpu.encoder import random_encoder


@pytest.fixture(scope="module")
def encoder() -> ir.Model:
    return random_encoder(layers=2, hidden=32, heads=4, positions=32)
