"""Rotary embeddings and q/k norms between a projection and the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import collaborate_refusal
from graph_passes.passes.shared_dimensions import sharing_refusal
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
CONSTANTS: dict[str, Any] = {
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
    "wide_shape": np.array([1, 1, 1, K], np.int64),
    "half": np.array([HALF], np.int64),
    "whole": np.array([K], np.int64),
}
ROTATED = "com.microsoft.RotaryEmbedding(q, where, cos_table, sin_table)"
WHERE = "int64[batch, sequence] where"
SCORES = "\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"

MEAN = "\n square = Mul(q, q)\n mean = ReduceMean <axes = [-1]> (square)"
POWER = "\n square = Pow(q, two)\n mean = ReduceMean <axes = [-1]> (square)"
ADDED = "\n sum = Add(mean, epsilon)"
ROOT = f"{ADDED}\n root = Sqrt(sum)"
DIVIDED = "\n n = Div(q, root)\n q9 = Mul(n, gain)"

NORMS: dict[str, tuple[str, int, float, bool]] = {
    "RMSNormalization": ("\n q9 = RMSNormalization <epsilon = 0.01> (q, gain)", 23, 0.01, False),
    "RMSNormalization, default epsilon": ("\n q9 = RMSNormalization(q, gain)", 23, 1e-5, False),
    "SimplifiedLayerNormalization": (
        "\n q9 = SimplifiedLayerNormalization <epsilon = 0.01> (q, gain)", 17, 0.01, False,
    ),
    "LayerNormalization": (
        "\n q9 = LayerNormalization <epsilon = 0.01> (q, gain, shift)", 17, 0.01, True,
    ),
    "LayerNormalization without a bias": ("\n q9 = LayerNormalization(q, gain)", 17, 1e-5, True),
    "Mul by Reciprocal": (
        f"{MEAN}{ROOT}\n inverse9 = Reciprocal(root)\n n = Mul(q, inverse9)\n q9 = Mul(n, gain)",
        17, 1e-3, False,
    ),
    "Mul by a quotient": (
        f"{POWER}{ROOT}\n inverse9 = Div(one, root)\n n = Mul(inverse9, q)\n q9 = Mul(gain, n)",
        17, 1e-3, False,
    ),
    "Div by Sqrt": (f"{POWER}{ROOT}{DIVIDED}", 17, 1e-3, False),
    "Div by Pow 0.5": (f"{POWER}{ADDED}\n root = Pow(sum, half_power){DIVIDED}", 17, 1e-3, False),
    "Pow -0.5": (
        f"{POWER}\n sum = Add(epsilon, mean)\n inverse9 = Pow(sum, minus_half)"
        "\n n = Mul(q, inverse9)\n q9 = Mul(n, gain)",
        17, 1e-3, False,
    ),
    "mean over an axis from the front": (
        f"\n square = Mul(q, q)\n mean = ReduceMean <axes = [3]> (square){ROOT}{DIVIDED}",
        17, 1e-3, False,
    ),
    "LayerNormalization of an axis from the front": (
        "\n q9 = LayerNormalization <axis = 3> (q, gain, shift)", 17, 1e-5, True,
    ),
    "mean with axes as an input": (
        f"\n square = Mul(q, q)\n mean = ReduceMean(square, last){ROOT}{DIVIDED}", 18, 1e-3, False,
    ),
    "Cast around the norm": (
        "\n q8 = Cast <to = 1> (q)\n square = Pow(q8, two)"
        f"\n mean = ReduceMean <axes = [-1]> (square){ROOT}\n n = Div(q8, root)"
        "\n n9 = Cast <to = 1> (n)\n q9 = Mul(n9, gain)",
        17, 1e-3, False,
    ),
    "no epsilon": (f"{MEAN}\n root = Sqrt(mean){DIVIDED}", 17, 0.0, False),
    "LayerNormalization in parts": (
        "\n middle = ReduceMean <axes = [-1]> (q)\n even = Sub(q, middle)\n even2 = Sub(q, middle)"
        f"\n square = Pow(even2, two)\n mean = ReduceMean <axes = [-1]> (square){ROOT}"
        "\n n = Div(even, root)\n q9 = Mul(n, gain)",
        17, 1e-3, True,
    ),
}  # fmt: skip
"""The nodes from q to q9, the opset, epsilon, and whether the norm is centered."""

SUM = "\n square = Mul(q, q)\n total = ReduceSum(square, last)"
L2 = "\n length = ReduceL2 <axes = [-1]> (q)"
OVER = "\n n = Div(q, size)\n q9 = Mul(n, gain)"

LENGTH_NORMS: dict[str, tuple[str, tuple[float, float, float]]] = {
    "x / |x|": (f"\n size = ReduceL2 <axes = [-1]> (q){OVER}", (0, 0, 0)),
    "torch normalize": (
        f"{L2}\n least = Clip(length, epsilon)\n size = Expand(least, wide_shape){OVER}",
        (0, 5e-4, 0),
    ),
    "x / max(|x|, epsilon)": (f"{L2}\n size = Max(length, epsilon){OVER}", (0, 5e-4, 0)),
    "x / (|x| + epsilon)": (f"{L2}\n size = Add(length, epsilon){OVER}", (0, 0, 5e-4)),
    "x / (max(|x|, epsilon) + epsilon)": (
        f"{L2}\n least = Max(length, epsilon)\n size = Add(least, epsilon){OVER}",
        (0, 5e-4, 5e-4),
    ),
    "x rsqrt(sum + epsilon)": (
        f"{SUM}\n sum = Add(total, epsilon)\n size = Sqrt(sum)\n inverse9 = Reciprocal(size)"
        "\n n = Mul(inverse9, q)\n q9 = Mul(n, gain)",
        (2.5e-4, 0, 0),
    ),
    "x / sqrt(max(sum, epsilon))": (
        f"{SUM}\n most = Max(total, epsilon)\n size = Sqrt(most){OVER}", (0, 1e-3**0.5 / 2, 0),
    ),
    "vector_norm in parts": (
        "\n positive = Abs(q)\n square = Pow(positive, two)\n total = ReduceSum(square, last)"
        f"\n size = Pow(total, half_power){OVER}",
        (0, 0, 0),
    ),
    "ReduceSumSquare": (
        f"\n total = ReduceSumSquare <axes = [-1]> (q)\n size = Sqrt(total){OVER}", (0, 0, 0),
    ),
    "LpNormalization": (
        "\n n = LpNormalization(q)\n q9 = Mul(n, gain)", (0, float(np.finfo(np.float32).tiny), 0),
    ),
}  # fmt: skip
"""The nodes from q to q9, and epsilon, least and added of the norm; K = 4 halves a length."""


@pytest.mark.parametrize("written", LENGTH_NORMS)
def test_find_attention_norm_by_length_matches(written: str) -> None:
    text, (epsilon, least, added) = LENGTH_NORMS[written]
    block = only(normed(text))
    norm = block.q.norm
    assert norm is not None
    got = (norm.epsilon, norm.least, norm.added, block.q.scale)
    assert got == pytest.approx((epsilon, least, added, K**-0.5), rel=1e-5)
    assert block.scale == pytest.approx(SCALE / K**0.5, rel=1e-6)


FACTORS: dict[str, tuple[str, tuple[int, ...] | None]] = {
    "a number": ("\n q9 = Mul(n, three)", None),
    "over a number": ("\n q9 = Div(n, three)", None),
    "by dimension": ("\n q9 = Mul(gain, n)", (K,)),
    "by head": ("\n q9 = Mul(n, by_head)", (H, 1)),
    "by head and dimension": ("\n q9 = Mul(n, by_both)", (H, K)),
    "the exponential by head": ("\n f = Exp(by_head)\n q9 = Mul(n, f)", (H, 1)),
    "clipped exponential by head": (
        "\n limited = Min(by_head, one)\n f = Exp(limited)\n q9 = Mul(n, f)", (H, 1),
    ),
    "softplus by head": ("\n f = Softplus(by_head)\n q9 = Mul(n, f)", (H, 1)),
    "one plus a weight": ("\n f = Add(gain, one)\n q9 = Mul(n, f)", (K,)),
}  # fmt: skip
COMPUTED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "the exponential by head": np.exp,
    "clipped exponential by head": lambda x: np.exp(np.minimum(x, 1)),
    "softplus by head": lambda x: np.log1p(np.exp(x)),
    "one plus a weight": lambda x: x + 1,
}


@pytest.mark.parametrize("order", ["norm", "norm and rotation", "rotation and norm"])
@pytest.mark.parametrize("factor", FACTORS)
def test_find_attention_factor_after_norm_matches(factor: str, order: str) -> None:
    """nanochat and nGPT normalize rotated queries, Qwen3 and Gemma3 rotate normalized ones."""
    text, shape = FACTORS[factor]
    norm = "\n n = SimplifiedLayerNormalization({}, wide_four)"
    chain = {
        "norm": norm.format("q"),
        "norm and rotation": norm.format("q").replace("n =", "n8 =")
        + f"\n n = {ROTATED.replace('(q', '(n8')}",
        "rotation and norm": f"\n q8 = {ROTATED}" + norm.format("q8"),
    }[order]
    rng = np.random.default_rng(1)
    values: dict[str, Any] = {
        "by_head": rng.uniform(0.5, 2, (H, 1, 1)).astype(np.float32),
        "by_both": rng.uniform(0.5, 2, (1, H, 1, K)).astype(np.float32),
        "wide_four": np.ones(K, np.float32),
    }
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, {WHERE}"
    model = attention(scores=f"{chain}{text}{SCORES}", inputs=inputs, constants=CONSTANTS | values)
    block = only(model)
    norm_found = block.q.norm
    assert norm_found is not None
    assert bool(norm_found.rotary_terms) == (order == "rotation and norm")
    assert bool(block.q.rotary_terms) == (order == "norm and rotation")
    assert block.position == ("none" if order == "norm" else "rope")
    if shape is None:
        number = 3 if factor == "a number" else 1 / 3
        assert block.scale == pytest.approx(SCALE * number, rel=1e-6)
        return
    name = "gain" if shape == (K,) else "by_head" if shape == (H, 1) else "by_both"
    wanted = (CONSTANTS | values)[name].reshape(shape)
    wanted = COMPUTED.get(factor, lambda x: x)(wanted)
    gain = np.abs(block.q.gain)  # of the cosine term, if rotated
    np.testing.assert_allclose(gain, np.broadcast_to(wanted, (H, K)), rtol=1e-5)


def test_find_attention_factor_by_length_is_no_constant() -> None:
    """A factor computed from the number of tokens is not that of another length."""
    text = (
        "\n n = SimplifiedLayerNormalization(q, gain)\n shape = Shape(x)"
        "\n count = Gather(shape, i1)\n number = Cast <to = 1> (count)\n log = Log(number)"
        "\n f = Mul(by_head, log)\n q9 = Mul(n, f)"
    )
    values: dict[str, Any] = {"by_head": np.ones((H, 1, 1), np.float32)}
    model = attention(scores=f"{text}{SCORES}", constants=CONSTANTS | values)
    for block in find_attention(model).blocks:
        assert not (block.q.gain == np.log(5)).any(), "log of the length that was tried"


def test_sharing_refusal_norm_after_rotation_returns_qk_norm() -> None:
    text = f"\n q8 = {ROTATED}\n q9 = SimplifiedLayerNormalization(q8, gain)"
    block = only(normed(text, inputs=f"{PLAIN_INPUT}, {FLOAT_MASK}, {WHERE}"))
    for refusal in (sharing_refusal(block), collaborate_refusal(block)):
        assert refusal and refusal.code == "qk_norm"


def normed(text: str, opset: int = 17, inputs: str = f"{PLAIN_INPUT}, {FLOAT_MASK}") -> ir.Model:
    return attention(scores=f"{text}{SCORES}", inputs=inputs, opset=opset, constants=CONSTANTS)


@pytest.mark.parametrize("written", NORMS)
def test_find_attention_norm_by_head_matches(written: str) -> None:
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


def test_find_attention_norm_of_queries_and_keys_matches() -> None:
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
def test_find_attention_norm_before_head_split_matches(norm: str) -> None:
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


def test_find_attention_scale_before_norm_is_scale_of_norm() -> None:
    """A factor before the norm has an effect only relative to epsilon; it does not scale logits."""
    block = only(normed("\n q8 = Mul(q, three)\n q9 = LayerNormalization(q8, gain)"))
    assert block.q.norm is not None
    assert (block.q.norm.scale, block.scale) == pytest.approx((3.0, SCALE), rel=1e-6)


NO_NORM = "Div is not supported"
OWN_TOKENS = "Mul multiplies the query by a value computed from its own tokens"
TWICE = "LayerNormalization normalizes a query that is normalized already"

UNMATCHED: dict[str, tuple[str, str]] = {
    "mean over the heads": (
        f"\n square = Mul(q, q)\n mean = ReduceMean <axes = [1]> (square){ROOT}{DIVIDED}", NO_NORM,
    ),
    "mean over the tokens": (
        f"\n square = Mul(q, q)\n mean = ReduceMean <axes = [2]> (square){ROOT}{DIVIDED}", NO_NORM,
    ),
    "mean of another value": (
        "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)\n square = Mul(k, k)"
        f"\n mean = ReduceMean <axes = [-1]> (square){ROOT}{DIVIDED}",
        NO_NORM,
    ),
    "mean of the cubes": (
        f"\n cube = Pow(q, three)\n mean = ReduceMean <axes = [-1]> (cube){ROOT}{DIVIDED}", NO_NORM,
    ),
    "maximum instead of the mean": (
        f"\n square = Mul(q, q)\n mean = ReduceMax <axes = [-1]> (square){ROOT}{DIVIDED}", NO_NORM,
    ),
    "no root": (f"{MEAN}{ADDED}\n q9 = Div(q, sum)", NO_NORM),
    "factor of its own tokens": (
        "\n size = ReduceL2 <axes = [-1], keepdims = 1> (q)\n q9 = Mul(q, size)", OWN_TOKENS,
    ),
    "factor of the tokens before the projection": (
        "\n sizes = ReduceMean <axes = [-1], keepdims = 1> (x)\n size4 = Unsqueeze(sizes, a1)"
        "\n q9 = Mul(q, size4)",
        OWN_TOKENS,
    ),
    "weight is an input": (
        "\n fed1 = Squeeze(fed, a0)\n q9 = LayerNormalization(q, fed1)", "not constant",
    ),
    "norm over two axes": (
        "\n q9 = LayerNormalization <axis = -2> (q, by_two)", "LayerNormalization is not supported",
    ),
    "two norms": (
        "\n q8 = LayerNormalization(q, gain)\n q9 = LayerNormalization(q8, gain)", TWICE,
    ),
    "two rotations": (
        f"\n q8 = {ROTATED}\n q9 = {ROTATED.replace('(q', '(q8')}", "that is rotated already",
    ),
    "rotation with a scale": (
        f"\n q9 = {ROTATED.replace('(', ' <scale = 2.0> (')}", "RotaryEmbedding scales the query",
    ),
    "too few angles": (
        "\n q9 = com.microsoft.RotaryEmbedding <rotary_embedding_dim = 4, num_heads = 3>"
        " (q, where, cos_half, sin_half)",
        "rotates 4 of 4 elements by 1 angles",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNMATCHED)
def test_find_attention_near_miss_returns_reason(case: str) -> None:
    text, expected = UNMATCHED[case]
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[1, {K}] fed, int64[batch, sequence] where"
    constants = CONSTANTS | {"by_two": np.ones((5, K), np.float32)}
    (reason,) = reasons(attention(scores=f"{text}{SCORES}", inputs=inputs, constants=constants))
    assert expected in reason


def test_find_attention_norm_of_values_returns_reason() -> None:
    context = (
        "\n v9 = LayerNormalization(v, v_ones)\n c0 = MatMul(p, v9)"
        "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c = Reshape(c1, merge)"
    )
    (reason,) = reasons(attention(context=context, constants={"v_ones": np.ones(2, np.float32)}))
    assert "norms of values are not supported" in reason


FIRST = "int64[1] where"
ANGLES = f"float[batch, sequence, {HALF}] cos, float[batch, sequence, {HALF}] sin"
MICROSOFT = "com.microsoft.RotaryEmbedding"
TABLES = "where, cos_table, sin_table"
IN_PARTS = """
    qc = Mul({q}, {cos})
    low = Slice({q}, n0, half, last)
    high = Slice({q}, half, whole, last)
    minus = Neg(high)
    swapped = Concat <axis = -1> (minus, low)
    qs = Mul(swapped, {sin})
    q9 = Add(qc, qs)"""


def before_split(rotation: str) -> str:
    """Rotate the queries (B, S, H*K) before the heads are split."""
    return f"""
        q0 = MatMul(x, Wq)
        q1 = Add(q0, bq)
        q8 = {rotation}
        q2 = Reshape(q8, heads)
        q9 = Transpose <perm = [0, 2, 1, 3]> (q2)"""


ROTATIONS: dict[str, tuple[str, str, int]] = {
    "com.microsoft": (f"\n q9 = {MICROSOFT}(q, {TABLES})", WHERE, 17),
    "com.microsoft, interleaved": (
        f"\n q9 = {MICROSOFT} <interleaved = 1> (q, {TABLES})", WHERE, 17,
    ),
    "com.microsoft, first position": (f"\n q9 = {MICROSOFT}(q, {TABLES})", FIRST, 17),
    "com.microsoft, interleaved, first position": (
        f"\n q9 = {MICROSOFT} <interleaved = 1> (q, {TABLES})", FIRST, 17,
    ),
    "com.microsoft, before the split": (
        before_split(f"{MICROSOFT} <num_heads = 3> (q1, {TABLES})"), WHERE, 17,
    ),
    "com.microsoft, default head size": (before_split(f"{MICROSOFT}(q1, {TABLES})"), WHERE, 17),
    "ai.onnx": ("\n q9 = RotaryEmbedding(q, cos, sin)", ANGLES, 23),
    "ai.onnx, interleaved": ("\n q9 = RotaryEmbedding <interleaved = 1> (q, cos, sin)", ANGLES, 23),
    "ai.onnx, positions": ("\n q9 = RotaryEmbedding(q, cos_table, sin_table, where)", WHERE, 23),
    "ai.onnx, before the split": (
        before_split("RotaryEmbedding <num_heads = 3> (q1, cos, sin)"), ANGLES, 23,
    ),
    "norm": (
        f"\n q8 = SimplifiedLayerNormalization(q, gain)\n q9 = {MICROSOFT}(q8, {TABLES})",
        WHERE, 17,
    ),
    "centered norm": (
        f"\n q8 = LayerNormalization(q, gain)\n q9 = {MICROSOFT}(q8, {TABLES})", WHERE, 17,
    ),
    "norm and rotation in parts": (
        f"{POWER}{ROOT}\n n = Div(q, root)\n q8 = Mul(n, gain)"
        + IN_PARTS.format(q="q8", cos="cos4", sin="sin4"),
        f"float[sequence, {K}] cos4, float[sequence, {K}] sin4",
        17,
    ),
}  # fmt: skip
"""The nodes to q9, further inputs, and the opset."""


@pytest.mark.parametrize("case", ROTATIONS)
def test_find_attention_rotary_embedding_matches(case: str) -> None:
    text, inputs, opset = ROTATIONS[case]
    block = only(
        attention(
            scores=f"{text}{SCORES}",
            inputs=f"{PLAIN_INPUT}, {FLOAT_MASK}, {inputs}",
            constants=CONSTANTS,
            opset=opset,
            **({"q": ""} if "(q," not in text else {}),
        )
    )
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)
    assert (block.q.norm is not None) == ("norm" in case)
    factors = [term.factor for term in block.q.rotary_terms]
    suffix = "4" if "in parts" in case else "_table" if "where" in inputs else ""
    assert [f and f.value.name for f in factors] == [f"cos{suffix}", f"sin{suffix}"]
    positions = {f.positions.name for f in factors if f and f.positions}
    assert positions == ({"where"} if "where" in inputs else set())
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "rotary"


def test_find_attention_partial_rotation_has_term_without_factor() -> None:
    text = "\n q9 = RotaryEmbedding <rotary_embedding_dim = 2> (q, cos_half, sin_half, where)"
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, {WHERE}"
    block = only(attention(scores=f"{text}{SCORES}", inputs=inputs, constants=CONSTANTS, opset=23))
    assert [term.factor is None for term in block.q.rotary_terms] == [False, False, True]
    assert block.q.rotary_terms[2].gain.tolist() == [[0, 0, 1, 1]] * H


def test_find_attention_rotation_of_some_tokens_returns_reason() -> None:
    """DINOv3 does not rotate its class and register tokens."""
    text = (
        "\n first = Slice(q, n0, from1, tokens)\n rest = Slice(q, from1, endless, tokens)"
        "\n cos1 = Slice(cos4, from1, endless, a0)\n sin1 = Slice(sin4, from1, endless, a0)"
        + IN_PARTS.format(q="rest", cos="cos1", sin="sin1").replace("q9", "turned")
        + "\n q9 = Concat <axis = 2> (first, turned)"
    )
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[sequence, {K}] cos4, float[sequence, {K}] sin4"
    constants = CONSTANTS | {
        "from1": np.array([1]), "endless": np.array([2**62]), "tokens": np.array([2]),
    }  # fmt: skip
    (reason,) = reasons(attention(scores=f"{text}{SCORES}", inputs=inputs, constants=constants))
    assert reason == "the query is rotated for some of its tokens only"


def test_find_attention_constant_angles_are_positions() -> None:
    """Graphs of one length may have their cosines as constants."""
    turns = np.concatenate([TURNS[:5], TURNS[:5]], axis=1)
    constants = CONSTANTS | {
        "cos5": np.cos(turns).astype(np.float32),
        "sin5": np.sin(turns).astype(np.float32),
    }
    inputs = f"float[batch, 5, {D}] x, float[batch, 1, 1, 5] mask"
    text = IN_PARTS.format(q="q", cos="cos5", sin="sin5")
    block = only(attention(scores=f"{text}{SCORES}", inputs=inputs, constants=constants))
    assert block.position == "rope" and len(block.q.rotary_terms) == 2
