"""The input of a search for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnserve.data.datasets import Dataset
from attnserve.job import Job
from attnserve.models.search_record import Asked
from attnserve.options import Goal
from graph_passes.analysis.workload import Workload

__all__ = ["SearchInput"]


@dataclass(frozen=True, eq=False)
class SearchInput:
    """Immutable input of a search.

    Attributes:
        checked: Where the whole model is timed.
        asked: The request as plan.json records it.
    """

    goal: Goal
    job: Job
    data: Dataset
    checked: Sequence[Workload]
    asked: Asked

    @property
    def lengths(self) -> list[int]:
        """The lengths at which the model should be fast."""
        return [workload.length for workload in self.job.requested]
