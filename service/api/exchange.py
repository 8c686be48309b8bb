"""A request and its answer: the engine, the body, the deadline, and what is held for it."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Coroutine, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import perf_counter
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from graph_passes.errors import InvalidData
from service.budget import Budget
from service.engine.engine import Engine
from service.engine.repository import Repository
from service.errors import ClientGone, MalformedRequest, TooLarge

T = TypeVar("T")

SMALL_BYTES = 262_144
"""Maximum size of an answer that does not wait for free memory."""


@dataclass
class Exchange:
    """A request until its answer is sent.

    Attributes:
        request: The HTTP request.
        repository: The models of the service.
        bodies, answers: The memory of the bodies of all open requests, and of their answers.
        held: What is released after the answer was sent.
        started: The time of the last byte of the body, on the clock of ``perf_counter``.
        raw: The raw tensors after the JSON.
        cost: The cost of the answer by name, for the log and the tracing span.
    """

    request: Request
    repository: Repository
    bodies: Budget
    answers: Budget
    held: ExitStack = field(default_factory=ExitStack)
    started: float = 0.0
    raw: memoryview = field(default_factory=lambda: memoryview(b""))
    cost: Mapping[str, str | float] = field(default_factory=dict[str, str | float])

    @property
    def path(self) -> Mapping[str, str]:
        """The parameters of the path."""
        return self.request.path_params

    def engine(self, name: str | None = None, version: str | None = None) -> Engine:
        """Get the engine of a model to read its description; ``acquire`` gets it for a run.

        Args:
            name: The name of the model if the path has none; None for the only model.
            version: The version if the path has none; None for the highest.

        Raises:
            NotReady: The model is not loaded.
            UnknownModel: Unknown model or version.
        """
        name, version = self.path.get("name", name), self.path.get("version", version)
        return self.repository.engine(name, version)

    def acquire(self, name: str | None = None, version: str | None = None) -> Engine:
        """Acquire the engine of a model until this request is answered; see ``engine``.

        Call the function after reading the body: a slow client must not keep an old version in
        memory.
        """
        engine = self.engine(name, version)
        engine.acquire()
        self.held.callback(engine.release)
        return engine

    async def hold_answer(self, size: int, deadline: float | None) -> None:
        """Wait for ``size`` free bytes for an answer, and reserve them until it is sent.

        Small answers do not wait, because the limit of waiting rows bounds their total.

        Raises:
            DeadlineExceeded: The deadline passed before the bytes were free.
        """
        if size > SMALL_BYTES:
            await self.answers.wait(size, deadline)
            self.held.callback(self.answers.give_back, size)

    async def read_body(self) -> bytes | bytearray:
        """Read and decompress the body.

        x-total-ms and the deadline start after the last byte, so that they exclude a slow upload.

        Raises:
            TooLarge: More than ``max_body_bytes``, compressed or decompressed.
            HTTPException: The content-encoding is unknown.
            MalformedRequest: The body does not match its content-encoding.
            ClientGone: The client disconnected.
            Overloaded: The bodies of open requests have ``max_open_bytes`` in total.
        """
        limit = self.repository.settings.max_body_bytes
        too_large = TooLarge(f"the body is larger than {limit} bytes", "split the request")
        encoding = self.request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
            raise HTTPException(
                415,
                f"content-encoding {encoding[:32]!r} is not supported; send gzip, deflate or"
                " neither",
            )
        # Before the first read: reading answers "100 Continue" to a client that waits for it.
        length = self.request.headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large
        taken = 0

        def take(size: int) -> None:
            nonlocal taken
            self.bodies.take(size, held=taken)
            taken += size

        # One release for the whole body, not one for each chunk: a client may send single bytes.
        self.held.callback(lambda: self.bodies.give_back(taken))
        body: bytes | bytearray = bytearray()
        try:
            async for chunk in self.request.stream():
                body += chunk
                if len(body) > limit:
                    raise too_large
                take(len(chunk))
        except ClientDisconnect as error:
            raise ClientGone("the client disconnected before its request was complete") from error
        if encoding != "identity":
            body = _decompress(body, encoding, limit)
            take(len(body))
        self.started = perf_counter()
        return body

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Await the answer of an engine, and cancel it if the client disconnects.

        Raises:
            ClientGone: The client disconnected.
            AttnserveError: An error of the call.
        """
        task = asyncio.ensure_future(work)
        # The body is read: the next message is the disconnect.
        disconnect = asyncio.ensure_future(self.request.receive())
        disconnect.add_done_callback(lambda _: task.cancel())
        try:
            return await task
        except asyncio.CancelledError:
            if disconnect.done() and not disconnect.cancelled():
                raise ClientGone("the client disconnected before its answer") from None
            raise
        finally:
            disconnect.cancel()

    def deadline(self, timeout_us: int | None = None) -> float:
        """The time at which the limit of a request ends, on the clock of ``perf_counter``.

        The time limit starts with the last byte of the body (``read_body``).

        Args:
            timeout_us: Time limit in addition to the header or the setting; 0 or None for none.

        Raises:
            InvalidData: x-timeout-ms is not a positive number, or above ``max_timeout_ms``.
        """
        settings = self.repository.settings
        timeout = self.request.headers.get("x-timeout-ms", settings.timeout_ms)
        try:
            timeout_ms = float(timeout)
        except ValueError:
            timeout_ms = math.nan
        longest = max(settings.max_timeout_ms, settings.timeout_ms)
        if not 0 < timeout_ms <= longest:
            raise InvalidData(
                f"x-timeout-ms is {timeout!r}: expected milliseconds above 0, at most {longest:g}",
                "send a number in this range, or leave the header out",
            )
        return self.started + min(timeout_ms / 1e3, timeout_us / 1e6 if timeout_us else math.inf)


async def _current(request: Request) -> Exchange:
    return request.scope["attnserve"]


Here = Annotated[Exchange, Depends(_current)]
"""The parameter of a route for its ``Exchange``, which ``ObserveRequests`` creates."""


def _decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes:
    """Decompress at most ``limit`` bytes of ``body``."""
    unpacker = zlib.decompressobj(wbits=47)  # detects gzip and deflate
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequest(
            f"the body is not {encoding}: {error}", "send it as content-encoding says"
        ) from error
    if len(unpacked) > limit:
        raise TooLarge(f"the decompressed body is larger than {limit} bytes", "split the request")
    if not unpacker.eof or unpacker.unused_data:
        raise MalformedRequest(f"the body is not {encoding}: it is truncated or has trailing bytes")
    return unpacked
