"""Group layers that share weights; they lose the same heads and keep sharing."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graph_passes.analysis.constants import origin
from graph_passes.blocks import AttentionBlock

__all__ = ["sharing_groups"]


def sharing_groups(blocks: Sequence[AttentionBlock]) -> list[list[AttentionBlock]]:
    """Blocks in groups that share a weight, directly or through a third block, in order."""
    groups: list[tuple[set[ir.Value], list[AttentionBlock]]] = []
    for block in blocks:
        weights, members = _weights(block), [block]
        separate: list[tuple[set[ir.Value], list[AttentionBlock]]] = []
        for group in groups:
            if weights.isdisjoint(group[0]):
                separate.append(group)
            else:
                weights, members = weights | group[0], [*group[1], *members]
        groups = [*separate, (weights, members)]
    order = {block.name: place for place, block in enumerate(blocks)}
    in_order = [sorted(members, key=lambda block: order[block.name]) for _, members in groups]
    return sorted(in_order, key=lambda members: order[members[0].name])


def _weights(block: AttentionBlock) -> set[ir.Value]:
    parts = (block.q, block.k, block.v, block.output)
    weights = [None if part is None else part.weight for part in parts]
    return {origin(weight.value) for weight in weights if weight is not None}
