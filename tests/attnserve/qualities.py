"""Qualities and comparisons with given values."""

from __future__ import annotations

from typing import Any

from attnserve.literals import Measure
from attnserve.models.measured import Fidelity, Losses, Quality

__all__ = ["fidelity_of", "quality_of"]


def quality_of(measure: Measure, value: float, **fields: Any) -> Quality:
    """A quality whose percentile and bounds are its value, of 60 rows without an interval."""
    usual: dict[str, Any] = {
        "lower": value, "p5": value, "ci95": None, "constant": 0.0, "rows": 60,
        "losses": Losses(1 - value, 1 - value),
    }  # fmt: skip
    return Quality(measure=measure, value=value, **{**usual, **fields})


def fidelity_of(*qualities: Quality, data: str = "held out of text.txt") -> Fidelity:
    """A comparison with these qualities and equal outputs."""
    return Fidelity(
        outputs=(), mean_cosine=1.0, min_cosine=1.0, data=data, qualities=qualities,
        is_held_out=data.startswith("held out"),
    )  # fmt: skip
