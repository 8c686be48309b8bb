"""The report of a recovery."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnserve.models.lineage import NOT_REPORTED, RecoverEntry
from attnserve.models.measured import Fidelity
from attnserve.models.training_result import TrainingResult

__all__ = ["KEPT", "RecoverReport"]

KEPT = ("plan", "before", "after", "batch", "sequence", "break_even_sequence")
"""Fields of the rewrite's record about the graph, which training does not change."""


@dataclass(frozen=True)
class RecoverReport:
    """The quality before and after training, on rows that were not used in the training.

    Attributes:
        record: The entry of the lineage.
        training: The result of the training.
        output: The .onnx file.
    """

    record: RecoverEntry
    training: TrainingResult
    output: Path

    @property
    def before(self) -> Fidelity:
        """The rewritten model against the original, with the errors of each output."""
        assert self.record.before_recovery.fidelity is not None  # earlier records may lack it
        return self.record.before_recovery.fidelity

    @property
    def after(self) -> Fidelity:
        """The result against the original; equal to ``before`` without a gain."""
        assert self.record.fidelity is not None
        return self.record.fidelity

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json(*NOT_REPORTED, *KEPT)
