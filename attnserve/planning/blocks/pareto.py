"""Pareto front of loss and time over one configuration for each part of a model.

Losses and times of the parts add up: this is a multiple-choice knapsack problem (Kellerer,
Pferschy and Pisinger 2004, chapter 11). Parts are added one by one, and dominated choices are
dropped. This is exact; a greedy search would fail where times are not convex (seven heads may
take longer than eight). Beyond ``MOST`` choices, those with nearly equal loss are thinned out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Choice", "pareto_front"]

MOST = 4000


@dataclass(frozen=True)
class Choice:
    """A configuration for each part.

    Attributes:
        loss, ms: The sums of the predicted losses and times of the parts.
        picks: The configuration of each part, by index.
    """

    loss: float
    ms: float
    picks: tuple[int, ...]


def pareto_front(
    parts: Sequence[Sequence[tuple[float, float]]], *, most: int = MOST
) -> list[Choice]:
    """Every choice that no other choice beats in both loss and time, by rising loss.

    Args:
        parts: The predicted (loss, time) of each configuration of each part.

    Raises:
        ValueError: A part has no configuration.
    """
    loss, ms = np.zeros(1), np.zeros(1)
    back: list[tuple[np.ndarray, np.ndarray]] = []
    for configs in parts:
        if not configs:
            raise ValueError("a part without configurations")
        added = np.array(configs)
        losses = (loss[:, None] + added[:, 0]).reshape(-1)
        times = (ms[:, None] + added[:, 1]).reshape(-1)
        kept = _thinned(losses, _undominated(losses, times), most)
        back.append((kept // len(configs), kept % len(configs)))
        loss, ms = losses[kept], times[kept]
    return [Choice(float(loss[i]), float(ms[i]), _picks(back, i)) for i in range(len(loss))]


def _undominated(losses: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Indices by rising loss, each with less time than all before."""
    order = np.lexsort((times, losses))
    best = np.minimum.accumulate(times[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return order[first]


def _thinned(losses: np.ndarray, kept: np.ndarray, most: int) -> np.ndarray:
    """The first, and at most ``most`` others, evenly by the logarithm of their loss."""
    if len(kept) <= most:
        return kept
    scale = np.log(np.maximum(losses[kept], 0.0) + 1e-9)
    cells = np.floor((scale - scale[0]) / (scale[-1] - scale[0]) * (most - 1)).astype(int)
    last = np.concatenate([cells[1:] != cells[:-1], [True]])  # the fastest of its cell
    last[0] = True
    return kept[last]


def _picks(back: Sequence[tuple[np.ndarray, np.ndarray]], index: int) -> tuple[int, ...]:
    picks: list[int] = []
    for states, configs in reversed(back):
        picks.append(int(configs[index]))
        index = int(states[index])
    return tuple(reversed(picks))
