"""Task scores of a model with bootstrap confidence intervals.

"sts" correlates the cosine of two pooled sentence vectors with a human score (Cer et al. 2017, STS
Benchmark). ``checks.tasks`` has one function for each task.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attnserve.checks.scores import Score
from attnserve.checks.tasks import TASKS, OpenModel
from attnserve.context import DEFAULT_CONTEXT, Progress, RunContext, ignore_progress
from attnserve.literals import Pooling, TaskName
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.options import Run, Scoring
from attnserve.paths import StrPath
from attnserve.runtime.interface import Session
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidArgument

__all__ = ["evaluate", "score_session"]


def evaluate(
    model: StrPath,
    *,
    scoring: Scoring = Scoring(),
    run: Run = Run(),
    batch_size: int = 32,
    progress: Progress | None = None,
) -> Score:
    """Score ``model`` on the rows of a file.

    Args:
        model: An .onnx file or an artifact folder.
        scoring: The task and its data, which are required.
        run: Provider and threads, and the seed of the bootstrap.
        batch_size: Texts per batch.
        progress: Called with (stage, texts done, texts in total).

    Raises:
        InvalidModel: The model cannot be read.
        InvalidData: The file or a line of it does not fit the task.
        InvalidArgument: An argument does not fit this model, or has no effect on the task.
        CheckFailed: The model returns NaN, or the same cosine for every pair.
    """
    task, data = scoring.require()
    _check_settings(scoring, task)
    artifact = open_artifact(model)
    load_model(artifact)  # refuses unsafe files, such as external data outside the folder
    session = open_session(artifact.model, run.device)
    return score_session(
        session,
        artifact,
        task=task,
        data=data,
        pooling=scoring.pooling,
        max_length=scoring.max_length,
        tokenizer=scoring.tokenizer,
        batch_size=batch_size,
        context=run.context(progress or ignore_progress),
    )


def _check_settings(scoring: Scoring, task: TaskName) -> None:
    """Check that the task uses the given settings of texts and vectors.

    Raises:
        InvalidArgument: A setting has no effect.
    """
    unused = {"max_length", "tokenizer"} if task == "image-classification" else set[str]()
    if task not in ("sts", "retrieval"):
        unused.add("pooling")
    for name, _ in scoring.changed():
        if name in unused:
            raise InvalidArgument(
                f"`{name}` has no effect with `task` {task}", "leave it out", code="evaluate.usage"
            )


def score_session(
    session: Session,
    artifact: Artifact,
    *,
    task: TaskName,
    data: Path,
    pooling: Pooling | None = None,
    max_length: int | None = None,
    tokenizer: Path | None = None,
    batch_size: int = 32,
    context: RunContext = DEFAULT_CONTEXT,
    index: Session | None = None,
) -> Score:
    """Compute the score of an open session, with the tokenizer and labels of ``artifact``.

    Args:
        index: The session that embeds the documents of a retrieval; None for ``session``.
    """
    if max_length is not None:
        artifact = replace(
            artifact, record=artifact.record.model_copy(update={"max_length": max_length})
        )
    model = OpenModel(
        session=session,
        artifact=artifact,
        pooling=pooling or artifact.pooling,
        tokenizer=tokenizer,
        batch_size=batch_size,
        context=context,
        index=index,
    )
    return TASKS[task](model, data)
