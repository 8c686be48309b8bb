"""Buckets: which runs are captured as CUDA graphs, and at which padded shape."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.serving.buckets import LARGEST, WASTE, Buckets, round_up

SIZES = st.integers(1, 200)
SHAPES = st.lists(st.tuples(SIZES, SIZES), max_size=60)


def test_round_up_gives_powers_of_two_and_their_one_and_a_half_fold():
    assert [round_up(size) for size in (1, 2, 3, 4, 5, 6, 7, 9, 13, 32, 33, 100, 129, 512)] == [
        1, 2, 3, 4, 6, 6, 8, 12, 16, 32, 48, 128, 192, 512,
    ]  # fmt: skip


@given(st.integers(1, 100_000))
def test_round_up_adds_less_than_half_and_is_idempotent(size: int):
    rounded = round_up(size)
    assert size <= rounded < 1.5 * size or (size, rounded) == (1, 1)
    assert round_up(rounded) == rounded


def test_choose_captures_bucket_at_second_use():
    buckets = Buckets(4)
    assert buckets.choose(5, 30) is None
    assert buckets.choose(6, 32) == (6, 32)  # the same bucket
    assert buckets.choose(5, 25) == (6, 32)
    assert buckets.captured == {(6, 32): 1}


def test_choose_when_full_uses_a_bucket_that_is_large_enough():
    buckets = Buckets(1)
    for _ in range(2):
        buckets.choose(1, 64)
    for _ in range(5):
        assert buckets.choose(1, 40) == (1, 64)
        assert buckets.choose(1, 32) == (1, 64)  # exactly twice as many tokens
        assert buckets.choose(1, 31) is None
        assert buckets.choose(2, 64) is None
    assert list(buckets.captured) == [(1, 64)]


def test_choose_without_capacity_or_above_the_largest_size_returns_none():
    without = Buckets(0)
    assert [without.choose(1, 8) for _ in range(3)] == [None] * 3
    buckets = Buckets(4)
    assert [buckets.choose(LARGEST // 128, 128) for _ in range(2)][1] == (LARGEST // 128, 128)
    assert [buckets.choose(LARGEST // 128 + 1, 128) for _ in range(3)] == [None] * 3


def test_choose_bucket_length_is_limited_to_positions():
    buckets = Buckets(4, longest=40)
    assert [buckets.choose(1, 33) for _ in range(2)] == [None, (1, 40)]
    assert [buckets.choose(1, 41) for _ in range(2)] == [None, (1, 41)]  # the model may refuse it


def test_choose_without_padding_matches_the_exact_shape():
    buckets = Buckets(1)
    exact = [buckets.choose(5, 30, more_rows=False, longer=False) for _ in range(2)]
    assert exact == [None, (5, 30)]
    assert buckets.choose(4, 30, more_rows=False, longer=False) is None
    assert buckets.choose(5, 29, more_rows=False, longer=False) is None
    assert buckets.choose(4, 30, longer=False) == (5, 30)
    assert buckets.choose(5, 29, more_rows=False) == (5, 30)


def test_refuse_removes_the_bucket_for_good():
    buckets = Buckets(2)
    for length in (8, 8, 64, 64):
        buckets.choose(1, length)
    buckets.refuse((1, 64))
    assert [buckets.choose(1, 64) for _ in range(3)] == [None] * 3
    assert [buckets.choose(1, 32) for _ in range(2)] == [None, (1, 32)]
    assert buckets.captured == {(1, 8): 1, (1, 32): 2}
    with pytest.raises(AssertionError):  # its graph was captured before
        buckets.refuse((1, 8))


@given(SHAPES, st.integers(0, 5), st.sampled_from([None, 50]), st.booleans(), st.booleans())
def test_choose_any_shapes_fit_their_buckets_and_captures_are_bounded(
    shapes: list[tuple[int, int]], most: int, longest: int | None, more_rows: bool, longer: bool
):
    buckets = Buckets(most, largest=1024, longest=longest)
    for batch, length in shapes * 3:
        before = dict(buckets.captured)
        bucket = buckets.choose(batch, length, more_rows=more_rows, longer=longer)
        assert len(buckets.captured) <= most
        assert before.items() <= buckets.captured.items(), "a captured graph stays"
        assert sorted(buckets.captured.values()) == list(range(1, len(buckets.captured) + 1))
        if bucket is None:
            continue
        rows, tokens = bucket
        assert bucket in buckets.captured
        assert rows >= batch if more_rows else rows == batch
        assert tokens >= length if longer else tokens == length
        assert rows * tokens <= min(1024, max(WASTE, 2.25) * batch * length)
        if longest is not None and length <= longest:
            assert tokens <= longest or not longer
