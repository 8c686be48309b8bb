"""The noun that every stage speaks: ``AttentionBlock``.

Glossary of dimensions, everywhere in this project:

    B  batch                 H  heads                   K  head size (queries and keys)
    S  query length          G  key/value heads         V  value head size
    T  key length            D  input size (of x)       R  shared dimension of collaborative heads
                             E  input size (of y)       N  columns of a projection

A block is a reading of one graph at one moment: after a rewrite, find again, never patch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, constant_shape, constant_type

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
    "Reused",
    "RotaryTerm",
    "Scaled",
    "Unmatched",
    "Weighted",
    "as_matrix",
]

HeadLayout = Literal["B H T K", "B*H T K", "B T H*K", "inside"]
BlockForm = Literal["standard", "collaborative", "sparse", "reuse", "skip"]


@dataclass(frozen=True, eq=False)
class BroadcastLayout:
    """How a value that the tokens do not make is laid over heads (B, H, T, K).

    Attributes:
        value: Angles of rotary positions, or the keys or values of earlier tokens.
        axes: What each axis of the value runs over: the batch, the tokens, or the elements that an
            (H, K) array of indices names (all zeros where the axis has length 1).
        positions: Where given, it is ``value[positions]`` that is laid out, (B or 1, T, ...).
        is_last_position: Positions are those of the last token of each sequence.
    """

    value: ir.Value
    axes: tuple[Literal["batch", "token"] | Int[np.ndarray, "H K"], ...]
    positions: ir.Value | None = None
    is_last_position: bool = False

    @property
    def token_axis(self) -> int:
        """The axis of the value that runs over the tokens."""
        return next(
            i for i, axis in enumerate(self.axes) if isinstance(axis, str) and axis == "token"
        )

    def over(
        self, array: np.ndarray, batch: int, length: int, positions: np.ndarray | None = None
    ) -> np.ndarray:
        """The value's elements, ``array``, as (B or 1, H or 1, T or 1, K or 1).

        Args:
            positions: Of ``self.positions``: one for each token, or one for the first (or the
                last) of each sequence, from where they count.
        """
        if positions is not None:
            if self.is_last_position or positions.ndim == 1:
                first = positions.reshape(-1, 1) - (length - 1 if self.is_last_position else 0)
                positions = first + np.arange(length)
            array = array[positions]
        batches = np.arange(batch)[:, None, None, None]
        tokens = np.arange(length)[None, None, :, None]
        index = [
            (batches if axis == "batch" else tokens)
            if isinstance(axis, str)
            else axis[None, :, None, :]
            for axis in self.axes
        ]
        return array[tuple(index)]


@dataclass(frozen=True, eq=False)
class RotaryTerm:
    """One term of a projection that positions turn (rotary embeddings): factor * (x W g + o).

    Attributes:
        factor: Cosines or sines, which do not depend on the tokens; None is one.
        columns, gain, offset: As of a ``Projection``, for this term.
    """

    factor: BroadcastLayout | None
    columns: Int[np.ndarray, "H K"]
    gain: Float[np.ndarray, "H K"]
    offset: Float[np.ndarray, "H K"]


@dataclass(frozen=True, eq=False)
class Norm:
    """q/k norm: parts of a projection normalised before positions turn them.

        u = scale * ((x W)[columns] * gain + offset);  n = u / sqrt(mean(u^2) + epsilon)

    with the mean of u taken away first where ``centred``. Its own weight and bias are gain and
    offset of the projection, whose columns count the elements of n, flattened.

    Attributes:
        node: The last node of the norm without its weight.
        columns: Which columns are normalised together: a row for each group of length L.
    """

    node: ir.Node
    columns: Int[np.ndarray, "G L"]
    gain: Float[np.ndarray, "G L"]
    offset: Float[np.ndarray, "G L"]
    scale: float
    epsilon: float
    centred: bool

    def __call__(self, product: Float[np.ndarray, "B T N"]) -> Float[np.ndarray, "B T G*L"]:
        u = self.scale * (product[..., self.columns] * self.gain + self.offset)  # B T G L
        if self.centred:
            u = u - u.mean(axis=-1, keepdims=True)
        normed = u / np.sqrt(np.square(u).mean(axis=-1, keepdims=True) + self.epsilon)
        return normed.reshape(*product.shape[:-1], -1)


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of tokens, read head by head.

        out[b, h, t, k] = scale * ( (input[b, t] @ W)[columns[h, k]] * gain[h, k] + offset[h, k] )

    ``columns`` says where the layout nodes between the map and the scores take each element from,
    so packed projections, shared columns and any order of heads are the same noun. ``gain`` holds
    element-wise factors (the mixing matrix of collaborative heads), ``offset`` the bias, ``scale``
    whatever scalars were multiplied in on the way.

    Attributes:
        input: The tokens, (B, S, D) where ``by_sequence``, else flattened or cut in windows. The
            cached heads where there is no weight.
        weight: A constant; None where the heads are handed in whole (``past``), as a decoder's
            cached cross-attention is.
        contracted: The axes of ``weight`` that meet the tokens' last: (0,) for (D, N), (1,) for
            (N, D). All others, flattened, are the columns.
        output: The value with the heads laid out, as the scores read it; None inside a fused
            operator.
        nodes: From the product to ``output``, in order.
        by_sequence: ``input`` is (B, S, D), with the batch and the length of ``output``.
        sequence_first: The tokens of ``input`` count (S, B), not (B, S).
        layout: Of ``output``: heads apart, in one axis with the batch, side by side, or (inside)
            nowhere in the graph.
        turns: Where positions turn the heads, every term of the sum (the first is ``columns``).
        norm: Where heads are normalised before that.
        past: The heads of earlier tokens, which come before those of ``input``.
        axes: The order that brings ``output`` to (B, H, T, K), (B*H, T, K) or (B, T, H*K).
    """

    input: ir.Value
    weight: ir.Value | None
    contracted: tuple[int, ...]
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

    def sequences(self, shape_of: Callable[[ir.Value], tuple[int, ...]]) -> int:
        """B: how many sequences there are where values have these shapes."""
        tokens = shape_of(self.input)
        if self.output is None or self.weight is None or self.by_sequence:
            return tokens[0]
        return math.prod(tokens[:-1]) // shape_of(self.output)[self.token_axis]

    @property
    def token_axis(self) -> int:
        """The axis of ``output`` that counts tokens."""
        return self.axes[1 if self.layout == "B T H*K" else -2]

    @property
    def num_heads(self) -> int:
        return self.columns.shape[0]

    @property
    def head_size(self) -> int:
        return self.columns.shape[1]

    @property
    def num_distinct_heads(self) -> int:
        """Heads that read columns of their own: fewer than H where key/value heads are grouped."""
        return len(np.unique(self.columns, axis=0))

    @property
    def dtype(self) -> ir.DataType:
        """The element type of the weight."""
        return ir.DataType.FLOAT if self.weight is None else constant_type(self.weight)

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """The whole weight, input size first."""
        assert self.weight is not None, "these heads are cached: no weight makes them"
        return as_matrix(constant_array(self.weight), self.contracted)

    def heads(self) -> Float[np.ndarray, "H D K"]:
        """W^h, without ``scale``."""
        picked = self.matrix()[:, self.columns]  # D H K
        return np.moveaxis(picked, 1, 0) * self.gain[:, None, :]


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The map from the heads' context back to the tokens: concat(heads)[rows] @ W_O + bias.

    Attributes:
        input: The context as the product reads it, (B, S, H*V) or (B, S, H, V).
        weight: A constant.
        contracted: The axes of ``weight`` that meet the heads; the others make the output.
        rows: Which row of W_O, as a matrix, the element v of head h meets.
        output: The value after the bias, (B, S, D), flattened or not.
        sequence_first: Its tokens count (S, B), not (B, S).
    """

    input: ir.Value
    weight: ir.Value
    contracted: tuple[int, ...]
    rows: Int[np.ndarray, "H V"]
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    sequence_first: bool = False

    def matrix(self) -> Float[np.ndarray, "N D"]:
        return as_matrix(constant_array(self.weight), self.contracted)

    def offset(self) -> Float[np.ndarray, " D"]:
        if self.bias is None:
            return np.zeros(1, dtype=np.float32)
        return constant_array(self.bias).reshape(-1)


def as_matrix(weight: np.ndarray, contracted: tuple[int, ...]) -> Float[np.ndarray, "D N"]:
    """A weight of any rank with its contracted axes as rows and all others as columns."""
    rows = math.prod(weight.shape[axis] for axis in contracted)
    return np.moveaxis(weight, contracted, range(len(contracted))).reshape(rows, -1)


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The logits become logits + sign * value (an additive mask, a position bias).

    Attributes:
        axes: Here and in other steps, the order that brings the axes of the logits at this step to
            (B, H, S, T), where it is another.
        entangled: It is computed from the queries or keys of the same block.
    """

    value: ir.Value
    sign: Literal[1, -1] = 1
    axes: tuple[int, ...] | None = None
    entangled: bool = False


@dataclass(frozen=True, eq=False)
class Mask:
    """The logits become ``fill`` wherever the boolean ``value`` differs from ``keep``."""

    value: ir.Value
    fill: float
    keep: bool
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class KeyMask:
    """``fill`` is added to the logits of each key whose (B, T) ``value`` is not positive.

    The value may also be (B, S, T), one row of keys a query, where ``queries`` is 0.
    """

    value: ir.Value
    fill: float
    queries: Literal[0, 1] = 1


@dataclass(frozen=True, eq=False)
class KeyLengths:
    """Each of B sequences has ``value + extra`` keys; the logits of others become ``fill``."""

    value: ir.Value
    extra: int
    fill: float


@dataclass(frozen=True, eq=False)
class FullLengths:
    """The graph says that all keys are there: ``value`` is T - 1 a sequence, ``total`` is T.

    Where an operator takes sequences of different lengths from one cache, a reading holds for full
    ones.
    """

    value: ir.Value
    total: ir.Value


@dataclass(frozen=True)
class Causal:
    """Query s sees keys t <= s (the attribute of a fused operator), or t <= s + T - S."""

    ends_together: bool = False


@dataclass(frozen=True, eq=False)
class Weighted:
    """The logits become logits * value (the mask of older decoders, before they add another)."""

    value: ir.Value
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Scaled:
    """The logits are multiplied by ``factor`` after an earlier step."""

    factor: float


@dataclass(frozen=True)
class Capped:
    """The logits become tanh(logits): with a ``Scaled`` on either side, a soft cap."""


@dataclass(frozen=True)
class Floor:
    """The logits become max(logits, ``low``)."""

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
"""What happens to the scaled logits before the softmax."""


@dataclass(frozen=True, eq=False)
class Reused:
    """Heads that take the probabilities of another attention, or of several.

    Attributes:
        value: The other's probabilities, (B, H, S, T).
        heads: Which heads of this block, and ``sources`` which head of ``value`` each takes.
    """

    value: ir.Value
    heads: Int[np.ndarray, " N"]
    sources: Int[np.ndarray, " N"]


@dataclass(frozen=True, eq=False)
class AttentionBlock:
    """softmax(scale * q k^T + content + bias, masked) v, and its output projection.

    Attributes:
        name: Unique in its graph; taken from the exporter's own names where they tell.
        graph: The graph that owns the nodes.
        q, k, v: The projections of x (queries) and y (keys, values).
        content: One logit a head and key (eq. 3 of arXiv 2006.16362), where the graph has them.
        output: None where the context does not go straight to a product with a constant.
        scale: Of the logits, the product of all scalars between projections and mask.
        steps: What happens to the scaled logits before the softmax, in order.
        product: The node that multiplies queries and keys, or the fused operator itself.
        logits: The scaled scores, before ``steps``; None inside a fused operator.
        logits_axes: The order of their axes that brings them to (B, H, S, T) or (B*H, S, T).
        probabilities: (B, H, S, T) or (B*H, S, T); None inside a fused operator, or where the graph
            never lays them out so.
        context: probabilities @ v, (B, H, S, V) or as the operator lays it out.
        context_axes: The order of its axes that brings it to (B, H, S, V) or (B*H, S, V); None
            for a fused operator's (B, S, H*V) or (B, H, S, V).
        nodes: Every node of the block that costs MACs, and the softmax.
        idiom: The name of the function in ``idioms`` that read it.
        reused: Where some heads take the probabilities of other attentions. Then q and k hold the
            other heads only, in order, while v, the probabilities and the context hold all, and
            ``own_probabilities`` are those of q and k.
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
    logits: ir.Value | None
    logits_axes: tuple[int, ...] | None
    probabilities: ir.Value | None
    context: ir.Value
    context_axes: tuple[int, ...] | None
    nodes: tuple[ir.Node, ...]
    idiom: str
    position: Literal["none", "bias", "rope"] = "none"
    reused: tuple[Reused, ...] = ()
    own_probabilities: ir.Value | None = None

    @property
    def x(self) -> ir.Value:
        """The tokens that ask, (B, S, D)."""
        return self.q.input

    @property
    def y(self) -> ir.Value:
        """The tokens that are asked, (B, T, E)."""
        return self.k.input

    @property
    def kind(self) -> Literal["self", "cross"]:
        return "self" if self.x is self.y else "cross"

    @property
    def num_heads(self) -> int:
        return self.v.num_heads

    @property
    def own_heads(self) -> Int[np.ndarray, " N"]:
        """The heads that compute their own probabilities: what q and k hold, in order."""
        taken = [reused.heads for reused in self.reused]
        return np.setdiff1d(np.arange(self.num_heads), np.concatenate([[], *taken]))

    @property
    def num_kv_heads(self) -> int:
        return self.v.num_distinct_heads

    @property
    def head_size(self) -> int:
        return self.q.head_size

    @property
    def v_head_size(self) -> int:
        return self.v.head_size

    @property
    def input_size(self) -> int:
        """D, the width of x."""
        assert self.q.weight is not None
        shape = constant_shape(self.q.weight)
        return math.prod(shape[axis] for axis in self.q.contracted)

    @property
    def form(self) -> BlockForm:
        if self.reused:
            return "reuse"
        if self.is_collaborative:
            return "collaborative"
        return "sparse" if self.is_sparse else "standard"

    @property
    def is_collaborative(self) -> bool:
        """Whether all own heads read the same columns, and tell them apart by mixing."""
        return self.q.num_heads > 1 and all(
            bool((read.columns == read.columns[0]).all()) for read in (self.q, self.k)
        )

    @property
    def is_sparse(self) -> bool:
        """Whether each own head reads a few shared columns: some queries' column meets the same
        keys' column in two heads, and in each the mixing gives it a weight of its own."""
        if self.is_collaborative or self.q.weight is None or self.k.weight is None:
            return False
        reads = np.any(self.q.matrix(), axis=(0,))  # a column of zeros meets the content
        counted = (self.q.gain != 0) & reads[self.q.columns]
        pairs = [
            set(zip(q[here].tolist(), k[here].tolist(), strict=True))
            for q, k, here in zip(self.q.columns, self.k.columns, counted, strict=True)
        ]
        return sum(map(len, pairs)) > len(set[tuple[int, int]]().union(*pairs))


@dataclass(frozen=True, eq=False)
class Linear:
    """Tokens times a constant: out = scale * tokens @ W.

    Attributes:
        contracted: The axes of ``weight`` that meet the last axes of ``tokens``, in their order.
        width: D, how many elements they have.
        columns, rows: Which column of W and which token each element of the output is, in a shape
            that broadcasts to the output's.
    """

    tokens: ir.Value
    weight: ir.Value
    contracted: tuple[int, ...]
    width: int
    columns: np.ndarray
    rows: np.ndarray
    scale: float


class Operand(NamedTuple):
    """A constant where a node reads it; ``axis`` counts the neurons."""

    node: ir.Node
    position: int
    axis: int

    @property
    def value(self) -> ir.Value:
        value = self.node.inputs[self.position]
        assert value is not None
        return value


@dataclass(frozen=True, eq=False)
class FeedForwardBlock:
    """out = f(x W_1 + b_1) W_2 + b_2, or gated: (f(x W_g + b_g) * (x W_u + b_u)) W_2 + b_2.

    Column j of every value between the products is neuron j; whatever f is, it is element-wise.

    Attributes:
        name: Unique among the feed-forwards of the model.
        graph: Owns the nodes: the main graph, or the body of an If or a Loop.
        x: The tokens (..., D), as they were before an exporter flattened them.
        first: The products with W_1, or with W_g and W_u in order of execution.
        products: Their nodes.
        hidden: What the second product reads, (..., F), flattened where it is.
        second: The product with W_2.
        product: Its node.
        bias: b_2, where there is one.
        output: The value after b_2.
        nodes: Between the products, in order of execution.
        constants_by_neuron: b_1 and all other constants on the way with an element a neuron.
        widths: Each Reshape among them that is told a shape which ends in F.
    """

    name: str
    graph: ir.Graph
    x: ir.Value
    first: tuple[Linear, ...]
    products: tuple[ir.Node, ...]
    hidden: ir.Value
    second: Linear
    product: ir.Node
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    constants_by_neuron: tuple[Operand, ...]
    widths: tuple[ir.Node, ...]

    @property
    def num_neurons(self) -> int:
        """F."""
        return self.second.width

    @property
    def input_size(self) -> int:
        """D."""
        return self.first[0].width

    def matrix(self, index: int = 0) -> Float[np.ndarray, "D F"]:
        """W_1, or W_g and W_u by their index in ``first``."""
        part = self.first[index]
        return as_matrix(constant_array(part.weight), part.contracted) * part.scale

    def second_matrix(self) -> Float[np.ndarray, "F N"]:
        """W_2."""
        part = self.second
        return as_matrix(constant_array(part.weight), part.contracted) * part.scale

    def weights(self) -> tuple[Operand, ...]:
        """Each weight, with its axis of neurons."""
        parts = zip(self.products, self.first, strict=True)
        first = [_weight(node, part, _columns_axis(part)) for node, part in parts]
        return (*first, _weight(self.product, self.second, self.second.contracted[0]))

    def operands(self) -> tuple[Operand, ...]:
        """All constants that are counted by neurons."""
        return (*self.weights(), *self.constants_by_neuron)


def _weight(node: ir.Node, part: Linear, axis: int) -> Operand:
    return Operand(node, list(node.inputs).index(part.weight), axis)


def _columns_axis(part: Linear) -> int:
    """The axis of a weight that counts its columns; others are contracted, or of length one."""
    shape = constant_shape(part.weight)
    free = [axis for axis in range(len(shape)) if axis not in part.contracted]
    return max(free, key=lambda axis: shape[axis])


@dataclass(frozen=True, eq=False)
class Unmatched:
    """A node that looked like attention and was not read, and why."""

    node: ir.Node
    reason: str
