"""Verify a model on rows that its training has not used."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnserve.checks.quality import largest_loss
from attnserve.checks.scores import Score
from attnserve.job import Job
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.measured import Fidelity
from attnserve.recovery.labels import LabeledBatch, Labels
from attnserve.runtime.session import open_session

__all__ = ["VerifiedModel", "labeled_outputs", "verify_model"]


@dataclass(frozen=True)
class VerifiedModel:
    """The quality of a model on held-out rows.

    Attributes:
        labeled_loss, score: Loss and score on labeled rows; 0 and None without labels.
    """

    fidelity: Fidelity
    labeled_loss: float = 0.0
    score: Score | None = None

    @property
    def loss(self) -> float:
        return largest_loss(self.fidelity.qualities, bounded=False) + self.labeled_loss

    def is_better_than(self, other: VerifiedModel) -> bool:
        """Whether the loss is smaller, and the score no lower.

        Without a score, no output, file or length class may be below its confidence interval.
        """
        if self.score is not None and other.score is not None:
            return self.loss < other.loss and self.score.value >= other.score.value
        least = {old.subject: old.lower for old in other.fidelity.qualities}
        kept = all(new.value >= least[new.subject] for new in self.fidelity.qualities)
        return kept and self.loss < other.loss


def verify_model(job: Job, model: ir.Model, labels: Labels | None = None) -> VerifiedModel:
    """Compare a model with the original on held-out rows, and score it on labeled ones.

    Raises:
        CheckFailed: The outputs are not finite, or equal for all labeled pairs.
        InvalidModel: The models do not have the same inputs and outputs.
    """
    fidelity = job.labeled("held out").compare_held_out(model, job.required_data.to_verify)
    if labels is None:
        return VerifiedModel(fidelity)
    outputs = labeled_outputs(job, model, labels)
    return VerifiedModel(fidelity, labels.held_out_loss(outputs), labels.score(outputs))


def labeled_outputs(
    job: Job, model: ir.Model, labels: Labels
) -> list[tuple[LabeledBatch, np.ndarray]]:
    """The output of the task on the labeled rows to verify."""
    empty = empty_axes(job.original, model)
    session = open_session(model, job.context.device)
    return labels.outputs(session, labels.verify, lambda batch: shaped_for(model, batch, empty))
