"""Tensor codec: invalid data is refused without rounding, guessing or allocation."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.serving.tensor_codec import DATATYPES, from_bytes, from_values
from graph_passes.errors import InvalidData


@pytest.mark.parametrize(
    ("datatype", "shape", "raw", "error"),
    [
        ("INT64", [1, 3], b"\0" * 23, r"23 bytes for shape \[1, 3\] of INT64: expected 24"),
        ("INT64", [1, 3], b"\0" * 25, "expected 24"),
        ("INT64", [1, 3], b"", "0 bytes for shape"),
        ("FP16", [], b"\0", r"1 bytes for shape \[\] of FP16: expected 2"),
        ("BOOL", [2], b"\1\2", "a BOOL must be a byte 0 or 1"),
        ("INT8", [2**62, 2**62], b"\0", "expected 21267647932558653966460912964485513216"),
        ("INT64", [0, 2**62], b"", "an axis of shape .* is too long"),
        ("INT8", [0, 2**63], b"", "an axis of shape .* is too long"),
    ],
)
def test_from_bytes_of_another_size_are_refused(
    datatype: Any, shape: list[int], raw: bytes, error: str
) -> None:
    with pytest.raises(InvalidData, match=error):
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
    with pytest.raises(InvalidData, match=r"not all of|out of the range of"):
        from_values([value], datatype, [1])


def test_from_values_long_string_allocates_no_memory() -> None:
    """numpy would give each of them the width of the longest: 400 GB."""
    data = ["x" * 1_000_000, *[""] * 100_000]
    with pytest.raises(InvalidData, match="not all of FP32"):
        from_values(data, "FP32", [len(data)])
