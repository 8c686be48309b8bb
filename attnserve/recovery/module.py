"""An ONNX graph as a PyTorch module with trainable weights."""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from attnserve.recovery.operators.registry import (
    HALF,
    ON_HOST,
    OPERATORS,
    Call,
    Operator,
    tensor_of,
)
from graph_passes.analysis.operator_sets import is_quantized, operators
from graph_passes.errors import AttnserveError, CannotRewrite, InvalidModel
from graph_passes.matching.find import find_attention

__all__ = ["GraphModule", "memory_errors", "rotary_constants", "trainable_weights"]


LARGEST_WEIGHT = 1000.0
"""Largest absolute weight; constants with larger elements are masks."""

WEIGHTED = operators(
    "Add Attention BiasGelu Conv Div Einsum FastGelu FusedGemm FusedMatMul Gemm"
    " InstanceNormalization LayerNormalization MatMul Mul MultiHeadAttention RMSNormalization"
    " SimplifiedLayerNormalization SkipLayerNormalization SkipSimplifiedLayerNormalization Sub Sum"
)
"""Operators whose constant inputs are weights, if another input is an activation."""

NO_ACTIVATION = operators(
    "Shape Size IsNaN IsInf ArgMax Cast Equal Less Greater LessOrEqual GreaterOrEqual Not"
)
"""Operators whose output is not an activation, except for Cast to a float type."""

FLOATS = (*HALF, ir.DataType.FLOAT, ir.DataType.DOUBLE)


@dataclass(frozen=True, eq=False)
class _Step:
    """One node: function, inputs, outputs, and the values that can be freed after the node."""

    call: Call
    function: Operator
    inputs: tuple[ir.Value | None, ...]
    outputs: tuple[ir.Value, ...]
    on_host: tuple[int, ...]
    dropped: tuple[ir.Value, ...] = ()


class GraphModule(torch.nn.Module):
    """Compute an ONNX graph, in float32, with gradients for its weights.

    An initializer is one parameter wherever it is read, so that shared weights stay shared. Values
    that depend only on constants are computed once.

    Args:
        model: The graph, which only ``write_weights`` changes.
        states: Values inside the graph that are returned after its outputs.
        frozen: Names of initializers that are not trained, besides tables whose rows are gathered,
            masks, and single numbers.
        device: The device of the weights.

    Attributes:
        replaced: Functions of single nodes that run instead of the functions of ``OPERATORS``.

    Raises:
        InvalidModel: An operator is not supported.
    """

    def __init__(
        self,
        model: ir.Model,
        states: Sequence[ir.Value] = (),
        *,
        frozen: Collection[str] = (),
        device: str = "cpu",
    ) -> None:
        super().__init__()
        self.model = model
        self.device = torch.device(device)
        self.outputs = [*model.graph.outputs, *states]
        self.replaced: Mapping[ir.Node, Operator] = {}
        self.names = [name for name in trainable_weights(model) if name not in frozen]
        steps = _steps(model, self.outputs)
        weights = [tensor_of(_tensor(model.graph.initializers[name])) for name in self.names]
        self.weights = torch.nn.ParameterList(
            torch.nn.Parameter(weight.to(self.device)) for weight in weights
        )
        self._trained = [model.graph.initializers[name] for name in self.names]
        trained_names = set(self.names)
        read = {*self.outputs, *(value for step in steps for value in step.inputs)}
        self._constants: dict[ir.Value, Tensor] = {
            value: self._placed(tensor_of(_tensor(value)))
            for name, value in model.graph.initializers.items()
            if name not in trained_names and value in read
        }
        self._steps = self._planned(steps)

    def forward(self, batch: Mapping[str, np.ndarray]) -> list[Tensor]:
        """The outputs and states for one batch of inputs.

        Raises:
            InvalidModel: A form of a node is not supported, or a node does not fit its inputs.
        """
        values: dict[ir.Value, Tensor] = dict(self._constants)
        values |= zip(self._trained, self.weights, strict=True)
        for value in self.model.graph.inputs:
            if (array := batch.get(value.name or "")) is not None:
                tensor = torch.from_numpy(np.array(array, order="C")).to(self.device)
                values[value] = tensor.float() if tensor.dtype == torch.float16 else tensor
        for step in self._steps:
            self._run(step, values)
        return [values[value] for value in self.outputs]

    def write_weights(self, weights: Sequence[Tensor] | None = None) -> None:
        """Write weights, by default the parameters, into the initializers of the model."""
        for value, weight in zip(self._trained, weights or list(self.weights), strict=True):
            tensor = _tensor(value)
            array = weight.detach().cpu().numpy().astype(tensor.dtype.numpy())
            value.const_value = ir.Tensor(array, tensor.dtype, name=tensor.name)

    def _placed(self, tensor: Tensor) -> Tensor:
        """Floats on the device; small integers, which are mostly shapes, on the host."""
        is_host = not tensor.is_floating_point() and tensor.numel() <= 64
        return tensor if is_host else tensor.to(self.device)

    def _run(self, step: _Step, values: dict[ir.Value, Tensor]) -> None:
        inputs = [None if value is None else values[value] for value in step.inputs]
        if self.device.type != "cpu":
            inputs = _on_one_device(step, inputs, self.device)
        function = self.replaced.get(step.call.node, step.function)
        try:
            results = function(step.call, *inputs)
        except AttnserveError:
            raise
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            _raise_lack_of_memory(error)
            node = step.call.node
            raise InvalidModel(
                f"operator {node.op_type} of node {node.name!r} fails in PyTorch: "
                f"{str(error).splitlines()[0][:200]}",
                "check that ONNX Runtime runs the model, and report the operator",
                code="recovery.node",
            ) from error
        results = results if isinstance(results, tuple) else (results,)
        if any(value.uses() or value.is_graph_output() for value in step.outputs[len(results) :]):
            raise step.call.unsupported("its further outputs are used")
        values.update(zip(step.outputs, results, strict=False))
        for value in step.dropped:
            values.pop(value, None)

    def _planned(self, steps: Sequence[_Step]) -> list[_Step]:
        """Compute values that depend only on constants, and plan the remaining nodes."""
        remaining: list[_Step] = []
        constants = self._constants
        with torch.no_grad():
            for step in steps:
                if all(value is None or value in constants for value in step.inputs):
                    self._run(step, constants)
                else:
                    remaining.append(step)
        last: dict[ir.Value, int] = {}
        for index, step in enumerate(remaining):
            last |= {value: index for value in (*step.inputs, *step.outputs) if value is not None}
        permanent_values = {*self.outputs, *constants, *self._trained}
        dropped: dict[int, list[ir.Value]] = {}
        for value, index in last.items():
            if value not in permanent_values:
                dropped.setdefault(index, []).append(value)
        read = {value for step in remaining for value in step.inputs} | set(self.outputs)
        self._constants = {value: tensor for value, tensor in constants.items() if value in read}
        return [
            replace(step, dropped=tuple(dropped.get(i, ()))) for i, step in enumerate(remaining)
        ]


@contextmanager
def memory_errors() -> Generator[None]:
    """Raise CannotRewrite for a lack of memory of any device."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        _raise_lack_of_memory(error)
        raise


def _raise_lack_of_memory(error: Exception) -> None:
    """Raise CannotRewrite if this error is a lack of memory."""
    is_lack = isinstance(error, torch.OutOfMemoryError | MemoryError)
    if is_lack or "allocate memory" in str(error):
        raise CannotRewrite(
            "there is not enough memory for a training step",
            "give shorter texts, or another `provider`",
            code="recovery.memory",
        ) from error


def _on_one_device(
    step: _Step, inputs: list[Tensor | None], device: torch.device
) -> list[Tensor | None]:
    """Move inputs that an operator reads on the host there, and others to the device.

    An operator of host values alone, such as a sum of lengths, stays on the host.
    """
    data = [x for i, x in enumerate(inputs) if x is not None and i not in step.on_host]
    common = device if any(x.device.type != "cpu" for x in data) else torch.device("cpu")
    return [
        None if x is None else x.cpu() if i in step.on_host else x.to(common)
        for i, x in enumerate(inputs)
    ]


def _steps(model: ir.Model, outputs: Sequence[ir.Value]) -> list[_Step]:
    """One step per node that the outputs depend on, in the order of the graph.

    Raises:
        InvalidModel: An operator is not supported.
    """
    nodes: set[ir.Node] = set()
    pending = [value.producer() for value in outputs]
    while pending:
        node = pending.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            pending += [value.producer() for value in node.inputs if value is not None]
    steps: list[_Step] = []
    for node in model.graph:
        if node not in nodes:
            continue
        key = (node.domain, node.op_type)
        if key not in OPERATORS:
            name = f"{node.domain}.{node.op_type}" if node.domain else node.op_type
            raise InvalidModel(
                f"operator {name} of node {node.name!r} cannot be trained",
                "recover the float model, and quantize the result"
                if is_quantized(node)
                else "report the operator, or recover the model before it was fused",
                code="recovery.operator",
            )
        call = Call(node, model.opset_imports.get(node.domain, 1))
        inputs, outputs = tuple(node.inputs), tuple(node.outputs)
        steps.append(_Step(call, OPERATORS[key], inputs, outputs, ON_HOST[key]))
    return steps


def _tensor(value: ir.Value) -> ir.TensorProtocol:
    tensor = value.const_value
    if tensor is None:
        raise InvalidModel(
            f"the initializer {value.name!r} has no content",
            "export the model again",
            code="recovery.initializer",
        )
    return tensor


# ---- which constants are weights ----------------------------------------------------------------


def trainable_weights(model: ir.Model) -> list[str]:
    """The names of the initializers that are trained, in order.

    A trained weight is a float constant that an operator such as MatMul, Add or LayerNormalization
    combines with an activation, directly or after operators on constants. An activation is computed
    from float inputs, or from rows that are gathered from a table. The table itself (embeddings) is
    no weight, unless it is also multiplied with activations (the tied table of a decoder).
    """
    sources: dict[ir.Value, frozenset[str]] = {
        value: frozenset([name]) if _may_be_weight(value) else frozenset()
        for name, value in model.graph.initializers.items()
        if not value.is_graph_input()
    }
    active = {
        value for value in model.graph.inputs if value.dtype in FLOATS and value not in sources
    }
    names: set[str] = set()
    for node in model.graph:
        inputs = [value for value in node.inputs if value is not None]
        if all(value in sources for value in inputs):
            behind = frozenset[str]().union(*(sources[value] for value in inputs))
            hidden = node.op_type in ("Shape", "Size")
            sources |= {value: frozenset[str]() if hidden else behind for value in node.outputs}
            continue
        is_active = any(value in active for value in inputs)
        if is_active and node.op_type in WEIGHTED:
            names.update(*(sources[value] for value in inputs if value in sources))
        if _makes_activation(node, is_active, sources):
            active.update(node.outputs)
    return [name for name in model.graph.initializers if name in names]


def rotary_constants(model: ir.Model) -> set[str]:
    """The names of initializers that hold rotary angles, which are not trained."""
    names: set[str] = set()
    blocks = find_attention(model).blocks
    pending = [
        factor.value
        for block in blocks
        if block.graph is model.graph
        for projection in (block.q, block.k)
        for factor in projection.factors
    ]
    seen: set[ir.Value] = set()
    while pending:
        value = pending.pop()
        if value in seen:
            continue
        seen.add(value)
        if value.is_initializer():
            names.add(value.name or "")
        elif (node := value.producer()) is not None:
            pending += [read for read in node.inputs if read is not None]
    return names


def _makes_activation(
    node: ir.Node, is_active: bool, sources: Mapping[ir.Value, frozenset[str]]
) -> bool:
    if node.op_type == "EmbedLayerNormalization":
        return True
    table = node.inputs[0] if node.op_type in ("Gather", "GatherND") else None
    if table is not None and table in sources:
        return bool(sources[table])
    if node.op_type == "Cast":
        return is_active and ir.DataType(node.attributes.get_int("to", 1)) in FLOATS
    return is_active and node.op_type not in NO_ACTIVATION


def _may_be_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    if tensor is None or tensor.dtype not in FLOATS or tensor.size < 2:
        return False
    array = np.asarray(tensor.numpy(), np.float32)
    return bool(np.isfinite(array).all() and np.abs(array).max() < LARGEST_WEIGHT)
