"""Run short rows of a model in one session, and long rows in another."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple, Self

from attnserve.runtime.interface import Feed, Session, SessionWrapper, row_length
from attnserve.runtime.times import Times
from graph_passes.analysis.workload import Workload

__all__ = ["LengthRunner", "RowRuntimes", "fastest_times"]


class RowRuntimes(NamedTuple):
    """The runtimes that run a model: that of short rows and that of long rows; usually the same.

    As text, as in records, it is "onnxruntime", or "onnxruntime+openvino".
    """

    short: str
    long: str

    @classmethod
    def one(cls, runtime: str) -> Self:
        """One runtime for all rows."""
        return cls(runtime, runtime)

    @classmethod
    def parse(cls, text: str) -> Self:
        short, _, long = text.partition("+")
        return cls(short, long or short)

    def __str__(self) -> str:
        return "+".join(dict.fromkeys(self))


def fastest_times(
    times: Mapping[str, Times[Workload]], choices: Sequence[RowRuntimes]
) -> Times[Workload]:
    """The times of a model in the fastest choice, of a pair with the best length between them.

    Args:
        times: The times of the model by runtime. Choices without times do not count.
    """
    every: list[Times[Workload]] = []
    for choice in choices:
        if not times.keys() >= {*choice}:
            continue
        short, long = times[choice.short], times[choice.long]
        lengths = {workload: workload.length for workload in short.by_shape}
        every += [short] if short is long else short.splits(long, lengths).values()
    return min(every, key=lambda each: each.ms)


class LengthRunner(SessionWrapper[Session]):
    """A session that runs rows up to a length in one session, and longer rows in another.

    Args:
        short: A session.
        open_long: Returns a session of the same file; called before its first run.
        above: Maximum number of tokens of rows that run in ``short``.
    """

    def __init__(self, short: Session, open_long: Callable[[], Session], above: int) -> None:
        super().__init__(short)
        self.short, self.above = short, above
        self._open_long = open_long
        self._long: Session | None = None
        self._lock = Lock()

    @property
    def long(self) -> Session:
        """The session of long rows."""
        with self._lock:
            if self._long is None:
                self._long = self._open_long()
            return self._long

    def session_of(self, feed: Feed) -> Session:
        return self.long if (row_length(feed) or 0) > self.above else self.short
