"""In which order heads can be left out, the others taking over what they can.

What a head writes alone says too little once the output projection is fitted again: some of it
others can write too. With C the covariance of the context and W the output projection, leaving out
heads costs

    min over X of  tr (X - W)^T C (X - W),   X being zero in the rows of these heads

and the cheapest next head is known in closed form from the inverse of C (as in Optimal Brain
Surgeon, Hassibi and Stork 1993).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.calibration.refit import context_moments
from attnserve.context import Provider
from attnserve.runtime.session import Batch
from graph_passes.blocks import AttentionBlock

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["Elimination", "eliminate", "eliminate_neurons", "elimination_order"]

RIDGE = 1e-3
"""In units of the mean variance of the context, so that no head is replaced by noise."""


@dataclass(frozen=True, eq=False)
class Elimination:
    """The heads of a layer from the first to go.

    Attributes:
        order: Heads.
        losses: The share of the output's variance that is lost once n are gone, n = 0 .. H.
    """

    order: Int[np.ndarray, " H"]
    losses: Float[np.ndarray, " H+1"]


def elimination_order(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    provider: Provider = "cpu",
    threads: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Elimination]:
    """``eliminate`` for each block that has an output projection, by what it sees on this data."""
    chosen = [block for block in blocks if block.output is not None]
    moments = context_moments(
        model, chosen, batches, provider=provider, threads=threads, progress=progress
    )
    found: dict[str, Elimination] = {}
    for block in chosen:
        assert block.output is not None
        rows = block.output.rows.reshape(-1)
        covariance = moments[block.name].covariance[np.ix_(rows, rows)]
        weight = block.output.matrix()[rows].astype(np.float64)
        found[block.name] = eliminate(covariance, weight, block.num_heads)
    return found


def eliminate(
    covariance: Float[np.ndarray, "N N"], weight: Float[np.ndarray, "N D"], heads: int
) -> Elimination:
    """Leave out one head after the other, always the one whose loss is least.

    Args:
        covariance: Of the context, N = heads x V, head by head.
        weight: W_O in the same order.
    """
    size = len(covariance) // heads
    unit = float(np.trace(covariance)) / len(covariance) or 1.0
    inverse = np.linalg.inv(covariance + RIDGE * unit * np.eye(len(covariance)))
    left, x = list(range(heads)), weight.copy()
    total = float(np.sum(weight * (covariance @ weight))) or 1.0
    order: list[int] = []
    losses = [0.0]
    while left:
        rows = {head: slice(head * size, (head + 1) * size) for head in left}
        solved = {head: np.linalg.solve(inverse[at, at], x[at]) for head, at in rows.items()}
        added = {head: float(np.sum(x[at] * solved[head])) for head, at in rows.items()}
        head = min(left, key=lambda h: added[h])
        at = rows[head]
        order.append(head)
        losses.append(losses[-1] + added[head] / total)
        x = x - inverse[:, at] @ solved[head]
        inverse = inverse - inverse[:, at] @ np.linalg.solve(inverse[at, at], inverse[at])
        left.remove(head)
    return Elimination(np.array(order), np.array(losses))


def eliminate_neurons(
    covariance: Float[np.ndarray, "F F"], weight: Float[np.ndarray, "F D"], step: int
) -> Elimination:
    """The same for the neurons of a feed-forward, ``step`` of them at once.

    Args:
        covariance: Of the neurons.
        weight: W_2.
    """
    count = len(covariance)
    unit = float(np.trace(covariance)) / count or 1.0
    inverse = np.linalg.inv(covariance + RIDGE * unit * np.eye(count))
    left, x = np.arange(count), weight.astype(np.float64)
    total = float(np.sum(weight * (covariance @ weight))) or 1.0
    order: list[int] = []
    losses = [0.0]
    while len(left):
        added = np.sum(x * x, axis=1) / np.maximum(np.diag(inverse), 1e-300)
        gone = np.argsort(added, kind="stable")[:step]
        stays = np.setdiff1d(np.arange(len(left)), gone)
        solved = np.linalg.solve(inverse[np.ix_(gone, gone)], x[gone])
        order += left[gone].tolist()
        losses.append(losses[-1] + float(np.sum(x[gone] * solved)) / total)
        across = inverse[np.ix_(stays, gone)]
        pull = np.linalg.solve(inverse[np.ix_(gone, gone)], across.T)
        x = x[stays] - across @ solved
        inverse = inverse[np.ix_(stays, stays)] - across @ pull
        left = left[stays]
    ends = np.minimum(step * np.arange(len(losses)), count)
    return Elimination(np.array(order), np.interp(np.arange(count + 1), ends, losses))
