"""The result of a search: the verified plan if it is faster than the original, or no change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnserve.limits import MIN_SPEEDUP
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import Fidelity, ServedSpeed
from attnserve.models.search_record import HeldOutComparison, SearchFidelity, TrainingRounds
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.plan_file import FORMAT, PlanRecord
from attnserve.planning.runtime_verification import VerifiedRuntimes
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, TimedCandidate, VerifiedCandidate
from attnserve.planning.search.unreduced import time_or_replace
from attnserve.precision.schemes import SCHEMES
from attnserve.versions import versions
from graph_passes.errors import CheckFailed, Refusal

__all__ = ["SearchResult", "result_of"]

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
        runtimes: The runtimes in which it keeps its quality; None if the original is returned.
    """

    record: PlanRecord
    state: State
    runtimes: VerifiedRuntimes | None = None


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


def _gain(search: FrontSearch, verified: VerifiedCandidate, timed: TimedCandidate) -> SearchResult:
    """A plan that meets the goal and is faster than the original."""
    state, last, note = verified.candidate.state, verified.verifications[-1], verified.note
    runtimes = search.judge.verify_runtimes(verified.candidate, last.fidelity)
    recovered = _without_gain(verified.recovered, note) if note else verified.recovered
    speed = search.judge.served.speed_of(state.model, state.result, state.plan, runtimes)
    # One measurement in one sentence: those of the search are others.
    speedup = timed.speedup if speed is None else speed.over_exported
    verdict = f"{speedup:.2f}x as fast, keeping {_kept(last, search.goal.task)}"
    if speed is not None:
        verdict += f": {speed.describe(state.plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    if note:
        verdict += f"; {note}"
    record = _record(
        search, verified.candidate, verdict, recovered, timed, verified.verifications, speed
    )
    return SearchResult(record, state, runtimes)


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


def _without_gain(recovered: TrainingRounds | None, reason: str) -> TrainingRounds | None:
    if recovered is None:
        return None
    verdict = f"training brings no gain: {reason}"
    return recovered.model_copy(update={"gain": False, "verdict": verdict})


def _no_gain(search: FrontSearch, verified: VerifiedCandidate, refusal: Refusal) -> SearchResult:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {refusal}; the original is returned"
    recovered = _without_gain(verified.recovered, refusal.reason)
    job = search.judge.job
    state = start(Plan(), job, job.original)
    return SearchResult(_record(search, verified.candidate, verdict, recovered), state)


def _record(
    search: FrontSearch,
    candidate: Candidate,
    verdict: str,
    recovered: TrainingRounds | None,
    timed: TimedCandidate | None = None,
    verifications: Sequence[HeldOutComparison] = (),
    served: ServedSpeed | None = None,
) -> PlanRecord:
    """The content of plan.json.

    Args:
        candidate: The candidate that is explained.
        timed: Its speed; None if the original is returned in its place.
        verifications: Its verifications; empty without a speed.
        served: The speed-ups of fusion, precision and removal.
    """
    front, job, gain = search.front, search.judge.job, bool(verifications)
    last = verifications[-1] if gain else ITSELF
    return PlanRecord(
        format=FORMAT,
        model=Source(file=job.artifact.model.name, sha256=fingerprint(job.artifact)),
        calibration=job.required_data.source,
        goal=search.goal,
        verdict=verdict,
        gain=gain,
        fidelity=SearchFidelity(**last.fidelity.stated, share=last.share),
        quality_to_choose=candidate.measured.quality if gain else None,
        verifications=tuple(verifications),
        speedup=timed.speedup if timed else 1.0,
        speeds=tuple(timed.speeds) if timed else (),
        speedups=served,
        decisions=tuple(explain(front, candidate.choice)),
        plan=candidate.state.plan if gain else Plan(),
        front=tuple(front_points(front, search.judge.measured)),
        latency_ms=front.latency.recorded(SCHEMES[front.precision].rest),
        timed_runtime=search.judge.runtime,
        machine=front.latency.table.setting,
        versions=versions(),
        recovered=recovered,
    )
