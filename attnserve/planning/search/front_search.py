"""Search the Pareto front for the choice that meets a goal, with few candidates.

Predicted losses and times put the choices in order; measured ones decide. Both rise along the front
nearly alike, so that a search narrows the part in which a measured loss or speed crosses the limit:
``low`` and ``high`` are the choices on both sides of it, by index. A candidate needs a refit and a
comparison, so that each one is aimed at the limit by the measurements before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from attnserve.checks.held_out import HeldOut
from attnserve.models.search_record import GoalRecord
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.search.front import Front
from attnserve.planning.search.judge import Candidate, Judge, VerifiedCandidate

__all__ = ["MAX_CANDIDATES", "FrontSearch", "TrainChoice"]

MAX_CANDIDATES = 6
"""The largest number of candidates besides the first and the last choice. More candidates come
closer to the limit."""

TrainChoice = Callable[[Choice, float, int], Candidate]
"""Trains a choice, given the loss at which it meets the goal, and the number of rounds that share
the time left. It returns the candidate with less loss, before or after the training."""


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
