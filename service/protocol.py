"""HTTP connections with bounds that uvicorn lacks: the size of the head, the time of transfers.

``uvicorn --http h11`` limits heads too, and keeps the bodies of requests that offer an upgrade, but
needs 100 us more processor time for each request.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 65_536
"""Of the request line and the headers."""

RECEIVE_S = 60.0
"""A request must be complete this long after its first byte, the first one after the connection."""

SEND_S = 30.0
"""A connection whose client reads nothing of an answer for this time is closed."""

LINGER_S = 2.0
"""After an error answer, input is dropped for at most this time: closing a connection with unread
input resets it, and the client may lose the answer."""

UPGRADE = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)", re.IGNORECASE)
"""The JDK's client offers HTTP/2 with every request; httptools would then drop the body
(github.com/MagicStack/httptools/issues/124)."""

HEALTH = ("/v2/health/live", "/v2/health/ready")
"""Paths that connections above the limit may ask for."""

MALFORMED = b"400 Bad Request"
TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


def _surplus(app: Any) -> Any:
    """The application for a connection above the limit."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await app(scope, receive, send)
            return
        body = b'{"error":"too many connections; try again later"}'
        headers = [(b"content-type", b"application/json"), (b"connection", b"close"),
                   (b"retry-after", b"1"), (b"content-length", b"%d" % len(body))]  # fmt: skip
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return answer


class Protocol(HttpToolsProtocol):
    """A connection that ends if its client sends too much or too slowly, or does not read.

    Connections above uvicorn's ``limit_concurrency`` are answered with 503, except for health
    checks. uvicorn would refuse all requests of all connections then, those of probes too.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most, self.limit_concurrency = self.limit_concurrency, None
        self._head_bytes: int | None = 0  # None while a body is read
        self._unread_bytes = 0  # since the last part of a body: sizes of chunks, and trailers
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._refused = False
        self._answering: Any = None  # the request that runs; ``cycle`` is the newest

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app = _surplus(self.app)
        self._start_receiving()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._sending, self._lingering):
            if timer is not None:
                timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._receiving is None:
            self._start_receiving()
        if self._head_bytes is not None:
            head, end, body = data.partition(b"\r\n\r\n")
            self._head_bytes += len(head)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)
                return
            data = UPGRADE.sub(b"", head + end[:2], count=1) + end[2:] + body
        else:
            self._unread_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is None and self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = self._unread_bytes = 0
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(MALFORMED)

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
        """Answer with an error after the requests before, and close the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._receiving is not None:
            self._receiving.cancel()
        current = self._answering
        if current is not None and not current.response_complete:
            is_its_body = current is self.cycle and self._head_bytes is None
            if current.response_started or not is_its_body:
                current.keep_alive = False  # uvicorn closes the connection after its answer
                return
            self._disconnect()
        body = b'{"error":"%b"}' % status.partition(b" ")[2]
        self.transport.write(
            b"HTTP/1.1 %b\r\nconnection: close\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
        )
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._lingering = self.loop.call_later(LINGER_S, self.transport.close)

    def _disconnect(self) -> None:
        """End the request that runs; uvicorn does this only for the newest one."""
        current = self._answering
        if current is not None and not current.response_complete:
            current.disconnected = True
            current.message_event.set()
