"""Match attention blocks that reuse the probabilities of another block (reuse transformer).

A product with values may read all heads of another layer's softmax, some heads (Gather, Slice,
Split), or own and reused heads (Concat over heads). ``head_sources`` traces such a value to the
softmaxes; ``products_of`` finds all products that read a softmax. A block may also have a product
for its own heads and one for each source, whose contexts are concatenated: ``joining_node`` finds
the Concat, ``whole_values`` the values of all heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.operator_sets import SELECTIONS
from graph_passes.analysis.required import producer_of
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Reused
from graph_passes.matching import reaches
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.output_projection import only_consumer
from graph_passes.matching.products import ContextProduct, context_product

__all__ = [
    "IN_ORDER",
    "HeadSources",
    "head_sources",
    "joining_node",
    "products_of",
    "reused_heads",
    "whole_values",
]

HEADS = 1
"""The axis of (B, H, S, T) that counts heads."""


IN_ORDER = (0, 1, 2, 3)

CASTS = ("Identity", "Cast")
"""Operators between the heads of a value and a product with them."""


@dataclass(frozen=True, eq=False)
class HeadSources:
    """The source of each head of a value (B, H, S, T): head ``heads[h]`` of ``values[h]``."""

    values: tuple[ir.Value, ...]
    heads: np.ndarray

    def take(self, index: np.ndarray) -> HeadSources:
        """The sources of selected heads."""
        return HeadSources(tuple(self.values[i] for i in index), self.heads[index])


def head_sources(
    value: ir.Value,
    probabilities: Collection[ir.Value],
    info: ShapeInfo,
    reach: int = reaches.REUSE,
) -> HeadSources | None:
    """Trace the heads of a value to known probabilities; None if it contains anything else.

    Args:
        reach: Maximum number of nodes in between.
    """
    shape = info.shape(value)
    node = value.producer()
    if shape is None or len(shape) != 4:
        return None
    if value in probabilities or (node is not None and _splits_heads(node, probabilities, info)):
        return HeadSources((value,) * shape[HEADS], np.arange(shape[HEADS]))
    if node is None or reach == 0 or node.domain:
        return None
    first = node.inputs[0] if node.inputs else None
    if first is None:
        return None
    match node.op_type:
        case "Identity" | "Cast":
            return head_sources(first, probabilities, info, reach - 1)
        case "Gather" | "Slice" | "Split":
            inner = head_sources(first, probabilities, info, reach - 1)
            index = _selected(value, info)
            return None if inner is None or index is None else inner.take(index)
        case "Concat" if _is_of_heads(node):
            traces = [
                head_sources(v, probabilities, info, reach - 1)
                for v in node.inputs
                if v is not None
            ]
            sources = [part for part in traces if part is not None]
            if len(sources) < len(traces):
                return None
            values = tuple(value for part in sources for value in part.values)
            return HeadSources(values, np.concatenate([part.heads for part in sources]))
        case _:
            return None


def _splits_heads(node: ir.Node, probabilities: Collection[ir.Value], info: ShapeInfo) -> bool:
    """Whether a node is a Reshape of known probabilities (B*H, S, T) to (B, H, S, T)."""
    if node.op_type != "Reshape" or node.inputs[0] not in probabilities:
        return False
    before, after = info.shape(node.inputs[0]), info.shape(node.outputs[0])
    return before is not None and after is not None and before[-2:] == after[-2:]


def _selected(value: ir.Value, info: ShapeInfo) -> np.ndarray | None:
    """The heads that a Gather, Slice or Split over heads selects, if they are constant."""
    node = producer_of(value)
    shape = info.shape(node.inputs[0])
    if shape is None or len(shape) != 4:
        return None
    heads = np.arange(shape[HEADS])
    if node.op_type == "Gather":
        return _gathered(node, heads)
    if node.op_type == "Slice":
        return _sliced(node, heads, info)
    sizes = [info.shape(output) for output in node.outputs]
    if not _is_of_heads(node) or None in sizes:
        return None
    ends = np.cumsum([0, *(size[HEADS] for size in sizes if size is not None)])
    place = value.index() or 0
    return heads[ends[place] : ends[place + 1]]


def _gathered(node: ir.Node, heads: np.ndarray) -> np.ndarray | None:
    """The heads that a Gather over heads selects, if they are constant."""
    index = node.inputs[1]
    if not _is_of_heads(node) or not is_constant(index):
        return None
    array = constant_array(index)
    in_range = array.ndim == 1 and ((array >= 0) & (array < len(heads))).all()
    return array.astype(np.int64) if in_range else None


def _sliced(node: ir.Node, heads: np.ndarray, info: ShapeInfo) -> np.ndarray | None:
    """The heads of a Slice of this axis alone; its bounds are inputs from opset 10 on."""
    bounds = [info.elements(value) for value in node.inputs[1:]]
    numbers = [int(a.reshape(())) for a in bounds if a is not None and a.size == 1]
    if len(numbers) < max(3, len(bounds)):
        return None
    start, end, axis, step = (*numbers, 1)[:4]
    return heads[start:end:step] if axis in (HEADS, HEADS - 4) and step > 0 else None


def _is_of_heads(node: ir.Node) -> bool:
    """Whether the axis of a Gather, Split or Concat counts heads."""
    default = 0 if node.op_type in ("Gather", "Split") else None
    return node.attributes.get_int("axis", default) in (HEADS, HEADS - 4)


def reused_heads(
    sources: HeadSources, own_probabilities: ir.Value | None, node: ir.Node
) -> tuple[Reused, ...]:
    """The reused heads, which come from values other than ``own_probabilities``.

    Raises:
        MatchFailure: The own heads are incomplete or out of order.
    """
    is_own = np.array([value is own_probabilities for value in sources.values], bool)
    own_heads = sources.heads[is_own]
    if own_probabilities is not None and not np.array_equal(own_heads, np.arange(len(own_heads))):
        raise MatchFailure(f"{describe(node)} reorders the heads of a softmax")
    others = dict.fromkeys(value for value in sources.values if value is not own_probabilities)
    return tuple(_heads_from(sources, value) for value in others)


def _heads_from(sources: HeadSources, value: ir.Value) -> Reused:
    heads = np.array([h for h, other in enumerate(sources.values) if other is value])
    return Reused(value, heads, sources.heads[heads])


def products_of(
    values: Sequence[ir.Value], info: ShapeInfo
) -> Iterator[tuple[ContextProduct, ir.Value]]:
    """Yield each product with values that reads these probabilities, and its operand."""
    pending = [(value, reaches.REUSE) for value in values]
    seen = set(values)
    while pending:
        value, reach = pending.pop()
        shape = info.shape(value)
        for node, index in value.uses():
            product = None
            if shape is not None and len(shape) == 4:
                product = context_product(node, value, IN_ORDER, info)
            if product is not None:
                yield product, value
                continue
            laid_out = node.op_type in ("Identity", "Reshape", *SELECTIONS) and index == 0
            if not (laid_out or (node.op_type == "Concat" and _is_of_heads(node))) or reach == 0:
                continue
            new = [output for output in node.outputs if output not in seen]
            seen.update(new)
            pending += [(output, reach - 1) for output in new]


def joining_node(context: ir.Value, info: ShapeInfo) -> tuple[ir.Node, ir.Value] | None:
    """The Concat over heads that alone reads a context (B, H, S, V), and its input."""
    shape = info.shape(context)
    node = only_consumer(context) if shape is not None and len(shape) == 4 else None
    while node is not None and node.op_type in CASTS:
        context = node.outputs[0]
        node = only_consumer(context)
    if node is None or node.op_type != "Concat" or not _is_of_heads(node):
        return None
    return node, context


def whole_values(parts: Sequence[ir.Value], info: ShapeInfo) -> ir.Value | None:
    """The value (B, H, T, V) that ``parts`` divide by heads, in order; None if there is none."""
    node = parts[0].producer()
    for _ in range(reaches.REUSE):
        is_part = node is not None and node.op_type in (*CASTS, *SELECTIONS)
        whole = node.inputs[0] if node is not None and is_part else None
        shape = info.shape(whole)
        if whole is None or shape is None or len(shape) != 4:
            return None
        sources = [head_sources(part, (whole,), info) for part in parts]
        heads = [head for source in sources if source is not None for head in source.heads]
        if None not in sources and heads == [*range(shape[HEADS])]:
            return whole
        node = whole.producer()
    return None
