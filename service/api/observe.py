"""Middleware of every request: request id, tracing span, metrics and access log."""

from __future__ import annotations

import logging
import re
import uuid
from time import perf_counter

from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.exchange import Exchange
from service.budget import Budget
from service.engine.repository import Repository
from service.errors import ErrorResponses
from service.log import REQUEST
from service.tracing import finish_span, request_span

log = logging.getLogger("attnserve")
access = logging.getLogger("attnserve.access")

TRACE_CONTEXT = TraceContextTextMapPropagator()
VALID_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class ObserveRequests:
    """ASGI middleware: adds x-request-id to answers, counts requests and writes the access log.

    The middleware creates the ``Exchange`` of a request, and releases what it holds after the
    answer. A valid id of the client is kept. An unexpected exception is logged with its traceback
    and answered with 500.
    """

    def __init__(self, app: ASGIApp, repository: Repository, errors: ErrorResponses) -> None:
        self._app, self._repository, self._errors = app, repository, errors
        limit = repository.settings.max_open_bytes
        self._bodies, self._answers = Budget(limit), Budget(limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = Headers(scope=scope).get("x-request-id", "")
        if not VALID_REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        start = perf_counter()
        status = 0
        id_headers = MutableHeaders({"x-request-id": request_id})
        # FastAPI's GET routes refuse HEAD. The web server omits the body of the answer.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        request = Request(routed, receive)
        exchange = Exchange(request, self._repository, self._bodies, self._answers)
        routed["attnserve"] = exchange

        async def observed(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], *id_headers.raw]
            await send(message)

        with request_span(scope) as span:
            fields = {"request_id": request_id}
            if (context := span.get_span_context()).is_valid:
                fields["trace_id"] = format_trace_id(context.trace_id)
                fields["span_id"] = format_span_id(context.span_id)
                TRACE_CONTEXT.inject(id_headers)
            if (client := scope.get("client")) is not None:
                fields["client"] = f"{client[0]}:{client[1]}"
            token = REQUEST.set(fields)
            try:
                await self._app(routed, receive, observed)
            except Exception:
                log.exception("request %s failed", request_id)
                if status:  # the answer has begun: the connection can only be closed
                    raise
                answer = self._errors.answer(scope, 500, "internal error")
                await answer(scope, receive, observed)
            finally:
                exchange.held.close()
                # The pattern of the route, not the path: the number of series must stay bounded.
                route = getattr(routed.get("route"), "path", "unknown")
                self._repository.metrics.requests.labels(route, status).inc()
                finish_span(span, scope["method"], route, status, exchange.cost)
                if access.isEnabledFor(logging.INFO):
                    line = {
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "ms": round((perf_counter() - start) * 1e3, 3),
                        **exchange.cost,
                    }
                    access.info("request", extra={"fields": line})
                REQUEST.reset(token)
