"""Apply a plan to a model: the one loop over its steps."""

from __future__ import annotations

from collections.abc import Iterable

from attnserve.models.opset import raise_opset
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.plans.steps import PlanStep
from graph_passes.emit.fused_attention import OPSETS
from graph_passes.errors import InvalidArgument
from graph_passes.passes.fuse_attention import FuseAttention

__all__ = ["apply_plan", "apply_steps"]


def apply_plan(plan: Plan, state: State) -> State:
    """Apply all steps of a plan to a state, which is changed and returned.

    Raises:
        InvalidArgument: A step needs data, or this machine cannot apply it.
        AttnserveError: A step does not fit the model or the data.
    """
    return apply_steps(plan.steps, prepare(plan, state))


def prepare(plan: Plan, state: State) -> State:
    """Set the opset that the plan's operators need, and the precision of its conversion.

    Returns:
        The state that was given.
    """
    operators = plan.targets(FuseAttention).values()
    if needed := max((OPSETS.get(operator, 0) for operator in operators), default=0):
        raise_opset(state.model, needed)
    state.precision, state.float_blocks = plan.precision, plan.float_blocks
    return state


def apply_steps(steps: Iterable[PlanStep], state: State) -> State:
    """Apply steps in order to a state, which is changed and returned.

    Raises:
        InvalidArgument: A step needs data, or this machine cannot apply it.
        AttnserveError: A step does not fit the model or the data.
    """
    with state:
        for step in steps:
            if step.needs_data and state.job.data is None:
                raise InvalidArgument(
                    f"the step {step.name} of the plan needs data",
                    "give `calib`",
                    code="plan.needs_data",
                )
            if (refusal := step.refusal()) is not None:
                raise InvalidArgument(
                    f"{step.name}: {refusal.reason}",
                    "make the plan for this machine",
                    code=f"plan.{refusal.code}",
                )
            step.apply(state)
        state.finish_rewrites()
    return state
