"""Search the front for the choice with the least loss that reaches a speed-up."""

from __future__ import annotations

from collections.abc import Mapping

from attnserve.checks.held_out import HeldOut
from attnserve.limits import MIN_GAIN, ROUNDING
from attnserve.planning.search.front_search import MAX_CANDIDATES, FrontSearch, TrainChoice
from attnserve.planning.search.judge import Candidate, VerifiedCandidate
from graph_passes.errors import CheckFailed

__all__ = ["LeastLossySearch"]

TIME_MARGIN = 0.05
"""The least share of the way between two measured speeds by which the next choice differs from each
of them. With a larger share, the steps are closer to halves."""


class LeastLossySearch(FrontSearch):
    """Searches for the choice with the least loss that reaches a speed-up of the whole model."""

    trains_faster = False

    @property
    def speedup(self) -> float:
        assert self.goal.target_speedup is not None
        return self.goal.target_speedup

    def run(self) -> Candidate:
        first = self._measure_speedup(0)
        if first >= self.speedup:
            return self.build_first()
        last = self._measure_speedup(-1)
        if last < self.speedup:
            raise CheckFailed(
                f"`target_speedup` is {self.speedup}: the fastest model found runs {last:.2f}x as "
                "fast",
                "lower it" + ("" if "ffn" in self.goal.allow else ", or let `allow` name ffn"),
                code="search.target_speedup",
            )
        return self._run_between(first, last)

    def run_from_fastest(self) -> Candidate | None:
        last = self._measure_speedup(-1)
        if last < self.speedup:
            return None
        first = self._measure_speedup(0)
        return self.build_first() if first >= self.speedup else self._run_between(first, last)

    def _run_between(self, first: float, last: float) -> Candidate:
        """Search between the first choice, which is too slow, and the last, by their speed-ups."""
        low, high = 0, len(self.front.choices) - 1
        reached = {low: first, high: last}  # by index
        for _ in range(MAX_CANDIDATES):
            if high - low < 2 or self.front.is_near(low, high):
                break
            index = min(max(self._expected(low, high, reached), low + 1), high - 1)
            reached[index] = self._measure_speedup(index)
            if reached[index] < self.speedup:
                low = index
                continue
            high = index
            if reached[index] < MIN_GAIN * self.speedup:
                break
        return self.build(self.front.choices[high])

    def verify(self, candidate: Candidate | None) -> VerifiedCandidate:
        """Verify a candidate once: the goal limits no loss."""
        assert candidate is not None
        return VerifiedCandidate(candidate, [self.judge.verify(candidate, HeldOut.VERIFY)])

    def train_choices(self, untrained: Candidate, rounds: int, train: TrainChoice) -> None:
        """Train the choice without training itself, which must lose less than before."""
        train(untrained.choice, untrained.loss * (1 - ROUNDING), 1)

    def allowed_trained_loss(self, untrained: Candidate, part: HeldOut) -> float:
        """The loss of the candidate without training on the same data."""
        return self.judge.verify(untrained, part).loss

    def _measure_speedup(self, index: int) -> float:
        return self.judge.measure_speedup(self.build(self.front.choices[index]))

    def _expected(self, low: int, high: int, reached: Mapping[int, float]) -> int:
        """The index at which a speed-up is expected, by the measured times of two neighbors."""
        slow, fast = 1 / reached[low], 1 / reached[high]
        choices = self.front.choices
        start, end = (self.front.predicted_ms(choices[index]) for index in (low, high))
        share = (slow - 1 / self.speedup) / max(slow - fast, 1e-9)
        share = min(max(share, TIME_MARGIN), 1 - TIME_MARGIN)
        return self.front.first_within(start + share * (end - start))
