"""Turn a request for rewrites into a plan; measurements on data select what it leaves open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from attnserve.checks.certify import require_attention
from attnserve.job import Job
from attnserve.literals import MixingKind
from attnserve.options import Rewrites
from attnserve.planning.plans.plan import Plan
from attnserve.planning.request.heads import select_heads
from attnserve.planning.request.neurons import choose_neurons
from attnserve.planning.request.request import Request
from attnserve.planning.request.sharing import allowed_mixings
from graph_passes.analyses import Analyses
from graph_passes.errors import CannotRewrite
from graph_passes.passes.base import RewritePass
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention, renumbered
from graph_passes.passes.skip_attention import SkipAttention
from graph_passes.passes.strip_cache import StripCache

__all__ = ["PlannedRequest", "plan_request"]


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
    heads = select_heads(request)
    others: list[RewritePass] = [
        *([StripCache()] if rewrites.strip_cache else []),
        SkipAttention(heads.skipped),
        PruneHeads(heads.masks),
        ReuseAttention(renumbered(heads.edges, heads.masks)),
        PruneNeurons(choose_neurons(request)),
    ]
    plans: dict[MixingKind, list[Plan]] = {
        kind: [Plan.merged([*others, Collaborate(mixings)]) for mixings in alternatives]
        for kind, alternatives in allowed_mixings(request, heads.own_heads).items()
    }
    planned = PlannedRequest(plans, tuple(request.warnings))
    if rewrites.are_given and not planned.plan.passes:
        raise CannotRewrite(
            f"none of the {len(request.blocks)} attention blocks can be rewritten as requested"
            + (f" ({request.warnings[0]})" if request.warnings else ""),
            "`attnserve inspect` lists the reasons by block",
            code="request.nothing",
        )
    return planned
