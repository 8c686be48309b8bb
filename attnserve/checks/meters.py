"""The meter of one output, by its measure."""

from __future__ import annotations

from attnserve.checks.measures import CosineMeter, FeaturesMeter, LogitsMeter, Meter
from attnserve.checks.relations import IndexMeter, OrderMeter, SimilarityMeter
from attnserve.literals import Measure, Pooling

__all__ = ["new_meter"]


def new_meter(
    measure: Measure,
    pooling: Pooling | None,
    window: int | None = None,
    dimensions: int | None = None,
) -> Meter:
    """The meter of one output.

    Args:
        pooling, dimensions: Pooling and size of the embeddings.
        window: Number of last batches to measure; None for all.
    """
    match measure:
        case "cosine":
            return CosineMeter(window)
        case "kl" | "top1":
            return LogitsMeter(measure, window)
        case "tau":
            return OrderMeter(window)
        case "similarity":
            return SimilarityMeter(pooling, window, dimensions)
        case "index":
            return IndexMeter(pooling, window, dimensions)
        case _:
            return FeaturesMeter(window)
