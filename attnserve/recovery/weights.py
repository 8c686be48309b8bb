"""The constants of a graph that a training changes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from attnserve.recovery.operators.registry import HALF
from graph_passes.matching.find import find_attention

__all__ = ["rotary_constants", "trainable_weights"]

LARGEST_WEIGHT = 1000.0
"""Largest absolute weight; constants with larger elements are masks."""

WEIGHTED = frozenset({
    "Add", "Attention", "BiasGelu", "Conv", "Div", "Einsum", "FastGelu",
    "FusedGemm", "FusedMatMul", "Gemm", "InstanceNormalization", "LayerNormalization", "MatMul",
    "Mul", "MultiHeadAttention", "RMSNormalization", "SimplifiedLayerNormalization",
    "SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "Sub", "Sum",
})  # fmt: skip
"""Operators whose constant inputs are weights, if another input is an activation."""

NO_ACTIVATION = frozenset({"Shape", "Size", "IsNaN", "IsInf", "ArgMax", "Cast", "Equal", "Less",
                           "Greater", "LessOrEqual", "GreaterOrEqual", "Not"})  # fmt: skip
"""Operators whose output is not an activation, except for Cast to a float type."""

FLOATS = (*HALF, ir.DataType.FLOAT, ir.DataType.DOUBLE)


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
        for part in (block.q, block.k)
        for factor in part.factors
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
