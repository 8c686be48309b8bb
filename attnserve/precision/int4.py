"""Quantize the weights of MatMul to signed 4 bits, with one scale for 32 weights (MatMulNBits).

The scale of a block maps its largest absolute weight to -8. With calibration data, weights are
rounded such that their errors cancel on the activations (``rounding``), and to the nearest
otherwise. ONNX Runtime rounds activations to 8 bits in blocks of each row, so that the result of a
text does not depend on the other texts of its batch.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.precision.products import InputMoments, Product, product_of
from attnserve.precision.rounding import Rounder
from graph_passes.analysis.constants import constant_shape
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite

if TYPE_CHECKING:
    from jaxtyping import Float, UInt8

__all__ = ["in_blocks", "quantize_to_int4"]

BLOCK = 32
"""Number of weights with a common scale. Larger blocks are faster and less accurate."""

LOW, HIGH = -8, 7
"""Minimum and maximum of signed 4-bit integers."""


def quantize_to_int4(
    model: ir.Model, moments: InputMoments | None = None, *, float_nodes: Collection[ir.Node] = ()
) -> None:
    """Quantize the matrices of MatMul in place.

    Args:
        moments: Second moments of activations, for GPTQ. Without them, and for weights that several
            activations share, weights are rounded to the nearest.
        float_nodes: Products that stay float.

    Raises:
        CannotRewrite: Weights are not finite.
    """
    all_products = filter(None, map(product_of, model.graph.all_nodes()))
    products = [p for p in all_products if p.node.op_type == "MatMul" and p.node not in float_nodes]
    readers: dict[ir.Value, set[ir.Value]] = {}
    for product in products:
        readers.setdefault(product.weight, set()).add(product.x)
    weights: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}
    rounders: dict[ir.Value, Rounder | None] = {}
    for product in products:
        x, weight = product.x, product.weight
        if weight not in weights:
            if x not in rounders:
                moment = None if moments is None else moments.moment(x.name or "")
                rounders = {x: None if moment is None else Rounder(moment)}  # one at a time
            rounder = rounders[x] if len(readers[weight]) == 1 else None
            packed, scales = in_blocks(_finite(product), rounder)
            make = Inserter(model.graph, model.graph[0], f"{weight.name}/int4")
            weights[weight] = make.constant(packed, "packed"), make.constant(scales, "scales")
        _replace(product, *weights[weight])
    model.opset_imports.setdefault(MICROSOFT, 1)
    remove_unused(model)


def _finite(product: Product) -> Float[np.ndarray, "D N"]:
    """The weights of a product.

    Raises:
        CannotRewrite: The weights are not finite.
    """
    matrix = product.matrix()
    if not np.isfinite(matrix).all():
        raise CannotRewrite(
            "int4: the weights are not finite", "check the model", code="precision.failed"
        )
    return matrix


def _replace(product: Product, packed: ir.Value, scales: ir.Value) -> None:
    node = product.node
    rows, columns = constant_shape(product.weight)
    assert isinstance(node.graph, ir.Graph)
    make = Inserter(node.graph, node, f"{node.name}/int4")
    output = make.op(
        "MatMulNBits",
        [node.inputs[0], packed, scales],
        "product",
        domain=MICROSOFT,
        K=rows,
        N=columns,
        bits=4,
        block_size=BLOCK,
        accuracy_level=4,  # activations are rounded to 8 bits in blocks of each row
    )
    replace_uses(node.outputs[0], output)


def in_blocks(
    matrix: Float[np.ndarray, "D N"], rounder: Rounder | None = None, size: int = BLOCK
) -> tuple[UInt8[np.ndarray, "N blocks half"], Float[np.ndarray, "N blocks"]]:
    """Pack weights for MatMulNBits: two per byte, the first in the low bits, with offset 8.

    Args:
        rounder: Rounds the weights; None rounds to the nearest.
        size: Rows with a common scale.

    Returns:
        The bytes, and the scale of each block.
    """
    rows, columns = matrix.shape
    blocks = -(-rows // size)
    padded = np.pad(matrix, ((0, blocks * size - rows), (0, 0))).reshape(blocks, size, columns)
    largest = np.take_along_axis(padded, np.abs(padded).argmax(axis=1)[:, None], axis=1)
    scales = (largest / LOW).astype(np.float32)  # blocks 1 N
    steps = np.where(scales == 0, 1, scales).astype(np.float64)
    steps = np.broadcast_to(steps, padded.shape).reshape(-1, columns)[:rows]
    if rounder is None:
        rounded = np.clip(np.round(matrix / steps), LOW, HIGH)
    else:
        rounded = rounder.round(matrix, steps, LOW, HIGH)
    nibbles = np.full((columns, blocks * size), -LOW, np.uint8)
    nibbles[:, :rows] = (rounded - LOW).T
    packed = nibbles[:, ::2] | nibbles[:, 1::2] << 4
    return packed.reshape(columns, blocks, size // 2), scales[:, 0].T.copy()
