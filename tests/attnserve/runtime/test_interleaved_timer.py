"""The interleaved timer: order of samples, number of rounds and repeats."""

from __future__ import annotations

import itertools
import time
from functools import partial

import numpy as np
import pytest

from attnserve.runtime.interleaved_timer import (
    BENCHMARK,
    InterleavedTimer,
    Sampler,
    time_functions,
    time_shapes,
    time_twice_if_slow,
)


def test_measure_rounds_alternates_their_order():
    order: list[str] = []

    def named(name: str, seconds: float) -> Sampler:
        def sample(repeats: int) -> float:
            order.append(f"{name}{repeats}")
            return seconds

        return sample

    times = InterleavedTimer(0.1, 2, 2).time([named("a", 0.1), named("b", 0.04)], 0.0)
    assert order == ["a1"] * 3 + ["b1"] * 3 + ["a1", "b3", "b3", "a1"]
    np.testing.assert_allclose(times, [[100, 100], [40, 40]])


def test_measure_explicit_rounds_are_used_and_reported():
    done: list[tuple[int, int]] = []
    times = BENCHMARK.time(
        [lambda repeats: 1.0], 8.0, rounds=3, progress=lambda *step: done.append(step)
    )
    assert times.shape == (1, 3) and done == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize(
    ("round_seconds", "rounds"), [(1e-4, 200), (0.08, 100), (0.081, 98), (0.4, 20), (30.0, 20)]
)
def test_rounds_within_time_is_even_and_limited(round_seconds: float, rounds: int):
    assert BENCHMARK.rounds_within(8.0, round_seconds) == rounds


@pytest.mark.parametrize("by_shape", [False, True])
def test_time_of_a_slower_function_or_shape_is_longer(by_shape: bool):
    pair = [lambda: None, lambda: sum(range(20_000))]
    fast, slow = time_shapes([pair], 0.02) if by_shape else time_functions(pair, 0.02)
    assert np.median(slow) > 10 * np.median(fast) > 0


def test_time_shapes_changes_the_shape_before_each_run_of_a_model():
    runs: dict[str, list[int]] = {"a": [], "b": []}
    models = [[partial(runs[name].append, shape) for shape in (1, 2, 3)] for name in runs]
    times = time_shapes(models, 0.0, InterleavedTimer(1e-5, 4, 4))
    assert times.shape == (3, 2, 4) and (times > 0).all()
    for shapes in runs.values():
        assert all(shape != before for before, shape in itertools.pairwise(shapes))


def test_times_exclude_what_other_functions_do_to_the_caches():
    """The first run after another function is slow; none of the others is."""
    last = ""

    def run(name: str) -> None:
        nonlocal last
        time.sleep(0.02 if name != last else 0.0)
        last = name

    functions = [partial(run, "a"), partial(run, "b")]
    assert np.median(time_functions(functions, 0.0, InterleavedTimer(1e-5, 4, 4))) < 10
    models = [[function] * 2 for function in functions]
    assert np.median(time_shapes(models, 0.0, InterleavedTimer(1e-5, 4, 4))) < 10


@pytest.mark.parametrize(("least", "runs"), [(0.9, 1), (0.92, 2)])
def test_time_twice_if_slow_joins_two_runs_if_a_model_seems_slow_at_a_shape(
    least: float, runs: int
):
    """Of two models and their reference, the last is slower at the second of two shapes."""
    times: list[np.ndarray] = []

    def time_models() -> np.ndarray:
        times.append(np.full((2, 3, 4), 1.0 + len(times)))
        times[-1][1, 2] *= 1.1
        return times[-1]

    found = time_twice_if_slow(time_models, least, [0, 1, 2])
    np.testing.assert_array_equal(found, np.concatenate(times, axis=2))
    assert len(times) == runs and found.shape == (2, 3, 4 * runs)


@pytest.mark.parametrize(("other_ms", "runs"), [(1.0, 1), (1.2, 2)])
def test_time_twice_if_slow_compares_models_in_their_fastest_runtimes(other_ms: float, runs: int):
    """Two models in two runtimes; each is slow in one of them."""
    times = np.full((1, 4, 4), 1.0)
    times[0, 0], times[0, 2], times[0, 3] = 1.5, other_ms, 1.5
    found = time_twice_if_slow(lambda: times, 0.97, [0, 0, 1, 1])
    assert found.shape == (1, 4, 4 * runs)
