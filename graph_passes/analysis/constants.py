"""Constant values: initializers, Constant nodes, and operators applied to them.

Exporters wrap weights in Transpose, Cast, DequantizeLinear and similar operators. Such values are
constants too. Their elements are computed on request only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

__all__ = [
    "constant_array",
    "constant_shape",
    "constant_tensor",
    "constant_type",
    "evaluate",
    "is_constant",
    "origin",
]

WRAPPERS = frozenset({"Identity", "Cast", "CastLike", "Transpose", "Reshape", "Squeeze",
                      "Unsqueeze", "Flatten", "Slice", "Split", "Concat", "Gather", "Where",
                      "QuantizeLinear", "DequantizeLinear", "Neg", "Add", "Sub", "Mul", "Div",
                      "Sqrt", "Reciprocal", "MatMul"})  # fmt: skip
"""Operators that are folded if all inputs are constant; their output is not much larger."""

DEPTH = 8
"""Maximum number of nested wrapper operators around a weight."""


def origin(value: ir.Value) -> ir.Value:
    """Skip Identity nodes, through which exporters share the weights of repeated layers."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0]:
        value = node.inputs[0]
    return value


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or Constant node; None if it is sparse or not constant."""
    value = origin(value)
    node = value.producer()
    if node is not None and node.op_type == "Constant" and not node.domain:
        given = node.attributes.get("value")
        if given is not None and given.type == ir.AttributeType.TENSOR:
            return given.value  # ten times faster than the protocol check below
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError:  # a sparse constant
        return None


def is_constant(value: ir.Value | None, depth: int = DEPTH) -> TypeGuard[ir.Value]:
    """Whether the value does not depend on the graph's inputs."""
    if value is None:
        return False
    if constant_tensor(value) is not None:
        return True
    node = value.producer()
    if node is None or node.domain or node.op_type not in WRAPPERS or depth == 0:
        return False
    given = [operand for operand in _read(node) if operand is not None]
    return bool(given) and all(is_constant(operand, depth - 1) for operand in given)


def constant_array(value: ir.Value) -> np.ndarray:
    """Load the elements of a constant value; half precision is converted to single."""
    array = _elements(value)
    keep = array.dtype == np.float64 or array.dtype.kind in "iub"
    return array if keep else array.astype(np.float32)


def constant_type(value: ir.Value) -> ir.DataType:
    """The element type of a constant value."""
    tensor = constant_tensor(value)
    node = value.producer()
    if tensor is not None or node is None:
        return ir.DataType.UNDEFINED if tensor is None else tensor.dtype
    if node.op_type == "Cast":
        return ir.DataType(node.attributes.get_int("to", 0))
    if node.op_type == "CastLike" and (like := node.inputs[1]) is not None and like.dtype:
        return like.dtype
    typed = node.inputs[1 if node.op_type in ("DequantizeLinear", "Where") else 0]
    return ir.DataType.UNDEFINED if typed is None else constant_type(typed)


def constant_shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of a constant value; elements are loaded only if operators wrap the tensor."""
    tensor = constant_tensor(value)
    return tuple(_elements(value).shape if tensor is None else tensor.shape.numpy())


def evaluate(
    node: ir.Node, inputs: Sequence[np.ndarray | None], opsets: Mapping[str, int]
) -> list[np.ndarray]:
    """Run one node on the ONNX reference evaluator."""
    proto = ir.serde.serialize_node(node)
    proto.input[:] = [f"i{i}" if x is not None else "" for i, x in enumerate(inputs)]
    proto.output[:] = [f"o{i}" for i in range(len(node.outputs))]
    feeds = {f"i{i}": x for i, x in enumerate(inputs) if x is not None}
    graph = onnx.GraphProto(node=[proto], name="node")
    graph.input.extend(onnx.ValueInfoProto(name=name) for name in feeds)
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in proto.output)
    # The evaluator assumes the newest opset for a node without a model.
    imports = [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()]
    model = onnx.ModelProto(graph=graph, opset_import=imports, ir_version=10)
    results: Any = ReferenceEvaluator(model).run(None, feeds)
    return [np.asarray(result) for result in results]


def _elements(value: ir.Value) -> np.ndarray:
    tensor = constant_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    node = value.producer()
    assert node is not None and is_constant(value), f"{value.name} is not a constant"
    inputs = [None if operand is None else _elements(operand) for operand in _read(node)]
    if node.op_type == "CastLike" and inputs[0] is not None:
        return inputs[0]
    if node.op_type == "DequantizeLinear":
        return _dequantized(node, [array for array in inputs if array is not None])
    return evaluate(node, inputs, _opsets(node))[value.index() or 0]


def _dequantized(node: ir.Node, inputs: Sequence[np.ndarray]) -> np.ndarray:
    """Compute (x - zero point) * scale per tensor, per axis or per block.

    The reference evaluator supports the operator from opset 19 on only.
    """
    quantized, scale = inputs[:2]
    zero = inputs[2] if len(inputs) > 2 else np.zeros_like(scale)
    axis = node.attributes.get_int("axis", 1)
    if scale.ndim == 1 and scale.size > 1:
        spread = [1] * quantized.ndim
        spread[axis] = -1
        scale, zero = scale.reshape(spread), zero.reshape(spread)
    elif scale.ndim == quantized.ndim and (size := node.attributes.get_int("block_size", 0)):
        count = quantized.shape[axis]
        scale = scale.repeat(size, axis).take(range(count), axis)
        zero = zero.repeat(size, axis).take(range(count), axis)
    return (quantized.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)


def _read(node: ir.Node) -> Sequence[ir.Value | None]:
    """The inputs that determine the elements: all, except for CastLike, where it is the first."""
    return node.inputs[:1] if node.op_type == "CastLike" else node.inputs


def _opsets(node: ir.Node) -> Mapping[str, int]:
    """The opset imports of the graph that owns the node.

    Bodies of If and Loop have none; the attribute ``axes`` then identifies opsets before 13.
    """
    if node.graph is not None and node.graph.opset_imports:
        return {"": 1, **node.graph.opset_imports}
    return {"": 12 if "axes" in node.attributes else 21}
