"""Turn a request for rewrites into a plan; measurements on data select what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnserve.checks.certify import require_attention
from attnserve.job import Job
from attnserve.literals import MixingKind
from attnserve.options import Rewrites
from attnserve.planning.blocks.configurations import MULTIPLE
from attnserve.planning.blocks.groups import group_blocks
from attnserve.planning.blocks.loss_curves import loss_curves
from attnserve.planning.heads.files import Masks, MutableEdges
from attnserve.planning.plans.plan import Plan
from attnserve.planning.request.heads import (
    Replacements,
    choose_edges,
    choose_masks,
    choose_skipped,
    removed_layers,
)
from attnserve.planning.request.neurons import choose_neurons
from attnserve.planning.request.request import Request
from attnserve.planning.request.sharing import allowed_mixings
from graph_passes.analyses import Analyses
from graph_passes.errors import Refusal
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import RewritePass
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention, renumbered
from graph_passes.passes.skip_attention import SkipAttention
from graph_passes.passes.strip_cache import StripCache

__all__ = ["PlannedRequest", "plan_request"]

SAME_NAME = Refusal("same_name", "an attention block has the same name")


@dataclass(frozen=True, eq=False)
class PlannedRequest:
    """Plans of the float32 model, and warnings about requested rewrites that do not apply.

    Attributes:
        plans: Plans of the same rewrites by kind of mixing; one plan if the request determines the
            mixing. Own dimensions have several plans, in ascending size.
    """

    plans: Mapping[MixingKind, Sequence[Plan]]
    warnings: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        """The plan with the first mixing."""
        return next(iter(self.plans.values()))[0]


def plan_request(rewrites: Rewrites, job: Job) -> PlannedRequest:
    """Turn a request into a plan of the float32 model; its conversion follows from the result.

    Raises:
        InvalidModel: The model has no attention.
        InvalidArgument: The request does not fit the model, or requires calibration data.
        CannotRewrite: A named layer cannot be rewritten, or no layer can.
    """
    if rewrites.are_given:
        require_attention(job.matches)
    request = Request(rewrites, job, Analyses.of(job.original))
    rewrites = request.rewrites
    skipped = choose_skipped(request)
    masks = choose_masks(request, skipped)
    edges = choose_edges(request, skipped, masks)
    others: list[RewritePass] = [
        *([StripCache()] if rewrites.strip_cache else []),
        SkipAttention(skipped),
        PruneHeads(masks),
        ReuseAttention(renumbered(edges, masks)),
        PruneNeurons(_neurons(request)),
    ]
    own_heads = _own_heads(request, skipped, masks, edges)
    plans: dict[MixingKind, list[Plan]] = {}
    for kind, mixings in allowed_mixings(request, own_heads):
        plan = Plan.merged([*others, Collaborate(mixings)])
        plans.setdefault(kind, []).append(plan)
    planned = PlannedRequest(plans, tuple(request.warnings))
    if rewrites.are_given and not planned.plan.passes:
        raise request.nothing("rewritten as requested")
    return planned


def _own_heads(
    request: Request, skipped: Replacements, masks: Masks, edges: MutableEdges
) -> dict[str, int]:
    """The number of heads that compute their own probabilities, by layer that keeps any head."""
    removed = removed_layers(skipped, masks)
    counts: dict[str, int] = {}
    for block in request.blocks:
        if block.name not in removed:
            mask = masks.get(block.name, [1] * block.num_heads)
            reused = edges.get(block.name, {})
            computed = (
                head for head in block.own_heads.tolist() if mask[head] and head not in reused
            )
            counts[block.name] = sum(1 for _ in computed)
    return counts


def _neurons(request: Request) -> Masks:
    """1 for each neuron that stays, by feed-forward."""
    share = request.rewrites.ffn
    if share is None:
        return {}
    batches = request.batches("`ffn` measures the loss of removed neurons", "leave `ffn` out")
    if request.rewrites.layers is not None:
        request.warnings.append(
            "`layers` names attention blocks: `ffn` removes neurons of any layer"
        )
    all_groups = group_blocks(request.model, request.blocks, ffn=True)
    groups = [group for group in all_groups if group.kind == "feed_forward"]
    refusals = {name: group.refusal for group in groups for name in group.names}
    for block in request.analyses.get(find_feed_forward):
        if refusal := request.body_refusal(block) or refusals.get(block.name, SAME_NAME):
            request.warnings.append(f"{block.name} keeps all its neurons: {refusal}")
    groups = [group for group in groups if group.refusal is None]
    if not groups:
        request.warnings.append(
            "`ffn` removes nothing: no feed-forward has neurons that can be removed"
        )
        return {}
    losses = loss_curves(
        request.model, groups, batches, new_meter=request.job.meter, context=request.job.context
    )
    masks = choose_neurons(groups, losses.curves, share)
    if not masks:
        total = sum(group.count for group in groups)
        request.warnings.append(
            f"`ffn` {share} rounds to 0 of {total} neurons: the number of remaining neurons of a "
            f"layer is a multiple of {MULTIPLE}"
        )
    return masks
