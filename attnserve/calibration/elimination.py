"""Order heads or neurons for pruning, assuming that the output projection is refitted.

After a refit the remaining heads reproduce part of the output of a removed head. With C the
covariance of the attention context and W the output projection, removing a set of heads costs

    min over X of  tr (X - W)^T C (X - W),   with X zero in the rows of these heads.

The cheapest next head follows in closed form from the inverse of C, as in Optimal Brain Surgeon
(Hassibi and Stork 1993).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.map_moments import last_map_moments
from attnserve.calibration.ridge import FitMoments
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "Elimination",
    "eliminate",
    "eliminate_heads",
    "eliminate_neurons",
    "elimination_order",
]

RIDGE = 1e-3
"""Regularization of C, relative to its mean diagonal."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """The pruning order of one layer.

    Attributes:
        order: Heads (or neurons), the first to remove first.
        losses: Share of the output variance that is lost after n removals, n = 0 .. H.
    """

    order: Int[np.ndarray, " H"]
    losses: Float[np.ndarray, " H+1"]


def elimination_order(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, Elimination]:
    """The pruning order of the heads of each block that has an output projection, by name.

    Raises:
        InvalidData: The model refuses a batch, a block sees no real token, or its activations are
            not finite.
    """
    projected_blocks = [block for block in blocks if block.output is not None]
    by_name = {block.name: block for block in projected_blocks}
    progress = context.stage("measure blocks")
    eliminations: dict[str, Elimination] = {}
    for name, moments in last_map_moments(model, projected_blocks, batches, context=context):
        eliminations[name] = eliminate_heads(by_name[name], moments)
        progress(len(eliminations), len(projected_blocks))
    return {block.name: eliminations[block.name] for block in projected_blocks}


def eliminate_heads(block: AttentionBlock, moments: FitMoments) -> Elimination:
    """The pruning order of the heads of a block.

    Args:
        moments: Of the input and the output of its output projection.
    """
    rows = block.part_rows.reshape(-1)
    covariance = moments.covariance[np.ix_(rows, rows)]
    weight = block.required_output.matrix()[rows].astype(np.float64)
    return eliminate(covariance, weight, block.num_heads)


def eliminate(
    covariance: Float[np.ndarray, "N N"], weight: Float[np.ndarray, "N D"], heads: int
) -> Elimination:
    """Remove heads one by one, each time the head with the least loss.

    Args:
        covariance: Covariance of the attention context; N = heads x V, ordered by head.
        weight: The output projection W_O, rows in the same order.
        heads: H.
    """
    size = len(covariance) // heads
    unit = float(np.trace(covariance)) / len(covariance) or 1.0
    inverse = np.linalg.inv(covariance + RIDGE * unit * np.eye(len(covariance)))
    heads_left = list(range(heads))
    weight_left = weight.copy()  # X of the remaining heads
    total = float(np.sum(weight * (covariance @ weight))) or 1.0
    order: list[int] = []
    losses = [0.0]
    while heads_left:
        blocks = inverse.reshape(heads, size, heads, size)[heads_left, :, heads_left]  # L V V
        rows = weight_left.reshape(heads, size, -1)[heads_left]  # L V D
        corrections = np.linalg.inv(blocks) @ rows
        added_losses = np.sum(rows * corrections, axis=(1, 2))
        index = int(np.argmin(added_losses))
        head = heads_left.pop(index)
        at = slice(head * size, (head + 1) * size)
        order.append(head)
        losses.append(losses[-1] + float(added_losses[index]) / total)
        weight_left = weight_left - inverse[:, at] @ corrections[index]
        inverse = inverse - inverse[:, at] @ np.linalg.solve(inverse[at, at], inverse[at])
    return Elimination(np.array(order), np.array(losses))


def eliminate_neurons(
    covariance: Float[np.ndarray, "F F"], weight: Float[np.ndarray, "F D"], step: int
) -> Elimination:
    """Remove neurons of a feed-forward layer, each time the neurons with the least loss.

    Args:
        covariance: Covariance of the neurons.
        weight: The second matrix W_2.
        step: Number of neurons that are removed at a time.
    """
    count = len(covariance)
    unit = float(np.trace(covariance)) / count or 1.0
    inverse = np.linalg.inv(covariance + RIDGE * unit * np.eye(count))
    neurons_left = np.arange(count)
    weight_left = weight.astype(np.float64)  # X of the remaining neurons
    total = float(np.sum(weight * (covariance @ weight))) or 1.0
    order: list[int] = []
    losses = [0.0]
    while len(neurons_left):
        added_losses = np.sum(weight_left * weight_left, axis=1) / np.maximum(
            np.diag(inverse), 1e-300
        )
        removals = np.argsort(added_losses, kind="stable")[:step]
        stays = np.setdiff1d(np.arange(len(neurons_left)), removals)
        correction = np.linalg.solve(inverse[np.ix_(removals, removals)], weight_left[removals])
        order += neurons_left[removals].tolist()
        losses.append(losses[-1] + float(np.sum(weight_left[removals] * correction)) / total)
        across = inverse[np.ix_(stays, removals)]
        pull = np.linalg.solve(inverse[np.ix_(removals, removals)], across.T)
        weight_left = weight_left[stays] - across @ correction
        inverse = inverse[np.ix_(stays, stays)] - across @ pull
        neurons_left = neurons_left[stays]
    ends = np.minimum(step * np.arange(len(losses)), count)
    return Elimination(np.array(order), np.interp(np.arange(count + 1), ends, losses))
