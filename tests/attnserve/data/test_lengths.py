"""One length, or a range of lengths."""

from __future__ import annotations

import pytest

from attnserve.data.lengths import Lengths, check_lengths, spread_lengths
from graph_passes.errors import InvalidArgument
from tests.errors import raises


@pytest.mark.parametrize(
    ("sequence", "expected"),
    [(128, (128,)), ((128, 128), (128,)), ((16, 512), (16, 91, 512)), ((1, 2), (1, 2))],
)
def test_spread_lengths_of_a_range_has_both_ends_and_the_geometric_mean(
    sequence: Lengths, expected: tuple[int, ...]
):
    check_lengths(sequence)
    assert spread_lengths(sequence) == expected


@pytest.mark.parametrize("sequence", [0, -1, (0, 5), (512, 16)])
def test_check_lengths_refuses_what_is_no_range(sequence: Lengths):
    with raises(InvalidArgument, "sequence.range"):
        check_lengths(sequence)
