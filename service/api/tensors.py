"""Tensors of the Open Inference Protocol v2: as JSON, and as raw bytes after the JSON.

The binary extension: the body is JSON, followed by the bytes of each binary input in the order of
the JSON, which holds their sizes (``binary_data_size``). A header holds the length of the JSON.
Answers have the same format. ``attnserve.serving.tensor_codec`` describes the data; requests cannot
hold NaN and infinities as JSON, and answers hold null instead.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeInt
from pydantic_core import PydanticCustomError

from attnserve.serving.tensor_codec import NAMES, Datatype, from_bytes, from_values, to_bytes
from graph_passes.errors import InvalidData
from service.api.requests import Body, Extensible, Name
from service.errors import MalformedRequest

HEADER_LENGTH = "inference-header-content-length"
"""Header with the length of the JSON in bytes, if raw tensors follow it."""


def _no_bytes(value: Any) -> Any:
    if value == "BYTES":
        raise PydanticCustomError(
            "bytes", "BYTES is not supported; send texts to /embed or /predict"
        )
    return value


class TensorParameters(Extensible):
    """Parameters of a tensor."""

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
            f"{HEADER_LENGTH} is {header_length[:32]!r}: expected the length of the JSON in bytes",
            code="request.header_length",
        )
    end = int(header_length)
    if end > len(view):
        raise MalformedRequest(
            f"{HEADER_LENGTH} is {end}, but the body has {len(view)} bytes",
            code="request.header_length",
        )
    return view[:end], view[end:]


def decode_all(tensors: Sequence[InputTensor], raw: memoryview) -> dict[str, np.ndarray]:
    """Decode ``tensors`` to arrays, by name; aligned binary tensors are views of ``raw``.

    Args:
        raw: The bytes after the JSON: the binary tensors, in order.

    Raises:
        InvalidData: Data is missing, given twice, does not fit its shape and datatype, or has too
            few or too many bytes.
    """
    arrays: dict[str, np.ndarray] = {}
    for tensor in tensors:
        subject = f"input {tensor.name!r}"
        size = tensor.parameters.binary_data_size
        if size is not None and size > len(raw):
            raise InvalidData(
                f"{subject}: binary_data_size is {size}, but {len(raw)} bytes are left in the body",
                code="tensor.size",
            )
        if (size is None) == (tensor.data is None):
            raise InvalidData(
                f"{subject} has {'no data' if size is None else 'data twice'}",
                "give 'data', or 'binary_data_size' in its parameters and the bytes after the JSON",
                code="tensor.data",
            )
        try:
            arrays[tensor.name] = (
                from_bytes(raw[:size], tensor.datatype, tensor.shape)
                if tensor.data is None
                else from_values(tensor.data, tensor.datatype, tensor.shape)
            )
        except InvalidData as error:
            raise InvalidData(f"{subject}: {error.what}", error.fix, code=error.code) from error
        raw = raw[size or 0 :]
    if len(raw):
        raise InvalidData(
            f"{len(raw)} bytes follow the last tensor",
            "set binary_data_size of each binary input",
            code="tensor.extra_bytes",
        )
    return arrays


def encode_all(
    arrays: Mapping[str, np.ndarray], binary: Collection[str]
) -> tuple[list[dict[str, Any]], list[memoryview]]:
    """(output tensors in the JSON, raw tensors after the JSON).

    Args:
        binary: Names of the tensors that are sent as raw bytes.
    """
    tensors: list[dict[str, Any]] = []
    buffers: list[memoryview] = []
    for name, array in arrays.items():
        tensor: dict[str, Any] = {
            "name": name,
            "shape": list(array.shape),
            "datatype": NAMES[array.dtype],
        }
        if name in binary:
            buffers.append(to_bytes(array))
            tensor["parameters"] = {"binary_data_size": array.nbytes}
        else:
            tensor["data"] = np.ascontiguousarray(array).ravel()
        tensors.append(tensor)
    return tensors, buffers
