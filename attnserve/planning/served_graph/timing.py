"""Time variants, interleaved with the original, and choose the fastest."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from attnserve.limits import MIN_GAIN, MIN_LOSSLESS_GAIN, MIN_SPEEDUP
from attnserve.planning.served_graph.equality import shape_name
from attnserve.runtime.interface import Batch, Session, row_length
from attnserve.runtime.interleaved_timer import (
    Speedup,
    paired_speedup,
    time_shapes,
    time_twice_if_slow,
)
from graph_passes.analysis.workload import Workload
from graph_passes.errors import Refusal

__all__ = [
    "ShapeTimer",
    "Times",
    "by_shape",
    "fastest",
    "speed_refusal",
    "speedup",
    "splits",
    "time_variants",
    "timed_workloads",
]

TIMED = ((1, 16), (8, 16), (1, 64), (1, 128), (1, 384))
"""(batch, sequence) at which the variants are timed, if the model accepts them; no length is above
the longest that is served. Fused attention gains most at the longest."""

TIMED_S = 1.6
"""Approximate time of all measurements of two variants."""

ShapeTimer = Callable[[Sequence[Sequence[Callable[[], object]]], float], np.ndarray]
"""Times functions as ``time_shapes`` does."""

Times = Mapping[str, np.ndarray]
"""Milliseconds of a model by shape, (rounds,); the rounds of all models are the same."""


def timed_workloads(longest: int | None) -> list[Workload]:
    """The shapes of ``TIMED``, with lengths up to ``longest``."""
    shapes = [(batch, min(length, longest or length)) for batch, length in TIMED]
    return [Workload.of(*shape) for shape in dict.fromkeys(shapes)]


def time_variants(
    original: Session,
    variants: Sequence[Session],
    inputs: Sequence[Batch],
    timer: ShapeTimer = time_shapes,
) -> tuple[Times, Sequence[Times]]:
    """Times of the original and of each variant.

    If a variant seems too slow at a shape, all are timed once more, and both runs count.
    """
    sessions = original, *variants
    runs = [[partial(session.run, None, feed) for feed in inputs] for session in sessions]
    seconds = TIMED_S * len(sessions) / 2
    times = time_twice_if_slow(lambda: timer(runs, seconds), MIN_LOSSLESS_GAIN)
    names = [shape_name(feed) for feed in inputs]
    first, *others = (dict(zip(names, rows, strict=True)) for rows in times.swapaxes(0, 1))
    return first, others


def speedup(before: Times, after: Times) -> Speedup:
    """The speed-up over all shapes."""
    return paired_speedup(list(before.values()), list(after.values()))


def by_shape(before: Times, after: Times) -> dict[str, Speedup]:
    """The speed-up at each shape."""
    return {shape: paired_speedup([before[shape]], [after[shape]]) for shape in before}


def splits(short: Times, long: Times, inputs: Sequence[Batch]) -> dict[int, Times]:
    """The times of a model that runs rows above a length as ``long``, by that length.

    Each length is the geometric mean of two timed lengths. Inputs without tokens give none.
    """
    lengths = {shape_name(feed): row_length(feed) or 0 for feed in inputs}
    pairs = itertools.pairwise(sorted(set(lengths.values())))
    return {
        above: {shape: (long if lengths[shape] > above else short)[shape] for shape in short}
        for above in (math.isqrt(shorter * longer) for shorter, longer in pairs)
    }


def fastest(original: Times, variants: Sequence[Times]) -> int:
    """The index of the variant to run: the first, unless another is faster by ``MIN_GAIN``.

    Variants that are too slow are taken only if all are.
    """
    indices = range(len(variants))
    best, *others = [i for i in indices if not speed_refusal(original, variants[i])] or indices
    for index in others:
        if speedup(variants[best], variants[index]).low >= MIN_GAIN:
            best = index
    return best


def speed_refusal(original: Times, times: Times) -> Refusal | None:
    """Why a variant is not faster than the original; None if it is.

    Shapes at which the original itself runs do not count: it may be the part of a variant that runs
    short or long rows.
    """
    changed = [shape for shape in original if times[shape] is not original[shape]]
    before, after = ({shape: each[shape] for shape in changed} for each in (original, times))
    mean = speedup(before, after).value if changed else 1.0
    if mean < MIN_LOSSLESS_GAIN:
        reason = f"the fused model runs {mean:.2f}x as fast, expected at least {MIN_LOSSLESS_GAIN}x"
        return Refusal("slow", reason)
    for shape, ratio in by_shape(original, times).items():
        if ratio.high < MIN_SPEEDUP:
            return Refusal(
                "slow",
                f"the fused model runs {ratio.value:.2f}x as fast at {shape}, expected at least "
                f"{MIN_SPEEDUP}x",
            )
    return None
