from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import orjson
import pytest
from starlette.testclient import TestClient

from tests.service.tiny import hidden_states, ids_request, write_model


def test_metadata_describes_server_and_model(client: TestClient) -> None:
    assert client.get("/v2").json()["name"] == "attnserve"
    expected = {
        "name": "tiny",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "parameters": {"runtime": "onnxruntime", "precision": "float32", "refused": {}},
        "inputs": [
            {"name": "input_ids", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "attention_mask", "datatype": "INT64", "shape": [-1, -1]},
        ],
        "outputs": [
            {"name": "last_hidden_state", "datatype": "FP32", "shape": [-1, -1, 4]},
            {"name": "kept", "datatype": "BOOL", "shape": [-1, -1]},
        ],
    }
    assert client.get("/v2/models/tiny").json() == expected
    assert client.get("/v2/models/tiny/versions/1").json() == expected
    for route in ("/v2/models/tiny/ready", "/v2/models/tiny/versions/1/ready"):
        assert client.get(route).json() == {"name": "tiny", "ready": True}


@pytest.mark.parametrize("route", ["/v2/models/tiny/infer", "/v2/models/tiny/versions/1/infer"])
def test_infer_returns_outputs_and_id(client: TestClient, route: str) -> None:
    ids = [[2, 4, 5, 3], [2, 6, 7, 3]]
    answer = client.post(route, json=ids_request(*ids) | {"id": "seven"})
    assert answer.status_code == 200
    body = answer.json()
    assert (body["model_name"], body["model_version"], body["id"]) == ("tiny", "1", "seven")
    hidden, kept = body["outputs"]
    assert (hidden["name"], hidden["datatype"], hidden["shape"]) == (
        "last_hidden_state",
        "FP32",
        [2, 4, 4],
    )
    assert hidden["data"] == hidden_states(np.array(ids)).ravel().tolist()
    assert (kept["name"], kept["datatype"], kept["data"]) == ("kept", "BOOL", [True] * 8)


def test_infer_returns_requested_outputs_in_order(client: TestClient) -> None:
    asked = [{"name": "kept"}, {"name": "last_hidden_state"}]
    answer = client.post("/v2/models/tiny/infer", json=ids_request([2, 3]) | {"outputs": asked})
    assert [output["name"] for output in answer.json()["outputs"]] == ["kept", "last_hidden_state"]
    assert "id" not in answer.json()


def binary_request(ids: np.ndarray, **fields: Any) -> tuple[bytes, dict[str, str]]:
    """(body, headers) of a request of the encoder with raw tensors."""
    tensors = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
    inputs = [
        {
            "name": name,
            "shape": array.shape,
            "datatype": "INT64",
            "parameters": {"binary_data_size": array.nbytes},
        }
        for name, array in tensors.items()
    ]
    head = orjson.dumps({"inputs": inputs, **fields})
    body = b"".join([head, *tensors.values()])
    return body, {"inference-header-content-length": str(len(head))}


def read_binary(answer: Any) -> tuple[dict[str, Any], bytes]:
    length = int(answer.headers["inference-header-content-length"])
    return orjson.loads(answer.content[:length]), answer.content[length:]


@pytest.mark.parametrize("spaces", range(8))
def test_infer_raw_tensors_at_any_address(client: TestClient, spaces: int) -> None:
    """Wherever in memory they lie."""
    ids = np.array([[2, 4, 5, 3], [2, 6, 7, 3]])
    asked = {"id": " " * spaces, "parameters": {"binary_data_output": True}}
    body, headers = binary_request(ids, **asked)
    answer = client.post("/v2/models/tiny/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/octet-stream"
    assert int(answer.headers["content-length"]) == len(answer.content)
    told, raw = read_binary(answer)
    expected = hidden_states(ids)
    assert told["outputs"] == [
        {
            "name": "last_hidden_state",
            "shape": [2, 4, 4],
            "datatype": "FP32",
            "parameters": {"binary_data_size": 128},
        },
        {
            "name": "kept",
            "shape": [2, 4],
            "datatype": "BOOL",
            "parameters": {"binary_data_size": 8},
        },
    ]
    assert raw == expected.astype("<f4").tobytes() + b"\1" * 8
    assert told["parameters"]["tokens"] == 8
    assert answer.headers["x-tokens"] == "8"


@pytest.mark.parametrize("binary", [(), ("kept",), ("last_hidden_state", "kept")])
def test_infer_large_outputs_arrive_in_parts(
    start: Callable[..., TestClient], encoder: Path, binary: tuple[str, ...]
) -> None:
    client = start(encoder, max_padded_tokens=200_000)
    ids = np.resize(np.arange(2, 8), (20_000, 4))
    outputs = [
        {"name": name, "parameters": {"binary_data": name in binary}}
        for name in ("last_hidden_state", "kept")
    ]
    body, headers = binary_request(ids, id="\0 seven", outputs=outputs)
    answer = client.post("/v2/models/tiny/infer", content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found, raw = read_binary(answer) if binary else (answer.json(), b"")
    assert found["id"] == "\0 seven" and found["parameters"]["tokens"] == ids.size
    assert not binary or int(answer.headers["content-length"]) == len(answer.content)
    expected = {"last_hidden_state": hidden_states(ids).astype("<f4"), "kept": ids > 0}
    for output in found["outputs"]:
        array = expected[output["name"]]
        if output["name"] in binary:
            assert raw.startswith(array.tobytes())
            raw = raw[array.nbytes :]
        else:
            assert output["data"] == array.ravel().tolist()
    assert not raw


def test_infer_large_json_of_http_1_0_has_a_length(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    """HTTP/1.0 has no chunks."""
    app = start(encoder, max_padded_tokens=200_000).app
    ids = np.resize(np.arange(2, 8), (20_000, 4))

    async def older(scope: Any, receive: Any, send: Any) -> None:
        await app({**scope, "http_version": "1.0"}, receive, send)

    body, headers = binary_request(ids)
    headers["accept-encoding"] = "gzip"
    answer = TestClient(older).post("/v2/models/tiny/infer", content=body, headers=headers)
    assert int(answer.headers["content-length"]) == len(answer.content)
    hidden = answer.json()["outputs"][0]["data"]
    assert hidden == hidden_states(ids).astype("<f4").ravel().tolist()


def test_infer_binary_data_of_output_overrides_request(client: TestClient) -> None:
    asked = {
        "parameters": {"binary_data_output": True},
        "outputs": [
            {"name": "last_hidden_state", "parameters": {"binary_data": False}},
            {"name": "kept"},
        ],
    }
    answer = client.post("/v2/models/tiny/infer", json=ids_request([2, 3]) | asked)
    told, raw = read_binary(answer)
    hidden, kept = told["outputs"]
    assert hidden["data"] == hidden_states(np.array([[2, 3]])).ravel().tolist()
    assert "parameters" not in hidden
    assert kept["parameters"] == {"binary_data_size": 2}
    assert raw == b"\1\1"


def test_infer_raw_inputs_json_outputs(client: TestClient) -> None:
    body, headers = binary_request(np.array([[2, 4, 3]]))
    answer = client.post("/v2/models/tiny/infer", content=body, headers=headers)
    assert answer.headers["content-type"] == "application/json"
    assert "inference-header-content-length" not in answer.headers
    assert answer.json()["outputs"][1]["data"] == [True] * 3


def test_infer_with_very_many_tensors_is_refused(client: TestClient) -> None:
    one = {"name": "a", "shape": [1], "datatype": "INT64", "data": [1]}
    answer = client.post("/v2/models/tiny/infer", json={"inputs": [one] * 1025})
    assert answer.status_code in (400, 422) and "1024" in answer.json()["error"]


def test_infer_infinity_is_null_in_json_and_exact_in_bytes(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    log (float[n] x) => (float[n] y) { y = Log(x) }
    """
    client = start(write_model(tmp_path / "log.onnx", text))
    tensor = {"name": "x", "datatype": "FP32", "shape": [3], "data": [0, -1, 1]}
    answer = client.post("/v2/models/log/infer", json={"inputs": [tensor]})
    assert answer.json()["outputs"][0]["data"] == [None, None, 0.0]
    body = {"inputs": [tensor], "parameters": {"binary_data_output": True}}
    _, raw = read_binary(client.post("/v2/models/log/infer", json=body))
    np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), [-np.inf, np.nan, 0])


def test_infer_needs_no_content_type(client: TestClient) -> None:
    body = orjson.dumps(ids_request([2, 3]))
    assert client.post("/v2/models/tiny/infer", content=body).status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert client.post("/v2/models/tiny/infer", content=body, headers=form).status_code == 200


IMAGE = """
<ir_version: 10, opset_import: ["": 18]>
image (float[batch, 3, height, width] pixel_values) => (float[batch, 3, height, width] doubled)
{
    doubled = Add(pixel_values, pixel_values)
}
"""


def test_infer_zero_rows_is_refused_at_once(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_model(tmp_path / "image.onnx", IMAGE), timeout_ms=2000)

    def infer(rows: int) -> httpx2.Response:
        tensor = {"name": "pixel_values", "shape": [rows, 3, 2, 2], "datatype": "FP32"}
        body = {"inputs": [tensor | {"data": [1.0] * (rows * 12)}]}
        return client.post("/v2/models/image/infer", json=body)

    refused = infer(0)
    assert refused.status_code == 422 and "[0, 3, 2, 2]" in refused.json()["error"]
    assert infer(2).json()["outputs"][0]["shape"] == [2, 3, 2, 2]


# Values of 100 or more have no row in the first output, and double the width of the second.
VALUE_SHAPES = """
<ir_version: 10, opset_import: ["": 18]>
values (float[n, 1] x) => (float[kept, 1] rows, float[n, width] wide)
  <float hundred = {100}, int64[1] one = {1}, int64[1] last = {1}>
{
    flat = Squeeze(x, last)
    small = Less(flat, hundred)
    rows = Compress<axis = 0>(x, small)
    largest = ReduceMax<keepdims = 0>(x)
    is_wide = Greater(largest, hundred)
    extra = Cast<to = 7>(is_wide)
    width = Add(one, extra)
    repeats = Concat<axis = 0>(one, width)
    wide = Tile(x, repeats)
}
"""


def test_infer_rows_of_different_shapes_are_refused(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    client = start(write_model(tmp_path / "values.onnx", VALUE_SHAPES), max_batch_tokens=1)
    model = client.app.state.repository.engine().model  # type: ignore[attr-defined]
    assert model.rows_are_independent
    url = "/v2/models/values/infer"

    def status(output: str, *values: float) -> int:
        tensor = {"name": "x", "shape": [len(values), 1], "datatype": "FP32", "data": values}
        body = {"inputs": [tensor], "outputs": [{"name": output}]}
        return client.post(url, json=body).status_code

    assert status("wide", 1, 2) == status("rows", 1, 2) == 200
    assert status("wide", 1, 200) == 422
    assert status("rows", 1, 200) == 422
    batched = start(tmp_path / "values.onnx").post(
        url,
        json={
            "inputs": [{"name": "x", "shape": [2, 1], "datatype": "FP32", "data": [1, 200]}],
            "outputs": [{"name": "rows"}],
        },
    )
    assert batched.status_code == 422
