"""The input of a search for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from attnserve.data.datasets import Dataset
from attnserve.job import Job
from attnserve.models.search_record import Asked
from graph_passes.analysis.workload import Workload

__all__ = ["SearchInput"]


@dataclass(frozen=True, eq=False)
class SearchInput:
    """Immutable input of a search.

    Attributes:
        checked: Where the whole model is timed.
        asked: The request as plan.json records it.
    """

    job: Job
    data: Dataset
    checked: Sequence[Workload]
    asked: Asked
