"""Verify the choice of a search on unused data, and report it, or that nothing was gained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnserve.checks.quality import allowed_loss
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Recovered, ShapeLatency, Source
from attnserve.options import Goal
from attnserve.planning.blocks.limits import MIN_REMOVAL_GAIN
from attnserve.planning.plans.state import State
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Built, Judge
from attnserve.planning.search.report import PlanReport, Proof
from attnserve.planning.served_speed import ServedTimer
from attnserve.versions import versions
from graph_passes.errors import CheckFailed

__all__ = ["SearchResult", "result_of", "verified", "worth_removing"]


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The report of a search, and the model after all steps of the plan."""

    report: PlanReport
    state: State


def verified(front_search: FrontSearch, best: Built | None) -> tuple[Built | None, list[Proof]]:
    """A choice that keeps its promise on data that no choice has seen, and all proofs, in order.

    If two choices fail, no unused data is left: a third one is measured on all held-out data, by
    its confidence bounds. If that fails too, a lossless choice is returned; None if that fails
    because of its precision.
    """
    if best is None:
        return None, []
    goal, judge = front_search.goal, front_search.judge
    proofs = [judge.verify(best, 0)]
    for attempt in (1, 2, 3):
        if goal.keep is None or proofs[-1].loss <= allowed_loss(goal.keep):
            break
        if not best.choice.loss:
            break
        if attempt < 3:
            best = front_search.more_careful(best, proofs[-1].loss, goal.keep)
        else:
            best = judge.build(judge.choices.front[0])
        proofs.append(judge.verify_on_all(best) if attempt == 2 else judge.verify(best, attempt))
    if goal.keep is not None and (best.choice.loss or front_search.precision != "float32"):
        best = best if proofs[-1].loss <= allowed_loss(goal.keep) else None
    return best, proofs


class Selected(NamedTuple):
    """The choice that a search returns.

    Attributes:
        proofs: Its verifications, in order.
        note: Why it removes nothing, although a choice with a removal was found; else empty.
    """

    best: Built
    proofs: Sequence[Proof]
    note: str = ""


def worth_removing(front_search: FrontSearch, best: Built, proofs: Sequence[Proof]) -> Selected:
    """The best choice, or the choice without removal if it is about as fast."""
    if not best.plan.lossy_blocks:
        return Selected(best, proofs)
    plain, whole = front_search.nothing_removed()
    if whole is None:  # it misses the speed-up of the goal
        return Selected(best, proofs)
    gain = front_search.judge.paired_speedup(whole, best)
    if gain.low >= MIN_REMOVAL_GAIN:
        return Selected(best, proofs)
    proved, others = verified(plain, whole)
    if proved is not None and proved is not whole:  # it keeps more blocks in float32
        gain = front_search.judge.paired_speedup(proved, best)
    if proved is None or gain.low >= MIN_REMOVAL_GAIN:
        return Selected(best, proofs)
    reason = (
        f"nothing is removed: the best removal runs at {gain.value:.2f}x ({gain.low:.2f} to "
        f"{gain.high:.2f}) the speed of the fused original in {front_search.precision}, expected "
        f"at least {MIN_REMOVAL_GAIN}x"
    )
    return Selected(proved, others, reason)


def result_of(
    front_search: FrontSearch,
    best: Built | None,
    proofs: Sequence[Proof],
    recovered: Recovered | None = None,
) -> SearchResult:
    """The best choice, or an empty plan if it is not faster than the original."""
    judge, goal, note = front_search.judge, front_search.goal, ""
    if best is not None:
        best, proofs, note = worth_removing(front_search, best, proofs)
    if best is None:
        best = judge.build(judge.choices.front[0])
        reason = (
            f"the best choice reaches {1 - proofs[-1].loss:.4f} on held-out data, "
            f"target {goal.keep:g}"
            if proofs
            else f"the lossless choice reaches {1 - best.loss:.4f}, target {goal.keep:g}"
        )
        return _no_gain(judge, best, reason, recovered)
    timed = judge.time(best)
    if timed.refusal and best.plan.lossy_blocks:  # for example, it is slower at a length
        other, others = verified(*front_search.nothing_removed())
        if other is not None:
            note = f"nothing is removed: with a removal {timed.refusal}"
            best, proofs, timed = other, others, judge.time(other)
    if timed.refusal:
        if (goal.target_speedup or 1) > 1:
            raise CheckFailed(
                f"`target_speedup` is {goal.target_speedup:g}: {timed.refusal}",
                "lower it, or search for `keep`",
                code="search.target_speedup",
            )
        return _no_gain(judge, best, timed.refusal, recovered, timed.speeds)
    if recovered is not None and note:
        recovered = _without_gain(recovered, note)
    proof = proofs[-1]
    speed = ServedTimer(judge.search_input.job).measure(best.state.model, best.model, best.plan)
    verdict = f"{timed.gain:.2f}x as fast, keeping {_kept(proof, goal)}"
    if speed is not None:
        verdict += f": {speed.describe(best.plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    verdict += f"; {note}" if note else ""
    report = replace(
        _report(judge, best, verdict),
        plan=best.plan,
        gain=True,
        fidelity=proof.fidelity,
        share=proof.share,
        speeds=timed.speeds,
        choose=best.fidelity,
        proofs=tuple(proofs),
        recovered=recovered,
        served_speed=speed,
    )
    return SearchResult(report, best.state)


def _kept(proof: Proof, goal: Goal) -> str:
    """What a verification found, in words."""
    parts: list[str] = []
    if proof.fidelity.quality is not None:
        quality = proof.fidelity.quality
        parts.append(f"{quality.measure} {quality.value:.4f}")
    if proof.share is not None:
        parts.append(
            f"{proof.share.value:.2%} of the {goal.task} score (standard error "
            f"{proof.share.standard_error:.2%})"
        )
    return ", ".join(parts)


def _without_gain(recovered: Recovered, reason: str) -> Recovered:
    verdict = f"training brings no gain: {reason}"
    return recovered.model_copy(update={"gain": False, "verdict": verdict})


def _no_gain(
    judge: Judge,
    best: Built,
    reason: str,
    recovered: Recovered | None,
    speeds: Sequence[ShapeLatency] = (),
) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {reason}; the original is returned"
    if recovered is not None:
        recovered = _without_gain(recovered, reason)
    report = replace(_report(judge, best, verdict), speeds=speeds, recovered=recovered)
    job = judge.search_input.job
    return SearchResult(report, State(job, job.original))


def _report(judge: Judge, best: Built, verdict: str) -> PlanReport:
    """The report of a search that returns the original."""
    search_input, timing = judge.search_input, judge.choices.timing
    artifact = search_input.job.artifact
    return PlanReport(
        model=Source(file=artifact.model.name, sha256=fingerprint(artifact)),
        calibration=search_input.data.source,
        asked=search_input.asked,
        verdict=verdict,
        layers=explain(judge.choices, best.choice),
        front=front_points(judge.choices, judge.measured),
        latency_ms=timing.to_json(),
        versions=versions(),
        machine=timing.table.setting,
    )
