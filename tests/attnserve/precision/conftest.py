"""An encoder with an outlier, and random numbers that each test draws anew."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from graph_passes.analysis.constants import constant_array, origin
from tests.attnserve.precision.graphs import RNG

STATE = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _reset_generator() -> None:
    RNG.bit_generator.state = STATE


@pytest.fixture
def encoder(tiny: Path) -> ir.Model:
    """An encoder with one outlier channel, as trained encoders have."""
    model = load_model(open_artifact(tiny))
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    for scale in {origin(node.inputs[1]) for node in norms if node.inputs[1] is not None}:
        gamma = constant_array(scale).copy()
        gamma[3] *= 20
        scale.const_value = ir.tensor(gamma, name=scale.name)
    return model
