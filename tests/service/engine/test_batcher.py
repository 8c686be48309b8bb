"""Queue and Batcher: selection of rows, deadlines, cancellation, failures."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Hashable
from time import perf_counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.batcher import Batch, Batcher, BatchResult, Queue, Row
from service.errors import DeadlineExceeded, ModelFailed, NotReady, OutOfMemory, Overloaded

LENGTHS = st.integers(1, 40)


def row(tokens: int, key: Hashable = "text", payload: Any = None) -> Row:
    return Row(key, tokens, payload)


def drained(queue: Queue) -> list[list[Row]]:
    batches: list[list[Row]] = []
    while len(queue):
        batches.append(queue.take())
    return batches


def lengths(batches: list[list[Row]]) -> list[list[int]]:
    return [[one.tokens for one in batch] for batch in batches]


# -- which rows run together ----------------------------------------------------------------------


def filled(*tokens: int, budget: int = 100, overhead: int = 10, rows: int | None = None) -> Queue:
    queue = Queue(budget, overhead, rows)
    for one in tokens:
        queue.add(row(one))
    return queue


def test_queue_take_equal_rows_fill_the_budget() -> None:
    assert lengths(drained(filled(*[25] * 9))) == [[25] * 4, [25] * 4, [25]]


def test_queue_take_row_above_the_budget_runs_alone() -> None:
    assert lengths(drained(filled(101, 100, 1))) == [[101], [100], [1]]


def test_queue_take_returns_oldest_row_and_neighbors_by_length() -> None:
    assert lengths(drained(filled(20, 90, 21, 1, 19))) == [[19, 20, 21], [90], [1]]


def test_queue_take_padding_above_overhead_splits_batch() -> None:
    """A row joins where its padding costs no more than a run of its own: exactly that, still."""
    assert lengths(drained(filled(20, 30))) == [[20, 30]]
    assert lengths(drained(filled(20, 31))) == [[20], [31]]
    # Two rows of 20 would each be padded by 6: 12 tokens, more than a run costs.
    assert lengths(drained(filled(20, 20, 26))) == [[20, 20], [26]]


def test_queue_take_separates_keys() -> None:
    queue = Queue(100, 100)
    for key in "abab":
        queue.add(row(5, key))
    assert [{one.key for one in batch} for batch in drained(queue)] == [{"a"}, {"b"}]


def test_queue_take_max_rows_bounds_batch() -> None:
    assert lengths(drained(filled(1, 1, 1, rows=2))) == [[1, 1], [1]]
    assert lengths(drained(filled(1, 1, rows=1))) == [[1], [1]]


def test_queue_discard_twice_removes_row_once() -> None:
    queue = filled(3, 4, 5)
    middle = list(queue)[1]
    queue.discard(middle)
    queue.discard(middle)
    assert queue.tokens == 8
    assert lengths(drained(queue)) == [[3, 5]]
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
    waiting: list[Row] = []
    seen: Counter[int] = Counter()

    def take() -> None:
        batch = queue.take()
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

    rows: list[Row] = []
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


# -- requests -------------------------------------------------------------------------------------


def echo(key: Hashable, payloads: list[Any]) -> BatchResult:
    return BatchResult([(key, payload) for payload in payloads])


class Gate:
    """A run that waits until it is let go, and remembers what it ran."""

    def __init__(self) -> None:
        self.ran: list[list[Any]] = []
        self.go = threading.Event()

    def __call__(self, key: Hashable, payloads: list[Any]) -> BatchResult:
        self.ran.append(payloads)
        assert self.go.wait(10)
        return echo(key, payloads)

    async def reached(self, runs: int) -> None:
        while len(self.ran) < runs:
            await asyncio.sleep(0.001)


def play(
    script: Callable[[Batcher], Coroutine[Any, Any, None]], run: Any = echo, **options: Any
) -> Batcher:
    batcher = Batcher(run, **{"budget": 100, "overhead": 10, **options})
    try:
        asyncio.run(asyncio.wait_for(script(batcher), 20))
    finally:
        batcher.close()
    assert (batcher.waiting, len(batcher.queue), batcher.queue.tokens) == (0, 0, 0)
    return batcher


def rows(*payloads: Any, tokens: int = 5) -> list[Row]:
    return [row(tokens, payload=payload) for payload in payloads]


@given(
    requests=st.lists(st.lists(LENGTHS, min_size=1, max_size=12), min_size=1, max_size=15),
    budget=st.integers(1, 100),
    concurrency=st.integers(1, 3),
)
@settings(deadline=None, max_examples=50)
def test_submit_concurrent_requests_get_their_own_results(
    requests: list[list[int]], budget: int, concurrency: int
) -> None:
    async def script(batcher: Batcher) -> None:
        outcomes = await asyncio.gather(
            *(
                batcher.submit([row(n, payload=(r, i)) for i, n in enumerate(sizes)])
                for r, sizes in enumerate(requests)
            )
        )
        for r, (sizes, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            assert outcome.results == [("text", (r, i)) for i in range(len(sizes))]
            assert sum(count for _, count in outcome.batches) == len(sizes)
            assert outcome.queue_ms >= 0 and outcome.compute_ms > 0

    batches: list[Batch] = []
    play(script, budget=budget, concurrency=concurrency, on_batch=batches.append)
    assert sum(batch.rows for batch in batches) == sum(map(len, requests))
    assert sum(batch.tokens for batch in batches) == sum(map(sum, requests))


def test_submit_while_slot_is_busy_forms_one_batch() -> None:
    gate = Gate()

    async def script(batcher: Batcher) -> None:
        waiting = [asyncio.ensure_future(batcher.submit(rows(n))) for n in range(5)]
        await gate.reached(1)
        gate.go.set()
        await asyncio.gather(*waiting)

    play(script, gate)
    assert gate.ran == [[0], [1, 2, 3, 4]]


def test_submit_max_wait_fills_batch_up_to_limit() -> None:
    ran: list[list[Any]] = []

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        ran.append(payloads)
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.submit(rows(1)))
        await asyncio.sleep(0.01)
        assert not ran
        outcome, _ = await asyncio.gather(first, batcher.submit(rows(2)))
        assert ran == [[1, 2]]
        assert 350 <= outcome.queue_ms < 5000
        # A full budget waits for nobody.
        started = perf_counter()
        await batcher.submit(rows(*range(20)))
        assert perf_counter() - started < 0.35

    play(script, run, max_wait_ms=400)


def test_check_room_full_queue_refuses_whole_request() -> None:
    gate = Gate()

    async def script(batcher: Batcher) -> None:
        batcher.check_room(100)  # nothing waits: any request may
        waiting = [asyncio.ensure_future(batcher.submit(rows(n))) for n in range(3)]
        await gate.reached(1)
        batcher.check_room(1)
        with pytest.raises(Overloaded, match="2 rows wait already, and at most 3 may"):
            batcher.check_room(2)
        making = threading.Event()
        made = asyncio.ensure_future(batcher.submit_from(made_after(making, "made"), 1))
        await asyncio.sleep(0.01)
        with pytest.raises(Overloaded, match="3 rows wait already"):
            batcher.check_room(1)
        with pytest.raises(Overloaded, match="3 rows wait already"):
            await batcher.submit_from(lambda: rows("more"), 1)
        making.set()
        gate.go.set()
        await asyncio.gather(*waiting, made)
        batcher.check_room(3)

    play(script, gate, max_queue=3)


# -- rows that are made ---------------------------------------------------------------------------


def made_after(event: threading.Event, *payloads: Any) -> Callable[[], list[Row]]:
    def make() -> list[Row]:
        assert event.wait(10)
        return rows(*payloads)

    return make


def made_in(threads: list[str], *payloads: Any) -> Callable[[], list[Row]]:
    def make() -> list[Row]:
        threads.append(threading.current_thread().name.partition("_")[0])
        return rows(*payloads)

    return make


def test_submit_from_short_and_alone_prepares_in_run_thread() -> None:
    gate, where = Gate(), list[str]()

    async def script(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.submit_from(made_in(where, 1), 1, is_short=True))
        await gate.reached(1)
        # The slot is busy: these are made meanwhile, and share a batch.
        others = [
            asyncio.ensure_future(batcher.submit_from(made_in(where, n), 1, is_short=True))
            for n in (2, 3)
        ]
        while len(batcher.queue) < 2:
            await asyncio.sleep(0.001)
        gate.go.set()
        outcomes = await asyncio.gather(first, *others)
        assert [outcome.results for outcome in outcomes] == [[("text", n)] for n in (1, 2, 3)]
        await batcher.submit_from(made_in(where, 4), 1)  # it says nothing of how long it takes
        await batcher.submit_from(made_in(where, 5), 1, is_short=True)

    play(script, gate)
    assert gate.ran == [[1], [2, 3], [4], [5]]
    assert where == ["run", "prepare", "prepare", "prepare", "run"]


def test_submit_from_second_request_prepares_outside_run_thread() -> None:
    """A slot that took the first to make it would run it alone."""
    ran: list[list[Any]] = []
    making = threading.Event()

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        ran.append(payloads)
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        slow = asyncio.ensure_future(batcher.submit_from(made_after(making, 0), 1))
        await asyncio.sleep(0.01)
        where: list[str] = []
        other = asyncio.ensure_future(batcher.submit_from(made_in(where, 1), 1, is_short=True))
        await asyncio.sleep(0.01)
        assert where == [] and ran == []  # one is made after the other
        making.set()
        await asyncio.gather(slow, other)
        assert where == ["prepare"]

    play(script, run)


def test_submit_from_reports_preparation_time_separately() -> None:
    def make() -> list[Row]:
        threading.Event().wait(0.05)
        return rows(1)

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        threading.Event().wait(0.1)
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        for is_short in (True, False):
            outcome = await batcher.submit_from(make, 1, is_short=is_short)
            assert 50 <= outcome.prepare_ms < 95 <= outcome.compute_ms
            assert outcome.queue_ms < 45

    play(script, run)


@pytest.mark.parametrize("is_short", [True, False])
def test_submit_from_prepare_fails_request_gets_its_error(is_short: bool) -> None:
    def broken() -> list[Row]:
        raise ValueError("no text")

    failed: list[Any] = []

    async def script(batcher: Batcher) -> None:
        with pytest.raises(ValueError, match="no text"):
            await batcher.submit_from(broken, 2, is_short=is_short)
        assert batcher.waiting == 0
        outcome = await batcher.submit_from(
            lambda: rows(1), 1, is_short=is_short
        )  # the slot is free
        assert outcome.results == [("text", 1)]

    play(script, on_failure=failed.append)
    assert failed == []


class Panic(BaseException):
    """What an extension module in Rust raises."""


@pytest.mark.parametrize("is_short", [True, False])
def test_submit_from_prepare_panics_request_fails_and_slot_is_free(is_short: bool) -> None:
    def panic() -> list[Row]:
        raise Panic("of its own")

    failed: list[Any] = []

    async def script(batcher: Batcher) -> None:
        with pytest.raises(ModelFailed, match="Panic: of its own"):
            await batcher.submit_from(panic, 2, is_short=is_short)
        outcome = await batcher.submit_from(lambda: rows(1), 1, is_short=is_short)
        assert outcome.results == [("text", 1)]

    play(script, on_failure=failed.append)
    assert failed == []


def test_submit_run_panics_request_fails_and_slot_is_free() -> None:
    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        if "bad" in payloads:
            raise Panic("of its own")
        return echo(key, payloads)

    failed: list[Any] = []

    async def script(batcher: Batcher) -> None:
        with pytest.raises(ModelFailed, match="Panic: of its own"):
            await batcher.submit(rows("bad"))
        assert (await batcher.submit(rows("good"))).results == [("text", "good")]

    play(script, run, on_failure=failed.append)
    assert [type(error) for error in failed] == [ModelFailed]


def test_submit_without_rows_is_refused() -> None:
    async def script(batcher: Batcher) -> None:
        with pytest.raises(ValueError, match="at least one row"):
            await asyncio.wait_for(batcher.submit([]), 5)
        for is_short in (True, False):
            with pytest.raises(ValueError, match="at least one row"):
                await asyncio.wait_for(batcher.submit_from(list, 0, is_short=is_short), 5)
        assert (await batcher.submit(rows(1))).results == [("text", 1)]

    play(script)


@pytest.mark.parametrize("is_short", [True, False])
@pytest.mark.parametrize("why", ["gone", "late"])
def test_submit_from_request_ended_during_preparation_is_not_computed(
    is_short: bool, why: str
) -> None:
    ran: list[list[Any]] = []
    making = threading.Event()

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        ran.append(payloads)
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        deadline = perf_counter() + 0.03 if why == "late" else None
        asked = asyncio.ensure_future(
            batcher.submit_from(made_after(making, "dead"), 1, deadline, is_short=is_short)
        )
        await asyncio.sleep(0.01)
        assert batcher.waiting == 1
        if why == "gone":
            asked.cancel()
        with pytest.raises(asyncio.CancelledError if why == "gone" else DeadlineExceeded):
            await asked
        making.set()
        await batcher.submit_from(lambda: rows("next"), 1, is_short=is_short)

    play(script, run)
    assert ran == [["next"]]


def test_submit_from_short_and_alone_respects_max_wait() -> None:
    async def script(batcher: Batcher) -> None:
        started = perf_counter()
        await batcher.submit_from(lambda: rows(1), 1, is_short=True)
        assert perf_counter() - started >= 0.2

    play(script, max_wait_ms=200)


def test_close_refuses_requests_in_preparation() -> None:
    making = threading.Event()

    async def script(batcher: Batcher) -> None:
        asked = [
            asyncio.ensure_future(batcher.submit_from(made_after(making, n), 1)) for n in range(2)
        ]
        await asyncio.sleep(0.01)
        asyncio.get_running_loop().call_later(0.1, making.set)
        await asyncio.to_thread(batcher.close)
        for one in asked:
            with pytest.raises(NotReady, match="unloaded"):
                await one

    play(script)


def test_submit_deadline_passes_in_queue_is_not_computed() -> None:
    gate = Gate()

    async def script(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.submit(rows("runs")))
        await gate.reached(1)
        started = perf_counter()
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(rows("late", "too"), perf_counter() + 0.03)
        assert 0.03 <= perf_counter() - started < 1  # told at once, not when the slot is free
        with pytest.raises(DeadlineExceeded, match="has passed"):
            await batcher.submit(rows("over"), perf_counter())
        gate.go.set()
        await first
        await batcher.submit(rows("next"), perf_counter() + 10)

    play(script, gate)
    assert gate.ran == [["runs"], ["next"]]


def test_submit_expected_to_miss_deadline_is_not_computed() -> None:
    ran: list[Any] = []

    def slow(key: Hashable, payloads: list[Any]) -> BatchResult:
        ran.extend(payloads)
        threading.Event().wait(0.2)
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        await batcher.submit(rows(0))  # a run is known to take 0.2 s
        first = asyncio.ensure_future(batcher.submit(rows(1)))
        await asyncio.sleep(0.01)
        with pytest.raises(DeadlineExceeded):  # it would start in time, and end 0.1 s late
            await batcher.submit(rows(2, tokens=60), perf_counter() + 0.3)
        await first
        # What can start at once is tried, so that a run that was slow once can be fast again.
        with pytest.raises(DeadlineExceeded):
            await batcher.submit(rows(3), perf_counter() + 0.1)

    play(script, slow)
    assert ran == [0, 1, 3]


def test_submit_cancelled_removes_rows_from_queue() -> None:
    gate = Gate()

    async def script(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.submit(rows("runs")))
        await gate.reached(1)
        gone = asyncio.ensure_future(batcher.submit(rows("gone", "too")))
        await asyncio.sleep(0.01)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert batcher.waiting == 0
        gate.go.set()
        await first

    play(script, gate)
    assert gate.ran == [["runs"]]


def test_submit_bad_row_fails_its_own_request_only() -> None:
    gate = Gate()

    def picky(key: Hashable, payloads: list[Any]) -> BatchResult:
        gate(key, payloads)
        if "bad" in payloads:
            raise ValueError("bad")
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        first = asyncio.ensure_future(batcher.submit(rows("first")))
        await gate.reached(1)
        good, bad, other = [
            asyncio.ensure_future(batcher.submit(rows(*payloads)))
            for payloads in (["a", "b"], ["c", "bad"], ["d"])
        ]
        await asyncio.sleep(0.01)
        gate.go.set()
        assert (await good).results == [("text", "a"), ("text", "b")]
        assert (await other).results == [("text", "d")]
        with pytest.raises(ValueError, match="bad"):
            await bad
        await first

    play(script, picky)


def test_submit_model_failure_is_reported_to_on_failure() -> None:
    told: list[NotReady] = []

    def broken(key: Hashable, payloads: list[Any]) -> BatchResult:
        raise OutOfMemory("no memory")

    async def script(batcher: Batcher) -> None:
        with pytest.raises(OutOfMemory):
            await batcher.submit(rows(1))
        await asyncio.sleep(0)
        assert [error.what for error in told] == ["no memory"]
        batcher.pause()
        waiting = asyncio.ensure_future(batcher.submit(rows(2)))
        await asyncio.sleep(0.01)
        assert batcher.waiting == 1
        batcher.refuse_waiting(NotReady("not now"))
        with pytest.raises(NotReady, match="not now"):
            await waiting

    play(script, broken, on_failure=told.append)


def test_submit_concurrency_runs_batches_in_parallel() -> None:
    together = threading.Barrier(3, timeout=10)

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        together.wait()
        return echo(key, payloads)

    async def script(batcher: Batcher) -> None:
        outcome = await batcher.submit(rows(1, 2, 3, tokens=60))
        # Three runs of a request side by side take the time of one.
        assert outcome.compute_ms <= 1e3 * sum(b.ended - b.started for b, _ in outcome.batches)

    play(script, run, concurrency=3)
