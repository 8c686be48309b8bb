"""Spans of requests, where OpenTelemetry is installed and set up; nothing else here knows of it.

A trace that a client began (W3C traceparent) is continued. Where spans go is the choice of whoever
sets the tracer provider. A span says what the answer cost and never what was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from starlette.types import Scope

try:
    from opentelemetry import propagate, trace
except ImportError:  # tracing is for those who have it
    propagate = trace = None

__all__ = ["request_span"]

Finish = Callable[[str, int], None]


@contextmanager
def request_span(scope: Scope) -> Generator[Finish]:
    """A span around one request; what is given is called with its route and status at the end."""
    provider = None if trace is None else trace.get_tracer_provider()
    if provider is None or isinstance(provider, trace.ProxyTracerProvider):  # set up by nobody
        yield _nothing
        return
    headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
    with provider.get_tracer("attnserve").start_as_current_span(
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
                span.set_status(trace.StatusCode.ERROR)

        yield finish


def _nothing(route: str, status: int) -> None:
    """Nobody traces."""
