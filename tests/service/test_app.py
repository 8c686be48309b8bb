from __future__ import annotations

import asyncio
import logging
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnx
import orjson
import pytest
from onnx import numpy_helper, parser
from starlette.testclient import TestClient

import service
from attnserve.serving.loaded_model import Model
from graph_passes.errors import InvalidArgument
from service.app import create_app
from service.launch import serve
from service.settings import Settings
from tests.errors import raises
from tests.service.conftest import listening, until
from tests.service.processes import serving
from tests.service.tiny import ids_request, write_encoder, write_model

INFER = "/v2/models/tiny/infer"
TIMES = ("x-queue-ms", "x-tokenize-ms", "x-compute-ms")


@pytest.mark.parametrize(
    ("route", "body", "tokens", "padded"),
    [
        (INFER, ids_request([2, 4, 3]), 3, 3),
        ("/texts/embed", {"inputs": ["a", "a b c"]}, 8, 10),
        ("/v1/embeddings", {"model": "tiny", "input": ["a", "a b c"]}, 8, 10),
    ],
)
def test_inference_answer_has_cost_in_headers_and_parameters(
    client: TestClient, route: str, body: Any, tokens: int, padded: int
) -> None:
    answer = client.post(route, json=body)
    headers = answer.headers
    assert float(headers["x-total-ms"]) >= sum(float(headers[key]) for key in TIMES) > 0
    assert (float(headers["x-tokenize-ms"]) > 0) == (route != INFER)
    assert int(headers["x-tokens"]) == tokens
    assert int(headers["x-macs"]) == padded * 4 * 4
    assert int(headers["x-flops"]) == 2 * int(headers["x-macs"])
    assert int(headers["x-rss-bytes"]) > 1_000_000
    assert headers["x-model"] == "tiny"
    assert (headers["x-runtime"], headers["x-precision"]) == ("onnxruntime", "float32")
    assert "x-gpu-bytes" not in headers
    if route == INFER:
        parameters = {
            f"x-{key.replace('_', '-')}": str(value)
            for key, value in answer.json()["parameters"].items()
        }
        assert parameters.items() <= dict(headers).items()
        assert len(parameters) == 9


BRANCH = """
<ir_version: 10, opset_import: ["": 18]>
branch (bool[] which, float[n] x) => (float[n] y) {
    y = If (which) <
        then_branch = plus () => (float[n] p) { p = Add(x, x) },
        else_branch = same () => (float[n] s) { s = Identity(x) }
    >
}
"""


def test_answer_of_uncountable_graph_omits_macs(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_model(tmp_path / "branch.onnx", BRANCH))
    which = {"name": "which", "shape": [], "datatype": "BOOL", "data": [True]}
    x = {"name": "x", "shape": [3], "datatype": "FP32", "data": [1, 1, 1]}
    answer = client.post("/v2/models/branch/infer", json={"inputs": [which, x]})
    assert answer.json()["outputs"][0]["data"] == [2, 2, 2]
    assert not {"x-macs", "x-flops"} & set(answer.headers)
    assert not {"macs", "flops"} & set(answer.json()["parameters"])


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        *((kept, kept) for kept in ("abc-123", "550e8400-e29b-41d4-a716-446655440000")),
        *((bad, "[0-9a-f]{32}") for bad in ("", "a b", "x" * 129, "a\tb", '"', None)),
    ],
)
def test_request_id_is_returned_if_valid_else_replaced(
    client: TestClient, sent: str | None, expected: str
) -> None:
    answer = client.get("/v2", headers={} if sent is None else {"x-request-id": sent})
    assert re.fullmatch(expected, answer.headers["x-request-id"])


def test_model_name_is_percent_encoded_in_header(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_encoder(tmp_path / "模型 1"))
    answer = client.post("/texts/embed", json={"inputs": "a"})
    assert (answer.status_code, answer.json()["model"]) == (200, "模型 1")
    assert answer.headers["x-model"] == "%E6%A8%A1%E5%9E%8B%201"
    assert client.get("/v2/models/模型 1").status_code == 200


def test_settings_are_read_from_environment(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_MODEL", str(encoder))
    monkeypatch.setenv("ATTNSERVE_MAX_INPUTS", "1")
    monkeypatch.setenv("ATTNSERVE_PROBE", "false")
    with TestClient(create_app()) as client:
        assert client.post("/texts/embed", json={"inputs": ["a", "b"]}).status_code == 413


def test_access_log_has_cost_and_no_request_text(
    client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="attnserve.access")
    client.post("/texts/embed", json={"inputs": "a secret"}, headers={"x-request-id": "one"})
    (record,) = [record for record in caplog.records if record.name == "attnserve.access"]
    values: dict[str, Any] = record.fields  # type: ignore[attr-defined]
    assert values["ms"] >= values["total_ms"] > 0
    expected = {
        "method": "POST",
        "path": "/texts/embed",
        "status": 200,
        "model": "tiny",
        "version": "1",
        "tokens": 4,
    }
    assert values.items() >= expected.items()
    assert "secret" not in str(values)


def test_openapi_document_describes_bodies(client: TestClient) -> None:
    document = client.get("/openapi.json").json()
    text = orjson.dumps(document).decode()
    schemas = document["components"]["schemas"]
    for name in re.findall(r"#/components/schemas/(\w+)", text):
        assert name in schemas
    assert {"InferRequest", "InferResponse", "EmbedRequest", "TextEmbedResponse"} <= set(schemas)
    assert client.get("/docs").status_code == 200


@pytest.fixture(scope="module")
def server(encoder: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    with serving(encoder) as server:
        yield server


def exchange(address: str, *parts: bytes) -> bytes:
    """Send bytes as they are and close the sending half; what came back."""
    host, port = address.removeprefix("http://").split(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
        except OSError:  # the server has answered and hung up
            pass
        try:
            while chunk := connection.recv(65536):
                received += chunk
        except ConnectionResetError:
            pass
    return received


@pytest.mark.process
def test_server_over_http_answers(server: tuple[str, subprocess.Popen[str]]) -> None:
    """The first of these tests to run asks as soon as the log says that it is ready."""
    address, _ = server
    with httpx2.Client(base_url=address) as client:
        assert client.get("/v2/health/ready").json() == {"ready": True}
        answer = client.post("/texts/embed", json={"inputs": ["a", "b c"]})
        assert answer.status_code == 200
        assert np.shape(answer.json()["embeddings"]) == (2, 4)
        assert "server" not in answer.headers
        assert client.post("/texts/embed", content=b" " * 2_000_001).status_code == 413
        chunks = (b" " * 100_000 for _ in range(30))
        assert client.post("/texts/embed", content=chunks).status_code == 413
        assert client.post("/texts/embed", json={"inputs": "a"}).status_code == 200


@pytest.mark.process
def test_answer_is_sent_without_nagle_delay(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    """Nagle's algorithm and delayed acknowledgements together add 40 ms to every answer."""
    address, _ = server
    with httpx2.Client(base_url=address) as client:
        times = [client.post("/texts/embed", json={"inputs": "a"}).elapsed for _ in range(20)]
    assert min(times[1:]).total_seconds() < 0.03


@pytest.mark.process
def test_malformed_http_is_refused(server: tuple[str, subprocess.Popen[str]]) -> None:
    address, _ = server
    head = b"POST /texts/embed HTTP/1.1\r\nhost: x\r\n"
    body = b'{"inputs": "a"}'
    cases = {
        "shorter than it says": (head + b"content-length: 4\r\n\r\n" + body, b"400"),
        "longer than it says, then gone": (head + b"content-length: 99\r\n\r\n" + body, b""),
    }
    for what, (sent, status) in cases.items():
        received = exchange(address, sent)
        assert status in received.split(b"\r\n", 1)[0], (what, received)
        assert b" 500 " not in received, what
    assert httpx2.post(f"{address}/texts/embed", json={"inputs": "a"}).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [(INFER, ids_request([2, 3]), "infer"), ("/texts/tokenize", {"inputs": "a"}, "tokenize")],
)
async def test_request_of_disconnected_client_leaves_queue(
    encoder: Path, path: str, body: dict[str, Any], method: str
) -> None:
    """The ASGI server says ``http.disconnect``; the work that waits is cancelled."""
    app = create_app(Settings(model=encoder, probe=False))
    messages = iter(
        [{"type": "http.request", "body": orjson.dumps(body)}, {"type": "http.disconnect"}]
    )
    sent: list[Any] = []

    async def receive() -> Any:
        return next(messages)

    async def send(message: Any) -> None:
        sent.append(message)

    async def never(*_: Any, **__: Any) -> None:
        cancelled.append(False)
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled[:] = [True]
            raise

    cancelled: list[bool] = []
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "app": app,
    }
    async with app.router.lifespan_context(app):
        setattr(app.state.repository.engine(), method, never)
        await asyncio.wait_for(app(scope, receive, send), 5)
    assert cancelled == [True]
    assert sent[0]["status"] == 499


def test_port_in_use_is_refused_before_loading(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises(InvalidArgument, "address.unavailable", port):
            serve(Settings(model=tmp_path / "nothing.onnx", port=port))


@pytest.mark.process
def test_log_goes_to_stderr_and_nothing_to_stdout(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    address, process = server
    httpx2.get(f"{address}/v2", headers={"x-request-id": "last"})
    process.terminate()
    stdout, stderr = process.communicate(timeout=20)
    assert stdout == ""
    *_, last = stderr.splitlines()
    assert re.match(r"\S+Z? info attnserve.access: .* request_id=last ", last + " ")
    assert "Traceback" not in stderr


@pytest.mark.process
def test_server_whose_stderr_is_not_read_answers_and_exits(encoder: Path) -> None:
    with serving(encoder, ATTNSERVE_PROBE="false") as (address, process):
        with httpx2.Client(base_url=address, timeout=10) as client:
            for _ in range(100):  # more than a pipe holds, because the log has the path
                assert client.get("/" + "x" * 3000).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


@pytest.mark.process
def test_crash_writes_stacks_to_stderr(encoder: Path) -> None:
    """A model may crash ONNX Runtime, which leaves no other trace."""
    prelude = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    with serving(encoder, prelude, ATTNSERVE_PROBE="false") as (_, process):
        process.send_signal(signal.SIGSEGV)
        _, stderr = process.communicate(timeout=20)
    assert "Fatal Python error: Segmentation fault" in stderr


SLOW = """
import time
from attnserve.serving.loaded_model import Model
run, warm_up = Model.run, Model.warm_up
def slow(*args):
    time.sleep(1)
    return run(*args)
def warm(self):
    warm_up(self)
    Model.run = slow
Model.warm_up = warm
"""
"""Runs after the warm-up take 1 s."""


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_server_signaled_answers_accepted_requests_and_exits(
    encoder: Path, number: signal.Signals
) -> None:
    limits = {"ATTNSERVE_MAX_BATCH_TOKENS": "3", "ATTNSERVE_PROBE": "false"}
    with serving(encoder, SLOW, **limits) as (address, process):
        with ThreadPoolExecutor(4) as threads:
            accepted = [
                threads.submit(
                    httpx2.post, f"{address}/texts/embed", json={"inputs": "a"}, timeout=20
                )
                for _ in range(4)
            ]
            series = 'attnserve_in_flight{model="tiny",version="1"} 4.0'
            until(lambda: series in httpx2.get(f"{address}/metrics").text)
            process.send_signal(number)
            assert [one.result().status_code for one in accepted] == [200] * 4
        assert process.wait(20) == 0
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{address}/v2/health/live")
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.process
def test_server_drain_delay_reports_not_ready_and_still_answers(encoder: Path) -> None:
    """Clients are told to close their connections meanwhile."""
    with (
        serving(encoder, ATTNSERVE_DRAIN_DELAY_S="2", ATTNSERVE_PROBE="false") as server,
        httpx2.Client(base_url=server[0]) as client,
    ):
        assert client.get("/v2/health/ready").status_code == 200
        assert "connection" not in client.get("/v2/health/live").headers
        server[1].send_signal(signal.SIGTERM)
        until(lambda: client.get("/v2/health/ready").status_code == 503)
        for path in ("/models/tiny/health", "/v2/models/tiny/ready"):
            assert client.get(path).status_code == 503
        live = client.get("/v2/health/live")
        assert (live.status_code, live.headers["connection"]) == (200, "close")
        assert client.post("/texts/embed", json={"inputs": "a"}).status_code == 200
        assert server[1].wait(20) == 0


@pytest.mark.process
def test_server_drain_ends_with_half_a_request(encoder: Path) -> None:
    """A client must not keep the server from stopping."""
    limits = {"ATTNSERVE_DRAIN_TIMEOUT_S": "1", "ATTNSERVE_PROBE": "false"}
    with serving(encoder, **limits) as server:
        address, process = server
        host, port = address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(b"POST /embed HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{")
            time.sleep(0.5)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 1
        assert process.stderr is not None
        log = process.stderr.read()
        assert "1 connections were closed" in log


@pytest.mark.process
def test_server_stops_while_it_starts(encoder: Path) -> None:
    program = (
        "import asyncio\n"
        "from pathlib import Path\n"
        "from service.engine.repository import Repository\n"
        "from service.launch import serve\n"
        "from service.settings import Settings\n"
        "async def start(self):\n"
        "    print('starting', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "Repository.start = start\n"
        f"serve(Settings(model=Path({str(encoder)!r}), port=0))"
    )
    root = Path(service.__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"starting\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 128 + signal.SIGTERM  # by a handler, not by the default action
        assert b"Traceback" not in process.stderr.read()


ENDLESS = """
<ir_version: 10, opset_import: ["": 18]>
endless (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, sequence] y)
{
    most = ReduceMax <keepdims = 0> (input_ids)
    start = Identity(zero)
    sum = Loop (most, , start) <
        body = step (int64 i, bool go, float s) => (bool go_on, float t) {
            go_on = Identity(go) t = Add(s, one) }
    >
    floats = Cast <to = 1> (input_ids)
    y = Add(floats, sum)
}
"""


def write_endless(tmp_path: Path) -> Path:
    """A model that loops as often as its largest input says."""
    (folder := tmp_path / "tiny").mkdir()
    model = parser.parse_model(ENDLESS)
    scalars = {"zero": np.float32(0), "one": np.float32(1)}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(value), name) for name, value in scalars.items()
    )
    onnx.save(model, folder / "model.onnx")
    return folder


def endless_request(times: int) -> dict[str, Any]:
    shape = {"shape": [1, 2], "datatype": "INT64"}
    return {
        "inputs": [
            {"name": "input_ids", "data": [times, 1], **shape},
            {"name": "attention_mask", "data": [1, 1], **shape},
        ]
    }


def test_endless_run_ends_with_its_request(tmp_path: Path) -> None:
    app = create_app(Settings(model=write_endless(tmp_path), probe=False))
    with TestClient(app) as client:
        for _ in range(2):
            answer = client.post(
                "/v2/models/tiny/infer",
                json=endless_request(2**60),
                headers={"x-timeout-ms": "300"},
            )
            assert answer.status_code == 504
            assert client.get("/v2/models/tiny/ready").status_code == 200
            answer = client.post("/v2/models/tiny/infer", json=endless_request(3))
            assert answer.status_code == 200
            assert answer.json()["outputs"][0]["data"] == [6.0, 4.0]


def test_run_ends_when_its_client_has_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, running = Model.run, list[Any]()

    def recorded(*given: Any) -> Any:
        running.append(given)
        try:
            return run(*given)
        finally:
            running.clear()

    app = create_app(Settings(model=write_endless(tmp_path), probe=False))
    body = orjson.dumps(endless_request(2**60))
    head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"
    with listening(app) as address:
        host, port = address.removeprefix("http://").split(":")
        monkeypatch.setattr(Model, "run", recorded)
        with socket.create_connection((host, int(port)), timeout=10) as client:
            client.sendall(head.encode() + body)
            until(lambda: running)
        until(lambda: not running)
        answer = httpx2.post(f"{address}/v2/models/tiny/infer", json=endless_request(3))
        assert answer.status_code == 200


@pytest.mark.process
def test_server_stops_although_a_run_does_not_return(tmp_path: Path) -> None:
    limits = {"ATTNSERVE_DRAIN_TIMEOUT_S": "1", "ATTNSERVE_PROBE": "false"}
    deaf = "import attnserve.runtime.onnx_runtime as r\nr.stoppable = lambda options: options"
    with serving(write_endless(tmp_path), deaf, **limits) as server:
        address, process = server
        answer = httpx2.post(
            f"{address}/v2/models/tiny/infer", json=endless_request(2**60),
            headers={"x-timeout-ms": "500"}, timeout=20,
        )  # fmt: skip
        assert answer.status_code == 504
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 1


def test_application_can_start_again(encoder: Path) -> None:
    app = create_app(Settings(model=encoder, probe=False))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/texts/embed", json={"inputs": "a"}).status_code == 200
