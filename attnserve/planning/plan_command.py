"""Search for a plan, and write it as plan.json with a plot."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from attnserve.choices import SearchMeasure, TaskName
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.data.datasets import check_calibration_files, load_inputs
from attnserve.data.lengths import Lengths, check_lengths
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_output, default_output, staged
from attnserve.paths import StrPath, as_path, as_paths
from attnserve.planning.search.goal import Allowed, Goal
from attnserve.planning.search.report import PlanReport, draw_front
from attnserve.planning.search.search import search
from attnserve.precision.convert import Precision, check_cpu
from graph_passes.errors import InvalidArgument, MissingExtra

__all__ = ["plan"]

log = logging.getLogger("attnserve")


def plan(
    model: StrPath,
    output: StrPath | None = None,
    *,
    calib: StrPath | Sequence[StrPath],
    calib_weights: Sequence[float] = (),
    keep: float | None = None,
    target_speedup: float | None = None,
    eval_data: StrPath | None = None,
    task: TaskName | None = None,
    allow: Sequence[Allowed] = (),
    measure: SearchMeasure = "auto",
    precision: Precision = "float32",
    tokenizer: StrPath | None = None,
    batch: int = 1,
    sequence: Lengths | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    progress: Progress = ignore_progress,
) -> PlanReport:
    """Search for the fastest plan that keeps the requested quality, and write it as .json and .svg.

    No model is written. ``optimize(plan=FILE)`` applies the plan, ``optimize(keep=X)`` does both.

    Args:
        model: An .onnx file or an artifact folder.
        output: The .json file; plan.json beside the model by default.
        calib: Text (a sentence per line), .npz or a folder of .npz, or several of them. Three parts
            of a seventh of the distinct rows of each file are held out: to choose, to prove, and
            for a second proof.
        calib_weights: See ``optimize``.
        keep: The quality to keep by ``measure``, and the share of the task's score if there is one.
        target_speedup: The speed-up to reach with the least loss, instead of ``keep``.
        eval_data, task: The rows on which a score is measured, and which score.
        allow: "ffn" allows the removal of feed-forward neurons.
        measure: See ``optimize``.
        precision: "float16", "bfloat16", "int8", "int8-full" or "int4" weights, after all rewrites.
        batch, sequence: The shape at which the model should be fast. A sequence is one length, or
            the shortest and the longest one; without it, the quartiles of the calibration data's
            lengths.
        threads: Of the timed sessions; all others use every core.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput: The input cannot be used.
    """
    check_cpu(precision)
    check_lengths(sequence)
    eval_data, tokenizer, files = as_path(eval_data), as_path(tokenizer), as_paths(calib)
    check_calibration_files(files, calib_weights)
    if not files:
        raise InvalidArgument(
            "calibration data is required", "give `calib`", code="optimize.no_data"
        )
    goal = Goal(keep, target_speedup, task, eval_data, tuple(allow), precision, measure)
    artifact = open_artifact(model)
    output = as_path(output) or default_output(Path(model), "plan")
    if output.suffix != ".json":
        raise InvalidArgument(
            f"`output` is {output}: expected a .json file",
            "for example plan.json",
            code="plan.output",
        )
    plot = output.with_suffix(".svg")
    for path in (output, plot):
        if path.is_dir():  # checked before the search, which takes long
            raise InvalidArgument(
                f"{path} is a folder: expected a file",
                "choose another `output`",
                code="plan.output",
            )
        check_output(path, source=artifact.model, force=force)
    graph = load_model(artifact)
    joined = None if measure == "score" else sequence  # as in optimize
    data = load_inputs(
        files, graph, artifact, weights=calib_weights, tokenizer=tokenizer, sequence=joined
    )
    report = search(
        goal, artifact, graph, data, tokenizer=tokenizer, batch=batch, sequence=sequence,
        context=RunContext(provider, threads, seed, progress),
    ).report  # fmt: skip
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged(output.parent) as stage:
        text = json.dumps(report.to_json(), indent=1)
        (stage / output.name).write_text(text + "\n", encoding="utf-8")
        try:
            (stage / plot.name).write_text(draw_front(report), encoding="utf-8")
        except MissingExtra as error:
            log.warning("no plot was written: %s (%s)", error.what, error.fix)
    return replace(report, output=output)
