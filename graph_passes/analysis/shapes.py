"""Shape inference at given axis lengths.

Exporters compute shapes with operators (Shape, Gather, Concat, Where, ...) that static inference
cannot evaluate. This module gives each named axis a length. The ONNX reference evaluator executes
the integer shape computations, and ONNX's inference rules give all other shapes node by node.
Weights are not loaded from disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import onnx
import onnx_ir as ir

from graph_passes.analysis.axes import bind_axes, input_shape, real_inputs, search_bodies
from graph_passes.analysis.constants import constant_array, constant_tensor, is_constant
from graph_passes.analysis.contrib_shapes import COUNTS, RULES, Shapes, gives_bytes
from graph_passes.analysis.convolved_axes import SIDE, convolved_lengths
from graph_passes.analysis.evaluation import SMALL, evaluate, infer_outputs
from graph_passes.analysis.workload import Workload
from graph_passes.errors import MALFORMED_NODE

__all__ = [
    "SAMPLES",
    "ShapeInfo",
    "TensorInfo",
    "infer_shapes_at",
    "infer_shapes_small",
    "set_missing_types",
]

SAMPLES = 400
"""Samples per token of an audio model: 25 ms at 16 kHz."""

PLAIN_ATTRIBUTES = frozenset(
    {
        ir.AttributeType.INT,
        ir.AttributeType.INTS,
        ir.AttributeType.FLOAT,
        ir.AttributeType.FLOATS,
        ir.AttributeType.STRING,
        ir.AttributeType.STRINGS,
    }
)
"""Types of hashable attributes; results of nodes with other attributes are not cached."""


@dataclass(frozen=True, eq=False)
class TensorInfo:
    """Element type and shape of a value, and its elements if they depend on shapes only."""

    dtype: ir.DataType
    shape: tuple[int, ...]
    constant: np.ndarray | None = None

    def shape_only(self) -> TensorInfo:
        """Return the type and shape without elements."""
        return TensorInfo(self.dtype, self.shape)

    def key(self) -> Hashable:
        """A hashable key; equal for equal information."""
        elements = None if self.constant is None else self.constant.tobytes()
        return self.dtype, self.shape, elements


@dataclass(frozen=True, eq=False)
class ShapeInfo:
    """Inferred shapes and constants of the values of a graph at given axis lengths.

    Attributes:
        axes: The length of each named axis.
        known: The information of each value with an inferred shape.
        unknown: Nodes whose outputs could not be inferred, with the reason.
    """

    axes: Mapping[str, int]
    known: Mapping[ir.Value, TensorInfo] = field(repr=False)
    unknown: Mapping[ir.Node, str] = field(repr=False)

    def shape(self, value: ir.Value | None) -> tuple[int, ...] | None:
        """The shape of a value, if known."""
        tensor = self.known.get(value) if value is not None else None
        return None if tensor is None else tensor.shape

    def constant(self, value: ir.Value | None) -> np.ndarray | None:
        """The elements of a small value that does not depend on input data, if known."""
        tensor = self.known.get(value) if value is not None else None
        return None if tensor is None else tensor.constant

    def elements(self, value: ir.Value | None) -> np.ndarray | None:
        """The elements of a value of any size that does not depend on input data, if known."""
        constant = self.constant(value)
        return constant_array(value) if constant is None and is_constant(value) else constant

    def branch(self, node: ir.Node) -> ir.Graph | None:
        """The branch that an If takes, if its condition depends on shapes only."""
        condition = self.constant(node.inputs[0]) if node.op_type == "If" else None
        if node.domain or condition is None or condition.size != 1:
            return None
        return node.attributes["then_branch" if condition.item() else "else_branch"].as_graph()

    def explain(self, value: ir.Value) -> str:
        """Return why a value has no shape: the reason of the first node above it that failed."""
        pending = [value]
        seen = {value}
        while pending:
            node = pending.pop(0).producer()
            parents = [parent for parent in node.inputs if parent is not None] if node else []
            unknown = [parent for parent in parents if parent not in self.known]
            if node is not None and not unknown:
                return self.unknown.get(node, f"{node.op_type} was not evaluated")
            pending += [parent for parent in unknown if parent not in seen]
            seen.update(unknown)
        return "an input of the graph has no shape"


def infer_shapes_small(
    model: ir.Model,
    *,
    batch: int,
    sequence: int,
    distinct_lengths: bool = False,
    sides: tuple[int, int] = (SIDE, SIDE),
) -> ShapeInfo:
    """Infer shapes at small axis lengths, or longer ones if strided convolutions need them.

    Audio models need hundreds of samples per token. Images have the height and width ``sides``.
    """
    image = convolved_lengths(model.graph, sides=sides)
    small = Workload.of(batch, sequence)
    axes = bind_axes(model.graph, small, distinct_lengths=distinct_lengths)
    info = infer_shapes_at(model, axes | image)
    if not info.axes or not _convolves_away(info):
        return info
    longer = bind_axes(model.graph, Workload.of(batch, sequence * SAMPLES))
    return infer_shapes_at(model, longer | image)


def _convolves_away(info: ShapeInfo) -> bool:
    """Whether a strided convolution failed or produced an empty axis."""
    for node in info.unknown:
        if node.op_type == "Conv" and max(node.attributes.get_ints("strides", None) or [1]) > 1:
            return True
    for value, tensor in info.known.items():
        node = value.producer()
        if node is None or node.op_type != "Conv":
            continue
        if min(tensor.shape, default=1) <= 0 or _is_shorter_than_kernel(node, info):
            return True
    return False


def _is_shorter_than_kernel(node: ir.Node, info: ShapeInfo) -> bool:
    """Whether a convolution has less input than one window: ONNX's rule infers length 1 then."""
    if node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME"):
        return False
    data, kernel = (info.shape(value) for value in node.inputs[:2])
    if data is None or kernel is None:
        return False
    axes = len(kernel) - 2
    pads = node.attributes.get_ints("pads", None) or [0] * (2 * axes)
    dilations = node.attributes.get_ints("dilations", None) or [1] * axes
    return any(
        length + start + end < (size - 1) * dilation + 1
        for length, size, dilation, start, end in zip(
            data[2:], kernel[2:], dilations, pads[:axes], pads[axes:], strict=False
        )
    )


def set_missing_types(model: ir.Model) -> None:
    """Set the element type of values without one, from shape inference."""
    for value, tensor in infer_shapes_small(model, batch=2, sequence=5).known.items():
        if value.type is None:
            value.type = ir.TensorType(tensor.dtype)


def infer_shapes_at(model: ir.Model, axes: Mapping[str, int]) -> ShapeInfo:
    """Infer all shapes of a model at the given axis lengths, including bodies of nodes.

    Outputs of unknown operators, data-dependent shapes and loop states of changing shape stay
    unknown; this is not an error. Axes of images have their only possible length.
    """
    axes = {**convolved_lengths(model.graph), **axes}
    inference = _Inference({"": 1, **model.opset_imports})
    for value in real_inputs(model.graph):
        shape = input_shape(value, axes)
        if shape is not None and value.dtype is not None:
            inference.known[value] = TensorInfo(value.dtype, shape)
    _infer_graph(model.graph, inference)
    return ShapeInfo(dict(axes), inference.known, inference.unknown)


Outcome = tuple[Sequence[TensorInfo | None], str]
"""Information about a node's outputs, and the reason for unknown ones."""


@dataclass(frozen=True, eq=False)
class _Inference:
    """Intermediate state of shape inference."""

    opsets: Mapping[str, int]
    known: dict[ir.Value, TensorInfo] = field(default_factory=dict[ir.Value, TensorInfo])
    unknown: dict[ir.Node, str] = field(default_factory=dict[ir.Node, str])

    def tensor(self, value: ir.Value | None) -> TensorInfo | None:
        """The information of a value, if known."""
        return None if value is None else self.known.get(value)


def _infer_graph(graph: ir.Graph, inference: _Inference) -> None:
    """Infer the nodes of a graph or a body in order."""
    for value in graph.initializers.values():
        if value.const_value is not None:
            inference.known[value] = _of_tensor(value.const_value)
    for node in graph:
        for searched in search_bodies(node):
            _infer_graph(searched, inference)
        body = BODIES.get(node.op_type) if not node.domain else None
        try:
            tensors, reason = (_infer_node if body is None else body)(node, inference)
        except MALFORMED_NODE as error:
            tensors = ()
            reason = f"{node.op_type}: {error}"
        for value, tensor in zip(node.outputs, tensors, strict=False):
            if tensor is not None:
                inference.known[value] = tensor
        if reason:
            inference.unknown[node] = reason


def _infer_body(
    body: ir.Graph, inputs: Sequence[TensorInfo | None], inference: _Inference
) -> list[TensorInfo | None]:
    """Infer a body with the given inputs; return the information of its outputs."""
    for value, tensor in zip(body.inputs, inputs, strict=False):
        if tensor is not None:
            inference.known[value] = tensor.shape_only()  # elements differ between iterations
    _infer_graph(body, inference)
    return [inference.tensor(value) for value in body.outputs]


def _common(a: TensorInfo | None, b: TensorInfo | None) -> TensorInfo | None:
    """The type and shape that two values have in common; None if they differ."""
    same = a is not None and b is not None and (a.dtype, a.shape) == (b.dtype, b.shape)
    return a.shape_only() if a is not None and same else None


def _infer_if(node: ir.Node, inference: _Inference) -> Outcome:
    """Infer both branches; an output is known if the condition is, or if both branches agree."""
    branches = [node.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    ends = [_infer_body(branch, (), inference) for branch in branches]
    condition = inference.tensor(node.inputs[0])
    if condition is not None and condition.constant is not None and condition.constant.size == 1:
        return ends[0 if condition.constant.item() else 1], ""
    agreed = [_common(a, b) for a, b in zip(*ends, strict=False)]
    return agreed, "" if all(agreed) else "its branches have outputs of different shapes"


def _infer_loop(node: ir.Node, inference: _Inference) -> Outcome:
    """Infer one iteration of the body from the initial state, which must keep its shape."""
    state = [inference.tensor(value) for value in node.inputs[2:]]
    iteration = TensorInfo(ir.DataType.INT64, ())
    condition = TensorInfo(ir.DataType.BOOL, ())
    body = node.attributes["body"].as_graph()
    ends = _infer_body(body, [iteration, condition, *state], inference)[1:]
    common_state = [_common(a, b) for a, b in zip(state, ends, strict=False)]
    complete = len(common_state) == len(node.outputs) and all(common_state)
    return common_state, "" if complete else "the shape of its state is not constant"


def _infer_scan(node: ir.Node, inference: _Inference) -> Outcome:
    """Infer one iteration of the body from the first slice of each scanned input."""
    tensors = [inference.tensor(value) for value in node.inputs]
    count = len(tensors) - node.attributes.get_int("num_scan_inputs", 0)
    axes = node.attributes.get_ints("scan_input_axes", None) or [0] * (len(tensors) - count)
    state = tensors[:count]
    iterations: int | None = None
    slices: list[TensorInfo | None] = []
    for tensor, axis in zip(tensors[count:], axes, strict=False):
        if tensor is None or not -len(tensor.shape) <= axis < len(tensor.shape):
            return (), "a scanned input has no known shape"
        lengths = list(tensor.shape)
        iterations = lengths.pop(axis)
        slices.append(TensorInfo(tensor.dtype, tuple(lengths)))
    ends = _infer_body(node.attributes["body"].as_graph(), [*state, *slices], inference)
    common_state = [_common(a, b) for a, b in zip(state, ends, strict=False)]
    stacked: list[TensorInfo | None] = []
    if iterations is not None and not node.attributes.get_ints("scan_output_axes", None):
        stacked = [end and TensorInfo(end.dtype, (iterations, *end.shape)) for end in ends[count:]]
    complete = all(common_state) and all(stacked)
    return [*common_state, *stacked], "" if complete else "the shape of its state is not constant"


BODIES = {"If": _infer_if, "Loop": _infer_loop, "Scan": _infer_scan}
"""Operators with bodies, and how their outputs are inferred."""


def _of_tensor(tensor: ir.TensorProtocol) -> TensorInfo:
    """The information of a weight; its elements if it is small."""
    info = _WEIGHTS.get(tensor)
    if info is None:
        shape = tuple(tensor.shape.numpy())
        small = math.prod(shape) <= SMALL and tensor.dtype != ir.DataType.STRING
        constant = tensor.numpy() if small else None
        info = _WEIGHTS[tensor] = TensorInfo(tensor.dtype, shape, constant)
    return info


_WEIGHTS = WeakKeyDictionary[ir.TensorProtocol, TensorInfo]()
"""Results by weight: clones of a model share their weights, and inference runs at many lengths."""


def _infer_node(node: ir.Node, inference: _Inference) -> Outcome:
    """Infer the outputs of a node without a body; results are cached by operator and inputs."""
    if node.op_type == "Constant" and not node.domain:
        tensor = constant_tensor(node.outputs[0])
        if tensor is None:
            return (), "its value is not a dense tensor"
        return [_of_tensor(tensor)], ""
    tensors = [inference.tensor(value) for value in node.inputs]
    if tensors.count(None) > node.inputs.count(None):
        return (), "its inputs have no known shape"
    if not all(attribute.type in PLAIN_ATTRIBUTES for attribute in node.attributes.values()):
        return _outcome(node, tensors, inference.opsets)
    key = (
        *node.op_identifier(),
        inference.opsets.get(node.domain),
        len(node.outputs),
        *((name, attribute.value) for name, attribute in node.attributes.items()),
        *(tensor and tensor.key() for tensor in tensors),
    )
    outcome = _CACHE.get(key)
    if outcome is None:
        if len(_CACHE) >= 20_000:
            _CACHE.clear()
        outcome = _CACHE[key] = _outcome(node, tensors, inference.opsets)
    return outcome


_CACHE: dict[Hashable, Outcome] = {}
"""Results by operator, attributes and inputs. Layers repeat nodes, and inference runs after each
rewrite."""


def _outcome(
    node: ir.Node, tensors: Sequence[TensorInfo | None], opsets: Mapping[str, int]
) -> Outcome:
    """Infer the outputs of a node without a body, uncached."""
    rule = RULES.get((node.domain, node.op_type))
    if rule is not None:
        return _infer_by_rule(rule, node, tensors)
    if not onnx.defs.has(node.op_type, opsets[""], node.domain):
        return _guess(node, tensors)
    if node.op_type == "Shape":
        return _shape(node, tensors)
    if _are_constant(tensors) and (outputs := _evaluate_node(node, tensors, opsets)):
        return outputs, ""
    return _infer_by_schema(node, tensors, opsets)


def _infer_by_rule(
    rule: Callable[[Shapes, ir.Node], Shapes], node: ir.Node, tensors: Sequence[TensorInfo | None]
) -> Outcome:
    """Infer outputs by a rule for an operator that is not in the ONNX standard."""
    try:
        shapes = rule([None if tensor is None else tensor.shape for tensor in tensors], node)
    except (IndexError, ValueError):  # missing inputs, or shapes that do not fit
        shapes = ()
    types = [tensor.dtype for tensor in tensors if tensor is not None]
    if not types or not shapes:
        return (), f"{node.op_type} has no known shape"
    floats = (element_type for element_type in types if element_type.is_floating_point())
    dtype = types[0] if gives_bytes(node) else next(floats, types[0])
    outputs: list[TensorInfo | None] = []
    for index, shape in enumerate(shapes):
        is_count = (node.op_type, index) in COUNTS
        output_type = ir.DataType.INT32 if is_count else dtype
        outputs.append(None if shape is None else TensorInfo(output_type, shape))
    return outputs, ""


def _guess(node: ir.Node, tensors: Sequence[TensorInfo | None]) -> Outcome:
    """Assume that an unknown operator with one input and one output keeps the shape.

    Matching and certification fail if the assumption is wrong.
    """
    name = ".".join(filter(None, (node.domain, node.op_type)))
    if len(tensors) != 1 or len(node.outputs) != 1 or tensors[0] is None:
        return (), f"{name} is not an operator of ONNX"
    return [tensors[0].shape_only()], ""


def _are_constant(tensors: Sequence[TensorInfo | None]) -> bool:
    """Whether the elements of all inputs are known."""
    inputs = [tensor for tensor in tensors if tensor is not None]
    return bool(inputs) and all(tensor.constant is not None for tensor in inputs)


def _evaluate_node(
    node: ir.Node, tensors: Sequence[TensorInfo | None], opsets: Mapping[str, int]
) -> Sequence[TensorInfo]:
    """Evaluate a node on the reference evaluator; empty if that fails (rules may still apply)."""
    try:
        with np.errstate(all="ignore"):
            arrays = [None if tensor is None else tensor.constant for tensor in tensors]
            results = evaluate(node, arrays, opsets, limit=SMALL)
        typed_results = [(ir.DataType.from_numpy(result.dtype), result) for result in results]
    except Exception:  # unsupported operator, or a large or non-numeric output
        return ()
    outputs: list[TensorInfo] = []
    for dtype, result in typed_results:
        is_kept = result.size <= SMALL and dtype != ir.DataType.STRING
        outputs.append(TensorInfo(dtype, result.shape, result if is_kept else None))
    return outputs


def _shape(node: ir.Node, tensors: Sequence[TensorInfo | None]) -> Outcome:
    """Infer the output of Shape."""
    if not tensors or tensors[0] is None:
        return (), "Shape reads nothing"
    start = node.attributes.get_int("start", 0)
    end = node.attributes.get_int("end", len(tensors[0].shape))
    constant = np.array(tensors[0].shape[start:end], dtype=np.int64)
    return [TensorInfo(ir.DataType.INT64, constant.shape, constant)], ""


def _infer_by_schema(
    node: ir.Node, tensors: Sequence[TensorInfo | None], opsets: Mapping[str, int]
) -> Outcome:
    """Infer outputs by ONNX's rules from shapes and small constants."""
    types = [None if tensor is None else (tensor.dtype, tensor.shape) for tensor in tensors]
    arrays = [None if tensor is None else tensor.constant for tensor in tensors]
    try:
        inferred = infer_outputs(node, types, arrays, opsets)
    except Exception as error:  # onnx raises bare InferenceError, KeyError, RuntimeError, ...
        reason = str(error).splitlines()[0] if str(error) else "not inferred"
        return (), f"{node.op_type}: {reason}"
    outputs = [output_type and TensorInfo(*output_type) for output_type in inferred]
    depends = outputs and outputs[0] is None
    return outputs, f"the shape of {node.op_type} depends on data" if depends else ""
