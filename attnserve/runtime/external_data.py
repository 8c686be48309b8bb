"""Tensors that an ONNX model stores in other files (external data)."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx_ir as ir

__all__ = [
    "PROTOBUF_LIMIT_BYTES",
    "all_tensors",
    "external_files",
    "external_folder",
    "external_weights",
    "in_memory",
    "map_external_data",
    "release_mapped_pages",
    "serialized",
    "weight_bytes",
    "without_content",
]

PROTOBUF_LIMIT_BYTES = 2**31 - 2**20
"""Maximum size of the weights in a model file: a protobuf message is limited to 2 GiB."""


def external_files(model: ir.Model) -> tuple[Path, ...]:
    """The external data files of a model, without duplicates."""
    paths = (tensor.path for tensor in all_tensors(model) if isinstance(tensor, ir.ExternalTensor))
    return tuple(dict.fromkeys(map(Path, paths)))


def external_folder(model: ir.Model) -> Path | None:
    """The folder of the external data, if only initializers of the main graph have external data.

    ONNX Runtime then maps the files itself. The result is also None without external data.
    """
    own = model.graph.initializers.values()
    external = [v.const_value for v in own if isinstance(v.const_value, ir.ExternalTensor)]
    if not external:
        return None
    folders = {Path(tensor.base_dir).absolute() for tensor in external}
    everywhere = sum(isinstance(tensor, ir.ExternalTensor) for tensor in all_tensors(model))
    return folders.pop() if len(folders) == 1 and everywhere == len(external) else None


def release_mapped_pages(model: ir.Model) -> None:
    """Give the pages of mapped initializers back to the system; the next access reads them again.

    Read pages count as resident memory of the process.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):  # Windows
        return
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and tensor.raw is not None:
            tensor.raw.madvise(mmap.MADV_DONTNEED)


def map_external_data(model: ir.Model) -> None:
    """Replace the external tensors of ``model`` by arrays over memory maps of their files.

    A model that is saved afterwards contains its weights instead of references to these files.
    The function copies no weights.

    ``ir.external_data.load_to_model`` copies each array and closes its map, which raises
    BufferError while another array of the map exists, such as a constant in cached shape
    information. ``ir.save`` with ``external_data`` closes the maps of tensors of up to 256 bytes.
    Both ignore tensors in attributes. This function keeps a map open while an array of it exists.
    """
    for value, tensor in external_weights(model):
        value.const_value = in_memory(tensor)
    for node in model.graph.all_nodes():
        for name, attribute in list(node.attributes.items()):
            if not any(isinstance(tensor, ir.ExternalTensor) for tensor in _values(attribute)):
                continue
            tensors = [
                in_memory(tensor) if isinstance(tensor, ir.ExternalTensor) else tensor
                for tensor in _values(attribute)
            ]
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, tensors[0])
            else:
                node.attributes[name] = ir.AttrTensors(name, tensors)


def serialized(
    model: ir.Model, folder: Path, *, limit_bytes: int = PROTOBUF_LIMIT_BYTES
) -> bytes | Path:
    """The serialized model; a file of ``folder`` if the weights have at least ``limit_bytes``."""
    if external_files(model):
        model = model.clone()
        map_external_data(model)
    if weight_bytes(model) < limit_bytes:
        return ir.to_proto(model).SerializeToString()
    path = folder / "model.onnx"
    ir.save(model, path, external_data="model.onnx.data")
    return path


@contextmanager
def without_content(model: ir.Model, names: Collection[str]) -> Generator[None]:
    """Remove the content of these initializers inside the context, for serialization."""
    tensors = {name: model.graph.initializers[name].const_value for name in names}
    try:
        for name, tensor in tensors.items():
            assert tensor is not None
            model.graph.initializers[name].const_value = ir.ExternalTensor(
                "memory",
                0,
                tensor.nbytes,
                tensor.dtype,
                shape=ir.Shape(tensor.shape.numpy()),
                name=name,
                doc_string=tensor.doc_string,
                metadata_props=dict(tensor.metadata_props),
            )
        yield
    finally:
        for name, tensor in tensors.items():
            model.graph.initializers[name].const_value = tensor


def external_weights(model: ir.Model) -> Iterator[tuple[ir.Value, ir.ExternalTensor]]:
    """Yield the initializers of all graphs that are external tensors, with their tensors."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if isinstance(value.const_value, ir.ExternalTensor):
                yield value, value.const_value


def in_memory(tensor: ir.ExternalTensor, array: np.ndarray | None = None) -> ir.TensorProtocol:
    """Make a tensor in memory of an array, by default an array over the memory map of its file."""
    return ir.Tensor(
        tensor.numpy() if array is None else array,
        dtype=tensor.dtype,
        name=tensor.name,
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props),
    )


def all_tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yield the tensors of all initializers and attributes."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if value.const_value is not None:
                yield value.const_value
    for node in model.graph.all_nodes():
        for attribute in node.attributes.values():
            yield from _values(attribute)


def _values(attribute: ir.Attr) -> tuple[ir.TensorProtocol, ...]:
    """The tensors of an attribute; none if it has another type or is a reference."""
    if attribute.is_ref():
        return ()
    if attribute.type == ir.AttributeType.TENSOR:
        return (attribute.value,)  # ``as_tensor`` checks a protocol, which takes longer
    return tuple(attribute.value) if attribute.type == ir.AttributeType.TENSORS else ()


def weight_bytes(model: ir.Model) -> int:
    """Size in bytes of all initializers, on disk or in memory."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)
