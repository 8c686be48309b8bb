"""The only lengths that the dynamic axes of an image can have.

Exporters such as Optimum name the channels, the height and the width of an image like the batch,
although the first convolution takes one number of channels, and learned positions take one size.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant

__all__ = ["SIDE", "image_lengths"]

SIDE = 224
"""The usual height and width of an image."""

ELEMENTWISE = frozenset({"Add", "Cast", "Div", "Identity", "Mul", "Sub"})
"""Operators that may be between an image and its first convolution: a normalization."""


def image_lengths(graph: ir.Graph, *, side: int | None = None) -> dict[str, int]:
    """The lengths of dynamic axes of images [batch, channels, height, width], by name.

    The height and the width follow from a table of learned positions, one for each patch of the
    first convolution and for up to two more tokens. Without such a table they are ``side``, or
    left out without it.
    """
    lengths: dict[str, int] = {}
    for value in graph.inputs:
        dims = list(value.shape or ())
        if len(dims) != 4 or all(isinstance(dim, int) for dim in dims[1:]):
            continue
        node = _first_convolution(value)
        weight = None if node is None else node.inputs[1]
        if node is None or weight is None or weight.shape is None:
            continue
        sizes = [size for size in weight.shape if isinstance(size, int)]
        if len(sizes) != 4:
            continue
        width, channels, *kernel = sizes
        strides = list(node.attributes.get_ints("strides", None) or [1] * len(kernel))
        found: list[int | None] = [channels * node.attributes.get_int("group", 1), side, side]
        if strides == kernel and (grid := _grid(graph, width)):
            found[1:] = [grid * stride for stride in strides]
        for position, size in enumerate(found, start=1):
            dim = dims[position]
            if size is not None and not isinstance(dim, int):
                lengths[dim.value or f"{value.name}[{position}]"] = size
    return lengths


def _first_convolution(value: ir.Value) -> ir.Node | None:
    """The 2-D convolution of an image, also after elementwise operators."""
    reached = [value]
    while reached:
        for node, index in reached.pop().uses():
            if node.op_type == "Conv" and index == 0 and not node.domain:
                weight = node.inputs[1]
                shape = None if weight is None else weight.shape
                return node if shape is not None and len(shape) == 4 else None
            if node.op_type in ELEMENTWISE and not node.domain:
                reached.append(node.outputs[0])
    return None


def _grid(graph: ir.Graph, width: int) -> int:
    """The patches of a side by the longest table of positions; 0 without one."""
    longest = max((_positions(value, width) for value in graph.initializers.values()), default=0)
    for more in (1, 0, 2):  # a token of the class, and one of a distillation
        side = math.isqrt(max(longest - more, 0))
        if side > 1 and side * side + more == longest:
            return side
    return 0


def _positions(value: ir.Value, width: int) -> int:
    """T of a weight [1, T, width], or of one [T, width] of which T constant rows are gathered."""
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
