"""plan: the fastest form of a model that keeps what it must is searched for, and written down."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnserve.checks.evaluate import TaskName
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.models.artifact import (
    check_output,
    default_output,
    load_model,
    open_artifact,
    staged,
)
from attnserve.models.datasets import load_inputs
from attnserve.models.precision import Precision, check_cpu
from attnserve.planning.report import PlanReport, draw_front
from attnserve.planning.search import Allowed, Goal, search
from graph_passes.errors import InvalidArgument, MissingExtra

__all__ = ["plan"]

log = logging.getLogger("attnserve")


def plan(
    model: Path,
    output: Path | None = None,
    *,
    calib: Path,
    keep: float | None = None,
    target_speedup: float | None = None,
    eval_data: Path | None = None,
    task: TaskName | None = None,
    allow: Sequence[Allowed] = (),
    precision: Precision = "float32",
    tokenizer: Path | None = None,
    batch: int = 1,
    sequence: int | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> PlanReport:
    """Find a plan, and write it as .json with a plot (.svg) beside it; no model is written.

    ``optimize(..., plan=FILE)`` carries it out; ``optimize(..., keep=X)`` does both.

    Args:
        model: An .onnx file or an artifact folder.
        output: The .json file; plan.json beside the model by default.
        calib: Text (a sentence a line), .npz or a folder of .npz. One row in ten is kept from all
            fits, to judge by.
        keep: What must be kept of the mean output cosine, or of the task's score.
        target_speedup: Or how much faster the model must be.
        eval_data, task: The rows a score is measured on, and which.
        allow: "ffn" lets the plan take neurons out of feed-forwards.
        precision: "float16", "bfloat16", "int8" or "int8-full" weights, after all rewrites.
        batch, sequence: The shape to be fast at; the calibration data's lengths (its quartiles)
            without a sequence.
        threads: Of the sessions that are timed; all others use every core.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput: See their texts.
    """
    check_cpu(precision)
    goal = Goal(keep, target_speedup, task, eval_data, tuple(allow), precision)
    artifact = open_artifact(model)
    output = output or default_output(model, "plan")
    if output.suffix != ".json":
        raise InvalidArgument(f"{output}: expected a .json file", "for example -o plan.json")
    plot = output.with_suffix(".svg")
    for path in (output, plot):
        if path.is_dir():  # said now, not once the search is done
            raise InvalidArgument(f"{path} is a folder: expected a file", "choose another -o")
        check_output(path, source=artifact.model, force=force)
    graph = load_model(artifact)
    data = load_inputs(calib, graph, artifact, tokenizer=tokenizer)
    found = search(
        goal, artifact, graph, data, tokenizer=tokenizer, batch=batch, sequence=sequence,
        context=RunContext(provider, threads, seed, progress),
    )  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged(output.parent) as stage:
        text = json.dumps(found.report.to_json(), indent=1)
        (stage / output.name).write_text(text + "\n", encoding="utf-8")
        try:
            (stage / plot.name).write_text(draw_front(found.report), encoding="utf-8")
        except MissingExtra as error:
            log.warning("no plot was written: %s (%s)", error.what, error.fix)
    return replace(found.report, output=output)
