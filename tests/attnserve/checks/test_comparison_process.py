"""The choice of the rows that are compared with the original model."""

from __future__ import annotations

from attnserve.checks.comparison_process import FIRST_ROWS, RowSampler


def test_sampler_takes_first_rows_at_a_higher_rate() -> None:
    sampler = RowSampler(0.005)
    taken = [sampler.is_next() for _ in range(4000)]
    assert sum(taken[:1600]) == FIRST_ROWS
    assert sum(taken[:2000]) == FIRST_ROWS + 2
    assert sum(taken[2000:]) == 10


def test_sampler_chooses_one_request_of_each_block() -> None:
    sampler = RowSampler(1 / 200, first_rows=0)
    taken = [sampler.is_next() for _ in range(2000)]
    assert all(sum(taken[at : at + 200]) == 1 for at in range(0, 2000, 200))
