"""The answer of an engine: its vectors or tensors, and its cost."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.engine.batcher import RequestResult

FollowUp = Callable[[], Awaitable[None]]
"""Callback after the answer was sent."""

RowOutputs = tuple[np.ndarray, ...]
"""The outputs of one row, each with a batch axis of size 1; a text has one (``run_task``)."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The cost of a request.

    ``tokens`` excludes padding, ``padded_tokens`` includes it. ``out_of_calibration`` counts the
    rows outside of the calibration data. ``follow_up`` is called after the answer was sent.
    """

    result: RequestResult[Any, RowOutputs]
    tokens: int
    padded_tokens: int
    out_of_calibration: int
    follow_up: FollowUp | None

    @property
    def runtimes(self) -> list[str]:
        """The names of the runtimes that computed the answer."""
        return list(dict.fromkeys(batch.result.runtime for batch, _ in self.result.batches))

    @property
    def macs(self) -> int | None:
        """The request's share of the MACs of the padded batches; None if MACs cannot be counted."""
        macs = 0
        for batch, count in self.result.batches:
            if batch.result.macs is None:
                return None
            macs += batch.result.macs * count // batch.rows
        return macs

    @property
    def padding_waste(self) -> float:
        """The fraction of ``padded_tokens`` that was padding."""
        return 1 - self.tokens / self.padded_tokens if self.padded_tokens else 0.0


@dataclass(frozen=True, kw_only=True)
class TensorAnswer(Answer):
    """The answer to a request of tensors: the requested outputs by name, and the cost."""

    outputs: Mapping[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class TextAnswer(Answer):
    """The answer to a request of texts: the vectors of the texts, and the cost.

    Attributes:
        vectors: One row per text, or per token of all texts; see ``Engine.run_task``.
        lengths: The number of tokens of each text.
    """

    vectors: np.ndarray
    lengths: Sequence[int]
