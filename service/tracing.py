"""Trace context of requests (W3C), and their OpenTelemetry spans.

A trace that a client began (traceparent) is continued: the answer and the log have the id of a
child span. With a tracer provider of OpenTelemetry in the process, that span is recorded with the
cost of the answer and no request content; the provider decides where it is exported.

https://www.w3.org/TR/trace-context/
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import Scope

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = propagate = None

__all__ = ["Span", "request_span"]

TRACEPARENT = re.compile(
    rb"(?!ff)(?P<version>[0-9a-f]{2})-(?!0{32})(?P<trace>[0-9a-f]{32})-(?!0{16})[0-9a-f]{16}"
    rb"-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
TRACESTATE = re.compile(rb"[\x20-\x7e]{1,512}")


@dataclass(frozen=True)
class Span:
    """The span of a request.

    Attributes:
        finish: Called with the route and the status of the answer.
        fields: ``trace_id`` and ``span_id``; empty without a trace.
        headers: traceparent and tracestate of the answer.
    """

    finish: Callable[[str, int], None]
    fields: dict[str, str]
    headers: list[tuple[bytes, bytes]]


@contextmanager
def request_span(scope: Scope) -> Generator[Span]:
    """Open a span around one request."""
    provider = trace.get_tracer_provider() if trace else None
    if not trace or not propagate or isinstance(provider, trace.ProxyTracerProvider):
        yield _continued(scope)
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

        context = span.get_span_context()
        trace_id, span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        state = context.trace_state.to_header().encode()
        yield _span(finish, trace_id, span_id, context.trace_flags, state)


def _continued(scope: Scope) -> Span:
    """A child span of the client's trace, which is recorded nowhere."""
    given: dict[bytes, list[bytes]] = {b"traceparent": [], b"tracestate": []}
    for name, value in scope["headers"]:
        if name in given:
            given[name].append(value.strip())
    parents = given[b"traceparent"]
    found = TRACEPARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if found is None or (found["version"] == b"00" and found["more"]):
        return Span(_ignore, {}, [])
    state = b",".join(given[b"tracestate"])
    return _span(
        _ignore,
        found["trace"].decode(),
        os.urandom(8).hex(),
        int(found["flags"], 16) & 3,  # sampled, and random since level 2
        state if TRACESTATE.fullmatch(state) else b"",
    )


def _span(
    finish: Callable[[str, int], None], trace_id: str, span_id: str, flags: int, state: bytes
) -> Span:
    headers = [(b"traceparent", f"00-{trace_id}-{span_id}-{flags:02x}".encode())]
    if state:
        headers.append((b"tracestate", state))
    return Span(finish, {"trace_id": trace_id, "span_id": span_id}, headers)


def _ignore(route: str, status: int) -> None:
    """Record nothing: tracing is off."""
