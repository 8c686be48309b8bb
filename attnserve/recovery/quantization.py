"""Fake quantization: compute the results of int8 kernels in PyTorch, with gradients.

Activations and weights are rounded to the grids of ``precision.int8_grids``: static bytes of
activations with the same divisors, scales and zero points, weights with one scale per column and
corrected biases, and bytes of large embedding tables. Weights keep the rounding from before the
training. Under autocast, products of the rounded numbers are rounded once more, to bfloat16.

The gradient of rounding is 1, and clipping has the gradient of a clamp (straight-through estimator,
arXiv 1308.3432). Products without a static grid (of constants) stay float.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnserve.models.quantized import Bits
from attnserve.precision.int8_grids import (
    LEVELS,
    Grid,
    Rounding,
    byte_table,
    large_tables,
    product_groups,
)
from attnserve.precision.products import Product, Range, WeightKey
from attnserve.recovery.operators.registry import OPERATORS, Call, Operator
from graph_passes.analysis.constants import constant_array

__all__ = ["fake_operators"]

TINY = torch.finfo(torch.float32).tiny


def fake_operators(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[str, Range],
    device: torch.device,
    *,
    float_nodes: Collection[ir.Node] = (),
    rounding: Mapping[WeightKey, Rounding] | None = None,
) -> dict[ir.Node, Operator]:
    """Create replacements of ``OPERATORS`` functions for the nodes that ``int8.quantize`` converts.

    Args:
        bits: Number of bits of the weights.
        ranges: Ranges of the activations, by name.
        float_nodes: Products that stay float.
        rounding: Rounding of the weights; weights without one are rounded to the nearest.

    Raises:
        CannotRewrite: The model has no products to quantize.
    """
    roundings = rounding or {}
    operators: dict[ir.Node, Operator] = {
        product.node: _FakeProduct(product, group.grid, bits, device, roundings.get(product.key))
        for group in product_groups(model, bits, ranges, float_nodes=float_nodes, rounding=rounding)
        if group.grid is not None
        for product in group.products
    }
    return operators | {node: _fake_table(node) for node in large_tables(model)}


class _FakeProduct:
    """A product of a rounded activation and rounded weights."""

    def __init__(
        self,
        product: Product,
        grid: Grid,
        bits: Bits,
        device: torch.device,
        rounding: Rounding | None,
    ) -> None:
        self._function = OPERATORS[product.node.domain, product.node.op_type]
        self._is_transposed = product.key.is_transposed
        self._is_attention = product.is_attention
        self._least, self._largest = LEVELS[bits]
        self._step = float(grid.step)
        self._zero_point = int(grid.zero_point)
        scaled = torch.from_numpy(grid.scaled.astype(np.float32))
        self._divisors = scaled.to(device)  # D
        mean = torch.from_numpy((grid.mean / grid.scaled).astype(np.float32))
        self._mean = mean.to(device)  # D, of the divided activation
        self._rounding = (
            None
            if rounding is None
            else tuple(
                torch.from_numpy(array).to(device) for array in (rounding.scales, rounding.offset)
            )
        )  # N and D N

    def __call__(self, call: Call, x: Tensor, weight: Tensor, *rest: Tensor | None) -> Tensor:
        matrix = weight.T if self._is_transposed else weight  # D N
        matrix = matrix * self._divisors[:, None]
        with torch.no_grad():
            error = self._rounded(matrix) - matrix
            # The correction of the bias; a product would be rounded by autocast.
            shift = -(self._mean[:, None] * error).sum(0)
        matrix = matrix + error
        x = _as_bytes(x.float() / self._divisors, self._step, self._zero_point)
        weight = matrix.T if self._is_transposed else matrix
        if self._is_attention:
            bias, *others = rest
            assert bias is not None
            return self._function(call, x, weight, bias + shift, *others)
        return self._function(call, x, weight, *rest) + shift

    def _rounded(self, matrix: Tensor) -> Tensor:
        if self._rounding is not None:
            scales, offset = self._rounding
            matrix = matrix + offset
        else:
            scales = torch.maximum(matrix.amax(0) / self._largest, matrix.amin(0) / self._least)
            scales = torch.where(scales < TINY, torch.ones_like(scales), scales)  # columns of zeros
        return (matrix / scales).round().clamp(self._least, self._largest) * scales


def _fake_table(node: ir.Node) -> Operator:
    """Rows of a rounded table, which is not trained."""
    table = node.inputs[0]
    assert table is not None
    function = OPERATORS[node.domain, node.op_type]
    _, step, zero_point = byte_table(constant_array(table))

    def rows(call: Call, table: Tensor, indices: Tensor) -> Tensor:
        return _as_bytes(function(call, table, indices), float(step), int(zero_point))

    return rows


def _as_bytes(x: Tensor, step: float, zero_point: int) -> Tensor:
    """Round to unsigned bytes and back."""
    low, high = -zero_point * step, (255 - zero_point) * step
    clipped = x.clamp(low, high)
    with torch.no_grad():
        bytes_ = ((x / step).round() + zero_point).clamp(0, 255)
        error = (bytes_ - zero_point) * step - clipped
    return clipped + error
