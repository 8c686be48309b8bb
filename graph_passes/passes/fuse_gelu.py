"""FuseGelu: the activation of a feed-forward as one operator of ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, evaluate, is_constant
from graph_passes.analysis.shapes import Facts, interpret_small
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import FeedForwardBlock, find_feed_forward
from graph_passes.matching.naming import PINNED
from graph_passes.passes.invariants import check, interface

__all__ = ["FuseGelu", "why_not"]

DOMAIN = "com.microsoft"

Operator = Literal["Gelu", "FastGelu"]

TOLERANCE = 2e-6
"""Of an activation that is written in single precision, at inputs up to 12."""


@dataclass(frozen=True, eq=False)
class FuseGelu(ir.passes.InPlacePass):
    """Write a GELU that an exporter took apart as one operator, which runs over memory once.

    Before: h = z * 0.5 * (1 + erf(z / sqrt(2))), or its approximation with tanh, in any nodes
    After:  h = Gelu(z), or FastGelu(z)

    Exact. That the nodes compute it is not read off their names but tried on numbers. The model
    imports com.microsoft. Refused (``CannotRewrite``) where ``why_not`` gives a reason.

    Attributes:
        names: Of the feed-forwards.
    """

    names: Collection[str]

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_feed_forward(model)}
        facts = interpret_small(model, batch=2, sequence=5)
        for name in self.names:
            if name not in blocks:
                raise CannotRewrite(f"{name}: no feed-forward has this name", "leave it out")
            if reason := why_not(blocks[name], facts, model.opset_imports):
                raise CannotRewrite(f"{name}: {reason}", "leave it out")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before, facts = interface(model), interpret_small(model, batch=2, sequence=5)
        blocks = find_feed_forward(model)
        for block in blocks:
            block.product.metadata_props[PINNED] = block.name
        for block in (block for block in blocks if block.name in self.names):
            found = _gelu(block, facts, model.opset_imports)
            assert found is not None
            operator, value = found
            make = Inserter(block.graph, block.product, f"{block.name}/fused")
            hidden = make.op(operator, [value], "gelu", domain=DOMAIN)
            replace_uses(block.hidden, hidden)
        if not self.names:
            return ir.passes.PassResult(model, modified=False)
        model.opset_imports.setdefault(DOMAIN, 1)
        remove_unused(model)
        check(before.with_opset(DOMAIN, 1), model, after="FuseGelu")
        return ir.passes.PassResult(model, modified=True)


def why_not(block: FeedForwardBlock, facts: Facts, opsets: Mapping[str, int]) -> str:
    """Why the activation of a block cannot be one operator; empty where it can."""
    if len(block.products) != 1:
        return "its activation is gated by a second product"
    if any(node.domain == DOMAIN for node in block.nodes):
        return "its activation is an operator of ONNX Runtime already"
    if block.hidden.is_graph_output():
        return "its neurons are an output of the graph"
    return "" if _gelu(block, facts, opsets) else "its activation is no GELU"


def _gelu(
    block: FeedForwardBlock, facts: Facts, opsets: Mapping[str, int]
) -> tuple[Operator, ir.Value] | None:
    """The operator that makes the neurons, and of which value: of the last that is so shaped."""
    made = _tried(block, facts, opsets)
    hidden = made.pop(block.hidden, None)
    if hidden is None or facts.shape(block.hidden) is None:
        return None
    for value, z in reversed(made.items()):
        if z.shape != hidden.shape or facts.shape(value) != facts.shape(block.hidden):
            continue
        if _near(hidden, _exact(z), z):
            return "Gelu", value
        if _near(hidden, _approximate(z), z):
            return "FastGelu", value
    return None


def _near(hidden: np.ndarray, expected: np.ndarray, z: np.ndarray) -> bool:
    return bool(np.all(np.abs(hidden - expected) < TOLERANCE * np.maximum(np.abs(z), 1.0)))


def _tried(
    block: FeedForwardBlock, facts: Facts, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray]:
    """What the nodes between the products make of numbers from -12 to 12."""
    first = block.products[0].outputs[0]
    shape = facts.shape(first)
    if shape is None:
        return {}
    numbers = np.linspace(-12, 12, math.prod(shape)).reshape(shape)
    found: dict[ir.Value, np.ndarray] = {first: numbers.astype(np.float32)}
    for node in block.nodes:
        inputs: list[np.ndarray | None] = []
        for value in node.inputs:
            if value is None:
                inputs.append(None)
            elif value in found:
                inputs.append(found[value])
            elif is_constant(value):
                inputs.append(constant_array(value))
            elif (known := facts.constant(value)) is not None:
                inputs.append(known)
            else:
                return {}
        try:
            outputs = evaluate(node, inputs, opsets)
        except Exception:  # whatever it is, it is no part of a GELU
            return {}
        found |= dict(zip(node.outputs, outputs, strict=False))
    return found


def _exact(z: np.ndarray) -> np.ndarray:
    from scipy.special import erf  # here, for every command would wait for it

    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + erf(wide / math.sqrt(2)))


def _approximate(z: np.ndarray) -> np.ndarray:
    """Hendrycks and Gimpel, arXiv 1606.08415."""
    wide = z.astype(np.float64)
    return 0.5 * wide * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
