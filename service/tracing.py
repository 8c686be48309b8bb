"""OpenTelemetry spans of requests, if OpenTelemetry is installed and configured.

A trace that a client began (W3C traceparent) is continued. The tracer provider of the process
decides where spans are exported. A span holds the cost of the answer and no request content.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = propagate = None

__all__ = ["request_span"]

Finish = Callable[[str, int], None]


@contextmanager
def request_span(scope: Scope) -> Generator[Finish]:
    """Open a span around one request; call the yielded function with its route and status."""
    provider = trace.get_tracer_provider() if trace else None
    if not trace or not propagate or isinstance(provider, trace.ProxyTracerProvider):
        yield _ignore
        return
    failure = trace.StatusCode.ERROR
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    with trace.get_tracer("attnserve").start_as_current_span(
        scope["method"], context=propagate.extract(headers), kind=trace.SpanKind.SERVER
    ) as span:

        def finish(route: str, status: int) -> None:
            span.update_name(f"{scope['method']} {route}")
            cost: dict[str, Any] = scope.get("attnserve.cost", {})
            span.set_attributes(
                {
                    "http.request.method": scope["method"],
                    "http.route": route,
                    "http.response.status_code": status,
                    **{f"attnserve.{key}": value for key, value in cost.items()},
                }
            )
            if not status or status >= 500:
                span.set_status(failure)

        yield finish


def _ignore(route: str, status: int) -> None:
    """Record nothing: tracing is off."""
