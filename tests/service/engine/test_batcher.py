"""The batcher: requests, deadlines, cancellation and failures."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager, suppress
from time import sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.runtime.by_load import IS_ALONE
from attnserve.runtime.stop import STOP
from attnserve.serving.loaded_model import ModelFailed, OutOfMemory
from service.engine import batcher as batcher_module
from service.engine.batcher import Batcher, BatchResult, BatchRun, RequestResult
from service.engine.row_queue import AnyRow, Queue
from service.errors import DeadlineExceeded, NotReady, Overloaded
from tests.errors import raises
from tests.service.engine.rows import LENGTHS, row

# -- requests -------------------------------------------------------------------------------------


def echo(key: Hashable, payloads: list[Any]) -> BatchResult:
    return BatchResult([(key, payload) for payload in payloads])


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


class Clock:
    """Seconds that pass only in ``advance``; the event loop has a clock of its own."""

    def __init__(self) -> None:
        self.now = 1.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class Recorder:
    """A run that records its payloads, waits for ``go`` if it is held, and takes ``seconds``."""

    def __init__(self, *, held: bool = True) -> None:
        self.ran: list[list[Any]] = []
        self.clock, self.seconds = Clock(), 0.0
        self.go = threading.Event()
        if not held:
            self.go.set()

    def __call__(self, key: Hashable, payloads: list[Any]) -> BatchResult:
        self.ran.append(payloads)
        assert self.go.wait(10)
        self.clock.advance(self.seconds)
        return echo(key, payloads)

    async def reached(self, runs: int) -> None:
        await until(lambda: len(self.ran) >= runs)


class Preparation:
    """Makes rows in a thread, whose name it records, after ``go``."""

    def __init__(self, *, held: bool = False) -> None:
        self.threads: list[str] = []
        self.started, self.go = threading.Event(), threading.Event()
        if not held:
            self.go.set()

    def of(self, *payloads: Any) -> Callable[[], list[AnyRow]]:
        def make() -> list[AnyRow]:
            self.started.set()
            assert self.go.wait(10)
            self.threads.append(threading.current_thread().name.partition("_")[0])
            return rows(*payloads)

        return make


@asynccontextmanager
async def batching(
    run: Any = echo,
    *,
    budget: int = 100,
    overhead: int = 10,
    max_rows: int | None = None,
    **options: Any,
) -> AsyncIterator[Batcher]:
    """A batcher, which has no rows left at the end."""
    batcher = Batcher(run, Queue(budget, overhead, max_rows), **options)
    try:
        async with asyncio.timeout(20):
            yield batcher
    finally:
        batcher.close()
    assert (batcher.waiting, len(batcher.queue), batcher.queue.tokens) == (0, 0, 0)


def rows(*payloads: Any, tokens: int = 5) -> list[AnyRow]:
    return [row(tokens, payload=payload) for payload in payloads]


start = asyncio.ensure_future
either_thread = pytest.mark.parametrize("is_short", [True, False])


@given(
    requests=st.lists(st.lists(LENGTHS, min_size=1, max_size=12), min_size=1, max_size=15),
    budget=st.integers(1, 100),
    concurrency=st.integers(1, 3),
)
@settings(deadline=None, max_examples=50)
def test_submit_concurrent_requests_get_their_own_results(
    requests: list[list[int]], budget: int, concurrency: int
) -> None:
    batches: list[BatchRun] = []

    async def script() -> None:
        async with batching(
            budget=budget, concurrency=concurrency, parts=concurrency, on_batch=batches.append
        ) as batcher:
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

    asyncio.run(script())
    assert sum(batch.rows for batch in batches) == sum(map(len, requests))
    assert sum(batch.tokens for batch in batches) == sum(map(sum, requests))


async def test_submit_while_slot_is_busy_forms_one_batch() -> None:
    run = Recorder()
    async with batching(run) as batcher:
        waiting = [start(batcher.submit(rows(n))) for n in range(5)]
        await run.reached(1)
        run.go.set()
        await asyncio.gather(*waiting)
    assert run.ran == [[0], [1, 2, 3, 4]]


async def test_submit_max_wait_ends_when_the_budget_is_full() -> None:
    """The wait of an hour is longer than the test may take."""
    run = Recorder(held=False)
    async with batching(run, max_wait_ms=3_600_000) as batcher:
        first = start(batcher.submit(rows(1)))
        await asyncio.sleep(0)
        assert not run.ran
        await asyncio.gather(first, batcher.submit(rows(*range(2, 21))))
        assert run.ran == [[*range(1, 21)]]  # of 5 tokens each
        await batcher.submit(rows(*range(20)))


async def test_submit_max_wait_ends_when_no_row_can_join() -> None:
    run = Recorder(held=False)
    async with batching(run, max_wait_ms=3_600_000, max_rows=1) as batcher:
        await asyncio.wait_for(batcher.submit(rows(1)), 10)
    assert run.ran == [[1]]


async def test_submit_max_wait_delays_a_batch_that_is_not_full() -> None:
    run = Recorder(held=False)
    async with batching(run, max_wait_ms=1, clock=run.clock) as batcher:
        waiting = [start(batcher.submit(rows(n))) for n in (1, 2)]
        await asyncio.sleep(0.002)
        assert not run.ran
        run.clock.advance(0.002)
        assert [(await one).queue_ms for one in waiting] == pytest.approx([2, 2])
        prepared = start(batcher.submit_from(lambda: rows(3), 1, is_short=True))
        await until(lambda: len(batcher.queue))
        assert run.ran == [[1, 2]]
        run.clock.advance(0.002)
        await prepared


async def test_check_room_full_queue_refuses_whole_request() -> None:
    run, preparation = Recorder(), Preparation(held=True)
    async with batching(run, max_queue=3) as batcher:
        batcher.check_room(100)  # an idle batcher takes any request
        waiting = [start(batcher.submit(rows(n))) for n in range(3)]
        await run.reached(1)
        batcher.check_room(1)
        with raises(Overloaded, "server.overloaded", "2 rows ", " 3 may"):
            batcher.check_room(2)
        prepared = start(batcher.submit_from(preparation.of("prepared"), 1))
        await asyncio.sleep(0)
        with raises(Overloaded, "server.overloaded", "3 rows"):
            batcher.check_room(1)
        with raises(Overloaded, "server.overloaded", "3 rows"):
            await batcher.submit_from(lambda: rows("more"), 1)
        preparation.go.set()
        run.go.set()
        await asyncio.gather(*waiting, prepared)
        batcher.check_room(3)


async def test_check_room_empty_queue_takes_any_request_beside_a_run() -> None:
    """Its client may send as many rows as the server announces, and would retry for ever."""
    run = Recorder()
    async with batching(run, max_queue=3) as batcher:
        running = start(batcher.submit(rows(1)))
        await run.reached(1)
        waiting = start(batcher.submit(rows(*range(2, 12))))
        await asyncio.sleep(0)
        with raises(Overloaded, "server.overloaded", "10 rows ", " 3 may"):
            batcher.check_room(1)
        run.go.set()
        await asyncio.gather(running, waiting)


async def test_check_room_without_queue_needs_a_free_slot() -> None:
    run = Recorder()
    async with batching(run, max_queue=0) as batcher:
        batcher.check_room(2)
        running = start(batcher.submit(rows(1)))
        await run.reached(1)
        assert batcher.waiting == 0
        with raises(Overloaded, "server.overloaded", "0 rows ", " 0 may"):
            batcher.check_room(1)
        run.go.set()
        await running
        batcher.check_room(2)


# -- preparation of rows --------------------------------------------------------------------------


async def test_submit_from_short_and_alone_prepares_in_run_thread() -> None:
    run, preparation = Recorder(), Preparation()
    async with batching(run) as batcher:

        def submit(payload: int, **options: bool) -> asyncio.Future[RequestResult[Any, Any]]:
            return start(batcher.submit_from(preparation.of(payload), 1, **options))

        first = submit(1, is_short=True)
        await run.reached(1)
        # The slot is busy: these are prepared meanwhile, and share a batch.
        others = [submit(n, is_short=True) for n in (2, 3)]
        await until(lambda: len(batcher.queue) == 2)
        run.go.set()
        outcomes = await asyncio.gather(first, *others)
        assert [outcome.results for outcome in outcomes] == [[("text", n)] for n in (1, 2, 3)]
        await submit(4)
        await submit(5, is_short=True)
    assert run.ran == [[1], [2, 3], [4], [5]]
    assert preparation.threads == ["run", "prepare-short", "prepare-short", "prepare", "run"]


async def test_submit_from_second_request_prepares_outside_run_thread() -> None:
    """In the run thread its rows could not share a batch with those of a third."""
    run, slow, preparation = Recorder(held=False), Preparation(held=True), Preparation()
    async with batching(run) as batcher:
        first = start(batcher.submit_from(slow.of(0), 1))
        await asyncio.sleep(0)
        await batcher.submit_from(preparation.of(1), 1, is_short=True)  # it does not wait
        assert preparation.threads == ["prepare-short"] and run.ran == [[1]]
        slow.go.set()
        await first


@either_thread
async def test_submit_from_reports_preparation_time_separately(is_short: bool) -> None:
    run = Recorder(held=False)
    run.seconds = 0.1

    def make() -> list[AnyRow]:
        run.clock.advance(0.05)
        return rows(1)

    async with batching(run, clock=run.clock) as batcher:
        outcome = await batcher.submit_from(make, 1, is_short=is_short)
    times = [outcome.prepare_ms, outcome.queue_ms, outcome.compute_ms]
    assert times == pytest.approx([50, 0, 100])


class Panic(BaseException):
    """Stands for the panic of an extension module in Rust."""


@pytest.mark.parametrize(
    ("raised", "expected"), [(ValueError("cause"), ValueError), (Panic("cause"), ModelFailed)]
)
@pytest.mark.parametrize("stage", ["prepare in run thread", "prepare", "run"])
async def test_submit_failure_fails_its_request_and_frees_the_slot(
    raised: BaseException, expected: type[Exception], stage: str
) -> None:
    def fail(*_: Any) -> Any:
        raise raised

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        return fail() if "bad" in payloads else echo(key, payloads)

    failures: list[ModelFailed] = []
    async with batching(run, on_failure=failures.append) as batcher:
        is_short = stage == "prepare in run thread"
        with pytest.raises(expected, match="cause"):
            if stage == "run":
                await batcher.submit(rows("bad"))
            else:
                await batcher.submit_from(fail, 2, is_short=is_short)
        assert batcher.waiting == 0
        outcome = await batcher.submit_from(lambda: rows(1), 1, is_short=is_short)
        assert outcome.results == [("text", 1)]
    reported = [ModelFailed] if stage == "run" and expected is ModelFailed else []
    assert [type(error) for error in failures] == reported


async def test_submit_without_rows_is_refused() -> None:
    async with batching() as batcher:
        for submitted in (
            batcher.submit([]),
            batcher.submit_from(list, 0, is_short=True),
            batcher.submit_from(list, 0),
        ):
            with pytest.raises(ValueError, match="at least one row"):
                await asyncio.wait_for(submitted, 5)
        assert (await batcher.submit(rows(1))).results == [("text", 1)]


@either_thread
@pytest.mark.parametrize("end", ["cancelled", "late"])
async def test_submit_from_request_ended_during_preparation_is_not_computed(
    is_short: bool, end: str
) -> None:
    run, preparation = Recorder(held=False), Preparation(held=True)
    async with batching(run, clock=run.clock) as batcher:
        deadline = run.clock() + 0.001 if end == "late" else None
        prepare = preparation.of("ended")
        ended = start(batcher.submit_from(prepare, 1, deadline, is_short=is_short))
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        if end == "cancelled":
            await until(preparation.started.is_set)
            ended.cancel()
        with pytest.raises(asyncio.CancelledError if end == "cancelled" else DeadlineExceeded):
            await ended
        preparation.go.set()
        await batcher.submit_from(lambda: rows("next"), 1, is_short=is_short)
    assert run.ran == [["next"]]


async def test_close_refuses_requests_in_preparation() -> None:
    preparation = Preparation(held=True)
    async with batching() as batcher:
        requests = [start(batcher.submit_from(preparation.of(n), 1)) for n in range(2)]
        await asyncio.sleep(0)
        closing = start(asyncio.to_thread(batcher.close))
        for request in requests:
            with pytest.raises(NotReady):
                await request
        preparation.go.set()
        await closing


# -- deadlines, cancellation and failures ---------------------------------------------------------


async def test_submit_deadline_passes_in_queue_is_not_computed() -> None:
    run = Recorder()
    async with batching(run, clock=run.clock) as batcher:
        first = start(batcher.submit(rows("runs")))
        await run.reached(1)
        late = start(batcher.submit(rows("late", "too"), run.clock() + 0.001))
        await asyncio.sleep(0)
        assert batcher.waiting == 2
        with pytest.raises(DeadlineExceeded):  # while the slot is busy
            await late
        with raises(DeadlineExceeded, "request.deadline"):
            await batcher.submit(rows("over"), run.clock())
        run.go.set()
        await first
        await batcher.submit(rows("next"), run.clock() + 1000)
    assert run.ran == [["runs"], ["next"]]


async def test_run_that_nobody_waits_for_is_ended() -> None:
    """Only when all of its requests have ended, whether by deadline or cancellation."""
    ended = threading.Event()
    ran: list[list[Any]] = []

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        ran.append(payloads)
        if payloads == ["first"]:
            return echo(key, payloads)
        stop = STOP.get()
        assert stop is not None
        stop.connect(ended.set)
        assert ended.wait(10)
        raise ModelFailed("terminated")

    failed: list[ModelFailed] = []
    async with batching(run, on_failure=failed.append, clock=Clock()) as batcher:
        batcher.pause()
        one = start(batcher.submit(rows("a"), 1.001))
        two = start(batcher.submit(rows("b")))
        await asyncio.sleep(0)
        batcher.resume()
        with pytest.raises(DeadlineExceeded):
            await one
        await until(lambda: ran)
        assert sorted(ran[0]) == ["a", "b"] and not ended.is_set()
        two.cancel()
        with suppress(asyncio.CancelledError):
            await two
        await until(ended.is_set)
        await batcher.submit(rows("first"), 1000)  # the slot is free again
    assert not failed  # the session is not broken
    assert len(ran) == 2  # its rows are not run one by one


@pytest.mark.parametrize("stage", ["run", "preparation"])
async def test_work_that_does_not_end_is_reported(stage: str) -> None:
    run, preparation = Recorder(), Preparation(held=True)
    async with batching(run, stuck_s=10, clock=run.clock) as batcher:
        if stage == "run":
            request = start(batcher.submit(rows("endless")))
            await run.reached(1)
        else:
            request = start(batcher.submit_from(preparation.of("endless"), 1))
            await until(preparation.started.is_set)
        run.clock.advance(60)
        assert not batcher.is_stuck  # a request waits for it
        request.cancel()
        await asyncio.wait([request])
        run.clock.advance(9)
        assert not batcher.is_stuck
        run.clock.advance(2)
        assert batcher.is_stuck
        run.go.set()
        preparation.go.set()
        await batcher.submit_from(lambda: rows("next"), 1)
        assert not batcher.is_stuck


async def test_submit_from_short_does_not_wait_behind_long() -> None:
    long, run = Preparation(held=True), Recorder(held=False)
    async with batching(run) as batcher:
        waiting = [start(batcher.submit_from(long.of("long"), 1)) for _ in range(2)]
        await asyncio.sleep(0)
        await batcher.submit_from(Preparation().of("short"), 1, is_short=True)
        assert run.ran == [["short"]]
        long.go.set()
        await asyncio.gather(*waiting)


async def test_submit_expected_to_miss_deadline_is_not_computed() -> None:
    run = Recorder(held=False)
    run.seconds = 200
    async with batching(run, clock=run.clock) as batcher:
        await batcher.submit(rows(0))
        run.go.clear()
        first = start(batcher.submit(rows(1)))
        await run.reached(2)
        late = start(batcher.submit(rows(2, tokens=60), run.clock() + 300))
        await asyncio.sleep(0)
        run.go.set()
        with pytest.raises(DeadlineExceeded):  # it would start in time, and end 100 s late
            await late
        await first
        # With a free slot it is tried, so that the expected duration is corrected.
        await batcher.submit(rows(3), run.clock() + 100)
    assert run.ran == [[0], [1], [3]]


async def test_submit_long_runs_of_large_batches_are_not_expected_of_small_ones() -> None:
    run = Recorder(held=False)
    run.seconds = 300
    async with batching(run, clock=run.clock) as batcher:
        for _ in range(3):
            await batcher.submit(rows("large", tokens=60))
        run.go.clear()
        first = start(batcher.submit(rows("large", tokens=60)))
        await run.reached(4)
        # It starts after 300 s, and would end after 600 s if it took as long as a large one.
        small = start(batcher.submit(rows("small"), run.clock() + 550))
        await asyncio.sleep(0)
        run.go.set()
        assert (await small).results == [("text", "small")]
        await first


async def test_submit_one_long_run_is_not_expected_again() -> None:
    """A paused process makes its current runs long; requests that are in time must run."""
    run = Recorder(held=False)
    async with batching(run, concurrency=2, clock=run.clock) as batcher:

        def submit_two() -> list[asyncio.Future[RequestResult[Any, Any]]]:
            return [start(batcher.submit(rows(n, tokens=60))) for n in range(2)]

        for run.seconds in (0, 0, 0, 500):
            await asyncio.gather(*submit_two())
        run.seconds = 20
        run.go.clear()
        first = submit_two()
        await run.reached(10)
        waits = start(batcher.submit(rows(3, tokens=60), run.clock() + 300))
        await asyncio.sleep(0)
        run.go.set()
        assert (await waits).results == [("text", 3)]
        await asyncio.gather(*first)


async def test_submit_cancelled_removes_rows_from_queue() -> None:
    run = Recorder()
    async with batching(run) as batcher:
        first = start(batcher.submit(rows("runs")))
        await run.reached(1)
        cancelled = start(batcher.submit(rows("cancelled", "too")))
        await asyncio.sleep(0)
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        assert batcher.waiting == 0
        run.go.set()
        await first
    assert run.ran == [["runs"]]


async def test_submit_bad_row_fails_its_own_request_only() -> None:
    gate = Recorder()

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        gate(key, payloads)
        if "bad" in payloads:
            raise ValueError("bad")
        return echo(key, payloads)

    async with batching(run) as batcher:
        first = start(batcher.submit(rows("first")))
        await gate.reached(1)
        good, bad, other = [
            start(batcher.submit(rows(*payloads))) for payloads in (["a", "b"], ["c", "bad"], ["d"])
        ]
        await asyncio.sleep(0)
        gate.go.set()
        assert (await good).results == [("text", "a"), ("text", "b")]
        assert (await other).results == [("text", "d")]
        with pytest.raises(ValueError, match="bad"):
            await bad
        await first


async def test_submit_model_failure_is_reported_to_on_failure() -> None:
    failures: list[ModelFailed] = []

    def broken(key: Hashable, payloads: list[Any]) -> BatchResult:
        raise OutOfMemory("no memory")

    async with batching(broken, on_failure=failures.append) as batcher:
        with pytest.raises(OutOfMemory):
            await batcher.submit(rows(1))
        await asyncio.sleep(0)
        assert [error.what for error in failures] == ["no memory"]
        batcher.pause()
        waiting = start(batcher.submit(rows(2)))
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        batcher.refuse_all(NotReady("not now"))
        with raises(NotReady, "model.not_ready", "not now"):
            await waiting


@pytest.mark.parametrize("fault", ["results", "on_batch"])
async def test_submit_undeliverable_results_fail_their_requests(fault: str) -> None:
    failing = True

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        return BatchResult([] if failing and fault == "results" else payloads)

    def on_batch(batch: BatchRun) -> None:
        if failing and fault == "on_batch":
            raise OSError("disk full")

    async with batching(run, on_batch=on_batch) as batcher:
        for error in await asyncio.gather(
            *(batcher.submit(rows(n)) for n in range(3)), return_exceptions=True
        ):
            assert isinstance(error, OSError if fault == "on_batch" else ValueError)
        failing = False
        assert (await batcher.submit(rows("next"))).results == ["next"]


async def test_submit_concurrency_runs_batches_in_parallel() -> None:
    barrier = threading.Barrier(3, timeout=10)

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        barrier.wait()
        return echo(key, payloads)

    async with batching(run, concurrency=3) as batcher:
        outcome = await batcher.submit(rows(1, 2, 3, tokens=60))
        # Three concurrent runs of a request take the time of one.
        assert outcome.compute_ms <= 1e3 * sum(b.ended - b.started for b, _ in outcome.batches)


@pytest.mark.parametrize(
    ("sizes", "alone"),
    [([1], [True]), ([3], [False, False, False]), ([1, 1, 1], [False, False, False])],
    ids=["one run", "a request of several runs", "several requests"],
)
async def test_run_is_alone_if_it_has_all_rows_that_are_due(
    sizes: list[int], alone: list[bool]
) -> None:
    found: list[bool] = []
    barrier = threading.Barrier(min(2, len(alone)), timeout=10)

    def run(key: Hashable, payloads: list[Any]) -> BatchResult:
        found.append(IS_ALONE.get())
        if len(found) <= 2:
            barrier.wait()
        return echo(key, payloads)

    async with batching(run, concurrency=2, parts=2) as batcher:
        batcher.pause()
        waiting = [
            asyncio.ensure_future(batcher.submit(rows(*range(size), tokens=60))) for size in sizes
        ]
        await asyncio.sleep(0)
        batcher.resume()
        await asyncio.gather(*waiting)
    assert found[:2] == alone[:2]
    if len(sizes) == 1:
        assert found == alone


class Slow(deque[Any]):
    """A deque that is slow to read and to extend; none may change while it is read."""

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            sleep(0.0002)
            yield item

    def append(self, item: Any) -> None:
        sleep(0.001)
        super().append(item)


async def test_submit_runs_that_end_while_others_are_expected_are_delivered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The times of recent runs are read and written under one lock."""
    monkeypatch.setattr(batcher_module, "deque", Slow)
    async with batching(concurrency=4) as batcher:
        waiting = [batcher.submit(rows(n, tokens=100)) for n in range(100)]
        results = [outcome.results for outcome in await asyncio.gather(*waiting)]
        assert results == [[("text", n)] for n in range(100)]
