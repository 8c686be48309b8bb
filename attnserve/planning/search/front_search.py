"""Search the Pareto front for the choice that meets a goal, with few builds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from attnserve.checks.quality import allowed_loss
from attnserve.options import Goal
from attnserve.planning.search.candidate_set import CandidateSet
from attnserve.planning.search.judge import Built, Judge
from graph_passes.errors import CheckFailed

__all__ = ["FIRST_GUESS", "INTERPOLATE", "NEAR", "SQUARED", "TIGHT", "FrontSearch"]

MAX_BUILDS = 6
"""The number of choices that are built besides the first and the last."""

TIGHT = 0.9
"""The share of the allowed loss from which on it counts as used up."""

NEAR = 1.01
"""Choices whose predicted speeds differ by less are not both built."""

FIRST_GUESS = {"score": 4.0}
"""A first guess of the ratio of the predicted loss, 1 - R^2 or a share of KL, to that of the
measure; 1 for others. The first build replaces it."""

SQUARED = frozenset({"top1"})
"""Measures whose squared loss grows with the predicted loss: tokens change their rank when logits
move, and independent moves add up in squares."""

SAME_MS = 1.02
"""Choices whose predicted times differ by less may be as fast as one another."""

CAREFUL = 0.8
"""The share of the allowed loss that is aimed at after a proof failed."""

INTERPOLATE, EXTRAPOLATE = 0.96, 0.98
"""Where the next choice is aimed at, relative to the estimate; below 1 to stay within bounds."""


@dataclass(frozen=True, eq=False)
class FrontSearch:
    """A bisection of the front that interpolates between measured choices.

    The measured loss and speed rise along the front nearly as the predicted ones do.
    """

    goal: Goal
    candidates: CandidateSet
    judge: Judge

    def run(self) -> Built | None:
        """The built choice that meets the goal; None if even lossless rewrites lose too much.

        Raises:
            CheckFailed: The precision alone loses too much, or the speed-up is out of reach.
        """
        if self.goal.target_speedup is not None:
            return self.least_loss(self.goal.target_speedup)
        assert self.goal.keep is not None
        return self.fastest(self.goal.keep)

    def fastest(self, keep: float) -> Built | None:
        """The fastest choice that keeps enough."""
        front = self.candidates.front
        lossless = self.judge.build(front[0])  # fused operators, and the precision
        measure, allowed = self.measure(lossless), 1 - keep
        if (constant := self._constant(lossless)) >= keep:
            raise CheckFailed(
                f"`keep` is {keep}, and a model that always returns the same keeps {constant:.3f} "
                f"by the measure {measure}",
                "choose another `measure`, or a higher `keep`",
                code="search.constant",
            )
        if lossless.loss > allowed_loss(keep):
            if self.goal.precision == "float32":
                return None
            raise CheckFailed(
                f"{self.goal.precision} weights alone keep {1 - lossless.loss:.4f} by the measure "
                f"{measure}, expected {keep}",
                "lower `keep`, or leave `precision` at float32",
                code="search.precision",
            )
        if lossless.loss >= allowed:
            return lossless
        power = 2 if measure in SQUARED else 1
        limit, start = allowed**power, lossless.loss**power
        measured = {0: start}
        low, high = 0, len(front)  # the last that keeps enough, the first that does not
        guess = (limit - start) * FIRST_GUESS.get(measure, 1.0)
        for _ in range(MAX_BUILDS):
            index = min(max(self.index_of(guess), low + 1), high - 1)
            if not low < index < high or self._is_near(low, high):
                break
            measured[index] = self.judge.loss(front[index]) ** power
            if measured[index] <= limit:
                low = index
                if measured[index] >= TIGHT * limit:
                    break
            else:
                high = index
            guess = self._next_guess(low, high, limit, measured)
        return self.judge.build(front[low])

    def as_fast_with_less_loss(self, built: Built) -> Built:
        """A choice that loses less and is as fast within the interval of paired times."""
        candidates, choice = self.candidates, built.choice
        most = SAME_MS * candidates.predicted_ms(choice)
        other = next(c for c in candidates.front if candidates.predicted_ms(c) <= most)
        if other.loss >= choice.loss:
            return built
        lean = self.judge.build(other)
        as_fast = self.judge.paired_speedup(lean, built).low <= 1
        return lean if as_fast and lean.loss <= built.loss else built

    def nothing_removed(self) -> tuple[FrontSearch, Built | None]:
        """The fastest choice that meets the goal and removes nothing, and its search.

        It is the fused original in the precision of the goal, if that keeps enough: otherwise some
        of its blocks stay float32.
        """
        front = replace(
            self, candidates=replace(self.candidates, front=self.candidates.nothing_removed)
        )
        fastest = self.judge.build(front.candidates.front[-1])
        keep, speedup = self.goal.keep, self.goal.target_speedup
        if keep is not None:
            keeps = fastest.loss <= allowed_loss(keep)
            return front, fastest if keeps else front.fastest(keep)
        assert speedup is not None
        reaches = self.judge.speedup(fastest) >= speedup
        return front, front.least_loss(speedup) if reaches else None

    def more_careful(self, built: Built, loss: float, keep: float) -> Built:
        """A choice with less predicted loss, after a proof measured too much for another one.

        Its loss is estimated by the mean of what the proof and the choice measured: a failed proof
        alone is too pessimistic, as it failed in part by chance.
        """
        front, allowed = self.candidates.front, 1 - keep
        estimate = max((built.loss + loss) / 2, allowed)
        index = self.index_of(CAREFUL * built.choice.loss * allowed / estimate)
        return self.judge.build(front[max(index, 0)])

    def measure(self, built: Built) -> str:
        """The measure of a built choice whose loss is the largest."""
        quality = built.fidelity.quality
        return "score" if self.goal.measure == "score" or quality is None else quality.measure

    def _constant(self, built: Built) -> float:
        """The highest quality of a constant predictor in the outputs that the goal limits."""
        limited = built.fidelity.qualities if self.goal.measure != "score" else ()
        # The second condition of top1 is one that a constant predictor never meets.
        return max((q.constant for q in limited if q.measure != "top1"), default=0.0)

    def least_loss(self, speedup: float) -> Built:
        """The choice with the least loss that reaches a speed-up, by the time of whole models."""
        front = self.candidates.front
        first = self._speedup_at(0)
        if first >= speedup:
            return self.judge.build(front[0])
        low, high = 0, len(front) - 1  # too slow; fast enough, or the fastest
        last = self._speedup_at(high)
        if last < speedup:
            raise CheckFailed(
                f"`target_speedup` is {speedup}: the fastest model found runs {last:.2f}x as fast",
                "lower it" + ("" if "ffn" in self.goal.allow else ", or let `allow` name ffn"),
                code="search.target_speedup",
            )
        reached = {low: first, high: last}
        for _ in range(MAX_BUILDS):
            index = self._between(low, high, speedup, reached)
            if index is None:
                break
            reached[index] = self._speedup_at(index)
            if reached[index] >= speedup:
                high = index
                if reached[index] < NEAR * speedup:
                    break
            else:
                low = index
        return self.judge.build(front[high])

    def _speedup_at(self, index: int) -> float:
        return self.judge.speedup(self.judge.build(self.candidates.front[index]))

    def _predicted_ms(self, index: int) -> float:
        return self.candidates.predicted_ms(self.candidates.front[index])

    def _is_near(self, low: int, high: int) -> bool:
        """Whether two choices are so close that nothing between them is worth a build."""
        if high == len(self.candidates.front):
            return False
        return self._predicted_ms(low) < NEAR * self._predicted_ms(high)

    def index_of(self, predicted_loss: float) -> int:
        """The index of the fastest choice with at most this predicted loss."""
        losses = [choice.loss for choice in self.candidates.front]
        return int(np.searchsorted(losses, predicted_loss, side="right")) - 1

    def _next_guess(
        self, low: int, high: int, allowed: float, measured: Mapping[int, float]
    ) -> float:
        """The predicted loss at which the allowed loss is expected.

        It is interpolated between the measured neighbors, or extrapolated from the lower one.
        """
        front, lossless = self.candidates.front, measured[0]
        below, loss_below = front[low].loss, measured[low]
        if high == len(front):
            gain = (allowed - lossless) / max(loss_below - lossless, 1e-9)
            return below * float(np.clip(EXTRAPOLATE * gain, 1.05, 3.0))
        above, loss_above = front[high].loss, measured[high]
        share = (allowed - loss_below) / max(loss_above - loss_below, 1e-9)
        # Even the smallest change has the uncertainty of a score. Interpolation from zero loss aims
        # too high until a lossy choice is known to keep enough.
        most = 0.9 if low else 0.5
        return below + float(np.clip(INTERPOLATE * share, 0.1, most)) * (above - below)

    def _between(
        self, low: int, high: int, speedup: float, reached: Mapping[int, float]
    ) -> int | None:
        """The index at which a speed-up is expected, by the measured times of two neighbors.

        None if no choice between them is worth a build.
        """
        if high - low < 2 or self._is_near(low, high):
            return None
        slow, fast = 1 / reached[low], 1 / reached[high]
        start, end = self._predicted_ms(low), self._predicted_ms(high)
        share = min(max((slow - 1 / speedup) / max(slow - fast, 1e-9), 0.05), 0.95)
        times = np.array([self.candidates.predicted_ms(c) for c in self.candidates.front])
        index = int(np.searchsorted(-times, -(start + share * (end - start))))
        return min(max(index, low + 1), high - 1)
