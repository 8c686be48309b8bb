"""Limit of the bytes of all open requests."""

from __future__ import annotations

import asyncio
from time import perf_counter

from service.errors import DeadlineExceeded, Overloaded


class Budget:
    """Byte budget of the requests of one event loop. A request alone may have any size.

    Args:
        limit: Maximum number of bytes in use at the same time.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    def take(self, size: int, held: int = 0) -> None:
        """Reserve ``size`` bytes until they are released.

        Args:
            held: The bytes that the same request has reserved before.

        Raises:
            Overloaded: Other requests use too many bytes.
        """
        if self._used > held and not self._has_room(size):
            raise Overloaded(
                f"open requests hold {self._used} bytes, and the limit is {self._limit}",
                "try again later",
            )
        self._used += size

    async def wait(self, size: int, deadline: float | None) -> None:
        """Wait for ``size`` free bytes, in order of arrival, and reserve them.

        Args:
            deadline: On the clock of ``perf_counter``; None for none.

        Raises:
            DeadlineExceeded: The deadline passed before the bytes were free.
        """
        timeout_s = None if deadline is None else deadline - perf_counter()
        try:
            async with asyncio.timeout(timeout_s), self._turn:
                while not self._has_room(size):
                    self._freed.clear()
                    await self._freed.wait()
                self._used += size
        except TimeoutError as error:
            raise DeadlineExceeded(
                "the memory for the answer was not free before the deadline", "allow more time"
            ) from error

    def give_back(self, size: int) -> None:
        """Release ``size`` reserved bytes, and admit the requests that wait for them."""
        self._used -= size
        self._freed.set()

    def _has_room(self, size: int) -> bool:
        return not self._used or self._used + size <= self._limit
