"""Parts of nodes and values that are optional in ONNX, where a match has found that they exist."""

from __future__ import annotations

import onnx_ir as ir

__all__ = ["graph_of", "input_of", "producer_of", "tensor_of"]


def input_of(node: ir.Node, position: int) -> ir.Value:
    """The input of a node at a position."""
    value = node.inputs[position]
    assert value is not None
    return value


def producer_of(value: ir.Value) -> ir.Node:
    """The node that computes a value."""
    node = value.producer()
    assert node is not None
    return node


def tensor_of(value: ir.Value) -> ir.TensorProtocol:
    """The elements of an initializer."""
    assert value.const_value is not None
    return value.const_value


def graph_of(node: ir.Node | ir.Value) -> ir.Graph:
    """The graph of a node or value."""
    assert isinstance(node.graph, ir.Graph)
    return node.graph
