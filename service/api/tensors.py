"""Tensors of the Open Inference Protocol v2: as JSON, and as raw bytes behind the JSON.

The binary extension: the body is JSON, followed by the bytes of each binary input in the order of
the JSON, which holds their sizes (``binary_data_size``). A header holds the length of the JSON.
Bytes are little-endian and row-major, without padding; a BOOL is one byte, 0 or 1. Answers have the
same format.

Numbers are never wrapped or rounded: 3.0 is not an INT64, 300 is not a UINT8, and 1e39 is not an
FP32. JSON has no NaN and no infinity: requests cannot hold them, and answers hold null instead.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal, get_args

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeInt
from pydantic_core import PydanticCustomError

from graph_passes.errors import InvalidData
from service.api.requests import Body, Extensible, Name
from service.errors import MalformedRequest

HEADER_LENGTH = "inference-header-content-length"
"""The header with the length of the JSON in bytes, if raw tensors follow it."""

Datatype = Literal[
    "BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64",
    "FP16", "FP32", "FP64",
]  # fmt: skip

DATATYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name.lower().replace("fp", "float")) for name in get_args(Datatype)
}
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
JSON_TYPES = {"b": {bool}, "u": {int}, "i": {int}, "f": {int, float}}
"""Python types of JSON values that are valid for each numpy kind."""


def _no_bytes(value: Any) -> Any:
    if value == "BYTES":
        raise PydanticCustomError(
            "bytes", "BYTES is not supported; send texts to /embed or /predict"
        )
    return value


class TensorParameters(Extensible):
    binary_data_size: NonNegativeInt | None = None
    """Size in bytes of this tensor after the JSON, instead of ``data``."""


class InputTensor(Body):
    """One input: ``data`` flat in row-major order, or nested like ``shape``, or raw bytes."""

    name: Name
    shape: list[NonNegativeInt] = Field(max_length=32, examples=[[1, 3]])
    datatype: Annotated[Datatype, BeforeValidator(_no_bytes)]
    data: list[Any] | None = Field(default=None, examples=[[101, 7592, 102]])
    parameters: TensorParameters = TensorParameters()


class OutputTensor(Body):
    """One output: ``data`` flat in row-major order; NaN and infinities are null.

    If ``parameters`` has a ``binary_data_size``, raw bytes after the JSON replace ``data``.
    """

    name: str
    shape: list[int]
    datatype: Datatype
    data: list[Any] | None = None
    parameters: TensorParameters | None = None


def split(body: bytes | bytearray, header_length: str | None) -> tuple[memoryview, memoryview]:
    """(JSON, raw tensors) of ``body``, without a copy.

    Args:
        header_length: Value of the header; None if the whole body is JSON.

    Raises:
        MalformedRequest: The header is not a number, or longer than the body.
    """
    view = memoryview(body)
    if header_length is None:
        return view, view[:0]
    if not re.fullmatch(r"[0-9]{1,19}", header_length, re.ASCII):
        raise MalformedRequest(
            f"{HEADER_LENGTH} is {header_length[:32]!r}: expected the length of the JSON in bytes"
        )
    end = int(header_length)
    if end > len(view):
        raise MalformedRequest(f"{HEADER_LENGTH} is {end}, but the body has {len(view)} bytes")
    return view[:end], view[end:]


def decode_all(tensors: Sequence[InputTensor], raw: memoryview) -> dict[str, np.ndarray]:
    """Decode ``tensors`` to arrays, by name.

    Args:
        raw: The bytes after the JSON: the binary tensors, in order.

    Raises:
        InvalidData: See ``decode``; or too few or too many bytes.
    """
    arrays: dict[str, np.ndarray] = {}
    start = 0
    for tensor in tensors:
        size = tensor.parameters.binary_data_size
        if size is not None and size > len(raw) - start:
            raise InvalidData(
                f"input {tensor.name!r}: binary_data_size is {size},"
                f" but {len(raw) - start} bytes are left in the body"
            )
        end = start + (size or 0)
        arrays[tensor.name] = decode(tensor, None if size is None else raw[start:end])
        start = end
    if start < len(raw):
        raise InvalidData(
            f"{len(raw) - start} bytes follow the last tensor",
            "set binary_data_size of each binary input",
        )
    return arrays


def decode(tensor: InputTensor, raw: memoryview | None = None) -> np.ndarray:
    """Decode one tensor; the result is a view of ``raw`` if its bytes are aligned.

    Raises:
        InvalidData: The data is missing, given twice, ragged, does not match the shape, or holds
            values that the datatype cannot represent.
    """
    what = f"input {tensor.name!r}"
    if (tensor.data is None) == (raw is None):
        raise InvalidData(
            f"{what} has {'no data' if raw is None else 'data twice'}",
            "give 'data', or 'binary_data_size' in its parameters and the bytes after the JSON",
        )
    dtype, shape = DATATYPES[tensor.datatype], tuple(tensor.shape)
    if raw is not None:
        return _reshape(_from_bytes(raw, dtype, shape, what), shape, what)
    assert tensor.data is not None
    nesting, values = _flatten(tensor.data, what)
    # Check sizes and types in Python first: numpy would allocate memory for any shape or string.
    if len(values) != math.prod(shape):
        raise InvalidData(f"{what}: {len(values)} values for shape {list(shape)}")
    if len(nesting) > 1 and nesting != list(shape):
        raise InvalidData(f"{what}: data nested as {nesting}, shape {list(shape)}")
    if not set(map(type, values)) <= JSON_TYPES[dtype.kind]:
        raise InvalidData(f"{what}: its data is not all of {tensor.datatype}")
    try:
        with np.errstate(over="raise"):
            array = np.array(values, dtype=dtype)
    except (FloatingPointError, OverflowError) as error:
        raise InvalidData(
            f"{what}: its data holds numbers out of the range of {tensor.datatype}"
        ) from error
    return _reshape(array, shape, what)


def encode_all(
    arrays: Mapping[str, np.ndarray], binary: Collection[str]
) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """(output tensors in the JSON, raw tensors after the JSON).

    Args:
        binary: Names of the tensors that are sent as raw bytes.
    """
    tensors: list[dict[str, Any]] = []
    raw: list[memoryview] = []
    for name, array in arrays.items():
        tensor: dict[str, Any] = {
            "name": name,
            "shape": list(array.shape),
            "datatype": NAMES[array.dtype],
        }
        if name in binary:
            little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
            raw.append(little.data)
            tensor["parameters"] = {"binary_data_size": little.nbytes}
        else:
            tensor["data"] = np.ascontiguousarray(array).ravel()
        tensors.append(tensor)
    return tensors, raw


def _from_bytes(
    raw: memoryview, dtype: np.dtype[Any], shape: tuple[int, ...], what: str
) -> np.ndarray:
    expected = math.prod(shape) * dtype.itemsize
    if len(raw) != expected:
        raise InvalidData(
            f"{what}: {len(raw)} bytes for shape {list(shape)} of {NAMES[dtype]}:"
            f" expected {expected}"
        )
    array = np.frombuffer(raw, dtype.newbyteorder("<"))
    if dtype.kind == "b" and array.size and array.view(np.uint8).max() > 1:
        raise InvalidData(f"{what}: a BOOL must be a byte 0 or 1")
    # The JSON has any length, so the address may be unaligned, which vector instructions need.
    return array.astype(dtype, copy=not array.flags.aligned)


def _flatten(data: list[Any], what: str) -> tuple[list[int], list[Any]]:
    """(length at each level of nesting, the values in row-major order)."""
    nesting = [len(data)]
    while data and type(data[0]) is list:
        if set(map(type, data)) != {list} or len(set(map(len, data))) != 1:
            raise InvalidData(f"{what}: its data is ragged")
        nesting.append(len(data[0]))
        data = list(chain.from_iterable(data))
    return nesting, data


def _reshape(array: np.ndarray, shape: tuple[int, ...], what: str) -> np.ndarray:
    try:
        return array.reshape(shape)
    except (OverflowError, ValueError) as error:  # next to an axis of 0, any length is possible
        raise InvalidData(f"{what}: an axis of shape {list(shape)} is too long") from error
