"""Write an ONNX file without copies of its weights in memory.

A protobuf library holds the message and its bytes, twice the size of the model. This writer passes
everything except ``raw_data`` of large initializers to the library, and streams their bytes to the
file. The library would write an equal file, with the fields of a message by ascending number.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from attnserve.runtime.external_data import without_content
from attnserve.runtime.onnx_reader import GRAPH, INITIALIZER, LARGE, RAW_DATA, fields

__all__ = ["write_model"]

Content = ir.Tensor[Any] | ir.PackedTensor[Any]
"""A tensor that can write its bytes to a file."""

Part = bytes | Content
"""A part of a message, or the bytes of a tensor."""


def write_model(model: ir.Model, path: Path) -> None:
    """Write ``model`` with its weights to ``path``; at most 2 GiB, the limit of protobuf."""
    initializers = model.graph.initializers
    contents: dict[str, Content] = {
        name: value.const_value
        for name, value in initializers.items()
        if isinstance(value.const_value, ir.Tensor | ir.PackedTensor)
        and value.const_value.nbytes >= LARGE
    }
    with without_content(model, contents):
        proto = ir.to_proto(model)
    tensors = list(proto.graph.initializer)
    del proto.graph.initializer[:]
    messages = [_tensor(tensor, contents.get(tensor.name)) for tensor in tensors]
    graph = _with_fields(proto.graph.SerializeToString(), INITIALIZER, messages)
    proto.ClearField("graph")
    temporary_file = path.with_name(f".{path.name}.new")  # the weights may be mapped from ``path``
    try:
        with temporary_file.open("wb") as file:
            for part in _with_fields(proto.SerializeToString(), GRAPH, [graph]):
                if isinstance(part, bytes):
                    file.write(part)
                else:
                    part.tofile(file)
        temporary_file.replace(path)
    except BaseException:
        temporary_file.unlink(missing_ok=True)
        raise


def _tensor(proto: onnx.TensorProto, content: Content | None) -> list[Part]:
    """The message of an initializer, with its content if that is not in ``proto``."""
    if content is None:
        return [proto.SerializeToString()]
    proto.ClearField("data_location")
    proto.ClearField("external_data")
    return _with_fields(proto.SerializeToString(), RAW_DATA, [[content]])


def _with_fields(message: bytes, number: int, contents: list[list[Part]]) -> list[Part]:
    """Insert fields with a length, bytes or messages, in front of fields with larger numbers."""
    starts = (field.start for field in fields(message) if field.number > number)
    at = next(starts, len(message))
    parts: list[Part] = [message[:at]]
    for content in contents:
        size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in content)
        parts += [_varint(number << 3 | 2) + _varint(size), *content]
    return [*parts, message[at:]]


def _varint(value: int) -> bytes:
    """Encode a number of base 128, lowest digit first."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    return bytes([*digits, value])
