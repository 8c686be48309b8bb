"""Run passes on a model, refit and certify what they change, and record their steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import onnx_ir as ir

from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import enough, refit
from attnserve.checks.certify import read_attention
from attnserve.fusion import DEFECT
from attnserve.job import Job
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.example_inputs import random_batches
from attnserve.models.lineage import StepRecord
from graph_passes.analysis.cost import count_macs, infer_at, macs_at
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.errors import InvalidModel
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import BlockPass, RewritePass, targets_of
from graph_passes.passes.skip_attention import skipped

__all__ = ["ApplyReport", "Rewriting", "exact_steps"]


@dataclass(frozen=True, eq=False)
class ApplyReport:
    """The steps of an applied plan.

    Attributes:
        is_exact: Whether all steps are exact.
        shared: Rewritten blocks that were not refitted, because other blocks share their weights.
    """

    steps: tuple[StepRecord, ...] = ()
    is_exact: bool = True
    shared: tuple[str, ...] = ()

    def then(self, later: ApplyReport) -> ApplyReport:
        """The report of these steps and later ones."""
        return ApplyReport(
            (*self.steps, *later.steps),
            is_exact=self.is_exact and later.is_exact,
            shared=(*self.shared, *later.shared),
        )


def exact_steps(rewrite: RewritePass, macs: int | None) -> list[StepRecord]:
    """The records of an exact pass, one for each rewritten block.

    Args:
        macs: MACs of the whole model after the pass; None if they cannot be counted.
    """
    return [
        StepRecord(rewrite=rewrite.name, block=name, macs_after=macs)
        for name in targets_of(rewrite)
    ]


@dataclass(eq=False)
class Rewriting:
    """A model while passes rewrite it.

    Heads and neurons are removed or reused first. The outputs of changed blocks are then refitted
    to the original's, front to back, before and after query and key dimensions are shared.

    Attributes:
        fit: Refit the outputs of changed blocks. False only measures the distance to the original.
    """

    job: Job
    graph_context: GraphContext
    fit: bool
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    """The steps; ``finish`` adds the errors."""
    errors: dict[int, float] = field(default_factory=dict[int, float])
    """``StepRecord.relative_error`` by the index of the step."""
    fitted_errors: dict[int, float] = field(default_factory=dict[int, float])
    """``StepRecord.fitted_error`` by the index of the step."""
    changed: list[str] = field(default_factory=list[str])
    """Blocks whose outputs differ from the original's."""
    is_measured: bool = True
    """Whether the changed blocks were measured (and refitted) since the last change."""
    shared: set[str] = field(default_factory=set[str])
    """Blocks that were not refitted, because other blocks share their weights."""
    uncertified: set[str] = field(default_factory=set[str])
    """Rewritten attention blocks that are not certified yet."""

    @property
    def model(self) -> ir.Model:
        return self.graph_context.model

    def run(self, rewrite: RewritePass) -> None:
        """Run a pass.

        Raises:
            CannotRewrite, InvalidArgument: The pass does not apply; see ``BlockPass.refusal``.
            InvalidData: The model refuses the data, or its activations are not finite.
            InvalidModel: A rewritten block fails certification.
        """
        if rewrite.is_fitted and targets_of(rewrite):
            rewrite = self._fitted(rewrite)
        if rewrite.lossy and isinstance(rewrite, BlockPass):
            self._run_lossy(cast("BlockPass[Any, Any]", rewrite))
        else:
            self._run_exact(rewrite)

    def finish(self) -> ApplyReport:
        """Refit and certify what the passes changed, and return their steps."""
        self._measure()
        self._certify()
        steps = tuple(
            step.model_copy(
                update={
                    "relative_error": self.errors.get(index),
                    "fitted_error": self.fitted_errors.get(index),
                }
            )
            for index, step in enumerate(self.steps)
        )
        return ApplyReport(steps, is_exact=not self.changed, shared=tuple(sorted(self.shared)))

    def _fitted(self, rewrite: RewritePass) -> RewritePass:
        """Fit a pass to the tokens of the model as rewritten so far."""
        rewrite.require_applicable(self.graph_context)
        if rewrite.needs_refit or not self.fit:
            self._measure()
        self._certify()
        moments: dict[str, TokenMoments] = {}
        blocks = [block for block in rewrite.blocks_to_fit(self.graph_context)
                  if block.graph is self.model.graph]  # fmt: skip
        if self.job.data is not None and blocks:  # a session cannot observe the body of an If
            batches = enough(self.job.data.fit, blocks)
            moments = collect_moments(self.model, blocks, batches, context=self.job.context)
        return rewrite.fitted(self.graph_context, moments, self.job.context.stage("factor"))

    def _run_lossy(self, rewrite: BlockPass[Any, Any]) -> None:
        targets = rewrite.targets
        if not targets:
            return
        before, macs = self._macs_by_block(), self._macs()
        rewrite(self.model)
        after, total = self._macs_by_block(), self._macs()
        blocks = self._blocks()
        for place, name in enumerate(targets, start=1):
            macs = None if macs is None else macs + after.get(name, 0) - before.get(name, 0)
            last = place == len(targets)  # the whole model: other blocks may have changed too
            error = rewrite.approximation_error(name)
            if error is not None:
                self.errors[len(self.steps)] = error
            if error != 0:
                self.changed.append(name)
                self.is_measured = self.is_measured and error is not None and not self.fit
            sizes = rewrite.sizes(name, blocks.get(name))
            self.steps.append(
                StepRecord(
                    rewrite=rewrite.name, block=name, macs_after=total if last else macs, **sizes
                )
            )
        self.uncertified |= targets.keys()

    def _run_exact(self, rewrite: RewritePass) -> None:
        """Run an exact pass; a pass of the whole graph edits no attention."""
        self._measure()
        rewrite(self.model)
        if targets := targets_of(rewrite):
            self.steps += exact_steps(rewrite, self._macs())
            attention = {block.name for block in self.graph_context.get(find_attention)[0]}
            self.uncertified |= targets.keys() & attention

    def _measure(self) -> None:
        """Measure the changed blocks' distance to the original, and refit them if requested."""
        if self.is_measured:
            return
        self.is_measured = True
        empty = empty_axes(self.job.original, self.model)
        if self.job.data is not None:
            blocks = self._blocks()
            batches = enough(self.job.data.fit, [blocks[n] for n in self.changed if n in blocks])
        else:
            batches = random_batches(self.job.original, self.job.context.seed, empty=empty)
        refits = refit(
            self.model, self.job.original, list(dict.fromkeys(self.changed)), batches,
            context=self.job.context, fit=self.fit,
            feed=lambda batch: shaped_for(self.model, batch, empty),
        )  # fmt: skip
        self.graph_context.invalidate()
        latest = {step.block: index for index, step in enumerate(self.steps)}
        for index, step in enumerate(self.steps):
            if step.block in refits:
                self.errors.setdefault(index, refits[step.block].relative_error_before)
        self.shared = {n for n, result in refits.items() if self.fit and result.is_shared}
        for name, result in refits.items():
            if result.ridge is not None:
                self.fitted_errors[latest[name]] = result.relative_error
        self._certify()

    def _certify(self) -> None:
        """Certify every block that was rewritten since the last time.

        Raises:
            InvalidModel: A block is not matched any more, or does not compute what was matched.
        """
        if not self.uncertified:
            return
        feed_forwards = {block.name for block in self.graph_context.get(find_feed_forward)}
        removed = {gap.name for gap in skipped(self.model)} | feed_forwards
        report = self.graph_context.get(read_attention, seed=self.job.context.seed)
        certified = {block.name for block in report.blocks}
        if lost := sorted(self.uncertified - removed - certified):
            reason = report.unmatched[0].reason if report.unmatched else "it is not found any more"
            raise InvalidModel(
                f"{lost[0]} is not certified after its rewrite: {reason}",
                DEFECT,
                code="internal.certificate",
            )
        self.uncertified.clear()

    def _blocks(self) -> dict[str, AttentionBlock | FeedForwardBlock]:
        blocks: dict[str, AttentionBlock | FeedForwardBlock] = {
            block.name: block for block in self.graph_context.get(find_feed_forward)
        }
        return blocks | {block.name: block for block in self.graph_context.get(find_attention)[0]}

    def _macs_by_block(self) -> dict[str, int]:
        shapes = self.graph_context.get(infer_at, self.job.counted)
        macs = {b.name: macs_at(shapes, (*b.products, b.product))[0]
                for b in self.graph_context.get(find_feed_forward)}  # fmt: skip
        attention = [*self.graph_context.get(find_attention)[0], *skipped(self.model)]
        return macs | {place.name: macs_at(shapes, place.nodes)[0] for place in attention}

    def _macs(self) -> int | None:
        return self.graph_context.get(count_macs, self.job.counted)
