"""The result of a search: the verified plan if it is faster than the original, or no change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import ShapeLatency
from attnserve.models.search_record import TrainingRounds, Verification
from attnserve.options import Goal
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.state import State
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, SpeedCheck
from attnserve.planning.search.report import PlanReport
from attnserve.planning.search.verification import (
    Verified,
    prefer_unreduced,
    verify_unreduced,
)
from attnserve.planning.served_speed import ServedTimer
from attnserve.versions import versions
from graph_passes.errors import CheckFailed

__all__ = ["SearchResult", "result_of"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The report of a search, and the model after all steps of the plan."""

    report: PlanReport
    state: State


def result_of(
    front_search: FrontSearch, verified: Verified, recovered: TrainingRounds | None = None
) -> SearchResult:
    """The verified plan, or an empty one if it is not faster than the original.

    Raises:
        CheckFailed: It misses the requested speed-up.
    """
    goal, judge = front_search.goal, front_search.judge
    if not verified.meets_goal:
        return _no_gain(front_search, verified.candidate, _missed(goal, verified), recovered)
    verified = prefer_unreduced(front_search, verified)
    timed = judge.time(verified.candidate)
    if timed.refusal and not verified.candidate.is_unreduced:  # for example, slower at a length
        unreduced = verify_unreduced(front_search)
        if unreduced is not None:
            note = f"nothing is removed: with a removal {timed.refusal}"
            verified = replace(unreduced, note=note)
            timed = judge.time(verified.candidate)
    if not timed.refusal:
        return _gain(front_search, verified, timed, recovered)
    target_speedup = goal.target_speedup or 1
    if target_speedup > 1:
        raise CheckFailed(
            f"`target_speedup` is {target_speedup:g}: {timed.refusal}",
            "lower it, or search for `keep`",
            code="search.target_speedup",
        )
    return _no_gain(front_search, verified.candidate, timed.refusal, recovered, timed.speeds)


def _missed(goal: Goal, verified: Verified) -> str:
    """Why no choice keeps the quality of the goal."""
    if not verified.verifications:
        reached = 1 - verified.candidate.loss
        return f"the choice with the least loss reaches {reached:.4f}, goal {goal.keep:g}"
    reached = 1 - verified.verifications[-1].loss
    return f"the best choice reaches {reached:.4f} on held-out data, goal {goal.keep:g}"


def _gain(
    front_search: FrontSearch,
    verified: Verified,
    timed: SpeedCheck,
    recovered: TrainingRounds | None,
) -> SearchResult:
    """A plan that meets the goal and is faster than the original."""
    goal, judge = front_search.goal, front_search.judge
    candidate, note = verified.candidate, verified.note
    plan, state = candidate.plan, candidate.state
    if recovered is not None and note:
        recovered = _without_gain(recovered, note)
    verification = verified.verifications[-1]
    speed = ServedTimer(judge.job).measure(state.model, candidate.model, plan)
    verdict = f"{timed.gain:.2f}x as fast, keeping {_kept(verification, goal)}"
    if speed is not None:
        verdict += f": {speed.describe(plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    if note:
        verdict += f"; {note}"
    report = replace(
        _report(front_search, candidate, verdict),
        plan=plan,
        gain=True,
        fidelity=verification.fidelity,
        share=verification.share,
        speeds=timed.speeds,
        choose=candidate.fidelity,
        verifications=tuple(verified.verifications),
        recovered=recovered,
        served_speed=speed,
    )
    return SearchResult(report, state)


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
    candidate: Candidate,
    reason: str,
    recovered: TrainingRounds | None,
    speeds: Sequence[ShapeLatency] = (),
) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {reason}; the original is returned"
    if recovered is not None:
        recovered = _without_gain(recovered, reason)
    report = replace(_report(front_search, candidate, verdict), speeds=speeds, recovered=recovered)
    job = front_search.judge.job
    return SearchResult(report, start(Plan(), job, job.original))


def _report(front_search: FrontSearch, candidate: Candidate, verdict: str) -> PlanReport:
    """The report of a search that returns the original."""
    front, judge = front_search.front, front_search.judge
    artifact, data = judge.job.artifact, judge.job.data
    return PlanReport(
        model=Source(file=artifact.model.name, sha256=fingerprint(artifact)),
        calibration=data.source,
        asked=judge.search_input.asked,
        verdict=verdict,
        layers=explain(front, candidate.choice),
        front=front_points(front, judge.measured),
        latency_ms=front.timing.to_json(),
        versions=versions(),
        machine=front.timing.table.setting,
    )
