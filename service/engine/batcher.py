"""Dynamic batching: rows of several requests share a run, and every request gets its own results.

``Queue`` chooses the rows of a batch. ``Batcher`` runs the batches in a thread pool.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Generic

from attnserve.runtime.by_load import IS_ALONE
from attnserve.runtime.stop import STOP, Stop
from attnserve.serving.loaded_model import ModelFailed
from service.engine.row_queue import AnyRow, P, Queue, R, Row
from service.errors import DeadlineExceeded, NotReady, Overloaded

STUCK_S = 30.0
"""Seconds after the end of all its requests from which a run counts as stuck."""

RECENT_RUNS = 32
"""Number of recent runs from which the duration of a run is estimated."""

ANSWER_MARGIN = 0.12
"""Fraction of a request's time limit that is reserved for receiving it and sending its answer."""


@dataclass(frozen=True)
class BatchResult:
    """One result per row, and the nanoseconds before, in and after the session.

    ``macs`` counts the whole batch with its padding; None if the graph cannot be counted.
    ``runtime`` is the name of the runtime.
    """

    results: Sequence[Any]
    macs: int | None = None
    runtime: str = ""
    stage_ns: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True, eq=False)
class BatchRun:
    """One run of rows of equal key: ``tokens`` without padding, start and end in seconds."""

    rows: int
    longest: int
    tokens: int
    started: float
    ended: float
    result: BatchResult

    @property
    def padded_tokens(self) -> int:
        """Number of rows times the tokens of the longest row."""
        return self.rows * self.longest


@dataclass(frozen=True)
class RequestResult(Generic[P, R]):
    """The rows of a request with their results, and the time of its stages.

    ``batches`` pairs each run that had rows of this request with the number of these rows.
    ``compute_ms`` is the time in which at least one of these runs ran, ``prepare_ms`` the time in
    which rows were prepared, and ``queue_ms`` the rest.
    """

    rows: Sequence[Row[P, R]]
    queue_ms: float
    compute_ms: float
    batches: list[tuple[BatchRun, int]]
    prepare_ms: float

    @property
    def results(self) -> list[R]:
        return [row.result for row in self.rows]


@dataclass(eq=False)
class _OpenRequest:
    future: asyncio.Future[RequestResult[Any, Any]]
    started: float
    deadline: float | None
    rows: list[AnyRow] = field(default_factory=list)
    queued_at: float = 0.0
    has_waited: bool = False
    """Whether no slot was free when the rows of the request were queued."""
    prepare_s: float = 0.0
    remaining: int = 0
    batches: list[tuple[BatchRun, int]] = field(default_factory=list)


@dataclass(eq=False)
class _SlotRun:
    """A slot's run or preparation of rows, with the requests that wait for the result."""

    requests: set[_OpenRequest]
    stop: Stop = field(default_factory=Stop)
    abandoned_at: float | None = None


class Batcher:
    """Runs rows in batches.

    The event loop and the threads of the pool both start batches: a thread that finishes a run
    takes the next batch itself, because the loop may be busy. ``_lock`` guards the shared state.

    Args:
        run: Computes the payloads of rows of one key, in a thread; one result per payload.
        queue: Holds the waiting rows and chooses the rows of a batch.
        max_wait_ms: How long a free slot waits for the budget to fill; 0 starts at once.
        max_queue: Maximum number of waiting rows.
        concurrency: Number of slots: the maximum number of concurrent runs.
        parts: Number of runs that share the waiting rows, if as many slots are free.
        clock: Returns the current time in seconds.
        on_batch: Called on the event loop after every run.
        on_failure: Called on the event loop with errors that are not caused by a request.
    """

    def __init__(
        self,
        run: Callable[[Any, list[Any]], BatchResult],
        queue: Queue,
        *,
        max_wait_ms: float = 0,
        max_queue: int = 512,
        concurrency: int = 1,
        parts: int = 1,
        stuck_s: float = STUCK_S,
        clock: Callable[[], float] = perf_counter,
        on_batch: Callable[[BatchRun], None] = lambda batch: None,
        on_failure: Callable[[ModelFailed], None] = lambda error: None,
    ) -> None:
        self.queue = queue
        self.max_queue = max_queue
        self._run, self._on_batch, self._on_failure = run, on_batch, on_failure
        self._max_wait, self._stuck_s, self._clock = max_wait_ms / 1e3, stuck_s, clock
        self._concurrency, self._parts = concurrency, parts
        self._run_pool = ThreadPoolExecutor(concurrency, "run")
        # Preparation has its own threads, so that it does not wait for runs; short texts have a
        # thread of their own, so that they do not wait for long ones.
        self._prepare_pool = ThreadPoolExecutor(1, "prepare")
        self._short_pool = ThreadPoolExecutor(1, "prepare-short")
        self._lock = threading.Lock()
        self._free_slots = concurrency
        self._preparing = 0  # number of rows
        self._paused = self._closed = False
        self._open: set[_OpenRequest] = set()  # requests without an answer
        self._runs: set[_SlotRun] = set()
        self._recent_runs: deque[tuple[int, float]] = deque(maxlen=RECENT_RUNS)
        """Padded tokens and seconds of each recent run."""
        self._loop: asyncio.AbstractEventLoop  # the loop of the requests; set by the first request
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        """Number of waiting rows, including rows in preparation."""
        return len(self.queue) + self._preparing

    @property
    def is_stuck(self) -> bool:
        """Whether a run or preparation without waiting requests does not end."""
        with self._lock:
            since = [run.abandoned_at for run in self._runs if run.abandoned_at is not None]
        return bool(since) and self._clock() - min(since) > self._stuck_s

    def check_room(self, rows: int) -> None:
        """Check that the queue has room for ``rows``; an empty queue accepts every request.

        Raises:
            Overloaded: The queue has no room. All rows of a request are accepted, or none.
        """
        waiting = self.waiting
        is_empty = not waiting and (self.max_queue or self._free_slots)
        if not is_empty and waiting + rows > self.max_queue:
            raise Overloaded(
                f"{waiting} rows wait already, and at most {self.max_queue} may", "try again later"
            )

    async def submit(
        self, rows: Sequence[Row[P, R]], deadline: float | None = None
    ) -> RequestResult[P, R]:
        """Run ``rows`` in one or more batches.

        Args:
            rows: At least one. The batcher changes them.
            deadline: On the clock of the batcher; None for none.

        Raises:
            Overloaded: More than ``max_queue`` rows would wait.
            DeadlineExceeded: The deadline passed, or would pass before the end of the run.
            NotReady: The batcher is closed.
            asyncio.CancelledError: The task was cancelled; waiting rows are not computed.
            ValueError: ``rows`` is empty.
            Exception: An error of ``run`` for one of these rows.
        """
        request = self._open_request(len(rows), deadline)
        with self._lock:
            self._enqueue(request, _check_not_empty(rows), request.started)
        self._start_batches()
        return await self._wait(request)

    async def submit_from(
        self,
        prepare: Callable[[], Sequence[Row[P, R]]],
        count: int,
        deadline: float | None = None,
        *,
        is_short: bool = False,
    ) -> RequestResult[P, R]:
        """Run rows that ``prepare`` makes in a thread.

        Args:
            prepare: Makes the rows, at least one.
            count: Number of rows that count as waiting until they are prepared.
            is_short: Preparing takes less time than changing threads (about 0.2 ms). A free slot
                then prepares and runs the rows in one thread, if no other request could share
                the batch.

        Raises:
            Exception: An error of ``prepare``; see ``submit`` for others.
        """
        request = self._open_request(count, deadline)
        is_alone = len(self._open) < self._concurrency
        with self._lock:
            is_idle = self._free_slots > 0 and not self._paused and not len(self.queue)
            in_slot = is_short and is_alone and is_idle
            self._free_slots -= in_slot
            self._preparing += count
        prepare_pool = self._short_pool if is_short else self._prepare_pool
        pool = self._run_pool if in_slot else prepare_pool
        pool.submit(self._prepare, request, prepare, count, in_slot)
        return await self._wait(request)

    def pause(self) -> None:
        """Start no more runs."""
        self._paused = True

    def resume(self) -> None:
        """Start runs again after ``pause``."""
        self._paused = False
        self._start_batches()

    def refuse_all(self, error: Exception) -> None:
        """Answer all open requests with ``error``; results of current runs are dropped."""
        for request in list(self._open):
            self._fail(request, error)

    def close(self) -> None:
        """Refuse open requests and wait for the current runs."""
        self._closed = True
        self.pause()
        if self._open:  # futures belong to the loop; this may be another thread
            unloaded = NotReady("the model is unloaded", "load it again")
            self._loop.call_soon_threadsafe(self.refuse_all, unloaded)
        for pool in (self._prepare_pool, self._short_pool):
            pool.shutdown(wait=True)
        self._run_pool.shutdown(wait=True, cancel_futures=True)

    # -- on the event loop ------------------------------------------------------------------------

    def _open_request(self, rows: int, deadline: float | None) -> _OpenRequest:
        self.check_room(rows)
        if self._closed:
            raise NotReady("the model is unloaded", "load it again")
        loop = self._loop = asyncio.get_running_loop()
        now = self._clock()
        if deadline is not None and now >= deadline:
            raise DeadlineExceeded("the deadline has passed", "allow more time, or send less")
        return _OpenRequest(loop.create_future(), now, deadline)

    async def _wait(self, request: _OpenRequest) -> RequestResult[Any, Any]:
        timer = None
        if request.deadline is not None:
            delay = request.deadline - request.started
            timer = self._loop.call_later(delay, self._expire, request)
        self._open.add(request)
        try:
            return await request.future
        finally:
            self._open.discard(request)
            if timer is not None:
                timer.cancel()
            self._withdraw(request)

    def _start_batches(self) -> None:
        """Start every batch that is due and has a free slot."""
        for batch in self._take_batches():
            self._run_pool.submit(self._run_batches, [batch])

    def _expire(self, request: _OpenRequest) -> None:
        self._fail(
            request,
            DeadlineExceeded("the answer would come after the deadline", "allow more time"),
        )

    def _fail(self, request: _OpenRequest, error: Exception) -> None:
        if not request.future.done():
            request.future.set_exception(error)

    def _withdraw(self, request: _OpenRequest) -> None:
        """Remove waiting rows of an answered request, and cancel runs for this request alone."""
        with self._lock:
            if request.remaining:
                for row in request.rows:
                    self.queue.discard(row)
            ended = [
                run
                for run in self._runs
                if request in run.requests and all(waiter.future.done() for waiter in run.requests)
            ]
        for run in ended:
            run.abandoned_at = run.abandoned_at or self._clock()
            run.stop.set()

    def _deliver(self, done: list[tuple[list[AnyRow], BatchRun | Exception]]) -> None:
        for rows, batch in done:
            counts = Counter(row.request for row in rows)
            try:
                if isinstance(batch, Exception):
                    raise batch
                self._on_batch(batch)
                for row, result in zip(rows, batch.result.results, strict=True):
                    row.result = result
                for request, count in counts.items():
                    request.batches.append((batch, count))
                    request.remaining -= count
                    if not request.remaining and not request.future.done():
                        request.future.set_result(_request_result(request))
            except Exception as error:
                for request in counts:
                    self._fail(request, error)
                if isinstance(error, ModelFailed):
                    self._on_failure(error)

    def _arm(self, delay: float) -> None:
        """Call ``_start_batches`` after ``delay`` seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay, self._start_batches)

    # -- in a thread of a pool --------------------------------------------------------------------

    def _prepare(
        self,
        request: _OpenRequest,
        prepare: Callable[[], Sequence[AnyRow]],
        count: int,
        in_slot: bool,
    ) -> None:
        """Prepare and enqueue the rows of a request; in a slot, also run due batches."""
        rows: Sequence[AnyRow] = ()
        error: Exception | None = None
        start = self._clock()
        run = _SlotRun({request})
        with self._lock:
            self._runs.add(run)
        try:
            if not request.future.done():
                rows = _check_not_empty(prepare())
        except BaseException as raised:
            error = _as_exception(raised)
        end = self._clock()
        request.prepare_s = end - start
        with self._lock:
            self._runs.discard(run)
            self._preparing -= count
            self._free_slots += in_slot
            if rows and not request.future.done():
                self._enqueue(request, rows, end)
        if error is not None:
            self._loop.call_soon_threadsafe(self._fail, request, error)
        if in_slot:
            self._run_batches(self._take_batches())
        else:
            self._start_batches()

    def _run_batches(self, batches: list[list[AnyRow]]) -> None:
        """Run ``batches``, all but the first in other threads, and then every batch that is due."""
        while batches:
            for other in batches[1:]:
                self._run_pool.submit(self._run_batches, [other])
            done = self._compute(batches[0])
            batches = self._take_batches(freed=1)
            self._loop.call_soon_threadsafe(self._deliver, done)

    def _compute(self, rows: list[AnyRow]) -> list[tuple[list[AnyRow], BatchRun | Exception]]:
        """Run a batch; after a failure, run each request separately: only faulty requests fail."""
        start = self._clock()
        run = _SlotRun({row.request for row in rows})
        with self._lock:
            self._runs.add(run)
            is_only_run = self._free_slots == self._concurrency - 1 and not len(self.queue)
        # Runs of one request are of one session, whose weights are in the caches.
        is_alone = is_only_run and sum(len(request.rows) for request in run.requests) == len(rows)
        STOP.set(run.stop)
        IS_ALONE.set(is_alone)
        try:
            result = self._run(rows[0].key, [row.payload for row in rows])
        except BaseException as error:
            if run.abandoned_at is not None:
                return [(rows, DeadlineExceeded("the run was cancelled: no request waits for it"))]
            by_request: dict[Any, list[AnyRow]] = {}
            for row in rows:
                by_request.setdefault(row.request, []).append(row)
            if len(by_request) == 1:
                return [(rows, _as_exception(error))]
            return [outcome for part in by_request.values() for outcome in self._compute(part)]
        finally:
            with self._lock:
                self._runs.discard(run)
        ended = self._clock()
        with self._lock:
            self._recent_runs.append((len(rows) * rows[-1].tokens, ended - start))
        tokens = sum(row.real_tokens or row.tokens for row in rows)
        return [(rows, BatchRun(len(rows), rows[-1].tokens, tokens, start, ended, result))]

    def _take_batches(self, freed: int = 0) -> list[list[AnyRow]]:
        """Free ``freed`` slots, then take a slot for each batch that is due."""
        batches: list[list[AnyRow]] = []
        with self._lock:
            self._free_slots += freed
            now = self._clock()
            while self._free_slots and len(self.queue) and not self._paused:
                if self._max_wait and not self.queue.is_full:
                    oldest = min(request.queued_at for request in self.queue.requests)
                    delay = oldest + self._max_wait - now
                    if delay > 0:
                        self._loop.call_soon_threadsafe(self._arm, delay)
                        break
                for rows in self.queue.take(min(self._parts, self._free_slots)):
                    end = now + self._expected_s(len(rows) * rows[-1].tokens)
                    batch = [row for row in rows if not self._will_miss_deadline(row.request, end)]
                    if batch:
                        self._free_slots -= 1
                        batches.append(batch)
        return batches

    # -- with the lock held -----------------------------------------------------------------------

    def _enqueue(self, request: _OpenRequest, rows: Sequence[AnyRow], now: float) -> None:
        request.rows = list(rows)
        request.queued_at = now
        request.remaining = len(rows)
        request.has_waited = self._free_slots == 0 or self._paused
        for row in rows:
            row.request = request
            self.queue.add(row)

    def _expected_s(self, padded_tokens: int) -> float:
        """The longest recent run of at most this size, without outliers."""
        past = sorted(seconds for tokens, seconds in self._recent_runs if tokens <= padded_tokens)
        return past[-self._concurrency - 1] if len(past) > self._concurrency else 0.0

    def _will_miss_deadline(self, request: _OpenRequest, end: float) -> bool:
        """Whether a run that ends then is too late for ``request``; such a request is refused.

        A request that found a free slot always runs: the expected duration would otherwise never
        be corrected after one slow run.
        """
        if request.future.done():
            return True
        if not request.has_waited or request.deadline is None:
            return False
        margin = ANSWER_MARGIN * (request.deadline - request.queued_at)
        is_late = end + margin > request.deadline
        if is_late:
            self._loop.call_soon_threadsafe(self._expire, request)
        return is_late


def _check_not_empty(rows: Sequence[AnyRow]) -> Sequence[AnyRow]:
    if not rows:
        raise ValueError("a request needs at least one row")
    return rows


def _as_exception(error: BaseException) -> Exception:
    """``error``; for a panic of a Rust extension, which is not an Exception, ``ModelFailed``."""
    if isinstance(error, Exception):
        return error
    failed = ModelFailed(f"the model failed: {type(error).__name__}: {error}", "try again")
    failed.__cause__ = error
    return failed


def _request_result(request: _OpenRequest) -> RequestResult[Any, Any]:
    spans = sorted((batch.started, batch.ended) for batch, _ in request.batches)
    compute_s = _union(spans)
    total_s = max(end for _, end in spans) - request.started
    return RequestResult(
        request.rows,
        queue_ms=max(total_s - compute_s - request.prepare_s, 0) * 1e3,
        compute_ms=compute_s * 1e3,
        batches=request.batches,
        prepare_ms=request.prepare_s * 1e3,
    )


def _union(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals, which are sorted by start."""
    covered = 0.0
    until = float("-inf")
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
