"""Apply a plan to a model: the one loop over its steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import onnx_ir as ir

from attnserve.fusion import raise_opset_for
from attnserve.job import Job
from attnserve.planning.plans.plan import Plan, PlanStep, State
from attnserve.planning.plans.rewriting import ApplyReport
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import AttentionPass

if TYPE_CHECKING:
    from attnserve.recovery.labels import Labels

__all__ = ["apply_plan", "apply_steps", "start"]


def start(
    plan: Plan,
    job: Job,
    model: ir.Model,
    *,
    fit: bool = True,
    key: str = "",
    labels: Labels | None = None,
    applied: ApplyReport | None = None,
) -> State:
    """The state before the first step of a plan, with the opset that its operators need.

    Args:
        model: The model to change, in float32.
        fit, key, labels: Attributes of the ``State``.
        applied: Earlier rewrites of the model, if there are any.

    Raises:
        CannotRewrite: The plan names an attention block that is not certified.
    """
    _require_certified(plan, job)
    raise_opset_for(plan.passes, model)
    return State(
        plan, job, model, fit=fit, key=key, labels=labels, applied=applied or ApplyReport()
    )


def _require_certified(plan: Plan, job: Job) -> None:
    """Refuse blocks that are found but not certified, which only an edited plan names."""
    named = plan.targets(AttentionPass)
    if not named or named.keys() <= {block.name for block in job.matches.blocks}:
        return
    for block in find_attention(job.original).blocks:
        unmatched = job.matches.failure(block)
        if block.name in named and unmatched is not None:
            raise CannotRewrite(
                f"the plan names a block that is not certified: {unmatched.reason[:300]}",
                f"remove {block.name} from the plan; `attnserve inspect` lists certified blocks",
                code="rewrite.not_certified",
            )


def apply_plan(plan: Plan, job: Job, model: ir.Model, *, fit: bool = True, key: str = "") -> State:
    """Apply all steps of a plan to a float32 model, which is changed.

    Args:
        fit, key: Attributes of the ``State``.

    Returns:
        The state after the last step.

    Raises:
        InvalidArgument: A step needs data, or this machine cannot apply it.
        AttnserveError: A step does not fit the model or the data.
    """
    return apply_steps(plan.steps, start(plan, job, model, fit=fit, key=key))


def apply_steps(steps: Iterable[PlanStep], state: State) -> State:
    """Apply some steps of a plan to its state, which is changed and returned.

    Raises:
        InvalidArgument: A step needs data, or this machine cannot apply it.
        AttnserveError: A step does not fit the model or the data.
    """
    for step in steps:
        if step.needs_data and state.job.data is None:
            raise InvalidArgument(
                f"the step {step.name} of the plan needs data",
                "give `calib`",
                code="plan.needs_data",
            )
        if (refusal := step.refusal()) is not None:
            fix = "make the plan for this machine"
            raise refusal.error(step.name, fix, kind=InvalidArgument, area="plan")
        if step.needs_finished_rewrites:
            state.finish_rewrites()
        step.apply(state)
    state.finish_rewrites()
    return state
