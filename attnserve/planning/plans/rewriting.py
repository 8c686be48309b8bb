"""Run passes on a model, refit and certify the changed blocks, and record the changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import onnx_ir as ir

from attnserve.calibration.map_moments import enough
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import refit
from attnserve.checks.certify import read_attention
from attnserve.fusion import DEFECT
from attnserve.job import Job
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.example_inputs import random_batches
from attnserve.models.lineage import RecordedChange
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import count_macs, infer_at, macs_at
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.errors import InvalidModel
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import BlockPass, FittedPass, RewritePass
from graph_passes.passes.skip_attention import skipped

__all__ = ["ApplyReport", "PassRunner"]


@dataclass(frozen=True, eq=False)
class ApplyReport:
    """The changes of an applied plan.

    Attributes:
        is_exact: Whether all changes are exact.
        shared: Rewritten blocks that were not refitted, because other blocks share their weights.
    """

    changes: tuple[RecordedChange, ...] = ()
    is_exact: bool = True
    shared: tuple[str, ...] = ()

    def then(self, later: ApplyReport) -> ApplyReport:
        """The report of these changes and later ones."""
        return ApplyReport(
            (*self.changes, *later.changes),
            is_exact=self.is_exact and later.is_exact,
            shared=(*self.shared, *later.shared),
        )


@dataclass(eq=False, kw_only=True)
class BlockChange:
    """A pass that ran on one block, while later passes may still change and refit the block.

    Attributes:
        rewrite, block: The names of the pass and of the block.
        macs: MACs of the whole model afterwards; None if they cannot be counted.
        sizes: Sizes of the block afterwards, by their names in ``RecordedChange``.
        is_exact: Whether the pass changes the block's output by rounding only.
        needs_measuring: Whether the output must still be compared with the original's (and
            refitted).
        needs_certificate: Whether the block must still be certified.
        error: ``RecordedChange.relative_error``; None while it is unknown.
        fitted_error: ``RecordedChange.fitted_error``; None while it is unknown.
        is_shared: Whether the block was not refitted, because other blocks share its weights.
    """

    rewrite: str
    block: str
    macs: int | None
    sizes: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    is_exact: bool = True
    needs_measuring: bool = False
    needs_certificate: bool = False
    error: float | None = None
    fitted_error: float | None = None
    is_shared: bool = False

    def record(self) -> RecordedChange:
        """The change as attnserve.json records it."""
        return RecordedChange(
            rewrite=self.rewrite,
            block=self.block,
            relative_error=self.error,
            macs_after=self.macs,
            fitted_error=self.fitted_error,
            **self.sizes,
        )


@dataclass(eq=False)
class PassRunner:
    """A model while passes rewrite it: ``run`` for each pass, then ``finish``.

    Lossy passes run one after another. The outputs of the changed blocks are refitted to the
    original's, front to back. This happens before the next exact pass, before a pass that is fitted
    to refitted blocks, and at the end. Rewritten blocks are certified after each refit and at the
    end.

    Attributes:
        fit: Refit the outputs of changed blocks. False only measures the distance to the original.
        changes: The changes so far.
    """

    job: Job
    analyses: Analyses
    fit: bool
    changes: list[BlockChange] = field(default_factory=list[BlockChange])

    @property
    def model(self) -> ir.Model:
        return self.analyses.model

    def run(self, graph_pass: RewritePass) -> None:
        """Run a pass.

        Raises:
            CannotRewrite, InvalidArgument: The pass does not apply; see ``BlockPass.refusal``.
            InvalidData: The model refuses the data, or its activations are not finite.
            InvalidModel: A rewritten block fails certification.
        """
        if isinstance(graph_pass, FittedPass) and graph_pass.targets:
            graph_pass = self._fitted(graph_pass)
        if graph_pass.lossy and isinstance(graph_pass, BlockPass):
            self.changes += self._run_lossy(cast("BlockPass[Any, Any]", graph_pass))
        else:
            self._refit()
            self.changes += self._run_exact(graph_pass)

    def finish(self) -> ApplyReport:
        """Refit and certify the changed blocks, and return the changes."""
        self._refit()
        self._certify()
        return ApplyReport(
            tuple(change.record() for change in self.changes),
            is_exact=all(change.is_exact for change in self.changes),
            shared=tuple(sorted({change.block for change in self.changes if change.is_shared})),
        )

    # ---- passes ----------------------------------------------------------------------------------

    def _fitted(self, graph_pass: FittedPass) -> FittedPass:
        """Fit a pass to the tokens of the model as rewritten so far."""
        graph_pass.require_applicable(self.analyses)
        if graph_pass.needs_refit or not self.fit:
            self._refit()
        self._certify()
        moments: dict[str, TokenMoments] = {}
        blocks = [block for block in graph_pass.blocks_to_fit(self.analyses)
                  if block.graph is self.model.graph]  # fmt: skip
        if self.job.data is not None and blocks:  # a session cannot observe the body of an If
            batches = enough(self.job.data.fit, blocks)
            moments = collect_moments(self.model, blocks, batches, context=self.job.context)
        return graph_pass.fitted(self.analyses, moments, self.job.context.stage("factor"))

    def _run_lossy(self, graph_pass: BlockPass[Any, Any]) -> list[BlockChange]:
        """Run a lossy pass, whose MACs are attributed to its blocks one after another."""
        if not graph_pass.targets:
            return []
        before = self._macs_by_block()
        macs = self._macs()
        graph_pass(self.model)
        after = self._macs_by_block()
        blocks = self._blocks()
        changes: list[BlockChange] = []
        for name in graph_pass.targets:
            macs = None if macs is None else macs + after.get(name, 0) - before.get(name, 0)
            error = (
                graph_pass.approximation_error(name) if isinstance(graph_pass, FittedPass) else None
            )
            changes.append(
                BlockChange(
                    rewrite=graph_pass.name,
                    block=name,
                    macs=macs,
                    sizes=graph_pass.sizes(name, blocks.get(name)),
                    is_exact=error == 0,
                    needs_measuring=error is None or (error != 0 and self.fit),
                    needs_certificate=True,
                    error=error,
                )
            )
        changes[-1].macs = self._macs()  # of the whole model: other blocks may have changed too
        return changes

    def _run_exact(self, graph_pass: RewritePass) -> list[BlockChange]:
        """Run an exact pass; one of the whole graph edits no attention, and has no changes."""
        graph_pass(self.model)
        targets = graph_pass.targets
        if not targets:
            return []
        macs = self._macs()
        attention = {block.name for block in self.analyses.get(find_attention).blocks}
        return [
            BlockChange(
                rewrite=graph_pass.name, block=name, macs=macs, needs_certificate=name in attention
            )
            for name in targets
        ]

    # ---- refit and certification -----------------------------------------------------------------

    def _refit(self) -> None:
        """Refit the changed blocks if one is not measured yet, and certify the rewritten ones.

        Without ``fit``, only their distance to the original is measured.
        """
        if not any(change.needs_measuring for change in self.changes):
            return
        changed = list(
            dict.fromkeys(change.block for change in self.changes if not change.is_exact)
        )
        empty = empty_axes(self.job.original, self.model)
        if self.job.data is not None:
            blocks = self._blocks()
            batches = enough(self.job.data.fit, [blocks[n] for n in changed if n in blocks])
        else:
            batches = random_batches(self.job.original, self.job.context.seed, empty=empty)
        refits = refit(
            self.model, self.job.original, changed, batches,
            context=self.job.context, fit=self.fit,
            feed=lambda batch: shaped_for(self.model, batch, empty),
        )  # fmt: skip
        self.analyses.invalidate()
        for change in self.changes:
            result = refits.get(change.block)
            change.needs_measuring = False
            change.is_shared = self.fit and result is not None and result.is_shared
            if change.error is None and result is not None:
                change.error = result.relative_error_before
        latest = {change.block: change for change in self.changes}
        for name, result in refits.items():
            if result.ridge is not None:
                latest[name].fitted_error = result.relative_error
        self._certify()

    def _certify(self) -> None:
        """Certify every block that was rewritten since the last time.

        Raises:
            InvalidModel: A block is no longer matched, or its outputs differ from the reference.
        """
        rewritten = {change.block for change in self.changes if change.needs_certificate}
        if not rewritten:
            return
        feed_forwards = {block.name for block in self.analyses.get(find_feed_forward)}
        removed = {gap.name for gap in skipped(self.model)} | feed_forwards
        report = self.analyses.get(read_attention, seed=self.job.context.seed)
        certified = {block.name for block in report.blocks}
        if lost := sorted(rewritten - removed - certified):
            found = {block.name: block for block in self.analyses.get(find_attention).blocks}
            block = found.get(lost[0])
            reason = None if block is None else report.failure(block)
            raise InvalidModel(
                f"{lost[0]} is not certified after its rewrite: "
                f"{reason or 'it is no longer found'}",
                DEFECT,
                code="internal.certificate",
            )
        for change in self.changes:
            change.needs_certificate = False

    # ---- the model -------------------------------------------------------------------------------

    def _blocks(self) -> dict[str, AttentionBlock | FeedForwardBlock]:
        blocks: dict[str, AttentionBlock | FeedForwardBlock] = {
            block.name: block for block in self.analyses.get(find_feed_forward)
        }
        return blocks | {block.name: block for block in self.analyses.get(find_attention).blocks}

    def _macs_by_block(self) -> dict[str, int]:
        shapes = self.analyses.get(infer_at, self.job.counted)
        macs = {b.name: macs_at(shapes, (*b.products, b.product))[0]
                for b in self.analyses.get(find_feed_forward)}  # fmt: skip
        attention = [*self.analyses.get(find_attention).blocks, *skipped(self.model)]
        return macs | {place.name: macs_at(shapes, place.nodes)[0] for place in attention}

    def _macs(self) -> int | None:
        return self.analyses.get(count_macs, self.job.counted)
