"""Write models as OpenVINO IR, for servers that run OpenVINO without attnserve."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import onnx_ir as ir

from attnserve.runtime.external_data import serialized
from attnserve.runtime.openvino_graph import check_scales
from attnserve.runtime.openvino_runtime import require_openvino
from attnserve.runtime.openvino_session import describe_error
from graph_passes.errors import InvalidModel

__all__ = ["write_openvino"]


def write_openvino(
    model: ir.Model, path: Path, *, output: str, name: str, is_repeated: bool = False
) -> None:
    """Write a graph with one output as OpenVINO IR: ``path`` (.xml), and its weights (.bin).

    Weights keep their types. The file cannot state the precision of computation: OpenVINO uses
    bfloat16 where the CPU has it, unless INFERENCE_PRECISION_HINT is f32.

    Args:
        output: The output to keep.
        name: The name of the output in the file.
        is_repeated: Whether the output, one vector per text [B, D], is repeated at each token of
            ``input_ids`` [B, S] to [B, S, D].

    Raises:
        InvalidModel: OpenVINO refuses the graph.
        MissingExtra: OpenVINO is not installed, or too old.
    """
    openvino = require_openvino()
    from openvino import opset13 as operators

    names = [value.name for value in model.graph.outputs]
    try:
        with tempfile.TemporaryDirectory(prefix="attnserve-", ignore_cleanup_errors=True) as folder:
            check_scales(model.graph)
            read = openvino.Core().read_model(serialized(model, Path(folder)))
            value = read.get_results()[names.index(output)].input_value(0)
            inputs = read.get_parameters()
            if is_repeated:
                ids = next(one for one in inputs if "input_ids" in one.output(0).get_names())
                width = operators.gather(
                    operators.shape_of(value), np.array([1]), np.array(0, np.int64)
                )
                shape = operators.concat([operators.shape_of(ids), width], 0)
                row = operators.unsqueeze(value, np.array(1, np.int64))
                value = operators.broadcast(row, shape).output(0)
            value.set_names({name})
            graph = openvino.Model([operators.result(value)], inputs, "attnserve")
            openvino.save_model(graph, path, compress_to_fp16=False)
    except Exception as error:  # RuntimeError for everything
        raise InvalidModel(
            f"{path.name}: OpenVINO refuses the graph: {describe_error(error)}",
            "write the model without `openvino`, for ONNX Runtime",
            code="session.graph_refused",
        ) from error
