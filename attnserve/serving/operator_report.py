"""The report of a loaded model's operators, as JSON: the fused ones, or why there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

__all__ = ["NOT_REWRITTEN", "PENDING", "Fused", "OperatorReport", "Unfused", "unfused"]


class Fused(TypedDict):
    """A model with fused operators; see ``planning.served_graph.lossless.FusionReport``."""

    rewritten: Literal[True]
    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float
    speedups: Mapping[str, float]
    kept: Sequence[str]
    runtime: NotRequired[str]
    long_rows: NotRequired[Mapping[str, Any] | None]
    refused: NotRequired[Mapping[str, str]]


class Unfused(TypedDict):
    """A model that runs as it was exported, and why; ``pending`` until a fusion has ended."""

    rewritten: Literal[False]
    why: str
    pending: NotRequired[Literal[True]]


OperatorReport = Fused | Unfused


def unfused(why: str) -> Unfused:
    """The report of a model without fused operators."""
    return {"rewritten": False, "why": why}


NOT_REWRITTEN = unfused("operator fusion is off")

PENDING: Unfused = {
    "rewritten": False,
    "pending": True,
    "why": "operator fusion is being tried in the background",
}
"""The report of a model until the fusion has ended."""
