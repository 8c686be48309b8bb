"""Measure the loss at the model's output when one block is changed.

The loss of a removal is measured at a few sizes (``LossEstimator``). The block's last weight, which
is the output projection or the second matrix of a feed-forward, is refitted in closed form. Between
these sizes the loss follows the block's own loss (``calibration.elimination``). Other changes are
applied to a copy of the model, whose loss is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.elimination import RIDGE, Elimination, eliminate, eliminate_neurons
from attnserve.calibration.layerwise import LayerwiseRunner
from attnserve.calibration.linear_maps import last_map
from attnserve.calibration.map_moments import enough, last_map_moments
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.refit import refit
from attnserve.calibration.refit_targets import Targets, collect_targets
from attnserve.calibration.ridge import FitMoments
from attnserve.calibration.similarity import HeadSimilarity, similarities
from attnserve.checks.quality import QualityMeter
from attnserve.context import RunContext, ignore_progress
from attnserve.data.row_batches import thinned
from attnserve.planning.blocks.configurations import (
    MAX_CONFIGS,
    MULTIPLE,
    BlockConfig,
    LossCurve,
    ReusePair,
    Reusing,
    apply_config,
)
from attnserve.planning.blocks.groups import Block, BlockGroup
from attnserve.planning.blocks.loss_estimation import LossEstimator
from attnserve.planning.heads.selection import Reuse, edges_of
from attnserve.precision.convert import Precision, convert_alone
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.errors import IMPOSSIBLE
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import decompose_fused

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["BlockLosses", "conversion_losses", "loss_curves"]

MEASURED_SHARES = (0.25, 0.5, 0.75)
"""The shares of a block's heads or neurons whose removal is measured."""

MEASURED_ROWS = 48
"""The approximate number of texts on which losses are measured."""

MOMENT_TOKENS = 8192
"""The approximate number of tokens for the moments of queries and keys, and for similarities."""

FIT_TOKENS = 4096
"""The approximate number of tokens to which a replaced attention is refitted."""


class BlockLosses(NamedTuple):
    """Losses of configurations of the blocks, at the output of the model.

    Attributes:
        curves: The loss curve of each group that can be reduced, by its key.
        pairs: The pairs whose loss was measured.
        conversion: The loss if only this group is converted to int8 or int4, by its key.
    """

    curves: dict[str, LossCurve]
    pairs: tuple[ReusePair, ...]
    conversion: dict[str, float]


def loss_curves(
    model: ir.Model,
    groups: Sequence[BlockGroup],
    batches: Sequence[Batch],
    changes: Mapping[str, Sequence[BlockConfig]] | None = None,
    pairs: Sequence[ReusePair] = (),
    *,
    new_meter: Callable[[], QualityMeter],
    context: RunContext,
) -> BlockLosses:
    """Measure the losses of removal, of other changes, and of reused probabilities.

    Args:
        changes: The other changes to measure, by the key of a group.
        pairs: The pairs to measure; pairs that are not faster are skipped.
        new_meter: Makes the meter of a comparison.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
    """
    reducible = [group for group in groups if not group.refusal]
    if not reducible:
        return BlockLosses({}, (), {})
    blocks = [block for group in reducible for block in group.blocks]
    measured, rest = _split(batches)
    estimator = LossEstimator(model, [block.name for block in blocks], measured, new_meter, context)
    curves: dict[str, LossCurve] = {}
    moments = last_map_moments(model, blocks, enough(rest, blocks), context=context)
    sums = _by_group(reducible, moments)
    for done, (group, total) in enumerate(sums, start=1):
        weight, rows = last_map(group.blocks[0]).weight, _rows(group.blocks[0])
        elimination = _elimination(group, weight, rows, total)
        count = group.count
        removals: list[int] = []
        losses: list[float] = []
        for share in MEASURED_SHARES:
            n = max(round(share * count), 1)
            if n >= count or n in removals:
                continue
            kept = np.setdiff1d(np.arange(count), elimination.order[:n])
            fitted = _fitted(total, weight, rows[kept].reshape(-1))
            removals.append(n)
            losses.append(estimator.loss(dict.fromkeys(group.names, fitted)))
        rising = np.maximum.accumulate(np.maximum(losses, 1e-9)) if losses else np.zeros(0)
        own = np.maximum.accumulate(elimination.losses)
        if losses:
            curves[group.key] = LossCurve(
                order=tuple(elimination.order.tolist()),
                own_loss=tuple(own.tolist()),
                removed_counts=tuple(removals),
                loss=tuple(rising.tolist()),
            )
        context.progress("measure block losses", done, len(reducible))
    others = _ChangeLosses(model, estimator, thinned(rest, MOMENT_TOKENS), context)
    wanted = {
        group: changes[group.key]
        for group in reducible
        if changes and group.key in changes and group.key in curves
    }
    for key, changed in others.changes(wanted).items():
        curves[key] = replace(curves[key], changed=changed)
    faster = [p for p in pairs if p.saved_ms > 0 and {p.source.key, p.reader.key} <= curves.keys()]
    return BlockLosses(curves, tuple(others.pairs(faster)), {})


def conversion_losses(
    model: ir.Model,
    groups: Sequence[BlockGroup],
    batches: Sequence[Batch],
    precision: Precision,
    *,
    new_meter: Callable[[], QualityMeter],
    context: RunContext,
) -> dict[str, float]:
    """Measure the loss if each group alone is converted to a precision, by its key.

    Args:
        precision: One that allows ``float_blocks``; see ``Scheme``.
        new_meter: Makes the meter of a comparison.

    Raises:
        InvalidArgument, CannotRewrite, InvalidData: In the cases of ``convert``.
    """
    measured, rest = _split(batches)
    estimator = LossEstimator(model, [], measured, new_meter, context)
    parts = convert_alone(model, precision, rest, [group.names for group in groups])
    losses: dict[str, float] = {}
    for group, converted in zip(groups, parts, strict=True):
        losses[group.key] = estimator.loss_of(converted)
        context.progress(f"measure {precision} losses", len(losses), len(groups))
    return losses


@dataclass(frozen=True, eq=False)
class _ChangeLosses:
    """Measures the losses of changes that are applied to a copy of the model."""

    model: ir.Model
    estimator: LossEstimator
    batches: Sequence[Batch]
    context: RunContext

    @property
    def silent(self) -> RunContext:
        """A context that reports no progress."""
        return replace(self.context, progress=ignore_progress)

    @cached_property
    def fit_batches(self) -> list[Batch]:
        """The batches to which changed blocks are fitted."""
        return thinned(self.batches, FIT_TOKENS)

    @cached_property
    def targets(self) -> Targets:
        """The outputs of all blocks on these batches."""
        return collect_targets(
            self.model, list(self.estimator.maps), self.fit_batches, context=self.silent
        )

    def changes(
        self, wanted: Mapping[BlockGroup, Sequence[BlockConfig]]
    ) -> dict[str, dict[str, float]]:
        """Measure each change of the groups with one block; impossible changes are left out."""
        single = {group: configs for group, configs in wanted.items() if len(group.blocks) == 1}
        names = [g.names[0] for g, configs in single.items() if any(c.is_fitted for c in configs)]
        plain = self.model.clone()
        moments: dict[str, TokenMoments] = {}
        if names:
            decompose_fused(plain, names)
            blocks = [block for block in find_attention(plain).blocks if block.name in names]
            moments = collect_moments(plain, blocks, self.batches, context=self.silent)
        losses: dict[str, dict[str, float]] = {}
        for done, (group, configs) in enumerate(single.items(), start=1):
            block = group.blocks[0]
            name = block.name
            for config in configs:
                new = plain.clone() if config.is_fitted else self.model.clone()
                with suppress(*IMPOSSIBLE):  # the change is left out
                    apply_config(new, block, config, moments.get(name))
                    loss = self._loss(new, name, [] if config.is_fitted else [name])
                    losses.setdefault(group.key, {})[config.change] = loss
            self.context.progress("measure changes", done, len(single))
        return losses

    def pairs(self, pairs: Sequence[ReusePair]) -> Iterator[ReusePair]:
        """Yield each pair with its most similar heads, and the loss if all of them are reused."""
        if not pairs:
            return
        plain = self.model.clone()
        decompose_fused(
            plain, {name for pair in pairs for name in (*pair.source.names, *pair.reader.names)}
        )
        blocks = {block.name: block for block in find_attention(plain).blocks}
        both = [[blocks[group.names[0]] for group in (pair.source, pair.reader)] for pair in pairs]
        measured = similarities(plain, both, self.batches, context=self.silent)
        for done, (pair, pair_blocks, similarity) in enumerate(
            zip(pairs, both, measured, strict=True), start=1
        ):
            if similarity is not None:
                with suppress(*IMPOSSIBLE):  # the change is left out
                    reusing = self._reusing(pair, pair_blocks, similarity)
                    if reusing is not None:
                        yield reusing
            self.context.progress("measure pairs", done, len(pairs))

    def _reusing(
        self, pair: ReusePair, blocks: Sequence[AttentionBlock], similarity: HeadSimilarity
    ) -> ReusePair | None:
        """Measure a pair; None if not all of its heads have a source."""
        reader = pair.reader.names[0]
        edges = edges_of(Reuse("full"), blocks, [reader], masks={}, similarity=similarity)
        taken = edges.get(reader, {})
        if len(taken) < pair.reader.count:
            return None
        heads = tuple(taken[head][1] for head in range(pair.reader.count))
        source = pair.source.names[0]
        new = self.model.clone()
        whole = Reusing(len(heads), dict(enumerate(heads)), source, 0.0)
        apply_config(new, pair.reader.blocks[0], whole)
        return replace(pair, heads=heads, loss=self._loss(new, source, [reader]))

    def _loss(self, new: ir.Model, first: str, fitted: Sequence[str]) -> float:
        """Measure the loss of a changed model.

        Args:
            first: The first changed block; the values in front of it are not computed again.
            fitted: The blocks whose outputs are refitted before the loss is measured.
        """
        if fitted:
            refit(
                new, self.model, fitted, self.fit_batches,
                context=self.silent, targets=self.targets, known=self.prefix.before(first),
            )  # fmt: skip
        return max(self.estimator.loss_of(new, first), 1e-9)

    @cached_property
    def prefix(self) -> _Prefix:
        """The values in front of each block on ``fit_batches``."""
        return _Prefix(self.model, self.fit_batches, self.silent)


class _Prefix:
    """A cache of the values in front of one attention block at a time.

    Values are computed once if blocks are requested in the order of execution.
    """

    def __init__(self, model: ir.Model, batches: Sequence[Batch], context: RunContext) -> None:
        self.model, self.batches, self.context = model, batches, context
        order = [value for node in model.graph for value in node.outputs]
        places = {value: place for place, value in enumerate(order)}
        self.inputs = {block.name: block.x for block in find_attention(model).blocks}
        self.places = {name: places.get(x, -1) for name, x in self.inputs.items()}
        self._place, self._runner = -1, self._start()

    def before(self, name: str) -> list[dict[str, np.ndarray]]:
        """Return the values that the block and later nodes read: by name, of each batch.

        The list is empty if the block reads an input of the model, or is in the body of a node.
        """
        place = self.places.get(name, -1)
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


def _by_group(
    groups: Sequence[BlockGroup], moments: Iterable[tuple[str, FitMoments]]
) -> Iterator[tuple[BlockGroup, FitMoments]]:
    """Sum the moments of the blocks of each group, which is yielded after its last block."""
    group_of = {name: group for group in groups for name in group.names}
    missing = {group: len(group.names) for group in groups}
    sums: dict[BlockGroup, FitMoments] = {}
    for name, found in moments:
        group = group_of[name]
        sums[group] = sums[group] + found if group in sums else found
        missing[group] -= 1
        if not missing[group]:
            yield group, sums.pop(group)


def _split(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """Split batches into about ``MEASURED_ROWS`` short and long texts to measure, and data to fit.

    Both are disjoint, because a block with many neurons overfits to the data of its fit.
    """
    if len(batches) < 2:
        return list(batches), list(batches)
    rows = [max((len(a) for a in batch.values() if a.ndim), default=1) for batch in batches]
    count = min(max(round(MEASURED_ROWS / max(np.mean(rows), 1)), 1), len(batches) // 2)
    places = np.linspace(0, len(batches) - 1, 2 * count + 1)[1::2].round().astype(int).tolist()
    measured = [batches[index] for index in dict.fromkeys(places)]
    return measured, [batch for index, batch in enumerate(batches) if index not in places]


def _rows(block: Block) -> Int[np.ndarray, "count rows"]:
    """The rows of the last weight that read each head or neuron."""
    if isinstance(block, FeedForwardBlock):
        return np.arange(block.num_neurons)[:, None]
    return block.required_output.rows


def _elimination(
    group: BlockGroup,
    weight: Float[np.ndarray, "N D"],
    rows: Int[np.ndarray, "count rows"],
    moments: FitMoments,
) -> Elimination:
    """The order of removal of the heads or neurons of a group."""
    if group.kind == "feed_forward":
        step = max(group.count // (2 * MAX_CONFIGS) // MULTIPLE, 1) * MULTIPLE
        return eliminate_neurons(moments.covariance, weight, step)
    flat = rows.reshape(-1)
    covariance = moments.covariance[np.ix_(flat, flat)]
    return eliminate(covariance, weight[flat], group.count)


def _fitted(
    moments: FitMoments, weight: Float[np.ndarray, "N D"], kept: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Fit the block's output to the kept rows by ridge regression; returns weight and bias."""
    gram = moments.covariance
    unit = RIDGE * (float(np.trace(gram)) / len(gram) or 1.0)
    fitted = np.zeros_like(weight)
    inner = gram[np.ix_(kept, kept)] + unit * np.eye(len(kept))
    fitted[kept] = np.linalg.solve(inner, gram[kept] @ weight + unit * weight[kept])
    return fitted, (moments.t - moments.c @ fitted) / max(moments.count, 1)
