"""FoldBiases: move biases of output projections into the norms of their residuals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.required import graph_of, input_of
from graph_passes.emit.editing import Inserter, remove_unused
from graph_passes.passes.base import RewritePass, pin_all_names

__all__ = ["FoldBiases"]


class FoldBiases(RewritePass):
    """Move the bias of an output projection into the norm of its residual.

    Before: r = norm(u) + beta,         y = (p + b) + r,   z_i = r W_i + c_i
    After:  r = norm(u) + (beta + b),   y = p + r,         z_i = r W_i + (c_i - b W_i)

    Exact except for rounding. It saves one addition; a layer of a post-norm encoder (BERT) has two.
    The graph is unchanged if ``r`` is an output, if it has readers other than the sum and such
    maps, if p is a map of r itself (SkipAttention leaves this), or if weights are not in single
    precision.
    """

    name: ClassVar[str] = "fold_biases"
    order: ClassVar[int] = 120

    def rewrite_graph(self, analyses: Analyses) -> bool:
        model = analyses.model
        modified = False
        # Names of blocks may come from biases; plans and ``float_blocks`` refer to these names.
        pin_all_names(analyses)
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
    """A linear map z = r W + c of the norm's output r.

    Attributes:
        weight: W.
        node: The node that adds c; c is its input ``place``.
    """

    weight: ir.Value
    node: ir.Node
    place: int


@dataclass(frozen=True, eq=False, kw_only=True)
class _Match:
    """A bias b that can be moved into a norm; letters as in ``FoldBiases``.

    Attributes:
        total: The node of y; its input ``place`` is ``product + bias``.
        norm: The node of r; its input ``beta`` is the bias of the norm.
        maps: The maps of r.
    """

    total: ir.Node
    place: int
    product: ir.Value
    bias: ir.Value
    norm: ir.Node
    beta: int
    maps: tuple[_Map, ...]


def _match(total: ir.Node) -> _Match | None:
    """Match the addition of a residual, y = (p + b) + r; None for other nodes."""
    if (total.domain, total.op_type) != ("", "Add"):
        return None
    for place in (0, 1):
        branch = total.inputs[place]
        residual = total.inputs[1 - place]
        if branch is None or residual is None or branch.is_graph_output():
            continue
        adds = branch.producer()
        norm = residual.producer()
        if adds is None or norm is None or norm.graph is not total.graph:
            continue
        at = _vector_at(adds)
        beta = 2 if norm.op_type == "LayerNormalization" else _vector_at(norm)
        if at is None or beta is None or len(branch.uses()) > 1 or not _is_shift(norm, beta):
            continue
        product = adds.inputs[1 - at]
        bias = adds.inputs[at]
        maps = _maps(residual, total)
        if maps is None or product is None or bias is None or product is residual:
            continue
        if any(linear.node is adds for linear in maps):  # b and c_i would be one constant
            continue
        return _Match(
            total=total, place=place, product=product, bias=bias, norm=norm, beta=beta, maps=maps
        )
    return None


def _vector_at(node: ir.Node) -> int | None:
    """The index of the only input of an addition that is a constant vector of floats."""
    if (node.domain, node.op_type) != ("", "Add"):
        return None
    places = [place for place in (0, 1) if _is_float(node.inputs[place], 1)]
    return places[0] if len(places) == 1 else None


def _is_float(value: ir.Value | None, rank: int) -> bool:
    """Whether a value is a constant of this rank in single precision."""
    if value is None or not is_constant(value):
        return False
    shape = constant_shape(value)
    return len(shape) == rank and shape[-1] > 1 and constant_type(value) == ir.DataType.FLOAT


def _is_shift(norm: ir.Node, beta: int) -> bool:
    """Whether a node adds its input ``beta``, a vector or absent, to each token."""
    if norm.op_type != "LayerNormalization":
        return True
    if norm.domain or not _is_float(norm.inputs[1], 1):  # over the last axis only
        return False
    used = [value for value in norm.outputs[1:] if value.uses() or value.is_graph_output()]
    bias = norm.inputs[beta] if len(norm.inputs) > beta else None
    return not used and (bias is None or _is_float(bias, 1))


def _maps(residual: ir.Value, total: ir.Node) -> tuple[_Map, ...] | None:
    """All other readers of r; None if one of them is not a linear map with a bias."""
    if residual.is_graph_output():
        return None
    maps: list[_Map] = []
    sums = 0
    for user, place in residual.uses():
        if user is total:
            sums += 1
        elif user.op_type == "Shape" and not user.domain:
            continue
        elif (linear := _map(user, place)) is not None and linear.node.graph is total.graph:
            maps.append(linear)
        else:
            return None
    return tuple(maps) if sums == 1 else None


def _map(user: ir.Node, place: int) -> _Map | None:
    """Match a node that reads r, as its input ``place``, as a map with a bias; else None."""
    if place != 0 or len(user.inputs) < 2 or not _is_float(user.inputs[1], 2):
        return None
    weight = input_of(user, 1)
    if user.op_identifier() == (MICROSOFT, "Attention", ""):  # first projects: x W + c
        has_bias = len(user.inputs) > 2 and _is_float(user.inputs[2], 1)
        return _Map(weight, user, 2) if has_bias else None
    if (user.domain, user.op_type) != ("", "MatMul"):
        return None
    product = user.outputs[0]
    if len(product.uses()) != 1 or product.is_graph_output():
        return None
    ((adds, _),) = product.uses()
    at = _vector_at(adds)
    return None if at is None else _Map(weight, adds, at)


def _fold(match: _Match) -> None:
    """Add b to the norm, subtract b W_i from the bias of each map, and remove b."""
    bias = constant_array(match.bias).astype(np.float64)
    for linear in match.maps:
        shift = bias @ constant_array(linear.weight).astype(np.float64)
        _add(linear.node, linear.place, -shift)
    _add(match.norm, match.beta, bias)
    match.total.replace_input_with(match.place, match.product)


def _add(node: ir.Node, place: int, shift: np.ndarray) -> None:
    """Add to a constant of one node; other readers keep the original constant."""
    if len(node.inputs) <= place:
        node.resize_inputs(place + 1)
    old = node.inputs[place]
    array = np.zeros(1) if old is None else constant_array(old).astype(np.float64)
    make = Inserter(graph_of(node), node, f"{node.name or node.outputs[0].name or 'map'}/folded")
    node.replace_input_with(place, make.constant(array + shift, "bias", ir.DataType.FLOAT))
