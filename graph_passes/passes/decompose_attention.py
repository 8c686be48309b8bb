"""DecomposeAttention: write a fused attention operator as the same attention in plain operators."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock, Projection
from graph_passes.context import GraphContext
from graph_passes.emit.attention import emit_heads, emit_softmax
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.errors import Refusal
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import AttentionPass, NoParams

__all__ = ["DecomposeAttention", "decompose_fused", "decomposition_refusal"]


class DecomposeAttention(AttentionPass[NoParams]):
    """Write the scores and probabilities inside a fused operator as values of the graph.

    Before: context = Attention(q, k, v, mask).
    After:  context = safe_softmax(masked(scale q k^T)) v, in MatMul, Where, Add and Softmax.

    Exact; rows that are masked throughout stay zero. Projections and splits inside the operator
    become nodes of their own. Heads that several query heads share are repeated by a Gather.

    Attributes:
        targets: The blocks to decompose.
    """

    name: ClassVar[str] = "decompose_attention"

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: NoParams | None, context: GraphContext
    ) -> Refusal | None:
        return decomposition_refusal(block)

    def rewrite(self, block: AttentionBlock, params: NoParams, context: GraphContext) -> None:
        _decompose(block)


def decompose_fused(context: GraphContext, names: Collection[str]) -> None:
    """Decompose those of the named blocks whose scores or probabilities are inside an operator."""
    fused = [
        block.name
        for block in context.get(find_attention)[0]
        if block.name in names
        and (block.logits is None or block.probabilities is None)
        and decomposition_refusal(block) is None
    ]
    if fused:
        DecomposeAttention(fused)(context.model)


def decomposition_refusal(block: AttentionBlock) -> Refusal | None:
    """Why a fused block cannot be decomposed; None if it can."""
    if not block.q.num_heads:
        return Refusal(
            "no_own_heads", "it has no scores: its heads take the probabilities of another layer"
        )
    if block.logits is not None:
        return Refusal("decomposed", "its scores are in the graph already")
    parts = (block.q, block.k, block.v)
    if any(part.past is not None and part.past.value in block.product.inputs for part in parts):
        return Refusal(
            "cached", "its fused operator reads cached keys, which are inputs of the graph"
        )
    apart = all(part.layout == "B H T K" for part in parts)
    if not apart and any(part.rotary_terms or part.norm or not part.by_sequence for part in parts):
        return Refusal("operator_rotary", "the fused operator splits and rotates its heads inside")
    if any(value.uses() or value.is_graph_output() for value in block.product.outputs[1:]):
        return Refusal(
            "operator_outputs", "its fused operator also returns its keys, values or scores"
        )
    return None


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
    nothing = ShapeInfo({}, {}, {})  # masks are laid out as the operator wants them
    probabilities = emit_softmax(make, block, logits, np.arange(block.num_heads), nothing)
    context = make.op("MatMul", [probabilities, v], "context")
    if block.q.layout != "B H T K":  # the operator leaves its heads side by side
        context = make.op("Transpose", [context], "context_by_token", perm=[0, 2, 1, 3])
        merged = make.constant(np.array([0, 0, -1], np.int64), "merged")
        context = make.op("Reshape", [context, merged], "merged_context")
    replace_uses(block.context, context)


def _heads(block: AttentionBlock, part: Projection, name: str, scale: float) -> ir.Value:
    """An operand as (B, H, T, K): as it is, or projected again where the operator splits heads.

    Then ``scale`` stands for that of the projection. Groups share heads as in the operators: each
    key/value head serves as many query heads, one after the other.
    """
    make = Inserter(block.graph, block.product, f"{block.name}/{name}")
    if part.layout != "B H T K":
        return emit_heads(make, part, scale)
    assert part.output is not None
    groups, heads = part.num_distinct_heads, part.num_heads
    if groups == heads:
        return part.output
    spread = make.constant(np.repeat(np.arange(groups), heads // groups), "groups")
    return make.op("Gather", [part.output, spread], "spread", axis=1)
