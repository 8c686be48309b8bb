"""ToBfloat16: convert products, attention and the operators between them to bfloat16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.operator_sets import GELUS, MICROSOFT, operators
from graph_passes.analysis.required import graph_of
from graph_passes.analysis.shapes import set_missing_types
from graph_passes.emit.editing import remove_unused
from graph_passes.passes.base import RewritePass

__all__ = [
    "BFLOAT16",
    "COMPUTES",
    "FLOAT",
    "MOVES",
    "ToBfloat16",
    "cast",
    "in_type",
    "spread_types",
]

FLOAT, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.BFLOAT16

MOVES = operators(
    "Concat Expand Flatten Gather GatherElements Identity Reshape Slice Split Squeeze Tile"
    " Transpose Trilu Unsqueeze"
)
"""Operators that only move elements; their output has the type of their input."""

COMPUTES = {
    13: "Add Cast Div Erf Exp Gemm IsNaN MatMul Max Min Mul Neg ReduceSum Relu Sigmoid Softmax Sqrt"
    " Sub Sum Tanh",
    15: "Pow",
    16: "Where",
    17: "LayerNormalization",
    20: "Gelu",
    22: "Conv",
    23: "Attention RMSNormalization RotaryEmbedding",
}
"""Operators of ai.onnx with a kernel for bfloat16 in ONNX Runtime's CUDA provider, by the first
opset that has it, as its docs/OperatorKernels.md says."""

CONTRIB_OPERATORS = GELUS | {
    "Attention",
    "FusedMatMul",
    "MultiHeadAttention",
    "RotaryEmbedding",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}
"""Operators of com.microsoft with a kernel for bfloat16 in ONNX Runtime's CUDA provider."""

STATISTICS = {
    "LayerNormalization": (1, 2),
    "SkipLayerNormalization": (1, 2),
    "SkipSimplifiedLayerNormalization": (1, 2),
}
"""Indices of outputs that are always float32."""

SINCE = {name: opset for opset, names in COMPUTES.items() for name in names.split()}


@dataclass(frozen=True, eq=False)
class ToBfloat16(RewritePass):
    """Convert a float32 graph to bfloat16 where a GPU has kernels for it; lossy.

    Before: z = f(x, W)
    After:  z = f(bfloat16(x), bfloat16(W)), for f in ``COMPUTES`` and ``CONTRIB_OPERATORS``

    bfloat16 has the range of float32 and 8 bits of its mantissa: the relative error is at most
    1/256. Finite constants beyond the largest bfloat16, as in masks, become the largest one. Other
    operators stay float32, operators that only move elements keep the type of their input, and a
    value is cast once for all readers in the other type. Inputs and outputs, also of bodies,
    constants that callers may replace, and nodes with an unknown type keep their type. Constants
    must be initializers: lift those of nodes first.

    Attributes:
        float_nodes: Names of the nodes that stay float32.
    """

    float_nodes: frozenset[str] = field(default_factory=frozenset[str])

    lossy: ClassVar[bool] = True

    def rewrite_graph(self, analyses: Analyses) -> bool:
        model = analyses.model
        spread_types(model)
        opset = model.opset_imports.get("", 0)
        nodes = list(model.graph.all_nodes())
        half_nodes: set[ir.Node] = set()
        half_values: set[ir.Value] = set()
        for node in nodes:
            if node.name not in self.float_nodes and _is_converted(node, half_values, opset):
                half_nodes.add(node)
                half_values |= {value for value in _computed(node) if value.dtype == FLOAT}
        _clip(model, nodes)
        casts = _Casts(half_values)
        for node in nodes:
            for place, value in enumerate(node.inputs):
                if value is None or value.dtype != FLOAT:
                    continue
                if (
                    node in half_nodes
                    and value not in half_values
                    and _is_read_only_by(value, half_nodes)
                ):
                    half_values.add(value)
                    value.const_value = in_type(value.const_value, BFLOAT16)
                if (node in half_nodes) != (value in half_values):
                    node.replace_input_with(place, casts.cast(value))
            if node in half_nodes and node.op_type == "Cast" and node.outputs[0] in half_values:
                node.attributes["to"] = ir.AttrInt64("to", BFLOAT16)
        for graph in model.graphs():
            for place, value in enumerate(graph.outputs):
                if value in half_values:
                    graph.outputs[place] = casts.as_output(value)
        for value in half_values:
            value.type = ir.TensorType(BFLOAT16)
        remove_unused(model)
        return bool(half_values)


def _is_converted(node: ir.Node, half: set[ir.Value], opset: int) -> bool:
    inputs = [value for value in node.inputs if value is not None]
    if any(value.dtype is None for value in (*inputs, *_computed(node))):
        return False
    floats = [value for value in inputs if value.dtype == FLOAT]
    if node.domain == MICROSOFT:
        return node.op_type in CONTRIB_OPERATORS
    if node.domain or opset < min(COMPUTES):
        return False
    if node.op_type in MOVES:
        return any(value in half or _is_constant(value) for value in floats)
    return opset >= SINCE.get(node.op_type, opset + 1)


def _computed(node: ir.Node) -> Iterator[ir.Value]:
    """The outputs, without omitted ones and outputs that are always float32."""
    fixed = STATISTICS.get(node.op_type, ())
    return (v for place, v in enumerate(node.outputs) if v.name and place not in fixed)


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input() and value.const_value is not None


def _is_read_only_by(constant: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether a value is a constant that only these nodes read."""
    return (
        _is_constant(constant)
        and not constant.is_graph_output()
        and all(user in nodes for user, _ in constant.uses())
    )


def _clip(model: ir.Model, nodes: list[ir.Node]) -> None:
    """Clip finite constants that a cast to bfloat16 would make infinite."""
    for graph in model.graphs():
        for value in graph.initializers.values():
            if _is_constant(value) and _is_beyond(value.const_value):
                value.const_value = in_type(value.const_value, FLOAT)
    for node in nodes:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and _is_beyond(attribute.as_tensor()):
                tensor = in_type(attribute.as_tensor(), FLOAT)
                node.attributes[name] = ir.AttrTensor(name, tensor)


def _is_beyond(tensor: ir.TensorProtocol | None) -> bool:
    if tensor is None or tensor.dtype != FLOAT:
        return False
    array = np.abs(tensor.numpy())
    return bool((np.isfinite(array) & (array > float(BFLOAT16.max))).any())


def in_type(tensor: ir.TensorProtocol | None, to: ir.DataType) -> ir.TensorProtocol:
    """Convert floats to another type; finite elements are clipped to the range of bfloat16."""
    assert tensor is not None
    array = tensor.numpy()
    most = float(BFLOAT16.max)
    array = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return ir.tensor(array.astype(to.numpy()), name=tensor.name)


def spread_types(model: ir.Model) -> None:
    """Infer missing types; outputs of ``CONTRIB_OPERATORS`` have the type of their input."""
    set_missing_types(model)
    for node in model.graph.all_nodes():
        is_supported = (
            node.op_type in CONTRIB_OPERATORS if node.domain else node.op_type in {*SINCE, *MOVES}
        )
        if not is_supported or node.op_type in ("Cast", "IsNaN"):
            continue
        read = node.inputs[node.op_type == "Where"]
        for value in _computed(node):
            if value.type is None and read is not None:
                value.type = read.type


class _Casts:
    """Casts of values to the other type, at most one per value."""

    def __init__(self, half: set[ir.Value]) -> None:
        self.half = half
        self._casts: dict[ir.Value, ir.Value] = {}

    def cast(self, value: ir.Value) -> ir.Value:
        if value not in self._casts:
            self._casts[value] = cast(value, FLOAT if value in self.half else BFLOAT16)
        return self._casts[value]

    def as_output(self, value: ir.Value) -> ir.Value:
        """The cast with the name of the value."""
        output = self.cast(value)
        output.name, value.name = value.name, output.name
        return output


def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
    """Insert a cast of a value directly after its producer."""
    name = f"{value.name}/{to.name.lower()}"
    node = ir.node("Cast", [value], {"to": ir.AttrInt64("to", to)}, name=name)
    output = node.outputs[0]
    output.name = name
    output.type = ir.TensorType(to)
    output.shape = value.shape.copy() if value.shape is not None else None
    graph = graph_of(value)
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, node)
    elif len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)
    return output
