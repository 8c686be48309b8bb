"""Change graphs that OpenVINO has read: indices are observed, and no run returns old outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

__all__ = ["RUN", "Table", "check_scales", "observe_indices", "remove_nan_tests"]

RUN = "attnserve_run"
"""Input with the number of a run, which is returned after the outputs. If the sizes of the inputs
do not fit together, OpenVINO may return the outputs of the previous run without an exception."""


@dataclass(frozen=True)
class Table:
    """A table from which a node reads rows at indices that the inputs determine.

    Attributes:
        name: The name of the node.
        rows: The number of rows of the table.
    """

    name: str
    rows: int


def check_scales(graph: ir.Graph) -> None:
    """Refuse com.microsoft Attention with another scale than the default, which OpenVINO uses."""
    for node in graph.all_nodes():
        if (node.domain, node.op_type) != ("com.microsoft", "Attention"):
            continue
        scale = node.attributes.get_float("scale", 0.0)
        heads = node.attributes.get_int("num_heads", 1)
        sizes = node.attributes.get_ints("qkv_hidden_sizes", ())
        width = sizes[0] if sizes else _last_size(node.inputs[1]) // 3
        if scale and width and not math.isclose(scale, (width / heads) ** -0.5, rel_tol=1e-4):
            raise ValueError(f"it would compute {node.name} with another scale than {scale:g}")


def _last_size(value: ir.Value | None) -> int:
    """The size of the last axis; 0 if it is unknown."""
    size = None if value is None or not value.shape else value.shape[-1]
    return size if isinstance(size, int) else 0


def remove_nan_tests(model: Any) -> None:
    """Remove the tests for NaN behind attention whose mask is finite.

    The ONNX operator returns 0 for a query whose keys are all masked by -inf. Masks of fused models
    are finite (``graph_passes.emit.fused_attention``).
    """
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Select":
            continue
        condition, _, value = (node.input_value(place) for place in range(3))
        if condition.get_node().get_type_name() == "IsNaN" and _has_finite_mask(value.get_node()):
            for reader in node.output(0).get_target_inputs():
                reader.replace_source_output(value)


def _has_finite_mask(node: Any) -> bool:
    """Whether a node is attention without a mask, or with one that has a finite lower bound."""
    if node.get_type_name() != "ScaledDotProductAttention":
        return False
    if node.get_input_size() < 4:
        return True
    mask = node.input_value(3).get_node()
    is_bounded = mask.get_type_name() == "Maximum"
    bounds = [mask, *(mask.input_value(place).get_node() for place in range(2) if is_bounded)]
    return any(
        bound.get_type_name() == "Constant" and bool(np.isfinite(bound.get_data()).all())
        for bound in bounds
    )


def observe_indices(model: Any) -> list[Table]:
    """Add the least and the greatest index of each table read to the outputs of a model."""
    from openvino import opset13 as operators

    tables: list[Table] = []
    results = [operators.result(_run_number(model))]
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Gather":
            continue
        data, indices, axis = (node.input_value(position) for position in range(3))
        kinds = [value.get_node().get_type_name() for value in (axis, indices)]
        if kinds[0] != "Constant" or kinds[1] == "Constant":
            continue
        rank = data.partial_shape.rank
        place = int(axis.get_node().get_data())
        length = data.partial_shape[place] if rank.is_static else None
        if length is None or not length.is_static:
            continue
        tables.append(Table(node.get_friendly_name(), length.get_length()))
        flat = operators.reshape(indices, np.array([-1], np.int64), special_zero=False)
        for reduce in (operators.reduce_min, operators.reduce_max):
            index = reduce(flat, np.array(0, np.int64), keep_dims=False)
            results.append(operators.result(index))
        kind = indices.element_type.to_dtype().type
        inside = operators.maximum(indices, np.array(-tables[-1].rows, kind))
        inside = operators.minimum(inside, np.array(tables[-1].rows - 1, kind))
        node.input(1).replace_source_output(inside.output(0))
    model.add_results(results)
    return tables


def _run_number(model: Any) -> Any:
    """Add the input ``RUN``; return its value, computed after all outputs of the model."""
    from openvino import opset13 as operators

    number = operators.parameter([], np.int64, name=RUN)
    number.output(0).set_names({RUN})
    model.add_parameters([number])
    shapes = [operators.shape_of(result.input_value(0)) for result in model.get_results()]
    size = operators.reduce_sum(operators.concat(shapes, 0), np.array([0], np.int64))
    return operators.minimum(number, operators.add(number, size))
