"""HTTP connections with bounds that uvicorn lacks: the size of the head, the time of transfers.

``uvicorn --http h11`` limits heads too, and keeps the bodies of requests that offer an upgrade, but
needs 100 us more processor time for each request.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["Protocol"]

MAX_HEAD_BYTES = 65_536
"""Of the request line and the headers."""

RECEIVE_S = 60.0
"""A request must be complete this long after its first byte, the first one after the connection."""

SEND_S = 30.0
"""A connection whose client reads nothing of an answer for this time is closed."""

UPGRADE = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""The JDK's client offers HTTP/2 with every request; httptools would then drop the body
(github.com/MagicStack/httptools/issues/124)."""

TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


class Protocol(HttpToolsProtocol):
    """A connection that ends if its client sends too much or too slowly, or does not read."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes: int | None = 0  # None while a body is read
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._receiving is None:
            self._start_receiving()
        if self._head_bytes is not None:
            head, end, body = data.partition(b"\r\n\r\n")
            self._head_bytes += len(head)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)
                return
            data = UPGRADE.sub(b"", head + end[:2], count=1) + end[2:] + body
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None
        super().resume_writing()

    def _start_receiving(self) -> None:
        self._receiving = self.loop.call_later(RECEIVE_S, self._refuse, TOO_SLOW)

    def _watch_sending(self) -> None:
        unread = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(SEND_S, self._check_sending, unread)

    def _check_sending(self, unread: int) -> None:
        if self.transport.get_write_buffer_size() < unread:
            self._watch_sending()
        else:
            self.transport.abort()

    def _refuse(self, status: bytes) -> None:
        """Answer with an error, unless a request is being answered, and close the connection."""
        if self.transport.is_closing():
            return
        cycle: Any = self.cycle  # None before the first request
        if cycle is None or cycle.response_complete:
            head = b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            self.transport.write(head % status)
        self.transport.close()

    def _cancel_timers(self) -> None:
        for timer in (self._receiving, self._sending):
            if timer is not None:
                timer.cancel()
