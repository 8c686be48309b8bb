"""Search for the best candidate in one precision, on the rows to choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import onnx_ir as ir

from attnserve.checks.certify import read_attention, require_attention
from attnserve.fusion import newest_opset
from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.search_record import Point
from attnserve.options import Goal
from attnserve.planning.blocks.groups import group_blocks
from attnserve.planning.blocks.loss_curves import BlockLosses, loss_curves
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan, Train
from attnserve.planning.scored_task import ScoredTask
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.estimates import changes_to_measure
from attnserve.planning.search.explain import front_points
from attnserve.planning.search.fastest_search import FastestSearch
from attnserve.planning.search.front import Front
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, Judge
from attnserve.planning.search.least_lossy_search import LeastLossySearch
from attnserve.planning.search.model_latency import ModelLatency
from attnserve.planning.search.recovery_search import RecoverySearch, training_of
from attnserve.planning.search.search_input import checked_workloads, goal_record, search_key
from attnserve.planning.search.search_result import SearchResult, result_of
from attnserve.precision.convert import convert
from graph_passes.errors import Refusal

__all__ = ["PrecisionSearch", "required_training"]


@dataclass(frozen=True, eq=False)
class PrecisionSearch:
    """The search in one precision, after it has selected its best candidate.

    Attributes:
        front_search: The search of the front.
        best: The candidate; None if even the choice with the least loss misses the goal.
        recovery: The training of faster choices, if the goal allows it.
    """

    front_search: FrontSearch
    best: Candidate | None
    recovery: RecoverySearch | None

    @classmethod
    def run(cls, goal: Goal, job: Job, task: ScoredTask | None = None) -> Self:
        """Search for the best candidate in one precision, on the rows to choose.

        Args:
            task: The task of the goal, if it was scored before.

        Raises:
            CheckFailed: The goal cannot be reached.
            InvalidArgument: The model does not run at the requested shape, or the goal does not
                fit it.
            InvariantBroken: A pass has a defect.
        """
        checked = checked_workloads(job)
        recorded = goal_record(goal, job)
        precision = job.target.precision
        newest = newest_opset(job.original)
        attention = read_attention(newest, seed=job.context.seed)
        require_attention(attention)
        if precision != "float32":
            # Fails early if the model cannot be converted.
            convert(job.original, precision, job.calibration[:1], to_nearest=True)
        training = required_training(goal, job)
        task = task or ScoredTask.of(goal, job)
        key = search_key(recorded, job)
        checkpoint = SearchCheckpoint(job.checkpoints.open("plans", key))
        groups = group_blocks(newest, attention.blocks, ffn="ffn" in goal.allow)
        latency = ModelLatency.time(job, checked, newest, groups)
        losses = _estimate_losses(job, newest, latency, checkpoint)
        judge = Judge(job, checked, checkpoint, goal.keep, task)
        kind = LeastLossySearch if goal.keep is None else FastestSearch
        search = kind(recorded, Front.of(latency, losses, precision), judge)
        recovery = None if training is None else RecoverySearch(search, training, key)
        return cls(search, search.run(), recovery)

    @property
    def precision(self) -> Precision:
        return self.front_search.front.precision

    def points(self, fused: float) -> list[Point]:
        """The choices of the front as they are recorded.

        Args:
            fused: The speed-up of the fused original in this precision. Those of the choices are
                over the same model.
        """
        front = self.front_search.front
        scale = fused / front.predicted_speedup(front.unreduced[-1])
        return [
            point.model_copy(update={"speedup": scale * point.speedup})
            for point in front_points(front, self.front_search.judge.measured)
        ]

    def speed(self) -> tuple[float, Refusal | None]:
        """The speed-up of the candidate over the original, and why it is too slow, if it is.

        A refused candidate is replaced by an unreduced one, as ``verified`` does. With a training
        none is refused, because the trained one may be faster.
        """
        if self.best is None:
            return 0.0, None
        timed = self.front_search.judge.time(self.best)
        if timed.refusal is not None and not self.best.is_unreduced:
            unreduced = self.front_search.unreduced.run_from_fastest()
            timed = timed if unreduced is None else self.front_search.judge.time(unreduced)
        return timed.speedup, None if self.recovery else timed.refusal

    def verified(self) -> SearchResult:
        """The result, if it keeps its quality on held-out rows, and is faster than the original.

        Raises:
            CheckFailed: It misses the requested speed-up.
        """
        search = self.front_search if self.recovery is None else self.recovery
        return result_of(self.front_search, search.verify(self.best))


def required_training(goal: Goal, job: Job) -> Train | None:
    """The training of a goal, if it allows one, after a check that the original can be trained.

    Raises:
        AttnserveError: It cannot.
    """
    if goal.recover is None:
        return None
    training = training_of(goal)
    untimed = job.on_all_threads().labeled("can be trained")
    training.check(start(Plan(), untimed, job.original))
    return training


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
        model,
        latency.groups,
        job.calibration,
        changes,
        latency.pairs,
        job.target.precision if latency.float_latencies else None,
        new_meter=job.meter,
        context=replace(job.context.on_all_threads(), seed=0),
    )
    checkpoint.put_losses(losses)
    return losses
