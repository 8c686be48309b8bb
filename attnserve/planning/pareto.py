"""The fastest choice for every loss: one option for each part of a model, the least sum of times.

A choice loses what its options lose together and takes the time that they take together, so this is
a knapsack with one item of each kind (multiple-choice knapsack; Kellerer, Pferschy and Pisinger
2004, chapter 11). Parts are added one by one, and only choices stay that no other beats in both:
exact, where a greedy search would be caught by times that do not fall evenly (seven heads may take
longer than eight). Past ``MOST`` choices those that hardly differ in loss are thinned out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

__all__ = ["Choice", "Option", "pareto_front"]

MOST = 4000


class Option(Protocol):
    """One form of one part: what it loses (predicted, one minus the cosine), and its time."""

    @property
    def loss(self) -> float: ...
    @property
    def ms(self) -> float: ...


@dataclass(frozen=True)
class Choice:
    """An option for each part, by index."""

    loss: float
    ms: float
    picks: tuple[int, ...]


def pareto_front(parts: Sequence[Sequence[Option]], *, most: int = MOST) -> list[Choice]:
    """Every choice that no other beats, from the least loss (and most time) on.

    Raises:
        ValueError: A part has no option.
    """
    loss, ms = np.zeros(1), np.zeros(1)
    back: list[tuple[np.ndarray, np.ndarray]] = []
    for options in parts:
        if not options:
            raise ValueError("a part without options")
        losses = (loss[:, None] + [option.loss for option in options]).reshape(-1)
        times = (ms[:, None] + [option.ms for option in options]).reshape(-1)
        kept = _thinned(losses, _undominated(losses, times), most)
        back.append((kept // len(options), kept % len(options)))
        loss, ms = losses[kept], times[kept]
    return [Choice(float(loss[i]), float(ms[i]), _picks(back, i)) for i in range(len(loss))]


def _undominated(losses: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Indices by rising loss, each with less time than all before."""
    order = np.lexsort((times, losses))
    best = np.minimum.accumulate(times[order])
    first = np.concatenate([[True], best[1:] < best[:-1]])
    return order[first]


def _thinned(losses: np.ndarray, kept: np.ndarray, most: int) -> np.ndarray:
    """At most so many, evenly by the logarithm of their loss; of those alike the fastest."""
    if len(kept) <= most:
        return kept
    scale = np.log(np.maximum(losses[kept], 0.0) + 1e-9)
    cells = np.floor((scale - scale[0]) / (scale[-1] - scale[0]) * (most - 1)).astype(int)
    last = np.concatenate([cells[1:] != cells[:-1], [True]])  # the fastest of its cell
    last[0] = True
    return kept[last]


def _picks(back: Sequence[tuple[np.ndarray, np.ndarray]], index: int) -> tuple[int, ...]:
    picks: list[int] = []
    for states, options in reversed(back):
        picks.append(int(options[index]))
        index = int(states[index])
    return tuple(reversed(picks))
