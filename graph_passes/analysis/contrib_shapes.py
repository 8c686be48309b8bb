"""Shapes of the outputs of operators of ONNX Runtime that are not in the ONNX standard.

A rule raises IndexError or ValueError, or returns nothing, for inputs that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.operator_sets import GELUS, MATRIX_PRODUCTS, MICROSOFT

__all__ = ["COUNTS", "RULES", "SHAPE_PRESERVING", "Shapes", "gives_bytes", "matrix_shape"]

Shapes = Sequence[tuple[int, ...] | None]
"""The shapes of the inputs or outputs of a node; None if unknown or left out."""


def _like_first(shapes: Shapes, node: ir.Node) -> Shapes:
    """The first output has the shape of the first input."""
    return [shapes[0]]


def _skip_normalization(shapes: Shapes, node: ir.Node) -> Shapes:
    return [shapes[0], None, None, shapes[0]]


def _matrix_product(shapes: Shapes, node: ir.Node) -> Shapes:
    """The product of the first two inputs, which may be transposed."""
    if shapes[0] is None or shapes[1] is None or min(len(shapes[0]), len(shapes[1])) < 2:
        return []
    a, b = matrix_shape(shapes[0], node, "A"), matrix_shape(shapes[1], node, "B")
    return [(*np.broadcast_shapes(a[:-2], b[:-2]), a[-2], b[-1])]


def matrix_shape(
    shape: tuple[int, ...], node: ir.Node, operand: Literal["A", "B"]
) -> tuple[int, ...]:
    """The shape of an operand of a matrix product as it is multiplied, (..., rows, columns).

    FusedMatMul may first move the first axis before the last (``transBatchA``).
    """
    if node.attributes.get_int(f"transBatch{operand}", 0):
        shape = (*shape[1:-1], shape[0], shape[-1])
    if node.attributes.get_int(f"trans{operand}", 0):
        shape = (*shape[:-2], shape[-1], shape[-2])
    return shape


def _quantized_gemm(shapes: Shapes, node: ir.Node) -> Shapes:
    return _matrix_product([shapes[0], shapes[3]], node)


def _quantized_sum(shapes: Shapes, node: ir.Node) -> Shapes:
    """QLinearAdd and QLinearMul: the inputs are broadcast to each other."""
    a, b = shapes[0], shapes[3]
    return [] if a is None or b is None else [np.broadcast_shapes(a, b)]


def _matmul_n_bits(shapes: Shapes, node: ir.Node) -> Shapes:
    return [] if shapes[0] is None else [(*shapes[0][:-1], node.attributes.get_int("N", 0))]


def _embedding(shapes: Shapes, node: ir.Node) -> Shapes:
    """EmbedLayerNormalization: embeddings (B, S, D), the number of tokens (B,), and their sum."""
    ids, table = shapes[0], shapes[2]
    if ids is None or table is None:
        return []
    return [(*ids, table[-1]), (ids[0],), (*ids, table[-1])]


def _attention(shapes: Shapes, node: ir.Node) -> Shapes:
    """com.microsoft Attention: x (B, S, D), weight (D, H*K + H*K + H*V)."""
    x, weight = shapes[:2]
    heads = node.attributes.get_int("num_heads", 0)
    if x is None or weight is None or len(x) != 3 or not heads:
        return []
    sizes = node.attributes.get_ints("qkv_hidden_sizes", None) or [weight[-1] // 3] * 3
    past = shapes[4] if len(shapes) > 4 else None
    length = x[1] + (past[3] if past is not None and len(past) == 5 else 0)
    return [(*x[:2], sizes[2]), (2, x[0], heads, length, sizes[0] // heads)]


def _multi_head_attention(shapes: Shapes, node: ir.Node) -> Shapes:
    """com.microsoft MultiHeadAttention: q (B, S, H*K), or packed q, k and v (B, S, H, 3, K).

    Keys and values are (B, T, H*K), (B, H, T, K) or packed (B, T, H, 2, K).
    """
    q, k, v, _, _, _, past = [*shapes, *[None] * 7][:7]
    heads = node.attributes.get_int("num_heads", 0)
    if q is None or len(q) < 3 or not heads:
        return []
    total = q[1]
    if len(q) == 5:
        size = q[4]
        width = heads * size
    else:
        size = q[-1] // heads
        width = q[-1]
        if k is not None:
            total = k[2] if len(k) == 4 else k[1]
        if v is not None:
            width = v[1] * v[3] if len(v) == 4 else v[2]
    total += past[2] if past is not None else 0
    present_key = (q[0], heads, total, size)
    present_value = (q[0], heads, total, width // heads)
    return [(*q[:2], width), present_key, present_value]


def _group_query_attention(shapes: Shapes, node: ir.Node) -> Shapes:
    """com.microsoft GroupQueryAttention: q (B, S, H*K), or packed (B, S, (H + 2 G) K)."""
    q, k, _, past = [*shapes, *[None] * 4][:4]
    heads, groups = (node.attributes.get_int(n, 0) for n in ("num_heads", "kv_num_heads"))
    if q is None or len(q) != 3 or not heads or not groups:
        return []
    size = q[-1] // (heads if k is not None else heads + 2 * groups)
    present = (q[0], groups, q[1] + (past[2] if past is not None else 0), size)
    return [(*q[:2], heads * size), present, present]


COUNTS = {("EmbedLayerNormalization", 1)}
"""Outputs of RULES of type int32 by operator and index; other outputs are bytes or floats."""


def gives_bytes(node: ir.Node) -> bool:
    """Whether the output of an operator has the type of its first input, a quantized value."""
    scaled = node.op_type == "QGemm" and len(node.inputs) > 7 and node.inputs[7] is not None
    return scaled or node.op_type in ("QLinearAdd", "QLinearMul")


SHAPE_PRESERVING = GELUS | {"BiasSoftmax", "RotaryEmbedding", "SimplifiedLayerNormalization"}
"""Operators of com.microsoft whose output has the shape of their first input."""

RULES: dict[tuple[str, str], Callable[[Shapes, ir.Node], Shapes]] = {
    **{(MICROSOFT, name): _like_first for name in SHAPE_PRESERVING},
    **{(MICROSOFT, name): _matrix_product for name in MATRIX_PRODUCTS},
    ("", "GroupNormalization"): _like_first,
    ("", "LayerNormalization"): _like_first,
    ("", "SimplifiedLayerNormalization"): _like_first,
    (MICROSOFT, "Attention"): _attention,
    (MICROSOFT, "EmbedLayerNormalization"): _embedding,
    (MICROSOFT, "GroupQueryAttention"): _group_query_attention,
    (MICROSOFT, "MatMulBnb4"): _matmul_n_bits,
    (MICROSOFT, "MatMulNBits"): _matmul_n_bits,
    (MICROSOFT, "MultiHeadAttention"): _multi_head_attention,
    (MICROSOFT, "QGemm"): _quantized_gemm,
    (MICROSOFT, "QLinearAdd"): _quantized_sum,
    (MICROSOFT, "QLinearMul"): _quantized_sum,
    (MICROSOFT, "SkipLayerNormalization"): _skip_normalization,
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): _skip_normalization,
}
"""Shape rules of operators of ONNX Runtime that are not in the ONNX standard."""
