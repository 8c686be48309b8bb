"""What a request gets: its outputs, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Answer"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was computed, and what it cost.

    ``compute_ms`` is the time in which a part of the request ran, ``queue_ms`` the time in which it
    only waited. ``tokens`` are without padding, ``padded_tokens`` with it; ``macs`` are the share
    of the request in its batches at their true (padded) shapes, None where the graph cannot be
    counted. ``batch_rows`` are the sizes of the batches that it ran in.
    """

    outputs: dict[str, np.ndarray]
    queue_ms: float
    tokenize_ms: float = 0.0
    compute_ms: float
    tokens: int
    padded_tokens: int
    macs: int | None
    batch_rows: tuple[int, ...] = ()

    @property
    def padding_waste(self) -> float:
        """The fraction of ``padded_tokens`` that was padding."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0
