"""Collaborate: exact at R = H*K, lossy below; values, masks and output do not change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.cost import macs_at, model_cost
from graph_passes.analysis.shapes import infer_shapes_at
from graph_passes.analysis.workload import Workload
from graph_passes.emit.collaborative import max_read_size, padded_head_size
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.factorize.cp import CollaborativeFactors
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass
from graph_passes.passes.collaborate import (
    Collaborate,
    Mixing,
    factor,
)
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.shared_dimensions import sharing_refusal
from tests.errors import raises
from tests.graph_passes.graphs import (
    PARTS,
    D,
    H,
    K,
    attention,
    feeds,
    graph,
    only,
    run,
    second_layer,
    weights,
)
from tests.graph_passes.layouts import (
    ALL_LAYOUTS,
    LAID_OUT,
    LAYOUTS,
    PACKED_PARTS,
    SPLIT,
)

EXACT = H * K
NAME = "attention_0"


def collaborate(model: ir.Model, rank: int = EXACT) -> ir.Model:
    """Every block of a model at one rank."""
    blocks, _ = find_attention(model)
    factors = {block.name: factor(block, rank) for block in blocks}
    return Collaborate.with_factors(factors)(model).model


def two_layers() -> ir.Model:
    """A second attention, with the same weights, over the output of a first."""
    text = "".join(PARTS.values()) + second_layer()
    return graph(text, output=f"float[batch, sequence, {D}] out_1")


@pytest.mark.parametrize("rank", [1, 5, EXACT])
@pytest.mark.parametrize("layout", ["plain", "no query bias", "packed by Split"])
def test_collaborate_rewritten_block_is_found_as_collaborative(layout: str, rank: int) -> None:
    before = only(attention(**ALL_LAYOUTS[layout]))
    after = only(collaborate(attention(**ALL_LAYOUTS[layout]), rank))
    assert after.form == "collaborative"
    assert (after.name, after.num_heads, after.input_size) == (before.name, H, D)
    assert (after.head_size, after.position, after.q.rotary_terms) == (rank, "none", ())
    assert after.scale == pytest.approx(before.scale, rel=1e-6)
    assert (after.x.name, after.steps[0].value.name) == ("x", "mask")  # type: ignore[union-attr]
    assert (after.content is not None) == (layout != "no query bias")


def test_collaborate_factors_are_read_back() -> None:
    factors = factor(only(attention()), 5)
    after = only(collaborate(attention(), 5))
    assert after.content is not None
    np.testing.assert_allclose(after.q.matrix(), factors.query, atol=1e-6)
    np.testing.assert_allclose(after.k.matrix(), factors.key, atol=1e-6)
    np.testing.assert_allclose(after.q.gain, factors.mixing, atol=1e-6)
    np.testing.assert_allclose(after.content.matrix().T, factors.content, atol=1e-6)


def test_collaborate_macs_match_formula() -> None:
    """S(2DR + 2DHV) + SHR + SDH for the content + S^2 H(R + V), with S = 7."""
    rank, S, V = 5, 7, 2
    model = collaborate(attention(), rank)
    block = only(model)
    macs, uncounted = macs_at(
        infer_shapes_at(model, bind_axes(model.graph, Workload.of(1, S))), block.nodes
    )
    projections = S * (2 * D * rank + 2 * D * H * V)
    assert uncounted == ()
    assert macs == projections + S * H * rank + S * D * H + S * S * H * (rank + V)


@pytest.mark.parametrize("scale", [0.05, 1.0, 2.0])
@pytest.mark.parametrize("rank", [4, EXACT])
def test_collaborate_any_rank_keeps_the_scale(scale: float, rank: int) -> None:
    """The scale is not recomputed as 1/sqrt(R), 1/sqrt(R/H) or 1/sqrt(K)."""
    constants = {"scale": np.float32(scale)}
    model = collaborate(attention(constants=constants), rank)
    assert only(model).scale == pytest.approx(scale, rel=1e-6)
    if rank == EXACT:
        arrays = feeds(model)
        expected = run(attention(constants=constants), arrays)
        np.testing.assert_allclose(run(model, arrays), expected, atol=1e-4, rtol=0)


def test_collaborate_error_decreases_with_rank() -> None:
    original = attention()
    arrays = feeds(original)
    expected = run(original, arrays)
    errors = [
        float(np.linalg.norm(run(collaborate(attention(), rank), arrays) - expected))
        for rank in (1, 4, 8, EXACT)
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 10 * errors[-1]
    assert errors[-1] <= 1e-4


def test_collaborate_query_bias_becomes_content() -> None:
    """v_h = W_K^h b_Q^h (eq. 3); b_K is nowhere, and the output is the same within 1e-4."""
    block = only(attention())
    factors = factor(block, EXACT)
    expected = np.einsum("hek,hk->he", block.k.heads(), block.q.offset)
    np.testing.assert_allclose(factors.content, expected, atol=1e-6)
    model = collaborate(attention(), 5)
    assert {"bq", "bk", "Wq", "Wk"}.isdisjoint(model.graph.initializers)
    assert {"bv", "Wv", "bo", "Wo"} <= set(model.graph.initializers)


def test_collaborate_without_query_bias_has_no_content() -> None:
    model = collaborate(attention(**LAYOUTS["no query bias"]))
    assert only(model).content is None
    assert not any("content" in name for name in model.graph.initializers)


def test_collaborate_ranks_differ_by_layer() -> None:
    model = two_layers()
    blocks, _ = find_attention(model)
    ranks = {block.name: rank for block, rank in zip(blocks, (4, EXACT), strict=True)}
    Collaborate({name: Mixing(rank=rank) for name, rank in ranks.items()})(model)
    matches = read_attention(model)
    assert {block.name: block.head_size for block in matches.blocks} == ranks
    assert matches.unmatched == ()


def test_collaborate_of_one_layer_leaves_the_other() -> None:
    model, original = two_layers(), two_layers()
    first = find_attention(model).blocks[0]
    Collaborate.with_factors({first.name: factor(first, EXACT)})(model)
    assert [block.form for block in find_attention(model).blocks] == ["collaborative", "standard"]
    arrays = feeds(original)
    np.testing.assert_allclose(run(model, arrays), run(original, arrays), atol=1e-4, rtol=0)


@pytest.mark.parametrize("rank", [0, -1, EXACT + 1])
def test_factor_rank_out_of_range_is_refused(rank: int) -> None:
    with raises(InvalidArgument, "collaborate.rank"):
        factor(only(attention()), rank)


def test_collaborate_packed_values_get_own_product() -> None:
    model = collaborate(attention(q=SPLIT["Split"], **PACKED_PARTS), 5)
    assert "Wqkv" not in model.graph.initializers
    block = only(model)
    np.testing.assert_allclose(block.v.matrix(), weights()["Wqkv"][:, 24:], atol=1e-6)


REFUSED = {
    "scores of five axes": (
        {"mask": "\n s5 = Unsqueeze(s, a0)\n m5 = Add(s5, mask)\n m = Squeeze(m5, a0)"},
        "score_layout",
    ),
    "a floor that softmax does not ignore": (
        {"mask": "\n m = Max(s, weak)"},
        "weak_mask",
    ),
    "a bias made of the queries": (
        {"mask": "\n sizes = ReduceSum <keepdims = 1> (q, last)\n m = Add(s, sizes)"},
        "entangled_bias",
    ),
    "scores that are an output": (
        {"mask": "\n m = Add(s, mask)\n shown = Identity(s)"},
        "scores_shared",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_collaborate_inexact_case_is_refused(case: str) -> None:
    parts, code = REFUSED[case]
    outputs = f"float[batch, sequence, {D}] out"
    if "shown" in str(parts):
        outputs += f", float[batch, {H}, sequence, sequence] shown"
    constants = LAID_OUT | {"ones": np.ones(K, np.float32)}
    model = attention(output_type=outputs, constants=constants, **parts)
    (block,), _ = find_attention(model)
    refusal = sharing_refusal(block)
    assert refusal and refusal.code == code
    with raises(CannotRewrite, f"rewrite.{code}"):
        Collaborate({block.name: Mixing(rank=4)})(model)


@pytest.mark.parametrize("rewrite", ["collaborate", "prune"])
def test_term_of_the_keys_alone_is_refused(rewrite: str) -> None:
    """Each head adds a number for each key to its scores, which no product of both holds."""
    gate = np.random.default_rng(1).standard_normal((D, H)).astype(np.float32)
    mask = """
        g0 = MatMul(x, gate)
        g1 = Transpose <perm = [0, 2, 1]> (g0)
        g2 = Unsqueeze(g1, a2)
        m = Add(s, g2)"""
    model = attention(mask=mask, inputs=f"float[batch, sequence, {D}] x", constants={"gate": gate})
    assert only(model).content is not None and only(model).form == "standard"
    passes = {
        "collaborate": Collaborate({NAME: Mixing(rank=EXACT)}),
        "prune": PruneHeads({NAME: [1, 1, 0]}),
    }
    with raises(CannotRewrite, "rewrite.key_term"):
        passes[rewrite](model)


def test_collaborate_one_remaining_head_a_second_time_is_refused() -> None:
    """A single head is not seen as shared, but its content term must not be lost."""
    model = PruneHeads({NAME: [1, 0, 0]})(attention()).model
    collaborate(model, K)
    assert only(model).content is not None
    with raises(CannotRewrite, "rewrite.key_term"):
        Collaborate({NAME: Mixing(rank=K)})(model)


def test_collaborate_writes_these_nodes() -> None:
    """Equation 7: two shared products, and M between them."""
    model = collaborate(attention(**LAYOUTS["no query bias"]), 5)
    added = [node for node in model.graph if (node.name or "").startswith(NAME)]
    names = [(node.name or "").removeprefix(f"{NAME}/collaborative/") for node in added]
    assert [f"{node.op_type} {name}" for node, name in zip(added, names, strict=True)] == [
        "MatMul query", "Mul scaled_query", "Unsqueeze query_tokens", "Mul mixed_query",
        "MatMul key", "Unsqueeze key_tokens", "Transpose shared_key", "MatMul scores",
    ]  # fmt: skip
    others = [node.outputs[0].name for node in model.graph if node not in added]
    assert others == ["v0", "v1", "v2", "v", "m", "p", "c0", "c1", "c", "o", "out"]


def test_collaborate_parameters_match_formula() -> None:
    before, after = model_cost(attention()), model_cost(collaborate(attention(), 4))
    removed = 2 * D * H * K + 2 * H * K  # W_Q, W_K and their biases
    new = 2 * D * 4 + H * 4 + H * D  # W~Q, W~K, M and v
    assert before.parameters - after.parameters == removed - new


def test_collaborate_minilm_at_full_rank_keeps_the_output(
    minilm_export: Callable[[str, str, int], Path],
) -> None:
    path = minilm_export("sdpa", "torchscript", 17) / "model.onnx"
    original, model = ir.load(path), ir.load(path)
    collaborate(model, 384)
    ids = np.random.default_rng(0).integers(1000, 9000, (2, 9))
    arrays = {name.name or "": np.ones_like(ids) for name in original.graph.inputs}
    arrays["input_ids"] = ids
    np.testing.assert_allclose(run(model, arrays), run(original, arrays), atol=1e-4, rtol=0)


# Sparse mixing


def sparse(model: ir.Model, rank: int, head_size: int, *, dense: bool = False) -> ir.Model:
    blocks, _ = find_attention(model)
    factors = {b.name: factor(b, rank, head_size=head_size) for b in blocks}
    return Collaborate.with_factors(factors, sparse=not dense)(model).model


@pytest.mark.parametrize("rank", [5, EXACT])
@pytest.mark.parametrize("layout", ["plain", "packed by Split", "heads and batch in one axis"])
def test_collaborate_dense_and_sparse_emission_agree(layout: str, rank: int) -> None:
    """Gathered (R = 5 for 9 entries) and side by side: outputs within 1e-5."""
    models = [
        sparse(attention(constants=LAID_OUT, **ALL_LAYOUTS[layout]), rank, 3, dense=dense)
        for dense in (True, False)
    ]
    arrays = feeds(models[0])
    np.testing.assert_allclose(run(models[1], arrays), run(models[0], arrays), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("rank", "form"), [(5, "sparse"), (EXACT, "standard")])
@pytest.mark.parametrize("layout", ["plain", "no query bias", "packed by Split"])
def test_collaborate_sparse_heads_are_found(layout: str, rank: int, form: str) -> None:
    """Three dimensions and the content make heads of size four; padding is read as nothing."""
    before = only(attention(**ALL_LAYOUTS[layout]))
    model = sparse(attention(**ALL_LAYOUTS[layout]), rank, 3)
    after = only(model)
    assert (after.form, after.num_heads, after.input_size) == (form, H, D)
    assert after.head_size == (3 if layout == "no query bias" else 4)
    assert after.content is None and after.scale == pytest.approx(before.scale, rel=1e-6)
    blocks, misses = (matches := read_attention(model)).blocks, matches.unmatched
    assert len(blocks) == 1 and not misses
    gathers = [node for node in model.graph if node.op_type == "Gather" and "/coll" in node.name]
    assert len(gathers) == (2 if form == "sparse" else 0)


def test_padded_head_size_is_a_multiple_of_eight() -> None:
    """10 dimensions a head and the content: 16, a multiple of 8, and no head outgrows that."""
    rng = np.random.default_rng(2)
    mixing = np.where(rng.random((3, 12)) < 0.8, 1.0, 0.0)
    content = np.ones((3, 4))
    made = CollaborativeFactors(np.ones((4, 12)), np.ones((4, 12)), mixing, content, 0.1, 1)
    assert padded_head_size(made) == 16
    assert [max_read_size(size, 32) for size in (3, 7, 8, 10, 15, 16, 31, 32)] == [
        3, 7, 15, 15, 15, 23, 31, 32,
    ]  # fmt: skip


def test_collaborate_sparse_macs_match_formula() -> None:
    """S(2DR + D) for q and k, D H for the content, S H K' to mix, S^2 H (K' + V) with K' = 4."""
    rank, S, V = 5, 7, 2
    model = sparse(attention(), rank, 3)
    facts = infer_shapes_at(model, bind_axes(model.graph, Workload.of(1, S)))
    macs, uncounted = macs_at(facts, only(model).nodes)
    assert uncounted == ()
    read = S * (2 * D * rank + D + D * H) + S * H * 4
    assert macs == read + S * 2 * D * H * V + S * S * H * (4 + V)


@pytest.mark.parametrize(
    ("build", "rewrite"),
    [
        (lambda: collaborate(attention(), 5), Collaborate({NAME: Mixing(rank=4)})),
        *((lambda: sparse(attention(), 5, 3), rewrite) for rewrite in (
            PruneHeads({NAME: (1, 0, 1)}),
            Collaborate({NAME: Mixing(rank=4)}),
            Collaborate({NAME: Mixing(rank=4, head_size=2)}),
        )),
    ],
    ids=["share twice", "prune sparse", "share sparse", "share sparse sparsely"],
)  # fmt: skip
def test_second_rewrite_of_shared_heads_is_refused(
    build: Callable[[], ir.Model], rewrite: RewritePass
) -> None:
    with raises(CannotRewrite, "rewrite.collaborative"):
        rewrite(build())


@pytest.mark.parametrize("head_size", [None, 4])
def test_collaborate_packed_values_in_another_order_of_axes(head_size: int | None):
    """As JAX and TensorFlow write them: the heads stay behind the tokens."""
    random = np.random.default_rng(0)
    body = """
        p = MatMul(x, Wqkv)
        r = Reshape(p, split)
        q = Gather <axis = 2> (r, i0)
        k = Gather <axis = 2> (r, i1)
        v = Gather <axis = 2> (r, i2)
        s = Einsum <equation = "bqhd,bkhd->bhqk"> (q, k)
        a = Softmax <axis = -1> (s)
        c = Einsum <equation = "bhqk,bkhd->bqhd"> (a, v)
        m = Reshape(c, merge)
        out = MatMul(m, Wo)"""
    model = graph(
        body, inputs=f"float[batch, sequence, {D}] x",
        constants={
            "Wqkv": random.standard_normal((D, 3 * EXACT)).astype(np.float32) / 4,
            "Wo": random.standard_normal((EXACT, D)).astype(np.float32) / 4,
            "split": np.array([0, 0, 3, H, K]), "merge": np.array([0, 0, EXACT]),
            "i0": np.array(0), "i1": np.array(1), "i2": np.array(2),
        },
    )  # fmt: skip
    arrays = feeds(model)
    before = run(model, arrays)
    block = only(model)
    Collaborate({block.name: {"rank": EXACT, "head_size": head_size}})(model)
    np.testing.assert_allclose(run(model, arrays), before, atol=1e-5, rtol=0)
