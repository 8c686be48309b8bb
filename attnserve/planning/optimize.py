"""Optimize a model: plan rewrites, apply them, compare with the original, and write the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from attnserve.checks.certify import require_attention
from attnserve.checks.compare import compare
from attnserve.checks.quality import allowed_loss, largest_loss
from attnserve.context import Progress, ignore_progress
from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fused_for_libraries
from attnserve.job import Job
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.cache_inputs import empty_axes, require_empty
from attnserve.models.checksums import source_entry
from attnserve.models.example_inputs import random_batches
from attnserve.models.lineage import NOT_REPORTED, ModelCost, OptimizeEntry, RecordedChange
from attnserve.models.measured import Fidelity
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import (
    check_openvino,
    check_output,
    default_output,
    output_file,
    write_rewritten,
)
from attnserve.models.quantized import int8_activations, int8_weight_bits
from attnserve.models.search_record import SearchRecord
from attnserve.options import Data, Goal, Rewrites, Run, Target, Write, check_mode
from attnserve.paths import StrPath, as_path
from attnserve.planning.mixing_choice import MixingChoice, MixingComparison, choose_mixing
from attnserve.planning.optimize_warnings import unverified_runtimes, warnings_of
from attnserve.planning.plans.apply import apply_plan, apply_steps
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.plan_file import PlanRecord, SavedPlan
from attnserve.planning.request.rewrites import plan_request
from attnserve.planning.runtime_verification import verify_in_other_runtimes
from attnserve.planning.search.search import run_search
from attnserve.planning.search.search_result import SearchResult
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.convert import check_cpu
from attnserve.runtime.openvino_runtime import OpenVino
from attnserve.runtime.session import runtime_of
from attnserve.versions import package_versions, versions
from graph_passes.analysis.cost import break_even, count_macs, model_cost
from graph_passes.analysis.parameters import parameter_bytes, parameters
from graph_passes.analysis.workload import Workload
from graph_passes.errors import CheckFailed
from graph_passes.passes.collaborate import Collaborate

__all__ = ["OptimizeReport", "optimize"]

NOT_COMPARED = (
    "mixings of shared dimensions could not be timed on inputs of this model: dense mixing is used"
)


@dataclass(frozen=True)
class OptimizeReport:
    """The applied rewrites, and their costs and effects.

    Attributes:
        record: The entry of the lineage.
        plan: The applied plan.
        output: The .onnx file.
        search: The content of plan.json, if there was a search; the lineage has a part of it.
    """

    record: OptimizeEntry
    plan: Plan
    output: Path
    search: PlanRecord | None = None

    @property
    def fidelity(self) -> Fidelity:
        """The comparison with the original, with the errors of each output."""
        assert self.record.fidelity is not None  # earlier records may lack it
        return self.record.fidelity

    @property
    def changes(self) -> tuple[RecordedChange, ...]:
        """The applied rewrites, one per block."""
        return self.record.changes

    @property
    def break_even_sequence(self) -> int | None:
        """The length from which the new model needs more MACs than the original, if any."""
        return self.record.break_even_sequence

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json(*NOT_REPORTED)


def optimize(
    model: StrPath,
    output: StrPath | None = None,
    *,
    rewrites: Rewrites = Rewrites(),
    goal: Goal = Goal(),
    data: Data = Data(),
    target: Target = Target(),
    run: Run = Run(),
    write: Write = Write(),
    plan: StrPath | None = None,
    progress: Progress = ignore_progress,
) -> OptimizeReport:
    """Rewrite a model, compare it with the original, and write it with attnserve.json beside it.

    With a ``goal``, a search selects the rewrites (``attnserve.plan``). With ``plan``, they are
    read from a file. Otherwise ``rewrites`` lists them.

    Args:
        model: An .onnx file or an artifact folder; it is never changed. Its weights are read from
            the file when they are needed, so the file must not change meanwhile.
        output: An .onnx file, or a folder that receives model.onnx; the folder NAME-optimized
            beside the model by default.
        rewrites: Rewrites by hand.
        goal: Goal of a search. The original is written if nothing is faster.
        data: Calibration data.
        target: Precision, and target workloads (``served_lengths``).
        run: Provider and threads of calibration and comparison; certification runs on the CPU.
        write: Output options. An existing output is replaced only with ``force``; the input never.
        plan: A file of ``attnserve.plan``. The same plan gives the same bytes on the same machine,
            with the same versions and the same number of threads of numpy.

    Raises:
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput, CannotRewrite: The input cannot
            be used.
        CheckFailed: The fidelity is below ``min_cosine``, or the goal of a search is not reached.
    """
    check_mode(goal, rewrites, data, target, as_path(plan))
    check_cpu(target.precision)
    saved = None if plan is None else SavedPlan.read(Path(plan))
    if saved is not None:
        saved.check_run(run)
    artifact = open_artifact(model)
    original = load_model(artifact, in_place=True)
    file = _output_file(artifact, original, Path(model), as_path(output), write)
    context = run.context(progress)
    if goal.is_given:
        job = Job.for_search(artifact, original, goal, data, target, context)
        require_attention(job.matches)  # raises errors before the long search
        found = run_search(goal, job)
        rewritten = _Rewritten(found.state, ServedTimer(job), found)
    elif saved is not None:
        job = saved.job(artifact, original, data, target, goal.measure, context)
        rewritten = _Rewritten(_replay(job, saved), ServedTimer(job), planned=saved.record)
    else:
        job = Job.read(
            artifact,
            original,
            data,
            target,
            measure=goal.measure,
            joined=target.sequence,
            context=context,
        )
        rewritten = _apply_request(job, rewrites)
    report = OptimizeReport(
        _entry(job, rewritten, write), rewritten.state.plan, file, rewritten.search
    )
    _require_cosine(report, rewritten.planned, write.min_cosine)
    if saved is not None:
        saved.require_guarantee(report.fidelity)
    if not write.dry_run:
        _write(job, rewritten.state.result, report, write)
        job.checkpoints.remove()
    return report


def _output_file(
    artifact: Artifact, original: ir.Model, model: Path, output: Path | None, write: Write
) -> Path:
    """The .onnx file to write.

    Raises:
        InvalidOutput: It cannot be written.
    """
    force = write.force or write.dry_run
    path = output or default_output(model, "optimized")
    if output is None:
        check_output(path, force=force)
    file = output_file(path, artifact, original, force=force)
    if write.openvino:
        check_openvino(file, artifact, original)
    return file


# ---- rewrites -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rewritten:
    """A rewritten model.

    Attributes:
        state: The state after the last step of its plan.
        timer: Times served models, and reuses the models that it has fused before.
        found: The result of the search that made the plan, if there was one.
        mixing: The choice of the mixing, if there was one.
        warnings: Warnings about the requested rewrites.
        planned: The record of the search of a replayed plan.
    """

    state: State
    timer: ServedTimer
    found: SearchResult | None = None
    mixing: MixingChoice | None = None
    warnings: Sequence[str] = ()
    planned: PlanRecord | None = None

    @property
    def search(self) -> PlanRecord | None:
        """The record of the search."""
        return None if self.found is None else self.found.record


def _replay(job: Job, saved: SavedPlan) -> State:
    """Apply a plan.json to the same model and data as in its search."""
    plan = saved.plan_for(job.artifact, job.required_data)
    _require_empty_caches(job, plan)
    return apply_plan(plan, job.on_all_threads(), job.original.clone(), key=saved.key)


def _apply_request(job: Job, rewrites: Rewrites) -> _Rewritten:
    """Apply the requested rewrites, in the fastest mixing if none is requested."""
    planned = plan_request(rewrites, job)
    mixing, warnings, timer = None, planned.warnings, ServedTimer(job)

    def build(plan: Plan) -> State:
        _require_empty_caches(job, plan)
        return apply_plan(plan, job, job.original.clone(), fit=rewrites.refit)

    if len(planned.plans) > 1:
        state, mixing = choose_mixing(planned.plans, build, MixingComparison(timer))
        warnings += () if mixing is not None else (NOT_COMPARED,)
    else:
        state = build(planned.plan)
    if job.target.precision != "float32":
        state.fuse(job.target.precision)
        apply_steps(state.plan.conversion, state)
    return _Rewritten(state, timer, mixing=mixing, warnings=warnings)


def _require_empty_caches(job: Job, plan: Plan) -> None:
    """Check that caches whose shape the plan changes are empty in the data.

    Raises:
        InvalidData: A row has such a cache that is not empty.
    """
    if job.data is not None:
        names = plan.targets(Collaborate)
        pasts = [block.k.past for block in job.matches.blocks if block.name in names]
        caches = [past.value.name or "" for past in pasts if past is not None]
        require_empty([*job.data.fit, *job.data.held_out], caches)


# ---- result -------------------------------------------------------------------------------------


def _entry(job: Job, rewritten: _Rewritten, write: Write) -> OptimizeEntry:
    """Measure a rewritten model, and record it."""
    state, search, planned = rewritten.state, rewritten.search, rewritten.planned
    converted = state.result
    fidelity = _compare(job, converted, search)
    if rewritten.found is not None and rewritten.found.record.gain:
        other_runtimes, speed = rewritten.found.other_runtimes, rewritten.found.record.speedups
    else:
        keep = planned and planned.guaranteed
        other_runtimes = verify_in_other_runtimes(job, converted, fidelity, keep)
        speed = rewritten.timer.speed_of(state.model, converted, state.plan, other_runtimes)
    other_fidelities = tuple(
        compare(
            job.original,
            converted,
            other.fit,
            name,
            meter=job.meter(data=other),
            context=job.context,
        )
        for name, other in job.others
    )
    before = _cost(job.original, job.original, job.counted_workload)
    after = _cost(state.model, converted, job.counted_workload)
    break_even_length = _break_even(job.original, state.model)
    fidelities = (fidelity, *other_fidelities)
    unverified = unverified_runtimes(job, converted, other_runtimes, openvino=write.openvino)
    warnings = warnings_of(
        job, state, search, (before, after), break_even_length, fidelities, unverified
    )
    return OptimizeEntry(
        rewrite=_names(state),
        source=source_entry(job.artifact, job.original),
        calibration=None if job.data is None else calibration_of(job.data),
        seed=job.context.seed,
        before=before,
        after=after,
        changes=state.applied.changes,
        fidelity=fidelity,
        break_even_sequence=break_even_length,
        batch=job.counted_workload.batch,
        sequence=job.counted_workload.length,
        warnings=(*rewritten.warnings, *warnings),
        plan=state.plan.to_json(),
        served_speedup=speed and speed.served.value,
        speedups=speed,
        trained=state.training and state.training.record,
        versions={**versions(), **(package_versions(["torch"]) if state.training else {})},
        search=search or (planned and _goal_of(planned, fidelity)),
        mixing=rewritten.mixing,
        int8_weight_bits=int8_weight_bits(converted),
        int8_activations=int8_activations(converted),
        also_verified=other_fidelities,
        other_runtimes={str(each): compared for each, compared in other_runtimes.items()},
        quality_to_choose=search and search.quality_to_choose,
    )


def _goal_of(planned: PlanRecord, fidelity: Fidelity) -> SearchRecord:
    """The goal of a replayed plan, for the record of its model.

    The other results of the search are those of another model if the plan was edited. The goal is
    guaranteed if the replay reaches it; a replay measures no score.
    """
    goal = planned.goal
    is_reached = (
        goal.keep is not None
        and goal.task is None
        and largest_loss(fidelity.qualities, bounded=False) <= allowed_loss(goal.keep)
    )
    return SearchRecord(goal=goal, gain=planned.gain and is_reached)


def _names(state: State) -> str:
    """The names of the passes, of the training and of the precision, joined by "+"."""
    names = [change.rewrite for change in state.applied.changes]
    if state.training is not None and state.training.is_better:
        names.append("recover")
    if state.plan.precision != "float32":
        names.append(state.plan.precision)
    return "+".join(dict.fromkeys(names)) or "none"


def _compare(job: Job, converted: ir.Model, search: PlanRecord | None) -> Fidelity:
    """Compare the converted model with the original, as the search did or on held-out rows.

    Without data, they are compared on random inputs.
    """
    if search is not None and search.gain:
        return search.verifications[-1].fidelity
    original = job.original
    if job.data is not None:
        return job.compare_held_out(converted, job.data.to_verify)
    batches = random_batches(original, job.context.seed, empty=empty_axes(original, converted))
    meter = job.meter(split="random")
    return compare(original, converted, batches, "random inputs", meter=meter, context=job.context)


def _cost(model: ir.Model, converted: ir.Model, counted: Workload) -> ModelCost:
    """The recorded cost of a float model, with the bytes of the converted one."""
    return ModelCost(
        parameters=parameters(model),
        macs=count_macs(model, counted),
        bytes=parameter_bytes(converted),
    )


def _break_even(before: ir.Model, after: ir.Model) -> int | None:
    """The length from which the new model needs more MACs than the original, if any."""
    old, new = (model_cost(model, memory=False).macs for model in (before, after))
    return break_even(old, new) if old and new else None


def _require_cosine(
    report: OptimizeReport, planned: PlanRecord | None, min_cosine: float | None
) -> None:
    """Check the mean cosine of the outputs to the original's, if there is a bound.

    Args:
        planned: The record of the search of a replayed plan.

    Raises:
        CheckFailed: It is below the bound.
    """
    cosine = report.fidelity.mean_cosine
    data = report.fidelity.data
    if min_cosine is None or cosine >= min_cosine:
        return
    if (search := report.search or planned) is not None:
        less = "lower `target_speedup`" if search.goal.keep is None else "raise `keep`"
        less = f"make a new plan: {less}" if planned else less
    elif report.plan.find(Collaborate):
        less = "raise `collab_dk`"
    else:
        less = "rewrite fewer layers"
    calibrated = report.fidelity.is_held_out
    raise CheckFailed(
        f"mean cosine {cosine:.4f} on {data}, expected at least {min_cosine}: nothing was written",
        less + ("" if calibrated else ", or calibrate with `calib`"),
        code="optimize.min_cosine",
    )


def _write(job: Job, model: ir.Model, report: OptimizeReport, write: Write) -> None:
    """Write the model, its record in attnserve.json, and the files of other libraries."""
    has_openvino = write.openvino or runtime_of(model, job.context.device) == OpenVino.name
    write_rewritten(
        report.output,
        model,
        job.artifact,
        report.record,
        external=write.external_data,
        openvino=fused_for_libraries(model) if has_openvino else None,
    )
