"""Match rotary embeddings between a projection and the scores.

Each function maps the trace of a node's operand to the trace of its output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import BroadcastLayout, RotaryTerm
from graph_passes.matching.element_map import (
    ElementMap,
    LinearTrace,
    MatchFailure,
    PositionFactor,
    TermByHead,
    describe,
    known_shape,
    split_last_axis,
)

__all__ = [
    "apply_position_factor",
    "apply_rotary_operator",
    "broadcast_layout_of",
    "depends_on",
    "rotary_terms_of",
    "rotate_heads",
]


def apply_position_factor(
    node: ir.Node, inner: LinearTrace, factor: ir.Value, info: ShapeInfo, role: str
) -> LinearTrace:
    """Trace the element-wise product with a value that depends on positions only."""
    shape = known_shape(factor, info)
    assert inner.source is not None
    if depends_on(factor, inner.source.tokens):
        raise MatchFailure(
            f"{describe(node)} multiplies the {role} by a value computed from its own tokens"
        )
    try:
        spread = np.broadcast_shapes(inner.shape, shape)
    except ValueError as error:
        raise MatchFailure(f"{describe(node)} does not fit the {role}: {error}") from error
    factor_index = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), spread)
    term = inner.terms[None].broadcast_to(spread)
    return replace(
        inner, terms={PositionFactor(factor): replace(term, factor_index=factor_index)}
    ).append_node(node)


def depends_on(value: ir.Value, source: ir.Value) -> bool:
    """Whether the elements of ``value`` depend on the elements of ``source``."""
    pending = [value]
    seen = {value}
    while pending:
        reached = pending.pop()
        if reached is source:
            return True
        node = reached.producer()
        if node is None or node.op_type == "Shape":
            continue
        parents = {parent for parent in node.inputs if parent is not None} - seen
        seen |= parents
        pending += parents
    return False


def apply_rotary_operator(
    node: ir.Node, inner: LinearTrace, info: ShapeInfo, role: str
) -> LinearTrace:
    """Trace RotaryEmbedding of ai.onnx (opset 23) or com.microsoft: a cosine and a sine term."""
    angles = _angles(node)
    if angles is None or not inner.has_no_factor:
        raise MatchFailure(
            f"{describe(node)} rotates a {role} that is rotated already, or lacks angles"
        )
    heads = node.attributes.get_int("num_heads", 0)
    if len(inner.shape) == 3 and not heads and node.domain:
        width = node.attributes.get_int("rotary_embedding_dim", 0)
        heads = 0 if width else inner.shape[-1] // (2 * known_shape(angles[0].value, info)[-1])
    if len(inner.shape) != 4 and not (len(inner.shape) == 3 and heads):
        raise MatchFailure(
            f"{describe(node)} rotates a {role} that is not laid out as (B, H, T, K)"
        )
    if node.attributes.get_float("scale", 1.0) != 1.0:
        raise MatchFailure(f"{describe(node)} scales the {role} in addition to the rotation")
    by_head = inner.terms[None]
    if len(inner.shape) == 3:  # B T H*K
        by_head = by_head.map(lambda array: split_last_axis(array, heads))
    terms = rotate_heads(node, by_head, *angles, info)
    if len(inner.shape) == 3:
        terms = {
            factor: term.map(lambda array: np.moveaxis(array, 1, 2).reshape(inner.shape))
            for factor, term in terms.items()
        }
    return replace(inner, terms=terms).append_node(node)


def rotate_heads(
    node: ir.Node, heads: ElementMap, cos: PositionFactor, sin: PositionFactor, info: ShapeInfo
) -> dict[PositionFactor | None, ElementMap]:
    """The terms of heads (B, H, T, K) after the rotation given by a node's attributes."""
    length, size = heads.columns.shape[-2:]
    interleaved = node.attributes.get_int("interleaved", 0)
    interleaved = node.attributes.get_int("rotary_interleaved", interleaved)
    width = _looked_up_shape(cos, info, length)[-1]
    count = node.attributes.get_int("rotary_embedding_dim", 0) or min(size, 2 * width)
    if count % 2 or count > size or width * 2 < count:
        raise MatchFailure(f"{describe(node)} rotates {count} of {size} elements by {width} angles")
    elements = np.arange(count)
    half = count // 2
    if interleaved:
        angle = elements // 2
        partner = elements ^ 1
        sign = np.where(elements % 2, 1.0, -1.0)
    else:
        angle = elements % half
        partner = (elements + half) % count
        sign = np.where(elements < half, -1.0, 1.0)
    is_unrotated = np.arange(size) >= count
    angle, partner, sign = (np.pad(array, (0, size - count)) for array in (angle, partner, sign))
    terms: dict[PositionFactor | None, ElementMap] = {}
    for factor, source, gain in (
        (cos, np.arange(size), np.where(is_unrotated, 0.0, 1.0)),
        (sin, partner, sign),
    ):
        shape = _looked_up_shape(factor, info, length)
        if len(shape) != 3:
            raise MatchFailure(
                f"{describe(node)} has angles of shape {shape}, expected (B, T, K/2)"
            )
        rows = np.arange(heads.columns.shape[0])[:, None, None, None] % shape[0] * shape[1]
        rows = rows + np.arange(length)[None, None, :, None] % shape[1]
        factor_index = np.broadcast_to(rows * shape[2] + angle, heads.columns.shape)
        source_elements = heads.map(partial(np.take, indices=source, axis=-1))
        terms[factor] = replace(source_elements.scaled_by(gain), factor_index=factor_index)
    if is_unrotated.any():
        terms[None] = heads.scaled_by(np.where(is_unrotated, 1.0, 0.0))
    return terms


def _angles(node: ir.Node) -> tuple[PositionFactor, PositionFactor] | None:
    """The cosines and the sines of a RotaryEmbedding; None if it lacks them."""
    inputs = [*node.inputs[1:4], None, None, None]
    if node.domain:
        positions, cos, sin = inputs[:3]
    else:
        cos, sin, positions = inputs[:3]
    if cos is None or sin is None:
        return None
    return PositionFactor(cos, positions), PositionFactor(sin, positions)


def _looked_up_shape(factor: PositionFactor, info: ShapeInfo, length: int) -> tuple[int, ...]:
    """The shape of ``value[positions]``; one position per sequence is expanded to ``length``."""
    shape = known_shape(factor.value, info)
    if factor.positions is None:
        return shape
    where = known_shape(factor.positions, info)
    if factor.is_last_position or len(where) == 1:
        return (where[0], length, *shape[1:])
    return (*where, *shape[1:])


def rotary_terms_of(
    terms: Mapping[PositionFactor | None, TermByHead], info: ShapeInfo, role: str
) -> tuple[RotaryTerm, ...]:
    """The terms of a projection, each with the broadcast layout of its factor."""
    return tuple(
        RotaryTerm(
            None if factor is None else broadcast_layout_of(factor, heads, info, role),
            heads.columns,
            heads.gain,
            heads.offset,
        )
        for factor, heads in terms.items()
    )


def broadcast_layout_of(
    factor: PositionFactor, heads: TermByHead, info: ShapeInfo, role: str
) -> BroadcastLayout:
    """Determine the role of each axis of a factor, from the factor indices of its term."""
    is_used = np.broadcast_to(
        ((heads.gain != 0) | (heads.offset != 0))[None, :, None, :], heads.factor_index.shape
    )
    batches, _, tokens, _ = np.ogrid[tuple(map(slice, heads.factor_index.shape))]
    shape = _looked_up_shape(factor, info, heads.factor_index.shape[2])
    axes: list[Literal["batch", "token"] | np.ndarray] = []
    # NumPy 2.4 reads beyond a broadcast array in unravel_index.
    index = np.ascontiguousarray(heads.factor_index)
    for size, where in zip(shape, np.unravel_index(index, shape), strict=True):
        element = where[0, :, 0]
        if size > 1 and ((where == tokens) | ~is_used).all():
            axes.append("token")
        elif size > 1 and ((where == batches) | ~is_used).all():
            axes.append("batch")
        elif ((where == where[:1, :, :1]) | ~is_used).all():
            axes.append(element)
        else:
            raise MatchFailure(f"{factor.value.name!r} multiplies the {role} out of order")
    tensor = info.known.get(factor.value)
    return BroadcastLayout(
        factor.value,
        tuple(axes),
        factor.positions,
        factor.is_last_position,
        None if tensor is None else tensor.dtype,
    )
