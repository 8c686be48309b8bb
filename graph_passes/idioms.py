"""How exporters write attention: one small named function an idiom.

Three lists are tried in order, and the first function that answers has read the node:

    LOGIT_IDIOMS         what stands between the scores and the softmax (from the softmax upwards)
    PROBABILITY_IDIOMS   what stands between the softmax and the context (downwards)
    OPERATORS            operators that hold a whole attention

A new idiom is one function here and one line in its list (see CONTRIBUTING.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.attention import (
    Causal,
    LogitStep,
    Mask,
    PositionBias,
    constant_array,
    is_constant,
)
from graph_passes.shapes import Facts
from graph_passes.trace import Unread, say

__all__ = ["FUSED", "LOGIT_IDIOMS", "OPERATORS", "PROBABILITY_IDIOMS", "Fused", "LogitReading"]


Step = LogitStep | float | None
"""A mask or bias, a factor of the scale, or nothing."""


@dataclass(frozen=True, eq=False)
class LogitReading:
    """One node between scores and softmax: where the logits come from, and what it did to them."""

    candidates: tuple[ir.Value, ...]
    step: Callable[[ir.Value], Step]


def _always(step: Step) -> Callable[[ir.Value], Step]:
    return lambda _: step


def _number(value: ir.Value | None, facts: Facts) -> float | None:
    """What a constant holds, if that is one number (however often)."""
    constant = facts.constant(value)
    if constant is None or constant.size == 0 or (constant != constant.flat[0]).any():
        return None
    return float(constant.flat[0])


def scaled_logits(node: ir.Node, facts: Facts) -> LogitReading | None:
    """logits * c, logits / c, c * logits."""
    if node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    for logits, factor in ((a, b), (b, a)):
        number = _number(factor, facts)
        if logits is None or number is None or (node.op_type == "Div" and logits is b):
            continue
        if number == 0.0 or not np.isfinite(number):
            return None
        scale = number if node.op_type == "Mul" else 1.0 / number
        return LogitReading((logits,), _always(scale))
    return None


def biased_logits(node: ir.Node, facts: Facts) -> LogitReading | None:
    """logits + mask, in either order."""
    if node.op_type != "Add" or None in node.inputs:
        return None
    a, b = node.inputs
    assert a is not None and b is not None
    return LogitReading((a, b), lambda logits: PositionBias(b if logits is a else a))


def selected_logits(node: ir.Node, facts: Facts) -> LogitReading | None:
    """Where(allowed, logits, -inf) or Where(forbidden, -inf, logits)."""
    if node.op_type != "Where":
        return None
    condition, when_true, when_false = node.inputs
    for logits, other, keep in ((when_true, when_false, True), (when_false, when_true, False)):
        fill = _number(other, facts)
        if logits is None or condition is None or fill is None:
            continue
        mask = Mask(condition, fill, keep)
        return LogitReading((logits,), _always(mask))
    return None


def cast_logits(node: ir.Node, facts: Facts) -> LogitReading | None:
    """Cast and Identity change nothing that the certificate would not see."""
    if node.op_type not in ("Cast", "Identity") or node.inputs[0] is None:
        return None
    return LogitReading((node.inputs[0],), _always(None))


LOGIT_IDIOMS = (scaled_logits, biased_logits, selected_logits, cast_logits)


def safe_softmax(probabilities: ir.Value) -> tuple[ir.Node, ...]:
    """Where(IsNaN(p), 0, p): rows that are masked throughout become zeros (PyTorch's sdpa)."""
    for where, index in probabilities.uses():
        if where.op_type != "Where" or index != 2 or where.inputs[0] is None:
            continue
        is_nan = where.inputs[0].producer()
        if is_nan is None or is_nan.op_type != "IsNaN" or is_nan.inputs[0] is not probabilities:
            continue
        if is_constant(where.inputs[1]) and not constant_array(where.inputs[1]).any():
            return (is_nan, where)
    return ()


def forwarded(probabilities: ir.Value) -> tuple[ir.Node, ...]:
    """Dropout at inference, Cast and Identity hand the probabilities on."""
    for node, index in probabilities.uses():
        if index == 0 and node.op_type in ("Dropout", "Cast", "Identity"):
            return (node,)
    return ()


PROBABILITY_IDIOMS = (safe_softmax, forwarded)


@dataclass(frozen=True, eq=False)
class Fused:
    """A fused operator's operands: (B, T, H*K), or (B, H, T, K) where ``num_heads`` is 0."""

    q: ir.Value
    k: ir.Value
    v: ir.Value
    num_heads: int
    num_kv_heads: int
    scale: float
    steps: tuple[LogitStep, ...]
    context: ir.Value


def attention_operator(node: ir.Node, facts: Facts) -> Fused:
    """ai.onnx Attention, opset 23 and later.

    Raises:
        Unread: It caches keys, caps its logits or returns its scores.
    """
    inputs = [*node.inputs, *[None] * (7 - len(node.inputs))]
    q, k, v, mask, past_key, past_value, lengths = inputs[:7]
    if q is None or k is None or v is None:
        raise Unread(f"{say(node)} lacks queries, keys or values")
    if past_key is not None or past_value is not None or lengths is not None:
        raise Unread(f"{say(node)} reads cached keys, which are inputs of the graph")
    if node.attributes.get_float("softcap", 0.0) != 0.0:
        raise Unread(f"{say(node)} caps its logits (softcap), so the key bias cannot be dropped")
    if any(value.uses() or value.is_graph_output() for value in node.outputs[1:]):
        raise Unread(f"{say(node)} returns its keys, values or scores")
    q_shape, k_shape = facts.shape(q), facts.shape(k)
    if q_shape is None or k_shape is None:
        raise Unread(f"the shapes of the operands of {say(node)} could not be inferred")
    if len(q_shape) not in (3, 4):
        raise Unread(f"{say(node)} has operands of shape {q_shape}")
    heads = node.attributes.get_int("q_num_heads", 0) or q_shape[1]
    kv_heads = node.attributes.get_int("kv_num_heads", 0) or k_shape[1]
    width = q_shape[-1] if len(q_shape) == 4 else q_shape[-1] // heads
    steps: list[LogitStep] = []
    if node.attributes.get_int("is_causal", 0):
        steps.append(Causal())
    if mask is not None:
        fact = facts.known.get(mask)
        if fact is None:
            raise Unread(f"the mask of {say(node)} has no known type")
        is_bool = fact.dtype == ir.DataType.BOOL
        steps.append(Mask(mask, -np.inf, keep=True) if is_bool else PositionBias(mask))
    scale = node.attributes.get_float("scale", 0.0) or float(width) ** -0.5
    split = len(q_shape) == 3
    return Fused(
        q,
        k,
        v,
        num_heads=heads if split else 0,
        num_kv_heads=kv_heads if split else 0,
        scale=scale,
        steps=tuple(steps),
        context=node.outputs[0],
    )


FUSED = frozenset({"Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention",
                   "PackedMultiHeadAttention", "DecoderMaskedMultiHeadAttention",
                   "DecoderMaskedSelfAttention", "PagedAttention", "SparseAttention",
                   "LongformerAttention", "QAttention", "QOrderedAttention"})  # fmt: skip
"""Operators that hold a whole attention, in any domain: those not in OPERATORS are misses."""

OPERATORS: Mapping[tuple[str, str], Callable[[ir.Node, Facts], Fused]] = {
    ("", "Attention"): attention_operator,
}
