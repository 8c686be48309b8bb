"""Errors of the service, and one table with the HTTP status of every error.

The body of an error is ``{"error": "text"}``, unless the protocol of its path has an
``ErrorRenderer`` of its own (``install_handlers``).
"""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from attnserve.models.loaded_model import ModelFailed
from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData, InvalidModel

__all__ = [
    "HTTP_ERRORS",
    "ClientGone",
    "DeadlineExceeded",
    "Error",
    "ErrorRenderer",
    "Forbidden",
    "InvalidField",
    "MalformedRequest",
    "NotFound",
    "NotReady",
    "Overloaded",
    "ServiceError",
    "TooLarge",
    "Unauthorized",
    "UnknownModel",
    "UnsupportedEncoding",
    "error_response",
    "explain",
    "hide_folders",
    "install_handlers",
]

log = logging.getLogger("attnserve")


class ServiceError(AttnserveError):
    """The request cannot be answered."""

    default_code = "request.failed"


class MalformedRequest(ServiceError):
    """The body is not valid JSON, or cannot be decoded."""

    default_code = "request.malformed"


class UnsupportedEncoding(ServiceError):
    """The content-encoding of the body is unknown."""

    default_code = "request.encoding"


class NotFound(ServiceError):
    """The model or version does not exist, or the model does not support the task."""

    default_code = "request.not_found"


class UnknownModel(NotFound):
    """No model has this name."""

    default_code = "model.unknown"


class InvalidField(InvalidData):
    """A field of the body is invalid; ``field`` is empty if the whole body is."""

    default_code = "request.field"

    def __init__(self, what: str, fix: str = "", *, field: str) -> None:
        super().__init__(what, fix)
        self.field = field


class TooLarge(ServiceError):
    """Too many bytes, texts or tokens in one request."""

    default_code = "request.too_large"


class Overloaded(ServiceError):
    """The queue is full."""

    default_code = "server.overloaded"


class Forbidden(ServiceError):
    """The client may not do this."""

    default_code = "request.forbidden"


class Unauthorized(ServiceError):
    """The API key is missing or unknown."""

    default_code = "request.unauthorized"


class DeadlineExceeded(ServiceError):
    """The deadline passed before the answer."""

    default_code = "request.deadline"


class NotReady(ServiceError):
    """The model is not loaded, or cannot run now."""

    default_code = "model.not_ready"


class ClientGone(ServiceError):
    """The client disconnected before its answer."""

    default_code = "request.client_gone"


class Error(BaseModel):
    """The body of an error."""

    error: str


class HttpError(NamedTuple):
    """The HTTP status of an error, and the headers of its answer."""

    status: int
    headers: Mapping[str, str] = {}


HTTP_ERRORS: Mapping[type[AttnserveError], HttpError] = {
    MalformedRequest: HttpError(400),
    Unauthorized: HttpError(401, {"www-authenticate": "Bearer"}),
    Forbidden: HttpError(403),
    NotFound: HttpError(404),
    TooLarge: HttpError(413),
    UnsupportedEncoding: HttpError(415, {"accept-encoding": "gzip, deflate"}),
    InvalidData: HttpError(422),
    InvalidArgument: HttpError(422),
    InvalidModel: HttpError(422),  # of a model to load
    Overloaded: HttpError(429, {"retry-after": "1"}),
    ClientGone: HttpError(499),  # nginx's number; it appears only in the log
    NotReady: HttpError(503, {"retry-after": "5"}),
    ModelFailed: HttpError(503, {"retry-after": "5"}),
    DeadlineExceeded: HttpError(504),
    AttnserveError: HttpError(500),
}
"""The status of each error; the entry of the closest base class applies."""

ErrorRenderer = Callable[[int, str, Exception | None], tuple[int, Any]]
"""(status, body) of an error answer, from its status, its text and the error if there is one."""


def install_handlers(app: FastAPI, renderers: Mapping[str, ErrorRenderer]) -> None:
    """Answer every error of ``app``.

    Args:
        renderers: Renderers of protocols with error bodies of their own, by path prefix ("/v1").
    """
    app.state.error_renderers = renderers
    app.add_exception_handler(AttnserveError, _handle_error)
    app.add_exception_handler(HTTPException, _handle_routing_error)


def error_response(
    scope: Scope,
    status: int,
    text: str,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
) -> Response:
    """``{"error": text}``, or the error body of the protocol that ``scope`` belongs to."""
    body: Any = {"error": text}
    for prefix, render in scope["app"].state.error_renderers.items():
        if f"{scope['path']}/".startswith(f"{prefix}/"):
            status, body = render(status, text, error)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def explain(scope: Scope, error: AttnserveError) -> Response:
    """The answer to a request that failed with ``error``."""
    kind = next(kind for kind in type(error).__mro__ if kind in HTTP_ERRORS)
    status, headers = HTTP_ERRORS[kind]
    text = hide_folders("; ".join(str(error).splitlines()), scope["app"].state.settings.model)
    return error_response(scope, status, text, headers, error)


def hide_folders(text: str, served: Path) -> str:
    """``text`` with relative paths for files in ``served``, temporary and installation folders.

    Clients must not learn the paths of the server. Tensor names look like paths ("/model/Add"), so
    that only known folders are removed.
    """
    return _folders(served).sub(lambda at: "" if at["separator"] else Path(at[0]).name, text)


@cache
def _folders(served: Path) -> re.Pattern[str]:
    folder = served.parent if served.suffix == ".onnx" else served
    folders = {
        folder.absolute(), folder.resolve(), Path(tempfile.gettempdir()),
        Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix),
    }  # fmt: skip
    longest_first = sorted((str(one) for one in folders if one.name), key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first))
    return re.compile(rf"(?<![\w/.-])(?:{names})(?:(?P<separator>[/\\])|(?![\w.-]))")


async def _handle_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, AttnserveError)
    answer = explain(request.scope, error)
    if answer.status_code == 500:
        log.error("%s failed", request.url.path, exc_info=error)
    return answer


async def _handle_routing_error(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, and the answer to OPTIONS."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = set((error.headers or {}).get("Allow", "").split(", "))
        allowed |= {"OPTIONS"} | ({"HEAD"} if "GET" in allowed else set())
        error.headers = {"allow": ", ".join(sorted(allowed))}
        if request.method == "OPTIONS":
            return Response(status_code=204, headers=error.headers)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(request.scope, error.status_code, text, error.headers)
