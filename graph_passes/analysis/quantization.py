"""Operators of quantized graphs."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["REWRITE_FIRST", "is_quantized"]

QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
                       "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                       "MatMulBnb4", "MatMulNBits", "GatherBlockQuantized", "ConvInteger",
                       "QGemm", "QAttention", "QEmbedLayerNormalization", "QMoE",
                       "DynamicQuantizeLSTM"})  # fmt: skip
"""Operators that read or write quantized values, besides those whose names start with QLinear."""

REWRITE_FIRST = "rewrite the float model, then quantize the result"


def is_quantized(node: ir.Node) -> bool:
    """Whether a node reads or writes quantized values."""
    return node.op_type in QUANTIZED or node.op_type.startswith("QLinear")
