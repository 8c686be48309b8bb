"""Optimize a model: plan rewrites, apply them, compare with the original, and write the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from attnserve.checks.certify import MatchReport, read_attention, require_finite_weights
from attnserve.checks.compare import (
    Fidelity,
    check_cosine_bound,
    compare,
    empty_axes,
    random_batches,
    require_empty,
)
from attnserve.checks.measures import MIN_ROWS
from attnserve.checks.quality import QualityMeter
from attnserve.choices import Alignment, Importance, Mixing, SearchMeasure, TaskName
from attnserve.context import Progress, Provider, RunContext, ignore_progress
from attnserve.data.datasets import (
    HELD_OUT,
    JOINED,
    Dataset,
    check_calibration_files,
    load_inputs,
)
from attnserve.data.lengths import Lengths, check_lengths, length_bounds, middle_length
from attnserve.data.token_statistics import calibration_of
from attnserve.fusion import fuse_for
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.checksums import source_entry
from attnserve.models.lineage import ModelCost, Rewrite, Step
from attnserve.models.onnx_files import load_model
from attnserve.models.outputs import check_output, check_target, default_output, write_rewritten
from attnserve.models.quantized import Int8Activations, int8_activations, int8_weight_bits
from attnserve.models.rows import counted_shape
from attnserve.paths import StrPath, as_path, as_paths
from attnserve.planning.apply import ApplyReport, apply_plan
from attnserve.planning.mixing_choice import FormComparison, MixingChoice, choose_mixing
from attnserve.planning.plan import Plan, targets_of
from attnserve.planning.plan_file import (
    planned_lengths,
    planned_measure,
    planned_quality,
    read_plan,
)
from attnserve.planning.requested_rewrites import Ranks, Request, plan_request
from attnserve.planning.search.goal import Allowed, Goal
from attnserve.planning.search.report import PlanReport
from attnserve.planning.search.search import search
from attnserve.planning.served_speed import ServedSpeed, ServedTimer, served_lengths
from attnserve.precision.convert import Precision, check_cpu, convert
from attnserve.versions import versions
from graph_passes.analysis.cost import Cost, break_even, count_macs, model_cost
from graph_passes.analysis.parameters import parameter_bytes
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import CheckFailed, InvalidArgument
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_neurons import PruneNeurons

__all__ = ["OptimizeReport", "optimize"]

DEFAULT_SEQUENCE = 128

GPU_ONLY = (
    "bfloat16 runs on a GPU only (provider cuda): ONNX Runtime has no CPU kernels for it and "
    "refuses the model"
)

NOT_COMPARED = (
    "forms of shared dimensions could not be timed on inputs of this model: it gets dense mixing"
)

LOW_QUALITY = 0.9
"""A warning is given below this value of the measure, which a constant predictor cannot reach."""


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
    steps: tuple[Step, ...]
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
    def record(self) -> Rewrite:
        """The entry of the lineage; ``_write`` adds the inputs."""
        found = self.found
        kinds = [step.rewrite for step in self.steps]
        if found is not None and found.recovered is not None and found.recovered.gain:
            kinds.append("recover")
        if self.plan.precision != "float32":
            kinds.append(self.plan.precision)
        entry = Rewrite(
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
        told: dict[str, Any] = {name: value for name, value in optional.items() if value}
        if found is not None:
            told["choose"] = found.summary.choose
        return entry.model_copy(update={**self.fidelity.measured.stated, **told})


def optimize(
    model: StrPath,
    output: StrPath | None = None,
    *,
    collab_dk: Ranks | None = None,
    collab_cache: bool = False,
    mixing: Mixing = "auto",
    head_dk: int | None = None,
    reuse: StrPath | Mapping[str, Any] | None = None,
    align: Alignment = "similarity",
    prune: float | None = None,
    importance: Importance = "energy",
    prune_heads: StrPath | Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    ffn: float | None = None,
    strip_cache: bool = False,
    keep: float | None = None,
    target_speedup: float | None = None,
    eval_data: StrPath | None = None,
    task: TaskName | None = None,
    allow: Sequence[Allowed] = (),
    measure: SearchMeasure = "auto",
    recover: float | None = None,
    plan: StrPath | None = None,
    precision: Precision = "float32",
    refit: bool = True,
    calib: StrPath | Sequence[StrPath] | None = None,
    calib_weights: Sequence[float] = (),
    also_prove: Sequence[StrPath] = (),
    tokenizer: StrPath | None = None,
    layers: Sequence[str] | None = None,
    batch: int = 1,
    sequence: Lengths | None = None,
    min_cosine: float | None = None,
    external_data: bool = False,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    dry_run: bool = False,
    progress: Progress = ignore_progress,
) -> OptimizeReport:
    """Rewrite a model, compare it with the original, and write it with attnserve.json beside it.

    Requested rewrites are applied in this order: skip, prune, reuse, prune neurons, refit,
    collaborate, refit, fuse operators and convert the precision. With ``keep`` or
    ``target_speedup`` the rewrites are searched for (``attnserve.plan``); with ``plan`` they are
    read from a file.

    Args:
        model: An .onnx file or an artifact folder; it is never changed. Its weights are read from
            the file when they are needed, so the file must not change meanwhile.
        output: An .onnx file, or a folder that receives model.onnx; the folder NAME-optimized
            beside the model by default.
        collab_dk: R for every layer, one R per layer in order, or R by layer name.
        collab_cache: Rewrite cached keys of decoders too: the cache, an input and an output of the
            model, then holds R shared dimensions (and H content logits) per token instead of H*K.
        mixing: "dense" lets every head read all R dimensions, as in the paper; "sparse" lets it
            read some of them; "auto" takes the fastest of both and of heads with fewer dimensions
            of their own, by measured time and at no more error than "dense"
            (``mixing_choice``).
        head_dk: The mean number of dimensions that a head reads in sparse mixing, from 1 to K.
            Without ``collab_dk`` nothing is shared.
        reuse: Heads that reuse the probabilities of earlier heads: ``partial:K[:P]``, ``full:P``,
            ``alternate``, ``all-end``, ``auto``, or edges as a .json file or an object
            (``read_edges``).
        align: Choose the reused heads by similarity, which needs ``calib``, or by index as in the
            paper.
        prune: The share of all heads to remove, least important first; needs ``calib``.
        importance: Output energy that other heads cannot reproduce ("energy"), leave-one-out loss
            ("loo") or Voting-to-Stay ("voting").
        prune_heads: Head masks instead, as a .json file or an object by layer (``read_masks``).
        skip: Layers whose attention is replaced by an affine map of its input, or by a constant
            (``LAYER:constant``); needs ``calib``.
        ffn: The share of all feed-forward neurons to remove, least predicted loss first; needs
            ``calib``.
        strip_cache: Remove a decoder's cache from inputs and outputs: the model then takes whole
            sequences. Rewrites that a cache rules out can follow in a second run.
        keep: Search for the fastest model that keeps this quality by ``measure``, and this share of
            a task's score if one is given; needs ``calib``. The original is written if nothing is
            faster.
        target_speedup: Search for the model with the least loss at this speed-up instead.
        eval_data, task: The rows on which a score is measured, and which score.
        allow: "ffn" allows the search to remove feed-forward neurons.
        measure: The measure of quality: "similarity", "r2", "kl", "top1" or "cosine"
            (``checks.quality``); "auto" chooses it by the kind of each output; "score" limits the
            loss of the task's score alone.
        recover: Minutes of training (``attnserve.recover``) within the search, which then takes
            faster choices that lose too much without it; see ``search.recovery_search``. The result
            is that without training if training brings no gain. Needs PyTorch.
        plan: A file of ``attnserve.plan``; the same plan gives the same bytes on the same machine.
        precision: "float16", "bfloat16", "int8", "int8-full" or "int4" weights, after all rewrites.
            "int8" has 7-bit weights, which are exact on every CPU; "int8-full" has 8-bit weights,
            for CPUs with VNNI, AMX or ARM dot products only; "int4" has 4-bit weights and float
            activations, for decoders that run one token at a time. A search leaves blocks in
            float32 whose int8 or int4 form is slower or loses too much.
        refit: Refit the output projections of rewritten layers, and the second matrices of
            feed-forwards, to the original's outputs; needs ``calib``.
        calib: Text (a sentence per line), .npz or a folder of .npz, or several of them. Without it
            factors are computed from the weights alone, at several times the error. The quality is
            measured on held-out rows of each file, and the lowest one counts.
        calib_weights: One number for each file of ``calib``: its share of the rows for statistics
            and fits. Rows of the other files are left out; by default all rows are used.
        also_prove: Files of other inputs, on which the result is compared with the original too.
        layers: Names or indices of the layers to rewrite; all by default.
        batch, sequence: The shape at which the model should be fast and costs are counted. A
            sequence is one length, or the shortest and the longest one, whose geometric mean counts
            then. It defaults to the calibration data's median length, else 128.
        min_cosine: Fail below this mean cosine, and write nothing.
        external_data: Store the weights in a file beside the model, as for models over 2 GB.
        provider, threads: Of calibration and comparison; certification runs on the CPU.
        force: Replace an existing output; never the input.
        dry_run: Do everything but write.

    Raises:
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput, CannotRewrite: The input cannot
            be used.
        CheckFailed: The fidelity is below ``min_cosine``, or the goal of a search is not reached.
    """
    check_cpu(precision)
    check_lengths(sequence)
    context = RunContext(provider, threads, seed, progress)
    eval_data, plan, tokenizer = as_path(eval_data), as_path(plan), as_path(tokenizer)
    files = as_paths(calib)
    check_calibration_files(files, calib_weights)
    rewrites: dict[str, Any] = {
        "collab_dk": collab_dk, "collab_cache": collab_cache, "mixing": mixing, "head_dk": head_dk,
        "reuse": reuse, "align": align, "prune": prune, "importance": importance,
        "prune_heads": prune_heads, "skip": tuple(skip), "ffn": ffn, "layers": layers,
        "strip_cache": strip_cache,
    }  # fmt: skip
    searched: dict[str, Any] = {
        "keep": keep, "target_speedup": target_speedup, "task": task, "eval_data": eval_data,
        "allow": tuple(allow), "measure": measure, "recover": recover,
    }  # fmt: skip
    mode = _mode(rewrites, searched, plan, precision, refit=refit, has_data=bool(files))
    if isinstance(mode, Path):
        measure = planned_measure(mode, measure)
    check_cosine_bound(min_cosine)
    artifact = open_artifact(model)
    original = load_model(artifact, in_place=True)
    folder = as_path(output) or default_output(Path(model), "optimized")
    if output is None:
        check_output(folder, force=force or dry_run)
    target = check_target(folder, artifact, original, force=force or dry_run)
    require_finite_weights(original)
    report = read_attention(original, seed=seed)
    data = None
    if files:
        # A task's score alone is kept on the task's own lengths.
        joined = None if measure == "score" else sequence
        joined = planned_lengths(mode) if isinstance(mode, Path) else joined
        data = load_inputs(
            files, original, artifact, weights=calib_weights, tokenizer=tokenizer, sequence=joined
        )
    others = [  # read before a search, which takes long
        (path.name, load_inputs(path, original, artifact, tokenizer=tokenizer, split=False))
        for path in as_paths(also_prove)
    ]
    wanted = sequence or (data.length if data is not None else DEFAULT_SEQUENCE)
    shape = counted_shape(original, batch, middle_length(wanted))
    length = shape[1]
    if length != middle_length(wanted):
        wanted = length  # that of the model
    before = model_cost(original)
    before_cost = _cost(before, original, shape)
    new_meter = partial(QualityMeter, original, artifact, measure=measure)
    timed = list(
        dict.fromkeys(
            counted_shape(original, batch, each) for each in served_lengths(sequence, data)
        )
    )
    calibration = data.fit if data is not None else ()
    timer = ServedTimer(original, calibration, context)
    form: MixingChoice | None = None
    if isinstance(mode, Goal):
        assert data is not None
        result = search(
            mode, artifact, original, data, tokenizer=tokenizer, batch=batch, sequence=sequence,
            context=context,
        )  # fmt: skip
        rewritten = _Rewritten(
            result.report.rewrites, result.float32_model, result.applied,
            found=result.report, converted=result.model,
        )  # fmt: skip
    elif isinstance(mode, Path):
        assert data is not None
        read, fit_context = read_plan(mode, artifact, data, context)
        rewritten = _apply(
            read, original=original, report=report, data=data, context=fit_context, shape=shape,
            fit=True,
        )  # fmt: skip
    else:
        planned = plan_request(mode, original, report, data, context, new_meter=new_meter)
        build = partial(
            _apply, original=original, report=report, data=data, context=context, shape=shape,
            fit=refit,
        )  # fmt: skip
        if planned.forms:
            comparison = FormComparison(timer, data, precision, timed)
            rewritten, form = choose_mixing(planned.forms, build, comparison)
            rewritten = replace(rewritten, warnings=() if form is not None else (NOT_COMPARED,))
        else:
            rewritten = build(planned.plan)
        rewritten = replace(rewritten, warnings=(*planned.warnings, *rewritten.warnings))
        if precision != "float32":
            rewritten = _fused(rewritten, shape, provider)
    converted = rewritten.converted or convert(
        rewritten.model, rewritten.plan.precision, calibration,
        float_blocks=rewritten.plan.float_blocks,
    )  # fmt: skip
    speed = rewritten.found and rewritten.found.speed
    speed = speed or timer.measure(rewritten.model, converted, rewritten.plan, timed)
    compared = partial(compare, original, converted, context=context)
    if rewritten.found is not None and rewritten.found.gain:
        fidelity = rewritten.found.fidelity  # the proof
    elif data is not None:
        meter = new_meter(data=data, split="prove")
        fidelity = compared(data.held_out, f"held out of {data.source.file}", meter=meter)
    else:
        batches = random_batches(original, seed, empty=empty_axes(original, converted))
        fidelity = compared(batches, "random inputs", meter=new_meter(split="random"))
    also: list[Fidelity] = []
    for name, other in others:
        also.append(compared(other.fit, name, meter=new_meter(data=other)))
    after = model_cost(rewritten.model)
    even = break_even(before.macs, after.macs) if before.macs and after.macs else None
    after_cost = replace(_cost(after, rewritten.model, shape), bytes=parameter_bytes(converted))
    optimized = OptimizeReport(
        output=target,
        before=before_cost,
        after=after_cost,
        steps=rewritten.applied.steps,
        fidelity=fidelity,
        break_even_sequence=even,
        batch=shape[0],
        sequence=length,
        warnings=(
            *rewritten.warnings,
            *((rewritten.found.verdict,) if rewritten.found and not rewritten.found.gain else ()),
            *_training_warnings(rewritten.found),
            *_shared_warnings(rewritten.applied),
            *_size_warnings(before_cost, after_cost),
            *_cost_warnings(even, length, artifact.max_length),
            *_data_warnings(rewritten, report, data, length_bounds(wanted)[1]),
            *_cache_warnings(report.blocks, rewritten.applied.steps),
            *_fidelity_warnings(fidelity, rewritten.plan),
            *fidelity.warnings(),
            *(warning for each in also for warning in each.warnings()),
            *((GPU_ONLY,) if rewritten.plan.precision == "bfloat16" else ()),
        ),
        plan=rewritten.plan,
        found=rewritten.found,
        also_proved=tuple(also),
        int8_weight_bits=int8_weight_bits(converted),
        int8_activations=int8_activations(converted),
        speed=speed,
        mixing=form,
    )
    _require_cosine(optimized, min_cosine)
    if isinstance(mode, Path):
        _require_promise(fidelity, planned_quality(mode))
    if not dry_run:
        _write(artifact, original, converted, optimized, data, external_data, seed)
    return optimized


def _mode(
    rewrites: Mapping[str, Any],
    searched: Mapping[str, Any],
    plan: Path | None,
    precision: Precision,
    *,
    refit: bool,
    has_data: bool,
) -> Goal | Path | Request:
    """The mode of a call: a search for a goal, a plan file, or requested rewrites.

    Raises:
        InvalidArgument: Parameters of different modes are given, or data is missing.
    """
    wants_search = searched["keep"] is not None or searched["target_speedup"] is not None
    if wants_search or plan is not None:
        _require_no_rewrites({**rewrites, "refit": refit}, "plan" if plan else "search")
        if not has_data:
            raise InvalidArgument(
                "calibration data is required", "give `calib`", code="optimize.no_data"
            )
    if not wants_search and (
        any(searched[name] for name in ("eval_data", "task", "allow"))
        or searched["measure"] == "score"
    ):
        raise InvalidArgument(
            "`eval_data`, `task`, `allow` and `measure` score apply to a search",
            "give `keep` or `target_speedup` too",
            code="optimize.conflict",
        )
    if not wants_search and searched["recover"] is not None:
        raise InvalidArgument(
            "`recover` applies to a search",
            "give `keep` or `target_speedup` too, or run `attnserve recover` on the result",
            code="optimize.conflict",
        )
    goal = Goal(**searched, precision=precision) if wants_search else None
    if plan is not None and (goal is not None or precision != "float32"):
        raise InvalidArgument(
            "`plan` describes all rewrites, and the precision",
            "leave the other parameters out",
            code="optimize.conflict",
        )
    return goal or plan or Request(**rewrites, precision=precision)


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

    The held-out rows are not only those of the proof, so that a value may be lower by chance.
    """
    quality = fidelity.quality
    if promised is None or quality is None or quality.ci95 is None or quality.ci95[1] >= promised:
        return
    raise CheckFailed(
        f"the plan keeps {quality.value:.4f} ({quality.measure}, at most {quality.ci95[1]:.4f}) on"
        f" {fidelity.data}, and promises {promised:g}: nothing was written",
        "make a new plan on this machine",
        code="plan.promise",
    )


@dataclass(frozen=True, eq=False)
class _Rewritten:
    """A rewritten model in float32, its plan, and the reports of its making.

    Attributes:
        converted: The model in the precision of its plan, if a search made it.
    """

    plan: Plan
    model: ir.Model
    applied: ApplyReport
    warnings: tuple[str, ...] = ()
    found: PlanReport | None = None
    converted: ir.Model | None = None


def _require_no_rewrites(parameters: Mapping[str, Any], mode: str) -> None:
    """Raises: InvalidArgument: A parameter of rewrites by hand is given beside a plan or search."""
    defaults = {field.name: field.default for field in fields(Request)} | {"refit": True}
    for name, value in parameters.items():
        if value != defaults[name]:
            raise InvalidArgument(
                f"`{name}` requests a rewrite, and a {mode} chooses its own",
                f"leave `{name}` out, or `plan`, `keep` and `target_speedup`",
                code="optimize.conflict",
            )


def _apply(
    plan: Plan,
    *,
    original: ir.Model,
    report: MatchReport,
    data: Dataset | None,
    context: RunContext,
    shape: tuple[int, int],
    fit: bool,
) -> _Rewritten:
    """Apply a plan to a copy of the model."""
    if data is not None:
        shared = plan.targets(Collaborate)
        pasts = [block.k.past for block in report.blocks if block.name in shared]
        caches = [past.value.name or "" for past in pasts if past is not None]
        require_empty([*data.fit, *data.held_out], caches)
    model = original.clone()
    applied = apply_plan(plan, model, context, original=original, data=data, fit=fit, shape=shape)
    return _Rewritten(plan, model, applied)


def _fused(rewritten: _Rewritten, shape: tuple[int, int], provider: Provider) -> _Rewritten:
    """The rewritten model in fused operators, before its conversion to another precision."""
    plan, model = rewritten.plan, rewritten.model
    passes = fuse_for(model, plan.precision, provider)
    macs = count_macs(model, *shape)
    steps = [Step(one.name, name, macs_after=macs) for one in passes for name in targets_of(one)]
    return replace(
        rewritten,
        plan=Plan.of([*plan.passes, *passes], plan.precision, plan.float_blocks),
        applied=replace(rewritten.applied, steps=(*rewritten.applied.steps, *steps)),
    )


def _cost(cost: Cost, graph: ir.Model, shape: tuple[int, int]) -> ModelCost:
    return ModelCost(cost.parameters, count_macs(graph, *shape), cost.bytes)


def _training_warnings(found: PlanReport | None) -> list[str]:
    recovered = None if found is None else found.recovered
    return [] if recovered is None or recovered.gain else [recovered.verdict]


def _shared_warnings(applied: ApplyReport) -> list[str]:
    """A warning about blocks whose last weights stay shared, and are not refitted."""
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


def _data_warnings(
    rewritten: _Rewritten, report: MatchReport, data: Dataset | None, longest: int
) -> list[str]:
    """Warnings about calibration data that is missing, short or scarce."""
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
    widths = [block.input_size for block in report.blocks if block.name in rewritten.plan.changed]
    widths += [sum(mask) for mask in rewritten.plan.targets(PruneNeurons).values()]
    if widths and data.source.fit_tokens < max(widths):
        warnings.append(
            f"calibrated on {data.source.fit_tokens} tokens, fewer than the "
            f"{max(widths)} features that a layer is fitted on: more text gives a better fit"
        )
    return warnings


def _cache_warnings(blocks: Sequence[AttentionBlock], steps: Sequence[Step]) -> list[str]:
    """Warnings about caches, which the original cannot share and which may even grow."""
    widths = {block.name: block.num_heads * block.head_size for block in blocks}
    sizes = [(widths[s.block], s.cache_width) for s in steps if s.cache_width is not None]
    if not sizes:
        return []
    before, after = (sum(column) for column in zip(*sizes, strict=True))
    warnings = [
        f"cached keys changed from {before} to {after} numbers a token over {len(sizes)} layers: "
        "this model reads only caches that it made itself"
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


def _write(
    artifact: Artifact,
    original: ir.Model,
    graph: ir.Model,
    report: OptimizeReport,
    data: Dataset | None,
    external_data: bool,
    seed: int,
) -> None:
    inputs = {
        "source": source_entry(artifact, original),
        "calibration": None if data is None else calibration_of(data),
        "seed": seed,
        "versions": versions(),
    }
    entry = report.record.model_copy(update=inputs)
    write_rewritten(report.output, graph, artifact, entry, external=external_data)
