"""Exporter idioms of attention: one small named function per idiom.

Each list is tried in order; the first function that returns a result matches the node:

    SOFTMAXES            softmax from scores to probabilities
    LOGIT_IDIOMS         nodes between scores and softmax (from the softmax upwards)
    PROBABILITY_IDIOMS   nodes between softmax and context (downwards)

Operators that contain a whole attention are in ``operators``, norms of queries and keys in
``norms``, output shapes of operators outside the standard in ``analysis.contrib_shapes``. A new
idiom is one function in this module and one line in its list.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.operator_sets import COPIES, RESHAPES
from graph_passes.analysis.required import input_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Capped, Floor, LogitStep, Mask, PositionBias, Weighted
from graph_passes.matching.element_map import MatchFailure, describe

__all__ = [
    "LOGIT_IDIOMS",
    "PROBABILITY_IDIOMS",
    "SOFTMAXES",
    "LogitMatch",
    "SoftmaxMatch",
    "reduction_axes",
]


@dataclass(frozen=True, eq=False)
class SoftmaxMatch:
    """A softmax: its input, axis and output; ``bias``, if any, is added to the input first."""

    logits: ir.Value
    axis: int
    probabilities: ir.Value
    bias: ir.Value | None = None


def softmax(node: ir.Node, info: ShapeInfo, opset: int) -> SoftmaxMatch | None:
    """Softmax; before opset 13 it covers all axes from ``axis`` on."""
    if node.op_type != "Softmax" or node.domain:
        return None
    return _softmax(node, info, one_axis=opset >= 13)


def exponential_of_log_softmax(node: ir.Node, info: ShapeInfo, opset: int) -> SoftmaxMatch | None:
    """Exp(LogSoftmax(logits))."""
    value = node.inputs[0] if node.op_type == "Exp" and node.inputs else None
    inner = None if value is None else value.producer()
    if inner is None or inner.op_type != "LogSoftmax" or inner.domain:
        return None
    reading = _softmax(inner, info, one_axis=opset >= 13)
    return replace(reading, probabilities=node.outputs[0])


def softmax_with_bias(node: ir.Node, info: ShapeInfo, opset: int) -> SoftmaxMatch | None:
    """com.microsoft BiasSoftmax: Softmax(logits + bias)."""
    if node.op_type != "BiasSoftmax" or len(node.inputs) < 2:
        return None
    return replace(_softmax(node, info, one_axis=False), bias=node.inputs[1])


def softmax_in_parts(node: ir.Node, info: ShapeInfo, opset: int) -> SoftmaxMatch | None:
    """e / ReduceSum(e), where e is Exp(logits) or Exp(logits - ReduceMax(logits))."""
    if node.op_type != "Div" or len(node.inputs) != 2:
        return None
    top, total = (None if value is None else value.producer() for value in node.inputs)
    if top is None or total is None or top.op_type != "Exp" or total.op_type != "ReduceSum":
        return None
    if total.inputs[0] is not top.outputs[0] or not total.attributes.get_int("keepdims", 1):
        return None
    logits = _unshifted(top.inputs[0])
    axes = reduction_axes(total)
    shape = info.shape(logits)
    if logits is None or shape is None or axes is None or len(axes) != 1:
        return None
    return SoftmaxMatch(logits, axes[0] % len(shape), node.outputs[0])


SOFTMAXES = (softmax, exponential_of_log_softmax, softmax_with_bias, softmax_in_parts)
"""Softmax from scores to probabilities."""


def _softmax(node: ir.Node, info: ShapeInfo, *, one_axis: bool) -> SoftmaxMatch:
    """Match a softmax over ``axis``, or also over later axes if those have length 1."""
    logits = node.inputs[0] if node.inputs else None
    if logits is None or not node.outputs:
        raise MatchFailure(f"{describe(node)} lacks its input or its output")
    shape = info.shape(logits)
    if shape is None:  # the match of the logits fails with the reason
        return SoftmaxMatch(logits, -1, node.outputs[0])
    axis = node.attributes.get_int("axis", -1 if one_axis else 1) % max(1, len(shape))
    if len(shape) < 2 or (not one_axis and math.prod(shape[axis + 1 :]) > 1):
        raise MatchFailure(f"{describe(node)} is not over the keys of (B, H, S, T) logits")
    return SoftmaxMatch(logits, axis, node.outputs[0])


def _unshifted(value: ir.Value | None) -> ir.Value | None:
    """The logits before subtraction of their maximum, which does not change the softmax."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "Sub" or None in node.inputs:
        return value
    logits, shift = node.inputs
    largest = None if shift is None else shift.producer()
    is_so = largest is not None and largest.op_type == "ReduceMax" and largest.inputs[0] is logits
    return logits if is_so else value


def reduction_axes(node: ir.Node) -> tuple[int, ...] | None:
    """The axes of a reduction, from its attribute or constant input."""
    axes = node.attributes.get_ints("axes", None)
    if axes is None and len(node.inputs) > 1 and is_constant(node.inputs[1]):
        axes = constant_array(node.inputs[1]).reshape(-1).tolist()
    return None if axes is None else tuple(axes)


Step = LogitStep | float | None
"""A mask or bias, a factor of the scale, or None for no change."""


@dataclass(frozen=True, eq=False)
class LogitMatch:
    """One node between scores and softmax: possible logit inputs, and the step for each."""

    candidates: tuple[ir.Value, ...]
    step: Callable[[ir.Value], Step]


def _always(step: Step) -> Callable[[ir.Value], Step]:
    return lambda _: step


def _number(value: ir.Value | None, info: ShapeInfo) -> float | None:
    """The value of a constant whose elements are all equal, else None."""
    constant = info.elements(value)
    if constant is None or constant.size == 0 or (constant != constant.flat[0]).any():
        return None
    return float(constant.flat[0])


def scaled_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """logits * c, logits / c, c * logits."""
    if node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    for logits, factor in ((a, b), (b, a)):
        number = _number(factor, info)
        if logits is None or number is None or (node.op_type == "Div" and logits is b):
            continue
        if number == 0.0 or not np.isfinite(number):
            return None
        scale = number if node.op_type == "Mul" else 1.0 / number
        return LogitMatch((logits,), _always(scale))
    return None


def biased_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """logits + mask, in either order, and logits - mask."""
    if node.op_type not in ("Add", "Sub", "Sum") or None in node.inputs or len(node.inputs) != 2:
        return None
    a, b = input_of(node, 0), input_of(node, 1)
    if node.op_type == "Sub":
        return LogitMatch((a,), _always(PositionBias(b, sign=-1)))
    return LogitMatch((a, b), lambda logits: PositionBias(b if logits is a else a))


def weighted_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """logits * mask, in either order."""
    if node.op_type != "Mul" or None in node.inputs or len(node.inputs) != 2:
        return None
    a, b = input_of(node, 0), input_of(node, 1)
    if _number(a, info) is not None or _number(b, info) is not None:
        return None
    return LogitMatch((a, b), lambda logits: Weighted(b if logits is a else a))


def selected_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """Where(allowed, logits, -inf) or Where(forbidden, -inf, logits)."""
    if node.op_type != "Where":
        return None
    condition, when_true, when_false = node.inputs
    for logits, other, keep in ((when_true, when_false, True), (when_false, when_true, False)):
        fill = _number(other, info)
        if logits is None or condition is None or fill is None:
            continue
        mask = Mask(condition, fill, keep)
        return LogitMatch((logits,), _always(mask))
    return None


def cast_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """Cast and Identity; certification detects any change of values."""
    if node.op_type not in ("Cast", "CastLike", "Identity") or node.inputs[0] is None:
        return None
    return LogitMatch((node.inputs[0],), _always(None))


def moved_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """Layout changes of scores, for example (B*H, S, T) or heads last."""
    if node.op_type not in RESHAPES | {"Transpose"} or node.inputs[0] is None:
        return None
    return LogitMatch((node.inputs[0],), _always(None))


def capped_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """tanh(logits), the middle of a soft cap."""
    if node.op_type != "Tanh" or node.inputs[0] is None:
        return None
    return LogitMatch((node.inputs[0],), _always(Capped()))


def floored_logits(node: ir.Node, info: ShapeInfo) -> LogitMatch | None:
    """max(logits, lowest number), which keeps a sum of masks finite in older exports."""
    if node.op_type not in ("Max", "Clip"):
        return None
    a, b, *rest = [*node.inputs, None]
    for logits, other in ((a, b), (b, a)):
        low = _number(other, info)
        if logits is None or low is None or (node.op_type == "Clip" and logits is b):
            continue
        if not any(rest):
            return LogitMatch((logits,), _always(Floor(low)))
    return None


LOGIT_IDIOMS = (
    scaled_logits,
    biased_logits,
    weighted_logits,
    selected_logits,
    cast_logits,
    moved_logits,
    capped_logits,
    floored_logits,
)
"""Nodes between scores and softmax, searched from the softmax upwards."""


def safe_softmax(probabilities: ir.Value) -> tuple[ir.Node, ...]:
    """Where(IsNaN(p), 0, p): fully masked rows become zero (PyTorch's sdpa)."""
    for where, index in probabilities.uses():
        if where.op_type != "Where" or index != 2 or where.inputs[0] is None:
            continue
        is_nan = where.inputs[0].producer()
        if is_nan is None or is_nan.op_type != "IsNaN" or is_nan.inputs[0] is not probabilities:
            continue
        if is_constant(where.inputs[1]) and not constant_array(where.inputs[1]).any():
            return (is_nan, where)
    return ()


def forwarded(probabilities: ir.Value) -> tuple[ir.Node, ...]:
    """Dropout at inference, Cast and Identity."""
    for node, index in probabilities.uses():
        if index == 0 and node.op_type in COPIES:
            return (node,)
    return ()


def moved_probabilities(probabilities: ir.Value) -> tuple[ir.Node, ...]:
    """Layout changes of probabilities."""
    for node, index in probabilities.uses():
        if index == 0 and node.op_type in ("Reshape", "Squeeze", "Unsqueeze", "Transpose"):
            return (node,)
    return ()


PROBABILITY_IDIOMS = (safe_softmax, forwarded, moved_probabilities)
"""Nodes between softmax and context, searched downwards; each returns the nodes it matched."""
