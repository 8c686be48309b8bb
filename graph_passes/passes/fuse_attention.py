"""FuseAttention: write attention as one operator of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, get_args

import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Floor,
    Mask,
    Scaled,
    Weighted,
)
from graph_passes.emit.attention import emission_refusal
from graph_passes.emit.fused_attention import (
    LOW,
    OPSETS,
    FusedOperator,
    emit_fused_blocks,
    is_plain,
)
from graph_passes.emit.head_terms import TOKEN_LAYOUT
from graph_passes.errors import Refusal
from graph_passes.passes.base import AttentionPass, AttentionTargets, small_shapes
from graph_passes.passes.conditions import (
    WEAK_FILL,
    no_output_projection_refusal,
    quantized_refusal,
    rotary_or_norm_refusal,
)
from graph_passes.passes.invariants import Interface

__all__ = ["IDIOMS", "FuseAttention", "fusion_refusal"]

IDIOMS: Mapping[FusedOperator, str] = {
    "attention": "microsoft_attention",
    "multi_head": "multi_head_attention",
    "merged": "multi_head_attention",
    "onnx": "attention_operator",
}
"""The function of ``matching.operators`` that matches each operator."""


class FuseAttention(AttentionPass[FusedOperator]):
    """Write attention as one operator of ONNX Runtime, which is faster than its parts.

    Before: out = softmax(steps(s q k^T)) v W_O + b_O, in as many nodes as the exporter wrote
    After:  out = Attention(x, [W_Q W_K W_V], [b_Q b_K b_V], bias = m) W_O + b_O
        or  out = MultiHeadAttention(x W_Q, y W_K, y W_V, [b_Q b_K b_V], bias = m) W_O + b_O
        or  the same of Split(x [W_Q W_K W_V])
        or  out = ai.onnx Attention(x W_Q + b_Q, y W_K + b_K, y W_V + b_V, mask = m) W_O + b_O

    with m = max(steps(0), LOW), (B or 1, H or 1, S, T), shared by layers with equal masks. Exact
    for each query with a visible key. A query without one attends to all keys, evenly in single
    precision (ai.onnx Attention on CUDA: to none); the original graph computes zeros, NaN, or the
    softmax of its finite mask value. The scale s does not change, except in com.microsoft
    Attention, which has 1 / sqrt(K), and its W_Q contains the rest. Rotary embeddings and q/k norm
    are computed before ai.onnx Attention or MultiHeadAttention. Grouped key/value heads stay
    grouped in ai.onnx Attention, and are repeated for MultiHeadAttention. Sparse heads that share
    dimensions are refused: the operator would compute H*K' columns instead of R. Products with
    quantized weights do not change, so that operators that contain the projections are refused.
    Blocks that are this operator already do not change. The model imports com.microsoft if needed;
    its operators support bfloat16 on a GPU only.

    Attributes:
        targets: The operator for each block to rewrite.
    """

    name: ClassVar[str] = "fuse_attention"
    order: ClassVar[int] = 100

    @classmethod
    def changes(cls, block: AttentionBlock, params: FusedOperator) -> bool:
        return block.idiom != IDIOMS[params]

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: FusedOperator | None, analyses: Analyses
    ) -> Refusal | None:
        opsets = analyses.model.opset_imports
        shapes = small_shapes(analyses)
        operators: Sequence[FusedOperator] = (params,) if params else get_args(FusedOperator)
        refusals = [fusion_refusal(block, operator, shapes, opsets) for operator in operators]
        return None if None in refusals else refusals[0]

    def expected_interface(self, before: Interface, analyses: Analyses) -> Interface:
        operators = {operator for _, operator in self._changed(analyses)}
        return before.with_opset(MICROSOFT, 1) if operators - {"onnx"} else before

    def rewrite(self, targets: AttentionTargets[FusedOperator], analyses: Analyses) -> None:
        blocks = [block for block, _ in targets]
        emit_fused_blocks(analyses.model, self.targets, blocks, small_shapes(analyses))


def fusion_refusal(
    block: AttentionBlock,
    operator: FusedOperator,
    info: ShapeInfo | None = None,
    opsets: Mapping[str, int] | None = None,
) -> Refusal | None:
    """Return why a block cannot become this operator; None if it can, or is it already.

    Args:
        info: Shapes, if known: masks may have too many axes.
        opsets: Opset versions of the model, if known: ai.onnx Attention needs opset 23.
    """
    if block.idiom == IDIOMS[operator]:
        return None
    if opsets is not None and (opset := opsets.get("", 0)) < OPSETS.get(operator, 0):
        return Refusal(
            "opset", f"the operator needs opset {OPSETS[operator]}, and the model has {opset}"
        )
    projects_inside = operator in ("attention", "merged")
    if refusal := (
        no_output_projection_refusal(block)
        or (rotary_or_norm_refusal(block) if projects_inside else None)
        or emission_refusal(block, info)
    ):
        return refusal
    parts = (block.q, block.k, block.v)
    if block.required_output.sequence_first or not all(part.by_sequence for part in parts):
        return TOKEN_LAYOUT
    if projects_inside and not is_plain(block):
        return Refusal(
            "grouped",
            "its key/value heads are grouped; the operator requires one for each query head",
        )
    if any(isinstance(step, Scaled | Capped | Floor | Weighted) for step in block.steps):
        return Refusal(
            "capped", "its logits are scaled, capped or weighted after the scores, not only masked"
        )
    if any(isinstance(step, Mask) and step.fill > WEAK_FILL for step in block.steps):
        return Refusal(
            "weak_mask",
            "its mask value is not ignored by softmax, and the operator adds masks",
        )
    dtypes = {part.dtype for part in parts}
    if len(dtypes) > 1 or not dtypes <= LOW.keys():
        names = ", ".join(sorted(dtype.name.lower() for dtype in dtypes))
        return Refusal(
            "dtype",
            f"its projections hold {names}, and the operator takes one of float and half types",
        )
    if projects_inside and any(part.is_quantized for part in parts):
        return quantized_refusal(block)
    if projects_inside and not block.q.input is block.k.input is block.v.input:
        return Refusal(
            "tokens_differ", "its queries, keys and values are not projected from the same tokens"
        )
    return _shared_refusal(block)


def _shared_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why inner values with other readers cannot be inside an operator; None if they can."""
    if _escapes(block, [block.product]):
        return Refusal(
            "probabilities_shared",
            "its scores or probabilities are read by another layer, or are an output",
        )
    parts = [part for part in (block.q, block.k, block.v) if not part.is_quantized]
    if _escapes(block, [node for part in parts for node in part.nodes]):
        return Refusal(
            "projections_shared",
            "its queries, keys or values are read elsewhere, so they would be computed twice",
        )
    return None


def _escapes(block: AttentionBlock, nodes: Iterable[ir.Node]) -> bool:
    """Whether a path from these nodes to an output of the graph avoids the block's output."""
    pending = [value for node in nodes for value in node.outputs]
    seen = {block.required_output.output}
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_graph_output():
            return True
        readers = [user for user, _ in value.uses() if user.op_type != "Shape"]
        pending += [output for user in readers for output in user.outputs]
    return False
