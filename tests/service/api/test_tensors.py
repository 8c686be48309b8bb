"""Tensors of requests and answers: round trips, and the bytes after the JSON."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnserve.serving.tensor_codec import DATATYPES
from graph_passes.errors import InvalidData
from service.api.tensors import InputTensor, decode_all, encode_all, split
from service.errors import MalformedRequest
from tests.errors import raises

NO_BYTES = memoryview(b"")


def arrays_of(dtype: np.dtype[Any], *, finite: bool) -> st.SearchStrategy[np.ndarray]:
    elements = None
    if dtype.kind == "f" and finite:
        elements = hnp.from_dtype(dtype, allow_nan=False, allow_infinity=False)
    shapes = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4)
    return hnp.arrays(dtype, shapes, elements=elements)


def any_array(*, finite: bool) -> st.SearchStrategy[np.ndarray]:
    return st.sampled_from(sorted(DATATYPES)).flatmap(
        lambda name: arrays_of(DATATYPES[name], finite=finite)
    )


def decode(tensor: InputTensor, raw: memoryview = NO_BYTES) -> np.ndarray:
    return decode_all([tensor], raw)["x"]


def binary(datatype: str, shape: list[int], size: Any) -> InputTensor:
    return InputTensor.model_validate(
        {
            "name": "x",
            "shape": shape,
            "datatype": datatype,
            "parameters": {"binary_data_size": size},
        }
    )


@given(array=any_array(finite=True), nested=st.booleans())
def test_decode_json_restores_encoded_array(array: np.ndarray, nested: bool) -> None:
    (encoded,), _ = encode_all({"x": array}, ())
    tensor = orjson.loads(orjson.dumps(encoded, option=orjson.OPT_SERIALIZE_NUMPY))
    if nested and array.ndim and array.size:
        tensor["data"] = array.tolist()
    decoded = decode(InputTensor.model_validate(tensor))
    assert decoded.dtype == array.dtype
    np.testing.assert_array_equal(decoded, array, strict=True)


@given(
    arrays=st.lists(any_array(finite=False), min_size=1, max_size=4),
    as_bytes=st.sets(st.integers(0, 3)),
    offset=st.integers(0, 8),
    order=st.sampled_from("CF"),
)
def test_decode_bytes_restore_encoded_arrays(
    arrays: list[np.ndarray], as_bytes: set[int], offset: int, order: Any
) -> None:
    """Any mixture of JSON and bytes, at any address; bytes carry NaN and infinity."""
    named = {str(index): np.asarray(array, order=order) for index, array in enumerate(arrays)}
    chosen = {
        name
        for name, array in named.items()
        if int(name) in as_bytes or (array.dtype.kind == "f" and not np.isfinite(array).all())
    }
    tensors, raw = encode_all(named, chosen)
    head = orjson.dumps(tensors, option=orjson.OPT_SERIALIZE_NUMPY) + b" " * offset
    text, rest = split(b"".join([head, *raw]), str(len(head)))
    decoded = decode_all([InputTensor.model_validate(one) for one in orjson.loads(text)], rest)
    assert list(decoded) == list(named)
    for name, array in named.items():
        assert decoded[name].flags.aligned
        np.testing.assert_array_equal(decoded[name], array, strict=True)


def test_encode_bytes_are_little_endian_row_major_without_padding() -> None:
    (tensor,), raw = encode_all({"x": np.array([[1, 2], [3, 4]], np.uint16, order="F")}, {"x"})
    assert tensor == {
        "name": "x",
        "shape": [2, 2],
        "datatype": "UINT16",
        "parameters": {"binary_data_size": 8},
    }
    assert b"".join(raw) == struct.pack("<4H", 1, 2, 3, 4)


def test_decode_aligned_bytes_are_not_copied() -> None:
    body = bytearray(64)
    text, raw = split(body, "32")
    assert (len(text), len(raw)) == (32, 32)
    array = decode(binary("FP64", [4], 32), raw)
    body[32:40] = struct.pack("<d", 7)
    assert array[0] == 7


@pytest.mark.parametrize(
    "header", ["", "-1", "+1", "1.0", "0x1", " 1", "\u0661", "9" * 20, "x" * 99]
)
def test_split_invalid_header_is_refused(header: str) -> None:
    with raises(MalformedRequest, "request.header_length"):
        split(b"{}", header)


def test_split_header_longer_than_body_is_refused() -> None:
    assert [bytes(part) for part in split(b"{}", "2")] == [b"{}", b""]
    assert [bytes(part) for part in split(b"{}", None)] == [b"{}", b""]
    with raises(MalformedRequest, "request.header_length", "is 3", "2 bytes"):
        split(b"{}", "3")


def test_decode_all_checks_number_of_bytes() -> None:
    raw = memoryview(bytes(4))
    with raises(InvalidData, "tensor.size", "binary_data_size is 5", "4 bytes"):
        decode_all([binary("INT8", [5], 5)], raw)
    with raises(InvalidData, "tensor.size", f"binary_data_size is {2**63}", "4 bytes"):
        decode_all([binary("INT8", [2**63], 2**63)], raw)
    with raises(InvalidData, "tensor.extra_bytes", "1 bytes", "set binary_data_size"):
        decode_all([binary("INT8", [3], 3)], raw)


@pytest.mark.parametrize("size", [-1, 1.0, "4", True])
def test_input_tensor_invalid_binary_size_is_refused(size: Any) -> None:
    with pytest.raises(ValueError, match="binary_data_size"):
        binary("INT8", [4], size)


def test_decode_missing_or_repeated_data_is_refused() -> None:
    twice = binary("INT8", [1], 1).model_copy(update={"data": [1]})
    with raises(InvalidData, "tensor.data", "input 'x' has data twice"):
        decode_all([twice], memoryview(b"\0"))
    with raises(InvalidData, "tensor.data", "input 'x' has no data", "give 'data', or"):
        decode_all([binary("INT8", [1], None)], memoryview(b""))


def test_input_tensor_bytes_datatype_is_refused() -> None:
    with pytest.raises(ValueError, match="BYTES is not supported; send texts to /embed"):
        binary("BYTES", [1], 8)
