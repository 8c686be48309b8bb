"""Scores and probabilities in any layout: element labels identify the axes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.blocks import Capped, Floor, Mask, PositionBias, Scaled, Weighted
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.shared_dimensions import sharing_refusal
from tests.graph_passes.graphs import (
    PLAIN_INPUT,
    SCALE,
    H,
    K,
    V,
    attention,
    feeds,
    only,
    reasons,
    run,
)

MASK4 = f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask"
HEADS_MASK = f"{PLAIN_INPUT}, float[batch, {H}, sequence, sequence] mask"

FOLD = "\n scores_shape = Shape(s0)\n tokens = Slice(scores_shape, a2, n4)" \
       "\n folded = Concat <axis = 0> (last, tokens)"  # fmt: skip

KEYS_BY_QUERIES = {
    "scores": "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)"
    "\n qT = Transpose <perm = [0, 1, 3, 2]> (q)\n s0 = MatMul(k, qT)\n s = Mul(s0, scale)",
    "mask": "\n maskT = Transpose <perm = [0, 1, 3, 2]> (mask)\n m = Add(s, maskT)",
}

LAID_OUT: dict[str, tuple[dict[str, str], str]] = {
    "folded into the batch before the softmax": (
        {
            "scores": f"\n s0 = MatMul(q, kT)\n s = Mul(s0, scale){FOLD}",
            "mask": "\n m4 = Add(s, mask)\n m = Reshape(m4, folded)",
            "softmax": "\n p3 = Softmax <axis = -1> (m)\n p = Reshape(p3, scores_shape)",
        },
        MASK4,
    ),
    "folded into the batch but for the mask": (
        {
            "scores": f"\n s0 = MatMul(q, kT){FOLD}\n s3 = Reshape(s0, folded)"
            "\n s = Mul(s3, scale)",
            "mask": "\n s4 = Reshape(s, scores_shape)\n m4 = Add(s4, mask)"
            "\n m = Reshape(m4, folded)",
            "softmax": "\n p3 = Softmax <axis = -1> (m)\n p = Reshape(p3, scores_shape)",
        },
        MASK4,
    ),
    "heads last": (
        {
            "mask": "\n sT = Transpose <perm = [2, 3, 0, 1]> (s)"
            "\n maskT = Transpose <perm = [2, 3, 0, 1]> (mask)\n m = Add(sT, maskT)",
            "softmax": "\n pT = Softmax <axis = 1> (m)\n p = Transpose <perm = [2, 3, 0, 1]> (pT)",
        },
        HEADS_MASK,
    ),
    "heads in front of the batch": (
        {
            "mask": "\n sT = Transpose <perm = [1, 0, 2, 3]> (s)\n m = Add(sT, mask)",
            "softmax": "\n pT = Softmax <axis = -1> (m)\n p = Transpose <perm = [1, 0, 2, 3]> (pT)",
        },
        f"{PLAIN_INPUT}, float[{H}, batch, sequence, sequence] mask",
    ),
    "keys by queries": (
        {
            **KEYS_BY_QUERIES,
            "softmax": "\n pT = Softmax <axis = 2> (m)\n p = Transpose <perm = [0, 1, 3, 2]> (pT)",
        },
        MASK4,
    ),
    "keys by queries, and the context too": (
        {
            **KEYS_BY_QUERIES,
            "softmax": "\n p = Softmax <axis = 2> (m)",
            "context": "\n vT = Transpose <perm = [0, 1, 3, 2]> (v)\n c0 = MatMul(vT, p)"
            "\n c1 = Transpose <perm = [0, 3, 1, 2]> (c0)\n c = Reshape(c1, merge)",
        },
        MASK4,
    ),
    "keys by queries, contracted by an Einsum": (
        {
            "scores": '\n s0 = Einsum <equation = "bhkt,bhsk->bhts"> (kT, q)\n s = Mul(s0, scale)',
            "mask": "\n m = Identity(s)",
            "softmax": "\n p = Softmax <axis = 2> (m)",
            "context": '\n c = Einsum <equation = "bhts,bhtv->bshv"> (p, v)',
            "output": "\n c9 = Reshape(c, merge)\n o = MatMul(c9, Wo)\n out = Add(o, bo)",
        },
        MASK4,
    ),
    "five axes, one of them a unit": (
        {
            "scores": "\n s0 = MatMul(q, kT)\n s5 = Unsqueeze(s0, a2)\n s = Mul(s5, scale)",
            "mask": "\n mask5 = Unsqueeze(mask, a2)\n m = Add(s, mask5)",
            "softmax": "\n p5 = Softmax <axis = -1> (m)\n p = Squeeze(p5, a2)",
        },
        MASK4,
    ),
    "five axes in front": (
        {
            "mask": "\n s5 = Unsqueeze(s, a0)\n m5 = Add(s5, mask)\n m = Squeeze(m5, a0)",
        },
        MASK4,
    ),
    "five axes and transposed": (
        {
            "scores": "\n s0 = MatMul(q, kT)\n s5 = Unsqueeze(s0, a2)"
            "\n sT = Transpose <perm = [2, 3, 4, 0, 1]> (s5)\n s = Mul(sT, scale)",
            "mask": "\n mask5 = Unsqueeze(mask, a2)"
            "\n maskT = Transpose <perm = [2, 3, 4, 0, 1]> (mask5)\n m = Add(s, maskT)",
            "softmax": "\n pT = Softmax <axis = 2> (m)"
            "\n p5 = Transpose <perm = [3, 4, 0, 1, 2]> (pT)\n p = Squeeze(p5, a2)",
        },
        HEADS_MASK,
    ),
    "transposed twice and back": (
        {
            "mask": "\n s1 = Transpose <perm = [3, 2, 1, 0]> (s)"
            "\n s2 = Transpose <perm = [3, 2, 1, 0]> (s1)\n m = Add(s2, mask)",
        },
        MASK4,
    ),
    "cast on the way": (
        {
            "mask": "\n s1 = Cast <to = 1> (s)\n s2 = CastLike(s1, mask)\n m = Add(s2, mask)",
            "softmax": "\n p9 = Softmax <axis = -1> (m)\n p = CastLike(p9, v)",
        },
        MASK4,
    ),
}


def laid_out(case: str) -> ir.Model:
    parts, inputs = LAID_OUT[case]
    return attention(inputs=inputs, constants={"n4": np.array([4], np.int64)}, **parts)


@pytest.mark.parametrize("case", LAID_OUT)
def test_find_attention_scores_layout_matches(case: str) -> None:
    block = only(laid_out(case))
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, V)
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    assert len(block.steps) == (0 if "Einsum" in case else 1)
    assert (block.kind, block.output is None) == ("self", False)


def test_find_attention_softmax_axis_distinguishes_queries_and_keys() -> None:
    plain, turned = only(attention()), only(laid_out("keys by queries"))
    np.testing.assert_array_equal(turned.q.matrix(), plain.q.matrix())
    np.testing.assert_array_equal(turned.k.matrix(), plain.k.matrix())


def test_find_attention_layout_records_axes() -> None:
    heads_last = only(laid_out("heads last"))
    assert heads_last.softmax is not None and heads_last.softmax.logits.name == "sT"
    assert heads_last.softmax.axes == (2, 3, 0, 1)
    (bias,) = heads_last.steps
    assert isinstance(bias, PositionBias) and bias.axes == (2, 3, 0, 1)
    assert heads_last.probabilities is not None and heads_last.probabilities.name == "p"
    in_order = only(attention())
    assert in_order.softmax is not None and in_order.softmax.axes == (0, 1, 2, 3)
    assert in_order.steps[0].axes is None  # type: ignore[union-attr]


def test_find_attention_probabilities_in_other_layout_are_none() -> None:
    block = only(laid_out("keys by queries, and the context too"))
    assert block.probabilities is None
    assert block.softmax is not None and block.own_probabilities is None
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == "probability_layout"


@pytest.mark.parametrize(
    "case", [case for case in LAID_OUT if not sharing_refusal(only(laid_out(case)))]
)
def test_collaborate_scores_layout_keeps_outputs(case: str) -> None:
    """At R = H*K the output stays within 1e-4."""
    model = laid_out(case)
    blocks, _ = find_attention(model)
    Collaborate.with_factors({block.name: factor(block, H * K) for block in blocks})(model)
    arrays = feeds(laid_out(case))
    np.testing.assert_allclose(run(model, arrays), run(laid_out(case), arrays), atol=1e-4, rtol=0)
    assert only(model).form == "collaborative"


STEPS: dict[str, tuple[str, list[object]]] = {
    "tanh before the mask": ("\n c9 = Tanh(s)\n m = Add(c9, mask)", [Capped, PositionBias]),
    "tanh after the mask": ("\n m9 = Add(s, mask)\n m = Tanh(m9)", [PositionBias, Capped]),
    "soft cap": (
        "\n s8 = Div(s, five)\n s9 = Tanh(s8)\n capped = Mul(s9, five)\n m = Add(capped, mask)",
        [Capped, Scaled, PositionBias],
    ),
    "floor": ("\n m9 = Add(s, mask)\n m = Max(m9, low)", [PositionBias, Floor]),
    "floor by Clip": ("\n m9 = Add(s, mask)\n m = Clip(m9, low)", [PositionBias, Floor]),
    "weights and a bias": ("\n m9 = Mul(s, mask)\n m = Add(m9, mask)", [Weighted, PositionBias]),
    "subtracted": ("\n m = Sub(s, mask)", [PositionBias]),
    "two masks": (
        "\n seen = Greater(mask, low)\n m9 = Where(seen, s, low)\n m = Add(m9, per_head)",
        [Mask, PositionBias],
    ),
    "divided after the mask": ("\n m9 = Add(mask, s)\n m = Div(m9, five)", [PositionBias, Scaled]),
    "a sum": ("\n m = Sum(s, mask)", [PositionBias]),
}


@pytest.mark.parametrize("case", STEPS)
def test_find_attention_steps_are_in_order(case: str) -> None:
    mask, kinds = STEPS[case]
    block = only(attention(mask=mask, inputs=MASK4, constants={"five": np.float32(5)}))
    assert [type(step) for step in block.steps] == kinds
    signs = {step.sign for step in block.steps if isinstance(step, PositionBias)}
    assert signs <= {-1 if case == "subtracted" else 1}
    assert block.scale == pytest.approx(SCALE / 5 if case == "soft cap" else SCALE, rel=1e-6)


@pytest.mark.parametrize(
    ("shape", "position"),
    [(f"[1, {H}, sequence, sequence]", "bias"), ("[batch, 1, sequence, sequence]", "none")],
)
def test_find_attention_bias_by_head_is_position(shape: str, position: str) -> None:
    block = only(attention(inputs=f"{PLAIN_INPUT}, float{shape} mask"))
    assert block.position == position


SOFTMAXES = {
    "exponential of the logarithm": "\n l = LogSoftmax <axis = -1> (m)\n p = Exp(l)",
    "quotient": "\n e = Exp(m)\n z = ReduceSum(e, last)\n p = Div(e, z)",
    "stable quotient": "\n t = ReduceMax <axes = [-1]> (m)\n d = Sub(m, t)\n e = Exp(d)"
    "\n z = ReduceSum(e, last)\n p = Div(e, z)",
    "safe": "\n p0 = Softmax <axis = -1> (m)\n n = IsNaN(p0)\n p = Where(n, zero, p0)",
}


@pytest.mark.parametrize("case", SOFTMAXES)
def test_find_attention_softmax_notation_matches(case: str) -> None:
    block = only(attention(softmax=SOFTMAXES[case], inputs=MASK4))
    assert (block.num_heads, block.scale) == (H, pytest.approx(SCALE, rel=1e-6))
    assert block.probabilities is not None and block.probabilities.name == "p"


def test_find_attention_bias_softmax_matches_without_certificate() -> None:
    bias = "\n p = com.microsoft.BiasSoftmax <axis = 3, is_inner_broadcast = 0> (s, mask)"
    model = attention(mask="", softmax=bias, inputs=HEADS_MASK)
    (block,), _ = find_attention(model)
    (step,) = block.steps
    assert isinstance(step, PositionBias) and step.value.name == "mask"
    (reason,) = reasons(model)
    assert "not certified" in reason and "BiasSoftmax" in reason


UNMATCHED: dict[str, tuple[dict[str, str], str]] = {
    "softmax over the queries": (
        {"softmax": "\n p = Softmax <axis = 2> (m)"},
        "MatMul sums probabilities over another axis than the keys",
    ),
    "softmax over the batch": (
        {"softmax": "\n p = Softmax <axis = 0> (m)"},
        "the softmax 'p' is not over the keys of (B, H, S, T) logits",
    ),
    "softmax over keys and queries": (
        {
            "mask": "\n m9 = Add(s, mask)\n m = Reshape(m9, side_by_side)",
            "softmax": "\n p9 = Softmax <axis = -1> (m)\n shape = Shape(m9)"
            "\n p = Reshape(p9, shape)",
        },
        "the softmax 'p9' is not over the keys",
    ),
    "probabilities summed over the queries": (
        {"softmax": "\n p9 = Softmax <axis = -1> (m)\n p = Transpose <perm = [0, 1, 3, 2]> (p9)"},
        "MatMul sums probabilities over another axis than the keys",
    ),
    "keys by queries without a transpose": (
        {
            "scores": "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)"
            "\n qT = Transpose <perm = [0, 1, 3, 2]> (q)\n s0 = MatMul(k, qT)\n s = Mul(s0, scale)",
            "softmax": "\n p = Softmax <axis = 2> (m)",
        },
        "MatMul sums probabilities over another axis than the keys",
    ),
    "two products": (
        {"scores": "\n s0 = MatMul(q, kT)\n s1 = MatMul(q, kT)\n s = Add(s0, s1)"},
        "Add adds two products of queries and keys: expected one",
    ),
    "scores spread over another axis": (
        {"scores": "\n s0 = MatMul(q, kT)\n s = Mul(s0, five_axes)", "mask": "\n m = Identity(s)",
         "context": "\n c0 = MatMul(p, v)\n c = ReduceSum <keepdims = 0> (c0, a0)",
         "output": "\n o = Transpose <perm = [0, 2, 1, 3]> (c)\n c9 = Reshape(o, merge)"
                   "\n o9 = MatMul(c9, Wo)\n out = Add(o9, bo)"},
        "Mul broadcasts the scores along another axis",
    ),
    "keys turned round after the product": (
        {"mask": "\n s9 = Slice(s, last, before, a3, last)\n m = Add(s9, mask)"},
        "Softmax has no product of queries and keys as input",
    ),
    "Dropout that is switched on": (
        {"softmax": "\n p9 = Softmax <axis = -1> (m)\n on = Equal(i0, i0)"
                    "\n p = Dropout(p9, half, on)"},
        "Dropout is a dropout in training mode: export in evaluation mode",
    ),
    "a sum of three": (
        {"mask": "\n m = Sum(s, mask, mask)"},
        "Softmax has no product of queries and keys as input",
    ),
    "probabilities that are squared": (
        {"softmax": "\n p9 = Softmax <axis = -1> (m)\n p = Mul(p9, p9)"},
        "no product with values reads the probabilities 'p9'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNMATCHED)
def test_find_attention_near_miss_returns_reason(case: str) -> None:
    parts, expected = UNMATCHED[case]
    constants = {
        "side_by_side": np.array([0, 0, -1], np.int64),
        "five_axes": np.ones((2, 1, 1, 1, 1), np.float32),
        "before": np.array([-99], np.int64),
        "half": np.float32(0.5),
    }
    (reason,) = reasons(attention(inputs=MASK4, constants=constants, **parts))
    assert expected in reason


def test_find_attention_mask_has_axes_of_scores() -> None:
    """Heads last: a mask (1, T, 1, H) differs between heads."""
    parts, _ = LAID_OUT["heads last"]
    parts = {**parts, "mask": "\n sT = Transpose <perm = [2, 3, 0, 1]> (s)\n m = Add(sT, mask)"}
    (step,) = only(
        attention(inputs=f"{PLAIN_INPUT}, float[1, sequence, 1, {H}] mask", **parts)
    ).steps
    assert isinstance(step, PositionBias) and step.axes == (2, 3, 0, 1)
