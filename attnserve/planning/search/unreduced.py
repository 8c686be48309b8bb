"""Replace a verified candidate by an unreduced one if its removals bring too little speed."""

from __future__ import annotations

from dataclasses import replace

from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate, TimedCandidate, VerifiedCandidate

__all__ = ["time_or_replace"]


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
    if other.meets_goal and other.candidate is not unreduced:  # more blocks stay float32
        reason = _reason_against(search, timed, other.candidate)
    if not other.meets_goal or not reason:
        return verified, timed
    note = f"nothing is removed: {reason}"
    replaced = replace(other, note=note, recovered=verified.recovered)
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
