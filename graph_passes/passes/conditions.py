"""Conditions that several rewrites share; each returns why it does not hold, or None."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.blocks import AttentionBlock
from graph_passes.errors import Refusal

__all__ = ["caller_reads", "no_output_projection", "reused_elsewhere"]


def caller_reads(block: AttentionBlock) -> Refusal | None:
    """Whether an output of the graph is a value that the rewrite would remove or change."""
    made = [value for part in (block.k, block.v) for node in part.nodes for value in node.outputs]
    if block.logits is None:
        made += block.product.outputs[1:]
    if any(value.is_graph_output() for value in made):
        return Refusal(
            "returned",
            "its keys and values are outputs of the graph (a cache), whose shapes would change",
        )
    if block.probabilities is not None and block.probabilities.is_graph_output():
        return Refusal("returned", "its probabilities are an output of the graph")
    return None


def no_output_projection(block: AttentionBlock) -> Refusal | None:
    """Whether the context is read by anything but an output projection."""
    if block.output is None:
        return Refusal(
            "no_output_projection", "its context does not go straight to an output projection"
        )
    return None


def reused_elsewhere(block: AttentionBlock, blocks: Sequence[AttentionBlock]) -> Refusal | None:
    """Whether another block reuses the probabilities of this one, and would go on reading them."""
    owners: dict[ir.Value | None, str] = {}
    for each in blocks:
        for value in (each.probabilities, each.own_probabilities):
            owners.setdefault(value, each.name)
    for other in blocks:
        for value in (reused.value for reused in other.reused):
            node = value.producer()  # a Reshape, if heads lie in the batch axis
            source = None if node is None else node.inputs[0]
            if block.name == owners.get(value, source and owners.get(source)):
                return Refusal("reused", f"{other.name} takes its probabilities")
    return None
