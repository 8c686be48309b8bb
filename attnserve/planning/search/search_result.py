"""The result of a search: the verified plan if it is faster than the original, or no change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from attnserve.limits import MIN_REMOVAL_GAIN, MIN_SPEEDUP
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import Fidelity, ServedSpeed
from attnserve.models.search_record import HeldOutComparison, SearchFidelity
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.plan_file import FORMAT, PlanRecord
from attnserve.planning.runtime_verification import verify_in_other_runtimes
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, TimedCandidate, VerifiedCandidate
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.by_length import RowRuntimes
from attnserve.versions import versions
from graph_passes.errors import CheckFailed, Refusal

__all__ = ["SearchResult", "result_of", "time_or_replace"]

ITSELF = HeldOutComparison(
    fidelity=Fidelity(mean_cosine=1.0, min_cosine=1.0, data="the original itself"), loss=0.0
)
"""The comparison of the original with itself, which needs no run."""


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The result of a search.

    Attributes:
        record: The content of plan.json.
        state: The model after all steps of the plan.
        other_runtimes: The comparisons in other runtimes in which it keeps its quality; none if
            the original is returned.
    """

    record: PlanRecord
    state: State
    other_runtimes: Mapping[RowRuntimes, Fidelity] = field(
        default_factory=dict[RowRuntimes, Fidelity]
    )


def result_of(search: FrontSearch, verified: VerifiedCandidate) -> SearchResult:
    """The verified plan, or an empty one if it is not faster than the original.

    Raises:
        CheckFailed: It misses the requested speed-up.
    """
    if verified.refusal is not None:
        return _no_gain(search, verified, verified.refusal)
    final, timed = time_or_replace(search, verified)
    refusal = timed.refusal
    target_speedup = search.goal.target_speedup or 1
    # The search reached it in another measurement.
    if refusal is None and timed.speedup < MIN_SPEEDUP * target_speedup:
        refusal = Refusal("slow", f"the model runs {timed.speedup:.2f}x as fast")
    if refusal is None:
        return _gain(search, final, timed)
    if target_speedup > 1:
        raise CheckFailed(
            f"`target_speedup` is {target_speedup:g}: {refusal}",
            "lower it, or search for `keep`",
            code="search.target_speedup",
        )
    return _no_gain(search, final, refusal)


def time_or_replace(
    search: FrontSearch, verified: VerifiedCandidate
) -> tuple[VerifiedCandidate, TimedCandidate]:
    """A verified candidate and its speed, or those of an unreduced one.

    The unreduced one is verified too. It is the result if the candidate is refused for its speed,
    or is hardly faster.
    """
    timed = search.judge.time(verified.candidate)
    if verified.candidate.is_unreduced:
        return verified, timed
    unreduced = search.unreduced.run_from_fastest()
    if unreduced is None:  # no unreduced choice meets the goal
        return verified, timed
    reason = _reason_against(search, timed, unreduced)
    if not reason:
        return verified, timed
    other = search.unreduced.verify(unreduced)
    if other.refusal is not None:
        return verified, timed
    if other.candidate is not unreduced:  # more blocks stay float32
        reason = _reason_against(search, timed, other.candidate)
        if not reason:
            return verified, timed
    note = f"nothing is removed: {reason}"
    recovered = verified.recovered and verified.recovered.without_gain(note)
    replaced = replace(other, note=note, recovered=recovered)
    return replaced, search.judge.time(other.candidate)


def _reason_against(search: FrontSearch, reduced: TimedCandidate, unreduced: Candidate) -> str:
    """Why removals are not worth their loss; empty if they are."""
    if reduced.refusal is not None:
        return f"with a removal {reduced.refusal}"
    speedup = search.judge.measure_speedup_over(unreduced, reduced.candidate)
    if speedup.low >= MIN_REMOVAL_GAIN:
        return ""
    return (
        f"the best removal runs at {speedup.value:.2f}x ({speedup.low:.2f} to {speedup.high:.2f}) "
        f"the speed of the fused original in {search.front.precision}, expected at least "
        f"{MIN_REMOVAL_GAIN}x"
    )


def _gain(search: FrontSearch, verified: VerifiedCandidate, timed: TimedCandidate) -> SearchResult:
    """A plan that meets the goal and is faster than the original."""
    state, judge, last = verified.candidate.state, search.judge, verified.verifications[-1]
    others = verify_in_other_runtimes(
        judge.untimed.labeled("other runtimes"),
        state.result,
        last.fidelity,
        search.goal.keep,
        judge.task,
    )
    speed = judge.served.speed_of(state.model, state.result, state.plan, others)
    # One measurement in one sentence: those of the search are others.
    speedup = timed.speedup if speed is None else speed.over_exported
    verdict = f"{speedup:.2f}x as fast, keeping {_kept(last, search.goal.task)}"
    if speed is not None:
        verdict += f": {speed.describe(state.plan.precision)}"
    if verified.recovered is not None and verified.recovered.gain:
        verdict += f" ({verified.recovered.verdict})"
    if verified.note:
        verdict += f"; {verified.note}"
    return SearchResult(_record(search, verified, verdict, timed, speed), state, others)


def _kept(verification: HeldOutComparison, task: str | None) -> str:
    """The result of a verification, in words."""
    parts: list[str] = []
    if (quality := verification.quality) is not None:
        parts.append(f"{quality.measure} {quality.value:.4f}")
    if (share := verification.share) is not None:
        parts.append(
            f"{share.value:.2%} of the {task} score (standard error {share.standard_error:.2%})"
        )
    return ", ".join(parts)


def _no_gain(search: FrontSearch, verified: VerifiedCandidate, refusal: Refusal) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {refusal}; the original is returned"
    recovered = verified.recovered and verified.recovered.without_gain(refusal.reason)
    job = search.judge.job
    state = start(Plan(), job, job.original)
    return SearchResult(_record(search, replace(verified, recovered=recovered), verdict), state)


def _record(
    search: FrontSearch,
    verified: VerifiedCandidate,
    verdict: str,
    timed: TimedCandidate | None = None,
    served: ServedSpeed | None = None,
) -> PlanRecord:
    """The content of plan.json.

    Args:
        verified: The candidate that is explained.
        timed: Its speed; None if the original is returned in its place.
        served: The speed-ups of fusion, precision and removal.
    """
    front, job, candidate = search.front, search.judge.job, verified.candidate
    gain = timed is not None
    last = verified.verifications[-1] if gain else ITSELF
    return PlanRecord(
        format=FORMAT,
        model=Source(file=job.artifact.model.name, sha256=fingerprint(job.artifact)),
        calibration=job.required_data.source,
        goal=search.goal,
        verdict=verdict,
        gain=gain,
        fidelity=SearchFidelity(**last.fidelity.stated, share=last.share),
        quality_to_choose=candidate.measured.quality if gain else None,
        verifications=tuple(verified.verifications) if gain else (),
        speedup=timed.speedup if timed else 1.0,
        speeds=tuple(timed.speeds) if timed else (),
        speedups=served,
        decisions=tuple(explain(front, candidate.choice)),
        plan=candidate.state.plan if gain else Plan(),
        front=tuple(front_points(front, search.judge.measured)),
        latency_ms=front.latency.recorded(SCHEMES[front.precision].rest),
        timed_runtime=search.judge.timed_runtime,
        machine=front.latency.table.setting,
        versions=versions(),
        recovered=verified.recovered,
    )
