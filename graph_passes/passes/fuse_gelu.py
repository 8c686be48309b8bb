"""FuseGelu: write the activation of a feed-forward as one operator of ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.evaluation import evaluate
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.errors import Refusal
from graph_passes.passes.base import FeedForwardPass, FeedForwardTargets, NoParams, small_shapes
from graph_passes.passes.invariants import Interface

__all__ = ["FuseGelu", "fusible_gelus", "gelu_refusal"]

DOMAIN = "com.microsoft"

Operator = Literal["Gelu", "FastGelu"]

TOLERANCE = 2e-6
"""Maximum error of an activation in single precision, at inputs up to 12."""


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

    @classmethod
    def refusal(
        cls, block: FeedForwardBlock, params: NoParams | None, context: GraphContext
    ) -> Refusal | None:
        return gelu_refusal(block, small_shapes(context), context.model.opset_imports)

    def expected_interface(self, before: Interface, context: GraphContext) -> Interface:
        return before.with_opset(DOMAIN, 1) if self.targets else before

    def rewrite(self, targets: FeedForwardTargets[NoParams], context: GraphContext) -> None:
        opsets = context.model.opset_imports
        for block, _ in targets:
            gelu = _gelu(block, small_shapes(context), opsets)
            assert gelu is not None
            operator, value = gelu
            make = Inserter(block.graph, block.product, f"{block.name}/fused")
            replace_uses(block.hidden, make.op(operator, [value], "gelu", domain=DOMAIN))
            opsets.setdefault(DOMAIN, 1)


def fusible_gelus(model: ir.Model) -> list[str]:
    """The names of the feed-forwards in the main graph whose activation can be one operator."""
    with GraphContext.of(model) as context:
        return [
            block.name
            for block in FuseGelu.find(context)
            if block.graph is model.graph and FuseGelu.refusal(block, None, context) is None
        ]


def gelu_refusal(
    block: FeedForwardBlock, info: ShapeInfo, opsets: Mapping[str, int]
) -> Refusal | None:
    """Why the activation of a block cannot be one GELU operator; None if it can."""
    if block.is_gated:
        return Refusal("gated", "its activation is gated by a second product")
    if any(node.domain == DOMAIN for node in block.nodes):
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
    arrays = _evaluated(block, info, opsets)
    hidden = arrays.pop(block.hidden, None)
    if hidden is None or info.shape(block.hidden) is None:
        return None
    for value, z in reversed(arrays.items()):
        if z.shape != hidden.shape or info.shape(value) != info.shape(block.hidden):
            continue
        if _near(hidden, _exact(z), z):
            return "Gelu", value
        if _near(hidden, _approximate(z), z):
            return "FastGelu", value
    return None


def _near(hidden: np.ndarray, expected: np.ndarray, z: np.ndarray) -> bool:
    return bool(np.all(np.abs(hidden - expected) < TOLERANCE * np.maximum(np.abs(z), 1.0)))


def _evaluated(
    block: FeedForwardBlock, info: ShapeInfo, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray]:
    """Evaluate the nodes between the products on numbers from -12 to 12."""
    first = block.products[0].outputs[0]
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
            elif (known := info.constant(value)) is not None:
                inputs.append(known)
            else:
                return {}
        try:
            outputs = evaluate(node, inputs, opsets)
        except Exception:  # any failure means that the nodes are not a GELU
            return {}
        arrays |= dict(zip(node.outputs, outputs, strict=False))
    return arrays


def _exact(z: np.ndarray) -> np.ndarray:
    from scipy.special import erf  # imported here because it is slow to import

    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + erf(wide / math.sqrt(2)))


def _approximate(z: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel, arXiv 1606.08415."""
    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
