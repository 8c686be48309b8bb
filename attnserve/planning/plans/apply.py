"""Apply a plan to a model: the one loop over its steps."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from attnserve.job import Job
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.plans.steps import PlanStep
from graph_passes.errors import InvalidArgument

__all__ = ["apply_plan", "apply_steps"]


def apply_plan(plan: Plan, job: Job, model: ir.Model, *, fit: bool = True, key: str = "") -> State:
    """Apply all steps of a plan to a float32 model, which is changed.

    Args:
        fit, key: See ``State``.

    Returns:
        The state after the last step.

    Raises:
        InvalidArgument: A step needs data, or this machine cannot apply it.
        AttnserveError: A step does not fit the model or the data.
    """
    return apply_steps(plan.steps, State.start(plan, job, model, fit=fit, key=key))


def apply_steps(steps: Iterable[PlanStep], state: State) -> State:
    """Apply some steps of a plan to its state, which is changed and returned.

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
