"""Head-importance criteria that select the heads to remove."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np
import onnx_ir as ir

from attnserve.calibration.elimination import elimination_order
from attnserve.calibration.importance import leave_one_out, leave_one_out_total
from attnserve.calibration.voting import voting_to_stay
from attnserve.context import RunContext
from attnserve.literals import Importance
from attnserve.planning.heads.files import Masks
from attnserve.planning.heads.selection import Removals, least_costly_masks
from attnserve.runtime.interface import Batch
from graph_passes.analysis.constants import origin
from graph_passes.blocks import AttentionBlock
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import decompose_fused

__all__ = ["CRITERIA", "PruningInput", "observable_blocks", "sharing_groups"]

WEIGHING_ROWS = 16
"""Number of texts for the comparison of layers; sums over heads need few."""


@dataclass(frozen=True, eq=False)
class PruningInput:
    """Input of a criterion.

    Attributes:
        blocks: The layers of ``model`` whose heads may be removed. Those that share weights have
            the same number of heads. Voting needs ``observable_blocks``.
        batches: Calibration data.
        share: The share of all heads to remove.
    """

    model: ir.Model
    blocks: Sequence[AttentionBlock]
    batches: Sequence[Batch]
    share: float
    context: RunContext

    @cached_property
    def groups(self) -> list[list[AttentionBlock]]:
        """Groups of layers that share weights; they lose the same heads and count once."""
        return sharing_groups(self.blocks)

    def of_groups(self, masks: Masks) -> Masks:
        """Expand masks of the first layer of each group to all layers."""
        return {
            block.name: masks[group[0].name]
            for group in self.groups
            if group[0].name in masks
            for block in group
        }


def sharing_groups(blocks: Sequence[AttentionBlock]) -> list[list[AttentionBlock]]:
    """Blocks in groups that share a weight, directly or through a third block, in order."""
    groups: list[list[AttentionBlock]] = []
    for block in blocks:
        sharing = [group for group in groups if not _weights(group).isdisjoint(_weights([block]))]
        groups = [group for group in groups if group not in sharing]
        groups.append(sorted(chain(*sharing, [block]), key=blocks.index))
    return sorted(groups, key=lambda group: blocks.index(group[0]))


def _weights(blocks: Sequence[AttentionBlock]) -> set[ir.Value]:
    parts = [part for block in blocks for part in (block.q, block.k, block.v, block.output)]
    weights = [None if part is None else part.weight for part in parts]
    return {origin(weight.value) for weight in weights if weight is not None}


def by_energy(given: PruningInput) -> Masks:
    """Remove heads whose output the other heads reproduce best."""
    eliminated = elimination_order(given.model, given.blocks, given.batches, context=given.context)
    # The effect on the model's output weights the losses of a layer's own output: later layers
    # compensate much of the loss of earlier ones.
    effects = leave_one_out_total(
        given.model, given.blocks, given.batches, most_rows=WEIGHING_ROWS, context=given.context
    )
    removals: dict[str, Removals] = {}
    for group in given.groups:
        added = np.zeros(group[0].num_heads)
        for block in group:
            order, losses = eliminated[block.name].order, eliminated[block.name].losses
            added[order] += effects[block.name] * np.diff(losses)
        name = group[0].name
        order = eliminated[name].order if len(group) == 1 else np.argsort(added, kind="stable")
        removals[name] = Removals(order.tolist(), added[order].tolist())
    return given.of_groups(least_costly_masks(removals, given.share))


def by_leave_one_out(given: PruningInput) -> Masks:
    """Remove heads without which the model's output changes least."""
    scores = leave_one_out(given.model, given.blocks, given.batches, context=given.context)
    removals = {
        group[0].name: Removals.by_score(np.sum([scores[block.name] for block in group], axis=0))
        for group in given.groups
    }
    return given.of_groups(least_costly_masks(removals, given.share))


def observable_blocks(
    model: ir.Model, names: Collection[str]
) -> tuple[ir.Model, list[AttentionBlock]]:
    """A copy of a model in plain operators, and the blocks whose probabilities can be observed.

    Args:
        names: The blocks whose probabilities are needed.
    """
    plain = model.clone()
    decompose_fused(plain, names)
    blocks = [
        block
        for block in find_attention(plain).blocks
        if block.name in names and block.probability_values and block.graph is plain.graph
    ]
    return plain, blocks


def by_voting(given: PruningInput) -> Masks:
    """Keep one head for each group of similar heads (Voting-to-Stay, arXiv 2305.14380)."""
    decomposed, blocks = observable_blocks(given.model, [block.name for block in given.blocks])
    groups = {b.name: max(1, b.num_heads - round(given.share * b.num_heads)) for b in blocks}
    votes = voting_to_stay(decomposed, blocks, given.batches, groups=groups, context=given.context)
    masks: Masks = {}
    for group in given.groups:
        group_votes = [votes[block.name] for block in group]
        first, mask = group[0].name, [int(x) for x in group_votes[0].mask]
        if len(group_votes) > 1:
            total = np.sum([vote.votes for vote in group_votes], axis=0)
            mask = [0] * len(mask)
            for head in np.argsort(-total, kind="stable")[: groups[first]].tolist():
                mask[head] = 1
        masks[first] = mask
    return given.of_groups(masks)


CRITERIA: Mapping[Importance, Callable[[PruningInput], Masks]] = {
    "energy": by_energy,
    "loo": by_leave_one_out,
    "voting": by_voting,
}
"""The criteria by the value of ``importance``."""
