"""One length, or a range of lengths."""

from __future__ import annotations

import pytest

from attnserve.data.lengths import spread_lengths
from attnserve.options import Lengths


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [(128, (128,)), ((128, 128), (128,)), ((16, 512), (16, 91, 512)), ((1, 2), (1, 2))],
)
def test_spread_lengths_of_a_range_has_both_ends_and_the_geometric_mean(
    sequence: Lengths, expected: tuple[int, ...]
):
    assert spread_lengths(sequence) == expected
