"""The queue: selection of the rows of a batch."""

from __future__ import annotations

from collections import Counter
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.serving.padding import padded_length
from service.engine.row_queue import AnyRow, Division, Queue, Row
from tests.service.engine.rows import LENGTHS, row


def drained(queue: Queue) -> list[list[AnyRow]]:
    batches: list[list[AnyRow]] = []
    while len(queue):
        batches += queue.take()
    return batches


def filled(*tokens: int, budget: int = 100, overhead: int = 10, rows: int | None = None) -> Queue:
    queue = Queue(budget, overhead, rows)
    for one in tokens:
        queue.add(row(one))
    return queue


TAKEN: dict[str, tuple[Queue, list[list[int]]]] = {
    "equal rows fill the budget": (filled(*[25] * 9), [[25] * 4, [25] * 4, [25]]),
    "a row above the budget runs alone": (filled(101, 100, 1), [[101], [100], [1]]),
    "oldest row and neighbors by length": (
        filled(20, 90, 21, 1, 19),
        [[19, 20, 21], [90], [1]],
    ),
    "padding equal to the overhead": (filled(20, 30), [[20, 30]]),
    "padding above the overhead": (filled(20, 31), [[20], [31]]),
    "padding of two rows (6 each) above the overhead": (filled(20, 20, 26), [[20, 20], [26]]),
    "two rows at most": (filled(1, 1, 1, rows=2), [[1, 1], [1]]),
    "one row at most": (filled(1, 1, rows=1), [[1], [1]]),
}


@pytest.mark.parametrize(("queue", "batches"), TAKEN.values(), ids=TAKEN)
def test_queue_take_chooses_batches(queue: Queue, batches: list[list[int]]) -> None:
    assert [[one.tokens for one in batch] for batch in drained(queue)] == batches


DIVIDED: dict[str, tuple[Queue, int, list[list[int]]]] = {
    "equal rows": (filled(*[20] * 8, budget=500), 2, [[20] * 4, [20] * 4]),
    "batches of equal cost": (filled(*[20] * 3, 60, 61, budget=500), 2, [[60, 61], [20] * 3]),
    "more batches than runs": (
        filled(64, *[32] * 2, *[16] * 4, *[8] * 8, overhead=1),
        2,
        [[64], [32] * 2],
    ),
    "above the budget": (filled(*[20] * 80), 2, [[20] * 5]),
    "less than the cost of two runs": (filled(*[5] * 7), 2, [[5] * 7]),
    "more rows than a batch may have": (filled(*[20] * 6, rows=2), 2, [[20] * 2] * 2),
    "fewer rows than runs": (filled(60, overhead=0), 2, [[60]]),
}


@pytest.mark.parametrize(("queue", "runs", "batches"), DIVIDED.values(), ids=DIVIDED)
def test_queue_take_divides_rows_among_concurrent_runs(
    queue: Queue, runs: int, batches: list[list[int]]
) -> None:
    assert [[one.tokens for one in batch] for batch in queue.take(runs)] == batches


def test_queue_take_keeps_a_division_when_one_run_ends_before_the_other() -> None:
    queue = filled(*[28] * 14, *[32] * 4, *[40] * 7, *[48] * 5, overhead=1, budget=512)
    lengths = [[one.tokens for one in batch] for batch in queue.take(2)]
    while len(queue):
        [batch] = queue.take(1)
        lengths.append([one.tokens for one in batch])
    costs = [len(batch) * max(batch) for batch in lengths]
    assert len(costs) % 2 == 0 and max(costs) < 1.2 * sum(costs) / len(costs)


@pytest.mark.parametrize("change", ["add", "discard"])
def test_queue_take_divides_again_after_a_change(change: str) -> None:
    queue = filled(64, *[16] * 12, overhead=1, budget=500)
    assert [len(batch) for batch in queue.take(2)] == [1, 4]
    queue.add(row(16)) if change == "add" else queue.discard(queue.next)
    assert len(queue.take(1)[0]) == (9 if change == "add" else 7)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=9).map(sorted), batches=st.integers(1, 4))
def test_even_division_has_the_smallest_largest_batch(lengths: list[int], batches: int) -> None:
    division = Division.even(lengths, batches)
    assert sum(division.sizes) == len(lengths) and len(division.sizes) <= batches
    ends = range(1, len(lengths))
    candidates = (
        max((end - start) * lengths[end - 1] for start, end in pairwise((0, *cuts, len(lengths))))
        for cuts in combinations(ends, min(batches, len(lengths)) - 1)
    )
    assert division.padded_tokens == min(candidates)


@given(lengths=st.lists(LENGTHS, min_size=1, max_size=40).map(sorted), batches=st.integers(1, 8))
def test_even_division_counts_the_padding_of_the_runtime(lengths: list[int], batches: int) -> None:
    division = Division.even(lengths, batches, multiple=8)
    assert sum(division.sizes) == len(lengths) and len(division.sizes) <= batches
    ends = np.cumsum(division.sizes[::-1])  # shortest rows first
    costs = [
        rows * padded_length(rows, lengths[end - 1], 8)
        for rows, end in zip(division.sizes[::-1], ends, strict=True)
    ]
    assert max(costs) <= division.padded_tokens and all(cost % 8 == 0 for cost in costs)


def test_queue_take_separates_keys() -> None:
    queue = Queue(100, 100)
    for key in "abab":
        queue.add(row(5, key))
    assert [{one.key for one in batch} for batch in drained(queue)] == [{"a"}, {"b"}]


def test_queue_requests_take_turns() -> None:
    """A short request waits for one row of each other request, not for all of them."""
    queue = Queue(10, 0)
    for request, rows in (("a", 4), ("b", 3), ("c", 1)):
        for _ in range(rows):
            queue.add(Row("text", 10, None, request=request))
    assert "".join(one.request for batch in drained(queue) for one in batch) == "abcababa"


def test_queue_discard_twice_removes_row_once() -> None:
    queue, middle = filled(3), row(4)
    queue.add(middle)
    queue.add(row(5))
    queue.discard(middle)
    queue.discard(middle)
    assert queue.tokens == 8
    assert [[one.tokens for one in batch] for batch in drained(queue)] == [[3, 5]]
    queue.discard(middle)
    assert (len(queue), queue.tokens) == (0, 0)


@given(
    arrivals=st.lists(st.tuples(LENGTHS, st.sampled_from("ab")) | st.none(), max_size=80),
    budget=st.integers(1, 120),
    overhead=st.integers(0, 60),
    max_rows=st.none() | st.integers(1, 5),
)
@settings(deadline=None)
def test_queue_any_arrivals_keep_invariants(
    arrivals: list[tuple[int, str] | None], budget: int, overhead: int, max_rows: int | None
) -> None:
    """``None`` among the arrivals is a slot that becomes free."""
    queue = Queue(budget, overhead, max_rows)
    waiting: list[AnyRow] = []
    seen: Counter[int] = Counter()

    def take() -> None:
        [batch] = queue.take()
        longest = max(one.tokens for one in batch)
        assert waiting[0] in batch  # nobody starves
        assert len(batch) == 1 or len(batch) * longest <= budget
        assert max_rows is None or len(batch) <= max_rows
        assert len({one.key for one in batch}) == 1
        assert [one.tokens for one in batch] == sorted(one.tokens for one in batch)
        assert len(batch) * longest - sum(one.tokens for one in batch) <= overhead * len(batch)
        for one in batch:
            seen[id(one)] += 1
            waiting.remove(one)
        assert len(queue) == len(waiting)
        assert queue.tokens == sum(one.tokens for one in waiting)

    rows: list[AnyRow] = []
    for arrival in arrivals:
        if arrival is not None:
            rows.append(row(*arrival))
            queue.add(rows[-1])
            waiting.append(rows[-1])
        elif waiting:
            take()
    while waiting:
        take()
    assert seen == Counter(map(id, rows))  # every row, once
