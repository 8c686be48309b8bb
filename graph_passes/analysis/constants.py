"""Constant values: initializers, Constant nodes, and operators applied to them.

Exporters wrap weights in Transpose, Cast, DequantizeLinear and similar operators. Such values are
constants too. Their elements are computed on request only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.evaluation import MAX_ELEMENTS, evaluate
from graph_passes.analysis.operator_sets import operators
from graph_passes.errors import InvalidModel

__all__ = [
    "FLOATS",
    "constant_array",
    "constant_number",
    "constant_shape",
    "constant_tensor",
    "constant_type",
    "is_constant",
    "is_dequantized",
    "origin",
    "readers",
]

FLOATS = frozenset({ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
"""Single precision and the half precisions, in which transformers are run."""

WRAPPERS = operators(
    "Identity Cast CastLike Transpose Reshape Squeeze Unsqueeze Flatten Slice Split Concat Gather"
    " Where QuantizeLinear DequantizeLinear Neg Add Sub Mul Div Sqrt Reciprocal MatMul"
)
"""Operators that are folded if all inputs are constant; their output is not much larger."""

DEPTH = 8
"""Maximum number of nested wrapper operators around a weight."""


def origin(value: ir.Value) -> ir.Value:
    """The value before all Identity nodes, through which exporters share weights of layers."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0]:
        value = node.inputs[0]
    return value


def readers(value: ir.Value) -> Iterator[tuple[ir.Node, int]]:
    """Yield each node that combines a constant with activations, and the index of that input.

    The input may be another constant, which is computed from ``value``.
    """
    for node, index in value.uses():
        if all(map(is_constant, node.outputs)):
            for output in node.outputs:
                yield from readers(output)
        else:
            yield node, index


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or Constant node; None if it is sparse or not constant."""
    value = origin(value)
    node = value.producer()
    if node is not None and node.op_type == "Constant" and not node.domain:
        attribute = node.attributes.get("value")
        if attribute is not None and attribute.type == ir.AttributeType.TENSOR:
            return attribute.value  # ten times faster than the protocol check below
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError:  # a sparse constant
        return None


def is_constant(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """Whether the value does not depend on the graph's inputs."""
    if value is None:
        return False
    pending = {value}
    for _ in range(DEPTH + 1):
        wrapped = [value for value in pending if constant_tensor(value) is None]
        nodes = [value.producer() for value in wrapped]
        pending = set[ir.Value]()
        for node in nodes:
            if node is None or node.domain or node.op_type not in WRAPPERS:
                return False
            operands = [operand for operand in _read(node) if operand is not None]
            if not operands:
                return False
            pending.update(operands)
        if not pending:
            return True
    return False


def is_dequantized(value: ir.Value | None) -> bool:
    """Whether a constant is computed by DequantizeLinear."""
    node = None if value is None else value.producer()
    if node is None:
        return False
    return node.op_type == "DequantizeLinear" or any(map(is_dequantized, node.inputs))


def constant_array(value: ir.Value) -> np.ndarray:
    """Load the elements of a constant value; half precision is converted to single."""
    array = _elements(value)
    keep = array.dtype == np.float64 or array.dtype.kind in "iub"
    return array if keep else array.astype(np.float32)


def constant_number(value: ir.Value | None) -> float | None:
    """The element of a constant with a single element; None for other values."""
    if not is_constant(value) or math.prod(constant_shape(value)) != 1:
        return None
    return float(constant_array(value).reshape(()))


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


def _elements(value: ir.Value) -> np.ndarray:
    """The elements of a constant value in its own type."""
    tensor = constant_tensor(value)
    if tensor is not None:
        return tensor.numpy()
    assert is_constant(value), f"{value.name} is not a constant"
    sizes = {id(tensor): tensor.size for tensor in _leaves(value, set())}
    return _computed(value, max(MAX_ELEMENTS, sum(sizes.values())), {})


def _leaves(value: ir.Value, seen: set[ir.Value]) -> Iterator[ir.TensorProtocol]:
    """The tensors from which a constant value is computed."""
    seen.add(value)
    tensor = constant_tensor(value)
    node = value.producer()
    if tensor is not None:
        yield tensor
    elif node is not None:
        for operand in _read(node):
            if operand is not None and operand not in seen:
                yield from _leaves(operand, seen)


def _computed(value: ir.Value, limit: int, arrays: dict[ir.Value, np.ndarray]) -> np.ndarray:
    """Compute a constant value from the tensors above it.

    Args:
        limit: Maximum number of elements of the output of each node.
        arrays: The elements of values that are computed already; the function adds further ones.

    Raises:
        InvalidModel: A node cannot be computed.
    """
    if value in arrays:
        return arrays[value]
    tensor = constant_tensor(value)
    node = value.producer()
    if tensor is not None or node is None:
        assert tensor is not None
        return tensor.numpy()
    inputs = [
        None if operand is None else _computed(operand, limit, arrays) for operand in _read(node)
    ]
    try:
        arrays[value] = _apply(node, inputs, limit)[value.index() or 0]
    except InvalidModel:
        raise
    except Exception as error:  # onnx and numpy raise various types for an invalid node
        raise InvalidModel(
            f"{node.op_type} {node.name!r} of constants cannot be computed: {str(error)[:300]}",
            "check the model with onnx.checker.check_model, or export it again",
            code="evaluation.failed",
        ) from error
    return arrays[value]


def _apply(node: ir.Node, inputs: Sequence[np.ndarray | None], limit: int) -> Sequence[np.ndarray]:
    if node.op_type == "CastLike" and inputs[0] is not None:
        return [inputs[0]]
    if node.op_type == "DequantizeLinear":
        return [_dequantized(node, [array for array in inputs if array is not None])]
    return evaluate(node, inputs, _opsets(node), limit)


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
        of_block = np.arange(quantized.shape[axis]) // size
        scale, zero = scale.take(of_block, axis), zero.take(of_block, axis)
    scale, zero = (np.broadcast_to(array, quantized.shape) for array in (scale, zero))
    return (quantized.astype(np.float32) - zero.astype(np.float32)) * scale.astype(np.float32)


def _read(node: ir.Node) -> Sequence[ir.Value | None]:
    """The inputs that determine the elements of the output: the first of CastLike, else all."""
    return node.inputs[:1] if node.op_type == "CastLike" else node.inputs


def _opsets(node: ir.Node) -> Mapping[str, int]:
    """The opset imports of the graph that owns the node.

    Bodies of If and Loop have no imports; the attribute ``axes`` then identifies opsets before 13.
    """
    if node.graph is not None and node.graph.opset_imports:
        return {"": 1, **node.graph.opset_imports}
    return {"": 12 if "axes" in node.attributes else 21}
