"""Time variants, interleaved with the original, and choose the fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from attnserve.limits import MIN_GAIN, MIN_LOSSLESS_GAIN, MIN_SPEEDUP
from attnserve.planning.served_graph.equality import shape_name
from attnserve.runtime.interface import Batch, Session, row_length
from attnserve.runtime.interleaved_timer import time_shapes, time_twice_if_slow
from attnserve.runtime.times import Times
from graph_passes.analysis.workload import Workload
from graph_passes.errors import Refusal

__all__ = [
    "ShapeTimer",
    "fastest",
    "lengths_of",
    "speed_refusal",
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


def timed_workloads(longest: int | None) -> list[Workload]:
    """The shapes of ``TIMED``, with lengths up to ``longest``."""
    shapes = [(batch, min(length, longest or length)) for batch, length in TIMED]
    return [Workload.of(*shape) for shape in dict.fromkeys(shapes)]


def time_variants(
    original: Session,
    variants: Sequence[Session],
    inputs: Sequence[Batch],
    timer: ShapeTimer = time_shapes,
) -> tuple[Times[str], Sequence[Times[str]]]:
    """Times of the original and of each variant.

    If a variant seems too slow at a shape, all are timed once more, and both runs count.
    """
    sessions = original, *variants
    runs = [[partial(session.run, None, feed) for feed in inputs] for session in sessions]
    seconds = TIMED_S * len(sessions) / 2
    indices = range(len(sessions))
    times = time_twice_if_slow(lambda: timer(runs, seconds), MIN_LOSSLESS_GAIN, indices)
    names = [shape_name(feed) for feed in inputs]
    first, *others = Times.of_models(names, times)
    return first, others


def fastest(
    original: Times[str], variants: Sequence[Times[str]], lengths: Mapping[str, int]
) -> int:
    """The index of the variant to run: the first, unless another is faster by ``MIN_GAIN``.

    Variants that are too slow are taken only if all are.

    Args:
        lengths: See ``lengths_of``.
    """
    indices = range(len(variants))
    accepted = [i for i in indices if not speed_refusal(original, variants[i], lengths)]
    best, *others = accepted or indices
    for index in others:
        if variants[index].speedup_over(variants[best]).low >= MIN_GAIN:
            best = index
    return best


def lengths_of(inputs: Sequence[Batch]) -> dict[str, int]:
    """The number of tokens of a row at each shape; 0 for inputs without tokens."""
    return {shape_name(feed): row_length(feed) or 0 for feed in inputs}


def speed_refusal(
    original: Times[str], times: Times[str], lengths: Mapping[str, int]
) -> Refusal | None:
    """Why a variant is not faster than the original; None if it is.

    Shapes at which the original itself runs do not count: it may be the part of a variant that runs
    short or long rows. At each length the mean over batch sizes counts: the runtime of a row
    depends on its own length only, and a runtime that is slower for one row may be faster for many.

    Args:
        lengths: See ``lengths_of``.
    """
    changed = [shape for shape, ms in original.by_shape.items() if times.by_shape[shape] is not ms]
    mean = times.at(changed).speedup_over(original).value if changed else 1.0
    if mean < MIN_LOSSLESS_GAIN:
        reason = f"the fused model runs {mean:.2f}x as fast, expected at least {MIN_LOSSLESS_GAIN}x"
        return Refusal("slow", reason)
    for length in sorted(set(lengths.values())):
        shapes = [shape for shape in times.by_shape if lengths[shape] == length]
        ratio = times.at(shapes).speedup_over(original)
        if ratio.high < MIN_SPEEDUP:
            return Refusal(
                "slow",
                f"the fused model runs {ratio.value:.2f}x as fast at {' and '.join(shapes)}, "
                f"expected at least {MIN_SPEEDUP}x",
            )
    return None
