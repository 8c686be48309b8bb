"""Insert nodes into a graph, and remove unused ones."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.convolved_axes import SIDE
from graph_passes.analysis.required import graph_of, tensor_of
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small

if TYPE_CHECKING:
    from graph_passes.blocks import AttentionBlock

__all__ = [
    "Attribute",
    "Inserter",
    "capture_weights",
    "in_precision",
    "redirect_shapes",
    "remove_unused",
    "replace_uses",
    "share_constants",
    "type_of",
]

Attribute = int | float | str | Sequence[int]
"""An attribute of an operator."""

LAID_OUT = frozenset({"Transpose", "Reshape", "Squeeze", "Unsqueeze", "Cast", "Identity"})
"""Operators through which exporters read the shape of a projection."""


class Inserter:
    """Inserts nodes and constants with unique names before a node.

    Args:
        graph: The graph to change.
        before: New nodes are inserted before this node.
        prefix: Prefix of all new names.
    """

    def __init__(self, graph: ir.Graph, before: ir.Node, prefix: str) -> None:
        self.graph = graph
        self.before = before
        self.prefix = prefix
        self._taken = _names(graph)

    def part(self, name: str) -> Inserter:
        """An inserter before the same node, with the prefix ``prefix/name``."""
        return Inserter(self.graph, self.before, f"{self.prefix}/{name}")

    def op(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        *,
        domain: str = "",
        dtype: ir.DataType | None = None,
        **attributes: Attribute,
    ) -> ir.Value:
        """Insert an operator with one output, named ``prefix/name``.

        Args:
            dtype: The element type of the output, if known.
        """
        output = self.ops(op_type, inputs, (name,), domain=domain, **attributes)[0]
        if dtype is not None:
            output.type = ir.TensorType(dtype)
        return output

    def ops(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        names: Sequence[str],
        *,
        domain: str = "",
        **attributes: Attribute,
    ) -> Sequence[ir.Value]:
        """Insert an operator with one output per name; the node has the first name."""
        unique = [self._unique(name) for name in names]
        node = ir.node(
            op_type,
            inputs,
            attributes=attributes,
            domain=domain,
            name=unique[0],
            num_outputs=len(unique),
        )
        for value, name in zip(node.outputs, unique, strict=True):
            value.name = name
        self.graph.insert_before(self.before, node)
        return node.outputs

    def constant(
        self, array: np.ndarray | float, name: str, dtype: ir.DataType | None = None
    ) -> ir.Value:
        """Add an initializer named ``prefix/name``, converted to ``dtype`` if given."""
        unique = self._unique(name)
        array = np.asarray(array)
        array = array.copy(order="C") if dtype is None else array.astype(dtype.numpy(), order="C")
        tensor = ir.tensor(array, name=unique)
        value = ir.Value(
            name=unique,
            shape=ir.Shape(array.shape),
            type=ir.TensorType(tensor.dtype),
            const_value=tensor,
        )
        self.graph.register_initializer(value)
        return value

    def integers(self, numbers: Sequence[int] | np.ndarray | int, name: str) -> ir.Value:
        """Add an initializer of type int64."""
        return self.constant(np.asarray(numbers), name, ir.DataType.INT64)

    def lengths(self, value: ir.Value, first: int, last: int) -> ir.Value:
        """Insert ``shape(value)[first:last]``."""
        ends = [self.integers([axis], name) for axis, name in ((first, "from"), (last, "to"))]
        return self.op("Slice", [self.op("Shape", [value], "shape"), *ends], "lengths")

    def _unique(self, name: str) -> str:
        """``prefix/name``, with a number if the name is taken."""
        candidate = f"{self.prefix}/{name}"
        count = 1
        while candidate in self._taken:
            count += 1
            candidate = f"{self.prefix}/{name}_{count}"
        self._taken.add(candidate)
        return candidate


def _names(graph: ir.Graph) -> set[str | None]:
    """All names in a graph and its subgraphs."""
    taken: set[str | None] = set()
    for inner in (graph, *graph.subgraphs()):
        taken |= {value.name for node in inner for value in node.outputs}
        taken |= {value.name for value in inner.inputs} | set(inner.initializers)
    return taken


def replace_uses(old: ir.Value, new: ir.Value) -> None:
    """Replace ``old`` by ``new`` in all readers; copy type and shape if unknown.

    If ``old`` is an output of the graph, ``new`` takes its name.
    """
    new.type = new.type or old.type
    new.shape = new.shape or old.shape
    if old.is_graph_output():
        old.name, new.name = f"{new.name}/before", old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def capture_weights(model: ir.Model) -> None:
    """Let bodies of Loop and Scan read weights from the outer graph instead of from their state.

    Some converters pass each weight to the body as a state that no iteration changes. The state
    stays, but no node computes with it.
    """
    for node in model.graph.all_nodes():
        if node.domain or node.op_type not in ("Loop", "Scan"):
            continue
        body = node.attributes["body"].as_graph()
        is_loop = node.op_type == "Loop"
        states = len(node.inputs) - node.attributes.get_int("num_scan_inputs", 0)
        for index in range(2 if is_loop else 0, states):
            outer, inner = node.inputs[index], body.inputs[index]
            last = body.outputs[index - is_loop]
            maker = last.producer()
            is_copied = maker is not None and (maker.op_type, *maker.inputs) == ("Identity", inner)
            if not is_constant(outer) or not (last is inner or is_copied):
                continue
            if outer.name in _names(body):  # it would hide the outer value
                continue
            for user, place in list(inner.uses()):
                if user is not maker:
                    user.replace_input_with(place, outer)


def remove_unused(model: ir.Model) -> None:
    """Remove nodes and initializers that no output depends on."""
    common.RemoveUnusedNodesPass()(model)


def redirect_shapes(model: ir.Model, blocks: Iterable[AttentionBlock]) -> None:
    """Redirect reads of shapes from nodes of rewritten blocks to the tokens, and remove the nodes.

    Exporters read batch and length from the shape of a layer's queries or keys. The tokens have the
    same batch and length. A shape of other lengths keeps its nodes, which is exact.
    """
    readers = {
        user: tokens
        for block in blocks
        for node, tokens in _tokens_of(block)
        if node.graph is not None
        for user in _shape_readers(node)
        if user.graph is block.graph
    }
    if not readers:
        return
    runs = [_infer_at(model, *point) for point in POINTS]
    if any(runs[-1].shape(node.inputs[0]) is None for node in readers):
        runs[-1] = _infer_at(model, *SHORTER_POINT)  # the model has fewer positions
    place = {node: index for index, node in enumerate(model.graph.all_nodes())}
    for node, tokens in readers.items():
        maker = tokens.producer()
        if maker is not None and place.get(maker, -1) > place[node]:
            continue  # the tokens are computed after their length is read (cached decoders)
        shapes = [info.shape(node.inputs[0]) for info in runs]
        known = [shape for shape in shapes if shape is not None]
        if len(known) < len(runs):
            continue
        sources = [_length_of(tokens, lengths, runs) for lengths in zip(*known, strict=True)]
        if all(source is not None for source in sources):
            _replace_shape(node, [source for source in sources if source is not None])
    remove_unused(model)


def _shape_readers(node: ir.Node) -> Iterator[ir.Node]:
    """Yield the Shape nodes that read outputs of a node, also through layout nodes."""
    for value in node.outputs:
        for user, _ in value.uses():
            if user.op_type == "Shape":
                yield user
            elif user.op_type in LAID_OUT:
                yield from _shape_readers(user)


def _tokens_of(block: AttentionBlock) -> Iterator[tuple[ir.Node, ir.Value]]:
    """Yield nodes of a block with the value that has the same batch and length.

    Scores have the lengths of x and y, so they are included for self-attention only.
    """
    for part in (block.v, block.k, block.q):
        if not part.is_cached:  # else some nodes count past tokens too
            yield from ((node, part.input) for node in part.nodes)
    nodes = list(() if block.output is None else block.output.nodes)
    nodes += block.nodes if block.x is block.y and not block.k.is_cached else ()
    yield from ((node, block.x) for node in nodes)


POINTS = ((2, 5, 1, 2), (3, 7, 2, 1), (2, 521, 3, 3))
"""Batch, sequence, and height and width of images in units of ``SIDE``, for shape inference.
Batch, length and functions of them, such as half of the length, differ in at least one point. The
last point is longer than windows to which models pad."""

SHORTER_POINT = (2, 13, 3, 3)


def _infer_at(model: ir.Model, batch: int, sequence: int, height: int, width: int) -> ShapeInfo:
    """Infer shapes at one of ``POINTS``."""
    sides = (height * SIDE, width * SIDE)
    return infer_shapes_small(model, batch=batch, sequence=sequence, sides=sides)


_Length = int | tuple[ir.Value, int, int]
"""A number, or a value, its axis, and a multiple of that axis."""


def _length_of(
    tokens: ir.Value, lengths: tuple[int, ...], runs: Sequence[ShapeInfo]
) -> _Length | None:
    """Express a length as a number or as a multiple of an axis of the tokens.

    ``lengths`` has the length in each of ``runs``. Multiples occur if heads are merged with the
    batch.
    """
    if len(set(lengths)) == 1:
        return lengths[0]
    shapes = [info.shape(tokens) or () for info in runs]
    for axis, token_lengths in enumerate(zip(*shapes, strict=False)):
        times = lengths[0] // max(token_lengths[0], 1)
        if lengths == tuple(times * length for length in token_lengths):
            return tokens, axis, times
    return None


def _replace_shape(node: ir.Node, sources: Sequence[_Length]) -> None:
    """Replace a Shape node by the concatenation of these lengths."""
    make = Inserter(graph_of(node), node, f"{node.name or node.outputs[0].name}/lengths")
    first = node.attributes.get_int("start", 0)
    last = node.attributes.get_int("end", len(sources))
    parts: list[ir.Value] = []
    for source in list(sources)[first:last]:
        if isinstance(source, int):
            parts.append(make.integers([source], "length"))
            continue
        tokens, axis, times = source
        part = make.lengths(tokens, axis, axis + 1)
        if times != 1:
            part = make.op("Mul", [part, make.integers([times], "times")], "many")
        parts.append(part)
    replace_uses(node.outputs[0], make.op("Concat", parts, "lengths", axis=0))


def share_constants(model: ir.Model, *, since: Collection[str]) -> None:
    """Merge new constants with equal elements, so that layers share weights.

    Args:
        since: Names of the constants before the rewrite; these are kept.
    """
    for graph in model.graphs():
        constants = [value for value in graph.initializers.values() if not _is_external(value)]
        new = [value for value in constants if value.name not in since]
        kinds = {_kind(value) for value in new}
        alike: dict[Hashable, list[ir.Value]] = {}
        for value in constants:
            if value.name in since and _kind(value) in kinds:  # do not load others from disk
                alike.setdefault(_sample(value), []).append(value)
        for value in new:
            candidates = alike.setdefault(_sample(value), [])
            equal = next((candidate for candidate in candidates if _same(candidate, value)), None)
            if equal is None:
                candidates.append(value)
                continue
            ir.convenience.replace_all_uses_with(value, equal)
            del graph.initializers[value.name or ""]


def _is_external(value: ir.Value) -> bool:
    """Whether a value is an input or output of the graph, or has no data."""
    return value.const_value is None or value.is_graph_output() or value.is_graph_input()


def _kind(value: ir.Value) -> Hashable:
    """The type and shape of a constant."""
    tensor = tensor_of(value)
    return tensor.dtype, tuple(tensor.shape)


def _sample(value: ir.Value) -> Hashable:
    """A hash key from a few elements; equal for equal constants."""
    array = tensor_of(value).numpy().reshape(-1)
    return _kind(value), array[:: max(1, array.size // 16)].tobytes()


def _same(a: ir.Value, b: ir.Value) -> bool:
    """Whether two constants of one type have equal bytes."""
    return tensor_of(a).numpy().tobytes() == tensor_of(b).numpy().tobytes()


def type_of(value: ir.Value | None, info: ShapeInfo) -> ir.DataType | None:
    """The element type of a value, if known."""
    if value is None:
        return None
    tensor = info.known.get(value)
    return value.dtype if tensor is None else tensor.dtype


def in_precision(make: Inserter, value: ir.Value, dtype: ir.DataType, info: ShapeInfo) -> ir.Value:
    """Cast a value to a precision, unless its precision is equal or unknown."""
    if type_of(value, info) in (None, dtype):
        return value
    return make.op("Cast", [value], "cast", dtype=dtype, to=dtype.value)
