"""The thresholds of speed-ups that count as a gain, and of allowed losses.

Speed-ups are ratios of times, above 1 if the new model is faster. A loss is 1 minus a quality.
"""

from __future__ import annotations

__all__ = [
    "LOW_QUALITY",
    "MIN_GAIN",
    "MIN_LOSSLESS_GAIN",
    "MIN_REMOVAL_GAIN",
    "MIN_SPEEDUP",
    "ROUNDING",
    "SAME_ERROR",
    "SAME_MS",
    "SELECTION_CONFIDENCE",
    "TAIL",
]

# ---- speed -----------------------------------------------------------------------------------

MIN_GAIN = 1.01
"""The lowest speed-up that counts as a gain; a lower one may be noise of the timings. A fused model
is faster than another one if the lower end of the 95 % interval of their speed-up is at least
``MIN_GAIN``."""

SAME_MS = 1.02
"""The highest ratio of two predicted times of models that count as equally fast, so that only the
one with less loss is a candidate. A prediction adds up the times of blocks, and is less exact than
``MIN_GAIN``."""

MIN_LOSSLESS_GAIN = 1.02
"""The lowest mean speed-up for which the service replaces a model by a fused model. It is above
``MIN_GAIN``, because the fused model needs another file and another check."""

MIN_REMOVAL_GAIN = 1.03
"""The lowest speed-up that is worth a loss of quality. A model with removed heads or neurons must
have it over the fused original in the same precision, at the lower end of the 95 % interval. A
block with shared dimensions must have it over separate dimensions, before its loss is measured."""

MIN_SPEEDUP = 0.97
"""The lowest accepted speed-up at a single length. It is below 1, so that noise at one length does
not reject a model. It applies to a model over its original, and to a block over the exported block.
For fused models and for a mixing, it is a limit of the upper end of the 95 % interval."""

# ---- quality ---------------------------------------------------------------------------------

ROUNDING = 1e-4
"""A loss or relative error below ``ROUNDING`` comes from rounding: no goal and no guarantee is
closer to 1."""

TAIL = 5
"""Maximum loss of the worst 5 % of texts, relative to the allowed loss. The 95th percentile of
exponential losses is three times their mean."""

SELECTION_CONFIDENCE = 0.8
"""Confidence of the bounds that select a choice. The reported result is the verification on
held-out data: a higher confidence would cost speed, a lower one would make more verifications
fail."""

SAME_ERROR = 1.02
"""The highest error of a mixing, relative to dense mixing, that counts as equal."""

LOW_QUALITY = 0.9
"""The quality below which a warning is given; constant predictors have a lower quality."""
