"""Log lines: their format, and the request that they belong to."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from service import log
from service.log import REQUEST, configure_log, flush_log
from service.settings import Settings

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = f"00-{TRACE}-00f067aa0ba902b7-01"
TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00"


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Set the log up; then all lines that were written."""
    written: list[bytes] = []
    monkeypatch.setattr(log.os, "write", lambda _, line: written.append(line))
    monkeypatch.setattr(log.faulthandler, "enable", lambda _: None)

    def begin(**settings: Any) -> Callable[[], list[str]]:
        configure_log(Settings.model_validate({"model": Path("m"), **settings}))

        def all_lines() -> list[str]:
            flush_log()
            found = b"".join(written).decode().splitlines()
            return [line for line in found if "httpx" not in line]  # the client of the test

        return all_lines

    return begin


def fail() -> None:
    try:
        raise ValueError("wrong\nnumber")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("it failed: %s", "now")


def test_text_lines_all_have_time_level_logger_and_request(lines: Any) -> None:
    written = lines()
    token = REQUEST.set({"request_id": "one", "client": "127.0.0.1:1"})
    try:
        logging.getLogger("attnserve").warning("a\nforged \x1b[31mline")
        fail()
    finally:
        REQUEST.reset(token)
    first, *stack = written()
    assert re.fullmatch(
        TIME + r" warning attnserve: a\\nforged \\x1b\[31mline request_id=one client=127.0.0.1:1",
        first,
    )
    assert len(stack) > 3 and stack[-1].endswith("number")
    for line in stack:
        assert re.match(TIME + r" error uvicorn.error: ", line)


def test_json_lines_hold_fields_and_the_stack(lines: Any) -> None:
    written = lines(log_format="json")
    fail()
    logging.getLogger("attnserve").info("done", extra={"fields": {"model": "a b"}})
    failed, done = map(orjson.loads, written())
    assert failed["message"] == "it failed: now" and failed["level"] == "error"
    assert failed["exception"].startswith("Traceback") and failed["logger"] == "uvicorn.error"
    assert done["model"] == "a b" and re.fullmatch(TIME, done["time"])


def test_request_lines_name_client_trace_and_key(
    start: Callable[..., TestClient], encoder: Path, tmp_path: Path, lines: Any
) -> None:
    (tmp_path / "keys").write_text("first-key batch job\nsecond-key\n")
    client = start(encoder, api_keys_file=tmp_path / "keys", admin_keys="boss")
    written = lines(log_format="json")
    head = {"x-request-id": "one", "traceparent": PARENT}
    answer = client.get("/v2", headers=head | {"x-api-key": "first-key"})
    span = answer.headers["traceparent"]
    assert re.fullmatch(rf"00-{TRACE}-[0-9a-f]{{16}}-01", span) and span != PARENT
    client.get("/v2", headers={"x-api-key": "second-key"})
    client.get("/v2", headers={"x-api-key": "wrong"})
    client.post("/v2/repository/models/tiny/load", headers={"x-api-key": "boss"})
    client.post("/v2/repository/models/tiny/unload", headers={"x-api-key": "boss"})
    named, other, refused, *control = map(orjson.loads, written())
    assert named["key"] == "batch job" and named["client"].startswith("testclient:")
    assert (named["request_id"], named["trace_id"]) == ("one", TRACE)
    assert named["span_id"] == span.split("-")[2]
    assert other["key"] == hashlib.sha256(b"second-key").hexdigest()[:8] and "trace_id" not in other
    assert refused["status"] == 401 and "key" not in refused
    loaded, _, unloaded, _ = control
    for line, message in ((loaded, "loaded tiny"), (unloaded, "unloaded tiny")):
        assert (line["logger"], line["message"]) == ("attnserve.audit", message)
        assert line["key"] == hashlib.sha256(b"boss").hexdigest()[:8] and line["client"]
        assert line["request_id"]
    assert re.fullmatch("[0-9a-f]{64}", loaded["versions"]["1"])
    assert not any("-key" in line or "boss" in line for line in written())


def test_access_log_can_be_switched_off(client: TestClient, lines: Any) -> None:
    written = lines(access_log=False)
    client.get("/v2")
    logging.getLogger("attnserve").info("other")
    assert [line.rpartition(" ")[2] for line in written()] == ["other"]


@pytest.mark.parametrize(
    "parent",
    [
        "", "nonsense", PARENT.upper(), f"{PARENT}-more", f"ff{PARENT[2:]}", PARENT[:-1],
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-{TRACE}-{'0' * 16}-01",
    ],
)  # fmt: skip
def test_malformed_traceparent_is_ignored(client: TestClient, parent: str) -> None:
    answer = client.get("/v2", headers={"traceparent": parent, "tracestate": "a=b"})
    assert answer.status_code == 200
    assert not {"traceparent", "tracestate"} & set(answer.headers)


def test_trace_state_and_later_versions_are_passed_on(client: TestClient) -> None:
    answer = client.get("/v2", headers={"traceparent": f"01{PARENT[2:]}-x", "tracestate": "a=b"})
    assert answer.headers["traceparent"].startswith(f"00-{TRACE}-")
    assert answer.headers["tracestate"] == "a=b"


def test_repeated_traceparent_is_ignored_and_unknown_flags_are_cleared(client: TestClient) -> None:
    repeated = client.get("/v2", headers=[("traceparent", PARENT), ("traceparent", PARENT)])
    assert "traceparent" not in repeated.headers
    flagged = client.get("/v2", headers={"traceparent": f"{PARENT[:-2]}ff"})
    assert flagged.headers["traceparent"].endswith("-03")
