"""Criteria that choose the heads to remove."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from attnserve.calibration.elimination import elimination_order
from attnserve.calibration.importance import leave_one_out, leave_one_out_total
from attnserve.calibration.voting import voting_to_stay
from attnserve.choices import Importance
from attnserve.context import RunContext
from attnserve.planning.head_files import Masks
from attnserve.planning.head_selection import masks_by_loss, masks_by_score
from attnserve.runtime.session import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.context import GraphContext
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import decompose_fused

__all__ = ["CRITERIA", "PruningInput"]

WEIGHING_ROWS = 16
"""The number of texts on which layers are compared; sums over heads need few."""


@dataclass(frozen=True, eq=False)
class PruningInput:
    """What a criterion is given.

    Attributes:
        blocks: The layers of ``model`` whose heads may be removed.
        batches: Calibration data.
        share: The share of all heads to remove.
    """

    model: ir.Model
    blocks: Sequence[AttentionBlock]
    batches: Sequence[Batch]
    share: float
    context: RunContext


def by_energy(given: PruningInput) -> Masks:
    """Remove heads whose output the other heads reproduce best."""
    eliminated = elimination_order(given.model, given.blocks, given.batches, context=given.context)
    orders = {name: (e.order.tolist(), e.losses) for name, e in eliminated.items()}
    effects = leave_one_out_total(
        given.model, given.blocks, given.batches, most_rows=WEIGHING_ROWS, context=given.context
    )
    return masks_by_loss(orders, given.share, effects)


def by_leave_one_out(given: PruningInput) -> Masks:
    """Remove heads without which the model's output changes least."""
    scores = leave_one_out(given.model, given.blocks, given.batches, context=given.context)
    return masks_by_score(scores, given.share)


def by_voting(given: PruningInput) -> Masks:
    """Keep one head for each group of similar heads (Voting-to-Stay, arXiv 2305.14380)."""
    decomposed, names = given.model.clone(), [block.name for block in given.blocks]
    with GraphContext.of(decomposed) as graph:
        decompose_fused(graph, names)
    plain = [
        block
        for block in find_attention(decomposed)[0]
        if block.name in names and block.probability_values and block.graph is decomposed.graph
    ]
    groups = {b.name: max(1, b.num_heads - round(given.share * b.num_heads)) for b in plain}
    votes = voting_to_stay(decomposed, plain, given.batches, groups=groups, context=given.context)
    return {name: [int(x) for x in vote.mask] for name, vote in votes.items()}


CRITERIA: Mapping[Importance, Callable[[PruningInput], Masks]] = {
    "energy": by_energy,
    "loo": by_leave_one_out,
    "voting": by_voting,
}
"""The criteria by the value of ``importance``."""
