"""Search the Pareto front for the choice that meets a goal, with few candidates.

Predicted losses and times put the choices in order; measured ones decide. A candidate needs a refit
and a comparison, so that each one is aimed at the limit by the measurements before (``bisect``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

from attnserve.checks.held_out import HeldOut
from attnserve.models.search_record import GoalRecord
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.search.front import Front
from attnserve.planning.search.judge import Candidate, Judge, VerifiedCandidate

__all__ = ["MAX_CANDIDATES", "BisectStep", "FrontSearch", "TrainChoice", "bisect"]

MAX_CANDIDATES = 6
"""The largest number of candidates besides the first and the last choice. More candidates come
closer to the limit."""

TrainChoice = Callable[[Choice, float, int], Candidate]
"""Trains a choice, given the loss at which it meets the goal, and the number of rounds that share
the time left. It returns the candidate with less loss, before or after the training."""


class BisectStep(NamedTuple):
    """The side of a limit on which a measured choice is.

    Attributes:
        is_low: Whether it is on the side of the start of the front.
        is_close: Whether it is close enough to the limit to end the search.
    """

    is_low: bool
    is_close: bool


def bisect(
    low: int,
    high: int,
    most: int,
    *,
    aim: Callable[[int, int], int | None],
    probe: Callable[[int], BisectStep],
) -> tuple[int, int]:
    """Narrow the part of a front in which a measured loss or speed crosses a limit.

    Both rise along the front nearly as the predicted ones do.

    Args:
        low, high: Choices on both sides of the limit, by index; ``high`` may be the end of the
            front.
        most: The number of choices to measure.
        aim: The index between two others at which the limit is expected; None if no choice between
            them is worth measuring.
        probe: Measures a choice.

    Returns:
        The measured choices that are next to the limit, by index.
    """
    for _ in range(most):
        if high - low < 2:
            break
        aimed = aim(low, high)
        if aimed is None:
            break
        index = min(max(aimed, low + 1), high - 1)
        probed = probe(index)
        if probed.is_low:
            low = index
        else:
            high = index
        if probed.is_close:
            break
    return low, high


@dataclass(frozen=True, eq=False)
class FrontSearch(ABC):
    """Searches the front for the best choice that meets a goal; each kind of goal is a subclass.

    Attributes:
        goal: The goal as plan.json records it.
        trains_faster: Whether a trained candidate must be faster than the one without training.
    """

    trains_faster: ClassVar[bool]
    goal: GoalRecord
    front: Front
    judge: Judge

    @abstractmethod
    def run(self) -> Candidate | None:
        """Search for the best choice that meets the goal; None if the least lossy one misses it.

        Raises:
            CheckFailed: The goal is out of reach.
        """

    @abstractmethod
    def run_from_fastest(self) -> Candidate | None:
        """Search like ``run``, but build the fastest choice first, which often meets the goal."""

    @abstractmethod
    def verify(self, candidate: Candidate | None) -> VerifiedCandidate:
        """Verify the result of ``run`` on data that no choice has seen, and others if it fails."""

    @abstractmethod
    def train_choices(self, untrained: Candidate, rounds: int, train: TrainChoice) -> None:
        """Train at most ``rounds`` choices that may be better than the one without training."""

    @abstractmethod
    def allowed_trained_loss(self, untrained: Candidate, part: HeldOut) -> float:
        """The largest loss on held-out data with which a trained candidate is the result."""

    @property
    def unreduced(self) -> Self:
        """The same search among the unreduced choices.

        The fastest of them is the fused original with all blocks in the precision of the goal. If
        it loses too much, the search keeps some blocks in float32.
        """
        return replace(self, front=replace(self.front, choices=self.front.unreduced))

    def build(self, choice: Choice) -> Candidate:
        """Build the plan of a choice, and measure its model."""
        return self.judge.build(choice, self.front.plan(choice))

    def build_first(self) -> Candidate:
        """Build the choice with the least loss, which only fuses operators and converts weights."""
        return self.build(self.front.choices[0])
