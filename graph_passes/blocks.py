"""Matched blocks as data: ``AttentionBlock``, ``FeedForwardBlock`` and their parts.

Dimensions, used in the whole project:

    B  batch                 H  heads                   K  head size (queries and keys)
    S  query length          G  key/value heads         V  value head size
    T  key length            D  input size (of x)       R  shared dimension of collaborative heads
    F  neurons               E  input size (of y)       N  columns of a projection

A block is invalid once its graph has changed: find again after each rewrite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, constant_shape

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "AttentionBlock",
    "BlockForm",
    "BroadcastLayout",
    "Capped",
    "Causal",
    "FeedForwardBlock",
    "Floor",
    "FullLengths",
    "KeyLengths",
    "KeyMask",
    "Linear",
    "LogitStep",
    "Mask",
    "Norm",
    "Operand",
    "OutputProjection",
    "PositionBias",
    "Projection",
    "QuantizedProduct",
    "Reused",
    "RotaryTerm",
    "Scaled",
    "Softmax",
    "Unmatched",
    "Weighted",
    "weight_matrix",
]

HeadLayout = Literal["B H T K", "B*H T K", "B T H*K", "inside"]
"""The order of the axes of projected heads; "inside" for heads that no value holds."""

BlockForm = Literal["standard", "collaborative", "sparse", "reuse", "skip"]
"""How a block computes its probabilities; "skip" stands for a removed attention layer."""


@dataclass(frozen=True, eq=False)
class BroadcastLayout:
    """Broadcasting of a token-independent value to heads (B, H, T, K).

    Attributes:
        value: Rotary angles, or cached keys or values.
        axes: The role of each axis of the value: the batch, the tokens, or elements selected by an
            (H, K) array of indices (zeros if the axis has length 1).
        positions: If given, ``value[positions]`` is broadcast, (B or 1, T, ...).
        is_last_position: Positions are those of the last token of each sequence.
    """

    value: ir.Value
    axes: tuple[Literal["batch", "token"] | Int[np.ndarray, "H K"], ...]
    positions: ir.Value | None = None
    is_last_position: bool = False

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
        offset: Their bias.
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


class QuantizedProduct(NamedTuple):
    """A product of tokens and a quantized weight, which is read as it is.

    Attributes:
        value: (B, T, N) in floating point; it may include a bias.
        width: N.
        is_flat: Whether the axes of the tokens are not those of the projection's input, mostly
            (B*T, N).
    """

    value: ir.Value
    width: int
    is_flat: bool


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of tokens, by head.

        out[b, h, t, k] = scale * ( (input[b, t] @ W)[columns[h, k]] * gain[h, k] + offset[h, k] )

    ``columns`` maps each element of a head to a column of W. Packed projections, shared columns and
    any order of heads have the same representation.

    A projection ``has_weight`` unless all its heads are inputs of the graph. If W ``is_quantized``,
    its elements are not read, and ``product`` is the value input @ W of the graph. If the
    projection ``is_cached``, the heads ``past`` of earlier tokens precede those of ``input``.

    Attributes:
        input: The tokens: (B, S, D) if ``by_sequence``, else flattened or split into windows. The
            cached heads if there is no weight.
        weight: W, a constant; None if all heads are inputs (``past``), as in cached
            cross-attention.
        contracted: The axes of ``weight`` that are contracted with the last axis of the tokens:
            (0,) for (D, N), (1,) for (N, D). The other axes, flattened, are the columns. Empty if
            the weight is an integer tensor, from which no matrix is computed.
        width: D, the size of the tokens; 0 if all heads are inputs.
        dtype: The element type in which the heads are computed: that of the weight, or of
            ``product``.
        product: input @ W if W is quantized, else None.
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
    weight: ir.Value | None
    contracted: tuple[int, ...]
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
    product: QuantizedProduct | None = None
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
        """Whether the weight is quantized, so that the heads are read from ``product``."""
        return self.product is not None

    @property
    def is_cached(self) -> bool:
        """Whether there are heads of earlier tokens, which are inputs of the graph."""
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

    def before_norm(self) -> Projection:
        """The projection that the q/k norm divides by its size, by group instead of by head."""
        norm = self.norm
        assert norm is not None
        return replace(
            self,
            columns=norm.columns,
            gain=norm.gain,
            offset=norm.offset,
            scale=1.0,
            rotary_terms=norm.rotary_terms,
            norm=None,
        )

    @property
    def token_axis(self) -> int:
        """The axis of ``output`` that counts tokens."""
        return self.axes[1 if self.layout == "B T H*K" else -2]

    @property
    def num_heads(self) -> int:
        """H."""
        return self.columns.shape[0]

    @property
    def head_size(self) -> int:
        """K, or V for values."""
        return self.columns.shape[1]

    @property
    def num_distinct_heads(self) -> int:
        """Number of heads with distinct columns: less than H for grouped key/value heads."""
        return len(np.unique(self.columns, axis=0))

    @property
    def source(self) -> ir.Value:
        """The value that the heads are computed from: ``input``, or the quantized product."""
        return self.input if self.product is None else self.product.value

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """W as a matrix, input size first."""
        assert self.weight is not None, "cached heads have no weight"
        return weight_matrix(self.weight, self.contracted)

    def heads(self) -> Float[np.ndarray, "H D K"]:
        """W^h of each head, without ``scale``."""
        picked = self.matrix()[:, self.columns]  # D H K
        return np.moveaxis(picked, 1, 0) * self.gain[:, None, :]


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The output projection: concat(heads)[rows] @ W_O + bias.

    Attributes:
        input: The context operand of the product, (B, S, H*V) or (B, S, H, V).
        weight: W_O, a constant.
        contracted: The axes of ``weight`` that are contracted with the heads; empty if W_O is
            quantized.
        rows: The row of W_O for element v of head h.
        bias: A constant; None without a bias, or if W_O is quantized.
        output: The value after the bias, (B, S, D) or (B*S, D); ``input`` if W_O is quantized.
        nodes: The nodes from the context to ``output``.
        sequence_first: Whether the tokens of ``output`` are ordered (S, B).
        is_quantized: Whether W_O is quantized. The block then ends at ``input``.
    """

    input: ir.Value
    weight: ir.Value
    contracted: tuple[int, ...]
    rows: Int[np.ndarray, "H V"]
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    sequence_first: bool = False
    is_quantized: bool = False

    def matrix(self) -> Float[np.ndarray, "N D"]:
        """W_O as a matrix, heads first."""
        return weight_matrix(self.weight, self.contracted)

    def offset(self) -> Float[np.ndarray, " D"]:
        """The bias, or a single zero without a bias."""
        if self.bias is None:
            return np.zeros(1, dtype=np.float32)
        return constant_array(self.bias).reshape(-1)


def weight_matrix(weight: ir.Value, contracted: tuple[int, ...]) -> Float[np.ndarray, "D N"]:
    """The elements of a constant as a matrix: contracted axes as rows, the others as columns."""
    assert contracted, "a weight of integers has no matrix"
    array = constant_array(weight)
    rows = math.prod(array.shape[axis] for axis in contracted)
    return np.moveaxis(array, contracted, range(len(contracted))).reshape(rows, -1)


@dataclass(frozen=True, eq=False)
class PositionBias:
    """logits + sign * value: an additive mask or a position bias.

    Attributes:
        value: Broadcasts to the logits.
        axes: The permutation of the logits at this step to (B, H, S, T); None for the identity.
        entangled: Whether the value depends on the queries or keys of the same block.
    """

    value: ir.Value
    sign: Literal[1, -1] = 1
    axes: tuple[int, ...] | None = None
    entangled: bool = False


@dataclass(frozen=True, eq=False)
class Mask:
    """Logits are replaced by ``fill`` where the boolean ``value`` differs from ``keep``.

    ``axes`` is the permutation of the logits at this step to (B, H, S, T); None for the identity.
    """

    value: ir.Value
    fill: float
    keep: bool
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class KeyMask:
    """``fill`` is added to the logits of keys whose (B, T) ``value`` is not positive.

    If ``queries`` is 0, the value is (B, S, T): one mask per query.
    """

    value: ir.Value
    fill: float
    queries: Literal[0, 1] = 1


@dataclass(frozen=True, eq=False)
class KeyLengths:
    """Each of B sequences has ``value + extra`` keys; logits of further keys become ``fill``."""

    value: ir.Value
    extra: int
    fill: float


@dataclass(frozen=True, eq=False)
class FullLengths:
    """Sequence lengths of a cache: ``value`` is T - 1 per sequence, ``total`` is T.

    An operator may accept sequences of different lengths; the block describes full ones.
    """

    value: ir.Value
    total: ir.Value


@dataclass(frozen=True)
class Causal:
    """Query s attends to keys t <= s, or t <= s + T - S if ``ends_together``."""

    ends_together: bool = False


@dataclass(frozen=True, eq=False)
class Weighted:
    """logits * value: the multiplicative mask of older decoders.

    ``axes`` is the permutation of the logits at this step to (B, H, S, T); None for the identity.
    """

    value: ir.Value
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scaled:
    """logits * factor, after an earlier step."""

    factor: float


@dataclass(frozen=True)
class Capped:
    """tanh(logits); with ``Scaled`` before and after, a soft cap."""


@dataclass(frozen=True)
class Floor:
    """max(logits, ``low``)."""

    low: float


LogitStep = (
    PositionBias
    | Mask
    | Weighted
    | KeyMask
    | KeyLengths
    | FullLengths
    | Causal
    | Scaled
    | Capped
    | Floor
)
"""One operation on the scaled logits before the softmax."""


@dataclass(frozen=True, eq=False)
class Reused:
    """Heads that reuse the attention probabilities of another block.

    Attributes:
        value: The probabilities of the other block, (B, H, S, T).
        heads: The heads of this block.
        sources: The head of ``value`` that each of them reuses.
    """

    value: ir.Value
    heads: Int[np.ndarray, " N"]
    sources: Int[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class Softmax:
    """The softmax of the heads that compute their own probabilities, as nodes of the graph.

    Attributes:
        logits: The scaled scores before ``AttentionBlock.steps``.
        axes: The permutation of the logits to (B, H, S, T) or (B*H, S, T); empty if there is none.
        probabilities: (B, H, S, T) or (B*H, S, T); None in another layout.
    """

    logits: ir.Value
    axes: tuple[int, ...]
    probabilities: ir.Value | None


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """Multi-head attention: softmax(steps(scale * q k^T + content)) v, and its output projection.

    Attributes:
        name: Unique in its graph; taken from the exporter's names if possible.
        graph: The graph that owns the nodes.
        q, k, v: The projections of x (queries) and y (keys, values).
        content: One logit per head and key (eq. 3 of arXiv 2006.16362), if present.
        output: None if the context is not the operand of a product with a constant.
        scale: The product of all scalar factors of the logits.
        steps: The operations on the scaled logits before the softmax, in order.
        product: The node that multiplies queries and keys, or the fused operator.
        softmax: The softmax of the heads of q and k; None inside a fused operator, or if all heads
            are reused.
        probabilities: Probabilities of all heads, (B, H, S, T) or (B*H, S, T); None inside a fused
            operator, in another layout, or if own and reused heads are in values of their own.
        context: probabilities @ v, (B, H, S, V) or in the layout of the operator.
        context_axes: The permutation of the context to (B, H, S, V) or (B*H, S, V); None for
            (B, S, H*V), as some fused operators return it.
        nodes: All nodes with MACs, and the softmax.
        idiom: The function in ``idioms`` or ``operators`` that matched it.
        position: The position encoding: none, a bias by head, or rotary embeddings.
        reused: Heads that reuse probabilities of other blocks. Then q and k have the other heads
            only, in order; v and the context have all heads.
    """

    name: str
    graph: ir.Graph
    q: Projection
    k: Projection
    v: Projection
    content: Projection | None
    output: OutputProjection | None
    scale: float
    steps: tuple[LogitStep, ...]
    product: ir.Node
    softmax: Softmax | None
    probabilities: ir.Value | None
    context: ir.Value
    context_axes: tuple[int, ...] | None
    nodes: tuple[ir.Node, ...]
    idiom: str
    position: Literal["none", "bias", "rope"] = "none"
    reused: tuple[Reused, ...] = ()

    @property
    def x(self) -> ir.Value:
        """The input of the queries, (B, S, D)."""
        return self.q.input

    @property
    def y(self) -> ir.Value:
        """The input of the keys and values, (B, T, E)."""
        return self.k.input

    @property
    def kind(self) -> Literal["self", "cross"]:
        """Self-attention if x is y, else cross-attention."""
        return "self" if self.x is self.y else "cross"

    @property
    def num_heads(self) -> int:
        """H: own and reused heads."""
        return self.v.num_heads

    @property
    def own_heads(self) -> Int[np.ndarray, " N"]:
        """The heads that compute their own probabilities: those of q and k, in order."""
        taken = [reused.heads for reused in self.reused]
        return np.setdiff1d(np.arange(self.num_heads), np.concatenate([[], *taken]))

    @property
    def own_probabilities(self) -> ir.Value | None:
        """The probabilities of the heads of q and k; None if no value has them by head."""
        return None if self.softmax is None else self.softmax.probabilities

    @property
    def probability_values(self) -> tuple[ir.Value, ...]:
        """The values with the probabilities of all heads: one, or own and then ``reused`` ones.

        Empty if the graph does not have them by head.
        """
        if self.probabilities is not None:
            return (self.probabilities,)
        computed = (self.own_probabilities,) if self.q.num_heads else ()
        values = (*computed, *(reused.value for reused in self.reused))
        present = tuple(value for value in values if value is not None)
        return present if len(present) == len(values) else ()

    @property
    def num_kv_heads(self) -> int:
        """G."""
        return self.v.num_distinct_heads

    @property
    def head_size(self) -> int:
        """K."""
        return self.q.head_size

    @property
    def v_head_size(self) -> int:
        """V."""
        return self.v.head_size

    @property
    def input_size(self) -> int:
        """D, the width of x."""
        return self.q.width

    @property
    def is_quantized(self) -> bool:
        """Whether any of its weights is quantized, so that rewrites cannot change it."""
        parts = (self.q, self.k, self.v, self.output)
        return any(part is not None and part.is_quantized for part in parts)

    @property
    def form(self) -> BlockForm:
        """How the probabilities are computed: reused, from shared dimensions, or as usual."""
        if self.reused:
            return "reuse"
        if self.is_collaborative:
            return "collaborative"
        return "sparse" if self.is_sparse else "standard"

    @property
    def is_collaborative(self) -> bool:
        """Whether all own heads read the same columns and differ only in their mixing."""
        return self.q.num_heads > 1 and all(
            bool((read.columns == read.columns[0]).all()) for read in (self.q, self.k)
        )

    @property
    def is_sparse(self) -> bool:
        """Whether heads share some columns: a pair of query and key columns occurs in two heads."""
        if self.is_collaborative or not (self.q.has_weight and self.k.has_weight):
            return False
        counted = self.q.gain != 0
        if not self.q.is_quantized:  # columns of zeros belong to the content term
            counted &= np.any(self.q.matrix(), axis=0)[self.q.columns]
        pairs = [
            set(zip(q[here].tolist(), k[here].tolist(), strict=True))
            for q, k, here in zip(self.q.columns, self.k.columns, counted, strict=True)
        ]
        return sum(map(len, pairs)) > len(set[tuple[int, int]]().union(*pairs))


@dataclass(frozen=True, eq=False)
class Linear:
    """A product of tokens with a constant: out = scale * tokens @ W.

    Attributes:
        node: The product, or the fused operator that contains it.
        tokens: The operand that is not constant.
        weight: W, a constant input of ``node``.
        contracted: The axes of ``weight`` that are contracted with the last axes of ``tokens``.
        width: D, the number of contracted elements.
        columns: The column of W of each element of the output; broadcasts to the output.
        rows: The token of each element of the output; broadcasts to the output.
        scale: A factor of the product.
        product: The output in floating point if W is quantized, else None. It may include a bias.
    """

    node: ir.Node
    tokens: ir.Value
    weight: ir.Value
    contracted: tuple[int, ...]
    width: int
    columns: np.ndarray
    rows: np.ndarray
    scale: float
    product: ir.Value | None = None

    @property
    def output(self) -> ir.Value:
        """scale * tokens @ W."""
        return self.node.outputs[0] if self.product is None else self.product

    @property
    def is_quantized(self) -> bool:
        """Whether W is quantized."""
        return self.product is not None

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """scale * W."""
        return weight_matrix(self.weight, self.contracted) * self.scale

    def weight_operand(self, axis: int) -> Operand:
        """The weight as an input of the node; ``axis`` counts the neurons."""
        return Operand(self.node, list(self.node.inputs).index(self.weight), axis)

    @property
    def columns_axis(self) -> int:
        """The axis of the weight that counts columns; others are contracted or have length 1."""
        shape = constant_shape(self.weight)
        free = [axis for axis in range(len(shape)) if axis not in self.contracted]
        return max(free, key=lambda axis: shape[axis])


class Operand(NamedTuple):
    """A constant input of a node, by position; ``axis`` counts the neurons."""

    node: ir.Node
    position: int
    axis: int

    @property
    def value(self) -> ir.Value:
        """The constant."""
        value = self.node.inputs[self.position]
        assert value is not None
        return value


@dataclass(frozen=True, eq=False)
class FeedForwardBlock:
    """out = f(x W_1 + b_1) W_2 + b_2, or gated: (f(x W_g + b_g) * (x W_u + b_u)) W_2 + b_2.

    f is element-wise, so column j of each value between the products is neuron j. W_g and W_u may
    be packed into one weight [W_g W_u], (D, 2F): then columns j and F + j are neuron j, up to the
    Split or Slice nodes.

    Attributes:
        name: Unique among the feed-forward blocks of the model.
        graph: The graph that owns the nodes: the main graph, or the body of an If or a Loop.
        x: The tokens (..., D), before any flattening.
        first: The products with W_1, with W_g and W_u in order of execution, or with [W_g W_u].
        hidden: The operand of the second product, (..., F) or flattened.
        second: The product with W_2.
        bias: b_2, if present; None if W_2 is quantized, whose output includes it.
        output: The value after b_2.
        nodes: The nodes between the products, in order of execution.
        constants_by_neuron: b_1 and all other constants with one element per neuron, or two behind
            a packed weight.
        widths: Nodes between the products with constants that name F: the target shape of a
            Reshape, the sizes of a Split, the bounds of a Slice.
    """

    name: str
    graph: ir.Graph
    x: ir.Value
    first: tuple[Linear, ...]
    hidden: ir.Value
    second: Linear
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    constants_by_neuron: tuple[Operand, ...]
    widths: tuple[ir.Node, ...]

    @property
    def products(self) -> tuple[ir.Node, ...]:
        """The nodes of ``first``."""
        return tuple(part.node for part in self.first)

    @property
    def product(self) -> ir.Node:
        """The node of ``second``."""
        return self.second.node

    @property
    def num_neurons(self) -> int:
        """F."""
        return self.second.width

    @property
    def input_size(self) -> int:
        """D."""
        return self.first[0].width

    @property
    def is_quantized(self) -> bool:
        """Whether any of its weights is quantized, so that rewrites cannot change it."""
        return any(part.is_quantized for part in (*self.first, self.second))

    @property
    def is_gated(self) -> bool:
        """Whether a second product multiplies the activations, packed or not."""
        return sum(part.columns.size for part in self.first) > self.num_neurons

    def matrix(self, index: int = 0) -> Float[np.ndarray, "D N"]:
        """W_1, or W_g or W_u by index in ``first``, (D, F); [W_g W_u] has 2F columns."""
        return self.first[index].matrix()

    def second_matrix(self) -> Float[np.ndarray, "F N"]:
        """W_2."""
        return self.second.matrix()

    def weights(self) -> tuple[Operand, ...]:
        """The weights, each with its axis of neurons."""
        first = [part.weight_operand(part.columns_axis) for part in self.first]
        return (*first, self.second.weight_operand(self.second.contracted[0]))

    def operands(self) -> tuple[Operand, ...]:
        """All constants with an axis of neurons."""
        return (*self.weights(), *self.constants_by_neuron)


@dataclass(frozen=True, eq=False)
class Unmatched:
    """A candidate node that did not match, and the reason."""

    node: ir.Node
    reason: str
