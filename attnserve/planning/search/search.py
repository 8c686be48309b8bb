"""Search for the fastest plan that keeps the requested quality, by measurement.

The goal is a share of the quality (``keep``) or a speed-up (``target_speedup``).
``docs/concepts/search.md`` explains the stages, and this package lists their types.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_attention
from attnserve.checks.quality import allowed_loss
from attnserve.context import AUTO
from attnserve.fusion import newest_opset
from attnserve.job import Job
from attnserve.models.output_kinds import require_measurable
from attnserve.models.search_record import PrecisionPoint
from attnserve.options import Goal
from attnserve.planning.blocks.groups import group_blocks
from attnserve.planning.blocks.loss_curves import BlockLosses, loss_curves
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.plan_file import PlanRecord
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.estimates import changes_to_measure
from attnserve.planning.search.fastest_search import FastestSearch
from attnserve.planning.search.front import Front
from attnserve.planning.search.judge import Judge, ScoredTask
from attnserve.planning.search.least_lossy_search import LeastLossySearch
from attnserve.planning.search.model_latency import ModelLatency
from attnserve.planning.search.precision_choice import compare_precisions, in_search_order
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.search_input import checked_workloads, goal_record, search_key
from attnserve.planning.search.verdict import result_of
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.convert import convert
from graph_passes.errors import CheckFailed

__all__ = ["run_search"]


Found = tuple[PlanRecord, State]


def run_search(goal: Goal, job: Job) -> Found:
    """Search for a plan, in the precision of the job; ``attnserve.plan`` describes the goal.

    With ``AUTO``, precisions are searched in the order of ``in_search_order``, until no other one
    is likely to be faster. The goal decides on the rows to choose alone.

    Returns:
        The record, and the model after all steps of the plan.

    Raises:
        CheckFailed: The goal cannot be reached.
        CannotRewrite: The precisions cannot be compared.
        InvalidArgument, InvalidModel, InvariantBroken: See ``_search``.
    """
    if job.target.precision != AUTO:
        return _search(goal, job)
    points = compare_precisions(goal, job)
    best: Found | None = None
    best_speed, missed = 0.0, None
    for point in in_search_order(points, goal):
        if best is not None and not _may_be_better(point, goal, best_speed):
            continue
        try:
            found = _search(goal, job.with_precision(point.precision).labeled(point.precision))
        except CheckFailed as error:
            missed = error
            continue
        record, state = found
        speed = point.speedup.value  # the least of a model without blocks in float32
        if state.plan.float_blocks or not record.gain:
            speed = record.speedups.served.value if record.speedups is not None else 1.0
        if best is None or speed > best_speed:
            best, best_speed = found, speed
    if best is None:
        assert missed is not None
        raise missed
    record, state = best
    return record.model_copy(update={"precisions": tuple(points)}), state


def _may_be_better(point: PrecisionPoint, goal: Goal, speed: float) -> bool:
    """Whether a precision meets the goal in all blocks, and is faster than a result."""
    if goal.keep is None:
        return False
    return point.loss <= allowed_loss(goal.keep) and point.speedup.value > speed


def _search(goal: Goal, job: Job) -> Found:
    """Search for a plan in one precision.

    Times, losses and the measurements of candidates are stored in the user's cache folder until the
    search ends, so that an interrupted search continues.

    Args:
        job: Its weights are finite.

    Returns:
        The record, and the model after all steps of the plan.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidArgument: The model does not run at the requested shape, or the goal does not fit it.
        InvalidModel: No output has a quality that can be measured.
        InvariantBroken: A pass has a defect.
    """
    if goal.measure != "score":
        require_measurable(job.original)
    checked = checked_workloads(job)
    recorded = goal_record(goal, job)
    precision = job.target.precision
    newest = newest_opset(job.original)
    attention = read_attention(newest, seed=job.context.seed)
    require_attention(attention)
    if precision != "float32":
        # Fails early if the model cannot be converted.
        convert(job.original, precision, job.calibration[:1], to_nearest=True)
    training = None if goal.recover is None else training_of(goal)
    if training is not None:
        untimed = job.on_all_threads().labeled("can be trained")
        training.check(start(Plan(), untimed, job.original))
    task = ScoredTask.of(goal, job)
    key = search_key(recorded, job)
    checkpoint = SearchCheckpoint(key)
    groups = group_blocks(newest, attention.blocks, ffn="ffn" in goal.allow)
    served = ServedTimer(job)
    timed_on = replace(job.context.device, runtime=served.fastest_runtime(precision))
    latency = ModelLatency.time(job, timed_on, checked, newest, groups)
    losses = _estimate_losses(job, newest, latency, checkpoint)
    allowed = None if goal.keep is None else allowed_loss(goal.keep)
    judge = Judge(job, served, timed_on, checked, checkpoint, allowed, task)
    kind = LeastLossySearch if goal.keep is None else FastestSearch
    front_search = kind(recorded, Front.of(latency, losses, precision), judge)
    best = front_search.run()
    if training is None:
        result = result_of(front_search, front_search.verify(best))
    else:
        recovery = RecoverySearch(front_search, training, key)
        result = result_of(front_search, recovery.run(best))
        recovery.remove_checkpoints()
    checkpoint.remove()
    return result


def _estimate_losses(
    job: Job, model: ir.Model, latency: ModelLatency, checkpoint: SearchCheckpoint
) -> BlockLosses:
    """The losses of all configurations, from the checkpoint if it has them."""
    stored = checkpoint.losses(latency.pairs)
    if stored is not None:
        return stored
    changes = {
        group.key: changes_to_measure(group, latency.default_of(group.blocks[0]))
        for group in latency.groups
    }
    losses = loss_curves(
        model, latency.groups, job.calibration, changes, latency.pairs,
        job.target.precision if latency.float_latencies else None,
        new_meter=job.meter, context=replace(job.context.on_all_threads(), seed=0),
    )  # fmt: skip
    checkpoint.put_losses(losses)
    return losses
