"""HTTP connections with limits that uvicorn lacks: size of the head, duration of transfers.

The alternative ``uvicorn --http h11`` limits heads too, and keeps the bodies of requests that offer
an upgrade, but needs 100 us more processor time for each request.

A head is the request line with the headers. The parser receives complete heads only, and the next
head separately from a body: headers that offer an upgrade are removed first, and the network may
split a head at any byte, also within such a header.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys
from contextlib import suppress
from typing import Any, ClassVar

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

MAX_HEAD_BYTES = 65_536
"""Maximum size of the request line and the headers."""

END = re.compile(rb"\r?\n\r?\n")
"""End of a head."""

CHUNK_SIZE = re.compile(rb"[0-9a-fA-F]+")

START = re.compile(rb"[\r\n]{0,4}(?:[A-Z]|$)")
"""Start of a head; TLS and other protocols are refused at their first byte."""

UPGRADE = re.compile(rb"(?<=\n)upgrade[ \t]*:[^\n]*\n(?:[ \t][^\n]*\n)*", re.IGNORECASE)
"""A header that offers another protocol, which this server never accepts. The JDK's client offers
HTTP/2 with every request, and httptools would drop the body
(github.com/MagicStack/httptools/issues/124)."""

HEALTH = ("/v2/health/live", "/v2/health/ready", "/health", "/ping")
"""Paths that connections above the limit may request."""

MALFORMED = b"400 Bad Request"
TOO_LARGE = b"431 Request Header Fields Too Large"
TOO_SLOW = b"408 Request Timeout"


def _surplus(app: ASGIApp) -> ASGIApp:
    """The application for a connection above the limit."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in HEALTH:
            await app(scope, receive, send)
            return
        content = {"error": "too many connections; try again later"}
        refusal = JSONResponse(content, 503, {"connection": "close", "retry-after": "1"})
        await refusal(scope, receive, send)

    return answer


class ConnectionState(ServerState):
    """The state of a server, shared by its connections.

    Attributes:
        cut_answers: Connections that were closed in the middle of an answer.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cut_answers = 0


class ChunkedBody:
    """Finds the end of a body in chunks, which arrives in parts (RFC 9112, 7.1).

    The parser does not tell where a body ends in what it receives.
    """

    def __init__(self) -> None:
        self._left = 0  # bytes of the chunk, with the end of its line
        self._line = b""  # the received part of a line that states a size, or of a trailer
        self._is_trailer = False

    def end(self, data: bytes) -> int | None:
        """The number of bytes of ``data`` that belong to the body; None if it is malformed."""
        place = 0
        while place < len(data):
            if self._left:
                step = min(self._left, len(data) - place)
                self._left -= step
                place += step
                continue
            stop = data.find(b"\n", place) + 1
            self._line += data[place : stop or len(data)]
            place = stop or len(data)
            if not stop:
                break
            line, self._line = self._line.rstrip(b"\r\n"), b""
            if self._is_trailer and not line:
                break
            if not self._is_trailer:
                found = CHUNK_SIZE.match(line)
                if found is None:
                    return None
                chunk = int(found[0], 16)
                self._is_trailer = not chunk
                self._left = chunk and chunk + 2
        return place


class Protocol(HttpToolsProtocol):
    """A connection that is closed if its client sends too much or too slowly, or does not read.

    A connection above uvicorn's ``limit_concurrency`` takes the place of one that waits for its
    client. If no connection waits, the new one is answered with 503, except for health checks.
    uvicorn itself would refuse all requests of all connections, including probes.

    Attributes:
        receive_s: Seconds to receive a request from its first byte on; the first, from the
            connection on.
        surplus_s: The same for a request on a connection above the limit.
        young_s: Age from which waiting connections between requests are preferred, of those that
            may be closed above the limit.
        old_s: Age from which incomplete requests may be closed so.
        send_s: Time after which a connection is closed if its client receives no byte of an answer.
        linger_s: After an error answer, input is dropped for at most this time: closing a
            connection with unread input resets it, and the client may lose the answer.
    """

    receive_s: ClassVar = 60.0
    surplus_s: ClassVar = 2.0
    young_s: ClassVar = 1.0
    old_s: ClassVar = 5.0
    send_s: ClassVar = 30.0
    linger_s: ClassVar = 2.0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._most = self.limit_concurrency
        self.limit_concurrency = None
        self._head = bytearray()  # the received part of an incomplete head
        self._body_left = 0.0  # bytes; infinite for chunks, 0 while a head is read
        self._unread_bytes = 0  # sizes of chunks and trailers since the last part of a body
        self._waits_since = self.loop.time()  # start of the wait for a request, or its rest
        self._chunks = ChunkedBody()  # the place in a body in chunks
        self._receiving: asyncio.TimerHandle | None = None
        self._sending: asyncio.TimerHandle | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._refused = False
        self._answering: RequestResponseCycle | None = None
        """The running request; uvicorn's ``cycle`` is the newest one."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # Any unsent byte starts the watch. With 0 in place of 1, TLS of asyncio would never resume.
        transport.set_write_buffer_limits(1)
        is_surplus = self._most is not None and len(self.connections) > self._most
        if is_surplus and not self._make_room():
            self.app = _surplus(self.app)
            self._start_receiving(self.surplus_s)
        else:
            self._start_receiving(self.receive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._receiving, self._sending, self._lingering):
            if timer is not None:
                timer.cancel()
        self._disconnect()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        if self._is_between:  # uvicorn stops its timer at a complete head
            super().timeout_keep_alive_handler()

    def data_received(self, data: bytes) -> None:
        while data and not self._refused:
            if self._receiving is None:
                self._start_receiving(self.receive_s)
            data = self._receive_body(data) if self._body_left else self._receive_head(data)

    def _receive_head(self, data: bytes) -> bytes:
        """Buffer a part of a head until it is complete; returns the remaining bytes."""
        searched = max(len(self._head) - 3, 0)
        self._head += data
        end = END.search(self._head, searched)
        size = len(self._head) if end is None else end.end()
        if size > MAX_HEAD_BYTES or not START.match(self._head):
            self._refuse(TOO_LARGE if size > MAX_HEAD_BYTES else MALFORMED)
            return b""
        if end is None:
            return b""
        head, rest = bytes(self._head[:size]), bytes(self._head[size:])
        self._head.clear()
        super().data_received(UPGRADE.sub(b"", head))
        return rest

    def _receive_body(self, data: bytes) -> bytes:
        """Read a part of a body; returns the remaining bytes."""
        if self._body_left == math.inf:
            size = self._chunks.end(data)
            if size is None:
                self._refuse(MALFORMED)
                return b""
        else:
            size = int(min(self._body_left, len(data)))
            self._body_left -= size
        self._unread_bytes += size
        super().data_received(data[:size])
        if self._unread_bytes > MAX_HEAD_BYTES:
            self._refuse(TOO_LARGE)
        return data[size:]

    def on_headers_complete(self) -> None:
        sizes = (int(value) for name, value in self.headers if name == b"content-length")
        is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
        assert self.parser is not None
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts != 1 and (hosts or self.parser.get_http_version() == "1.1"):
            raise ValueError("RFC 9112, 3.2: exactly one Host")  # answered with 400
        if self.parser.should_upgrade():
            raise ValueError("CONNECT asks for a tunnel")
        self._body_left = math.inf if is_chunked else next(sizes, 0)
        self._chunks = ChunkedBody()
        super().on_headers_complete()
        if not self.pipeline:
            self._answering = self.cycle

    def on_body(self, body: bytes) -> None:
        self._unread_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._body_left = self._unread_bytes = 0
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answering = self.pipeline[-1][0]
        self._waits_since = self.loop.time()
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

    def _start_receiving(self, seconds: float) -> None:
        self._waits_since = self.loop.time()
        self._receiving = self.loop.call_later(seconds, self._refuse, TOO_SLOW)

    def _make_room(self) -> bool:
        """Close a connection that waits for its client; return whether there was one.

        The order is: connections without any request, connections between two requests, young
        connections of both kinds, connections with an incomplete request.
        """
        now = self.loop.time()
        order: dict[Protocol, tuple[bool, bool, bool, float]] = {}
        for connection in self.connections:
            if isinstance(connection, Protocol) and connection is not self and connection._waits:
                age = now - connection._waits_since
                if connection._is_between or age >= self.old_s:
                    has_asked = connection._answering is not None
                    is_open = not connection._is_between
                    is_young = age < self.young_s
                    order[connection] = is_open, is_young, has_asked, connection._waits_since
        if not order:
            return False
        candidate = min(order, key=lambda connection: order[connection])
        if candidate._is_between:
            candidate.transport.close()
        else:
            candidate._refuse(TOO_SLOW)
        return True

    @property
    def _waits(self) -> bool:
        """Whether all complete requests are answered."""
        current = self._answering
        is_answered = (
            current is None
            or current.response_complete
            or (self._body_left > 0 and not current.response_started and current is self.cycle)
        )
        return is_answered and not (self.pipeline or self._refused or self.transport.is_closing())

    @property
    def _is_between(self) -> bool:
        """Whether no byte of the next request has arrived."""
        return not (self._head or self._body_left)

    def _watch_sending(self) -> None:
        self._sending = self.loop.call_later(self.send_s, self._check_sending, self._unsent)

    def _check_sending(self, before: int) -> None:
        if self._unsent < before:
            self._watch_sending()
            return
        if isinstance(self.server_state, ConnectionState):
            self.server_state.cut_answers += 1
        self.transport.abort()

    @property
    def _unsent(self) -> int:
        """Number of bytes that the client has not received yet.

        The kernel buffers megabytes, and accepts no more while a slow client reads them. The number
        of bytes that wait in this process is therefore no measure of progress.
        """
        waiting = self.transport.get_write_buffer_size()
        if sys.platform == "linux":
            import fcntl
            import termios

            queued = bytearray(4)
            with suppress(OSError):
                fcntl.ioctl(self.transport.get_extra_info("socket"), termios.TIOCOUTQ, queued)
            waiting += int.from_bytes(queued, sys.byteorder)
        return waiting

    def _refuse(self, status: bytes) -> None:
        """Answer with an error after the answers to earlier requests, and close the connection."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        if self._receiving is not None:
            self._receiving.cancel()
        answer = self._answering
        if answer is not None and not answer.response_complete:
            is_its_body = answer is self.cycle and self._body_left > 0
            if answer.response_started or not is_its_body:
                answer.keep_alive = False  # uvicorn closes the connection after its answer
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
        self._lingering = self.loop.call_later(self.linger_s, self.transport.close)

    def _disconnect(self) -> None:
        """End the running request; uvicorn does this only for the newest one."""
        current = self._answering
        if current is not None and not current.response_complete:
            current.disconnected = True
            current.message_event.set()
