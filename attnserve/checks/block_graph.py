"""Extract the graph of one block, in float32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from attnserve.runtime.observer import reads
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.matching.rotary import depends_on

__all__ = ["UndecidedError", "block_graph", "single"]


class UndecidedError(Exception):
    """The block could not be run."""


def block_graph(
    values: Mapping[ir.Value, np.ndarray],
    outputs: Sequence[ir.Value],
    info: ShapeInfo,
    opset_imports: Mapping[str, int],
) -> tuple[ir.Graph, dict[str, np.ndarray]]:
    """Build a graph that computes the outputs from the cut values and inferred shape constants.

    Nodes of a subgraph (If) and values of outer graphs are extracted into one graph.

    Args:
        values: The cut values.

    Returns:
        The graph and its inputs.

    Raises:
        UndecidedError: The outputs depend on other inputs, or on a subgraph that is not known.
    """
    arrays = dict(values)
    nodes, constants = _between(arrays, outputs, info)
    graph = ir.GraphView(
        list(arrays),
        list(outputs),
        nodes=nodes,
        initializers=constants,
        opset_imports=dict(opset_imports),
        name="block",
    ).clone()
    for graph_input, (value, array) in zip(graph.inputs, arrays.items(), strict=True):
        graph_input.const_value = None
        graph_input.type = ir.TensorType(info.known[value].dtype)
        graph_input.shape = ir.Shape(array.shape)
    _in_single_precision(graph)
    return graph, {value.name or "": array for value, array in arrays.items()}


def _between(
    cut: dict[ir.Value, np.ndarray],
    outputs: Sequence[ir.Value],
    info: ShapeInfo,
) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes from the cut values to the outputs, in order, and the constants that they read.

    Inferred constants are added to the cut, except those that are computed from the cut values: the
    tokens of a block may be constants themselves (the object queries of DETR).
    """
    cut_values = tuple(cut)
    nodes: dict[ir.Node, None] = {}
    constants: dict[ir.Value, None] = {}
    stack: list[ir.Value | ir.Node] = list(reversed(outputs))
    entered: set[ir.Value] = set()
    while stack:
        item = stack.pop()
        if isinstance(item, ir.Node):  # its inputs were visited
            nodes[item] = None
            continue
        if item in cut or item in entered:
            continue
        entered.add(item)
        node = item.producer()
        if node is None:
            if not item.is_initializer():
                raise UndecidedError(f"it also depends on the graph input {item.name!r}")
            constants[item] = None
            continue
        constant = None if node.op_type == "Constant" else info.constant(item)
        if constant is not None and not any(depends_on(item, value) for value in cut_values):
            cut[item] = constant.astype(single(info.known[item].dtype).numpy())
            continue
        if node in nodes:
            continue
        has_graph = any(a.type == ir.AttributeType.GRAPH for a in node.attributes.values())
        if has_graph and info.branch(node) is None:
            raise UndecidedError(f"it depends on {node.op_type} {node.name!r} with a subgraph")
        stack += [node, *reads(node)]
    return list(nodes), list(constants)


def single(dtype: ir.DataType) -> ir.DataType:
    """float32 for half precision: blocks are certified without the rounding of half precision."""
    half = dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
    return ir.DataType.FLOAT if half else dtype


def _in_single_precision(graph: ir.Graph) -> None:
    """Convert half-precision constants, inputs and Casts of a graph to float32."""
    for value in graph.inputs:
        value.type = ir.TensorType(single(value.dtype or ir.DataType.FLOAT))
    for value in graph.initializers.values():
        value.const_value = _single_tensor(value.const_value)
        value.type = None if value.const_value is None else ir.TensorType(value.const_value.dtype)
    for node in graph:
        node.name = None  # names may not be unique in the file
        for value in node.outputs:
            value.type = value.shape = None  # ONNX Runtime infers them again
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR:
                node.attributes[name] = ir.AttrTensor(name, _single_tensor(attribute.as_tensor()))
            elif name == "to" and node.op_type == "Cast":
                to = single(ir.DataType(attribute.as_int()))
                node.attributes[name] = ir.AttrInt64(name, to.value)


def _single_tensor(tensor: ir.TensorProtocol | None) -> Any:
    if tensor is None or single(tensor.dtype) is not tensor.dtype:
        return tensor and ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)
    # A session copies external data to a temporary folder.
    return ir.tensor(tensor.numpy()) if isinstance(tensor, ir.ExternalTensor) else tensor
