"""The choice of the rows that are compared with the original model."""

from __future__ import annotations

from attnserve.serving.comparison_process import FIRST_ROWS, RowSampler


def test_sampler_takes_first_rows_at_a_higher_rate() -> None:
    sampler = RowSampler(0.005)
    taken = [sampler.is_next() for _ in range(4000)]
    assert sum(taken[:1600]) == FIRST_ROWS
    assert sum(taken[:2000]) == FIRST_ROWS + 2
    assert sum(taken[2000:]) == 10


def test_sampler_chooses_one_request_of_each_block() -> None:
    sampler = RowSampler(0.005)
    for size, blocks in (25, FIRST_ROWS), (200, 10):
        taken = [[sampler.is_next() for _ in range(size)] for _ in range(blocks)]
        assert [sum(block) for block in taken] == [1] * blocks


def test_samplers_of_several_processes_share_the_first_rows() -> None:
    sampler = RowSampler(0.005, samplers=2)
    taken = [sampler.is_next() for _ in range(1200)]
    assert sum(taken[:800]) == FIRST_ROWS // 2 and sum(taken[800:]) == 2
