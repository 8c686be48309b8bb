"""Measure the loss at the model's output of changes that are applied to a copy of the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import onnx_ir as ir

from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.original_outputs import OriginalOutputs, collect_outputs
from attnserve.calibration.refit import refit
from attnserve.calibration.similarity import HeadSimilarity, similarities
from attnserve.context import Progress, RunContext
from attnserve.data.row_batches import thinned
from attnserve.planning.blocks.configurations import BlockConfig, Reusing
from attnserve.planning.blocks.groups import BlockGroup, ReusePair, apply_config
from attnserve.planning.blocks.loss_estimation import LossEstimator
from attnserve.planning.heads.criteria import observable_blocks
from attnserve.planning.heads.selection import Reuse, edges_of
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import IMPOSSIBLE
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.find import find_attention

__all__ = ["ChangeLosses"]

FIT_TOKENS = 4096
"""The approximate number of tokens to which a replaced attention is refitted."""


@dataclass(frozen=True, eq=False)
class ChangeLosses:
    """Measures the losses of changes that are applied to a copy of the model.

    Attributes:
        estimator: Compares the changed models with the original.
        batches: The data to which changes and changed blocks are fitted.
        context: The context of each measurement, which reports no progress.
        progress: Reports the number of measured changes.
    """

    model: ir.Model
    estimator: LossEstimator
    batches: Sequence[Batch]
    context: RunContext
    progress: Progress

    @cached_property
    def prefix(self) -> _Prefix:
        """The values in front of each block, on batches to which changed blocks are refitted."""
        return _Prefix(self.model, thinned(self.batches, FIT_TOKENS), self.context)

    @cached_property
    def original_outputs(self) -> OriginalOutputs:
        """The outputs of all blocks on the same batches."""
        names = list(self.estimator.maps)
        return collect_outputs(self.model, names, self.prefix.batches, context=self.context)

    def changes(
        self, wanted: Mapping[BlockGroup, Sequence[BlockConfig]]
    ) -> dict[str, dict[str, float]]:
        """Measure each change of the groups with one block; impossible changes are left out."""
        single = {group: configs for group, configs in wanted.items() if len(group.blocks) == 1}
        names = [g.names[0] for g, configs in single.items() if any(c.is_fitted for c in configs)]
        plain, moments = self.model, dict[str, TokenMoments]()
        if names:
            plain, blocks = observable_blocks(self.model, names)
            moments = collect_moments(plain, blocks, self.batches, context=self.context)
        losses: dict[str, dict[str, float]] = {}
        for done, (group, configs) in enumerate(single.items(), start=1):
            (name,) = group.names
            for config in configs:
                new = (plain if config.is_fitted else self.model).clone()
                with suppress(*IMPOSSIBLE):  # the change is left out
                    apply_config(new, group, config, moments=moments.get(name))
                    loss = self._loss(new, name, [] if config.is_fitted else [name])
                    losses.setdefault(group.key, {})[config.change] = loss
            self.progress("measure changes", done, len(single))
        return losses

    def pairs(self, pairs: Sequence[ReusePair]) -> Iterator[ReusePair]:
        """Yield each pair with its most similar heads, and the loss if all of them are reused."""
        if not pairs:
            return
        names = [(pair.source.names[0], pair.reader.names[0]) for pair in pairs]
        plain, blocks = observable_blocks(self.model, {name for both in names for name in both})
        by_name = {block.name: block for block in blocks}
        both = [[by_name[source], by_name[reader]] for source, reader in names]
        measured = similarities(plain, both, self.batches, context=self.context)
        for done, (pair, pair_blocks, similarity) in enumerate(
            zip(pairs, both, measured, strict=True), start=1
        ):
            if similarity is not None:
                with suppress(*IMPOSSIBLE):  # the change is left out
                    reusing = self._reusing(pair, pair_blocks, similarity)
                    if reusing is not None:
                        yield reusing
            self.progress("measure pairs", done, len(pairs))

    def _reusing(
        self, pair: ReusePair, blocks: Sequence[AttentionBlock], similarity: HeadSimilarity
    ) -> ReusePair | None:
        """Measure a pair; None if not all of its heads have a source."""
        (source,), (reader,) = pair.source.names, pair.reader.names
        edges = edges_of(Reuse("full"), blocks, [reader], masks={}, similarity=similarity)
        taken = edges.get(reader, {})
        if len(taken) < pair.reader.count:
            return None
        heads = tuple(taken[head][1] for head in range(pair.reader.count))
        new = self.model.clone()
        apply_config(new, pair.reader, Reusing(len(heads), dict(enumerate(heads)), source, 0.0))
        return replace(pair, heads=heads, loss=self._loss(new, source, [reader]))

    def _loss(self, new: ir.Model, first: str, fitted: Sequence[str]) -> float:
        """Measure the loss of a changed model.

        Args:
            first: The first changed block; the values in front of it are not computed again.
            fitted: The blocks whose outputs are refitted before the loss is measured.
        """
        if fitted:
            refit(
                new,
                self.model,
                fitted,
                self.prefix.batches,
                context=self.context,
                original_outputs=self.original_outputs,
                known=self.prefix.before(first),
            )
        return max(self.estimator.loss_of(new, first), 1e-9)


class _Prefix:
    """A cache of the values in front of one attention block at a time.

    Values are computed once if blocks are requested in the order of execution.
    """

    def __init__(self, model: ir.Model, batches: Sequence[Batch], context: RunContext) -> None:
        self.model, self.batches, self.context = model, batches, context
        self.inputs = {block.name: block.x for block in find_attention(model).blocks}
        order = [value for node in model.graph for value in node.outputs]
        self.places = {value: place for place, value in enumerate(order)}
        self._place, self._runner = -1, self._start()

    def before(self, name: str) -> list[dict[str, np.ndarray]]:
        """Return the values that the block and later nodes read: by name, of each batch.

        The list is empty if the block reads an input of the model, or is in the body of a node.
        """
        place = self.places.get(self.inputs[name], -1)
        if place < 0:
            return []
        if place < self._place:
            self._runner = self._start()
        self._place = place
        for _ in self._runner.run_to([self.inputs[name]], self.model.graph.outputs):
            pass
        return self._runner.known

    def _start(self) -> LayerwiseRunner:
        return LayerwiseRunner(self.model, self.batches, context=self.context)
