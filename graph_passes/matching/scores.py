"""From the softmax up to the scores, and down to the context.

Every element of the scores gets a number, (B, H, S, T) in order, and the numbers are sent through
whatever lies scores and probabilities out anew. Where they arrive tells which axis is which, so a
graph may keep its heads last, fold them into the batch, or make its scores keys by queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.blocks import LogitStep, Mask, PositionBias, Scaled, Weighted
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.idioms import LOGIT_IDIOMS, PROBABILITY_IDIOMS, SoftmaxMatch
from graph_passes.matching.layout import PASS_THROUGH, LayoutReader
from graph_passes.matching.products import (
    ContextProduct,
    ScoreProduct,
    context_product,
    score_product,
)

__all__ = ["ContextMatch", "LogitsMatch", "match_context", "match_logits"]

REACH = 16
"""Nodes between scores and softmax; each may have two operands to search, so few."""

LAYOUT = PASS_THROUGH | {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten"}


@dataclass(frozen=True, eq=False)
class LogitsMatch:
    """What the softmax normalises.

    Attributes:
        product: The scores, queries first.
        scale: Of all scalars up to ``scaled``.
        scaled: The last value before any step.
        order: Of its axes, that brings it to (B, H, S, T) or (B*H, S, T); None where it has others.
        steps: What follows.
        labels: The numbers of the elements of the softmax's input.
        shape: (B*H, S, T).
    """

    product: ScoreProduct
    scale: float
    scaled: ir.Value
    order: tuple[int, ...] | None
    steps: tuple[LogitStep, ...]
    labels: np.ndarray
    shape: tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class _Link:
    """A node on the way from the scores to the softmax, which value of it, and what it does."""

    node: ir.Node
    before: ir.Value
    step: LogitStep | float | None


def match_logits(softmax: SoftmaxMatch, reader: LayoutReader) -> LogitsMatch | None:
    """Read what a softmax normalises; None where no product of activations feeds it.

    Raises:
        MatchFailure: Two products feed it, or the axis is not that of the keys.
    """
    found = _find_scores(softmax.logits, reader, REACH, {})
    if found is None:
        return None
    product, chain = found
    sizes = reader.shape(product.node.outputs[0])
    shape = (math.prod(sizes[:-2]), sizes[-2], sizes[-1])
    stages = [np.arange(math.prod(sizes)).reshape(sizes)]
    for link in chain:
        labels = stages[-1]
        if link.node.op_type in LAYOUT:
            labels = reader.apply_layout(link.node, labels, link.node.outputs[0].index() or 0)
        elif reader.shape(link.node.outputs[0]) != labels.shape:
            raise MatchFailure(f"{describe(link.node)} spreads the scores over another axis")
        stages.append(labels)
    axis = softmax.axis
    by_key = _runs_over(stages[-1], axis, shape, 2)
    if not by_key and _runs_over(
        stages[-1], axis, shape, 1
    ):  # softmax over what comes first: keys by queries
        product = replace(
            product,
            query=product.key,
            key=product.query,
            query_axes=product.key_axes,
            key_axes=product.query_axes,
        )
        heads, s, t = shape
        stages = [(each // t % s) + s * (each % t + t * (each // (s * t))) for each in stages]
        shape = (heads, t, s)
    elif not by_key:
        name = softmax.probabilities.name
        raise MatchFailure(f"the softmax {name!r} is not over the keys of (B, H, S, T) logits")
    scale, scaled, order = product.scale, product.node.outputs[0], axis_order(stages[0])
    steps: list[LogitStep] = []
    for link, labels in zip(chain, stages[1:], strict=True):
        if isinstance(link.step, float | int):
            if steps:
                steps.append(Scaled(link.step))
            else:
                scale *= link.step
        elif link.step is not None:
            steps.append(_in_order(link.step, labels))
        if not steps:
            scaled, order = link.node.outputs[0], axis_order(labels)
    if softmax.bias is not None:
        steps.append(_in_order(PositionBias(softmax.bias), stages[-1]))
    return LogitsMatch(product, scale, scaled, order, tuple(steps), stages[-1], shape)


_Path = tuple[ScoreProduct, tuple[_Link, ...]]


def _find_scores(
    value: ir.Value, reader: LayoutReader, reach: int, tried: dict[ir.Value, _Path | None]
) -> _Path | None:
    """Up to the one product of two activations, and the way back down; each value once."""
    if value not in tried:
        tried[value] = _search_scores(value, reader, reach, tried)
    return tried[value]


def _search_scores(
    value: ir.Value, reader: LayoutReader, reach: int, tried: dict[ir.Value, _Path | None]
) -> _Path | None:
    node = value.producer()
    if node is None or reach == 0:
        return None
    if (product := score_product(node, reader.info)) is not None:
        return product, ()
    for idiom in LOGIT_IDIOMS:
        reading = idiom(node, reader.info)
        if reading is None:
            continue
        found = [
            (candidate, inner)
            for candidate in reading.candidates
            if (inner := _find_scores(candidate, reader, reach - 1, tried)) is not None
        ]
        if len(found) > 1:
            raise MatchFailure(
                f"{describe(node)} adds two products: this attention has more than one score"
            )
        if not found:
            return None
        candidate, (product, chain) = found[0]
        return product, (*chain, _Link(node, candidate, reading.step(candidate)))
    return None


def _runs_over(labels: np.ndarray, axis: int, shape: tuple[int, int, int], which: int) -> bool:
    """Whether one axis of the labels counts one index of (B*H, S, T) and leaves the others."""
    order = axis_order(labels)
    if order is not None:  # then the strides tell, and no element need be looked at
        stride = math.prod(labels.shape[a] for a in order[order.index(axis % labels.ndim) + 1 :])
        size = labels.shape[axis]
        return size == shape[which] and (size == 1 or stride == math.prod(shape[which + 1 :]))
    rows = np.moveaxis(labels, axis, -1).reshape(-1, labels.shape[axis])
    indices = np.unravel_index(rows, shape)
    counts = indices[which]
    if rows.shape[-1] != shape[which] or not (counts == np.arange(shape[which])).all():
        return False
    return all((i == i[:, :1]).all() for n, i in enumerate(indices) if n != which)


def axis_order(labels: np.ndarray) -> tuple[int, ...] | None:
    """The order of the axes in which the labels count up; None where there is none.

    Axes of length 1 stay where they are if nothing else moves, else they follow the first.
    """
    if (labels.reshape(-1) == np.arange(labels.size)).all():
        return tuple(range(labels.ndim))
    strides = [
        int(labels.take(1, axis).flat[0] - labels.flat[0]) if size > 1 else 0
        for axis, size in enumerate(labels.shape)
    ]
    moving = sorted((a for a, s in enumerate(labels.shape) if s > 1), key=lambda a: -strides[a])
    order = (*moving[:1], *(a for a, s in enumerate(labels.shape) if s == 1), *moving[1:])
    counted = labels.transpose(order).reshape(-1)
    return tuple(order) if (counted == np.arange(labels.size)).all() else None


def _in_order(step: LogitStep, labels: np.ndarray) -> LogitStep:
    """The step with the order of the axes that its mask is laid out by."""
    if not isinstance(step, PositionBias | Mask | Weighted):
        return step
    order = axis_order(labels)
    if order is None:
        raise MatchFailure(
            "a mask meets scores that are neither (B, H, S, T) nor an order of these axes"
        )
    return step if order == tuple(range(labels.ndim)) else replace(step, axes=order)


@dataclass(frozen=True, eq=False)
class ContextMatch:
    """What becomes of the probabilities.

    Attributes:
        nodes: Between the softmax and the product with the values.
        probabilities: The last value on the way that is (B, H, S, T) or (B*H, S, T); None where
            none is.
        product: With the values; its axes bring values and context to (B, H, ...).
        joined: The Concat that puts heads of other attentions beside these, where there is one.
            Then ``probabilities`` is its output, and ``own`` what of it was made here.
    """

    nodes: tuple[ir.Node, ...]
    probabilities: ir.Value | None
    product: ContextProduct
    joined: ir.Node | None = None
    own: ir.Value | None = None


def match_context(softmax: SoftmaxMatch, logits: LogitsMatch, reader: LayoutReader) -> ContextMatch:
    """Down to the product with the values.

    Raises:
        MatchFailure: No product reads the probabilities, or over another axis than the keys.
    """
    nodes: list[ir.Node] = []
    value, labels = softmax.probabilities, logits.labels
    probabilities = value if _plain(labels, logits.shape) else None
    while not (products := _products(value, labels, logits.shape, reader)):
        if probabilities is value and (joined := _joined(value, reader)) is not None:
            return replace(joined, nodes=(*nodes, *joined.nodes))
        if (node := _drops_at_random(value, reader)) is not None:
            raise MatchFailure(
                f"{describe(node)} drops probabilities at random: export in evaluation mode"
            )
        step = next((found for idiom in PROBABILITY_IDIOMS if (found := idiom(value))), ())
        if not step:
            raise MatchFailure(f"no product with values reads the probabilities {value.name!r}")
        nodes += step
        if step[-1].op_type in LAYOUT - PASS_THROUGH:
            labels = reader.apply_layout(step[-1], labels, 0)
        value = step[-1].outputs[0]
        probabilities = value if _plain(labels, logits.shape) else probabilities
    # Where several products read them, all but the first belong to layers that reuse them.
    return ContextMatch(tuple(nodes), probabilities, _first(products))


def _first(products: Sequence[ContextProduct]) -> ContextProduct:
    """The one that is executed first."""
    if len(products) == 1:
        return products[0]
    by_node = {product.node: product for product in products}
    graph = products[0].node.graph
    assert graph is not None
    return next((by_node[node] for node in graph if node in by_node), products[0])


def _joined(own: ir.Value, reader: LayoutReader) -> ContextMatch | None:
    """Where (B, H, S, T) of this softmax are put beside heads of other attentions."""
    shape = reader.info.shape(own)
    for node, _ in own.uses():
        axis = node.attributes.get_int("axis", 0) if node.op_type == "Concat" else 0
        if shape is None or len(shape) != 4 or axis not in (1, -3):
            continue
        value = node.outputs[0]
        read = [context_product(user, value, (0, 1, 2, 3), reader.info) for user, _ in value.uses()]
        if products := [product for product in read if product is not None]:
            return ContextMatch((node,), value, _first(products), joined=node, own=own)
    return None


def _plain(labels: np.ndarray, shape: tuple[int, int, int]) -> bool:
    """(B, H, S, T) or (B*H, S, T)."""
    in_order = bool((labels.reshape(-1) == np.arange(labels.size)).all())
    return in_order and labels.shape[-2:] == shape[1:] and labels.ndim in (2, 3, 4)


def _products(
    value: ir.Value, labels: np.ndarray, shape: tuple[int, int, int], reader: LayoutReader
) -> list[ContextProduct]:
    order = axis_order(labels)
    if order is None:
        return []
    read = [context_product(node, value, order, reader.info) for node, _ in value.uses()]
    found = [product for product in read if product is not None]
    for product in found:
        if not _runs_over(labels, product.contracted, shape, 2):
            raise MatchFailure(
                f"{describe(product.node)} sums probabilities over another axis than the keys"
            )
    return found


def _drops_at_random(value: ir.Value, reader: LayoutReader) -> ir.Node | None:
    """The Dropout in training mode that reads a value, where there is one."""
    for node, index in value.uses():
        training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
        constant = None if training is None else reader.constant_elements(training)
        if index == 0 and constant is not None and constant.any():
            return node
    return None
