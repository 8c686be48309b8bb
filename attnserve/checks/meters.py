"""The meter of one output, by its measure."""

from __future__ import annotations

from attnserve.checks.measures import CosineMeter, FeaturesMeter, LogitsMeter, Meter
from attnserve.checks.relations import IndexMeter, OrderMeter, SimilarityMeter
from attnserve.literals import Measure
from attnserve.models.embeddings import BY_COSINE, Embedding

__all__ = ["new_meter"]


def new_meter(
    measure: Measure, embedding: Embedding = BY_COSINE, window: int | None = None
) -> Meter:
    """The meter of one output.

    Args:
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
            return SimilarityMeter(embedding, window)
        case "index":
            return IndexMeter(embedding, window)
        case _:
            return FeaturesMeter(window)
