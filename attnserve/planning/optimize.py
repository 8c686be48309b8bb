"""optimize: read, certify, calibrate, factor, rewrite, prove and write; or write nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

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
from attnserve.checks.evaluate import TaskName
from attnserve.context import Provider, RunContext
from attnserve.models.artifact import (
    Artifact,
    check_output,
    check_target,
    copy_companions,
    default_output,
    fingerprint,
    load_model,
    merged_record,
    open_artifact,
    save_model,
    sha256,
    staged,
    versions,
    write_record,
)
from attnserve.models.datasets import Dataset, load_inputs
from attnserve.models.precision import Precision, check_cpu, convert, int8_weight_bits
from attnserve.planning.apply import Stage, Step, carry_out, count_macs
from attnserve.planning.head_selection import Alignment
from attnserve.planning.mixing import Mixing
from attnserve.planning.plan import MAKE_ONE, Plan, read_plan
from attnserve.planning.report import PlanReport
from attnserve.planning.request import Importance, Ranks, Request, make_plan
from attnserve.planning.search import Allowed, Goal, search
from graph_passes.analysis.cost import Cost, break_even, model_cost
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData
from graph_passes.matching.feed_forward import find_feed_forward

__all__ = ["ModelCost", "OptimizeReport", "optimize"]

DEFAULT_SEQUENCE = 128

GPU_ALONE = (
    "bfloat16 runs on a GPU alone (--provider cuda): on a CPU ONNX Runtime has no kernels for it, "
    "and refuses the model"
)

SHORT = 4
"""A model that is meant for texts this many times as long as it was calibrated on may keep much
less of them than was promised: 0.79 where it was 0.99 (MiniLM, sentences against paragraphs)."""

LOW_COSINE = 0.9
"""Below it a sentence encoder's scores suffer visibly (benchmarks/results/fidelity.json)."""


@dataclass(frozen=True)
class ModelCost:
    """Counts at the report's batch and sequence; MACs are None where they cannot be counted."""

    parameters: int
    macs: int | None
    bytes: int


@dataclass(frozen=True)
class OptimizeReport:
    """What was done to a model, what it cost and what it saved.

    ``found`` says how it was found, where it was searched for. Parameters and MACs are those of the
    rewritten model in float32, bytes those of its weights as they are written. ``int8_weight_bits``
    is 8 where the model needs a CPU with VNNI, AMX or ARM dot products; None without int8.
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
    int8_weight_bits: Literal[7, 8] | None = None

    def to_json(self) -> dict[str, Any]:
        bits = self.int8_weight_bits
        return {
            "before": asdict(self.before),
            "after": asdict(self.after),
            "steps": [asdict(step) for step in self.steps],
            "fidelity": {
                "mean_cosine": self.fidelity.mean_cosine,
                "min_cosine": self.fidelity.min_cosine,
                "data": self.fidelity.data,
            },
            "break_even_sequence": self.break_even_sequence,
            "batch": self.batch,
            "sequence": self.sequence,
            "warnings": list(self.warnings),
            "plan": self.plan.to_json(),
            **({} if bits is None else {"int8_weight_bits": bits}),
            **({} if self.found is None else {"search": self.found.summary()}),
        }


def optimize(
    model: Path,
    output: Path | None = None,
    *,
    collab_dk: Ranks | None = None,
    collab_cache: bool = False,
    mixing: Mixing = "auto",
    head_dk: int | None = None,
    reuse: str | Path | Mapping[str, Any] | None = None,
    align: Alignment = "similarity",
    prune: float | None = None,
    importance: Importance = "energy",
    prune_heads: Path | Mapping[str, Any] | None = None,
    skip: Sequence[str] = (),
    ffn: float | None = None,
    keep: float | None = None,
    target_speedup: float | None = None,
    eval_data: Path | None = None,
    task: TaskName | None = None,
    allow: Sequence[Allowed] = (),
    plan: Path | None = None,
    precision: Precision = "float32",
    refit: bool = True,
    calib: Path | None = None,
    tokenizer: Path | None = None,
    layers: Sequence[str] | None = None,
    batch: int = 1,
    sequence: int | None = None,
    min_cosine: float | None = None,
    external_data: bool = False,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    force: bool = False,
    dry_run: bool = False,
    progress: Stage | None = None,
) -> OptimizeReport:
    """Rewrite a model's attention and write it with attnserve.json beside it.

    What is asked for is done in this order: skip, prune, reuse, prune neurons, fit again,
    collaborate, fit again, then change the precision. With ``keep`` or ``target_speedup`` the
    rewrites are searched for (``attnserve.plan``), with ``plan`` they are read from a file.

    Args:
        model: An .onnx file or an artifact folder; never changed.
        output: An .onnx file, or a folder that receives model.onnx; the folder NAME-optimized
            beside the model by default.
        collab_dk: R for every layer, one R a layer in order, or R by layer name.
        collab_cache: Rewrite cached keys of decoders too: the cache, an input and an output of the
            model, then holds R shared dimensions (and H content logits) a token instead of H*K.
        mixing: "dense" lets every head multiply all R dimensions, as in the paper; "sparse" some
            of them, as ordinary multi-head attention; "auto" takes the one with fewer MACs at
            ``sequence`` among those that need no more than the original at any length.
        head_dk: For sparse mixing, how many dimensions a head reads on average, from 1 to K. Every
            head has its own where there is no ``collab_dk``.
        reuse: Heads that take the probabilities of earlier ones: ``partial:K[:P]``, ``full:P``,
            ``alternate``, ``all-end``, ``auto``, a .json file of edges or such an object
            (``choose.read_edges``).
        align: Which heads take whose probabilities: the most similar, which needs ``calib``, or by
            index as in the paper.
        prune: The share of all heads that goes, least important first; needs ``calib``.
        importance: By what they write that others cannot, by what the output loses without them,
            or by Voting-to-Stay.
        prune_heads: Or a mask, as a .json file or an object by layer (``choose.read_masks``).
        skip: Layers whose attention is left out: the best affine map of their input stands for it,
            or a constant (``LAYER:constant``); needs ``calib``.
        ffn: The share of all feed-forward neurons that goes, those first that write least; needs
            ``calib``.
        keep: Find the fastest model that keeps this much of the mean output cosine, or of a task's
            score; needs ``calib``. What is not faster is not written: the output is then the
            original.
        target_speedup: Or the model that loses least and is so much faster.
        eval_data, task: The rows a score is measured on, and which score.
        allow: "ffn" lets the search take neurons out of feed-forwards.
        plan: What ``attnserve.plan`` wrote, carried out again: the same bytes on the same machine.
        precision: "float16", "bfloat16", "int8" or "int8-full" weights, once all rewrites are done.
            "int8" has 7-bit weights, which are exact on every CPU; "int8-full" has 8-bit weights,
            for CPUs with VNNI, AMX or ARM dot products only.
        refit: Fit the output projections of rewritten layers, and the second matrices of
            feed-forwards, to the original's output, where there is ``calib``.
        calib: Text (a sentence a line), .npz or a folder of .npz; without it the weights alone are
            approximated, at several times the error.
        layers: Names or indices of the layers to rewrite; all that can be by default.
        batch, sequence: Where costs are reported; the sequence defaults to the calibration data's
            median, else 128.
        min_cosine: Fail below this mean cosine, writing nothing.
        external_data: Keep the weights in a file beside the model, as models over 2 GB always do.
        provider, threads: Of the runs that calibrate and verify; certificates run on the CPU.
        force: Replace an output that exists; never the input.
        dry_run: Do everything but write.

    Raises:
        InvalidModel, InvalidArgument, InvalidData, InvalidOutput, CannotRewrite: See their texts.
        CheckFailed: The fidelity is below ``min_cosine``, or the goal of a search is not reached.
    """
    check_cpu(precision)
    given = (collab_dk, head_dk, reuse, prune, prune_heads, ffn, layers)
    asked = any(value is not None for value in given) or bool(skip)
    goal = request = None
    if keep is not None or target_speedup is not None:
        goal = Goal(keep, target_speedup, task, eval_data, tuple(allow), precision)
    elif eval_data is not None or task is not None or allow:
        raise InvalidArgument(
            "--eval-data, --task and --allow are about what a search keeps and uses",
            "give --keep X or --target-speedup S too",
        )
    if plan is not None and (goal is not None or precision != "float32"):
        raise InvalidArgument(
            "--plan says all that is done, its precision too", "leave the other options out"
        )
    searched = goal is not None or plan is not None
    odd = collab_cache or mixing != "auto" or align != "similarity" or importance != "energy"
    if searched and (odd or not refit):
        raise InvalidArgument(
            "--collab-cache, --mixing, --align, --importance and --no-refit are about rewrites "
            "that are asked for by hand",
            "leave them out, or --plan, --keep and --target-speedup",
        )
    if asked and searched:
        raise InvalidArgument(
            "rewrites were asked for, and a " + ("plan" if plan else "search") + " chooses its own",
            "leave them out, or --plan, --keep and --target-speedup",
        )
    if searched and calib is None:
        raise InvalidArgument("a plan is fitted to data, and there is none", "give --calib FILE")
    if goal is None and plan is None:
        request = Request(
            collab_dk, collab_cache, mixing, head_dk, reuse, align, prune, importance, prune_heads,
            skip, ffn, layers, precision,
        )  # fmt: skip
    check_cosine_bound(min_cosine)
    artifact = open_artifact(model)
    graph = load_model(artifact)
    if output is None:
        output = default_output(model, "optimized")
        check_output(output, force=force or dry_run)
    target = check_target(output, artifact, graph, force=force or dry_run)
    report_stage = progress or _silent
    require_finite_weights(graph)
    reading = read_attention(graph, seed=seed)
    data = None
    if calib is not None:
        data = load_inputs(calib, graph, artifact, tokenizer=tokenizer)
    length = sequence or (data.length if data is not None else DEFAULT_SEQUENCE)
    before = model_cost(graph)
    before_cost = _cost(before, graph, batch, length)
    original, found = load_model(artifact), None
    fit_provider, fit_threads = provider, threads
    if goal is not None:
        assert data is not None
        found = search(
            goal, artifact, graph, data, tokenizer=tokenizer, batch=batch, sequence=sequence,
            provider=provider, threads=threads, seed=seed, progress=progress,
        )  # fmt: skip
        decided, graph, done = found.report.rewrites, found.exact, found.done
    else:
        if request is None:
            assert plan is not None and data is not None
            decided, seed, fit_provider = _replayed(plan, artifact, reading, data, graph)
            fit_threads = 0  # as the search itself has it
        else:
            decided = make_plan(
                request, graph, reading, data, provider=provider, threads=threads, seed=seed,
                length=length, longest=artifact.max_length, report=report_stage,
            )  # fmt: skip
        if data is not None:
            chosen = [block.k.past for block in reading.blocks if block.name in decided.ranks]
            caches = [past.value.name or "" for past in chosen if past is not None]
            require_empty([*data.fit, *data.held_out], caches)
        done = carry_out(
            decided, graph, original, data, fit=refit and data is not None, batch=batch,
            length=length, caches=collab_cache, provider=fit_provider, threads=fit_threads,
            seed=seed, report=report_stage,
        )  # fmt: skip
    converted = convert(graph, decided.precision)
    if data is not None:
        batches = data.held_out
    else:
        batches = random_batches(original, seed, empty=empty_axes(original, graph))
    source = f"held out of {calib.name}" if calib is not None else "random inputs"
    fidelity = compare(
        original, converted, batches, source,
        context=RunContext(provider, threads, seed, report_stage),
    )  # fmt: skip
    after = model_cost(graph)
    even = break_even(before.macs, after.macs) if before.macs and after.macs else None
    widths = [block.input_size for block in reading.blocks if block.name in decided.changed]
    widths += [sum(mask) for mask in decided.neurons.values()]  # each is a row of what is fitted
    report = OptimizeReport(
        output=target,
        before=before_cost,
        after=replace(_cost(after, graph, batch, length), bytes=_bytes(converted)),
        steps=done.steps,
        fidelity=fidelity,
        break_even_sequence=even,
        batch=batch,
        sequence=length,
        warnings=(
            *decided.warnings,
            *((found.report.verdict,) if found and not found.report.gain else ()),
            *_warn(even, length, artifact.max_length, data, widths, done.exact),
            *_warn_of_caches(reading.blocks, done.steps),
            *_warn_of_fidelity(fidelity),
            *((GPU_ALONE,) if decided.precision == "bfloat16" else ()),
        ),
        plan=decided,
        found=found and found.report,
        int8_weight_bits=int8_weight_bits(converted),
    )
    if min_cosine is not None and fidelity.mean_cosine < min_cosine:
        raise CheckFailed(
            f"mean cosine {fidelity.mean_cosine:.4f} on {source}, expected at least {min_cosine}: "
            "nothing was written",
            ("raise --collab-dk" if decided.ranks else "rewrite fewer heads or layers")
            + ("" if calib else ", or calibrate with --calib FILE"),
        )
    if not dry_run:
        _write(artifact, converted, report, data, external_data, seed)
    return report


def _replayed(
    path: Path, artifact: Artifact, reading: MatchReport, data: Dataset, graph: ir.Model
) -> tuple[Plan, int, Provider]:
    """The plan of a file, which was made for this model and this data, with its seed and the
    provider that it was fitted on."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InvalidData(f"--plan {path}: no such file", "check the path") from error
    except OSError as error:
        why = f"--plan {path}: cannot be read: {error.strerror}"
        raise InvalidData(why, "check the path") from error
    except (ValueError, RecursionError) as error:
        raise InvalidData(f"--plan {path}: not JSON: {error}", MAKE_ONE) from error
    parts = content if isinstance(content, dict) else {}
    rewrites = parts.get("rewrites")
    if parts.get("format") != 1 or not isinstance(rewrites, dict):
        raise InvalidData(f"--plan {path}: no plan of format 1", MAKE_ONE)
    ours = {"model": fingerprint(artifact), "calibration": data.source["sha256"]}
    for what, mine in ours.items():
        theirs = parts.get(what)
        given = theirs.get("sha256") if isinstance(theirs, dict) else None
        if given != mine:
            name = theirs.get("file") if isinstance(theirs, dict) else None
            raise InvalidArgument(
                f"--plan {path}: it was made with another {what} ({name}, sha256 "
                f"{str(given)[:12]}; this one is {str(mine)[:12]})",
                "give the file that it was made with, or make a new plan",
            )
    asked = parts.get("asked")
    asked = asked if isinstance(asked, dict) else {}
    seed, provider = asked.get("seed", 0), asked.get("provider", "cpu")
    if type(seed) is not int or seed < 0 or provider not in get_args(Provider):
        raise InvalidData(f"--plan {path}: seed {seed!r}, provider {provider!r}", MAKE_ONE)
    neurons = {block.name: block.num_neurons for block in find_feed_forward(graph)}
    plan = read_plan(rewrites, reading.blocks, feed_forwards=neurons)
    check_cpu(plan.precision)
    return plan, seed, provider


def _bytes(graph: ir.Model) -> int:
    return model_cost(graph).bytes


def _cost(cost: Cost, graph: ir.Model, batch: int, sequence: int) -> ModelCost:
    return ModelCost(cost.parameters, count_macs(graph, batch, sequence), cost.bytes)


def _warn(
    even: int | None,
    sequence: int,
    longest: int | None,
    data: Dataset | None,
    widths: Sequence[int],
    exact: bool,
) -> list[str]:
    """What the reader may not expect, and is true of this model."""
    warnings: list[str] = []
    if even is not None and even <= 1:
        warnings.append("this model needs more MACs than the original at every length")
    elif even is not None and sequence >= even:
        warnings.append(
            f"at {sequence} tokens this model needs more MACs than the original: "
            f"it needs fewer only below {even} tokens"
        )
    elif even is not None and (longest is None or even <= longest):
        warnings.append(
            f"from {even} tokens on this model needs more MACs than the original "
            f"(fewer at the {sequence} counted here)"
        )
    if exact:
        return warnings
    if data is None:
        warnings.append("not calibrated: --calib FILE cuts the error several times")
        return warnings
    usual = int(np.median(data.lengths)) if data.lengths else sequence
    if SHORT * usual <= sequence:
        warnings.append(
            f"calibrated and judged on texts of {usual} tokens, at the median, for {sequence}: on "
            "longer texts less may be kept; calibrate on some, or see `attnserve verify --data`"
        )
    width = max(widths)
    if data.source["fit_tokens"] < width:
        warnings.append(
            f"calibrated on {data.source['fit_tokens']} tokens, fewer than the "
            f"{width} features that a layer is fitted on: more text gives a better fit"
        )
    return warnings


def _warn_of_caches(blocks: Sequence[AttentionBlock], steps: Sequence[Step]) -> list[str]:
    """A cache of the original is of no use to the new model, and may even be the smaller one."""
    held = {block.name: block.num_heads * block.head_size for block in blocks}
    sizes = [(held[step.block], step.cache_width) for step in steps if step.cache_width is not None]
    if not sizes:
        return []
    before, after = (sum(column) for column in zip(*sizes, strict=True))
    warnings = [
        f"cached keys changed from {before} to {after} numbers a token over {len(sizes)} layers: "
        "this model reads only caches that it made itself"
    ]
    if any(new >= old for old, new in sizes):
        warnings.append(
            "the cache of keys shrinks only where R, and one content logit a head, are together "
            "fewer than num_heads x head_size: lower --collab-dk"
        )
    return warnings


def _warn_of_fidelity(fidelity: Fidelity) -> list[str]:
    if fidelity.mean_cosine >= LOW_COSINE:
        return []
    return [
        f"the outputs are far from the original's: mean cosine {fidelity.mean_cosine:.3f} "
        f"({fidelity.data}); raise --collab-dk, or fail below a bound with --min-cosine"
    ]


def _silent(what: str, done: int, total: int) -> None:
    """No progress."""


def _write(
    artifact: Artifact,
    graph: ir.Model,
    report: OptimizeReport,
    data: Dataset | None,
    external_data: bool,
    seed: int,
) -> None:
    target = report.output
    with staged(target.parent) as stage:
        save_model(graph, stage / target.name, external=external_data)
        copy_companions(artifact, stage)
        kinds = [step.rewrite for step in report.steps]
        precision = [] if report.plan.precision == "float32" else [report.plan.precision]
        entry = {
            "rewrite": "+".join(dict.fromkeys([*kinds, *precision])) or "none",
            "source": {"file": artifact.model.name, "sha256": sha256(artifact.model)},
            "calibration": None if data is None else dict(data.source),
            "seed": seed,
            **report.to_json(),
            "versions": versions(),
        }
        record = {
            **artifact.record,
            "format": 1,
            "files": {p.name: sha256(p) for p in sorted(stage.iterdir()) if p.suffix != ".json"},
            "lineage": [*artifact.lineage, entry],
        }
        write_record(stage, merged_record(target, record))
