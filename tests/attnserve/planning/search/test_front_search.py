"""Choices that lose less at the same speed, and unreduced choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import onnx_ir as ir
import pytest

from attnserve.checks.held_out import HeldOut
from attnserve.limits import SAME_MS
from attnserve.literals import Precision
from attnserve.models.search_record import GoalRecord, HeldOutComparison
from attnserve.planning.blocks.loss_curves import BlockLosses
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Distill, Plan
from attnserve.planning.search.estimates import Unit, UnitConfig
from attnserve.planning.search.fastest_search import FastestSearch
from attnserve.planning.search.front import Front
from attnserve.planning.search.front_search import MAX_CANDIDATES
from attnserve.planning.search.judge import Candidate, Judge, TimedCandidate, VerifiedCandidate
from attnserve.planning.search.least_lossy_search import LeastLossySearch
from attnserve.planning.search.model_latency import ModelLatency
from attnserve.planning.search.recovery_search import RecoverySearch
from attnserve.planning.search.search_result import time_or_replace
from attnserve.runtime.part_latency import LatencyTable
from attnserve.runtime.times import Speedup
from graph_passes.errors import Refusal
from graph_passes.passes.prune_heads import PruneHeads
from tests.attnserve.qualities import fidelity_of, quality_of
from tests.jobs import job_of

NO_GAIN = Speedup(value=1.0, ci95=(0.98, 1.02))
FUSED, INT8 = Choice(0.0, 10.0, (0,)), Choice(0.004, 6.0, (1,))
FRONT = [FUSED, INT8, Choice(0.005, 5.05, (2,)), Choice(0.009, 5.0, (3,)), Choice(0.05, 2.0, (4,))]
MODEL = ir.from_onnx_text(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
)
JOB = job_of(MODEL)
FIDELITY = fidelity_of(quality_of("r2", 1.0))
LATENCY = ModelLatency((), (), LatencyTable(None), {}, {}, (), None, 0.0)


def compared(loss: float) -> HeldOutComparison:
    return HeldOutComparison(fidelity=FIDELITY, loss=loss)


def candidate_of(choice: Choice, loss: float | None = None, *, reduced: bool = False) -> Candidate:
    """A candidate with this loss, by default the predicted one, and maybe without a head."""
    plan = Plan.merged([PruneHeads({"layer": [1, 0]})] if reduced else [])
    return Candidate(
        choice, start(plan, JOB, MODEL), compared(choice.loss if loss is None else loss)
    )


def front_of(
    choices: Sequence[Choice] = FRONT,
    unreduced: Sequence[Choice] = (FUSED, INT8),
    precision: Precision = "float32",
) -> Front:
    """A front of one unit without blocks."""
    unit = Unit((), [UnitConfig((), choice.loss, choice.ms) for choice in choices])
    return Front(LATENCY, BlockLosses({}, (), {}), [unit], choices, precision, unreduced)


@dataclass
class FakeJudge:
    """What a search of the front calls of a ``Judge``, without models.

    Attributes:
        loss: The measured loss of a lossy choice by its predicted one.
        gain: The measured speed-up of a pair of candidates.
        gains: The same by the choice of the slower one, where it differs.
        verified: The losses of the verifications, in order.
        slow: Choices that are refused for their speed.
    """

    loss: Callable[[float], float] = lambda predicted: predicted
    gain: Speedup = NO_GAIN
    gains: Mapping[Choice, Speedup] = field(default_factory=dict)
    verified: Sequence[float] = ()
    slow: Sequence[Choice] = ()
    measured: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)
    built: list[Choice] = field(default_factory=list)
    parts: list[HeldOut] = field(default_factory=list)

    def measure_loss(self, choice: Choice, plan: Plan) -> float:
        loss = self.loss(choice.loss) if choice.loss else 0.0
        self.measured[choice.picks] = loss, 1 - loss
        return loss

    def build(self, choice: Choice, plan: Plan) -> Candidate:
        self.built.append(choice)
        return candidate_of(choice, self.measure_loss(choice, plan))

    def measure_speedup_over(self, slow: Candidate, fast: Candidate) -> Speedup:
        return self.gains.get(slow.choice, self.gain)

    def measure_speedup(self, candidate: Candidate) -> float:
        return FUSED.ms / candidate.choice.ms

    def verify(self, candidate: Candidate, part: HeldOut) -> HeldOutComparison:
        self.parts.append(part)
        return compared(self.verified[len(self.parts) - 1])

    def time(self, candidate: Candidate) -> TimedCandidate:
        refusal = Refusal("slow", "it is slow") if candidate.choice in self.slow else None
        return TimedCandidate(candidate, (), 2.0, refusal)


def search(judge: FakeJudge, keep: float = 0.99, front: Front | None = None) -> FastestSearch:
    return FastestSearch(GoalRecord(keep=keep), front or front_of(), cast(Judge, judge))


def search_to(speedup: float, judge: FakeJudge) -> LeastLossySearch:
    return LeastLossySearch(GoalRecord(target_speedup=speedup), front_of(), cast(Judge, judge))


class OtherSpeedJudge(FakeJudge):
    """A judge that measures other speed-ups than the predicted ones."""

    def __init__(self, speedup: Callable[[float], float]) -> None:
        super().__init__()
        self.speedup = speedup

    def measure_speedup(self, candidate: Candidate) -> float:
        return self.speedup(super().measure_speedup(candidate))


def front_to_speed_up(choices: int) -> Front:
    """A front of choices, each of which is 1.04 times as fast as the one before it."""
    return front_of([Choice(n / 1000, 10 / 1.04**n, (n,)) for n in range(choices)])


@pytest.mark.parametrize("power", [0.7, 1.0, 1.4])
@pytest.mark.parametrize("border", [1, 2, 40, 98, 99])
def test_search_of_a_speedup_finds_the_least_lossy_choice_that_reaches_it(
    border: int, power: float
) -> None:
    """Measured speed-ups rise less or more than the predicted ones."""
    front, judge = front_to_speed_up(100), OtherSpeedJudge(lambda predicted: predicted**power)
    goal = GoalRecord(target_speedup=1.04 ** (power * (border - 0.5)))
    found = LeastLossySearch(goal, front, cast(Judge, judge)).run()
    assert found is not None and found.choice == front.choices[border]


@pytest.mark.parametrize("border", [1, 2, 40, 98, 99])
def test_search_of_a_speedup_measures_a_limited_number_of_choices_once(border: int) -> None:
    """All choices from ``border`` on are twice as fast as all before it."""
    front = front_to_speed_up(100)
    judge = OtherSpeedJudge(lambda predicted: 2.0 if predicted > 1.04 ** (border - 0.5) else 1.0)
    found = LeastLossySearch(GoalRecord(target_speedup=1.5), front, cast(Judge, judge)).run()
    *measured, last = judge.built  # the result is built again
    assert found is not None and found.choice == last and found.choice.picks[0] >= border
    assert len(measured) == len(set(measured)) <= 2 + MAX_CANDIDATES


@pytest.mark.parametrize(("target", "candidates"), [(1.5, MAX_CANDIDATES), (1.99, 1)])
def test_search_of_a_speedup_ends_at_a_choice_that_is_close_to_it(
    target: float, candidates: int
) -> None:
    """All choices but the first are twice as fast as it is."""
    judge = OtherSpeedJudge(lambda predicted: 1.0 if predicted < 1.01 else 2.0)
    goal = GoalRecord(target_speedup=target)
    LeastLossySearch(goal, front_to_speed_up(100), cast(Judge, judge)).run()
    first, last, result = 1, 1, 1
    assert len(judge.built) == first + last + candidates + result


@pytest.mark.parametrize(("keep", "index"), [(0.995, 2), (0.991, 2), (0.99, 2), (0.95, 4)])
def test_search_takes_the_least_loss_at_the_same_speed(keep: float, index: int) -> None:
    """Choice 3 loses 0.009 in place of 0.005, and is 1.01x as fast as choice 2."""
    judge = FakeJudge()
    found = search(judge, keep=keep).run()
    assert found is not None and found.choice == FRONT[index]
    assert FRONT[3].picks not in judge.measured


def test_search_goes_on_behind_an_extrapolation_that_is_cut_off() -> None:
    """The loss is a sixth of the predicted one, and one extrapolation goes three times as far."""
    front = [Choice(0.0, 10.0, (0,)), Choice(0.003, 9.0, (1,)), Choice(0.009, 8.9, (2,)),
             Choice(0.02, 7.0, (3,))]  # fmt: skip
    found = search(FakeJudge(lambda loss: loss / 6), front=front_of(front)).run()
    assert found is not None and found.choice == front[3]


@pytest.mark.parametrize(
    ("loss", "points"),
    [
        (lambda x: 0.0015 + 0.25 * x, [(0.0, 10.0), (0.0019, 8.0), (0.01, 7.95), (0.03, 5.0)]),
        (lambda x: {0.004: 0.0036, 0.012: 0.0096}[x], [(0.0, 10.0), (0.004, 8.0), (0.012, 5.0)]),
    ],
    ids=["an uncertainty and a flat front", "a front of few choices"],
)
def test_search_goes_on_if_little_of_the_allowed_loss_is_used(
    loss: Callable[[float], float], points: Sequence[tuple[float, float]]
) -> None:
    """The last choice is expected to lose too much, and does not."""
    front = [Choice(predicted, ms, (n,)) for n, (predicted, ms) in enumerate(points)]
    found = search(FakeJudge(loss), front=front_of(front)).run()
    assert found is not None and found.choice == front[-1]


def test_training_goes_on_between_a_choice_that_fails_and_one_that_passes() -> None:
    front = [Choice(loss, 10 * 0.97**n, (n,)) for n, loss in
             enumerate((0.0, 0.01, 0.011, 0.013, 0.015, 0.02, 0.03))]  # fmt: skip
    losses = {0.02: 0.03, 0.011: 0.004}
    trained: list[float] = []

    def train(choice: Choice, limit: float, rounds: int) -> Candidate:
        trained.append(choice.loss)
        return candidate_of(choice, losses.get(choice.loss, 0.0095))

    search(FakeJudge(), front=front_of(front)).train_choices(candidate_of(front[1]), 3, train)
    assert len(trained) == 3 and 0.011 < trained[-1] < 0.02


@pytest.mark.parametrize(("keep", "index"), [(0.997, 0), (0.994, 0), (0.99, 2)])
def test_search_skips_choices_that_are_hardly_faster_than_the_first(
    keep: float, index: int
) -> None:
    front = [Choice(0.0, 10.0, (0,)), Choice(0.003, 9.9, (1,)), Choice(0.009, 9.0, (2,))]
    judge = FakeJudge()
    found = search(judge, keep=keep, front=front_of(front)).run()
    assert found is not None and found.choice == front[index]
    assert front[1].picks not in judge.measured


def test_unreduced_is_the_fastest_precision_that_keeps_enough() -> None:
    unreduced = search(FakeJudge()).unreduced
    found = unreduced.run_from_fastest()
    assert found is not None and found.choice == INT8
    assert list(unreduced.front.choices) == [FUSED, INT8]


@pytest.mark.parametrize(("speedup", "choice"), [(1.6, INT8), (1.0, FUSED), (1.7, None)])
def test_unreduced_reaches_the_speedup_or_is_none(speedup: float, choice: Choice | None) -> None:
    found = search_to(speedup, FakeJudge()).unreduced.run_from_fastest()
    assert (found and found.choice) == choice


class SlowingJudge(FakeJudge):
    """A judge whose machine gets slower with each measurement."""

    def measure_speedup(self, candidate: Candidate) -> float:
        return super().measure_speedup(candidate) * 0.99 ** len(self.built)


def test_unreduced_at_the_border_of_the_speedup_is_no_error() -> None:
    found = search_to(1.64, SlowingJudge()).unreduced.run_from_fastest()
    assert found is not None and found.choice == INT8


def verified_of(candidate: Candidate) -> VerifiedCandidate:
    return VerifiedCandidate(candidate, [candidate.measured])


REDUCED = verified_of(candidate_of(FRONT[3], reduced=True))
INT8_FRONT = front_of(precision="int8")


@pytest.mark.parametrize(
    ("gain", "losses", "is_reduced"),
    [
        (Speedup(value=1.10, ci95=(1.03, 1.2)), [], True),
        (Speedup(value=1.10, ci95=(1.029, 1.2)), [0.004], False),  # within the interval
        (Speedup(value=0.99, ci95=(0.98, 1.0)), [0.004], False),
        (Speedup(value=0.99, ci95=(0.98, 1.0)), [0.02, 0.02], True),  # by chance
    ],
)
def test_a_gain_of_removal_within_three_percent_is_unreduced(
    gain: Speedup, losses: Sequence[float], is_reduced: bool
) -> None:
    """The unreduced choice may miss the goal in its own verifications."""
    judge = FakeJudge(gain=gain, verified=losses)
    found, timed = time_or_replace(search(judge, front=INT8_FRONT), REDUCED)
    assert timed.candidate is found.candidate
    assert len(judge.parts) == len(losses)
    if is_reduced:
        assert found is REDUCED
        return
    assert found.candidate.choice == INT8 and "1.03x" in found.note
    assert [verification.loss for verification in found.verifications] == losses


@pytest.mark.parametrize(
    ("gain", "is_reduced"),
    [(Speedup(value=1.5, ci95=(1.4, 1.6)), True), (Speedup(value=1.0, ci95=(0.9, 1.1)), False)],
)
def test_removal_is_compared_with_the_unreduced_model_that_would_be_written(
    gain: Speedup, is_reduced: bool
) -> None:
    """The fastest choice without removal fails its verification; the one after it may be slow."""
    judge = FakeJudge(gains={FUSED: gain}, verified=[0.02, 0.0])
    found, timed = time_or_replace(search(judge, front=INT8_FRONT), REDUCED)
    assert timed.candidate is found.candidate
    if is_reduced:
        assert found is REDUCED
    else:
        assert found.candidate.choice == FUSED and f"{gain.value:.2f}x" in found.note


def test_an_unreduced_candidate_is_not_compared() -> None:
    judge, verified = FakeJudge(), verified_of(candidate_of(FUSED))
    assert time_or_replace(search(judge), verified)[0] is verified
    assert judge.built == judge.parts == []


@pytest.mark.parametrize(("losses", "is_reduced"), [([0.004], False), ([0.02, 0.02], True)])
def test_a_reduced_candidate_that_is_refused_is_replaced_by_an_unreduced_one(
    losses: Sequence[float], is_reduced: bool
) -> None:
    """Although it is much faster than the unreduced one; that one may miss the goal."""
    gain = Speedup(value=1.5, ci95=(1.4, 1.6))
    judge = FakeJudge(gain=gain, verified=losses, slow=[FRONT[3]])
    found, timed = time_or_replace(search(judge, front=INT8_FRONT), REDUCED)
    assert (found is REDUCED) == is_reduced == (timed.refusal is not None)
    assert timed.candidate is found.candidate
    assert is_reduced or (found.candidate.choice == INT8 and "it is slow" in found.note)


LOSSES: Mapping[str, tuple[Callable[[float], float], float]] = {
    "as predicted": (lambda x: x, 0.009),
    "less": (lambda x: 0.3 * x, 0.025),
    "more": (lambda x: 3 * x, 0.0025),
    "an uncertainty that is nearly all that is allowed": (lambda x: 0.0093 + 0.1 * x, 0.004),
}
"""How the loss depends on the predicted one, and a predicted loss at which nearly all of the
allowed loss is used."""


@pytest.mark.parametrize("step", [0.97, 0.995, 0.9995])
@pytest.mark.parametrize(("loss", "least"), LOSSES.values(), ids=LOSSES)
def test_search_is_as_fast_as_a_choice_that_uses_up_the_allowed_loss(
    loss: Callable[[float], float], least: float, step: float
) -> None:
    """On a front of a hundred choices: each takes ``step`` of the time of the one before it."""
    judge = FakeJudge(loss)
    front = [Choice(n / 1000, 10 * step**n, (n,)) for n in range(100)]
    found = search(judge, front=front_of(front)).run()
    assert found is not None and loss(found.choice.loss) <= 0.01
    fast = next(choice for choice in front if choice.loss >= least)
    assert found.choice.ms <= SAME_MS * fast.ms
    assert len(judge.measured) <= 1 + MAX_CANDIDATES


STEPS = [Choice(loss, 10 - 100 * loss, (n,)) for n, loss in enumerate((0.0, 0.01, 0.02, 0.03))]


@pytest.mark.parametrize(
    ("losses", "choices", "kept"),
    [
        ([0.01], STEPS, 0.03),
        ([0.011, 0.01], STEPS, 0.02),
        ([0.011, 0.012, 0.0099], STEPS, 0.01),  # on all held-out data, by its bounds
        ([0.011, 0.012, 0.0101, 0.0], STEPS, 0.0),  # the choice that loses nothing
        ([0.011, 0.0], [STEPS[0], STEPS[3]], 0.0),  # no other choice is more careful
    ],
)
def test_verify_failed_verifications_lead_to_more_careful_choices(
    losses: list[float], choices: list[Choice], kept: float
):
    """Each lossy choice loses as much as is allowed on the rows to choose."""
    judge = FakeJudge(lambda _: 0.01, verified=losses)
    verified = search(judge, front=front_of(choices)).verify(candidate_of(STEPS[3], 0.01))
    assert verified.refusal is None and verified.candidate.choice.loss == kept
    assert [each.loss for each in verified.verifications] == losses
    parts = [HeldOut.VERIFY, HeldOut.VERIFY_AGAIN, HeldOut.ALL, HeldOut.VERIFY_AGAIN]
    assert judge.parts == parts[: len(losses)]


@pytest.mark.parametrize("trainings", [(Distill(),), ()], ids=len)
def test_recovery_search_without_keep_compares_losses_on_the_same_data(
    trainings: tuple[Distill, ...],
):
    """A result of the rounds that is better without its training is no gain of the training."""
    judge = FakeJudge(verified=[0.01, 0.02, 0.03, 0.02])
    plain, *trained = (candidate_of(choice) for choice in FRONT[:3])
    for candidate in trained:
        candidate.state.plan = Plan(trainings=trainings)
    recovery = RecoverySearch(search_to(1.5, judge), Distill(), "key", found=trained)
    found, rounds = recovery._verify_fastest(plain)
    assert found is trained[1] and rounds.gain == bool(trainings)
    assert rounds.verdict.startswith("no gain by training") == (not trainings)
    first, second = HeldOut.VERIFY, HeldOut.VERIFY_AGAIN
    assert judge.parts == [first, first, second, second]
