"""Build the projection to queries, keys or values from the trace of an operand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_type, origin
from graph_passes.analysis.operator_sets import FLATTENS
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import BroadcastLayout, Norm, Projection, QuantizedProduct, Weight
from graph_passes.matching import reaches
from graph_passes.matching.element_map import (
    CachedHeads,
    LinearTrace,
    PositionFactor,
    TermByHead,
    TracedNorm,
    split_heads,
)
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.rotary import broadcast_layout_of, rotary_terms_of

__all__ = ["make_projection", "match_projection"]


def match_projection(
    reader: LayoutReader, operand: ir.Value, role: str, *, axes: Sequence[int] | None = None
) -> Projection:
    """Trace ``operand``, (B, H, T, K) or (B*H, T, K), to the product with its weight.

    Args:
        operand: An operand of the scores or of the context.
        role: "query", "key", "value" or "content", for messages.
        axes: The permutation of the operand to (..., T, K), if not the identity.

    Raises:
        MatchFailure: A node between the product and the operand is not supported.
    """
    return make_projection(reader, reader.trace(operand, role), operand, role, axes=axes)


def make_projection(
    reader: LayoutReader,
    trace: LinearTrace,
    operand: ir.Value,
    role: str,
    *,
    axes: Sequence[int] | None = None,
) -> Projection:
    """Build the projection of a trace; see ``match_projection`` for the arguments."""
    info = reader.info
    if axes is None:
        axes = range(len(trace.shape))
    terms, cached = split_heads(trace, axes, role)
    # Phi-3 joins the rotated elements with an empty set of elements without rotation.
    terms = {factor: term for factor, term in terms.items() if term.is_used} or terms
    past = None if cached is None else broadcast_layout_of(*cached, info, role)
    if trace.source is None:
        assert cached is not None and past is not None
        return _cached(operand, trace, past, cached)
    factor = 1.0 if cached is None else cached.scale
    first = next(iter(terms.values()))
    source = trace.source
    length = first.factor_index.shape[2]
    batch = source.rows.size // length
    source_input, sequence_first = _unflattened(source.tokens, first.sequence_first, reader)
    value = origin(source.weight)
    if source.product is None:
        dtype = constant_type(source.weight)
        weight = Weight(value, source.contracted)
    else:
        tensor = info.known[source.product]
        dtype = tensor.dtype
        is_flat = tensor.shape[:-1] != reader.shape(source_input)[:-1]
        weight = QuantizedProduct(value, source.product, tensor.shape[-1], is_flat)
    lengths = (length, batch) if sequence_first else (batch, length)
    return Projection(
        input=source_input,
        weight=weight,
        width=source.width,
        dtype=dtype,
        columns=first.columns,
        gain=first.gain / factor,
        offset=first.offset / factor,
        scale=trace.scale * factor,
        output=operand,
        nodes=trace.nodes,
        by_sequence=reader.shape(source_input)[:-1] == lengths and not sequence_first,
        sequence_first=sequence_first,
        layout="B*H T K" if len(trace.shape) == 3 else "B H T K",
        rotary_terms=() if set(terms) == {None} else rotary_terms_of(terms, info, role),
        norm=_norm(trace.norm, batch, info, sequence_first=first.sequence_first, role=role),
        past=past,
        axes=tuple(axes),
    )


def _cached(
    operand: ir.Value, trace: LinearTrace, past: BroadcastLayout, cached: CachedHeads
) -> Projection:
    """A projection whose heads are all cached: each (h, k) is a column of its own."""
    indices = [axis for axis in past.axes if not isinstance(axis, str)]
    sizes = [int(index.max()) + 1 for index in indices]
    shape = cached.heads.columns.shape
    columns = np.ravel_multi_index(indices, sizes) if indices else np.zeros(shape, np.int64)
    ones = np.ones(shape)
    return Projection(
        input=past.value,
        weight=None,
        width=0,
        dtype=ir.DataType.FLOAT,
        columns=columns,
        gain=ones,
        offset=0.0 * ones,
        scale=trace.scale * cached.scale,
        output=operand,
        nodes=trace.nodes,
        by_sequence=True,
        layout="B H T K",
        past=past,
        axes=(0, 1, 2, 3),
    )


def _norm(
    traced: TracedNorm | None, batch: int, info: ShapeInfo, *, sequence_first: bool, role: str
) -> Norm | None:
    """The norm of a trace, whose tokens are ``batch`` sequences."""
    if traced is None:
        return None
    if not traced.terms:
        return traced.norm
    terms: dict[PositionFactor | None, TermByHead] = {}
    for factor, term in traced.terms.items():
        index = term.factor_index  # N G L
        axes = (1, 2, 0, 3) if sequence_first else (0, 2, 1, 3)
        lead = (-1, batch) if sequence_first else (batch, -1)
        by_group = index.reshape(*lead, *index.shape[1:]).transpose(axes)  # B G T L
        terms[factor] = term._replace(factor_index=by_group)
    return replace(traced.norm, rotary_terms=rotary_terms_of(terms, info, role))


def _unflattened(
    tokens: ir.Value, sequence_first: bool, reader: LayoutReader
) -> tuple[ir.Value, bool]:
    """The value (B, S, D) before flattening or transposing; whether it remains (S, B, D)."""
    *lengths, size = reader.shape(tokens)
    count = math.prod(lengths)
    value: ir.Value | None = tokens
    for _ in range(reaches.FLATTENING):
        shape = reader.info.shape(value)
        if value is None or shape is None:
            break
        if len(shape) == 3 and shape[2] == size and shape[0] * shape[1] == count:
            tokens = value
            break
        node = value.producer()
        value = node.inputs[0] if node is not None and node.op_type in FLATTENS else None
    node = tokens.producer()
    while node is not None and node.op_type in FLATTENS and node.inputs[0] is not None:
        if reader.info.shape(node.inputs[0]) != reader.info.shape(tokens):
            break
        tokens = node.inputs[0]  # not changed, for example by a Reshape to the same shape
        node = tokens.producer()
    if not sequence_first or node is None or node.op_type != "Transpose" or not node.inputs[0]:
        return tokens, sequence_first
    is_swapped = list(node.attributes.get_ints("perm", None) or ()) == [1, 0, 2]
    return (node.inputs[0], False) if is_swapped else (tokens, True)
