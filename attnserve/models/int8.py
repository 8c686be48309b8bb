"""Quantize the matrix products of a float32 model to 8 bits.

Weights are signed bytes with one scale per column and no zero point. They are within -64..63 (7
bits) or -127..127 (8 bits). ONNX Runtime adds pairs of products in 16-bit sums on x86 CPUs without
VNNI. 7-bit weights cannot saturate them: 2 x 255 x 64 = 32,640. 8-bit weights need a CPU with exact
kernels (``cpu``) and give wrong results on others.

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

com.microsoft Attention contains its projections. With static scales it is written as QAttention.
It stays float32 without calibration data, because QAttention takes no scale per row, and with
``attention_bias``, for which QAttention has no input.

An embedding table (Gather) is quantized with one scale and 8 bits if it holds at least a twentieth
of the weights: word embeddings do, position embeddings do not. Convolutions, stacked weights and
products of activations stay float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from attnserve.models.datasets import real_tokens
from attnserve.runtime.cpu import has_int8_dot_product
from attnserve.runtime.session import Batch, open_session, run, weight_bytes
from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    is_constant,
)
from graph_passes.emit.editing import Inserter, exposing, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite, InvalidData

if TYPE_CHECKING:
    from jaxtyping import Float, Int8

__all__ = [
    "QUANTIZED",
    "Bits",
    "Int8Activations",
    "Range",
    "batch_invariant",
    "collect_ranges",
    "int8_activations",
    "int8_warning",
    "int8_weight_bits",
    "quantize",
]

Bits = Literal[7, 8]
Int8Activations = Literal["static", "per-row", "dynamic"]

TABLE = 1 / 20
"""Minimum share of the weight bytes for which the table of a Gather is quantized. Smaller tables
save little and may need to be exact (rotary angles, relative positions)."""

MOST_BATCHES = 64
"""Calibration batches from which ranges are taken, evenly spaced."""

LIMITS = 9
"""Limits of the channels that smoothing compares, from the median channel to the largest one."""

COST = 400
"""Smoothing that costs a Mul must lower the squared error of products with N columns by the factor
1 + COST / N: the Mul takes the more of their time, the fewer columns they have."""

QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear",
                       "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                       "ConvInteger", "QGemm", "QAttention", "QEmbedLayerNormalization",
                       "DynamicQuantizeLSTM", "MatMulNBits", "GatherBlockQuantized"})  # fmt: skip
"""Operators of quantized models, besides QLinear..."""

LARGEST_7_BIT = 64
"""The largest absolute weight with which 16-bit sums of two products never saturate."""

INT8_PRODUCTS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul",
                           "QAttention", "QGemm", "QLinearMatMul", "ConvInteger", "QLinearConv",
                           "DynamicQuantizeLSTM"})  # fmt: skip
"""Operators that multiply 8-bit activations by 8-bit weights."""

FACTORS = frozenset({"MatMul", "Gemm", "Conv"})
"""Operators that ONNX Runtime runs in 8 bits if their inputs are dequantized."""

DYNAMIC = frozenset({"DynamicQuantizeLinear", "DynamicQuantizeMatMul", "DynamicQuantizeLSTM"})
"""Operators that quantize an activation with one scale for all of its rows."""

NORMALIZATIONS = {
    ("", "LayerNormalization"): (1, 2),
    ("", "RMSNormalization"): (1,),
    ("", "SimplifiedLayerNormalization"): (1,),
    ("com.microsoft", "SkipLayerNormalization"): (2, 3),
    ("com.microsoft", "SkipSimplifiedLayerNormalization"): (2,),
}
"""Places of the scale and the shift of normalizations."""

MICROSOFT = "com.microsoft"


@dataclass(frozen=True, eq=False)
class Range:
    """Values of an activation on calibration data, by channel.

    Attributes:
        low, high: The smallest and the largest value.
        mean, mean_square: Moments over the tokens.
    """

    low: Float[np.ndarray, " D"]
    high: Float[np.ndarray, " D"]
    mean: Float[np.ndarray, " D"]
    mean_square: Float[np.ndarray, " D"]


@dataclass(frozen=True, eq=False)
class _Product:
    """A product of an activation and constant weights.

    Attributes:
        bias: A constant vector that is added to the product.
        has_addend: Whether a Gemm adds another value.
        result: The sum.
    """

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    has_addend: bool
    result: ir.Value

    @property
    def is_attention(self) -> bool:
        return self.node.op_type == "Attention"

    @property
    def key(self) -> tuple[ir.Value, bool]:
        """The weights as they are multiplied."""
        is_transposed = self.node.op_type == "Gemm" and self.node.attributes.get_int("transB", 0)
        return self.weight, bool(is_transposed)

    def matrix(self) -> Float[np.ndarray, "D N"]:
        array = constant_array(self.weight).astype(np.float64)
        return array.T if self.key[1] else array


# ---- conversion ----------------------------------------------------------------------------------


def collect_ranges(model: ir.Model, batches: Sequence[Batch]) -> dict[ir.Value, Range]:
    """The ranges of the activations that ``quantize`` needs, without padding.

    The activations of one batch are in memory at a time.

    Raises:
        InvalidData: The model refuses a batch, the data has no token, or activations are not
            finite.
    """
    products = filter(None, map(_product, model.graph))
    values = [x for x in dict.fromkeys(product.x for product in products) if not is_constant(x)]
    inside = [value for value in values if not value.is_graph_input()]
    session = None
    if inside and batches:
        with exposing(model, inside):
            session = open_session(model, spinning=False)
    sums: dict[ir.Value, _Sums] = {value: _Sums() for value in values}
    for batch in batches[:: -(-len(batches) // MOST_BATCHES) or 1]:
        arrays = {value: batch[value.name or ""] for value in values if value.is_graph_input()}
        if session is not None:
            arrays |= dict(zip(inside, run(session, batch), strict=True))
        for value, array in arrays.items():
            if array.size:
                sums[value].add(real_tokens(np.atleast_2d(array), batch))
    return {value: each.range(value.name or "") for value, each in sums.items()} if batches else {}


class _Sums:
    """Running sums of one activation."""

    def __init__(self) -> None:
        self.count = 0
        self.low: np.ndarray | float = np.inf
        self.high: np.ndarray | float = -np.inf
        self.sum: np.ndarray | float = 0.0
        self.squares: np.ndarray | float = 0.0

    def add(self, tokens: Float[np.ndarray, "M D"]) -> None:
        if not len(tokens):
            return
        self.count += len(tokens)
        self.low = np.minimum(self.low, tokens.min(axis=0))
        self.high = np.maximum(self.high, tokens.max(axis=0))
        self.sum = self.sum + tokens.sum(axis=0, dtype=np.float64)
        self.squares = self.squares + np.einsum("md,md->d", tokens, tokens, dtype=np.float64)

    def range(self, name: str) -> Range:
        if not self.count:
            raise InvalidData(
                f"{name}: the calibration data has no unmasked token",
                "check the mask input",
                code="calibration.no_token",
            )
        low, high = np.asarray(self.low, float), np.asarray(self.high, float)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise InvalidData(
                f"{name}: the activations on the calibration data are not finite",
                "check the model and the data",
                code="calibration.not_finite",
            )
        mean, mean_square = (np.asarray(s) / self.count for s in (self.sum, self.squares))
        return Range(low, high, mean, mean_square)


def quantize(
    model: ir.Model,
    bits: Bits,
    ranges: Mapping[ir.Value, Range],
    *,
    smooth: bool = True,
    correct: bool = True,
) -> None:
    """Quantize matrix products and large embedding tables in place.

    Args:
        bits: Of the weights of products; tables have 8.
        ranges: The static activations; all others get scales per row.
        smooth: Divide large channels of static activations.
        correct: Correct biases after static activations.

    Raises:
        CannotRewrite: There are no products to quantize, or weights are not finite.
    """
    nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
    least = TABLE * weight_bytes(model)
    products = [p for p in map(_product, nodes) if p and (p.x in ranges or not p.is_attention)]
    if not products:
        raise CannotRewrite(
            "int8: the model has no MatMul, Gemm or (with calibration data) com.microsoft "
            "Attention with constant float32 weights that can be quantized",
            "keep the float32 model",
            code="precision.no_weights",
        )
    writer = _Writer(model, bits, products, smooth=smooth, correct=correct)
    groups: dict[tuple[ir.Value, ir.Graph | ir.Function | None], list[_Product]] = {}
    for product in products:
        groups.setdefault((product.x, product.node.graph), []).append(product)
    for (x, _), group in groups.items():
        source = group[0].node.inputs[0]  # x, or the quantized product that replaced it
        assert source is not None
        if x in ranges:
            writer.write_static(source, group, ranges[x])
        else:
            writer.write_per_row(source, group)
    for node in nodes:
        if _is_table(node, least):
            writer.write_table(node)
    model.opset_imports.setdefault(MICROSOFT, 1)
    remove_unused(model)


class _Writer:
    """Writes quantized products into a graph; every weight is quantized once."""

    def __init__(
        self,
        model: ir.Model,
        bits: Bits,
        products: Sequence[_Product],
        *,
        smooth: bool,
        correct: bool,
    ) -> None:
        self.graph, self.opset = model.graph, model.opset_imports.get("", 1)
        self.bits: Bits = bits
        self.smooth, self.correct = smooth, correct
        self.inputs: dict[tuple[ir.Value, bool], set[ir.Value]] = {}
        for product in products:
            self.inputs.setdefault(product.key, set()).add(product.x)
        self.weights: dict[tuple[ir.Value, bool], tuple[ir.Value, ir.Value]] = {}
        self.tables: dict[ir.Value, tuple[ir.Value, ir.Value, ir.Value]] = {}

    def write_static(self, x: ir.Value, group: Sequence[_Product], range_: Range) -> None:
        """QuantizeLinear with constants, and the products of x."""
        make = _inserter(group[0])
        divisors = self._divisors(x, group, range_)
        source, scaled = x, divisors if divisors is not None else np.ones(len(range_.low))
        if divisors is not None and not _fold_into_normalization(x, group, divisors):
            factors = make.constant((1 / divisors).astype(np.float32), "factors")
            source = make.op("Mul", [x, factors], "smooth", dtype=ir.DataType.FLOAT)
        step, zero = _byte_step((range_.low / scaled).min(), (range_.high / scaled).max())
        scale, zero_point = make.constant(step, "scale"), make.constant(zero, "zero_point")
        q = make.op("QuantizeLinear", [source, scale, zero_point], "q", dtype=ir.DataType.UINT8)
        for product in group:
            make = _inserter(product)
            weight, weight_scale = self._weight(product, divisors)
            shift = np.zeros(constant_shape(weight_scale))
            if product.bias is not None:
                shift += constant_array(product.bias).reshape(-1)
            if self.correct:
                rounded = constant_array(weight) * constant_array(weight_scale).astype(np.float64)
                shift += range_.mean @ product.matrix() - (range_.mean / scaled) @ rounded
            bias = make.constant(shift.astype(np.float32), "bias")
            if product.is_attention:
                self._write_attention(product, q, scale, weight, weight_scale, zero_point, bias)
                continue
            y = make.op(
                "MatMulIntegerToFloat",
                [q, weight, scale, weight_scale, zero_point, None, bias],
                "product",
                domain=MICROSOFT,
            )
            self._replace(product, make, y)

    def _write_attention(
        self,
        product: _Product,
        q: ir.Value,
        scale: ir.Value,
        weight: ir.Value,
        weight_scale: ir.Value,
        zero_point: ir.Value,
        bias: ir.Value,
    ) -> None:
        node = product.node
        mask = node.inputs[3] if len(node.inputs) > 3 else None
        inputs = [q, weight, bias, scale, weight_scale, mask, zero_point]
        y = _inserter(product).op("QAttention", inputs, "attention", domain=MICROSOFT)
        made = y.producer()
        assert made is not None
        made.attributes.update(node.attributes)
        made.attributes.pop("qkv_hidden_sizes", None)  # equal sizes are the default
        replace_uses(product.result, y)

    def write_per_row(self, x: ir.Value, group: Sequence[_Product]) -> None:
        """Bytes of -127..127 times the largest absolute value of each row, and the products."""
        make, axes = _inserter(group[0]), np.array([-1])
        absolute = make.op("Abs", [x], "absolute")
        if self.opset < 18:
            largest = make.op("ReduceMax", [absolute], "largest", axes=axes.tolist())
        else:
            largest = make.op("ReduceMax", [absolute, make.integers(axes, "axes")], "largest")
        least = make.constant(np.array(np.finfo(np.float32).tiny), "least", ir.DataType.FLOAT)
        peak = make.op("Max", [largest, least], "peak", dtype=ir.DataType.FLOAT)
        unit = make.op("Div", [x, peak], "unit", dtype=ir.DataType.FLOAT)
        scale = make.constant(np.array(1 / 127, np.float32), "scale")
        zero_point = make.constant(np.array(128, np.uint8), "zero_point")
        q = make.op("QuantizeLinear", [unit, scale, zero_point], "q", dtype=ir.DataType.UINT8)
        for product in group:
            make = _inserter(product)
            weight, weight_scale = self._weight(product, None)
            y = make.op(
                "MatMulIntegerToFloat",
                [q, weight, scale, weight_scale, zero_point],
                "product",
                domain=MICROSOFT,
            )
            y = make.op("Mul", [y, peak], "scaled")
            if product.bias is not None:
                y = make.op("Add", [y, product.bias], "biased")
            self._replace(product, make, y)

    def write_table(self, node: ir.Node) -> None:
        """Gather of bytes, and DequantizeLinear."""
        make = Inserter(self.graph, self.graph[0], f"{node.name}/int8")
        table = node.inputs[0]
        assert table is not None
        if table not in self.tables:
            array = constant_array(table)
            step, zero = _byte_step(array.min(), array.max())
            bytes_ = np.clip(np.round(array / step) + zero, 0, 255).astype(np.uint8)
            self.tables[table] = (make.constant(bytes_, "table"), make.constant(step, "scale"),
                                  make.constant(zero, "zero_point"))  # fmt: skip
        quantized, scale, zero_point = self.tables[table]
        assert isinstance(node.graph, ir.Graph)
        make = Inserter(node.graph, node, f"{node.name}/int8")
        axis = node.attributes.get_int("axis", 0)
        rows = make.op(
            "Gather", [quantized, node.inputs[1]], "rows", dtype=ir.DataType.UINT8, axis=axis
        )
        y = make.op("DequantizeLinear", [rows, scale, zero_point], "float")
        replace_uses(node.outputs[0], y)

    def _replace(self, product: _Product, make: Inserter, y: ir.Value) -> None:
        if product.has_addend:
            y = make.op("Add", [y, product.node.inputs[2]], "sum")
        replace_uses(product.result, y)

    def _divisors(
        self, x: ir.Value, group: Sequence[_Product], range_: Range
    ) -> Float[np.ndarray, " D"] | None:
        """Divisors of the channels of x; None if all are 1."""
        if not self.smooth or any(len(self.inputs[product.key]) > 1 for product in group):
            return None  # shared weights would need a copy for each activation
        weights = np.concatenate([product.matrix() for product in group], axis=1)
        least = 1.0 if _folds(x, group) else 1 + COST / weights.shape[1]
        return smoothing(range_, weights, self.bits, least)

    def _weight(self, product: _Product, divisors: np.ndarray | None) -> tuple[ir.Value, ir.Value]:
        """Bytes (D N) and scales (N); shared weights are never divided."""
        found = self.weights.get(product.key)
        if found is None or divisors is not None:
            matrix = product.matrix() * (1.0 if divisors is None else divisors[:, None])
            bytes_, scales = quantized_weights(matrix, self.bits)
            make = Inserter(self.graph, self.graph[0], f"{product.weight.name}/int8")
            found = make.constant(bytes_, "bytes"), make.constant(scales, "scale")
            self.weights[product.key] = found
        return found


def _inserter(product: _Product) -> Inserter:
    graph = product.node.graph
    assert isinstance(graph, ir.Graph)
    return Inserter(graph, product.node, f"{product.node.name}/int8")


def quantized_weights(
    matrix: Float[np.ndarray, "D N"], bits: Bits
) -> tuple[Int8[np.ndarray, "D N"], Float[np.ndarray, " N"]]:
    """Bytes within -64..63 (7 bits) or -127..127 (8 bits), and one scale per column.

    Raises:
        CannotRewrite: Weights are not finite.
    """
    least, largest = (-64, 63) if bits == 7 else (-127, 127)
    if not np.isfinite(matrix).all():
        raise CannotRewrite(
            "int8: the weights are not finite", "check the model", code="precision.failed"
        )
    scales = np.maximum(matrix.max(axis=0) / largest, matrix.min(axis=0) / least)
    scales = scales.astype(np.float32)
    scales[scales < np.finfo(np.float32).tiny] = 1  # columns of zeros
    bytes_ = np.clip(np.round(matrix / scales), least, largest)
    return bytes_.astype(np.int8), scales


def smoothing(
    range_: Range, weights: Float[np.ndarray, "D N"], bits: Bits, least: float
) -> Float[np.ndarray, " D"] | None:
    """Divisors of the channels of an activation; None if they lower the error too little.

    Channels above a limit are divided down to it. The limit with the least expected error of the
    product is taken. Rounding errors are independent and uniform: a step d has a variance of
    d^2 / 12.

    Args:
        least: The least factor by which the squared error must fall.
    """
    peaks = np.maximum(np.abs(range_.low), np.abs(range_.high))
    typical, largest = float(np.median(peaks)), float(peaks.max(initial=0))
    if not 0 < typical < largest:
        return None
    levels = LARGEST_7_BIT if bits == 7 else 127
    norms, absolute = np.square(weights).sum(axis=1), np.abs(weights)

    def squared_error(divisors: np.ndarray) -> float:
        step = _byte_step((range_.low / divisors).min(), (range_.high / divisors).max())[0]
        steps = (absolute * divisors[:, None]).max(axis=0) / levels  # N
        of_x = float(step) ** 2 * (np.square(divisors) * norms).sum()
        return of_x + np.square(steps).sum() * (range_.mean_square / np.square(divisors)).sum()

    candidates = [np.maximum(peaks / limit, 1) for limit in np.geomspace(typical, largest, LIMITS)]
    best = min(candidates, key=squared_error)
    if squared_error(best) * least >= squared_error(np.ones(len(peaks))):
        return None
    return best


def _byte_step(low: float, high: float) -> tuple[np.ndarray, np.ndarray]:
    """The scale and zero point of unsigned bytes from ``low`` to ``high``, and for 0."""
    low, high = min(float(low), 0.0), max(float(high), 0.0)
    step = np.array((high - low) / 255, np.float32)
    if step < np.finfo(np.float32).tiny:
        step = np.array(1, np.float32)
    return step, np.array(np.clip(np.round(-low / float(step)), 0, 255), np.uint8)


def _folds(x: ir.Value, group: Sequence[_Product]) -> bool:
    """Whether x is a normalization that only these products read, with constant parameters."""
    node = x.producer()
    places = None if node is None else NORMALIZATIONS.get((node.domain, node.op_type))
    if node is None or places is None or x is not node.outputs[0] or x.is_graph_output():
        return False
    if {user for user, _ in x.uses()} != {product.node for product in group}:
        return False
    read = [node.inputs[place] for place in places if place < len(node.inputs)]
    return read[0] is not None and all(v is None or is_constant(v) for v in read)


def _fold_into_normalization(
    x: ir.Value, group: Sequence[_Product], divisors: Float[np.ndarray, " D"]
) -> bool:
    if not _folds(x, group):
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


# ---- products ------------------------------------------------------------------------------------


def _product(node: ir.Node) -> _Product | None:
    """The product that a node computes, if it can be quantized."""
    kind = (node.domain, node.op_type)
    if kind not in {("", "MatMul"), ("", "Gemm"), (MICROSOFT, "Attention")}:
        return None
    x, weight = node.inputs[:2]
    if x is None or weight is None or not _is_matrix(weight):
        return None
    result, bias, has_addend = node.outputs[0], None, False
    match node.op_type:
        case "MatMul":
            result, bias = _biased(result, constant_shape(weight)[1])
        case "Gemm":
            numbers = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
            if numbers != [1.0, 1.0] or node.attributes.get_int("transA", 0):
                return None
            width = constant_shape(weight)[0 if node.attributes.get_int("transB", 0) else 1]
            addend = node.inputs[2] if len(node.inputs) > 2 else None
            if addend is not None and _is_row(addend, width):
                bias = addend
            has_addend = addend is not None and bias is None
        case _:
            bias = node.inputs[2] if len(node.inputs) > 2 else None
            others = any(value is not None for value in node.inputs[4:])  # cache, attention_bias
            sizes = node.attributes.get_ints("qkv_hidden_sizes", ())
            if not is_constant(bias) or others or len(set(sizes)) > 1 or len(node.outputs) > 1:
                return None
    return _Product(node, x, weight, bias, has_addend, result)


def _is_matrix(value: ir.Value) -> bool:
    if not is_constant(value) or len(shape := constant_shape(value)) != 2 or 0 in shape:
        return False  # ONNX Runtime has no kernel for stacked matrices with a scale per column
    tensor = constant_tensor(value)
    dtype = constant_array(value).dtype if tensor is None else tensor.dtype.numpy()
    return dtype == np.float32


def _is_row(value: ir.Value, width: int) -> bool:
    return is_constant(value) and constant_shape(value) in ((width,), (1, width))


def _biased(product: ir.Value, width: int) -> tuple[ir.Value, ir.Value | None]:
    """The sum of a product and a constant vector, if nothing else reads the product."""
    uses = list(product.uses())
    if len(uses) == 1 and not product.is_graph_output():
        user, place = uses[0]
        here = product.producer()
        if user.op_type == "Add" and here is not None and user.graph is here.graph:
            other = user.inputs[1 - place]
            if other is not None and is_constant(other) and constant_shape(other) == (width,):
                return user.outputs[0], other
    return product, None


def _is_table(node: ir.Node, least: float) -> bool:
    """Whether a Gather reads a table of at least this many bytes, which no product reads."""
    if (node.domain, node.op_type) != ("", "Gather"):
        return False
    value = node.inputs[0]
    if value is None or not value.is_initializer() or value.const_value is None:
        return False
    tensor = value.const_value
    is_matrix = tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == 2
    return (
        is_matrix
        and tensor.nbytes >= least
        and all(user.op_type == "Gather" for user, _ in value.uses())
    )


# ---- quantized models ----------------------------------------------------------------------------


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
    """Bits of the signed 8-bit weights that are multiplied by 8-bit activations.

    7 if all are within -64..64 (other tools do not clamp 64 to 63), 8 if not, None without such
    weights. Unsigned weights are not counted: their kernels do not saturate.
    """
    bits: Bits | None = None
    for value in _int8_weights(model):
        weights = constant_array(value)
        if weights.size and max(-int(weights.min()), int(weights.max())) > LARGEST_7_BIT:
            return 8
        bits = 7
    return bits


def _int8_weights(model: ir.Model) -> Iterator[ir.Value]:
    """Signed 8-bit weights of products with 8-bit activations."""
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if not _multiplies_int8(node):
            continue
        for value in node.inputs:
            tensor = None if value is None else constant_tensor(value)
            if tensor is not None and tensor.dtype == ir.DataType.INT8 and len(tensor.shape) > 1:
                assert value is not None
                yield value


def _multiplies_int8(node: ir.Node) -> bool:
    """Whether a node multiplies constants by 8-bit activations, or dequantizes such constants."""
    if node.op_type != "DequantizeLinear":
        return node.op_type in INT8_PRODUCTS
    # ONNX Runtime converts a product to QLinearMatMul if all its factors are dequantized.
    users = [user for user, _ in node.outputs[0].uses() if user.op_type in FACTORS]
    return any(_is_dequantized(value) for user in users for value in user.inputs[:1])


def _is_dequantized(value: ir.Value | None) -> bool:
    producer = None if value is None else value.producer()
    return producer is not None and producer.op_type == "DequantizeLinear"


def int8_warning(model: ir.Model) -> str | None:
    """Return why int8 products of the model are inexact on this CPU; None if they are exact."""
    if has_int8_dot_product() or int8_weight_bits(model) != 8:
        return None
    return (
        "int8 weights outside -64..64 saturate on this CPU, which has no VNNI, AMX or ARM dot "
        "product: results are inaccurate; quantize the float32 model with 7-bit weights "
        "(attnserve precision int8, or reduce_range=True in onnxruntime.quantization)"
    )
