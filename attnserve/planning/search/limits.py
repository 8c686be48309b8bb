"""Limits that the planner and the lossless fusion share."""

from __future__ import annotations

__all__ = [
    "MAX_BLOCK_SLOWDOWN",
    "MIN_GAIN",
    "MIN_LOSSLESS_GAIN",
    "MIN_REMOVAL_GAIN",
    "MIN_SPEEDUP",
    "MULTIPLE",
]

MULTIPLE = 8
"""The number of remaining neurons is a multiple of this, the floats of a vector register."""

MIN_SPEEDUP = 0.97
"""The lowest accepted speed-up of a whole model at any timed length."""

MAX_BLOCK_SLOWDOWN = 1.03
"""The highest accepted time of a block at any length, relative to the exported block. It keeps the
whole model above ``MIN_SPEEDUP``."""

MIN_GAIN = 1.01
"""The lowest mean speed-up for which a lossy model is worth its loss."""

MIN_REMOVAL_GAIN = 1.03
"""The lowest speed-up over the fused original in the same precision for which something is removed,
at the lower end of its 95 % interval."""

MIN_LOSSLESS_GAIN = 1.02
"""The lowest mean speed-up for which the service replaces a model by its fused form."""
