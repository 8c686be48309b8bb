"""Match fused attention operators: one function per operator.

Each function traces the operands to projections. An operator in ``FUSED_OPERATORS`` without a
function in ``OPERATORS`` is reported as unmatched.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.operator_sets import MICROSOFT, operators
from graph_passes.blocks import (
    Capped,
    Causal,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
    Scaled,
)
from graph_passes.matching.element_map import (
    LinearTrace,
    MatchFailure,
    PositionFactor,
    concat_traces,
    describe,
    split_last_axis,
)
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.projections import make_projection
from graph_passes.matching.rotary import rotate_heads

__all__ = ["FUSED_OPERATORS", "OPERATORS", "OperatorMatch"]


@dataclass(frozen=True, eq=False)
class OperatorMatch:
    """The parts of an attention block, before key/value heads are repeated."""

    q: Projection
    k: Projection
    v: Projection
    scale: float
    steps: tuple[LogitStep, ...]
    context: ir.Value


@dataclass(frozen=True, eq=False)
class _Operand:
    """The trace of an operand as heads (B, H, T, K).

    Attributes:
        node: The fused operator.
        role: "query", "key" or "value", for messages.
        value: The operand, or the output of an operator that projects inside.
    """

    node: ir.Node
    reader: LayoutReader
    role: str
    value: ir.Value
    trace: LinearTrace

    @classmethod
    def read(
        cls, node: ir.Node, reader: LayoutReader, value: ir.Value, role: str, heads: int
    ) -> _Operand:
        """Trace an operand (B, T, H*K) or (B, H, T, K)."""
        trace = reader.trace(value, role)
        operand = cls(node, reader, role, value, trace)
        return operand if len(trace.shape) == 4 else operand.split_heads(heads)

    def map(self, change: Callable[[np.ndarray], np.ndarray]) -> _Operand:
        """Apply a function to each array of the element maps."""
        return replace(self, trace=self.trace.map_terms(lambda term: term.map(change)))

    def split_heads(self, heads: int) -> _Operand:
        """Split (B, T, H*K) into (B, H, T, K)."""
        shape = self.trace.shape
        if len(shape) != 3 or heads < 1 or shape[-1] % heads:
            raise MatchFailure(
                f"{describe(self.node)} cannot split a {self.role} {shape} into {heads} heads"
            )
        return self.map(lambda array: split_last_axis(array, heads))

    def add_bias(self, bias: np.ndarray | None) -> _Operand:
        """Add the operator's bias of H*K elements."""
        if bias is None:
            return self
        _, heads, _, size = self.trace.shape
        if bias.size != heads * size or not self.trace.has_no_factor:
            raise MatchFailure(f"{describe(self.node)} adds {bias.size} elements to a {self.role}")
        return replace(self, trace=self.trace.add_offset(bias.reshape(heads, 1, size)))

    def rotate(self, cos: PositionFactor, sin: PositionFactor) -> _Operand:
        """Apply the rotary embedding of the operator."""
        if not self.trace.has_no_factor:
            raise MatchFailure(
                f"{describe(self.node)} rotates a {self.role} that is rotated already"
            )
        terms = rotate_heads(self.node, self.trace.terms[None], cos, sin, self.reader.info)
        return replace(self, trace=replace(self.trace, terms=terms))

    def prepend_past(self, past: ir.Value | None, part: int | None = None) -> _Operand:
        """Prepend cached heads (B, H, P, K), or one part of a cache (2, B, H, P, K)."""
        if past is None:
            return self
        held = self.reader.trace_past(past, self.role, part)
        return replace(self, trace=concat_traces(self.node, [held, self.trace], 2, self.role))

    def projection(self) -> Projection:
        """The projection of the operand.

        Raises:
            MatchFailure: The trace is not a projection by head.
        """
        projection = make_projection(self.reader, self.trace, self.value, self.role)
        if self.value in self.node.outputs:  # the operator projects inside
            return replace(projection, output=None, layout="inside", axes=())
        rank = len(self.reader.shape(self.value))
        layout = "B H T K" if rank == 4 else "B T H*K"
        return replace(projection, output=self.value, layout=layout, axes=tuple(range(rank)))


def attention_operator(node: ir.Node, reader: LayoutReader) -> OperatorMatch:
    """ai.onnx Attention, opset 23 and later.

    Raises:
        MatchFailure: The operator is causal over caches of different lengths.
    """
    q, k, v, mask, past_key, past_value, lengths = _inputs(node, 7)
    if q is None or k is None or v is None:
        raise MatchFailure(f"{describe(node)} lacks queries, keys or values")
    heads = node.attributes.get_int("q_num_heads", 0)
    kv_heads = node.attributes.get_int("kv_num_heads", 0)
    query = _Operand.read(node, reader, q, "query", heads)
    key = _Operand.read(node, reader, k, "key", kv_heads).prepend_past(past_key)
    value = _Operand.read(node, reader, v, "value", kv_heads).prepend_past(past_value)
    steps: list[LogitStep] = []
    if node.attributes.get_int("is_causal", 0):
        if lengths is not None:
            raise MatchFailure(
                f"{describe(node)} is causal from the end of caches of different lengths"
            )
        steps.append(Causal(ends_together=past_key is not None))
    if lengths is not None:
        steps.append(KeyLengths(lengths, 0, -np.inf))
    if mask is not None:
        tensor = reader.info.known.get(mask)
        if tensor is None:
            raise MatchFailure(f"the mask of {describe(node)} has no known type")
        is_bool = tensor.dtype == ir.DataType.BOOL
        steps.append(Mask(mask, -np.inf, keep=True) if is_bool else PositionBias(mask))
    cap = node.attributes.get_float("softcap", 0.0)
    if cap != 0.0:
        steps = [Scaled(1 / cap), Capped(), Scaled(cap), *steps]
    return _fused(node, query, key, value, steps)


def microsoft_attention(node: ir.Node, reader: LayoutReader) -> OperatorMatch:
    """com.microsoft Attention, which includes the projections: weight (D, H*K + H*K + H*V).

    Raises:
        MatchFailure: The weight is not constant, or rotary positions or the mask are unsupported.
    """
    x, weight, bias, mask, past, attention_bias, length = _inputs(node, 7)
    if x is None or not is_constant(weight) or not (bias is None or is_constant(bias)):
        raise MatchFailure(f"{describe(node)} has projections that are not constant")
    if length is not None or node.attributes.get_int("do_rotary", 0):
        raise MatchFailure(f"{describe(node)} rotates its heads, or shares the buffer of its cache")
    columns = reader.shape(weight)[-1]
    sizes = list(node.attributes.get_ints("qkv_hidden_sizes", None) or [columns // 3] * 3)
    if len(sizes) != 3 or sum(sizes) != columns:
        raise MatchFailure(f"{describe(node)} splits {columns} columns into {sizes}")
    heads = node.attributes.get_int("num_heads", 0)
    trace = reader.trace_product(node, x, weight)
    biases = None if bias is None else constant_array(bias)
    operands: list[_Operand] = []
    ends = np.cumsum([0, *sizes])
    for role, start, stop in zip(("query", "key", "value"), ends[:-1], ends[1:], strict=True):
        operand = _Operand(node, reader, role, node.outputs[0], trace)
        operand = operand.map(lambda array, start=start, stop=stop: array[..., start:stop])
        operand = operand.split_heads(heads)
        operands.append(operand.add_bias(None if biases is None else biases[start:stop]))
    query, key, value = operands
    steps = _microsoft_steps(node, reader, mask, attention_bias)
    return _fused(node, query, key.prepend_past(past, 0), value.prepend_past(past, 1), steps)


def multi_head_attention(node: ir.Node, reader: LayoutReader) -> OperatorMatch:
    """com.microsoft MultiHeadAttention, with operands (B, T, H*K), (B, H, T, K) or packed.

    Raises:
        MatchFailure: The cache buffer is shared, or the mask is unsupported.
    """
    q, k, v, bias, mask, attention_bias, past_key, past_value, length = _inputs(node, 9)
    if q is None or length is not None:
        raise MatchFailure(f"{describe(node)} lacks queries, or shares the buffer of its cache")
    heads = node.attributes.get_int("num_heads", 0)
    if k is None:  # (B, S, H, 3, K)
        query, key, value = (_packed(node, reader, q, r, i) for i, r in enumerate(ROLES))
    else:
        query = _Operand.read(node, reader, q, "query", heads)
        if v is None:  # (B, T, H, 2, K)
            key, value = (_packed(node, reader, k, r, i) for i, r in enumerate(ROLES[1:]))
        else:
            key = _Operand.read(node, reader, k, "key", heads)
            value = _Operand.read(node, reader, v, "value", heads)
    if bias is not None:
        if not is_constant(bias):
            raise MatchFailure(f"{describe(node)} adds a bias that is not constant")
        array = constant_array(bias)
        width = query.trace.shape[1] * query.trace.shape[3]
        query = query.add_bias(array[:width])
        if k is None or len(reader.shape(k)) != 4:  # operands (B, H, T, K) include the bias
            key = key.add_bias(array[width : 2 * width])
            value = value.add_bias(array[2 * width :])
    sources = {part.trace.source and part.trace.source.tokens for part in (query, key)}
    if node.attributes.get_int("unidirectional", 0) and len(sources) > 1:
        raise MatchFailure(f"{describe(node)} is causal over the keys of another input")
    key = key.prepend_past(past_key)
    value = value.prepend_past(past_value)
    return _fused(node, query, key, value, _microsoft_steps(node, reader, mask, attention_bias))


def group_query_attention(node: ir.Node, reader: LayoutReader) -> OperatorMatch:
    """com.microsoft GroupQueryAttention: causal, cached, optionally rotary.

    The match holds for sequences of equal length (``seqlens_k``).

    Raises:
        MatchFailure: Local windows, sinks, smooth softmax and quantized caches are unsupported.
    """
    q, k, v, past_key, past_value, lengths, total, cos, sin, positions, attention_bias, sink = (
        _inputs(node, 12)
    )
    if q is None or lengths is None or total is None:
        raise MatchFailure(f"{describe(node)} lacks queries or the lengths of its sequences")
    for reason, is_so in (
        ("smooths its softmax", node.attributes.get_int("smooth_softmax", 0) == 1),
        ("sees a local window", node.attributes.get_int("local_window_size", -1) > 0),
        ("has attention sinks", sink is not None),
        ("quantizes its cache", node.attributes.get_string("k_quant_type", "NONE") != "NONE"),
    ):
        if is_so:
            raise MatchFailure(f"{describe(node)} {reason}, which is not supported")
    heads = node.attributes.get_int("num_heads", 0)
    groups = node.attributes.get_int("kv_num_heads", 0)
    if k is None or v is None:  # one (B, S, (H + 2 G) K)
        count = heads + 2 * groups
        packed_operands = [_Operand.read(node, reader, q, role, count) for role in ROLES]
        query = packed_operands[0].map(lambda array: array[:, :heads])
        key = packed_operands[1].map(lambda array: array[:, heads : heads + groups])
        value = packed_operands[2].map(lambda array: array[:, heads + groups :])
    else:
        query = _Operand.read(node, reader, q, "query", heads)
        key = _Operand.read(node, reader, k, "key", groups)
        value = _Operand.read(node, reader, v, "value", groups)
    if node.attributes.get_int("do_rotary", 0):
        if cos is None or sin is None:
            raise MatchFailure(f"{describe(node)} lacks the angles of its rotary positions")
        if positions is None:  # the lengths count the keys before the last token
            angles = [PositionFactor(table, lengths, is_last_position=True) for table in (cos, sin)]
        else:
            angles = [PositionFactor(table, positions) for table in (cos, sin)]
        query = query.rotate(*angles)
        key = key.rotate(*angles)
    key = key.prepend_past(past_key)
    value = value.prepend_past(past_value)
    cap = node.attributes.get_float("softcap", 0.0)
    steps: list[LogitStep] = [] if cap == 0.0 else [Scaled(1 / cap), Capped(), Scaled(cap)]
    steps.append(FullLengths(lengths, total))
    if node.attributes.get_int("causal", 1):
        steps.append(Causal(ends_together=True))
    if attention_bias is not None:
        steps.append(PositionBias(attention_bias))
    return _fused(node, query, key, value, steps)


ROLES = ("query", "key", "value")


def _inputs(node: ir.Node, count: int) -> list[ir.Value | None]:
    """The first ``count`` inputs of a node; None for an omitted input."""
    return [*node.inputs, *[None] * count][:count]


def _packed(node: ir.Node, reader: LayoutReader, value: ir.Value, role: str, part: int) -> _Operand:
    """One part of a packed operand (B, T, H, parts, K)."""
    trace = reader.trace(value, role)
    if len(trace.shape) != 5:
        raise MatchFailure(f"{describe(node)} packs its {role} as {trace.shape}")
    operand = _Operand(node, reader, role, value, trace)
    return operand.map(lambda a: np.moveaxis(a[:, :, :, part], 2, 1))


def _fused(
    node: ir.Node, query: _Operand, key: _Operand, value: _Operand, steps: list[LogitStep]
) -> OperatorMatch:
    """The match of an operator with these operands; the default scale is 1 / sqrt(K)."""
    q = query.projection()
    scale = node.attributes.get_float("scale", 0.0) or float(q.head_size) ** -0.5
    return OperatorMatch(
        q, key.projection(), value.projection(), scale, tuple(steps), node.outputs[0]
    )


def _microsoft_steps(
    node: ir.Node, reader: LayoutReader, mask: ir.Value | None, attention_bias: ir.Value | None
) -> list[LogitStep]:
    """The mask by keys or by lengths, the causal mask, and an additive bias."""
    steps: list[LogitStep] = []
    fill = node.attributes.get_float("mask_filter_value", -10000.0)
    if node.attributes.get_int("unidirectional", 0):
        steps.append(Causal(ends_together=True))
    if mask is not None:
        shape = reader.shape(mask)
        if len(shape) in (2, 3):
            steps.append(KeyMask(mask, fill, 1 if len(shape) == 2 else 0))
        elif len(shape) == 1 and not is_constant(mask):
            steps.append(KeyLengths(mask, 0, fill))
        else:
            raise MatchFailure(f"{describe(node)} has a mask of shape {shape}")
    if attention_bias is not None:
        steps.append(PositionBias(attention_bias))
    return steps


FUSED_OPERATORS = operators(
    "Attention MultiHeadAttention GroupQueryAttention PackedAttention PackedMultiHeadAttention"
    " DecoderMaskedMultiHeadAttention DecoderMaskedSelfAttention DecoderAttention PagedAttention"
    " SparseAttention LongformerAttention QAttention QOrderedAttention QOrderedLongformerAttention"
    " LinearAttention"
)
"""Operators that contain a whole attention, in any domain."""

OPERATORS: Mapping[tuple[str, str], Callable[[ir.Node, LayoutReader], OperatorMatch]] = {
    ("", "Attention"): attention_operator,
    (MICROSOFT, "Attention"): microsoft_attention,
    (MICROSOFT, "MultiHeadAttention"): multi_head_attention,
    (MICROSOFT, "GroupQueryAttention"): group_query_attention,
}
