"""Build the plans of a search, and measure the loss and the speed of their models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.job import Job
from attnserve.limits import MIN_GAIN, MIN_SPEEDUP
from attnserve.models.measured import ShapeLatency
from attnserve.models.search_record import HeldOutComparison, TrainingRounds
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.apply import apply_plan, apply_steps, start
from attnserve.planning.plans.plan import Plan, State, Train
from attnserve.planning.scored_task import ScoredTask, compare_part
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.served_speed import ServedTimer
from attnserve.runtime.cache import digest
from attnserve.runtime.times import Speedup, Times
from graph_passes.analysis.workload import Workload
from graph_passes.errors import CannotRewrite, Refusal

__all__ = ["Candidate", "Judge", "TimedCandidate", "VerifiedCandidate"]

PAIR_SECONDS = 8.0
"""Approximate time of a comparison that decides whether a model is written."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A choice, and the measured model of its plan.

    Attributes:
        state: The plan, and the model after its steps.
        measured: The comparison of this model with the original on the rows to choose.
    """

    choice: Choice
    state: State
    measured: HeldOutComparison

    @property
    def loss(self) -> float:
        """The largest upper bound of the losses that the goal limits, on the rows to choose."""
        return self.measured.loss

    @property
    def is_unreduced(self) -> bool:
        """Whether no pass of the plan is lossy."""
        return not self.state.plan.lossy_blocks


@dataclass(frozen=True, eq=False)
class TimedCandidate:
    """A candidate that was timed beside the original.

    Attributes:
        speeds: The latencies at all checked workloads.
        speedup: The geometric mean of the speed-ups at the requested lengths.
        refusal: Why its speed does not allow it to be returned; None if it is worth it.
    """

    candidate: Candidate
    speeds: Sequence[ShapeLatency]
    speedup: float
    refusal: Refusal | None


@dataclass(frozen=True, eq=False)
class VerifiedCandidate:
    """The result of the verifications of a search.

    Attributes:
        candidate: The candidate of the last verification.
        verifications: All verifications in order; all but the last missed the goal. Empty if even
            the choice with the least loss missed the goal on the rows to choose.
        refusal: Why the candidate may not be returned; None if it meets the goal, or differs from
            the original by rounding only.
        note: Why the candidate is unreduced, although a reduced one was found; else empty.
        recovered: The training rounds, if the goal allows training.
    """

    candidate: Candidate
    verifications: Sequence[HeldOutComparison]
    refusal: Refusal | None = None
    note: str = ""
    recovered: TrainingRounds | None = None


@dataclass(eq=False)
class Judge:
    """Builds plans, and measures their models and their speed relative to the original.

    The latest model, the latest that keeps enough, and the latest that is unreduced stay in
    memory, because the search ends with one of them.

    Attributes:
        checked: The workloads at which a result is timed.
        keep: The share of the quality to keep; None if the goal is a speed-up.
        task: The task whose score is limited; None if there is none.
        measured: The loss and the cosine of each candidate by the ``picks`` of its choice; the
            candidates include those that were measured before an interruption.
    """

    job: Job
    checked: Sequence[Workload]
    checkpoint: SearchCheckpoint
    keep: float | None = None
    task: ScoredTask | None = None
    measured: dict[tuple[int, ...], tuple[float, float]] = field(
        default_factory=dict[tuple[int, ...], tuple[float, float]]
    )
    _latest: Candidate | None = None
    _latest_allowed: Candidate | None = None
    _latest_unreduced: Candidate | None = None

    @property
    def timed_runtime(self) -> str:
        """The runtime in which candidates are timed, and their losses are measured."""
        return self.job.runtime_for(self.job.target.precision)

    @cached_property
    def served(self) -> ServedTimer:
        """Times models as served, and has the models that it has fused before."""
        return ServedTimer(self.job)

    @cached_property
    def untimed(self) -> Job:
        """The job with all threads of the machine, for work that is not timed."""
        return self.job.on_all_threads()

    def measure_loss(self, choice: Choice, plan: Plan) -> float:
        """Measure the loss of a choice, or read it from the checkpoint."""
        stored = self.checkpoint.build(digest(plan.to_json()))
        if stored is not None:
            self.measured[choice.picks] = stored
            return stored[0]
        return self.build(choice, plan).loss

    def build(self, choice: Choice, plan: Plan) -> Candidate:
        """Apply the plan of a choice, convert the model, and measure its loss."""
        for built in (self._latest, self._latest_allowed, self._latest_unreduced):
            if built is not None and built.choice.picks == choice.picks:
                return built
        number = len(self.measured) + (choice.picks not in self.measured)
        job = self.untimed.labeled(f"build {number}")
        state = apply_plan(plan, job, job.original.clone())
        self._latest = candidate = self._measure(choice, state, job)
        if self.keep is not None and candidate.loss <= allowed_loss(self.keep):
            self._latest_allowed = candidate
        if candidate.is_unreduced:  # every result is compared with an unreduced one
            self._latest_unreduced = candidate
        measured = candidate.loss, candidate.measured.fidelity.mean_cosine
        self.measured[choice.picks] = measured
        self.checkpoint.add_build(digest(plan.to_json()), *measured)
        return candidate

    def train(self, candidate: Candidate, training: Train, key: str, label: str) -> Candidate:
        """Train the model of a choice before its conversion, and measure it again.

        Args:
            key: The name of the checkpoint of the training.
            label: The name of the training in reports of progress.
        """
        job = self.untimed.labeled(label)
        before = candidate.state
        plan = replace(before.plan, trainings=(*before.plan.trainings, training))
        state = start(plan, job, before.model, key=key, applied=before.applied)
        return self._measure(
            candidate.choice, apply_steps((training, *plan.conversion), state), job
        )

    def _measure(self, choice: Choice, state: State, job: Job) -> Candidate:
        """Measure the model of an applied plan on the data to choose."""
        measured = compare_part(state.result, HeldOut.CHOOSE, job, self.task)
        return Candidate(choice, state, measured)

    def verify(self, candidate: Candidate, part: HeldOut) -> HeldOutComparison:
        """Verify a candidate on held-out data."""
        job = self.untimed.labeled("held out")
        return compare_part(candidate.state.result, part, job, self.task)

    def time(self, candidate: Candidate) -> TimedCandidate:
        """Time a candidate and the original at all checked workloads.

        Raises:
            CannotRewrite: See ``_time``.
        """
        speeds = self._compare_speed(candidate.state.result, self.checked)
        speedup = self._requested_speedup(speeds)
        return TimedCandidate(candidate, speeds, speedup, self._refusal(candidate, speeds, speedup))

    def measure_speedup(self, candidate: Candidate) -> float:
        """Time a candidate at the requested lengths only; see ``TimedCandidate.speedup``."""
        speeds = self._compare_speed(candidate.state.result, self.job.requested_workloads)
        return self._requested_speedup(speeds)

    def _requested_speedup(self, speeds: Sequence[ShapeLatency]) -> float:
        lengths = [workload.length for workload in self.job.requested_workloads]
        requested = [speed.speedup for speed in speeds if speed.sequence in lengths]
        return float(np.exp(np.mean(np.log(requested))))

    def _refusal(
        self, candidate: Candidate, speeds: Sequence[ShapeLatency], speedup: float
    ) -> Refusal | None:
        plan = candidate.state.plan
        is_lossy = bool(plan.lossy_blocks) or plan.precision != "float32"
        if not (is_lossy or plan.passes):
            return Refusal(
                "unchanged", "no configuration of any block is faster within the allowed loss"
            )
        if speedup < (MIN_GAIN if is_lossy else 1.0):
            return Refusal(
                "slow", f"the best model runs at {speedup:.2f}x the speed of the original"
            )
        slowest = min(speeds, key=lambda speed: speed.speedup)
        if slowest.speedup < MIN_SPEEDUP:
            return Refusal(
                "slow_length",
                f"the best model runs at {slowest.speedup:.2f}x the speed of the original at "
                f"{slowest.sequence} tokens",
            )
        return None

    def _compare_speed(self, model: ir.Model, workloads: Sequence[Workload]) -> list[ShapeLatency]:
        """Time the original in the runtime of float32, and a model in that of the precision.

        If the model seems slower at a workload, both are timed again, and both runs count.

        Raises:
            CannotRewrite: See ``_time``.
        """
        reference = self.job.original, self.job.runtime_for("float32")
        timed = [reference, (model, self.timed_runtime)]
        before, after = self._time(timed, workloads, min_speedup=MIN_SPEEDUP)
        return [
            ShapeLatency(
                batch=workload.batch,
                sequence=workload.length,
                original_ms=float(np.median(original_ms)),
                ms=float(np.median(after.by_shape[workload])),
                speedup=float(np.median(original_ms / after.by_shape[workload])),
            )
            for workload, original_ms in before.by_shape.items()
        ]

    def measure_speedup_over(self, slow: Candidate, fast: Candidate) -> Speedup:
        """Measure the speed-up of one candidate over another at the requested lengths, interleaved.

        Raises:
            CannotRewrite: See ``_time``.
        """
        timed = [(candidate.state.result, self.timed_runtime) for candidate in (slow, fast)]
        slower, faster = self._time(timed, self.job.requested_workloads, seconds=PAIR_SECONDS)
        return faster.speedup_over(slower)

    def _time(
        self,
        timed: Sequence[tuple[ir.Model, str]],
        workloads: Sequence[Workload],
        *,
        seconds: float | None = None,
        min_speedup: float = 0.0,
    ) -> list[Times[Workload]]:
        """Time models in interleaved runs.

        Raises:
            CannotRewrite: The models cannot run side by side, for example for lack of memory.
        """
        times = self.served.time(timed, workloads, seconds=seconds, min_speedup=min_speedup)
        if not times:
            raise CannotRewrite(
                "two models of the search cannot be timed together",
                "free memory, and start the search again: it continues",
                code="search.not_timed",
            )
        return times
