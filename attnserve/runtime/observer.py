"""Compute values inside a model by running extracted parts of its graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnserve.context import CPU, DEFAULT_CONTEXT, Device, RunContext
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session

__all__ = [
    "Arrays",
    "Observer",
    "behind",
    "dependents",
    "extract",
    "observe",
    "reads",
    "state_of",
]

Arrays = Mapping[ir.Value, np.ndarray]
"""Arrays of values of a graph."""


class Observer:
    """A function from the inputs of a model, or from known values, to other values of the model.

    Only nodes that the values depend on run. Sessions of several observers may alternate.

    Args:
        model: The model. The observer does not change it, and ignores later changes.
        outputs: The values to compute.
        known: An example of each known value, for example the first state.
        device: The device of the runs.
    """

    def __init__(
        self, model: ir.Model, outputs: Sequence[ir.Value], known: Arrays, device: Device = CPU
    ) -> None:
        self._outputs = [value for value in dict.fromkeys(outputs) if value not in known]
        self._names: dict[ir.Value, str] = {}
        if self._outputs:
            part, self._names = extract(model, known, self._outputs)
            self._session = open_session(part, device)

    def __call__(self, state: Arrays) -> dict[ir.Value, np.ndarray]:
        """Compute the values that are not known; arrays may be session memory (``owned``).

        Raises:
            InvalidData: The model refuses the state.
        """
        if not self._outputs:
            return {}
        feed = {name: state[value] for value, name in self._names.items() if value in state}
        arrays = self._session.run(None, feed)
        return dict(zip(self._outputs, arrays, strict=True))


def observe(
    model: ir.Model,
    values: Sequence[Sequence[ir.Value]],
    batches: Sequence[Batch],
    context: RunContext = DEFAULT_CONTEXT,
    stage: str = "",
) -> Iterator[tuple[Batch, list[list[np.ndarray]]]]:
    """Yield each batch with the arrays of these values; one batch is in memory at a time.

    Args:
        values: Groups of values, for example one group per block.
        stage: The name under which progress is reported, after each batch; empty for none.

    Raises:
        InvalidData: The model refuses a batch.
    """
    outputs = [value for group in values for value in group]
    observer: Observer | None = None
    for number, batch in enumerate(batches if outputs else (), start=1):
        state = state_of(model.graph.inputs, batch)
        observer = observer or Observer(model, outputs, state, context.device)
        state |= observer(state)
        yield batch, [[state[value] for value in group] for group in values]
        if stage:
            context.progress(stage, number, len(batches))


def state_of(
    values: Sequence[ir.Value], arrays: Mapping[str, np.ndarray]
) -> dict[ir.Value, np.ndarray]:
    """Map values to arrays by name; other names are ignored."""
    return {value: arrays[name] for value in values if (name := value.name or "") in arrays}


def extract(
    model: ir.Model, known: Arrays, outputs: Sequence[ir.Value]
) -> tuple[ir.Model, dict[ir.Value, str]]:
    """Extract the computation of values from known values as a model, with its input names.

    Args:
        known: An example of each known value, for its type and number of axes.
    """
    weights = model.graph.initializers  # old graphs list them among the inputs
    inputs = [value for value in model.graph.inputs if value.name not in weights]
    sources = dict.fromkeys([*inputs, *known])
    origins, nodes = behind(model.graph, outputs, sources)
    # Some known values are outputs of the extracted nodes.
    origins -= {value for node in nodes for value in node.outputs}
    start = [value for value in sources if value in origins]
    graph = ir.convenience.extract(model.graph, start, outputs)
    for value, graph_input in zip(start, graph.inputs, strict=True):
        if not value.is_graph_input():  # its declared type may be missing
            array = known[value]
            graph_input.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            graph_input.shape = ir.Shape(_fixed_axes(value, array))
            graph_input.const_value = None
    functions = [function.clone() for function in model.functions.values()]
    part = ir.Model(graph, ir_version=model.ir_version, functions=functions)
    names = zip(start, graph.inputs, strict=True)
    return part, {value: graph_input.name or "" for value, graph_input in names}


def _fixed_axes(value: ir.Value, array: np.ndarray) -> list[int | None]:
    """The sizes of axes that are equal for all inputs of the model, as far as known.

    The shape that a Reshape or Expand reads is fixed too: a runtime may need its number of axes.
    """
    if value.shape is not None and len(value.shape) == array.ndim:
        return [axis if isinstance(axis, int) else None for axis in value.shape]
    is_sizes = any(
        use.node.op_type in ("Reshape", "Expand") and use.idx == 1 for use in value.uses()
    )
    return [*array.shape] if is_sizes else [None] * array.ndim


def behind(
    graph: ir.Graph, outputs: Collection[ir.Value], known: Collection[ir.Value]
) -> tuple[set[ir.Value], list[ir.Node]]:
    """The known values on which the outputs depend, and the nodes in between, last first."""
    values_read = set(outputs)
    nodes: list[ir.Node] = []
    for node in reversed(graph):
        if any(value in values_read and value not in known for value in node.outputs):
            nodes.append(node)
            values_read.update(reads(node))
    return values_read & set(known), nodes


def dependents(
    graph: ir.Graph, values: Collection[ir.Value], *, shapes: bool = True
) -> set[ir.Value]:
    """These values, and all values that depend on them.

    Args:
        shapes: Include values that depend on their shape alone.
    """
    found = set(values)
    for node in graph:
        reads_shape = node.op_type in ("Shape", "Size") and not node.domain
        if (shapes or not reads_shape) and not found.isdisjoint(reads(node)):
            found.update(node.outputs)
    return found


def reads(node: ir.Node) -> Iterator[ir.Value]:
    """Yield the values that a node and the graphs in its attributes read, in order."""
    yield from (value for value in node.inputs if value is not None)
    for attribute in node.attributes.values():
        graphs: Sequence[ir.Graph] = ()
        if attribute.type == ir.AttributeType.GRAPH:
            graphs = (attribute.as_graph(),)
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs = attribute.as_graphs()
        for graph in graphs:
            local_values = {value for child in graph for value in child.outputs} | set(graph.inputs)
            local_values |= set(graph.initializers.values())
            yield from (v for child in graph for v in reads(child) if v not in local_values)
            yield from (value for value in graph.outputs if value not in local_values)
