"""Caches of a decoder's keys and values: inputs and outputs that a rewrite may change."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.blocks import AttentionBlock, Projection
from graph_passes.errors import Refusal

__all__ = ["Cache", "cache_of", "cache_refusal", "has_separate_heads"]

MOST_READERS = 64
"""Nodes between cached keys and their scores; more are not followed."""


@dataclass(frozen=True, eq=False)
class Cache:
    """Where keys or values are cached.

    Attributes:
        past: The input of the graph, and the copies that exporters make of it (a Concat of one).
        join: The Concat of the past and what is new.
    """

    past: tuple[ir.Value, ...]
    join: ir.Node

    @property
    def present(self) -> ir.Value:
        return self.join.outputs[0]


def cache_of(part: Projection) -> Cache | None:
    """The cache of a projection; None where it has none, or no Concat joins past and new heads."""
    past = [] if part.past is None else [part.past.value]
    for node in part.nodes if past else ():
        if node.op_type == "Concat" and node.inputs[0] is past[-1]:
            if len(node.inputs) == 2:
                return Cache(tuple(past), node)
            past += node.outputs if len(node.inputs) == 1 else ()
    return None


def cache_refusal(block: AttentionBlock) -> Refusal | None:
    """Why the cache of a block's keys cannot be rewritten; None if it can."""
    past, cache = block.k.past, cache_of(block.k)
    assert past is not None
    if block.num_heads == 1:
        return Refusal("single_head", "its cache holds a single head: there is nothing to share")
    if not has_separate_heads(block.k):
        return Refusal(
            "cache_layout", "its past keys are not laid out as (batch, heads, tokens, head size)"
        )
    if past.value.graph is not block.graph:
        return Refusal("cache_scope", "its past keys come from outside the body that it lies in")
    if cache is None or not cache.present.is_graph_output():
        return Refusal(
            "cache_present",
            "its present keys are not returned as the past and the new ones, joined",
        )
    if past.value.shape is None or isinstance(past.value.shape[2], int):
        return Refusal(
            "cache_fixed",
            "its cache has a fixed length, and only an empty one could prove the rewrite",
        )
    if not _ends_in_scores(block, cache):
        return Refusal("cache_shared", "its cached keys are read by more than its own scores")
    return None


def has_separate_heads(part: Projection) -> bool:
    """Whether a cache is (B, H, P, K), every head its own."""
    if part.past is None or part.past.positions is not None or len(part.past.axes) != 4:
        return False
    batch, heads, tokens, elements = part.past.axes
    wanted = np.indices(part.columns.shape)
    in_order = np.array_equal(heads, wanted[0]) and np.array_equal(elements, wanted[1])
    return isinstance(batch, str) and isinstance(tokens, str) and in_order


def _ends_in_scores(block: AttentionBlock, cache: Cache) -> bool:
    """Whether nothing but the scores is made of cached keys, besides of their batch and length."""
    held = {*cache.past, cache.present}
    end = block.context if block.logits is None else block.logits
    pending, seen = list(held), set[ir.Node]()
    while pending:
        value = pending.pop()
        if value.is_graph_output() and value is not cache.present:
            return False
        for node in {node for node, _ in value.uses()} - seen:
            seen.add(node)
            if len(seen) > MOST_READERS:
                return False
            if value in held and node.op_type == "Shape" and _takes_no_width(node):
                continue
            pending += [made for made in node.outputs if made is not end]
    return True


def _takes_no_width(shape: ir.Node) -> bool:
    """Whether only batch and length are taken of a shape (B, H, T, K)."""
    end = shape.attributes.get_int("end", 4)
    taken = list(range(4))[shape.attributes.get_int("start", 0) : end]
    if set(taken) <= {0, 2}:
        return True
    readers = [node for node, _ in shape.outputs[0].uses()]
    return all(set(_picked(node, taken)) <= {0, 2} for node in readers)


def _picked(node: ir.Node, axes: list[int]) -> list[int]:
    """Which of these a Gather or a Slice picks; all of them where that is not plain."""
    where = node.inputs[1:]
    if not where or not all(is_constant(value) for value in where):
        return axes
    numbers = [constant_array(value).reshape(-1).tolist() for value in where if value is not None]
    if node.op_type == "Gather":
        return [axes[index % len(axes)] for index in numbers[0]]
    if node.op_type == "Slice" and len(numbers) in (2, 3):
        return axes[numbers[0][0] : numbers[1][0]]
    return axes
