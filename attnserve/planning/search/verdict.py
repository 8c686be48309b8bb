"""The result of a search: the verified plan if it is faster than the original, or no change."""

from __future__ import annotations

from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import Fidelity, ServedSpeed
from attnserve.models.search_record import SearchFidelity, TrainingRounds, Verification
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import FORMAT, PlanRecord
from attnserve.planning.plans.state import State
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import SpeedCheck, Verified
from attnserve.planning.search.report import PlanReport
from attnserve.planning.search.unreduced import prefer_unreduced, time_or_replace
from attnserve.planning.served_speed import ServedTimer
from attnserve.versions import versions
from graph_passes.errors import CheckFailed, Refusal

__all__ = ["result_of"]

ITSELF = Verification(
    fidelity=Fidelity(mean_cosine=1.0, min_cosine=1.0, data="the original itself"), loss=0.0
)
"""The comparison of the original with itself, which needs no run."""


def result_of(
    search: FrontSearch, verified: Verified, recovered: TrainingRounds | None = None
) -> tuple[PlanReport, State]:
    """The verified plan, or an empty one if it is not faster than the original.

    Raises:
        CheckFailed: It misses the requested speed-up.
    """
    if verified.refusal is not None:
        return _no_gain(search, verified, verified.refusal, recovered)
    verified, timed = time_or_replace(search, prefer_unreduced(search, verified))
    if timed.refusal is None:
        return _gain(search, verified, timed, recovered)
    target_speedup = search.goal.target_speedup or 1
    if target_speedup > 1:
        raise CheckFailed(
            f"`target_speedup` is {target_speedup:g}: {timed.refusal}",
            "lower it, or search for `keep`",
            code="search.target_speedup",
        )
    return _no_gain(search, verified, timed.refusal, recovered, timed)


def _gain(
    search: FrontSearch, verified: Verified, timed: SpeedCheck, recovered: TrainingRounds | None
) -> tuple[PlanReport, State]:
    """A plan that meets the goal and is faster than the original."""
    candidate, note = verified.candidate, verified.note
    plan, state = candidate.plan, candidate.state
    if recovered is not None and note:
        recovered = _without_gain(recovered, note)
    speed = ServedTimer(search.judge.job).speed_of(state.model, candidate.model, plan)
    # One measurement in one sentence: those of the search are others.
    speedup = timed.speedup if speed is None else speed.over_exported
    kept = _kept(verified.verifications[-1], search.goal.task)
    verdict = f"{speedup:.2f}x as fast, keeping {kept}"
    if speed is not None:
        verdict += f": {speed.describe(plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    if note:
        verdict += f"; {note}"
    return _report(search, verified, verdict, recovered, timed, speed), state


def _kept(verification: Verification, task: str | None) -> str:
    """The result of a verification, in words."""
    parts: list[str] = []
    if verification.fidelity.quality is not None:
        quality = verification.fidelity.quality
        parts.append(f"{quality.measure} {quality.value:.4f}")
    if verification.share is not None:
        parts.append(
            f"{verification.share.value:.2%} of the {task} score (standard error "
            f"{verification.share.standard_error:.2%})"
        )
    return ", ".join(parts)


def _without_gain(recovered: TrainingRounds, reason: str) -> TrainingRounds:
    verdict = f"training brings no gain: {reason}"
    return recovered.model_copy(update={"gain": False, "verdict": verdict})


def _no_gain(
    search: FrontSearch,
    verified: Verified,
    refusal: Refusal,
    recovered: TrainingRounds | None,
    timed: SpeedCheck | None = None,
) -> tuple[PlanReport, State]:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {refusal}; the original is returned"
    if recovered is not None:
        recovered = _without_gain(recovered, refusal.reason)
    job = search.judge.job
    return _report(search, verified, verdict, recovered, timed), start(Plan(), job, job.original)


def _report(
    search: FrontSearch,
    verified: Verified,
    verdict: str,
    recovered: TrainingRounds | None,
    timed: SpeedCheck | None,
    served_speed: ServedSpeed | None = None,
) -> PlanReport:
    """The report of a search.

    Args:
        timed: The speed of the candidate; None if it misses the goal. If it is not enough, the
            original is returned as well.
        served_speed: The speed-ups of fusion, precision and removal.
    """
    front, job, candidate = search.front, search.judge.job, verified.candidate
    gain = timed is not None and timed.refusal is None
    plan = candidate.plan if gain else Plan()
    verification = verified.verifications[-1] if gain else ITSELF
    fidelity = verification.fidelity
    record = PlanRecord(
        format=FORMAT,
        model=Source(file=job.artifact.model.name, sha256=fingerprint(job.artifact)),
        calibration=job.required_data.source,
        goal=search.goal,
        verdict=verdict,
        gain=gain,
        fidelity=SearchFidelity(**fidelity.cosines.stated, share=verification.share),
        qualities=fidelity.qualities,
        quality_to_choose=candidate.fidelity.quality if gain else None,
        verifications=tuple(verified.verifications) if gain else (),
        speedup=1.0 if timed is None else timed.speedup,
        speeds=() if timed is None else tuple(timed.speeds),
        speedups=served_speed,
        decisions=tuple(explain(front, candidate.choice)),
        plan=plan.to_json(),
        front=tuple(front_points(front, search.judge.measured)),
        latency_ms=tuple(front.latency.to_json()),
        machine=front.latency.table.setting,
        versions=versions(),
        recovered=recovered,
    )
    return PlanReport(record, plan, fidelity)
