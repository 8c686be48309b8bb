"""A plan carried out: one pass after the other, each read back and certified, then fitted."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import refit
from attnserve.checks.certify import MatchReport, read_attention
from attnserve.checks.compare import empty_axes, random_batches, shaped_for
from attnserve.context import Provider, RunContext
from attnserve.models.datasets import Dataset
from attnserve.models.opset import raise_opset
from attnserve.planning.plan import Plan
from attnserve.runtime.session import Batch
from graph_passes.analysis.cost import macs_at
from graph_passes.analysis.shapes import bind_axes, interpret
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.collaborative import cache_width
from graph_passes.errors import InvalidModel
from graph_passes.factorize.cp import CollaborativeFactors, with_mean
from graph_passes.factorize.moments import TokenMoments, pooled
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import OPSETS, Form, FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.fuse_residuals import SumResiduals
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import AffineMap, SkipAttention, skipped

__all__ = ["DEFECT", "CarriedOut", "Stage", "Step", "carry_out", "count_macs"]

Stage = Callable[[str, int, int], None]
"""Progress: (what is being done, done, total)."""

DEFECT = "this is a defect of attnserve: please report it with the model; nothing was written"


@dataclass(frozen=True)
class Step:
    """One rewrite of one block, in the order in which they were done.

    Attributes:
        rewrite: "skip", "prune", "reuse", "neurons", "collaborate" or "fuse".
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


@dataclass(frozen=True, eq=False)
class CarriedOut:
    """What was done, step by step, and whether it approximates anything."""

    steps: tuple[Step, ...]
    exact: bool


def carry_out(
    plan: Plan,
    graph: ir.Model,
    original: ir.Model,
    data: Dataset | None,
    *,
    fit: bool,
    batch: int = 1,
    length: int = 128,
    caches: bool = False,
    provider: Provider = "cpu",
    threads: int = 0,
    seed: int = 0,
    report: Stage,
) -> CarriedOut:
    """Rewrite ``graph``, a copy of ``original``, in place.

    The order is: skip, prune, reuse, prune neurons, fit again, collaborate, fit again, fuse.

    Args:
        fit: Fit the outputs of what was rewritten to the original's, on ``data``.
        batch, length: Where MACs are counted.
        caches: Rewrite cached keys too.

    Raises:
        CannotRewrite, InvalidData, InvalidModel: See the passes.
    """
    if needed := max((OPSETS.get(form, 0) for form in plan.forms.values()), default=0):
        raise_opset(graph, needed)
    macs = count_macs(graph, batch, length)
    run = _Run(graph, original, plan, data, macs, batch, length, provider, threads, seed, report)
    run.skip()
    run.prune()
    run.reuse()
    run.neurons()
    before_sharing = [*plan.skip, *plan.masks, *plan.edges, *plan.neurons]
    if not plan.ranks or plan.ranks.keys() - plan.head_sizes.keys() or not fit:
        run.fit(before_sharing, fit=fit)  # shorter heads are fitted once, when all is done
    run.collaborate(caches=caches)
    lossy = [
        step.block for step in run.steps if step.rewrite == "collaborate" and step.relative_error
    ]
    if fit and lossy:
        run.fit([*before_sharing, *lossy], fit=True)
    run.fuse()
    return CarriedOut(tuple(run.steps), run.exact)


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

    def fuse(self) -> None:
        """Write what is left in the operators that run fastest; nothing else changes."""
        forms: dict[str, Form] = {n: f for n, f in self.plan.forms.items() if self._stands(n)}
        if forms:
            FuseAttention(forms)(self.graph)
            _require(read_attention(self.graph, seed=self.seed), forms)
        if self.plan.gelu:
            FuseGelu(self.plan.gelu)(self.graph)
        if self.plan.sums:
            FoldBiases()(self.graph)
            SumResiduals()(self.graph)
        for name in (*forms, *self.plan.gelu):
            self.steps.append(Step("fuse", name, None, self.macs))

    def _stands(self, name: str) -> bool:
        """Whether a layer has any heads left."""
        return any(self.plan.masks.get(name, (1,)))

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
        # with what others go on reading
        self.macs = count_macs(self.graph, self.batch, self.length)
        self.steps[-1] = replace(self.steps[-1], macs_after=self.macs)
        self.exact = False

    def _macs_by_layer(self, reading: MatchReport) -> dict[str, int]:
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
            context=RunContext(self.provider, self.threads, self.seed, self.report),
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


def _require(reading: MatchReport, names: Collection[str]) -> None:
    """Every rewritten block must be read back and certified, under its own name."""
    lost = sorted(set(names) - {block.name for block in reading.blocks})
    if lost:
        reason = reading.unmatched[0].reason if reading.unmatched else "it is not found any more"
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
                graph, lossy, data.fit, context=RunContext(threads=threads, progress=report)
            )
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


def count_macs(graph: ir.Model, batch: int, sequence: int) -> int | None:
    """MACs of one run; None where something in the graph cannot be counted."""
    facts = interpret(graph, bind_axes(graph.graph, batch=batch, sequence=sequence))
    total, uncounted = macs_at(facts, graph.graph)
    return None if uncounted else total
