"""Search the front for the fastest choice that keeps a share of the quality.

Example: ``keep`` 0.99 allows a measured loss of 0.01, and the first choice loses 0.

1. A choice with a predicted loss of 0.01 is built (for a ratio of 1, see ``FIRST_GUESS``). It loses
   0.005.
2. The limit is twice as far: the next one has ``EXTRAPOLATE * 2 * 0.01`` = 0.0196. It loses 0.02.
3. The limit is expected at (0.01 - 0.005) / (0.02 - 0.005) = 1/3 of the way from 0.01 to 0.0196;
   the next one is at ``INTERPOLATE / 3`` of it, 0.0131. It loses 0.0095.
4. This is allowed, and more than ``TIGHT * 0.01``: the search ends.

In place of each of these choices, the least lossy one that is as fast is built.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnserve.checks.held_out import VERIFIED_PARTS, HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.limits import ROUNDING, SAME_MS
from attnserve.models.search_record import HeldOutComparison
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.search.front_search import MAX_CANDIDATES, FrontSearch, TrainChoice
from attnserve.planning.search.judge import Candidate, VerifiedCandidate
from graph_passes.errors import CheckFailed, Refusal

__all__ = ["FastestSearch"]

TIGHT = 0.9
"""The search ends at a candidate with at least this share of the allowed loss. A larger share
brings the result closer to the limit, and needs more candidates."""

NEAR = 0.5
"""The search also ends at a candidate with this share of the allowed loss if no faster choice is
expected to be allowed. With a smaller share, an uncertain expectation may end it too early."""

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
"""The bounds of the factor by which an extrapolation increases the predicted loss. With a larger
upper one, it goes further beyond the limit, because measured losses usually are not proportional to
predicted ones."""

MIN_STEP = 0.1
"""The least share of the way from the lower to the upper choice. A larger step exceeds the limit
more often; a smaller one stays within the uncertainty of a score, which even the smallest change
has."""

MAX_STEP, MAX_FIRST_STEP = 0.9, 0.5
"""The largest share of that way, and the largest one from the first choice of the front. With a
larger share, the next choice loses more. An interpolation from no loss aims too high until a lossy
choice is known to keep enough."""

TRAINED_STEP = 2.0
"""The predicted loss grows or shrinks by at most this factor from one round of training to the
next; the first round takes this many times the loss of the choice without training."""


def first_guess(measure: str, loss: float) -> float:
    """Estimate the predicted loss that belongs to a loss by a measure, before any is measured."""
    return loss * FIRST_GUESS.get(measure, 1.0)


def power_of(measure: str) -> int:
    """The power of a loss by a measure that is proportional to the predicted loss."""
    return 2 if measure in SQUARED else 1


class FastestSearch(FrontSearch):
    """Searches for the fastest choice that keeps a share of the quality."""

    trains_faster = True

    @property
    def keep(self) -> float:
        assert self.goal.keep is not None
        return self.goal.keep

    @property
    def limit(self) -> float:
        """The loss to aim at; ``allowed`` is larger if only rounding is allowed."""
        return 1 - self.keep

    @property
    def allowed(self) -> float:
        """The largest loss of a model that keeps enough."""
        return allowed_loss(self.keep)

    def run_from_fastest(self) -> Candidate | None:
        fastest = self.build(self.front.choices[-1])
        return fastest if fastest.loss <= self.allowed else self.run()

    def run(self) -> Candidate | None:
        """Find the fastest choice that meets the goal of quality.

        Of choices that are equally fast within ``SAME_MS``, only the one with the least loss is
        measured.
        """
        least_lossy = self.build_first()
        measure = self._worst_measure(least_lossy)
        self._require_not_constant(least_lossy, measure)
        if least_lossy.loss > self.allowed:
            if self.front.precision == "float32":
                return None
            raise CheckFailed(
                f"{self.front.precision} weights alone keep {1 - least_lossy.loss:.4f} by the "
                f"measure {measure}, expected {self.keep}",
                "lower `keep`, or leave `precision` at float32",
                code="search.precision",
            )
        if least_lossy.loss >= self.limit:
            return least_lossy
        choices, power = self.front.choices, power_of(measure)
        limit, start = self.limit**power, least_lossy.loss**power
        measured = {0: start}  # by index
        guess = first_guess(measure, limit - start)
        low, high = 0, len(choices)
        for _ in range(MAX_CANDIDATES):
            index = self._next_faster(guess, low)
            if index >= high:
                break
            loss = measured[index] = self._measure_loss(choices[index]) ** power
            low, high = (index, high) if loss <= limit else (low, index)
            if TIGHT * limit <= loss <= limit:
                break
            expected = self._expected(low, high, limit, measured)
            is_near = measured[low] >= NEAR * limit
            if is_near and not self._is_faster(self.front.index_of(expected), low):
                break
            guess = self._next_guess(low, high, expected)
        return self.build(choices[low])

    def _require_not_constant(self, candidate: Candidate, measure: str) -> None:
        """Check that a constant predictor does not meet the goal.

        Raises:
            CheckFailed: It does, in an output that the goal limits.
        """
        limited = candidate.measured.qualities if self.goal.measure != "score" else ()
        # The second condition of top1 is one that a constant predictor never meets.
        constant = max((q.constant for q in limited if q.measure != "top1"), default=0.0)
        if constant >= self.keep:
            raise CheckFailed(
                f"`keep` is {self.keep}, and a constant predictor keeps {constant:.3f} "
                f"by the measure {measure}",
                "choose another `measure`, or a higher `keep`",
                code="search.constant",
            )

    def _least_lossy_as_fast(self, index: int) -> int:
        """The first choice that is as fast as another one within ``SAME_MS``, by index."""
        return self.front.first_within(SAME_MS * self._ms(index))

    def _is_faster(self, index: int, low: int) -> bool:
        """Whether a choice is faster than another one by more than ``SAME_MS``."""
        return self._ms(index) * SAME_MS <= self._ms(low)

    def _next_faster(self, loss: float, low: int) -> int:
        """The choice of a predicted loss, or a less lossy one that is as fast, by index.

        It is faster than the choice ``low``: the end of the front if none is.
        """
        faster = self.front.first_within(self._ms(low) / SAME_MS)
        return max(faster, self._least_lossy_as_fast(max(self.front.index_of(loss), low)))

    def _ms(self, index: int) -> float:
        return self.front.predicted_ms(self.front.choices[index])

    def verify(self, candidate: Candidate | None) -> VerifiedCandidate:
        if candidate is None:
            first = self.build_first()
            return VerifiedCandidate(
                first, (), self._missed("choice with the least loss", first.loss)
            )
        verifications: list[HeldOutComparison] = []
        for number, part in enumerate(VERIFIED_PARTS, start=1):
            if number == len(VERIFIED_PARTS):
                candidate = self.build_first()
            elif verifications:
                candidate = self._step_back(candidate, verifications[-1].loss)
            verifications.append(self.judge.verify(candidate, part))
            if verifications[-1].loss <= self.allowed:
                return VerifiedCandidate(candidate, verifications)
            if not candidate.choice.loss:
                break
        if not candidate.choice.loss and self.front.precision == "float32":
            return VerifiedCandidate(candidate, verifications)  # outputs differ by rounding only
        missed = self._missed("best choice", verifications[-1].loss, " on held-out data")
        return VerifiedCandidate(candidate, verifications, missed)

    def _missed(self, choice: str, loss: float, data: str = "") -> Refusal:
        return Refusal("quality", f"the {choice} reaches {1 - loss:.4f}{data}, goal {self.keep:g}")

    def _step_back(self, candidate: Candidate, loss: float) -> Candidate:
        """Build a choice with less predicted loss, after the verification of another one failed.

        Its loss is estimated from the mean of both measurements of the failed choice, because a
        failed verification alone is biased: it failed partly by chance.
        """
        estimate = max((candidate.loss + loss) / 2, self.limit)
        share = (self.limit / estimate) ** power_of(self._worst_measure(candidate))
        index = self.front.index_of(CAREFUL * candidate.choice.loss * share)
        return self.build(self.front.choices[self._least_lossy_as_fast(max(index, 0))])

    def train_choices(self, untrained: Candidate, rounds: int, train: TrainChoice) -> None:
        """Train choices beyond the one without training, unless only rounding is allowed."""
        choices, limit = self.front.choices, self.limit
        if limit <= ROUNDING:
            return
        measure = self._worst_measure(untrained)
        power = power_of(measure)
        guess = TRAINED_STEP * untrained.choice.loss or first_guess(measure, limit**power)
        low, high = choices.index(untrained.choice), len(choices)
        for rounds_left in range(rounds, 0, -1):
            index = self._next_faster(min(guess, choices[high - 1].loss), low)
            if index >= high:
                break
            loss = train(choices[index], limit, rounds_left).loss
            low, high = (index, high) if loss <= limit else (low, index)
            if TIGHT * limit <= loss <= limit:
                break
            share = INTERPOLATE * (limit / max(loss, 1e-9)) ** power
            growth = float(np.clip(share, 1 / TRAINED_STEP, TRAINED_STEP))
            guess = choices[index].loss * growth

    def allowed_trained_loss(self, untrained: Candidate, part: HeldOut) -> float:
        return self.allowed

    def _measure_loss(self, choice: Choice) -> float:
        """Measure the loss of a choice, which is built unless the checkpoint has its loss."""
        return self.judge.measure_loss(choice, self.front.plan(choice))

    def _worst_measure(self, candidate: Candidate) -> str:
        """The measure with the largest loss of a candidate."""
        quality = candidate.measured.quality
        return "score" if self.goal.measure == "score" or quality is None else quality.measure

    def _expected(
        self, low: int, high: int, allowed: float, measured: Mapping[int, float]
    ) -> float:
        """The predicted loss at which the allowed loss is expected.

        It is interpolated between the measured neighbors, or extrapolated from the lower one.
        """
        choices = self.front.choices
        below, loss_below = choices[low].loss, measured[low]
        if high == len(choices):
            lossless = measured[0]
            return below * (allowed - lossless) / max(loss_below - lossless, 1e-9)
        share = (allowed - loss_below) / max(measured[high] - loss_below, 1e-9)
        return below + share * (choices[high].loss - below)

    def _next_guess(self, low: int, high: int, expected: float) -> float:
        """The predicted loss of the next candidate, near the expected one and within bounds."""
        choices = self.front.choices
        below = choices[low].loss
        if high == len(choices):
            growth = expected / max(below, 1e-9)
            return below * float(np.clip(EXTRAPOLATE * growth, MIN_GROWTH, MAX_GROWTH))
        span = choices[high].loss - below
        share = (expected - below) / max(span, 1e-9)
        most = MAX_STEP if low else MAX_FIRST_STEP
        return below + float(np.clip(INTERPOLATE * share, MIN_STEP, most)) * span
