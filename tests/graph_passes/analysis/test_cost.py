"""Costs are exact: held against formulas written by hand, and against the paper's Table 1."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.cost import Cost, Polynomial, break_even, macs_at, model_cost
from graph_passes.analysis.shapes import bind_axes, infer_shapes_at
from graph_passes.factorize.cp import CollaborativeFactors
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate
from tests.graph_passes.graphs import D, H, K, V, attention, graph, weights

TOKENS = "float[batch, sequence, 12] x"


def macs(body: str, inputs: str, output: str, *, opset: int = 17, **lengths: int) -> int:
    cost = model_cost(graph(body, inputs=inputs, output=output, opset=opset))
    assert cost.macs is not None and cost.uncounted == ()
    return cost.macs(lengths)


# Operators


def test_matmul() -> None:
    body = "\n out = MatMul(x, Wq)"
    assert (
        macs(body, TOKENS, "float[batch, sequence, 12] out", batch=2, sequence=7) == 2 * 7 * D * 12
    )


def test_matmul_of_two_activations() -> None:
    body = "\n xt = Transpose <perm = [0, 2, 1]> (x)\n out = MatMul(x, xt)"
    assert macs(body, TOKENS, "float[b, s, s] out", batch=2, sequence=7) == 2 * 7 * 7 * D


@pytest.mark.parametrize("weight", ["Gemm (x, Wfc)", "Gemm <transA = 1> (xt, Wfc)"])
def test_gemm(weight: str) -> None:
    body = f"\n xt = Transpose <perm = [1, 0]> (x)\n out = {weight}"
    assert macs(body, "float[rows, 12] x", "float[rows, 5] out", rows=9) == 9 * 12 * 5


def test_conv_with_groups_and_strides_over_a_fixed_image() -> None:
    body = "\n out = Conv <group = 2, strides = [2, 2], kernel_shape = [3, 3]> (x, w)"
    cost = macs(
        body, "float[batch, 4, 9, 9] x, float[6, 2, 3, 3] w", "float[batch, 6, 4, 4] out", batch=3
    )
    assert cost == 3 * 6 * 4 * 4 * (2 * 3 * 3)


def test_conv_transpose() -> None:
    body = "\n out = ConvTranspose <kernel_shape = [2]> (x, w)"
    inputs = "float[batch, 4, 9] x, float[4, 6, 2] w"
    assert macs(body, inputs, "float[batch, 6, 10] out", batch=3) == 3 * 4 * 9 * 6 * 2


def test_einsum() -> None:
    body = '\n out = Einsum <equation = "bsd, btd -> bst"> (x, x)'
    assert macs(body, TOKENS, "float[b, s, s] out", batch=2, sequence=7) == 2 * 7 * 7 * D


def test_attention_operator() -> None:
    body = "\n out = Attention <q_num_heads = 3, kv_num_heads = 1> (q, k, v)"
    inputs = "float[batch, s, 12] q, float[batch, t, 4] k, float[batch, t, 2] v"
    count = macs(body, inputs, "float[batch, s, 6] out", opset=23, batch=2, s=7, t=5)
    assert count == 2 * H * 7 * 5 * (K + V)


def test_element_wise_work_is_free() -> None:
    body = "\n a = Softmax <axis = -1> (x)\n b = Add(a, bq)\n out = Mul(b, scale)"
    assert macs(body, TOKENS, "float[b, s, 12] out", batch=2, sequence=7) == 0


def test_broadcast_product_that_feeds_no_matmul_is_free() -> None:
    body = "\n u = Unsqueeze(x, a1)\n out = Mul(u, per_head)"
    assert macs(body, TOKENS, "float[b, 3, s, 12] out", batch=2, sequence=7) == 0


# Whole graphs


def test_attention_is_a_polynomial_in_its_axes() -> None:
    cost = model_cost(attention())
    assert str(cost.macs) == (
        f"{H * (K + V)} batch sequence^2 + {2 * D * H * K + 2 * D * H * V} batch sequence"
    )


def test_parameters_count_shared_weights_once_and_no_integers() -> None:
    cost = model_cost(attention())
    arrays = weights()
    names = ["Wq", "Wk", "Wv", "Wo", "bq", "bk", "bv", "bo", "scale"]
    assert cost.parameters == sum(arrays[name].size for name in names)
    shapes = [arrays[name].nbytes for name in ("heads", "v_heads", "merge")]
    assert cost.bytes == 4 * cost.parameters + sum(shapes)


def test_weight_used_twice_counts_once_in_parameters_and_twice_in_macs() -> None:
    model = graph("\n a = MatMul(x, Wq)\n out = MatMul(a, Wq)", inputs=TOKENS)
    cost = model_cost(model)
    assert cost.parameters == 144
    assert cost.macs is not None and cost.macs({"batch": 1, "sequence": 1}) == 288


def test_second_length_of_a_decoder_is_an_axis_of_its_own() -> None:
    model = attention(
        inputs="float[batch, sequence, 12] x, float[batch, memory, 12] y",
        k="\n k0 = MatMul(y, Wk)\n k2 = Reshape(k0, heads)"
        "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        v="\n v0 = MatMul(y, Wv)\n v2 = Reshape(v0, v_heads)"
        "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
        mask="\n m = Identity(s)",
    )
    cost = model_cost(model)
    S, T = 7, 5
    projections = S * D * (H * K + H * V) + T * D * (H * K + H * V)
    expected = 2 * (projections + S * T * H * (K + V))
    assert cost.macs is not None
    assert cost.macs({"batch": 2, "sequence": S, "memory": T}) == expected
    assert cost.macs_of({"x": (2, S, D), "y": (2, T, D)}) == expected


def test_fixed_axes_leave_a_number() -> None:
    cost = model_cost(graph("\n out = MatMul(x, Wq)", inputs="float[2, 3, 12] x"))
    assert str(cost.macs) == str(2 * 3 * 144)
    assert cost.macs_of({"x": (2, 3, 12)}) == 864


def test_axes_without_names_are_counted_too() -> None:
    cost = model_cost(
        graph("\n out = MatMul(x, Wq)", inputs="float[?, ?, 12] x", output="float[?, ?, 12] out")
    )
    assert cost.macs_of({"x": (2, 3, 12)}) == 864


def test_shapes_that_do_not_fit_have_no_count() -> None:
    cost = model_cost(attention())
    assert cost.macs_of({"x": (2, 3)}) is None
    assert cost.macs_of({"y": (2, 3, 12)}) is None
    assert cost.macs_of({}) is None


# What cannot be counted is named


def test_control_flow_is_named_as_uncounted() -> None:
    body = """
        w = MatMul(x, Wq)
        out = If (flag) <
            then_branch = yes () => (float[b, s, 12] a) { a = MatMul(w, Wk) },
            else_branch = no () => (float[b, s, 12] c) { c = Identity(w) }>"""
    cost = model_cost(graph(body, inputs=f"{TOKENS}, bool flag"))
    assert [line.split(":")[0] for line in cost.uncounted] == ["If ''"]
    assert cost.macs_of({"x": (1, 2, 12), "flag": ()}) is None


def test_loop_and_unknown_operators_are_named_as_uncounted() -> None:
    body = """
        y = Loop (trips, keep, x) <
            body = step (int64 i, bool go, float[b, s, 12] h) => (bool go2, float[b, s, 12] h2) {
                go2 = Identity(go)
                h2 = MatMul(h, Wq)
            }>
        out = com.microsoft.Mystery(y)"""
    cost = model_cost(graph(body, inputs=f"{TOKENS}, int64 trips, bool keep"))
    assert [line.split(" ")[0] for line in cost.uncounted] == ["Loop", "Mystery"]


def test_product_of_unknown_shape_is_named_as_uncounted() -> None:
    body = "\n at = NonZero(x)\n f = Cast <to = 1> (at)\n out = MatMul(f, f)"
    cost = model_cost(graph(body, inputs=TOKENS, output="float[a, b] out"))
    assert cost.uncounted == ("MatMul '': the shape of NonZero depends on data",)


def test_count_that_is_no_polynomial_is_named_as_uncounted() -> None:
    """A stride rounds lengths down."""
    body = "\n out = Conv <strides = [2], kernel_shape = [1]> (x, w)"
    cost = model_cost(
        graph(body, inputs="float[1, 12, n] x, float[5, 12, 1] w", output="float[1, 5, m] out")
    )
    assert cost.macs is None
    assert cost.uncounted == ("the count is not a polynomial of the axes",)


def test_more_free_axes_than_can_be_counted_are_named() -> None:
    cost = model_cost(
        graph("\n out = Abs(x)", inputs="float[a, b, c, d, e] x", output="float[a, b, c, d, e] out")
    )
    assert cost.uncounted == ("the graph has 5 free axes: expected at most 4",)


# The paper


def layer(size: int, heads: int) -> ir.Model:
    """Self-attention without biases, as Table 1 counts it."""
    rng = np.random.default_rng(0)
    head = size // heads
    constants = {
        name: rng.standard_normal((size, size), np.float32) for name in ("Wq", "Wk", "Wv", "Wo")
    }
    shape = np.array([0, 0, heads, head], np.int64)
    return attention(
        q="\n q0 = MatMul(x, Wq)\n q2 = Reshape(q0, heads)"
        "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
        k="\n k0 = MatMul(x, Wk)\n k2 = Reshape(k0, heads)"
        "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        v="\n v0 = MatMul(x, Wv)\n v2 = Reshape(v0, v_heads)"
        "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
        mask="\n m = Identity(s)",
        output="\n out = MatMul(c, Wo)",
        inputs=f"float[batch, sequence, {size}] x",
        output_type=f"float[batch, sequence, {size}] out",
        constants={**constants, "heads": shape, "v_heads": shape},
    )


def collaborative(size: int, heads: int, rank: int, *, content: bool = False) -> Cost:
    """The cost after ``Collaborate``; it does not depend on what the factors hold."""
    rng = np.random.default_rng(0)
    factors = CollaborativeFactors(
        rng.standard_normal((size, rank)),
        rng.standard_normal((size, rank)),
        rng.standard_normal((heads, rank)),
        np.full((heads, size), float(content)),
        0.0,
        0,
    )
    model = layer(size, heads)
    rewrite = Collaborate.with_factors({find_attention(model)[0][0].name: factors})
    return model_cost(rewrite(model).model)


@pytest.mark.parametrize(
    ("size", "heads", "rank", "paper"),
    [
        (512, 8, 128, (1.51, 1.09, 1.05, 0.66)),
        (768, 12, 256, (3.27, 2.65, 2.36, 1.58)),
    ],
)
def test_table_1_of_the_paper(size: int, heads: int, rank: int, paper: tuple[float, ...]) -> None:
    """arXiv 2006.16362, Table 1, T = 128, to its three digits.

    The paper counts the mixing product twice, on queries and on keys; one of them suffices.
    """
    before, after = model_cost(layer(size, heads)), collaborative(size, heads, rank)
    assert before.macs is not None and after.macs is not None
    T = 128
    lengths = {"batch": 1, "sequence": T}
    mixing = T * heads * rank
    assert round(before.macs(lengths) / 1e8, 2) == paper[0]
    assert round(after.macs(lengths) / 1e8, 2) == pytest.approx(paper[1], abs=0.0051)
    assert round((after.macs(lengths) + mixing) / 1e8, 2) == paper[1]
    assert round(before.parameters / 1e6, 2) == paper[2]
    assert round(after.parameters / 1e6, 2) == paper[3]
    assert before.parameters == 4 * size * size + 1  # and the scale
    assert after.parameters == 2 * size * size + (2 * size + heads) * rank + 1
    expected = T * (2 * size * rank + 2 * size * size) + mixing + T * T * (heads * rank + size)
    assert after.macs(lengths) == expected


@pytest.mark.parametrize("content", [False, True])
def test_break_even_is_where_the_formula_says(content: bool) -> None:
    """2D(HK - R) / (HR - HK), less what mixing (HR) and content (HD) add to each token."""
    D, H, R = 64, 4, 32
    before, after = model_cost(layer(D, H)).macs, collaborative(D, H, R, content=content).macs
    assert before is not None and after is not None
    even = (2 * D * (D - R) - H * R - H * D * content) / (H * R - D)
    assert break_even(before, after) == int(even) + 1


def polynomial(axes: tuple[str, ...], terms: dict[tuple[int, ...], int]) -> Polynomial:
    return Polynomial(axes, terms)  # type: ignore[arg-type]


def test_break_even_of_a_graph_whose_batch_is_fixed() -> None:
    before = polynomial(("sequence",), {(1,): 100, (2,): 1})
    after = polynomial(("sequence",), {(1,): 50, (2,): 2})
    assert break_even(before, after) == 51


def test_no_break_even() -> None:
    before = polynomial(("batch", "sequence"), {(1, 1): 100, (1, 2): 2})
    assert break_even(before, polynomial(before.axes, {(1, 1): 50, (1, 2): 2})) is None
    assert break_even(before, polynomial(before.axes, {(1, 1): 101, (1, 2): 2})) == 1
    assert break_even(before, polynomial(("n",), {(1,): 1})) is None
    assert break_even(polynomial((), {(): 5}), polynomial((), {(): 6})) is None


@pytest.mark.parametrize(
    ("text", "inputs", "macs"),
    [
        (  # B S D (3 H K) for the projections, 2 B S S H K for scores and context
            "out = com.microsoft.Attention <num_heads = 3> (x, Wqkv, bqkv)",
            "float[batch, sequence, 12] x",
            2 * 5 * 12 * 36 + 2 * (2 * 5 * 5 * 12),
        ),
        (
            "out = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v)",
            "float[batch, s, 12] q, float[batch, t, 12] k, float[batch, t, 6] v",
            2 * 5 * 5 * (12 + 6),
        ),
        (
            "out = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v, , , , past, past)",
            "float[b, s, 12] q, float[b, t, 12] k, float[b, t, 12] v, float[b, 3, p, 4] past",
            2 * 5 * (5 + 5) * 24,
        ),
        (
            "out = com.microsoft.GroupQueryAttention <num_heads = 3, kv_num_heads = 1>"
            " (q, k, k, past, past, lengths, total)",
            "float[b, s, 12] q, float[b, s, 4] k, float[b, 1, p, 4] past,"
            " int32[b] lengths, int32[1] total",
            2 * 5 * (5 + 5) * 24,
        ),
        ("out = com.microsoft.MatMulNBits <K = 12, N = 7> (x, x, x)", TOKENS, 2 * 5 * 12 * 7),
    ],
)
def test_fused_operators_count_their_products(text: str, inputs: str, macs: int) -> None:
    model = graph(f"\n {text}", inputs=inputs, output="float[a, b, c] out")
    facts = infer_shapes_at(model, bind_axes(model.graph, batch=2, sequence=5))
    assert macs_at(facts, model.graph) == (macs, ())
