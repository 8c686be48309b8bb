"""Change graphs that crash ONNX Runtime 1.31 on CPUs; a crash ends the process.

- ``com.microsoft.Attention`` without a bias gets a bias of zeros.
- A MatMul with a transposed float16 operand, such as Transpose <perm = [1, 0, 2]> of
  ``torch.nn.MultiheadAttention``, gets a Reshape to the same shape between both.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from attnserve.runtime.onnx_reader import read_in_place
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.errors import InvalidModel

__all__ = ["crashes", "part_transposes", "safe_copy", "safe_graph"]


def safe_graph(path: Path) -> ir.Model | None:
    """The changed graph of a file; None if the file needs no change, or cannot be read."""
    try:
        proto = read_in_place(path)
        fused = any(imported.domain == MICROSOFT for imported in proto.opset_import)
        types = {weight.data_type for weight in proto.graph.initializer}
        half = onnx.TensorProto.FLOAT16 in types
        if not (fused or half):
            return None
        model = ir.from_proto(proto)
    except Exception:  # ONNX Runtime reports the error
        return None
    ir.external_data.set_base_dir(model.graph, path.parent)
    if not crashes(model):
        return None
    _change(model)
    return model


def crashes(model: ir.Model) -> bool:
    """Whether a graph has to be changed."""
    return bool(_without_bias(model)) or any(True for _ in _fused_transposes(model))


def safe_copy(model: ir.Model) -> ir.Model:
    """Return a changed copy of a model.

    Raises:
        InvalidModel: An Attention operator has neither a bias nor a constant weight.
    """
    model = model.clone()
    _change(model)
    return model


def _change(model: ir.Model) -> None:
    """Change a graph in place, so that ONNX Runtime can load it."""
    _give_biases(model)
    part_transposes(model)


def _without_bias(model: ir.Model) -> list[ir.Node]:
    """The com.microsoft Attention nodes without a bias."""
    return [
        node
        for node in model.graph.all_nodes()
        if (node.domain, node.op_type) == (MICROSOFT, "Attention")
        and (len(node.inputs) < 3 or node.inputs[2] is None)
    ]


def _give_biases(model: ir.Model) -> None:
    """Give a bias of zeros to each Attention without one.

    Raises:
        InvalidModel: The weight of an Attention is not constant.
    """
    for index, node in enumerate(_without_bias(model)):
        weight = node.inputs[1].const_value if len(node.inputs) > 1 and node.inputs[1] else None
        if weight is None:
            raise InvalidModel(
                f"{node.name or node.op_type}: com.microsoft Attention without a bias crashes "
                "ONNX Runtime, and its weight is not constant",
                "add a bias of zeros to the operator",
                code="session.attention_bias",
            )
        zeros = np.zeros(weight.shape.numpy()[-1], weight.dtype.numpy())
        bias = ir.val(f"attnserve/bias_{index}", const_value=ir.tensor(zeros))
        model.graph.register_initializer(bias)
        node.resize_inputs(max(3, len(node.inputs)))
        node.replace_input_with(2, bias)


def part_transposes(model: ir.Model) -> None:
    """Put a Reshape to the same shape between Transpose and MatMul, in place."""
    for node, place in [*_fused_transposes(model)]:
        value = node.inputs[place]
        graph = node.graph
        assert value is not None and graph is not None
        same = ir.node("Reshape", [value, _same_shape(model, len(_permutation(value) or ()))])
        result = same.outputs[0]
        result.name = same.name = f"{node.outputs[0].name}/operand_{place}"
        result.type = value.type
        result.shape = value.shape
        graph.insert_before(node, same)
        node.replace_input_with(place, result)


def _same_shape(model: ir.Model, rank: int) -> ir.Value:
    """The shape [0, ..., 0, -1], which keeps all axes; an earlier conversion may have added it."""
    name = f"attnserve/same_shape_{rank}"
    if name not in model.graph.initializers:
        sizes = ir.tensor(np.array([0] * (rank - 1) + [-1], np.int64))
        model.graph.register_initializer(ir.val(name, const_value=sizes))
    return model.graph.initializers[name]


def _fused_transposes(model: ir.Model) -> Iterator[tuple[ir.Node, int]]:
    """Yield each MatMul and the index of an operand whose fusion with a Transpose crashes."""
    for node in model.graph.all_nodes():
        if node.op_type != "MatMul" or node.domain:
            continue
        if not any(_is_half(value) for value in node.inputs):
            continue
        for place, value in enumerate(node.inputs):
            order = _permutation(value)
            if order is not None and 2 < len(order) < 5 and order[0] == 1:
                yield node, place


def _permutation(value: ir.Value | None) -> list[int] | None:
    """The permutation of a Transpose that computes a value, if any."""
    producer = None if value is None else value.producer()
    if producer is None or producer.op_type != "Transpose" or producer.domain:
        return None
    order = producer.attributes.get_ints("perm", None)
    return None if order is None else [*order]


def _is_half(value: ir.Value | None) -> bool:
    if value is None:
        return False
    tensor = value.const_value
    return (value.dtype if tensor is None else tensor.dtype) == ir.DataType.FLOAT16
