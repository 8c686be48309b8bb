"""Match norms of queries and keys between a projection and the scores."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, constant_number, is_constant
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Norm
from graph_passes.matching.element_map import (
    ElementMap,
    LinearTrace,
    MatchFailure,
    TermByHead,
    TracedNorm,
    describe,
    known_shape,
)
from graph_passes.matching.idioms import reduction_axes

__all__ = ["NORMS", "NormMatch", "apply_norm"]


@dataclass(frozen=True, eq=False)
class NormMatch:
    """factor * value / size(value) over the last axis, times ``weight``, plus ``bias``.

    ``blocks.Norm`` describes the size and the other attributes.
    """

    value: ir.Value
    epsilon: float
    centered: bool = False
    weight: ir.Value | None = None
    bias: ir.Value | None = None
    least: float = 0.0
    added: float = 0.0
    factor: float = 1.0


def norm_operator(node: ir.Node, info: ShapeInfo) -> NormMatch | None:
    """RMSNormalization, SimplifiedLayerNormalization and LayerNormalization of the last axis."""
    if (
        node.op_type
        not in ("RMSNormalization", "SimplifiedLayerNormalization", "LayerNormalization")
        or node.inputs[0] is None
    ):
        return None
    axis = node.attributes.get_int("axis", -1)
    if not _is_last(axis, node.inputs[0], info) or any(o.uses() for o in node.outputs[1:]):
        return None
    weight, bias = [*node.inputs[1:3], None, None][:2]
    return NormMatch(
        node.inputs[0],
        node.attributes.get_float("epsilon", 1e-5),
        node.op_type == "LayerNormalization",
        weight,
        bias,
    )


def lp_operator(node: ir.Node, info: ShapeInfo) -> NormMatch | None:
    """LpNormalization of the last axis with p = 2; rows of zeros stay zero."""
    value = node.inputs[0] if node.op_type == "LpNormalization" else None
    if value is None or node.attributes.get_int("p", 2) != 2:
        return None
    if not _is_last(node.attributes.get_int("axis", -1), value, info):
        return None
    smallest = float(np.finfo(np.float32).tiny)
    return NormMatch(value, 0.0, least=smallest, factor=_length(value, info) ** -0.5)


def norm_in_parts(node: ir.Node, info: ShapeInfo) -> NormMatch | None:
    """u / size(u) and u * (1 / size(u)), where u may be x - mean(x)."""
    if node.op_type not in ("Mul", "Div"):
        return None
    a, b = node.inputs
    for value, other in ((a, b), (b, a)):
        if value is None or other is None or (node.op_type == "Div" and value is b):
            continue
        size = (_size if node.op_type == "Div" else _inverse_size)(other, value, info)
        if size is not None:
            whole = _before_centering(value, info)
            return NormMatch(
                whole or value,
                size.epsilon,
                centered=whole is not None,
                least=size.least,
                added=size.added,
                factor=size.factor,
            )
    return None


NORMS = (norm_operator, lp_operator, norm_in_parts)
"""The forms of a norm; the first that matches a node is used."""


class _Size(NamedTuple):
    """A size of rows u: (max(sqrt(mean(u^2) + epsilon), least) + added) / factor."""

    factor: float
    epsilon: float = 0.0
    least: float = 0.0
    added: float = 0.0


def _size(value: ir.Value | None, rows: ir.Value, info: ShapeInfo) -> _Size | None:
    """Match a size of the rows, (..., 1)."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    first = node.inputs[0] if node.inputs else None
    match node.op_type:
        case "Expand" | "Identity" | "Cast":
            return _size(first, rows, info)
        case "Sqrt":
            return _mean_square(first, rows, info)
        case "Pow" if constant_number(node.inputs[1]) == 0.5:
            return _mean_square(first, rows, info)
        case "ReduceL2" if _last_axis_kept(node, info) and _are_same(first, rows):
            return _Size(_length(rows, info) ** -0.5)
        case "Add" | "Max" | "Clip":
            for inner, number in _with_number(node):
                if (size := _size(inner, rows, info)) is not None:
                    number *= size.factor
                    if node.op_type == "Add":
                        return size._replace(added=size.added + number)
                    return size._replace(least=max(size.least, number - size.added))
        case _:
            pass
    return None


def _inverse_size(value: ir.Value | None, rows: ir.Value, info: ShapeInfo) -> _Size | None:
    """Match 1 / size of the rows; return the size."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    match node.op_type:
        case "Expand" | "Identity" | "Cast":
            return _inverse_size(node.inputs[0], rows, info)
        case "Reciprocal":
            return _size(node.inputs[0], rows, info)
        case "Div" if constant_number(node.inputs[0]) == 1.0:
            return _size(node.inputs[1], rows, info)
        case "Pow" if constant_number(node.inputs[1]) == -0.5:
            return _mean_square(node.inputs[0], rows, info)
        case _:
            return None


def _mean_square(value: ir.Value | None, rows: ir.Value, info: ShapeInfo) -> _Size | None:
    """Match the square of a size; return the size."""
    node = None if value is None else value.producer()
    if node is None:
        return None
    first = node.inputs[0] if node.inputs else None
    match node.op_type:
        case "Identity" | "Cast":
            return _mean_square(first, rows, info)
        case "ReduceMean" | "MatMul" if _is_mean(node, info) and _is_square(first, rows):
            return _Size(1.0)
        case "ReduceSum" if _last_axis_kept(node, info) and _is_square(first, rows):
            return _Size(_length(rows, info) ** -0.5)
        case "ReduceSumSquare" if _last_axis_kept(node, info) and _are_same(first, rows):
            return _Size(_length(rows, info) ** -0.5)
        case "Add" | "Max" | "Clip":
            for inner, number in _with_number(node):
                size = _mean_square(inner, rows, info)
                if size is None or size.least or number < 0.0:
                    continue
                if node.op_type == "Add":
                    return size._replace(epsilon=size.epsilon + number * size.factor**2)
                return size._replace(least=number**0.5 * size.factor)
        case _:
            pass
    return None


def _with_number(node: ir.Node) -> list[tuple[ir.Value | None, float]]:
    """Pairs of an operand and the constant number combined with it; of Clip, the lower bound."""
    a, b, *rest = [*node.inputs, None]
    if any(rest):  # an upper bound
        return []
    pairs = ((a, b),) if node.op_type == "Clip" else ((a, b), (b, a))
    return [
        (inner, number) for inner, other in pairs if (number := constant_number(other)) is not None
    ]


def _before_centering(value: ir.Value | None, info: ShapeInfo) -> ir.Value | None:
    """x if the value is x - mean(x) over the last axis, else None."""
    node = _uncast(value)[1]
    if node is None or node.op_type != "Sub":
        return None
    x, mean = node.inputs
    maker = _uncast(mean)[1]
    is_so = maker is not None and _is_mean(maker, info) and _are_same(maker.inputs[0], x)
    return x if is_so else None


def _is_mean(node: ir.Node, info: ShapeInfo) -> bool:
    """Whether a node is a mean over the last axis with keepdims."""
    return (node.op_type == "ReduceMean" and _last_axis_kept(node, info)) or _is_mean_product(node)


def _uncast(value: ir.Value | None) -> tuple[ir.Value | None, ir.Node | None]:
    """The value before Cast and Identity, and its producer."""
    node = None if value is None else value.producer()
    while node is not None and node.op_type in ("Cast", "Identity"):
        value = node.inputs[0]
        node = None if value is None else value.producer()
    return value, node


def _are_same(a: ir.Value | None, b: ir.Value | None) -> bool:
    """Whether two values are equal except for casts; exporters write x - mean(x) twice."""
    (a, first), (b, second) = _uncast(a), _uncast(b)
    if a is b:
        return a is not None
    if first is None or second is None or first.op_type != second.op_type:
        return False
    if first.op_type == "Sub":
        return all(map(_are_same, first.inputs, second.inputs))
    axes = [reduction_axes(node) for node in (first, second)]
    is_mean = first.op_type == "ReduceMean" and axes[0] is not None and axes[0] == axes[1]
    return is_mean and _are_same(first.inputs[0], second.inputs[0])


def _length(value: ir.Value, info: ShapeInfo) -> int:
    """The length of the last axis."""
    return known_shape(value, info)[-1]


def _is_mean_product(node: ir.Node) -> bool:
    """Whether a node is a product with a column of 1 / L, as ``emit`` writes a mean."""
    if node.op_type != "MatMul" or not is_constant(node.inputs[1]):
        return False
    column = constant_array(node.inputs[1])
    return column.ndim == 2 and column.shape[1] == 1 and bool(np.allclose(column * len(column), 1))


def _last_axis_kept(node: ir.Node, info: ShapeInfo) -> bool:
    """Whether a reduction is over the last axis with keepdims."""
    if node.attributes.get_int("keepdims", 1) != 1:
        return False
    axes = reduction_axes(node)
    return axes is not None and len(axes) == 1 and _is_last(axes[0], node.inputs[0], info)


def _is_last(axis: int, value: ir.Value | None, info: ShapeInfo) -> bool:
    """Whether an axis, which may count from the front, is the last one of a value."""
    shape = None if value is None else info.shape(value)
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _is_square(value: ir.Value | None, rows: ir.Value) -> bool:
    """Whether a value is the element-wise square of the rows."""
    node = _uncast(value)[1]
    if node is None:
        return False
    first = node.inputs[0] if node.inputs else None
    if node.op_type == "Pow" and constant_number(node.inputs[1]) == 2.0:
        absolute = _uncast(first)[1]  # torch.linalg.vector_norm
        if absolute is not None and absolute.op_type == "Abs":
            first = absolute.inputs[0]
        return _are_same(first, rows)
    return node.op_type == "Mul" and _are_same(first, rows) and _are_same(node.inputs[1], rows)


def apply_norm(node: ir.Node, inner: LinearTrace, match: NormMatch, role: str) -> LinearTrace:
    """Trace the output of a norm; group g of length L has the new columns g L to (g + 1) L - 1."""
    if inner.norm is not None:
        raise MatchFailure(f"{describe(node)} normalizes a {role} that is normalized already")
    if inner.source is None or any(factor and factor.past for factor in inner.terms):
        raise MatchFailure(f"{describe(node)} normalizes a {role} that holds a cache")
    length = inner.shape[-1]
    rows = [term.map(lambda array: array.reshape(-1, length)) for term in inner.terms.values()]
    is_used = np.hstack([term.used for term in rows])
    tokens = np.hstack([term.tokens for term in rows])
    token = np.take_along_axis(tokens, is_used.argmax(axis=1)[:, None], axis=1)
    if not ((tokens == token) | ~is_used).all():
        raise MatchFailure(f"{describe(node)} normalizes the {role} over more than one token")
    keys = [(np.where(term.used, term.columns, -1), term.gain, term.offset) for term in rows]
    _, first, group = np.unique(
        np.hstack([array for key in keys for array in key]),
        axis=0,
        return_index=True,
        return_inverse=True,
    )
    group = group.reshape(-1)
    token = token[:, 0]
    terms = {
        factor: TermByHead(
            term.columns[first],
            term.gain[first],
            term.offset[first],
            _factors_by_group(node, term, token, group, inner.source.rows.size, role),
        )
        for factor, term in zip(inner.terms, rows, strict=True)
    }
    first_term = next(iter(terms.values()))
    norm = Norm(
        node,
        first_term.columns,
        first_term.gain,
        first_term.offset,
        inner.scale,
        match.epsilon,
        match.centered,
        match.least,
        match.added,
    )
    fresh = (group[:, None] * length + np.arange(length)).reshape(inner.shape)
    weight = np.ones(1) if match.weight is None else _vector(node, match.weight, role)
    bias = np.zeros(1) if match.bias is None else _vector(node, match.bias, role)
    of_token = token.reshape(*inner.shape[:-1], 1)
    normalized = ElementMap(fresh, of_token, weight, bias, np.zeros((), np.int64))
    normalized = normalized.broadcast_to(inner.shape)
    traced_norm = TracedNorm(norm, {} if inner.has_no_factor else terms)
    return replace(
        inner, scale=match.factor, terms={None: normalized}, norm=traced_norm
    ).append_node(node)


def _factors_by_group(
    node: ir.Node, term: ElementMap, token: np.ndarray, group: np.ndarray, count: int, role: str
) -> np.ndarray:
    """The factor indices (N, G, L) of the groups of each token, given rows (M, L) of both."""
    index = np.zeros((count, int(group.max()) + 1, term.columns.shape[1]), np.int64)
    is_filled = np.zeros(index.shape[:2], bool)
    index[token, group] = term.factor_index
    is_filled[token, group] = True
    alike = (index[token, group] == term.factor_index) | ~term.used
    if not (is_filled.all() and alike.all()):
        raise MatchFailure(f"{describe(node)} normalizes a {role} that depends on the token")
    return index


def _vector(node: ir.Node, value: ir.Value, role: str) -> np.ndarray:
    """The elements of the weight or bias of a norm.

    Raises:
        MatchFailure: The value is not constant.
    """
    if not is_constant(value):
        raise MatchFailure(
            f"{describe(node)} normalizes the {role} with a weight that is not constant"
        )
    return constant_array(value).astype(np.float64)
