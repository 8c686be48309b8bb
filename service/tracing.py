"""The trace context (W3C) and the OpenTelemetry spans of requests.

A trace of the client (traceparent) is continued: answer and log contain the id of a child span.
With a tracer provider of OpenTelemetry in the process, the span is recorded with the cost of the
answer, without request content; the provider decides where the span is exported.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from random import getrandbits

from opentelemetry import propagate, trace
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
)
from starlette.datastructures import Headers
from starlette.types import Scope


class _HeaderGetter(Getter[Headers]):
    def get(self, carrier: Headers, key: str) -> list[str] | None:
        values = carrier.getlist(key)
        is_ambiguous = key == "traceparent" and len(values) > 1
        return None if is_ambiguous else values or None

    def keys(self, carrier: Headers) -> list[str]:
        return carrier.keys()


GETTER = _HeaderGetter()


@contextmanager
def request_span(scope: Scope) -> Generator[Span]:
    """Open the span of a request; without a trace, the context of the span is invalid."""
    headers = Headers(scope=scope)
    provider = trace.get_tracer_provider()
    if "traceparent" not in headers and isinstance(provider, trace.ProxyTracerProvider):
        yield trace.INVALID_SPAN
        return
    parent = propagate.extract(headers, getter=GETTER)
    span = trace.get_tracer("attnserve").start_span(scope["method"], parent, SpanKind.SERVER)
    context = span.get_span_context()
    if context.is_remote:  # without a provider, the span is the client's
        flags = TraceFlags(context.trace_flags & 3)  # sampled, and random since level 2
        span_id = getrandbits(64) or 1
        state = context.trace_state
        span = NonRecordingSpan(SpanContext(context.trace_id, span_id, False, flags, state))
    with trace.use_span(span, end_on_exit=True):
        yield span


def finish_span(
    span: Span, method: str, route: str, status: int, cost: Mapping[str, str | float]
) -> None:
    """Record the route, the status and the cost of the answer."""
    if not span.is_recording():
        return
    span.update_name(f"{method} {route}")
    span.set_attributes(
        {
            "http.request.method": method,
            "http.route": route,
            "http.response.status_code": status,
            **{f"attnserve.{key}": value for key, value in cost.items()},
        }
    )
    if not status or status >= 500:
        span.set_status(StatusCode.ERROR)
