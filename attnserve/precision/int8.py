"""Quantize the matrix products of a float32 model to 8 bits; quantized products stay unchanged.

Weights have one scale per column. They are within -64..63 (7 bits) or -127..127 (8 bits). ONNX
Runtime adds pairs of products with signed weights in 16-bit sums on x86 CPUs without VNNI. 7-bit
weights cannot saturate these sums: 2 x 255 x 64 = 32,640. 8-bit weights may, except on CPUs with
exact kernels (``runtime.machine.has_int8_dot_product``). For other CPUs they are stored as unsigned
bytes with the zero point 128, whose kernels are exact and slower.

Activations are unsigned bytes. The result of a text does not depend on the other texts of its
batch, because their scales are

- static: constants of the model, from the smallest and largest values on calibration data, or
- per row: from the largest value of each token at run time, for products without calibration data,
  and for products in subgraphs, whose activations cannot be read.

``DynamicQuantizeLinear`` takes one scale for the whole batch: a text alone and in a batch of 8 then
differ as much as int8 differs from float32 (``benchmarks/results/int8.json``).

Bias correction (arXiv 1906.04721): the mean of a static activation times the rounding errors of the
weights is added to the bias.

Rounding: with calibration data, weights of static activations are rounded such that their errors
cancel (``rounding``), and to the nearest byte otherwise. Weights that several activations share are
rounded to the nearest. Weights that are trained for int8 keep the rounding from before the training
(``Rounding``): a new rounding would have errors that the training did not compensate.

com.microsoft Attention contains its projections. With static scales it is written as QAttention.
Attention stays float32 without calibration data, because QAttention takes no scale per row, and
with ``attention_bias``, for which QAttention has no input.

An embedding table (Gather) is quantized with one scale and 8 bits if it holds at least a twentieth
of the weights, as word embeddings do, but not position embeddings. Convolutions, stacked weights
and products of activations stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from attnserve.models.quantized import Bits, quantized_node
from attnserve.precision.int8_grids import (
    NORMALIZATIONS,
    ActivationGroup,
    Grid,
    Rounding,
    activations_of,
    byte_table,
    is_foldable,
    large_tables,
    product_groups,
    quantized_arrays,
)
from attnserve.precision.products import InputMoments, Product, Range, WeightKey
from attnserve.precision.rounding import Rounder
from graph_passes.analysis.constants import constant_array, constant_shape
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses

if TYPE_CHECKING:
    from jaxtyping import Float, Int8

__all__ = ["quantize", "roundings"]

ZERO = 128
"""The zero point of unsigned weights."""


def quantize(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[str, Range],
    *,
    float_nodes: Collection[ir.Node] = (),
    tables: bool = True,
    smooth: bool = True,
    correct: bool = True,
    unsigned: bool = False,
    moments: InputMoments | None = None,
    rounding: Mapping[WeightKey, Rounding] | None = None,
) -> None:
    """Quantize matrix products and large embedding tables in place.

    Args:
        bits: Number of bits of product weights; tables have 8.
        ranges: The static activations by name; all others get scales per row.
        float_nodes: Products that stay float.
        tables: Quantize embedding tables too.
        smooth: Divide large channels of static activations.
        correct: Correct biases after static activations.
        unsigned: Store product weights as unsigned bytes.
        moments: Second moments of the static activations; without them, weights are rounded to the
            nearest.
        rounding: Precomputed ``roundings`` of a model with the same graph.

    Raises:
        CannotRewrite: The model has no products and tables to quantize, or weights are not finite.
    """
    gathers = large_tables(model) if tables else []
    required = not gathers or quantized_node(model) is None  # others may be quantized already
    groups = product_groups(
        model,
        bits,
        ranges,
        float_nodes=float_nodes,
        smooth=smooth,
        rounding=rounding,
        required=required,
    )
    writer = _Writer(
        model, bits, groups, correct=correct, unsigned=unsigned, moments=moments, rounding=rounding
    )
    for group in groups:
        if group.grid is None:
            writer.write_per_row(group.products)
        else:
            writer.write_static(group.products, group.grid)
    for node in gathers:
        writer.write_table(node)
    model.opset_imports.setdefault(MICROSOFT, 1)
    remove_unused(model)


def roundings(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[str, Range],
    moments: InputMoments,
    *,
    float_nodes: Collection[ir.Node] = (),
) -> dict[WeightKey, Rounding]:
    """The rounding of the weights of static activations, by ``Product.key``.

    Args:
        bits: Number of bits of the weights.
        ranges: The static activations by name.
        moments: Second moments of the activations, for GPTQ.
        float_nodes: Products that stay float.

    Raises:
        CannotRewrite: The model has no products to quantize, or weights are not finite.
    """
    groups = product_groups(model, bits, ranges, float_nodes=float_nodes)
    writer = _Writer(model, bits, groups, correct=True, moments=moments)
    return {
        product.key: writer.rounded(product, group.grid)
        for group in groups
        if group.grid is not None
        for product in group.products
    }


@dataclass(frozen=True)
class _Weight:
    """The constants of a weight.

    Attributes:
        bytes: Signed bytes, or unsigned ones with a zero point (D N).
        scale: One scale per column (N).
        zero_points: ``ZERO``, a scalar, of unsigned bytes; empty for signed ones.
    """

    bytes: ir.Value
    scale: ir.Value
    zero_points: Sequence[ir.Value]

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """The rounded weights."""
        zero = float(ZERO) if self.zero_points else 0.0
        return (constant_array(self.bytes) - zero) * constant_array(self.scale).astype(np.float64)


class _Writer:
    """Writes quantized products into a graph; every weight is quantized once."""

    def __init__(
        self,
        model: ir.Model,
        bits: Bits,
        groups: Sequence[ActivationGroup],
        *,
        correct: bool,
        unsigned: bool = False,
        moments: InputMoments | None,
        rounding: Mapping[WeightKey, Rounding] | None = None,
    ) -> None:
        self.graph = model.graph
        self.opset = model.opset_imports.get("", 1)
        self.bits: Bits = bits
        self.correct = correct
        self.unsigned = unsigned
        self.moments = moments
        self.rounding = rounding or {}
        self.activations = activations_of([p for group in groups for p in group.products])
        self.weights: dict[WeightKey, _Weight] = {}
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}

    def write_static(self, products: Sequence[Product], grid: Grid) -> None:
        """Write products of a static activation.

        Args:
            products: The products of one activation.
            grid: The bytes of the activation.
        """
        make = _inserter(products[0])
        source = _source(products)
        divisors = grid.divisors
        if divisors is not None and not _fold_into_normalization(source, products, divisors):
            factors = make.constant((1 / divisors).astype(np.float32), "factors")
            source = make.op("Mul", [source, factors], "smooth", dtype=ir.DataType.FLOAT)
        scale = make.constant(grid.step, "scale")
        zero_point = make.constant(grid.zero_point, "zero_point")
        operands = [source, scale, zero_point]
        quantized = make.op("QuantizeLinear", operands, "q", dtype=ir.DataType.UINT8)
        rounder = self._rounder(products[0].x, grid.scaled, float(grid.step))
        for product in products:
            make = _inserter(product)
            weight = self._weight(product, divisors, rounder)
            shift = np.zeros(constant_shape(weight.scale))
            if product.bias is not None:
                shift += constant_array(product.bias).reshape(-1)
            if self.correct:
                rounded = (grid.mean / grid.scaled) @ weight.matrix()
                shift += grid.mean @ product.matrix() - rounded
            bias = make.constant(shift.astype(np.float32), "bias")
            if product.is_attention:
                node = product.node
                mask = node.inputs[3] if len(node.inputs) > 3 else None
                inputs = [quantized, weight.bytes, bias, scale, weight.scale, mask, zero_point]
                inputs += weight.zero_points
                output = make.op("QAttention", inputs, "attention", domain=MICROSOFT)
                attributes = {n: a for n, a in node.attributes.items() if n != "qkv_hidden_sizes"}
                producer = output.producer()  # equal sizes are the default
                assert producer is not None
                producer.attributes.update(attributes)
                replace_uses(product.result, output)
                continue
            inputs = [quantized, weight.bytes, scale, weight.scale, zero_point]
            inputs += [*(weight.zero_points or [None]), bias]
            output = make.op("MatMulIntegerToFloat", inputs, "product", domain=MICROSOFT)
            self._replace(product, make, output)

    def write_per_row(self, products: Sequence[Product]) -> None:
        """Write products of an activation with a scale per row: the largest absolute value / 127.

        Args:
            products: The products of one activation.
        """
        make = _inserter(products[0])
        source = _source(products)
        axes = np.array([-1])
        absolute = make.op("Abs", [source], "absolute")
        if self.opset < 18:
            largest = make.op("ReduceMax", [absolute], "largest", axes=axes.tolist())
        else:
            largest = make.op("ReduceMax", [absolute, make.integers(axes, "axes")], "largest")
        tiny = make.constant(np.array(np.finfo(np.float32).tiny), "least", ir.DataType.FLOAT)
        peak = make.op("Max", [largest, tiny], "peak", dtype=ir.DataType.FLOAT)
        unit = make.op("Div", [source, peak], "unit", dtype=ir.DataType.FLOAT)
        scale = make.constant(np.array(1 / 127, np.float32), "scale")
        zero_point = make.constant(np.array(128, np.uint8), "zero_point")
        operands = [unit, scale, zero_point]
        quantized = make.op("QuantizeLinear", operands, "q", dtype=ir.DataType.UINT8)
        for product in products:
            make = _inserter(product)
            weight = self._weight(product, None, None)
            inputs = [quantized, weight.bytes, scale, weight.scale, zero_point, *weight.zero_points]
            output = make.op("MatMulIntegerToFloat", inputs, "product", domain=MICROSOFT)
            output = make.op("Mul", [output, peak], "scaled")
            if product.bias is not None:
                output = make.op("Add", [output, product.bias], "biased")
            self._replace(product, make, output)

    def write_table(self, node: ir.Node) -> None:
        """Write a Gather of bytes and a DequantizeLinear in place of a Gather."""
        make = Inserter(self.graph, self.graph[0], f"{node.name}/int8")
        table = node.inputs[0]
        assert table is not None
        if table not in self.tables:
            arrays = byte_table(constant_array(table))
            self.tables[table] = (
                make.constant(arrays.bytes, "table"),
                make.constant(arrays.step, "scale"),
                make.constant(arrays.zero_point, "zero_point"),
            )
        table_bytes, scale, zero_point = self.tables[table]
        assert isinstance(node.graph, ir.Graph)
        make = Inserter(node.graph, node, f"{node.name}/int8")
        axis = node.attributes.get_int("axis", 0)
        rows = make.op(
            "Gather", [table_bytes, node.inputs[1]], "rows", dtype=ir.DataType.UINT8, axis=axis
        )
        floats = make.op("DequantizeLinear", [rows, scale, zero_point], "float")
        replace_uses(node.outputs[0], floats)

    def _replace(self, product: Product, make: Inserter, output: ir.Value) -> None:
        """Replace a product by ``output``, to which the addend of a Gemm is added."""
        if product.has_addend:
            output = make.op("Add", [output, product.node.inputs[2]], "sum")
        replace_uses(product.result, output)

    def rounded(self, product: Product, grid: Grid) -> Rounding:
        """The rounding of the weights of a static activation."""
        divided = _divided(product, grid.divisors)
        rounder = self._rounder(product.x, grid.scaled, float(grid.step))
        bytes_, scales = self._bytes(product, divided, rounder)
        return Rounding(grid.divisors, scales, (bytes_ * scales - divided).astype(np.float32))

    def _rounder(self, x: ir.Value, divisors: np.ndarray, step: float) -> Rounder | None:
        """A rounder for the divided and quantized activation."""
        if self.moments is None:
            return None
        moment = self.moments.moment(x.name or "", centered=self.correct)
        if moment is None:
            return None
        noise = step**2 / 12  # the variance of the rounding of x
        return Rounder(moment / np.outer(divisors, divisors) + noise * np.eye(len(moment)))

    def _weight(
        self, product: Product, divisors: np.ndarray | None, rounder: Rounder | None
    ) -> _Weight:
        """The weight of a product; only undivided weights are shared between products."""
        weight = self.weights.get(product.key)
        if weight is None or divisors is not None:
            bytes_, scales = self._bytes(product, _divided(product, divisors), rounder)
            make = Inserter(self.graph, self.graph[0], f"{product.weight.name}/int8")
            stored = (bytes_ + np.int16(ZERO)).astype(np.uint8) if self.unsigned else bytes_
            weight = _Weight(
                make.constant(stored, "bytes"),
                make.constant(scales, "scale"),
                [make.constant(np.array(ZERO, np.uint8), "zero_point")] if self.unsigned else [],
            )
            if divisors is None:
                self.weights[product.key] = weight
        return weight

    def _bytes(
        self, product: Product, matrix: Float[np.ndarray, "D N"], rounder: Rounder | None
    ) -> tuple[Int8[np.ndarray, "D N"], Float[np.ndarray, " N"]]:
        """Bytes and scales of the divided weights of a product."""
        rounding = self.rounding.get(product.key)
        if rounding is not None:
            return quantized_arrays(matrix + rounding.offset, self.bits, scales=rounding.scales)
        is_shared = len(self.activations[product.key]) > 1
        return quantized_arrays(matrix, self.bits, None if is_shared else rounder)


def _divided(
    product: Product, divisors: Float[np.ndarray, " D"] | None
) -> Float[np.ndarray, "D N"]:
    """The weights for the divided activation."""
    matrix = product.matrix()
    return matrix if divisors is None else matrix * divisors[:, None]


def _source(products: Sequence[Product]) -> ir.Value:
    """The activation, or the quantized product that replaced it."""
    source = products[0].node.inputs[0]
    assert source is not None
    return source


def _inserter(product: Product) -> Inserter:
    graph = product.node.graph
    assert isinstance(graph, ir.Graph)
    return Inserter(graph, product.node, f"{product.node.name}/int8")


def _fold_into_normalization(
    x: ir.Value, products: Sequence[Product], divisors: Float[np.ndarray, " D"]
) -> bool:
    """Divide the parameters of the preceding normalization, if foldable; return whether it is."""
    if not is_foldable(x, products):
        return False
    node = x.producer()
    assert node is not None and isinstance(node.graph, ir.Graph)
    make = Inserter(node.graph, node, f"{node.name}/int8")
    for place in NORMALIZATIONS[node.domain, node.op_type]:
        value = node.inputs[place] if place < len(node.inputs) else None
        if value is not None:
            array = (constant_array(value) / divisors).astype(np.float32)
            node.replace_input_with(place, make.constant(array, "smooth"))
    return True
