"""The bound on the bytes of open requests."""

from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from service.budget import Budget
from service.errors import DeadlineExceeded, Overloaded


@pytest.mark.parametrize("taken", [(60, 40), (1000,)])
def test_take_above_the_limit_is_refused_until_bytes_are_given_back(taken: tuple[int, ...]) -> None:
    """A free budget may be exceeded."""
    budget = Budget(100)
    for size in taken:
        budget.take(size)
    with pytest.raises(Overloaded):
        budget.take(1)
    budget.give_back(taken[-1])
    budget.take(1)


def test_a_lone_request_may_take_more_in_parts() -> None:
    budget = Budget(100)
    budget.take(90)
    budget.take(90, held=90)
    with pytest.raises(Overloaded):
        budget.take(1)  # of another request
    budget.give_back(180)
    budget.take(10)
    budget.take(20)  # of another request
    with pytest.raises(Overloaded):
        budget.take(90, held=10)


async def test_wait_is_served_in_the_order_of_arrival() -> None:
    """A small request does not overtake a large one, which would wait for ever."""
    order: list[int] = []
    budget = Budget(100)

    async def hold(size: int) -> None:
        await budget.wait(size, None)
        order.append(size)

    await budget.wait(90, None)
    tasks = [asyncio.create_task(hold(size)) for size in (80, 5, 10)]
    await asyncio.sleep(0.01)
    assert not order
    budget.give_back(90)
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    assert order == [80, 5, 10]


@pytest.mark.parametrize("end", ["deadline", "cancelled"])
async def test_wait_that_ends_leaves_the_turn_to_the_next(end: str) -> None:
    budget = Budget(100)
    await budget.wait(100, None)
    deadline = perf_counter() + 0.05 if end == "deadline" else None
    first = asyncio.create_task(budget.wait(50, deadline))
    second = asyncio.create_task(budget.wait(10, None))
    await asyncio.sleep(0.01)
    if end == "cancelled":
        first.cancel()
    with pytest.raises(DeadlineExceeded if end == "deadline" else asyncio.CancelledError):
        await first
    budget.give_back(100)
    await asyncio.wait_for(second, 10)
    budget.take(90)  # what the first one asked for is not held
