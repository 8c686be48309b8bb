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
        by_shape: The milliseconds of each round, (rounds,). Models that are timed together have the
            same rounds.
    """

    by_shape: Mapping[Shape, np.ndarray]

    @classmethod
    def of_models(cls, shapes: Sequence[Shape], ms: np.ndarray) -> list[Times[Shape]]:
        """The times of each model, from milliseconds (shapes, models, rounds)."""
        return [cls(dict(zip(shapes, of_model, strict=True))) for of_model in ms.swapaxes(0, 1)]

    @property
    def ms(self) -> float:
        """The geometric mean over shapes of the median of the rounds."""
        return math.exp(np.mean([np.log(np.median(ms)) for ms in self.by_shape.values()]))

    def speedup_over(self, reference: Times[Shape]) -> Speedup:
        """The speed-up over another model at the shapes of these times (``paired_speedup``)."""
        before = [reference.by_shape[shape] for shape in self.by_shape]
        return paired_speedup(before, list(self.by_shape.values()))

    def speedups_over(self, reference: Times[Shape]) -> dict[Shape, Speedup]:
        """The speed-up over another model at each shape."""
        return {shape: self.at([shape]).speedup_over(reference) for shape in self.by_shape}

    def at(self, shapes: Sequence[Shape]) -> Times[Shape]:
        """The times at some of the shapes."""
        return Times({shape: self.by_shape[shape] for shape in shapes})

    def splits(self, long: Times[Shape], lengths: Mapping[Shape, int]) -> dict[int, Times[Shape]]:
        """The times of short rows from here and of long rows from ``long``.

        Keys are the lengths above which a row is long: the geometric means of two neighboring timed
        lengths. With one length, as of inputs without tokens, there are none.

        Args:
            lengths: Tokens of a row at each shape.
        """
        pairs = itertools.pairwise(sorted(set(lengths.values())))
        return {
            above: Times(
                {
                    shape: long.by_shape[shape] if lengths[shape] > above else ms
                    for shape, ms in self.by_shape.items()
                }
            )
            for above in (math.isqrt(shorter * longer) for shorter, longer in pairs)
        }


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
