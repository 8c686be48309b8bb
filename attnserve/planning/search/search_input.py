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

__all__ = ["SearchInput"]


@dataclass(frozen=True, eq=False)
class SearchInput:
    """Everything that a search is given; no step changes it.

    Attributes:
        lengths: The sequence lengths at which the model should be fast.
        checked_lengths: All lengths at which the whole model is timed.
        shape: (batch, middle length), at which MACs are counted.
        asked: The request as plan.json records it.
    """

    goal: Goal
    artifact: Artifact
    model: ir.Model
    data: Dataset
    tokenizer: Path | None
    batch: int
    lengths: tuple[int, ...]
    checked_lengths: Sequence[int]
    shape: tuple[int, int]
    context: RunContext
    asked: Asked

    @property
    def all_threads(self) -> RunContext:
        """The context of what is not timed."""
        return replace(self.context, threads=0)
