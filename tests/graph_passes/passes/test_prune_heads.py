"""PruneHeads: slicing heads out is masking them, and nothing of a pruned head stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from attnserve.runtime.session import open_session
from graph_passes.analysis.cost import model_cost
from graph_passes.emit.attention import emission_refusal
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
    attention,
    feeds,
    graph,
    layers,
    masked,
    only,
    run,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    ALL_LAYOUTS,
    HALF_PRECISION,
    LAID_OUT,
    LAYOUTS,
    MEMORY,
    NO_PROJECTION,
    OPERANDS,
    RMS_NORM,
    ROTARY,
    SHARED,
    SINGLE_CONTEXT,
    SINGLE_MASK,
    SINGLE_OUTPUT,
    VARIANTS,
    cross,
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


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("layout", [name for name in ALL_LAYOUTS if name not in NO_PROJECTION])
def test_slicing_heads_out_is_masking_them(layout: str, mask: Sequence[int]) -> None:
    assert_is_masking(lambda: attention(constants=LAID_OUT, **ALL_LAYOUTS[layout]), mask)


# ---- masks, biases and positions ----------------------------------------------------------------


@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("case", VARIANTS)
def test_masks_biases_positions_and_norms_stay_with_their_heads(
    case: str, mask: Sequence[int]
) -> None:
    inputs, parts = VARIANTS[case]

    def build() -> ir.Model:
        order = "sequence, batch" if case == "sequence first" else "batch, sequence"
        output = f"float[{order}, {D}] out"
        return attention(inputs=inputs, output_type=output, constants=OPERANDS | ROTARY, **parts)

    assert_is_masking(build, mask)


RUN = {
    name: case for name, case in OPERATORS.items() if case.runs and case.output and not case.past
}


@pytest.mark.parametrize("name", RUN)
def test_fused_operator_needs_no_decomposing(name: str) -> None:
    """Every operator without a cache, or the reason why not."""
    case = RUN[name]
    (block,), _ = find_attention(case.model())
    if refusal := emission_refusal(block):
        assert refusal.code in ("cache_lengths", "projection_layout")
        return
    mask = [index % 2 for index in range(block.num_heads)]
    model = assert_is_masking(case.model, mask)
    assert not {"Attention", "MultiHeadAttention"} & {node.op_type for node in model.graph}


def test_query_that_sees_no_key_stays_zero_where_the_operator_makes_it_zero() -> None:
    case = OPERATORS["ai.onnx: boolean mask"]
    x = np.random.default_rng(0).standard_normal((1, 4, D)).astype(np.float32)
    seen = np.tril(np.ones((1, 1, 4, 4), bool))
    seen[:, :, 2] = False
    model = case.model()
    (block,), _ = find_attention(model)
    got = run(prune(case.model(), (1, 0, 1), block.name), {"x": x, "mask": seen})
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[0, 2], weights()["bo"], atol=EXACT, rtol=0)


def test_no_guard_is_added_where_the_graph_has_none() -> None:
    """IsNaN and Where run over every probability: only for graphs that had them."""
    guarded = {
        "softmax": "\n p0 = Softmax <axis = -1> (m)\n nan = IsNaN(p0)\n p = Where(nan, zero, p0)"
    }
    ops = [{node.op_type for node in prune(attention(**p), (1, 0, 1)).graph} for p in ({}, guarded)]
    assert ["IsNaN" in found for found in ops] == [False, True]


# ---- half precision -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask_type", "parts"),
    [("float16", {}), ("float", SINGLE_MASK), ("float", SINGLE_CONTEXT), ("float", SINGLE_OUTPUT)],
    ids=["throughout", "but for the softmax", "but for the product", "but for the output"],
)
def test_half_precision_stays_where_it_is(mask_type: str, parts: dict[str, str]) -> None:
    """Within 2e-2, which is the rounding of half precision."""

    def build() -> ir.Model:
        return attention(
            inputs=f"float16[batch, sequence, {D}] x, {mask_type}[batch, 1, 1, sequence] mask",
            output_type=f"float16[batch, sequence, {D}] out",
            constants=HALF_PRECISION | {"Wo32": weights()["Wo"], "bo32": weights()["bo"]},
            **parts,
        )

    assert_is_masking(build, (1, 0, 1), atol=2e-2)


def test_norm_of_large_half_precision_queries_is_taken_in_single() -> None:
    """Squares of 300 and more do not fit into half precision."""
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


# ---- what is left -------------------------------------------------------------------------------


def test_pruning_nothing_changes_nothing() -> None:
    model = layers(2)
    before = ir.to_proto(model).SerializeToString()
    result = PruneHeads({NAME: (1, 1, 1)})(model)
    assert not result.modified
    assert ir.to_proto(result.model).SerializeToString() == before
    assert not PruneHeads({})(model).modified


def test_nothing_of_a_pruned_layer_stays_but_what_its_heads_are() -> None:
    """W_Q, W_K, W_V, W_O and their biases are new and smaller; b_O is as it was."""
    model = prune(layers(2), (0, 1, 0))
    gone = {f"{name}_0" for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv", "Wo")}
    assert gone.isdisjoint(model.graph.initializers)
    assert {"bo_0", "Wq_1", "bq_1", "Wo_1"} <= set(model.graph.initializers)
    block = find_attention(model)[0][0]
    original = find_attention(layers(2))[0][0]
    for part, whole in ((block.q, original.q), (block.k, original.k), (block.v, original.v)):
        expected = whole.heads()[1:2] * (original.scale if part is block.q else 1)
        np.testing.assert_allclose(part.heads(), expected, atol=1e-6)
    assert block.output is not None and original.output is not None
    np.testing.assert_array_equal(
        block.output.matrix()[block.output.rows],
        original.output.matrix()[original.output.rows[1:2]],
    )


@pytest.mark.parametrize("kept", [1, 2, 6, 8])
def test_parameters_by_formula(kept: int) -> None:
    """4 d^2 + 3 d, biases of q, k, v included, fall to kept/H of it: MHA with H*K = D.

    Keeping 2 of 8 heads removes 75 % of a layer's attention parameters.
    """
    heads, size = 8, 3
    width = heads * size
    model, mask = square(heads, size), [int(h < kept) for h in range(heads)]
    before = model_cost(model).parameters - 1 - width  # the scale, and the bias of the output
    assert before == 4 * width**2 + 3 * width
    after = model_cost(prune(square(heads, size), mask)).parameters
    after -= width + (kept == heads)
    assert after == before * kept // heads
    if kept == 2:
        assert after == 0.25 * before


@pytest.mark.parametrize("kept", [1, 3, 7])
def test_macs_by_formula(kept: int) -> None:
    """(4 d^2 n + 2 d n^2) kept / H for n tokens."""
    heads, size = 8, 3
    width = heads * size
    model = prune(square(heads, size), [int(h < kept) for h in range(heads)])
    macs, uncounted = model_cost(model).macs, model_cost(model).uncounted
    assert uncounted == () and macs is not None
    for n in (1, 7, 100):
        expected = (4 * width**2 * n + 2 * width * n**2) * kept // heads
        assert macs({"batch": 1, "sequence": n}) == expected


def square(heads: int, size: int) -> ir.Model:
    """One attention whose heads are as wide together as its tokens."""
    width, rng = heads * size, np.random.default_rng(0)
    shapes = {"Wq": 2, "Wk": 2, "Wv": 2, "Wo": 2, "bq": 1, "bk": 1, "bv": 1, "bo": 1}
    constants = {
        name: rng.standard_normal((width,) * rank).astype(np.float32)
        for name, rank in shapes.items()
    }
    constants["heads"] = constants["v_heads"] = np.array([0, 0, heads, size], np.int64)
    return attention(
        inputs=f"float[batch, sequence, {width}] x",
        output_type=f"float[batch, sequence, {width}] out",
        constants=constants,
        mask="\n m = Identity(s)",
    )


def test_shared_key_head_stays_while_one_of_its_queries_does() -> None:
    """6 query heads over 3 key/value heads: dropping heads 0, 1 and 2 drops the first, no other."""
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
def test_layer_without_heads_is_its_constant(layout: str) -> None:
    parts = ALL_LAYOUTS[layout]
    model = prune(attention(constants=LAID_OUT, **parts), (0, 0, 0))
    arrays = feeds(attention(constants=LAID_OUT, **parts))
    bias = 0 * weights()["bo"] if layout == "no biases at all" else weights()["bo"]
    expected = np.broadcast_to(bias, arrays["x"].shape)
    np.testing.assert_allclose(run(model, arrays), expected, atol=1e-6, rtol=0)
    assert read_attention(model).blocks == ()
    assert model_cost(model).parameters == D
    assert not {"MatMul", "Gemm", "Softmax"} & {node.op_type for node in model.graph}


def test_layers_are_pruned_apart_and_keep_their_names() -> None:
    masks = {"attention_0": (1, 0, 0), "attention_2": (0, 1, 1)}
    arrays = feeds(layers(3))
    model = PruneHeads(masks)(layers(3)).model
    reading = read_attention(model)
    assert reading.unmatched == ()
    assert [(block.name, block.num_heads) for block in reading.blocks] == [
        ("attention_0", 1), ("attention_1", 3), ("attention_2", 2),
    ]  # fmt: skip
    expected = run(masked(layers(3), masks), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)


def test_pruned_twice_is_pruned_once() -> None:
    twice = prune(prune(attention(), (1, 0, 1)), (0, 1))
    arrays = feeds(attention())
    once = run(prune(attention(), (0, 0, 1)), arrays)
    np.testing.assert_allclose(run(twice, arrays), once, atol=EXACT, rtol=0)
    assert only(twice).num_heads == 1


def test_layers_that_share_their_weights_go_on_sharing_them() -> None:
    """ALBERT: three layers, one weight; pruned alike they are three layers and one weight."""
    model = layers(3, same=SHARED)
    before = model_cost(model).parameters
    PruneHeads({f"attention_{layer}": (0, 1, 1) for layer in range(3)})(model)
    head = 2 * (D * K + K) + D * V + V + V * D
    assert before - model_cost(model).parameters == head + 1  # and the scale, now in the weights
    blocks = read_attention(model).blocks
    for part in ("q", "k", "v", "output"):
        assert len({id(getattr(block, part).weight) for block in blocks}) == 1


def test_layers_that_shared_weights_may_part() -> None:
    masks = {"attention_0": (0, 1, 1), "attention_1": (1, 0, 1)}
    model, arrays = layers(3, same=SHARED), feeds(layers(3, same=SHARED))
    PruneHeads(masks)(model)
    expected = run(masked(layers(3, same=SHARED), masks), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert {"Wq", "Wo"} <= set(model.graph.initializers)  # the third layer's


def test_queries_whose_shape_others_read_are_let_go() -> None:
    """Exporters ask a layer's keys how long the sequence is."""
    shown = """
        asked = Shape(k2)
        length = Gather <axis = 0> (asked, a1)
        ones = Expand(one, length)
        shown = CumSum(ones, i0)"""

    def build() -> ir.Model:
        return attention(
            output_type=f"float[batch, sequence, {D}] out, float[sequence] shown",
            output=PARTS["output"] + shown,
        )

    model, arrays = prune(build(), (0, 1, 1)), feeds(build())
    assert {"Wk", "bk"}.isdisjoint(model.graph.initializers)
    got = open_session(model, threads=1, optimize=False).run(None, arrays)[1]
    np.testing.assert_array_equal(got, np.arange(1, 8))


def test_length_is_asked_of_the_right_sequence() -> None:
    """Memory and queries have lengths of their own, though both are dynamic."""
    parts = cross()
    parts["output"] = PARTS["output"] + (
        "\n asked = Shape(k2)\n length = Gather <axis = 0> (asked, a1)\n ones = Expand(one, length)"
        "\n shown = CumSum(ones, i0)"
    )
    model = attention(
        inputs=f"{PLAIN_INPUT}, {MEMORY}",
        output_type=f"float[batch, sequence, {D}] out, float[memory] shown",
        **parts,
    )
    prune(model, (0, 1, 1))
    assert "Wk" not in model.graph.initializers
    rng = np.random.default_rng(0)
    x, y = (rng.standard_normal((2, n, D)).astype(np.float32) for n in (7, 4))
    session = open_session(model, threads=1, optimize=False)
    np.testing.assert_array_equal(session.run(None, {"x": x, "y": y})[1], np.arange(1, 5))


def test_length_is_asked_of_heads_in_the_batch() -> None:
    """(B*H, T, K): the first length is H times the batch."""
    parts = dict(LAYOUTS["heads and batch in one axis"])
    parts["output"] = PARTS["output"] + (
        "\n asked = Shape(k4)\n length = Gather <axis = 0> (asked, a0)"
        "\n ones = Expand(one, length)\n shown = CumSum(ones, i0)"
    )
    model = attention(
        inputs=PLAIN_INPUT,
        output_type=f"float[batch, sequence, {D}] out, float[many] shown",
        constants=LAID_OUT,
        **parts,
    )
    prune(model, (0, 1, 1))
    assert {"Wq", "Wk"}.isdisjoint(model.graph.initializers)
    session = open_session(model, threads=1, optimize=False)
    np.testing.assert_array_equal(session.run(None, feeds(model))[1], np.arange(1, 2 * H + 1))


@pytest.mark.parametrize("mask", [*MASKS, (0, 0, 0)], ids=str)
def test_cross_attention(mask: Sequence[int]) -> None:
    def build() -> ir.Model:
        return attention(inputs=f"{PLAIN_INPUT}, {MEMORY}", **cross())

    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, t, D)).astype(np.float32) for n, t in (("x", 7), ("y", 4))}
    expected = run(masked(build(), {NAME: mask}), arrays)
    np.testing.assert_allclose(run(prune(build(), mask), arrays), expected, atol=EXACT, rtol=0)


def test_graph_in_text_before_and_after() -> None:
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


# ---- what is refused ----------------------------------------------------------------------------

BAD_MASKS = {
    "too short": ((1, 0), "prune_heads.mask_length"),
    "empty": ((), "pass.params"),
    "a share": ((1, 0.5, 0), "pass.params"),
    "another number": ((1, 2, 0), "pass.params"),
    "not a number": ((1, float("nan"), 0), "pass.params"),
    "negative": ((1, -1, 0), "pass.params"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_masks_hold_a_zero_or_a_one_for_each_head(case: str) -> None:
    mask, code = BAD_MASKS[case]
    with raises(InvalidArgument, code) as caught:
        prune(attention(), mask)  # type: ignore[arg-type]
    assert "\n" not in caught.value.what


def test_unknown_layer_is_refused() -> None:
    with raises(CannotRewrite, "rewrite.unknown_block"):
        prune(attention(), (1, 0, 1), "attention_9")


REFUSED = {
    "no output projection": (
        {"output": "\n o = Tanh(c)\n o1 = MatMul(o, Wo)\n out = Add(o1, bo)"},
        "no_output_projection",
    ),
    "keys that are an output": (
        {"k": PARTS["k"].replace("k2 =", "shown =").replace("(k2)", "(shown)")},
        "returned",
    ),
    "probabilities that are an output": (
        {"softmax": PARTS["softmax"].replace("p =", "shown ="),
         "context": PARTS["context"].replace("(p, v)", "(shown, v)")},
        "returned",
    ),
    "a bias made of the queries": (
        {"mask": "\n sizes = ReduceSum <keepdims = 1> (q, last)\n m = Add(s, sizes)"},
        "entangled_bias",
    ),
    "q/k norm over all heads at once": (
        {"q": PARTS["q"].replace("q2 = Reshape(q1", "q9 = LayerNormalization(q1, all_gains)\n"
                                 "        q2 = Reshape(q9")},
        "projection_layout",
    ),
}  # fmt: skip
SHOWN = {
    "keys that are an output": f", float[batch, sequence, {H}, {K}] shown",
    "probabilities that are an output": f", float[batch, {H}, sequence, sequence] shown",
}


@pytest.mark.parametrize("case", REFUSED)
def test_prune_is_refused(case: str) -> None:
    parts, code = REFUSED[case]
    output = f"float[batch, sequence, {D}] out{SHOWN.get(case, '')}"
    constants = {"all_gains": np.ones(H * K, np.float32)}
    model = attention(output_type=output, constants=constants, **parts)
    before = text_of(model)
    with raises(CannotRewrite, code) as caught:
        prune(model, (1, 0, 1))
    assert "\n" not in caught.value.what
    assert text_of(model) == before
    assert not PruneHeads({NAME: (1, 1, 1)})(model).modified  # nothing is asked of it


def test_cache_is_refused() -> None:
    case = OPERATORS["ai.onnx: past"]
    (block,), _ = find_attention(case.model())
    with raises(CannotRewrite, "cached"):
        prune(case.model(), (1, 0, 1), block.name)


def test_mask_with_an_axis_of_windows_is_refused() -> None:
    """Swin: (B, windows, H, S, T) is added to scores of (B * windows, H, S, T)."""
    split, join = np.array([-1, 2, H, 4, 4], np.int64), np.array([-1, H, 4, 4], np.int64)
    model = attention(
        inputs=f"float[batch, 4, {D}] x, float[1, 2, 1, 4, 4] mask",
        output_type=f"float[batch, 4, {D}] out",
        constants={"split": split, "join": join},
        mask="\n s5 = Reshape(s, split)\n m5 = Add(s5, mask)\n m = Reshape(m5, join)",
    )
    with raises(CannotRewrite, "window_mask"):
        prune(model, (1, 0, 1))


# ---- any mask -----------------------------------------------------------------------------------


@settings(max_examples=25)
@given(masks=st.lists(st.lists(st.integers(0, 1), min_size=H, max_size=H), min_size=2, max_size=2))
def test_any_mask_is_masking(masks: list[list[int]]) -> None:
    """And the opsets stay, names are unique, and what is left is certified by its name."""
    chosen: Mapping[str, list[int]] = dict(zip(("attention_0", "attention_1"), masks, strict=True))
    model, arrays = layers(2, opset=11), feeds(layers(2))
    PruneHeads(chosen)(model)
    expected = run(masked(layers(2, opset=11), chosen), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert model.opset_imports[""] == 11
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)
    reading = read_attention(model)
    assert reading.unmatched == ()
    left = {block.name: block.num_heads for block in reading.blocks}
    if all(map(any, masks)):
        assert left == {name: sum(mask) for name, mask in chosen.items()}


def test_attention_in_a_body_is_pruned_there() -> None:
    body = "".join(PARTS.values()).replace("\n", "\n    ")
    text = f"""
        out = If (choice) <
            then_branch = yes () => (float[batch, sequence, {D}] out_then) {{{body}
                out_then = Identity(out)
            }},
            else_branch = no () => (float[batch, sequence, {D}] out_else) {{
                out_else = Identity(x)
            }}>"""
    text = text.replace("out = Add(o, bo)", "done = Add(o, bo)").replace(
        "Identity(out)", "Identity(done)"
    )

    def build() -> ir.Model:
        return graph(text, inputs=f"{PLAIN_INPUT}, {FLOAT_MASK}, bool choice")

    (block,), _ = find_attention(build())
    arrays = feeds(attention()) | {"choice": np.array(True)}
    model = prune(build(), (0, 1, 1), block.name)
    expected = run(masked(attention(), {NAME: (0, 1, 1)}), feeds(attention()))
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)
