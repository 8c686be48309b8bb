"""Limits shared by the search and lossless operator fusion."""

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
"""Remaining neurons are a multiple of this, the number of floats in a vector register."""

MIN_SPEEDUP = 0.97
"""The lowest accepted speed-up of a whole model at any timed length."""

MAX_BLOCK_SLOWDOWN = 1.03
"""The highest accepted time of a block at any length, relative to the exported block. It keeps the
whole model above ``MIN_SPEEDUP``."""

MIN_GAIN = 1.01
"""Minimum mean speed-up of a lossy model."""

MIN_REMOVAL_GAIN = 1.03
"""Minimum speed-up of a removal over the fused original in the same precision, at the lower end of
its 95 % interval."""

MIN_LOSSLESS_GAIN = 1.02
"""The lowest mean speed-up for which the service replaces a model by its fused form."""
