"""Tensor codec: invalid data is refused without rounding, guessing or allocation."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.serving.tensor_codec import DATATYPES, from_bytes, from_values
from graph_passes.errors import InvalidData
from tests.errors import raises


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "code", "values"),
    [
        (
            "INT64",
            [1, 3],
            b"\0" * 23,
            "tensor.size",
            ["23 bytes", "[1, 3] of INT64", "expected 24"],
        ),
        ("INT64", [1, 3], b"\0" * 25, "tensor.size", ["expected 24"]),
        ("INT64", [1, 3], b"", "tensor.size", ["0 bytes"]),
        ("FP16", [], b"\0", "tensor.size", ["1 bytes", "[] of FP16", "expected 2"]),
        ("BOOL", [2], b"\1\2", "tensor.bool", []),
        (
            "INT8",
            [2**62, 2**62],
            b"\0",
            "tensor.size",
            ["expected 21267647932558653966460912964485513216"],
        ),
        ("INT64", [0, 2**62], b"", "tensor.shape", [[0, 2**62]]),
        ("INT8", [0, 2**63], b"", "tensor.shape", [[0, 2**63]]),
    ],
)
def test_from_bytes_of_another_size_are_refused(
    datatype: Any, shape: list[int], raw: bytes, code: str, values: list[Any]
) -> None:
    with raises(InvalidData, code, *values):
        from_bytes(memoryview(raw), datatype, shape)


def test_from_bytes_huge_shape_allocates_no_memory() -> None:
    tracemalloc.start()
    try:
        for _ in range(10):
            with pytest.raises(InvalidData):
                from_bytes(memoryview(b""), "FP64", [2**40])
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


@given(
    datatype=st.sampled_from(sorted(DATATYPES)),
    shape=st.lists(st.integers(0, 2**63), max_size=5),
    data=st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
        lambda inner: st.lists(inner, max_size=4),
    ),
)
def test_from_values_any_data_is_refused_or_matches_shape(
    datatype: Any, shape: list[int], data: Any
) -> None:
    values = data if isinstance(data, list) else [data]
    try:
        array = from_values(values, datatype, shape)
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
def test_from_values_number_out_of_datatype_is_refused(datatype: Any, value: Any) -> None:
    with pytest.raises(InvalidData) as error:
        from_values([value], datatype, [1])
    assert error.value.code in ("tensor.datatype", "tensor.range")


def test_from_values_long_string_allocates_no_memory() -> None:
    """numpy would give each of them the width of the longest: 400 GB."""
    data = ["x" * 1_000_000, *[""] * 100_000]
    with raises(InvalidData, "tensor.datatype", "FP32"):
        from_values(data, "FP32", [len(data)])
