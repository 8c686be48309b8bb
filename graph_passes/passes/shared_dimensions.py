"""Factor the queries and keys of all heads into dimensions that the heads share."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import AttentionBlock, Capped, Floor, LogitStep, Mask, Weighted
from graph_passes.emit.attention import KEY_TERM, entangled_bias_refusal
from graph_passes.emit.caches import cache_refusal
from graph_passes.emit.collaborative import max_read_size
from graph_passes.emit.head_terms import TOKEN_LAYOUT
from graph_passes.errors import Refusal
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.sparse import sparse_factors
from graph_passes.matching.output_projection import only_consumer
from graph_passes.passes.conditions import (
    WEAK_FILL,
    quantized_refusal,
    rotary_or_norm_refusal,
    scores_refusal,
)

__all__ = ["placeholder_factors", "shared_factors", "sharing_refusal"]


def sharing_refusal(block: AttentionBlock, *, caches: bool = False) -> Refusal | None:
    """Return why the queries and keys of a block cannot be factored; None if they can.

    Args:
        caches: Cached keys may be rewritten too.
    """
    if refusal := quantized_refusal(block):
        return refusal
    if not block.q.num_heads:
        return Refusal("no_own_heads", "all its heads reuse the probabilities of another layer")
    if block.is_collaborative or block.is_sparse:
        return Refusal("collaborative", "its heads are collaborative already")
    if block.content is not None:
        return KEY_TERM
    if refusal := rotary_or_norm_refusal(block):
        return refusal
    if not block.k.has_weight:
        return Refusal(
            "external_keys",
            "its keys are inputs of the graph: no projection in the graph computes them",
        )
    if block.k.is_cached and not caches:
        return Refusal(
            "cached", "its cached keys are an input of the graph, made by the original projection"
        )
    if refusal := entangled_bias_refusal(block):
        return refusal
    if any(isinstance(step, Capped | Weighted) for step in block.steps):
        return Refusal(
            "capped", "its logits are capped or weighted: the key bias cannot be dropped"
        )
    if block.k.num_distinct_heads != block.q.num_heads:
        return Refusal("grouped", "its key heads are grouped: they share their projections already")
    if any(_fill(step) > WEAK_FILL for step in block.steps):
        return Refusal(
            "weak_mask",
            "its mask value is not ignored by softmax: the key bias cannot be dropped",
        )
    if not (block.q.by_sequence and block.k.by_sequence):
        return TOKEN_LAYOUT
    if refusal := cache_refusal(block) or scores_refusal(block):
        return refusal
    if block.softmax is not None and not _only_softmax_reads(block.softmax.logits):
        return Refusal(
            "scores_shared",
            "its scores have other readers than the softmax: the key bias cannot be dropped",
        )
    return None


def _fill(step: LogitStep) -> float:
    """The number that a step sets masked scores to; -inf if it masks none."""
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


def shared_factors(
    block: AttentionBlock, rank: int, head_size: int | None, moments: TokenMoments | None = None
) -> CollaborativeFactors:
    """Decompose the heads of a block into R shared dimensions, from 1 to H*K (exact).

    Args:
        head_size: The mean number of dimensions that a head reads, from 1 to K; None for all R. No
            head reads more than K, or than the padded size of the mean allows.
        moments: Token moments of the input of the block.
    """
    q, k, bias = block.q.heads(), block.k.heads(), block.q.offset
    if head_size is None:
        return collaborative_factors(q, k, rank, query_bias=bias, moments=moments)
    limit = max_read_size(head_size, block.head_size)
    return sparse_factors(
        q, k, rank, head_size, max_head_size=limit, query_bias=bias, moments=moments
    )


def placeholder_factors(
    block: AttentionBlock, rank: int, head_size: int | None
) -> CollaborativeFactors:
    """Factors of the right sizes for a model that is only timed."""
    heads = len(block.own_heads)
    size = min(head_size or rank, rank)
    mixing = np.zeros((heads, rank))
    columns = (np.arange(heads)[:, None] * size + np.arange(size)) % rank  # H K'
    np.put_along_axis(mixing, columns, 1.0, axis=1)
    query, key = (np.full((part.width, rank), 1e-2) for part in (block.q, block.k))
    return CollaborativeFactors(query, key, mixing, np.full((heads, len(key)), 1e-2), 1.0, 0)
