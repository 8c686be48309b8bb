"""Latencies at the workloads of a search."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnserve.limits import MIN_SPEEDUP

__all__ = ["Latencies"]


@dataclass(frozen=True)
class Latencies:
    """Milliseconds of a part of a model, or milliseconds that a rewrite saves.

    Attributes:
        requested: At each target workload.
        extremes: At each other timed workload, of a short and of a long length.
    """

    requested: tuple[float, ...]
    extremes: tuple[float, ...] = ()

    @classmethod
    def total(cls, parts: Sequence[Latencies]) -> Latencies:
        """The sum over parts that run one after another; at least one part."""
        return cls(
            tuple(np.sum([part.requested for part in parts], axis=0).tolist()),
            tuple(np.sum([part.extremes for part in parts], axis=0).tolist()),
        )

    @property
    def mean(self) -> float:
        """The mean over the target workloads."""
        return float(np.mean(self.requested))

    def saved_over(self, other: Latencies) -> Latencies:
        """The milliseconds that this saves over another."""
        return Latencies(
            tuple(b - a for a, b in zip(self.requested, other.requested, strict=True)),
            tuple(b - a for a, b in zip(self.extremes, other.extremes, strict=True)),
        )

    def keeps_up_with(self, other: Latencies) -> bool:
        """Whether its speed-up over another is at least ``MIN_SPEEDUP`` at every workload."""
        return all(MIN_SPEEDUP * a <= b for a, b in zip(self, other, strict=True))

    def __iter__(self) -> Iterator[float]:
        """The milliseconds at all workloads, the target workloads first."""
        yield from self.requested
        yield from self.extremes
