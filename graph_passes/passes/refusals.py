"""Which rewrites apply to a block, or why not: one small function a rewrite.

Each answers with an empty text where its rewrite applies, else with one sentence a user can act on.
``REWRITES`` is what ``attnserve inspect`` reports; the passes refuse by the same functions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_type,
    is_constant,
)
from graph_passes.blocks import AttentionBlock
from graph_passes.emit import attention as emit
from graph_passes.passes import collaborate as collaborative
from graph_passes.passes import decompose_attention as decompose
from graph_passes.passes import skip_attention as skipping

__all__ = ["REWRITES", "collaborate", "prune", "reasons", "reuse", "skip", "truncate",
           "why_not_source"]  # fmt: skip

SMALL = 1024
"""Elements of constants that are compared one by one; larger ones must be the same tensor."""

FOUND_IN_DATA = frozenset({"NonZero", "Unique", "Compress"})
"""What they make is as long as the tokens have it, however alike two of them are."""

REACH = 60
"""Nodes above a mask that are compared; the lengths of a mask are asked of a layer's own keys."""


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
    alike = _Alike(shaped={(block.x, other.x): True, (block.y, other.y): True})
    for mine, theirs in zip(block.steps, other.steps, strict=True):
        a, b = dict(vars(mine)), dict(vars(theirs))
        values = [(a.pop(name, None), b.pop(name, None)) for name in ("value", "total")]
        if type(mine) is not type(theirs) or a != b:
            return False
        if not all(alike.same(x, y) for x, y in values):
            return False
    return True


Pairs = dict[tuple[ir.Value, ir.Value], bool]


@dataclass(frozen=True, eq=False)
class _Alike:
    """Which values of two layers hold the same, and which are as long as each other.

    Exporters often repeat a mask in every layer, and ask its own queries or keys for the lengths.

    Attributes:
        known: Pairs that hold the same, or do not, as far as was asked.
        shaped: Pairs of the same shape; to begin with, the tokens of both layers.
    """

    known: Pairs = field(default_factory=dict[tuple[ir.Value, ir.Value], bool])
    shaped: Pairs = field(default_factory=dict[tuple[ir.Value, ir.Value], bool])

    def same(self, a: ir.Value | None, b: ir.Value | None, reach: int = REACH) -> bool:
        """Whether two values are computed alike."""
        if a is b or a is None or b is None:
            return a is b
        if (a, b) not in self.known:
            compare = self.as_long if _is_shape(a) else self.same
            self.known[a, b] = (
                _equal(a, b)
                if is_constant(a) or is_constant(b)
                else reach > 0
                and _made_alike(a, b)
                and all(compare(x, y, reach - 1) for x, y in _inputs(a, b))
            )
        return self.known[a, b]

    def as_long(self, a: ir.Value | None, b: ir.Value | None, reach: int = REACH) -> bool:
        """Whether two values have one shape: made alike, but for weights and tokens."""
        if a is b or a is None or b is None:
            return a is b
        if (a, b) not in self.shaped:
            self.shaped[a, b] = (
                _equal(a, b) or _are_weights(a, b)
                if is_constant(a) or is_constant(b)
                else reach > 0
                and _made_alike(a, b)
                and all(self.as_long(x, y, reach - 1) for x, y in _inputs(a, b))
            )
        return self.shaped[a, b]


def _is_shape(value: ir.Value) -> bool:
    node = value.producer()
    return node is not None and node.op_type == "Shape"


def _equal(a: ir.Value, b: ir.Value) -> bool:
    """Whether two constants hold the same."""
    if not (is_constant(a) and is_constant(b)):
        return False
    shape = constant_shape(a)
    small = shape == constant_shape(b) and int(np.prod(shape)) <= SMALL
    return small and bool(np.array_equal(constant_array(a), constant_array(b)))


def _are_weights(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are weights of one shape, which may differ from layer to layer."""
    both = is_constant(a) and is_constant(b) and constant_shape(a) == constant_shape(b)
    return both and constant_type(a).is_floating_point() and constant_type(a) == constant_type(b)


def _made_alike(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are the same output of the same operator with the same attributes."""
    first, second = a.producer(), b.producer()
    if first is None or second is None or a.index() != b.index():
        return False
    if first.op_type in FOUND_IN_DATA:
        return False
    if first.op_identifier() != second.op_identifier() or len(first.inputs) != len(second.inputs):
        return False
    mine, theirs = (
        {n: str(x.value) for n, x in node.attributes.items()} for node in (first, second)
    )
    return mine == theirs


def _inputs(a: ir.Value, b: ir.Value) -> list[tuple[ir.Value | None, ir.Value | None]]:
    first, second = a.producer(), b.producer()
    assert first is not None and second is not None
    return list(zip(first.inputs, second.inputs, strict=True))
