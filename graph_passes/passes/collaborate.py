"""Collaborate: query and key projections of all heads become shared ones and a mixing matrix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import (
    AttentionBlock,
    Capped,
    Floor,
    LogitStep,
    Mask,
    PositionBias,
    Weighted,
)
from graph_passes.emit.attention import emit_heads
from graph_passes.emit.caches import cache_of, heads_apart, why_not_cached
from graph_passes.emit.collaborative import cache_width, dense_logits, most_read, sparse_logits
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses, share_constants
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.sparse import sparse_factors
from graph_passes.matching.find import find_attention
from graph_passes.matching.layout import only_consumer
from graph_passes.passes.invariants import check, interface

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

    Dense mixing multiplies all shared dimensions in every head; sparse mixing only those for which
    m_h is not zero, as ordinary multi-head attention (see ``scores``). Both compute the same.
    The scale s is the graph's own, never one derived from R; the key bias is constant over the keys
    and is dropped; mask, softmax, values and output are not touched. Exact at R = H*K, lossy below.
    Refused (``CannotRewrite``) where ``why_not`` gives a reason.

    Where keys are cached, past (B, H, P, K) an input and present (B, H, P+T, K) an output of the
    graph, and only if ``caches``, the cache holds what all heads share:

    After:  present = [past; y [W~K, v^T]]  (B, 1, P+T, R+H), and from there as above

    Input and output keep their names, types, batch and length; the cached values are not touched.
    The H content logits are left out where there are none. A cache of the original model means
    nothing to the new one.

    Attributes:
        factors: W~Q, W~K, M and v for each block to rewrite, by the block's name (see ``factor``).
            Layers with the same weights go on sharing them.
        caches: Rewrite cached keys too, which changes inputs and outputs of the graph.
        mixing: Cached keys have dense mixing only.
    """

    factors: Mapping[str, CollaborativeFactors]
    caches: bool = False
    mixing: Literal["dense", "sparse"] = "dense"

    def requires(self, model: ir.Model) -> None:
        blocks = {block.name: block for block in find_attention(model)[0]}
        for name in self.factors:
            if (block := blocks.get(name)) is None:
                reason = "no attention has this name"
            elif not (reason := why_not(block, caches=self.caches)) and block.k.past is not None:
                if block.graph is not model.graph:
                    reason = "its cached keys stay inside the body of a node"
                elif self.mixing == "sparse":
                    reason = "what it caches is shared by all heads: only dense mixing reads that"
            if reason:
                raise CannotRewrite(f"{name}: {reason}", "leave this layer out with --layers")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before = interface(model)
        widths: dict[str, int] = {}
        uses = Counter(id(factors.key) for factors in self.factors.values())
        for block in find_attention(model)[0]:
            if block.name in self.factors:
                factors, cache = self.factors[block.name], cache_of(block.k)
                if cache is not None:
                    held = (cache.past[0], cache.present)
                    widths |= {value.name or "": cache_width(factors) for value in held}
                make = Inserter(block.graph, block.product, f"{block.name}/collaborative")
                if self.mixing == "sparse":
                    shared = uses[id(factors.key)] > 1
                    logits = sparse_logits(make, block, factors, shared=shared)
                else:
                    logits = dense_logits(make, block, factors, cache)
                _install(make, block, logits)
        remove_unused(model)
        share_constants(model, since=before.initializers)
        check(before.with_caches(widths), model, after="Collaborate")
        return ir.passes.PassResult(model, modified=bool(self.factors))


def why_not(block: AttentionBlock, *, caches: bool = False) -> str:
    """Why a block cannot be given collaborative heads, in one sentence; empty where it can.

    Args:
        caches: Cached keys may be rewritten too.
    """
    if not block.q.num_heads:
        return "all its heads take the probabilities of another layer"
    if block.is_collaborative or block.is_sparse:
        return "its heads are collaborative already"
    if block.position == "rope":
        return "rotary positions stand between the projections and the scores"
    if block.q.norm is not None or block.k.norm is not None:
        return "q/k norm stands between the projections and the scores"
    if block.k.weight is None:
        return "its keys are handed in by the caller: no projection in this graph makes them"
    if block.k.past is not None and not caches:
        return "its cached keys are an input of the graph, made by the original projection"
    if any(isinstance(step, PositionBias) and step.entangled for step in block.steps):
        return "its position bias is computed from its own queries or keys"
    if any(isinstance(step, Capped | Weighted) for step in block.steps):
        return "its logits are capped or weighted before the softmax, so the key bias counts"
    if block.k.num_distinct_heads != block.q.num_heads:
        return "its key heads are grouped: they share their projections already"
    if any(_fill(step) > WEAK_FILL for step in block.steps):
        return "its mask fills in scores that softmax does not ignore, so the key bias counts"
    if not (block.q.by_sequence and block.k.by_sequence):
        return "its tokens are not laid out as (batch, sequence, size)"
    if block.k.past is not None and (reason := why_not_cached(block)):
        return reason
    if block.logits is None:
        return INSIDE_OPERATOR
    if block.logits_axes != (0, 1, 2) and len(block.logits_axes or ()) != 4:
        return "its scores are laid out in an order that is not followed"
    if block.probabilities is None:
        return "its probabilities are nowhere laid out as (batch, heads, queries, keys)"
    if not _only_softmax_reads(block.logits):
        return "its scores are read by more than the softmax, which alone ignores the key bias"
    return ""


def _fill(step: LogitStep) -> float:
    """What a step sets masked scores to, which must not matter beside the others."""
    match step:
        case Mask():
            return step.fill
        case Floor():
            return step.low
        case _:
            return -np.inf


def _only_softmax_reads(logits: ir.Value) -> bool:
    node = only_consumer(logits)
    while node is not None and node.op_type != "Softmax":
        node = only_consumer(node.outputs[0])
    return node is not None


def factor(
    block: AttentionBlock,
    rank: int,
    *,
    head_size: int | None = None,
    moments: TokenMoments | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Decompose the heads of a block into R shared dimensions.

    Args:
        block: Any block that ``why_not`` has nothing against.
        rank: R, from 1 to H*K (exact there).
        head_size: For sparse mixing, the dimensions that a head reads on average, from 1 to K. No
            head reads so many that it would outgrow K, or what the average needs.
        moments: Of the tokens the block sees; without them the weights alone are approximated.
        progress: See ``cp.collaborative_factors``.

    Raises:
        InvalidArgument: R is out of range.
    """
    exact = block.q.num_heads * block.head_size
    if not 1 <= rank <= exact:
        raise InvalidArgument(
            f"{block.name}: a shared dimension of {rank}: expected 1 to {exact} "
            f"({block.q.num_heads} heads x {block.head_size})",
            f"choose R from 1 to {exact}; {exact} is exact",
        )
    q, k, bias = block.q.heads(), block.k.heads(), block.q.offset
    if head_size is None:
        return collaborative_factors(
            q, k, rank, query_bias=bias, moments=moments, progress=progress
        )
    return sparse_factors(
        q, k, rank, head_size, most=most_read(head_size, block.head_size), query_bias=bias,
        moments=moments, progress=progress,
    )  # fmt: skip


def _install(make: Inserter, block: AttentionBlock, logits: ir.Value) -> None:
    """Put new logits (B, H, S, T) into the place of a block's own."""
    _unpack_values(block)
    assert block.logits is not None
    replace_uses(block.logits, _laid_out(make, logits, block))


def _laid_out(make: Inserter, logits: ir.Value, block: AttentionBlock) -> ir.Value:
    """Logits (B, H, S, T) as the graph lays them out."""
    axes = block.logits_axes
    assert axes is not None
    if len(axes) == 4:
        back = [int(axis) for axis in np.argsort(axes)]
        in_order = axes == (0, 1, 2, 3)
        return logits if in_order else make.op("Transpose", [logits], "laid_out", perm=back)
    ends = [make.constant(np.array([n], np.int64), name) for n, name in ((2, "from"), (4, "to"))]
    lengths = make.op("Slice", [make.op("Shape", [logits], "shape"), *ends], "lengths")  # S T
    rows = make.constant(np.array([-1], np.int64), "rows")
    return make.op(
        "Reshape", [logits, make.op("Concat", [rows, lengths], "rows_of", axis=0)], "folded"
    )


def _unpack_values(block: AttentionBlock) -> None:
    """Where one product makes queries, keys and values, the values get a product of their own.

    Where values are cached, it makes the new ones.
    """
    v = block.v
    packed = not {*v.nodes}.isdisjoint((*block.q.nodes, *block.k.nodes))
    if not packed or not v.by_sequence or v.output is None or v.layout != "B H T K":
        return
    if v.past is None:
        # Before the first that may read them: Shape nodes come before the scores.
        make = Inserter(block.graph, v.nodes[-1], f"{block.name}/value")
        replace_uses(v.output, emit_heads(make, v, v.scale))
    elif (cache := cache_of(v)) is not None and heads_apart(v):
        make = Inserter(block.graph, cache.join, f"{block.name}/value")
        cache.join.replace_input_with(1, emit_heads(make, v, 1.0))
