"""The cost of an inference answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AnswerCost:
    """The cost of one inference answer; the v2 parameters of the answer have the same names.

    Attributes:
        tokens: Number of tokens without padding.
        out_of_calibration: Number of rows outside of the calibration data; None without such rows.
        macs, flops: Operations with padding; None if the graph cannot be counted.
        rss_bytes: Resident memory of this process.
        gpu_bytes: Memory in use on the whole device; None without a GPU.
    """

    queue_ms: float
    tokenize_ms: float
    compute_ms: float
    total_ms: float
    tokens: int
    padding_waste: float
    out_of_calibration: int | None
    macs: int | None
    flops: int | None
    rss_bytes: int
    gpu_bytes: int | None

    def to_json(self) -> dict[str, int | float]:
        """The values that are not None."""
        return {name: value for name, value in vars(self).items() if value is not None}
