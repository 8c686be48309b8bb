"""Rows in, batches out: what waits is put together so that it costs little, and nobody starves.

A **row** is what may share a run with others: one text, or one index of the batch axis of tensors.
Rows of equal key fit into one batch, padded to its longest row; a batch costs its padded tokens,
rows x longest, and stays within a budget. A row that is longer than the budget runs alone.

``Queue`` decides which rows run together. It is pure: no clock, no threads. ``Batcher`` runs what
it takes in a pool of threads, and gives every request its own results. What rows are made of (a
text's tokens) is made in a thread too: in the one that will run them, where one is free.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from service.errors import DeadlineExceeded, ModelFailed, NotReady, Overloaded

__all__ = ["Batch", "BatchResult", "Batcher", "Queue", "RequestResult", "Row"]

FORGET = 0.9
"""How much of the longest recent run is remembered from one run to the next."""

ON_ITS_WAY = 0.08
"""The share of a request's time that is left for its way from socket to socket on a busy machine:
its clock starts when it is read, which is after it was sent."""


@dataclass(slots=True, eq=False)
class Row:
    """What may share a run with others of its ``key``; ``tokens`` is its length, at least 1."""

    key: Hashable
    tokens: int
    payload: Any
    request: Any = None
    index: int = 0
    number: int = 0


class Queue:
    """The rows that wait, and which of them run together.

    A batch is the oldest row and its neighbours by length, taken one by one, the closest first,
    while the budget holds and while each saves more than it adds: a row joins where the padding
    that it brings costs no more than a run of its own would.

    Args:
        budget: Padded tokens of a batch: rows x longest row. A longer row runs alone.
        overhead: What starting a run costs, in tokens: padding that a row may bring at most.
        max_rows: Rows of a batch; None for as many as the budget holds.
    """

    def __init__(self, budget: int, overhead: int, max_rows: int | None = None) -> None:
        self.budget, self.overhead, self.max_rows = budget, overhead, max_rows
        self._arrived: OrderedDict[int, Row] = OrderedDict()
        self._sorted: dict[Hashable, list[tuple[int, int, Row]]] = {}
        self._next = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def __iter__(self) -> Iterator[Row]:
        """The oldest first."""
        return iter(self._arrived.values())

    @property
    def oldest(self) -> Row:
        return next(iter(self._arrived.values()))

    def add(self, row: Row) -> None:
        row.number = self._next
        self._next += 1
        self._arrived[row.number] = row
        insort(self._sorted.setdefault(row.key, []), (row.tokens, row.number, row))
        self.tokens += row.tokens

    def discard(self, row: Row) -> None:
        """Take ``row`` out, where it still waits."""
        if self._arrived.get(row.number) is row:
            rows = self._sorted[row.key]
            at = bisect_left(rows, (row.tokens, row.number))
            self._remove(rows, at, at + 1)

    def take(self) -> list[Row]:
        """The next batch, shortest row first; there must be a row that waits."""
        first = self.oldest
        rows = self._sorted[first.key]
        low = bisect_left(rows, (first.tokens, first.number))
        high = low + 1  # the batch is rows[low:high]
        while self.max_rows is None or high - low < self.max_rows:
            size, longest = high - low + 1, rows[high - 1][0]
            below = longest - rows[low - 1][0] if low > 0 else None
            above = (size - 1) * (rows[high][0] - longest) if high < len(rows) else None
            if below is not None and (below > self.overhead or size * longest > self.budget):
                below = None
            if above is not None and (above > self.overhead or size * rows[high][0] > self.budget):
                above = None
            if below is None and above is None:
                break
            if above is None or (below is not None and below <= above):
                low -= 1
            else:
                high += 1
        return self._remove(rows, low, high)

    def _remove(self, rows: list[tuple[int, int, Row]], low: int, high: int) -> list[Row]:
        taken = [row for _, _, row in rows[low:high]]
        del rows[low:high]
        for row in taken:
            del self._arrived[row.number]
            self.tokens -= row.tokens
        if not rows:
            del self._sorted[taken[0].key]
        return taken


@dataclass(frozen=True)
class BatchResult:
    """What a run gave: a result for each row, and nanoseconds before, in and after the session.

    ``macs`` are those of the whole batch, padding included; None where they cannot be counted.
    """

    results: Sequence[Any]
    macs: int | None = None
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


@dataclass(frozen=True, eq=False)
class Batch:
    """One run: ``rows`` of one key, ``tokens`` of them without padding, and when it ran (s)."""

    rows: int
    longest: int
    tokens: int
    started: float
    ended: float
    result: BatchResult

    @property
    def padded_tokens(self) -> int:
        return self.rows * self.longest


@dataclass(frozen=True)
class RequestResult:
    """What one request got: a result for each of its rows, in their order.

    ``batches`` pairs each run that had rows of this request with how many. ``compute_ms`` is the
    time in which at least one of them ran, ``make_ms`` that in which they were made, ``queue_ms``
    the rest.
    """

    results: list[Any]
    queue_ms: float
    compute_ms: float
    batches: list[tuple[Batch, int]]
    make_ms: float = 0.0


@dataclass(eq=False)
class _Request:
    future: asyncio.Future[RequestResult]
    asked: float
    deadline: float | None
    rows: list[Row] = field(default_factory=list)
    submitted: float = 0.0
    """When its rows were there, and began to wait."""
    make_s: float = 0.0
    results: list[Any] = field(default_factory=list)
    left: int = 0
    queued: bool = False
    gone: bool = False
    """It was answered, or nobody waits for it: what is made now comes too late."""
    batches: list[tuple[Batch, int]] = field(default_factory=list)
    timer: asyncio.TimerHandle | None = None


class Batcher:
    """Runs rows in batches.

    Args:
        run: Computes the payloads of rows of one key; called in a thread. A result a payload.
        budget, overhead, max_rows: See ``Queue``.
        max_wait_ms: How long a free slot may wait for the budget to fill; 0 starts at once.
        max_queue: Rows that may wait.
        concurrency: Runs at once.
        on_batch: Called on the event loop with every batch that ran.
        on_failure: Called on the event loop with every error that was not the request's own.
    """

    def __init__(
        self,
        run: Callable[[Hashable, list[Any]], BatchResult],
        *,
        budget: int,
        overhead: int = 0,
        max_rows: int | None = None,
        max_wait_ms: float = 0,
        max_queue: int = 512,
        concurrency: int = 1,
        on_batch: Callable[[Batch], None] | None = None,
        on_failure: Callable[[NotReady], None] | None = None,
    ) -> None:
        self.queue = Queue(budget, overhead, max_rows)
        self.max_queue = max_queue
        self._run, self._on_batch, self._on_failure = run, on_batch, on_failure
        self._max_wait = max_wait_ms / 1e3
        self._slots = concurrency
        self._pool = ThreadPoolExecutor(concurrency, "compute")
        self.maker = ThreadPoolExecutor(1, "make")
        """A thread beside the slots, for what must not wait behind runs."""
        # A worker takes its next batch by itself: the loop may be busy with other requests. What
        # both touch is touched under this lock; it is never held for longer than a selection.
        self._lock = threading.Lock()
        self._free = concurrency
        self._paused = self._closed = False
        self._reserved = 0
        self._open: set[_Request] = set()  # until they are answered
        self._typical_s = 0.0
        self._lag_s = 0.0  # how long the loop takes to come to what is due
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Rows that wait, those included that are being made."""
        return len(self.queue) + self._reserved

    def check_room(self, rows: int) -> None:
        """Whether ``rows`` may wait; where nothing waits and a slot is free, any request may.

        Raises:
            Overloaded: Too many rows wait already: all or none of a request is taken.
        """
        waiting = self.waiting
        if (waiting or not self._free) and waiting + rows > self.max_queue:
            raise Overloaded(
                f"{waiting} rows wait already, and at most {self.max_queue} may", "try again later"
            )

    async def submit(self, rows: Sequence[Row], deadline: float | None = None) -> RequestResult:
        """Run ``rows``, which were admitted (``check_room``), in one or more batches.

        Args:
            rows: At least one. They belong to this request from here on.
            deadline: On the clock of ``perf_counter``; None for none.

        Raises:
            DeadlineExceeded: It has passed, or would before the run is over.
            NotReady: The batcher is closed.
            asyncio.CancelledError: What still waited is never computed.
            ValueError: There are no rows: a request without rows would never be answered.
            Exception: What ``run`` raised for one of these rows.
        """
        request = self._request(deadline)
        with self._lock:
            self._add(request, _not_empty(rows), request.asked)
        self._start()
        return await self._answered(request)

    async def submit_from(
        self,
        make: Callable[[], Sequence[Row]],
        count: int,
        deadline: float | None = None,
        *,
        brief: bool = False,
    ) -> RequestResult:
        """Run rows that are made first, in a thread.

        Args:
            make: Makes the rows, at least one.
            count: How many, about: so many are waiting meanwhile.
            brief: A slot makes them itself, where one is free and nobody else asks (who else asks
                could share the batch meanwhile): the ways between threads that this saves take
                longer than the making.

        Raises:
            Overloaded: See ``check_room``.
            Exception: What ``make`` raised; for the rest see ``submit``.
        """
        self.check_room(count)
        request = self._request(deadline)
        alone = len(self._open) < self._slots
        with self._lock:
            self._reserved += count
            here = brief and alone and self._free > 0 and not len(self.queue) and not self._paused
            self._free -= here
        (self._pool if here else self.maker).submit(self._make, request, make, count, here)
        return await self._answered(request)

    def pause(self) -> None:
        """Begin no more runs."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._start()

    def refuse_waiting(self, error: Exception) -> None:
        """Answer all that waits with ``error``."""
        with self._lock:
            requests = {row.request for row in self.queue}
        for request in requests:
            self._fail(request, error)

    def refuse_all(self, error: Exception) -> None:
        """Answer all that is not answered yet with ``error``; what runs does so in vain."""
        for request in list(self._open):
            self._fail(request, error)

    def close(self) -> None:
        """Wait for the runs that have begun; what waits is refused."""
        self._closed = True
        self.pause()
        unloaded = NotReady("the model is unloaded", "load it again")
        self.refuse_waiting(unloaded)
        for request in [request for request in self._open if not request.rows]:
            self._fail(request, unloaded)
        self.maker.shutdown(wait=True)  # what is refused is not made
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- on the loop ------------------------------------------------------------------------------

    def _request(self, deadline: float | None) -> _Request:
        if self._closed:
            raise NotReady("the model is unloaded", "load it again")
        loop = self._loop = asyncio.get_running_loop()
        now = perf_counter()
        if deadline is not None and now >= deadline:
            raise DeadlineExceeded("the deadline has passed", "allow more time, or send less")
        return _Request(loop.create_future(), now, deadline)

    async def _answered(self, request: _Request) -> RequestResult:
        if request.deadline is not None and not request.future.done():
            assert self._loop is not None
            wait = request.deadline - request.asked
            request.timer = self._loop.call_later(wait, self._expire, request)
        self._open.add(request)
        try:
            return await request.future
        finally:
            self._open.discard(request)
            if request.timer is not None:
                request.timer.cancel()
            self._withdraw(request)

    def _start(self) -> None:
        """Give what is due to the slots that are free."""
        assert self._loop is not None or not len(self.queue)
        while True:
            with self._lock:
                batch = self._next(perf_counter()) if self._free else None
                if batch is None:
                    return
                self._free -= 1
            self._pool.submit(self._work, batch)

    def _expire(self, request: _Request) -> None:
        self._fail(
            request,
            DeadlineExceeded("the deadline passed before the answer", "allow more time"),
        )

    def _fail(self, request: _Request, error: Exception) -> None:
        self._withdraw(request)
        if not request.future.done():
            request.future.set_exception(error)

    def _withdraw(self, request: _Request) -> None:
        with self._lock:
            request.gone = True
            if request.left:
                for row in request.rows:
                    self.queue.discard(row)

    def _deliver(self, done: list[tuple[list[Row], Batch | Exception]]) -> None:
        for rows, result in done:
            if isinstance(result, Exception):
                for request in {row.request for row in rows}:
                    self._fail(request, result)
                if isinstance(result, NotReady) and self._on_failure is not None:
                    self._on_failure(result)
                continue
            self._lag_s = max(perf_counter() - result.ended, self._lag_s * FORGET)
            if self._on_batch is not None:
                self._on_batch(result)
            counts: dict[_Request, int] = {}
            for row, value in zip(rows, result.result.results, strict=True):
                row.request.results[row.index] = value
                counts[row.request] = counts.get(row.request, 0) + 1
            for request, count in counts.items():
                request.batches.append((result, count))
                request.left -= count
                if not request.left and not request.future.done():
                    request.future.set_result(_request_result(request))

    def _arm(self, delay: float) -> None:
        """Look again when the oldest row has waited long enough."""
        if self._timer is not None:
            self._timer.cancel()
        assert self._loop is not None
        self._timer = self._loop.call_later(delay, self._start)

    # -- in a worker ------------------------------------------------------------------------------

    def _make(
        self, request: _Request, make: Callable[[], Sequence[Row]], count: int, here: bool
    ) -> None:
        """Make the rows of a request and let them wait; ``here``, in a slot, run what is due."""
        assert self._loop is not None
        rows: Sequence[Row] = ()
        failed: Exception | None = None
        started = perf_counter()
        try:
            if not request.gone:
                rows = _not_empty(make())
        except BaseException as error:
            failed = _as_exception(error)
        now = perf_counter()
        request.make_s = now - started
        with self._lock:
            self._reserved -= count
            if rows and not request.gone:
                self._add(request, rows, now, here=here)
            batch = self._next(now) if here or self._free else None
            self._free += here - (batch is not None)
        if failed is not None:
            self._loop.call_soon_threadsafe(self._fail, request, failed)
        if batch is None:
            return
        if here:
            self._work(batch)
        else:
            self._pool.submit(self._work, batch)

    def _work(self, batch: list[Row]) -> None:
        assert self._loop is not None
        while True:
            done = self._compute(batch)
            with self._lock:
                following = self._next(perf_counter())
                self._free += following is None
            self._loop.call_soon_threadsafe(self._deliver, done)
            if following is None:
                return
            batch = following

    def _compute(self, rows: list[Row]) -> list[tuple[list[Row], Batch | Exception]]:
        """Run a batch; where it fails, each of its requests alone: it fails for its own rows."""
        started = perf_counter()
        try:
            ran = self._run(rows[0].key, [row.payload for row in rows])
        except BaseException as raised:
            error = _as_exception(raised)
            requests: dict[Any, list[Row]] = {}
            for row in rows:
                requests.setdefault(row.request, []).append(row)
            if len(requests) == 1:
                return [(rows, error)]
            return [done for each in requests.values() for done in self._compute(each)]
        ended = perf_counter()
        self._typical_s = max(ended - started, self._typical_s * FORGET)
        tokens = sum(row.tokens for row in rows)
        return [(rows, Batch(len(rows), rows[-1].tokens, tokens, started, ended, ran))]

    # -- under the lock ---------------------------------------------------------------------------

    def _add(
        self, request: _Request, rows: Sequence[Row], now: float, *, here: bool = False
    ) -> None:
        """Let the rows of a request wait; ``here``: a slot is kept for them."""
        request.rows, request.submitted = list(rows), now
        request.results, request.left = [None] * len(rows), len(rows)
        request.queued = not (here or self._free) or self._paused
        for index, row in enumerate(request.rows):
            row.request, row.index = request, index
            self.queue.add(row)

    def _next(self, now: float) -> list[Row] | None:
        """The batch that is due; None where nothing is."""
        while len(self.queue) and not self._paused:
            if self._max_wait and self.queue.tokens < self.queue.budget:
                wait = self.queue.oldest.request.submitted + self._max_wait - now
                if wait > 0:
                    assert self._loop is not None
                    self._loop.call_soon_threadsafe(self._arm, wait)
                    return None
            batch = [
                row for row in self.queue.take() if not self._will_miss_deadline(row.request, now)
            ]
            if batch:
                return batch
        return None

    def _will_miss_deadline(self, request: _Request, now: float) -> bool:
        """Whether a request that had to wait would be answered too late: then it is not computed.

        A busy loop is late twice: when it reads a request, whose clock starts only then, and when
        it answers. What could start at once is always tried, so that a run's length stays known.
        """
        if request.future.done():
            return True
        if not request.queued or request.deadline is None:
            return False
        way = 2 * self._lag_s + ON_ITS_WAY * (request.deadline - request.submitted)
        late = now + self._typical_s + way > request.deadline
        if late:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._expire, request)
        return late


def _not_empty(rows: Sequence[Row]) -> Sequence[Row]:
    if not rows:
        raise ValueError("a request needs at least one row")
    return rows


def _as_exception(error: BaseException) -> Exception:
    """``error``, or an Exception in its place that a request can be answered with.

    A panic of a Rust extension is no Exception.
    """
    if isinstance(error, Exception):
        return error
    failed = ModelFailed(f"the model failed: {type(error).__name__}: {error}", "try again")
    failed.__cause__ = error
    return failed


def _request_result(request: _Request) -> RequestResult:
    spans = sorted((batch.started, batch.ended) for batch, _ in request.batches)
    busy, total = _union(spans), max(end for _, end in spans) - request.asked
    queued = max(total - busy - request.make_s, 0)
    return RequestResult(
        request.results, queued * 1e3, busy * 1e3, request.batches, request.make_s * 1e3
    )


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what intervals cover together, given in order of their starts."""
    covered, until = 0.0, float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
