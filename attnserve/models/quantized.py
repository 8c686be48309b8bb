"""Describe a quantized model: its weights and activations, and its exactness on this CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnserve.runtime.machine import has_int8_dot_product
from graph_passes.analysis.constants import constant_array, constant_tensor, is_constant
from graph_passes.analysis.operator_sets import is_quantized, operators

__all__ = [
    "FACTORS",
    "Bits",
    "Int8Activations",
    "batch_invariant",
    "int8_activations",
    "int8_warning",
    "int8_weight_bits",
    "quantized_node",
    "rounds_activations",
]

Bits = Literal[7, 8]
Int8Activations = Literal["static", "per-row", "dynamic"]

LARGEST_7_BIT = 64
"""The largest absolute weight with which 16-bit sums of two products never saturate."""

INT8_PRODUCTS = operators(
    "MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul QAttention QGemm QLinearMatMul"
    " ConvInteger QLinearConv DynamicQuantizeLSTM"
)
"""Operators that multiply 8-bit activations by 8-bit weights."""

BYTES = (ir.DataType.INT8, ir.DataType.UINT8)
"""Types of 8-bit weights."""

FACTORS = frozenset({"MatMul", "Gemm", "Conv"})
"""Operators that ONNX Runtime runs in 8 bits if their inputs are dequantized."""

DYNAMIC = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
"""Operators that quantize an activation with one scale for all of its rows."""


def quantized_node(model: ir.Model) -> ir.Node | None:
    """The first node that reads or writes quantized values; None if there is none."""
    return next(filter(is_quantized, ir.traversal.RecursiveGraphIterator(model.graph)), None)


def batch_invariant(model: ir.Model) -> bool:
    """Whether the quantization of a row does not depend on the other rows of its batch.

    Operators that quantize with one scale for a whole tensor mix its rows, unless the tensor has
    only one.
    """
    graphs = [*model.graphs(), *(function.graph for function in model.functions.values())]
    return not any(
        node.op_type in DYNAMIC and not _is_single_row(node.inputs[0])
        for graph in graphs
        for node in graph
    )


def rounds_activations(model: ir.Model) -> bool:
    """Whether any activation is rounded to integers, also inside an operator.

    A floating-point error before it may move a value to the next integer.
    """
    rounding = {"QuantizeLinear", "MatMulNBits", *DYNAMIC}
    return any(
        node.op_type in rounding and not is_constant(node.inputs[0])
        for node in ir.traversal.RecursiveGraphIterator(model.graph)
    )


def _is_single_row(value: ir.Value | None) -> bool:
    shape = None if value is None else value.shape
    return shape is not None and all(size == 1 for size in shape[:-1])


def int8_activations(model: ir.Model) -> Int8Activations | None:
    """How the activations of int8 products are quantized; None without int8 products.

    "static" if all scales are constants, "per-row" if some are computed for each row, and "dynamic"
    if some are computed for the whole batch.
    """
    if int8_weight_bits(model) is None:
        return None
    if not batch_invariant(model):
        return "dynamic"
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    sources = [n.inputs[0] for n in nodes if n.op_type == "QuantizeLinear"]
    return "per-row" if any(map(_is_divided_by_peak, sources)) else "static"


def _is_divided_by_peak(value: ir.Value | None) -> bool:
    """Whether a value was divided by the largest value of its rows (``write_per_row``)."""
    for op_type, place in (("Div", 1), ("Max", 0), ("ReduceMax", 0), ("Abs", 0)):
        node = None if value is None else value.producer()
        if node is None or node.op_type != op_type:
            return False
        value = node.inputs[place]
    return True


def int8_weight_bits(model: ir.Model) -> Bits | None:
    """Number of bits of the weights that are multiplied by 8-bit activations.

    7 if all are signed and within -64..64 (other tools do not clamp 64 to 63), 8 if not, None
    without such weights.
    """
    bits: Bits | None = None
    for weights in _int8_weights(model):
        if weights.dtype == np.uint8 or _may_saturate(weights):
            return 8
        bits = 7
    return bits


def _may_saturate(weights: np.ndarray) -> bool:
    """Whether 16-bit sums of two products may saturate; the kernels of unsigned weights are exact.

    8-bit activations are unsigned.
    """
    if weights.dtype == np.uint8 or not weights.size:
        return False
    return max(-int(weights.min()), int(weights.max())) > LARGEST_7_BIT


def _int8_weights(model: ir.Model) -> Iterator[np.ndarray]:
    """The 8-bit weights of products with 8-bit activations."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not _multiplies_int8(node):
            continue
        for value in node.inputs:
            tensor = None if value is None else constant_tensor(value)
            if tensor is not None and tensor.dtype in BYTES and len(tensor.shape) > 1:
                assert value is not None
                yield constant_array(value)


def _multiplies_int8(node: ir.Node) -> bool:
    """Whether a node multiplies constants by 8-bit activations, or dequantizes such constants."""
    if node.op_type != "DequantizeLinear":
        return node.op_type in INT8_PRODUCTS
    # ONNX Runtime converts a product to QLinearMatMul if all its factors are dequantized.
    users = [user for user, _ in node.outputs[0].uses() if user.op_type in FACTORS]
    sources = [value.producer() for user in users for value in user.inputs[:1] if value is not None]
    return any(one is not None and one.op_type == "DequantizeLinear" for one in sources)


def int8_warning(model: ir.Model) -> str | None:
    """Return why int8 products of the model are inexact on this CPU; None if they are exact."""
    if has_int8_dot_product() or not any(map(_may_saturate, _int8_weights(model))):
        return None
    return (
        "int8 weights outside -64..64 saturate on this CPU, which has no VNNI, AMX or ARM dot "
        "product: results are inaccurate; quantize the float32 model with 7-bit weights "
        "(attnserve optimize --int8, or reduce_range=True in onnxruntime.quantization)"
    )
