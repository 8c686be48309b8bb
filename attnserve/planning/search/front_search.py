"""Search the Pareto front for the choice that meets a goal, with few candidates.

Predicted losses and times put the choices in order; measured ones decide. A candidate needs a refit
and a comparison, so that each one is aimed at the limit by the measurements before (``bisect``).

Example: ``keep`` 0.99 allows a measured loss of 0.01, and the first choice loses 0.

1. A choice with a predicted loss of 0.01 is built (for a ratio of 1, see ``FIRST_GUESS``). It loses
   0.005.
2. The limit is twice as far: the next one has ``EXTRAPOLATE * 2 * 0.01`` = 0.0196. It loses 0.02.
3. The limit is expected at (0.01 - 0.005) / (0.02 - 0.005) = 1/3 of the way from 0.01 to 0.0196;
   the next one is at ``INTERPOLATE / 3`` of it, 0.0131. It loses 0.0095.
4. This is allowed, and more than ``TIGHT * 0.01``: the search ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from attnserve.checks.quality import allowed_loss
from attnserve.limits import MIN_GAIN, SAME_MS
from attnserve.literals import Precision
from attnserve.options import Goal
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.search.front import Front
from attnserve.planning.search.judge import Candidate, Judge
from graph_passes.errors import CheckFailed

__all__ = [
    "INTERPOLATE",
    "TIGHT",
    "BisectStep",
    "FrontSearch",
    "bisect",
    "first_guess",
    "power_of",
]

MAX_CANDIDATES = 6
"""The largest number of candidates besides the first and the last choice. More candidates come
closer to the limit."""

TIGHT = 0.9
"""The search ends at a candidate with at least this share of the allowed loss. A larger share
brings the result closer to the limit, and needs more candidates."""

FIRST_GUESS = {"score": 4.0}
"""The ratio of the predicted loss (1 - R^2 or a share of KL) to the loss by a measure that is
expected before any loss is measured; 1 for other measures. With a larger ratio, the first candidate
loses more."""

SQUARED = frozenset({"index", "tau", "top1"})
"""Measures whose squared loss is proportional to the predicted loss: ranks change when vectors or
logits change, and independent changes add up in squares."""

CAREFUL = 0.8
"""The share of the allowed loss at which the choice after a failed verification is aimed. With a
smaller share, it is slower and fails less often."""

INTERPOLATE, EXTRAPOLATE = 0.96, 0.98
"""Between two measured choices, the next one is aimed at the first share of the way to the expected
limit; beyond the last one, at the second share of the predicted loss that is expected there. With
smaller shares, the next choice exceeds the allowed loss less often."""

MIN_GROWTH, MAX_GROWTH = 1.05, 3.0
"""The bounds of the factor by which an extrapolation increases the predicted loss. A smaller least
factor may find the same choice again. A larger greatest one goes further beyond the limit, because
measured losses usually are not proportional to predicted ones."""

MIN_STEP = 0.1
"""The least share of the way from the lower to the upper choice. A larger step exceeds the limit
more often; a smaller one stays within the uncertainty of a score, which even the smallest change
has."""

MAX_STEP, MAX_FIRST_STEP = 0.9, 0.5
"""The largest share of that way, and the largest one from the first choice of the front. With a
larger share, the next choice loses more. An interpolation from no loss aims too high until a lossy
choice is known to keep enough."""

TIME_MARGIN = 0.05
"""The least share of the way between two measured speeds by which the next choice differs from each
of them. With a larger share, the steps are closer to halves."""


def first_guess(measure: str, loss: float) -> float:
    """Estimate the predicted loss that belongs to a loss by a measure, before any is measured."""
    return loss * FIRST_GUESS.get(measure, 1.0)


def power_of(measure: str) -> int:
    """The power of a loss by a measure that is proportional to the predicted loss."""
    return 2 if measure in SQUARED else 1


class BisectStep(NamedTuple):
    """The side of a limit on which a measured choice is.

    Attributes:
        is_low: Whether it is on the side of the start of the front.
        is_close: Whether it is close enough to the limit to end the search.
    """

    is_low: bool
    is_close: bool


def bisect(
    low: int,
    high: int,
    most: int,
    *,
    aim: Callable[[int, int], int | None],
    probe: Callable[[int], BisectStep],
) -> tuple[int, int]:
    """Narrow the part of a front in which a measured loss or speed crosses a limit.

    Both rise along the front nearly as the predicted ones do.

    Args:
        low, high: Choices on both sides of the limit, by index; ``high`` may be the end of the
            front.
        most: The number of choices to measure.
        aim: The index between two others at which the limit is expected; None if no choice between
            them is worth measuring.
        probe: Measures a choice.

    Returns:
        The measured choices that are next to the limit, by index.
    """
    for _ in range(most):
        aimed = aim(low, high)
        if aimed is None or high - low < 2:
            break
        index = min(max(aimed, low + 1), high - 1)
        probed = probe(index)
        if probed.is_low:
            low = index
        else:
            high = index
        if probed.is_close:
            break
    return low, high


@dataclass(frozen=True, eq=False)
class FrontSearch:
    """Searches the front by ``bisect``, aiming between measured choices."""

    goal: Goal
    front: Front
    judge: Judge

    @property
    def precision(self) -> Precision:
        return self.front.precision

    def build(self, choice: Choice) -> Candidate:
        """Build the plan of a choice, and measure its model."""
        return self.judge.build(choice, self.front.plan(choice))

    def measure_loss(self, choice: Choice) -> float:
        """Measure the loss of a choice, which is built unless the checkpoint has its loss."""
        return self.judge.measure_loss(choice, self.front.plan(choice))

    def build_first(self) -> Candidate:
        """Build the choice with the least loss, which only fuses operators and converts weights."""
        return self.build(self.front.choices[0])

    def run(self) -> Candidate | None:
        """Search for a choice that meets the goal; None if the least lossy one loses too much.

        Raises:
            CheckFailed: The precision alone loses too much, or the speed-up is out of reach.
        """
        if self.goal.target_speedup is not None:
            return self.find_least_lossy(self.goal.target_speedup)
        assert self.goal.keep is not None
        return self.find_fastest(self.goal.keep)

    def find_fastest(self, keep: float) -> Candidate | None:
        """Find the fastest choice that meets the goal of quality.

        Returns:
            None if even the first choice loses too much in float32.
        """
        choices = self.front.choices
        least_lossy = self.build_first()
        measure = self.worst_measure(least_lossy)
        allowed = 1 - keep
        constant = self._constant(least_lossy)
        if constant >= keep:
            raise CheckFailed(
                f"`keep` is {keep}, and a constant predictor keeps {constant:.3f} "
                f"by the measure {measure}",
                "choose another `measure`, or a higher `keep`",
                code="search.constant",
            )
        if least_lossy.loss > allowed_loss(keep):
            if self.precision == "float32":
                return None
            raise CheckFailed(
                f"{self.precision} weights alone keep {1 - least_lossy.loss:.4f} by the measure "
                f"{measure}, expected {keep}",
                "lower `keep`, or leave `precision` at float32",
                code="search.precision",
            )
        if least_lossy.loss >= allowed:
            return least_lossy
        power = power_of(measure)
        limit, start = allowed**power, least_lossy.loss**power
        measured = {0: start}  # by index

        def aim(low: int, high: int) -> int | None:
            if self.is_near(low, high):
                return None
            if len(measured) == 1:
                return self.index_of(first_guess(measure, limit - start))
            return self.index_of(self._next_guess(low, high, limit, measured))

        def keeps(index: int) -> BisectStep:
            loss = self.measure_loss(choices[index]) ** power
            measured[index] = loss
            return BisectStep(loss <= limit, TIGHT * limit <= loss <= limit)

        low, _ = bisect(0, len(choices), MAX_CANDIDATES, aim=aim, probe=keeps)
        return self.build(choices[low])

    def find_less_lossy(self, candidate: Candidate) -> Candidate:
        """Find a choice that loses less and is as fast within the interval of paired times."""
        front = self.front
        ms = SAME_MS * front.predicted_ms(candidate.choice)
        other = front.choices[self._first_within(ms)]
        if other.loss >= candidate.choice.loss:
            return candidate
        lean = self.build(other)
        as_fast = self.judge.measure_speedup_over(lean, candidate).low <= 1
        return lean if as_fast and lean.loss <= candidate.loss else candidate

    @property
    def unreduced(self) -> FrontSearch:
        """The same search among the unreduced choices.

        The fastest of them is the fused original with all blocks in the precision of the goal. If
        it loses too much, the search keeps some blocks in float32.
        """
        return replace(self, front=replace(self.front, choices=self.front.unreduced))

    def run_from_fastest(self) -> Candidate | None:
        """Search like ``run``, but build the fastest choice first, which often meets the goal.

        Returns:
            None if no choice meets the goal.
        """
        fastest = self.build(self.front.choices[-1])
        keep, speedup = self.goal.keep, self.goal.target_speedup
        if keep is not None:
            return fastest if fastest.loss <= allowed_loss(keep) else self.find_fastest(keep)
        assert speedup is not None
        return (
            self.find_least_lossy(speedup)
            if self.judge.measure_speedup(fastest) >= speedup
            else None
        )

    def step_back(self, candidate: Candidate, loss: float, keep: float) -> Candidate:
        """Build a choice with less predicted loss, after the verification of another one failed.

        Its loss is estimated from the mean of both measurements of the failed choice, because a
        failed verification alone is biased: it failed partly by chance.
        """
        choices = self.front.choices
        allowed = 1 - keep
        estimate = max((candidate.loss + loss) / 2, allowed)
        share = (allowed / estimate) ** power_of(self.worst_measure(candidate))
        index = self.index_of(CAREFUL * candidate.choice.loss * share)
        return self.build(choices[max(index, 0)])

    def worst_measure(self, candidate: Candidate) -> str:
        """The measure with the largest loss of a candidate."""
        quality = candidate.fidelity.quality
        return "score" if self.goal.measure == "score" or quality is None else quality.measure

    def _constant(self, candidate: Candidate) -> float:
        """The highest quality of a constant predictor in the outputs that the goal limits."""
        limited = candidate.fidelity.qualities if self.goal.measure != "score" else ()
        # The second condition of top1 is one that a constant predictor never meets.
        return max((q.constant for q in limited if q.measure != "top1"), default=0.0)

    def find_least_lossy(self, speedup: float) -> Candidate:
        """Find the choice with the least loss that reaches a speed-up of the whole model."""
        choices = self.front.choices
        first = self._measure_speedup(0)
        if first >= speedup:
            return self.build_first()
        last = self._measure_speedup(len(choices) - 1)
        if last < speedup:
            raise CheckFailed(
                f"`target_speedup` is {speedup}: the fastest model found runs {last:.2f}x as fast",
                "lower it" + ("" if "ffn" in self.goal.allow else ", or let `allow` name ffn"),
                code="search.target_speedup",
            )
        reached = {0: first, len(choices) - 1: last}

        def aim(low: int, high: int) -> int | None:
            return None if self.is_near(low, high) else self._expected(low, high, speedup, reached)

        def is_slow(index: int) -> BisectStep:
            measured = self._measure_speedup(index)
            reached[index] = measured
            return BisectStep(measured < speedup, speedup <= measured < MIN_GAIN * speedup)

        _, high = bisect(0, len(choices) - 1, MAX_CANDIDATES, aim=aim, probe=is_slow)
        return self.build(choices[high])

    def _measure_speedup(self, index: int) -> float:
        return self.judge.measure_speedup(self.build(self.front.choices[index]))

    def _predicted_ms(self, index: int) -> float:
        return self.front.predicted_ms(self.front.choices[index])

    def is_near(self, low: int, high: int) -> bool:
        """Whether two choices are so close that no choice between them is worth building."""
        if high == len(self.front.choices):
            return False
        return self._predicted_ms(low) < MIN_GAIN * self._predicted_ms(high)

    def index_of(self, predicted_loss: float) -> int:
        """The index of the fastest choice with at most this predicted loss."""
        return bisect_right(self.front.choices, predicted_loss, key=lambda c: c.loss) - 1

    def _first_within(self, ms: float) -> int:
        """The index of the least lossy choice with at most this predicted time."""
        return bisect_left(self.front.choices, -ms, key=lambda c: -self.front.predicted_ms(c))

    def _next_guess(
        self, low: int, high: int, allowed: float, measured: Mapping[int, float]
    ) -> float:
        """The predicted loss at which the allowed loss is expected.

        It is interpolated between the measured neighbors, or extrapolated from the lower one.
        """
        choices = self.front.choices
        lossless = measured[0]
        below, loss_below = choices[low].loss, measured[low]
        if high == len(choices):
            gain = (allowed - lossless) / max(loss_below - lossless, 1e-9)
            return below * float(np.clip(EXTRAPOLATE * gain, MIN_GROWTH, MAX_GROWTH))
        above, loss_above = choices[high].loss, measured[high]
        share = (allowed - loss_below) / max(loss_above - loss_below, 1e-9)
        most = MAX_STEP if low else MAX_FIRST_STEP
        return below + float(np.clip(INTERPOLATE * share, MIN_STEP, most)) * (above - below)

    def _expected(self, low: int, high: int, speedup: float, reached: Mapping[int, float]) -> int:
        """The index at which a speed-up is expected, by the measured times of two neighbors."""
        slow, fast = 1 / reached[low], 1 / reached[high]
        start, end = self._predicted_ms(low), self._predicted_ms(high)
        share = (slow - 1 / speedup) / max(slow - fast, 1e-9)
        share = min(max(share, TIME_MARGIN), 1 - TIME_MARGIN)
        return self._first_within(start + share * (end - start))
