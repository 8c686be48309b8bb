"""Read an ONNX file without loading its large weights.

A protobuf library keeps the bytes and the parsed message in memory, twice the size of the model.
This reader passes everything except ``raw_data`` of large initializers to the library. Large
weights become external data that refers to a range of the model file.

This reader parses only the outermost fields (protobuf.dev/programming-guides/encoding): a key with
a field number and a wire type, followed by a varint, 4 or 8 bytes, or a length and that many bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx

__all__ = ["GRAPH", "INITIALIZER", "LARGE", "RAW_DATA", "Field", "fields", "read_in_place"]

LARGE = 1 << 16
"""Minimum size in bytes of weights that stay in the file."""

GRAPH, INITIALIZER, RAW_DATA = 7, 5, 9
"""Field numbers of ModelProto.graph, GraphProto.initializer and TensorProto.raw_data."""


class Field(NamedTuple):
    """A field of a message; positions are in bytes.

    Attributes:
        number: The field number.
        start: The position of the key.
        content: The position of the content.
        end: The position after the content.
    """

    number: int
    start: int
    content: int
    end: int


def read_in_place(path: Path) -> onnx.ModelProto:
    """Read a model; its large weights become external data in ``path`` itself.

    Raises:
        ValueError, DecodeError: The file is not a protobuf message, or truncated.
    """
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        model = onnx.ModelProto.FromString(_without(data, 0, len(data), GRAPH))
        for model_field in fields(data, 0, len(data)):
            if model_field.number != GRAPH:
                continue
            rest = _without(data, model_field.content, model_field.end, INITIALIZER)
            graph = onnx.GraphProto.FromString(rest)
            for graph_field in fields(data, model_field.content, model_field.end):
                if graph_field.number == INITIALIZER:
                    graph.initializer.append(_initializer(data, graph_field, path))
            model.graph.MergeFrom(graph)
    return model


def _initializer(data: mmap.mmap, field: Field, path: Path) -> onnx.TensorProto:
    """Read an initializer; a large one becomes external data in ``path``."""
    raw = [inner for inner in fields(data, field.content, field.end) if inner.number == RAW_DATA]
    if len(raw) != 1 or raw[0].end - raw[0].content < LARGE:
        return onnx.TensorProto.FromString(data[field.content : field.end])
    tensor = onnx.TensorProto.FromString(_without(data, field.content, field.end, RAW_DATA))
    tensor.data_location = onnx.TensorProto.EXTERNAL
    location = {
        "location": path.name,
        "offset": raw[0].content,
        "length": raw[0].end - raw[0].content,
    }
    for key, value in location.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def _without(data: mmap.mmap, first: int, end: int, number: int) -> bytes:
    """The message without the fields of this number."""
    kept = (field for field in fields(data, first, end) if field.number != number)
    return b"".join(data[field.start : field.end] for field in kept)


def fields(data: mmap.mmap | bytes, position: int = 0, end: int | None = None) -> Iterator[Field]:
    """Yield the fields of the message from ``position`` to ``end`` (default: the end of the data).

    Raises:
        ValueError: The data is not a message, or truncated.
    """
    end = len(data) if end is None else end
    while position < end:
        start = position
        key, position = _varint(data, position, end)
        content = position
        match key & 7:
            case 0:
                _, position = _varint(data, position, end)
            case 1:
                position += 8
            case 2:
                length, content = _varint(data, position, end)
                position = content + length
            case 5:
                position += 4
            case wire:
                raise ValueError(f"unknown wire type {wire} at byte {start}")
        if position > end:
            raise ValueError(f"the field at byte {start} ends after its message")
        yield Field(key >> 3, start, content, position)


def _varint(data: mmap.mmap | bytes, at: int, end: int) -> tuple[int, int]:
    """Decode a little-endian base-128 number; return it and the position after it.

    Raises:
        ValueError: The number does not end before ``end``.
    """
    value = 0
    for shift in range(0, 70, 7):
        if at >= end:
            break
        byte = data[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise ValueError(f"the number before byte {at} is not a varint")
