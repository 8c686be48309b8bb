"""Valid requests to every route of the server, and random changes of them."""

from __future__ import annotations

import copy
import gzip
import http.client
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import orjson

from tests.service.tiny import ids_request, write_encoder, write_model

IDS = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])


def good(*, ids_binary: bool, mask_binary: bool, outputs: Any) -> tuple[dict[str, Any], bytes]:
    """(JSON, raw tensors) of a request that is answered."""
    raw = b""
    inputs: list[dict[str, Any]] = []
    for name, array, binary in (
        ("input_ids", IDS, ids_binary),
        ("attention_mask", np.ones_like(IDS), mask_binary),
    ):
        tensor: dict[str, Any] = {"name": name, "shape": [2, 4], "datatype": "INT64"}
        if binary:
            raw += array.tobytes()
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensor["data"] = array.ravel().tolist()
        inputs.append(tensor)
    return {"inputs": inputs} | outputs, raw


OUTPUTS = [
    {},
    {"parameters": {"binary_data_output": True}},
    {"outputs": [{"name": "kept", "parameters": {"binary_data": True}}]},
    {"outputs": [{"name": "kept"}], "parameters": {"timeout": 10**9, "priority": 1}, "id": "1"},
]


def places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path to something inside of ``tree``."""
    children = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places(child, (*path, key))


SCORES_PER_TOKEN = """
<ir_version: 10, opset_import: ["": 18]>
scores (int64[batch, sequence] input_ids) => (float[batch, sequence] y) {
    y = Cast<to = 1>(input_ids)
}
"""
CLASSIFIER = """
<ir_version: 10, opset_import: ["": 18]>
classes (int64[batch, sequence] input_ids) => (float[batch, one] logits) {
    numbers = Cast<to = 1>(input_ids)
    axis = Constant<value = int64[1] {1}>()
    logits = ReduceMean(numbers, axis)
}
"""
SPARSE = """
<ir_version: 10, opset_import: ["": 18]>
sparse (int64[batch, sequence] input_ids, int64[batch, sequence] attention_mask)
  => (float[batch, sequence, 8] logits)
  <int64[8] vocabulary = {0, 1, 2, 3, 4, 5, 6, 7}, int64[1] last = {2}>
{
    ids = Unsqueeze(input_ids, last)
    same = Equal(ids, vocabulary)
    logits = Cast<to = 1>(same)
}
"""
IMAGE = """
<ir_version: 10, opset_import: ["": 18]>
image (float[batch, 3, h, w] pixels) => (float[batch, 3, h, w] y) { y = Relu(pixels) }
"""


@dataclass(frozen=True)
class Call:
    """A request; ``body`` is JSON, or bytes."""

    method: str
    path: str
    body: Any = None
    headers: tuple[tuple[str, str], ...] = ()

    def encoded(self) -> bytes:
        if isinstance(self.body, bytes):
            return self.body
        return b"" if self.body is None else orjson.dumps(self.body)

    def raw(self) -> bytes:
        body = self.encoded()
        head = [f"{self.method} {self.path} HTTP/1.1", "Host: a", f"Content-Length: {len(body)}"]
        head += [f"{name}: {value}" for name, value in self.headers]
        return "\r\n".join([*head, "", ""]).encode("latin-1", "replace") + body


def calls() -> list[Call]:
    """A good request to every route, several to those with a body."""
    ids, raw = good(ids_binary=True, mask_binary=False, outputs=OUTPUTS[1])
    head = orjson.dumps(ids)
    length = (("Inference-Header-Content-Length", str(len(head))),)
    pixels = {"name": "pixels", "shape": [1, 3, 1, 2], "datatype": "FP32", "data": [0.5] * 6}
    scores = {"name": "input_ids", "shape": [2, 2], "datatype": "INT64", "data": [1, 2, 3, 4]}
    zipped = gzip.compress(orjson.dumps({"inputs": ["a", "b c"], "model": "tiny"}))
    posts: list[tuple[str, Any]] = [
        ("/v2/models/tiny/infer", good(ids_binary=False, mask_binary=False, outputs={})[0]),
        ("/v2/models/tiny/versions/1/infer", {"inputs": ids_request([2, 3], [2, 4])["inputs"]}),
        ("/v2/models/image/infer", {"inputs": [pixels], "id": "a"}),
        ("/v2/models/scores/infer", {"inputs": [scores]}),
        ("/embed", {"inputs": ["a", "b c d"], "model": "tiny", "truncate": True}),
        ("/embed", {"inputs": "a", "model": "scores", "version": "1"}),
        ("/texts/embed", {"inputs": ["a", "b c d"], "model": "tiny", "truncate": True}),
        ("/texts/predict", {"inputs": ["a", "b"], "model": "classes", "top_k": 1}),
        ("/texts/similarity", {"source": "a", "targets": ["b", "c"], "model": "tiny"}),
        ("/texts/similarity", {"pairs": [["a", "b"], ["c", "d"]], "model": "tiny"}),
        ("/texts/tokenize", {"inputs": ["a b", "c"], "model": "tiny"}),
        ("/models/tiny/embed", {"inputs": ["a", [2, 4, 3]], "normalize": False, "dimensions": 2}),
        ("/embed_all", {"inputs": ["a", [2, 4, 3]], "model": "tiny", "truncate": True}),
        ("/models/sparse/embed_sparse", {"inputs": ["a", "b c"]}),
        ("/models/tiny/embed_all", {"inputs": "a"}),
        ("/embed_sparse", {"inputs": ["a", "b c"], "model": "sparse"}),
        ("/rerank", {"query": "a", "texts": ["b", "c"], "model": "classes"}),
        ("/v1/rerank", {"query": "a", "documents": ["b", {"text": "c"}], "model": "classes"}),
        ("/v2/rerank", {"query": "a", "documents": ["b"], "top_n": 1, "model": "classes"}),
        ("/models/tiny/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}),
        ("/models/tiny/tokenize", {"inputs": "a b"}),
        ("/models/tiny/decode", {"ids": [2, 4, 3]}),
        ("/models/classes/rerank", {"query": "a", "texts": ["b", "c"], "return_text": True}),
        ("/models/classes/predict", {"inputs": [["a"], ["b", "c"]], "raw_scores": True}),
        ("/predict", {"inputs": ["a", "b"], "model": "classes"}),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}, "model": "tiny"}),
        ("/tokenize", {"inputs": ["a b", "c"], "model": "tiny", "add_special_tokens": False}),
        ("/decode", {"ids": [[2, 4, 3], [5]], "model": "tiny", "skip_special_tokens": False}),
        ("/", {"inputs": "a", "model": "tiny"}),
        ("/invocations", {"query": "a", "texts": ["b"], "model": "classes"}),
        ("/models/tiny", {"inputs": ["a", "b"]}),
        ("/embeddings", {"model": "tiny", "input": ["a", "b"]}),
        ("/v1/embeddings", {"model": "tiny", "input": ["a", "b"], "encoding_format": "base64"}),
        ("/v1/embeddings", {"model": "tiny", "input": [[2, 3], [2, 4, 3]], "dimensions": 4}),
        ("/v2/repository/index", {"ready": True}),
        ("/v2/repository/models/spare/load", {"parameters": {}}),
        ("/v2/repository/models/spare/unload", {"parameters": {"unload_dependents": False}}),
    ]
    paths = [
        "/", "/docs", "/docs/oauth2-redirect", "/redoc",
        "/info", "/health", "/ping", "/models/tiny/info", "/models/tiny/health", "/metrics",
        "/stats.json", "/openapi.json", "/v1/models", "/v1/models/tiny", "/v2",
        "/v2/health/live", "/v2/health/ready", "/v2/models/tiny", "/v2/models/tiny/versions/1",
        "/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready", "/v2/models/tiny/config",
        "/v2/models/tiny/versions/1/config", "/v2/models/stats", "/v2/models/tiny/stats",
        "/v2/models/tiny/versions/1/stats",
    ]  # fmt: skip
    return [
        Call("POST", "/v2/models/tiny/infer", head + raw, length),
        Call("POST", "/embed", zipped, (("Content-Encoding", "gzip"),)),
        *(Call("POST", path, body, (("x-timeout-ms", "20000"),)) for path, body in posts),
        Call("GET", "/", headers=(("Accept", "text/html"),)),
        *(Call("GET", path) for path in paths),
    ]


ODD = [
    None, True, False, -1, 0, 1, 3.5, 1e308, 2**31, 2**53, 2**63, 2**64 - 1, "", "a", "\x00",
    "\u00e9\U0001f600" * 20, "x" * 5000, [], {}, [[]], [None], ["a", 1], {"a": {}}, [0] * 3000,
    "INT64",
]  # fmt: skip
HEADERS = [
    ("Content-Encoding", "gzip"), ("Content-Encoding", "br"), ("Content-Type", "text/plain"),
    ("Expect", "100-continue"), ("Upgrade", "h2c"), ("Connection", "close"),
    ("x-timeout-ms", "nan"), ("x-timeout-ms", "0.01"), ("x-request-id", "\xff" * 9),
    ("Accept-Encoding", "gzip"),
    ("Inference-Header-Content-Length", "7"), ("Inference-Header-Content-Length", "-1"),
    ("traceparent", "00-zz"), ("Origin", "http://evil.example"), ("x-api-key", "a" * 9999),
    ("a" * 300, "b"), ("Accept-Encoding", "gzip;q=0, *"), ("Range", "bytes=0-1"),
]  # fmt: skip
SEGMENTS = ["..", "%2e%2e", "%00", "%ff", "", "a" * 3000, "tiny", "1", "infer", "*"]
METHODS = ["GET", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE", "POST", "TRACE", "BREW"]


def mutated(call: Call, random: Random) -> Call | bytes:
    """``call`` with one to three changes; bytes if it may not be HTTP any more."""
    method, path, body, headers = call.method, call.path, copy.deepcopy(call.body), call.headers
    for _ in range(random.randint(1, 3)):
        match random.choice(["json", "json", "json", "bytes", "path", "header", "method"]):
            case "json" if isinstance(body, dict) and (found := list(places(body))):
                *above, last = random.choice(found)
                parent: Any = body
                for key in above:
                    parent = parent[key]
                parent[last] = copy.deepcopy(random.choice(ODD))
            case "bytes" if body is not None:
                changed = bytearray(Call(method, path, body).encoded())
                for _ in range(random.randint(1, 4)):
                    at = random.randrange(len(changed) + 1)
                    changed[at : at + random.choice([0, 1, 1, 8])] = random.choice(
                        [b"", b"\x00", b"\xff", b"[" * 500, b'"', b"}", random.randbytes(4)]
                    )
                body = bytes(changed)
            case "path":
                parts = path.split("/")
                parts[random.randrange(len(parts))] = random.choice(SEGMENTS)
                path = "/" + "/".join(parts).lstrip("/") + random.choice(["", "", "?a=%00", "/"])
            case "header":
                headers = (*headers, random.choice(HEADERS))
            case "method":
                method = random.choice(METHODS)
            case _:
                pass
    if path.endswith("load") and "/spare/" not in path:  # the other models stay
        path = call.path
    found_call = Call(method, path, body, headers)
    if random.random() > 0.15:
        return found_call
    raw = bytearray(found_call.raw())
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(raw))
        raw[at : at + random.choice([0, 1, 1, 9])] = random.choice(
            [b"", b"\r\n", b"\n", b"\x00", b":", b" ", b"transfer-encoding: chunked\r\n", b"9"]
        )
    return b"" if b"unload" in raw and b"/spare/unload" not in raw else bytes(raw)


def ask_raw(address: tuple[str, int], sent: bytes) -> tuple[int, bytes]:
    """(status, 0 if the connection was closed without an answer; the answer)."""
    with socket.create_connection(address, timeout=20) as connection:
        connection.sendall(sent)
        connection.settimeout(0.3)
        try:
            received = connection.recv(65_536)
        except TimeoutError:  # the request is not complete
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(20)
            received = connection.recv(65_536)
    return int(received[9:12]) if received else 0, received


class Asker:
    """Sends calls on one connection, which it opens again when the server closes it."""

    def __init__(self, address: tuple[str, int], timeout_s: float = 20) -> None:
        self._address = address
        self._connection = http.client.HTTPConnection(*address, timeout=timeout_s)

    def close(self) -> None:
        self._connection.close()

    def ask(self, call: Call | bytes) -> tuple[int, bytes]:
        if isinstance(call, bytes):
            return ask_raw(self._address, call)
        connection, body = self._connection, call.encoded()
        connection.putrequest(call.method, call.path, skip_accept_encoding=True)
        for name, value in (("Content-Length", str(len(body))), *call.headers):
            connection.putheader(name, value.encode("latin-1"))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def write_models(folder: Path) -> Path:
    """Write the models that ``calls`` name: an encoder, its copy "spare", and other kinds."""
    folder.mkdir()
    for name in ("tiny", "spare"):
        write_encoder(folder / name)
    for name, text in (("scores", SCORES_PER_TOKEN), ("classes", CLASSIFIER), ("image", IMAGE)):
        (folder / name).mkdir()
        write_model(folder / name / "model.onnx", text, tokenizer=True)
    (folder / "sparse").mkdir()
    write_model(folder / "sparse" / "model.onnx", SPARSE, tokenizer=True)
    (folder / "sparse" / "attnserve.json").write_text('{"task": "fill-mask"}')
    return folder
