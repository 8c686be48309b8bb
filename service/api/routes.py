"""What all routes share: bodies within their bounds, answers with their cost, a line in the log."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import uuid
import zlib
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graph_passes.errors import InvalidData
from service.api.cost import as_headers, cost_of
from service.engine.answer import Answer
from service.engine.engine import Engine
from service.engine.repository import Repository
from service.errors import ClientGone, InvalidField, MalformedRequest, TooLarge, error_response
from service.metrics import Metrics
from service.settings import Settings
from service.tracing import request_span

__all__ = [
    "JsonRoute",
    "ObserveRequests",
    "acquire_engine",
    "cancel_on_disconnect",
    "deadline",
    "get_engine",
    "json_response",
    "parse_json",
    "read_body",
    "record_cost",
    "respond",
]

T = TypeVar("T")
B = TypeVar("B", bound=BaseModel)

log = logging.getLogger("attnserve")
access = logging.getLogger("attnserve.access")

SANE_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
JSON = orjson.OPT_SERIALIZE_NUMPY
GONE = "the client is gone"


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """``content`` as JSON; arrays as (nested) lists, NaN and infinities as null."""
    return Response(
        orjson.dumps(content, option=JSON), status, headers, media_type="application/json"
    )


def get_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """The engine that serves a model now; to run something on it, take it from ``acquire_engine``.

    Raises:
        NotFound, NotReady: See ``acquire_engine``.
    """
    repository: Repository = request.app.state.repository
    return repository.engine(name, version)


def acquire_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """The engine that serves a model, kept open until this request is answered.

    Call it when the body is there: a client that is slow to send must not keep an old model alive.

    Args:
        name: None for the only model there is.
        version: None for the highest.

    Raises:
        NotReady: It is not loaded yet, or unloaded already.
        NotFound: There is no such model or version.
    """
    engine = get_engine(request, name, version)
    engine.acquire()
    request.scope["attnserve.engines"].append(engine)
    return engine


def deadline(request: Request) -> float:
    """When the answer must be there, on the clock of ``perf_counter``.

    The time starts with the last byte of the body (``read_body``).

    Raises:
        InvalidData: x-timeout-ms is no positive number, or above ``max_timeout_ms``.
    """
    settings: Settings = request.app.state.settings
    given = request.headers.get("x-timeout-ms")
    timeout_ms = settings.timeout_ms
    if given is not None:
        try:
            timeout_ms = float(given)
        except ValueError:
            timeout_ms = math.nan
        longest = max(settings.max_timeout_ms, settings.timeout_ms)
        if not 0 < timeout_ms <= longest:
            raise InvalidData(
                f"x-timeout-ms is {given!r}: expected milliseconds above 0, at most {longest:g}"
            )
    return request.state.started + timeout_ms / 1e3


async def read_body(request: Request) -> bytes | bytearray:
    """The whole body of ``request``, unpacked; one that comes in one piece is not copied.

    The clock of x-total-ms and of the deadline starts here, at the last byte: how fast a client
    sends is its own affair.

    Raises:
        TooLarge: More bytes than ``max_body_bytes``, whatever Content-Length says, also unpacked.
        MalformedRequest: It is compressed otherwise than it says, or than is known here.
    """
    settings: Settings = request.app.state.settings
    limit = settings.max_body_bytes
    body: bytes | bytearray = b""
    async for chunk in request.stream():
        if not body:
            body = chunk
        elif chunk:
            if isinstance(body, bytes):
                body = bytearray(body)
            body += chunk
        if len(body) > limit:
            raise TooLarge(f"the body is larger than {limit} bytes", "split the request")
    body = _unpacked(body, request.headers.get("content-encoding", "identity"), limit)
    request.state.started = perf_counter()
    return body


def _unpacked(body: bytes | bytearray, encoding: str, limit: int) -> bytes | bytearray:
    """``body`` decompressed, but never more than ``limit`` bytes of it."""
    if encoding == "identity":
        return body
    if encoding not in {"gzip", "deflate"}:
        raise MalformedRequest(
            f"content-encoding {encoding[:32]!r} is not served", "send gzip, deflate or neither"
        )
    unpacker = zlib.decompressobj(wbits=47)  # either, by what its first bytes say
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequest(f"the body is not {encoding}: {error}") from error
    if len(unpacked) > limit:
        raise TooLarge(f"the body unpacks to more than {limit} bytes", "split the request")
    if not unpacker.eof or unpacker.unused_data:
        raise MalformedRequest(f"the body is not {encoding}: it ends too early or too late")
    return unpacked


def parse_json(body: bytes | bytearray | memoryview, schema: type[B]) -> B:
    """``body`` as JSON that fits ``schema``.

    Raises:
        MalformedRequest: Not JSON, or not UTF-8.
        InvalidField: JSON that does not fit ``schema``.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from error
    try:
        return schema.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        field = str(first["loc"][0]) if first["loc"] else ""
        raise InvalidField(f"{where}: {first['msg']}", field=field) from error


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it when the client hangs up: what still waits is never computed.

    Raises:
        ClientGone: Nobody waits for the answer.
    """
    task = asyncio.current_task()
    assert task is not None
    waiting = True

    def left(leaving: asyncio.Future[Any]) -> None:
        if waiting and not leaving.cancelled():
            task.cancel(GONE)

    # The body is read: what the server says next is that the client is gone.
    leaving = asyncio.ensure_future(request.receive())
    leaving.add_done_callback(left)
    try:
        return await work
    except asyncio.CancelledError as error:
        if error.args != (GONE,):
            raise
        task.uncancel()
        raise ClientGone("the client hung up before its answer") from None
    finally:
        waiting = False
        leaving.cancel()


def respond(
    request: Request,
    engine: Engine,
    answer: Answer,
    outputs: Any,
    envelope: Callable[[orjson.Fragment, dict[str, int | float]], dict[str, Any]],
    raw: Sequence[np.ndarray] = (),
) -> Response:
    """The response of an inference route, with what it cost in its headers and in the metrics.

    Args:
        outputs: What was computed. It is written before the clock stops: for large outputs that is
            much of the time.
        envelope: The body, made of the written outputs and the cost.
        raw: Tensors that follow it as they are in memory.
    """
    written = orjson.Fragment(orjson.dumps(outputs, option=JSON))
    cost, headers = record_cost(request, engine, answer)
    if not raw:
        return json_response(envelope(written, cost), headers=headers)
    head = orjson.dumps(envelope(written, cost), option=JSON)
    headers["inference-header-content-length"] = str(len(head))
    body = b"".join([head, *(tensor.data for tensor in raw)])
    return Response(body, 200, headers, media_type="application/octet-stream")


def record_cost(
    request: Request, engine: Engine, answer: Answer
) -> tuple[dict[str, int | float], dict[str, str]]:
    """(what ``answer`` cost, its headers); the clock stops, and the metrics are told."""
    total_ms = (perf_counter() - request.state.started) * 1e3
    cost = cost_of(answer, total_ms, engine.settings.provider)
    engine.metrics.record_request(cost)
    # Headers are ASCII; a model may be called anything.
    headers = as_headers(cost) | {
        "x-model": quote(engine.name),
        "x-model-version": engine.version,
    }
    if engine.model.plan_id is not None:
        headers["x-plan"] = engine.model.plan_id
    request.scope["attnserve.cost"] = {"model": engine.name, "version": engine.version, **cost}
    return cost, headers


class JsonRoute(APIRoute):
    """A route whose JSON body is read here and not by FastAPI.

    The endpoint declares ``body: Schema``; FastAPI writes the schema into the OpenAPI document.
    FastAPI's own reader does not unpack gzip, requires a Content-Type and parses with ``json``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        if field is None:
            return super().get_route_handler()
        schema, is_required = field.field_info.annotation, field.field_info.is_required()
        assert isinstance(schema, type) and issubclass(schema, BaseModel)
        path_parameters = [parameter.name for parameter in self.dependant.path_params]

        async def handle(request: Request) -> Response:
            content = await self.read(request)
            body = schema() if not content and not is_required else parse_json(content, schema)
            values = {name: request.path_params[name] for name in path_parameters}
            return await self.endpoint(request=request, body=body, **values)

        return handle

    async def read(self, request: Request) -> bytes | bytearray | memoryview:
        """Return the JSON text in the body of ``request``."""
        return await read_body(request)


class ObserveRequests:
    """ASGI middleware: x-request-id on every answer, a log line and a count for each.

    The engines that a request holds (``acquire_engine``) are let go when it is answered.

    A client's own id is kept where it is short and harmless, so that it can be found in its logs
    and in ours. A defect of ours ends here: the log has the trace, the client a 500 and the id.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
        request_id = given if SANE_ID.fullmatch(given) else uuid.uuid4().hex.encode()
        started, status = perf_counter(), 0
        engines: list[Engine] = []
        scope["attnserve.engines"] = engines
        # FastAPI's GET routes refuse HEAD. The web server omits the body of the answer.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        with request_span(scope) as finish:
            try:
                await self._app(routed, receive, observed)
            except Exception:
                log.exception("request %s failed", request_id.decode())
                if status:  # half an answer is out: the connection can only be dropped
                    raise
                answer = error_response(scope, 500, "internal error")
                await answer(scope, receive, observed)
            finally:
                for engine in engines:
                    engine.release()
                # The route's pattern, not the path: a client must not make up series without end.
                route = getattr(routed.get("route"), "path", "unknown")
                self._metrics.count_response(route, status)
                finish(route, status)
                if access.isEnabledFor(logging.INFO):
                    line = {
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "ms": round((perf_counter() - started) * 1e3, 3),
                        "request_id": request_id.decode(),
                        **scope.get("attnserve.cost", {}),
                    }
                    access.info(orjson.dumps(line).decode())
