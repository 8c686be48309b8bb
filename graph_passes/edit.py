"""Put new nodes into a graph, and take out what nothing reads any more."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.attention import Projection

__all__ = ["Inserter", "emit_heads", "exposing", "remove_unused", "replace_uses"]


class Inserter:
    """Makes nodes and constants with names of their own and places them before one node.

    Args:
        graph: Receives the nodes.
        before: The node in front of which they go.
        prefix: Starts every name, so that a reader of the graph sees where they come from.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, prefix: str) -> None:
        self.graph = graph
        self.before = before
        self.prefix = prefix
        self._taken = _names(graph)

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], name: str, **attributes: Any
    ) -> ir.Value:
        """A standard operator with one output, called ``prefix/name``."""
        unique = self._unique(name)
        node = ir.node(op_type, inputs, attributes=attributes, name=unique)
        node.outputs[0].name = unique
        self.graph.insert_before(self.before, node)
        return node.outputs[0]

    def constant(self, array: np.ndarray, name: str) -> ir.Value:
        """An initializer called ``prefix/name``."""
        unique = self._unique(name)
        tensor = ir.tensor(array.copy(order="C"), name=unique)
        value = ir.Value(
            name=unique,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def _unique(self, name: str) -> str:
        candidate, count = f"{self.prefix}/{name}", 1
        while candidate in self._taken:
            count += 1
            candidate = f"{self.prefix}/{name}_{count}"
        self._taken.add(candidate)
        return candidate


def emit_heads(make: Inserter, projection: Projection, scale: float) -> ir.Value:
    """``scale`` times the projection of its input, (B, H, T, K), in nodes of its own.

    The projection must read whole sequences, without positions, norm or cache.
    """
    dtype = projection.dtype.numpy()
    matrix = np.moveaxis(projection.heads(), 0, 1)  # D H K
    heads, size = projection.num_heads, projection.head_size
    weight = scale * matrix.reshape(len(matrix), heads * size)
    bias = scale * projection.offset.reshape(-1)
    value = make.op(
        "MatMul", [projection.input, make.constant(weight.astype(dtype), "weight")], "product"
    )
    if np.any(bias):
        value = make.op("Add", [value, make.constant(bias.astype(dtype), "bias")], "biased")
    shape = make.constant(np.array([0, 0, heads, size], np.int64), "shape")
    value = make.op("Reshape", [value, shape], "heads")
    return make.op("Transpose", [value], "heads_apart", perm=[0, 2, 1, 3])


def _names(graph: ir.Graph) -> set[str | None]:
    """Every name in a graph, in the bodies inside it and in the graphs around it."""
    taken: set[str | None] = set()
    for inner in (graph, *graph.subgraphs()):
        taken |= {value.name for node in inner for value in node.outputs}
        taken |= {value.name for value in inner.inputs} | set(inner.initializers)
    return taken


def replace_uses(old: ir.Value, new: ir.Value) -> None:
    """Every reader of ``old`` reads ``new``; what is known of its type and shape moves along.

    Where ``old`` is an output of the graph, its name moves along too.
    """
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    if old.is_graph_output():
        old.name, new.name = f"{new.name}/before", old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def remove_unused(model: ir.Model) -> None:
    """Drop nodes and initializers that no output of the model depends on."""
    common.RemoveUnusedNodesPass()(model)


@contextmanager
def exposing(model: ir.Model, values: Sequence[ir.Value]) -> Generator[ir.Model]:
    """The model with these values as its only outputs, for as long as the context lasts."""
    outputs = list(model.graph.outputs)
    model.graph.outputs[:] = list(values)
    try:
        yield model
    finally:
        model.graph.outputs[:] = outputs
