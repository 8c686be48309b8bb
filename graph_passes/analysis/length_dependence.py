"""Find constants that depend on axis lengths, although they are equal at some of the lengths."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.evaluation import evaluate
from graph_passes.analysis.operator_sets import LAYOUT, SELECTIONS
from graph_passes.analysis.shapes import ShapeInfo

__all__ = ["drop_length_dependent"]

MOVES = LAYOUT | {"Concat"}
"""Operators whose output consists of elements of their first input, or of all for Concat."""


def drop_length_dependent(
    info: ShapeInfo, other_info: ShapeInfo, opsets: Mapping[str, int]
) -> ShapeInfo:
    """Remove float constants and conditions of If that are computed from lengths of dynamic axes.

    They cannot be scales or branches of a model: ``max(1, log(S) / log(512))`` and ``S > 512``
    change at lengths that no inference visits. A head size that is read from a shape is a scale,
    and ``S == 1`` is false at all other lengths (the Squeeze of TorchScript).
    Integer constants stay: they determine layouts. So do arrays whose shapes differ (masks and
    positions).

    Args:
        info: Shape information at one choice of lengths.
        other_info: Shape information of the same graph at other lengths.
        opsets: The opset imports of the model.
    """
    tensors = dict(info.known)
    varying: dict[ir.Value, np.ndarray] = {}
    for value, tensor in info.known.items():  # in order of execution
        if tensor.constant is None or is_constant(value):
            continue
        other = other_info.constant(value)
        elements = _varying_elements(value, tensor.constant, info, other_info, varying, opsets)
        if not elements.any():
            continue
        varying[value] = elements
        has_one_shape = other is not None and other.shape == tensor.shape
        is_condition = any(node.op_type == "If" and index == 0 for node, index in value.uses())
        if is_condition or (has_one_shape and tensor.dtype.is_floating_point()):
            tensors[value] = tensor.shape_only()
    return ShapeInfo(info.axes, tensors, info.unknown)


def _varying_elements(
    value: ir.Value,
    constant: np.ndarray,
    info: ShapeInfo,
    other_info: ShapeInfo,
    varying: Mapping[ir.Value, np.ndarray],
    opsets: Mapping[str, int],
) -> np.ndarray:
    """Which elements of a constant differ between two lengths, or are computed from such elements.

    Args:
        constant: The elements at the first lengths.
        varying: The result for each value before this one, if it has such elements.
    """
    everything = np.ones(constant.shape, bool)
    other = other_info.constant(value)
    if other is not None and other.shape != constant.shape:
        return everything
    differs = ~everything
    if other is not None:
        are_nan = (constant != constant) & (other != other)
        differs = np.asarray((constant != other) & ~are_nan)
    node = value.producer()
    read = [] if node is None else [operand for operand in node.inputs if operand in varying]
    if node is None or not read or node.op_type == "ConstantOfShape":
        return differs
    if node.op_type == "Equal" and not any(_is_equal(v, info, other_info) for v in read):
        return differs
    has_data_only = node.op_type == "Concat" or read == [node.inputs[0]]
    if node.op_type not in MOVES or (node.op_type in SELECTIONS and not has_data_only):
        return everything
    arrays: list[np.ndarray | None] = []
    for index, operand in enumerate(node.inputs):
        array = info.constant(operand)
        if operand is not None and array is not None and (index == 0 or node.op_type == "Concat"):
            array = varying.get(operand, np.zeros(array.shape, bool)).astype(np.int64)
        arrays.append(array)
    try:
        moved = evaluate(node, arrays, opsets)[value.index() or 0]
    except Exception:  # an operator that takes no integers
        return everything
    return differs | (moved != 0)


def _is_equal(value: ir.Value | None, info: ShapeInfo, other_info: ShapeInfo) -> bool:
    """Whether the elements of a constant are equal at both lengths."""
    constant, other = info.constant(value), other_info.constant(value)
    return constant is not None and other is not None and np.array_equal(constant, other)
