"""Exact costs: compared with explicit formulas and with Table 1 of arXiv 2006.16362."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.cost import Cost, Polynomial, break_even, macs_at, model_cost
from graph_passes.analysis.shapes import infer_shapes_at
from graph_passes.factorize.cp import CollaborativeFactors
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate
from tests.graph_passes.graphs import D, H, K, V, attention, graph, weights

TOKENS = "float[batch, sequence, 12] x"


OPERATORS: dict[str, tuple[str, str, str, dict[str, int], int]] = {
    "MatMul": (
        "out = MatMul(x, Wq)", TOKENS, "batch, sequence, 12", {"batch": 2, "sequence": 7},
        2 * 7 * D * 12,
    ),
    "MatMul of two activations": (
        "xt = Transpose <perm = [0, 2, 1]> (x)\n out = MatMul(x, xt)", TOKENS, "b, s, s",
        {"batch": 2, "sequence": 7}, 2 * 7 * 7 * D,
    ),
    "Gemm": ("out = Gemm (x, Wfc)", "float[rows, 12] x", "rows, 5", {"rows": 9}, 9 * 12 * 5),
    "Gemm, transposed": (
        "xt = Transpose <perm = [1, 0]> (x)\n out = Gemm <transA = 1> (xt, Wfc)",
        "float[rows, 12] x", "rows, 5", {"rows": 9}, 9 * 12 * 5,
    ),
    "Conv with groups and strides": (
        "out = Conv <group = 2, strides = [2, 2], kernel_shape = [3, 3]> (x, w)",
        "float[batch, 4, 9, 9] x, float[6, 2, 3, 3] w", "batch, 6, 4, 4", {"batch": 3},
        3 * 6 * 4 * 4 * (2 * 3 * 3),
    ),
    "ConvTranspose": (
        "out = ConvTranspose <kernel_shape = [2]> (x, w)",
        "float[batch, 4, 9] x, float[4, 6, 2] w", "batch, 6, 10", {"batch": 3}, 3 * 4 * 9 * 6 * 2,
    ),
    "Einsum": (
        'out = Einsum <equation = "bsd, btd -> bst"> (x, x)', TOKENS, "b, s, s",
        {"batch": 2, "sequence": 7}, 2 * 7 * 7 * D,
    ),
    "Attention": (
        "out = Attention <q_num_heads = 3, kv_num_heads = 1> (q, k, v)",
        "float[batch, s, 12] q, float[batch, t, 4] k, float[batch, t, 2] v", "batch, s, 6",
        {"batch": 2, "s": 7, "t": 5}, 2 * H * 7 * 5 * (K + V),
    ),
    "element-wise": (
        "a = Softmax <axis = -1> (x)\n b = Add(a, bq)\n out = Mul(b, scale)", TOKENS, "b, s, 12",
        {"batch": 2, "sequence": 7}, 0,
    ),
    "broadcast product without MatMul": (
        "u = Unsqueeze(x, a1)\n out = Mul(u, per_head)", TOKENS, "b, 3, s, 12",
        {"batch": 2, "sequence": 7}, 0,
    ),
    "com.microsoft.Attention": (  # projections and scores and context
        "out = com.microsoft.Attention <num_heads = 3> (x, Wqkv, bqkv)", TOKENS, "a, b, c",
        {"batch": 2, "sequence": 5}, 2 * 5 * 12 * 36 + 2 * (2 * 5 * 5 * 12),
    ),
    "MultiHeadAttention": (
        "out = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v)",
        "float[batch, s, 12] q, float[batch, t, 12] k, float[batch, t, 6] v", "a, b, c",
        {"batch": 2, "s": 5, "t": 5}, 2 * 5 * 5 * (12 + 6),
    ),
    "MultiHeadAttention with a cache": (
        "out = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v, , , , past, past)",
        "float[b, s, 12] q, float[b, t, 12] k, float[b, t, 12] v, float[b, 3, p, 4] past",
        "a, b, c", {"b": 2, "s": 5, "t": 5, "p": 5}, 2 * 5 * (5 + 5) * 24,
    ),
    "GroupQueryAttention": (
        "out = com.microsoft.GroupQueryAttention <num_heads = 3, kv_num_heads = 1>"
        " (q, k, k, past, past, lengths, total)",
        "float[b, s, 12] q, float[b, s, 4] k, float[b, 1, p, 4] past,"
        " int32[b] lengths, int32[1] total",
        "a, b, c", {"b": 2, "s": 5, "p": 5}, 2 * 5 * (5 + 5) * 24,
    ),
    "FusedMatMul that moves the first axes": (
        "out = com.microsoft.FusedMatMul <transBatchA = 1, transBatchB = 1, transB = 1> (q, k)",
        "float[s, b, 4] q, float[t, b, 4] k", "a, b, c", {"b": 2, "s": 5, "t": 5}, 2 * 5 * 5 * 4,
    ),
    "FusedMatMul that transposes after it": (
        "out = com.microsoft.FusedMatMul <transBatchA = 1, transA = 1> (q, k)",
        "float[s, b, 4] q, float[b, s, 3] k", "a, b, c", {"b": 2, "s": 5}, 2 * 4 * 5 * 3,
    ),
    "MatMulNBits": (
        "out = com.microsoft.MatMulNBits <K = 12, N = 7> (x, x, x)", TOKENS, "a, b, c",
        {"batch": 2, "sequence": 5}, 2 * 5 * 12 * 7,
    ),
}  # fmt: skip
"""The nodes, inputs, output shape, axis lengths, and the expected MACs."""


@pytest.mark.parametrize("name", OPERATORS)
def test_model_cost_operator_macs(name: str) -> None:
    body, inputs, output, lengths, expected = OPERATORS[name]
    opset = 23 if name == "Attention" else 17
    model = graph(f"\n {body}", inputs=inputs, output=f"float[{output}] out", opset=opset)
    cost = model_cost(model)
    assert cost.macs is not None and cost.uncounted == ()
    assert cost.macs(lengths) == expected
    assert macs_at(infer_shapes_at(model, lengths), model.graph) == (expected, ())


# Whole graphs


def test_model_cost_attention_is_polynomial() -> None:
    cost = model_cost(attention())
    assert str(cost.macs) == (
        f"{H * (K + V)} batch sequence^2 + {2 * D * H * K + 2 * D * H * V} batch sequence"
    )


def test_model_cost_parameters_exclude_integers() -> None:
    cost = model_cost(attention())
    arrays = weights()
    names = ["Wq", "Wk", "Wv", "Wo", "bq", "bk", "bv", "bo", "scale"]
    assert cost.parameters == sum(arrays[name].size for name in names)
    shapes = [arrays[name].nbytes for name in ("heads", "v_heads", "merge")]
    assert cost.bytes == 4 * cost.parameters + sum(shapes)


def test_model_cost_shared_weight_counts_once_in_parameters() -> None:
    model = graph("\n a = MatMul(x, Wq)\n out = MatMul(a, Wq)", inputs=TOKENS)
    cost = model_cost(model)
    assert cost.parameters == 144
    assert cost.macs is not None and cost.macs({"batch": 1, "sequence": 1}) == 288


def test_model_cost_cross_attention_has_two_lengths() -> None:
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


@pytest.mark.parametrize("axes", ["2, 3", "?, ?"])
def test_model_cost_fixed_or_unnamed_axes_are_counted(axes: str) -> None:
    shape = f"float[{axes}, 12]"
    cost = model_cost(graph("\n out = MatMul(x, Wq)", inputs=f"{shape} x", output=f"{shape} out"))
    assert cost.macs_of({"x": (2, 3, 12)}) == 864
    assert (str(cost.macs) == "864") == (axes == "2, 3")


def test_macs_of_other_shapes_returns_none() -> None:
    cost = model_cost(attention())
    assert cost.macs_of({"x": (2, 3)}) is None
    assert cost.macs_of({"y": (2, 3, 12)}) is None
    assert cost.macs_of({}) is None


# Uncounted nodes


IF = """
    w = MatMul(x, Wq)
    out = If (flag) <
        then_branch = yes () => (float[b, s, 12] a) { a = MatMul(w, Wk) },
        else_branch = no () => (float[b, s, 12] c) { c = Identity(w) }>"""
LOOP = """
    y = Loop (trips, keep, x) <
        body = step (int64 i, bool go, float[b, s, 12] h) => (bool go2, float[b, s, 12] h2) {
            go2 = Identity(go)
            h2 = MatMul(h, Wq)
        }>
    out = com.microsoft.Mystery(y)"""
UNCOUNTED: dict[str, tuple[str, str, str, list[str]]] = {
    "If": (IF, f"{TOKENS}, bool flag", "b, s, 12", ["If ''"]),
    "Loop and unknown operator": (
        LOOP, f"{TOKENS}, int64 trips, bool keep", "b, s, 12", ["Loop ''", "Mystery ''"],
    ),
    "unknown shape": (
        "\n at = NonZero(x)\n f = Cast <to = 1> (at)\n out = MatMul(f, f)", TOKENS, "a, b",
        ["MatMul '': the shape of NonZero depends on data"],
    ),
    "no polynomial": (  # a stride rounds lengths down
        "\n out = Conv <strides = [2], kernel_shape = [1]> (x, w)",
        "float[1, 12, n] x, float[5, 12, 1] w", "1, 5, m", ["the count is not a polynomial"],
    ),
    "too many axes": (
        "\n out = Abs(x)", "float[a, b, c, d, e] x", "a, b, c, d, e", ["the graph has 5 free axes"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNCOUNTED)
def test_model_cost_uncounted_node_is_named(case: str) -> None:
    body, inputs, output, names = UNCOUNTED[case]
    cost = model_cost(graph(body, inputs=inputs, output=f"float[{output}] out"))
    assert len(cost.uncounted) == len(names)
    assert all(map(str.startswith, cost.uncounted, names))
    assert (cost.macs is None) == (case in ("no polynomial", "too many axes"))
    assert cost.macs_of({"x": (1, 2, 12), "flag": ()}) is None


# The paper


def layer(size: int, heads: int) -> ir.Model:
    """Self-attention without biases, as in Table 1."""
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
    """The cost after ``Collaborate``; it does not depend on the values of the factors."""
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
    rewrite = Collaborate.with_factors({find_attention(model).blocks[0].name: factors})
    return model_cost(rewrite(model).model)


@pytest.mark.parametrize(
    ("size", "heads", "rank", "paper"),
    [
        (512, 8, 128, (1.51, 1.09, 1.05, 0.66)),
        (768, 12, 256, (3.27, 2.65, 2.36, 1.58)),
    ],
)
def test_model_cost_equals_table_1_of_the_paper(
    size: int, heads: int, rank: int, paper: tuple[float, ...]
) -> None:
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
def test_break_even_equals_formula(content: bool) -> None:
    """2D(HK - R) / (HR - HK), less what mixing (HR) and content (HD) add to each token."""
    D, H, R = 64, 4, 32
    before, after = model_cost(layer(D, H)).macs, collaborative(D, H, R, content=content).macs
    assert before is not None and after is not None
    even = (2 * D * (D - R) - H * R - H * D * content) / (H * R - D)
    assert break_even(before, after) == int(even) + 1


def polynomial(axes: tuple[str, ...], terms: dict[tuple[int, ...], int]) -> Polynomial:
    return Polynomial(axes, terms)  # type: ignore[arg-type]


def test_break_even_fixed_batch_returns_length() -> None:
    before = polynomial(("sequence",), {(1,): 100, (2,): 1})
    after = polynomial(("sequence",), {(1,): 50, (2,): 2})
    assert break_even(before, after) == 51


def test_break_even_without_crossing_returns_none() -> None:
    before = polynomial(("batch", "sequence"), {(1, 1): 100, (1, 2): 2})
    assert break_even(before, polynomial(before.axes, {(1, 1): 50, (1, 2): 2})) is None
    assert break_even(before, polynomial(before.axes, {(1, 1): 101, (1, 2): 2})) == 1
    assert break_even(before, polynomial(("n",), {(1,): 1})) is None
    assert break_even(polynomial((), {(): 5}), polynomial((), {(): 6})) is None


def test_largest_node_bytes_is_that_of_short_and_of_long_inputs():
    """The context product dominates short inputs, adding a mask to the scores long ones."""
    cost = model_cost(attention())

    def largest(length: int) -> int | None:
        return cost.largest_node_bytes({"x": (2, length, D), "mask": (2, 1, 1, length)})

    scores = 4 * 2 * H * 1000**2
    assert largest(1000) == 2 * scores + 4 * 2 * 1000
    assert largest(1) == 2 * (12 + 96)
    assert cost.largest_node_bytes({}) is None
