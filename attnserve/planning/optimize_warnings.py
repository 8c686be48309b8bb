"""Warnings in the report of ``optimize``, such as a missing gain or too little data."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from attnserve.checks.measures import MIN_ROWS
from attnserve.checks.relations import MIN_DOCUMENTS, NEIGHBORS
from attnserve.context import AUTO
from attnserve.data.joined_texts import JOINED
from attnserve.data.splits import INVERSE_HELD_OUT_SHARE
from attnserve.job import Job
from attnserve.limits import LOW_QUALITY
from attnserve.models.lineage import ModelCost, RecordedChange
from attnserve.models.measured import Fidelity
from attnserve.models.quantized import rounds_activations
from attnserve.models.search_record import SearchRecord
from attnserve.models.training_result import TrainingResult
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.plans.rewriting import ApplyReport
from attnserve.runtime.by_length import RowRuntimes
from attnserve.runtime.openvino_runtime import OpenVino
from attnserve.runtime.session import runtime_of
from graph_passes.blocks import AttentionBlock
from graph_passes.passes.prune_neurons import PruneNeurons

__all__ = ["unverified_runtimes", "warnings_of"]

GPU_ONLY = (
    "bfloat16 runs on a GPU only (provider cuda): ONNX Runtime has no CPU kernels for it and "
    "refuses the model"
)


def warnings_of(
    job: Job,
    state: State,
    search: SearchRecord | None,
    costs: tuple[ModelCost, ModelCost],
    break_even: int | None,
    fidelities: Sequence[Fidelity],
    unverified: Sequence[str] = (),
) -> tuple[str, ...]:
    """The warnings about a rewritten model, the most important first.

    Args:
        state: The state after the last step of its plan.
        search: The record of the search, if there was one.
        costs: Costs of the original and of the rewritten model.
        break_even: The length from which the rewritten model needs more MACs; None if there is
            none.
        fidelities: The comparison with the original, and those on other data.
        unverified: See ``unverified_runtimes``.
    """
    plan, applied = state.plan, state.applied
    return (
        *((search.verdict,) if search and not search.gain else ()),
        *_runtime_warnings(runtime_of(state.result, job.context.device), unverified),
        *_training_warnings(search, state.training),
        *_shared_warnings(applied),
        *_size_warnings(*costs),
        *_cost_warnings(break_even, job.counted_workload.length, job.artifact.max_length),
        *_data_warnings(job, plan, applied),
        *_cache_warnings(job.matches.blocks, applied.changes),
        *_fidelity_warnings(fidelities[0], plan),
        *(warning for fidelity in fidelities for warning in fidelity.warnings()),
        *((GPU_ONLY,) if plan.precision == "bfloat16" else ()),
    )


def unverified_runtimes(
    job: Job, model: ir.Model, verified: Collection[RowRuntimes] = (), *, openvino: bool
) -> list[str]:
    """The runtimes that run the written files by default, but in which the quality is not known.

    Args:
        verified: See ``ServedTimer.speed_of``.
        openvino: Whether a file for OpenVINO is written.
    """
    if job.data is None or not rounds_activations(model):
        return []
    device = job.context.device
    default = runtime_of(model, replace(device, runtime=AUTO))
    defaults = dict.fromkeys([default, *[OpenVino.name] * openvino])
    known = {RowRuntimes.one(runtime_of(model, device)), *verified}
    return [runtime for runtime in defaults if RowRuntimes.one(runtime) not in known]


def _runtime_warnings(verified: str, unverified: Sequence[str]) -> list[str]:
    """A warning about each runtime in which an int8 model does not keep its quality."""
    return [
        f"the model does not keep its quality in {runtime}: use it in {verified} "
        f"(`runtime` {verified})"
        for runtime in unverified
    ]


def _training_warnings(search: SearchRecord | None, training: TrainingResult | None) -> list[str]:
    """A warning about a search, or a replayed plan, whose training brought no gain."""
    if search is None:
        if training is None or training.is_better:
            return []
        return [
            f"no gain by training: no weights were better after {training.steps} steps; the result "
            "is not trained"
        ]
    recovered = search.recovered
    return [] if recovered is None or recovered.gain else [recovered.verdict]


def _shared_warnings(applied: ApplyReport) -> list[str]:
    """A warning about blocks that were not refitted, because they share their last weights."""
    if not applied.unfitted:
        return []
    names = ", ".join(applied.unfitted)
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


def _cost_warnings(break_even: int | None, sequence: int, longest: int | None) -> list[str]:
    """Warnings about lengths at which the model costs more than the original."""
    if break_even is None:
        return []
    if break_even <= 1:
        return ["this model needs more MACs than the original at every length"]
    if sequence >= break_even:
        return [
            f"at {sequence} tokens this model needs more MACs than the original: "
            f"it needs fewer only below {break_even} tokens"
        ]
    if longest is None or break_even <= longest:
        return [
            f"from {break_even} tokens on this model needs more MACs than the original "
            f"(fewer at the {sequence} counted here)"
        ]
    return []


def _data_warnings(job: Job, plan: Plan, applied: ApplyReport) -> list[str]:
    """Warnings about calibration data that is missing, short or scarce."""
    data = job.data
    longest = job.longest_length
    if applied.is_exact:
        return []
    if data is None:
        return ["not calibrated: with calibration data the error is usually several times smaller"]
    warnings: list[str] = []
    median_length = float(np.median(data.lengths)) if data.lengths else longest
    if data.source.joined_rows:
        warnings.append(
            f"the calibration texts are much shorter than {longest} tokens: "
            f"{data.source.joined_rows} rows of several texts were added; texts of the length "
            "to be served are better"
        )
    elif JOINED * median_length <= longest:
        warnings.append(
            f"calibrated and verified on {median_length:.0f} tokens (median), for {longest}: "
            "longer inputs may lose more; calibrate on inputs of the length to be served"
        )
    widths = [block.input_size for block in job.matches.blocks if block.name in plan.lossy_blocks]
    widths += [sum(mask) for mask in plan.targets(PruneNeurons).values()]
    if widths and data.source.fit_tokens < max(widths):
        warnings.append(
            f"calibrated on {data.source.fit_tokens} tokens, fewer than the "
            f"{max(widths)} features that a layer is fitted on: more text gives a better fit"
        )
    return warnings


def _cache_warnings(
    blocks: Sequence[AttentionBlock], changes: Sequence[RecordedChange]
) -> list[str]:
    """Warnings about caches, which the original cannot share and which may even grow."""
    widths = {block.name: block.num_heads * block.head_size for block in blocks}
    sizes = [
        (widths[change.block], change.cache_width)
        for change in changes
        if change.cache_width is not None
    ]
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
    """Warnings about a low quality, one without an interval, or none that can be measured."""
    quality = fidelity.quality
    if quality is None:
        if not fidelity.is_held_out:
            return []
        return ["no output has a quality that can be measured: only cosines were compared"]
    warnings: list[str] = []
    if quality.value < LOW_QUALITY:
        less = (
            "compress less, or fewer layers" if plan.lossy_blocks else "use a more exact precision"
        )
        warnings.append(
            f"the outputs are far from the original's: {quality.measure} {quality.value:.3f} "
            f"({fidelity.data}); {less}"
        )
    if quality.ci95 is None and quality.split in ("verify", "held out") and quality.rows:
        kind = f" of {quality.lengths}" if quality.lengths else ""
        warnings.append(
            f"measured on {quality.rows} held-out rows{kind}, which is too few for an interval: "
            f"give at least {MIN_ROWS * INVERSE_HELD_OUT_SHARE} different rows{kind}"
        )
    documents = quality.documents or quality.rows - 1
    if quality.measure == "index" and documents < MIN_DOCUMENTS:
        warnings.append(
            f"queries searched {documents} held-out documents, too few to compare {NEIGHBORS} "
            f"neighbors: give at least {MIN_DOCUMENTS * INVERSE_HELD_OUT_SHARE} different documents"
        )
    return warnings
