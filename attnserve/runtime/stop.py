"""Cancel a run of a session whose result is no longer needed."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

__all__ = ["STOP", "Stop"]


class Stop:
    """Ends the run of one thread, from another thread."""

    def __init__(self) -> None:
        self._is_set = False
        self._end: Callable[[], None] | None = None

    def connect(self, end: Callable[[], None]) -> None:
        """Register ``end``, which ends the run. After ``set``, ``end`` is called at once."""
        self._end = end
        if self._is_set:
            end()

    def set(self) -> None:
        """End the run at its next node."""
        self._is_set = True
        if self._end is not None:
            self._end()


STOP: ContextVar[Stop | None] = ContextVar("stop", default=None)
"""The ``Stop`` of the run in this thread."""
