"""Which rewrites apply to a block, or why not: one small function a rewrite.

Each answers with an empty text where its rewrite applies, else with one sentence a user can act on.
``REWRITES`` is what ``attnserve inspect`` reports; the passes refuse by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graph_passes import collaborate as collaborative
from graph_passes import decompose, emit
from graph_passes import skip as skipping
from graph_passes.attention import AttentionBlock
from graph_passes.constants import constant_array, constant_shape, is_constant

__all__ = ["REWRITES", "collaborate", "prune", "reasons", "reuse", "skip", "truncate",
           "why_not_source"]  # fmt: skip

SMALL = 1024
"""Elements of constants that are compared one by one; larger ones must be the same tensor."""


def collaborate(
    block: AttentionBlock, earlier: Sequence[AttentionBlock] = (), *, caches: bool = False
) -> str:
    """Shared query and key dimensions (``Collaborate``), after decomposing a fused operator.

    Args:
        caches: Cached keys may be rewritten too (--collab-cache).
    """
    reason = collaborative.why_not(block, caches=True)
    if reason == collaborative.INSIDE_OPERATOR:
        reason = decompose.why_not(block)
    if not reason and block.k.past is not None and not caches:
        return "its cached keys are an input of the graph: --collab-cache rewrites the cache too"
    return reason


def truncate(block: AttentionBlock, earlier: Sequence[AttentionBlock] = ()) -> str:
    """Queries and keys of each head cut to fewer dimensions: sharing's special case."""
    reason = collaborative.why_not(block)
    return decompose.why_not(block) if reason == collaborative.INSIDE_OPERATOR else reason


def reuse(block: AttentionBlock, earlier: Sequence[AttentionBlock] = ()) -> str:
    """Probabilities of an earlier attention in the place of its own.

    Args:
        earlier: The blocks before it, in order of execution.
    """
    reason = _returned(block) or _written(block) or emit.why_not_values(block)
    if reason:
        return reason
    if block.reused:
        return "it takes the probabilities of an earlier attention already"
    sources = [other for other in earlier if other.graph is block.graph]
    if not sources:
        return "no attention comes before it, whose probabilities it could take"
    alike = [other for other in sources if _attends_alike(block, other)]
    if not alike:
        return "no earlier attention has the same queries' and keys' lengths, masks and biases"
    if all(map(why_not_source, alike)):
        return f"no earlier attention has probabilities it could take: {why_not_source(alike[-1])}"
    return ""


def why_not_source(block: AttentionBlock) -> str:
    """Why the probabilities of a block cannot be handed on; empty where they can."""
    if block.logits is None and block.probabilities is None:
        return decompose.why_not(block)
    if block.probabilities is None:
        return "its probabilities are nowhere laid out as (batch, heads, queries, keys)"
    return ""


def prune(block: AttentionBlock, earlier: Sequence[AttentionBlock] = ()) -> str:
    """Some heads taken out; key/value heads that several query heads share go as a group."""
    return _returned(block) or _written(block) or emit.why_not(block)


def skip(block: AttentionBlock, earlier: Sequence[AttentionBlock] = ()) -> str:
    """The whole attention replaced by an affine map of its input."""
    return _returned(block) or skipping.why_not(block)


REWRITES: Mapping[str, Callable[[AttentionBlock, Sequence[AttentionBlock]], str]] = {
    "collaborate": collaborate,
    "reuse": reuse,
    "prune": prune,
    "skip": skip,
    "truncate": truncate,
}


def reasons(blocks: Sequence[AttentionBlock]) -> list[dict[str, str]]:
    """For each block, in order of execution, why a rewrite does not apply; empty where it does."""
    return [
        {name: why_not(block, blocks[:index]) for name, why_not in REWRITES.items()}
        for index, block in enumerate(blocks)
    ]


def _returned(block: AttentionBlock) -> str:
    """Whether the caller gets what the rewrite would take away or change."""
    made = [value for part in (block.k, block.v) for node in part.nodes for value in node.outputs]
    if block.logits is None:
        made += block.product.outputs[1:]
    if any(value.is_graph_output() for value in made):
        return "its keys and values are outputs of the graph (a cache), whose shapes would change"
    if block.probabilities is not None and block.probabilities.is_graph_output():
        return "its probabilities are an output of the graph"
    return ""


def _written(block: AttentionBlock) -> str:
    if block.output is None:
        return "its context does not go straight to an output projection"
    return ""


def _attends_alike(block: AttentionBlock, other: AttentionBlock) -> bool:
    """Whether two blocks have queries and keys of the same tokens' lengths, and the same masks."""
    if block.kind != other.kind or len(block.steps) != len(other.steps):
        return False
    if block.kind == "cross" and block.y is not other.y and block.k.past is None:
        return False
    seen: dict[tuple[ir.Value, ir.Value], bool] = {}
    for mine, theirs in zip(block.steps, other.steps, strict=True):
        a, b = dict(vars(mine)), dict(vars(theirs))
        values = [(a.pop(name, None), b.pop(name, None)) for name in ("value", "total")]
        if type(mine) is not type(theirs) or a != b:
            return False
        if not all(_same(x, y, seen) for x, y in values):
            return False
    return True


def _same(
    a: ir.Value | None, b: ir.Value | None, seen: dict[tuple[ir.Value, ir.Value], bool]
) -> bool:
    """Whether two values are computed alike: exporters often repeat a mask in every layer."""
    if a is b:
        return True
    if a is None or b is None:
        return False
    if (a, b) not in seen:
        seen[a, b] = _computed_alike(a, b, seen)
    return seen[a, b]


def _computed_alike(a: ir.Value, b: ir.Value, seen: dict[tuple[ir.Value, ir.Value], bool]) -> bool:
    if is_constant(a) and is_constant(b):
        shape = constant_shape(a)
        small = shape == constant_shape(b) and int(np.prod(shape)) <= SMALL
        return small and bool(np.array_equal(constant_array(a), constant_array(b)))
    first, second = a.producer(), b.producer()
    if first is None or second is None or a.index() != b.index():
        return False
    if first.op_identifier() != second.op_identifier() or len(first.inputs) != len(second.inputs):
        return False
    if {n: str(x.value) for n, x in first.attributes.items()} != {
        n: str(x.value) for n, x in second.attributes.items()
    }:
        return False
    return all(_same(x, y, seen) for x, y in zip(first.inputs, second.inputs, strict=True))
