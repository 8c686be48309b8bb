"""Verify the candidate of a search on held-out data, and replace removals that bring no speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.models.search_record import Verification
from attnserve.planning.search.front_search import FrontSearch
from attnserve.planning.search.judge import Candidate

__all__ = ["ATTEMPTS", "Verified", "prefer_unreduced", "verify_candidate", "verify_unreduced"]


class Attempt(NamedTuple):
    """A verification, if those before failed.

    Attributes:
        part: The held-out rows.
        is_least_lossy: Whether it verifies the choice with the least loss; otherwise one with less
            loss than the choice before.
    """

    part: HeldOut
    is_least_lossy: bool = False


ATTEMPTS = (
    Attempt(HeldOut.VERIFY),  # no choice depends on these rows
    Attempt(HeldOut.VERIFY_AGAIN),  # no choice depends on these rows
    # The search measured only choices with more loss on these rows; losses are bounds.
    Attempt(HeldOut.ALL),
    # The search measured other choices on these rows, on which the choice with the least loss does
    # not depend.
    Attempt(HeldOut.VERIFY_AGAIN, is_least_lossy=True),
)
"""The verifications of a search, in order."""


@dataclass(frozen=True, eq=False)
class Verified:
    """The result of the verifications of a search.

    Attributes:
        candidate: The candidate of the last verification.
        verifications: All verifications in order; all but the last missed the goal. Empty if even
            the choice with the least loss missed the goal on the rows to choose.
        meets_goal: Whether the candidate may be returned: it keeps the quality of the goal, or
            differs from the original by rounding only.
        note: Why the candidate is unreduced, although a reduced one was found; else empty.
    """

    candidate: Candidate
    verifications: Sequence[Verification]
    meets_goal: bool = True
    note: str = ""


def verify_candidate(front_search: FrontSearch, candidate: Candidate | None) -> Verified:
    """Verify a candidate on data that no choice has seen, and others with less loss if it fails.

    Args:
        candidate: The result of the search; None if no choice meets the goal on the data to choose.
    """
    if candidate is None:
        return Verified(front_search.build_first(), (), meets_goal=False)
    judge = front_search.judge
    keep = front_search.goal.keep
    if keep is None:
        return Verified(candidate, [judge.verify(candidate, HeldOut.VERIFY)])
    verifications: list[Verification] = []
    for part, is_least_lossy in ATTEMPTS:
        if is_least_lossy:
            candidate = front_search.build_first()
        elif verifications:
            candidate = front_search.step_back(candidate, verifications[-1].loss, keep)
        verification = judge.verify(candidate, part)
        verifications.append(verification)
        if verification.loss <= allowed_loss(keep):
            return Verified(candidate, verifications)
        if not candidate.choice.loss:
            break
    # Without loss and conversion, outputs differ by rounding only: the choice is returned
    # nevertheless.
    is_exact = not candidate.choice.loss and front_search.precision == "float32"
    return Verified(candidate, verifications, meets_goal=is_exact)


def verify_unreduced(front_search: FrontSearch) -> Verified | None:
    """Find and verify an unreduced candidate; None if none meets the goal."""
    unreduced_search = front_search.unreduced
    unreduced = unreduced_search.run_from_fastest()
    if unreduced is None:
        return None
    verified = verify_candidate(unreduced_search, unreduced)
    return verified if verified.meets_goal else None


def prefer_unreduced(front_search: FrontSearch, verified: Verified) -> Verified:
    """Replace a verified candidate by an unreduced one if that is about as fast."""
    judge = front_search.judge
    best = verified.candidate
    if best.is_unreduced:
        return verified
    unreduced_search = front_search.unreduced
    unreduced = unreduced_search.run_from_fastest()
    if unreduced is None:  # it misses the speed-up of the goal
        return verified
    gain = judge.measure_speedup_over(unreduced, best)
    if gain.low >= MIN_REMOVAL_GAIN:
        return verified
    other = verify_candidate(unreduced_search, unreduced)
    if not other.meets_goal:
        return verified
    if other.candidate is not unreduced:  # more blocks stay float32
        gain = judge.measure_speedup_over(other.candidate, best)
        if gain.low >= MIN_REMOVAL_GAIN:
            return verified
    note = (
        f"nothing is removed: the best removal runs at {gain.value:.2f}x ({gain.low:.2f} to "
        f"{gain.high:.2f}) the speed of the fused original in {front_search.precision}, expected "
        f"at least {MIN_REMOVAL_GAIN}x"
    )
    return replace(other, note=note)
