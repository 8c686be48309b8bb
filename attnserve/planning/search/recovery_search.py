"""Search for faster choices that meet the goal after training (``attnserve.recovery``).

Each round builds a choice beyond the one that was found without training, trains it to give the
outputs of the original, and measures it on the data to choose. The next round moves to a faster
choice if the goal was met, and to a slower one if not. The fastest trained choice that
meets the goal is verified on unused held-out data. If it fails, the next one is verified on
other data. The fallback is the choice without training, which was selected before any verification,
so that the same data can be used for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.limits import MIN_GAIN, ROUNDING
from attnserve.literals import Measure
from attnserve.models.search_record import Round, TrainingRounds, Verification
from attnserve.options import Goal
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.steps import TRAININGS, Train
from attnserve.planning.search.front_search import (
    INTERPOLATE,
    TIGHT,
    BisectStep,
    FrontSearch,
    bisect,
    first_guess,
    power_of,
)
from attnserve.planning.search.judge import Candidate
from attnserve.runtime.cache import digest
from attnserve.versions import package_versions
from graph_passes.errors import AttnserveError, InvariantBroken, Refusal

__all__ = ["RecoverySearch", "training_of"]

ROUNDS = 3

STEP = 2.0
"""The predicted loss grows or shrinks by at most this factor from one round to the next; the first
round takes this many times the loss of the choice without training."""


def training_of(goal: Goal, minutes: float = 0.0) -> Train:
    """The training step of a search; a task score cannot select weights."""
    measure: Measure = "auto" if goal.measure == "score" else goal.measure
    return replace(TRAININGS[goal.training], minutes=minutes, measure=measure)


@dataclass(eq=False)
class RecoverySearch:
    """Rounds of building, training and measuring.

    Attributes:
        key: The name of the search's checkpoint.
        seconds: The time left for training.
        rounds: The rounds so far.
        found: The trained candidates that meet the goal, the fastest first.
        verifications: The verifications of trained candidates, in order.
        report: The rounds and their result, after ``run``.
    """

    front_search: FrontSearch
    key: str
    seconds: float
    rounds: list[Round] = field(default_factory=list[Round])
    found: list[Candidate] = field(default_factory=list[Candidate])
    verifications: list[Verification] = field(default_factory=list[Verification])
    report: TrainingRounds | None = None
    _trained: list[tuple[Train, str]] = field(default_factory=list[tuple[Train, str]])

    def run(self, untrained: Candidate | None) -> Candidate | None:
        """Train choices that are faster than ``untrained``, and verify the best.

        Without ``keep``, the choice itself is trained. An error in a round ends the rounds.

        Returns:
            The verified candidate; None if the one without training is better.
        """
        if untrained is None:
            self._report_no_gain("even the choice with the least loss misses the goal")
            return None
        problem = ""
        try:
            self._train_choices(untrained)
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            problem = error.what
        if not self.found:
            self._report_no_gain(problem or self._shortage())
            return None
        return self._verify_fastest(untrained)

    def remove_checkpoints(self) -> None:
        """Delete the training checkpoints of the search."""
        for training, key in self._trained:
            training.forget(key)

    def _train_choices(self, untrained: Candidate) -> None:
        search = self.front_search
        keep = search.goal.keep
        if keep is None:
            self._train(untrained.choice, untrained.loss * (1 - ROUNDING), self.seconds)
            return
        choices = search.front.choices
        allowed = 1 - keep
        if allowed <= ROUNDING:
            return
        measure = search.worst_measure(untrained)
        power = power_of(measure)
        trained: list[Candidate] = []

        def aim(low: int, high: int) -> int | None:
            if trained:
                share = INTERPOLATE * (allowed / max(trained[-1].loss, 1e-9)) ** power
                loss = trained[-1].choice.loss * float(np.clip(share, 1 / STEP, STEP))
            else:
                loss = STEP * untrained.choice.loss or first_guess(measure, allowed**power)
            index = min(max(search.index_of(loss), low + 1), high - 1)
            return None if search.is_near(low, index) else index

        def keeps(index: int) -> BisectStep:
            seconds = self.seconds / (ROUNDS - len(trained))
            trained.append(self._train(choices[index], allowed, seconds))
            loss = trained[-1].loss
            return BisectStep(loss <= allowed, TIGHT * allowed <= loss <= allowed)

        start = choices.index(untrained.choice)
        bisect(start, len(choices), ROUNDS, aim=aim, probe=keeps)

    def _train(self, choice: Choice, allowed: float, seconds: float) -> Candidate:
        """Build and train a choice; it is kept in ``found`` if its loss is allowed."""
        search = self.front_search
        candidate = search.build(choice)
        number = len(self.rounds) + 1
        training = training_of(search.goal, seconds / 60)
        key = digest((self.key, candidate.plan.to_json()))
        trained = search.judge.train(candidate, training, key, f"round {number}")
        result = trained.state.training
        assert result is not None
        self._trained.append((training, key))
        self.seconds = max(self.seconds - result.seconds, 0.0)
        best = min(candidate, trained, key=lambda one: one.loss) if result.is_better else candidate
        keeps = best.loss <= allowed
        self.rounds.append(
            Round(
                predicted_speedup=search.front.predicted_speedup(choice),
                predicted_loss=choice.loss,
                built_loss=candidate.loss,
                loss=best.loss,
                steps=result.steps,
                seconds=result.seconds,
                keeps=keeps,
            )
        )
        if keeps:
            self.found.insert(0, best)
        return best

    def _verify_fastest(self, untrained: Candidate) -> Candidate | None:
        """Verify the fastest trained candidate that is faster than ``untrained``, else the next.

        Without ``keep``, it must lose less than ``untrained`` on the same data.
        """
        goal, judge = self.front_search.goal, self.front_search.judge
        keep = goal.keep
        unused = [HeldOut.VERIFY, HeldOut.VERIFY_AGAIN]
        gain_without = judge.time(untrained).gain
        reason = ""
        for candidate in self.found:
            timed = judge.time(candidate)
            refusal = timed.refusal
            if keep is not None and timed.gain < MIN_GAIN * gain_without:
                without = f"{timed.gain:.2f}x with it, {gain_without:.2f}x without"
                refusal = Refusal("slow", without)
            if refusal is not None:
                reason = reason or refusal.reason
                continue
            if not unused:
                break
            part = unused.pop(0)
            allowed = judge.verify(untrained, part).loss if keep is None else allowed_loss(keep)
            verification = judge.verify(candidate, part)
            self.verifications.append(verification)
            if verification.loss <= allowed:
                self._report(gain=True, verdict=self._verdict(timed.gain, gain_without))
                return candidate
            reason = "a trained model missed the goal on held-out data"
        self._report_no_gain(reason)
        return None

    def _verdict(self, gain: float, without: float) -> str:
        minutes = sum(trained.seconds for trained in self.rounds) / 60
        count = f"{len(self.rounds)} round{'s' * (len(self.rounds) > 1)}"
        after = f"{count} of training in {minutes:.1f} minutes"
        return f"{gain:.2f}x after {after}, {without:.2f}x without"

    def _shortage(self) -> str:
        """Why no trained choice was found."""
        if not self.rounds:
            return "no faster choice is left, or no loss is allowed"
        kept = 1 - min(trained.loss for trained in self.rounds)
        return f"the best of {len(self.rounds)} trained models keeps {kept:.4f}"

    def _report_no_gain(self, reason: str) -> None:
        verdict = f"no gain by training: {reason}; the result without training is returned"
        self._report(gain=False, verdict=verdict)

    def _report(self, *, gain: bool, verdict: str) -> None:
        torch = package_versions(["torch"]).get("torch", "")
        self.report = TrainingRounds(
            rounds=tuple(self.rounds), gain=gain, verdict=verdict, torch=torch
        )
