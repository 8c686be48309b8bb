"""Read and write ONNX files, with weights in the file or in files beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.models.artifact import Artifact
from attnserve.models.onnx_validation import external_file, external_locations, validated
from attnserve.runtime.external_data import (
    PROTOBUF_LIMIT_BYTES,
    external_files,
    external_weights,
    in_memory,
    map_external_data,
    weight_bytes,
)
from attnserve.runtime.onnx_reader import read_in_place
from attnserve.runtime.onnx_writer import write_model
from graph_passes.emit.editing import capture_weights
from graph_passes.errors import InvalidModel

__all__ = ["data_file", "external_data_locations", "load_model", "save_model"]


def load_model(source: Artifact | Path, *, in_place: bool = False) -> ir.Model:
    """Read and validate a model; external data stays on disk and is memory-mapped on access.

    Weights that the graph lists as inputs are not inputs of the result. Axes of length -1
    are free.

    Args:
        in_place: Memory-map also the weights inside the .onnx file, which must not change
            meanwhile. Sessions map them too. ``save_model`` writes such a model with its weights.

    Raises:
        InvalidModel: The file is not a valid ONNX model, or its external data is missing, too
            short, or outside the model's folder.
    """
    path = source.model if isinstance(source, Artifact) else source
    try:
        proto = _in_place(path) or onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise InvalidModel(
            f"{path}: cannot be read: {error.strerror}",
            "check the path",
            code="artifact.unreadable",
        ) from error
    except Exception as error:  # protobuf's DecodeError, UnicodeDecodeError, ...
        raise InvalidModel(
            f"{path}: not an ONNX file, or truncated ({path.stat().st_size} bytes)",
            "download or export it again",
            code="artifact.not_onnx",
        ) from error
    proto = validated(path, proto)
    try:
        model = ir.from_proto(proto)
        _check_values(model)
        ir.external_data.set_base_dir(model.graph, path.parent)
        _map_linked(model, path)
        model.graph.sort()  # some converters do not sort nodes
        capture_weights(model)
        _remove_weights_from_inputs(model)
        _free_negative_axes(model)
    except Exception as error:  # onnx_ir raises ValueError for cycles, and other types
        raise InvalidModel(
            f"{path}: the graph is not well formed: {str(error)[:300]}",
            "check it with onnx.checker.check_model, or export it again",
            code="artifact.malformed",
        ) from error
    if not in_place:
        _read_own_weights(model, path)
    return model


def _check_values(model: ir.Model) -> None:
    """Raise ValueError if a value is used and never defined: onnx_ir cannot copy such a graph."""
    used = [v for node in model.graph.all_nodes() for v in node.inputs if v is not None]
    for value in (*used, *model.graph.outputs):
        is_given = value.is_graph_input() or value.is_initializer()
        if not is_given and value.producer() is None:
            raise ValueError(f"{value.name!r} is used and never defined")


def _map_linked(model: ir.Model, path: Path) -> None:
    """Map external data behind links that leave the model's folder, which onnx_ir refuses.

    ``validated`` allows it beside the target of a link to the model.
    """
    folder = path.parent.resolve()
    for value, tensor in external_weights(model):
        file = Path(tensor.path).resolve()
        if not file.is_relative_to(folder):
            linked = ir.ExternalTensor(
                file,
                tensor.offset,
                tensor.length,
                tensor.dtype,
                shape=tensor.shape,
                name=tensor.name or "",
            )
            value.const_value = in_memory(tensor, linked.numpy())


def external_data_locations(path: Path) -> list[str]:
    """The files with external data of a model, relative to its folder."""
    in_place = _in_place(path)
    proto = in_place or onnx.load(path, format="protobuf", load_external_data=False)
    locations = external_locations(proto)
    return [location for location in locations if in_place is None or location != path.name]


def _remove_weights_from_inputs(model: ir.Model) -> None:
    """Remove initializers from the inputs: those of IR version 3, and defaults of later versions.

    ONNX Runtime does not count them as inputs either, and fuses less while they are.
    """
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        model.graph.inputs.remove(value)
        model.ir_version = max(model.ir_version, 4)


def _free_negative_axes(model: ir.Model) -> None:
    """Make axes of length -1 free, as some converters mean them and ONNX Runtime reads them."""
    for value in (*model.graph.inputs, *model.graph.outputs):
        shape = value.shape
        if shape is not None and any(isinstance(axis, int) and axis < 0 for axis in shape):
            value.shape = ir.Shape(
                [None if isinstance(axis, int) and axis < 0 else axis for axis in shape]
            )


def _read_own_weights(model: ir.Model, path: Path) -> None:
    """Copy the weights that are mapped from the .onnx file itself into memory."""
    for value, tensor in external_weights(model):
        if tensor.location == path.name:
            value.const_value = in_memory(tensor, np.array(tensor.numpy()))


def _in_place(path: Path) -> onnx.ModelProto | None:
    """The model with its weights in the file; None if that is not possible."""
    try:
        # onnx_ir maps no file that has several hard links, or that is a link out of its folder.
        is_own = path.stat().st_nlink == 1 and path.resolve().parent == path.parent.resolve()
        is_own = is_own and external_file(path, path.name) is not None
        return read_in_place(path) if is_own else None
    except Exception:  # onnx.load reports the error
        return None


def save_model(model: ir.Model, path: Path, *, external: bool = False) -> None:
    """Write ``model`` to ``path``.

    Weights are written to ``path`` + ``.data`` if ``external``, or if they exceed 2 GB.
    """
    if external_files(model):
        model = model.clone()
        map_external_data(model)
    if external or weight_bytes(model) >= PROTOBUF_LIMIT_BYTES:
        ir.save(model, path, external_data=data_file(path).name)
    else:
        write_model(model, path)


def data_file(model: Path) -> Path:
    """The file with the external data of a model that is written."""
    return model.with_name(f"{model.name}.data")
