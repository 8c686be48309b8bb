"""Extract parts of a model, time them in interleaved order and cache their latencies in a file.

Latencies are measured, because they are not proportional to operation counts and depend on the
machine. A block is extracted as a small graph with the inputs that the whole model gives it, so
that masks and shapes are realistic.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from attnserve.context import CPU, Device, ModelTimer, TimedModel
from attnserve.runtime.cache import cache_folder, write_atomically
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.interface import Batch
from attnserve.runtime.interleaved_timer import time_functions
from attnserve.runtime.machine import available_cores, cpu_name, gpu_name
from attnserve.runtime.observer import Observer, dependents, extract, reads, state_of
from attnserve.runtime.session import RUNTIMES, open_session
from graph_passes.analysis.axes import bind_axes, read_axes
from graph_passes.analysis.constants import origin
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at
from graph_passes.analysis.workload import Workload

__all__ = ["Cut", "LatencyTable", "Part", "cut_out", "default_cache", "dim_of"]

Name = TypeVar("Name", bound=Hashable)

GROUP_SECONDS = 4.0
"""Approximate time to measure all variants of one block."""

MOST_OPEN = 8
"""Maximum number of open sessions: each holds its weights and their packed copies."""

SMALL = 64
"""Integers with at most this many elements (axes, shapes) are part of a part's key; of floats, only
scalars are: biases of equal layers differ."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a model as a separate graph.

    Attributes:
        model: The graph.
        feeds: Its inputs at each shape.
    """

    model: ir.Model
    feeds: tuple[Batch, ...]

    def key(self, index: int) -> str:
        """A key that is equal for parts with equal work at a shape; weights only by their shape."""
        shapes = sorted((array.dtype.str, array.shape) for array in self.feeds[index].values())
        text = repr((_structure(self.model.graph, {}), shapes))
        if computes_in_bfloat16(self.model):
            text += " in bfloat16"
        return hashlib.sha256(text.encode()).hexdigest()[:24]


class Cut(NamedTuple):
    """The computation of ``output`` from ``sources``."""

    output: ir.Value
    sources: tuple[ir.Value, ...]


def cut_out(
    model: ir.Model, cuts: Sequence[Cut], feeds: Sequence[Batch], *, device: Device = CPU
) -> list[Part]:
    """Extract parts of a model, each of which computes one value from others.

    Other values that a part reads and that do not depend on its sources (masks, probabilities of
    another layer) become inputs too. Integers (lengths) and scalars that follow from lengths are
    computed in the part.

    Args:
        feeds: Inputs of the whole model, one per shape.

    Raises:
        InvalidData: The model refuses them.
    """
    inputs = _frontiers(model, cuts, feeds[0])
    fed = list(dict.fromkeys(value for values in inputs for value in values))
    computed_values = [value for value in fed if not value.is_graph_input()]
    states: list[dict[ir.Value, np.ndarray]] = []
    observer: Observer | None = None
    for feed in feeds:
        state = state_of(model.graph.inputs, feed)
        observer = observer or Observer(model, computed_values, state, device)
        states.append(state | observer(state))
    sizes = [_sizes(feed) for feed in feeds]
    return [
        _part(model, cut, values, states, sizes) for cut, values in zip(cuts, inputs, strict=True)
    ]


def _part(
    model: ir.Model,
    cut: Cut,
    inputs: Sequence[ir.Value],
    states: Sequence[Mapping[ir.Value, np.ndarray]],
    sizes: Sequence[tuple[int, int]],
) -> Part:
    """Extract one part.

    Args:
        inputs: The inputs of the part, its sources first.
        states: The arrays of the inputs at each shape.
        sizes: Batch and length at each shape.
    """
    part, names = extract(model, {value: states[0][value] for value in inputs}, [cut.output])
    for value, graph_input in zip(names, part.graph.inputs, strict=True):
        shapes = [arrays[value].shape for arrays in states]
        graph_input.type = ir.TensorType(ir.DataType.from_numpy(states[0][value].dtype))
        graph_input.shape = ir.Shape(
            [dim_of(i, axis_sizes, sizes) for i, axis_sizes in enumerate(zip(*shapes, strict=True))]
        )
    return Part(part, tuple({name: arrays[v] for v, name in names.items()} for arrays in states))


def dim_of(axis: int, axis_sizes: tuple[int, ...], sizes: Sequence[tuple[int, int]]) -> int | str:
    """The size of an axis, or a name if it differs between shapes.

    Args:
        axis_sizes: The size of the axis at each shape.
        sizes: Batch and length at each shape.
    """
    if len(set(axis_sizes)) == 1:
        return axis_sizes[0]
    batches, lengths = zip(*sizes, strict=True)
    if axis_sizes == batches and (axis == 0 or batches != lengths):
        return "batch"
    if axis_sizes == lengths:
        return "sequence"
    if axis_sizes == tuple(batch * length for batch, length in sizes):  # flattened tokens
        batch = str(batches[0]) if len(set(batches)) == 1 else "batch"
        length = str(lengths[0]) if len(set(lengths)) == 1 else "sequence"
        return f"{batch}*{length}"
    return "axis_" + "_".join(map(str, axis_sizes))


def _frontiers(model: ir.Model, cuts: Sequence[Cut], feed: Batch) -> list[list[ir.Value]]:
    """The inputs of each part, its sources first."""
    # Old graphs list their initializers among the inputs.
    inputs = [value for value in model.graph.inputs if value.name not in model.graph.initializers]
    named = {value.name or "": value for value in inputs}
    axes = bind_axes(model.graph, Workload.of(*_sizes(feed)))  # of products of axes
    axes |= read_axes(named, {name: feed[name].shape for name in named if name in feed}) or {}
    info = infer_shapes_at(model, axes)
    varying = dependents(model.graph, inputs)
    return [
        _frontier(cut, varying, dependents(model.graph, cut.sources, shapes=False), info)
        for cut in cuts
    ]


def _frontier(
    cut: Cut, varying: set[ir.Value], dependent: set[ir.Value], info: ShapeInfo
) -> list[ir.Value]:
    """The inputs of a part, its sources first.

    Args:
        varying: The values that depend on the inputs of the model.
        dependent: The values that depend on the content of the sources.
    """
    inputs = dict.fromkeys(source for source in cut.sources if source in varying)
    visited = {cut.output, *cut.sources}
    stack = [cut.output]
    while stack:
        value = stack.pop()
        node = value.producer()
        tensor = info.known.get(value)
        dtype = value.dtype if tensor is None else tensor.dtype
        counts = dtype is not None and dtype.is_integer()
        if tensor is not None and tensor.constant is not None:  # K of 1 / sqrt(K), from a Shape
            counts = counts or tensor.constant.size <= 1
        if node is None or (value in varying and not (value in dependent or counts)):
            if value in varying:
                inputs[value] = None
            continue
        for operand in reads(node):
            if operand not in visited:
                visited.add(operand)
                stack.append(operand)
    return list(inputs)


def _sizes(feed: Batch) -> tuple[int, int]:
    """Batch and length of the inputs of a model or part: of ids, else of hidden states."""
    shapes = [array.shape for array in feed.values()]
    lengths = [shape[1] for rank in (2, 3) for shape in shapes if len(shape) == rank]
    return next((shape[0] for shape in shapes if shape), 1), next(iter(lengths), 1)


def _structure(graph: ir.Graph, number: dict[ir.Value, int]) -> Hashable:
    """The structure of a graph, independent of names, node order and weight values.

    Args:
        number: Numbers of values that were visited before, including outer graphs.
    """

    def place(value: ir.Value | None) -> Hashable:
        if value is None:
            return None
        value = origin(value)  # layers may share a constant through Identity
        tensor = value.const_value
        if tensor is not None and value.producer() is None:
            return tensor.dtype.name, tuple(tensor.shape), str(_content(tensor))
        return number.setdefault(value, len(number))

    rows: list[Hashable] = []
    for node in _nodes_in_order(graph):
        attributes = tuple(sorted((n, _attribute(a, number)) for n, a in node.attributes.items()))
        inputs = tuple(place(value) for value in node.inputs)
        outputs = tuple(place(value) for value in node.outputs)
        rows.append((node.domain, node.op_type, attributes, inputs, outputs))
    return tuple(rows), tuple(place(value) for value in graph.outputs)


def _content(tensor: ir.TensorProtocol) -> Any:
    """The elements of a constant that may determine the work; None for weights."""
    most = 1 if tensor.dtype.is_floating_point() else SMALL
    return tensor.numpy().tolist() if int(np.prod(tensor.shape.numpy())) <= most else None


def _nodes_in_order(graph: ir.Graph) -> list[ir.Node]:
    """The nodes that the outputs depend on, in a topological order independent of the listing."""
    order: dict[ir.Node, None] = {}
    stack = [origin(value).producer() for value in reversed(graph.outputs)]
    while stack:
        node = stack[-1]
        if node is None or node in order or node.graph is not graph:
            stack.pop()
            continue
        makers = [origin(value).producer() for value in reads(node)]
        producers = [m for m in makers if m is not None and m.graph is graph and m not in order]
        stack += reversed(producers)
        if not producers:
            order[node] = None
    return list(order)


def _attribute(attribute: ir.Attr, number: dict[ir.Value, int]) -> str:
    """A text that is equal for attributes with equal work; see ``_structure``."""
    match attribute.type:
        case ir.AttributeType.GRAPH:
            return repr(_structure(attribute.as_graph(), number))
        case ir.AttributeType.TENSOR:
            tensor = attribute.as_tensor()
            return f"{tensor.dtype.name} {tuple(tensor.shape)} {_content(tensor)}"
        case _:
            return repr(attribute.value)


def time_parts(models: Sequence[TimedModel], seconds: float) -> Sequence[np.ndarray]:
    """Measure models at one shape after another; see ``ModelTimer``.

    On CUDA, inputs and outputs stay on the device, as in the whole model.
    """
    sessions = [open_session(timed.model, timed.device) for timed in models]
    by_shape = list(zip(*(timed.feeds for timed in models), strict=True))
    return [
        time_functions(
            [session.bind(feed) for session, feed in zip(sessions, feeds, strict=True)],
            seconds / len(by_shape),
        )
        for feeds in by_shape
    ]


class LatencyTable:
    """Milliseconds of parts on one machine, cached in a file.

    Args:
        path: The cache file; None for no file.
        device: Times are cached separately for each device, version of its runtime, processor,
            number of usable cores and GPU.
        timer: Times the parts.
    """

    def __init__(
        self, path: Path | None, device: Device = CPU, timer: ModelTimer | None = None
    ) -> None:
        self.path = path
        self.device = device
        self.timer = timer or time_parts
        self.setting = _setting(device)
        self.times_ms: dict[str, float] = _read(path).get(self.setting, {})
        self.measured = 0
        """Number of entries that were measured and not found in the cache."""

    def time(self, parts: Mapping[Name, Part]) -> dict[Name, tuple[float, ...]]:
        """Milliseconds of each part at each shape, by name, in the order of the feeds.

        The first part is the reference: parts that are not cached are timed together with it, and
        their times are scaled to its cached time.
        """
        names = list(parts)
        reference = names[0]
        keys = {name: [part.key(i) for i in range(len(part.feeds))] for name, part in parts.items()}
        unmeasured = [n for n in names if any(key not in self.times_ms for key in keys[n])]
        if unmeasured:
            candidates = [name for name in unmeasured if name != reference]
            step = MOST_OPEN - 1
            chunks = [
                [reference, *candidates[start : start + step]]
                for start in range(0, max(len(candidates), 1), step)
            ]
            seconds = GROUP_SECONDS / sum(map(len, chunks))
            for chunk in chunks:
                models = [
                    TimedModel(parts[name].model, parts[name].feeds, self.device) for name in chunk
                ]
                for index, samples in enumerate(self.timer(models, seconds * len(chunk))):
                    self._note([keys[name][index] for name in chunk], samples)
            self._save()
        return {name: tuple(self.times_ms[key] for key in keys[name]) for name in names}

    def _note(self, keys: Sequence[str], times: np.ndarray) -> None:
        """Store the times of parts that are not cached, relative to the first part.

        Args:
            keys: The key of each part.
            times: Milliseconds, (parts, rounds).
        """
        first_ms = self.times_ms.get(keys[0], float(np.median(times[0])))
        for key, samples in zip(keys, times, strict=True):
            if key not in self.times_ms:
                ratio = float(np.median(samples / times[0]))
                self.times_ms[key] = round(first_ms * ratio, 5)
                self.measured += 1

    def _save(self) -> None:
        """Merge with the current content of the file and write it atomically."""
        if self.path is None:
            return
        content = _read(self.path)
        content[self.setting] = {**content.get(self.setting, {}), **self.times_ms}
        with suppress(OSError):  # the cache is optional
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(content, indent=1, sort_keys=True)
            write_atomically(self.path, text.encode())


def _setting(device: Device) -> str:
    """The key of everything that affects times, except the part."""
    machine = f"{cpu_name()}, {available_cores()} cores"
    if device.provider == "cuda":
        machine += f", {gpu_name() or 'an unknown GPU'}"
    runtime = f"{device.runtime_name} {RUNTIMES[device.runtime_name].version()}"
    return f"{machine}, {device.provider}, {device.threads} threads, {runtime}"


def _read(path: Path | None) -> dict[str, dict[str, float]]:
    """The content of a cache file; empty if it is damaged or missing."""
    try:
        content: Any = {} if path is None else json.loads(path.read_text(encoding="utf-8"))
        return {
            str(setting): {str(k): float(v) for k, v in times.items() if float(v) > 0}
            for setting, times in content.items()
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def default_cache() -> Path:
    """The cache file of this user. Its number changes with the way in which parts are timed."""
    return cache_folder() / "latency-2.json"
