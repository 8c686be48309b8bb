"""Run a model layer by layer and cache activations while later layers are being rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.session import Batch, open_session, run

__all__ = ["LayerwiseRunner", "Suffix", "suffix_of"]


class LayerwiseRunner:
    """Compute values of a model on batches, starting from the values that were cached last.

    Each call reads the graph again, so nodes that have not run yet may be edited between calls;
    nodes that have run are not run again. The cache of a batch holds the ONNX Runtime outputs
    between the requested values and the ones that are requested later: in a chain of layers the
    hidden state, the inputs of the next node, and a mask. Values that do not follow from the cache
    are computed from the model's inputs, which are kept.

    Args:
        model: It is cloned before it runs and never changed.
        batches: Inputs of the model.
        feed: Converts a batch to the inputs that the model takes.
    """

    def __init__(
        self,
        model: ir.Model,
        batches: Sequence[Batch],
        *,
        feed: Callable[[Batch], Batch] = lambda batch: batch,
        context: RunContext = DEFAULT_CONTEXT,
    ) -> None:
        self.model = model
        self.context = context
        self._given = [_by_value(model.graph.inputs, feed(batch)) for batch in batches]
        self._kept: list[dict[ir.Value, np.ndarray]] = [{} for _ in batches]

    def run_to(
        self, wanted: Sequence[ir.Value], later: Collection[ir.Value] = ()
    ) -> Iterator[list[np.ndarray]]:
        """Run up to ``wanted`` and cache what ``later`` depends on.

        Yields the values of each batch, in order. Consume all batches before the next call.

        Raises:
            InvalidData: The model refuses a batch.
        """
        return self._stretch(wanted, later)

    def peek(self, wanted: Sequence[ir.Value]) -> Iterator[list[np.ndarray]]:
        """Run up to ``wanted`` and keep the cache: nodes on the way may still be edited."""
        return self._stretch(wanted, None)

    def _stretch(
        self, wanted: Sequence[ir.Value], later: Collection[ir.Value] | None
    ) -> Iterator[list[np.ndarray]]:
        if not self._given:
            return
        known = self._given[0].keys() | self._kept[0].keys()
        varying = _varying(self.model.graph)
        start, nodes = _behind(self.model.graph, wanted, known)
        made = {value for node in nodes for value in node.outputs} & varying
        ahead = known | set(wanted) | {value for value in made if _is_tensor(value)}
        keep: set[ir.Value] = set()
        if later is not None:
            keep = _behind(self.model.graph, later, ahead)[0] & varying - self._given[0].keys()
        outputs = [
            value
            for value in dict.fromkeys([*wanted, *sorted(keep, key=lambda value: value.name or "")])
            if value not in known
        ]
        session, names = None, dict[ir.Value, str]()
        if outputs:
            first = self._given[0] | self._kept[0]
            start = {value: array for value, array in first.items() if value in start}
            part, names = _between(self.model, start, nodes, outputs)
            session = open_session(
                part, provider=self.context.provider, threads=self.context.threads
            )
        for index, given in enumerate(self._given):
            seen = given | self._kept[index]
            if session is not None:
                arrays = run(session, {name: seen[value] for value, name in names.items()})
                seen |= dict(zip(outputs, arrays, strict=True))
            if later is not None:
                self._kept[index] = {value: seen[value] for value in keep}
            yield [seen[value] for value in wanted]


@dataclass(frozen=True, eq=False)
class Suffix:
    """The part of a graph that depends on one of its inputs.

    Attributes:
        reads: Computed values, and other inputs, that the part reads.
        nodes: In reverse order of execution.
        outputs: The outputs of the graph that depend on the input.
    """

    reads: list[ir.Value]
    nodes: list[ir.Node]
    outputs: list[ir.Value]

    def model(
        self, model: ir.Model, inputs: Sequence[ir.Value], arrays: Sequence[np.ndarray]
    ) -> tuple[ir.Model, dict[ir.Value, str]]:
        """A model of the part, and the name of its input for each value that it reads.

        Args:
            inputs: The inputs that the part depends on.
            arrays: An example of each value of ``reads``.
        """
        start = dict(zip(self.reads, arrays, strict=True)) | {v: np.zeros(0) for v in inputs}
        return _between(model, start, self.nodes, self.outputs)


def suffix_of(graph: ir.Graph, start: ir.Value) -> Suffix:
    """The part of a graph that depends on ``start``, an input of the graph."""
    dependent = {start}
    for node in graph:
        if not dependent.isdisjoint(_reads(node)):
            dependent.update(node.outputs)
    known = {v for v in _varying(graph) - dependent if _is_tensor(v)}
    outputs = [value for value in graph.outputs if value in dependent]
    reads, nodes = _behind(graph, outputs, known | {start})
    order = {value: place for place, value in enumerate(_values(graph))}
    return Suffix(sorted(reads - {start}, key=lambda v: order[v]), nodes, outputs)


def _by_value(inputs: Sequence[ir.Value], batch: Batch) -> dict[ir.Value, np.ndarray]:
    return {value: batch[value.name] for value in inputs if value.name in batch}


def _reads(node: ir.Node) -> set[ir.Value]:
    """The inputs of a node and of the graphs in its attributes."""
    found = {value for value in node.inputs if value is not None}
    for attribute in node.attributes.values():
        graphs: Sequence[ir.Graph] = ()
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = [attribute.as_graph()]
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = attribute.as_graphs()
        for graph in graphs:
            found |= {*graph.outputs}.union(*map(_reads, graph))
    return found


def _varying(graph: ir.Graph) -> set[ir.Value]:
    """Values that depend on the inputs. All others are equal for each batch and not cached."""
    found = set(graph.inputs)
    for node in graph:
        if not found.isdisjoint(_reads(node)):
            found.update(node.outputs)
    return found


def _is_tensor(value: ir.Value) -> bool:
    node = value.producer()
    made = "" if node is None else node.op_type
    other = isinstance(value.type, ir.SequenceType | ir.OptionalType)
    return not other and not ("Sequence" in made or made.startswith("Optional"))


def _behind(
    graph: ir.Graph, values: Collection[ir.Value], known: Collection[ir.Value]
) -> tuple[set[ir.Value], list[ir.Node]]:
    """The known values that ``values`` are computed from, and the nodes in between."""
    wanted, nodes = set(values), list[ir.Node]()
    for node in reversed(graph):
        if any(value in wanted and value not in known for value in node.outputs):
            nodes.append(node)
            wanted |= _reads(node)
    return wanted & set(known), nodes


def _between(
    model: ir.Model,
    start: Mapping[ir.Value, np.ndarray],
    nodes: Collection[ir.Node],
    outputs: Sequence[ir.Value],
) -> tuple[ir.Model, dict[ir.Value, str]]:
    """Return a model of these nodes, from ``start`` to ``outputs``, and its input names."""
    part = model.clone()
    graph = part.graph
    own = dict(zip(_values(model.graph), _values(graph), strict=True))
    graph.outputs[:] = [own[value] for value in outputs]
    new: dict[ir.Value, ir.Value] = {}
    for value, array in start.items():
        if not value.is_graph_input():
            dtype = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            new[value] = ir.Value(type=dtype, shape=ir.Shape([None] * array.ndim))
            ir.convenience.replace_all_uses_with(own[value], new[value])
    chosen = set(nodes)
    pairs = zip(list(model.graph), list(graph), strict=True)
    graph.remove([copy for node, copy in pairs if node not in chosen])
    # Subgraphs of removed nodes still count as users of captured values: uses() is not reliable.
    read = set(graph.outputs).union(*map(_reads, graph))
    for name, value in list(graph.initializers.items()):
        if value not in read:
            del graph.initializers[name]
    taken = {value.name for inner in part.graphs() for value in _values(inner)}
    for value, known in new.items():
        known.name = value.name or "known"  # error messages show this name
        while known.name in taken:  # its node is still in the graph, for another output
            known.name += "/known"
        taken.add(known.name)
    graph.inputs[:] = [value for value in (*graph.inputs, *new.values()) if value in read]
    taking = {value: new.get(value, own[value]) for value in start}
    return part, {value: known.name or "" for value, known in taking.items() if known in read}


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *made]
