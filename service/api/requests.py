"""Routes and their JSON bodies."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Annotated, Any, TypeVar, cast

import orjson
from fastapi import APIRouter, Depends, Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from service.api.exchange import Exchange
from service.errors import InvalidField, MalformedRequest, UnknownField

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

    ``{name}`` and ``{version}`` in a path are those of the model (``Exchange.engine``).

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
"""Dependencies that add the path parameters of ``Exchange.engine`` to the OpenAPI document."""


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


class JsonRoute(APIRoute):
    """A route that reads its JSON body itself, instead of FastAPI.

    The endpoint declares ``exchange: Here`` and ``body: Schema``; FastAPI writes the schema into
    the OpenAPI document. FastAPI's own reader does not unpack gzip, requires a Content-Type and
    parses with ``json``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        field = self.body_field
        if field is None:
            return super().get_route_handler()
        schema = field.field_info.annotation
        is_required = field.field_info.is_required()
        assert isinstance(schema, type) and issubclass(schema, BaseModel)

        async def handle(request: Request) -> Response:
            exchange: Exchange = request.scope["attnserve"]
            content = await self.read(exchange)
            body = schema() if not content and not is_required else parse_json(content, schema)
            del content  # it may be large, and the request may wait
            return await self.endpoint(exchange=exchange, body=body)

        return handle

    async def read(self, exchange: Exchange) -> bytes | bytearray | memoryview:
        """Return the JSON text in the body of the request."""
        return await exchange.read_body()
