"""Quantize the matrix products of a float32 model to 8 bits; quantized products stay unchanged.

Weights are signed bytes with one scale per column and no zero point. They are within -64..63 (7
bits) or -127..127 (8 bits). ONNX Runtime adds pairs of products in 16-bit sums on x86 CPUs without
VNNI. 7-bit weights cannot saturate them: 2 x 255 x 64 = 32,640. 8-bit weights need a CPU with exact
kernels (``runtime.machine.has_int8_dot_product``) and give wrong results on others.

Activations are unsigned bytes. The result of a text does not depend on the other texts of its
batch, because their scales are

- static: constants of the model, from the smallest and largest values on calibration data, or
- per row: from the largest value of each token at run time. It is for products without calibration
  data, and for those in subgraphs, whose activations cannot be read.

``DynamicQuantizeLinear`` takes one scale for the whole batch: a text alone and in a batch of 8 then
differ as much as int8 differs from float32 (``benchmarks/results/int8.json``).

Smoothing (SmoothQuant, arXiv 2211.10438): a few channels of a static activation may be ten times as
large as the others, and then set the scale of all. They are divided by a constant, by which the
rows of the weights are multiplied. Clipping them instead is less accurate. The division is folded
into the normalization before if nothing else reads it; otherwise it costs a Mul, so that it is left
out where it gains little.

Bias correction (arXiv 1906.04721): the mean of a static activation times the rounding errors of the
weights is added to the bias.

Rounding: with calibration data, weights of static activations are rounded such that their errors
cancel (``rounding``), and to the nearest byte otherwise. Weights that several activations share are
rounded to the nearest. Weights that are trained for int8 keep the rounding from before the training
(``Rounding``): a new rounding would have errors that the training did not compensate.

com.microsoft Attention contains its projections. With static scales it is written as QAttention.
It stays float32 without calibration data, because QAttention takes no scale per row, and with
``attention_bias``, for which QAttention has no input.

An embedding table (Gather) is quantized with one scale and 8 bits if it holds at least a twentieth
of the weights: word embeddings do, position embeddings do not. Convolutions, stacked weights and
products of activations stay float32.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.models.quantized import LARGEST_7_BIT, Bits, quantized_node
from attnserve.precision.products import InputMoments, Product, Range, WeightKey, product_of
from attnserve.precision.rounding import Rounder
from attnserve.runtime.external_data import weight_bytes
from graph_passes.analysis.constants import constant_array, constant_shape, is_constant
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite

if TYPE_CHECKING:
    from jaxtyping import Float, Int8, UInt8

__all__ = [
    "LEVELS",
    "ActivationGroup",
    "ByteTable",
    "Grid",
    "Rounding",
    "byte_table",
    "large_tables",
    "product_groups",
    "quantize",
    "roundings",
]

LEVELS: Mapping[Bits, tuple[int, int]] = {7: (-64, 63), 8: (-127, 127)}
"""Minimum and maximum of quantized weights, by bits."""

COST = 400
"""Smoothing that costs a Mul must lower the squared error of products with N columns by the factor
1 + COST / N: with fewer columns, the Mul takes a larger share of their time."""

NORMALIZATIONS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    (MICROSOFT, "SkipLayerNormalization"): (2, 3),
    (MICROSOFT, "SkipSimplifiedLayerNormalization"): (2,),
}
"""Places of the scale and the shift of normalizations."""


def quantize(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[str, Range],
    *,
    float_nodes: Collection[ir.Node] = (),
    tables: bool = True,
    smooth: bool = True,
    correct: bool = True,
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
        moments: Second moments of the static activations; without them, weights are rounded to the
            nearest.
        rounding: Precomputed ``roundings`` of a model with the same graph.

    Raises:
        CannotRewrite: There are no products and tables to quantize, or weights are not finite.
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
    writer = _Writer(model, bits, groups, correct=correct, moments=moments, rounding=rounding)
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
    """The rounding of the weights of static activations, by ``Product.weight_key``.

    Args:
        bits: Number of bits of the weights.
        ranges: The static activations by name.
        moments: Second moments of the activations, for GPTQ.
        float_nodes: Products that stay float.

    Raises:
        CannotRewrite: There are no products to quantize, or weights are not finite.
    """
    groups = product_groups(model, bits, ranges, float_nodes=float_nodes)
    writer = _Writer(model, bits, groups, correct=True, moments=moments)
    return {
        product.weight_key: writer.rounded(product, group.grid)
        for group in groups
        if group.grid is not None
        for product in group.products
    }


@dataclass(frozen=True, eq=False)
class Rounding:
    """Rounding of weights W (D, N) to bytes: round((W * divisors + offset) / scales).

    Attributes:
        divisors: Smoothing divisors of the activation; None if all are 1.
        scales: One per column.
        offset: The chosen bytes times the scales, minus W * divisors, of the weights that the
            rounding was computed for.
    """

    divisors: Float[np.ndarray, " D"] | None
    scales: Float[np.ndarray, " N"]
    offset: Float[np.ndarray, "D N"]


@dataclass(frozen=True, eq=False)
class Grid:
    """The bytes of a static activation x: round(x / divisors / step) + zero_point.

    Attributes:
        divisors: Smoothing divisors by channel; None if all are 1.
        step: The scale, one for all channels.
        zero_point: The byte of 0.
        mean: Mean of x on the calibration data, for the bias correction.
    """

    divisors: Float[np.ndarray, " D"] | None
    step: Float[np.ndarray, ""]
    zero_point: UInt8[np.ndarray, ""]
    mean: Float[np.ndarray, " D"]

    @property
    def scaled(self) -> Float[np.ndarray, " D"]:
        """The divisors, or ones."""
        return np.ones(len(self.mean)) if self.divisors is None else self.divisors


@dataclass(frozen=True, eq=False)
class ActivationGroup:
    """Products that share one activation in one graph.

    Attributes:
        grid: The static grid of the activation; None for scales per row.
    """

    products: Sequence[Product]
    grid: Grid | None


def product_groups(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[str, Range],
    *,
    float_nodes: Collection[ir.Node] = (),
    smooth: bool = True,
    rounding: Mapping[WeightKey, Rounding] | None = None,
    required: bool = True,
) -> list[ActivationGroup]:
    """The products that ``quantize`` converts, with the grids of their activations.

    Args:
        bits: Number of bits of the weights.
        ranges: The static activations by name; all others get scales per row.
        float_nodes: Products that stay float.
        smooth: Divide large channels of static activations.
        rounding: Precomputed ``roundings``, whose divisors are used.
        required: Whether a model without such products is refused.

    Raises:
        CannotRewrite: There are no products to quantize.
    """
    candidates = [
        product
        for product in map(product_of, model.graph.all_nodes())
        if product and (product.x.name in ranges or not product.is_attention)
    ]
    if required and not candidates:
        raise CannotRewrite(
            "int8: the model has no MatMul, Gemm or (with calibration data) com.microsoft "
            "Attention with constant float32 weights that can be quantized",
            "keep the float32 model",
            code="precision.no_weights",
        )
    converted_products = [product for product in candidates if product.node not in float_nodes]
    activations = _activations_of(converted_products)
    products_by_activation: dict[tuple[ir.Value, ir.Graph | ir.Function | None], list[Product]] = {}
    for product in converted_products:
        key = (product.x, product.node.graph)
        products_by_activation.setdefault(key, []).append(product)
    groups: list[ActivationGroup] = []
    for (x, _), products in products_by_activation.items():
        range_ = ranges.get(x.name or "")
        if range_ is None:
            groups.append(ActivationGroup(products, None))
            continue
        precomputed = (rounding or {}).get(products[0].weight_key)
        # Shared weights would need a copy for each activation.
        is_shared = any(len(activations[product.key]) > 1 for product in products)
        divisors = None
        if precomputed is not None:
            divisors = precomputed.divisors
        elif smooth and not is_shared:
            divisors = _divisors(products, range_, bits)
        groups.append(ActivationGroup(products, _grid(range_, divisors)))
    return groups


def _divisors(
    products: Sequence[Product], range_: Range, bits: Bits
) -> Float[np.ndarray, " D"] | None:
    """Smoothing divisors of the activation of these products; None if they gain too little."""
    weights = np.concatenate([product.matrix() for product in products], axis=1)
    min_gain = 1.0 if _is_foldable(products[0].x, products) else 1 + COST / weights.shape[1]
    return smoothing(range_, weights, bits, min_gain)


def _grid(range_: Range, divisors: Float[np.ndarray, " D"] | None) -> Grid:
    """The bytes of an activation with this range, divided by the divisors."""
    scaled = 1.0 if divisors is None else divisors
    step, zero_point = _byte_step((range_.low / scaled).min(), (range_.high / scaled).max())
    return Grid(divisors, step, zero_point, range_.mean)


def _activations_of(products: Sequence[Product]) -> dict[tuple[ir.Value, bool], set[ir.Value]]:
    """The activations that weights are multiplied by."""
    inputs: dict[tuple[ir.Value, bool], set[ir.Value]] = {}
    for product in products:
        inputs.setdefault(product.key, set()).add(product.x)
    return inputs


class _Writer:
    """Writes quantized products into a graph; every weight is quantized once."""

    def __init__(
        self,
        model: ir.Model,
        bits: Bits,
        groups: Sequence[ActivationGroup],
        *,
        correct: bool,
        moments: InputMoments | None,
        rounding: Mapping[WeightKey, Rounding] | None = None,
    ) -> None:
        self.graph = model.graph
        self.opset = model.opset_imports.get("", 1)
        self.bits: Bits = bits
        self.correct = correct
        self.moments = moments
        self.rounding = rounding or {}
        self.activations = _activations_of([p for group in groups for p in group.products])
        self.weights: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value]] = {}
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
        activation_bytes = make.op("QuantizeLinear", operands, "q", dtype=ir.DataType.UINT8)
        rounder = self._rounder(products[0].x, grid.scaled, float(grid.step))
        for product in products:
            make = _inserter(product)
            weight, weight_scale = self._weight(product, divisors, rounder)
            shift = np.zeros(constant_shape(weight_scale))
            if product.bias is not None:
                shift += constant_array(product.bias).reshape(-1)
            if self.correct:
                scales = constant_array(weight_scale).astype(np.float64)
                matrix = constant_array(weight) * scales
                shift += grid.mean @ product.matrix() - (grid.mean / grid.scaled) @ matrix
            bias = make.constant(shift.astype(np.float32), "bias")
            if product.is_attention:
                node = product.node
                mask = node.inputs[3] if len(node.inputs) > 3 else None
                inputs = [activation_bytes, weight, bias, scale, weight_scale, mask, zero_point]
                output = make.op("QAttention", inputs, "attention", domain=MICROSOFT)
                attributes = {n: a for n, a in node.attributes.items() if n != "qkv_hidden_sizes"}
                producer = output.producer()  # equal sizes are the default
                assert producer is not None
                producer.attributes.update(attributes)
                replace_uses(product.result, output)
                continue
            inputs = [activation_bytes, weight, scale, weight_scale, zero_point, None, bias]
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
        activation_bytes = make.op("QuantizeLinear", operands, "q", dtype=ir.DataType.UINT8)
        for product in products:
            make = _inserter(product)
            weight, weight_scale = self._weight(product, None, None)
            inputs = [activation_bytes, weight, scale, weight_scale, zero_point]
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
        noise = step**2 / 12  # of the rounding of x
        return Rounder(moment / np.outer(divisors, divisors) + noise * np.eye(len(moment)))

    def _weight(
        self, product: Product, divisors: np.ndarray | None, rounder: Rounder | None
    ) -> tuple[ir.Value, ir.Value]:
        """Bytes (D N) and scales (N); only undivided weights are shared between products."""
        constants = self.weights.get(product.key)
        if constants is None or divisors is not None:
            bytes_, scales = self._bytes(product, _divided(product, divisors), rounder)
            make = Inserter(self.graph, self.graph[0], f"{product.weight.name}/int8")
            constants = make.constant(bytes_, "bytes"), make.constant(scales, "scale")
            if divisors is None:
                self.weights[product.key] = constants
        return constants

    def _bytes(
        self, product: Product, matrix: Float[np.ndarray, "D N"], rounder: Rounder | None
    ) -> tuple[Int8[np.ndarray, "D N"], Float[np.ndarray, " N"]]:
        """Bytes and scales of the divided weights of a product."""
        rounding = self.rounding.get(product.weight_key)
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
    """An inserter before the node of a product."""
    graph = product.node.graph
    assert isinstance(graph, ir.Graph)
    return Inserter(graph, product.node, f"{product.node.name}/int8")


def quantized_arrays(
    matrix: Float[np.ndarray, "D N"],
    bits: Bits,
    rounder: Rounder | None = None,
    *,
    scales: Float[np.ndarray, " N"] | None = None,
) -> tuple[Int8[np.ndarray, "D N"], Float[np.ndarray, " N"]]:
    """Bytes within -64..63 (7 bits) or -127..127 (8 bits), and one scale per column.

    Args:
        scales: Scales of the columns (default: from the largest weight of each column).

    Raises:
        CannotRewrite: Weights are not finite.
    """
    min_level, max_level = LEVELS[bits]
    if not np.isfinite(matrix).all():
        raise CannotRewrite(
            "int8: the weights are not finite", "check the model", code="precision.failed"
        )
    if scales is None:
        peaks = np.maximum(matrix.max(axis=0) / max_level, matrix.min(axis=0) / min_level)
        scales = np.asarray(peaks, np.float32)
        scales[scales < np.finfo(np.float32).tiny] = 1  # columns of zeros
    if rounder is None:
        bytes_ = np.clip(np.round(matrix / scales), min_level, max_level)
    else:
        bytes_ = rounder.round(matrix, scales, min_level, max_level)
    return bytes_.astype(np.int8), scales


def smoothing(
    range_: Range, weights: Float[np.ndarray, "D N"], bits: Bits, min_gain: float
) -> Float[np.ndarray, " D"] | None:
    """Compute smoothing divisors of an activation; None if they reduce the error too little.

    Channels above a limit are divided down to it. The limit with the least expected error of the
    product is taken. Rounding errors are independent and uniform: a step d has a variance of
    d^2 / 12.

    Args:
        min_gain: Minimum factor by which the squared error must decrease.
    """
    peaks = np.maximum(np.abs(range_.low), np.abs(range_.high))
    typical = float(np.median(peaks))
    largest = float(peaks.max(initial=0))
    if not 0 < typical < largest:
        return None
    levels = LARGEST_7_BIT if bits == 7 else 127
    norms = np.square(weights).sum(axis=1)
    absolute = np.abs(weights)

    def squared_error(divisors: np.ndarray) -> float:
        """The expected squared error of the products with these divisors."""
        step = _byte_step((range_.low / divisors).min(), (range_.high / divisors).max())[0]
        steps = (absolute * divisors[:, None]).max(axis=0) / levels  # N
        of_x = float(step) ** 2 * (np.square(divisors) * norms).sum()
        return of_x + np.square(steps).sum() * (range_.mean_square / np.square(divisors)).sum()

    candidates = [np.maximum(peaks / limit, 1) for limit in np.geomspace(typical, largest, 9)]
    best = min(candidates, key=squared_error)
    if squared_error(best) * min_gain >= squared_error(np.ones(len(peaks))):
        return None
    return best


def _byte_step(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The scale and zero point of unsigned bytes from ``low`` to ``high``, and for 0."""
    low = min(float(low), 0.0)
    high = max(float(high), 0.0)
    step = np.array((high - low) / 255, np.float32)
    if step < np.finfo(np.float32).tiny:
        step = np.array(1, np.float32)
    return step, np.array(np.clip(np.round(-low / float(step)), 0, 255), np.uint8)


def _is_foldable(x: ir.Value, products: Sequence[Product]) -> bool:
    """Whether x is a normalization that only these products read, with constant parameters."""
    node = x.producer()
    places = None if node is None else NORMALIZATIONS.get((node.domain, node.op_type))
    if node is None or places is None or x is not node.outputs[0] or x.is_graph_output():
        return False
    if {user for user, _ in x.uses()} != {product.node for product in products}:
        return False
    parameters = [node.inputs[place] for place in places if place < len(node.inputs)]
    return parameters[0] is not None and all(v is None or is_constant(v) for v in parameters)


def _fold_into_normalization(
    x: ir.Value, products: Sequence[Product], divisors: Float[np.ndarray, " D"]
) -> bool:
    """Divide the parameters of the normalization before, if it is foldable, and return whether."""
    if not _is_foldable(x, products):
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


class ByteTable(NamedTuple):
    """A table of bytes: (bytes - zero_point) * step approximates its elements."""

    bytes: UInt8[np.ndarray, "V D"]
    step: Float[np.ndarray, ""]
    zero_point: UInt8[np.ndarray, ""]


def byte_table(table: Float[np.ndarray, "V D"]) -> ByteTable:
    """Quantize a table to unsigned bytes with one scale."""
    step, zero_point = _byte_step(table.min(), table.max())
    bytes_ = np.clip(np.round(table / step) + zero_point, 0, 255).astype(np.uint8)
    return ByteTable(bytes_, step, zero_point)


def large_tables(model: ir.Model) -> list[ir.Node]:
    """The Gather nodes whose tables ``quantize`` converts.

    Tables of less than a twentieth of the weight bytes save little, and may need to be exact
    (rotary angles, relative positions).
    """
    min_bytes = weight_bytes(model) / 20
    return [node for node in model.graph.all_nodes() if _is_table(node, min_bytes)]


def _is_table(node: ir.Node, min_bytes: float) -> bool:
    """Whether a Gather reads a table of at least this many bytes, which no product reads.

    A table with infinities, of biases, has no scale.
    """
    if (node.domain, node.op_type) != ("", "Gather"):
        return False
    value = node.inputs[0]
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    tensor = value.const_value
    is_matrix = tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == 2
    return (
        is_matrix
        and tensor.nbytes >= min_bytes
        and all(user.op_type == "Gather" for user, _ in value.uses())
        and bool(np.isfinite(tensor.numpy()).all())
    )
