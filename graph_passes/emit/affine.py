"""Replace the output of a block by a map of its tokens, or by a constant."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.required import producer_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.emit.editing import Inserter, in_precision, replace_uses, type_of

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["emit_affine", "emit_constant", "emit_order"]


def emit_affine(
    make: Inserter,
    tokens: ir.Value,
    weight: Float[np.ndarray, "N D"],
    bias: Float[np.ndarray, " D"],
    old: ir.Value,
    info: ShapeInfo,
) -> ir.Node:
    """Replace ``old``, (B, S, D) or flattened, by tokens (B, S, N) @ weight + bias.

    Returns:
        The product.
    """
    dtype = type_of(old, info) or ir.DataType.FLOAT
    factors = [
        in_precision(make, tokens, dtype, info),
        make.constant(weight, "output_weight", dtype),
    ]
    value = make.op("MatMul", factors, "output_product")
    product = producer_of(value)
    if bias.any():
        value = make.op("Add", [value, make.constant(bias, "output_bias", dtype)], "output")
    _replace(make, old, value, weight.shape[1], info)
    return product


def emit_order(
    make: Inserter, tokens: ir.Value, order: np.ndarray, old: ir.Value, info: ShapeInfo
) -> None:
    """Replace ``old``, (B, S, N) or flattened, by tokens (B, S, N)[..., order]."""
    value = in_precision(make, tokens, type_of(old, info) or ir.DataType.FLOAT, info)
    if not np.array_equal(order, np.arange(len(order))):
        value = make.op("Gather", [value, make.integers(order, "order")], "in_order", axis=-1)
    _replace(make, old, value, len(order), info)


def emit_constant(
    make: Inserter,
    tokens: ir.Value,
    bias: Float[np.ndarray, " D"],
    old: ir.Value,
    info: ShapeInfo,
) -> None:
    """Replace ``old`` by the bias, expanded to ``tokens`` (B, S, N)."""
    dtype = type_of(old, info) or ir.DataType.FLOAT
    value = make.constant(bias, "output_bias", dtype)
    lengths = [make.lengths(tokens, 0, 2), make.integers([len(bias)], "width")]
    shape = make.op("Concat", lengths, "output_shape", axis=0)
    _replace(make, old, make.op("Expand", [value, shape], "output"), len(bias), info)


def _replace(make: Inserter, old: ir.Value, new: ir.Value, width: int, info: ShapeInfo) -> None:
    """Replace ``old`` by ``new``, (B, S, width); flatten ``new`` if ``old`` is flattened."""
    if len(info.shape(old) or ()) == 2:  # ``old`` is flattened
        new = make.op("Reshape", [new, make.integers([-1, width], "flat")], "flat_output")
    replace_uses(old, new)
