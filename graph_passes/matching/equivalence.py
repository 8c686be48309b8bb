"""Compare the masks, position biases and lengths of two attention blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_number,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.analysis.operator_sets import DATA_DEPENDENT
from graph_passes.analysis.required import producer_of
from graph_passes.blocks import AttentionBlock, LogitStep, Mask, PositionBias
from graph_passes.matching import reaches

__all__ = ["have_equal_masks"]

SMALL = 1024
"""Maximum size of constants that are compared by element; larger ones must be one tensor."""


def have_equal_masks(block: AttentionBlock, other: AttentionBlock) -> bool:
    """Whether two blocks have equal query and key lengths, masks and position biases.

    Each block may have selected its own heads from an equal mask (B, H, S, T).
    """
    if block.kind != other.kind or len(block.steps) != len(other.steps):
        return False
    if block.kind == "cross" and block.y is not other.y and not block.k.is_cached:
        return False
    comparison = _Comparison({(block.x, other.x, True): True, (block.y, other.y, True): True})
    steps = ([_as_mask(step) for step in attention.steps] for attention in (block, other))
    for own_step, other_step in zip(*steps, strict=True):
        a = dict(vars(own_step))
        b = dict(vars(other_step))
        values = [(a.pop(name, None), b.pop(name, None)) for name in ("value", "total")]
        if type(own_step) is not type(other_step) or a != b:
            return False
        pairs = ((_of_all_heads(x, block), _of_all_heads(y, other)) for x, y in values)
        if not all(comparison.are_equal(x, y) for x, y in pairs):
            return False
    return True


def _as_mask(step: LogitStep) -> LogitStep:
    """Return a bias of 0 and -inf, which ``PruneHeads`` writes for a mask, as that mask.

    A Not before the mask is removed, and ``keep`` inverted.
    """
    if isinstance(step, PositionBias) and step.sign == 1 and not step.entangled:
        node = step.value.producer()
        if node is None or node.op_type != "Where" or node.inputs[0] is None:
            return step
        if [constant_number(value) for value in node.inputs[1:]] != [0.0, -np.inf]:
            return step
        step = Mask(node.inputs[0], -np.inf, True, step.axes)
    while isinstance(step, Mask):
        node = step.value.producer()
        if node is None or node.op_type != "Not" or node.inputs[0] is None:
            break
        step = replace(step, value=node.inputs[0], keep=not step.keep)
    return step


def _of_all_heads(value: ir.Value | None, block: AttentionBlock) -> ir.Value | None:
    """The mask of all heads from which a Gather of ``PruneHeads`` selected; else the value."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Gather" or node.domain or not is_constant(node.inputs[1]):
        return value
    return node.inputs[0] if constant_shape(node.inputs[1]) == (block.num_heads,) else value


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Comparison of values of two layers, and of their shapes.

    Exporters often repeat a mask in each layer and compute its lengths from the queries or keys of
    the layer.

    Attributes:
        known: Whether a pair of values is equal, or only its shapes; initially, the tokens of both
            layers have equal shapes.
    """

    known: dict[tuple[ir.Value, ir.Value, bool], bool]

    def are_equal(
        self,
        a: ir.Value | None,
        b: ir.Value | None,
        *,
        shapes_only: bool = False,
        reach: int = reaches.MASK,
    ) -> bool:
        """Whether two values are computed by the same operators from equal inputs.

        Args:
            shapes_only: Compare the shapes: weights and tokens may have different elements.
        """
        if a is b or a is None or b is None:
            return a is b
        pair = (a, b, shapes_only)
        if pair not in self.known:
            if is_constant(a) or is_constant(b):
                self.known[pair] = _equal(a, b) or (shapes_only and _are_weights(a, b))
            else:
                inner = shapes_only or _is_shape(a)
                self.known[pair] = (
                    reach > 0
                    and _same_operator(a, b)
                    and all(
                        self.are_equal(x, y, shapes_only=inner, reach=reach - 1)
                        for x, y in _inputs(a, b)
                    )
                )
        return self.known[pair]


def _is_shape(value: ir.Value) -> bool:
    """Whether a value is the output of a Shape."""
    node = value.producer()
    return node is not None and node.op_type == "Shape"


def _equal(a: ir.Value, b: ir.Value) -> bool:
    """Whether two constants have equal elements."""
    if not (is_constant(a) and is_constant(b)):
        return False
    shape = constant_shape(a)
    small = shape == constant_shape(b) and int(np.prod(shape)) <= SMALL
    return small and bool(np.array_equal(constant_array(a), constant_array(b)))


def _are_weights(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are float constants of equal shape and type."""
    both = is_constant(a) and is_constant(b) and constant_shape(a) == constant_shape(b)
    return both and constant_type(a).is_floating_point() and constant_type(a) == constant_type(b)


def _same_operator(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are the same output of the same operator with the same attributes."""
    first, second = a.producer(), b.producer()
    if first is None or second is None or a.index() != b.index():
        return False
    if first.op_type in DATA_DEPENDENT:  # equal operators do not imply equal shapes
        return False
    if first.op_identifier() != second.op_identifier() or len(first.inputs) != len(second.inputs):
        return False
    mine, theirs = (
        {n: str(x.value) for n, x in node.attributes.items()} for node in (first, second)
    )
    return mine == theirs


def _inputs(a: ir.Value, b: ir.Value) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """The pairs of inputs of the nodes that compute two values."""
    return list(zip(producer_of(a).inputs, producer_of(b).inputs, strict=True))
