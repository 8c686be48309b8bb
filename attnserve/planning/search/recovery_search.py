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

from attnserve.checks.held_out import HeldOut
from attnserve.limits import MIN_GAIN
from attnserve.literals import Measure
from attnserve.models.search_record import HeldOutComparison, Round, TrainingRounds
from attnserve.options import Goal
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.plan import TRAININGS, Train
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, VerifiedCandidate
from attnserve.runtime.cache import digest
from attnserve.versions import package_versions
from graph_passes.errors import AttnserveError, InvariantBroken, Refusal

__all__ = ["RecoverySearch", "training_of"]

ROUNDS = 3


def training_of(goal: Goal) -> Train:
    """The training of a search within its time; a task score cannot select weights."""
    measure: Measure = "auto" if goal.measure == "score" else goal.measure
    return replace(TRAININGS[goal.training], minutes=goal.recover or 0.0, measure=measure)


@dataclass(eq=False)
class RecoverySearch:
    """Rounds of building, training and measuring.

    Attributes:
        search: The search without training.
        training: The training, with the time of all rounds.
        key: The name of the search's checkpoint.
        rounds: The rounds so far.
        found: The candidates of the rounds that meet the goal, the fastest first; without the
            training where that is better.
        verifications: The verifications of trained candidates, in order.
    """

    search: FrontSearch
    training: Train
    key: str
    rounds: list[Round] = field(default_factory=list[Round])
    found: list[Candidate] = field(default_factory=list[Candidate])
    verifications: list[HeldOutComparison] = field(default_factory=list[HeldOutComparison])

    def verify(self, untrained: Candidate | None) -> VerifiedCandidate:
        """Train choices that may be better than ``untrained``, and verify the best one.

        An error in a round ends the rounds. Without a better one, ``untrained`` is verified.
        """
        if untrained is None:
            rounds = self._no_gain("even the choice with the least loss misses the goal")
        else:
            trained, rounds = self._train_choices(untrained)
            if trained is not None:
                return VerifiedCandidate(trained, self.verifications, recovered=rounds)
        verified = self.search.verify(untrained)
        verifications = [*self.verifications, *verified.verifications]
        return replace(verified, verifications=verifications, recovered=rounds)

    def _train_choices(self, untrained: Candidate) -> tuple[Candidate | None, TrainingRounds]:
        """The verified candidate, None if ``untrained`` is better, and the rounds."""
        problem = ""
        try:
            self.search.train_choices(untrained, ROUNDS, self._train)
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            problem = error.what
        if self.found:
            return self._verify_fastest(untrained)
        return None, self._no_gain(problem or self._shortage())

    def _train(self, choice: Choice, allowed: float, rounds: int) -> Candidate:
        """Build and train a choice; it is kept in ``found`` if its loss is allowed."""
        search = self.search
        candidate = search.build(choice)
        minutes = self.training.minutes - sum(each.seconds for each in self.rounds) / 60
        training = replace(self.training, minutes=max(minutes, 0.0) / rounds)
        key = digest((self.key, candidate.state.plan.to_json()))
        trained = search.judge.train(candidate, training, key, f"round {len(self.rounds) + 1}")
        result = trained.state.training
        assert result is not None
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

    def _verify_fastest(self, untrained: Candidate) -> tuple[Candidate | None, TrainingRounds]:
        """Verify the fastest trained candidate that is better than ``untrained``, else the next."""
        search, judge = self.search, self.search.judge
        unused = [HeldOut.VERIFY, HeldOut.VERIFY_AGAIN]
        speedup_without = judge.time(untrained).speedup
        reason = ""
        for candidate in self.found:
            timed = judge.time(candidate)
            speedup, refusal = timed.speedup, timed.refusal
            if search.trains_faster and speedup < MIN_GAIN * speedup_without:
                without = f"{speedup:.2f}x with it, {speedup_without:.2f}x without"
                refusal = Refusal("slow", without)
            if refusal is not None:
                reason = reason or refusal.reason
                continue
            if not unused:
                break
            part = unused.pop(0)
            allowed = search.allowed_trained_loss(untrained, part)
            verification = judge.verify(candidate, part)
            self.verifications.append(verification)
            if verification.loss <= allowed:
                if not candidate.state.plan.trainings:
                    return candidate, self._no_gain("a faster choice meets the goal without it")
                return candidate, self._rounds(True, self._verdict(speedup, speedup_without))
            reason = "a trained model missed the goal on held-out data"
        return None, self._no_gain(reason)

    def _verdict(self, speedup: float, without: float) -> str:
        minutes = sum(trained.seconds for trained in self.rounds) / 60
        count = f"{len(self.rounds)} round{'s' if len(self.rounds) > 1 else ''}"
        after = f"{count} of training in {minutes:.1f} minutes"
        return f"{speedup:.2f}x after {after}, {without:.2f}x without"

    def _shortage(self) -> str:
        """Why no trained choice was found."""
        if not self.rounds:
            return "no faster choice is left, or no loss is allowed"
        kept = 1 - min(trained.loss for trained in self.rounds)
        return f"the best of {len(self.rounds)} trained models keeps {kept:.4f}"

    def _no_gain(self, reason: str) -> TrainingRounds:
        verdict = f"no gain by training: {reason}; the result without training is returned"
        return self._rounds(False, verdict)

    def _rounds(self, gain: bool, verdict: str) -> TrainingRounds:
        torch = package_versions(["torch"]).get("torch", "")
        return TrainingRounds(rounds=tuple(self.rounds), gain=gain, verdict=verdict, torch=torch)
