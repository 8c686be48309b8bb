"""Middleware of every request: request id, tracing span, metrics and access log."""

from __future__ import annotations

import logging
import re
import uuid
from contextlib import ExitStack
from time import perf_counter

from opentelemetry.trace import format_span_id, format_trace_id
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.errors import error_response
from service.log import REQUEST
from service.metrics import Metrics
from service.tracing import finish_span, request_span

log = logging.getLogger("attnserve")
access = logging.getLogger("attnserve.access")

TRACE_CONTEXT = TraceContextTextMapPropagator()
VALID_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)


class ObserveRequests:
    """ASGI middleware: adds x-request-id to answers, counts requests and writes the access log.

    The middleware releases the resources of a request (``hold``) after the answer. A valid id of
    the client is kept. An unexpected exception is logged with its traceback and answered with 500.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

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
        resources = scope["attnserve.held"] = ExitStack()
        # FastAPI's GET routes refuse HEAD. The web server omits the body of the answer.
        routed = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope

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
                answer = error_response(scope, 500, "internal error")
                await answer(scope, receive, observed)
            finally:
                resources.close()
                # The pattern of the route, not the path: the number of series must stay bounded.
                route = getattr(routed.get("route"), "path", "unknown")
                self._metrics.count_response(route, status)
                finish_span(span, scope, route, status)
                if access.isEnabledFor(logging.INFO):
                    line = {
                        "method": scope["method"],
                        "path": scope["path"],
                        "status": status,
                        "ms": round((perf_counter() - start) * 1e3, 3),
                        **scope.get("attnserve.cost", {}),
                    }
                    access.info("request", extra={"fields": line})
                REQUEST.reset(token)
