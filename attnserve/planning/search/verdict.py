"""The result of a search: the verified plan if it is faster than the original, or no change."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from attnserve.limits import MIN_SPEEDUP
from attnserve.models.checksums import fingerprint
from attnserve.models.lineage import Source
from attnserve.models.measured import Fidelity, ServedSpeed, ShapeLatency
from attnserve.models.quantized import rounds_activations
from attnserve.models.search_record import HeldOutComparison, SearchFidelity, TrainingRounds
from attnserve.planning.plans.apply import start
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.plan_file import FORMAT, PlanRecord
from attnserve.planning.search.explain import explain, front_points
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, Verified
from attnserve.planning.search.unreduced import prefer_unreduced, time_or_replace
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.session import runtime_of
from attnserve.versions import versions
from graph_passes.errors import CheckFailed, Refusal

__all__ = ["result_of"]

log = logging.getLogger(__name__)

ITSELF = HeldOutComparison(
    fidelity=Fidelity(mean_cosine=1.0, min_cosine=1.0, data="the original itself"), loss=0.0
)
"""The comparison of the original with itself, which needs no run."""


def result_of(search: FrontSearch, verified: Verified) -> tuple[PlanRecord, State]:
    """The verified plan, or an empty one if it is not faster than the original.

    Raises:
        CheckFailed: It misses the requested speed-up.
    """
    if verified.refusal is not None:
        return _no_gain(search, verified, verified.refusal)
    search, usable = _in_verified_runtimes(search, verified)
    final, speeds = time_or_replace(search, prefer_unreduced(search, verified))
    if final.candidate is not verified.candidate:
        served_in = search.judge.served_in
        search, usable = _in_verified_runtimes(search, final)
        if search.judge.served_in != served_in:
            speeds = search.judge.time(final.candidate)
    judge = search.judge
    refusal = judge.refusal(final.candidate, speeds)
    target_speedup = search.goal.target_speedup or 1
    speedup = judge.requested_speedup(speeds)
    # The search reached it in another measurement, perhaps in a runtime that loses too much.
    if refusal is None and speedup < MIN_SPEEDUP * target_speedup:
        refusal = Refusal("slow", f"in {judge.runtime}, the model runs {speedup:.2f}x as fast")
    if refusal is None:
        return _gain(search, final, speeds, usable)
    if target_speedup > 1:
        raise CheckFailed(
            f"`target_speedup` is {target_speedup:g}: {refusal}",
            "lower it, or search for `keep`",
            code="search.target_speedup",
        )
    return _no_gain(search, final, refusal)


def _in_verified_runtimes(
    search: FrontSearch, verified: Verified
) -> tuple[FrontSearch, Mapping[str, Fidelity]]:
    """The search with candidates timed in verified runtimes, and the comparisons in them."""
    judge, state = search.judge, verified.candidate.state
    usable = judge.usable_runtimes(verified.candidate, verified.verifications[-1].fidelity)
    names = list(judge.job.timed_runtimes(state.plan.precision))
    if rounds_activations(state.result):
        first = runtime_of(state.result, judge.job.context.device)
        names = [name for name in names if name in {first, *usable}] or [first]
    runtime = judge.runtime if judge.runtime in names else names[0]
    if runtime != judge.runtime:
        log.warning(
            "the model does not keep its quality in %s, in which it was timed: it is timed in %s",
            judge.runtime, runtime,
        )  # fmt: skip
    return replace(search, judge=replace(judge, runtime=runtime, served_in=names)), usable


def _gain(
    search: FrontSearch,
    verified: Verified,
    speeds: Sequence[ShapeLatency],
    usable: Mapping[str, Fidelity],
) -> tuple[PlanRecord, State]:
    """A plan that meets the goal and is faster than the original.

    Args:
        usable: The comparisons in other runtimes that may serve it.
    """
    state, last, note = verified.candidate.state, verified.verifications[-1], verified.note
    recovered = _without_gain(verified.recovered, note) if note else verified.recovered
    speed = search.judge.served.speed_of(state.model, state.result, state.plan, usable.keys())
    # One measurement in one sentence: those of the search are others.
    speedup = search.judge.requested_speedup(speeds) if speed is None else speed.over_exported
    verdict = f"{speedup:.2f}x as fast, keeping {_kept(last, search.goal.task)}"
    if speed is not None:
        verdict += f": {speed.describe(state.plan.precision)}"
    if recovered is not None and recovered.gain:
        verdict += f" ({recovered.verdict})"
    if note:
        verdict += f"; {note}"
    record = _record(
        search, verified.candidate, verdict, recovered, speeds, verified.verifications, speed
    )
    return record.model_copy(update={"other_runtimes": usable}), state


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


def _no_gain(search: FrontSearch, verified: Verified, refusal: Refusal) -> tuple[PlanRecord, State]:
    """The empty plan, which leaves the model unchanged."""
    verdict = f"no gain: {refusal}; the original is returned"
    recovered = _without_gain(verified.recovered, refusal.reason)
    job = search.judge.job
    state = start(Plan(), job, job.original)
    return _record(search, verified.candidate, verdict, recovered), state


def _record(
    search: FrontSearch,
    candidate: Candidate,
    verdict: str,
    recovered: TrainingRounds | None,
    speeds: Sequence[ShapeLatency] = (),
    verifications: Sequence[HeldOutComparison] = (),
    served: ServedSpeed | None = None,
) -> PlanRecord:
    """The content of plan.json.

    Args:
        candidate: The candidate that is explained.
        speeds: Its speeds; empty if the original is returned in its place.
        verifications: Its verifications; empty without speeds.
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
        speedup=search.judge.requested_speedup(speeds) if speeds else 1.0,
        speeds=tuple(speeds),
        speedups=served,
        decisions=tuple(explain(front, candidate.choice)),
        plan=candidate.state.plan if gain else Plan(),
        front=tuple(front_points(front, search.judge.measured)),
        latency_ms=tuple(front.latency.to_json(SCHEMES[front.precision].rest)),
        timed_runtime=search.judge.runtime,
        machine=front.latency.table.setting,
        versions=versions(),
        recovered=recovered,
    )
