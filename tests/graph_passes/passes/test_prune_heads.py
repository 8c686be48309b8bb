"""PruneHeads: the output equals that of masked heads, and removed heads leave no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.analysis.cost import model_cost
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from tests.errors import raises
from tests.graph_passes.graphs import (
    FLOAT_MASK,
    PARTS,
    PLAIN_INPUT,
    D,
    H,
    K,
    V,
    assert_unchanged,
    attention,
    feeds,
    layers,
    masked,
    only,
    run,
    square_layers,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    ALL_LAYOUTS,
    HALF_PRECISION,
    LAID_OUT,
    LAYOUTS,
    MEMORY,
    OPERANDS,
    RMS_NORM,
    SHARED,
    SHOW_LENGTH,
    cross,
    returning,
)
from tests.graph_passes.operators import OPERATORS

EXACT = 1e-5
"""Pruning is masking but for the order of sums."""

MASKS = ((0, 1, 0), (1, 0, 1))
NAME = "attention_0"


def prune(model: ir.Model, mask: Sequence[int], name: str = NAME) -> ir.Model:
    return PruneHeads({name: mask})(model).model


def assert_is_masking(
    build: Callable[[], ir.Model], mask: Sequence[int], atol: float = EXACT
) -> ir.Model:
    """Pruned and masked models write the same, other than the original; the pruned is certified."""
    (block,), _ = find_attention(build())
    arrays = feeds(build())
    expected = run(masked(build(), {block.name: mask}), arrays)
    model = prune(build(), mask, block.name)
    got = run(model, arrays)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)
    assert np.abs(expected.astype(float) - run(build(), arrays)).max() > 100 * atol
    after = only(model)
    assert (after.name, after.num_heads, after.form) == (block.name, sum(mask), "standard")
    assert (after.head_size, after.v_head_size) == (block.head_size, block.v_head_size)
    assert after.position == block.position or (sum(mask) == 1 and block.position == "bias")
    return model


def test_prune_heads_of_operator_query_without_keys_is_zero() -> None:
    case = OPERATORS["ai.onnx: boolean mask"]
    x = np.random.default_rng(0).standard_normal((1, 4, D)).astype(np.float32)
    seen = np.tril(np.ones((1, 1, 4, 4), bool))
    seen[:, :, 2] = False
    model = case.model()
    (block,), _ = find_attention(model)
    got = run(prune(case.model(), (1, 0, 1), block.name), {"x": x, "mask": seen})
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[0, 2], weights()["bo"], atol=EXACT, rtol=0)


def test_prune_heads_adds_nan_guard_only_if_present() -> None:
    """IsNaN and Where cost time for every probability."""
    for layout, is_guarded in (("plain", False), ("safe softmax", True)):
        model = prune(attention(**LAYOUTS[layout]), (1, 0, 1))
        assert ("IsNaN" in {node.op_type for node in model.graph}) == is_guarded


def test_prune_heads_half_precision_norm_is_computed_in_single() -> None:
    """Squares of numbers above 255 overflow in half precision."""
    norm = RMS_NORM.replace("Mul(q, q)", "Mul(q32, q32)").replace("Div(q, ", "Div(q32, ").replace(
        "\n q_sq", "\n q32 = Cast <to = 1> (q)\n q_sq").replace("q9 = Mul(gains, q_normed)",
        "q16 = Cast <to = 10> (q_normed)\n q9 = Mul(gains, q16)")  # fmt: skip
    constants = HALF_PRECISION | {
        "gains": OPERANDS["gains"].astype(np.float16),
        "epsilon": np.float32(1e-6),
    }
    constants["Wq"] = (100 * weights()["Wq"]).astype(np.float16)

    def build() -> ir.Model:
        return attention(
            inputs=f"float16[batch, sequence, {D}] x, float16[batch, 1, 1, sequence] mask",
            output_type=f"float16[batch, sequence, {D}] out",
            constants=constants,
            scores=norm,
        )

    assert_is_masking(build, (1, 0, 1), atol=2e-2)


# ---- the rewritten graph ------------------------------------------------------------------------


def test_prune_heads_mask_of_ones_changes_nothing() -> None:
    model = layers(2)
    assert_unchanged(model, PruneHeads({NAME: (1, 1, 1)}))
    assert not PruneHeads({})(model).modified


def test_prune_heads_removes_weights_of_removed_heads() -> None:
    """W_Q, W_K, W_V, W_O and their biases are new and smaller; b_O is as it was."""
    model = prune(layers(2), (0, 1, 0))
    removed = {f"{name}_0" for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo")}
    assert removed.isdisjoint(model.graph.initializers)
    assert {"bo_0", "Wq_1", "bq_1", "Wo_1"} <= set(model.graph.initializers)
    block = find_attention(model).blocks[0]
    original = find_attention(layers(2)).blocks[0]
    for part, whole in ((block.q, original.q), (block.k, original.k), (block.v, original.v)):
        expected = whole.heads()[1:2] * (original.scale if part is block.q else 1)
        np.testing.assert_allclose(part.heads(), expected, atol=1e-6)
    assert block.output is not None and original.output is not None
    np.testing.assert_array_equal(
        block.output.matrix()[block.output.rows],
        original.output.matrix()[original.output.rows[1:2]],
    )


@pytest.mark.parametrize("kept", [1, 2, 6, 8])
def test_prune_heads_cost_matches_formula(kept: int) -> None:
    """4 d^2 + 3 d parameters and 4 d^2 n + 2 d n^2 MACs for n tokens fall to kept/H, if H*K = D."""
    heads, size = 8, 3
    width = heads * size
    cost = model_cost(prune(square_layers(heads, size), [int(h < kept) for h in range(heads)]))
    constants = width + (kept == heads)  # the output bias, and the scale if no head is removed
    assert cost.parameters - constants == (4 * width**2 + 3 * width) * kept // heads
    assert cost.uncounted == () and cost.macs is not None
    for n in (1, 7, 100):
        expected = (4 * width**2 * n + 2 * width * n**2) * kept // heads
        assert cost.macs({"batch": 1, "sequence": n}) == expected


def test_prune_heads_grouped_key_head_stays_with_its_queries() -> None:
    """6 query heads share 3 key/value heads: removing heads 0, 1 and 2 removes the first only."""
    rng = np.random.default_rng(0)
    constants = {
        "Wq6": rng.standard_normal((D, 6 * K)).astype(np.float32),
        "Wk3": rng.standard_normal((D, 3 * K)).astype(np.float32),
        "Wo6": rng.standard_normal((6 * V, D)).astype(np.float32),
        "six": np.array([0, 0, 6, K], np.int64),
        "twice": np.array([0, 0, 1, 1, 2, 2], np.int64),
    }

    def build() -> ir.Model:
        return attention(
            inputs=PLAIN_INPUT,
            constants=constants,
            q="\n q0 = MatMul(x, Wq6)\n q2 = Reshape(q0, six)"
            "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
            k="\n k0 = MatMul(x, Wk3)\n k2 = Reshape(k0, heads)"
            "\n k3 = Transpose <perm = [0, 2, 3, 1]> (k2)\n kT = Gather <axis = 1> (k3, twice)",
            v="\n v0 = MatMul(x, Wv)\n v2 = Reshape(v0, v_heads)"
            "\n v3 = Transpose <perm = [0, 2, 1, 3]> (v2)\n v = Gather <axis = 1> (v3, twice)",
            mask="\n m = Identity(s)",
            output="\n out = MatMul(c, Wo6)",
        )

    before = only(build())
    assert (before.num_heads, before.num_kv_heads) == (6, 3)
    after = only(assert_is_masking(build, (0, 0, 0, 1, 1, 1)))
    assert (after.num_heads, after.num_kv_heads) == (3, 2)
    assert after.k.matrix().shape == (D, 2 * K)
    np.testing.assert_array_equal(after.k.matrix(), constants["Wk3"][:, K:])


@pytest.mark.parametrize("layout", ["plain", "no biases at all", "Gemm as the output projection"])
def test_prune_heads_of_all_heads_leaves_a_constant(layout: str) -> None:
    parts = ALL_LAYOUTS[layout]
    model = prune(attention(constants=LAID_OUT, **parts), (0, 0, 0))
    arrays = feeds(attention(constants=LAID_OUT, **parts))
    bias = 0 * weights()["bo"] if layout == "no biases at all" else weights()["bo"]
    expected = np.broadcast_to(bias, arrays["x"].shape)
    np.testing.assert_allclose(run(model, arrays), expected, atol=1e-6, rtol=0)
    assert read_attention(model).blocks == ()
    assert model_cost(model).parameters == D
    assert not {"MatMul", "Gemm", "Softmax"} & {node.op_type for node in model.graph}


def test_prune_heads_of_several_layers_keeps_names() -> None:
    masks = {"attention_0": (1, 0, 0), "attention_2": (0, 1, 1)}
    arrays = feeds(layers(3))
    model = PruneHeads(masks)(layers(3)).model
    matches = read_attention(model)
    assert matches.unmatched == ()
    assert [(block.name, block.num_heads) for block in matches.blocks] == [
        ("attention_0", 1), ("attention_1", 3), ("attention_2", 2),
    ]  # fmt: skip
    expected = run(masked(layers(3), masks), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)


def test_prune_heads_twice_equals_once() -> None:
    twice = prune(prune(attention(), (1, 0, 1)), (0, 1))
    arrays = feeds(attention())
    once = run(prune(attention(), (0, 0, 1)), arrays)
    np.testing.assert_allclose(run(twice, arrays), once, atol=EXACT, rtol=0)
    assert only(twice).num_heads == 1


def test_prune_heads_equal_masks_keep_weights_shared() -> None:
    """ALBERT: three layers with equal masks still share one weight."""
    model = layers(3, same=SHARED)
    before = model_cost(model).parameters
    PruneHeads({f"attention_{layer}": (0, 1, 1) for layer in range(3)})(model)
    head = 2 * (D * K + K) + D * V + V + V * D
    assert before - model_cost(model).parameters == head + 1  # and the scale, now in the weights
    blocks = read_attention(model).blocks
    for part in ("q", "k", "v", "output"):
        assert len({getattr(block, part).weight for block in blocks}) == 1


def test_prune_heads_different_masks_copy_shared_weights() -> None:
    masks = {"attention_0": (0, 1, 1), "attention_1": (1, 0, 1)}
    model, arrays = layers(3, same=SHARED), feeds(layers(3, same=SHARED))
    PruneHeads(masks)(model)
    expected = run(masked(layers(3, same=SHARED), masks), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert {"Wq", "Wo"} <= set(model.graph.initializers)  # the third layer's


LENGTHS: dict[str, tuple[dict[str, str], str, str, int, set[str]]] = {
    "keys": ({}, "k2", "a1", 7, {"Wk", "bk"}),
    "keys of another length": (cross(), "k2", "a1", 4, {"Wk"}),
    "heads in the batch axis": (
        LAYOUTS["heads and batch in one axis"], "k4", "a0", 2 * H, {"Wq", "Wk"},
    ),
}  # fmt: skip
"""Parts, a value whose shape is read, the axis, its length, and the weights that are removed."""


@pytest.mark.parametrize("case", LENGTHS)
def test_prune_heads_keys_read_for_their_shape_are_removed(case: str) -> None:
    """The length is taken from the tokens."""
    parts, value, axis, length, removed = LENGTHS[case]
    output = PARTS["output"] + SHOW_LENGTH.format(value=value, axis=axis)
    model = attention(
        inputs=f"{PLAIN_INPUT}, {FLOAT_MASK}, {MEMORY}",
        output_type=f"float[batch, sequence, {D}] out, float[many] shown",
        constants=LAID_OUT,
        **{**parts, "output": output},
    )
    arrays = feeds(model) | {"y": np.ones((2, 4, D), np.float32)}
    prune(model, (0, 1, 1))
    assert removed.isdisjoint(model.graph.initializers)
    got = open_session(model, ONE_THREAD, SessionOptions(optimize=False)).run(None, arrays)[1]
    np.testing.assert_array_equal(got, np.arange(1, length + 1))


def test_prune_heads_writes_these_nodes() -> None:
    model = prune(attention(), (0, 1, 1))
    nodes = [f"{node.op_type} {node.name}" for node in model.graph]
    assert nodes == [f"{op} {NAME}/pruned/{name}" for op, name in PRUNED]
    assert "mask" in text_of(model)


PRUNED = (
    ("MatMul", "query/product"), ("Add", "query/biased"),
    ("Reshape", "query/heads"), ("Transpose", "query/heads_apart"),
    ("MatMul", "key/product"), ("Add", "key/biased"),
    ("Reshape", "key/heads"), ("Transpose", "key/heads_apart"),
    ("Transpose", "keys"), ("MatMul", "scores"), ("Add", "biased"), ("Softmax", "softmax"),
    ("MatMul", "value/product"), ("Add", "value/biased"),
    ("Reshape", "value/heads"), ("Transpose", "value/heads_apart"),
    ("MatMul", "context"), ("Transpose", "by_token"), ("Reshape", "merged_heads"),
    ("MatMul", "output_product"), ("Add", "output"),
)  # fmt: skip


# ---- refusals -----------------------------------------------------------------------------------


def test_prune_heads_mask_of_another_length_is_refused() -> None:
    with raises(InvalidArgument, "prune_heads.mask_length", NAME, "2 entries", "expected 3"):
        prune(attention(), (1, 0))


@pytest.mark.parametrize("values", ["keys", "probabilities"])
def test_prune_heads_with_returned_values_is_refused(values: str) -> None:
    model = returning(values)
    before = text_of(model)
    with raises(CannotRewrite, "rewrite.returned") as caught:
        prune(model, (1, 0, 1))
    assert "\n" not in caught.value.what
    assert text_of(model) == before
    assert not PruneHeads({NAME: (1, 1, 1)})(model).modified


def test_prune_heads_window_mask_is_refused() -> None:
    """Swin: (B, windows, H, S, T) is added to scores of (B * windows, H, S, T)."""
    split, join = np.array([-1, 2, H, 4, 4], np.int64), np.array([-1, H, 4, 4], np.int64)
    model = attention(
        inputs=f"float[batch, 4, {D}] x, float[1, 2, 1, 4, 4] mask",
        output_type=f"float[batch, 4, {D}] out",
        constants={"split": split, "join": join},
        mask="\n s5 = Reshape(s, split)\n m5 = Add(s5, mask)\n m = Reshape(m5, join)",
    )
    with raises(CannotRewrite, "rewrite.window_mask"):
        prune(model, (1, 0, 1))


# ---- any mask -----------------------------------------------------------------------------------


@pytest.mark.fuzz
@settings(max_examples=25)
@given(masks=st.lists(st.lists(st.integers(0, 1), min_size=H, max_size=H), min_size=2, max_size=2))
def test_prune_heads_any_mask_equals_masking(masks: list[list[int]]) -> None:
    """The opset does not change, names are unique, and the other heads are certified."""
    chosen: Mapping[str, list[int]] = dict(zip(("attention_0", "attention_1"), masks, strict=True))
    model, arrays = layers(2, opset=11), feeds(layers(2))
    PruneHeads(chosen)(model)
    expected = run(masked(layers(2, opset=11), chosen), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert model.opset_imports[""] == 11
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)
    matches = read_attention(model)
    assert matches.unmatched == ()
    if all(map(any, masks)):
        heads = {block.name: block.num_heads for block in matches.blocks}
        assert heads == {name: sum(mask) for name, mask in chosen.items()}
