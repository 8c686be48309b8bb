"""Search in several precisions, in the order of the time and loss of the fused original in each.

A search has one precision, in which single blocks may stay float32 or bfloat16. Usually the first
search finds the fastest model. All precisions are compared on the rows to choose; only the best
candidate is verified.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.job import Job
from attnserve.limits import MIN_GAIN
from attnserve.models.search_record import PrecisionPoint
from attnserve.options import Goal
from attnserve.planning.plans.apply import apply_steps, start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.planning.search.chosen import Chosen, Found, choose, required_training
from attnserve.planning.search.judge import ScoredTask, compare_part
from attnserve.planning.search.search_input import checked_workloads, goal_record, search_key
from attnserve.planning.served_speed import ServedTimer, fastest_runtime
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

        For a quality to keep, the fastest one comes first: its search leaves blocks in float32 that
        lose too much. For a speed-up, the one with the least loss of those that reach it comes
        first. Equally fast ones are in the order of their losses.
        """
        target = goal.target_speedup
        highest = max(point.speedup.value for point in self.points)

        def order(point: PrecisionPoint) -> tuple[bool, float, float]:
            speed = point.speedup.value
            slower = int(math.log(highest / speed) / math.log(MIN_GAIN))  # 0: about as fast
            if target is not None and self.fusion * speed >= target:
                return False, point.loss, slower
            return target is not None, slower, point.loss

        return sorted(self.points, key=order)


def search_precisions(goal: Goal, job: Job) -> Found:
    """Search in one precision after the other, until no other one is likely to be better.

    With a quality to keep, further precisions are searched if the first one alone loses too much,
    or if its candidate is refused for its speed, or slower than another precision that meets the
    goal in all blocks.

    Returns:
        The verified result of the fastest candidate; the original if its verification fails.

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
    searches = _Searches(goal, job, task, comparison.fusion)
    for point in comparison.in_search_order(goal):
        searches.try_precision(point)
    chosen = searches.best or searches.last
    if chosen is None:
        raise searches.failure()
    found = chosen.verified()
    unused, used = dict(searches.unused), chosen.search.front.precision
    if found.record.gain:
        unused.pop(used, None)  # the verified result may be another candidate
    else:
        unused.setdefault(used, "its result brings no gain")
    points = [
        point.model_copy(update={"unused": unused.get(point.precision, "")})
        for point in comparison.points
    ]
    return replace(
        found,
        record=found.record.model_copy(update={"precisions": tuple(points)}),
        removals=[*searches.removals, *found.removals],
    )


@dataclass(eq=False)
class _Searches:
    """The searches of several precisions so far.

    Attributes:
        fusion: See ``PrecisionComparison``.
        best: The best candidate that meets the goal.
        speed: Its speed-up over the exported original.
        last: The last search without a fast candidate that meets the goal.
        removals: Each deletes the checkpoint of a search, also of one without a result.
        unused: The reasons why precisions are not used.
        errors: The errors of searches.
    """

    goal: Goal
    job: Job
    task: ScoredTask | None
    fusion: float
    best: Chosen | None = None
    speed: float = 0.0
    last: Chosen | None = None
    removals: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    unused: dict[str, str] = field(default_factory=dict[str, str])
    errors: dict[str, AttnserveError] = field(default_factory=dict[str, AttnserveError])

    def try_precision(self, point: PrecisionPoint) -> None:
        """Search in a precision, unless it is unlikely to be better; ``best`` is updated."""
        name = point.precision
        if reason := self._reason_against(point):
            self.unused[name] = reason
            return
        job = self.job.with_precision(name).labeled(name)
        self.removals.append(SearchCheckpoint(search_key(goal_record(self.goal, job), job)).remove)
        try:
            chosen = choose(self.goal, job, self.task)
            speed, refusal = chosen.speed()
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            # The frames of the search hold models.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            self.errors[name], self.unused[name] = error, error.what
            return
        if chosen.best is None or refusal is not None:
            self.last = chosen
            self.unused[name] = LOSES if refusal is None else refusal.reason
            return
        slower = chosen
        if self.best is None or speed > self.speed:
            slower, self.best, self.speed = self.best, chosen, speed
        if slower is not None:
            self.unused[slower.search.front.precision] = "its result is slower"

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
        loses = self.goal.keep is not None and point.loss > allowed_loss(self.goal.keep)
        if loses and not SCHEMES[point.precision].allows_float_blocks:
            return LOSES
        if self.best is None:
            return ""
        if self.goal.keep is None:
            return "another one reaches the speed-up"
        if loses:
            return LOSES
        speed = self.fusion * point.speedup.value
        return "it is not faster" if speed < MIN_GAIN * self.speed else ""


def compare_precisions(goal: Goal, job: Job, task: ScoredTask | None) -> PrecisionComparison:
    """Measure the fused original in each precision that this machine computes.

    Speed-ups are over float32, each in its fastest runtime of a search, in interleaved runs at the
    requested workloads. Losses are those on the rows to choose, in this runtime and in that of the
    job; the larger one counts.

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
    exported = "exported"
    runtimes = {precision: job.timed_runtimes(precision) for precision in models}
    try:
        compared = timer.compare(
            {exported: job.original, **models},
            {exported: runtimes[REFERENCE], **runtimes},
        )
    except InvariantBroken:  # a defect
        raise
    except AttnserveError as error:  # for example, no memory
        raise _not_timed(error.what) from error
    if not compared:
        raise _not_timed("it does not run at the requested lengths")
    fastest = {name: fastest_runtime(times) for name, times in compared.items()}
    for name, runtime in fastest.items():
        if name == exported or not SCHEMES[name].is_int8 or runtime == runtimes[name][0]:
            continue
        loss = _loss_in(runtime, models[name], job.with_precision(name), task)
        keeps = goal.keep is None or not losses[name] <= allowed_loss(goal.keep) < loss
        if not keeps or not math.isfinite(loss):
            fastest[name] = runtimes[name][0]
        else:
            losses[name] = max(losses[name], loss)
    times = {name: compared[name][runtime] for name, runtime in fastest.items()}
    reference = times[REFERENCE]
    points = [
        PrecisionPoint(
            precision=precision,
            runtime=fastest[precision],
            speedup=times[precision].speedup_over(reference),
            loss=losses[precision],
        )
        for precision in models
    ]
    return PrecisionComparison(points, reference.speedup_over(times[exported]).value)


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


def _loss_in(runtime: str, model: ir.Model, job: Job, task: ScoredTask | None) -> float:
    """The loss on the rows to choose in a runtime; infinite if it does not run there."""
    job = job.on_all_threads().labeled(f"loss in {runtime}")
    context = replace(job.context, device=replace(job.context.device, runtime=runtime))
    try:
        return compare_part(model, HeldOut.CHOOSE, replace(job, context=context), task).loss
    except AttnserveError:
        return math.inf
