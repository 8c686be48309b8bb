"""Match the scores above a softmax and the context below it.

Each element of the scores gets a label in (B, H, S, T) order, and layout nodes are executed on the
labels. The result identifies the axes, so heads may be last or merged with the batch, and scores
may be keys by queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.operator_sets import COPIES, RESHAPES
from graph_passes.blocks import LogitStep, Mask, PositionBias, Scaled, Weighted
from graph_passes.matching import reaches
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.idioms import LOGIT_IDIOMS, PROBABILITY_IDIOMS, SoftmaxMatch
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.products import (
    ContextProduct,
    ScoreProduct,
    context_product,
    score_product,
)

__all__ = ["ContextMatch", "LogitsMatch", "match_context", "match_logits"]


MOVES = RESHAPES | {"Transpose"}
"""Operators that change the layout of scores and probabilities."""


@dataclass(frozen=True, eq=False)
class LogitsMatch:
    """The matched input of a softmax.

    Attributes:
        product: The scores, queries first.
        scale: The product of all scalar factors up to ``scaled``.
        scaled: The last value before the first step.
        order: The permutation of ``scaled`` to (B, H, S, T) or (B*H, S, T); None if there is none.
        steps: The steps after ``scaled``.
        labels: The labels of the softmax's input.
        shape: (B*H, S, T).
    """

    product: ScoreProduct
    scale: float
    scaled: ir.Value
    order: tuple[int, ...] | None
    steps: tuple[LogitStep, ...]
    labels: np.ndarray
    shape: tuple[int, int, int]


class _Link(NamedTuple):
    """A node between scores and softmax: its step, its factor, or None for a layout change."""

    node: ir.Node
    step: LogitStep | float | None


def match_logits(softmax: SoftmaxMatch, reader: LayoutReader) -> LogitsMatch | None:
    """Match the input of a softmax; None if it contains no product of activations.

    Raises:
        MatchFailure: The scores come from two products, or the axis does not count keys.
    """
    path = _find_scores(softmax.logits, reader, reaches.SCORES, {})
    if path is None:
        return None
    product, chain = path
    sizes = reader.shape(product.node.outputs[0])
    shape = (math.prod(sizes[:-2]), sizes[-2], sizes[-1])
    stages = [np.arange(math.prod(sizes)).reshape(sizes)]
    for link in chain:
        labels = stages[-1]
        if link.node.op_type in MOVES | COPIES:
            labels = reader.apply_layout(link.node, labels, link.node.outputs[0].index() or 0)
        elif reader.shape(link.node.outputs[0]) != labels.shape:
            raise MatchFailure(f"{describe(link.node)} broadcasts the scores along another axis")
        stages.append(labels)
    axis = softmax.axis
    by_key = _runs_over(stages[-1], axis, shape, 2)
    if not by_key and _runs_over(stages[-1], axis, shape, 1):  # the scores are keys by queries
        product = replace(
            product,
            query=product.key,
            key=product.query,
            query_axes=product.key_axes,
            key_axes=product.query_axes,
        )
        heads, s, t = shape
        # The label of (h, i, j) in a shape (heads, s, t) becomes that of (h, j, i).
        stages = [(stage // t % s) + s * (stage % t + t * (stage // (s * t))) for stage in stages]
        shape = (heads, t, s)
    elif not by_key:
        name = softmax.probabilities.name
        raise MatchFailure(f"the softmax {name!r} is not over the keys of (B, H, S, T) logits")
    scale = product.scale
    scaled_scores = product.node.outputs[0]
    order = axis_order(stages[0])
    steps: list[LogitStep] = []
    for link, labels in zip(chain, stages[1:], strict=True):
        if isinstance(link.step, float | int):
            if steps:
                steps.append(Scaled(link.step))
            else:
                scale *= link.step
        elif link.step is not None:
            steps.append(_step_in_order(link.step, labels))
        if not steps:
            scaled_scores = link.node.outputs[0]
            order = axis_order(labels)
    if softmax.bias is not None:
        steps.append(_step_in_order(PositionBias(softmax.bias), stages[-1]))
    return LogitsMatch(product, scale, scaled_scores, order, tuple(steps), stages[-1], shape)


_Path = tuple[ScoreProduct, tuple[_Link, ...]]
"""The product of queries and keys, and the nodes between it and a value, in order."""


def _find_scores(
    value: ir.Value, reader: LayoutReader, reach: int, tried: dict[ir.Value, _Path | None]
) -> _Path | None:
    """Find the product of two activations above a value, and the nodes between; memoized."""
    if value not in tried:
        tried[value] = _search_scores(value, reader, reach, tried)
    return tried[value]


def _search_scores(
    value: ir.Value, reader: LayoutReader, reach: int, tried: dict[ir.Value, _Path | None]
) -> _Path | None:
    """Find the product of two activations above a value, from the value upwards."""
    node = value.producer()
    if node is None or reach == 0:
        return None
    if (product := score_product(node, reader.info)) is not None:
        return product, ()
    for idiom in LOGIT_IDIOMS:
        logit_match = idiom(node, reader.info)
        if logit_match is None:
            continue
        paths = [
            (candidate, inner)
            for candidate in logit_match.candidates
            if (inner := _find_scores(candidate, reader, reach - 1, tried)) is not None
        ]
        if len(paths) > 1:
            raise MatchFailure(
                f"{describe(node)} adds two products of queries and keys: expected one"
            )
        if not paths:
            return None
        candidate, (product, chain) = paths[0]
        return product, (*chain, _Link(node, logit_match.step(candidate)))
    return None


def _runs_over(labels: np.ndarray, axis: int, shape: tuple[int, int, int], which: int) -> bool:
    """Whether an axis of the labels counts index ``which`` of (B*H, S, T) and no other."""
    order = axis_order(labels)
    if order is not None:  # the strides suffice
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
    """The permutation of the axes that sorts the labels; None if there is none.

    Axes of length 1 keep their place if no other axis moves, else they follow the first axis.
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


def _step_in_order(step: LogitStep, labels: np.ndarray) -> LogitStep:
    """Add to a step the permutation of the logits to which its mask is broadcast."""
    if not isinstance(step, PositionBias | Mask | Weighted):
        return step
    order = axis_order(labels)
    if order is None:
        raise MatchFailure(
            "the layout of the scores at a mask is not a permutation of (B, H, S, T)"
        )
    return step if order == tuple(range(labels.ndim)) else replace(step, axes=order)


@dataclass(frozen=True, eq=False)
class ContextMatch:
    """The matched nodes between softmax and context.

    Attributes:
        nodes: The nodes between the softmax and the product with the values.
        probabilities: The last value in between that is (B, H, S, T) or (B*H, S, T), if any.
        product: The product with the values.
        joined: The Concat with reused heads of other blocks, if any. ``probabilities`` is then its
            output.
        own: The probabilities of this softmax, if there are reused heads.
    """

    nodes: tuple[ir.Node, ...]
    probabilities: ir.Value | None
    product: ContextProduct
    joined: ir.Node | None = None
    own: ir.Value | None = None


def match_context(softmax: SoftmaxMatch, logits: LogitsMatch, reader: LayoutReader) -> ContextMatch:
    """Match the product of the probabilities with the values.

    Raises:
        MatchFailure: No product is found, or it does not contract the keys.
    """
    nodes: list[ir.Node] = []
    value = softmax.probabilities
    labels = logits.labels
    probabilities = value if _plain(labels, logits.shape) else None
    while True:
        contexts = [
            ContextMatch((), probabilities, product)
            for product in _products(value, labels, logits.shape, reader)
        ]
        if probabilities is value and (joined_context := _joined(value, reader)) is not None:
            contexts.append(joined_context)
        if contexts:
            # If several products read the probabilities, the later ones belong to layers that
            # reuse them.
            first = _first(contexts)
            return replace(first, nodes=(*nodes, *first.nodes))
        if (node := _drops_at_random(value, reader)) is not None:
            raise MatchFailure(
                f"{describe(node)} is a dropout in training mode: export in evaluation mode"
            )
        step = next((chain for idiom in PROBABILITY_IDIOMS if (chain := idiom(value))), ())
        if not step:
            raise MatchFailure(f"no product with values reads the probabilities {value.name!r}")
        nodes += step
        if step[-1].op_type in MOVES:
            labels = reader.apply_layout(step[-1], labels, 0)
        value = step[-1].outputs[0]
        probabilities = value if _plain(labels, logits.shape) else probabilities


def _first(contexts: Sequence[ContextMatch]) -> ContextMatch:
    """The match whose product is executed first."""
    if len(contexts) == 1:
        return contexts[0]
    by_node = {context.product.node: context for context in contexts}
    graph = contexts[0].product.node.graph
    assert graph is not None
    return next((by_node[node] for node in graph if node in by_node), contexts[0])


def _joined(probabilities: ir.Value, reader: LayoutReader) -> ContextMatch | None:
    """Match a Concat of these probabilities (B, H, S, T) with heads of other blocks."""
    shape = reader.info.shape(probabilities)
    for node, _ in probabilities.uses():
        axis = node.attributes.get_int("axis", 0) if node.op_type == "Concat" else 0
        if shape is None or len(shape) != 4 or axis not in (1, -3):
            continue
        value = node.outputs[0]
        read = [context_product(user, value, (0, 1, 2, 3), reader.info) for user, _ in value.uses()]
        if products := [product for product in read if product is not None]:
            contexts = [
                ContextMatch((node,), value, product, joined=node, own=probabilities)
                for product in products
            ]
            return _first(contexts)
    return None


def _plain(labels: np.ndarray, shape: tuple[int, int, int]) -> bool:
    """Whether the labels are in (B, H, S, T) or (B*H, S, T) order."""
    in_order = bool((labels.reshape(-1) == np.arange(labels.size)).all())
    return in_order and labels.shape[-2:] == shape[1:] and labels.ndim in (2, 3, 4)


def _products(
    value: ir.Value, labels: np.ndarray, shape: tuple[int, int, int], reader: LayoutReader
) -> list[ContextProduct]:
    """The products with values that read these probabilities.

    Raises:
        MatchFailure: A product sums over another axis than the keys.
    """
    order = axis_order(labels)
    if order is None:
        return []
    read = [context_product(node, value, order, reader.info) for node, _ in value.uses()]
    products = [product for product in read if product is not None]
    for product in products:
        if not _runs_over(labels, product.contracted, shape, 2):
            raise MatchFailure(
                f"{describe(product.node)} sums probabilities over another axis than the keys"
            )
    return products


def _drops_at_random(value: ir.Value, reader: LayoutReader) -> ir.Node | None:
    """The Dropout in training mode that reads a value, if any."""
    for node, index in value.uses():
        training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
        constant = reader.info.elements(training)
        if index == 0 and constant is not None and constant.any():
            return node
    return None
