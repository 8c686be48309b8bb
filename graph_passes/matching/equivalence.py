"""Compare the masks, position biases and lengths of two attention blocks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.blocks import AttentionBlock

__all__ = ["have_equal_masks"]

SMALL = 1024
"""Elements of constants that are compared one by one; larger ones must be the same tensor."""

DATA_DEPENDENT = frozenset({"NonZero", "Unique", "Compress"})
"""Operators whose output shapes depend on values: equal operators do not imply equal shapes."""

REACH = 60
"""The most nodes above a mask that are compared."""


def have_equal_masks(block: AttentionBlock, other: AttentionBlock) -> bool:
    """Whether two blocks have the same query and key lengths, masks and position biases."""
    if block.kind != other.kind or len(block.steps) != len(other.steps):
        return False
    if block.kind == "cross" and block.y is not other.y and block.k.past is None:
        return False
    comparison = _Comparison(shaped={(block.x, other.x): True, (block.y, other.y): True})
    for mine, theirs in zip(block.steps, other.steps, strict=True):
        a, b = dict(vars(mine)), dict(vars(theirs))
        values = [(a.pop(name, None), b.pop(name, None)) for name in ("value", "total")]
        if type(mine) is not type(theirs) or a != b:
            return False
        if not all(comparison.are_equal(x, y) for x, y in values):
            return False
    return True


Pairs = dict[tuple[ir.Value, ir.Value], bool]


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Which values of two layers are equal, and which have equal shapes.

    Exporters often repeat a mask in every layer, and read its lengths from the layer's own queries
    or keys.

    Attributes:
        known: Whether a pair of values is equal, for the pairs compared so far.
        shaped: Whether a pair has the same shape; initially the tokens of both layers.
    """

    known: Pairs = field(default_factory=dict[tuple[ir.Value, ir.Value], bool])
    shaped: Pairs = field(default_factory=dict[tuple[ir.Value, ir.Value], bool])

    def are_equal(self, a: ir.Value | None, b: ir.Value | None, reach: int = REACH) -> bool:
        """Whether two values are computed alike."""
        if a is b or a is None or b is None:
            return a is b
        if (a, b) not in self.known:
            compare = self.have_equal_shapes if _is_shape(a) else self.are_equal
            self.known[a, b] = (
                _equal(a, b)
                if is_constant(a) or is_constant(b)
                else reach > 0
                and _same_operator(a, b)
                and all(compare(x, y, reach - 1) for x, y in _inputs(a, b))
            )
        return self.known[a, b]

    def have_equal_shapes(self, a: ir.Value | None, b: ir.Value | None, reach: int = REACH) -> bool:
        """Whether two values have one shape: made alike, but for weights and tokens."""
        if a is b or a is None or b is None:
            return a is b
        if (a, b) not in self.shaped:
            self.shaped[a, b] = (
                _equal(a, b) or _are_weights(a, b)
                if is_constant(a) or is_constant(b)
                else reach > 0
                and _same_operator(a, b)
                and all(self.have_equal_shapes(x, y, reach - 1) for x, y in _inputs(a, b))
            )
        return self.shaped[a, b]


def _is_shape(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Shape"


def _equal(a: ir.Value, b: ir.Value) -> bool:
    """Whether two constants hold the same."""
    if not (is_constant(a) and is_constant(b)):
        return False
    shape = constant_shape(a)
    small = shape == constant_shape(b) and int(np.prod(shape)) <= SMALL
    return small and bool(np.array_equal(constant_array(a), constant_array(b)))


def _are_weights(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are weights of one shape, which may differ from layer to layer."""
    both = is_constant(a) and is_constant(b) and constant_shape(a) == constant_shape(b)
    return both and constant_type(a).is_floating_point() and constant_type(a) == constant_type(b)


def _same_operator(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are the same output of the same operator with the same attributes."""
    first, second = a.producer(), b.producer()
    if first is None or second is None or a.index() != b.index():
        return False
    if first.op_type in DATA_DEPENDENT:
        return False
    if first.op_identifier() != second.op_identifier() or len(first.inputs) != len(second.inputs):
        return False
    mine, theirs = (
        {n: str(x.value) for n, x in node.attributes.items()} for node in (first, second)
    )
    return mine == theirs


def _inputs(a: ir.Value, b: ir.Value) -> list[tuple[ir.Value | None, ir.Value | None]]:
    first, second = a.producer(), b.producer()
    assert first is not None and second is not None
    return list(zip(first.inputs, second.inputs, strict=True))
