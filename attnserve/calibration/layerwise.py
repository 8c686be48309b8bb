"""Run a model layer by layer and cache activations while later layers are being rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.session import Batch, open_session, owned, run

__all__ = ["LayerwiseRunner", "SegmentedModel", "depending_on"]


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
        known: By batch, values of the graph that are known, by name; other names are ignored.
    """

    def __init__(
        self,
        model: ir.Model,
        batches: Sequence[Batch],
        *,
        feed: Callable[[Batch], Batch] = lambda batch: batch,
        known: Sequence[Mapping[str, np.ndarray]] = (),
        context: RunContext = DEFAULT_CONTEXT,
    ) -> None:
        self.model = model
        self.context = context
        self._given = [_by_value(model.graph.inputs, feed(batch)) for batch in batches]
        values = [value for node in model.graph for value in node.outputs] if known else []
        self._kept: list[dict[ir.Value, np.ndarray]] = [
            _by_value(values, arrays) for arrays in known or [{} for _ in batches]
        ]

    @property
    def known(self) -> list[dict[str, np.ndarray]]:
        """The cached values of each batch, by name."""
        return [{v.name or "": array for v, array in kept.items()} for kept in self._kept]

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
            session = _open(part, self.context)
        for index, given in enumerate(self._given):
            seen = given | self._kept[index]
            if session is not None:
                arrays = run(session, {name: seen[value] for value, name in names.items()})
                seen |= dict(zip(outputs, arrays, strict=True))
            if later is not None:
                self._kept[index] = {value: owned(seen[value]) for value in keep}
            yield [seen[value] for value in wanted]


class SegmentedModel:
    """A model that is cut in front of some of its inputs, to vary them one at a time.

    Segment i reads input i and what was computed before it; a run with another value of input i
    skips the segments before i. One session per segment serves all runs.

    Args:
        model: It is not changed.
        inputs: The inputs to vary, in the order of execution of the nodes that read them.
    """

    def __init__(
        self, model: ir.Model, inputs: Sequence[ir.Value], context: RunContext = DEFAULT_CONTEXT
    ) -> None:
        self.model = model
        self.context = context
        self._cuts = _cuts(model.graph, inputs)
        self._parts: list[_Part | None] = [None] * len(self._cuts)

    def start(self, batch: Batch) -> dict[ir.Value, np.ndarray]:
        """The state before the first varied input."""
        return self._advance(0, _by_value(self.model.graph.inputs, batch))

    def run(self, segment: int, state: Mapping[ir.Value, np.ndarray]) -> dict[ir.Value, np.ndarray]:
        """The state after a segment.

        Args:
            state: The state before it, which includes all inputs of the model.
        """
        return self._advance(segment + 1, state)

    def finish(self, segment: int, state: Mapping[ir.Value, np.ndarray]) -> list[np.ndarray]:
        """The outputs of the model, from the state before a segment."""
        for index in range(segment, len(self._cuts) - 1):
            state = self.run(index, state)
        return [state[value] for value in self.model.graph.outputs]

    def _advance(
        self, index: int, state: Mapping[ir.Value, np.ndarray]
    ) -> dict[ir.Value, np.ndarray]:
        part = self._parts[index]
        if part is None:
            part = self._parts[index] = self._opened(index, state)
        after = {v: a for v, a in state.items() if v in self._cuts[index] or v.is_graph_input()}
        if part.session is None:
            return after
        arrays = run(part.session, {name: state[value] for value, name in part.inputs.items()})
        return after | dict(zip(part.outputs, arrays, strict=True))

    def _opened(self, index: int, state: Mapping[ir.Value, np.ndarray]) -> _Part:
        order = _values(self.model.graph)
        outputs = [v for v in order if v in self._cuts[index] and v not in state]
        if not outputs:
            return _Part(None, {}, [])
        reads, nodes = _behind(self.model.graph, outputs, state.keys())
        start = {value: array for value, array in state.items() if value in reads}
        model, names = _between(self.model, start, nodes, outputs)
        return _Part(_open(model, self.context), names, outputs)


@dataclass(frozen=True, eq=False)
class _Part:
    """A session of a part of a graph; without one there is nothing to compute."""

    session: Any
    inputs: Mapping[ir.Value, str]
    outputs: Sequence[ir.Value]


def _cuts(graph: ir.Graph, inputs: Sequence[ir.Value]) -> list[set[ir.Value]]:
    """For each input, the values that the outputs need and that depend on no later input.

    The last cut holds the outputs.
    """
    cuts = [set(graph.outputs)]
    dependent: set[ir.Value] = set()
    varying = {value for value in _varying(graph) if _is_tensor(value)}
    for value in reversed(inputs):
        dependent.add(value)
        for node in graph:
            if not dependent.isdisjoint(_reads(node)):
                dependent.update(node.outputs)
        cuts.append(_behind(graph, graph.outputs, varying - dependent)[0])
    return cuts[::-1]


def _open(model: ir.Model, context: RunContext) -> Any:
    """A session that takes turns with those of other parts."""
    return open_session(model, provider=context.provider, threads=context.threads, spinning=False)


def _by_value(
    values: Sequence[ir.Value], arrays: Mapping[str, np.ndarray]
) -> dict[ir.Value, np.ndarray]:
    return {value: arrays[name] for value in values if (name := value.name or "") in arrays}


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


def depending_on(graph: ir.Graph, nodes: Collection[ir.Node]) -> set[ir.Value]:
    """The outputs of these nodes, and all values that depend on them."""
    found = {value for node in nodes for value in node.outputs}
    _add_dependents(graph, found)
    return found


def _varying(graph: ir.Graph) -> set[ir.Value]:
    """Values that depend on the inputs. All others are equal for each batch and not cached."""
    found = set(graph.inputs)
    _add_dependents(graph, found)
    return found


def _add_dependents(graph: ir.Graph, found: set[ir.Value]) -> None:
    for node in graph:
        if not found.isdisjoint(_reads(node)):
            found.update(node.outputs)


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
    nodes: Sequence[ir.Node],
    outputs: Sequence[ir.Value],
) -> tuple[ir.Model, dict[ir.Value, str]]:
    """Return a model of these nodes, from ``start`` to ``outputs``, and its input names.

    Args:
        start: Known values, with an example of each.
        nodes: In reverse order of execution.
    """
    made = {value for node in nodes for value in node.outputs}
    read = set(outputs).union(*map(_reads, nodes)) - made
    inputs = [v for v in dict.fromkeys([*model.graph.inputs, *start]) if v in read]
    view = ir.GraphView(
        inputs,
        outputs,
        nodes=nodes[::-1],
        initializers=[v for v in model.graph.initializers.values() if v in read],
        opset_imports=model.graph.opset_imports,
        name=model.graph.name,
    )
    graph = view.clone()
    for value, known in zip(inputs, graph.inputs, strict=True):
        if value in start and not value.is_graph_input():  # its declared type may be missing
            array = start[value]
            known.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            known.shape = ir.Shape([None] * array.ndim)
            known.const_value = None
    functions = [function.clone() for function in model.functions.values()]
    part = ir.Model(graph, ir_version=model.ir_version, functions=functions)
    pairs = zip(inputs, graph.inputs, strict=True)
    return part, {value: known.name or "" for value, known in pairs if value in start}


def _values(graph: ir.Graph) -> list[ir.Value]:
    made = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *made]
