"""Compare a model with the original on held-out data, and by the score of a task."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import onnx_ir as ir

from attnserve.checks.evaluate import score_session
from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import largest_loss
from attnserve.checks.scores import Score, share_kept
from attnserve.job import Job
from attnserve.limits import ROUNDING
from attnserve.literals import TaskName
from attnserve.models.measured import Fidelity, Share
from attnserve.models.search_record import HeldOutComparison
from attnserve.options import Goal
from attnserve.runtime.session import OpenNew, open_session

__all__ = ["ScoredTask", "compare_part"]


@dataclass(frozen=True, eq=False)
class ScoredTask:
    """The task whose score a goal limits, and the score of the original."""

    name: TaskName
    data: Path
    original: Score

    @classmethod
    def of(cls, goal: Goal, job: Job) -> Self | None:
        """The task of a goal, and the score of the original; None if the goal has no task."""
        if goal.task is None or goal.eval_data is None:
            return None
        untimed = job.on_all_threads().labeled("original")
        original = _score(goal.task, goal.eval_data, untimed, job.original)
        return cls(goal.task, goal.eval_data, original)

    def share(self, model: ir.Model, fidelity: Fidelity, part: HeldOut, job: Job) -> Share:
        """The share of the score that a model keeps; 1 without a run if its outputs are equal."""
        # Cosines of single numbers, as a reranker returns, compare only their signs.
        is_same = bool(fidelity.outputs) and all(
            output.relative_error < ROUNDING and not output.not_finite_rows
            for output in fidelity.outputs
        )
        score = self.original if is_same else _score(self.name, self.data, job, model)
        return share_kept(self.original, score, part=part, seed=job.context.seed)

    def share_in(self, model: ir.Model, job: Job, open_new: OpenNew) -> Share:
        """The share of the score on all rows that a model keeps in other sessions."""
        score = _score(self.name, self.data, job, model, open_new)
        return share_kept(self.original, score, seed=job.context.seed)


def compare_part(
    model: ir.Model, part: HeldOut, job: Job, task: ScoredTask | None
) -> HeldOutComparison:
    """Compare a model with the original on held-out data, and on the same part of the task.

    Losses are bounds if the data was used before; see ``Losses``.
    """
    batches = part.batches(job.required_data)
    is_bounded = not part.is_unused
    fidelity = job.compare_held_out(model, batches, part.split)
    losses: list[float] = []
    share = None
    if job.measure != "score":
        losses.append(largest_loss(fidelity.qualities, bounded=is_bounded))
    if task is not None:
        share = task.share(model, fidelity, part, job)
        losses.append(share.losses.bounded if is_bounded else share.losses.measured)
    return HeldOutComparison(
        fidelity=fidelity,
        share=share,
        loss=max(losses, default=0.0),
        part=part.name.lower(),
    )


def _score(
    task: TaskName,
    data: Path,
    job: Job,
    model: ir.Model,
    open_new: OpenNew | None = None,
) -> Score:
    """The score of a model; with the measure "index", the original embeds the documents.

    Args:
        open_new: Opens the model; by default in the runtime of the job.
    """
    session = open_new(model) if open_new else open_session(model, job.context.device)
    has_index = task == "retrieval" and job.measure == "index" and model is not job.original
    index = open_session(job.original, job.context.device) if has_index else None
    return score_session(
        session,
        job.artifact,
        task=task,
        data=data,
        tokenizer=job.tokenizer,
        context=job.context,
        index=index,
    )
