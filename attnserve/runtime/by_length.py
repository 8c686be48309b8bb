"""Run short rows of a model in one session, and long rows in another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations
from threading import Lock

from attnserve.runtime.interface import Feed, Session, SessionWrapper, row_length

__all__ = ["LengthRunner", "by_length", "runtimes_by_length", "with_pairs"]


def by_length(short: str, long: str) -> str:
    """The joint name of a runtime for short rows and a runtime for long rows."""
    return f"{short}+{long}"


def runtimes_by_length(name: str) -> tuple[str, str]:
    """The runtimes of short and of long rows in a name of ``by_length``; equal if it names one."""
    short, _, long = name.partition("+")
    return short, long or short


def with_pairs(runtimes: Sequence[str]) -> list[str]:
    """The names of runtimes, and of all pairs of them for short and for long rows."""
    return [*runtimes, *(by_length(*pair) for pair in permutations(runtimes, 2))]


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
