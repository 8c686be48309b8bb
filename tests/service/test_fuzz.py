"""Whatever bytes arrive at a real server, it answers: no 5xx, no hang, errors in v2's own form.

ATTNSERVE_FUZZ_CASES=20000 python -m pytest -s tests/service/test_fuzz.py runs for longer, and
says how many cases were answered with which status.
"""

from __future__ import annotations

import copy
import http.client
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from service.app import create_app
from service.settings import Settings
from tests.attack.requests import IDS, OUTPUTS, good, places
from tests.service.conftest import listening
from tests.service.tiny import (
    hidden_states,
)

CASES = int(os.environ.get("ATTNSERVE_FUZZ_CASES", "300"))


@dataclass(frozen=True)
class Sent:
    """A request: JSON, what follows it, and what the header says of its length."""

    head: bytes
    raw: bytes
    header: bytes | None

    @property
    def body(self) -> bytes:
        return self.head + self.raw


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from([-1, 0, 1, 2, 3, 8, 31, 32, 33, 64, 2**31, 2**32, 2**53, 2**63, 2**64 - 1])
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["input_ids", "kept", "INT64", "FP32", "BOOL", "BYTES", "INT8"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "shape", "data", "parameters", "binary_data_size"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)


@st.composite
def bent_json(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """A good request, its JSON changed in up to three places."""
    tree, raw = good(
        ids_binary=draw(st.booleans()),
        mask_binary=draw(st.booleans()),
        outputs=copy.deepcopy(draw(st.sampled_from(OUTPUTS))),
    )
    for _ in range(draw(st.integers(0, 3))):
        *path, last = draw(st.sampled_from(list(places(tree))))
        parent: Any = tree
        for key in path:
            parent = parent[key]
        match draw(st.sampled_from(["replace", "remove", "repeat"])):
            case "replace":
                parent[last] = draw(VALUES)
            case "remove":
                del parent[last]
            case _ if isinstance(parent, list):
                parent.append(copy.deepcopy(parent[last]))
            case _:
                parent[draw(st.text(max_size=3))] = copy.deepcopy(parent[last])
        if not list(places(tree)):
            break
    return orjson.dumps(tree), raw


def bend(draw: st.DrawFn, data: bytes) -> bytes:
    """``data`` with bytes changed, cut, moved or put in between."""
    changed = bytearray(data)
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, len(changed)))
        end = min(len(changed), start + draw(st.integers(0, 16)))
        match draw(st.sampled_from(["flip", "cut", "insert", "repeat", "end"])):
            case "flip" if start < len(changed):
                changed[start] ^= draw(st.integers(1, 255))
            case "cut":
                del changed[start:end]
            case "insert":
                changed[start:start] = draw(st.binary(max_size=16))
            case "repeat":
                changed[start:start] = changed[start:end] * draw(st.integers(1, 8))
            case _:
                del changed[start:]
    return bytes(changed)


def legal(value: bytes) -> bytes:
    """What HTTP lets into a header: the server hangs up on the rest before we see it."""
    return bytes(byte for byte in value if byte > 31 and byte != 127)


@st.composite
def requests(draw: st.DrawFn) -> Sent:
    head, raw = draw(bent_json())
    length = len(head)
    if draw(st.booleans()):
        head, raw = bend(draw, head), bend(draw, raw)
    header = draw(
        st.sampled_from([b"%d" % length, b"%d" % len(head), None])
        | st.integers(-3, len(head + raw) + 3).map(lambda number: b"%d" % number)
        | st.binary(max_size=24).map(legal)
    )
    return Sent(head, raw, header)


Ask = Callable[[Sent], tuple[int, dict[str, str], bytes]]


@pytest.fixture(scope="module")
def ask(encoder: Path) -> Iterator[Ask]:
    """Send a request as it is; (status, headers, body) of the answer, within 20 seconds."""
    with listening(create_app(Settings(model=encoder, max_body_bytes=20_000))) as address:
        host, port = address.removeprefix("http://").split(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=20)

        def send(sent: Sent) -> tuple[int, dict[str, str], bytes]:
            connection.putrequest("POST", "/v2/models/tiny/infer")
            connection.putheader("Content-Length", str(len(sent.body)))
            if sent.header is not None:
                connection.putheader("Inference-Header-Content-Length", sent.header)
            connection.endheaders(sent.body)
            answer = connection.getresponse()
            return answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()

        yield send
        connection.close()


@pytest.mark.fuzz
def test_infer_any_bytes_are_answered(ask: Ask) -> None:
    seen: Counter[int] = Counter()

    @settings(max_examples=CASES, suppress_health_check=list(HealthCheck), deadline=None)
    @given(sent=requests())
    def check(sent: Sent) -> None:
        status, headers, body = ask(sent)
        seen[status] += 1
        assert status in {200, 400, 413, 422}, (sent, body)
        if status != 200:
            answer = orjson.loads(body)
            assert list(answer) == ["error"]
            assert isinstance(answer["error"], str)
            assert "\n" not in answer["error"]
            return
        length = int(headers.get("inference-header-content-length", len(body)))
        answer = orjson.loads(body[:length])
        sizes = [(one.get("parameters") or {}).get("binary_data_size") for one in answer["outputs"]]
        assert sum(size or 0 for size in sizes) == len(body) - length
        assert [size is None for size in sizes] == ["data" in one for one in answer["outputs"]]

    check()
    assert {200, 400, 422} <= set(seen)
    print(dict(seen))


@pytest.mark.parametrize("ids_binary", [True, False])
@pytest.mark.parametrize("mask_binary", [True, False])
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_infer_unmodified_fuzz_requests_succeed(
    ask: Ask, ids_binary: bool, mask_binary: bool, outputs: Any
) -> None:
    tree, raw = good(ids_binary=ids_binary, mask_binary=mask_binary, outputs=outputs)
    head = orjson.dumps(tree)
    status, headers, body = ask(Sent(head, raw, b"%d" % len(head)))
    assert status == 200, body
    if outputs == OUTPUTS[1]:
        length = int(headers["inference-header-content-length"])
        hidden = np.frombuffer(body[length : length + 128], np.float32).reshape(2, 4, 4)
        np.testing.assert_array_equal(hidden, hidden_states(IDS))
