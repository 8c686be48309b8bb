"""Apply a plan: run its passes in order, refit what they changed, and certify the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import onnx_ir as ir

from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import refit
from attnserve.checks.certify import MatchReport, read_attention
from attnserve.checks.compare import empty_axes, random_batches, shaped_for
from attnserve.context import RunContext
from attnserve.models.datasets import Dataset
from attnserve.models.opset import raise_opset
from attnserve.planning.plan import Plan
from graph_passes.analysis.cost import macs_at
from graph_passes.analysis.shapes import bind_axes, infer_shapes_at
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.emit.collaborative import cache_width
from graph_passes.emit.fused_attention import OPSETS
from graph_passes.errors import InvalidModel
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.skip_attention import skipped

__all__ = ["DEFECT", "ApplyReport", "Step", "apply_plan", "count_macs"]

DEFECT = "this is a defect of attnserve: please report it with the model; nothing was written"


@dataclass(frozen=True)
class Step:
    """One rewrite of one block.

    Attributes:
        rewrite: The name of the pass.
        relative_error: Of collaborative factors, in the metric that was minimized. Of other lossy
            rewrites, the distance of the block's output to the original's over its variation there,
            on calibration data (random inputs without); None if it cannot be observed.
        macs_after: MACs of the whole model.
        fitted_error: The distance after the output projection was refitted, all rewrites of the
            block included; None if it was not refitted.
        rank: R of collaborative heads.
        heads: The number of heads that compute their own probabilities.
        neurons: The number of neurons that a feed-forward has left.
        head_size: The mean number of dimensions that a head reads in sparse mixing.
        cache_width: Numbers of a token in the cached keys, over all heads.
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
class ApplyReport:
    """The steps of an applied plan, and whether all of them are exact."""

    steps: tuple[Step, ...]
    is_exact: bool


def apply_plan(
    plan: Plan,
    model: ir.Model,
    context: RunContext,
    *,
    original: ir.Model,
    data: Dataset | None = None,
    fit: bool = True,
    shape: tuple[int, int] = (1, 128),
) -> ApplyReport:
    """Rewrite a model in place; its precision is left to ``models.precision.convert``.

    Heads and neurons are removed or reused first. The outputs of changed blocks are then refitted
    to the original's, front to back, before and after query and key dimensions are shared.

    Args:
        model: A copy of ``original``.
        data: Calibration data; without it factors are those of the weights alone.
        fit: Refit; needs ``data``. False only measures the distance to the original.
        shape: (batch, sequence) at which MACs are counted.

    Raises:
        CannotRewrite, InvalidArgument: A pass does not apply; see ``BlockPass.refusal``.
        InvalidData: The model refuses the data, or its activations are not finite.
        InvalidModel: A rewritten block fails certification.
    """
    forms = plan.targets(FuseAttention).values()
    if needed := max((OPSETS.get(form, 0) for form in forms), default=0):
        raise_opset(model, needed)
    with GraphContext.of(model) as graph:
        applied = _Application(graph, context, original, data, fit and data is not None, shape)
        for each in plan.passes:
            applied.run(each)
        applied.finish()
        return ApplyReport(tuple(applied.steps), applied.is_exact)


@dataclass(eq=False)
class _Application:
    """A model that a plan is being applied to."""

    graph: GraphContext
    context: RunContext
    original: ir.Model
    data: Dataset | None
    fit: bool
    shape: tuple[int, int]
    steps: list[Step] = field(default_factory=list[Step])
    is_exact: bool = True
    changed: list[str] = field(default_factory=list[str])
    """Blocks whose outputs differ from the original's, in the order of their rewrites."""
    is_measured: bool = True
    """Whether the changed blocks were measured, and refitted, since the last of them changed."""
    uncertified: set[str] = field(default_factory=set[str])
    """Rewritten attention blocks that were not certified since."""

    @property
    def model(self) -> ir.Model:
        return self.graph.model

    def run(self, each: RewritePass) -> None:
        if isinstance(each, Collaborate):
            self._collaborate(each)
        elif not each.lossy:
            self._measure()
            self._run_exact(each)
        else:
            self._rewrite(cast("BlockPass[Any, Any]", each))

    def finish(self) -> None:
        self._measure()
        self._certify()

    def _rewrite(self, each: BlockPass[Any, Any]) -> None:
        """Run a lossy pass, and record a step for each of its blocks."""
        if not each.targets:
            return
        before, macs = self._macs_by_block(), self._macs()
        each(self.model)
        self._record(each, before, macs)
        self.changed += each.targets
        self.uncertified |= each.targets.keys()
        self.is_measured, self.is_exact = False, False

    def _record(
        self, each: BlockPass[Any, Any], before: Mapping[str, int], macs: int | None
    ) -> None:
        after, total = self._macs_by_block(), self._macs()
        blocks = self._blocks()
        for index, name in enumerate(each.targets, start=1):
            macs = None if macs is None else macs + after.get(name, 0) - before.get(name, 0)
            last = index == len(each.targets)  # with what other blocks go on reading
            block = blocks.get(name)
            step = Step(str(each.name), name, None, total if last else macs)
            if isinstance(block, FeedForwardBlock):
                step = replace(step, neurons=block.num_neurons)
            else:
                step = replace(step, heads=0 if block is None else block.q.num_heads)
            self.steps.append(step)

    def _collaborate(self, each: Collaborate) -> None:
        if not each.targets:
            return
        each.check(self.graph)
        dense = any(not params.is_sparse for params in each.targets.values())
        if dense or not self.fit:  # shorter heads are refitted once, after sharing
            self._measure()
        self._certify()
        moments: dict[str, TokenMoments] = {}
        lossy = [b for b in each.lossy_blocks(self.graph) if b.graph is self.model.graph]
        if self.data is not None and lossy:  # a session cannot observe the body of an If
            moments = collect_moments(self.model, lossy, self.data.fit, context=self.context)
        each = each.factored(self.graph, moments, self.context.stage("factor"))
        blocks = [b for b in self.graph.get(find_attention)[0] if b.name in each.targets]
        before, macs = self._macs_by_block(), self._macs()
        each(self.model)
        self._record(each, before, macs)
        for block in blocks:
            params = each.targets[block.name]
            found = params.factors
            assert found is not None
            place = next(i for i, step in enumerate(self.steps)
                         if (step.rewrite, step.block) == (each.name, block.name))  # fmt: skip
            self.steps[place] = replace(
                self.steps[place],
                relative_error=found.relative_error,
                rank=found.rank,
                heads=block.q.num_heads,
                head_size=params.head_size,
                cache_width=None if block.k.past is None else cache_width(found),
            )
            if found.relative_error:
                self.changed.append(block.name)
                self.is_exact = False
                self.is_measured = self.is_measured and not self.fit
        self.uncertified |= each.targets.keys()

    def _run_exact(self, each: RewritePass) -> None:
        """Run an exact pass; a pass of the whole graph edits no attention."""
        each(self.model)
        if not isinstance(each, BlockPass):
            return
        targets = cast("BlockPass[Any, Any]", each).targets
        macs = self._macs() if targets else None
        self.steps += [Step(str(each.name), name, None, macs) for name in targets]
        self.uncertified |= targets.keys() & {b.name for b in self.graph.get(find_attention)[0]}

    def _measure(self) -> None:
        """Measure the changed blocks' distance to the original, and refit them if asked to."""
        names = list(dict.fromkeys(self.changed))
        if self.is_measured or not names:
            return
        self.is_measured = True
        empty = empty_axes(self.original, self.model)
        if self.data is not None:
            batches = self.data.fit
        else:
            batches = random_batches(self.original, self.context.seed, empty=empty)
        found = refit(
            self.model, self.original, names, batches, context=self.context,
            fit=self.fit, feed=lambda batch: shaped_for(self.model, batch, empty),
        )  # fmt: skip
        self.graph.invalidate()
        last = {step.block: place for place, step in enumerate(self.steps)}
        for place, step in enumerate(self.steps):
            if step.relative_error is None and step.block in found:
                error = found[step.block].relative_error_before
                self.steps[place] = replace(step, relative_error=error)
        for name, done in found.items() if self.fit else ():
            if done.ridge is not None:
                step = self.steps[last[name]]
                self.steps[last[name]] = replace(step, fitted_error=done.relative_error)
        self._certify()

    def _certify(self) -> None:
        """Certify every block that was rewritten since the last time.

        Raises:
            InvalidModel: One is not found any more, or does not compute what was read.
        """
        if not self.uncertified:
            return
        feed_forwards = {block.name for block in self.graph.get(find_feed_forward)}
        gone = {gap.name for gap in skipped(self.model)} | feed_forwards
        report = self.graph.get(read_attention, seed=self.context.seed)
        _require(report, self.uncertified - gone)
        self.uncertified.clear()

    def _blocks(self) -> dict[str, AttentionBlock | FeedForwardBlock]:
        found: dict[str, AttentionBlock | FeedForwardBlock] = {
            block.name: block for block in self.graph.get(find_feed_forward)
        }
        return found | {block.name: block for block in self.graph.get(find_attention)[0]}

    def _macs_by_block(self) -> dict[str, int]:
        shapes = self.graph.get(_shapes, *self.shape)
        found = {b.name: macs_at(shapes, (*b.products, b.product))[0]
                 for b in self.graph.get(find_feed_forward)}  # fmt: skip
        attention = [*self.graph.get(find_attention)[0], *skipped(self.model)]
        return found | {place.name: macs_at(shapes, place.nodes)[0] for place in attention}

    def _macs(self) -> int | None:
        return self.graph.get(count_macs, *self.shape)


def _require(report: MatchReport, names: Collection[str]) -> None:
    lost = sorted(set(names) - {block.name for block in report.blocks})
    if lost:
        reason = report.unmatched[0].reason if report.unmatched else "it is not found any more"
        raise InvalidModel(
            f"{lost[0]} is not certified after its rewrite: {reason}",
            DEFECT,
            code="internal.certificate",
        )


def _shapes(model: ir.Model, batch: int, sequence: int) -> Any:
    return infer_shapes_at(model, bind_axes(model.graph, batch=batch, sequence=sequence))


def count_macs(model: ir.Model, batch: int, sequence: int) -> int | None:
    """MACs of one run; None if something in the graph cannot be counted."""
    total, uncounted = macs_at(_shapes(model, batch, sequence), model.graph)
    return None if uncounted else total
