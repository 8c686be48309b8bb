"""Sets of operators that several modules use, by name."""

from __future__ import annotations

import onnx_ir as ir

__all__ = [
    "COPIES",
    "DATA_DEPENDENT",
    "FLATTENS",
    "GELUS",
    "LAYOUT",
    "MATRIX_PRODUCTS",
    "MICROSOFT",
    "RESHAPES",
    "REWRITE_FIRST",
    "SELECTIONS",
    "is_quantized",
    "operators",
]


def operators(names: str) -> frozenset[str]:
    """The set of some operators, from their names between spaces."""
    return frozenset(names.split())


MICROSOFT = "com.microsoft"
"""The domain of the operators of ONNX Runtime that are not in the ONNX standard."""

RESHAPES = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze"})
FLATTENS = RESHAPES | {"Identity"}
"""Operators that keep the elements of their first input and their order."""

COPIES = frozenset({"Identity", "Cast", "CastLike", "Dropout"})
"""Operators that keep the elements and shape of their input, at inference and up to rounding."""

SELECTIONS = frozenset({"Gather", "Slice", "Split"})
LAYOUT = RESHAPES | COPIES | SELECTIONS | {"Transpose", "GatherND", "Expand", "Tile"}
"""Operators that select, move or repeat elements of their first input."""

DATA_DEPENDENT = frozenset({"Compress", "NonZero", "Unique"})
"""Operators with an output whose shape depends on data and is bounded by the input."""

GELUS = frozenset({"Gelu", "FastGelu", "BiasGelu", "QuickGelu"})
"""Activations of com.microsoft."""

MATRIX_PRODUCTS = frozenset(
    {"DynamicQuantizeMatMul", "FusedGemm", "FusedMatMul", "MatMulIntegerToFloat", "TransposeMatMul"}
)
"""Products of com.microsoft whose first two inputs are the matrices."""

QUANTIZED_OPERATORS = operators(
    "QuantizeLinear DequantizeLinear DynamicQuantizeLinear MatMulInteger MatMulIntegerToFloat"
    " DynamicQuantizeMatMul MatMulBnb4 MatMulNBits GatherBlockQuantized ConvInteger QGemm"
    " QAttention QEmbedLayerNormalization QMoE DynamicQuantizeLSTM"
)
"""Operators on quantized values, in addition to operators whose names start with QLinear."""

REWRITE_FIRST = "rewrite the float model, then quantize the result"


def is_quantized(node: ir.Node) -> bool:
    """Whether a node reads or writes quantized values."""
    return node.op_type in QUANTIZED_OPERATORS or node.op_type.startswith("QLinear")
