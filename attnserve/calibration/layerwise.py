"""A model run once, stretch by stretch, while what lies ahead of it is still being rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnserve.context import Provider
from attnserve.runtime.session import Batch, open_session, run

__all__ = ["Stepwise"]


class Stepwise:
    """Values of a model on batches, each computed from those that were kept last.

    Before each stretch the graph is read anew, so nodes may have been edited since, but for those
    that made what is known: these are not run again. Of every batch there is kept, as ONNX Runtime
    returned it, what lies between the values that were asked for and those that will be: in a
    chain of layers the hidden state, what the next node reads, and a mask or so. What cannot be
    told from it is computed from the model's inputs, which stay.

    Args:
        model: Its clones are run; it is never changed.
        batches: Inputs of the model.
        feed: A batch as the model takes it.
    """

    def __init__(
        self,
        model: ir.Model,
        batches: Sequence[Batch],
        *,
        feed: Callable[[Batch], Batch] = lambda batch: batch,
        provider: Provider = "cpu",
        threads: int = 0,
    ) -> None:
        self.model = model
        self.provider: Provider = provider
        self.threads = threads
        self._given = [_by_value(model.graph.inputs, feed(batch)) for batch in batches]
        self._kept: list[dict[ir.Value, np.ndarray]] = [{} for _ in batches]

    def advance(
        self, wanted: Sequence[ir.Value], later: Collection[ir.Value] = ()
    ) -> Iterator[list[np.ndarray]]:
        """Run up to ``wanted``, and keep from there on what ``later`` depends on, no more.

        Each batch's values, in the order of the batches, which must all be taken before the next
        stretch.

        Raises:
            InvalidData: The model refuses a batch.
        """
        return self._stretch(wanted, later)

    def look(self, wanted: Sequence[ir.Value]) -> Iterator[list[np.ndarray]]:
        """Run up to ``wanted`` and stay: what lies on the way may still be edited."""
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
            session = open_session(part, provider=self.provider, threads=self.threads)
        for index, given in enumerate(self._given):
            seen = given | self._kept[index]
            if session is not None:
                arrays = run(session, {name: seen[value] for value, name in names.items()})
                seen |= dict(zip(outputs, arrays, strict=True))
            if later is not None:
                self._kept[index] = {value: seen[value] for value in keep}
            yield [seen[value] for value in wanted]


def _by_value(inputs: Sequence[ir.Value], batch: Batch) -> dict[ir.Value, np.ndarray]:
    return {value: batch[value.name] for value in inputs if value.name in batch}


def _reads(node: ir.Node) -> set[ir.Value]:
    """What a node and the bodies inside it read."""
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
    """What depends on the inputs; all else is the same for each batch, and never kept."""
    found = set(graph.inputs)
    for node in graph:
        if not found.isdisjoint(_reads(node)):
            found.update(node.outputs)
    return found


def _is_tensor(value: ir.Value) -> bool:
    node = value.producer()
    made = "" if node is None else node.op_type
    told = isinstance(value.type, ir.SequenceType | ir.OptionalType)
    return not told and not ("Sequence" in made or made.startswith("Optional"))


def _behind(
    graph: ir.Graph, values: Collection[ir.Value], known: Collection[ir.Value]
) -> tuple[set[ir.Value], list[ir.Node]]:
    """The known values that these are made from, and the nodes between."""
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
    """A model of these nodes that makes ``outputs`` from the values of ``start``, and as what it
    takes these."""
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
    # Bodies of nodes that are gone still count as users of what they captured: uses tell nothing.
    read = set(graph.outputs).union(*map(_reads, graph))
    for name, value in list(graph.initializers.items()):
        if value not in read:
            del graph.initializers[name]
    taken = {value.name for inner in part.graphs() for value in _values(inner)}
    for value, known in new.items():
        known.name = value.name or "known"  # which an error message may tell
        while known.name in taken:  # its node is still here, for another output
            known.name += "/known"
        taken.add(known.name)
    graph.inputs[:] = [value for value in (*graph.inputs, *new.values()) if value in read]
    taking = {value: new.get(value, own[value]) for value in start}
    return part, {value: known.name or "" for value, known in taking.items() if known in read}


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *made]
