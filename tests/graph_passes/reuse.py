"""Edges of reuse between three layers: by layer, the head whose probabilities each head uses."""

from __future__ import annotations

import onnx_ir as ir

from graph_passes.passes.reuse_attention import Edges, ReuseAttention
from tests.graph_passes.graphs import H

EXACT = 1e-5
FIRST, SECOND, THIRD = (f"attention_{index}" for index in range(3))


def all_of(name: str, source: str, heads: int = H) -> dict[str, dict[int, tuple[str, int]]]:
    return {name: {head: (source, head) for head in range(heads)}}


EDGES: dict[str, dict[str, dict[int, tuple[str, int]]]] = {
    "all of the second from the first": all_of(SECOND, FIRST),
    "all, in another order": {SECOND: {0: (FIRST, 2), 1: (FIRST, 0), 2: (FIRST, 1)}},
    "all from one head": {SECOND: dict.fromkeys(range(H), (FIRST, 1))},
    "one head": {SECOND: {1: (FIRST, 1)}},
    "one head from another": {SECOND: {2: (FIRST, 0)}},
    "two from one": {SECOND: {0: (FIRST, 1), 2: (FIRST, 1)}},
    "the last from the first": all_of(THIRD, FIRST),
    "second and third from the first": all_of(SECOND, FIRST) | all_of(THIRD, FIRST),
    "from two layers": {THIRD: {0: (FIRST, 0), 1: (SECOND, 1), 2: (SECOND, 0)}},
    "from two layers, and one head stays": {THIRD: {0: (SECOND, 2), 2: (FIRST, 0)}},
    "a chain over heads that stay": {
        SECOND: {0: (FIRST, 0)}, THIRD: {0: (SECOND, 1), 1: (SECOND, 2), 2: (FIRST, 0)},
    },
    "a chain in which one head stays": {
        SECOND: {0: (FIRST, 0), 1: (FIRST, 1)}, THIRD: {1: (SECOND, 2)},
    },
}  # fmt: skip


def reuse(model: ir.Model, edges: Edges) -> ir.Model:
    """Rewrite a model in place."""
    return ReuseAttention(edges)(model).model
