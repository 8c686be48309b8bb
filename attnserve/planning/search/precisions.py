"""Search in several precisions, in the order of the time and loss of the fused original in each.

A search has one precision, in which single blocks may stay float32 or bfloat16. Usually the first
search finds the fastest model. All precisions are compared on the rows to choose; only the best
candidate is verified. A goal with training trains in the fastest precision first, because training
may convert blocks that lose too much without it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.job import Job
from attnserve.limits import MIN_GAIN
from attnserve.models.search_record import Point, PrecisionPoint, TrainingRounds
from attnserve.options import Goal
from attnserve.planning.plans.apply import apply_steps, start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.judge import ScoredTask, compare_part
from attnserve.planning.search.precision_search import PrecisionSearch, required_training
from attnserve.planning.search.search_input import checked_workloads
from attnserve.planning.search.search_result import SearchResult
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.convert import context_for
from attnserve.precision.schemes import SCHEMES, Scheme
from graph_passes.errors import (
    AttnserveError,
    CannotRewrite,
    CheckFailed,
    InvariantBroken,
    Refusal,
)

__all__ = ["PrecisionComparison", "compare_precisions", "search_precisions"]

log = logging.getLogger(__name__)

REFERENCE = "float32"

LOSES = "it loses more than the goal allows"

SHARE_FACTOR = 2.0
"""The ratio of the share of blocks that may be converted to the share that the mean loss of a block
allows: a search converts the blocks that lose least. With a larger value, fewer precisions are left
out, and a search takes longer."""

MISSED = frozenset({"search.precision", "search.target_speedup"})
"""Codes of errors of a search that finds no result."""


@dataclass(frozen=True)
class PrecisionComparison:
    """The fused original in each precision that the machine computes, float32 first.

    Attributes:
        fusion: The speed-up of the fused original over the exported one.
    """

    points: Sequence[PrecisionPoint]
    fusion: float

    def in_search_order(self, goal: Goal) -> list[PrecisionPoint]:
        """The precisions in the order in which they are likely to meet the goal best.

        For a quality to keep, it is the order of ``potential``. For a speed-up, the one with the
        least loss of those that reach it comes first. Equally fast ones are in the order of their
        losses.
        """
        target = goal.target_speedup
        potentials = {point.precision: self.potential(point, goal) for point in self.points}
        highest = max(potentials.values())

        def order(point: PrecisionPoint) -> tuple[bool, float, float]:
            speed = potentials[point.precision]
            slower = int(math.log(highest / speed) / math.log(MIN_GAIN))  # 0: about as fast
            if target is not None and self.fusion * speed >= target:
                return False, point.loss, slower
            return target is not None, slower, point.loss

        return sorted(self.points, key=order)

    def potential(self, point: PrecisionPoint, goal: Goal) -> float:
        """The speed-up over float32 that a search in a precision may reach.

        If all blocks lose too much, some of them stay in the precision ``Scheme.rest``. Time and
        loss are taken to grow in proportion to the converted share, see ``SHARE_FACTOR``.
        """
        scheme, speed = SCHEMES[point.precision], point.speedup.value
        if goal.keep is None or not scheme.allows_float_blocks:
            return speed
        points = {each.precision: each for each in self.points}
        rest = points.get(scheme.rest, points[REFERENCE])
        added = max(point.loss - rest.loss, 0.0)
        allowed = SHARE_FACTOR * max(allowed_loss(goal.keep) - rest.loss, 0.0)
        share = min(allowed / added, 1.0) if added else 1.0
        return 1 / (share / speed + (1 - share) / rest.speedup.value)


def search_precisions(goal: Goal, job: Job) -> SearchResult:
    """Search in one precision after the other, until no other one is likely to be better.

    With a quality to keep, further precisions are searched if the first one alone loses too much,
    or if its candidate is refused for its speed, or slower than another precision that meets the
    goal in all blocks.

    Returns:
        The verified result of the fastest candidate, or of a training that is faster; the original
        if its verification fails.

    Raises:
        CheckFailed: No precision meets the goal.
        CannotRewrite: The precisions cannot be compared.
        AttnserveError: The search in float32 raises it, and no other one has a result.
    """
    in_float32 = job.with_precision(REFERENCE)
    checked_workloads(in_float32)  # raises errors before long work
    required_training(goal, in_float32)
    task = ScoredTask.of(goal, job)
    comparison = compare_precisions(goal, job, task)
    searches = _Searches(goal, job, task, comparison)
    for point in comparison.in_search_order(goal):
        searches.try_precision(point)
    used, found = searches.verified()
    unused = dict(searches.unused)
    if found.record.gain:
        unused.pop(used, None)  # the verified result may be another candidate
    else:
        unused.setdefault(used, "its result brings no gain")
    points = [
        point.model_copy(
            update={
                "unused": unused.get(point.precision, ""),
                "front": tuple(searches.fronts.get(point.precision, ())),
            }
        )
        for point in comparison.points
    ]
    return replace(found, record=found.record.model_copy(update={"precisions": tuple(points)}))


@dataclass(eq=False)
class _Searches:
    """The searches of several precisions so far.

    Attributes:
        comparison: The precisions.
        first: The first search with a candidate that meets the goal, in the fastest precision.
        best: The best candidate that meets the goal.
        speed: Its speed-up over the exported original.
        last: The last search without a fast candidate that meets the goal.
        unused: The reasons why precisions are not used.
        fronts: The choices of each search.
        errors: The errors of searches.
    """

    goal: Goal
    job: Job
    task: ScoredTask | None
    comparison: PrecisionComparison
    first: PrecisionSearch | None = None
    best: PrecisionSearch | None = None
    speed: float = 0.0
    last: PrecisionSearch | None = None
    unused: dict[str, str] = field(default_factory=dict[str, str])
    fronts: dict[str, list[Point]] = field(default_factory=dict[str, list[Point]])
    errors: dict[str, AttnserveError] = field(default_factory=dict[str, AttnserveError])

    def try_precision(self, point: PrecisionPoint) -> None:
        """Search in a precision, unless it is unlikely to be better; ``best`` is updated."""
        name = point.precision
        if reason := self._reason_against(point):
            self.unused[name] = reason
            return
        job = self.job.with_precision(name).labeled(name)
        try:
            search = PrecisionSearch.run(self.goal, job, self.task)
            self.fronts[name] = search.points(point.speedup.value)
            speed, refusal = search.speed()
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            # The frames of the search hold models.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.errors[name], self.unused[name] = error, error.what
            return
        if search.best is None or refusal is not None:
            self.last = search
            self.unused[name] = LOSES if refusal is None else refusal.reason
            return
        self.first = self.first or search
        slower = search
        if self.best is None or speed > self.speed:
            slower, self.best, self.speed = self.best, search, speed
        if slower is not None:
            self.unused[slower.precision] = "its result is slower"

    def verified(self) -> tuple[str, SearchResult]:
        """The precision of the result, and the result.

        Raises:
            AttnserveError: There is none; see ``failure``.
        """
        search, first = self.best or self.last, self.first
        if search is None:
            raise self.failure()
        used, best = search.precision, self.best
        if first is None or first is best or best is None or first.recovery is None:
            return used, search.verified()
        trained = first.verified()
        rounds = trained.record.recovered
        is_trained = rounds is not None and rounds.gain
        if is_trained and (trained.record.speedup or 0.0) >= MIN_GAIN * self.speed:
            self.unused[used] = "its result is slower"
            return first.precision, trained
        del trained  # its model is freed before the other one is verified
        found = replace(best, recovery=None).verified()
        record = found.record.model_copy(update={"recovered": _unused_rounds(rounds, used)})
        return used, replace(found, record=record)

    def failure(self) -> AttnserveError:
        """The error if no precision has a result: that of float32, if it is not about the goal."""
        error = self.errors.get(REFERENCE)
        if error is not None and error.code not in MISSED:
            return error
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.unused.items())
        return CheckFailed(
            f"no precision meets the goal ({reasons})",
            "lower `keep` or `target_speedup`",
            code="search.precision",
        )

    def _reason_against(self, point: PrecisionPoint) -> str:
        """Why a precision is not searched; empty if it is."""
        keep, scheme = self.goal.keep, SCHEMES[point.precision]
        if keep is not None and point.loss > allowed_loss(keep) and not scheme.allows_float_blocks:
            return LOSES
        if self.best is None:
            return ""
        if keep is None:
            return "another one reaches the speed-up"
        potential = self.comparison.fusion * self.comparison.potential(point, self.goal)
        return "it is not faster" if potential < MIN_GAIN * self.speed else ""


def _unused_rounds(rounds: TrainingRounds | None, used: str) -> TrainingRounds | None:
    """The training rounds of another precision than the one that is used."""
    if rounds is None or not rounds.gain:
        return rounds
    verdict = f"training brings no gain: {used} without it is faster"
    return rounds.model_copy(update={"gain": False, "verdict": verdict})


def compare_precisions(goal: Goal, job: Job, task: ScoredTask | None) -> PrecisionComparison:
    """Measure the fused original in each precision that this machine computes.

    Speed-ups are over float32, each in its ``Job.runtime_for``, in interleaved runs at the
    requested workloads. Losses are those on the rows to choose.

    Args:
        job: Its precision is ``AUTO``.
        task: The task of the goal.

    Raises:
        CannotRewrite: The models cannot be timed.
    """
    timer = ServedTimer(job)
    models = {REFERENCE: timer.served(job.original)}
    losses = {REFERENCE: 0.0}
    schemes = list(_usable_schemes(job))
    progress = job.context.stage("convert to each precision")
    for done, scheme in enumerate(schemes):
        progress(done, len(schemes))
        try:
            models[scheme.name], losses[scheme.name] = _converted(scheme, job, task)
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            log.warning("%s is not compared: %s", scheme.name, error.what)
    progress(len(schemes), len(schemes))
    timed = [
        (job.original, job.runtime_for(REFERENCE)),
        *((model, job.runtime_for(precision)) for precision, model in models.items()),
    ]
    try:
        times = timer.time(timed, job.workloads)
    except InvariantBroken:  # a defect
        raise
    except AttnserveError as error:  # for example, no memory
        raise _not_timed(error.what) from error
    if not times:
        raise _not_timed("it does not run at the requested lengths")
    exported, reference, *_ = times
    points = [
        PrecisionPoint(
            precision=precision,
            runtime=job.runtime_for(precision),
            speedup=of_model.speedup_over(reference),
            loss=losses[precision],
        )
        for precision, of_model in zip(models, times[1:], strict=True)
    ]
    return PrecisionComparison(points, reference.speedup_over(exported).value)


def _not_timed(reason: str) -> CannotRewrite:
    return CannotRewrite(
        f"the original cannot be timed in each precision: {reason}",
        "give a `precision`",
        code="search.not_timed",
    )


def _usable_schemes(job: Job) -> Iterator[Scheme]:
    """The precisions besides float32 that this machine, the runtime and the model allow."""
    device = job.context.device
    phase = job.requested_workloads[0].phase
    usable = [
        scheme
        for scheme in SCHEMES
        if scheme.name != REFERENCE
        and scheme.provider == device.provider
        and (phase == "token" or not scheme.for_tokens)
        and scheme.refusal() is None
        and scheme.has_weights(job.original)
        and Refusal.of(partial(context_for, scheme.name, job.context)) is None
    ]
    most_bits = max((scheme.bits for scheme in usable if scheme.bits is not None), default=0)
    for scheme in usable:
        # More bits lose less at the same speed.
        if scheme.bits is None or scheme.bits == most_bits:
            yield scheme


def _converted(scheme: Scheme, job: Job, task: ScoredTask | None) -> tuple[ir.Model, float]:
    """The fused original in a precision, and its loss on the rows to choose.

    Raises:
        AttnserveError: It cannot be converted, or does not run.
    """
    job = job.with_precision(scheme.name).on_all_threads().labeled(scheme.name)
    state = start(Plan(), job, job.original.clone())
    state.fuse(scheme.name)
    apply_steps(state.plan.conversion, state)
    return state.result, compare_part(state.result, HeldOut.CHOOSE, job, task).loss
