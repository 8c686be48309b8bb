"""Invalid requests get a 4xx answer that says what is wrong."""

from __future__ import annotations

import copy
import gzip
import re
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.testclient import TestClient

from service.app import create_app
from service.settings import Settings
from tests.service.conftest import listening
from tests.service.tiny import ids_request

INFER = "/v2/models/tiny/infer"


def changed(**changes: Any) -> dict[str, Any]:
    """A good request whose first input has ``changes``."""
    request = copy.deepcopy(ids_request([2, 4, 3]))
    request["inputs"][0] |= changes
    return request


def without(key: str) -> dict[str, Any]:
    request = changed()
    del request["inputs"][0][key]
    return request


def nested(depth: int) -> Any:
    data: Any = [2]
    for _ in range(depth):
        data = [data]
    return data


GOOD = ids_request([2, 4, 3])
IDS, MASK = GOOD["inputs"]

BODIES: dict[str, tuple[bytes, int, str]] = {
    "no body": (b"", 400, "the body is not JSON"),
    "no JSON": (b'{"inputs": [', 400, "the body is not JSON"),
    "not UTF-8": (b'{"inputs": "\xff\xfe"}', 400, "not valid UTF-8"),
    "NaN": (orjson.dumps(GOOD).replace(b"[2,4,3]", b"[NaN,4,3]"), 400, "not JSON"),
    "infinity": (orjson.dumps(GOOD).replace(b"[2,4,3]", b"[1e999,4,3]"), 400, "not JSON"),
    "lone surrogate": (b'{"inputs": "\\ud800"}', 400, "the body is not JSON"),
    "deep JSON": (b"[" * 100_000 + b"]" * 100_000, 400, "depth limit"),
    "a list": (b"[]", 422, "the body: Input should be a valid dictionary"),
    "null": (b"null", 422, "the body"),
}

REQUESTS: dict[str, tuple[Any, int, str]] = {
    "no inputs": ({}, 422, "inputs: Field required"),
    "empty inputs": ({"inputs": []}, 422, "inputs: List should have at least 1 item"),
    "inputs no list": ({"inputs": {"a": 1}}, 422, "inputs: Input should be a valid list"),
    "input no object": ({"inputs": [1]}, 422, "inputs.0"),
    "no name": (without("name"), 422, "inputs.0.name: Field required"),
    "no shape": (without("shape"), 422, "inputs.0.shape: Field required"),
    "no datatype": (without("datatype"), 422, "inputs.0.datatype: Field required"),
    "no data": (without("data"), 422, "input 'input_ids' has no data; give 'data', or"),
    "name no text": (changed(name=3), 422, "inputs.0.name: Input should be a valid string"),
    "negative shape": (changed(shape=[1, -3]), 422, "greater than or equal to 0"),
    "shape of floats": (changed(shape=[1.0, 3.0]), 422, "inputs.0.shape.0"),
    "shape of booleans": (changed(shape=[True, 3]), 422, "inputs.0.shape.0"),
    "shape of text": (changed(shape="13"), 422, "inputs.0.shape"),
    "shape of rank 100": (changed(shape=[1] * 99 + [3]), 422, "at most 32 items"),
    "huge shape": (changed(shape=[2**62, 2**62]), 422, "3 values for shape"),
    "empty huge shape": (changed(shape=[0, 2**62], data=[]), 422, "is too long"),
    "empty huge rank": (changed(shape=[0, *[2**31] * 9], data=[]), 422, "is too long"),
    "empty past int64": (changed(shape=[0, 2**63], data=[]), 422, "is too long"),
    "data too short": (changed(data=[2, 3]), 422, "2 values for shape [1, 3]"),
    "data too long": (changed(data=[2, 3, 3, 3]), 422, "4 values for shape [1, 3]"),
    "data no list": (changed(data=2), 422, "inputs.0.data: Input should be a valid list"),
    "data of text": (changed(data=["2", "4", "3"]), 422, "not all of INT64"),
    "data of nulls": (changed(data=[None] * 3), 422, "not all of INT64"),
    "data of objects": (changed(data=[{}] * 3), 422, "not all of INT64"),
    "data of floats": (changed(data=[2.5, 4, 3]), 422, "not all of INT64"),
    "data past int64": (changed(data=[2**63, 4, 3]), 422, "out of the range of INT64"),
    "data ragged": (changed(data=[[2, 4], [3]]), 422, "its data is ragged"),
    "data ragged below": (changed(data=[[2, [4]], [3, 3]]), 422, "4"),
    "data of lists after a number": (changed(data=[2, [4], 3]), 422, "not all of INT64"),
    "data nested otherwise": (changed(data=[[2], [4], [3]]), 422, "data nested as [3, 1]"),
    "data nested deep": (changed(shape=[1, 1], data=nested(200)), 422, "data nested as [1, 1, 1"),
    "unknown datatype": (changed(datatype="INT65"), 422, "inputs.0.datatype"),
    "bytes": (changed(datatype="BYTES"), 422, "inputs.0.datatype: BYTES is not supported"),
    "wrong datatype": (changed(datatype="INT32"), 422, "'input_ids' is int32: expected int64"),
    "floats for ids": (changed(datatype="FP32"), 422, "'input_ids' is float32: expected int64"),
    "wrong rank": (changed(shape=[3]), 422, "has shape [3]: expected [-1, -1]"),
    "empty": (changed(shape=[1, 0], data=[]), 422, "has shape [1, 0]: it is empty"),
    "axes disagree": (changed(shape=[3, 1]), 422, "its axis 'batch' is 1, but 3 in input"),
    "id past the vocabulary": (changed(data=[2, 8, 3]), 422, "holds 8: expected ids from 0 to 7"),
    "negative id": (changed(data=[2, -1, 3]), 422, "holds -1: expected ids from 0 to 7"),
    "least id": (changed(data=[2, -(2**63), 3]), 422, "expected ids from 0 to 7"),
    "past the positions": (ids_request([2] * 9), 422, "cannot run input_ids [1, 9]"),
    "too many tokens": (ids_request([2] * 20_000), 413, "20000 padded tokens in one request"),
    "unknown input": (changed(name="ids"), 422, "unknown input 'ids': tiny takes input_ids, "),
    "missing input": ({"inputs": [IDS]}, 422, "missing input 'attention_mask'"),
    "input twice": ({"inputs": [IDS, MASK, IDS]}, 422, "input 'input_ids' is given 2 times"),
    "unknown output": (GOOD | {"outputs": [{"name": "x"}]}, 422, "unknown output 'x'"),
    "output twice": (GOOD | {"outputs": [{"name": "kept"}] * 2}, 422, "'kept' is given 2 times"),
    "outputs no list": (GOOD | {"outputs": 1}, 422, "outputs: Input should be a valid list"),
    "id no text": (GOOD | {"id": 7}, 422, "id: Input should be a valid string"),
    "raw bytes that are missing": (
        {"inputs": [IDS | {"data": None, "parameters": {"binary_data_size": 24}}, MASK]},
        422,
        "input 'input_ids': binary_data_size is 24, but 0 bytes are left in the body",
    ),
    "size no number": (changed(parameters={"binary_data_size": "8"}), 422, "binary_data_size"),
    "sequence": (GOOD | {"parameters": {"sequence_id": 3}}, 422, "sequences are not supported"),
    "negative timeout": (GOOD | {"parameters": {"timeout": -1}}, 422, "parameters.timeout"),
    "timeout no number": (GOOD | {"parameters": {"timeout": "1s"}}, 422, "parameters.timeout"),
    "priority no number": (GOOD | {"parameters": {"priority": "1"}}, 422, "parameters.priority"),
    "binary no boolean": (
        GOOD | {"outputs": [{"name": "kept", "parameters": {"binary_data": 1}}]},
        422,
        "outputs.0.parameters.binary_data: Input should be a valid boolean",
    ),
    "classification": (
        GOOD | {"outputs": [{"name": "kept", "parameters": {"classification": 2}}]},
        422,
        "output 'kept': classification is not supported; request the scores",
    ),
    "shared memory": (
        changed(parameters={"shared_memory_region": "x", "shared_memory_byte_size": 24}),
        422,
        "input 'input_ids': shared memory is not supported; send the tensor in the body",
    ),
    "parameters no object": (GOOD | {"parameters": []}, 422, "parameters"),
}

EMBEDDINGS: dict[str, tuple[Any, int, str]] = {
    "no inputs": ({}, 422, "inputs: Field required"),
    "null": ({"inputs": None}, 422, "inputs: Input should be a valid list"),
    "number": ({"inputs": 3}, 422, "inputs: Input should be a valid list"),
    "empty": ({"inputs": []}, 422, "inputs: List should have at least 1 item"),
    "numbers": ({"inputs": ["a", 3]}, 422, "inputs.1: Input should be a valid string"),
    "nested": ({"inputs": [["a"]]}, 422, "inputs.0: Input should be a valid string"),
    "many numbers": ({"inputs": [1] * 400_000}, 422, "inputs.0"),
    "many texts": ({"inputs": ["a"] * 2049}, 413, "2049 texts in one request: at most 2048"),
    "truncate no boolean": ({"inputs": "a", "truncate": 1}, 422, "truncate"),
    "unknown field": ({"inputs": "a", "truncat": False}, 422, "truncat: Extra inputs"),
    "too long": ({"inputs": "a " * 9, "truncate": False}, 422, "text 0 has 11 tokens"),
}


def check(answer: Any, status: int, text: str) -> None:
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert list(body) == ["error"]
    assert text in body["error"]
    assert "\n" not in body["error"]
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize("route", [INFER, "/texts/embed"])
@pytest.mark.parametrize(("content", "status", "text"), BODIES.values(), ids=BODIES)
def test_malformed_body_is_refused(
    client: TestClient, route: str, content: bytes, status: int, text: str
) -> None:
    check(client.post(route, content=content), status, text)


@pytest.mark.parametrize(("request_", "status", "text"), REQUESTS.values(), ids=REQUESTS)
def test_infer_invalid_request_is_refused(
    client: TestClient, request_: Any, status: int, text: str
) -> None:
    check(client.post(INFER, content=orjson.dumps(request_)), status, text)


@pytest.mark.parametrize(("request_", "status", "text"), EMBEDDINGS.values(), ids=EMBEDDINGS)
def test_embed_invalid_request_is_refused(
    client: TestClient, request_: Any, status: int, text: str
) -> None:
    check(client.post("/texts/embed", content=orjson.dumps(request_)), status, text)


@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/nothing", 404, "GET /nothing: Not Found"),
        ("GET", "/v2/", 404, "Not Found"),
        ("GET", INFER, 405, "Method Not Allowed"),
        ("PUT", "/texts/embed", 405, "Method Not Allowed"),
        ("POST", "/v2/health/live", 405, "Method Not Allowed"),
        ("GET", "/v2/models/other", 404, "unknown model 'other': this server has 'tiny'"),
        ("GET", "/v2/models/%ff%00", 404, "unknown model"),
        ("POST", "/v2/models/other/infer", 404, "unknown model 'other'"),
        ("GET", "/v2/models/tiny/versions/2", 404, "unknown version '2'"),
        ("POST", "/v2/models/tiny/versions/x/infer", 404, "unknown version 'x'"),
    ],
)
def test_unknown_path_or_method_is_refused(
    client: TestClient, method: str, path: str, status: int, text: str
) -> None:
    check(client.request(method, path), status, text)


@pytest.mark.parametrize(
    ("header", "tail", "status", "text"),
    [
        ("x", b"", 400, "inference-header-content-length is 'x': expected the length of the JSON"),
        ("-1", b"", 400, "is '-1'"),
        ("99999", b"", 400, "is 99999, but the body has"),
        ("0", b"", 400, "the body is not JSON"),
        (None, b"\0" * 4, 400, "the body is not JSON"),
        ("all", b"\0" * 4, 422, "4 bytes follow the last tensor; set binary_data_size"),
    ],
)
def test_infer_invalid_header_length_is_refused(
    client: TestClient, header: str | None, tail: bytes, status: int, text: str
) -> None:
    body = orjson.dumps(GOOD)
    headers = {"inference-header-content-length": str(len(body)) if header == "all" else header}
    sent = {key: value for key, value in headers.items() if value is not None}
    check(client.post(INFER, content=body + tail, headers=sent), status, text)


def test_body_above_limit_is_refused(start: Callable[..., TestClient], encoder: Path) -> None:
    client = start(encoder, max_body_bytes=1000)

    def chunks() -> Iterator[bytes]:  # sent without a Content-Length
        for _ in range(100):
            yield b" " * 100

    assert client.post("/texts/embed", content=b'{"inputs":"a"}'.ljust(1000)).status_code == 200
    check(client.post("/texts/embed", content=b'{"inputs":"a"}'.ljust(1001)), 413, "1000 bytes")
    check(client.post(INFER, content=chunks()), 413, "the body is larger than 1000 bytes")


@pytest.mark.process
def test_body_above_limit_is_refused_before_it_is_sent(encoder: Path) -> None:
    """A client that waits for "100 Continue" does not send a body that is refused."""
    with listening(create_app(Settings(model=encoder, probe=False))) as address:
        port = int(address.rpartition(":")[2])
        for length, lines in ((14, ["100", "200"]), (10**10, ["413"])):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                head = f"host: x\r\nexpect: 100-continue\r\ncontent-length: {length}"
                connection.sendall(f"POST /texts/embed HTTP/1.1\r\n{head}\r\n\r\n".encode())
                received = connection.recv(65536)
                if lines[0] == "100":
                    connection.sendall(b'{"inputs":"a"}')
                    received += connection.recv(65536)
                assert re.findall(r"HTTP/1.1 (\d+)", received.decode()) == lines


PACKED: dict[str, tuple[str, bytes, int, str]] = {
    "unknown": ("br", b"{}", 415, "content-encoding 'br' is not supported; send gzip, deflate or"),
    "not packed": ("gzip", b"{}", 400, "the body is not gzip: Error -3"),
    "nothing": ("gzip", b"", 400, "the body is not gzip: it is truncated or has trailing bytes"),
    "cut": ("gzip", gzip.compress(b"{}")[:-1], 400, "is truncated or has trailing bytes"),
    "more behind": (
        "deflate",
        zlib.compress(b"{}") + b"{}",
        400,
        "is truncated or has trailing bytes",
    ),
    "one too many": ("gzip", gzip.compress(b" " * 2_000_001), 413, "is larger than 2000000"),
    "a bomb": ("gzip", gzip.compress(b" " * 100_000_000, 1), 413, "is larger than 2000000"),
    "twice": ("gzip", gzip.compress(gzip.compress(b"{}")), 400, "the body is not JSON"),
}


@pytest.mark.parametrize(("encoding", "content", "status", "text"), PACKED.values(), ids=PACKED)
def test_invalid_compressed_body_is_refused(
    client: TestClient, encoding: str, content: bytes, status: int, text: str
) -> None:
    headers = {"content-encoding": encoding}
    check(client.post(INFER, content=content, headers=headers), status, text)


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["as gzip", "as zlib"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate", "GZIP", "x-gzip", "Deflate "])
def test_compressed_body_is_accepted(
    client: TestClient, pack: Callable[[bytes], bytes], encoding: str
) -> None:
    headers = {"content-encoding": encoding}
    answer = client.post(INFER, content=pack(orjson.dumps(GOOD)), headers=headers)
    assert answer.status_code == 200


def test_requests_before_loading_are_not_ready(encoder: Path) -> None:
    client = TestClient(create_app(Settings(model=encoder)))  # not entered: never started
    assert client.get("/v2/health/live").json() == {"live": True}
    ready = client.get("/v2/health/ready")
    assert (ready.status_code, ready.json()) == (503, {"ready": False})
    answer = client.post("/texts/embed", json={"inputs": "a"})
    check(answer, 503, "the models are being loaded")
    assert answer.headers["retry-after"] == "5"


def test_unexpected_exception_is_logged_and_hidden_from_client(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("service.api.texts.respond", lambda *_: 1 / 0)
    answer = client.post("/texts/embed", json={"inputs": "a"}, headers={"x-request-id": "seven"})
    check(answer, 500, "internal error")
    assert "request seven failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text
