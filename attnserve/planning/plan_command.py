"""Search for a plan, and write it as plan.json with a plot."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnserve.context import Progress, ignore_progress
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.measured import Fidelity
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_output, default_output, staged
from attnserve.options import Data, Goal, Run, Target
from attnserve.paths import StrPath, as_path
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import PlanRecord
from attnserve.planning.search.search import run_search
from attnserve.precision.convert import check_cpu
from attnserve.reports.model_plots import plot_search
from graph_passes.errors import InvalidArgument, MissingExtra

__all__ = ["PlanReport", "plan"]

log = logging.getLogger("attnserve")


@dataclass(frozen=True)
class PlanReport:
    """The result of a search, and the file that it was written to."""

    record: PlanRecord
    output: Path

    @property
    def plan(self) -> Plan:
        """The plan; empty if the original is returned."""
        return self.record.plan

    @property
    def fidelity(self) -> Fidelity:
        """The verification, with the errors of each output."""
        return self.record.fidelity

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json()


def plan(
    model: StrPath,
    output: StrPath | None = None,
    *,
    goal: Goal = Goal(),
    data: Data = Data(),
    target: Target = Target(),
    run: Run = Run(),
    force: bool = False,
    progress: Progress = ignore_progress,
) -> PlanReport:
    """Search for the fastest plan that keeps the requested quality, and write it as .json and .svg.

    No model is written. ``optimize(plan=FILE)`` applies the plan, ``optimize(keep=X)`` does both.

    Args:
        model: An .onnx file or an artifact folder.
        output: The .json file; plan.json beside the model by default.
        goal: Goal of the search.
        data: Calibration data. Three parts of a seventh of the distinct rows of each file are held
            out: to choose, to verify, and for a second verification.
        target: The precision, and the target workloads; without a sequence, the quartiles of the
            calibration data's lengths.
        run: Runtime options; ``threads`` applies to the timed sessions, all other work uses every
            core.

    Raises:
        CheckFailed: The goal cannot be reached.
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput: The input cannot be used.
    """
    check_cpu(target.precision)
    data.require()
    goal.require()
    if data.also_prove:
        raise InvalidArgument(
            "`also_prove` applies to `attnserve.optimize`",
            "leave it out",
            code="optimize.conflict",
        )
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
    original = load_model(artifact, in_place=True)
    job = Job.for_search(artifact, original, goal, data, target, run.context(progress))
    record = run_search(goal, job).record
    output.parent.mkdir(parents=True, exist_ok=True)
    with staged(output.parent) as stage:
        text = json.dumps(record.to_json(), indent=1)
        (stage / output.name).write_text(text + "\n", encoding="utf-8")
        try:
            (stage / plot.name).write_text(plot_search(record), encoding="utf-8")
        except MissingExtra as error:
            log.warning("no plot was written: %s (%s)", error.what, error.fix)
    job.checkpoints.remove()
    return PlanReport(record, output)
