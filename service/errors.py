"""What goes wrong in the service, and the HTTP status of each: one table.

    AttnserveError                 (graph_passes/errors.py)
    └── ServiceError
        ├── MalformedRequest       the body is not the JSON that it should be
        ├── NotFound               no such model, version, or ability of this model
        ├── TooLarge               more bytes, texts or tokens than one request may have
        ├── Overloaded             too many requests wait already
        ├── NotReady               the model is not loaded, or its memory ran out
        └── ClientGone             the client hung up before its answer: nobody reads this one

Every error answer is ``{"error": "text"}``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData

__all__ = [
    "STATUS",
    "ClientGone",
    "MalformedRequest",
    "NotFound",
    "NotReady",
    "Overloaded",
    "ServiceError",
    "TooLarge",
    "error_response",
    "install_handlers",
]

log = logging.getLogger("attnserve")


class ServiceError(AttnserveError):
    """A request that cannot be answered as it is."""


class MalformedRequest(ServiceError):
    """The body is not the JSON that it should be."""


class NotFound(ServiceError):
    """There is no such model or version, or the model cannot do what the route does."""


class TooLarge(ServiceError):
    """More bytes, texts or tokens than one request may have."""


class Overloaded(ServiceError):
    """Too many requests wait already."""


class NotReady(ServiceError):
    """The model is not loaded, or there is no memory left to run it."""


class ClientGone(ServiceError):
    """The client hung up before its answer."""


STATUS: Mapping[type[Exception], int] = {
    MalformedRequest: 400,
    NotFound: 404,
    TooLarge: 413,
    InvalidData: 422,
    InvalidArgument: 422,
    Overloaded: 429,
    ClientGone: 499,  # nginx's number; only the log sees it
    ClientDisconnect: 499,
    NotReady: 503,
    AttnserveError: 500,
}

RETRY_AFTER = {Overloaded: "1", NotReady: "5"}
"""Seconds after which asking again makes sense."""


def install_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` as ``{"error": "text"}``."""
    for kind in STATUS:
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid_path)


def error_response(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """``{"error": text}``."""
    return Response(orjson.dumps({"error": text}), status, headers, media_type="application/json")


async def _expected(request: Request, error: Exception) -> Response:
    kind = next(kind for kind in type(error).__mro__ if kind in STATUS)
    if STATUS[kind] == 500:
        log.error("%s failed", request.url.path, exc_info=error)
    retry = RETRY_AFTER.get(kind)
    return error_response(
        STATUS[kind],
        "; ".join(str(error).splitlines()),
        {"retry-after": retry} if retry else None,
    )


async def _http(request: Request, error: Exception) -> Response:
    """Routing's own errors: 404 and 405."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(error.status_code, text, error.headers)


async def _invalid_path(request: Request, error: Exception) -> Response:
    return error_response(422, f"{request.url.path}: {error}")
