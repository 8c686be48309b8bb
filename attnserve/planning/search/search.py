"""Search for the fastest plan that keeps the requested quality, by measurement.

The goal is a share of the quality (``keep``) or a speed-up (``target_speedup``).
``docs/concepts/search.md`` explains the stages, and this package lists their types.
"""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_attention
from attnserve.checks.quality import allowed_loss
from attnserve.fusion import newest_opset
from attnserve.job import Job
from attnserve.models.output_kinds import require_measurable
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
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.search_input import checked_workloads, goal_record, search_key
from attnserve.planning.search.verdict import result_of
from attnserve.precision.convert import convert

__all__ = ["run_search"]


def run_search(goal: Goal, job: Job) -> tuple[PlanRecord, State]:
    """Search for a plan; ``attnserve.plan`` describes the goal.

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
    latency = ModelLatency.time(job, checked, newest, groups)
    losses = _estimate_losses(job, newest, latency, checkpoint)
    allowed = None if goal.keep is None else allowed_loss(goal.keep)
    judge = Judge(job, checked, checkpoint, allowed, task)
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
