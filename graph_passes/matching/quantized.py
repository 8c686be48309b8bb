"""Match products of tokens with quantized weights.

Bytes, scales and zero points of such a product are not read. The match is its floating-point
output: the last value before the layout of the heads, or before an activation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import is_constant, is_dequantized
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Linear
from graph_passes.matching import reaches
from graph_passes.matching.products import linear

__all__ = ["quantized_linear", "quantized_reader"]

OPERANDS = {
    ("", "MatMul"): (0, 1),
    ("", "Gemm"): (0, 1),
    ("", "MatMulInteger"): (0, 1),
    ("", "QLinearMatMul"): (0, 3),
    (MICROSOFT, "DynamicQuantizeMatMul"): (0, 1),
    (MICROSOFT, "FusedMatMul"): (0, 1),
    (MICROSOFT, "MatMulBnb4"): (0, 1),
    (MICROSOFT, "MatMulIntegerToFloat"): (0, 1),
    (MICROSOFT, "MatMulNBits"): (0, 1),
    (MICROSOFT, "QGemm"): (0, 3),
}
"""The input positions of the tokens and of the weight, by domain and operator."""

OF_FLOATS = frozenset({"MatMul", "Gemm", "FusedMatMul"})
"""Products whose weight is quantized only if a DequantizeLinear computes it."""

CONVERSIONS = frozenset(
    {"Cast", "DequantizeLinear", "DynamicQuantizeLinear", "Identity", "QuantizeLinear"}
)


def quantized_linear(value: ir.Value, info: ShapeInfo) -> Linear | None:
    """Match ``value`` as the output of a product with a quantized weight; None if it is not one.

    Scales, zero points and vectors that are multiplied or added are part of the product. A scalar
    factor of a product in floating point is not: it may be the scale of the attention.
    """
    tensor = info.known.get(value)
    if tensor is None or not tensor.dtype.is_floating_point() or len(tensor.shape) < 2:
        return None
    node = _product(value, info, reaches.QUANTIZED)
    return None if node is None else _linear(node, value, info)


def quantized_reader(value: ir.Value, info: ShapeInfo) -> tuple[ir.Node, ir.Value] | None:
    """A product with a quantized weight whose tokens are ``value``, and the weight, if any."""
    pending = [(value, reaches.QUANTIZED)]
    seen = {value}
    while pending:
        read, reach = pending.pop()
        for user, _ in read.uses():
            if (weight := _weight(user)) is not None and value in _operand_sources(user, info):
                return user, weight
            if reach and (user.op_type in CONVERSIONS or user.op_type in ("Mul", "Div")):
                new = [output for output in user.outputs if output not in seen]
                seen.update(new)
                pending += [(output, reach - 1) for output in new]
    return None


def _linear(node: ir.Node, value: ir.Value, info: ShapeInfo) -> Linear | None:
    """The product of a node whose floating-point output is ``value``."""
    tokens = list(_operand_sources(node, info))[-1]
    weight = _weight(node)
    sizes = info.shape(tokens)
    shape = info.shape(value)
    if sizes is None or shape is None or math.prod(sizes[:-1]) != math.prod(shape[:-1]):
        return None
    assert weight is not None
    contracted: tuple[int, ...] = ()
    if node.op_type in OF_FLOATS:  # DequantizeLinear computes the weight
        float_product = linear(node, lambda value: info.shape(value) or ())
        if float_product is None or float_product.scale != 1.0:
            return None
        contracted = float_product.contracted
    return Linear(
        node=node,
        tokens=tokens,
        weight=weight,
        contracted=contracted,
        width=sizes[-1],
        columns=np.arange(shape[-1]),
        rows=np.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1),
        scale=1.0,
        product=value,
    )


def _weight(node: ir.Node) -> ir.Value | None:
    """The quantized weight of a product; None for other nodes."""
    places = OPERANDS.get((node.domain, node.op_type))
    if places is None or len(node.inputs) <= max(places):
        return None
    tokens, weight = (node.inputs[place] for place in places)
    if tokens is None or not is_constant(weight) or is_constant(tokens):
        return None
    return weight if node.op_type not in OF_FLOATS or is_dequantized(weight) else None


def _product(value: ir.Value, info: ShapeInfo, reach: int) -> ir.Node | None:
    """Find the product that computes ``value``, ignoring scales, zero points and a bias."""
    node = value.producer()
    if node is None or reach == 0 or is_constant(value):
        return None
    if _weight(node) is not None:
        return node
    if node.domain == MICROSOFT and node.op_type == "QLinearAdd":
        operands = [node.inputs[place] for place in (0, 3) if place < len(node.inputs)]
    elif node.op_type in CONVERSIONS:
        operands = [node.inputs[0]]
    elif node.op_type in ("Add", "Mul") and not node.domain:
        operands = [a for a, b in _pairs(node) if _spreads(a, b, value, info)]
    else:
        return None
    active = [operand for operand in operands if operand and not is_constant(operand)]
    return _product(active[0], info, reach - 1) if len(active) == 1 else None


def _spreads(a: ir.Value | None, b: ir.Value | None, value: ir.Value, info: ShapeInfo) -> bool:
    """Whether a product ``a`` keeps its shape when ``b``, a bias or a scale, is combined with it.

    A scale depends on the token or on the column, rotary angles on both.
    """
    mine = info.shape(a)
    other = info.shape(b)
    if mine is None or other is None or mine != info.shape(value):
        return False
    by_column = math.prod(other[:-1]) == 1
    by_token = math.prod(other[-1:]) == 1
    if not (by_column or by_token):
        return False
    node = value.producer()
    if node is not None and node.op_type == "Add":
        return is_constant(b) and by_column and not by_token
    return not (by_column and by_token and is_constant(b)) or _is_cast_from_integers(a, info)


def _is_cast_from_integers(value: ir.Value | None, info: ShapeInfo) -> bool:
    """Whether a value is a Cast of integers, such as the result of an integer product."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Cast" or node.inputs[0] is None:
        return False
    tensor = info.known.get(node.inputs[0])
    return tensor is not None and not tensor.dtype.is_floating_point()


def _operand_sources(product: ir.Node, info: ShapeInfo) -> Iterator[ir.Value]:
    """Yield the operand of a product, then the values before its quantization, up to the tokens."""
    value = product.inputs[OPERANDS[product.domain, product.op_type][0]]
    for _ in range(reaches.QUANTIZED):
        if value is None:
            return
        yield value
        node = value.producer()
        if node is None or not node.inputs:
            return
        if node.op_type in CONVERSIONS:
            inner = node.inputs[0]
            if node.op_type == "DequantizeLinear" and not _is_quantize(inner):
                return  # another operator, such as Gather, computes the bytes
            value = inner
        elif node.op_type in ("Div", "Mul") and not node.domain:
            # Divided by the largest value of its row, or smoothed by channel.
            pairs = _pairs(node) if node.op_type == "Mul" else _pairs(node)[:1]
            value = next((a for a, b in pairs if _rescales(a, b, value, info)), None)
        else:
            return


def _is_quantize(value: ir.Value | None) -> bool:
    """Whether a value is the output of QuantizeLinear."""
    node = None if value is None else value.producer()
    return node is not None and node.op_type == "QuantizeLinear"


def _rescales(a: ir.Value | None, b: ir.Value | None, value: ir.Value, info: ShapeInfo) -> bool:
    """Whether ``value`` is tokens ``a`` with a factor ``b`` by channel, or by token."""
    mine = info.shape(a)
    other = info.shape(b)
    if mine is None or other is None or mine != info.shape(value) or math.prod(mine) == 0:
        return False
    by_channel = is_constant(b) and other[-1:] == mine[-1:] and math.prod(other) == mine[-1]
    return by_channel or (not is_constant(b) and other[-1:] == (1,))


def _pairs(node: ir.Node) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """The two operands of a node, in both orders."""
    a, b = [*node.inputs, None, None][:2]
    return [(a, b), (b, a)]
