from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from starlette.testclient import TestClient

from graph_passes.errors import InvalidData
from service.protocols.open_inference import DATATYPES, decode, encode
from service.schemas import InputTensor
from tests.service.tiny import ECHO, hidden_states, ids_request, write_model


def finite_arrays(dtype: np.dtype[Any]) -> st.SearchStrategy[np.ndarray]:
    elements = None
    if dtype.kind == "f":
        elements = hnp.from_dtype(dtype, allow_nan=False, allow_infinity=False)
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    return hnp.arrays(dtype, shapes, elements=elements)


@given(
    array=st.sampled_from(sorted(DATATYPES)).flatmap(lambda name: finite_arrays(DATATYPES[name])),
    nested=st.booleans(),
)
def test_what_is_encoded_decodes_to_itself(array: np.ndarray, nested: bool) -> None:
    tensor = orjson.loads(orjson.dumps(encode("x", array), option=orjson.OPT_SERIALIZE_NUMPY))
    if nested and array.ndim and array.size:
        tensor["data"] = array.tolist()
    decoded = decode(InputTensor.model_validate(tensor))
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array, strict=True)


@given(
    datatype=st.sampled_from(sorted(DATATYPES)),
    shape=st.lists(st.integers(0, 2**63), max_size=5),
    data=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4),
    ),
)
def test_any_other_data_is_refused_or_is_what_it_says(
    datatype: Any, shape: list[int], data: Any
) -> None:
    tensor = InputTensor.model_construct(
        name="x", shape=shape, datatype=datatype, data=data if isinstance(data, list) else [data]
    )
    try:
        array = decode(tensor)
    except InvalidData:
        return
    assert array.dtype == DATATYPES[datatype]
    assert list(array.shape) == shape


@pytest.mark.parametrize(
    ("datatype", "value"),
    [
        ("INT64", 2**63),
        ("INT64", 1.0),
        ("INT64", True),
        ("INT8", -129),
        ("UINT8", 256),
        ("UINT64", -1),
        ("BOOL", 1),
        ("FP16", 70000),
        ("FP32", 1e39),
        ("FP32", False),
        ("FP64", "1.0"),
        ("FP64", None),
    ],
)
def test_a_number_is_never_bent_to_its_datatype(datatype: Any, value: Any) -> None:
    tensor = InputTensor.model_construct(name="x", shape=[1], datatype=datatype, data=[value])
    with pytest.raises(InvalidData, match=r"not all of|out of the range of"):
        decode(tensor)


def test_a_long_string_among_short_ones_costs_no_memory() -> None:
    """numpy would give each of them the width of the longest: 400 GB."""
    data = ["x" * 1_000_000, *[""] * 100_000]
    tensor = InputTensor.model_construct(name="x", shape=[len(data)], datatype="FP32", data=data)
    with pytest.raises(InvalidData, match="not all of FP32"):
        decode(tensor)


def test_metadata(client: TestClient) -> None:
    assert client.get("/v2").json()["name"] == "attnserve"
    expected = {
        "name": "tiny",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
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
def test_infer(client: TestClient, route: str) -> None:
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


def test_outputs_are_those_asked_for_in_their_order(client: TestClient) -> None:
    asked = [{"name": "kept"}, {"name": "last_hidden_state", "parameters": {"binary_data": True}}]
    answer = client.post("/v2/models/tiny/infer", json=ids_request([2, 3]) | {"outputs": asked})
    assert [output["name"] for output in answer.json()["outputs"]] == ["kept", "last_hidden_state"]
    assert "id" not in answer.json()


def test_no_content_type_is_needed(client: TestClient) -> None:
    body = orjson.dumps(ids_request([2, 3]))
    assert client.post("/v2/models/tiny/infer", content=body).status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert client.post("/v2/models/tiny/infer", content=body, headers=form).status_code == 200


def test_every_datatype_survives(start: Callable[..., TestClient], tmp_path: Path) -> None:
    values: dict[str, tuple[str, list[int], list[Any]]] = {
        "b": ("BOOL", [2], [True, False]),
        "u8": ("UINT8", [2], [0, 255]),
        "u64": ("UINT64", [2], [0, 2**64 - 1]),
        "i8": ("INT8", [2], [-128, 127]),
        "i64": ("INT64", [2], [-(2**63), 2**63 - 1]),
        "f16": ("FP16", [2], [0.5, -65504.0]),
        "f32": ("FP32", [2, 2], [0.1, 1.5, -2.25, 3]),
        "f64": ("FP64", [], [0.1]),
    }
    client = start(write_model(tmp_path / "echo.onnx", ECHO))
    inputs = [
        {"name": name, "datatype": datatype, "shape": shape, "data": data}
        for name, (datatype, shape, data) in values.items()
    ]
    answer = client.post("/v2/models/echo/infer", json={"inputs": inputs})
    assert answer.status_code == 200, answer.text
    for output in answer.json()["outputs"]:
        datatype, shape, data = values[output["name"].removesuffix("_out")]
        assert (output["datatype"], output["shape"]) == (datatype, shape)
        assert output["data"] == data


def test_infinity_is_null(start: Callable[..., TestClient], tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    log (float[n] x) => (float[n] y) { y = Log(x) }
    """
    client = start(write_model(tmp_path / "log.onnx", text))
    inputs = [{"name": "x", "datatype": "FP32", "shape": [3], "data": [0, -1, 1]}]
    answer = client.post("/v2/models/log/infer", json={"inputs": inputs})
    assert answer.json()["outputs"][0]["data"] == [None, None, 0.0]
