"""Masks of layers whose heads were removed are compared as the masks they were taken from."""

from __future__ import annotations

import pytest

from graph_passes.matching.equivalence import have_equal_masks
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from tests.graph_passes.graphs import PLAIN_INPUT, H, layers

MASKS = {
    "of heads, true where attention is allowed": (
        f"bool[batch, {H}, sequence, sequence] mask", "\n m = Where(mask, s, infinity)",
    ),
    "of heads, true where it is not": (
        f"bool[batch, {H}, sequence, sequence] mask", "\n m = Where(mask, infinity, s)",
    ),
    "inverted in each layer": (
        "bool[batch, 1, 1, sequence] mask", "\n no = Not(mask)\n m = Where(no, infinity, s)",
    ),
    "a bias of heads": (f"float[{H}, sequence, sequence] mask", "\n m = Add(s, mask)"),
}  # fmt: skip

REMOVED = [
    {"attention_0": [1, 0, 1]},
    {"attention_1": [1, 0, 1]},
    {"attention_0": [1, 0, 1], "attention_1": [1, 1, 0]},
]


@pytest.mark.parametrize("removed", REMOVED, ids=["first", "second", "both"])
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_layers_without_some_heads_are_equal(name: str, removed: dict[str, list[int]]):
    inputs, mask = MASKS[name]
    model = PruneHeads(removed)(layers(inputs=f"{PLAIN_INPUT}, {inputs}", mask=mask)).model
    (first, second), _ = find_attention(model)
    assert have_equal_masks(first, second) and have_equal_masks(second, first)
