"""Put new nodes into a graph, and take out what nothing reads any more."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.shapes import Facts, interpret_small

__all__ = [
    "Inserter",
    "exposing",
    "keep_shapes",
    "remove_unused",
    "replace_uses",
    "share_constants",
]


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


def keep_shapes(model: ir.Model, nodes: Iterable[ir.Node]) -> None:
    """Let go of nodes that are left only because their shapes are read.

    Exporters ask a layer's own queries or keys for the batch and the length; the same numbers come
    from the inputs of the model.
    """
    left = [node for node in nodes if node.graph is not None]
    asked = [
        user
        for node in left
        for value in node.outputs
        for user, _ in value.uses()
        if user.op_type == "Shape" and user.graph is model.graph
    ]
    if not asked:
        return
    runs = [interpret_small(model, batch=b, sequence=s) for b, s in ((2, 5), (3, 7))]
    for node in dict.fromkeys(asked):
        value = node.inputs[0]
        shapes = [facts.shape(value) for facts in runs]
        if value is None or shapes[0] is None or shapes[1] is None:
            continue
        sources = [_length_of(model, pair, runs) for pair in zip(*shapes, strict=True)]
        if all(source is not None for source in sources):
            _replace_shape(node, [source for source in sources if source is not None])
    remove_unused(model)


_Length = int | tuple[ir.Value, int]


def _length_of(model: ir.Model, lengths: tuple[int, ...], runs: Sequence[Facts]) -> _Length | None:
    """A number, or the axis of an input, that is of these lengths in these runs."""
    if len(set(lengths)) == 1:
        return lengths[0]
    for value in model.graph.inputs:
        shapes = [facts.shape(value) or () for facts in runs]
        for axis, pair in enumerate(zip(*shapes, strict=True)):
            if pair == lengths:
                return value, axis
    return None


def _replace_shape(node: ir.Node, sources: Sequence[_Length]) -> None:
    assert isinstance(node.graph, ir.Graph)
    make = Inserter(node.graph, node, f"{node.name or node.outputs[0].name}/lengths")
    first = node.attributes.get_int("start", 0)
    last = node.attributes.get_int("end", len(sources))
    parts: list[ir.Value] = []
    for source in list(sources)[first:last]:
        if isinstance(source, int):
            parts.append(make.constant(np.array([source], np.int64), "length"))
            continue
        ends = [make.constant(np.array([source[1] + n], np.int64), "end") for n in (0, 1)]
        parts.append(make.op("Slice", [make.op("Shape", [source[0]], "shape"), *ends], "length"))
    replace_uses(node.outputs[0], make.op("Concat", parts, "lengths", axis=0))


def share_constants(model: ir.Model, *, since: Collection[str]) -> None:
    """Constants that are not in ``since`` and hold the same become one, as layers share weights."""
    for graph in model.graphs():
        first: dict[bytes, ir.Value] = {}
        for name, value in list(graph.initializers.items()):
            tensor = value.const_value
            if name in since or tensor is None or value.is_graph_output():
                continue
            content = hashlib.sha256(repr((tensor.dtype, tuple(tensor.shape))).encode())
            content.update(tensor.tobytes())
            kept = first.setdefault(content.digest(), value)
            if kept is not value:
                ir.convenience.replace_all_uses_with(value, kept)
                del graph.initializers[name]


@contextmanager
def exposing(model: ir.Model, values: Sequence[ir.Value]) -> Generator[ir.Model]:
    """The model with these values as its only outputs, for as long as the context lasts."""
    outputs = list(model.graph.outputs)
    model.graph.outputs[:] = list(values)
    try:
        yield model
    finally:
        model.graph.outputs[:] = outputs
