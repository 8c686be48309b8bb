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
from attnserve.planning.blocks.loss_curves import BlockLosses, conversion_losses, loss_curves
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.estimates import changes_to_measure
from attnserve.planning.search.front import Front
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, Judge, ScoredTask
from attnserve.planning.search.model_latency import ModelLatency
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.report import PlanReport
from attnserve.planning.search.search_input import SearchInput
from attnserve.planning.search.verdict import result_of
from attnserve.planning.search.verification import Verified, verify_candidate
from attnserve.precision.convert import convert

__all__ = ["search"]


def search(goal: Goal, job: Job) -> tuple[PlanReport, State]:
    """Search for a plan; ``attnserve.plan`` describes the goal.

    Times, losses and the measurements of candidates are stored in the user's cache folder until the
    search ends, so that an interrupted search continues.

    Args:
        job: Its weights are finite.

    Returns:
        The report, and the model after all steps of the plan.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidArgument: The model does not run at the requested shape, or the goal does not fit it.
        InvalidModel: No output has a quality that can be measured.
        InvariantBroken: A pass has a defect.
    """
    if goal.measure != "score":
        require_measurable(job.original)
    search_input = SearchInput.of(goal, job)
    precision = job.target.precision
    newest = newest_opset(job.original)
    attention = read_attention(newest, seed=job.context.seed)
    require_attention(attention)
    if precision != "float32":
        # Fails early if the model cannot be converted.
        convert(job.original, precision, job.calibration[:1], to_nearest=True)
    if goal.recover is not None:
        untimed = job.on_all_threads().labeled("can be trained")
        training_of(goal).check(start(Plan(), untimed, job.original))
    task = ScoredTask.of(goal, job)
    checkpoint = SearchCheckpoint(search_input.key)
    groups = group_blocks(newest, attention.blocks, ffn="ffn" in goal.allow)
    latency = ModelLatency.measure(search_input, newest, groups)
    losses = _estimate_losses(search_input, newest, latency, checkpoint)
    allowed = None if goal.keep is None else allowed_loss(goal.keep)
    judge = Judge(search_input, checkpoint, allowed, task)
    front_search = FrontSearch(goal, Front.of(latency, losses, precision), judge)
    best = front_search.run()
    if best is not None and goal.keep is not None:
        best = front_search.find_less_lossy(best)
    if goal.recover is None:
        result = result_of(front_search, verify_candidate(front_search, best))
    else:
        recovery = RecoverySearch(front_search, search_input.key, 60 * goal.recover)
        result = _train_faster(recovery, best)
    checkpoint.remove()
    return result


def _train_faster(recovery: RecoverySearch, plain: Candidate | None) -> tuple[PlanReport, State]:
    """The result with training, or without it if that is no better."""
    front_search = recovery.front_search
    trained = recovery.run(plain)
    if trained is not None:
        verified = Verified(trained, recovery.verifications)
    else:
        verified = verify_candidate(front_search, plain)
        verifications = [*recovery.verifications, *verified.verifications]
        verified = replace(verified, verifications=verifications)
    result = result_of(front_search, verified, recovery.report)
    recovery.remove_checkpoints()
    return result


def _estimate_losses(
    search_input: SearchInput, model: ir.Model, latency: ModelLatency, checkpoint: SearchCheckpoint
) -> BlockLosses:
    """The losses of all choices, from the checkpoint if it has them."""
    stored = checkpoint.losses(latency.pairs)
    if stored is not None:
        return stored
    changes = {
        group.key: changes_to_measure(group, latency.default_of(group.blocks[0]))
        for group in latency.groups
    }
    job = search_input.job
    context = replace(job.context.on_all_threads(), seed=0)
    losses = loss_curves(
        model, latency.groups, job.calibration, changes, latency.pairs, new_meter=job.meter,
        context=context,
    )  # fmt: skip
    if latency.float_latencies:
        conversion = conversion_losses(
            model, latency.groups, job.calibration, job.target.precision, new_meter=job.meter,
            context=context,
        )  # fmt: skip
        losses = losses._replace(conversion=conversion)
    checkpoint.put_losses(losses)
    return losses
