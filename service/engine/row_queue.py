"""The queue of rows: which rows share a run.

A **row** is one text, or one index of the batch axis of tensors. Rows of equal key can share a
batch, which is padded to its longest row. The cost of a batch is its number of padded tokens (rows
x longest row), and stays within a budget. A row that is longer than the budget runs alone. The
queue has no clock and no threads.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

from attnserve.serving.padding import padded_length

P = TypeVar("P")
R = TypeVar("R")


@dataclass(slots=True, eq=False)
class Row(Generic[P, R]):
    """A unit of work: one text, or one index of the batch axis of tensors.

    Attributes:
        key: Rows of equal key can share a run.
        tokens: Number of tokens that a run computes for the row, at least 1.
        payload: The value that ``Batcher`` passes to its ``run``.
        real_tokens: Number of tokens without the padding of a model with a fixed length; None if
            equal to ``tokens``.
        request: The request of the row; set by the batcher.
        number: The position in the order of arrival; set by the queue.
        result: The result of the run; set by the batcher.
    """

    key: Hashable
    tokens: int
    payload: P
    real_tokens: int | None = None
    request: Any = None
    number: int = 0
    result: R = field(init=False, repr=False)


AnyRow = Row[Any, Any]

RUN_START_OVERHEADS = 2
"""The cost of starting a run, as a multiple of ``Queue.overhead``."""

MOST_TURNS = 4
"""Maximum number of batches that one run takes in turn, when rows are divided."""


class Division(NamedTuple):
    """Rows divided into batches of close lengths.

    Attributes:
        sizes: The number of rows of each batch, longest rows first.
        padded_tokens: The padded tokens of the largest batch.
    """

    sizes: Sequence[int]
    padded_tokens: int = 0

    @classmethod
    def even(cls, lengths: Sequence[int], batches: int, multiple: int = 1) -> Division:
        """Divide rows into at most ``batches`` batches; the largest is as small as possible.

        Args:
            lengths: Tokens of the rows, in rising order; not empty.
            multiple: See ``Queue``. If it is not 1, the largest batch may be larger than possible.
        """
        rows, longest = len(lengths), lengths[-1]
        first, last = (count * padded_length(count, longest, multiple) for count in (1, rows))
        tokens = range(first, last + 1)
        least = bisect_left(
            tokens, True, key=lambda most: len(cls._within(lengths, most, multiple)) <= batches
        )
        return cls(cls._within(lengths, tokens[least], multiple), tokens[least])

    @staticmethod
    def _within(lengths: Sequence[int], most: int, multiple: int) -> Sequence[int]:
        """The numbers of rows of few batches with at most ``most`` padded tokens each."""
        sizes: list[int] = []
        left = len(lengths)
        while left:
            longest = lengths[left - 1]
            counts = range(min(left, most // longest), 0, -1)
            fits = (n for n in counts if n * padded_length(n, longest, multiple) <= most)
            sizes.append(next(fits))
            left -= sizes[-1]
        return sizes


class Queue:
    """Waiting rows, and the choice of rows that run together.

    Requests take turns, so that a short request does not wait for all rows of a large one. A batch
    consists of the oldest row of the next request and the rows of the closest lengths, up to the
    budget. A row joins only if its added padding costs no more than a separate run.

    Args:
        budget: Maximum number of padded tokens of a batch: rows x longest row.
        overhead: Maximum padding that a row may add, in tokens: a part of the cost of a run.
        max_rows: Maximum rows of a batch; None for no limit.
        multiple: The runtime pads rows further, until the tokens of a run are a multiple of this.
    """

    def __init__(
        self, budget: int, overhead: int = 0, max_rows: int | None = None, multiple: int = 1
    ) -> None:
        self.budget, self.overhead, self.max_rows = budget, overhead, max_rows
        self.multiple = multiple
        self._waiting: OrderedDict[Any, OrderedDict[int, AnyRow]] = OrderedDict()
        """The rows of each request by number; the first request has the next turn."""
        self._sorted: dict[Hashable, list[tuple[int, int, AnyRow]]] = {}
        self._planned: Sequence[int] = ()
        """The numbers of rows of the next batches, which ``take`` has divided."""
        self._next = 0
        self._rows = 0
        self.tokens = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def is_full(self) -> bool:
        """Whether a batch gains nothing by waiting for more rows."""
        has_rows = self.max_rows is not None and self._rows >= self.max_rows
        return has_rows or self.tokens >= self.budget

    @property
    def next(self) -> AnyRow:
        """The oldest row of the request that has the next turn."""
        return next(iter(next(iter(self._waiting.values())).values()))

    @property
    def requests(self) -> Iterable[Any]:
        """The requests with waiting rows."""
        return self._waiting.keys()

    def add(self, row: AnyRow) -> None:
        """Add a row to the rows of its request; a new request has the last turn."""
        row.number = self._next
        self._next += 1
        self._waiting.setdefault(row.request, OrderedDict())[row.number] = row
        self._rows += 1
        insort(self._sorted.setdefault(row.key, []), (row.tokens, row.number, row))
        self.tokens += row.tokens
        self._planned = ()

    def discard(self, row: AnyRow) -> None:
        """Remove ``row`` if it still waits."""
        if self._waiting.get(row.request, {}).get(row.number) is row:
            rows = self._sorted[row.key]
            at = bisect_left(rows, (row.tokens, row.number))
            self._remove(rows, at, at + 1)
            self._planned = ()

    def take(self, runs: int = 1) -> list[list[AnyRow]]:
        """Remove and return the next batches, shortest row first; the queue must not be empty.

        Args:
            runs: Number of runs that can start now. Rows that fit into them are divided, so that
                all end at the same time; otherwise there is one batch. The batches of a division
                that do not start now are the next ones, unless other rows wait or come.
        """
        rows = self._sorted[self.next.key]
        sizes = self._planned or self._divided([tokens for tokens, _, _ in rows], runs)
        if not sizes:
            return [self._take_one()]
        batches = [self._remove(rows, len(rows) - size, len(rows)) for size in sizes[:runs]]
        self._planned = sizes[runs:] if len(self._sorted) <= 1 else ()
        return batches

    def _divided(self, lengths: Sequence[int], runs: int) -> Sequence[int]:
        """The numbers of rows of concurrent batches, longest rows first; none for one batch.

        Args:
            lengths: Tokens of the rows, in rising order.
        """
        run_cost = RUN_START_OVERHEADS * self.overhead
        if runs == 1 or sum(lengths) < runs * run_cost:
            return ()
        best: Sequence[int] = ()
        least = math.inf
        for turns in range(1, MOST_TURNS + 1):
            sizes, padded_tokens = Division.even(lengths, runs * turns, self.multiple)
            cost = turns * (padded_tokens + run_cost)
            fits = self.max_rows is None or max(sizes) <= self.max_rows
            if fits and padded_tokens <= self.budget and cost < least:
                best, least = sizes, cost
        return best

    def _take_one(self) -> list[AnyRow]:
        """Remove and return a batch with the oldest row of the request that has the next turn."""
        oldest = self.next
        self._waiting.move_to_end(oldest.request)
        rows = self._sorted[oldest.key]
        low = bisect_left(rows, (oldest.tokens, oldest.number))
        high = low + 1  # the batch is rows[low:high]
        while self.max_rows is None or high - low < self.max_rows:
            size = high - low + 1
            longest = rows[high - 1][0]
            # For each neighbor: the padding that it would add, and whether it is the longer one.
            padding_costs: list[tuple[int, bool]] = []
            if low > 0 and size * longest <= self.budget:
                padding_costs.append((longest - rows[low - 1][0], False))
            if high < len(rows) and size * rows[high][0] <= self.budget:
                padding_costs.append(((size - 1) * (rows[high][0] - longest), True))
            padding, is_above = min(padding_costs, default=(math.inf, False))
            if padding > self.overhead:
                break
            low, high = (low, high + 1) if is_above else (low - 1, high)
        return self._remove(rows, low, high)

    def _remove(self, rows: list[tuple[int, int, AnyRow]], low: int, high: int) -> list[AnyRow]:
        removed = [row for _, _, row in rows[low:high]]
        del rows[low:high]
        for row in removed:
            waiting = self._waiting[row.request]
            del waiting[row.number]
            if not waiting:
                del self._waiting[row.request]
            self._rows -= 1
            self.tokens -= row.tokens
        if not rows:
            del self._sorted[removed[0].key]
        return removed
