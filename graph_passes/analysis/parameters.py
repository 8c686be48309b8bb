"""Count the parameters of a graph: the elements of its weights, including quantized ones.

Weights are floating-point constants, and the integers that an operator multiplies, gathers or
dequantizes. Two 4-bit weights in one byte are two parameters. A weight that several nodes read
counts once. Scales, zero points, masks and indices are not parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import onnx_ir as ir

from graph_passes.analysis.constants import constant_tensor
from graph_passes.analysis.operator_sets import operators

__all__ = ["parameter_bytes", "parameters"]

WEIGHT_INPUTS: Mapping[str, tuple[int, ...]] = {
    "ConvInteger": (0, 1),
    "DequantizeLinear": (0,),
    "DynamicQuantizeLSTM": (1, 2),
    "DynamicQuantizeMatMul": (1,),
    "GatherBlockQuantized": (0,),
    "MatMulBnb4": (1,),
    "MatMulInteger": (0, 1),
    "MatMulIntegerToFloat": (0, 1),
    "MatMulNBits": (1,),
    "QAttention": (1,),
    "QEmbedLayerNormalization": (2, 3, 4, 5, 6),
    "QGemm": (0, 3, 6),
    "QLinearAdd": (0, 3),
    "QLinearConv": (0, 3, 8),
    "QLinearMatMul": (0, 3),
    "QLinearMul": (0, 3),
    "QMoE": (2, 5, 8),
}
"""Inputs of operators that hold quantized weights if they are constant."""

FLOAT_INPUTS: Mapping[str, tuple[int, ...]] = {
    "DynamicQuantizeLSTM": (3, 5, 6, 7),
    "DynamicQuantizeMatMul": (4,),
    "MatMulIntegerToFloat": (6,),
    "MatMulNBits": (5,),
    "QAttention": (2,),
    "QMoE": (4, 7, 10),
    "QuantizeLinear": (0,),
}
"""Floating-point inputs of operators on quantized values that are not scales, such as biases."""

MOVES = operators("Concat Flatten Gather Identity Reshape Slice Split Squeeze Transpose Unsqueeze")
"""Operators whose output holds elements of their first input, or of all inputs (Concat)."""

MATRIX_SIZES = frozenset({"MatMulBnb4", "MatMulNBits"})
"""Operators with weights of K rows and N columns, stored in another shape."""


def parameters(model: ir.Model) -> int:
    """Number of elements of weights; shared ones count once."""
    quantized = _quantized(model)
    floats = [t for t in _tensors(model) if t.dtype.is_floating_point() and id(t) not in quantized]
    scales = _scales(model) if quantized or _quantizes(model) else set[int]()
    return sum(quantized.values()) + sum(t.size for t in floats if id(t) not in scales)


def parameter_bytes(model: ir.Model) -> int:
    """Size in bytes of all initializers and weights in Constant nodes; shared ones count once."""
    return sum(tensor.nbytes for tensor in _tensors(model))


def _tensors(model: ir.Model) -> list[ir.TensorProtocol]:
    """Every initializer once, in all graphs, and the constants of more than one element."""
    tensors_by_id = {
        id(tensor): tensor for graph in model.graphs() for tensor in _initializers(graph)
    }
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and not node.domain:
            tensor = constant_tensor(node.outputs[0])
            is_weight = tensor is not None and tensor.size > 1 and tensor.dtype != ir.DataType.INT64
            if tensor is not None and is_weight:
                tensors_by_id[id(tensor)] = tensor
    return list(tensors_by_id.values())


READERS = frozenset({"Conv", "ConvTranspose", "Einsum", "FusedMatMul", "Gather", "Gemm", "MatMul"})
"""Operators that read weights."""

SCALING_OPERATORS = frozenset(
    {"Cast", "Div", "Identity", "Mul", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze"}
)
"""Operators between quantized weights and their readers, if weights are dequantized by hand."""


def _initializers(graph: ir.Graph | ir.Function) -> Iterator[ir.TensorProtocol]:
    values = graph.initializers.values() if isinstance(graph, ir.Graph) else ()
    return (value.const_value for value in values if value.const_value is not None)


def _quantized(model: ir.Model) -> dict[int, int]:
    """The number of elements of each quantized weight, by the ``id`` of its tensor."""
    elements_by_id: dict[int, int] = {}
    for node in model.graph.all_nodes():
        for place in _weight_places(node):
            for tensor in _sources(node, place):
                elements_by_id[id(tensor)] = _elements(node, tensor)
    return elements_by_id


def _weight_places(node: ir.Node) -> tuple[int, ...]:
    """The inputs of a node that hold quantized weights if they are constant."""
    if node.op_type == "Cast" and not node.domain:  # dequantized by hand: (Cast(x) - zero) * scale
        to = ir.DataType(node.attributes.get_int("to", ir.DataType.UNDEFINED))
        return (0,) if to.is_floating_point() and _is_multiplied(node.outputs[0]) else ()
    return WEIGHT_INPUTS.get(node.op_type, ())


def _is_multiplied(value: ir.Value) -> bool:
    """Whether a product or a table lookup reads a value, also scaled or moved; masks are added."""
    pending = [value]
    seen = {value}
    while pending:
        for node, _ in pending.pop().uses():
            if node.op_type in READERS:
                return True
            if node.op_type in SCALING_OPERATORS:
                new = [output for output in node.outputs if output not in seen]
                seen.update(new)
                pending += new
    return False


def _elements(node: ir.Node, tensor: ir.TensorProtocol) -> int:
    """The number of elements of a quantized weight; one byte may hold several elements."""
    if node.op_type in MATRIX_SIZES:
        return node.attributes.get_int("K", 0) * node.attributes.get_int("N", 0)
    bits = 8
    if node.op_type == "GatherBlockQuantized":
        bits = node.attributes.get_int("bits", 4)
    elif node.op_type == "QMoE":
        bits = node.attributes.get_int("expert_weight_bits", 4)
    return tensor.size * 8 // bits if tensor.dtype == ir.DataType.UINT8 else tensor.size


def _sources(node: ir.Node, place: int) -> Iterator[ir.TensorProtocol]:
    """The constant integers that reach an input, also through operators that move elements."""
    pending = [node.inputs[place]] if place < len(node.inputs) else []
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        producer = value.producer()
        tensor = constant_tensor(value)
        if tensor is not None:
            is_vector = node.op_type == "Cast" and len(tensor.shape) < 2
            if _is_quantized(tensor.dtype, node) and not is_vector:
                yield tensor
        elif producer is not None and producer.op_type in MOVES:
            pending += producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]


def _is_quantized(dtype: ir.DataType, node: ir.Node) -> bool:
    """Whether a constant of this type can be a weight of this operator."""
    if dtype.is_floating_point():
        return dtype.bitwidth <= 8
    widest = 8 if node.op_type == "Cast" else 32  # biases are 32-bit integers
    return dtype.is_integer() and dtype.bitwidth <= widest


def _quantizes(model: ir.Model) -> bool:
    """Whether a graph quantizes a value by QuantizeLinear."""
    nodes = model.graph.all_nodes()
    return any(node.op_type == "QuantizeLinear" for node in nodes)


def _scales(model: ir.Model) -> set[int]:
    """The ``id`` of floating-point constants that are only read as scales and zero points."""
    scales: set[int] = set()
    others: set[int] = set()
    for node in model.graph.all_nodes():
        for place, value in enumerate(node.inputs):
            tensor = None if value is None else constant_tensor(value)
            if tensor is not None and tensor.dtype.is_floating_point():
                (scales if _is_scale(node, place) else others).add(id(tensor))
    return scales - others


def _is_scale(node: ir.Node, place: int) -> bool:
    """Whether a node reads its input at this place as a scale or a zero point."""
    if node.op_type in ("Identity", *MOVES):  # the readers of the output decide
        users = [use for output in node.outputs for use in output.uses()]
        return bool(users) and all(_is_scale(user, at) for user, at in users)
    if node.op_type in WEIGHT_INPUTS or node.op_type.startswith("QLinear"):
        return place not in (
            *WEIGHT_INPUTS.get(node.op_type, ()),
            *FLOAT_INPUTS.get(node.op_type, ()),
        )
    if node.op_type == "QuantizeLinear":
        return place not in FLOAT_INPUTS["QuantizeLinear"]
    return node.op_type in ("Mul", "Div", "Sub") and _scales_product(node, place)


def _scales_product(node: ir.Node, place: int) -> bool:
    """Whether a factor scales an integer product, or another scale of such a product."""
    other = node.inputs[1 - place] if len(node.inputs) == 2 else None
    producer = None if other is None else other.producer()
    while producer is not None and producer.op_type in ("Cast", "Sub", *MOVES):
        value = producer.inputs[0]
        if producer.op_type == "Cast" and value is not None and (tensor := constant_tensor(value)):
            return _is_quantized(tensor.dtype, producer)  # dequantized by hand
        producer = None if value is None else value.producer()
    return producer is not None and producer.op_type in (
        "ConvInteger",
        "DynamicQuantizeLinear",
        "MatMulInteger",
    )
