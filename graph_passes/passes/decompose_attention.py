"""DecomposeAttention: write a fused attention operator as the same attention in plain operators."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock, Projection
from graph_passes.emit.editing import Inserter, replace_uses
from graph_passes.emit.heads import emit_heads
from graph_passes.emit.probabilities import emit_softmax
from graph_passes.errors import Refusal
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import AttentionPass, AttentionTargets, NoParams, small_shapes

__all__ = ["DecomposeAttention", "decompose_fused", "decomposition_refusal"]


class DecomposeAttention(AttentionPass[NoParams]):
    """Write the scores and probabilities inside a fused operator as values of the graph.

    Before: context = Attention(q, k, v, mask).
    After:  context = safe_softmax(masked(scale q k^T)) v, in MatMul, Where, Add and Softmax.

    Exact; fully masked rows stay zero. Projections and splits inside the operator become nodes.
    Key/value heads that several query heads share are repeated by a Gather.

    Attributes:
        targets: The blocks to decompose.
    """

    name: ClassVar[str] = "decompose_attention"

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: NoParams | None, analyses: Analyses
    ) -> Refusal | None:
        return decomposition_refusal(block)

    def rewrite(self, targets: AttentionTargets[NoParams], analyses: Analyses) -> None:
        info = small_shapes(analyses)
        for block, _ in targets:
            _decompose(block, info)


def decompose_fused(model: ir.Model, names: Collection[str]) -> None:
    """Decompose the named blocks whose scores or probabilities are inside an operator."""
    fused = [
        block.name
        for block in Analyses.of(model).get(find_attention).blocks
        if block.name in names
        and (block.softmax is None or block.probabilities is None)
        and decomposition_refusal(block) is None
    ]
    if fused:
        DecomposeAttention(fused)(model)


def decomposition_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why a fused block cannot be decomposed; None if it can."""
    if not block.q.num_heads:
        return Refusal(
            "no_own_heads", "it has no scores: its heads reuse the probabilities of another layer"
        )
    if block.softmax is not None:
        return Refusal("decomposed", "its scores are in the graph already")
    parts = (block.q, block.k, block.v)
    if any(part.past is not None and part.past.value in block.product.inputs for part in parts):
        return Refusal(
            "cached", "its fused operator reads cached keys, which are inputs of the graph"
        )
    split = all(part.layout == "B H T K" for part in parts)
    if not split and any(part.rotary_terms or part.norm or not part.by_sequence for part in parts):
        return Refusal("operator_rotary", "the fused operator splits and rotates its heads inside")
    if any(value.uses() or value.is_graph_output() for value in block.product.outputs[1:]):
        return Refusal(
            "operator_outputs", "its fused operator also returns its keys, values or scores"
        )
    return None


def _decompose(block: AttentionBlock, info: ShapeInfo) -> None:
    operator = block.product
    make = Inserter(block.graph, operator, block.name)
    q = _heads(block, block.q, "query", 1.0, info)
    k = _heads(block, block.k, "key", 1.0, info)
    v = _heads(block, block.v, "value", block.v.scale, info)
    applied = [part.scale for part in (block.q, block.k) if part.layout == "B H T K"]
    scale = make.constant(block.scale / math.prod(applied), "scale", block.q.dtype)
    keys = make.op("Transpose", [k], "keys", perm=[0, 1, 3, 2])  # B H K T
    logits = make.op("MatMul", [make.op("Mul", [q, scale], "queries"), keys], "scores")
    no_info = ShapeInfo({}, {}, {})  # masks of operators broadcast to (B, H, S, T)
    probabilities = emit_softmax(make, block, logits, np.arange(block.num_heads), no_info)
    context = make.op("MatMul", [probabilities, v], "context")
    if block.q.layout != "B H T K":  # the operator returns (B, S, H*V)
        context = make.op("Transpose", [context], "context_by_token", perm=[0, 2, 1, 3])
        merged = make.integers([0, 0, block.num_heads * block.v_head_size], "merged")
        context = make.op("Reshape", [context, merged], "merged_context")
    replace_uses(block.context, context)


def _heads(
    block: AttentionBlock, part: Projection, name: str, scale: float, info: ShapeInfo
) -> ir.Value:
    """An operand (B, H, T, K): unchanged, or emitted with ``scale`` if the operator splits heads.

    Each key/value head is repeated for the consecutive query heads of its group, if the graph has
    not done so before the operator.
    """
    make = Inserter(block.graph, block.product, f"{block.name}/{name}")
    if part.output is None or part.layout != "B H T K":
        return emit_heads(make, part, scale)
    heads = part.num_heads
    shape = info.shape(part.output)
    groups = part.num_distinct_heads if shape is None else shape[1]
    if groups == heads:
        return part.output
    spread = make.integers(np.repeat(np.arange(groups), heads // groups), "groups")
    return make.op("Gather", [part.output, spread], "spread", axis=1)
