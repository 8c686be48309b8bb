"""The verifications of the candidates of a search on held-out data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnserve.checks.held_out import HeldOut
from attnserve.models.search_record import Verification
from attnserve.planning.search.judge import Candidate

__all__ = ["ATTEMPTS", "Verified"]


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
        problem: Why the candidate may not be returned; empty if it meets the goal, or differs from
            the original by rounding only.
        note: Why the candidate is unreduced, although a reduced one was found; else empty.
    """

    candidate: Candidate
    verifications: Sequence[Verification]
    problem: str = ""
    note: str = ""

    @property
    def meets_goal(self) -> bool:
        return not self.problem
