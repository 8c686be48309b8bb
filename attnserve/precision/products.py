"""Products that can be quantized, and statistics of their activations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.data.row_batches import thinned
from attnserve.models.masks import no_token, not_finite, vector_mask
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    is_constant,
    is_dequantized,
)
from graph_passes.analysis.operator_sets import MICROSOFT

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = [
    "MOMENT_TOKENS",
    "InputMoments",
    "Product",
    "Range",
    "WeightKey",
    "collect_ranges",
    "product_of",
]

MOMENT_TOKENS = 8192
"""Number of calibration tokens for second moments, evenly spaced. On MiniLM, 3,000 tokens are
nearly as good."""

MOMENT_BYTES = 2**29
"""Memory for second moments: enough for all of MiniLM, or a quarter of BERT-large."""


@dataclass(frozen=True, eq=False)
class Range:
    """Range and moments of an activation on calibration data, by channel.

    Attributes:
        low: The smallest value.
        high: The largest value.
        mean: The mean over the tokens.
        mean_square: The mean of the square over the tokens.
    """

    low: Float[np.ndarray, " D"]
    high: Float[np.ndarray, " D"]
    mean: Float[np.ndarray, " D"]
    mean_square: Float[np.ndarray, " D"]


class WeightKey(NamedTuple):
    """Identifies weights in a model and its copies.

    Attributes:
        name: The name of the value with the weights.
        is_transposed: Whether a Gemm transposes the weights.
    """

    name: str
    is_transposed: bool


@dataclass(frozen=True, eq=False)
class Product:
    """A product of an activation and a constant float32 matrix, which can be quantized.

    ``graph_passes.blocks.Linear`` also describes stacked and quantized weights, element by element.

    Attributes:
        node: The MatMul, Gemm or Attention.
        x: The activation.
        weight: A float32 matrix.
        bias: A constant vector that is added to the product.
        has_addend: Whether a Gemm adds another value.
        result: The value after the bias or the addend.
    """

    node: ir.Node
    x: ir.Value
    weight: ir.Value
    bias: ir.Value | None
    has_addend: bool
    result: ir.Value

    @property
    def is_attention(self) -> bool:
        """Whether the node is com.microsoft Attention, which projects inside."""
        return self.node.op_type == "Attention"

    @property
    def key(self) -> WeightKey:
        """The weights, which other products may share."""
        is_transposed = self.node.op_type == "Gemm" and self.node.attributes.get_int("transB", 0)
        return WeightKey(self.weight.name or "", bool(is_transposed))

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """The weights in float64, input size first."""
        array = constant_array(self.weight).astype(np.float64)
        return array.T if self.key.is_transposed else array


def collect_ranges(model: ir.Model, batches: Sequence[Batch]) -> dict[str, Range]:
    """The ranges of the activations of all products, by the name of the value, without padding.

    Up to 64 batches, evenly spaced, are observed. The activations of one batch are in memory at a
    time.

    Raises:
        InvalidData: The model refuses a batch, the data has no token, or activations are not
            finite.
    """
    values = list(_activations(model))
    sums: dict[ir.Value, _InputSums] = {value: _InputSums() for value in values}
    few = batches[:: -(-len(batches) // 64) or 1]
    for tokens in _observe_tokens(model, values, few):
        for value, array in tokens.items():
            sums[value].add(array)
    if not batches:
        return {}
    return {value.name or "": each.range(value.name or "") for value, each in sums.items()}


class InputMoments:
    """Second moments of the activations of products, over tokens without padding.

    Moments are computed on first request, together with the moments of later products up to
    ``MOMENT_BYTES``, which then replace them: request moments in the order of the graph.

    Args:
        model: The model, which may be changed afterwards.
        batches: Calibration data.
    """

    def __init__(self, model: ir.Model, batches: Sequence[Batch]) -> None:
        self._model = model.clone()
        self._widths = _activations(self._model)
        self._batches = thinned(batches, MOMENT_TOKENS) if batches else []
        self._known: dict[str, tuple[Float[np.ndarray, "D D"], Float[np.ndarray, " D"]]] = {}

    def moment(self, name: str, *, centered: bool = False) -> Float[np.ndarray, "D D"] | None:
        """E[x x^T] of the activation of this name, or its covariance; None without data.

        Raises:
            InvalidData: The model refuses a batch, the data has no token, or activations are not
                finite.
        """
        values = list(self._widths)
        names = [value.name for value in values]
        if not self._batches or name not in names:
            return None
        if name not in self._known:
            self._collect(values[names.index(name) :])
        moment, mean = self._known[name]
        return moment - np.outer(mean, mean) if centered else moment

    def _collect(self, values: Sequence[ir.Value]) -> None:
        """Compute the moments of the first of these values, up to ``MOMENT_BYTES``."""
        fits = np.cumsum([4 * self._widths[value] ** 2 for value in values]) <= MOMENT_BYTES
        first_values = values[: max(int(fits.sum()), 1)]
        self._known.clear()
        squares: dict[ir.Value, Any] = dict.fromkeys(first_values, 0.0)
        sums: dict[ir.Value, Any] = dict.fromkeys(first_values, 0.0)
        count = dict.fromkeys(first_values, 0)
        for tokens in _observe_tokens(self._model, first_values, self._batches):
            for value, array in tokens.items():
                squares[value] += array.T @ array
                sums[value] += array.sum(axis=0, dtype=np.float64)
                count[value] += len(array)
        for value in first_values:
            name = value.name or ""
            if not count[value]:
                raise no_token(name)
            if not np.isfinite(sums[value]).all():
                raise not_finite(name)
            squares[value] /= np.float32(count[value])
            self._known[name] = (squares[value], sums[value] / count[value])


def _activations(model: ir.Model) -> dict[ir.Value, int]:
    """The activations of products in the main graph that vary, with their widths."""
    products = filter(None, map(product_of, model.graph))
    return {
        product.x: constant_shape(product.weight)[product.key.is_transposed]
        for product in products
        if not is_constant(product.x)
    }


def _observe_tokens(
    model: ir.Model, values: Sequence[ir.Value], batches: Sequence[Batch]
) -> Iterator[dict[ir.Value, Float[np.ndarray, "M D"]]]:
    """Yield the tokens of activations in each batch, without padding."""
    for batch, [array] in observe(model, [values], batches):
        arrays = zip(values, map(np.atleast_2d, array), strict=True)
        yield {v: a[vector_mask(a.shape, batch)] for v, a in arrays if a.size}


class _InputSums:
    """Running sums of one activation."""

    def __init__(self) -> None:
        self.count = 0
        self.low: np.ndarray | float = np.inf
        self.high: np.ndarray | float = -np.inf
        self.sum: np.ndarray | float = 0.0
        self.squares: np.ndarray | float = 0.0

    def add(self, tokens: Float[np.ndarray, "M D"]) -> None:
        """Add the tokens of one batch."""
        if not len(tokens):
            return
        self.count += len(tokens)
        self.low = np.minimum(self.low, tokens.min(axis=0))
        self.high = np.maximum(self.high, tokens.max(axis=0))
        self.sum = self.sum + tokens.sum(axis=0, dtype=np.float64)
        self.squares = self.squares + np.einsum("md,md->d", tokens, tokens, dtype=np.float64)

    def range(self, name: str) -> Range:
        """The range of all tokens.

        Args:
            name: Name of the activation, for errors.

        Raises:
            InvalidData: The data has no token, or activations are not finite.
        """
        if not self.count:
            raise no_token(name)
        low = np.asarray(self.low, float)
        high = np.asarray(self.high, float)
        if not (np.isfinite(low).all() and np.isfinite(high).all()):
            raise not_finite(name)
        mean = np.asarray(self.sum) / self.count
        mean_square = np.asarray(self.squares) / self.count
        return Range(low, high, mean, mean_square)


def product_of(node: ir.Node) -> Product | None:
    """The product that a node computes, if it can be quantized."""
    kind = (node.domain, node.op_type)
    if kind not in {("", "MatMul"), ("", "Gemm"), (MICROSOFT, "Attention")}:
        return None
    x, weight = node.inputs[:2]
    if x is None or weight is None or not _is_matrix(weight):
        return None
    result = node.outputs[0]
    bias: ir.Value | None = None
    has_addend = False
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
            extras = [v for v in node.inputs[4:] if v is not None]  # cache, attention_bias
            sizes = node.attributes.get_ints("qkv_hidden_sizes", ())
            if not is_constant(bias) or extras or len(set(sizes)) > 1 or len(node.outputs) > 1:
                return None
    return Product(node, x, weight, bias, has_addend, result)


def _is_matrix(value: ir.Value) -> bool:
    """Whether a value is a constant float32 matrix."""
    if is_constant(value) and is_dequantized(value):
        return False  # quantized already
    if not is_constant(value) or len(shape := constant_shape(value)) != 2 or 0 in shape:
        return False  # ONNX Runtime has no kernel for stacked matrices with a scale per column
    tensor = constant_tensor(value)
    dtype = constant_array(value).dtype if tensor is None else tensor.dtype.numpy()
    return dtype == np.float32


def _is_row(value: ir.Value, width: int) -> bool:
    """Whether a value is a constant vector of this length, or a matrix of one row."""
    return is_constant(value) and constant_shape(value) in ((width,), (1, width))


def _biased(product: ir.Value, width: int) -> tuple[ir.Value, ir.Value | None]:
    """The sum of a product and a constant vector, if no other node reads the product."""
    uses = list(product.uses())
    if len(uses) == 1 and not product.is_graph_output():
        user, place = uses[0]
        here = product.producer()
        if user.op_type == "Add" and here is not None and user.graph is here.graph:
            other = user.inputs[1 - place]
            if other is not None and is_constant(other) and constant_shape(other) == (width,):
                return user.outputs[0], other
    return product, None
