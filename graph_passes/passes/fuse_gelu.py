"""FuseGelu: write the activation of a feed-forward as one operator of ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import FLOATS, constant_array, constant_type, is_constant
from graph_passes.analysis.evaluation import evaluate
from graph_passes.analysis.operator_sets import FLATTENS, MICROSOFT
from graph_passes.analysis.required import producer_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import FeedForwardBlock
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.errors import Refusal
from graph_passes.passes.base import FeedForwardPass, FeedForwardTargets, NoParams, small_shapes
from graph_passes.passes.invariants import Interface

__all__ = ["FuseGelu", "fusible_gelus", "gelu_refusal"]

Operator = Literal["Gelu", "FastGelu"]

TOLERANCES: Mapping[ir.DataType, float] = {
    ir.DataType.FLOAT: 2e-6,
    ir.DataType.FLOAT16: 1e-4,
    ir.DataType.BFLOAT16: 1e-3,
}
"""Maximum error of an activation at inputs up to 12, by the type of its constants. The nodes are
evaluated in single precision, so it is the rounding of the constants, e.g. of sqrt(2): up to 3e-5
in float16 and 3e-4 in bfloat16."""


class FuseGelu(FeedForwardPass[NoParams]):
    """Write a decomposed GELU as one operator, which reads and writes memory once.

    Before: h = z * 0.5 * (1 + erf(z / sqrt(2))), or its approximation with tanh, in any nodes
    After:  h = Gelu(z), or FastGelu(z)

    Exact. The nodes are evaluated on numbers; their names are not used. The model imports
    com.microsoft.

    Attributes:
        targets: The feed-forwards to rewrite.
    """

    name: ClassVar[str] = "fuse_gelu"
    order: ClassVar[int] = 110

    @classmethod
    def refusal(
        cls, block: FeedForwardBlock, params: NoParams | None, analyses: Analyses
    ) -> Refusal | None:
        return gelu_refusal(block, small_shapes(analyses), analyses.model.opset_imports)

    def expected_interface(self, before: Interface, analyses: Analyses) -> Interface:
        return before.with_opset(MICROSOFT, 1) if self.targets else before

    def rewrite(self, targets: FeedForwardTargets[NoParams], analyses: Analyses) -> None:
        opsets, info = analyses.model.opset_imports, small_shapes(analyses)
        for block, _ in targets:
            gelu = _gelu(block, info, opsets)
            assert gelu is not None
            operator, value = gelu
            activation = _activation(block)
            make = Inserter(block.graph, producer_of(activation), f"{block.name}/fused")
            replace_uses(activation, make.op(operator, [value], "gelu", domain=MICROSOFT))
            opsets.setdefault(MICROSOFT, 1)


def _activation(block: FeedForwardBlock) -> ir.Value:
    """The neurons before they are flattened; exporters read their shape too."""
    value = block.hidden
    for node in reversed(block.nodes):
        inner = node.inputs[0]
        if value is node.outputs[0] and node.op_type in FLATTENS and inner is not None:
            value = inner
    return value


def fusible_gelus(model: ir.Model) -> list[str]:
    """The names of the feed-forwards in the main graph whose activation can be one operator."""
    analyses = Analyses.of(model)
    return [
        block.name
        for block in FuseGelu.find(analyses)
        if block.graph is model.graph and FuseGelu.refusal(block, None, analyses) is None
    ]


def gelu_refusal(
    block: FeedForwardBlock, info: ShapeInfo, opsets: Mapping[str, int]
) -> Refusal | None:
    """Return why the activation of a block cannot be one GELU operator; None if it can."""
    if block.is_gated:
        return Refusal("gated", "its activation is gated by a second product")
    if any(node.domain == MICROSOFT for node in block.nodes):
        return Refusal("fused", "its activation is an operator of ONNX Runtime already")
    if block.hidden.is_graph_output():
        return Refusal("returned", "its neurons are an output of the graph")
    if _gelu(block, info, opsets) is None:
        return Refusal("not_gelu", "its activation is not a GELU")
    return None


def _gelu(
    block: FeedForwardBlock, info: ShapeInfo, opsets: Mapping[str, int]
) -> tuple[Operator, ir.Value] | None:
    """The operator that computes the neurons, and its input: the last value that matches."""
    activation = _activation(block)
    arrays = _evaluated(block, info, opsets)
    hidden = arrays.get(activation)
    if hidden is None or info.shape(activation) is None:
        return None
    earlier_values = list(arrays)[: list(arrays).index(activation)]
    for value in reversed(earlier_values):
        z = arrays[value]
        if z.shape != hidden.shape or info.shape(value) != info.shape(activation):
            continue
        if info.known[value].dtype != info.known[activation].dtype:  # between casts
            continue
        # In half precision, both GELUs may be within the tolerance.
        errors: dict[Operator, float] = {
            "Gelu": _error(hidden, _exact(z), z),
            "FastGelu": _error(hidden, _approximate(z), z),
        }
        nearest = min(errors, key=errors.__getitem__)
        if errors[nearest] < _tolerance(block):
            return nearest, value
    return None


def _error(hidden: np.ndarray, expected: np.ndarray, z: np.ndarray) -> float:
    """The largest error, relative to inputs above 1."""
    return float((np.abs(hidden - expected) / np.maximum(np.abs(z), 1.0)).max())


def _tolerance(block: FeedForwardBlock) -> float:
    """The tolerance of the least exact type of the constants between the products."""
    read = [value for node in block.nodes for value in node.inputs if value is not None]
    types = {constant_type(value) for value in read if is_constant(value)}
    return max(TOLERANCES[dtype] for dtype in {ir.DataType.FLOAT, *types} & FLOATS)


def _evaluated(
    block: FeedForwardBlock, info: ShapeInfo, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray]:
    """Evaluate the nodes between the products on numbers from -12 to 12."""
    first = block.first[0].output
    shape = info.shape(first)
    if shape is None:
        return {}
    numbers = np.linspace(-12, 12, math.prod(shape)).reshape(shape)
    arrays: dict[ir.Value, np.ndarray] = {first: numbers.astype(np.float32)}
    for node in block.nodes:
        inputs: list[np.ndarray | None] = []
        for value in node.inputs:
            if value is None:
                inputs.append(None)
            elif value in arrays:
                inputs.append(arrays[value])
            elif is_constant(value):
                inputs.append(constant_array(value))
            elif (constant := info.constant(value)) is not None:
                inputs.append(constant)
            else:
                return {}
        if (
            _is_float_cast(node)
            and (operand := inputs[0]) is not None
            and operand.dtype.kind == "f"
        ):
            arrays[node.outputs[0]] = operand
            continue
        try:
            outputs = evaluate(node, inputs, opsets)
        except Exception:  # any failure means that the nodes are not a GELU
            return {}
        arrays |= dict(zip(node.outputs, outputs, strict=False))
    return arrays


def _is_float_cast(node: ir.Node) -> bool:
    """Whether a node casts to a floating-point type, which only rounds the numbers."""
    to = node.attributes.get_int("to", 0) if node.op_type == "Cast" and not node.domain else 0
    return to in {dtype.value for dtype in FLOATS}


def _exact(z: np.ndarray) -> np.ndarray:
    from scipy.special import erf  # imported here because it is slow to import

    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + erf(wide / math.sqrt(2)))


def _approximate(z: np.ndarray) -> np.ndarray:
    """GELU with tanh (Hendrycks and Gimpel, arXiv 1606.08415)."""
    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
