"""optimize: read, certify, calibrate, factor, rewrite, prove and write; or write nothing."""

from __future__ import annotations

import hashlib
import importlib.metadata
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.artifact import (
    Artifact,
    check_target,
    copy_companions,
    load_model,
    merged_record,
    open_artifact,
    save_model,
    staged,
    write_record,
)
from attnserve.calibrate import Dataset, collect_moments, load_inputs
from attnserve.certify import Reading, read_attention
from attnserve.session import Provider
from attnserve.verify import (
    Fidelity,
    check_cosine_bound,
    compare,
    empty_axes,
    random_batches,
    require_empty,
)
from graph_passes import rewrites
from graph_passes.attention import AttentionBlock
from graph_passes.collaborate import Collaborate, cache_width, factor
from graph_passes.cost import Cost, break_even, macs_at, model_cost
from graph_passes.cp import CollaborativeFactors, TokenMoments, pooled, with_mean
from graph_passes.decompose import DecomposeAttention
from graph_passes.errors import CannotRewrite, CheckFailed, InvalidArgument, InvalidModel
from graph_passes.shapes import bind_axes, interpret

__all__ = ["ModelCost", "OptimizeReport", "Step", "optimize"]

Ranks = int | Sequence[int] | Mapping[str, int]
Stage = Callable[[str, int, int], None]
"""Progress: (what is being done, done, total)."""

DEFAULT_SEQUENCE = 128

LOW_COSINE = 0.9
"""Below it a sentence encoder's scores suffer visibly (benchmarks/results/fidelity.json)."""


@dataclass(frozen=True)
class ModelCost:
    """Counts at the report's batch and sequence; MACs are None where they cannot be counted."""

    parameters: int
    macs: int | None
    bytes: int


@dataclass(frozen=True)
class Step:
    """One rewrite of one block. The error is relative, in the metric that was minimized.

    ``cache_width`` counts the numbers of a token that cached keys hold now, over all heads; None
    where keys are not cached.
    """

    rewrite: str
    block: str
    relative_error: float
    macs_after: int | None
    rank: int
    cache_width: int | None = None


@dataclass(frozen=True)
class OptimizeReport:
    """What was done to a model, what it cost and what it saved."""

    output: Path
    before: ModelCost
    after: ModelCost
    steps: tuple[Step, ...]
    fidelity: Fidelity
    break_even_sequence: int | None
    batch: int
    sequence: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
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
        }


def optimize(
    model: Path,
    output: Path,
    *,
    collab_dk: Ranks,
    collab_cache: bool = False,
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
    """Give a model's attention collaborative heads and write it with attnserve.json beside it.

    Args:
        model: An .onnx file or an artifact folder; never changed.
        output: An .onnx file, or a folder that receives model.onnx.
        collab_dk: R for every layer, one R a layer in order, or R by layer name.
        collab_cache: Rewrite cached keys of decoders too: the cache, an input and an output of the
            model, then holds R shared dimensions (and H content logits) a token instead of H*K.
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
        CheckFailed: The fidelity is below ``min_cosine``.
    """
    check_cosine_bound(min_cosine)
    artifact = open_artifact(model)
    graph = load_model(artifact)
    target = check_target(output, artifact, graph, force=force or dry_run)
    report_stage = progress or _silent
    require_finite_weights(graph)
    reading = read_attention(graph, seed=seed)
    ranks, warnings = _choose(
        reading, collab_dk, layers, graph.graph, calibrated=calib is not None, caches=collab_cache
    )
    data = None
    if calib is not None:
        data = load_inputs(calib, graph, artifact, tokenizer=tokenizer)
        chosen = [block.k.past for block in reading.blocks if block.name in ranks]
        caches = [past.value.name or "" for past in chosen if past is not None]
        require_empty([*data.fit, *data.held_out], caches)
    length = sequence or (data.length if data is not None else DEFAULT_SEQUENCE)
    before = model_cost(graph)
    before_cost = _cost(before, graph, batch, length)

    fused = frozenset(b.name for b in reading.blocks if b.name in ranks and b.logits is None)
    if fused:
        DecomposeAttention(fused)(graph)
        reading = read_attention(graph, seed=seed)
        _require(reading, ranks)
    blocks = [block for block in reading.blocks if block.name in ranks]
    factors = _factor(
        graph, blocks, ranks, data, provider=provider, threads=threads, report=report_stage
    )
    exact = all(found.relative_error == 0 for found in factors.values())
    spent = _macs_by_block(graph, reading, batch, length)
    Collaborate(factors, caches=collab_cache)(graph)
    reading = read_attention(graph, seed=seed)
    _require(reading, ranks)
    now = _macs_by_block(graph, reading, batch, length)
    total = before_cost.macs
    steps: list[Step] = []
    for block in blocks:
        name, found = block.name, factors[block.name]
        width = None if block.k.past is None else cache_width(found)
        total = None if total is None else total + now[name] - spent[name]
        steps.append(Step("collaborate", name, found.relative_error, total, found.rank, width))

    original = load_model(artifact)
    if data is not None:
        batches = data.held_out
    else:
        batches = random_batches(original, seed, empty=empty_axes(original, graph))
    source = f"held out of {calib.name}" if calib is not None else "random inputs"
    fidelity = compare(
        original, graph, batches, source, provider=provider, threads=threads,
        progress=lambda done, total: report_stage("verify", done, total),
    )  # fmt: skip
    after = model_cost(graph)
    even = break_even(before.macs, after.macs) if before.macs and after.macs else None
    report = OptimizeReport(
        output=target,
        before=before_cost,
        after=_cost(after, graph, batch, length),
        steps=tuple(steps),
        fidelity=fidelity,
        break_even_sequence=even,
        batch=batch,
        sequence=length,
        warnings=(
            *warnings,
            *_warn(even, length, artifact.max_length, data, blocks, exact),
            *_warn_of_caches(blocks, steps),
            *_warn_of_fidelity(fidelity),
        ),
    )
    if min_cosine is not None and fidelity.mean_cosine < min_cosine:
        raise CheckFailed(
            f"mean cosine {fidelity.mean_cosine:.4f} on {source}, expected at least {min_cosine}: "
            "nothing was written",
            "raise --collab-dk" + ("" if calib else ", or calibrate with --calib FILE"),
        )
    if not dry_run:
        _write(artifact, graph, report, data, external_data, seed)
    return report


def require_finite_weights(model: ir.Model) -> None:
    """Refuse NaN and infinite weights, one tensor at a time.

    Scalars and masks may hold -inf (that is how exporters write "forbidden"); weights may not.

    Raises:
        InvalidModel: Naming the first such weight.
    """
    for graph in model.graphs():
        for name, value in graph.initializers.items():
            tensor = value.const_value
            if tensor is None or not tensor.dtype.is_floating_point():
                continue
            array = tensor.numpy()
            with np.errstate(invalid="ignore"):
                total = float(np.sum(array, dtype=np.float64))  # finite unless an element is not
            if np.isfinite(total) or array.size == 1 or _is_mask(array):
                continue
            raise InvalidModel(
                f"the weight {name!r} {tuple(array.shape)} holds a value that is NaN or infinite",
                "export the model again from a sound checkpoint",
            )


def _is_mask(array: np.ndarray) -> bool:
    """Only zeros and minus infinity, as a causal mask holds them."""
    return bool(np.all((array == 0) | np.isneginf(array)))


def _choose(
    reading: Reading,
    collab_dk: Ranks,
    layers: Sequence[str] | None,
    main: ir.Graph,
    *,
    calibrated: bool,
    caches: bool,
) -> tuple[dict[str, int], list[str]]:
    """R by block name, for the blocks that were asked for and can be rewritten."""
    blocks = reading.blocks
    if not blocks:
        misses = "; ".join(
            f"{m.node.name or m.node.op_type}: {m.reason}" for m in reading.misses[:2]
        )
        raise InvalidModel(
            "no attention was found"
            + (f" ({misses[:400]})" if misses else ": the graph has no softmax"),
            "`attnserve inspect MODEL` lists everything that was read and why the rest was not",
        )
    names = [block.name for block in blocks]
    chosen = names if layers is None else [_layer(layer, names) for layer in layers]
    chosen = list(dict.fromkeys(chosen))
    asked = layers is not None or isinstance(collab_dk, Mapping)
    if isinstance(collab_dk, int):
        ranks = dict.fromkeys(chosen, collab_dk)
    elif isinstance(collab_dk, Mapping):
        ranks = {_layer(name, names): rank for name, rank in collab_dk.items()}
    else:
        if len(collab_dk) != len(chosen):
            raise InvalidArgument(
                f"--collab-dk names {len(collab_dk)} sizes for {len(chosen)} layers",
                "give one R, or one for each layer",
            )
        ranks = dict(zip(chosen, collab_dk, strict=True))
    warnings: list[str] = []
    for block in blocks:
        rank = ranks.get(block.name)
        if rank is None:
            continue
        exact = block.num_heads * block.head_size
        reason = rewrites.collaborate(block, caches=caches)
        if not reason and not 1 <= rank <= exact:
            raise InvalidArgument(
                f"--collab-dk {rank}: expected 1 to {exact} for {block.name}, which has "
                f"{block.num_heads} heads x {block.head_size}",
                f"choose R from 1 to {exact}; {exact} is exact",
            )
        if reason:
            if asked:
                raise CannotRewrite(f"{block.name}: {reason}", "leave this layer out of --layers")
            warnings.append(f"{block.name} is left as it is: {reason}")
            del ranks[block.name]
        elif calibrated and rank < exact and block.graph is not main:
            warnings.append(
                f"{block.name} lies in the body of another node, where calibration cannot see it: "
                "it is factored by its weights alone"
            )
    if not ranks:
        raise CannotRewrite(
            f"none of the {len(blocks)} attention blocks can be factored ({warnings[0]})",
            "`attnserve inspect MODEL` says why, block by block",
        )
    return ranks, warnings


def _layer(layer: str, names: Sequence[str]) -> str:
    if layer in names:
        return layer
    if layer.isdecimal() and int(layer) < len(names):
        return names[int(layer)]
    raise InvalidArgument(
        f"--layers: no attention is called {layer!r}; the model has {len(names)}, the first of "
        f"them {names[0]!r}",
        "use names or indices (from 0) as `attnserve inspect` lists them",
    )


def _require(reading: Reading, ranks: Mapping[str, int]) -> None:
    """Every rewritten block must be read back and certified, under its own name."""
    lost = sorted(set(ranks) - {block.name for block in reading.blocks})
    if lost:
        reason = reading.misses[0].reason if reading.misses else "it is not found any more"
        raise InvalidModel(
            f"{lost[0]} is not certified after its rewrite: {reason}",
            "this is a defect of attnserve: please report it with the model; nothing was written",
        )


def _factor(
    graph: ir.Model,
    blocks: Sequence[AttentionBlock],
    ranks: Mapping[str, int],
    data: Dataset | None,
    *,
    provider: Provider,
    threads: int,
    report: Stage,
) -> dict[str, CollaborativeFactors]:
    """The factors of every block; blocks that share their weights share P, Q and M."""
    moments: dict[str, TokenMoments] = {}
    if data is not None:
        # What the body of an If computes is no output that a session could give.
        lossy = [
            block
            for block in blocks
            if ranks[block.name] < block.num_heads * block.head_size and block.graph is graph.graph
        ]
        if lossy:
            moments = collect_moments(
                graph, lossy, data.fit, threads=threads,
                progress=lambda done, total: report("calibrate", done, total),
            )  # fmt: skip
    factors: dict[str, CollaborativeFactors] = {}
    for uses in _sharing(blocks, ranks):
        first = uses[0]
        seen = [moments[block.name] for block in uses if block.name in moments]
        pool = pooled(seen) if len(uses) > 1 and len(seen) == len(uses) else None
        whole = factor(first, ranks[first.name], moments=pool or (seen[0] if seen else None))
        for block in uses:
            factors[block.name] = whole
            if pool is not None and whole.relative_error > 0:
                mean = moments[block.name].query_mean
                factors[block.name] = with_mean(whole, block.q.heads(), block.k.heads(), mean)
            report("factor", len(factors), len(blocks))
    return {block.name: factors[block.name] for block in blocks}


def _sharing(
    blocks: Sequence[AttentionBlock], ranks: Mapping[str, int]
) -> list[list[AttentionBlock]]:
    """Blocks grouped by what their scores are made of: the same weights and the same R."""
    groups: dict[tuple[Any, ...], list[AttentionBlock]] = {}
    for block in blocks:
        arrays = (block.q.heads(), block.q.offset, block.k.heads())
        digests = [hashlib.sha256(np.ascontiguousarray(a).tobytes()).digest() for a in arrays]
        shapes = [array.shape for array in arrays]
        groups.setdefault((ranks[block.name], *digests, *shapes), []).append(block)
    return list(groups.values())


def _macs_by_block(graph: ir.Model, reading: Reading, batch: int, sequence: int) -> dict[str, int]:
    facts = interpret(graph, bind_axes(graph.graph, batch=batch, sequence=sequence))
    return {block.name: macs_at(facts, block.nodes)[0] for block in reading.blocks}


def _macs(graph: ir.Model, batch: int, sequence: int) -> int | None:
    facts = interpret(graph, bind_axes(graph.graph, batch=batch, sequence=sequence))
    total, uncounted = macs_at(facts, graph.graph)
    return None if uncounted else total


def _cost(cost: Cost, graph: ir.Model, batch: int, sequence: int) -> ModelCost:
    return ModelCost(cost.parameters, _macs(graph, batch, sequence), cost.bytes)


def _warn(
    even: int | None,
    sequence: int,
    longest: int | None,
    data: Dataset | None,
    blocks: Sequence[AttentionBlock],
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
    width = max(block.input_size for block in blocks)
    if data.source["fit_tokens"] < width:
        warnings.append(
            f"calibrated on {data.source['fit_tokens']} tokens, fewer than the model's width "
            f"{width}: more text gives a better fit"
        )
    return warnings


def _warn_of_caches(blocks: Sequence[AttentionBlock], steps: Sequence[Step]) -> list[str]:
    """A cache of the original is of no use to the new model, and may even be the smaller one."""
    sizes = [
        (block.num_heads * block.head_size, step.cache_width)
        for block, step in zip(blocks, steps, strict=True)
        if step.cache_width is not None
    ]
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
        entry = {
            "rewrite": "collaborate",
            "source": {"file": artifact.model.name, "sha256": _sha256(artifact.model)},
            "calibration": None if data is None else dict(data.source),
            "seed": seed,
            **report.to_json(),
            "versions": _versions(),
        }
        record = {
            **artifact.record,
            "format": 1,
            "files": {p.name: _sha256(p) for p in sorted(stage.iterdir()) if p.suffix != ".json"},
            "lineage": [*artifact.lineage, entry],
        }
        write_record(stage, merged_record(target, record))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in (
        "attnserve",
        "numpy",
        "onnx",
        "onnx-ir",
        "tensorly",
        "onnxruntime",
        "onnxruntime-gpu",
    ):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
