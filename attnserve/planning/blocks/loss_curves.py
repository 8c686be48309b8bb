"""Measure the loss at the model's output when one block is changed.

The loss of a removal is measured at a few sizes (``LossEstimator``). The block's last weight, which
is the output projection or the second matrix of a feed-forward, is refitted in closed form. Between
these sizes the loss follows the block's own loss (``calibration.elimination``). Other changes are
applied to a copy of the model, whose loss is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.elimination import RIDGE
from attnserve.calibration.linear_maps import last_map
from attnserve.calibration.map_moments import enough, last_map_moments
from attnserve.calibration.ridge import FitMoments
from attnserve.checks.quality import QualityMeter
from attnserve.context import RunContext, ignore_progress
from attnserve.data.row_batches import thinned
from attnserve.planning.blocks.change_losses import ChangeLosses
from attnserve.planning.blocks.configurations import BlockConfig, LossCurve
from attnserve.planning.blocks.groups import BlockGroup, ReusePair
from attnserve.planning.blocks.loss_estimation import LossEstimator
from attnserve.precision.convert import Precision, convert_alone
from attnserve.runtime.interface import Batch

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["BlockLosses", "loss_curves"]

MEASURED_SHARES = (0.25, 0.5, 0.75)
"""The shares of a block's heads or neurons whose removal is measured."""

MEASURED_ROWS = 48
"""The approximate number of texts on which losses are measured."""

MOMENT_TOKENS = 8192
"""The approximate number of tokens for the moments of queries and keys, and for similarities."""


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
    precision: Precision | None = None,
    *,
    new_meter: Callable[[], QualityMeter],
    context: RunContext,
) -> BlockLosses:
    """Measure the losses of removal, other changes, reused probabilities, and conversion.

    Args:
        changes: The other changes to measure, by the key of a group.
        pairs: The pairs to measure; pairs that are not faster are skipped.
        precision: One that allows ``float_blocks`` (see ``Scheme``), to which each group alone is
            converted; None measures no conversion.
        new_meter: Makes the meter of a comparison.

    Raises:
        InvalidData: The model refuses a batch, or its activations are not finite.
        InvalidArgument, CannotRewrite: In the cases of ``convert``.
    """
    conversion: dict[str, float] = {}
    if precision is not None:
        conversion = _conversion_losses(model, groups, batches, precision, new_meter, context)
    measured, rest = _split(batches)
    reducible = [group for group in groups if not group.refusal]
    if not reducible:
        return BlockLosses({}, (), conversion)
    blocks = [block for group in reducible for block in group.blocks]
    estimator = LossEstimator(model, [block.name for block in blocks], measured, new_meter, context)
    curves: dict[str, LossCurve] = {}
    moments = last_map_moments(model, blocks, enough(rest, blocks), context=context)
    for done, (group, total) in enumerate(_by_group(reducible, moments), start=1):
        if curve := _curve(group, total, estimator):
            curves[group.key] = curve
        context.progress("measure block losses", done, len(reducible))
    silent = replace(context, progress=ignore_progress)
    others = ChangeLosses(model, estimator, thinned(rest, MOMENT_TOKENS), silent, context.progress)
    changes = changes or {}
    wanted = {g: changes[g.key] for g in reducible if g.key in changes.keys() & curves.keys()}
    for key, losses in others.changes(wanted).items():
        curves[key] = replace(curves[key], changed=losses)
    faster = [p for p in pairs if p.saved_ms > 0 and {p.source.key, p.reader.key} <= curves.keys()]
    return BlockLosses(curves, tuple(others.pairs(faster)), conversion)


def _conversion_losses(
    model: ir.Model,
    groups: Sequence[BlockGroup],
    batches: Sequence[Batch],
    precision: Precision,
    new_meter: Callable[[], QualityMeter],
    context: RunContext,
) -> dict[str, float]:
    """The loss if each group alone is converted, by its key."""
    measured, rest = _split(batches)
    estimator = LossEstimator(model, [], measured, new_meter, context)
    parts = convert_alone(model, precision, rest, [group.names for group in groups])
    losses: dict[str, float] = {}
    for group, converted in zip(groups, parts, strict=True):
        losses[group.key] = estimator.loss_of(converted)
        context.progress(f"measure {precision} losses", len(losses), len(groups))
    return losses


def _curve(group: BlockGroup, moments: FitMoments, estimator: LossEstimator) -> LossCurve | None:
    """Measure the losses of removal from a group; None if it has too few parts.

    Args:
        moments: Of the input and the output of its last linear map.
    """
    elimination = group.elimination(moments)
    first, count = group.blocks[0], group.count
    weight = last_map(first).weight
    removals = dict.fromkeys(max(round(share * count), 1) for share in MEASURED_SHARES)
    losses: dict[int, float] = {}
    for n in (n for n in removals if n < count):
        kept = np.setdiff1d(np.arange(count), elimination.order[:n])
        fitted = _fitted(moments, weight, first.part_rows[kept].reshape(-1))
        losses[n] = estimator.loss(dict.fromkeys(group.names, fitted))
    if not losses:
        return None
    return LossCurve(
        order=tuple(elimination.order.tolist()),
        own_loss=tuple(np.maximum.accumulate(elimination.losses).tolist()),
        removed_counts=tuple(losses),
        loss=tuple(np.maximum.accumulate(np.maximum([*losses.values()], 1e-9)).tolist()),
    )


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
