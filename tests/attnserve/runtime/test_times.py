"""Speed-ups between models that were timed together, and times split by length."""

from __future__ import annotations

import numpy as np
import pytest

from attnserve.runtime.times import Times, paired_speedup


def constant(**milliseconds: float) -> Times[str]:
    return Times({shape: np.full(4, ms) for shape, ms in milliseconds.items()})


def test_paired_speedup_is_the_geometric_mean_of_median_ratios():
    """Drift of both models cancels, and the interval holds the value."""
    drift = np.array([1.0, 2.0, 1.5, 3.0])
    found = paired_speedup([8 * drift, 2 * drift], [4 * drift, 4 * drift])
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 1.0, 1.0))
    noisy = np.random.default_rng(0).normal(1.0, 0.02, 200)
    found = paired_speedup([1.1 * noisy], [np.ones(200)])
    assert found.low < found.value < found.high
    assert found.value == pytest.approx(1.1, rel=0.01)
    assert found.high - found.low < 0.02


def test_speedups_are_over_the_times_of_a_reference():
    reference, faster = constant(a=8, b=2), constant(b=1, a=1)  # the order of shapes is free
    assert reference.ms == pytest.approx(4)
    assert faster.speedup_over(reference).value == pytest.approx(4)
    by_shape = {shape: found.value for shape, found in faster.speedups_over(reference).items()}
    assert by_shape == pytest.approx({"a": 8, "b": 2})
    assert faster.at(["b"]).speedup_over(reference).value == pytest.approx(2)


def test_splits_take_longer_rows_from_the_other_times():
    short, long = constant(a=1, b=1, c=1), constant(a=2, b=2, c=2)
    splits = short.splits(long, {"a": 16, "b": 64, "c": 64})
    assert list(splits) == [32]
    assert {shape: ms[0] for shape, ms in splits[32].by_shape.items()} == {"a": 1, "b": 2, "c": 2}
    assert short.splits(long, dict.fromkeys("abc", 0)) == {}  # images have no tokens
