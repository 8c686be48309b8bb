"""The input of a search for a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from attnserve.context import RunContext
from attnserve.data.datasets import Dataset
from attnserve.models.artifact import Artifact
from attnserve.models.lineage import Asked
from attnserve.options import Goal
from graph_passes.analysis.workload import Workload

__all__ = ["SearchInput"]


@dataclass(frozen=True, eq=False)
class SearchInput:
    """Immutable input of a search.

    Attributes:
        workloads: Where the model should be fast.
        checked: Where the whole model is timed.
        counted: Where MACs are counted: the middle length.
        asked: The request as plan.json records it.
    """

    goal: Goal
    artifact: Artifact
    model: ir.Model
    data: Dataset
    tokenizer: Path | None
    workloads: Sequence[Workload]
    checked: Sequence[Workload]
    counted: Workload
    context: RunContext
    asked: Asked

    @property
    def lengths(self) -> list[int]:
        """The lengths of the workloads."""
        return [each.length for each in self.workloads]

    @property
    def all_threads(self) -> RunContext:
        """The context of what is not timed."""
        return replace(self.context, threads=0)
