"""Connections of clients that send too much, too slowly, or do not read."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from service import protocol
from tests.service.conftest import until

LARGE = 50_000_000
BODY = b'{"inputs": "a"}'
HEAD = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 15\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"

JDK = (
    b"POST / HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: 15\r\nHost: a\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.2\r\nContent-Type: application/json\r\n\r\n"
)


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """Answer with the body of the request; /large with many bytes."""
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message.get("body", b""), message.get("more_body", False)
    answer = bytes(LARGE) if scope["path"] == "/large" else body
    headers = [(b"content-length", str(len(answer)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": answer})


class Recorded(protocol.Protocol):
    """A connection that tests can look at."""

    made: ClassVar[list[Recorded]] = []

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.made.append(self)
        super().connection_made(transport)


@contextmanager
def served(
    app: Any = echo, times: dict[str, Any] | None = None, **options: Any
) -> Iterator[tuple[str, int]]:
    http = type("Timed", (Recorded,), times or {})
    config = uvicorn.Config(app, port=0, http=http, lifespan="off", log_config=None, **options)
    Recorded.made.clear()
    server = uvicorn.Server(config)
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    yield listener.getsockname()
    server.force_exit = server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    with served(times={"linger_s": 0.5}) as found:
        yield found


@pytest.fixture
def impatient() -> Iterator[tuple[str, int]]:
    """With short time limits; a busy machine may exceed them where they do not matter."""
    with served(times={"linger_s": 0.5, "receive_s": 0.5, "send_s": 0.5}) as found:
        yield found


@contextmanager
def connected(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, timeout=10) as client:
        yield client


def answer(client: socket.socket) -> bytes:
    """All bytes until the server closes, or the answer to one request with a short body."""
    found = b""
    while b"\r\n\r\n" not in found or len(found.partition(b"\r\n\r\n")[2]) < _length(found):
        part = client.recv(65_536)
        if not part:
            break
        found += part
    return found


def _length(found: bytes) -> int:
    lines = found.lower().split(b"\r\n")
    return next((int(x.split(b":")[1]) for x in lines if x.startswith(b"content-length")), 0)


def is_closed(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_requests_of_one_connection_are_answered_one_after_another(address: tuple[str, int]):
    with connected(address) as client:
        for _ in range(3):
            client.sendall(HEAD + b"\r\n" + BODY)
            assert answer(client).endswith(BODY)
            time.sleep(0.3)  # idle time does not count
        client.sendall((HEAD + b"\r\n" + BODY) * 2)
        assert answer(client).endswith(BODY)


UPGRADES = [b"h2c", b"websocket", b"TLS/1.0, h2c", b"h2c\r\n ,x"]


def offering(protocol: bytes) -> bytes:
    return JDK.replace(b"Upgrade: h2c", b"Upgrade: " + protocol)


@pytest.mark.parametrize("offered", UPGRADES)
@pytest.mark.parametrize("at", ["value", "end", "body"])
def test_request_cut_into_segments_keeps_its_body(
    address: tuple[str, int], offered: bytes, at: str
):
    """The cut is in the offer, in the end of the head, or before the same text in a body."""
    body = b"\r\nupgrade: h2c\r\n\r\n" * 7_500
    head = offering(offered).replace(b"Length: 15", b"Length: %d" % len(body))
    cut = {"value": head.index(b"Upgrade: ") + 10, "end": len(head) - 2, "body": len(head)}[at]
    with connected(address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in ((head + body)[:cut], (head + body)[cut:]):
            client.sendall(part)
            time.sleep(0.1)
        assert answer(client).endswith(body)


@pytest.mark.parametrize("offered", UPGRADES)
def test_pipelined_requests_that_offer_an_upgrade_keep_their_bodies(
    address: tuple[str, int], offered: bytes
):
    with connected(address) as client:
        client.sendall((offering(offered) + BODY) * 3)
        found = b""
        while found.count(BODY) < 3:
            part = client.recv(65_536)
            assert part
            found += part


@given(
    texts=st.lists(st.binary(min_size=1, max_size=40) | st.sampled_from([b"\n\n", b"\r\n\r\n0"])),
    extension=st.sampled_from([b"", b";a=b"]),
    trailer=st.sampled_from([b"", b"X: y\r\n", b"X: y\r\nZ: 0\r\n"]),
    cuts=st.lists(st.integers(0, 400)),
)
def test_end_of_chunks_is_found_in_any_parts(
    texts: list[bytes], extension: bytes, trailer: bytes, cuts: list[int]
):
    chunks = [b"%x%b\r\n%b\r\n" % (len(text), extension, text) for text in texts]
    sent = b"".join(chunks) + b"0" + extension + b"\r\n" + trailer + b"\r\n"
    body, found = protocol.ChunkedBody(), 0
    cuts = sorted({cut for cut in cuts if cut < len(sent)} | {0})
    for start, stop in zip(cuts, [*cuts[1:], None], strict=True):
        size = body.end(sent[start:stop] + (HEAD if stop is None else b""))
        assert size is not None
        found += size
    assert found == len(sent)


def test_newlines_in_a_chunk_are_one_part():
    """A part for each of them would block all connections: each part copies the rest."""
    body = protocol.ChunkedBody()
    assert body.end(b"fffff\r\n" + b"\n" * 60_000) == 60_007
    assert body.end(b"\n" * 60_000) == 60_000


@pytest.mark.parametrize("line", [b"x\r\n", b"\r\n", b"-1\r\n", b" 1\r\n"])
def test_chunk_without_a_size_is_malformed(address: tuple[str, int], line: bytes):
    with connected(address) as client:
        client.sendall(CHUNKED + line)
        assert b" 400 " in client.recv(65_536)


@pytest.mark.parametrize("cut", [-4, -3, -2, -1, 0, 1, 40])
def test_request_after_chunks_arrives_in_any_segments(address: tuple[str, int], cut: int):
    """The client may send it with the end of chunks, for example after an early refusal."""
    text = b"a\r\n\r\n\n\nb\r\n"  # empty lines inside of a chunk
    chunks = CHUNKED + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text)
    sent = chunks + JDK + BODY + chunks + HEAD + b"Connection: close\r\n\r\n" + BODY
    with connected(address) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.sendall(sent[: len(chunks) + cut])
        time.sleep(0.1)
        client.sendall(sent[len(chunks) + cut :])
        found = b""
        while part := client.recv(65_536):
            found += part
    assert found.count(b" 200 ") == 4
    assert found.count(text) == found.count(BODY) == 2 and found.endswith(BODY)


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET / HTTP/1.1\r\n", b" 400 "),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n", b" 400 "),
        (b"GET / HTTP/1.0\r\n", b" 200 "),
    ],
)
def test_request_needs_exactly_one_host_unless_it_is_old(
    address: tuple[str, int], head: bytes, status: bytes
):
    with connected(address) as client:
        client.sendall(head + b"\r\n")
        assert status in answer(client)


@pytest.mark.parametrize("pieces", [1, 7])
def test_body_after_an_offered_upgrade_arrives(address: tuple[str, int], pieces: int):
    with connected(address) as client:
        client.sendall(JDK)
        for start in range(0, len(BODY), pieces):
            client.sendall(BODY[start : start + pieces])
        assert answer(client).endswith(BODY)
        client.sendall(JDK + BODY)
        assert answer(client).endswith(BODY)


@pytest.mark.parametrize("line", [b"x: " + b"y" * 1_000_000, b"a: b\r\n" * 100_000])
@pytest.mark.parametrize("before", [HEAD, CHUNKED + b"2\r\n{}\r\n0\r\n"])
def test_large_head_or_trailer_is_refused(address: tuple[str, int], before: bytes, line: bytes):
    with connected(address) as client:
        client.sendall(before + line)
        assert b" 431 " in answer(client)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        CHUNKED + b"zz\r\n",
        b"CONNECT /x HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_malformed_request_is_answered_before_the_connection_closes(
    address: tuple[str, int], sent: bytes
):
    """With unread input, the kernel would reset the connection and drop the answer."""
    with connected(address) as client:
        client.sendall(sent + b"x" * 3_000_000)
        found = answer(client)
        assert found.startswith((b"HTTP/1.1 400 ", b"HTTP/1.1 431 ")) and found.endswith(b'"}')
        assert is_closed(client)
        start = time.monotonic()
        with pytest.raises(OSError):  # input is dropped for a bounded time only
            while time.monotonic() - start < 10:
                client.sendall(b"x" * 1000)
                time.sleep(0.01)


def test_malformed_request_after_another_does_not_replace_its_answer(address: tuple[str, int]):
    with connected(address) as client:
        client.sendall(HEAD + b"\r\n" + BODY + b"no HTTP\r\n\r\n")
        found = answer(client)
        assert found.startswith(b"HTTP/1.1 200 ") and found.endswith(BODY)
        assert is_closed(client)


def test_client_that_pipelines_and_resets_disconnects_the_request_that_runs(
    caplog: pytest.LogCaptureFixture,
):
    seen: list[str] = []
    running = threading.Event()

    async def wait(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        running.set()
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"late"})

    with served(wait) as address:
        with connected(address) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.sendall((HEAD + b"\r\n" + BODY) * 3)
            assert running.wait(10)
            time.sleep(0.1)
        end = time.monotonic() + 10
        while not seen and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(0.1)
    assert seen == ["http.disconnect"]
    assert not [record for record in caplog.records if record.exc_info]


def test_chunked_body_arrives(address: tuple[str, int]):
    with connected(address) as client:
        for piece in (CHUNKED, b"5\r\n" + BODY[:5] + b"\r\n", b"a;x=y\r\n" + BODY[5:] + b"\r\n"):
            client.sendall(piece)
            time.sleep(0.02)
        client.sendall(b"0\r\nTrailer: 1\r\n\r\n")
        assert answer(client).endswith(BODY)
        client.sendall(HEAD + b"\r\n" + BODY)
        assert answer(client).endswith(BODY)


def test_idle_connection_is_closed_after_the_keep_alive_time():
    """An incomplete head is not idle: it has its own time limit."""
    with served(timeout_keep_alive=1) as address, connected(address) as client:
        client.sendall(HEAD + b"\r\n" + BODY)
        assert answer(client).endswith(BODY)
        client.sendall(HEAD[:9])
        time.sleep(1.5)
        client.sendall(HEAD[9:] + b"\r\n" + BODY)
        assert answer(client).endswith(BODY)
        start = time.monotonic()
        assert is_closed(client) and time.monotonic() - start > 0.5


def test_large_body_is_no_large_head(address: tuple[str, int]):
    body = b"x" * 300_000
    with connected(address) as client:
        client.sendall(HEAD.replace(b"15", b"300000") + b"\r\n" + body)
        assert answer(client).endswith(body)


@pytest.mark.parametrize("sent", [b"", b"POST / HT", HEAD, HEAD + b"\r\n" + BODY[:5]])
def test_incomplete_request_is_closed(impatient: tuple[str, int], sent: bytes):
    start = time.monotonic()
    with connected(impatient) as client:
        client.sendall(sent)
        found = answer(client)
    assert b" 408 " in found
    assert 0.4 < time.monotonic() - start < 30


def test_client_that_does_not_read_is_closed(impatient: tuple[str, int]):
    with connected(impatient) as client:
        client.sendall(b"POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        until(lambda: Recorded.made and Recorded.made[0].transport.is_closing())
        received = 0
        try:
            while part := client.recv(1_000_000):
                received += len(part)
        except ConnectionResetError:
            pass
        assert received < LARGE


def test_client_that_reads_slowly_gets_all():
    """The kernel takes no more from the server for a while, although the client reads."""
    with served(times={"send_s": 2.0}) as address, connected(address) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)  # it tells of each read
        client.sendall(b"POST /large HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n")
        start, received = time.monotonic(), 0
        while received < LARGE and time.monotonic() - start < 7:
            part = client.recv(40_000)  # 0.8 MB/s
            assert part
            received += len(part)
            time.sleep(0.05)
        while received < LARGE:
            part = client.recv(1_000_000)
            assert part
            received += len(part)


def test_connections_over_the_limit_close_the_oldest_idle_one():
    with served(limit_concurrency=3) as address, connected(address) as used:
        used.sendall(HEAD + b"\r\n" + BODY)
        assert b" 200 " in answer(used)
        with connected(address) as silent, connected(address) as begun:
            begun.sendall(HEAD)
            until(lambda: len(Recorded.made) == 3 and any(one._head for one in Recorded.made))
            with connected(address) as client:
                client.sendall(HEAD + b"\r\n" + BODY)
                assert b" 200 " in answer(client)
                assert is_closed(silent)  # it has sent nothing
                with connected(address) as other:
                    other.sendall(HEAD + b"\r\n" + BODY)
                    assert b" 200 " in answer(other)
                    assert is_closed(used)
                begun.sendall(b"\r\n" + BODY)
                assert b" 200 " in answer(begun)


def test_connections_over_the_limit_close_old_ones_before_young_ones():
    """A connection that was just accepted has not had the time to ask."""
    limited = served(times={"young_s": 60.0}, limit_concurrency=2)
    with limited as address, connected(address) as used:
        used.sendall(HEAD + b"\r\n" + BODY)
        assert b" 200 " in answer(used)
        Recorded.made[0]._waits_since -= 100
        with connected(address) as young, connected(address) as other:
            for one in (young, other):
                one.sendall(HEAD + b"\r\n" + BODY)
                assert b" 200 " in answer(one)
            assert is_closed(used)


def test_connections_over_the_limit_close_old_incomplete_requests():
    """One byte must not keep a connection from being closed."""
    limited = served(times={"old_s": 0.0}, limit_concurrency=1)
    with limited as address, connected(address) as begun:
        begun.sendall(b"P")
        until(lambda: any(one._head for one in Recorded.made))
        with connected(address) as client:
            client.sendall(HEAD + b"\r\n" + BODY)
            assert b" 200 " in answer(client)
        assert b" 408 " in answer(begun)


def test_connections_over_the_limit_without_an_idle_one_get_503():
    health = b"GET /v2/health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    limited = served(times={"old_s": 600.0}, limit_concurrency=2)
    with limited as address, connected(address) as first, \
            connected(address) as second:  # fmt: skip
        for one in (first, second):
            one.sendall(b"POST / HTTP/1.1\r\n")
        until(lambda: sum(bool(one._head) for one in Recorded.made) == 2)
        with connected(address) as client:
            client.sendall(HEAD + b"\r\n" + BODY)
            refused = answer(client)
            assert b" 503 " in refused and b"retry-after" in refused and b'{"error":' in refused
        with connected(address) as client:  # a probe must not restart a busy server
            client.sendall(health)
            assert b" 200 " in answer(client)
        second.sendall(HEAD.partition(b"\r\n")[2] + b"Connection: close\r\n\r\n" + BODY)
        assert b" 200 " in answer(second)
