"""Match attention blocks that reuse the probabilities of another block (reuse transformer).

A product with values may read all heads of another layer's softmax, some heads (Gather), or own and
reused heads (Concat over heads). ``head_sources`` traces such a value to the softmaxes;
``products_of`` finds all products that read a softmax.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Reused
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.products import ContextProduct, context_product

__all__ = ["HeadSources", "head_sources", "products_of", "reused_heads"]

HEADS = 1
"""The axis of (B, H, S, T) that counts heads."""

REACH = 8
"""Maximum number of nodes between a softmax and a product that reuses it."""

IN_ORDER = (0, 1, 2, 3)


@dataclass(frozen=True, eq=False)
class HeadSources:
    """The source of each head of a value (B, H, S, T): head ``heads[h]`` of ``values[h]``."""

    values: tuple[ir.Value, ...]
    heads: np.ndarray

    def take(self, index: np.ndarray) -> HeadSources:
        return HeadSources(tuple(self.values[i] for i in index), self.heads[index])


def head_sources(
    value: ir.Value, known: Collection[ir.Value], info: ShapeInfo, reach: int = REACH
) -> HeadSources | None:
    """Trace the heads of a value to known probabilities; None if it contains anything else.

    Args:
        reach: Maximum number of nodes in between.
    """
    shape, node = info.shape(value), value.producer()
    if shape is None or len(shape) != 4:
        return None
    if value in known or (node is not None and _splits_heads(node, known, info)):
        return HeadSources((value,) * shape[HEADS], np.arange(shape[HEADS]))
    if node is None or reach == 0 or node.domain:
        return None
    first = node.inputs[0] if node.inputs else None
    if first is None:
        return None
    match node.op_type:
        case "Identity":
            return head_sources(first, known, info, reach - 1)
        case "Gather":
            inner, index = head_sources(first, known, info, reach - 1), _index(node)
            return None if inner is None or index is None else inner.take(index)
        case "Concat" if _is_of_heads(node):
            parts = [head_sources(v, known, info, reach - 1) for v in node.inputs if v is not None]
            whole = [part for part in parts if part is not None]
            if len(whole) < len(parts):
                return None
            values = tuple(value for part in whole for value in part.values)
            return HeadSources(values, np.concatenate([part.heads for part in whole]))
        case _:
            return None


def _splits_heads(node: ir.Node, known: Collection[ir.Value], info: ShapeInfo) -> bool:
    """Reshape of known (B*H, S, T) to (B, H, S, T)."""
    if node.op_type != "Reshape" or node.inputs[0] not in known:
        return False
    before, after = info.shape(node.inputs[0]), info.shape(node.outputs[0])
    return before is not None and after is not None and before[-2:] == after[-2:]


def _index(node: ir.Node) -> np.ndarray | None:
    """The constant indices of a Gather over heads, else None."""
    index = node.inputs[1]
    if not _is_of_heads(node) or not is_constant(index):
        return None
    array = constant_array(index)
    return array.astype(np.int64) if array.ndim == 1 and (array >= 0).all() else None


def _is_of_heads(node: ir.Node) -> bool:
    default = 0 if node.op_type == "Gather" else None
    return node.attributes.get_int("axis", default) in (HEADS, HEADS - 4)


def reused_heads(sources: HeadSources, own: ir.Value | None, node: ir.Node) -> tuple[Reused, ...]:
    """The reused heads: those from values other than ``own``.

    Raises:
        MatchFailure: The heads of ``own`` are incomplete or out of order.
    """
    mine = np.array([value is own for value in sources.values], bool)
    kept = sources.heads[mine]
    if own is not None and not np.array_equal(kept, np.arange(len(kept))):
        raise MatchFailure(f"{describe(node)} reorders the heads of a softmax")
    others = dict.fromkeys(value for value in sources.values if value is not own)
    return tuple(_taken(sources, value) for value in others)


def _taken(sources: HeadSources, value: ir.Value) -> Reused:
    heads = np.array([h for h, other in enumerate(sources.values) if other is value])
    return Reused(value, heads, sources.heads[heads])


def products_of(
    values: Sequence[ir.Value], info: ShapeInfo
) -> Iterator[tuple[ContextProduct, ir.Value]]:
    """Yield each product with values that reads these probabilities, and its operand."""
    pending, seen = [(value, REACH) for value in values], set(values)
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
            laid_out = node.op_type in ("Identity", "Reshape", "Gather") and index == 0
            if not (laid_out or (node.op_type == "Concat" and _is_of_heads(node))) or reach == 0:
                continue
            if node.outputs[0] not in seen:
                seen.add(node.outputs[0])
                pending.append((node.outputs[0], reach - 1))
