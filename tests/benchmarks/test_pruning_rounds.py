"""The sizes in benchmarks/pruning_rounds.py."""

from __future__ import annotations

import math

import pytest

from benchmarks.pruning_rounds import HEADS, NEURONS, shares


@pytest.mark.parametrize("rounds", [1, 2, 4])
@pytest.mark.parametrize("sizes", [HEADS, NEURONS])
def test_all_rounds_lead_to_the_same_size(rounds: int, sizes: tuple[int, int]):
    before, after = sizes
    removed = shares(rounds, sizes)
    assert len(removed) == rounds
    left = before * math.prod(1 - share for share in removed)
    assert left == pytest.approx(after, rel=1e-12)
