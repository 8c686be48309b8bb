"""``AttentionBlock``: attention as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import onnx_ir as ir

from graph_passes.blocks.logit_steps import LogitStep
from graph_passes.blocks.projections import OutputProjection, Projection

if TYPE_CHECKING:
    from jaxtyping import Int

__all__ = ["AttentionBlock", "BlockForm", "Reused", "Softmax", "Unmatched"]

BlockForm = Literal["standard", "collaborative", "sparse", "reuse", "skip"]
"""The kind of computation of a block's probabilities; "skip" is a removed attention layer."""


@dataclass(frozen=True, eq=False)
class Reused:
    """Heads that reuse the attention probabilities of another block.

    Attributes:
        value: The probabilities of the other block, (B, H, S, T).
        heads: The heads of this block.
        sources: The head of ``value`` that each of ``heads`` reuses.
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
            operator, in another layout, or if own and reused heads are in separate values.
        context: probabilities @ v, (B, H, S, V) or in the layout of the operator.
        context_axes: The permutation of the context to (B, H, S, V) or (B*H, S, V); None for
            (B, S, H*V), as some fused operators return it.
        nodes: All nodes with MACs, and the softmax.
        idiom: The function in ``idioms`` or ``operators`` that matched the block.
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
    def part_rows(self) -> Int[np.ndarray, "H V"]:
        """The rows of the last weight that read each head, a part that can be removed."""
        return self.required_output.rows

    @property
    def last_width(self) -> int:
        """The number of inputs of the output projection."""
        return self.num_heads * self.v_head_size

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """x, and y if it is another value."""
        return tuple(dict.fromkeys((self.x, self.y)))

    @property
    def own_heads(self) -> Int[np.ndarray, " N"]:
        """The heads that compute their own probabilities, in the order of q and k."""
        taken = [reused.heads for reused in self.reused]
        return np.setdiff1d(np.arange(self.num_heads), np.concatenate([[], *taken]))

    @property
    def own_probabilities(self) -> ir.Value | None:
        """The probabilities of the heads of q and k; None if no value holds them by head."""
        return None if self.softmax is None else self.softmax.probabilities

    @property
    def probability_values(self) -> tuple[ir.Value, ...]:
        """The values with the probabilities of all heads: one value, or own, then ``reused`` ones.

        Empty if the graph has no probabilities by head.
        """
        if self.probabilities is not None:
            return (self.probabilities,)
        computed = (self.own_probabilities,) if self.q.num_heads else ()
        values = (*computed, *(reused.value for reused in self.reused))
        present = tuple(value for value in values if value is not None)
        return present if len(present) == len(values) else ()

    @property
    def num_kv_heads(self) -> int:
        """G, the number of key/value heads."""
        return self.v.num_distinct_heads

    @property
    def head_size(self) -> int:
        """K, the size of queries and keys of a head."""
        return self.q.head_size

    @property
    def v_head_size(self) -> int:
        """V, the size of values of a head."""
        return self.v.head_size

    @property
    def input_size(self) -> int:
        """D, the width of x."""
        return self.q.width

    @property
    def required_output(self) -> OutputProjection:
        """The output projection of a block that was checked to have one."""
        assert self.output is not None
        return self.output

    @property
    def is_quantized(self) -> bool:
        """Whether any weight of the block is quantized; rewrites cannot change such a block."""
        parts = (self.q, self.k, self.v, self.output)
        return any(part is not None and part.is_quantized for part in parts)

    @property
    def form(self) -> BlockForm:
        """The computation of the probabilities: reused, from shared dimensions, or standard."""
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
class Unmatched:
    """A candidate node that did not match, and the reason."""

    node: ir.Node
    reason: str
