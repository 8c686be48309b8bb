"""The held-out data of a search: batches of a data set, and rows of a task."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from attnserve.data.datasets import Dataset
from attnserve.literals import Split
from attnserve.runtime.interface import Batch

__all__ = ["TASK_PARTS", "VERIFIED_PARTS", "HeldOut"]


class HeldOut(Enum):
    """Parts of the data that no fit has used, on which a search measures a model.

    Attributes:
        CHOOSE: The part to choose.
        VERIFY, VERIFY_AGAIN: The parts to verify; the second is for a failed first verification.
        ALL: All three parts.
    """

    CHOOSE = auto()
    VERIFY = auto()
    VERIFY_AGAIN = auto()
    ALL = auto()

    @property
    def split(self) -> Split:
        """The value of ``Quality.split`` for a measurement on this part."""
        if self is HeldOut.ALL:
            return "held out"
        return "choose" if self is HeldOut.CHOOSE else "verify"

    @property
    def is_unused(self) -> bool:
        """Whether no choice has used this part: losses are then measured values, else bounds."""
        return self in (HeldOut.VERIFY, HeldOut.VERIFY_AGAIN)

    def batches(self, data: Dataset) -> Sequence[Batch]:
        """The batches of this part of a split data set."""
        first, second = data.verify
        match self:
            case HeldOut.CHOOSE:
                return data.choose
            case HeldOut.VERIFY:
                return first
            case HeldOut.VERIFY_AGAIN:
                return second
            case HeldOut.ALL:
                return data.held_out


TASK_PARTS = (HeldOut.CHOOSE, HeldOut.VERIFY, HeldOut.CHOOSE, HeldOut.VERIFY_AGAIN)
"""The part of each of four consecutive blocks of rows of a task."""

VERIFIED_PARTS = (
    HeldOut.VERIFY,  # no choice depends on these rows
    HeldOut.VERIFY_AGAIN,  # no choice depends on these rows
    # All rows were used to choose or to verify other candidates, so a confidence bound of the loss
    # must meet the goal, not its value.
    HeldOut.ALL,
    HeldOut.VERIFY_AGAIN,  # for the choice with the least loss, which depends on no rows
)
"""The parts of the verifications of a search, in order; each one follows if the one before fails.
The first one is of the result, the last one of the choice with the least loss, and the others are
of choices with less and less loss."""
