"""DecomposeAttention: a fused attention operator becomes the same attention in plain operators."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.attention import (
    AttentionBlock,
    Capped,
    Causal,
    Floor,
    FullLengths,
    KeyLengths,
    KeyMask,
    LogitStep,
    Mask,
    PositionBias,
    Projection,
    Scaled,
    Weighted,
)
from graph_passes.edit import Inserter, emit_heads, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite
from graph_passes.find import find_attention
from graph_passes.invariants import check, interface

__all__ = ["DecomposeAttention", "why_not"]


@dataclass(frozen=True)
class DecomposeAttention(ir.passes.InPlacePass):
    """Take the scores out of a fused operator, where a rewrite needs them.

    Before: context = Attention(q, k, v, mask).
    After:  context = safe_softmax(masked(scale q k^T)) v, in MatMul, Where, Add and Softmax.
    Exact; rows that are masked throughout stay zero. Heads that the operator itself projects or
    splits are projected by nodes of their own. Refused (``why_not``) for operators that were not
    read, for caches, and for grouped key/value heads.

    Attributes:
        names: The blocks to decompose.
    """

    names: frozenset[str]

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        blocks = {block.name: block for block in find_attention(model)[0]}
        before = interface(model)
        for name in sorted(self.names):
            if name not in blocks:
                raise CannotRewrite(f"no attention is called {name!r}", "see `attnserve inspect`")
            reason = why_not(blocks[name])
            if reason:
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out with --layers")
            _decompose(blocks[name])
        remove_unused(model)
        check(before, model, after="DecomposeAttention")
        return ir.passes.PassResult(model, modified=bool(self.names))


def why_not(block: AttentionBlock) -> str:
    """Why a fused block cannot be decomposed; empty where it can."""
    if block.logits is not None:
        return "its scores are in the graph already"
    if block.num_kv_heads != block.num_heads:
        return "its key/value heads are grouped"
    parts = (block.q, block.k, block.v)
    if any(part.past is not None and part.past.value in block.product.inputs for part in parts):
        return "its fused operator reads cached keys, which are inputs of the graph"
    apart = all(part.layout == "B H T K" for part in parts)
    if not apart and any(part.turns or part.norm or not part.by_sequence for part in parts):
        return "the fused operator splits and rotates its heads inside"
    if any(value.uses() or value.is_graph_output() for value in block.product.outputs[1:]):
        return "its fused operator also returns its keys, values or scores"
    return ""


def _decompose(block: AttentionBlock) -> None:
    operator = block.product
    make = Inserter(block.graph, operator, block.name)
    dtype = block.q.dtype
    q, k = _heads(block, block.q, "query", 1.0), _heads(block, block.k, "key", 1.0)
    v = _heads(block, block.v, "value", block.v.scale)
    given = [part.scale for part in (block.q, block.k) if part.layout == "B H T K"]
    scale = block.scale / math.prod(given)  # those operands hold theirs already
    factor = make.constant(np.array(scale, dtype=dtype.numpy()), "scale")
    keys = make.op("Transpose", [k], "keys", perm=[0, 1, 3, 2])  # B H K T
    logits = make.op("MatMul", [make.op("Mul", [q, factor], "queries"), keys], "scores")
    for step in block.steps:
        logits = _masked(make, step, logits, dtype)
    softmax = make.op("Softmax", [logits], "softmax", axis=-1)
    probabilities = _safe(make, softmax, dtype) if _can_mask_rows(block) else softmax
    context = make.op("MatMul", [probabilities, v], "context")
    if block.q.layout != "B H T K":  # the operator leaves its heads side by side
        context = make.op("Transpose", [context], "context_by_token", perm=[0, 2, 1, 3])
        merged = make.constant(np.array([0, 0, -1], np.int64), "merged")
        context = make.op("Reshape", [context, merged], "merged_context")
    replace_uses(block.context, context)


def _heads(block: AttentionBlock, part: Projection, name: str, scale: float) -> ir.Value:
    """An operand as (B, H, T, K): as it is, or projected again where the operator splits heads.

    Then ``scale`` stands for that of the projection.
    """
    if part.layout == "B H T K":
        assert part.output is not None
        return part.output
    make = Inserter(block.graph, block.product, f"{block.name}/{name}")
    return emit_heads(make, part, scale)


def _masked(make: Inserter, step: LogitStep, logits: ir.Value, dtype: ir.DataType) -> ir.Value:
    """The logits after one step of an operator."""
    match step:
        case PositionBias():
            return make.op("Add", [logits, step.value], "biased")
        case Mask():
            allowed, fill = step.value, step.fill
        case KeyMask():
            allowed = make.op("Cast", [step.value], "allowed", to=ir.DataType.BOOL.value)
            shape = make.op("Shape", [step.value], "mask_shape")
            ends = [make.constant(np.array([n], np.int64), name) for n, name in ENDS]
            batch = make.op("Slice", [shape, *ends[:2]], "rows_of_mask")
            keys = make.op("Slice", [shape, *ends[1:]], "keys_of_mask")
            one = make.constant(np.array([1] * (1 + step.queries), np.int64), "ones")
            spread = make.op("Concat", [batch, one, keys], "spread", axis=0)
            allowed = make.op("Reshape", [allowed, spread], "key_mask")  # B 1 (1 or S) T
            fill = step.fill
        case KeyLengths():
            allowed, fill = _before_end(make, step, logits), step.fill
        case Causal():
            allowed, fill = _causal(make, logits, ends_together=step.ends_together), -np.inf
        case FullLengths():
            return logits
        case Scaled() | Floor():
            op, number = ("Mul", step.factor) if isinstance(step, Scaled) else ("Max", step.low)
            constant = make.constant(np.array(number, dtype.numpy()), "number")
            return make.op(op, [logits, constant], "scaled")
        case Capped():
            return make.op("Tanh", [logits], "capped")
        case Weighted():
            return make.op("Mul", [logits, step.value], "weighted")
    zero = make.constant(np.zeros((), dtype.numpy()), "zero")
    low = make.constant(np.array(fill, dtype.numpy()), "masked_logit")
    return make.op("Add", [logits, make.op("Where", [allowed, zero, low], "mask")], "masked")


ENDS = ((0, "from"), (1, "to"), (4, "end"))


def _positions(make: Inserter, logits: ir.Value, axis: int, name: str) -> ir.Value:
    """0, 1, ... along an axis of the logits."""
    ends = [make.constant(np.array(n, np.int64), label) for n, label in ((0, "first"), (1, "step"))]
    return make.op("Range", [ends[0], _length(make, logits, axis), ends[1]], name)


def _length(make: Inserter, logits: ir.Value, axis: int) -> ir.Value:
    index = make.constant(np.array(axis, np.int64), "axis")
    return make.op("Gather", [make.op("Shape", [logits], "shape"), index], "length")


def _before_end(make: Inserter, step: KeyLengths, logits: ir.Value) -> ir.Value:
    """allowed[b, t] = t < lengths[b] + extra."""
    keys = _positions(make, logits, 3, "key_positions")
    lengths = make.op("Cast", [step.value], "lengths", to=ir.DataType.INT64.value)
    extra = make.constant(np.array(step.extra, np.int64), "extra")
    rows = make.constant(np.array([-1, 1, 1, 1], np.int64), "rows")
    ends = make.op("Reshape", [make.op("Add", [lengths, extra], "ends"), rows], "end_of_row")
    return make.op("Less", [keys, ends], "before_end")


def _causal(make: Inserter, logits: ir.Value, *, ends_together: bool) -> ir.Value:
    """allowed[s, t] = t <= s, or t <= s + T - S."""
    queries = _positions(make, logits, 2, "query_positions")
    if ends_together:
        more = make.op("Sub", [_length(make, logits, 3), _length(make, logits, 2)], "more_keys")
        queries = make.op("Add", [queries, more], "query_ends")
    ends = make.op("Add", [queries, make.constant(np.array(1, np.int64), "one")], "ends")
    column = make.constant(np.array([-1, 1], np.int64), "column")
    ends = make.op("Reshape", [ends, column], "end_of_query")  # S 1
    return make.op("Less", [_positions(make, logits, 3, "key_positions"), ends], "causal")


def _can_mask_rows(block: AttentionBlock) -> bool:
    return any(not isinstance(step, Causal) for step in block.steps)


def _safe(make: Inserter, softmax: ir.Value, dtype: ir.DataType) -> ir.Value:
    zero = make.constant(np.zeros((), dtype.numpy()), "zero")
    return make.op("Where", [make.op("IsNaN", [softmax], "is_nan"), zero, softmax], "probabilities")
