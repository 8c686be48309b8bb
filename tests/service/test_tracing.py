"""OpenTelemetry spans of requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.testclient import TestClient

Spans = Callable[[], list[ReadableSpan]]

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], list[ReadableSpan]]]:
    """All that is traced: one span a request, by us and not by FastAPI beside."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("opentelemetry.trace.get_tracer_provider", lambda: provider)
    yield lambda: list(exporter.get_finished_spans())
    provider.shutdown()


def test_span_has_cost_and_no_request_text(client: TestClient, spans: Spans):
    answer = client.post("/texts/embed", json={"inputs": "a b secret"})
    (span,) = spans()
    told = dict(span.attributes or {})
    assert span.instrumentation_scope is not None and span.instrumentation_scope.name == "attnserve"
    assert span.name == "POST /texts/embed"
    assert told["http.response.status_code"] == 200
    assert told["attnserve.model"] == "tiny"
    assert told["attnserve.tokens"] == int(answer.headers["x-tokens"])
    assert told["attnserve.macs"] == int(answer.headers["x-macs"])
    assert told["attnserve.total_ms"] == float(answer.headers["x-total-ms"])
    assert "secret" not in span.to_json()
    assert span.status.is_ok or span.status.is_unset


def test_span_continues_trace_of_client(client: TestClient, spans: Spans):
    client.get("/v2/health/live", headers={"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"})
    (span,) = spans()
    assert span.context is not None and f"{span.context.trace_id:032x}" == TRACE


@pytest.mark.parametrize("header", ["", "00-0-0-00", "nonsense", "ÿ" * 200])
def test_span_invalid_traceparent_starts_new_trace(client: TestClient, spans: Spans, header: str):
    headers = {b"traceparent": header.encode("latin-1")}
    assert client.get("/v2/health/live", headers=headers).status_code == 200
    (span,) = spans()
    assert span.context is not None and span.context.trace_id


def test_span_unknown_paths_share_one_name(client: TestClient, spans: Spans):
    for path in ("/nothing", "/nowhere"):
        assert client.get(path).status_code == 404
    assert {span.name for span in spans()} == {"GET unknown"}


def test_request_without_tracer_provider_is_answered(client: TestClient):
    assert client.get("/v2/health/live").status_code == 200
