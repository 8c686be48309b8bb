"""Put new nodes into a graph, and take out what nothing reads any more."""

from __future__ import annotations

from collections.abc import Collection, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small

if TYPE_CHECKING:
    from graph_passes.blocks import AttentionBlock

__all__ = [
    "Inserter",
    "exposing",
    "redirect_shapes",
    "remove_unused",
    "replace_uses",
    "share_constants",
]


LAID_OUT = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Identity"})


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
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        """An operator with one output, called ``prefix/name``; a standard one by default."""
        return self.ops(op_type, inputs, (name,), domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        names: Sequence[str],
        *,
        domain: str = "",
        **attributes: Any,
    ) -> Sequence[ir.Value]:
        """An operator with an output for each name; it is called by the first."""
        unique = [self._unique(name) for name in names]
        node = ir.node(
            op_type, inputs, attributes=attributes, domain=domain, name=unique[0],
            num_outputs=len(unique),
        )  # fmt: skip
        for value, name in zip(node.outputs, unique, strict=True):
            value.name = name
        self.graph.insert_before(self.before, node)
        return node.outputs

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


def redirect_shapes(model: ir.Model, blocks: Iterable[AttentionBlock]) -> None:
    """Let go of nodes of rewritten blocks that are left only because their shapes are read.

    Exporters ask a layer's own queries or keys for the batch and the length; the tokens that these
    are made of tell the same.
    """
    asked = [
        (user, tokens)
        for block in blocks
        for node, tokens in _tokens_of(block)
        if node.graph is not None
        for user in _asked(node)
        if user.graph is block.graph
    ]
    if not asked:
        return
    runs = [infer_shapes_small(model, batch=b, sequence=s) for b, s in ((2, 5), (3, 7))]
    place = {node: index for index, node in enumerate(model.graph.all_nodes())}
    for node, tokens in dict(asked).items():
        maker = tokens.producer()
        if maker is not None and place.get(maker, -1) > place[node]:
            continue  # the tokens are computed after their length is read (cached decoders)
        shapes = [info.shape(node.inputs[0]) for info in runs]
        if shapes[0] is None or shapes[1] is None:
            continue
        sources = [_length_of(tokens, pair, runs) for pair in zip(*shapes, strict=True)]
        if all(source is not None for source in sources):
            _replace_shape(node, [source for source in sources if source is not None])
    remove_unused(model)


def _asked(node: ir.Node) -> Iterator[ir.Node]:
    """Every Shape of what a node makes, laid out anew or not."""
    for value in node.outputs:
        for user, _ in value.uses():
            if user.op_type == "Shape":
                yield user
            elif user.op_type in LAID_OUT:
                yield from _asked(user)


def _tokens_of(block: AttentionBlock) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Each node whose batch and length are those of one value, and this value.

    Scores have two lengths, those of x and of y, which are told apart only where they are one.
    """
    for part in (block.v, block.k, block.q):
        yield from ((node, part.input) for node in part.nodes)
    made = [] if block.output is None else block.output.nodes
    yield from ((node, block.x) for node in (*made, *(block.nodes if block.x is block.y else ())))


_Length = int | tuple[ir.Value, int, int]
"""A number, or an axis of a value and how many times it is taken."""


def _length_of(
    tokens: ir.Value, lengths: tuple[int, ...], runs: Sequence[ShapeInfo]
) -> _Length | None:
    """A number, or the axis of the tokens, that is of these lengths in these runs.

    Heads may lie in the batch: then the length is some times that of the axis.
    """
    if len(set(lengths)) == 1:
        return lengths[0]
    shapes = [info.shape(tokens) or () for info in runs]
    for axis, pair in enumerate(zip(*shapes, strict=False)):
        times = lengths[0] // max(pair[0], 1)
        if lengths == tuple(times * length for length in pair):
            return tokens, axis, times
    return None


def _replace_shape(node: ir.Node, sources: Sequence[_Length]) -> None:
    assert isinstance(node.graph, ir.Graph)
    make = Inserter(node.graph, node, f"{node.name or node.outputs[0].name}/lengths")
    first = node.attributes.get_int("start", 0)
    last = node.attributes.get_int("end", len(sources))
    parts: list[ir.Value] = []

    def number(value: int, name: str) -> ir.Value:
        return make.constant(np.array([value], np.int64), name)

    for source in list(sources)[first:last]:
        if isinstance(source, int):
            parts.append(number(source, "length"))
            continue
        tokens, axis, times = source
        ends = [number(axis, "from"), number(axis + 1, "to")]
        part = make.op("Slice", [make.op("Shape", [tokens], "shape"), *ends], "length")
        parts.append(part if times == 1 else make.op("Mul", [part, number(times, "times")], "many"))
    replace_uses(node.outputs[0], make.op("Concat", parts, "lengths", axis=0))


def share_constants(model: ir.Model, *, since: Collection[str]) -> None:
    """Constants that are not in ``since`` and hold the same become one, as layers share weights.

    Where an older constant holds the same, it is the one that stays.
    """
    for graph in model.graphs():
        given = [value for value in graph.initializers.values() if not _is_seen(value)]
        new = [value for value in given if value.name not in since]
        kinds = {_kind(value) for value in new}
        alike: dict[Hashable, list[ir.Value]] = {}
        for value in given:
            if value.name in since and _kind(value) in kinds:  # others may stay on disk
                alike.setdefault(_sample(value), []).append(value)
        for value in new:
            others = alike.setdefault(_sample(value), [])
            kept = next((other for other in others if _same(other, value)), None)
            if kept is None:
                others.append(value)
                continue
            ir.convenience.replace_all_uses_with(value, kept)
            del graph.initializers[value.name or ""]


def _is_seen(value: ir.Value) -> bool:
    """Whether callers of the model may read or replace it."""
    return value.const_value is None or value.is_graph_output() or value.is_graph_input()


def _kind(value: ir.Value) -> Hashable:
    assert value.const_value is not None
    return value.const_value.dtype, tuple(value.const_value.shape)


def _sample(value: ir.Value) -> Hashable:
    """The same for constants that hold the same; a few elements, for most differ in the first."""
    assert value.const_value is not None
    array = value.const_value.numpy().reshape(-1)
    return _kind(value), array[:: max(1, array.size // 16)].tobytes()


def _same(a: ir.Value, b: ir.Value) -> bool:
    assert a.const_value is not None and b.const_value is not None
    return a.const_value.numpy().tobytes() == b.const_value.numpy().tobytes()


@contextmanager
def exposing(model: ir.Model, values: Sequence[ir.Value]) -> Generator[ir.Model]:
    """The model with these values as its only outputs, for as long as the context lasts."""
    outputs = list(model.graph.outputs)
    model.graph.outputs[:] = list(values)
    try:
        yield model
    finally:
        model.graph.outputs[:] = outputs
