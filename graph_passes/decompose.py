"""DecomposeAttention: a fused attention operator becomes the same attention in plain operators."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.attention import AttentionBlock, Causal, LogitStep, Mask, PositionBias
from graph_passes.edit import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite
from graph_passes.find import find_attention
from graph_passes.invariants import check, interface

__all__ = ["DecomposeAttention", "why_not"]


@dataclass(frozen=True)
class DecomposeAttention(ir.passes.InPlacePass):
    """Take the scores out of a fused operator, where a rewrite needs them.

    Before: context = Attention(q, k, v, mask).
    After:  context = safe_softmax(masked(scale q k^T)) v, in MatMul, Where, Add and Softmax.
    Exact; rows that are masked throughout stay zero. Refused for operators that were not read, for
    operands that are not (B, H, T, K), and for grouped key/value heads.

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
    if block.q.layout != "B H T K":
        return "the fused operator splits its heads inside"
    if block.num_kv_heads != block.num_heads:
        return "its key/value heads are grouped"
    return ""


def _decompose(block: AttentionBlock) -> None:
    operator = block.product
    make = Inserter(block.graph, operator, block.name)
    dtype = block.q.weight.dtype or ir.DataType.FLOAT
    scale = block.scale / (block.q.scale * block.k.scale)
    q, k, v = operator.inputs[:3]
    factor = make.constant(np.array(scale, dtype=dtype.numpy()), "scale")
    keys = make.op("Transpose", [k], "keys", perm=[0, 1, 3, 2])  # B H K T
    logits = make.op("MatMul", [make.op("Mul", [q, factor], "queries"), keys], "scores")
    for step in block.steps:
        logits = _masked(make, step, logits, dtype)
    softmax = make.op("Softmax", [logits], "softmax", axis=-1)
    probabilities = _safe(make, softmax, dtype) if _can_mask_rows(block) else softmax
    context = make.op("MatMul", [probabilities, v], "context")
    replace_uses(block.context, context)


def _masked(make: Inserter, step: LogitStep, logits: ir.Value, dtype: ir.DataType) -> ir.Value:
    if isinstance(step, PositionBias):
        return make.op("Add", [logits, step.value], "biased")
    allowed = step.value if isinstance(step, Mask) else _causal(make, logits)
    zero = make.constant(np.zeros((), dtype.numpy()), "zero")
    low = make.constant(np.array(-np.inf, dtype.numpy()), "minus_infinity")
    return make.op("Add", [logits, make.op("Where", [allowed, zero, low], "mask")], "masked")


def _causal(make: Inserter, logits: ir.Value) -> ir.Value:
    """allowed[s, t] = t <= s."""
    ends = [make.constant(np.array(n, np.int64), name) for n, name in ((0, "first"), (1, "step"))]
    shape = make.op("Shape", [logits], "shape")

    def positions(axis: int, name: str) -> ir.Value:
        length = make.op(
            "Gather", [shape, make.constant(np.array(axis, np.int64), "axis")], "length"
        )
        return make.op("Range", [ends[0], length, ends[1]], name)

    column = make.constant(np.array([-1, 1], np.int64), "column")
    queries = make.op("Reshape", [positions(2, "query_positions"), column], "rows")  # S 1
    return make.op("GreaterOrEqual", [queries, positions(3, "key_positions")], "causal")


def _can_mask_rows(block: AttentionBlock) -> bool:
    return any(not isinstance(step, Causal) for step in block.steps)


def _safe(make: Inserter, softmax: ir.Value, dtype: ir.DataType) -> ir.Value:
    zero = make.constant(np.zeros((), dtype.numpy()), "zero")
    return make.op("Where", [make.op("IsNaN", [softmax], "is_nan"), zero, softmax], "probabilities")
