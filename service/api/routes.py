"""Shared parts of all routes: reading bodies, engines, deadlines, responses, and the access log."""

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

VALID_REQUEST_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)
JSON = orjson.OPT_SERIALIZE_NUMPY
DISCONNECTED = "the client disconnected"


def json_response(
    content: Any, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """A response with ``content`` as JSON; arrays become lists, NaN and infinities null."""
    return Response(
        orjson.dumps(content, option=JSON), status, headers, media_type="application/json"
    )


def get_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """The engine of a model, for reading its description; use ``acquire_engine`` to run it.

    Raises:
        NotFound, NotReady: See ``acquire_engine``.
    """
    repository: Repository = request.app.state.repository
    return repository.engine(name, version)


def acquire_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """The engine of a model, which stays open until this request is answered.

    Call it after the body was read: a slow client must not keep an old version in memory.

    Args:
        name: None if there is only one model.
        version: None for the highest.

    Raises:
        NotReady: The model is not loaded.
        NotFound: Unknown model or version.
    """
    engine = get_engine(request, name, version)
    engine.acquire()
    request.scope["attnserve.engines"].append(engine)
    return engine


def deadline(request: Request) -> float:
    """The deadline of the answer, on the clock of ``perf_counter``.

    The time limit starts with the last byte of the body (``read_body``).

    Raises:
        InvalidData: x-timeout-ms is not a positive number, or above ``max_timeout_ms``.
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
    """Read and decompress the body of ``request``.

    The clock of x-total-ms and of the deadline starts after the last byte, so that it does not
    count a slow upload.

    Raises:
        TooLarge: More than ``max_body_bytes``, compressed or decompressed.
        MalformedRequest: The content-encoding is unknown, or the body does not match it.
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
    body = _decompress(body, request.headers.get("content-encoding", "identity"), limit)
    request.state.started = perf_counter()
    return body


def _decompress(body: bytes | bytearray, encoding: str, limit: int) -> bytes | bytearray:
    """Decompress at most ``limit`` bytes of ``body``."""
    if encoding == "identity":
        return body
    if encoding not in {"gzip", "deflate"}:
        raise MalformedRequest(
            f"content-encoding {encoding[:32]!r} is not supported", "send gzip, deflate or neither"
        )
    unpacker = zlib.decompressobj(wbits=47)  # detects gzip and deflate
    try:
        unpacked = unpacker.decompress(body, limit + 1)
    except zlib.error as error:
        raise MalformedRequest(f"the body is not {encoding}: {error}") from error
    if len(unpacked) > limit:
        raise TooLarge(f"the decompressed body is larger than {limit} bytes", "split the request")
    if not unpacker.eof or unpacker.unused_data:
        raise MalformedRequest(f"the body is not {encoding}: it is truncated or has trailing bytes")
    return unpacked


def parse_json(body: bytes | bytearray | memoryview, schema: type[B]) -> B:
    """Parse ``body`` as JSON and validate it.

    Raises:
        MalformedRequest: The body is not JSON.
        InvalidField: The JSON does not match ``schema``.
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
    """Await ``work``, and cancel it if the client disconnects, so that it is not computed.

    Raises:
        ClientGone: The client disconnected.
    """
    task = asyncio.current_task()
    assert task is not None
    waiting = True

    def cancel(disconnect: asyncio.Future[Any]) -> None:
        if waiting and not disconnect.cancelled():
            task.cancel(DISCONNECTED)

    # The body was read: the next message is the disconnect.
    disconnect = asyncio.ensure_future(request.receive())
    disconnect.add_done_callback(cancel)
    try:
        return await work
    except asyncio.CancelledError as error:
        if error.args != (DISCONNECTED,):
            raise
        task.uncancel()
        raise ClientGone("the client disconnected before its answer") from None
    finally:
        waiting = False
        disconnect.cancel()


def respond(
    request: Request,
    engine: Engine,
    answer: Answer,
    outputs: Any,
    envelope: Callable[[orjson.Fragment, dict[str, int | float]], dict[str, Any]],
    raw: Sequence[np.ndarray] = (),
) -> Response:
    """The response of an inference route; its cost goes to the headers and the metrics.

    Args:
        outputs: The computed values. Their serialization counts as time of the request.
        envelope: Makes the body from the serialized outputs and the cost.
        raw: Tensors whose bytes follow the JSON.
    """
    serialized = orjson.Fragment(orjson.dumps(outputs, option=JSON))
    cost, headers = record_cost(request, engine, answer)
    if not raw:
        return json_response(envelope(serialized, cost), headers=headers)
    head = orjson.dumps(envelope(serialized, cost), option=JSON)
    headers["inference-header-content-length"] = str(len(head))
    body = b"".join([head, *(tensor.data for tensor in raw)])
    return Response(body, 200, headers, media_type="application/octet-stream")


def record_cost(
    request: Request, engine: Engine, answer: Answer
) -> tuple[dict[str, int | float], dict[str, str]]:
    """Stop the clock and record the cost of ``answer``; return the cost and its headers."""
    total_ms = (perf_counter() - request.state.started) * 1e3
    cost = cost_of(answer, total_ms, engine.settings.provider)
    engine.metrics.record_request(cost)
    # Headers are ASCII; names of models may not be.
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
    """ASGI middleware: adds x-request-id to answers, counts requests and writes the access log.

    It releases the engines of a request (``acquire_engine``) after the answer. A valid id of the
    client is kept. An unexpected exception is logged with its traceback and answered with 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client_id = next((value for key, value in scope["headers"] if key == b"x-request-id"), b"")
        request_id = (
            client_id if VALID_REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex.encode()
        )
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
                if status:  # the answer has begun: the connection can only be closed
                    raise
                answer = error_response(scope, 500, "internal error")
                await answer(scope, receive, observed)
            finally:
                for engine in engines:
                    engine.release()
                # The pattern of the route, not the path: the number of series must stay bounded.
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
