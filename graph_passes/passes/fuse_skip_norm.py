"""FuseSkipNorm: write a residual addition and its norm as one operator of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import (
    FLOATS,
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.required import graph_of, input_of, producer_of
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at, infer_shapes_small
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.passes.base import RewritePass, pin_all_names, small_shapes
from graph_passes.passes.fuse_residuals import find_residuals
from graph_passes.passes.invariants import Interface

__all__ = ["FuseSkipNorm"]


class FuseSkipNorm(RewritePass):
    """Write a residual addition, the bias before it and the norm after it as one operator.

    Before: s = (p + b) + r,   y = LayerNormalization(s, gain, shift)
    After:  y, s = SkipLayerNormalization(p, r, gain, shift, b)

    Exact except for rounding; in half precision the operator sums in half precision. It reads and
    writes memory once instead of three times, which is faster on a GPU. ONNX Runtime's CPU kernel
    is slower than the separate nodes: use ``FuseResiduals`` on CPUs. Norms do not change if the sum
    broadcasts, if its rank is not 2 or 3, or if they have several axes or a scale that is not
    constant. The model imports com.microsoft.
    """

    name: ClassVar[str] = "fuse_skip_norm"
    order: ClassVar[int] = 140

    def expected_interface(self, before: Interface, analyses: Analyses) -> Interface:
        return before.with_opset(MICROSOFT, 1) if _fusible(analyses) else before

    def rewrite_graph(self, analyses: Analyses) -> bool:
        norms = _fusible(analyses)
        info = small_shapes(analyses)
        if norms:
            pin_all_names(analyses)  # names of blocks, to which plans refer, may come from biases
            analyses.model.opset_imports.setdefault(MICROSOFT, 1)
        for norm in norms:
            _fuse(norm, info)
        remove_unused(analyses.model)
        return bool(norms)


def _fusible(analyses: Analyses) -> list[ir.Node]:
    """The norms to fuse: the first of each sum."""
    info = small_shapes(analyses)
    norms: dict[ir.Value | None, ir.Node] = {}
    for norm in find_residuals(analyses.model):
        if _applies(norm, info) and not _may_broadcast(norm, analyses.get(_with_axes_of_one)):
            norms.setdefault(norm.inputs[0], norm)
    return list(norms.values())


def _with_axes_of_one(model: ir.Model) -> tuple[ShapeInfo, ...]:
    """Infer shapes with each named axis of length 1 in turn, to separate axes of equal length."""
    axes = infer_shapes_small(model, batch=2, sequence=5).axes
    return tuple(infer_shapes_at(model, {**axes, name: 1}) for name in axes)


def _may_broadcast(norm: ir.Node, infos: Iterable[ShapeInfo]) -> bool:
    """Whether the summands have different shapes at some lengths, which the operator refuses."""
    shapes = [[info.shape(value) for value in _sum_before(norm).inputs] for info in infos]
    return any(None not in pair and pair[0] != pair[1] for pair in shapes)


def _sum_before(norm: ir.Node) -> ir.Node:
    """The addition that ``find_residuals`` found before a norm."""
    return producer_of(input_of(norm, 0))


def _applies(norm: ir.Node, info: ShapeInfo) -> bool:
    total = _sum_before(norm)
    gain = norm.inputs[1]
    shapes = [info.shape(value) for value in total.inputs]
    shape = shapes[0]
    if shape is None or shapes[1] != shape or len(shape) not in (2, 3):
        return False
    if norm.attributes.get_int("axis", -1) not in (-1, len(shape) - 1):
        return False
    if any(value.uses() or value.is_graph_output() for value in norm.outputs[1:]):
        return False
    vectors = [value for value in norm.inputs[1:] if value is not None]
    return (
        total.graph is norm.graph
        and gain is not None
        and all(_is_vector(value, shape[-1]) for value in vectors)
        and {constant_type(value) for value in vectors} <= FLOATS
    )


def _is_vector(value: ir.Value | None, size: int) -> bool:
    return value is not None and is_constant(value) and tuple(constant_shape(value)) == (size,)


def _fuse(norm: ir.Node, info: ShapeInfo) -> None:
    residual_sum, gain = input_of(norm, 0), input_of(norm, 1)
    shift = norm.inputs[2] if len(norm.inputs) > 2 else None
    total = _sum_before(norm)
    # Names of nodes need not be unique; names of values are, also in bodies.
    make = Inserter(graph_of(norm), total, f"{norm.outputs[0].name}/fused")
    size = constant_shape(gain)[0]
    product, residual = total.inputs
    bias: ir.Value | None = None
    for place in (0, 1):
        branch = _without_bias(total.inputs[place], size, info)
        if branch is not None:
            product, bias = branch
            residual = total.inputs[1 - place]
            break
    # A constant may be the output of a node after the addition.
    gain, shift = (_copied(make, value) for value in (gain, shift))
    readers = [user for user, _ in residual_sum.uses() if user is not norm]
    is_read = residual_sum.is_graph_output() or bool(readers)
    names = ("skip_norm", "mean", "deviation", "sum") if is_read else ("skip_norm",)
    inputs = [product, residual, gain, shift, bias]
    while inputs[-1] is None:
        inputs.pop()
    epsilon = norm.attributes.get_float("epsilon", 1e-5)
    outputs = make.ops("SkipLayerNormalization", inputs, names, domain=MICROSOFT, epsilon=epsilon)
    if is_read:
        outputs[1].name = outputs[2].name = ""  # not computed
        replace_uses(residual_sum, outputs[3])
    replace_uses(norm.outputs[0], outputs[0])


def _without_bias(
    value: ir.Value | None, size: int, info: ShapeInfo
) -> tuple[ir.Value, ir.Value] | None:
    """(p, b) of a value p + b that nothing else reads; None for other values."""
    adds = None if value is None else value.producer()
    if value is None or adds is None or adds.domain or adds.op_type != "Add":
        return None
    if len(value.uses()) != 1 or value.is_graph_output():
        return None
    for place in (0, 1):
        product = adds.inputs[1 - place]
        bias = adds.inputs[place]
        if product is None or bias is None or is_constant(product) or not _is_vector(bias, size):
            continue
        if info.shape(product) == info.shape(value):
            return product, bias
    return None


def _copied(make: Inserter, value: ir.Value | None) -> ir.Value | None:
    """A constant as an initializer."""
    if value is None or value.producer() is None:
        return value
    return make.constant(constant_array(value), "vector", constant_type(value))
