"""The noun that every stage speaks: ``AttentionBlock``.

Glossary of dimensions, everywhere in this project:

    B  batch                 H  heads                   K  head size (queries and keys)
    S  query length          G  key/value heads         V  value head size
    T  key length            D  input size (of x)       R  shared dimension of collaborative heads
                             E  input size (of y)       N  columns of a projection

A block is a reading of one graph at one moment: after a rewrite, find again, never patch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeGuard

import numpy as np
import onnx_ir as ir

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "AttentionBlock",
    "Causal",
    "Form",
    "LogitStep",
    "Mask",
    "Miss",
    "OutputProjection",
    "PositionBias",
    "Projection",
    "Turn",
    "TurnAxis",
]

Layout = Literal["B H T K", "B*H T K", "B T H*K"]
Form = Literal["standard", "collaborative", "sparse", "reuse", "skip"]


TurnAxis = Literal["one", "batch", "token", "element"]


@dataclass(frozen=True, eq=False)
class Turn:
    """One term of a projection that positions turn (rotary embeddings): factor * (x W g + o).

    Attributes:
        factor: Cosines or sines, a value that does not depend on the tokens; None is one.
        columns, gain, offset: As of a ``Projection``, for this term.
        axes: What each axis of the factor runs over.
        element: Where an axis runs over the elements of the head: which of it each one takes.
    """

    factor: ir.Value | None
    columns: Int[np.ndarray, "H K"]
    gain: Float[np.ndarray, "H K"]
    offset: Float[np.ndarray, "H K"]
    axes: tuple[TurnAxis, ...]
    element: Int[np.ndarray, "H K"]

    def angles(self, factor: np.ndarray, batch: int, length: int) -> np.ndarray:
        """The factor as (B or 1, H or 1, T or 1, K or 1), for each element of the heads."""
        where = {
            "one": np.zeros((1, 1, 1, 1), np.int64),
            "batch": np.arange(batch)[:, None, None, None],
            "token": np.arange(length)[None, None, :, None],
            "element": self.element[None, :, None, :],
        }
        return factor[tuple(where[axis] for axis in self.axes)]


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear map of tokens, read head by head.

        out[b, h, t, k] = scale * ( (input[b, t] @ W)[columns[h, k]] * gain[h, k] + offset[h, k] )

    ``columns`` says where the layout nodes between the map and the scores take each element from,
    so packed projections, shared columns and any order of heads are the same noun. ``gain`` holds
    element-wise factors (the mixing matrix of collaborative heads), ``offset`` the bias, ``scale``
    whatever scalars were multiplied in on the way.

    Attributes:
        input: The tokens, (B, S, D) where ``by_sequence``, else flattened or cut in windows.
        weight: The constant (D, N), or (N, D) where ``transposed``.
        output: The value with the heads laid out, as the scores read it.
        nodes: From the product to ``output``, in order.
        by_sequence: The batch and the length of ``input`` are those of ``output``.
        layout: Of ``output``: heads apart, in one axis with the batch, or side by side.
        turns: Where positions turn the heads, every term of the sum (the first is ``columns``).
    """

    input: ir.Value
    weight: ir.Value
    transposed: bool
    columns: Int[np.ndarray, "H K"]
    gain: Float[np.ndarray, "H K"]
    offset: Float[np.ndarray, "H K"]
    scale: float
    output: ir.Value
    nodes: tuple[ir.Node, ...]
    by_sequence: bool
    layout: Layout
    turns: tuple[Turn, ...] = ()

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

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """The whole weight, input size first."""
        weight = constant_array(self.weight)
        return weight.T if self.transposed else weight

    def heads(self) -> Float[np.ndarray, "H D K"]:
        """W^h, without ``scale``."""
        picked = self.matrix()[:, self.columns]  # D H K
        return np.moveaxis(picked, 1, 0) * self.gain[:, None, :]


@dataclass(frozen=True, eq=False)
class OutputProjection:
    """The map from the heads' context back to the tokens: concat(heads)[rows] @ W_O + bias.

    Attributes:
        input: The context as the product reads it, (B, S, H*V).
        weight: The constant (H*V, D), or (D, H*V) where ``transposed``.
        rows: Which row of W_O the element v of head h meets.
        output: The value after the bias, (B, S, D).
    """

    input: ir.Value
    weight: ir.Value
    transposed: bool
    rows: Int[np.ndarray, "H V"]
    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...]

    def matrix(self) -> Float[np.ndarray, "N D"]:
        weight = constant_array(self.weight)
        return weight.T if self.transposed else weight

    def offset(self) -> Float[np.ndarray, " D"]:
        if self.bias is None:
            return np.zeros(1, dtype=np.float32)
        return constant_array(self.bias)


@dataclass(frozen=True, eq=False)
class PositionBias:
    """The logits become logits + value (an additive mask, a position bias)."""

    value: ir.Value


@dataclass(frozen=True, eq=False)
class Mask:
    """The logits become ``fill`` wherever the boolean ``value`` differs from ``keep``."""

    value: ir.Value
    fill: float
    keep: bool


@dataclass(frozen=True)
class Causal:
    """Query s sees keys t <= s only (the attribute of a fused operator)."""


LogitStep = PositionBias | Mask | Causal


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
        probabilities: None inside a fused operator.
        context: probabilities @ v, (B, H, S, V) or as the operator lays it out.
        nodes: Every node of the block that costs MACs, and the softmax.
        idiom: The name of the function in ``idioms`` that read it.
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
    probabilities: ir.Value | None
    context: ir.Value
    nodes: tuple[ir.Node, ...]
    idiom: str
    position: Literal["none", "bias", "rope"] = "none"

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
        return self.q.num_heads

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
        tensor = constant_tensor(self.q.weight)
        assert tensor is not None
        return tensor.shape.numpy()[1 if self.q.transposed else 0]

    @property
    def form(self) -> Form:
        """Collaborative when all heads read the same columns and tell them apart by mixing."""
        shared = self.num_heads > 1 and all(
            bool((read.columns == read.columns[0]).all()) for read in (self.q, self.k)
        )
        return "collaborative" if shared else "standard"


@dataclass(frozen=True, eq=False)
class Miss:
    """A node that looked like attention and was not read, and why."""

    node: ir.Node
    reason: str


def origin(value: ir.Value) -> ir.Value:
    """The value behind any Identity: exporters share the weights of repeated layers that way."""
    while (node := value.producer()) is not None and node.op_type == "Identity" and node.inputs[0]:
        value = node.inputs[0]
    return value


def constant_tensor(value: ir.Value) -> ir.TensorProtocol | None:
    """The tensor of an initializer or of a Constant node, if it is a dense one."""
    try:
        return ir.convenience.get_const_tensor(origin(value))
    except ValueError:  # a sparse constant
        return None


def is_constant(value: ir.Value | None) -> TypeGuard[ir.Value]:
    """A value with elements of its own: an initializer or the output of a Constant node."""
    return value is not None and constant_tensor(value) is not None


def constant_array(value: ir.Value) -> np.ndarray:
    """The elements of a constant value, read from disk only now; half precision becomes single."""
    tensor = constant_tensor(value)
    assert tensor is not None, f"{value.name} is not a constant"
    array = tensor.numpy()
    keep = array.dtype == np.float64 or array.dtype.kind in "iu"
    return array if keep else array.astype(np.float32)
