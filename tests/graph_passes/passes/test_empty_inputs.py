"""Rewritten graphs accept an empty batch or sequence, as the original does."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.passes.base import RewritePass
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.prune_heads import PruneHeads
from tests.graph_passes.graphs import FUSED, PLAIN_INPUT, D, H, K, V, attention, run
from tests.graph_passes.layouts import ONE_KEY_HEAD

NAME = "attention_0"
MERGE = {"merge": np.array([0, 0, H * V])}
NO_MASK = {"mask": "\n m = Identity(s)"}
OPERATOR = {
    **FUSED, "q": "", "k": "", "v": "", "output": "\n out = MatMul(c, Wo12)",
    "context": f"\n c = com.microsoft.Attention <num_heads = {H}> (x, Wqkv, bqkv)",
}  # fmt: skip


@pytest.mark.parametrize(
    ("rewrite", "parts"),
    [
        (PruneHeads({NAME: [0, 1, 1]}), NO_MASK),
        (Collaborate({NAME: Mixing(rank=K)}), NO_MASK),
        (FuseAttention({NAME: "multi_head"}), NO_MASK | ONE_KEY_HEAD),
        (DecomposeAttention({NAME}), OPERATOR),
    ],
    ids=lambda value: value.name if isinstance(value, RewritePass) else "",
)
@pytest.mark.parametrize("shape", [(0, 5, D), (2, 0, D)], ids=str)
def test_rewritten_graph_accepts_empty_inputs(
    rewrite: RewritePass, parts: dict[str, str], shape: tuple[int, int, int]
) -> None:
    model = attention(inputs=PLAIN_INPUT, constants=MERGE, **parts)
    assert rewrite(model).modified
    assert run(model, {"x": np.zeros(shape, np.float32)}).shape == shape
