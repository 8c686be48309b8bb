"""``FeedForwardBlock``: a feed-forward network as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_shape
from graph_passes.analysis.required import input_of
from graph_passes.blocks.projections import Weight

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = ["FeedForwardBlock", "Linear", "Operand"]


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
        return self.product is not None

    def matrix(self) -> Float[np.ndarray, "D N"]:
        """scale * W."""
        return Weight(self.weight, self.contracted).matrix() * self.scale

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
        return input_of(self.node, self.position)


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
        """F, the number of neurons."""
        return self.second.width

    @property
    def part_rows(self) -> Int[np.ndarray, "F 1"]:
        """The row of the last weight that reads each neuron, a part that can be removed."""
        return np.arange(self.num_neurons)[:, None]

    @property
    def last_width(self) -> int:
        """The number of inputs of the second product."""
        return self.num_neurons

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        """x."""
        return (self.x,)

    @property
    def input_size(self) -> int:
        """D, the size of x."""
        return self.first[0].width

    @property
    def is_quantized(self) -> bool:
        """Whether any weight of the block is quantized; rewrites cannot change such a block."""
        return any(part.is_quantized for part in (*self.first, self.second))

    @property
    def is_gated(self) -> bool:
        """Whether a second product, packed or not, multiplies the activations."""
        return sum(part.columns.size for part in self.first) > self.num_neurons

    def weights(self) -> tuple[Operand, ...]:
        """The weights, each with its axis of neurons."""
        first = [part.weight_operand(part.columns_axis) for part in self.first]
        return (*first, self.second.weight_operand(self.second.contracted[0]))

    def operands(self) -> tuple[Operand, ...]:
        """All constants with an axis of neurons."""
        return (*self.weights(), *self.constants_by_neuron)
