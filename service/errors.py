"""What goes wrong in the service, and the HTTP status of each: one table.

    AttnserveError                 (graph_passes/errors.py)
    └── ServiceError
        ├── MalformedRequest       the body is not the JSON that it should be
        ├── NotFound               no such model, version, or ability of this model
        ├── Unauthorized           no API key, or not one of ours
        ├── TooLarge               more bytes, texts or tokens than one request may have
        ├── Overloaded             too many rows wait already
        ├── DeadlineExceeded       the request's time was over before its answer
        ├── NotReady               the model is not loaded, or cannot run now
        │   ├── OutOfMemory        its memory ran out
        │   └── ModelFailed        its session or its device is broken
        └── ClientGone             the client hung up before its answer: nobody reads this one

The body of an error answer is ``{"error": "text"}``, unless its protocol has a renderer in
``ERROR_RENDERERS``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from graph_passes.errors import AttnserveError, InvalidArgument, InvalidData, InvalidModel

__all__ = [
    "ERROR_RENDERERS",
    "STATUS",
    "ClientGone",
    "DeadlineExceeded",
    "InvalidField",
    "MalformedRequest",
    "ModelFailed",
    "NotFound",
    "NotReady",
    "OutOfMemory",
    "Overloaded",
    "ServiceError",
    "TooLarge",
    "Unauthorized",
    "UnknownModel",
    "error_response",
    "explain",
    "install_handlers",
]

log = logging.getLogger("attnserve")


class ServiceError(AttnserveError):
    """A request that cannot be answered as it is."""


class MalformedRequest(ServiceError):
    """The body is not the JSON that it should be."""


class NotFound(ServiceError):
    """There is no such model or version, or the model cannot do what the route does."""


class UnknownModel(NotFound):
    """There is no model of this name."""


class InvalidField(InvalidData):
    """One field of the body cannot be what it is; empty where it is the body itself."""

    def __init__(self, what: str, fix: str = "", *, field: str) -> None:
        super().__init__(what, fix)
        self.field = field


class TooLarge(ServiceError):
    """More bytes, texts or tokens than one request may have."""


class Overloaded(ServiceError):
    """Too many rows wait already."""


class Unauthorized(ServiceError):
    """The request has no API key, or not one that this server knows."""


class DeadlineExceeded(ServiceError):
    """The request's time was over before its answer."""


class NotReady(ServiceError):
    """The model is not loaded, or cannot run now."""


class OutOfMemory(NotReady):
    """There is no memory left to run the model."""


class ModelFailed(NotReady):
    """The session of the model, or the device that it runs on, is broken."""


class ClientGone(ServiceError):
    """The client hung up before its answer."""


STATUS: Mapping[type[Exception], int] = {
    MalformedRequest: 400,
    Unauthorized: 401,
    NotFound: 404,
    TooLarge: 413,
    InvalidData: 422,
    InvalidArgument: 422,
    InvalidModel: 422,  # of a model to load; one that serves was read already
    Overloaded: 429,
    ClientGone: 499,  # nginx's number; only the log sees it
    ClientDisconnect: 499,
    NotReady: 503,
    DeadlineExceeded: 504,
    AttnserveError: 500,
}

RETRY_AFTER = {Overloaded: "1", NotReady: "5"}
"""Seconds after which asking again makes sense."""

Form = Callable[[int, str, Exception | None], tuple[int, Any]]
"""(status, body) of an error answer, by its status, its text and the error where there is one."""

ERROR_RENDERERS: dict[str, Form] = {}
"""The forms of protocols that have one of their own, by the first part of their paths."""


def install_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` as ``{"error": "text"}``."""
    for kind in STATUS:
        app.add_exception_handler(kind, _expected)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(RequestValidationError, _invalid_path)


def error_response(
    path: str,
    status: int,
    text: str,
    headers: Mapping[str, str] | None = None,
    error: Exception | None = None,
) -> Response:
    """``{"error": text}``, or what the protocol of ``path`` has in its place."""
    form = ERROR_RENDERERS.get("/" + path.split("/", 2)[1] if path.startswith("/") else path)
    status, body = (status, {"error": text}) if form is None else form(status, text, error)
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def explain(path: str, error: AttnserveError) -> Response:
    """The answer to a request that failed with ``error``."""
    kind = next(kind for kind in type(error).__mro__ if kind in STATUS)
    headers = {"retry-after": RETRY_AFTER[kind]} if kind in RETRY_AFTER else {}
    if kind is Unauthorized:
        headers["www-authenticate"] = "Bearer"
    return error_response(path, STATUS[kind], "; ".join(str(error).splitlines()), headers, error)


async def _expected(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        error = ClientGone("the client hung up before its request was whole")
    assert isinstance(error, AttnserveError)
    answer = explain(request.url.path, error)
    if answer.status_code == 500:
        log.error("%s failed", request.url.path, exc_info=error)
    return answer


async def _http(request: Request, error: Exception) -> Response:
    """Routing's own errors: 404 and 405."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    text = f"{request.method} {path}: {error.detail}"
    return error_response(path, error.status_code, text, error.headers)


async def _invalid_path(request: Request, error: Exception) -> Response:
    return error_response(request.url.path, 422, f"{request.url.path}: {error}")
