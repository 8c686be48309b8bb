"""Choices that lose less at the same speed, and unreduced choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
import pytest

from attnserve.checks.held_out import HeldOut
from attnserve.literals import Precision
from attnserve.models.search_record import Verification
from attnserve.options import Goal
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search import verification
from attnserve.planning.search.front_search import (
    MAX_CANDIDATES,
    BisectStep,
    FrontSearch,
    bisect,
)
from attnserve.planning.search.judge import Candidate, SpeedCheck
from attnserve.planning.search.recovery_search import RecoverySearch
from attnserve.planning.search.verification import Verified
from attnserve.runtime.interleaved_timer import Speedup
from graph_passes.passes.prune_heads import PruneHeads
from tests.attnserve.qualities import fidelity_of, quality_of
from tests.jobs import job_of

NO_GAIN = Speedup(value=1.0, ci95=(0.98, 1.02))
FUSED, INT8 = Choice(0.0, 10.0, (0,)), Choice(0.004, 6.0, (1,))
FRONT = [FUSED, INT8, Choice(0.005, 5.05, (2,)), Choice(0.009, 5.0, (3,)), Choice(0.05, 2.0, (4,))]
MODEL = ir.from_onnx_text(
    '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Relu(x) }'
)
STATE = start(Plan(), job_of(MODEL), MODEL)
PLAN = Plan()
FIDELITY = fidelity_of(quality_of("r2", 1.0))


def candidate_of(choice: Choice, loss: float | None = None, *, reduced: bool = False) -> Candidate:
    """A candidate with this loss, by default the predicted one, and maybe without a head."""
    plan = Plan.merged([PruneHeads({"layer": [1, 0]})] if reduced else [])
    return Candidate(choice, plan, STATE, FIDELITY, None, choice.loss if loss is None else loss)


@dataclass(frozen=True)
class FakeFront:
    """A front whose choices have a loss and a time, without blocks."""

    choices: Sequence[Choice] = tuple(FRONT)
    unreduced: Sequence[Choice] = (FUSED, INT8)
    precision: Precision = "float32"

    def plan(self, choice: Choice) -> Plan:
        return PLAN

    def predicted_ms(self, choice: Choice) -> float:
        return choice.ms


@dataclass
class Judge:
    """A judge whose losses are the predicted ones; pairs differ in speed by ``gain``."""

    gain: Speedup = NO_GAIN
    built: list[Choice] = field(default_factory=list[Choice])

    def build(self, choice: Choice, plan: Plan = PLAN) -> Candidate:
        self.built.append(choice)
        return candidate_of(choice)

    def measure_speedup_over(self, slow: Candidate, fast: Candidate) -> Speedup:
        return self.gain

    def measure_speedup(self, candidate: Candidate) -> float:
        return FUSED.ms / candidate.choice.ms


def search(judge: Any, **goal: Any) -> FrontSearch:
    front: Any = FakeFront()
    return FrontSearch(Goal(**goal), front, judge)


@pytest.mark.parametrize("border", [0, 1, 40, 98, 99])
def test_bisect_finds_the_border_between_measured_indices(border: int) -> None:
    measured: list[int] = []

    def measure(index: int) -> BisectStep:
        measured.append(index)
        return BisectStep(is_low=index <= border, is_close=False)

    low, high = bisect(0, 100, 20, aim=lambda low, high: (low + high) // 2, probe=measure)
    assert (low, high) == (border, border + 1)
    assert len(measured) == len(set(measured)) <= 7 and not {0, 100} & set(measured)


def test_bisect_aim_outside_is_moved_inside_and_limits_end_it() -> None:
    measured: list[int] = []

    def run(most: int = 9, close: int = -1, least_high: int = 0) -> tuple[int, int]:
        measured.clear()

        def probe(index: int) -> BisectStep:
            measured.append(index)
            return BisectStep(False, index == close)

        def aim(low: int, high: int) -> int | None:
            return None if high == least_high else 99

        return bisect(0, 10, most, aim=aim, probe=probe)

    assert run() == (0, 1) and measured == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert run(most=2) == (0, 8)
    assert run(close=7) == (0, 7)
    assert run(least_high=8) == (0, 8)


@pytest.mark.parametrize(
    ("gain", "index"), [(NO_GAIN, 2), (Speedup(value=1.05, ci95=(1.01, 1.09)), 3)]
)
def test_find_less_lossy_takes_less_loss_at_the_same_speed(gain: Speedup, index: int) -> None:
    judge = Judge(gain)
    built = judge.build(FRONT[3])
    assert search(judge, keep=0.99).find_less_lossy(built).choice == FRONT[index]


def test_find_less_lossy_builds_nothing_where_no_choice_is_as_fast() -> None:
    judge = Judge()
    built = judge.build(FRONT[4])
    assert search(judge, keep=0.9).find_less_lossy(built) is built
    assert judge.built == [FRONT[4]]


def test_unreduced_is_the_fastest_precision_that_keeps_enough() -> None:
    unreduced = search(Judge(), keep=0.99).unreduced
    found = unreduced.run_from_fastest()
    assert found is not None and found.choice == INT8
    assert list(unreduced.front.choices) == [FUSED, INT8]


@pytest.mark.parametrize(("speedup", "choice"), [(1.6, INT8), (1.0, FUSED), (1.7, None)])
def test_unreduced_reaches_the_speedup_or_is_none(speedup: float, choice: Choice | None) -> None:
    found = search(Judge(), target_speedup=speedup).unreduced.run_from_fastest()
    assert (found and found.choice) == choice


@dataclass(frozen=True, eq=False)
class Int8Search(FrontSearch):
    """A search in int8, with this unreduced choice."""

    whole: Candidate | None = None

    @property
    def unreduced(self) -> FrontSearch:
        return self

    def run_from_fastest(self) -> Candidate | None:
        return self.whole


@dataclass
class PairedJudge:
    """A judge of two models: their speed-up by the slower one."""

    gain: Speedup
    others: dict[Candidate, Speedup] = field(default_factory=dict[Candidate, Speedup])

    def measure_speedup_over(self, slow: Candidate, fast: Candidate) -> Speedup:
        return self.others.get(slow, self.gain)


@dataclass
class Settling:
    """A search whose best choice is reduced; the other one is not."""

    gain: Speedup
    keeps: bool = True
    careful: Speedup | None = None
    """The gain over another unreduced choice, which the verification returns then."""
    verified: list[Any] = field(default_factory=list[Any])

    def run(self, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
        whole, careful = candidate_of(INT8), candidate_of(FUSED)
        best = candidate_of(FRONT[3], reduced=True)
        front: Any = FakeFront(precision="int8")
        judge: Any = PairedJudge(self.gain, {careful: self.careful} if self.careful else {})
        front_search = Int8Search(Goal(keep=0.99), front, judge, whole)

        def verify(*_: Any) -> Any:
            found = careful if self.careful else whole
            verified: Any = ["verification of the whole"]
            return Verified(found, verified, meets_goal=self.keeps)

        monkeypatch.setattr(verification, "verify_candidate", verify)
        first: Any = ["verification"]
        found = verification.prefer_unreduced(front_search, Verified(best, first))
        self.verified = list(found.verifications)
        return found.candidate, found.note


@pytest.mark.parametrize(
    ("gain", "keeps", "reduced"),
    [
        (Speedup(value=1.10, ci95=(1.03, 1.2)), True, True),
        (Speedup(value=1.10, ci95=(1.029, 1.2)), True, False),  # within the interval
        (Speedup(value=0.99, ci95=(0.98, 1.0)), True, False),
        (
            Speedup(value=0.99, ci95=(0.98, 1.0)),
            False,
            True,
        ),  # the other one failed its verification by chance
    ],
)
def test_prefer_unreduced_gain_within_three_percent_is_unreduced(
    gain: Speedup, keeps: bool, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settling = Settling(gain, keeps)
    found, note = settling.run(monkeypatch)
    assert bool(found.plan.lossy_blocks) == reduced
    assert bool(note) == (not reduced) and (reduced or "1.03x" in note)
    assert settling.verified == (["verification"] if reduced else ["verification of the whole"])


@pytest.mark.parametrize(
    ("careful", "reduced"),
    [(Speedup(value=1.5, ci95=(1.4, 1.6)), True), (Speedup(value=1.0, ci95=(0.9, 1.1)), False)],
)
def test_prefer_unreduced_compares_with_the_model_that_would_be_written(
    careful: Speedup, reduced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest choice without removal failed its verification; the one after it may be slow."""
    settling = Settling(NO_GAIN, careful=careful)
    found, note = settling.run(monkeypatch)
    assert bool(found.plan.lossy_blocks) == reduced
    assert reduced or f"{careful.value:.2f}x" in note


def test_prefer_unreduced_plan_is_not_compared() -> None:
    no_judge, plain = None, candidate_of(FUSED)
    front_search = search(no_judge, keep=0.99)  # a comparison would need one
    verified = Verified(plain, [Verification(fidelity=FIDELITY, loss=0.0)])
    assert verification.prefer_unreduced(front_search, verified) is verified


class LongFront:
    """A front of a hundred choices."""

    def __init__(self) -> None:
        self.choices = [Choice(n / 1000, 10 - n / 20, (n,)) for n in range(100)]

    def plan(self, choice: Choice) -> Plan:
        return PLAN

    def predicted_ms(self, choice: Choice) -> float:
        return choice.ms


class FakeJudge:
    """A judge whose losses follow from the predicted ones by a function."""

    def __init__(self, measure: Callable[[float], float]) -> None:
        self.measure = measure
        self.measured: dict[tuple[int, ...], tuple[float, float]] = {}

    def measure_loss(self, choice: Choice, plan: Plan = PLAN) -> float:
        loss = self.measure(choice.loss) if choice.loss else 0.0
        self.measured[choice.picks] = loss, 1 - loss
        return loss

    def build(self, choice: Choice, plan: Plan = PLAN) -> Candidate:
        return candidate_of(choice, self.measure_loss(choice))


@pytest.mark.parametrize(
    ("loss", "least"),
    [(lambda x: x, 0.009), (lambda x: 0.3 * x, 0.025), (lambda x: 3 * x, 0.0025),
     (lambda x: 0.0093 + 0.1 * x, 0.004)],
    ids=["as predicted", "less", "more", "an uncertainty that is nearly all that is allowed"],
)  # fmt: skip
def test_front_search_uses_up_the_allowed_loss_in_few_candidates(
    loss: Callable[[float], float], least: float
):
    fake: Any = FakeJudge(loss)
    front: Any = LongFront()
    found: Any = FrontSearch(Goal(keep=0.99), front, fake).run()
    assert found.choice.loss >= least
    assert loss(found.choice.loss) <= 0.01
    assert len(fake.measured) <= 1 + MAX_CANDIDATES


@dataclass
class VerifyingJudge:
    """A judge whose verifications have these losses, one after the other."""

    losses: Iterator[float]
    parts: list[HeldOut] = field(default_factory=list[HeldOut])
    """The data of each verification."""

    def build(self, choice: Choice, plan: Plan = PLAN) -> Candidate:
        return candidate_of(choice)

    def verify(self, candidate: Candidate, part: HeldOut) -> Verification:
        self.parts.append(part)
        return Verification(fidelity=FIDELITY, loss=next(self.losses))

    def time(self, candidate: Candidate) -> SpeedCheck:
        return SpeedCheck((), 2.0, "")


@dataclass(frozen=True, eq=False)
class CarefulSearch(FrontSearch):
    """A search that finds these more careful choices, one after the other."""

    careful: Iterator[Candidate] = field(default_factory=lambda: iter(()))

    def step_back(self, candidate: Candidate, loss: float, keep: float) -> Candidate:
        return next(self.careful)


@pytest.mark.parametrize(
    ("losses", "kept", "count"),
    [
        ([0.01], 0.03, 1),
        ([0.011, 0.01], 0.02, 2),
        ([0.011, 0.012, 0.0099], 0.01, 3),  # on all held-out data, by its bounds
        ([0.011, 0.012, 0.0101, 0.0], 0.0, 4),  # what loses nothing
        ([0.011, 0.0], 0.0, 2),  # nothing more careful was found
    ],
)
def test_verify_candidate_failed_verifications_lead_to_more_careful_choices(
    losses: list[float], kept: float, count: int
):
    steps = [Choice(loss, 1.0, ()) for loss in (0.03, 0.02, 0.01, 0.0)]
    careful = map(candidate_of, steps[1:] if len(losses) != 2 or losses[1] else steps[-1:])
    front: Any = FakeFront(choices=steps[-1:])
    judge: Any = VerifyingJudge(iter(losses))
    front_search = CarefulSearch(Goal(keep=0.99), front, judge, careful)
    verified = verification.verify_candidate(front_search, candidate_of(steps[0]))
    found = verified.verifications
    assert verified.meets_goal and verified.candidate.choice.loss == kept
    assert [each.loss for each in found] == losses and len(found) == count
    parts = [HeldOut.VERIFY, HeldOut.VERIFY_AGAIN, HeldOut.ALL, HeldOut.VERIFY_AGAIN]
    assert judge.parts == parts[:count]


def test_recovery_search_without_keep_compares_losses_on_the_same_data():
    judge: Any = VerifyingJudge(iter([0.01, 0.02, 0.03, 0.02]))
    front: Any = FakeFront()
    plain, *trained = (candidate_of(choice) for choice in FRONT[:3])
    front_search = FrontSearch(Goal(target_speedup=1.5), front, judge)
    recovery = RecoverySearch(front_search, "key", 60.0, found=trained)
    assert recovery._verify_fastest(plain) is trained[1]
    first, second = HeldOut.VERIFY, HeldOut.VERIFY_AGAIN
    assert judge.parts == [first, first, second, second]
