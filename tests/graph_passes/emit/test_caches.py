"""Key/value caches as inputs of the graph: matching and certification."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.passes.shared_dimensions import sharing_refusal
from tests.graph_passes.graphs import PARTS, PLAIN_INPUT, SCALE, H, K, V, attention, only, reasons

CACHE = f"float[batch, {H}, past, {K}] pk, float[batch, {H}, past, {V}] pv"
INPUTS = f"{PLAIN_INPUT}, {CACHE}"

KEYS = PARTS["k"].replace("kT", "k3").replace("0, 2, 3, 1", "0, 2, 1, 3")
VALUES = PARTS["v"].replace("v = T", "v3 = T")


def keys(joined: str) -> dict[str, str]:
    """Keys of which ``joined`` makes (B, H, P+T, K) ``k4``."""
    return {"k": f"{KEYS}\n {joined}\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)"}


JOINED = {
    **keys("k4 = Concat <axis = 2> (pk, k3)"),
    "v": f"{VALUES}\n v = Concat <axis = 2> (pv, v3)",
    "mask": "\n m = Identity(s)",
}
"""A decoder step: past keys and values come first."""


def cached(inputs: str = INPUTS, **changes: str) -> ir.Model:
    return attention(inputs=inputs, **{**JOINED, **changes})


READ: dict[str, tuple[dict[str, str], str]] = {
    "keys and values joined": ({}, INPUTS),
    "joined as they are transposed": (
        {
            "k": f"{KEYS}\n k4 = Transpose <perm = [0, 1, 3, 2]> (k3)"
            "\n kT = Concat <axis = 3> (pk, k4)"
        },
        INPUTS.replace(f"past, {K}] pk", f"{K}, past] pk"),
    ),
    "joined before the heads are apart": (
        {
            "k": "\n k0 = MatMul(x, Wk)\n k1 = Add(k0, bk)\n k2 = Reshape(k1, heads)"
            "\n k4 = Concat <axis = 1> (pk, k2)\n kT = Transpose <perm = [0, 2, 3, 1]> (k4)"
        },
        INPUTS.replace(f"[batch, {H}, past, {K}] pk", f"[batch, past, {H}, {K}] pk"),
    ),
    "joined, and the keys scaled with their cache": (
        {"scores": "\n k9 = Mul(kT, scale)\n s = MatMul(q, k9)"},
        INPUTS,
    ),
    "present keys and values are outputs": (
        {"v": f"{VALUES}\n v = Concat <axis = 2> (pv, v3)\n present = Identity(v)"},
        INPUTS,
    ),
    "one cache for keys and values": (
        {
            "k": f"{KEYS}\n pk = Gather <axis = 0> (both, i0)\n k4 = Concat <axis = 2> (pk, k3)"
            "\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)",
            "v": "\n v0 = MatMul(x, Wk)\n v2 = Reshape(v0, heads)"
            "\n v3 = Transpose <perm = [0, 2, 1, 3]> (v2)\n pv = Gather <axis = 0> (both, i1)"
            "\n v = Concat <axis = 2> (pv, v3)",
            "output": "\n out = MatMul(c, Wo12)",
        },
        f"{PLAIN_INPUT}, float[2, batch, {H}, past, {K}] both",
    ),
}


@pytest.mark.parametrize("case", READ)
def test_find_attention_with_cache_is_certified(case: str) -> None:
    parts, inputs = READ[case]
    block = only(cached(inputs, **parts))
    assert (block.num_heads, block.num_kv_heads, block.head_size) == (H, H, K)
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    assert block.k.past is not None and block.v.past is not None
    assert (block.kind, block.q.past) == ("self", None)
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "cached"


def test_find_attention_cache_axes_are_recorded() -> None:
    past = only(cached()).k.past
    assert past is not None and past.value.name == "pk"
    assert (past.axes[0], past.axes[2], past.token_axis) == ("batch", "token", 2)
    parts, inputs = READ["joined before the heads are apart"]
    past = only(cached(inputs, **parts)).k.past
    assert past is not None and (past.axes[1], past.token_axis) == ("token", 1)


CROSS: dict[str, str] = {
    "k": "\n kT = Transpose <perm = [0, 1, 3, 2]> (pk)",
    "v": "\n v = Identity(pv)",
    "mask": "\n m = Identity(s)",
}


def test_find_attention_cached_cross_attention_has_no_key_projection() -> None:
    block = only(cached(**CROSS))
    assert (block.k.weight, block.v.weight, block.kind) == (None, None, "cross")
    assert (block.y.name, block.num_heads, block.num_kv_heads) == ("pk", H, H)
    assert (block.head_size, block.v_head_size) == (K, V)
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "external_keys"


def test_find_attention_cached_cross_attention_with_mask() -> None:
    inputs = f"{INPUTS}, float[batch, 1, 1, past] mask"
    block = only(cached(inputs, **CROSS | {"mask": "\n m = Add(s, mask)"}))
    assert len(block.steps) == 1


def test_find_attention_grouped_cache_has_one_key_head() -> None:
    """One key head, repeated after its cache was joined."""
    parts = {
        "k": "\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
        "\n k3 = Transpose <perm = [0, 2, 1, 3]> (k2)\n k4 = Concat <axis = 2> (pk, k3)"
        "\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)",
        "v": "\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
        "\n v3 = Transpose <perm = [0, 2, 1, 3]> (v2)\n v = Concat <axis = 2> (pv, v3)",
    }
    inputs = f"{PLAIN_INPUT}, float[batch, 1, past, {K}] pk, float[batch, 1, past, {V}] pv"
    block = only(cached(inputs, **parts))
    assert (block.num_heads, block.num_kv_heads) == (H, 1)


MISSED: dict[str, tuple[dict[str, str], str]] = {
    "the cache after the tokens": (
        keys("k4 = Concat <axis = 2> (k3, pk)"),
        "the cache of the key does not precede its tokens",
    ),
    "two caches": (
        keys("k4 = Concat <axis = 2> (pk, pk2, k3)"),
        "the key joins several caches",
    ),
    "a cache scaled element by element": (
        keys("pk9 = Mul(pk, gains)\n k4 = Concat <axis = 2> (pk9, k3)"),
        "the cache of the key is scaled element by element",
    ),
    "a cache plus a constant": (
        keys("pk9 = Add(pk, gains)\n k4 = Concat <axis = 2> (pk9, k3)"),
        "Add adds to a key",
    ),
    "a cache that is squashed": (
        keys("pk9 = Tanh(pk)\n k4 = Concat <axis = 2> (pk9, k3)"),
        "Tanh is not supported between the key projection and the product",
    ),
    "a cache of two axes": (
        {"k": "\n kT = Transpose <perm = [1, 0]> (flat_keys)"},
        "Softmax has no product of queries and keys as input",
    ),
    "queries that are joined to a cache": (
        {"q": "\n q0 = MatMul(x, Wq)\n q2 = Reshape(q0, heads)"
              "\n q3 = Transpose <perm = [0, 2, 1, 3]> (q2)\n q = Concat <axis = 2> (pk, q3)"},
        "the query is 'pk', an input of the graph: not the output of a projection",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSED)
def test_find_attention_unsupported_cache_is_unmatched(case: str) -> None:
    parts, reason = MISSED[case]
    inputs = f"{INPUTS}, float[batch, {H}, past, {K}] pk2, float[past, {K}] flat_keys"
    gains = np.linspace(0.5, 2, K).astype(np.float32)
    model = attention(inputs=inputs, constants={"gains": gains}, **{**JOINED, **parts})
    (said,) = reasons(model)
    assert reason in said


@pytest.mark.parametrize(
    "scaled",
    ["pk9 = Mul(pk, root)\n k9 = Mul(k3, root)", "pk9 = Identity(pk)\n k9 = Div(k3, one)"],
    ids=["both by the same", "neither"],
)
def test_find_attention_scaled_cache_is_certified(scaled: str) -> None:
    block = only(
        cached(
            k=f"{KEYS}\n {scaled}\n k4 = Concat <axis = 2> (pk9, k9)"
            "\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)"
        )
    )
    assert block.k.past is not None


def test_find_attention_cache_scaled_without_tokens_sets_the_scale() -> None:
    """The scale of the cache is the scale of the logits; that of the tokens becomes a gain."""
    block = only(
        cached(
            k=f"{KEYS}\n pk9 = Mul(pk, root)\n k4 = Concat <axis = 2> (pk9, k3)"
            "\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)"
        )
    )
    assert block.scale == pytest.approx(SCALE**1.5, rel=1e-5)
    np.testing.assert_allclose(block.k.gain, SCALE**-0.5, rtol=1e-5)


def test_find_attention_rotated_new_keys_are_certified() -> None:
    """New keys are rotated before they are joined to the cache."""
    turned = (
        f"{KEYS}\n k8 = com.microsoft.RotaryEmbedding(k3, where, cos_table, sin_table)"
        "\n k4 = Concat <axis = 2> (pk, k8)\n kT = Transpose <perm = [0, 1, 3, 2]> (k4)"
    )
    turns = np.random.default_rng(0).uniform(0, 6, (16, K // 2))
    model = attention(
        inputs=f"{INPUTS}, int64[batch, sequence] where",
        constants={
            "cos_table": np.cos(turns).astype(np.float32),
            "sin_table": np.sin(turns).astype(np.float32),
        },
        **{**JOINED, "k": turned},
    )
    block = only(model)
    assert block.position == "rope" and block.k.past is not None
