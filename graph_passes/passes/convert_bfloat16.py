"""ToBfloat16: products, attention and what lies between them in bfloat16, for a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import set_missing_types
from graph_passes.context import GraphContext
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

MOVES = frozenset({"Concat", "Expand", "Flatten", "Gather", "GatherElements", "Identity", "Reshape",
                   "Slice", "Split", "Squeeze", "Tile", "Transpose", "Trilu",
                   "Unsqueeze"})  # fmt: skip
"""What only moves numbers, and does so in the type that they have."""

COMPUTES = {
    13: "Add Cast Div Erf Exp Gemm IsNaN MatMul Max Min Mul Neg ReduceSum Relu Sigmoid Softmax Sqrt"
        " Sub Sum Tanh",
    15: "Pow",
    16: "Where",
    17: "LayerNormalization",
    20: "Gelu",
    22: "Conv",
    23: "Attention RMSNormalization RotaryEmbedding",
}  # fmt: skip
"""Operators of ai.onnx with a kernel for bfloat16 in ONNX Runtime's CUDA provider, by the first
opset that has it, as its docs/OperatorKernels.md says."""

CONTRIBUTED = frozenset({"Attention", "BiasGelu", "FastGelu", "FusedMatMul", "Gelu",
                         "MultiHeadAttention", "QuickGelu", "RotaryEmbedding",
                         "SkipLayerNormalization",
                         "SkipSimplifiedLayerNormalization"})  # fmt: skip
"""The same of com.microsoft."""

STATISTICS = {"LayerNormalization": (1, 2), "SkipLayerNormalization": (1, 2),
              "SkipSimplifiedLayerNormalization": (1, 2)}  # fmt: skip
"""Outputs that are float32 whatever the rest is."""

SINCE = {name: opset for opset, names in COMPUTES.items() for name in names.split()}


@dataclass(frozen=True, eq=False)
class ToBfloat16(RewritePass):
    """Compute in bfloat16 what a GPU has kernels for, in a float32 graph; lossy.

    Before: z = f(x, W)
    After:  z = f(bfloat16(x), bfloat16(W)), for f in ``COMPUTES`` and ``CONTRIBUTED``

    bfloat16 has the range of float32 and 8 bits of its mantissa: a number is off by 1/256 of it at
    most. Constants beyond the largest bfloat16, as masks hold, become that, so that what was finite
    stays it. Other operators stay float32, what only moves numbers is in the type of what it moves,
    and a value is cast once for all that read it in the other type. Inputs, outputs, those of
    bodies too, and constants that callers may replace keep their type, and so does a node of which
    some type is not known. Constants are initializers here: lift those of nodes first.

    Attributes:
        exact: Names of nodes that stay float32.
    """

    exact: frozenset[str] = field(default_factory=frozenset[str])

    lossy: ClassVar[bool] = True

    def requires(self, model: ir.Model) -> None:
        spread_types(model)
        super().requires(model)

    def rewrite_graph(self, context: GraphContext) -> bool:
        model = context.model
        opset = model.opset_imports.get("", 0)
        nodes = list(ir.traversal.RecursiveGraphIterator(model.graph))
        turned, half = set[ir.Node](), set[ir.Value]()
        for node in nodes:
            if node.name not in self.exact and _is_turned(node, half, opset):
                turned.add(node)
                half |= {value for value in _computed(node) if value.dtype == FLOAT}
        _clip(model, nodes)
        casts = _Casts(half)
        for node in nodes:
            for place, value in enumerate(node.inputs):
                if value is None or value.dtype != FLOAT:
                    continue
                if node in turned and value not in half and _is_read_by(value, turned):
                    half.add(value)
                    value.const_value = in_type(value.const_value, BFLOAT16)
                if (node in turned) != (value in half):
                    node.replace_input_with(place, casts.of(value))
            if node in turned and node.op_type == "Cast" and node.outputs[0] in half:
                node.attributes["to"] = ir.AttrInt64("to", BFLOAT16)
        for graph in model.graphs():
            for place, value in enumerate(graph.outputs):
                if value in half:
                    graph.outputs[place] = casts.as_output(value)
        for value in half:
            value.type = ir.TensorType(BFLOAT16)
        remove_unused(model)
        return bool(half)


def _is_turned(node: ir.Node, half: set[ir.Value], opset: int) -> bool:
    given = [value for value in node.inputs if value is not None]
    if any(value.dtype is None for value in (*given, *_computed(node))):
        return False
    floats = [value for value in given if value.dtype == FLOAT]
    if node.domain == "com.microsoft":
        return node.op_type in CONTRIBUTED
    if node.domain or opset < min(COMPUTES):
        return False
    if node.op_type in MOVES:
        return any(value in half or _is_constant(value) for value in floats)
    return opset >= SINCE.get(node.op_type, opset + 1)


def _computed(node: ir.Node) -> Iterator[ir.Value]:
    """Outputs, but for those that are float32 in any case, or left out."""
    fixed = STATISTICS.get(node.op_type, ())
    return (v for place, v in enumerate(node.outputs) if v.name and place not in fixed)


def _is_constant(value: ir.Value) -> bool:
    return value.is_initializer() and not value.is_graph_input() and value.const_value is not None


def _is_read_by(constant: ir.Value, nodes: set[ir.Node]) -> bool:
    """Whether this is a constant that nothing else reads."""
    return (
        _is_constant(constant)
        and not constant.is_graph_output()
        and all(user in nodes for user, _ in constant.uses())
    )


def _clip(model: ir.Model, nodes: list[ir.Node]) -> None:
    """No finite constant may become infinite once it, or what is made of it, is cast."""
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
    """Floats in another type, what is finite within the range of bfloat16."""
    assert tensor is not None
    array, most = tensor.numpy(), float(BFLOAT16.max)
    array = np.where(np.isfinite(array), np.clip(array, -most, most), array)
    return ir.tensor(array.astype(to.numpy()), name=tensor.name)


def spread_types(model: ir.Model) -> None:
    """ONNX's own rules end where an operator is not its own: those known here keep the type."""
    set_missing_types(model)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        known = node.op_type in CONTRIBUTED if node.domain else node.op_type in {*SINCE, *MOVES}
        if not known or node.op_type in ("Cast", "IsNaN"):
            continue
        read = node.inputs[node.op_type == "Where"]
        for value in _computed(node):
            if value.type is None and read is not None:
                value.type = read.type


class _Casts:
    """Values in the other type, each made once."""

    def __init__(self, half: set[ir.Value]) -> None:
        self.half, self._made = half, dict[ir.Value, ir.Value]()

    def of(self, value: ir.Value) -> ir.Value:
        if value not in self._made:
            self._made[value] = cast(value, FLOAT if value in self.half else BFLOAT16)
        return self._made[value]

    def as_output(self, value: ir.Value) -> ir.Value:
        """``of``, under the name that the value has."""
        made = self.of(value)
        made.name, value.name = value.name, made.name
        return made


def cast(value: ir.Value, to: ir.DataType) -> ir.Value:
    """A cast of a value, right behind where it is made."""
    name = f"{value.name}/{to.name.lower()}"
    node = ir.node("Cast", [value], {"to": ir.AttrInt64("to", to)}, name=name)
    made = node.outputs[0]
    made.name, made.type = name, ir.TensorType(to)
    made.shape = value.shape.copy() if value.shape is not None else None
    _behind(value, node)
    return made


def _behind(value: ir.Value, node: ir.Node) -> None:
    graph, producer = value.graph, value.producer()
    assert isinstance(graph, ir.Graph)
    if producer is not None:
        graph.insert_after(producer, node)
    elif len(graph):
        graph.insert_before(graph[0], node)
    else:
        graph.append(node)
