"""FoldBiases: move biases of output projections into the norms of their residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.context import GraphContext
from graph_passes.emit.editing import Inserter, remove_unused
from graph_passes.passes.base import RewritePass

__all__ = ["FoldBiases"]

MICROSOFT_ATTENTION = ("com.microsoft", "Attention", "")
"""Multiplies its first input by its second and adds its third, before anything else."""


class FoldBiases(RewritePass):
    """Move the bias of an output projection into the norm of its residual.

    Before: r = norm(u) + beta,         y = (p + b) + r,   z_i = r W_i + c_i
    After:  r = norm(u) + (beta + b),   y = p + r,         z_i = r W_i + (c_i - b W_i)

    Exact but for rounding, with one addition less; a layer of a post-norm encoder (BERT) has two.
    Unchanged if ``r`` is an output of the graph, if anything but the sum and such maps reads it,
    and if weights are not of single precision.
    """

    name: ClassVar[str] = "fold_biases"

    def rewrite_graph(self, context: GraphContext) -> bool:
        model, modified = context.model, False
        for graph in (model.graph, *model.graph.subgraphs()):
            for node in list(graph):
                match = _match(node)
                if match is not None:
                    _fold(match)
                    modified = True
        remove_unused(model)
        return modified


@dataclass(frozen=True, eq=False)
class _Map:
    """z = r W + c; ``node`` adds c, its input ``place``."""

    weight: ir.Value
    node: ir.Node
    place: int


@dataclass(frozen=True, eq=False)
class _Match:
    """The sum y, which input of it is p + b, the node of that, and everything around r."""

    total: ir.Node
    place: int
    product: ir.Value
    bias: ir.Value
    norm: ir.Node
    beta: int
    maps: tuple[_Map, ...]


def _match(total: ir.Node) -> _Match | None:
    if (total.domain, total.op_type) != ("", "Add"):
        return None
    for place in (0, 1):
        biased, residual = total.inputs[place], total.inputs[1 - place]
        if biased is None or residual is None or biased.is_graph_output():
            continue
        adds, norm = biased.producer(), residual.producer()
        if adds is None or norm is None or norm.graph is not total.graph:
            continue
        at = _vector_at(adds)
        beta = 2 if norm.op_type == "LayerNormalization" else _vector_at(norm)
        if at is None or beta is None or len(biased.uses()) > 1 or not _is_shift(norm, beta):
            continue
        product, bias = adds.inputs[1 - at], adds.inputs[at]
        maps = _maps(residual, total)
        if maps is None or product is None or bias is None or product is residual:
            continue
        return _Match(total, place, product, bias, norm, beta, maps)
    return None


def _vector_at(node: ir.Node) -> int | None:
    """Which input of an addition is a constant vector of floats, the other being computed."""
    if (node.domain, node.op_type) != ("", "Add"):
        return None
    places = [place for place in (0, 1) if _is_vector(node.inputs[place])]
    return places[0] if len(places) == 1 else None


def _is_vector(value: ir.Value | None) -> bool:
    return _is_float(value, 1)


def _is_float(value: ir.Value | None, rank: int) -> bool:
    """Whether this is a constant of single precision with so many axes."""
    if value is None or not is_constant(value):
        return False
    shape = constant_shape(value)
    return len(shape) == rank and shape[-1] > 1 and constant_type(value) == ir.DataType.FLOAT


def _is_shift(norm: ir.Node, beta: int) -> bool:
    """Whether a node adds this input, a vector or nothing yet, to each token."""
    if norm.op_type != "LayerNormalization":
        return True
    if norm.domain or not _is_vector(norm.inputs[1]):  # over the last axis alone
        return False
    unused = [value for value in norm.outputs[1:] if value.uses() or value.is_graph_output()]
    given = norm.inputs[beta] if len(norm.inputs) > beta else None
    return not unused and (given is None or _is_vector(given))


def _maps(residual: ir.Value, total: ir.Node) -> tuple[_Map, ...] | None:
    """Everything else that reads r; None where something is no linear map with a bias."""
    if residual.is_graph_output():
        return None
    found: list[_Map] = []
    sums = 0
    for user, place in residual.uses():
        if user is total:
            sums += 1
        elif user.op_type == "Shape" and not user.domain:
            continue
        elif (each := _map(user, place)) is not None and each.node.graph is total.graph:
            found.append(each)
        else:
            return None
    return tuple(found) if sums == 1 else None


def _map(user: ir.Node, place: int) -> _Map | None:
    if place != 0 or len(user.inputs) < 2 or not _is_float(user.inputs[1], 2):
        return None
    weight = user.inputs[1]
    assert weight is not None
    if user.op_identifier() == MICROSOFT_ATTENTION:
        return (
            _Map(weight, user, 2) if len(user.inputs) > 2 and _is_vector(user.inputs[2]) else None
        )
    if (user.domain, user.op_type) != ("", "MatMul"):
        return None
    product = user.outputs[0]
    if len(product.uses()) != 1 or product.is_graph_output():
        return None
    ((adds, _),) = product.uses()
    at = _vector_at(adds)
    return None if at is None else _Map(weight, adds, at)


def _fold(match: _Match) -> None:
    bias = constant_array(match.bias).astype(np.float64)
    for each in match.maps:
        shift = bias @ constant_array(each.weight).astype(np.float64)
        _add(each.node, each.place, -shift)
    _add(match.norm, match.beta, bias)
    match.total.replace_input_with(match.place, match.product)


def _add(node: ir.Node, place: int, shift: np.ndarray) -> None:
    """Shift a constant of one node, which others may read too."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    old = node.inputs[place]
    given = np.zeros(1) if old is None else constant_array(old).astype(np.float64)
    make = Inserter(graph, node, f"{node.name or node.outputs[0].name or 'map'}/folded")
    node.replace_input_with(place, make.constant((given + shift).astype(np.float32), "bias"))
