"""The only lengths that the dynamic axes of images and spectrograms can have.

Exporters such as Optimum name all axes of an input like the batch, although the first convolution
takes one number of channels, and learned positions take one size.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.operator_sets import MICROSOFT, operators

__all__ = ["SIDE", "convolved_lengths"]

SIDE = 224
"""The usual height and width of an image."""

CONVOLUTIONS = {
    ("", "Conv"): 1,
    ("", "ConvInteger"): 1,
    ("", "QLinearConv"): 3,
    (MICROSOFT, "FusedConv"): 1,
}
"""Convolution operators, and the index of the input for the weight."""

ELEMENTWISE = operators(
    "Add Cast DequantizeLinear Div DynamicQuantizeLinear Identity Mul QuantizeLinear Sub"
)
"""Operators that may be between an image and its first convolution: a normalization, rounding."""

INNER_OPERATORS = ELEMENTWISE | {"Erf", "Gelu", "Relu", "Sigmoid", "Tanh", "Transpose"}
"""Operators that may be between the convolutions of a spectrogram and its positions."""


def convolved_lengths(graph: ir.Graph, *, sides: tuple[int, int] | None = None) -> dict[str, int]:
    """The lengths of the dynamic axes of convolved inputs, by name.

    The height and the width of images [batch, channels, height, width] follow from a table of
    learned positions, one for each patch of the first convolution and for up to two more tokens.
    Without such a table they are ``sides``, or left out without it. The length of spectrograms
    [batch, channels, length] follows from positions that are added after the last convolution.
    """
    lengths: dict[str, int] = {}
    for value in graph.inputs:
        dims = list(value.shape or ())
        node = _first_convolution(value) if len(dims) in (3, 4) else None
        if node is None or all(isinstance(dim, int) for dim in dims[1:]):
            continue
        width, channels, *kernel = _kernel(node)
        if len(kernel) != len(dims) - 2:
            continue
        sizes: list[int | None] = [channels * node.attributes.get_int("group", 1)]
        strides = _strides(node)
        if len(dims) == 3:
            sizes.append(_length(value))
        elif strides == kernel and (grid := _grid(graph, width)):
            sizes += [grid * stride for stride in strides]
        else:
            sizes += sides or (None, None)
        for position, size in enumerate(sizes, start=1):
            dim = dims[position]
            if size is not None and not isinstance(dim, int):
                lengths[dim.value or f"{value.name}[{position}]"] = size
    return lengths


def _first_convolution(value: ir.Value) -> ir.Node | None:
    """The convolution that reads an input, directly or after elementwise operators."""
    reached = [value]
    while reached:
        for node, index in reached.pop().uses():
            if (node.domain, node.op_type) in CONVOLUTIONS and index == 0:
                return node if _kernel(node) else None
            if node.op_type in ELEMENTWISE and not node.domain:
                reached.append(node.outputs[0])
    return None


def _kernel(node: ir.Node) -> list[int]:
    """The shape of a convolution's weight: outputs, inputs of a group, size; empty if unknown."""
    weight = node.inputs[CONVOLUTIONS[node.domain, node.op_type]]
    while weight is not None and (producer := weight.producer()) is not None:
        if producer.op_type not in ("Cast", "DequantizeLinear", "Identity"):
            break
        weight = producer.inputs[0]
    shape = [] if weight is None or weight.shape is None else list(weight.shape)
    sizes = [size for size in shape if isinstance(size, int)]
    return sizes if len(sizes) == len(shape) else []


def _strides(node: ir.Node) -> list[int]:
    """The strides of a convolution, one for each axis of its window."""
    return list(node.attributes.get_ints("strides", None) or [1] * (len(_kernel(node)) - 2))


def _length(value: ir.Value) -> int | None:
    """The length T of positions [T, D] or [1, T, D] after convolutions of width D; else None."""
    values = [value]
    seen: set[ir.Node] = set()
    stride = 1  # of all convolutions so far
    width = 0  # of the last convolution
    while values:
        for node, index in values.pop(0).uses():
            if node in seen:
                continue
            seen.add(node)
            is_convolution = (node.domain, node.op_type) in CONVOLUTIONS
            if is_convolution and index == 0 and _kernel(node):
                stride *= _strides(node)[0]
                width = _kernel(node)[0]
            elif node.op_type not in INNER_OPERATORS:
                continue
            for table in node.inputs if node.op_type == "Add" else ():
                shape = list(table.shape or ()) if table is not None and is_constant(table) else []
                if shape[:-2] in ([], [1]) and len(shape) > 1 and shape[-1] == width:
                    return stride * int(shape[-2]) if isinstance(shape[-2], int) else None
            values.append(node.outputs[0])
    return None


def _grid(graph: ir.Graph, width: int) -> int:
    """The number of patches per side, from the longest table of positions; 0 without a table."""
    longest = max((_positions(value, width) for value in graph.initializers.values()), default=0)
    for more in (1, 0, 2):  # a class token and a distillation token
        side = math.isqrt(max(longest - more, 0))
        if side > 1 and side * side + more == longest:
            return side
    return 0


def _positions(value: ir.Value, width: int) -> int:
    """T of a weight [1, T, width], or [T, width] with T constant rows gathered from it; else 0."""
    shape = list(value.shape or ())
    if len(shape) == 3 and shape[0] == 1 and shape[2] == width and isinstance(shape[1], int):
        return shape[1]
    if len(shape) != 2 or shape[1] != width or not isinstance(shape[0], int):
        return 0
    for node, index in value.uses():
        if node.op_type == "Gather" and index == 0:
            rows = node.inputs[1]
            if rows is not None and is_constant(rows) and constant_array(rows).size == shape[0]:
                return shape[0]
    return 0
