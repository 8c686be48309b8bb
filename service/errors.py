"""Errors of the service, and one table with the HTTP status of every error."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from fastapi import Request, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from attnserve.runtime.cache import cache_folder
from attnserve.serving.loaded_model import ModelFailed
from graph_passes.errors import (
    AttnserveError,
    CheckFailed,
    InvalidArgument,
    InvalidData,
    InvalidModel,
)

log = logging.getLogger("attnserve")


class ServiceError(AttnserveError):
    """The request cannot be answered."""

    default_code = "request.failed"


class MalformedRequest(ServiceError):
    """The body is not valid JSON, or cannot be decoded."""

    default_code = "request.malformed"


class UnknownModel(ServiceError):
    """No model has this name or version, or the request must name one of several."""

    default_code = "model.unknown"


class UnsupportedTask(ServiceError):
    """The model does not support the task, for example because it has no tokenizer."""

    default_code = "model.unsupported_task"


class InvalidField(InvalidData):
    """A field of the body is invalid; ``field`` is empty if the whole body is."""

    default_code = "request.field"

    def __init__(self, what: str, fix: str = "", *, field: str) -> None:
        super().__init__(what, fix)
        self.field = field


class UnknownField(InvalidField):
    """The body has a field that this kind of request does not define."""


class EmptyBatch(ServiceError):
    """A list of inputs is empty."""

    default_code = "request.empty"


class TooLarge(ServiceError):
    """Too many bytes, texts or tokens in one request."""

    default_code = "request.too_large"


class Overloaded(ServiceError):
    """The queue is full."""

    default_code = "server.overloaded"


class DeadlineExceeded(ServiceError):
    """The deadline passed before the answer."""

    default_code = "request.deadline"


class NotReady(ServiceError):
    """The model is not loaded, or cannot run now."""

    default_code = "model.not_ready"


class ClientGone(ServiceError):
    """The client disconnected before the answer."""

    default_code = "request.client_gone"


class Error(BaseModel):
    """The body of an error."""

    error: str


class ErrorClass(NamedTuple):
    """The HTTP status of an error, and the label of the failed request in the metrics."""

    status: int
    reason: str


ERROR_CLASSES: Mapping[type[BaseException], ErrorClass] = {
    MalformedRequest: ErrorClass(400, "invalid"),
    EmptyBatch: ErrorClass(400, "invalid"),
    UnknownModel: ErrorClass(404, "invalid"),
    UnsupportedTask: ErrorClass(404, "invalid"),
    TooLarge: ErrorClass(413, "too_large"),
    InvalidData: ErrorClass(422, "invalid"),
    InvalidArgument: ErrorClass(422, "invalid"),
    InvalidModel: ErrorClass(422, "invalid"),  # of a model to load
    Overloaded: ErrorClass(429, "overloaded"),
    ClientGone: ErrorClass(499, "gone"),  # nginx's number; it appears only in the log
    asyncio.CancelledError: ErrorClass(499, "gone"),  # becomes ``ClientGone`` in the API
    CheckFailed: ErrorClass(500, "not_finite"),
    NotReady: ErrorClass(503, "not_ready"),
    ModelFailed: ErrorClass(503, "not_ready"),
    DeadlineExceeded: ErrorClass(504, "deadline"),
    BaseException: ErrorClass(500, "error"),
}


def error_class(error: BaseException) -> ErrorClass:
    """The entry of the closest base class of an error in ``ERROR_CLASSES``."""
    return next(ERROR_CLASSES[kind] for kind in type(error).__mro__ if kind in ERROR_CLASSES)


HEADERS: Mapping[int, Mapping[str, str]] = {
    401: {"www-authenticate": "Bearer"},
    415: {"accept-encoding": "gzip, deflate"},
    429: {"retry-after": "1"},
    503: {"retry-after": "5"},
}
"""Headers of error answers by status."""

ErrorRenderer = Callable[[int, str, Exception | None], tuple[int, BaseModel]]
"""A function from the status, text and exception (if any) of an error to (status, body)."""


@dataclass(frozen=True)
class ErrorResponses:
    """The answers to errors.

    Attributes:
        served: The path of the models, which clients do not see.
        renderers: The form of errors below each prefix of paths; ``Error`` elsewhere.
    """

    served: Path
    renderers: Mapping[str, ErrorRenderer]

    def answer(
        self, scope: Scope, status: int, text: str, error: Exception | None = None
    ) -> Response:
        """The answer to a request, in the form of the protocol of its path."""
        # By the first status: TEI's 424 of a failed run (503 elsewhere) keeps retry-after, because
        # the model may run again soon. That of a task that the model does not support (404) has
        # none. TEI itself sends no such header.
        headers = HEADERS.get(status)
        body: BaseModel = Error(error=text)
        for prefix, render in self.renderers.items():
            if f"{scope['path']}/".startswith(f"{prefix}/"):
                status, body = render(status, text, error)
        content = orjson.dumps(body.model_dump())
        return Response(content, status, headers, media_type="application/json")

    @property
    def handlers(self) -> dict[Any, Callable[[Request, Any], Coroutine[Any, Any, Response]]]:
        """The exception handlers of the application."""
        return {AttnserveError: self._handle_error, HTTPException: self._handle_http_error}

    async def _handle_error(self, request: Request, error: AttnserveError) -> Response:
        status = error_class(error).status
        if status == 500:
            log.error("%s failed", request.url.path, exc_info=error)
        text = hide_folders(one_line(error), self.served)
        return self.answer(request.scope, status, text, error)

    async def _handle_http_error(self, request: Request, error: HTTPException) -> Response:
        """Handle errors of the router, answers to OPTIONS, and refusals with an explicit status."""
        text = f"{request.method} {request.url.path}: {error.detail}"
        answer = self.answer(request.scope, error.status_code, text)
        if error.status_code == 405:
            allowed = set((error.headers or {}).get("Allow", "").split(", "))
            allowed |= {"OPTIONS"} | ({"HEAD"} if "GET" in allowed else set())
            if request.method == "OPTIONS":
                answer = Response(status_code=204)
            answer.headers["allow"] = ", ".join(sorted(allowed))
        return answer


def one_line(error: AttnserveError) -> str:
    """The problem and the fix of an error in one line, for answers and the log."""
    return "; ".join(str(error).splitlines())


def hide_folders(text: str, served: Path) -> str:
    """Replace paths of files in ``served``, temporary and installation folders by relative paths.

    Paths of the server are hidden from clients. Only known folders are replaced, because tensor
    names look like paths ("/model/Add").
    """
    return _folders(served).sub(lambda at: "" if at["separator"] else Path(at[0]).name, text)


@cache
def _folders(served: Path) -> re.Pattern[str]:
    folder = served.parent if served.suffix == ".onnx" else served
    folders = {
        folder.absolute(),
        folder.resolve(),
        Path(tempfile.gettempdir()),
        Path(__file__).parents[1],
        Path(sys.prefix),
        Path(sys.base_prefix),
        cache_folder(),
    }
    longest_first = sorted((str(path) for path in folders if path.name), key=len, reverse=True)
    names = "|".join(map(re.escape, longest_first))
    return re.compile(rf"(?<![\w/.-])(?:{names})(?:(?P<separator>[/\\])|(?![\w.-]))")
