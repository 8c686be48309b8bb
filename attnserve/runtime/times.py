"""Times of models that were timed together, and the speed-ups between them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, FiniteFloat

from attnserve.intervals import bootstrap_interval

__all__ = ["Speedup", "Times", "paired_speedup"]

Shape = TypeVar("Shape", bound=Hashable)

RESAMPLES = 2000
"""Bootstrap samples of a speed-up."""


class Speedup(BaseModel):
    """A ratio of times with its 95 % interval; above 1 is faster. Records contain it as it is."""

    model_config = ConfigDict(extra="allow", frozen=True)

    value: FiniteFloat
    ci95: tuple[FiniteFloat, FiniteFloat]

    @property
    def low(self) -> float:
        """The lower end of the interval."""
        return self.ci95[0]

    @property
    def high(self) -> float:
        """The upper end of the interval."""
        return self.ci95[1]


@dataclass(frozen=True, eq=False)
class Times(Generic[Shape]):
    """Milliseconds of the runs of one model.

    Attributes:
        rounds: By shape, (rounds,). Models that are timed together have the same rounds.
    """

    rounds: Mapping[Shape, np.ndarray]

    @property
    def ms(self) -> float:
        """The geometric mean over shapes of the median of the rounds."""
        return math.exp(np.mean([np.log(np.median(ms)) for ms in self.rounds.values()]))

    def speedup_over(self, reference: Times[Shape]) -> Speedup:
        """The speed-up over another model; see ``paired_speedup``."""
        shapes = self.rounds.keys()
        return paired_speedup([reference.rounds[s] for s in shapes], [*self.rounds.values()])

    def speedups_over(self, reference: Times[Shape]) -> dict[Shape, Speedup]:
        """The speed-up over another model at each shape."""
        return {
            shape: self.at([shape]).speedup_over(reference.at([shape])) for shape in self.rounds
        }

    def at(self, shapes: Sequence[Shape]) -> Times[Shape]:
        """The times at some of the shapes."""
        return Times({shape: self.rounds[shape] for shape in shapes})

    def splits(self, long: Times[Shape], lengths: Mapping[Shape, int]) -> dict[int, Times[Shape]]:
        """The times if longer rows run elsewhere, by the number of tokens above which they do.

        That number is the geometric mean of two timed lengths.

        Args:
            long: The times of the long rows.
            lengths: Tokens of a row at each shape.
        """
        pairs = itertools.pairwise(sorted(set(lengths.values())))
        return {
            above: Times({
                shape: (long.rounds[shape] if lengths[shape] > above else ms)
                for shape, ms in self.rounds.items()
            })
            for above in (math.isqrt(shorter * longer) for shorter, longer in pairs)
        }  # fmt: skip


def paired_speedup(
    first: Sequence[np.ndarray], other: Sequence[np.ndarray], *, seed: int = 0
) -> Speedup:
    """The speed-up of a function over the first one, from samples of the same rounds.

    At each shape it is the median ratio of a round, so that drift cancels; over shapes it is the
    geometric mean. The interval is a bootstrap over the rounds of each shape.

    Args:
        first: Milliseconds of the first function by round, (rounds,), at each shape.
        other: Milliseconds of the other function, likewise.
        seed: Seed of the bootstrap.
    """
    log_ratios = [np.log(np.divide(a, b)) for a, b in zip(first, other, strict=True)]

    def mean_of_medians(*drawn: np.ndarray) -> np.ndarray:
        pairs = zip(log_ratios, drawn, strict=True)
        medians = [np.median(logs[rounds], axis=1) for logs, rounds in pairs]
        return np.mean(medians, axis=0)

    interval = bootstrap_interval(
        mean_of_medians, *map(len, log_ratios), seed=seed, resamples=RESAMPLES
    )
    value = np.mean([np.median(logs) for logs in log_ratios])
    return Speedup(value=float(np.exp(value)), ci95=(math.exp(interval[0]), math.exp(interval[1])))
