"""Run a model layer by layer and cache activations while later layers are being rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.runtime.interface import Batch, owned
from attnserve.runtime.observer import Observer, behind, dependents, state_of

__all__ = ["LayerwiseRunner", "SegmentedModel"]


class LayerwiseRunner:
    """Compute values of a model on batches, starting from the latest cached values.

    Each call reads the graph again, so nodes that have not run yet may be edited between calls;
    nodes that have run are not run again. The cache of a batch holds the values at the cut between
    the requested values and later requested values: in a chain of layers the hidden state, the
    inputs of the next node, and a mask. Values that do not depend on the cache alone are computed
    from the model's inputs, which are kept.

    Args:
        model: The model; it is cloned before it runs and never changed.
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
        self._inputs = [state_of(model.graph.inputs, feed(batch)) for batch in batches]
        values = [value for node in model.graph for value in node.outputs] if known else []
        self._cache: list[dict[ir.Value, np.ndarray]] = [
            state_of(values, arrays) for arrays in known or [{} for _ in batches]
        ]

    @property
    def known(self) -> list[dict[str, np.ndarray]]:
        """The cached values of each batch, by name."""
        return [{v.name or "": array for v, array in cache.items()} for cache in self._cache]

    def run_to(
        self, values: Sequence[ir.Value], later_values: Collection[ir.Value] | None = ()
    ) -> Iterator[list[np.ndarray]]:
        """Run up to ``values`` and cache the values on which ``later_values`` depend.

        Yields the values of each batch, in order. Consume all batches before the next call.

        Args:
            later_values: None leaves the cache unchanged; nodes that run may then still be edited.

        Raises:
            InvalidData: The model refuses a batch.
        """
        if not self._inputs:
            return
        inputs_and_cache = self._inputs[0].keys() | self._cache[0].keys()
        # All other values are equal for each batch and not cached.
        batch_dependent = dependents(self.model.graph, self.model.graph.inputs)
        _, nodes = behind(self.model.graph, values, inputs_and_cache)
        node_outputs = {value for node in nodes for value in node.outputs} & batch_dependent
        tensors = {value for value in node_outputs if _is_tensor(value)}
        available = inputs_and_cache | set(values) | tensors
        next_cache: set[ir.Value] = set()
        if later_values is not None:
            sources = behind(self.model.graph, later_values, available)[0]
            next_cache = sources & batch_dependent - self._inputs[0].keys()
        by_name = sorted(next_cache, key=lambda value: value.name or "")
        needed_values = dict.fromkeys([*values, *by_name])
        outputs = [value for value in needed_values if value not in inputs_and_cache]
        observer: Observer | None = None
        for index, batch in enumerate(self._inputs):
            state = batch | self._cache[index]
            observer = observer or Observer(self.model, outputs, state, self.context.device)
            state |= observer(state)
            if later_values is not None:
                self._cache[index] = {value: owned(state[value]) for value in next_cache}
            yield [state[value] for value in values]


class SegmentedModel:
    """A model that is divided in front of some of its inputs, to vary one input at a time.

    Segment i reads input i and the results of the earlier segments; a run with another value of
    input i skips the segments before i. One session per segment serves all runs.

    Args:
        model: The model, which is not changed.
        inputs: The inputs to vary, in the order of execution of the nodes that read them.
    """

    def __init__(
        self, model: ir.Model, inputs: Sequence[ir.Value], context: RunContext = DEFAULT_CONTEXT
    ) -> None:
        self.model = model
        self.context = context
        self._cuts = _cuts(model.graph, inputs)
        self._segments: list[Observer | None] = [None] * len(self._cuts)

    def start(self, batch: Batch) -> dict[ir.Value, np.ndarray]:
        """The state before the first varied input."""
        return self._advance(0, state_of(self.model.graph.inputs, batch))

    def run(self, segment: int, state: Mapping[ir.Value, np.ndarray]) -> dict[ir.Value, np.ndarray]:
        """The state after a segment.

        Args:
            state: The state before the segment, which includes all inputs of the model.
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
        """The state at a cut, from the state at the previous cut; the first cut is the inputs."""
        segment = self._segments[index]
        if segment is None:
            cut_values = [v for v in _values(self.model.graph) if v in self._cuts[index]]
            segment = Observer(self.model, cut_values, state, self.context.device)
            self._segments[index] = segment
        next_state = {
            v: a for v, a in state.items() if v in self._cuts[index] or v.is_graph_input()
        }
        return next_state | segment(state)


def _cuts(graph: ir.Graph, inputs: Sequence[ir.Value]) -> list[set[ir.Value]]:
    """For each input, the values that the outputs need and that depend on no later input.

    The last cut holds the outputs.
    """
    cuts = [set(graph.outputs)]
    dependent: set[ir.Value] = set()
    batch_dependent = {value for value in dependents(graph, graph.inputs) if _is_tensor(value)}
    for value in reversed(inputs):
        dependent = dependents(graph, {*dependent, value})
        cuts.append(behind(graph, graph.outputs, batch_dependent - dependent)[0])
    return cuts[::-1]


def _is_tensor(value: ir.Value) -> bool:
    """Whether a value is neither a sequence nor optional."""
    node = value.producer()
    operator = "" if node is None else node.op_type
    has_other_type = isinstance(value.type, ir.SequenceType | ir.OptionalType)
    return not has_other_type and not ("Sequence" in operator or operator.startswith("Optional"))


def _values(graph: ir.Graph) -> list[ir.Value]:
    """All values of a graph: inputs, initializers and outputs of nodes."""
    outputs = [value for node in graph for value in node.outputs]
    return [*graph.inputs, *graph.initializers.values(), *outputs]
