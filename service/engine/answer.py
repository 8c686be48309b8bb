"""The outputs of a request and their cost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["Answer"]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Outputs and cost of a request.

    ``compute_ms`` is the time in which a part of the request ran, ``queue_ms`` the time in which it
    only waited. ``tokens`` excludes padding, ``padded_tokens`` includes it. ``macs`` is the share
    of the request in the MACs of its padded batches, None if they cannot be counted.
    ``batch_rows`` are the sizes of its batches.
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
