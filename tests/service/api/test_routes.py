"""Keys, limits, deadlines and the end of a server: what holds for every route."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import numpy as np
import pytest
from starlette.testclient import TestClient

import service
from graph_passes.errors import InvalidArgument
from service.api.requests import cancel_on_disconnect
from service.app import create_app
from service.auth import read_keys
from service.engine.model import Model
from service.errors import ClientGone
from service.settings import Settings
from tests.service.tiny import hidden_states, ids_request, write_encoder

INFER = "/v2/models/tiny/infer"
EMBED = {"inputs": "a"}


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Runs wait: (set when one has begun, to be set to let all go). Install after warm-up."""
    running, go, run = threading.Event(), threading.Event(), Model.run

    def slow(self: Model, inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()) -> Any:
        running.set()
        assert go.wait(10)
        return run(self, inputs, outputs)

    monkeypatch.setattr(Model, "run", slow)
    yield running, go
    go.set()


# -- keys -----------------------------------------------------------------------------------------


@pytest.fixture
def guarded(start: Callable[..., TestClient], encoder: Path, tmp_path: Path) -> TestClient:
    (tmp_path / "keys").write_text("# of the search team\nfirst-key\n\n  second-key \n")
    return start(encoder, api_keys="third-key,fourth-key", api_keys_file=tmp_path / "keys")


@pytest.mark.parametrize("key", ["first-key", "second-key", "third-key", "fourth-key"])
@pytest.mark.parametrize("form", ["Bearer {}", "bearer  {}", None])
def test_each_key_is_let_in_by_either_header(
    guarded: TestClient, key: str, form: str | None
) -> None:
    headers = {"authorization": form.format(key)} if form else {"x-api-key": key}
    assert guarded.post("/embed", json=EMBED, headers=headers).status_code == 200
    assert guarded.get("/metrics", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer first-ke"},
        {"authorization": "Bearer first-keyy"},
        {"authorization": "Basic first-key"},
        {"authorization": "first-key"},
        {"x-api-key": ""},
        {"x-api-key": "FIRST-KEY"},
        {"x-api-key": "# of the search team"},
    ],
)
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "/embed"), ("GET", "/metrics"), ("GET", "/v2"), ("GET", "/docs"), ("GET", "/no")],
)
def test_nobody_else_is(
    guarded: TestClient, headers: dict[str, str], method: str, path: str
) -> None:
    answer = guarded.request(method, path, headers=headers)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"].startswith("the API key is missing or unknown")
    assert answer.headers["x-request-id"]


def test_health_stays_open(guarded: TestClient) -> None:
    assert guarded.get("/v2/health/live").json() == {"live": True}
    assert guarded.get("/v2/health/ready").json() == {"ready": True}
    assert guarded.get("/v2/health/ready/").status_code == 401


@pytest.mark.parametrize(
    ("content", "code"),
    [
        (None, "keys.unreadable"),
        (b"", "keys.none"),
        (b"# only\n", "keys.none"),
        (b"\xff\xfe", "keys.unreadable"),
        ("schlüssel".encode(), "keys.characters"),
    ],
)
def test_read_keys_unusable_file_is_refused(
    tmp_path: Path, content: bytes | None, code: str
) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        read_keys(Settings(model=tmp_path, api_keys_file=path))
    assert caught.value.code == code


@pytest.mark.parametrize("given", ["", " ", ",", " , "])
def test_api_keys_set_but_empty_are_refused(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """An unset secret of a deployment must not let everybody in."""
    monkeypatch.setenv("ATTNSERVE_MODEL", str(encoder))
    monkeypatch.setenv("ATTNSERVE_API_KEYS", given)
    with pytest.raises(InvalidArgument, match="api_keys"):
        create_app()


@pytest.mark.parametrize(
    "name", ["ATTNSERVE_API_KEY", "ATTNSERVE_APIKEYS", "attnserve_api_key_file"]
)
def test_api_keys_misspelled_are_refused(
    encoder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("ATTNSERVE_MODEL", str(encoder))
    monkeypatch.setenv(name, "hush")
    with pytest.raises(InvalidArgument, match=name) as caught:
        create_app()
    assert "hush" not in str(caught.value)


def test_read_keys_empty_key_is_refused(tmp_path: Path) -> None:
    settings = Settings.model_validate({"model": tmp_path, "api_keys": ["one", ""]})
    with pytest.raises(InvalidArgument, match="key 2 of 2") as caught:
        read_keys(settings)
    assert caught.value.code == "keys.empty"


def test_keys_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "one-key, other-key")
    settings = Settings(model=tmp_path)
    assert read_keys(settings) == (b"one-key", b"other-key")
    assert "one-key" not in repr(settings)


def test_pages_of_other_origins_ask_only_where_they_may(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    origin = {"origin": "https://a.example"}
    asked = origin | {"access-control-request-method": "POST"}
    closed = start(encoder)
    assert closed.options("/embed", headers=asked).status_code == 405
    answer = closed.post("/embed", json=EMBED, headers=origin)
    assert "access-control-allow-origin" not in answer.headers
    opened = start(encoder, cors_origins="https://a.example, https://b.example", api_keys="k")
    assert opened.options("/embed", headers=asked).status_code == 200
    answer = opened.post("/embed", json=EMBED, headers=origin | {"x-api-key": "k"})
    assert answer.headers["access-control-allow-origin"] == "https://a.example"
    other = opened.options("/embed", headers=asked | {"origin": "https://c.example"})
    assert "access-control-allow-origin" not in other.headers


# -- limits ---------------------------------------------------------------------------------------


def test_limits_at_their_exact_ends(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(encoder, max_text_chars=5, max_tensor_bytes=48, max_tokens=100)
    assert client.post("/embed", json={"inputs": "a b c"}).status_code == 200
    refused = client.post("/embed", json={"inputs": ["a", "a b cc"]})
    assert refused.status_code == 413
    assert refused.json()["error"].startswith("text 1 has 6 characters: at most 5")
    assert client.post(INFER, json=ids_request([2, 4, 3])).status_code == 200  # 2 x 3 x 8 bytes
    refused = client.post(INFER, json=ids_request([2, 4, 5, 3]))
    assert refused.status_code == 413
    assert refused.json()["error"].startswith("64 bytes of tensors in one request: at most 48")


def test_a_request_larger_than_a_batch_is_split_and_rejoined(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, max_batch_tokens=10)
    rows = np.random.default_rng(0).integers(0, 8, (7, 4))
    answer = client.post(INFER, json=ids_request(*rows.tolist()))
    hidden = np.reshape(answer.json()["outputs"][0]["data"], (7, 4, 4))
    np.testing.assert_array_equal(hidden, hidden_states(rows))
    stats = client.app.state.repository.engine().metrics.statistics()  # type: ignore[attr-defined]
    assert (stats["inference_count"], stats["execution_count"]) == (7, 4)
    assert [batch["batch_size"] for batch in stats["batch_stats"]] == [1, 2]
    assert int(answer.headers["x-macs"]) == 7 * 4 * 4 * 4


def test_an_answer_says_what_padding_it_cost(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, run_overhead_tokens=10)
    answer = client.post("/embed", json={"inputs": ["", "a b c d"]})
    assert answer.headers["x-tokens"] == "8"
    assert float(answer.headers["x-padding-waste"]) == round(1 - 8 / 12, 4)
    apart = start(encoder, run_overhead_tokens=0)
    answer = apart.post("/embed", json={"inputs": ["", "a b c d"]})
    assert float(answer.headers["x-padding-waste"]) == 0


# -- deadlines ------------------------------------------------------------------------------------


def test_a_deadline_is_504_and_not_computed(
    start: Callable[..., TestClient], encoder: Path, request: pytest.FixtureRequest
) -> None:
    client = start(encoder)
    running, go = request.getfixturevalue("held")
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(client.post, "/embed", json=EMBED)
        assert running.wait(10)
        late = client.post("/embed", json=EMBED, headers={"x-timeout-ms": "30"})
        go.set()
        assert first.result().status_code == 200
    assert late.status_code == 504
    assert "deadline" in late.json()["error"]
    stats = client.app.state.repository.engine().metrics.statistics()  # type: ignore[attr-defined]
    assert stats["execution_count"] == 1
    assert stats["inference_stats"]["fail"]["count"] == 1
    assert 'reason="deadline"' in client.get("/metrics").text


def test_the_setting_is_the_deadline_of_requests_that_name_none(
    start: Callable[..., TestClient], encoder: Path, request: pytest.FixtureRequest
) -> None:
    client = start(encoder, timeout_ms=20)
    _, go = request.getfixturevalue("held")
    assert client.post("/embed", json=EMBED).status_code == 504
    go.set()
    longer = client.post(INFER, json=ids_request([2, 3]), headers={"x-timeout-ms": "5000"})
    assert longer.status_code == 200


@pytest.mark.parametrize("given", ["0", "-1", "soon", "nan", "inf", "1e99", ""])
def test_a_deadline_that_is_no_time_is_refused(client: TestClient, given: str) -> None:
    answer = client.post("/embed", json=EMBED, headers={"x-timeout-ms": given})
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("x-timeout-ms is")


@pytest.mark.parametrize(
    ("settings", "given", "status"),
    [
        ({}, "300000", 200),
        ({}, "300001", 422),
        ({"max_timeout_ms": 40_000}, "40000", 200),
        ({"max_timeout_ms": 40_000}, "40001", 422),
        ({"timeout_ms": 400_000}, "400000", 200),
    ],
)
def test_deadline_above_the_maximum_is_refused(
    start: Callable[..., TestClient],
    encoder: Path,
    settings: dict[str, int],
    given: str,
    status: int,
) -> None:
    answer = start(encoder, **settings).post("/embed", json=EMBED, headers={"x-timeout-ms": given})
    assert answer.status_code == status


# -- busy, alive, ready ---------------------------------------------------------------------------


def test_a_full_queue_is_neither_dead_nor_unready(
    start: Callable[..., TestClient], encoder: Path, request: pytest.FixtureRequest
) -> None:
    client = start(encoder, max_queue=1)
    running, go = request.getfixturevalue("held")
    with ThreadPoolExecutor(2) as threads:
        accepted = [threads.submit(client.post, "/embed", json=EMBED)]
        assert running.wait(10)
        accepted.append(threads.submit(client.post, "/embed", json=EMBED))
        engine = client.app.state.repository.engine()  # type: ignore[attr-defined]
        while engine.batcher.waiting < 1:
            threading.Event().wait(0.001)
        refused = client.post("/embed", json=EMBED)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200
        told = client.get("/metrics").text
        assert 'attnserve_queue_rows{model="tiny",version="1"} 1.0' in told
        go.set()
        assert [one.result().status_code for one in accepted] == [200, 200]
    assert 'attnserve_rejects_total{model="tiny",reason="overloaded",version="1"} 1.0' in (
        client.get("/metrics").text
    )


# -- what is told ---------------------------------------------------------------------------------


def test_statistics_are_exact(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(encoder)
    engine = client.app.state.repository.engine()  # type: ignore[attr-defined]
    for _ in range(3):
        client.post(INFER, json=ids_request([2, 3], [2, 4]))
    client.post(INFER, json=ids_request([99]))
    stats = engine.metrics.statistics()
    told = stats["inference_stats"]
    assert (stats["name"], stats["version"]) == ("tiny", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (6, 3)
    assert stats["last_inference"] > 1.7e12
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    assert all(told[stage]["count"] == 3 for stage in ("success", *stages))
    assert told["fail"]["count"] == 1
    assert sum(told[stage]["ns"] for stage in stages) <= told["success"]["ns"]
    assert all(told[stage]["ns"] > 0 for stage in ("success", "fail", *stages))
    assert told["cache_hit"] == told["cache_miss"] == {"count": 0, "ns": 0}
    (batch,) = stats["batch_stats"]
    assert batch["batch_size"] == 2
    assert batch["compute_infer"]["count"] == 3
    assert 0 < batch["compute_infer"]["ns"] <= told["compute_infer"]["ns"]


def test_what_the_dashboard_shows(
    start: Callable[..., TestClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = [
        {
            "rewrite": "prune",
            "before": {"parameters": 10, "macs": 100, "bytes": 40},
            "after": {"parameters": 8, "macs": 80, "bytes": 32},
            "fidelity": {"mean_cosine": 0.99, "min_cosine": 0.9, "data": "texts"},
            "plan": {"steps": []},
            "batch": 1,
            "sequence": 128,
        }
    ]
    client = start(
        write_encoder(tmp_path / "tiny", lineage=lineage, source="/srv/somewhere/models/big")
    )
    clock = [1000.5]
    monkeypatch.setattr("service.metrics.time", lambda: clock[0])
    answer = client.post("/embed", json={"inputs": ["", "a b c d"]})
    clock[0] += 1
    told = client.get("/stats.json").json()
    assert told["ready"] and told["memory"]["rss_bytes"] > 1_000_000
    (model,) = told["models"]
    assert (model["name"], model["version"], model["requests"]) == ("tiny", "1", 1)
    window = model["window"]
    assert len(window["seconds"]) == 60
    last = window["seconds"][-1]
    assert (last["at"], last["requests"], last["rows"], last["tokens"]) == (1000, 1, 2, 8)
    assert last["p50_ms"] == last["p99_ms"] == float(answer.headers["x-total-ms"])
    assert window["seconds"][0]["p50_ms"] is None
    assert window["macs_per_second"] * 60 == int(answer.headers["x-macs"])
    assert sum(window["batch_rows"].values()) in (1, 2)
    card = model["card"]
    assert card["parameters"] == 32 + 32 + 16
    assert card["source"] == "models/big"  # where it lay is nobody's business
    assert card["optimization"]["before"] == lineage[0]["before"]
    assert card["optimization"]["after"] == lineage[0]["after"]
    assert card["optimization"]["fidelity"] == lineage[0]["fidelity"]
    assert re.fullmatch(r"[0-9a-f]{12}", card["plan"])
    assert answer.headers["x-plan"] == card["plan"]
    clock[0] += 60  # a minute later it is forgotten
    (model,) = client.get("/stats.json").json()["models"]
    assert model["window"]["p50_ms"] is None and model["requests"] == 1


# -- the end --------------------------------------------------------------------------------------


@contextmanager
def server(model: Path, **environment: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """(address, process) of a real server whose runs take 0.5 s."""
    program = (
        "import time, sys\n"
        "from pathlib import Path\n"
        "from service.engine import model\n"
        "from service.launch import serve\n"
        "from service.settings import Settings\n"
        "run = model.Model.run\n"
        "def slow(*args):\n"
        "    time.sleep(0.5)\n"
        "    return run(*args)\n"
        "settings = Settings(model=Path(sys.argv[1]), port=0, probe=False)\n"
        "start = model.Model.warm_up\n"
        "def warm(self):\n"
        "    start(self)\n"
        "    model.Model.run = slow\n"
        "model.Model.warm_up = warm\n"
        "serve(settings)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(model)],
        cwd=Path(service.__file__).parents[1],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    ) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"serving tiny at (http://\S+)\n", line)
        assert found, line + process.stderr.read()
        for _ in range(200):
            try:
                httpx2.get(f"{found[1]}/v2/health/live")
                break
            except httpx2.TransportError:
                threading.Event().wait(0.02)
        try:
            yield found[1], process
        finally:
            process.kill()


@pytest.mark.process
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_stop_it_answers_what_it_accepted_and_ends_well(
    encoder: Path, number: signal.Signals
) -> None:
    with server(encoder, ATTNSERVE_MAX_BATCH_TOKENS="3") as (address, process):
        with ThreadPoolExecutor(4) as threads:
            accepted = [
                threads.submit(httpx2.post, f"{address}/embed", json=EMBED, timeout=20)
                for _ in range(4)
            ]
            while "in_flight" not in (told := httpx2.get(f"{address}/metrics").text) or (
                'attnserve_in_flight{model="tiny",version="1"} 4.0' not in told
            ):
                assert process.poll() is None
            process.send_signal(number)
            assert [one.result().status_code for one in accepted] == [200] * 4
        assert process.wait(20) == 0
        with pytest.raises(httpx2.TransportError):
            httpx2.get(f"{address}/v2/health/live")
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.process
def test_before_it_stops_listening_it_says_that_it_is_not_ready(encoder: Path) -> None:
    with server(encoder, ATTNSERVE_DRAIN_DELAY_S="2") as (address, process):
        assert httpx2.get(f"{address}/v2/health/ready").status_code == 200
        process.send_signal(signal.SIGTERM)
        threading.Event().wait(0.3)
        assert httpx2.get(f"{address}/v2/health/ready").status_code == 503
        assert httpx2.get(f"{address}/v2/health/live").status_code == 200
        assert httpx2.post(f"{address}/embed", json=EMBED).status_code == 200
        assert process.wait(20) == 0


def test_an_application_can_start_again(encoder: Path) -> None:
    app = create_app(Settings(model=encoder, probe=False))
    for _ in range(2):
        with TestClient(app) as client:
            assert client.post("/embed", json=EMBED).status_code == 200


# -- routes ---------------------------------------------------------------------------------------


def test_a_route_answers_to_the_methods_that_are_described_and_to_no_others(
    client: TestClient,
) -> None:
    """Starlette answers what FastAPI describes: the two must say the same. HEAD goes with GET: many
    a load balancer asks so whether we live."""
    for path, described in client.get("/openapi.json").json()["paths"].items():
        there = path.format(name="tiny", version="1")
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            status = client.request(method, there).status_code
            known = method.lower().replace("head", "get") in described
            assert (status == 405) == (not known), (method, there, status)
    alive = client.head("/v2/health/live")
    assert alive.status_code == 200


# -- a client that hangs up -----------------------------------------------------------------------


def asked(receive: Callable[[], Awaitable[Any]]) -> Any:
    """A request whose body is read."""
    return SimpleNamespace(receive=receive)


async def for_ever() -> Any:
    await asyncio.sleep(60)


def test_what_a_client_waits_for_is_its_own() -> None:
    async def work() -> int:
        await asyncio.sleep(0.001)
        return 5

    async def script() -> None:
        assert await cancel_on_disconnect(asked(for_ever), work()) == 5
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1  # nobody watches any more

    asyncio.run(script())


def test_a_client_that_leaves_as_its_answer_is_ready_cancels_nothing_else() -> None:
    left = asyncio.Event()

    async def leave() -> Any:
        await left.wait()

    async def work() -> int:
        await asyncio.sleep(0)  # the client is watched
        left.set()
        return 5

    async def script() -> None:
        assert await cancel_on_disconnect(asked(leave), work()) == 5
        for _ in range(5):
            await asyncio.sleep(0)  # the answer is on its way

    asyncio.run(script())


def test_work_is_cancelled_for_a_client_that_left_and_nobody_else() -> None:
    cancelled: list[str] = []

    async def leave() -> Any:
        await asyncio.sleep(0.01)

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    async def script() -> None:
        with pytest.raises(ClientGone, match="disconnected before its answer"):
            await cancel_on_disconnect(asked(leave), work("left"))
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        # A server that stops is no client that left.
        stopped = asyncio.ensure_future(cancel_on_disconnect(asked(for_ever), work("stopped")))
        await asyncio.sleep(0.01)
        stopped.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stopped

    asyncio.run(script())
    assert cancelled == ["left", "stopped"]
