"""Optimize a model: plan rewrites, apply them, compare with the original, and write the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import MatchReport, read_attention, require_finite_weights
from attnserve.checks.compare import Fidelity, compare
from attnserve.checks.measures import MIN_ROWS
from attnserve.checks.quality import QualityMeter
from attnserve.choices import Precision, SearchMeasure
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.data.datasets import (
    HELD_OUT,
    JOINED,
    Dataset,
    load_inputs,
)
from attnserve.data.lengths import length_bounds, middle_length
from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fuse_for
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.cache_inputs import empty_axes, require_empty
from attnserve.models.checksums import source_entry
from attnserve.models.example_inputs import random_batches
from attnserve.models.lineage import ModelCost, RewriteRecord, StepRecord
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_output, check_target, default_output, write_rewritten
from attnserve.models.quantized import Int8Activations, int8_activations, int8_weight_bits
from attnserve.models.rows import with_fixed_sizes
from attnserve.options import (
    Data,
    Goal,
    Lengths,
    Rewrites,
    Run,
    Shape,
    Write,
    with_keywords,
)
from attnserve.paths import StrPath, as_path
from attnserve.planning.apply import apply_plan, apply_steps, prepare
from attnserve.planning.mixing_choice import FormComparison, MixingChoice, choose_mixing
from attnserve.planning.plan import Plan
from attnserve.planning.plan_file import (
    SavedPlan,
)
from attnserve.planning.requested_rewrites import plan_request
from attnserve.planning.search.report import PlanReport
from attnserve.planning.search.search import search
from attnserve.planning.served_speed import ServedSpeed, ServedTimer, served_workloads
from attnserve.planning.state import ApplyReport, State
from attnserve.precision.convert import check_cpu
from attnserve.runtime.interface import Batch
from attnserve.versions import versions
from graph_passes.analysis.cost import Cost, break_even, count_macs, model_cost
from graph_passes.analysis.parameters import parameter_bytes
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import CheckFailed, InvalidArgument
from graph_passes.passes.base import targets_of
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_neurons import PruneNeurons

__all__ = ["OptimizeReport", "optimize"]

DEFAULT_SEQUENCE = 128

GPU_ONLY = (
    "bfloat16 runs on a GPU only (provider cuda): ONNX Runtime has no CPU kernels for it and "
    "refuses the model"
)

NOT_COMPARED = (
    "forms of shared dimensions could not be timed on inputs of this model: dense mixing is used"
)

NO_REWRITES, NO_GOAL, NO_DATA = Rewrites(), Goal(), Data()
ANY_SHAPE, DEFAULT_RUN, DEFAULT_WRITE = Shape(), Run(), Write()

LOW_QUALITY = 0.9
"""Quality below which a warning is given; constant predictors are below it."""


@dataclass(frozen=True)
class OptimizeReport:
    """The applied rewrites, and their costs and effects.

    Attributes:
        after: Parameters and MACs of the rewritten model in float32, bytes of its written weights.
        found: The report of the search, if there was one.
        also_proved: The comparison on each file of ``also_prove``.
        int8_weight_bits: 8 if the model needs a CPU with VNNI, AMX or ARM dot products; None
            without int8.
        int8_activations: "static" with calibration data, otherwise "per-row"; None without int8.
    """

    output: Path
    before: ModelCost
    after: ModelCost
    steps: tuple[StepRecord, ...]
    fidelity: Fidelity
    break_even_sequence: int | None
    batch: int
    sequence: int
    warnings: tuple[str, ...]
    plan: Plan
    found: PlanReport | None = None
    also_proved: tuple[Fidelity, ...] = ()
    int8_weight_bits: Literal[7, 8] | None = None
    int8_activations: Int8Activations | None = None
    speed: ServedSpeed | None = None
    mixing: MixingChoice | None = None

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json("rewrite")

    @property
    def record(self) -> RewriteRecord:
        """The entry of the lineage; ``_write`` adds the inputs."""
        found = self.found
        kinds = [step.rewrite for step in self.steps]
        if found is not None and found.recovered is not None and found.recovered.gain:
            kinds.append("recover")
        if self.plan.precision != "float32":
            kinds.append(self.plan.precision)
        entry = RewriteRecord(
            rewrite="+".join(dict.fromkeys(kinds)) or "none",
            before=self.before,
            after=self.after,
            steps=self.steps,
            fidelity=self.fidelity.cosines,
            break_even_sequence=self.break_even_sequence,
            batch=self.batch,
            sequence=self.sequence,
            warnings=self.warnings,
            plan=self.plan.to_json(),
            served_speedup=self.speed and self.speed.served.value,
            speedups=self.speed and self.speed.record,
        )
        optional = {
            "mixing": self.mixing and self.mixing.record,
            "int8_weight_bits": self.int8_weight_bits,
            "int8_activations": self.int8_activations,
            "search": found and found.summary,
            "also_proved": tuple(fidelity.record for fidelity in self.also_proved),
        }
        given: dict[str, Any] = {name: value for name, value in optional.items() if value}
        if found is not None:
            given["choose"] = found.summary.choose
        return entry.model_copy(update={**self.fidelity.measured.stated, **given})


@with_keywords
def optimize(
    model: StrPath,
    output: StrPath | None = None,
    *,
    rewrites: Rewrites = NO_REWRITES,
    goal: Goal = NO_GOAL,
    data: Data = NO_DATA,
    shape: Shape = ANY_SHAPE,
    run: Run = DEFAULT_RUN,
    write: Write = DEFAULT_WRITE,
    plan: StrPath | None = None,
    progress: Progress = ignore_progress,
) -> OptimizeReport:
    """Rewrite a model, compare it with the original, and write it with attnserve.json beside it.

    With a ``goal``, a search selects the rewrites (``attnserve.plan``). With ``plan``, they are
    read from a file. Otherwise ``rewrites`` lists them. The fields of the groups are keywords too:
    ``optimize(model, keep=0.99, calib="texts.txt")``.

    Args:
        model: An .onnx file or an artifact folder; it is never changed. Its weights are read from
            the file when they are needed, so the file must not change meanwhile.
        output: An .onnx file, or a folder that receives model.onnx; the folder NAME-optimized
            beside the model by default.
        rewrites: Rewrites by hand.
        goal: Goal of a search. The original is written if no candidate is faster.
        data: Calibration data.
        shape: Shape at which the model should be fast. The sequence defaults to the calibration
            data's median length, else 128.
        run: Provider and threads of calibration and comparison; certification runs on the CPU.
        write: Output options. An existing output is replaced only with ``force``; the input never.
        plan: A file of ``attnserve.plan``; the same plan gives the same bytes on the same machine.

    Raises:
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput, CannotRewrite: The input cannot
            be used.
        CheckFailed: The fidelity is below ``min_cosine``, or the goal of a search is not reached.
    """
    _check_mode(rewrites, goal, data, as_path(plan))
    saved = None if plan is None else SavedPlan.read(Path(plan))
    given = _read(
        Path(model), as_path(output), goal, data, shape, run, write,
        goal.precision if goal.is_given else rewrites.precision, plan=saved, progress=progress,
    )  # fmt: skip
    if goal.is_given:
        rewritten = _searched(given, goal)
    elif saved is not None:
        rewritten = _replayed(given, saved)
    else:
        rewritten = _requested(given, rewrites)
    converted = rewritten.state.result
    report = _compared(given, rewritten, converted)
    _require_cosine(report, write.min_cosine)
    if saved is not None:
        _require_promise(report.fidelity, saved.promised)
    if not write.dry_run:
        _write(given, converted, report, external=write.external_data)
        for training in rewritten.plan.trainings if saved is not None else ():
            training.forget(rewritten.state.key)
    return report


# ---- input --------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Given:
    """Validated arguments of a call, and the loaded model and data.

    Attributes:
        target: The file that is written.
        report: The certified attention of the original.
        others: Data of ``also_prove``, by file name.
        wanted: The lengths at which the model should be fast.
        counted: Where MACs are counted: the middle length.
        timed: Where models are timed.
    """

    artifact: Artifact
    original: ir.Model
    target: Path
    report: MatchReport
    data: Dataset | None
    others: Sequence[tuple[str, Dataset]]
    options: Data
    wished: Shape
    run: Run
    measure: SearchMeasure
    context: RunContext
    wanted: Lengths
    counted: Workload
    timed: Sequence[Workload]
    timer: ServedTimer

    @property
    def calibration(self) -> Sequence[Batch]:
        return () if self.data is None else self.data.fit

    def meter(self, *, data: Dataset | None = None, split: str = "data") -> QualityMeter:
        """Create a meter that compares outputs with those of the original."""
        return QualityMeter(
            self.original, self.artifact, measure=self.measure, data=data, split=split
        )


def _check_mode(rewrites: Rewrites, goal: Goal, data: Data, plan: Path | None) -> None:
    """Raises: InvalidArgument: Options of different modes are given, or data is missing."""
    precision, other = rewrites.precision, goal.precision
    if goal.is_given:
        precision, other = other, precision
    check_cpu(precision)
    if goal.is_given or plan is not None:
        kind = "plan" if plan else "search"
        for name, _ in rewrites.changed("precision"):
            raise InvalidArgument(
                f"`{name}` requests a rewrite, but a {kind} selects the rewrites",
                f"leave `{name}` out, or `plan`, `keep` and `target_speedup`",
                code="optimize.conflict",
            )
        data.require()
    if plan is not None and (goal.is_given or precision != "float32" or other != "float32"):
        raise InvalidArgument(
            "`plan` describes all rewrites, and the precision",
            "leave the other parameters out",
            code="optimize.conflict",
        )
    if other not in ("float32", precision):
        raise InvalidArgument(
            f"`precision` is {rewrites.precision} by hand, and {goal.precision} of the goal",
            "give one of them",
            code="optimize.conflict",
        )
    if not goal.is_given and plan is None:
        rewrites.require()


def _read(
    model: Path,
    output: Path | None,
    goal: Goal,
    options: Data,
    wished: Shape,
    run: Run,
    write: Write,
    precision: Precision,
    *,
    plan: SavedPlan | None,
    progress: Progress,
) -> _Given:
    """Read the model and the data, and check that the output can be written."""
    measure = goal.measure if plan is None else plan.measure(goal.measure)
    wished = wished if plan is None else plan.shape(wished)
    artifact = open_artifact(model)
    original = load_model(artifact, in_place=True)
    force = write.force or write.dry_run
    folder = output or default_output(model, "optimized")
    if output is None:
        check_output(folder, force=force)
    target = check_target(folder, artifact, original, force=force)
    require_finite_weights(original)
    report = read_attention(original, seed=run.seed)
    data = None
    if options.calib:
        # With `measure` score, the lengths are those of the task's data.
        joined = None if goal.measure == "score" else wished.sequence
        joined = joined if plan is None else plan.lengths
        data = load_inputs(
            options.calib, original, artifact, weights=options.calib_weights,
            tokenizer=options.tokenizer, sequence=joined,
        )  # fmt: skip
    others = [  # read before a search, which takes long
        (path.name, load_inputs(path, original, artifact, tokenizer=options.tokenizer, split=False))
        for path in options.also_prove
    ]
    wanted = wished.sequence or (data.length if data is not None else DEFAULT_SEQUENCE)
    timed = [with_fixed_sizes(original, each) for each in
             served_workloads(original, wished, data, precision)]  # fmt: skip
    middle = Workload.of(wished.batch, middle_length(wanted), timed[0].phase)
    counted = with_fixed_sizes(original, middle)
    if counted.length != middle.length:
        wanted = counted.length  # that of the model
    context = run.context(progress)
    context = context if plan is None else plan.context(context)
    return _Given(
        artifact=artifact,
        original=original,
        target=target,
        report=report,
        data=data,
        others=others,
        options=options,
        wished=wished,
        run=run,
        measure=measure,
        context=context,
        wanted=wanted,
        counted=counted,
        timed=list(dict.fromkeys(timed)),
        timer=ServedTimer(original, () if data is None else data.fit, context),
    )


# ---- rewrites -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rewritten:
    """A plan, and the model after its steps.

    Attributes:
        mixing: The choice between forms of shared dimensions, if there was one.
    """

    plan: Plan
    state: State
    warnings: tuple[str, ...] = ()
    found: PlanReport | None = None
    mixing: MixingChoice | None = None

    @property
    def model(self) -> ir.Model:
        """The rewritten model in float32."""
        return self.state.model

    @property
    def applied(self) -> ApplyReport:
        return self.state.report


def _searched(given: _Given, goal: Goal) -> _Rewritten:
    assert given.data is not None
    result = search(
        goal, given.artifact, given.original, given.data, tokenizer=given.options.tokenizer,
        shape=given.wished, context=given.context,
    )  # fmt: skip
    return _Rewritten(result.report.rewrites, result.state, found=result.report)


def _replayed(given: _Given, saved: SavedPlan) -> _Rewritten:
    assert given.data is not None
    plan = saved.plan_for(given.artifact, given.data)
    state = _state(given, plan, replace(given.context, threads=0), saved.key)  # as the search
    return _Rewritten(plan, apply_plan(plan, state))


def _requested(given: _Given, rewrites: Rewrites) -> _Rewritten:
    planned = plan_request(
        rewrites, given.original, given.report, given.data, given.context, new_meter=given.meter
    )

    def build(plan: Plan) -> _Rewritten:
        """The model in float32, which is fused before its conversion."""
        state = prepare(plan, _state(given, plan, given.context, fit=rewrites.refit))
        return _Rewritten(plan, apply_steps(plan.in_order(plan.passes).steps, state))

    if planned.forms:
        comparison = FormComparison(given.timer, given.data, rewrites.precision, given.timed)
        rewritten, form = choose_mixing(planned.forms, build, comparison)
        warnings = () if form is not None else (NOT_COMPARED,)
        rewritten = replace(rewritten, warnings=warnings, mixing=form)
    else:
        rewritten = build(planned.plan)
    rewritten = replace(rewritten, warnings=(*planned.warnings, *rewritten.warnings))
    if rewrites.precision != "float32":
        rewritten = _fused(rewritten, given.counted, given.run.provider)
    apply_steps(rewritten.plan.conversion, rewritten.state)
    return rewritten


def _state(
    given: _Given, plan: Plan, context: RunContext, key: str = "", *, fit: bool = True
) -> State:
    """The state before the steps of a plan."""
    data = given.data
    if data is not None:
        shared = plan.targets(Collaborate)
        pasts = [block.k.past for block in given.report.blocks if block.name in shared]
        caches = [past.value.name or "" for past in pasts if past is not None]
        require_empty([*data.fit, *data.held_out], caches)
    return State(
        given.original.clone(), context, given.original, given.artifact, data, fit, given.counted,
        key=key,
    )  # fmt: skip


def _fused(rewritten: _Rewritten, counted: Workload, provider: Provider) -> _Rewritten:
    """The rewritten model in fused operators, before its conversion to another precision."""
    plan, model = rewritten.plan, rewritten.model
    passes = fuse_for(model, plan.precision, provider)
    macs = count_macs(model, counted)
    steps = [
        StepRecord(rewrite=one.name, block=name, macs_after=macs)
        for one in passes
        for name in targets_of(one)
    ]
    applied = rewritten.applied
    rewritten.state.record(replace(applied, steps=(*applied.steps, *steps)))
    fused = Plan.of([*plan.passes, *passes], plan.precision, plan.float_blocks)
    return replace(rewritten, plan=fused)


# ---- result -------------------------------------------------------------------------------------


def _compared(given: _Given, rewritten: _Rewritten, converted: ir.Model) -> OptimizeReport:
    """Time the converted model, and compare it with the original."""
    original, data, found = given.original, given.data, rewritten.found
    speed = found and found.speed
    speed = speed or given.timer.measure(rewritten.model, converted, rewritten.plan, given.timed)
    compared = partial(compare, original, converted, context=given.context)
    if found is not None and found.gain:
        fidelity = found.fidelity  # the verification
    elif data is not None:
        meter = given.meter(data=data, split="prove")
        fidelity = compared(data.held_out, f"held out of {data.source.file}", meter=meter)
    else:
        batches = random_batches(original, given.run.seed, empty=empty_axes(original, converted))
        fidelity = compared(batches, "random inputs", meter=given.meter(split="random"))
    also = tuple(
        compared(other.fit, name, meter=given.meter(data=other)) for name, other in given.others
    )
    before, after = model_cost(original), model_cost(rewritten.model)
    before_cost = _cost(before, original, given.counted)
    after_cost = _cost(after, rewritten.model, given.counted)
    after_cost = after_cost.model_copy(update={"bytes": parameter_bytes(converted)})
    even = break_even(before.macs, after.macs) if before.macs and after.macs else None
    length = given.counted.length
    return OptimizeReport(
        output=given.target,
        before=before_cost,
        after=after_cost,
        steps=rewritten.applied.steps,
        fidelity=fidelity,
        break_even_sequence=even,
        batch=given.counted.batch,
        sequence=length,
        warnings=(
            *rewritten.warnings,
            *((found.verdict,) if found and not found.gain else ()),
            *_training_warnings(found),
            *_shared_warnings(rewritten.applied),
            *_size_warnings(before_cost, after_cost),
            *_cost_warnings(even, length, given.artifact.max_length),
            *_data_warnings(rewritten, given),
            *_cache_warnings(given.report.blocks, rewritten.applied.steps),
            *_fidelity_warnings(fidelity, rewritten.plan),
            *fidelity.warnings(),
            *(warning for each in also for warning in each.warnings()),
            *((GPU_ONLY,) if rewritten.plan.precision == "bfloat16" else ()),
        ),
        plan=rewritten.plan,
        found=found,
        also_proved=also,
        int8_weight_bits=int8_weight_bits(converted),
        int8_activations=int8_activations(converted),
        speed=speed,
        mixing=rewritten.mixing,
    )


def _require_cosine(report: OptimizeReport, min_cosine: float | None) -> None:
    """Raises: CheckFailed: The mean cosine is below the bound."""
    cosine, data = report.fidelity.mean_cosine, report.fidelity.data
    if min_cosine is None or cosine >= min_cosine:
        return
    less = "raise `collab_dk`" if report.plan.find(Collaborate) else "rewrite fewer layers"
    calibrated = data.startswith("held out")
    raise CheckFailed(
        f"mean cosine {cosine:.4f} on {data}, expected at least {min_cosine}: nothing was written",
        less + ("" if calibrated else ", or calibrate with `calib`"),
        code="optimize.min_cosine",
    )


def _require_promise(fidelity: Fidelity, promised: float | None) -> None:
    """Raises: CheckFailed: A plan certainly keeps less here than its search promised.

    The interval is compared, because these rows differ from the verification rows of the search.
    """
    quality = fidelity.quality
    if promised is None or quality is None or quality.ci95 is None or quality.ci95[1] >= promised:
        return
    raise CheckFailed(
        f"the plan keeps {quality.value:.4f} ({quality.measure}, at most {quality.ci95[1]:.4f}) on"
        f" {fidelity.data}, and its target is {promised:g}: nothing was written",
        "make a new plan on this machine",
        code="plan.promise",
    )


def _cost(cost: Cost, graph: ir.Model, counted: Workload) -> ModelCost:
    return ModelCost(parameters=cost.parameters, macs=count_macs(graph, counted), bytes=cost.bytes)


def _training_warnings(found: PlanReport | None) -> list[str]:
    recovered = None if found is None else found.recovered
    return [] if recovered is None or recovered.gain else [recovered.verdict]


def _shared_warnings(applied: ApplyReport) -> list[str]:
    """A warning about blocks that were not refitted, because they share their last weights."""
    if not applied.shared:
        return []
    names = ", ".join(applied.shared)
    return [f"{names}: not refitted, because layers that are not rewritten share the weights"]


def _size_warnings(before: ModelCost, after: ModelCost) -> list[str]:
    """Warnings about a model that is larger than the original."""
    grown = [
        f"{name} grew from {old:,} to {new:,}"
        for name, old, new in (
            ("parameters", before.parameters, after.parameters),
            ("bytes of weights", before.bytes, after.bytes),
        )
        if new > old
    ]
    return [f"this model is larger than the original: {', '.join(grown)}"] if grown else []


def _cost_warnings(even: int | None, sequence: int, longest: int | None) -> list[str]:
    """Warnings about lengths at which the model costs more than the original."""
    if even is None:
        return []
    if even <= 1:
        return ["this model needs more MACs than the original at every length"]
    if sequence >= even:
        return [
            f"at {sequence} tokens this model needs more MACs than the original: "
            f"it needs fewer only below {even} tokens"
        ]
    if longest is None or even <= longest:
        return [
            f"from {even} tokens on this model needs more MACs than the original "
            f"(fewer at the {sequence} counted here)"
        ]
    return []


def _data_warnings(rewritten: _Rewritten, given: _Given) -> list[str]:
    """Warnings about calibration data that is missing, short or scarce."""
    data, longest = given.data, length_bounds(given.wanted)[1]
    if rewritten.applied.is_exact:
        return []
    if data is None:
        return ["not calibrated: calibration data cuts the error several times"]
    warnings: list[str] = []
    usual = float(np.median(data.lengths)) if data.lengths else longest
    if data.source.joined_rows:
        warnings.append(
            f"the calibration texts are much shorter than {longest} tokens: "
            f"{data.source.joined_rows} rows of several texts were added; texts of the length "
            "to be served are better"
        )
    elif JOINED * usual <= longest:
        warnings.append(
            f"calibrated and verified on {usual:.0f} tokens (median), for {longest}: longer "
            "inputs may lose more; calibrate on inputs of the length to be served"
        )
    widths = [block.input_size for block in given.report.blocks
              if block.name in rewritten.plan.changed]  # fmt: skip
    widths += [sum(mask) for mask in rewritten.plan.targets(PruneNeurons).values()]
    if widths and data.source.fit_tokens < max(widths):
        warnings.append(
            f"calibrated on {data.source.fit_tokens} tokens, fewer than the "
            f"{max(widths)} features that a layer is fitted on: more text gives a better fit"
        )
    return warnings


def _cache_warnings(blocks: Sequence[AttentionBlock], steps: Sequence[StepRecord]) -> list[str]:
    """Warnings about caches, which the original cannot share and which may even grow."""
    widths = {block.name: block.num_heads * block.head_size for block in blocks}
    sizes = [(widths[s.block], s.cache_width) for s in steps if s.cache_width is not None]
    if not sizes:
        return []
    before, after = (sum(column) for column in zip(*sizes, strict=True))
    warnings = [
        f"cached keys changed from {before} to {after} numbers a token over {len(sizes)} layers: "
        "this model can read only caches that it wrote"
    ]
    if any(new >= old for old, new in sizes):
        warnings.append(
            "the cache of keys shrinks only if R plus one content logit for each head is less than "
            "num_heads x head_size: lower R"
        )
    return warnings


def _fidelity_warnings(fidelity: Fidelity, plan: Plan) -> list[str]:
    quality = fidelity.quality
    if quality is None:
        if not fidelity.data.startswith("held out"):
            return []
        return ["no output has a quality that can be measured: only cosines were compared"]
    warnings: list[str] = []
    if quality.value < LOW_QUALITY:
        less = "compress less, or fewer layers" if plan.changed else "use a more exact precision"
        warnings.append(
            f"the outputs are far from the original's: {quality.measure} {quality.value:.3f} "
            f"({fidelity.data}); {less}"
        )
    if quality.ci95 is None and quality.split in ("prove", "held out") and quality.rows:
        kind = f" of {quality.lengths}" if quality.lengths else ""
        warnings.append(
            f"measured on {quality.rows} held-out rows{kind}, which is too few for an interval: "
            f"give at least {MIN_ROWS * HELD_OUT} different rows{kind}"
        )
    return warnings


def _write(given: _Given, graph: ir.Model, report: OptimizeReport, *, external: bool) -> None:
    artifact, data = given.artifact, given.data
    inputs = {
        "source": source_entry(artifact, given.original),
        "calibration": None if data is None else calibration_of(data),
        "seed": given.run.seed,
        "versions": versions(),
    }
    entry = report.record.model_copy(update=inputs)
    write_rewritten(report.output, graph, artifact, entry, external=external)
