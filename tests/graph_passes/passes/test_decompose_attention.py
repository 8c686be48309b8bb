"""A fused attention operator becomes the same attention in plain operators, exactly."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.blocks import Capped
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention
from graph_passes.matching.operators import FUSED_OPERATORS as FUSED_NAMES
from graph_passes.passes.collaborate import Collaborate, factor, sharing_refusal
from graph_passes.passes.decompose_attention import DecomposeAttention, decomposition_refusal
from tests.errors import raises
from tests.graph_passes.graphs import (
    FUSED,
    PARTS,
    PLAIN_INPUT,
    D,
    H,
    K,
    attention,
    only,
    run,
)
from tests.graph_passes.operators import OPERATORS, any_feeds

BOOL = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"
FLOAT = f"{PLAIN_INPUT}, float[batch, {H}, sequence, sequence] mask"
S = 6
rng = np.random.default_rng(4)


def fused(operator: str, inputs: str = PLAIN_INPUT, **parts: str) -> ir.Model:
    return attention(
        opset=23,
        inputs=inputs,
        **{
            **FUSED,
            "k": PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3"),
            "context": PARTS["context"].replace("MatMul(p, v)", operator),
            **parts,
        },
    )


def decompose(model: ir.Model) -> ir.Model:
    names = frozenset(block.name for block in find_attention(model)[0])
    return DecomposeAttention(names)(model).model


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, S, D)).astype(np.float32)


def bool_mask() -> np.ndarray:
    """Random, and one query that sees no key at all."""
    mask = np.random.default_rng(1).random((2, 1, S, S)) < 0.6
    mask[..., 0] = True
    mask[0, 0, 2] = False
    return mask


CASES = {
    "plain": ("Attention (q, k, v)", PLAIN_INPUT, {}),
    "scale": ("Attention <scale = 0.37> (q, k, v)", PLAIN_INPUT, {}),
    "causal": ("Attention <is_causal = 1> (q, k, v)", PLAIN_INPUT, {}),
    "float mask": (
        "Attention (q, k, v, mask)",
        FLOAT,
        {"mask": np.random.default_rng(2).standard_normal((2, H, S, S)).astype(np.float32)},
    ),
    "boolean mask": ("Attention (q, k, v, mask)", BOOL, {"mask": bool_mask()}),
    "boolean mask and causal": (
        "Attention <is_causal = 1> (q, k, v, mask)",
        BOOL,
        {"mask": bool_mask()},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_decomposed_operator_computes_the_same(case: str) -> None:
    """Within 1e-5, rows included that see no key."""
    operator, inputs, masks = CASES[case]
    arrays = {"x": tokens(), **masks}
    original, plain = fused(operator, inputs), decompose(fused(operator, inputs))
    assert "Attention" not in {node.op_type for node in plain.graph}
    np.testing.assert_allclose(run(plain, arrays), run(original, arrays), atol=1e-5, rtol=0)


def test_rows_that_see_no_key_are_zero() -> None:
    model = decompose(fused("Attention (q, k, v, mask)", BOOL))
    (block,), _ = find_attention(model)
    arrays = {"x": tokens(), "mask": bool_mask()}
    bias = np.asarray(model.graph.initializers["bo"].const_value)
    np.testing.assert_allclose(run(model, arrays)[0, 2], bias, atol=1e-6, rtol=0)
    assert block.probabilities is not None


def test_decomposed_block_is_read_with_name_scale_and_masks() -> None:
    before = only(fused("Attention <scale = 0.37> (q, k, v, mask)", FLOAT))
    after = only(decompose(fused("Attention <scale = 0.37> (q, k, v, mask)", FLOAT)))
    assert (after.name, after.num_heads) == (before.name, before.num_heads)
    assert after.scale == pytest.approx(before.scale, rel=1e-6)
    assert after.idiom == "softmax"
    assert after.logits is not None


def test_operator_that_is_the_output_of_the_graph_keeps_the_outputs_name() -> None:
    def model() -> ir.Model:
        return attention(
            opset=23,
            inputs=PLAIN_INPUT,
            output_type=f"float[batch, {H}, sequence, 2] out",
            **{
                **FUSED,
                "k": PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3"),
                "context": "\n out = Attention (q, k, v)",
                "output": "",
            },
        )

    plain = decompose(model())
    assert [value.name for value in plain.graph.outputs] == ["out"]
    arrays = {"x": tokens()}
    np.testing.assert_allclose(run(plain, arrays), run(model(), arrays), atol=1e-5, rtol=0)


# Operators that split or project their heads inside


DECOMPOSED = [
    name
    for name, case in OPERATORS.items()
    if case.runs and not decomposition_refusal(find_attention(case.model())[0][0])
]
REFUSED = (
    "ai.onnx: past", "Attention: past", "MultiHeadAttention: keys and values handed in",
)  # fmt: skip


@pytest.mark.parametrize("name", DECOMPOSED)
def test_every_form_of_every_operator_decomposes_exactly(name: str) -> None:
    """Within 1e-5, and what is left has its scores in the graph."""
    original, plain = OPERATORS[name].model(), decompose(OPERATORS[name].model())
    assert not {node.op_type for node in plain.graph} & FUSED_NAMES
    arrays = any_feeds(original)
    np.testing.assert_allclose(run(plain, arrays), run(original, arrays), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", DECOMPOSED)
def test_decomposed_operator_is_read_as_what_it_was(name: str) -> None:
    case = OPERATORS[name]
    block = only(decompose(case.model()))
    assert (block.num_heads, block.num_kv_heads) == case.heads
    assert (block.head_size, block.v_head_size) == case.sizes
    scale = case.scale / 3 if Capped in case.steps else case.scale  # a cap of 3 divides first
    assert block.scale == pytest.approx(scale, rel=1e-5)
    assert (block.kind, block.position) == (case.kind, case.position)
    assert block.logits is not None and block.probabilities is not None


SHARED = [
    name for name in DECOMPOSED if not sharing_refusal(only(decompose(OPERATORS[name].model())))
]


@pytest.mark.parametrize("name", SHARED)
def test_collaborative_heads_after_decomposing_are_exact(name: str) -> None:
    """At R = H*K the output stays within 1e-4."""
    model = decompose(OPERATORS[name].model())
    blocks, _ = find_attention(model)
    Collaborate.with_factors({block.name: factor(block, H * K) for block in blocks})(model)
    assert only(model).form == "collaborative"
    original = OPERATORS[name].model()
    arrays = any_feeds(original)
    np.testing.assert_allclose(run(model, arrays), run(original, arrays), atol=1e-4, rtol=0)


def test_most_forms_decompose_and_can_then_share_their_heads() -> None:
    """The parametrized tests above are over what applies; it must not be nothing."""
    assert {name.split(":")[0] for name in SHARED} == {"ai.onnx", "Attention", "MultiHeadAttention"}
    assert set(DECOMPOSED) - set(SHARED) == {
        "ai.onnx: soft cap",
        "ai.onnx: soft cap and mask",
        "ai.onnx: grouped heads",
        "ai.onnx: one key/value head",
        "GroupQueryAttention: no cache",
    }
    assert len(SHARED) > 30


@pytest.mark.parametrize("name", REFUSED)
def test_decompose_attention_with_cached_keys_is_refused(name: str) -> None:
    model = OPERATORS[name].model()
    (block,), _ = find_attention(model)
    with raises(CannotRewrite, "cached"):
        DecomposeAttention(frozenset({block.name}))(model)


def test_operator_whose_keys_are_read_elsewhere_is_refused() -> None:
    plain = OPERATORS["ai.onnx: heads side by side"]
    body = plain.body.replace("c = A", "c, nk, nv = A")
    assert decomposition_refusal(only(replace(plain, body=body).model())) is None
    kept = only(replace(plain, body=f"{body}\n kept = Abs(nk)").model())
    refusal = decomposition_refusal(kept)
    assert refusal and refusal.code == "operator_outputs"


def test_operator_that_rotates_its_heads_inside_is_refused() -> None:
    rotary = OPERATORS["GroupQueryAttention: rotary without a cache"]
    text = rotary.body.replace("kv_num_heads = 2", "kv_num_heads = 4")
    wide = {"Wk_grouped": rng.standard_normal((D, 64)), "Wv_grouped": rng.standard_normal((D, 64))}
    constants = {name: array.astype(np.float32) / 2 for name, array in wide.items()}
    block = only(replace(rotary, body=text, constants=constants).model())
    refusal = decomposition_refusal(block)
    assert refusal and refusal.code == "operator_rotary"


def test_a_head_that_all_queries_share_is_spread() -> None:
    parts = {
        "k": "\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
        "\n k = Transpose <perm = [0, 2, 1, 3]> (k2)",
        "v": "\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
        "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
    }
    model = decompose(fused("Attention (q, k, v)", **parts))
    block = only(model)
    assert (block.num_heads, block.num_kv_heads) == (H, 1)
    arrays = {"x": tokens()}
    expected = run(fused("Attention (q, k, v)", **parts), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=1e-5, rtol=0)


def test_plain_attention_and_unknown_names_are_refused() -> None:
    with raises(CannotRewrite, "decomposed"):
        DecomposeAttention(["attention_0"])(attention())
    with raises(CannotRewrite, "rewrite.unknown_block"):
        DecomposeAttention(frozenset({"layer_9"}))(attention())


def test_group_query_attention_with_heads_of_its_own_decomposes() -> None:
    """Over whole sequences, within 1e-5."""
    plain = OPERATORS["GroupQueryAttention: no cache"]
    text = plain.body.replace("kv_num_heads = 2", "kv_num_heads = 4")
    wide = {"Wk_grouped": rng.standard_normal((D, 64)), "Wv_grouped": rng.standard_normal((D, 64))}
    constants = {name: array.astype(np.float32) / 2 for name, array in wide.items()}
    case = replace(plain, body=text, constants=constants)
    arrays = {"x": tokens(), "lengths": np.full(2, S - 1, np.int32), "total": np.int32(S)}
    arrays = {name: np.asarray(array) for name, array in arrays.items()}
    model = decompose(case.model())
    assert "GroupQueryAttention" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, arrays), run(case.model(), arrays), atol=1e-5, rtol=0)
