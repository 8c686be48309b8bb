"""Read requests: bodies, JSON, engines, deadlines and disconnects."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Coroutine, Sequence
from time import perf_counter
from typing import Annotated, Any, TypeVar, cast

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from attnserve.literals import Side
from attnserve.serving.text_tasks import TextTask
from graph_passes.errors import InvalidData
from service.api.exchange import Exchange
from service.engine.answer import TextAnswer
from service.engine.engine import Engine, Text
from service.errors import ClientGone, InvalidField, MalformedRequest, TooLarge, UnknownField

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
B = TypeVar("B", bound=BaseModel)

Name = Annotated[str, Field(max_length=1024)]

MAX_FIELDS = 100
"""Maximum number of fields of an object, because each unknown field creates an error object."""


class Body(BaseModel):
    """A JSON body. Types are strict: ``"3"`` is not a number and 1 is not a boolean.

    Null is the same as an omitted field, as some clients send it.
    """

    model_config = ConfigDict(strict=True, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        fields = cast(dict[str, Any], value)
        if len(fields) > MAX_FIELDS:
            raise PydanticCustomError(
                "fields", "expected at most {most} fields", {"most": MAX_FIELDS}
            )
        optional = {name for name, field in cls.model_fields.items() if not field.is_required()}
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in optional
        }


class Extensible(Body):
    """The supported parameters; other parameters belong to extensions and are ignored."""

    model_config = ConfigDict(extra="allow")


def serve_at(
    router: APIRouter, *paths: str, method: str = "POST", **options: Any
) -> Callable[[F], F]:
    """Return a decorator that serves all ``paths``.

    ``{name}`` and ``{version}`` in a path are those of the model (``get_engine``).

    ``options`` are arguments of ``APIRouter.add_api_route``.
    """

    def add(function: F) -> F:
        for path in paths:
            parameters = [Depends(declare) for name, declare in DECLARED.items() if name in path]
            router.add_api_route(
                path, function, methods=[method], dependencies=parameters, **options
            )
        return function

    return add


def model_paths(path: str) -> tuple[str, str]:
    """``path`` below a model, and below one version of the model."""
    return f"/models/{{name}}{path}", f"/models/{{name}}/versions/{{version}}{path}"


def _declare_name(name: str) -> None: ...


def _declare_version(version: str) -> None: ...


DECLARED = {"{name}": _declare_name, "{version}": _declare_version}
"""Dependencies that add the path parameters of ``get_engine`` to the OpenAPI document."""


def get_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """Get the engine of a model to read its description; ``acquire_engine`` gets it for a run.

    Args:
        name: The name of the model if the path has none; None for the only model.
        version: The version if the path has none; None for the highest.
    """
    path = request.path_params
    repository = Exchange.of(request).repository
    return repository.engine(path.get("name", name), path.get("version", version))


def acquire_engine(request: Request, name: str | None = None, version: str | None = None) -> Engine:
    """Acquire the engine of ``get_engine`` until this request is answered.

    Call the function after reading the body: a slow client must not keep an old version in memory.

    Raises:
        NotReady: The model is not loaded.
        NotFound: Unknown model or version.
    """
    engine = get_engine(request, name, version)
    engine.acquire()
    Exchange.of(request).held.callback(engine.release)
    return engine


async def read_body(request: Request) -> bytes | bytearray:
    """Read and decompress the body of ``request``.

    x-total-ms and the deadline start after the last byte, so that they exclude a slow upload.

    Raises:
        TooLarge: More than ``max_body_bytes``, compressed or decompressed.
        HTTPException: The content-encoding is unknown.
        MalformedRequest: The body does not match its content-encoding.
        ClientGone: The client disconnected.
        Overloaded: The bodies of open requests have ``max_open_bytes`` in total.
    """
    exchange = Exchange.of(request)
    limit = exchange.repository.settings.max_body_bytes
    too_large = TooLarge(f"the body is larger than {limit} bytes", "split the request")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip", "x-gzip", "deflate"):
        raise HTTPException(
            415,
            f"content-encoding {encoding[:32]!r} is not supported; send gzip, deflate or neither",
        )
    # Before the first read: reading answers "100 Continue" to a client that waits for it.
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limit:
        raise too_large
    taken = 0

    def take(size: int) -> None:
        nonlocal taken
        exchange.bodies.take(size)
        taken += size

    # One release for the whole body, not one for each chunk: a client may send single bytes.
    exchange.held.callback(lambda: exchange.bodies.give_back(taken))
    body: bytes | bytearray = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
            take(len(chunk))
    except ClientDisconnect as error:
        raise ClientGone("the client disconnected before its request was complete") from error
    if encoding != "identity":
        body = _decompress(body, encoding, limit)
        take(len(body))
    exchange.started = perf_counter()
    return body


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


def parse_json(body: bytes | bytearray | memoryview, schema: type[B]) -> B:
    """Parse ``body`` as JSON and validate it.

    Raises:
        MalformedRequest: The body is not JSON.
        InvalidField: The JSON does not match ``schema``; UnknownField if it has no such field.
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
        kind = UnknownField if first["type"] == "extra_forbidden" else InvalidField
        raise kind(f"{where}: {first['msg']}", field=field) from error


def deadline_of(request: Request, timeout_us: int | None = None) -> float:
    """Return the time at which the limit of a request ends, on the clock of ``perf_counter``.

    The time limit starts with the last byte of the body (``read_body``).

    Args:
        timeout_us: Time limit in addition to the header or the setting; 0 or None for none.

    Raises:
        InvalidData: x-timeout-ms is not a positive number, or above ``max_timeout_ms``.
    """
    exchange = Exchange.of(request)
    settings = exchange.repository.settings
    timeout = request.headers.get("x-timeout-ms", settings.timeout_ms)
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
    return exchange.started + min(timeout_ms / 1e3, timeout_us / 1e6 if timeout_us else math.inf)


async def run_task(
    request: Request,
    engine: Engine,
    task: TextTask,
    texts: Sequence[Text],
    *,
    truncate: bool = True,
    side: Side | None = None,
) -> TextAnswer:
    """Run ``Engine.run_task`` within the time limit, until the client disconnects.

    Raises:
        InvalidData: x-timeout-ms is invalid, or ``Engine.run_task`` refuses the texts.
        ClientGone: The client disconnected.
    """
    work = engine.run_task(task, texts, truncate=truncate, side=side, deadline=deadline_of(request))
    return await cancel_on_disconnect(request, work)


async def run_tokenizer(
    request: Request, engine: Engine, texts: Sequence[Text], work: Callable[..., Sequence[T]]
) -> Sequence[T]:
    """Run ``Engine.tokenize`` within the time limit, until the client disconnects.

    Raises:
        InvalidData: x-timeout-ms is invalid, or ``Engine.tokenize`` refuses the texts.
        ClientGone: The client disconnected.
    """
    tokenized = engine.tokenize(texts, work, deadline=deadline_of(request))
    return await cancel_on_disconnect(request, tokenized)


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await ``work``, and cancel it if the client disconnects.

    Raises:
        ClientGone: The client disconnected.
    """
    task = asyncio.ensure_future(work)
    # The body is read: the next message is the disconnect.
    disconnect = asyncio.ensure_future(request.receive())
    disconnect.add_done_callback(lambda _: task.cancel())
    try:
        return await task
    except asyncio.CancelledError:
        if disconnect.done() and not disconnect.cancelled():
            raise ClientGone("the client disconnected before its answer") from None
        raise
    finally:
        disconnect.cancel()


class JsonRoute(APIRoute):
    """A route that reads its JSON body itself, instead of FastAPI.

    The endpoint declares ``body: Schema``; FastAPI writes the schema into the OpenAPI document.
    FastAPI's own reader does not unpack gzip, requires a Content-Type and parses with ``json``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        if field is None:
            return super().get_route_handler()
        schema = field.field_info.annotation
        is_required = field.field_info.is_required()
        assert isinstance(schema, type) and issubclass(schema, BaseModel)

        async def handle(request: Request) -> Response:
            content = await self.read(request)
            body = schema() if not content and not is_required else parse_json(content, schema)
            del content  # it may be large, and the request may wait
            return await self.endpoint(request=request, body=body)

        return handle

    async def read(self, request: Request) -> bytes | bytearray | memoryview:
        """Return the JSON text in the body of ``request``."""
        return await read_body(request)
