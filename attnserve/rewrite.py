"""optimize: read, certify, calibrate, factor, rewrite, prove and write; or write nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    sha256,
    staged,
    versions,
    write_record,
)
from attnserve.calibrate import Batch, Dataset, collect_moments, load_inputs
from attnserve.certify import Reading, read_attention
from attnserve.choose import Alignment
from attnserve.mixing import Mixing
from attnserve.plan import Importance, Plan, Ranks, Request, make_plan
from attnserve.refit import refit
from attnserve.session import Provider
from attnserve.verify import (
    Fidelity,
    check_cosine_bound,
    compare,
    empty_axes,
    random_batches,
    require_empty,
    shaped_for,
)
from graph_passes.attention import AttentionBlock
from graph_passes.collaborate import Collaborate, factor
from graph_passes.cost import Cost, break_even, macs_at, model_cost
from graph_passes.cp import CollaborativeFactors, with_mean
from graph_passes.decompose import DecomposeAttention
from graph_passes.errors import CheckFailed, InvalidModel
from graph_passes.feed_forward import find_feed_forward
from graph_passes.moments import TokenMoments, pooled
from graph_passes.prune import PruneHeads
from graph_passes.prune_neurons import PruneNeurons
from graph_passes.reuse import ReuseAttention
from graph_passes.scores import cache_width
from graph_passes.shapes import bind_axes, interpret
from graph_passes.skip import AffineMap, SkipAttention, skipped

__all__ = ["ModelCost", "OptimizeReport", "Step", "optimize"]

Stage = Callable[[str, int, int], None]
"""Progress: (what is being done, done, total)."""

DEFAULT_SEQUENCE = 128

DEFECT = "this is a defect of attnserve: please report it with the model; nothing was written"

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
    """One rewrite of one block, in the order in which they were done.

    Attributes:
        rewrite: "skip", "prune", "reuse", "neurons" or "collaborate".
        relative_error: Of collaborative factors, in the metric that was minimized. Of all others,
            how far the attention's output is from the original's, over its variation there, on the
            calibration data (random inputs without); None where it cannot be seen.
        macs_after: Of the whole model.
        fitted_error: How far the output is once its projection is fitted again, with all that was
            done to the layer before; None where it was not.
        rank: R of collaborative heads.
        heads: How many heads compute probabilities of their own.
        neurons: How many neurons a feed-forward has left.
        head_size: How many dimensions a head reads on average in sparse mixing.
        cache_width: How many numbers of a token cached keys hold now, over all heads.
    """

    rewrite: str
    block: str
    relative_error: float | None
    macs_after: int | None
    fitted_error: float | None = None
    rank: int | None = None
    heads: int | None = None
    neurons: int | None = None
    head_size: int | None = None
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
    plan: Plan

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
            "plan": self.plan.to_json(),
        }


def optimize(
    model: Path,
    output: Path,
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
    collaborate, fit again.

    Args:
        model: An .onnx file or an artifact folder; never changed.
        output: An .onnx file, or a folder that receives model.onnx.
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
        CheckFailed: The fidelity is below ``min_cosine``.
    """
    request = Request(
        collab_dk, collab_cache, mixing, head_dk, reuse, align, prune, importance, prune_heads,
        skip, ffn, layers,
    )  # fmt: skip
    check_cosine_bound(min_cosine)
    artifact = open_artifact(model)
    graph = load_model(artifact)
    target = check_target(output, artifact, graph, force=force or dry_run)
    report_stage = progress or _silent
    require_finite_weights(graph)
    reading = read_attention(graph, seed=seed)
    data = None
    if calib is not None:
        data = load_inputs(calib, graph, artifact, tokenizer=tokenizer)
    length = sequence or (data.length if data is not None else DEFAULT_SEQUENCE)
    plan = make_plan(
        request, graph, reading, data, provider=provider, threads=threads, seed=seed,
        length=length, longest=artifact.max_length, report=report_stage,
    )  # fmt: skip
    if data is not None:
        chosen = [block.k.past for block in reading.blocks if block.name in plan.ranks]
        caches = [past.value.name or "" for past in chosen if past is not None]
        require_empty([*data.fit, *data.held_out], caches)
    before = model_cost(graph)
    before_cost = _cost(before, graph, batch, length)

    original = load_model(artifact)
    run = _Run(
        graph, original, plan, data, before_cost.macs, batch, length, provider, threads, seed,
        report_stage,
    )  # fmt: skip
    fit = refit and data is not None
    run.skip()
    run.prune()
    run.reuse()
    run.neurons()
    before_sharing = [*plan.skip, *plan.masks, *plan.edges, *plan.neurons]
    run.fit(before_sharing, fit=fit)
    run.collaborate(caches=collab_cache)
    lossy = [
        step.block for step in run.steps if step.rewrite == "collaborate" and step.relative_error
    ]
    if fit and lossy:
        run.fit([*before_sharing, *lossy], fit=True)

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
    widths = [block.input_size for block in reading.blocks if block.name in plan.changed]
    widths += [sum(mask) for mask in plan.neurons.values()]  # each is a row of what is fitted
    report = OptimizeReport(
        output=target,
        before=before_cost,
        after=_cost(after, graph, batch, length),
        steps=tuple(run.steps),
        fidelity=fidelity,
        break_even_sequence=even,
        batch=batch,
        sequence=length,
        warnings=(
            *plan.warnings,
            *_warn(even, length, artifact.max_length, data, widths, run.exact),
            *_warn_of_caches(reading.blocks, run.steps),
            *_warn_of_fidelity(fidelity),
        ),
        plan=plan,
    )
    if min_cosine is not None and fidelity.mean_cosine < min_cosine:
        raise CheckFailed(
            f"mean cosine {fidelity.mean_cosine:.4f} on {source}, expected at least {min_cosine}: "
            "nothing was written",
            ("raise --collab-dk" if plan.ranks else "rewrite fewer heads or layers")
            + ("" if calib else ", or calibrate with --calib FILE"),
        )
    if not dry_run:
        _write(artifact, graph, report, data, external_data, seed)
    return report


@dataclass(eq=False)
class _Run:
    """A plan being carried out on ``graph``; every rewrite is read back and certified."""

    graph: ir.Model
    original: ir.Model
    plan: Plan
    data: Dataset | None
    macs: int | None
    batch: int
    length: int
    provider: Provider
    threads: int
    seed: int
    report: Stage
    steps: list[Step] = field(default_factory=list[Step])
    exact: bool = True
    """Whether nothing was approximated so far."""

    def skip(self) -> None:
        if not self.plan.skip:
            return
        blocks = {block.name: block for block in read_attention(self.graph, seed=self.seed).blocks}
        maps: dict[str, AffineMap] = {}
        for name, kind in self.plan.skip.items():
            output = blocks[name].output
            assert output is not None
            width = output.matrix().shape[1]
            weight = np.zeros((blocks[name].input_size, width)) if kind == "affine" else None
            maps[name] = AffineMap(weight, np.zeros(width))
        self._do("skip", SkipAttention(maps), list(maps))

    def prune(self) -> None:
        if self.plan.masks:
            self._do("prune", PruneHeads(self.plan.masks), list(self.plan.masks))

    def reuse(self) -> None:
        edges = self._numbered()
        if not edges:
            return
        reading = read_attention(self.graph, seed=self.seed)
        sources = {source for heads in edges.values() for source, _ in heads.values()}
        inside = [b.name for b in reading.blocks if b.name in sources and b.probabilities is None]
        if inside:
            DecomposeAttention(frozenset(inside))(self.graph)
        self._do("reuse", ReuseAttention(edges), list(edges))

    def neurons(self) -> None:
        masks = self.plan.neurons
        if not masks:
            return
        spent = self._macs_of_feed_forwards()
        PruneNeurons(masks)(self.graph)
        now, left = self._macs_of_feed_forwards(), find_feed_forward(self.graph)
        neurons = {block.name: block.num_neurons for block in left}
        for name, mask in masks.items():
            if neurons.get(name) != sum(mask):
                raise InvalidModel(f"{name} is not found after its neurons were pruned", DEFECT)
            self._spend(now[name] - spent[name])
            self.steps.append(Step("neurons", name, None, self.macs, neurons=neurons[name]))
        self.exact = False

    def _macs_of_feed_forwards(self) -> dict[str, int]:
        facts = interpret(
            self.graph, bind_axes(self.graph.graph, batch=self.batch, sequence=self.length)
        )
        blocks = find_feed_forward(self.graph)
        return {b.name: macs_at(facts, (*b.products, b.product))[0] for b in blocks}

    def _numbered(self) -> dict[str, dict[int, tuple[str, int]]]:
        """The edges in the numbers of the heads that pruning left."""
        places: dict[str, dict[int, int]] = {
            name: {head: place for place, head in enumerate(np.flatnonzero(mask).tolist())}
            for name, mask in self.plan.masks.items()
        }

        def place(name: str, head: int) -> int:
            return places[name][head] if name in places else head

        return {
            name: {place(name, h): (source, place(source, t)) for h, (source, t) in heads.items()}
            for name, heads in self.plan.edges.items()
        }

    def _do(self, rewrite: str, change: ir.passes.InPlacePass, names: Sequence[str]) -> None:
        """Run a pass, prove what it made, and note what each layer costs now."""
        spent = self._macs_by_layer(read_attention(self.graph, seed=self.seed))
        change(self.graph)
        reading = read_attention(self.graph, seed=self.seed)
        _require(reading, set(names) - {gap.name for gap in skipped(self.graph)})
        now = self._macs_by_layer(reading)
        heads = {block.name: block.q.num_heads for block in reading.blocks}
        for name in names:
            self._spend(now.get(name, 0) - spent[name])
            self.steps.append(Step(rewrite, name, None, self.macs, heads=heads.get(name, 0)))
        self.macs = _macs(self.graph, self.batch, self.length)  # with what others go on reading
        self.steps[-1] = replace(self.steps[-1], macs_after=self.macs)
        self.exact = False

    def _macs_by_layer(self, reading: Reading) -> dict[str, int]:
        axes = bind_axes(self.graph.graph, batch=self.batch, sequence=self.length)
        facts = interpret(self.graph, axes)
        places = [*reading.blocks, *skipped(self.graph)]
        return {place.name: macs_at(facts, place.nodes)[0] for place in places}

    def _spend(self, macs: int) -> None:
        self.macs = None if self.macs is None else self.macs + macs

    def fit(self, names: Collection[str], *, fit: bool) -> None:
        """Fit the outputs of these layers again, and note how far they are from the original's."""
        names = list(dict.fromkeys(names))
        if not names:
            return
        empty = empty_axes(self.original, self.graph)
        batches: Sequence[Batch]
        if self.data is not None:
            batches = self.data.fit
        else:
            batches = random_batches(self.original, self.seed, empty=empty)
        found = refit(
            self.graph, self.original, names, batches,
            fit=fit, feed=lambda batch: shaped_for(self.graph, batch, empty),
            provider=self.provider, threads=self.threads,
            progress=lambda done, total: self.report("fit again", done, total),
        )  # fmt: skip
        self.steps = [
            replace(step, relative_error=found[step.block].relative_error_before)
            if step.relative_error is None and step.block in found
            else step
            for step in self.steps
        ]
        if fit:
            others = {gap.name for gap in skipped(self.graph)} | self.plan.neurons.keys()
            _require(read_attention(self.graph, seed=self.seed), found.keys() - others)
            last = {step.block: index for index, step in enumerate(self.steps)}
            for name, done in found.items():
                if done.ridge is not None:
                    step = self.steps[last[name]]
                    self.steps[last[name]] = replace(step, fitted_error=done.relative_error)

    def collaborate(self, *, caches: bool) -> None:
        ranks = self.plan.ranks
        if not ranks:
            return
        reading = read_attention(self.graph, seed=self.seed)
        fused = frozenset(b.name for b in reading.blocks if b.name in ranks and b.logits is None)
        if fused:
            DecomposeAttention(fused)(self.graph)
            reading = read_attention(self.graph, seed=self.seed)
            _require(reading, ranks)
        blocks = [block for block in reading.blocks if block.name in ranks]
        factors = _factor(
            self.graph, blocks, ranks, self.plan.head_sizes, self.data,
            provider=self.provider, threads=self.threads, report=self.report,
        )  # fmt: skip
        spent = self._macs_by_layer(reading)
        sparse = {name: found for name, found in factors.items() if name in self.plan.head_sizes}
        dense = {name: found for name, found in factors.items() if name not in sparse}
        Collaborate(dense, caches=caches)(self.graph)
        Collaborate(sparse, mixing="sparse")(self.graph)
        reading = read_attention(self.graph, seed=self.seed)
        _require(reading, ranks)
        now = self._macs_by_layer(reading)
        for block in blocks:
            name, found = block.name, factors[block.name]
            width = None if block.k.past is None else cache_width(found)
            self._spend(now[name] - spent[name])
            self.steps.append(
                Step("collaborate", name, found.relative_error, self.macs, None, found.rank,
                     heads=block.q.num_heads, head_size=self.plan.head_sizes.get(name),
                     cache_width=width)
            )  # fmt: skip
            self.exact = self.exact and found.relative_error == 0


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


def _require(reading: Reading, names: Collection[str]) -> None:
    """Every rewritten block must be read back and certified, under its own name."""
    lost = sorted(set(names) - {block.name for block in reading.blocks})
    if lost:
        reason = reading.misses[0].reason if reading.misses else "it is not found any more"
        raise InvalidModel(
            f"{lost[0]} is not certified after its rewrite: {reason}",
            DEFECT,
        )


def _factor(
    graph: ir.Model,
    blocks: Sequence[AttentionBlock],
    ranks: Mapping[str, int],
    head_sizes: Mapping[str, int],
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
        seen = [block for block in blocks if block.graph is graph.graph]
        lossy = [b for b in seen if ranks[b.name] < b.q.num_heads * b.head_size
                 or head_sizes.get(b.name, b.head_size) < b.head_size]  # fmt: skip
        if lossy:
            moments = collect_moments(
                graph, lossy, data.fit, threads=threads,
                progress=lambda done, total: report("calibrate", done, total),
            )  # fmt: skip
    factors: dict[str, CollaborativeFactors] = {}
    for uses in _sharing(blocks, ranks, head_sizes):
        first = uses[0]
        seen = [moments[block.name] for block in uses if block.name in moments]
        pool = pooled(seen) if len(uses) > 1 and len(seen) == len(uses) else None
        whole = factor(
            first, ranks[first.name], head_size=head_sizes.get(first.name),
            moments=pool or (seen[0] if seen else None),
        )  # fmt: skip
        for block in uses:
            factors[block.name] = whole
            if pool is not None and whole.relative_error > 0:
                mean = moments[block.name].query_mean
                factors[block.name] = with_mean(whole, block.q.heads(), block.k.heads(), mean)
            report("factor", len(factors), len(blocks))
    return {block.name: factors[block.name] for block in blocks}


def _sharing(
    blocks: Sequence[AttentionBlock], ranks: Mapping[str, int], head_sizes: Mapping[str, int]
) -> list[list[AttentionBlock]]:
    """Blocks grouped by what their scores are made of: the same weights and the same sizes."""
    groups: dict[tuple[Any, ...], list[AttentionBlock]] = {}
    for block in blocks:
        arrays = (block.q.heads(), block.q.offset, block.k.heads())
        digests = [hashlib.sha256(np.ascontiguousarray(a).tobytes()).digest() for a in arrays]
        shapes = [array.shape for array in arrays]
        sizes = ranks[block.name], head_sizes.get(block.name)
        groups.setdefault((*sizes, *digests, *shapes), []).append(block)
    return list(groups.values())


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
        entry = {
            "rewrite": "+".join(dict.fromkeys(kinds)),
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
