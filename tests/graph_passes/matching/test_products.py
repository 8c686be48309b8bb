"""Products of attention as MatMul, Gemm, FusedMatMul and Einsum have the same heads."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph_passes.graphs import (
    PLAIN_INPUT,
    SCALE,
    D,
    H,
    K,
    V,
    attention,
    graph,
    only,
    reasons,
    run,
    weights,
)

SHAPED = {  # the weights of graphs.weights() as Keras keeps them
    "Wq3": weights()["Wq"].reshape(D, H, K),
    "Wk3": weights()["Wk"].reshape(D, H, K),
    "Wv3": weights()["Wv"].reshape(D, H, V),
    "Wo3": weights()["Wo"].reshape(H, V, D),
    "bq2": weights()["bq"].reshape(H, K),
    "bk2": weights()["bk"].reshape(H, K),
    "bv2": weights()["bv"].reshape(H, V),
    "WqHDK": np.ascontiguousarray(weights()["Wq"].reshape(D, H, K).transpose(1, 0, 2)),
    "WqHKD": np.ascontiguousarray(weights()["Wq"].reshape(D, H, K).transpose(1, 2, 0)),
    "W3": weights()["Wqkv"].reshape(D, 3, H * K).transpose(1, 0, 2).copy(),
    "b3": weights()["bqkv"].reshape(3, 1, H * K),
    "merged": np.array([-1, H * V], np.int64),
    "flat_heads": np.array([-1, 5, H, K], np.int64),
    "n3": np.array([H], np.int64),
    "n4": np.array([K], np.int64),
    "stacked": np.array([3, -1, 5, H, K], np.int64),
}

KERAS = {
    "q": """
        q0 = Einsum <equation = "abc,cde->abde"> (x, Wq3)
        q1 = Add(q0, bq2)
        q = Mul(q1, scale)""",
    "k": """
        k0 = Einsum <equation = "abc,cde->abde"> (x, Wk3)
        k = Add(k0, bk2)""",
    "v": """
        v0 = Einsum <equation = "abc,cde->abde"> (x, Wv3)
        v = Add(v0, bv2)""",
    "scores": """
        s = Einsum <equation = "aecd,abcd->acbe"> (k, q)""",
    "context": """
        c = Einsum <equation = "acbe,aecd->abcd"> (p, v)""",
    "output": """
        o = Einsum <equation = "abcd,cde->abe"> (c, Wo3)
        out = Add(o, bo)""",
}
"""keras.layers.MultiHeadAttention: tokens a b, heads c, sizes d."""


def query(text: str) -> dict[str, str]:
    return {"q": f"\n {text}"}


HEADS_LAST = (
    "\n q1 = Add(q0, bq)\n q2 = Reshape(q1, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"
)

FLAT_HEADS = (
    "\n length = Shape <start = 1, end = 2> (x)"
    "\n laid_out = Concat <axis = 0> (last, length, n3, n4)\n q2 = Reshape(q0, laid_out)"
    "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"
)

PRODUCTS: dict[str, dict[str, str]] = {
    "Einsum, as Keras writes it": KERAS,
    "Einsum with spaces in its equation": {
        "scores": "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)"
        '\n s0 = Einsum <equation = "b h s k, b h t k -> b h s t"> (q, k)'
        "\n s = Mul(s0, scale)",
    },
    "Einsum with an ellipsis": {
        "scores": '\n s0 = Einsum <equation = "...sk,...kt->...st"> (q, kT)\n s = Mul(s0, scale)',
        "context": '\n c0 = Einsum <equation = "...st,...tv->...sv"> (p, v)'
        "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c = Reshape(c1, merge)",
    },
    "Einsum with the weight first": query(
        f'q0 = Einsum <equation = "nd,bsd->bsn"> (WqT, x){HEADS_LAST}'
    ),
    "Einsum that lays the heads apart": query(
        'q0 = Einsum <equation = "bsd,hdk->bhsk"> (x, WqHDK)'
        "\n bias = Reshape(bq, per_head_bias)\n q = Add(q0, bias)"
    ),
    "Einsum with the contracted axis of the weight last": query(
        'q = Einsum <equation = "bsd,hkd->bhsk"> (x, WqHKD)'
    ),
    "Einsum that merges nothing and is merged afterwards": {
        "context": '\n c0 = Einsum <equation = "bhst,bhtv->bshv"> (p, v)\n c = Reshape(c0, merge)',
    },
    "Einsum over heads first": {
        "context": '\n c = Einsum <equation = "bhst,bhtv->bshv"> (p, v)',
        "output": '\n o = Einsum <equation = "bshv,hvd->bsd"> (c, Wo3)\n out = Add(o, bo)',
    },
    "FusedMatMul with its scale": {
        "scores": "\n k = Transpose <perm = [0, 1, 3, 2]> (kT)"
        "\n s = com.microsoft.FusedMatMul <alpha = 0.37, transB = 1> (q, k)",
    },
    "FusedMatMul with the queries transposed": {
        "scores": "\n qT = Transpose <perm = [0, 1, 3, 2]> (q)"
        "\n s = com.microsoft.FusedMatMul <alpha = 0.37, transA = 1> (qT, kT)",
    },
    "FusedMatMul as a projection": query(
        f"q0 = com.microsoft.FusedMatMul <transB = 1> (x, WqT){HEADS_LAST}"
    ),
    "FusedMatMul as the context": {
        "context": "\n vT = Transpose <perm = [0, 1, 3, 2]> (v)"
        "\n c0 = com.microsoft.FusedMatMul <transB = 1> (p, vT)"
        "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c = Reshape(c1, merge)",
    },
    "FusedMatMul as the output projection": {
        "output": "\n o = com.microsoft.FusedMatMul <transB = 1> (c, WoT)\n out = Add(o, bo)",
    },
    "Gemm with both of its matrices as they are": query(
        f"flat_x = Reshape(x, flat)\n q0 = Gemm(flat_x, Wq, bq){FLAT_HEADS}"
    ),
    "Gemm with a bias of one row": query(
        "flat_x = Reshape(x, flat)\n row = Unsqueeze(bq, a0)"
        f"\n q0 = Gemm(flat_x, Wq, row){FLAT_HEADS}"
    ),
    "values that the context has on its left": {
        "context": "\n vT = Transpose <perm = [0, 1, 3, 2]> (v)"
        "\n pT = Transpose <perm = [0, 1, 3, 2]> (p)\n cT = MatMul(vT, pT)"
        "\n c1 = Transpose <perm = [0, 3, 1, 2]> (cT)\n c = Reshape(c1, merge)",
    },
}
CONSTANTS = SHAPED | {"per_head_bias": np.array([1, H, 1, K], np.int64)}


@pytest.mark.parametrize("notation", PRODUCTS)
def test_find_attention_product_has_heads_of_plain_attention(notation: str) -> None:
    plain, block = only(attention()), only(attention(constants=CONSTANTS, **PRODUCTS[notation]))
    assert (block.num_heads, block.num_kv_heads) == (H, H)
    assert (block.head_size, block.v_head_size, block.input_size) == (K, V, D)
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    assert (block.kind, block.form, block.position) == ("self", "standard", "none")
    for one, other in ((plain.q, block.q), (plain.k, block.k), (plain.v, block.v)):
        np.testing.assert_allclose(one.heads(), other.heads(), atol=1e-6, rtol=0)
    assert plain.output is not None and block.output is not None
    assert block.output.matrix().shape == (H * V, D)
    np.testing.assert_allclose(
        plain.output.matrix()[plain.output.rows],
        block.output.matrix()[block.output.rows],
        atol=1e-6,
        rtol=0,
    )


def test_keras_attention_equals_plain_attention() -> None:
    """Within 1e-5: the graphs differ only in the operators of the products."""
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    arrays = {"x": x, "mask": np.zeros((2, 1, 1, 5), np.float32)}
    got = run(attention(constants=CONSTANTS, **KERAS), arrays)
    np.testing.assert_allclose(got, run(attention(), arrays), atol=1e-5, rtol=0)


def test_find_attention_keras_single_head_matches() -> None:
    constants = {
        name: array[:, :1] if name[0] == "W" else array[:1]
        for name, array in SHAPED.items()
        if name in ("Wq3", "Wk3", "Wv3", "bq2", "bk2", "bv2")
    }
    block = only(attention(constants=constants | {"Wo3": SHAPED["Wo3"][:1]}, **KERAS))
    assert (block.num_heads, block.head_size, block.v_head_size) == (1, K, V)


def test_find_attention_stacked_weight_is_shared() -> None:
    """(1, B*S, D) @ (3, D, N) + (3, 1, N): queries, keys and values are columns of one weight."""
    stack = """
        flat_x = Reshape(x, flat)
        one_x = Unsqueeze(flat_x, a0)
        made = MatMul(one_x, W3)
        biased = Add(made, b3)
        length = Shape <start = 1, end = 2> (x)
        laid_out = Concat <axis = 0> (n3, last, length, n3, n4)
        apart = Reshape(biased, laid_out)
        apart1 = Transpose <perm = [0, 1, 3, 2, 4]> (apart)
        q = Gather <axis = 0> (apart1, i0)
        k = Gather <axis = 0> (apart1, i1)
        kT = Transpose <perm = [0, 1, 3, 2]> (k)
        v = Gather <axis = 0> (apart1, i2)"""
    block = only(
        attention(q=stack, k="", v="", output="\n out = MatMul(c, Wo12)", constants=CONSTANTS)
    )
    assert block.q.weight == block.k.weight == block.v.weight
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, K)
    np.testing.assert_allclose(
        block.q.heads(), weights()["Wqkv"][:, : H * K].reshape(D, H, K).transpose(1, 0, 2), atol=0
    )


@pytest.mark.parametrize(
    ("parts", "scale", "v_scale"),
    [
        (
            {"q": "\n q0 = com.microsoft.FusedMatMul <alpha = 0.5> (x, Wq)"
                  "\n q2 = Reshape(q0, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
            SCALE / 2,
            1.0,
        ),
        (
            {"context": "\n c0 = com.microsoft.FusedMatMul <alpha = 0.5> (p, v)"
                        "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c = Reshape(c1, merge)"},
            SCALE,
            0.5,
        ),
        ({"scores": "\n s = com.microsoft.FusedMatMul(q, kT)"}, 1.0, 1.0),
    ],
    ids=["projection", "context", "scores"],
)  # fmt: skip
def test_find_attention_alpha_is_part_of_scale(
    parts: dict[str, str], scale: float, v_scale: float
) -> None:
    block = only(attention(**parts))
    assert (block.scale, block.v.scale) == pytest.approx((scale, v_scale), rel=1e-6)


NO_KEYS = "Softmax has no product of queries and keys as input"

UNMATCHED: dict[str, tuple[dict[str, str], str]] = {
    "a letter twice in one operand": (
        {"scores": "\n s9 = MatMul(q, kT)"
                   '\n s0 = Einsum <equation = "bhss,bhst->bhst"> (s9, s9)\n s = Mul(s0, scale)'},
        NO_KEYS,
    ),
    "a letter of the size that is kept": (
        {"scores": '\n s5 = Einsum <equation = "bhsk,bhkt->bhstk"> (q, kT)'
                   "\n s0 = ReduceSum <keepdims = 0> (s5, last)\n s = Mul(s0, scale)"},
        NO_KEYS,
    ),
    "an Einsum of three": (
        {"scores": "\n factors = Unsqueeze(scale, a0)"
                   '\n s = Einsum <equation = "bhsk,bhkt,n->bhst"> (q, kT, factors)'},
        NO_KEYS,
    ),
    "an ellipsis on one side only": (
        {"scores": '\n s0 = Einsum <equation = "...sk,bhkt->bhst"> (q, kT)\n s = Mul(s0, scale)'},
        NO_KEYS,
    ),
    "an ellipsis in the tokens only": (
        query(f'q0 = Einsum <equation = "...d,dn->...n"> (x, Wq){HEADS_LAST}'),
        "the query is computed by Einsum, not from tokens and a matrix",
    ),
    "a letter that is summed besides the size": (
        {"scores": '\n s0 = Einsum <equation = "bhsk,bgkt->bhst"> (q, kT)\n s = Mul(s0, scale)'},
        NO_KEYS,
    ),
    "heads of the queries with those of the keys": (
        {"scores": '\n s5 = Einsum <equation = "bhsk,bgkt->bhgst"> (q, kT)\n s0 = ReduceSum'
                   " <keepdims = 0> (s5, a2)\n s = Mul(s0, scale)"},
        NO_KEYS,
    ),
    "a product that adds something": (
        {"scores": "\n q9 = Reshape(q, rows4)\n k9 = Reshape(k2, rows4)"
                   "\n s0 = Gemm <transB = 1> (q9, k9, q9)\n s = Mul(s0, scale)",
         "mask": "\n m = Identity(s)"},
        NO_KEYS,
    ),
    "an implicit output": (
        {"scores": '\n s0 = Einsum <equation = "abcd,abde"> (q, kT)\n s = Mul(s0, scale)'},
        NO_KEYS,
    ),
    "a projection whose letters are all kept": (
        query('q9 = Einsum <equation = "bsd,dn->bsdn"> (x, Wq)'
              "\n q0 = ReduceSum <keepdims = 0> (q9, a2)" + HEADS_LAST),
        "ReduceSum is not supported between the query projection and the product",
    ),
    "tokens that are transposed": (
        query("xT = Transpose <perm = [0, 2, 1]> (x)"
              f"\n q0 = com.microsoft.FusedMatMul <transA = 1> (xT, Wq){HEADS_LAST}"),
        "the query is computed by FusedMatMul, not from tokens and a matrix",
    ),
    "a Gemm whose bias is data": (
        query(f"flat_x = Reshape(x, flat)\n q0 = Gemm(flat_x, square12, flat_x){FLAT_HEADS}"),
        "the bias of Gemm is not constant",
    ),
    "a projection times zero": (
        query(f"q0 = com.microsoft.FusedMatMul <alpha = 0.0> (x, Wq){HEADS_LAST}"),
        "FusedMatMul multiplies by zero",
    ),
    "queries that contract their tokens": (
        query('q0 = Einsum <equation = "bsd,sn->bdn"> (x, by_token)\n q2 = Reshape(q0, heads)'
              "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"),
        "the query is computed by Einsum, not from tokens and a matrix",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNMATCHED)
def test_find_attention_near_miss_returns_reason(case: str) -> None:
    parts, expected = UNMATCHED[case]
    constants = CONSTANTS | {
        "rows4": np.array([-1, K], np.int64),
        "square12": np.ones((D, D), np.float32),
        "by_token": np.ones((5, H * K), np.float32),
    }
    (reason,) = reasons(attention(constants=constants, **parts))
    assert expected in reason


def test_find_attention_incompatible_weight_returns_reason() -> None:
    model = graph(
        "\n q = MatMul(x, Wo)\n kT = Transpose <perm = [0, 2, 1]> (q)\n s = MatMul(q, kT)"
        "\n p = Softmax <axis = -1> (s)\n out = MatMul(p, q)",
        inputs=PLAIN_INPUT,
    )
    assert "could not be inferred" in reasons(model)[0]
