"""Replace a verified candidate by an unreduced one if its removals bring too little speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.models.measured import ShapeLatency
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Verified

__all__ = ["prefer_unreduced", "time_or_replace"]


def prefer_unreduced(search: FrontSearch, verified: Verified) -> Verified:
    """Replace a verified candidate by an unreduced one if that is about as fast."""
    judge = search.judge
    best = verified.candidate
    if best.is_unreduced:
        return verified
    unreduced_search = search.unreduced
    unreduced = unreduced_search.run_from_fastest()
    if unreduced is None:  # no unreduced choice meets the goal
        return verified
    speedup = judge.measure_speedup_over(unreduced, best)
    if speedup.low >= MIN_REMOVAL_GAIN:
        return verified
    other = unreduced_search.verify(unreduced)
    if not other.meets_goal:
        return verified
    if other.candidate is not unreduced:  # more blocks stay float32
        speedup = judge.measure_speedup_over(other.candidate, best)
        if speedup.low >= MIN_REMOVAL_GAIN:
            return verified
    note = (
        f"nothing is removed: the best removal runs at {speedup.value:.2f}x ({speedup.low:.2f} to "
        f"{speedup.high:.2f}) the speed of the fused original in {search.front.precision}, "
        f"expected at least {MIN_REMOVAL_GAIN}x"
    )
    return replace(other, note=note, recovered=verified.recovered)


def time_or_replace(
    search: FrontSearch, verified: Verified
) -> tuple[Verified, Sequence[ShapeLatency]]:
    """A verified candidate and its speeds; an unreduced one if the candidate is refused.

    ``result_of`` decides whether the unreduced candidate is fast enough.
    """
    speeds = search.judge.time(verified.candidate)
    refusal = search.judge.refusal(verified.candidate, speeds)
    if refusal is None or verified.candidate.is_unreduced:
        return verified, speeds
    unreduced = search.unreduced.run_from_fastest()
    if unreduced is None:
        return verified, speeds
    other = search.unreduced.verify(unreduced)
    if not other.meets_goal:
        return verified, speeds
    note = f"nothing is removed: with a removal {refusal}"
    replaced = replace(other, note=note, recovered=verified.recovered)
    return replaced, search.judge.time(other.candidate)
