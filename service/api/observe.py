"""Middleware around every request: its id, its span, its metrics and the access log."""

from __future__ import annotations

import logging
import re
import uuid
from time import perf_counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.engine.engine import Engine
from service.errors import error_response
from service.log import REQUEST
from service.metrics import Metrics
from service.tracing import request_span

__all__ = ["ObserveRequests"]

log = logging.getLogger("attnserve")
access = logging.getLogger("attnserve.access")

VALID_REQUEST_ID = re.compile(rb"[\w.:/+=@-]{1,128}", re.ASCII)


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
        started, status, added = perf_counter(), 0, [(b"x-request-id", request_id)]
        engines: list[Engine] = []
        scope["attnserve.engines"] = engines
        # FastAPI's GET routes refuse HEAD. The web server omits the body of the answer.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *added]
            await send(message)

        with request_span(scope) as span:
            client = scope.get("client")
            fields = {"request_id": request_id.decode(), **span.fields}
            if client is not None:
                fields["client"] = f"{client[0]}:{client[1]}"
            added += span.headers
            token = REQUEST.set(fields)
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
                span.finish(route, status)
                if access.isEnabledFor(logging.INFO):
                    line = {
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "ms": round((perf_counter() - started) * 1e3, 3),
                        **scope.get("attnserve.cost", {}),
                    }
                    access.info("request", extra={"fields": line})
                REQUEST.reset(token)
