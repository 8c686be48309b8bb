"""The projections of attention: queries, keys and values by head, and the output projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "BroadcastLayout",
    "Norm",
    "OutputProjection",
    "Projection",
    "QuantizedProduct",
    "QuantizedWeight",
    "RotaryTerm",
    "Weight",
]

HeadLayout = Literal["B H T K", "B*H T K", "B T H*K", "inside"]
"""The order of the axes of projected heads; "inside" for heads that no value holds."""


@dataclass(frozen=True, eq=False)
class BroadcastLayout:
    """Broadcasting of a token-independent value to heads (B, H, T, K).

    Attributes:
        value: Rotary angles, or cached keys or values.
        axes: The role of each axis of the value: the batch, the tokens, or elements selected by an
            (H, K) array of indices (zeros if the axis has length 1).
        positions: If given, ``value[positions]`` is broadcast, (B or 1, T, ...).
        is_last_position: Positions are those of the last token of each sequence.
        dtype: The precision of the value; None if unknown. Half-precision models may rotate in
            single precision.
    """

    value: ir.Value
    axes: tuple[Literal["batch", "token"] | Int[np.ndarray, "H K"], ...]
    positions: ir.Value | None = None
    is_last_position: bool = False
    dtype: ir.DataType | None = None

    @property
    def token_axis(self) -> int:
        """The axis of the value that counts tokens."""
        return next(
            i for i, axis in enumerate(self.axes) if isinstance(axis, str) and axis == "token"
        )

    def broadcast(
        self, array: np.ndarray, batch: int, length: int, positions: np.ndarray | None = None
    ) -> np.ndarray:
        """Reshape the elements of the value to (B or 1, H or 1, T or 1, K or 1).

        Args:
            array: The elements of ``value``.
            batch: B.
            length: T.
            positions: The elements of ``positions``: one per token, or one per sequence for its
                first (or last) token.
        """
        if positions is not None:
            if self.is_last_position or positions.ndim == 1:
                first = positions.reshape(-1, 1) - (length - 1 if self.is_last_position else 0)
                positions = first + np.arange(length)
            array = array[positions]
        by_role = {
            "batch": np.arange(batch)[:, None, None, None],
            "token": np.arange(length)[None, None, :, None],
        }
        index = [
            by_role[axis] if isinstance(axis, str) else axis[None, :, None, :] for axis in self.axes
        ]
        return array[tuple(index)]


@dataclass(frozen=True, eq=False)
class RotaryTerm:
    """One term of a projection with rotary embeddings.

        term[b, h, t, k] = factor[b, h, t, k] * ( (x W)[columns[h, k]] * gain[h, k] + offset[h, k] )

    Attributes:
        factor: Cosines or sines by position; None means 1.
        columns: The column of W of each element of each head.
        gain: Element-wise factors, for example -1 for elements that a rotation subtracts.
        offset: The bias.
    """

    factor: BroadcastLayout | None
    columns: Int[np.ndarray, "H K"]
    gain: Float[np.ndarray, "H K"]
    offset: Float[np.ndarray, "H K"]


@dataclass(frozen=True, eq=False)
class Norm:
    """q/k norm: groups of columns of a projection, divided by their size.

        u = scale * ((x W)[columns] * gain + offset);  n = u / size(u)
        size(u) = max(sqrt(mean(u^2) + epsilon), least) + added

    The L2 norm is this norm with another scale of the projection. The weight and bias of the norm
    are gain and offset of the projection, whose columns index the flattened elements of n.

    Attributes:
        node: The last node of the norm before its weight.
        columns: The columns of W of each group of L elements that are normalized together.
        gain: Factors of the elements before the norm.
        offset: The bias of the elements before the norm.
        scale: A scalar factor before the norm.
        epsilon: Added to the mean square.
        centered: Whether the mean of u is subtracted first, as in LayerNorm.
        least: Lower bound of the root.
        added: Added to the root.
        rotary_terms: All terms of u, by group instead of by head, if rotary embeddings precede the
            norm (the first has ``columns``).
    """

    node: ir.Node
    columns: Int[np.ndarray, "G L"]
    gain: Float[np.ndarray, "G L"]
    offset: Float[np.ndarray, "G L"]
    scale: float
    epsilon: float
    centered: bool
    least: float = 0.0
    added: float = 0.0
    rotary_terms: tuple[RotaryTerm, ...] = ()

    def __call__(self, u: Float[np.ndarray, "*batch L"]) -> Float[np.ndarray, "*batch L"]:
        """Normalize ``scale * u``."""
        u = self.scale * u
        if self.centered:
            u = u - u.mean(axis=-1, keepdims=True)
        size = np.sqrt(np.square(u).mean(axis=-1, keepdims=True) + self.epsilon)
        return u / (np.maximum(size, self.least) + self.added)

    def operand(self, part: Projection) -> Projection:
        """The projection that the norm divides by its size, by group instead of by head."""
        return replace(
            part,
            columns=self.columns,
            gain=self.gain,
            offset=self.offset,
            scale=1.0,
            rotary_terms=self.rotary_terms,
            norm=None,
        )


@dataclass(frozen=True)
class Weight:
    """A constant W of floats.

    Attributes:
        value: The constant.
        contracted: The axes of ``value`` that are contracted with the last axis of the tokens: (0,)
            for (D, N), (1,) for (N, D). The other axes, flattened, are the columns.
    """

    value: ir.Value
    contracted: tuple[int, ...]

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """W as a matrix: contracted axes as rows, the others as columns."""
        array = constant_array(self.value)
        rows = math.prod(array.shape[axis] for axis in self.contracted)
        axes = range(len(self.contracted))
        return np.moveaxis(array, self.contracted, axes).reshape(rows, -1)


@dataclass(frozen=True)
class QuantizedWeight:
    """A constant whose elements are not read."""

    value: ir.Value


@dataclass(frozen=True)
class QuantizedProduct(QuantizedWeight):
    """A quantized weight, and its product with tokens, which stays in the graph.

    Attributes:
        product: (B, T, N) in floating point; it may include a bias.
        num_columns: N.
        is_flat: Whether the axes of the tokens differ from the axes of the projection's input,
            mostly (B*T, N).
    """

    product: ir.Value
    num_columns: int
    is_flat: bool


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of tokens, by head.

        out[b, h, t, k] = scale * ( (input[b, t] @ W)[columns[h, k]] * gain[h, k] + offset[h, k] )

    ``columns`` maps each element of a head to a column of W. Packed projections, shared columns and
    any order of heads have the same representation.

    If the projection ``is_cached``, the heads ``past`` of earlier tokens precede those of
    ``input``.

    Attributes:
        input: The tokens: (B, S, D) if ``by_sequence``, else flattened or split into windows. The
            cached heads if there is no weight.
        weight: W; None if all heads are inputs (``past``), as in cached cross-attention.
        width: D, the size of the tokens; 0 if all heads are inputs.
        dtype: The element type in which the heads are computed: the type of the weight, or of its
            quantized product.
        columns: The column of each element of each head.
        gain: Element-wise factors, for example the mixing matrix of collaborative heads.
        offset: The bias.
        scale: The product of all scalar factors.
        output: The operand of the scores or of the context; None inside a fused operator.
        nodes: The nodes from the product to ``output``, in order.
        by_sequence: Whether ``input`` is (B, S, D), with the batch and length of ``output``.
        layout: The layout of ``output``: heads in an axis of their own, merged with the batch, or
            merged with K; "inside" if ``output`` is None.
        rotary_terms: All terms of the sum if there are rotary embeddings (the first has
            ``columns``).
        norm: The q/k norm, applied before the rotary embedding of ``rotary_terms``.
        past: The cached heads, which precede those of ``input``; None without a cache.
        axes: The permutation of ``output`` to (B, H, T, K), (B*H, T, K) or (B, T, H*K).
        sequence_first: Whether the tokens of ``input`` are ordered (S, B).
    """

    input: ir.Value
    weight: Weight | QuantizedProduct | None
    width: int
    dtype: ir.DataType
    columns: Int[np.ndarray, "H K"]
    gain: Float[np.ndarray, "H K"]
    offset: Float[np.ndarray, "H K"]
    scale: float
    output: ir.Value | None
    nodes: tuple[ir.Node, ...]
    by_sequence: bool
    layout: HeadLayout
    rotary_terms: tuple[RotaryTerm, ...] = ()
    norm: Norm | None = None
    past: BroadcastLayout | None = None
    axes: tuple[int, ...] = ()
    sequence_first: bool = False

    @property
    def has_weight(self) -> bool:
        """Whether the graph computes heads from tokens; otherwise all heads are cached."""
        return self.weight is not None

    @property
    def is_quantized(self) -> bool:
        """Whether the weight is quantized, so that the heads are read from its product."""
        return isinstance(self.weight, QuantizedWeight)

    @property
    def is_cached(self) -> bool:
        """Whether the graph has inputs with the heads of earlier tokens."""
        return self.past is not None

    def sequences(self, shape_of: Callable[[ir.Value], tuple[int, ...]]) -> int:
        """B, the number of sequences, given the shapes of values."""
        tokens = shape_of(self.input)
        if self.output is None or not self.has_weight or self.by_sequence:
            return tokens[0]
        return math.prod(tokens[:-1]) // shape_of(self.output)[self.token_axis]

    @property
    def factors(self) -> tuple[BroadcastLayout, ...]:
        """The cosines and sines of all rotary embeddings, before and after the norm."""
        terms = (*(() if self.norm is None else self.norm.rotary_terms), *self.rotary_terms)
        return tuple(term.factor for term in terms if term.factor is not None)

    @property
    def token_axis(self) -> int:
        """The axis of ``output`` that counts tokens."""
        return self.axes[1 if self.layout == "B T H*K" else -2]

    @property
    def num_heads(self) -> int:
        """H, the number of heads."""
        return self.columns.shape[0]

    @property
    def head_size(self) -> int:
        """The size of a head: K for queries and keys, V for values."""
        return self.columns.shape[1]

    @property
    def num_distinct_heads(self) -> int:
        """Number of heads with distinct columns: less than H for grouped key/value heads."""
        return len(np.unique(self.columns, axis=0))

    @property
    def source(self) -> ir.Value:
        """The value that the heads are computed from: ``input``, or the quantized product."""
        return self.weight.product if isinstance(self.weight, QuantizedProduct) else self.input

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """W as a matrix, input size first, if it is a ``Weight``."""
        assert isinstance(self.weight, Weight)
        return self.weight.matrix()

    def heads(self) -> Float[np.ndarray, "H D K"]:
        """W^h of each head, without ``scale``."""
        picked = self.matrix()[:, self.columns]  # D H K
        return np.moveaxis(picked, 1, 0) * self.gain[:, None, :]


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The output projection: concat(heads)[rows] @ W_O + bias.

    Attributes:
        input: The context operand of the product, (B, S, H*V) or (B, S, H, V).
        weight: W_O. If it is quantized, the block ends at ``input``.
        rows: The row of W_O for element v of head h.
        bias: A constant; None without a bias, or if W_O is quantized.
        output: The value after the bias, (B, S, D) or (B*S, D); ``input`` if W_O is quantized.
        nodes: The nodes from the context to ``output``.
        sequence_first: Whether the tokens of ``output`` are ordered (S, B).
    """

    input: ir.Value
    weight: Weight | QuantizedWeight
    rows: Int[np.ndarray, "H V"]
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    sequence_first: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether W_O is quantized."""
        return isinstance(self.weight, QuantizedWeight)

    def matrix(self) -> Float[np.ndarray, "N D"]:
        """W_O as a matrix, heads first, if it is a ``Weight``."""
        assert isinstance(self.weight, Weight)
        return self.weight.matrix()

    def offset(self) -> Float[np.ndarray, " D"]:
        """The bias, or a single zero without a bias."""
        if self.bias is None:
            return np.zeros(1, dtype=np.float32)
        return constant_array(self.bias).reshape(-1)
