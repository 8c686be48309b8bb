"""Key/value caches of decoders, which are inputs and outputs of the graph."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.blocks import AttentionBlock, Projection
from graph_passes.errors import Refusal

__all__ = ["Cache", "cache_of", "cache_refusal", "has_separate_heads"]


@dataclass(frozen=True, eq=False)
class Cache:
    """The cache of keys or values.

    Attributes:
        past: The graph input of the cache, and its copies (a Concat of one input).
        join: The Concat of past and new heads.
    """

    past: tuple[ir.Value, ...]
    join: ir.Node

    @property
    def present(self) -> ir.Value:
        """Past and new heads."""
        return self.join.outputs[0]


def cache_of(part: Projection) -> Cache | None:
    """The cache of a projection; None if no Concat joins past and new heads."""
    past = [] if part.past is None else [part.past.value]
    for node in part.nodes if past else ():
        if node.op_type == "Concat" and node.inputs[0] is past[-1]:
            if len(node.inputs) == 2:
                return Cache(tuple(past), node)
            past += node.outputs if len(node.inputs) == 1 else ()
    return None


def cache_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the cache of a block's keys cannot be rewritten; None if it can or has none."""
    past = block.k.past
    cache = cache_of(block.k)
    if past is None:
        return None
    if block.num_heads == 1:
        return Refusal("single_head", "its cache has a single head: there is nothing to share")
    if not has_separate_heads(block.k):
        return Refusal(
            "cache_layout", "its past keys are not laid out as (batch, heads, tokens, head size)"
        )
    if past.value.graph is not block.graph:
        return Refusal(
            "cache_scope", "its past keys are defined outside the body of its If or Loop"
        )
    if cache is None or not cache.present.is_graph_output():
        return Refusal(
            "cache_present",
            "its present keys are not an output: expected the concatenation of past and new keys",
        )
    if past.value.shape is None or isinstance(past.value.shape[2], int):
        return Refusal(
            "cache_fixed",
            "its cache has a fixed length, which cannot be verified with an empty cache",
        )
    if not _ends_in_scores(block, cache):
        return Refusal("cache_shared", "its cached keys have other readers than its scores")
    return None


def has_separate_heads(part: Projection) -> bool:
    """Whether a cache is (B, H, P, K) with one entry per head."""
    if part.past is None or part.past.positions is not None or len(part.past.axes) != 4:
        return False
    batch, heads, tokens, elements = part.past.axes
    wanted = np.indices(part.columns.shape)
    in_order = np.array_equal(heads, wanted[0]) and np.array_equal(elements, wanted[1])
    return isinstance(batch, str) and isinstance(tokens, str) and in_order


def _ends_in_scores(block: AttentionBlock, cache: Cache) -> bool:
    """Whether only the scores read the cached keys; other nodes may read their batch and length."""
    cached = {*cache.past, cache.present}
    end = block.context if block.softmax is None else block.softmax.logits
    pending = list(cached)
    seen: set[ir.Node] = set()
    while pending:
        value = pending.pop()
        if value.is_graph_output() and value is not cache.present:
            return False
        for node in {node for node, _ in value.uses()} - seen:
            seen.add(node)
            if len(seen) > 64:  # too far from the scores
                return False
            if value in cached and node.op_type == "Shape" and _takes_no_width(node):
                continue
            pending += [output for output in node.outputs if output is not end]
    return True


def _takes_no_width(shape: ir.Node) -> bool:
    """Whether readers of a shape (B, H, T, K) use batch and length only."""
    end = shape.attributes.get_int("end", 4)
    taken = list(range(4))[shape.attributes.get_int("start", 0) : end]
    if set(taken) <= {0, 2}:
        return True
    readers = [node for node, _ in shape.outputs[0].uses()]
    return all(set(_picked(node, taken)) <= {0, 2} for node in readers)


def _picked(node: ir.Node, axes: list[int]) -> list[int]:
    """The axes that a Gather or Slice selects; all if the indices are not constant."""
    where = node.inputs[1:]
    if not where or not all(is_constant(value) for value in where):
        return axes
    numbers = [constant_array(value).reshape(-1).tolist() for value in where if value is not None]
    if node.op_type == "Gather":
        return [axes[index % len(axes)] for index in numbers[0]]
    if node.op_type == "Slice" and len(numbers) in (2, 3):
        return axes[numbers[0][0] : numbers[1][0]]
    return axes
