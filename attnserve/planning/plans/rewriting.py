"""Run passes on a model, refit and certify the changed blocks, and record the changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
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
from graph_passes.blocks import Block
from graph_passes.errors import InvalidModel
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.passes.skip_attention import skipped

__all__ = ["ApplyReport", "PassRunner", "exact_changes"]


@dataclass(frozen=True, eq=False)
class ApplyReport:
    """The changes of an applied plan.

    Attributes:
        is_exact: Whether all changes are exact.
        unfitted: Rewritten blocks that were not refitted, because other blocks share their weights.
    """

    changes: tuple[RecordedChange, ...] = ()
    is_exact: bool = True
    unfitted: tuple[str, ...] = ()

    def then(self, later: ApplyReport) -> ApplyReport:
        """The report of these changes and later ones."""
        return ApplyReport(
            (*self.changes, *later.changes),
            is_exact=self.is_exact and later.is_exact,
            unfitted=(*self.unfitted, *later.unfitted),
        )


def exact_changes(
    passes: Iterable[RewritePass], macs_after: int | None
) -> tuple[RecordedChange, ...]:
    """The changes of exact passes, which lead to these MACs of the model."""
    return tuple(
        RecordedChange(rewrite=graph_pass.name, block=name, macs_after=macs_after)
        for graph_pass in passes
        for name in graph_pass.targets
    )


@dataclass(eq=False)
class PassRunner:
    """A model while passes rewrite it: ``run`` for each pass, then ``finish``.

    Lossy passes run one after another. The outputs of the changed blocks are refitted to the
    original's, front to back. This happens before the next exact pass, before a pass that is fitted
    to refitted blocks, and at the end. Rewritten blocks are certified after each refit and at the
    end.

    Attributes:
        model: The model, which the passes change.
        fit: Refit the outputs of changed blocks. False only measures the distance to the original.
        changes: The changes so far.
        lossy: The blocks that changed by more than rounding, in order.
        unfitted: Those that were not refitted, because other blocks share their weights.
        to_certify: The blocks that were rewritten since the last certification.
        needs_refit: Whether a block was changed since the last refit.
    """

    job: Job
    model: ir.Model
    fit: bool
    changes: list[RecordedChange] = field(default_factory=list[RecordedChange])
    lossy: dict[str, None] = field(default_factory=dict[str, None])
    unfitted: tuple[str, ...] = ()
    to_certify: set[str] = field(default_factory=set[str])
    needs_refit: bool = False

    @property
    def analyses(self) -> Analyses:
        return Analyses.of(self.model)

    def run(self, graph_pass: RewritePass) -> None:
        """Run a pass.

        Raises:
            CannotRewrite, InvalidArgument: The pass does not apply; see ``BlockPass.refusal``.
            InvalidData: The model refuses the data, or its activations are not finite.
            InvalidModel: A rewritten block fails certification.
        """
        progress = self.job.context.stage("factor")
        graph_pass = graph_pass.fitted(self.model, self._moments_of, progress)
        if graph_pass.lossy and isinstance(graph_pass, BlockPass):
            self._run_lossy(cast("BlockPass[Any, Any]", graph_pass))
        else:
            self._refit()
            self._run_exact(graph_pass)

    def finish(self) -> ApplyReport:
        """Refit and certify the changed blocks, and return the changes."""
        self._refit()
        self._certify()
        return ApplyReport(tuple(self.changes), is_exact=not self.lossy, unfitted=self.unfitted)

    # ---- passes ----------------------------------------------------------------------------------

    def _moments_of(self, names: Collection[str], refit_first: bool) -> Mapping[str, TokenMoments]:
        """The moments of the tokens in the model as rewritten so far; none without data."""
        if refit_first or not self.fit:
            self._refit()
        self._certify()
        # A session cannot observe the body of an If.
        blocks = [
            block
            for block in self.analyses.get(find_attention).blocks
            if block.name in names and block.graph is self.model.graph
        ]
        if self.job.data is None or not blocks:
            return {}
        batches = enough(self.job.data.fit, blocks)
        return collect_moments(self.model, blocks, batches, context=self.job.context)

    def _run_lossy(self, graph_pass: BlockPass[Any, Any]) -> None:
        """Run a lossy pass, whose MACs are attributed to its blocks one after another."""
        if not graph_pass.targets:
            return
        before = self._macs_by_block()
        macs = self._macs()
        graph_pass(self.model)
        after = self._macs_by_block()
        blocks = self._blocks()
        *_, last = graph_pass.targets
        for name in graph_pass.targets:
            macs = None if macs is None else macs + after.get(name, 0) - before.get(name, 0)
            error = graph_pass.approximation_error(name)
            change = RecordedChange(
                rewrite=graph_pass.name,
                block=name,
                relative_error=error,
                # The last is of the whole model: other blocks may have changed too.
                macs_after=self._macs() if name == last else macs,
                **graph_pass.sizes(name, blocks.get(name)),
            )
            self.changes.append(change)
            if error != 0:
                self.lossy[name] = None
                self.needs_refit |= error is None or self.fit
        self.to_certify.update(graph_pass.targets)

    def _run_exact(self, graph_pass: RewritePass) -> None:
        """Run an exact pass; one of the whole graph edits no attention, and has no changes."""
        graph_pass(self.model)
        if not graph_pass.targets:
            return
        self.changes += exact_changes([graph_pass], self._macs())
        attention = {block.name for block in self.analyses.get(find_attention).blocks}
        self.to_certify |= attention & graph_pass.targets.keys()

    # ---- refit and certification -----------------------------------------------------------------

    def _refit(self) -> None:
        """Refit the lossy blocks if one changed since the last time, and certify rewritten ones.

        Without ``fit``, only their distance to the original is measured.
        """
        if not self.needs_refit:
            return
        empty = empty_axes(self.job.original, self.model)
        if self.job.data is not None:
            blocks = self._blocks()
            batches = enough(self.job.data.fit, [blocks[n] for n in self.lossy if n in blocks])
        else:
            batches = random_batches(self.job.original, self.job.context.seed, empty=empty)
        refits = refit(
            self.model,
            self.job.original,
            list(self.lossy),
            batches,
            context=self.job.context,
            fit=self.fit,
            feed=lambda batch: shaped_for(self.model, batch, empty),
        )
        self.needs_refit = False
        if self.fit:
            shared = [name for name, result in refits.items() if result.is_shared]
            self.unfitted = tuple(sorted(shared))
        latest = {change.block: change for change in self.changes}
        for place, change in enumerate(self.changes):
            if (result := refits.get(change.block)) is None:
                continue
            errors = change.stated
            if change.relative_error is None:
                errors["relative_error"] = result.relative_error_before
            if change is latest[change.block] and result.ridge is not None:
                errors["fitted_error"] = result.relative_error
            self.changes[place] = RecordedChange(**errors)
        self._certify()

    def _certify(self) -> None:
        """Certify every block that was rewritten since the last time.

        Raises:
            InvalidModel: A block is no longer matched, or its outputs differ from the reference.
        """
        if not self.to_certify:
            return
        feed_forwards = {block.name for block in self.analyses.get(find_feed_forward)}
        removed = {gap.name for gap in skipped(self.model)} | feed_forwards
        report = self.analyses.get(read_attention, seed=self.job.context.seed)
        certified = {block.name for block in report.blocks}
        if lost := sorted(self.to_certify - removed - certified):
            found = {block.name: block for block in self.analyses.get(find_attention).blocks}
            block = found.get(lost[0])
            unmatched = None if block is None else report.failure(block)
            raise InvalidModel(
                f"{lost[0]} is not certified after its rewrite: "
                f"{'it is no longer found' if unmatched is None else unmatched.reason}",
                DEFECT,
                code="internal.certificate",
            )
        self.to_certify.clear()

    # ---- the model -------------------------------------------------------------------------------

    def _blocks(self) -> dict[str, Block]:
        blocks: dict[str, Block] = {
            block.name: block for block in self.analyses.get(find_feed_forward)
        }
        return blocks | {block.name: block for block in self.analyses.get(find_attention).blocks}

    def _macs_by_block(self) -> dict[str, int]:
        shapes = self.analyses.get(infer_at, self.job.counted_workload)
        macs = {
            b.name: macs_at(shapes, (*b.products, b.product))[0]
            for b in self.analyses.get(find_feed_forward)
        }
        attention = [*self.analyses.get(find_attention).blocks, *skipped(self.model)]
        return macs | {place.name: macs_at(shapes, place.nodes)[0] for place in attention}

    def _macs(self) -> int | None:
        return self.analyses.get(count_macs, self.job.counted_workload)
