"""Limits, deadlines, methods and disconnects of all routes."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson
import pytest
from starlette.testclient import TestClient

from attnserve.models.tokenizer import TextEncoder
from service.api import responses
from service.api.exchange import Exchange
from service.api.responses import _parts, _without_large
from service.errors import ClientGone
from tests.service.conftest import HeldRuns, until
from tests.service.tiny import hidden_states, ids_request, make_tokenizer, write_model

INFER = "/v2/models/tiny/infer"
EMBED = {"inputs": "a"}

# -- limits ---------------------------------------------------------------------------------------


def test_limits_are_inclusive(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(
        encoder,
        max_inputs=3,
        max_text_chars=5,
        max_tensor_bytes=85,
        max_tokens=9,
        max_queue=9,
    )
    cases: list[tuple[str, Any, Any, str]] = [
        ("/texts/embed", {"inputs": ["", "", ""]}, {"inputs": [""] * 4}, "4 texts"),
        (
            "/texts/embed",
            {"inputs": "a b c"},
            {"inputs": ["a", "a b cc"]},
            "text 1 has 6 characters",
        ),
        ("/texts/embed", {"inputs": ["a", "a", "a"]}, {"inputs": ["a b c", "a b c"]}, "10 tokens"),
        # A token has 16 bytes of input and 17 of output.
        (INFER, ids_request([2, 4, 5, 6, 3]), ids_request([2, 4, 5, 6, 7, 3]), "96 bytes"),
    ]
    for route, accepted, refused, text in cases:
        assert client.post(route, json=accepted).status_code == 200
        answer = client.post(route, json=refused)
        assert answer.status_code == 413 and answer.json()["error"].startswith(text)


@pytest.mark.parametrize("route", ["/embed", "/embed_all", "/texts/embed", "/v1/embeddings"])
def test_large_answers_are_those_of_small_requests(
    start: Callable[..., TestClient], encoder: Path, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    client = start(encoder)
    field = "input" if route.startswith("/v1") else "inputs"
    body = {field: ["a", "b c", "", "a b c d"] * 500, "model": "tiny"}
    large = client.post(route, json=body)
    monkeypatch.setattr(responses, "SLICE", 10**9)
    assert large.status_code == 200 and large.content == client.post(route, json=body).content


def test_infer_request_larger_than_batch_is_split_and_joined(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder, max_batch_tokens=10)
    rows = np.random.default_rng(0).integers(0, 8, (7, 4))
    answer = client.post(INFER, json=ids_request(*rows.tolist()))
    hidden = np.reshape(answer.json()["outputs"][0]["data"], (7, 4, 4))
    np.testing.assert_array_equal(hidden, hidden_states(rows))
    (stats,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
    assert (stats["inference_count"], stats["execution_count"]) == (7, 4)
    assert [batch["batch_size"] for batch in stats["batch_stats"]] == [1, 2]
    assert int(answer.headers["x-macs"]) == 7 * 4 * 4 * 4


@pytest.mark.parametrize(("overhead", "waste"), [(10, round(1 - 8 / 12, 4)), (0, 0)])
def test_embed_reports_padding_of_its_batches(
    start: Callable[..., TestClient], encoder: Path, overhead: int, waste: float
) -> None:
    client = start(encoder, run_overhead_tokens=overhead)
    headers = client.post("/texts/embed", json={"inputs": ["", "a b c d"]}).headers
    assert (headers["x-tokens"], float(headers["x-padding-waste"])) == ("8", waste)


# 1000 numbers per token, and as many as the first token says.
LARGE = """
<ir_version: 10, opset_import: ["": 18]>
large (int64[batch, sequence] input_ids) => (float[batch, sequence, 1000] hidden, float[n] n_ones)
  <int64[1] axis = {2}, int64[3] repeats = {1, 1, 1000}, int64[2] one = {1, 1}, int64[1] last = {1}>
{
    ids = Cast<to = 1>(input_ids)
    wide = Unsqueeze(ids, axis)
    hidden = Tile(wide, repeats)
    first = Slice(input_ids, zeros, one)
    zeros = Sub(one, one)
    count = Squeeze(first)
    size = Unsqueeze(count, start)
    start = Sub(last, last)
    n_ones = ConstantOfShape(size)
}
"""


def large_request(ids: list[int], output: str) -> dict[str, Any]:
    request = ids_request(ids)
    return {"inputs": request["inputs"][:1], "outputs": [{"name": output}]}


def test_outputs_above_limit_are_refused_before_the_run_if_their_size_is_known(
    start: Callable[..., TestClient], tmp_path: Path, hold: Callable[[], HeldRuns]
) -> None:
    write_model(tmp_path / "large.onnx", LARGE)
    make_tokenizer().save(str(tmp_path / "tokenizer.json"))
    client = start(tmp_path / "large.onnx", max_tensor_bytes=12_000)
    held = hold()
    held.go.set()

    def post(route: str, body: Any) -> tuple[int, int]:
        before = held.started
        return client.post(route, json=body).status_code, held.started - before

    infer = "/v2/models/large/infer"
    assert post(infer, large_request([1, 1, 1], "hidden")) == (200, 1)
    assert post(infer, large_request([1, 1, 1, 1], "hidden")) == (413, 0)
    assert post(infer, large_request([3000, 1, 1, 1], "n_ones")) == (200, 1)
    assert post(infer, large_request([3001], "n_ones")) == (413, 1)
    # A run of a text of 4 tokens makes the same output.
    assert post("/texts/embed", {"inputs": "a"}) == (200, 1)
    assert post("/texts/embed", {"inputs": ["a", "a b"]}) == (413, 0)


# 4 numbers per text. The first model pads each text to 8 tokens; the second one pools.
FIXED = """
<ir_version: 10, opset_import: ["": 18]>
fixed (int64[batch, 8] input_ids, int64[batch, 8] attention_mask) => (float[batch, 8, 4] hidden)
  <int64[1] last = {2}, int64[3] repeats = {1, 1, 4}>
{
    masked = Mul(input_ids, attention_mask)
    ids = Cast<to = 1>(masked)
    wide = Unsqueeze(ids, last)
    hidden = Tile(wide, repeats)
}
"""
POOLED = """
<ir_version: 10, opset_import: ["": 18]>
pooled (int64[batch, sequence] input_ids) => (float[batch, 4] sentence_embedding)
  <int64[1] tokens = {1}, int64[2] repeats = {1, 4}>
{
    ids = Cast<to = 1>(input_ids)
    sum = ReduceSum<keepdims = 1>(ids, tokens)
    sentence_embedding = Tile(sum, repeats)
}
"""


@pytest.mark.parametrize("model", [FIXED, POOLED])
def test_limit_of_vectors_counts_vectors_and_not_padding(
    start: Callable[..., TestClient], tmp_path: Path, model: str
) -> None:
    path = write_model(tmp_path / "model.onnx", model, tokenizer=True)
    client = start(path, max_tensor_bytes=8 * 4 * 4)
    for count, status in ((8, 200), (9, 413)):
        answer = client.post("/texts/embed", json={"inputs": ["a"] * count})
        assert answer.status_code == status, answer.text


SCORES = """
<ir_version: 10, opset_import: ["": 18]>
scores (int64[batch, sequence] input_ids) => (float[batch, sequence] sums)
{
    numbers = Cast<to = 1>(input_ids)
    two = Constant<value = int64[1] {2}>()
    one = Constant<value = int64[1] {1}>()
    column = Unsqueeze(numbers, two)
    row = Unsqueeze(numbers, one)
    products = Mul(column, row)
    weights = Softmax(products)
    sums = ReduceSum<keepdims = 0>(weights, one)
}
"""


def test_runs_above_memory_limit_are_refused_before_the_run(
    start: Callable[..., TestClient], tmp_path: Path, hold: Callable[[], HeldRuns]
) -> None:
    """The scores of n tokens take 4 x n^2 bytes, and Softmax reads and writes them."""
    write_model(tmp_path / "scores.onnx", SCORES)
    client = start(tmp_path / "scores.onnx", max_run_bytes=8 * 10**2)
    held = hold()
    held.go.set()

    def post(*rows: list[int]) -> tuple[int, int]:
        before = held.started
        body = {"inputs": ids_request(*rows)["inputs"][:1]}
        answer = client.post("/v2/models/scores/infer", json=body)
        if answer.status_code == 413:
            assert "at most 800" in answer.json()["error"]
            assert "ATTNSERVE_MAX_RUN_BYTES" in answer.json()["error"]
        return answer.status_code, held.started - before

    assert post([1] * 10) == (200, 1)
    assert post([1] * 11) == (413, 0)
    assert post([1] * 10, [1] * 10)[0] == 200  # the budget of a batch bounds its rows


def test_large_arrays_become_json_in_parts_between_which_others_run() -> None:
    large = np.arange(200_000, dtype=np.float32)
    large[0] = np.nan
    arrays = [large, np.array([], np.int64), np.array([5]), large[:100_000]]
    content = {"id": "\0", "outputs": [{"data": array} for array in arrays] + [{"name": "raw"}]}
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def script() -> Any:
        other = asyncio.ensure_future(count_turns())
        parts = [part async for part in _parts(*_without_large(content))]
        other.cancel()
        assert max(map(len, parts)) < 1_000_000
        return orjson.loads(b"".join(parts))

    found = asyncio.run(script())
    assert found["id"] == "\0" and found["outputs"].pop() == {"name": "raw"}
    expected = [[None, *range(1, 200_000)], [], [5], [None, *range(1, 100_000)]]
    assert [output["data"] for output in found["outputs"]] == expected
    assert turns >= 5


@pytest.mark.parametrize("kind", ["stated", "chunks", "gzip"])
def test_bodies_above_the_limit_of_all_requests_get_429(
    start: Callable[..., TestClient], encoder: Path, hold: Callable[[], HeldRuns], kind: str
) -> None:
    client = start(encoder, max_open_bytes=1000)
    held, body = hold(), orjson.dumps({"inputs": "a " * 400})

    def post() -> int:
        if kind == "gzip":
            packed = gzip.compress(body)
            answer = client.post(
                "/texts/embed", content=packed, headers={"content-encoding": "gzip"}
            )
        else:
            content = body if kind == "stated" else iter([body[:300], body[300:]])
            answer = client.post("/texts/embed", content=content)
        return answer.status_code

    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(post)
        held.wait()
        assert post() == 429
        held.go.set()
        assert first.result() == 200
    assert post() == 200


# -- deadlines and a full queue -------------------------------------------------------------------


def test_deadline_passed_answers_504_and_is_not_computed(
    start: Callable[..., TestClient], encoder: Path, hold: Callable[[], HeldRuns]
) -> None:
    client = start(encoder)
    held = hold()
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(client.post, "/texts/embed", json=EMBED)
        held.wait()
        late = client.post("/texts/embed", json=EMBED, headers={"x-timeout-ms": "30"})
        held.go.set()
        assert first.result().status_code == 200
    assert late.status_code == 504 and "deadline" in late.json()["error"]
    (stats,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
    assert stats["execution_count"] == 1
    assert stats["inference_stats"]["fail"]["count"] == 1
    assert 'reason="deadline"' in client.get("/metrics").text


def test_deadline_defaults_to_setting(
    start: Callable[..., TestClient], encoder: Path, hold: Callable[[], HeldRuns]
) -> None:
    client = start(encoder, timeout_ms=20)
    held = hold()
    assert client.post("/texts/embed", json=EMBED).status_code == 504
    held.go.set()
    longer = client.post(INFER, json=ids_request([2, 3]), headers={"x-timeout-ms": "5000"})
    assert longer.status_code == 200


@pytest.mark.parametrize(
    ("settings", "accepted", "refused"),
    [
        ({}, ["300000"], ["300001", "0", "-1", "soon", "nan", "inf", "1e99", ""]),
        ({"max_timeout_ms": 40_000}, ["40000"], ["40001"]),
        ({"timeout_ms": 400_000}, ["400000"], []),
    ],
)
def test_deadline_invalid_or_above_maximum_is_refused(
    start: Callable[..., TestClient],
    encoder: Path,
    settings: dict[str, int],
    accepted: list[str],
    refused: list[str],
) -> None:
    client = start(encoder, **settings)
    for timeout in accepted + refused:
        answer = client.post("/texts/embed", json=EMBED, headers={"x-timeout-ms": timeout})
        assert answer.status_code == (200 if timeout in accepted else 422)
        assert timeout in accepted or answer.json()["error"].startswith("x-timeout-ms is")


def test_full_queue_answers_429_and_stays_live_and_ready(
    start: Callable[..., TestClient], encoder: Path, hold: Callable[[], HeldRuns]
) -> None:
    client = start(encoder, max_queue=1)
    held = hold()
    with ThreadPoolExecutor(2) as threads:
        accepted = [threads.submit(client.post, "/texts/embed", json=EMBED)]
        held.wait()
        accepted.append(threads.submit(client.post, "/texts/embed", json=EMBED))
        until(lambda: 'queue_rows{model="tiny",version="1"} 1.0' in client.get("/metrics").text)
        for refused in (
            client.post("/texts/embed", json=EMBED),
            client.post(INFER, json=ids_request([2, 3])),
        ):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            text = "1 rows wait already, and at most 1 may; try again later"
            assert refused.json() == {"error": text}
        refused = client.post("/embed", json=EMBED)
        assert (refused.status_code, refused.json()["error_type"]) == (429, "Overloaded")
        assert client.get("/v2/health/live").status_code == 200
        assert client.get("/v2/health/ready").status_code == 200
        held.go.set()
        assert [one.result().status_code for one in accepted] == [200, 200]
    assert 'attnserve_rejects_total{model="tiny",reason="overloaded",version="1"} 3.0' in (
        client.get("/metrics").text
    )


# -- methods --------------------------------------------------------------------------------------


def test_routes_accept_exactly_the_documented_methods(client: TestClient) -> None:
    """HEAD is accepted where GET is: many load balancers use it for health checks."""
    for path, documented in client.get("/openapi.json").json()["paths"].items():
        url = path.format(name="tiny", version="1")
        for method in ("GET", "HEAD", "POST", "PUT", "DELETE"):
            status = client.request(method, url).status_code
            is_documented = method.lower().replace("head", "get") in documented
            assert (status == 405) == (not is_documented), (method, url, status)
        allowed = {"get": "GET, HEAD, OPTIONS", "post": "OPTIONS, POST"}[next(iter(documented))]
        refused = client.delete(url)
        assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
        options = client.options(url)
        assert (options.status_code, options.headers["allow"]) == (204, allowed)
        assert options.content == b""
    assert client.head("/v2/health/live").status_code == 200
    assert client.options("/made-up").status_code == 404


# -- compression ----------------------------------------------------------------------------------

ROUTE = "/v2/models/large/infer"


@pytest.mark.parametrize(
    ("accepted", "length", "binary", "is_compressed"),
    [
        ("gzip", 100, False, True),
        ("deflate, GZIP;q=0.5", 100, False, False),
        ("br, gzip;q=0.5", 100, False, True),
        ("gzip;q=0", 100, False, False),
        ("gzip; q=0.00, br", 100, False, False),
        ("identity", 100, False, False),
        ("gzip", 4, False, False),
        ("gzip", 100, True, False),
    ],
)
def test_large_json_is_compressed_if_the_client_accepts_it(
    start: Callable[..., TestClient],
    tmp_path: Path,
    accepted: str,
    length: int,
    binary: bool,
    is_compressed: bool,
) -> None:
    write_model(tmp_path / "large.onnx", LARGE)
    client = start(tmp_path / "large.onnx")
    request = large_request([1] * length, "hidden") | {"parameters": {"binary_data_output": binary}}
    found = client.post(ROUTE, json=request, headers={"accept-encoding": accepted})
    plain = client.post(ROUTE, json=request, headers={"accept-encoding": "identity"})
    assert (found.headers.get("content-encoding") == "gzip") is is_compressed
    assert is_compressed == (found.num_bytes_downloaded < len(plain.content) / 2)
    if is_compressed:
        assert "Accept-Encoding" in plain.headers["vary"]
    if not binary:
        assert found.json()["outputs"] == plain.json()["outputs"]


# -- disconnects ----------------------------------------------------------------------------------


def exchange_with(receive: Callable[[], Awaitable[Any]]) -> Exchange:
    """A request whose body was read."""
    request: Any = SimpleNamespace(receive=receive)
    unused: Any = None
    return Exchange(request, unused, unused, unused)


async def stay() -> Any:
    await asyncio.sleep(60)


async def test_run_returns_result_and_stops_watching() -> None:
    async def work() -> int:
        await asyncio.sleep(0.001)
        return 5

    assert await exchange_with(stay).run(work()) == 5
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == 1


async def test_disconnect_after_result_cancels_nothing() -> None:
    disconnected = asyncio.Event()

    async def disconnect() -> Any:
        await disconnected.wait()

    async def work() -> int:
        await asyncio.sleep(0)  # the watcher has started
        disconnected.set()
        return 5

    assert await exchange_with(disconnect).run(work()) == 5
    for _ in range(5):
        await asyncio.sleep(0)


async def test_run_distinguishes_disconnect_from_cancellation() -> None:
    cancelled: list[str] = []

    async def disconnect() -> Any:
        await asyncio.sleep(0.01)

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    with pytest.raises(ClientGone):
        await exchange_with(disconnect).run(work("disconnected"))
    task = asyncio.current_task()
    assert task is not None and task.cancelling() == 0
    stopped = asyncio.ensure_future(exchange_with(stay).run(work("stopped")))
    await asyncio.sleep(0.01)
    stopped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopped
    assert cancelled == ["disconnected", "stopped"]


# -- /texts/tokenize ----------------------------------------------------------------------------


class HeldTokenizer:
    """Holds the tokenization of "held" until ``go`` and counts its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.started, self.go, encode = 0, threading.Event(), TextEncoder.encode

        def wait_and_encode(encoder: TextEncoder, texts: Any, **options: Any) -> Any:
            if "held" in texts:
                self.started += 1
                assert self.go.wait(20)
            return encode(encoder, texts, **options)

        monkeypatch.setattr(TextEncoder, "encode", wait_and_encode)


@pytest.fixture
def tokenizer(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldTokenizer]:
    held = HeldTokenizer(monkeypatch)
    yield held
    held.go.set()


def test_tokenize_has_deadline_and_queue_limit_and_does_not_delay_embed(
    start: Callable[..., TestClient], encoder: Path, tokenizer: HeldTokenizer
) -> None:
    client = start(encoder, max_queue=1)
    held = {"inputs": "held"}
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(client.post, "/texts/tokenize", json=held)
        until(lambda: tokenizer.started == 1)
        assert 'queue_rows{model="tiny",version="1"} 1.0' in client.get("/metrics").text
        full = client.post("/texts/tokenize", json=held)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        # Longer than the texts that are tokenized in the thread of their run.
        long = client.post(
            "/texts/embed", json={"inputs": "a " * 2000}, headers={"x-timeout-ms": "5000"}
        )
        assert long.status_code == 200
        tokenizer.go.set()
        assert first.result().status_code == 200
    tokenizer.go.clear()
    late = client.post("/texts/tokenize", json=held, headers={"x-timeout-ms": "30"})
    assert late.status_code == 504
    tokenizer.go.set()
    metrics = client.get("/metrics").text
    for reason in ("overloaded", "deadline"):
        assert f'rejects_total{{model="tiny",reason="{reason}",version="1"}} 1.0' in metrics
    (stats,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
    assert stats["execution_count"] == 1  # of /embed: the model is not run to tokenize
