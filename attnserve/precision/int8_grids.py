"""The bytes of int8: grids of activations, their smoothing, and quantized weights and tables.

Smoothing (SmoothQuant, arXiv 2211.10438): a few channels of a static activation may be ten times as
large as the others, and then set the scale of all channels. Large channels are divided by
constants, and the rows of the weights are multiplied by the same constants. Clipping is less
accurate. The division is folded into the preceding normalization if no other node reads it;
otherwise it costs a Mul, and is left out if it improves little.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.models.quantized import Bits
from attnserve.precision.products import Product, Range, WeightKey, product_of
from attnserve.precision.rounding import Rounder
from attnserve.runtime.external_data import weight_bytes
from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.errors import CannotRewrite

if TYPE_CHECKING:
    from jaxtyping import Float, Int8, UInt8

__all__ = [
    "LEVELS",
    "NORMALIZATIONS",
    "ActivationGroup",
    "ByteTable",
    "Grid",
    "Rounding",
    "activations_of",
    "byte_table",
    "is_foldable",
    "large_tables",
    "product_groups",
    "quantized_arrays",
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


@dataclass(frozen=True, eq=False)
class Rounding:
    """Rounding of weights W (D, N) to bytes: round((W * divisors + offset) / scales).

    Attributes:
        divisors: Smoothing divisors of the activation; None if all are 1.
        scales: The scale of each column.
        offset: The chosen bytes times the scales, minus W * divisors, for the weights of which the
            rounding was computed.
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
        required: Whether to refuse a model without such products.

    Raises:
        CannotRewrite: The model has no products to quantize.
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
    activations = activations_of(converted_products)
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
        precomputed = (rounding or {}).get(products[0].key)
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
    """Smoothing divisors of the activation of these products; None if they improve too little."""
    weights = np.concatenate([product.matrix() for product in products], axis=1)
    min_factor = 1.0 if is_foldable(products[0].x, products) else 1 + COST / weights.shape[1]
    return smoothing(range_, weights, bits, min_factor)


def _grid(range_: Range, divisors: Float[np.ndarray, " D"] | None) -> Grid:
    """The bytes of an activation with this range, divided by the divisors."""
    scaled = 1.0 if divisors is None else divisors
    step, zero_point = _byte_step((range_.low / scaled).min(), (range_.high / scaled).max())
    return Grid(divisors, step, zero_point, range_.mean)


def activations_of(products: Sequence[Product]) -> dict[WeightKey, set[ir.Value]]:
    """The activations by which each weight is multiplied."""
    inputs: dict[WeightKey, set[ir.Value]] = {}
    for product in products:
        inputs.setdefault(product.key, set()).add(product.x)
    return inputs


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
    range_: Range, weights: Float[np.ndarray, "D N"], bits: Bits, min_factor: float
) -> Float[np.ndarray, " D"] | None:
    """Compute smoothing divisors of an activation; None if they reduce the error too little.

    Channels above a limit are divided down to it. The limit with the least expected error of the
    product is taken. Rounding errors are independent and uniform: a step d has a variance of
    d^2 / 12.

    Args:
        min_factor: Minimum factor by which the squared error must decrease.
    """
    peaks = np.maximum(np.abs(range_.low), np.abs(range_.high))
    typical = float(np.median(peaks))
    largest = float(peaks.max(initial=0))
    if not 0 < typical < largest:
        return None
    levels = -LEVELS[bits][0]
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
    if squared_error(best) * min_factor >= squared_error(np.ones(len(peaks))):
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


def is_foldable(x: ir.Value, products: Sequence[Product]) -> bool:
    """Whether x is a normalization that only these products read, with constant parameters."""
    node = x.producer()
    places = None if node is None else NORMALIZATIONS.get((node.domain, node.op_type))
    if node is None or places is None or x is not node.outputs[0] or x.is_graph_output():
        return False
    if {user for user, _ in x.uses()} != {product.node for product in products}:
        return False
    parameters = [node.inputs[place] for place in places if place < len(node.inputs)]
    return parameters[0] is not None and all(v is None or is_constant(v) for v in parameters)


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
    """Whether a Gather reads a table of at least ``min_bytes`` that no product reads.

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
