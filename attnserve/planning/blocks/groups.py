"""Blocks with the same last weight, which a search rewrites in the same way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import origin
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.attention import emission_refusal
from graph_passes.errors import Refusal
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import small_shapes
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import neurons_refusal

__all__ = ["Block", "BlockGroup", "group_blocks"]

Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]

NOT_ALLOWED = Refusal("not_allowed", "neurons are kept unless `allow` names ffn")


@dataclass(frozen=True, eq=False)
class BlockGroup:
    """Blocks with the same last weight, which are rewritten alike; usually one block.

    Attributes:
        count: The number of heads or neurons.
        refusal: Why nothing can be removed; None if something can.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    count: int
    refusal: Refusal | None = None

    @property
    def noun(self) -> str:
        """The unit of the count: "heads" or "neurons"."""
        return "heads" if self.kind == "attention" else "neurons"

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """Identifies the group in files and mappings."""
        return f"{self.kind} {self.names[0]}"


def group_blocks(
    model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool
) -> list[BlockGroup]:
    """Group certified attention blocks and feed-forward blocks by their last weight.

    Blocks in the body of another node are left out, because a session cannot observe them.

    Args:
        ffn: Allow the removal of neurons.
    """
    blocks_by_weight: dict[object, list[Block]] = {}
    analyses = Analyses.of(model)
    for block in attention:
        if block.graph is model.graph and block.output is not None:
            blocks_by_weight.setdefault(origin(block.output.weight.value), []).append(block)
    for block in find_feed_forward(model):
        if block.graph is model.graph:
            blocks_by_weight.setdefault(origin(block.second.weight), []).append(block)
    names = {block.name for block in attention}
    groups: list[BlockGroup] = []
    for blocks in blocks_by_weight.values():
        first = blocks[0]
        if isinstance(first, FeedForwardBlock):
            if any(block.name in names for block in blocks):
                continue  # an attention block has the same name
            refusals = [neurons_refusal(b) for b in blocks if isinstance(b, FeedForwardBlock)]
            refusals += [] if ffn else [NOT_ALLOWED]
            kind, count = "feed_forward", first.num_neurons
        else:
            refusals = [_refusal(b, analyses) for b in blocks if isinstance(b, AttentionBlock)]
            kind, count = "attention", first.num_heads
        refusal = next((reason for reason in refusals if reason is not None), None)
        groups.append(BlockGroup(kind, tuple(blocks), count, refusal))
    return groups


def _refusal(block: AttentionBlock, analyses: Analyses) -> Refusal | None:
    """Why no heads of a block can be removed; None if they can."""
    return PruneHeads.refusal(block, None, analyses) or emission_refusal(
        block, small_shapes(analyses)
    )
