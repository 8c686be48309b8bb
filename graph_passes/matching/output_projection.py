"""Match the product with W_O and its bias, which read the context of attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import is_constant, origin
from graph_passes.analysis.operator_sets import FLATTENS, LAYOUT
from graph_passes.blocks import Linear, OutputProjection, QuantizedWeight, Weight
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.products import linear
from graph_passes.matching.quantized import quantized_reader

__all__ = ["match_output_projection", "only_consumer"]


class _Biased(NamedTuple):
    """The bias of a product, the value after it, and the Add node in between, if any."""

    bias: ir.Value | None
    output: ir.Value
    nodes: tuple[ir.Node, ...] = ()


def match_output_projection(
    reader: LayoutReader, context: ir.Value, labels: np.ndarray, order: tuple[int, int, int, int]
) -> OutputProjection | None:
    """Follow the context forward to the product with W_O; None if there is no such product.

    Args:
        context: The output of the product with the values.
        labels: Indices in (B, H, S, V) order, in the layout of the context.
        order: B, H, S and V.
    """
    size = labels.size
    value = context
    path: list[ir.Node] = []
    while (node := only_consumer(value)) is not None and node.op_type in LAYOUT:
        if node.inputs[0] is not value or (len(node.outputs) > 1 and node.op_type != "Dropout"):
            return None
        try:
            labels = reader.apply_layout(node, labels, 0)
        except MatchFailure:  # a layout that depends on data
            return None
        value = node.outputs[0]
        path.append(node)
    if (quantized := quantized_reader(value, reader.info)) is not None:
        node, constant = quantized
        weight = QuantizedWeight(origin(constant))
        columns = labels.shape[-1]
    elif (
        node is not None
        and (product := linear(node, reader.shape)) is not None
        and product.tokens is value
        and product.scale == 1.0
        and _has_columns_in_order(product)
    ):
        weight = Weight(origin(product.weight), product.contracted)
        columns = product.width
    else:
        return None
    rows_and_layout = _rows_by_head(labels.reshape(-1, columns), order)
    if labels.size != size or rows_and_layout is None:
        return None
    rows, sequence_first = rows_and_layout
    addition = _Biased(None, value) if quantized is not None else _add_bias(node, reader)
    return OutputProjection(
        input=value,
        weight=weight,
        rows=rows,
        bias=addition.bias,
        output=addition.output,
        nodes=(*path, *addition.nodes, node),
        sequence_first=sequence_first,
    )


def _has_columns_in_order(product: Linear) -> bool:
    """Whether the output of the product is ordered (tokens, columns)."""
    shape = np.broadcast_shapes(product.rows.shape, product.columns.shape)
    rows = np.broadcast_to(product.rows, shape).reshape(product.rows.size, -1)
    return bool((rows == np.arange(product.rows.size)[:, None]).all())


def _rows_by_head(
    by_token: np.ndarray, order: tuple[int, int, int, int]
) -> tuple[np.ndarray, bool] | None:
    """The place of each element of each head in the last axis, and whether tokens are (S, B).

    Args:
        by_token: Labels of the context in (B, H, S, V) order, one row per token.
        order: B, H, S and V.

    Returns:
        None if the tokens are in another order, or their elements differ.
    """
    batch, heads, length, width = order
    if by_token.shape[0] != batch * length:
        return None
    b, h, s, v = np.unravel_index(by_token, order)
    tokens = np.arange(batch * length)[:, None]
    elements = (h * width + v)[0]
    by_batch = (b * length + s == tokens).all()
    by_length = (s * batch + b == tokens).all()
    if not ((by_batch or by_length) and (h * width + v == elements).all()):
        return None
    if np.unique(elements).size != heads * width:
        return None
    return np.argsort(elements).reshape(heads, width), not by_batch


def _add_bias(product: ir.Node, reader: LayoutReader) -> _Biased:
    """Match a product and its bias, in the same operator or in an Add after the product."""
    output = product.outputs[0]
    if product.op_type == "Gemm" and len(product.inputs) > 2 and product.inputs[2] is not None:
        bias = product.inputs[2]
        is_unscaled = product.attributes.get_float("beta", 1.0) == 1.0
        if not (is_unscaled and is_constant(bias) and math.prod(reader.shape(bias)[:-1]) == 1):
            raise MatchFailure(f"{describe(product)} adds a value that is not a bias")
        return _Biased(bias, output)
    add = only_consumer(output)
    if add is not None and add.op_type == "Add" and None not in add.inputs:
        other = add.inputs[1] if add.inputs[0] is output else add.inputs[0]
        if is_constant(other) and math.prod(reader.shape(other)[:-1]) == 1:
            return _Biased(other, add.outputs[0], (add,))
    return _Biased(None, output)


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The only node that reads the elements of a value; None if the value has other readers."""
    if value.is_graph_output():
        return None
    consumers = {node for node, _ in value.uses() if _reads_elements(node)}
    return consumers.pop() if len(consumers) == 1 else None


def _reads_elements(node: ir.Node) -> bool:
    """Whether a node reads elements; a Shape does not, nor a reshape that only Shape nodes read."""
    if node.op_type in FLATTENS:
        output = node.outputs[0]
        return output.is_graph_output() or any(_reads_elements(use) for use, _ in output.uses())
    return node.op_type != "Shape"
