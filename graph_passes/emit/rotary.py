"""Emit the logits of reduced heads with rotary positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.blocks import AttentionBlock, BroadcastLayout, Projection, RotaryTerm, Weight
from graph_passes.emit.editing import Inserter
from graph_passes.emit.heads import emit_heads
from graph_passes.factorize.rotary import RotaryFactors, RotaryHeads

if TYPE_CHECKING:
    from jaxtyping import Complex, Int

__all__ = ["RotaryPlanes", "rotary_heads", "rotary_logits", "rotary_planes"]


@dataclass(frozen=True, eq=False)
class RotaryPlanes:
    """The pairs of elements that are rotated: real' = c real - s imaginary, and so on.

    Attributes:
        elements: The real and the imaginary element of each plane.
        cos: The cosines by head and element.
        sin: The sines by head and element.
        turned: The number of rotated planes, which come first. The others are pairs of elements
            without a position (partial rotary embeddings).
    """

    elements: Int[np.ndarray, "F 2"]
    cos: BroadcastLayout
    sin: BroadcastLayout
    turned: int

    @property
    def is_rotation(self) -> bool:
        """Whether both elements of each plane are known to have one angle."""
        return all(self._has_one_angle(factor) for factor in (self.cos, self.sin))

    def _has_one_angle(self, factor: BroadcastLayout) -> bool:
        """Whether a factor is known to be equal for both elements of each plane."""
        *lead, last = factor.axes
        elements = self.elements[: self.turned]
        indices = [axis[0][elements] for axis in lead if not isinstance(axis, str)]
        if isinstance(last, str) or not all((i[:, 0] == i[:, 1]).all() for i in indices):
            return False
        real, imaginary = last[0][elements].T
        half = self.turned
        if (real == imaginary).all():
            return True
        orders = {  # a single plane has both
            False: (real < half).all() and (imaginary - real == half).all(),
            True: (real % 2 == 0).all() and (imaginary - real == 1).all(),
        }
        return any(
            matches and _repeats(factor.value, half, interleaved=interleaved)
            for interleaved, matches in orders.items()
        )


SAME_ANGLES = frozenset({"Cast", "Cos", "Expand", "Gather", "Identity", "Mul", "Sin", "Unsqueeze"})
"""Operators that keep equal halves of the last axis equal."""


def _repeats(value: ir.Value | None, half: int, *, interleaved: bool) -> bool:
    """Whether the last axis is known to hold ``half`` elements twice: a, b, a, b or a, a, b, b."""
    if value is None:
        return False
    if is_constant(value):
        table = constant_array(value)
        if table.shape[-1:] != (2 * half,):
            return False
        if interleaved:
            return np.array_equal(table[..., 0::2], table[..., 1::2])
        return np.array_equal(table[..., :half], table[..., half:])
    node = value.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Concat":
        rank = 0 if value.shape is None else len(value.shape)
        is_last = node.attributes.get_int("axis", 0) in (-1, rank - 1)
        is_twice = len(node.inputs) == 2 and node.inputs[0] is node.inputs[1]
        return is_last and is_twice and not interleaved
    if node.op_type == "Gather" and node.attributes.get_int("axis", 0) != 0:
        indices = constant_array(node.inputs[1]) if is_constant(node.inputs[1]) else np.zeros(0)
        if indices.ndim and not np.array_equal(indices, np.arange(2 * half)):
            return False
    inner = partial(_repeats, half=half, interleaved=interleaved)
    if node.op_type == "Reshape":
        if interleaved and _joins_equal_pairs(node.inputs[0]):
            return True
        shape = constant_array(node.inputs[1]) if is_constant(node.inputs[1]) else np.zeros(1)
        return shape[-1] == 2 * half and inner(node.inputs[0])  # as ``emit_heads`` writes it
    if node.op_type == "Mul":
        scalar = [is_constant(v) and constant_array(v).size == 1 for v in node.inputs]
        return sum(scalar) == 1 and inner(node.inputs[scalar.index(False)])
    return node.op_type in SAME_ANGLES and inner(node.inputs[0])


def _joins_equal_pairs(pairs: ir.Value | None) -> bool:
    """Whether the last axis of a value holds two equal elements, for a Reshape that joins axes.

    PyTorch writes ``repeat_interleave`` and ``stack`` in this way (GPT-J, RoFormer).
    """
    node = None if pairs is None else pairs.producer()
    if node is None or node.domain:
        return False
    if node.op_type == "Concat":
        rank = len(node.outputs[0].shape or ())
        sources = [_before_new_last_axis(operand, rank) for operand in node.inputs]
        is_last = node.attributes.get_int("axis", 0) in (-1, (rank or None) and rank - 1)
        return is_last and len(sources) == 2 and sources[0] is sources[1] is not None
    times = node.inputs[1] if node.op_type in ("Tile", "Expand") else None
    if times is None or not is_constant(times) or constant_array(times)[-1] != 2:
        return False
    return _before_new_last_axis(node.inputs[0], constant_array(times).size) is not None


def _before_new_last_axis(value: ir.Value | None, rank: int) -> ir.Value | None:
    """The value before an Unsqueeze that made a last axis of size 1; a rank of 0 is unknown."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Unsqueeze" or node.domain or len(node.inputs) < 2:
        return None
    axes = node.inputs[1]
    new_axes = constant_array(axes).flatten().tolist() if axes and is_constant(axes) else []
    return node.inputs[0] if -1 in new_axes or (rank and rank - 1 in new_axes) else None


def rotary_planes(part: Projection) -> RotaryPlanes | None:
    """The planes of a projection, if it rotates the same pairs of elements in all heads."""
    terms = [term for term in part.rotary_terms if term.factor is not None]
    plain_terms = [term for term in part.rotary_terms if term.factor is None]
    if part.norm is not None or len(terms) != 2 or len(plain_terms) > 1:
        return None
    keeps_columns = [np.array_equal(term.columns, part.columns) for term in terms]
    if sum(keeps_columns) != 1:
        return None
    cos, sin = terms if keeps_columns[0] else terms[::-1]
    assert cos.factor is not None and sin.factor is not None
    elements = np.arange(part.head_size)
    sign = np.sign(sin.gain[0])
    gain = cos.gain
    is_still = sign == 0
    partner = np.array(
        [np.flatnonzero(part.columns[0] == column)[:1].sum() for column in sin.columns[0]]
    )
    partner = np.where(is_still, elements, partner)
    alike = (
        np.array_equal(sin.columns[:, ~is_still], part.columns[:, partner[~is_still]])
        and np.array_equal(partner[partner], elements)
        and np.array_equal(sign[partner], -sign)
        and np.allclose(sin.gain, sign * gain)
        and np.allclose(gain[:, partner], gain)
        and np.allclose(sin.offset, sign * cos.offset[:, partner])
        and all(
            isinstance(axis, str) or bool((axis == axis[:1])[..., ~is_still].all())
            for factor in (cos.factor, sin.factor)
            for axis in factor.axes
        )
    )
    if plain_terms:  # partial rotary embeddings
        plain_term = plain_terms[0]
        alike = (
            alike
            and is_still.sum() % 2 == 0
            and np.array_equal(plain_term.columns, part.columns)
            and not cos.gain[:, is_still].any()
            and not cos.offset[:, is_still].any()
            and not plain_term.gain[:, ~is_still].any()
            and not plain_term.offset[:, ~is_still].any()
        )
    if not alike or is_still.any() != bool(plain_terms):
        return None
    real = np.flatnonzero(sign < 0)
    pairs = np.stack([real, partner[real]], axis=1)
    still_pairs = np.flatnonzero(is_still).reshape(-1, 2)
    return RotaryPlanes(np.concatenate([pairs, still_pairs]), cos.factor, sin.factor, len(pairs))


def rotary_heads(block: AttentionBlock) -> RotaryHeads:
    """The queries and keys of a block before the rotation."""
    planes = rotary_planes(block.q)
    assert planes is not None
    _, first, groups = np.unique(block.k.columns, axis=0, return_index=True, return_inverse=True)
    query, key = (_complex(part, planes) for part in (block.q, block.k))
    return RotaryHeads(
        query, key[first], groups.reshape(-1), block.kind == "self", turned=planes.turned
    )


def _complex(part: Projection, planes: RotaryPlanes) -> Complex[np.ndarray, "H D+1 F"]:
    """The weights before the rotation as complex numbers, (H, D+1, F), the bias as last row."""
    terms = [t for t in part.rotary_terms if np.array_equal(t.columns, part.columns)]
    gain = np.sum([t.gain for t in terms], axis=0)  # H K
    offset = np.sum([t.offset for t in terms], axis=0)
    matrix = np.moveaxis(part.matrix()[:, part.columns], 1, 0).astype(np.float64)  # H D K
    rows = np.concatenate([matrix * gain[:, None], offset[:, None]], axis=1)
    real, imaginary = planes.elements.T
    return rows[..., real] + 1j * rows[..., imaginary]


def rotary_logits(make: Inserter, block: AttentionBlock, factors: RotaryFactors) -> ir.Value:
    """Emit scale * q k^T of reduced queries and keys, (B, H, S, T)."""
    heads = np.arange(len(factors.groups))
    planes = factors.planes[factors.groups]
    query = _reduced(make.part("query"), block.q, factors.query, heads, planes)
    key = _reduced(make.part("key"), block.k, factors.key, factors.groups, planes)
    q = emit_heads(make.part("query"), query, block.scale)
    k = emit_heads(make.part("key"), key, 1.0)
    keys = make.op("Transpose", [k], "keys", perm=[0, 1, 3, 2])
    return make.op("MatMul", [q, keys], "scores")


def _reduced(
    make: Inserter, part: Projection, heads: Any, groups: np.ndarray, planes: np.ndarray
) -> Projection:
    """A projection with other weights, whose elements are rotated in other planes.

    Args:
        heads: The weights and biases as complex numbers, (G, D+1, N).
        groups: The index into ``heads`` of each head, (H,).
        planes: The plane of each complex number, (H, N).
    """
    pairs = rotary_planes(part)
    assert pairs is not None
    size = heads.shape[2]
    halves = np.concatenate([heads.real, heads.imag], axis=2)  # G D+1 2N
    columns = np.arange(len(halves) * 2 * size).reshape(len(halves), -1)[groups]
    weight = np.moveaxis(halves[:, :-1], 0, 1).reshape(halves.shape[1] - 1, -1)
    offset = halves[groups, -1]
    ones = np.ones(columns.shape)
    swap = np.roll(np.arange(2 * size), size)
    sign = np.repeat([-1.0, 1.0], size) * ones
    elements = np.concatenate([pairs.elements[planes, 0], pairs.elements[planes, 1]], axis=1)

    def layout(factor: BroadcastLayout) -> BroadcastLayout:
        axes = [axis if isinstance(axis, str) else axis[0][elements] for axis in factor.axes]
        return replace(factor, axes=tuple(axes))

    turns = np.tile(planes < pairs.turned, 2)  # H 2N
    terms = (
        RotaryTerm(layout(pairs.cos), columns, 1.0 * turns, turns * offset),
        RotaryTerm(
            layout(pairs.sin), columns[:, swap], sign * turns, sign * turns * offset[:, swap]
        ),
        RotaryTerm(None, columns, 1.0 * ~turns, ~turns * offset),
    )
    terms = tuple(term for term in terms if term.gain.any())
    return replace(
        part,
        weight=Weight(make.constant(weight, "reduced", part.dtype), (0,)),
        columns=columns,
        gain=ones,
        offset=offset,
        rotary_terms=terms if turns.any() else (),
    )
