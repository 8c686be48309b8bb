"""Tensors as JSON values and as raw bytes, with the datatypes of the Open Inference Protocol v2.

Bytes are little-endian and row-major, without padding; a BOOL is one byte, 0 or 1.

Numbers are never wrapped: 3.0 is not an INT64, 300 is not a UINT8, and 1e39 is not an FP32. Floats
are rounded to their type. JSON has no NaN and no infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np

from graph_passes.errors import InvalidData

__all__ = ["DATATYPES", "NAMES", "ONNX_TYPES", "Datatype", "from_bytes", "from_values", "to_bytes"]

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "FP32",
    "FP64",
]

DATATYPES: dict[Datatype, np.dtype[Any]] = {
    name: np.dtype(name.lower().replace("fp", "float")) for name in get_args(Datatype)
}
NAMES: dict[np.dtype[Any], Datatype] = {dtype: name for name, dtype in DATATYPES.items()}

_ONNX_NAMES = {"float32": "float", "float64": "double"}
ONNX_TYPES: dict[str, np.dtype[Any]] = {
    f"tensor({_ONNX_NAMES.get(dtype.name, dtype.name)})": dtype for dtype in NAMES
}
"""The data types, by their names in ONNX Runtime."""

JSON_TYPES = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}
"""Python types of JSON values that are valid for each numpy kind."""


def from_values(values: list[Any], datatype: Datatype, shape: Sequence[int]) -> np.ndarray:
    """Decode JSON values, flat in row-major order or nested like ``shape``.

    Sizes and types are checked before numpy, which would allocate memory for any shape or string.

    Raises:
        InvalidData: The values are ragged, do not match the shape, or are not of the datatype.
    """
    nesting, elements = _flatten(values)
    if len(elements) != math.prod(shape):
        raise InvalidData(f"{len(elements)} values for shape {list(shape)}", code="tensor.count")
    if len(nesting) > 1 and nesting != list(shape):
        raise InvalidData(f"data nested as {nesting}, shape {list(shape)}", code="tensor.nesting")
    dtype = DATATYPES[datatype]
    if not set(map(type, elements)) <= JSON_TYPES[dtype.kind]:
        raise InvalidData(f"its data is not all of {datatype}", code="tensor.datatype")
    try:
        with np.errstate(over="raise"):
            array = np.array(elements, dtype)
    except (FloatingPointError, OverflowError) as error:
        raise InvalidData(
            f"its data holds numbers out of the range of {datatype}", code="tensor.range"
        ) from error
    return _reshape(array, shape)


def from_bytes(raw: memoryview, datatype: Datatype, shape: Sequence[int]) -> np.ndarray:
    """Decode raw bytes; the array is a view of aligned bytes.

    Raises:
        InvalidData: The number of bytes does not match the shape, or a BOOL is neither 0 nor 1.
    """
    dtype = DATATYPES[datatype]
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise InvalidData(
            f"{len(raw)} bytes for shape {list(shape)} of {datatype}: expected {expected}",
            code="tensor.size",
        )
    array = np.frombuffer(raw, dtype.newbyteorder("<"))
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise InvalidData("a BOOL must be a byte 0 or 1", code="tensor.bool")
    # Vector instructions need aligned addresses.
    return _reshape(array.astype(dtype, copy=not array.flags.aligned), shape)


def to_bytes(array: np.ndarray) -> memoryview:
    """The raw bytes of a tensor, without a copy if it is contiguous and little-endian."""
    ordered = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    return ordered.reshape(-1).view(np.uint8).data


def _flatten(values: list[Any]) -> tuple[list[int], list[Any]]:
    """(length at each level of nesting, the values in row-major order)."""
    nesting = [len(values)]
    while values and type(values[0]) is list:
        if set(map(type, values)) != {list} or len(set(map(len, values))) != 1:
            raise InvalidData("its data is ragged", code="tensor.ragged")
        nesting.append(len(values[0]))
        values = list(chain.from_iterable(values))
    return nesting, values


def _reshape(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    try:
        return array.reshape(shape)
    except (OverflowError, ValueError) as error:  # beside an axis of 0, any length is possible
        raise InvalidData(
            f"an axis of shape {list(shape)} is too long", code="tensor.shape"
        ) from error
