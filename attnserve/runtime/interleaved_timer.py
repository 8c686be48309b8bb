"""Time several functions fairly on a machine whose speed drifts.

Every round takes one sample of each function, and rounds alternate the order (A B, B A, ...). Drift
of the clock and load from other processes thus affect all functions equally, and the ratio of two
samples of one round cancels it.

A server runs one model again and again, so that its weights stay in the caches. Each sample
therefore begins with a run that is not timed: the functions before it have filled the caches with
other weights, and for MiniLM loading them again takes longer than a row of 16 tokens.

Rows of different lengths follow each other. Some runtimes prepare the graph again whenever the
shape changes: in OpenVINO 2026.2 that takes about as long as a short row.
Served models are therefore timed with a change of the shape before each run (``time_shapes``).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

__all__ = [
    "BENCHMARK",
    "QUICK",
    "InterleavedTimer",
    "Sampler",
    "sampler",
    "shape_sampler",
    "time_functions",
    "time_shapes",
    "time_twice_if_slow",
]

Sampler = Callable[[int], ArrayLike]
"""Runs a function once, then a number of times, and returns the mean seconds per run of the latter:
one number, or one for each of its shapes, (shapes,)."""


@dataclass(frozen=True)
class InterleavedTimer:
    """Settings of interleaved timing.

    Attributes:
        sample_seconds: A sample repeats a faster function up to about this time.
        min_rounds: Minimum number of rounds, even.
        max_rounds: Maximum number of rounds, even.
    """

    sample_seconds: float
    min_rounds: int
    max_rounds: int

    def time(
        self,
        samplers: Sequence[Sampler],
        seconds: float,
        *,
        rounds: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> np.ndarray:
        """Milliseconds per run: float64 (functions, rounds), or (functions, rounds, shapes).

        Args:
            samplers: One for each function.
            seconds: Approximate total time, which determines the number of rounds.
            rounds: The number of rounds instead.
            progress: Called after each round.
        """
        repeats: list[int] = []
        round_seconds = 0.0
        first = np.zeros(())
        for sample in samplers:
            first = np.asarray(sample(1))  # allocates memory and selects kernels
            start = time.perf_counter()
            call_seconds = min(float(np.sum(sample(1))) for _ in range(2))
            sample_seconds = (time.perf_counter() - start) / 2
            repeats.append(max(1, math.ceil(self.sample_seconds / call_seconds)))
            round_seconds += sample_seconds + (repeats[-1] - 1) * call_seconds
        count = rounds or self.rounds_within(seconds, round_seconds)
        times = np.empty((len(samplers), count, *first.shape))
        order = range(len(samplers))
        for index in range(count):
            for i in reversed(order) if index % 2 else order:
                times[i, index] = np.multiply(1e3, samplers[i](repeats[i]))
            if progress is not None:
                progress(index + 1, count)
        return times

    def rounds_within(self, seconds: float, round_seconds: float) -> int:
        """An even number of rounds, so that both orders have equal weight."""
        rounds = int(min(seconds / round_seconds, self.max_rounds))
        return max(rounds - rounds % 2, self.min_rounds)


BENCHMARK = InterleavedTimer(sample_seconds=2e-3, min_rounds=20, max_rounds=200)
"""Timer for reported results."""

QUICK = InterleavedTimer(sample_seconds=5e-4, min_rounds=8, max_rounds=80)
"""Timer for many small comparisons, as in the search."""


def sampler(function: Callable[[], object]) -> Callable[[int], float]:
    """Sample a function in this process."""

    def sample(repeats: int) -> float:
        function()
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    return sample


def time_functions(
    functions: Sequence[Callable[[], object]], seconds: float, timer: InterleavedTimer = QUICK
) -> np.ndarray:
    """Milliseconds per run of functions in this process: float64 (functions, rounds)."""
    return timer.time([sampler(function) for function in functions], seconds)


def shape_sampler(functions: Sequence[Callable[[], object]]) -> Callable[[int], np.ndarray]:
    """Sample a model at several shapes in turn: seconds (shapes,).

    Args:
        functions: Runs the model once, at each shape.
    """

    def sample(repeats: int) -> np.ndarray:
        seconds = np.zeros(len(functions))
        functions[1 % len(functions)]()  # not the first one: its shape would not change
        for _ in range(repeats):
            for shape, function in enumerate(functions):
                start = time.perf_counter()
                function()
                seconds[shape] += time.perf_counter() - start
        return seconds / repeats

    return sample


def time_shapes(
    models: Sequence[Sequence[Callable[[], object]]],
    seconds: float,
    timer: InterleavedTimer = QUICK,
) -> np.ndarray:
    """Milliseconds per run of models whose shape changes at each run: (shapes, models, rounds).

    Args:
        models: Functions that run a model once at each shape, of each model.
        seconds: Approximate time of all runs.
    """
    times = timer.time([shape_sampler(functions) for functions in models], seconds)
    return times.transpose(2, 0, 1)


def time_twice_if_slow(
    time_models: Callable[[], np.ndarray], min_speedup: float, model_of: Sequence[int]
) -> np.ndarray:
    """Milliseconds per run of models; those of two runs if a model seems slow in the first one.

    The times of a few rounds may be wrong by some percent. All shapes are timed again, because some
    runtimes are slower after a change of the shape.

    Args:
        time_models: Times models in runtimes, the reference first: (shapes, pairs, rounds).
        min_speedup: A model seems slow if its median speed-up over the reference is lower at
            a shape, each in its fastest runtime.
        model_of: The index of the model of each pair; that of the reference is 0.
    """
    times = time_models()
    of_model = np.array(model_of)
    ms = [times[:, of_model == index].min(axis=1) for index in range(max(model_of) + 1)]
    speedups = np.array([np.median(ms[0] / other, axis=1) for other in ms[1:]])
    return np.concatenate([times, time_models()], 2) if (speedups < min_speedup).any() else times
