"""Collaborate: query and key projections of all heads become shared ones and a mixing matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.attention import AttentionBlock, Mask, Projection
from graph_passes.cp import CollaborativeFactors, TokenMoments, collaborative_factors
from graph_passes.edit import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.find import REWRITTEN, find_attention
from graph_passes.invariants import check, interface
from graph_passes.trace import only_consumer

__all__ = ["INSIDE_OPERATOR", "Collaborate", "factor", "why_not"]

INSIDE_OPERATOR = "its scores are inside a fused operator: decompose it first"
"""The one reason of ``why_not`` that ``DecomposeAttention`` can take away; told last."""

WEAK_FILL = -1e3
"""What masked scores are set to must be below this, whatever is subtracted from the others."""


@dataclass(frozen=True, eq=False)
class Collaborate(ir.passes.InPlacePass):
    """Share query and key dimensions between heads (eq. 6 and 7 of arXiv 2006.16362).

    Before: logits_h = s (x W_Q^h + b_Q^h)(y W_K^h + b_K^h)^T
    After:  logits_h = s [ (x W~Q) diag(m_h) (y W~K)^T + v_h^T y^T ]

    The scale s is the graph's own, never one derived from R; the key bias is constant over the keys
    and is dropped; mask, softmax, values and output are not touched. Exact at R = H*K, lossy below.
    Refused (``CannotRewrite``) where ``why_not`` gives a reason.

    Attributes:
        factors: W~Q, W~K, M and v for each block to rewrite, by the block's name (see ``factor``).
    """

    factors: Mapping[str, CollaborativeFactors]

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_attention(model)[0]}
        for name in self.factors:
            reason = why_not(blocks[name]) if name in blocks else "no attention has this name"
            if reason:
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out with --layers")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = interface(model)
        for block in find_attention(model)[0]:
            if block.name in self.factors:
                _rewrite(block, self.factors[block.name])
        remove_unused(model)
        check(before, model, after="Collaborate")
        return ir.passes.PassResult(model, modified=bool(self.factors))


def why_not(block: AttentionBlock) -> str:
    """Why a block cannot be given collaborative heads, in one sentence; empty where it can."""
    if block.form != "standard":
        return f"its heads are {block.form} already"
    if block.position == "rope":
        return "rotary positions stand between the projections and the scores"
    if block.k.num_distinct_heads != block.num_heads:
        return "its key heads are grouped: they share their projections already"
    if any(isinstance(step, Mask) and step.fill > WEAK_FILL for step in block.steps):
        return "its mask fills in scores that softmax does not ignore, so the key bias counts"
    if not (block.q.by_sequence and block.k.by_sequence):
        return "its tokens are not laid out as (batch, sequence, size)"
    if block.logits is None:
        return INSIDE_OPERATOR
    if block.q.layout != "B H T K":
        return "its scores keep batch and heads in one axis"
    if not _only_softmax_reads(block.logits):
        return "its scores are read by more than the softmax, which alone ignores the key bias"
    return ""


def _only_softmax_reads(logits: ir.Value) -> bool:
    node = only_consumer(logits)
    while node is not None and node.op_type != "Softmax":
        node = only_consumer(node.outputs[0])
    return node is not None


def factor(
    block: AttentionBlock,
    rank: int,
    *,
    moments: TokenMoments | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Decompose the heads of a block into R shared dimensions.

    Args:
        block: Any block that ``why_not`` has nothing against.
        rank: R, from 1 to H*K (exact there).
        moments: Of the tokens the block sees; without them the weights alone are approximated.
        progress: See ``cp.collaborative_factors``.

    Raises:
        InvalidArgument: R is out of range.
    """
    exact = block.num_heads * block.head_size
    if not 1 <= rank <= exact:
        raise InvalidArgument(
            f"{block.name}: a shared dimension of {rank}: expected 1 to {exact} "
            f"({block.num_heads} heads x {block.head_size})",
            f"choose R from 1 to {exact}; {exact} is exact",
        )
    return collaborative_factors(
        block.q.heads(),
        block.k.heads(),
        rank,
        query_bias=block.q.offset,
        moments=moments,
        progress=progress,
    )


def _rewrite(block: AttentionBlock, factors: CollaborativeFactors) -> None:
    make = Inserter(block.graph, block.product, f"{block.name}{REWRITTEN}".rstrip("/"))
    dtype = (block.q.weight.dtype or ir.DataType.FLOAT).numpy()
    rank, heads = factors.rank, block.num_heads

    def weight(array: np.ndarray, name: str) -> ir.Value:
        return make.constant(array.astype(dtype), name)

    def shaped(value: ir.Value, columns: int, name: str) -> ir.Value:
        shape = make.constant(np.array([0, 1, -1, columns], np.int64), f"{name}_shape")
        return make.op("Reshape", [value, shape], name)  # B 1 T columns

    scale = weight(np.array(block.scale), "scale")
    q = make.op("MatMul", [block.x, weight(factors.query, "query_weight")], "query")  # B S R
    q = shaped(make.op("Mul", [q, scale], "scaled_query"), rank, "query_tokens")
    mixing = weight(factors.mixing[:, None, :], "mixing")  # H 1 R
    q = make.op("Mul", [q, mixing], "mixed_query")  # B H S R
    k = make.op("MatMul", [block.y, weight(factors.key, "key_weight")], "key")  # B T R
    k = make.op("Transpose", [shaped(k, rank, "key_tokens")], "shared_key", perm=[0, 1, 3, 2])
    logits = make.op("MatMul", [q, k], "scores")  # B H S T
    if np.any(factors.content):
        content = make.op(
            "MatMul", [block.y, weight(factors.content.T, "content_weight")], "content"
        )
        content = shaped(
            make.op("Mul", [content, scale], "scaled_content"), heads, "content_tokens"
        )
        content = make.op("Transpose", [content], "content_logits", perm=[0, 3, 1, 2])  # B H 1 T
        logits = make.op("Add", [logits, content], "logits")
    _unpack_values(block)
    assert block.logits is not None
    replace_uses(block.logits, logits)


def _unpack_values(block: AttentionBlock) -> None:
    """Where one product makes queries, keys and values, the values get a product of their own."""
    v = block.v
    if v.nodes[0] not in (block.q.nodes[0], block.k.nodes[0]) or not v.by_sequence:
        return
    make = Inserter(block.graph, block.product, f"{block.name}/value")
    dtype = (v.weight.dtype or ir.DataType.FLOAT).numpy()
    heads, size = v.num_heads, v.head_size
    columns, bias = v.scale * _merged(v), v.scale * v.offset.reshape(-1)
    value = make.op("MatMul", [v.input, make.constant(columns.astype(dtype), "weight")], "product")
    if np.any(bias):
        value = make.op("Add", [value, make.constant(bias.astype(dtype), "bias")], "biased")
    shape = make.constant(np.array([0, 0, heads, size], np.int64), "shape")
    laid_out = make.op("Reshape", [value, shape], "heads")
    replace_uses(v.output, make.op("Transpose", [laid_out], "values", perm=[0, 2, 1, 3]))


def _merged(projection: Projection) -> np.ndarray:
    """The weight as one (D, H*V) matrix, heads in order."""
    heads = projection.heads()  # H D V
    return np.moveaxis(heads, 0, 1).reshape(heads.shape[1], -1)
