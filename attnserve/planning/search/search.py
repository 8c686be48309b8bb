"""Search for the fastest plan that keeps the requested quality, by measurement.

The goal is a share of the quality (``keep``) or a speed-up (``target_speedup``).
``docs/concepts/search.md`` explains the stages, and this package lists their types.

A search has one precision, in which single blocks may stay float32 or bfloat16. Without a requested
one, precisions are searched in the order of the time and loss of the fused original in each.
Usually the first search finds the fastest model. All precisions are compared on the rows to choose;
only the best candidate is verified. A goal with training trains in the fastest precision first,
because training may convert blocks that lose too much without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from attnserve.checks.quality import allowed_loss
from attnserve.context import AUTO
from attnserve.job import Job
from attnserve.limits import MIN_GAIN
from attnserve.models.output_kinds import require_measurable
from attnserve.models.search_record import Point, PrecisionPoint
from attnserve.options import Goal
from attnserve.planning.scored_task import ScoredTask
from attnserve.planning.search.precision_search import PrecisionSearch, required_training
from attnserve.planning.search.precisions import REFERENCE, PrecisionComparison, compare_precisions
from attnserve.planning.search.search_input import checked_workloads
from attnserve.planning.search.search_result import SearchResult
from attnserve.precision.schemes import SCHEMES
from graph_passes.errors import AttnserveError, CheckFailed, InvariantBroken

__all__ = ["run_search", "search_precisions"]

LOSES = "it loses more than the goal allows"

SLOWER = "its result is slower"

MISSED = frozenset({"search.precision", "search.target_speedup"})
"""Codes of errors of a search that finds no result."""


def run_search(goal: Goal, job: Job) -> SearchResult:
    """Search for a plan; ``attnserve.plan`` describes the goal.

    Times, losses and the measurements of candidates are stored in the user's cache folder, so that
    an interrupted search continues. The caller removes them once the result is written.

    Args:
        job: Its weights are finite.

    Raises:
        CheckFailed: The goal cannot be reached.
        CannotRewrite: The precisions cannot be compared.
        InvalidArgument: The model does not run at the requested shape, or the goal does not fit it.
        InvalidModel: No output has a quality that can be measured.
        InvariantBroken: A pass has a defect.
    """
    if goal.measure != "score":
        require_measurable(job.original)
    if job.target.precision == AUTO:
        return search_precisions(goal, job)
    return PrecisionSearch.run(goal, job).verified()


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
    comparison = compare_precisions(job, task)
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
        float32_error: The error of the search in float32.
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
    float32_error: AttnserveError | None = None

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
            self.unused[name] = error.what
            if name == REFERENCE:
                self.float32_error = error
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
            self.unused[slower.precision] = SLOWER

    def verified(self) -> tuple[str, SearchResult]:
        """The precision of the result, and the result.

        Raises:
            AttnserveError: There is none; see ``failure``.
        """
        search, first = self.best or self.last, self.first
        if search is None:
            raise self.failure()
        used = search.precision
        if first is None or first is search or first.recovery is None:
            return used, search.verified()
        trained = first.verified()
        rounds = trained.record.recovered
        if rounds is not None and rounds.gain:
            if (trained.record.speedup or 0.0) >= MIN_GAIN * self.speed:
                self.unused[used] = SLOWER
                return first.precision, trained
            rounds = rounds.without_gain(f"{used} without it is faster")
        del trained  # its model is freed before the other one is verified
        found = replace(search, recovery=None).verified()
        record = found.record.model_copy(update={"recovered": rounds})
        return used, replace(found, record=record)

    def failure(self) -> AttnserveError:
        """The error if no precision has a result: that of float32, if it is not about the goal."""
        error = self.float32_error
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
