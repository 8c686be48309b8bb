"""Verify the choice of a search on unused data, and report it, or that nothing was gained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import ShapeLatency
from attnserve.models.search_record import TrainingRounds
from attnserve.options import Goal
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Built, SpeedCheck
from attnserve.planning.search.report import PlanReport, Verification
from attnserve.planning.served_speed import ServedTimer
from attnserve.versions import versions
from graph_passes.errors import CheckFailed

__all__ = ["SearchResult", "Verified", "prefer_no_removal", "result_of", "verify_choice"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The report of a search, and the model after all steps of the plan."""

    report: PlanReport
    state: State


class Verified(NamedTuple):
    """The result of verifications.

    Attributes:
        best: The choice that meets the goal on this data; None if none does.
        verifications: The verifications, in order.
    """

    best: Built | None
    verifications: list[Verification]


def verify_choice(front_search: FrontSearch, best: Built | None) -> Verified:
    """Verify a choice on data that no choice has seen, and others if it fails (``_attempts``).

    ``best`` of the result is None if even the least lossy choice misses the goal after conversion.
    """
    verifications = list[Verification]()
    if best is None:
        return Verified(None, verifications)
    keep = front_search.goal.keep
    for attempt in _attempts(front_search, best, verifications):
        verifications.append(front_search.judge.verify(attempt.built, attempt.part))
        best = attempt.built
        if keep is None or verifications[-1].loss <= allowed_loss(keep):
            return Verified(best, verifications)
        if not best.choice.loss:
            break
    # Without loss and conversion, outputs differ by rounding only: it is returned nevertheless.
    is_exact = not best.choice.loss and front_search.precision == "float32"
    return Verified(best if is_exact else None, verifications)


class _Attempt(NamedTuple):
    """A choice to verify, and the data."""

    built: Built
    part: HeldOut


def _attempts(
    front_search: FrontSearch, best: Built, verifications: Sequence[Verification]
) -> Iterator[_Attempt]:
    """Choices to verify in order, each if the one before failed, and the data.

    After two failures no unused data is left: a third choice is measured on all held-out data, by
    its bounds. This data was used before, but only for choices with more loss.

    Args:
        verifications: The verifications so far.
    """
    keep = front_search.goal.keep
    yield _Attempt(best, HeldOut.VERIFY)
    assert keep is not None
    careful = front_search.more_careful(best, verifications[-1].loss, keep)
    yield _Attempt(careful, HeldOut.VERIFY_AGAIN)
    more_careful = front_search.more_careful(careful, verifications[-1].loss, keep)
    yield _Attempt(more_careful, HeldOut.ALL)
    yield _Attempt(front_search.least_lossy(), HeldOut.VERIFY_AGAIN)


class Selected(NamedTuple):
    """The choice that a search returns.

    Attributes:
        verifications: Its verifications, in order.
        note: Why it removes nothing, although a choice with a removal was found; else empty.
    """

    best: Built
    verifications: Sequence[Verification]
    note: str = ""


def prefer_no_removal(
    front_search: FrontSearch, best: Built, verifications: Sequence[Verification]
) -> Selected:
    """The best choice, or the choice without removal if it is about as fast."""
    if not best.plan.lossy_blocks:
        return Selected(best, verifications)
    unreduced = front_search.without_removal()
    if unreduced.fastest is None:  # it misses the speed-up of the goal
        return Selected(best, verifications)
    gain = front_search.judge.speedup_over(unreduced.fastest, best)
    if gain.low >= MIN_REMOVAL_GAIN:
        return Selected(best, verifications)
    verified, others = verify_choice(*unreduced)
    if verified is not None and verified is not unreduced.fastest:  # more blocks stay float32
        gain = front_search.judge.speedup_over(verified, best)
    if verified is None or gain.low >= MIN_REMOVAL_GAIN:
        return Selected(best, verifications)
    reason = (
        f"nothing is removed: the best removal runs at {gain.value:.2f}x ({gain.low:.2f} to "
        f"{gain.high:.2f}) the speed of the fused original in {front_search.precision}, expected "
        f"at least {MIN_REMOVAL_GAIN}x"
    )
    return Selected(verified, others, reason)


def result_of(
    front_search: FrontSearch,
    best: Built | None,
    verifications: Sequence[Verification],
    recovered: TrainingRounds | None = None,
) -> SearchResult:
    """The best choice, or an empty plan if it is not faster than the original.

    Raises:
        CheckFailed: It misses the requested speed-up.
    """
    if best is None:
        return _missed(front_search, verifications, recovered)
    selected, timed = _timed(front_search, prefer_no_removal(front_search, best, verifications))
    if not timed.refusal:
        return _gain(front_search, selected, timed, recovered)
    target_speedup = front_search.goal.target_speedup or 1
    if target_speedup > 1:
        raise CheckFailed(
            f"`target_speedup` is {target_speedup:g}: {timed.refusal}",
            "lower it, or search for `keep`",
            code="search.target_speedup",
        )
    return _no_gain(front_search, selected.best, timed.refusal, recovered, timed.speeds)


def _missed(
    front_search: FrontSearch,
    verifications: Sequence[Verification],
    recovered: TrainingRounds | None,
) -> SearchResult:
    """The original, because no choice keeps the quality of the goal."""
    least_lossy, keep = front_search.least_lossy(), front_search.goal.keep
    reason = (
        f"the best choice reaches {1 - verifications[-1].loss:.4f} on held-out data, goal {keep:g}"
        if verifications
        else f"the choice with the least loss reaches {1 - least_lossy.loss:.4f}, goal {keep:g}"
    )
    return _no_gain(front_search, least_lossy, reason, recovered)


def _timed(front_search: FrontSearch, selected: Selected) -> tuple[Selected, SpeedCheck]:
    """Time a choice beside the original, and another one if a removal makes it too slow."""
    timed = front_search.judge.time(selected.best)
    if timed.refusal and selected.best.plan.lossy_blocks:  # for example, it is slower at a length
        verified, verifications = verify_choice(*front_search.without_removal())
        if verified is not None:
            note = f"nothing is removed: with a removal {timed.refusal}"
            return Selected(verified, verifications, note), front_search.judge.time(verified)
    return selected, timed


def _gain(
    front_search: FrontSearch,
    selected: Selected,
    timed: SpeedCheck,
    recovered: TrainingRounds | None,
) -> SearchResult:
    """A choice that meets the goal and is faster than the original."""
    best, verifications, note = selected
    if recovered is not None and note:
        recovered = _without_gain(recovered, note)
    verification = verifications[-1]
    speed = ServedTimer(front_search.judge.job).measure(best.state.model, best.model, best.plan)
    verdict = f"{timed.gain:.2f}x as fast, keeping {_kept(verification, front_search.goal)}"
    if speed is not None:
        verdict += f": {speed.describe(best.plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    verdict += f"; {note}" if note else ""
    report = replace(
        _report(front_search, best, verdict),
        plan=best.plan,
        gain=True,
        fidelity=verification.fidelity,
        share=verification.share,
        speeds=timed.speeds,
        choose=best.fidelity,
        proofs=tuple(verifications),
        recovered=recovered,
        served_speed=speed,
    )
    return SearchResult(report, best.state)


def _kept(verification: Verification, goal: Goal) -> str:
    """What a verification found, in words."""
    parts: list[str] = []
    if verification.fidelity.quality is not None:
        quality = verification.fidelity.quality
        parts.append(f"{quality.measure} {quality.value:.4f}")
    if verification.share is not None:
        parts.append(
            f"{verification.share.value:.2%} of the {goal.task} score (standard error "
            f"{verification.share.standard_error:.2%})"
        )
    return ", ".join(parts)


def _without_gain(recovered: TrainingRounds, reason: str) -> TrainingRounds:
    verdict = f"training brings no gain: {reason}"
    return recovered.model_copy(update={"gain": False, "verdict": verdict})


def _no_gain(
    front_search: FrontSearch,
    best: Built,
    reason: str,
    recovered: TrainingRounds | None,
    speeds: Sequence[ShapeLatency] = (),
) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {reason}; the original is returned"
    if recovered is not None:
        recovered = _without_gain(recovered, reason)
    report = replace(_report(front_search, best, verdict), speeds=speeds, recovered=recovered)
    job = front_search.judge.job
    return SearchResult(report, start(Plan(), job, job.original))


def _report(front_search: FrontSearch, best: Built, verdict: str) -> PlanReport:
    """The report of a search that returns the original."""
    choices, judge = front_search.choices, front_search.judge
    search_input, artifact = judge.search_input, judge.job.artifact
    return PlanReport(
        model=Source(file=artifact.model.name, sha256=fingerprint(artifact)),
        calibration=search_input.data.source,
        asked=search_input.asked,
        verdict=verdict,
        layers=explain(choices, best.choice),
        front=front_points(choices, judge.measured),
        latency_ms=choices.timing.to_json(),
        versions=versions(),
        machine=choices.timing.table.setting,
    )
