"""What stands between a projection and the scores besides layout: rotary positions, q/k norm."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.blocks import AttentionBlock
from graph_passes.passes.collaborate import sharing_refusal
from tests.graph_passes.graphs import (
    FLOAT_MASK,
    PLAIN_INPUT,
    SCALE,
    D,
    H,
    K,
    attention,
    only,
    reasons,
)

HALF = K // 2
rng = np.random.default_rng(9)
TURNS = rng.uniform(0, 6, (16, HALF))
CONSTANTS = {
    "ones": np.ones(K, np.float32),
    "gain": rng.uniform(0.5, 2, K).astype(np.float32),
    "shift": rng.standard_normal(K).astype(np.float32),
    "wide_ones": np.ones(H * K, np.float32),
    "wide_gain": rng.uniform(0.5, 2, H * K).astype(np.float32),
    "two": np.float32(2),
    "half_power": np.float32(0.5),
    "minus_half": np.float32(-0.5),
    "three": np.float32(3),
    "epsilon": np.float32(1e-3),
    "cos_table": np.cos(TURNS).astype(np.float32),
    "sin_table": np.sin(TURNS).astype(np.float32),
    "cos_half": np.cos(TURNS[:, :1]).astype(np.float32),
    "sin_half": np.sin(TURNS[:, :1]).astype(np.float32),
    "half": np.array([HALF], np.int64),
    "whole": np.array([K], np.int64),
}
SCORES = "\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"

MEAN = "\n square = Mul(q, q)\n mean = ReduceMean <axes = [-1]> (square)"
POWER = "\n square = Pow(q, two)\n mean = ReduceMean <axes = [-1]> (square)"
ADDED = "\n sum = Add(mean, epsilon)"

# What it says: the text that makes q9 of q, the opset, epsilon, whether it is centred.
NORMS: dict[str, tuple[str, int, float, bool]] = {
    "RMSNormalization": ("\n q9 = RMSNormalization <epsilon = 0.01> (q, gain)", 23, 0.01, False),
    "RMSNormalization with its own epsilon": ("\n q9 = RMSNormalization(q, gain)", 23, 1e-5, False),
    "SimplifiedLayerNormalization": (
        "\n q9 = SimplifiedLayerNormalization <epsilon = 0.01> (q, gain)",
        17,
        0.01,
        False,
    ),
    "LayerNormalization": (
        "\n q9 = LayerNormalization <epsilon = 0.01> (q, gain, shift)",
        17,
        0.01,
        True,
    ),
    "LayerNormalization without a bias": ("\n q9 = LayerNormalization(q, gain)", 17, 1e-5, True),
    "Mul by Reciprocal": (
        f"{MEAN}{ADDED}\n root = Sqrt(sum)\n inverse9 = Reciprocal(root)\n n = Mul(q, inverse9)"
        "\n q9 = Mul(n, gain)",
        17,
        1e-3,
        False,
    ),
    "Mul by a quotient": (
        f"{POWER}{ADDED}\n root = Sqrt(sum)\n inverse9 = Div(one, root)\n n = Mul(inverse9, q)"
        "\n q9 = Mul(gain, n)",
        17,
        1e-3,
        False,
    ),
    "Div by Sqrt": (
        f"{POWER}{ADDED}\n root = Sqrt(sum)\n n = Div(q, root)\n q9 = Mul(n, gain)",
        17,
        1e-3,
        False,
    ),
    "Div by Pow 0.5": (
        f"{POWER}{ADDED}\n root = Pow(sum, half_power)\n n = Div(q, root)\n q9 = Mul(n, gain)",
        17,
        1e-3,
        False,
    ),
    "Pow -0.5": (
        f"{POWER}\n sum = Add(epsilon, mean)\n inverse9 = Pow(sum, minus_half)"
        "\n n = Mul(q, inverse9)\n q9 = Mul(n, gain)",
        17,
        1e-3,
        False,
    ),
    "a mean whose axes are an input": (
        "\n square = Mul(q, q)\n mean = ReduceMean(square, last)"
        f"{ADDED}\n root = Sqrt(sum)\n n = Div(q, root)\n q9 = Mul(n, gain)",
        18,
        1e-3,
        False,
    ),
    "cast noise around it": (
        "\n q8 = Cast <to = 1> (q)\n square = Pow(q8, two)"
        f"\n mean = ReduceMean <axes = [-1]> (square){ADDED}\n root = Sqrt(sum)\n n = Div(q8, root)"
        "\n n9 = Cast <to = 1> (n)\n q9 = Mul(n9, gain)",
        17,
        1e-3,
        False,
    ),
}


def normed(text: str, opset: int = 17, inputs: str = f"{PLAIN_INPUT}, {FLOAT_MASK}") -> ir.Model:
    return attention(scores=f"{text}{SCORES}", inputs=inputs, opset=opset, constants=CONSTANTS)


@pytest.mark.parametrize("written", NORMS)
def test_norm_of_each_head_is_read_and_certified(written: str) -> None:
    text, opset, epsilon, centered = NORMS[written]
    block = only(normed(text, opset))
    assert block.q.norm is not None and block.k.norm is None
    assert block.q.norm.epsilon == pytest.approx(epsilon, rel=1e-6)
    assert block.q.norm.centered == centered
    assert block.q.norm.columns.tolist() == np.arange(H * K).reshape(H, K).tolist()
    np.testing.assert_allclose(block.q.gain, np.tile(CONSTANTS["gain"], (H, 1)), rtol=1e-6)
    assert (block.num_heads, block.head_size, block.position) == (H, K, "none")
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "qk_norm"


def test_norm_on_both_sides() -> None:
    text = (
        "\n q9 = LayerNormalization(q, gain, shift)\n k = Transpose <perm = [0, 1, 3, 2]> (kT)"
        "\n k9 = LayerNormalization(k, ones)\n kT9 = Transpose <perm = [0, 1, 3, 2]> (k9)"
        "\n s0 = MatMul(q9, kT9)\n s = Mul(s0, scale)"
    )
    block = only(attention(scores=text, constants=CONSTANTS))
    assert block.q.norm is not None and block.k.norm is not None
    np.testing.assert_allclose(block.q.offset, np.tile(CONSTANTS["shift"], (H, 1)), rtol=1e-6)


@pytest.mark.parametrize(
    "norm",
    [
        "n = SimplifiedLayerNormalization(q1, wide_gain)",
        "n = LayerNormalization(q1, wide_gain)",
        "square = Pow(q1, two)\n mean = ReduceMean <axes = [-1]> (square)"
        "\n sum = Add(mean, epsilon)\n root = Sqrt(sum)\n n0 = Div(q1, root)"
        "\n n = Mul(n0, wide_gain)",
    ],
    ids=["SimplifiedLayerNormalization", "LayerNormalization", "in parts"],
)
def test_norm_over_the_whole_width_before_the_heads_are_split(norm: str) -> None:
    text = f"""
        q0 = MatMul(x, Wq)
        q1 = Add(q0, bq)
        {norm}
        q2 = Reshape(n, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""
    block = only(attention(q=text, constants=CONSTANTS))
    assert block.q.norm is not None
    assert block.q.norm.columns.tolist() == [list(range(H * K))]
    np.testing.assert_allclose(block.q.gain.ravel(), CONSTANTS["wide_gain"], rtol=1e-6)


def test_scale_before_a_norm_belongs_to_the_norm() -> None:
    """A factor before the norm only weighs against its epsilon; it is no scale of the logits."""
    block = only(normed("\n q8 = Mul(q, three)\n q9 = LayerNormalization(q8, gain)"))
    assert block.q.norm is not None
    assert (block.q.norm.scale, block.scale) == pytest.approx((3.0, SCALE), rel=1e-6)


MISSED: dict[str, tuple[str, str]] = {
    "mean over the heads": (
        "\n square = Mul(q, q)\n mean = ReduceMean <axes = [1]> (square)"
        f"{ADDED}\n root = Sqrt(sum)\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "mean over the tokens": (
        "\n square = Mul(q, q)\n mean = ReduceMean <axes = [2]> (square)"
        f"{ADDED}\n root = Sqrt(sum)\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "mean of another value": (
        "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)\n square = Mul(k, k)"
        f"\n mean = ReduceMean <axes = [-1]> (square){ADDED}\n root = Sqrt(sum)"
        "\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "mean of the cubes": (
        f"\n cube = Pow(q, three)\n mean = ReduceMean <axes = [-1]> (cube){ADDED}"
        "\n root = Sqrt(sum)\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "the largest in the place of the mean": (
        f"\n square = Mul(q, q)\n mean = ReduceMax <axes = [-1]> (square){ADDED}"
        "\n root = Sqrt(sum)\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "no root": (
        f"{MEAN}{ADDED}\n q9 = Div(q, sum)",
        "Div stands between the query projection and the product",
    ),
    "no epsilon": (
        f"{MEAN}\n root = Sqrt(mean)\n q9 = Div(q, root)",
        "Div stands between the query projection and the product",
    ),
    "a factor made of its own tokens": (
        "\n size = ReduceL2 <axes = [-1], keepdims = 1> (q)\n q9 = Mul(q, size)",
        "Mul multiplies the query by a value made of its own tokens",
    ),
    "a factor made of the tokens before the projection": (
        "\n sizes = ReduceMean <axes = [-1], keepdims = 1> (x)\n size4 = Unsqueeze(sizes, a1)"
        "\n q9 = Mul(q, size4)",
        "Mul multiplies the query by a value made of its own tokens",
    ),
    "a weight that is not constant": (
        "\n fed1 = Squeeze(fed, a0)\n q9 = LayerNormalization(q, fed1)",
        "LayerNormalization normalises the query with a weight that is not constant",
    ),
    "a norm over two axes": (
        "\n q9 = LayerNormalization <axis = -2> (q, by_two)",
        "LayerNormalization stands between the query projection and the product",
    ),
    "a norm twice": (
        "\n q8 = LayerNormalization(q, gain)\n q9 = LayerNormalization(q8, gain)",
        "LayerNormalization normalises a query that is normalised or rotated already",
    ),
    "a norm of rotated queries": (
        "\n q8 = com.microsoft.RotaryEmbedding(q, where, cos_table, sin_table)"
        "\n q9 = LayerNormalization(q8, gain)",
        "LayerNormalization normalises a query that is normalised or rotated already",
    ),
    "rotated twice": (
        "\n q8 = com.microsoft.RotaryEmbedding(q, where, cos_table, sin_table)"
        "\n q9 = com.microsoft.RotaryEmbedding(q8, where, cos_table, sin_table)",
        "RotaryEmbedding rotates a query that is rotated already",
    ),
    "scaled as it is rotated": (
        "\n q9 = com.microsoft.RotaryEmbedding <scale = 2.0> (q, where, cos_table, sin_table)",
        "RotaryEmbedding scales the query as it rotates it",
    ),
    "too few angles": (
        "\n q9 = com.microsoft.RotaryEmbedding <rotary_embedding_dim = 4, num_heads = 3>"
        " (q, where, cos_half, sin_half)",
        "RotaryEmbedding rotates 4 of 4 elements by 1 angles",
    ),
}


@pytest.mark.parametrize("written", MISSED)
def test_near_miss_is_missed_with_a_reason(written: str) -> None:
    text, reason = MISSED[written]
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[1, {K}] fed, int64[batch, sequence] where"
    constants = CONSTANTS | {"by_two": np.ones((5, K), np.float32)}
    (said,) = reasons(
        attention(scores=f"{text}{SCORES}", inputs=inputs, constants=constants, opset=17)
    )
    assert reason in said


def test_norm_of_the_values_is_missed() -> None:
    context = (
        "\n v9 = LayerNormalization(v, v_ones)\n c0 = MatMul(p, v9)"
        "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c = Reshape(c1, merge)"
    )
    (said,) = reasons(attention(context=context, constants={"v_ones": np.ones(2, np.float32)}))
    assert said == "positions turn the values, or a norm changes them: no reading covers that"


def rope(text: str, extra: str, opset: int = 17, **parts: str) -> AttentionBlock:
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}{extra}"
    return only(
        attention(
            scores=f"{text}{SCORES}", inputs=inputs, constants=CONSTANTS, opset=opset, **parts
        )
    )


WHERE = ", int64[batch, sequence] where"
ANGLES = f", float[batch, sequence, {HALF}] cos, float[batch, sequence, {HALF}] sin"


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("where", [WHERE, ", int64[1] where"], ids=["each token", "the first"])
def test_rotary_embedding_of_onnx_runtime(where: str, interleaved: int) -> None:
    block = rope(
        f"\n q9 = com.microsoft.RotaryEmbedding <interleaved = {interleaved}>"
        " (q, where, cos_table, sin_table)",
        where,
    )
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)
    factors = [turn.factor for turn in block.q.rotary_terms]
    assert [factor.value.name for factor in factors if factor] == ["cos_table", "sin_table"]
    assert {f.positions.name for f in factors if f and f.positions} == {"where"}
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "rotary"


def test_rotary_embedding_of_onnx_runtime_before_the_heads_are_split() -> None:
    text = """
        q0 = MatMul(x, Wq)
        q1 = Add(q0, bq)
        q8 = com.microsoft.RotaryEmbedding <num_heads = 3> (q1, where, cos_table, sin_table)
        q2 = Reshape(q8, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""
    block = rope("\n q9 = Identity(q)", WHERE, q=text)
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)


def test_rotary_embedding_of_onnx_runtime_takes_its_head_size_from_the_angles() -> None:
    text = """
        q0 = MatMul(x, Wq)
        q8 = com.microsoft.RotaryEmbedding(q0, where, cos_table, sin_table)
        q2 = Reshape(q8, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""
    assert rope("\n q9 = Identity(q)", WHERE, q=text).position == "rope"


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotary_embedding_of_onnx(interleaved: int) -> None:
    block = rope(
        f"\n q9 = RotaryEmbedding <interleaved = {interleaved}> (q, cos, sin)", ANGLES, opset=23
    )
    assert block.position == "rope" and len(block.q.rotary_terms) == 2


def test_rotary_embedding_of_onnx_with_positions() -> None:
    block = rope("\n q9 = RotaryEmbedding(q, cos_table, sin_table, where)", WHERE, opset=23)
    assert [turn.factor and turn.factor.value.name for turn in block.q.rotary_terms] == [
        "cos_table",
        "sin_table",
    ]


def test_rotary_embedding_of_onnx_before_the_heads_are_split() -> None:
    text = """
        q0 = MatMul(x, Wq)
        q8 = RotaryEmbedding <num_heads = 3> (q0, cos, sin)
        q2 = Reshape(q8, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""
    block = rope("\n q9 = Identity(q)", ANGLES, opset=23, q=text)
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)


def test_part_of_a_head_is_rotated() -> None:
    """The other elements are a third term, without a factor."""
    block = rope(
        "\n q9 = RotaryEmbedding <rotary_embedding_dim = 2> (q, cos_half, sin_half, where)",
        WHERE,
        opset=23,
    )
    assert [turn.factor is None for turn in block.q.rotary_terms] == [False, False, True]
    assert block.q.rotary_terms[2].gain.tolist() == [[0, 0, 1, 1]] * H


@pytest.mark.parametrize("norm", ["SimplifiedLayerNormalization", "LayerNormalization"])
def test_norm_before_rotary_positions(norm: str) -> None:
    block = rope(
        f"\n q8 = {norm}(q, gain)\n"
        "q9 = com.microsoft.RotaryEmbedding(q8, where, cos_table, sin_table)",
        WHERE,
    )
    assert block.position == "rope" and block.q.norm is not None
    assert len(block.q.rotary_terms) == 2


def test_norm_in_parts_before_rotary_positions_in_parts() -> None:
    text = (
        f"{POWER}{ADDED}\n root = Sqrt(sum)\n n = Div(q, root)\n q8 = Mul(n, gain)"
        "\n qc = Mul(q8, cos4)\n low = Slice(q8, n0, half, last)"
        "\n high = Slice(q8, half, whole, last)\n minus = Neg(high)"
        "\n swapped = Concat <axis = -1> (minus, low)\n qs = Mul(swapped, sin4)"
        "\n q9 = Add(qc, qs)"
    )
    angles = f", float[sequence, {K}] cos4, float[sequence, {K}] sin4"
    block = rope(text, angles)
    assert block.position == "rope" and block.q.norm is not None


def test_folded_angles_are_positions_too() -> None:
    """Graphs of one length may have their cosines as constants."""
    text = (
        "\n qc = Mul(q, cos5)\n low = Slice(q, n0, half, last)\n high = Slice(q, half, whole, last)"
        "\n minus = Neg(high)\n swapped = Concat <axis = -1> (minus, low)\n qs = Mul(swapped, sin5)"
        f"\n q9 = Add(qc, qs){SCORES}"
    )
    turns = np.concatenate([TURNS[:5], TURNS[:5]], axis=1)
    constants = CONSTANTS | {
        "cos5": np.cos(turns).astype(np.float32),
        "sin5": np.sin(turns).astype(np.float32),
    }
    inputs = f"float[batch, 5, {D}] x, float[batch, 1, 1, 5] mask"
    block = only(attention(scores=text, inputs=inputs, constants=constants))
    assert block.position == "rope" and len(block.q.rotary_terms) == 2
