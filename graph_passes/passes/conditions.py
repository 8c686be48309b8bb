"""The refusals that several rewrites share."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.analysis.operator_sets import REWRITE_FIRST
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import Refusal
from graph_passes.passes.decompose_attention import decomposition_refusal

__all__ = [
    "QK_NORM",
    "WEAK_FILL",
    "no_output_projection_refusal",
    "no_probabilities_refusal",
    "quantized_refusal",
    "returned_refusal",
    "reused_refusal",
    "rotary_or_norm_refusal",
    "scores_refusal",
]

WEAK_FILL = -1e3
"""Masked scores must be below this, so that softmax ignores them whatever the key bias is."""

QK_NORM = Refusal("qk_norm", "q/k norm is applied between projections and scores")


def quantized_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the weights of a block cannot be rewritten; None if no weight is quantized."""
    for name, part in (("queries", block.q), ("keys", block.k), ("values", block.v)):
        if part.is_quantized:
            what = f"its {name} are projected by quantized weights"
            return Refusal("quantized", f"{what}: {REWRITE_FIRST}")
    if block.output is not None and block.output.is_quantized:
        what = "the weights of its output projection are quantized"
        return Refusal("quantized", f"{what}: {REWRITE_FIRST}")
    return None


def returned_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why shapes inside a block cannot change; None if none of them is a graph output."""
    values = [v for part in (block.k, block.v) for node in part.nodes for v in node.outputs]
    if block.softmax is None:
        values += block.product.outputs[1:]
    if any(value.is_graph_output() for value in values):
        return Refusal(
            "returned",
            "its keys and values are outputs of the graph (a cache), whose shapes would change",
        )
    probabilities = (block.probabilities, block.own_probabilities)
    if any(value is not None and value.is_graph_output() for value in probabilities):
        return Refusal("returned", "its probabilities are an output of the graph")
    return None


def no_output_projection_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the output projection of a block cannot be rewritten; None if it can."""
    if block.output is None:
        return Refusal(
            "no_output_projection", "its context is not the direct input of an output projection"
        )
    return None


def rotary_or_norm_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the projections of a block cannot be multiplied together; None if they can."""
    parts = (block.q, block.k, block.v)
    if any(part.rotary_terms for part in parts):
        return Refusal(
            "rotary", "rotary positions are applied between the projections and the scores"
        )
    if any(part.norm is not None for part in parts):
        return QK_NORM
    return None


def no_probabilities_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the probabilities of a block cannot be read; None if they can."""
    if block.own_probabilities is None:
        return Refusal(
            "probability_layout",
            "no value holds its probabilities as (batch, heads, queries, keys)",
        )
    return None


def reused_refusal(block: AttentionBlock, blocks: Sequence[AttentionBlock]) -> Refusal | None:
    """Return why reused probabilities of a block cannot change; None if no block reuses them."""
    owners: dict[ir.Value | None, str] = {}
    for other in blocks:
        for value in (other.probabilities, other.own_probabilities):
            owners.setdefault(value, other.name)
    for other in blocks:
        for value in (reused.value for reused in other.reused):
            node = value.producer()  # a Reshape, if heads lie in the batch axis
            source = None if node is None else node.inputs[0]
            if block.name == owners.get(value, source and owners.get(source)):
                return Refusal("reused", f"{other.name} takes its probabilities")
    return None


def scores_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the scores of a block cannot be replaced; None if they can."""
    if block.softmax is None:
        return decomposition_refusal(block)
    if block.softmax.axes != (0, 1, 2) and len(block.softmax.axes) != 4:
        return Refusal("score_layout", "its scores are laid out in an order that is not followed")
    return no_probabilities_refusal(block)
