"""FuseAttention: one operator computes the same for each query that sees a key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD
from attnserve.models.onnx_files import load_model
from attnserve.models.opset import raise_opset
from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import count_macs, model_cost, parameter_bytes
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import AttentionBlock, Causal, PositionBias
from graph_passes.emit.fused_attention import LOW, FusedOperator
from graph_passes.errors import CannotRewrite
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.fuse_attention import IDIOMS, FuseAttention, fusion_refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention
from tests import architectures
from tests.architectures import ARCHITECTURES, Cell
from tests.errors import raises
from tests.graph_passes.graphs import (
    BOOL_MASK,
    PARTS,
    PLAIN_INPUT,
    D,
    H,
    K,
    V,
    assert_unchanged,
    attention,
    feeds,
    graph,
    layers,
    masked,
    only,
    run,
    second_layer,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    ALL_LAYOUTS,
    HALF_PRECISION,
    RETURNED,
    SHARED,
    SHOW_LENGTH,
    returning,
    variant,
)
from tests.graph_passes.operators import OPERATORS, any_feeds, raised

EXACT = 1e-5
"""Fused attention equals the original except for the order of sums."""

NAME = "attention_0"
FORMS: tuple[FusedOperator, ...] = get_args(FusedOperator)
OPERATOR = {
    "attention": "Attention", "multi_head": "MultiHeadAttention", "merged": "MultiHeadAttention",
    "onnx": "Attention",
}  # fmt: skip
PRODUCTS = {
    "attention": [], "multi_head": ["MatMul"] * 3, "merged": ["MatMul", "Split"],
    "onnx": ["MatMul", "Add"] * 3,
}  # fmt: skip
"""The nodes of queries, keys and values before the operator."""

each_form = pytest.mark.parametrize("form", FORMS)
each_microsoft_form = pytest.mark.parametrize("form", [form for form in FORMS if form != "onnx"])


def fuse(model: ir.Model, form: FusedOperator, *names: str) -> ir.Model:
    """Fuse all blocks, or those with these names."""
    raised(model, form)
    found = Analyses.of(model).get(find_attention)  # the pass reads the same blocks
    names = names or tuple(block.name for block in found.blocks)
    result = FuseAttention(dict.fromkeys(names, form))(model)
    assert result.modified
    return result.model


def operators(model: ir.Model) -> list[ir.Node]:
    nodes = model.graph.all_nodes()
    return [n for n in nodes if n.op_type in OPERATOR.values()]


def biases(model: ir.Model) -> list[ir.Value | None]:
    """The bias of the scores of each operator."""
    places = [(node, 5 if node.domain else 3) for node in operators(model)]
    return [node.inputs[i] if len(node.inputs) > i else None for node, i in places]


def codes(model: ir.Model, form: FusedOperator) -> list[str]:
    """Why each block of a model cannot be fused; empty if it can."""
    blocks, info = find_attention(model).blocks, infer_shapes_small(model, batch=2, sequence=5)
    refusals = [fusion_refusal(block, form, info) for block in blocks]
    return [refusal.code if refusal else "" for refusal in refusals]


def assert_same_block(after: AttentionBlock, before: AttentionBlock, form: FusedOperator) -> None:
    assert (after.name, after.idiom, after.form) == (before.name, IDIOMS[form], "standard")
    assert (after.num_heads, after.num_kv_heads) == (before.num_heads, before.num_kv_heads)
    assert (after.head_size, after.v_head_size) == (before.head_size, before.v_head_size)
    # OpenVINO reads no scale of com.microsoft Attention: its weights contain the rest.
    scale = before.head_size**-0.5 if form == "attention" else before.scale
    assert after.scale == pytest.approx(scale, rel=1e-6)
    assert (after.kind, after.position) == (before.kind, before.position)


def assert_same_output(
    model: ir.Model, original: ir.Model, arrays: Mapping[str, np.ndarray] | None = None
) -> None:
    arrays = feeds(original) if arrays is None else arrays
    expected, got = run(original, arrays), run(model, arrays)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, atol=EXACT, rtol=EXACT)


def assert_fused(
    build: Callable[[], ir.Model],
    form: FusedOperator,
    arrays: Mapping[str, np.ndarray] | None = None,
) -> ir.Model:
    """One operator has the same output, and is certified under the same name."""
    original = build()
    model = fuse(original.clone(), form)
    assert [node.op_type for node in operators(model)] == [OPERATOR[form]]
    assert "Softmax" not in {node.op_type for node in model.graph}
    assert_same_output(model, original, arrays)
    (before,), _ = find_attention(original)
    assert_same_block(only(model), before, form)
    return model


# ---- fused blocks -------------------------------------------------------------------------------


FUSED_MASKS = (
    "no mask", "boolean mask kept", "boolean mask forbidden", "mask of two axes", "subtracted mask",
    "mask by head", "ALiBi: a slope a head", "T5: a bias for every head, query and key",
    "a bias of three axes",
)  # fmt: skip


@each_form
@pytest.mark.parametrize("case", FUSED_MASKS)
def test_fuse_attention_masks_become_one_bias(case: str, form: FusedOperator) -> None:
    """The bias is (B or 1, H or 1, S, T); there is none without a mask."""
    model = assert_fused(lambda: variant(case), form)
    (bias,) = biases(model)
    assert (bias is None) == (case == "no mask")
    if bias is not None:
        shape = infer_shapes_small(model, batch=2, sequence=5).shape(bias)
        assert shape is not None and shape[0] in (1, 2) and shape[1] in (1, H)
        assert shape[2:] == (5, 5)


@each_form
def test_fuse_attention_causal_mask_is_an_attribute(form: FusedOperator) -> None:
    is_onnx = form == "onnx"
    case = OPERATORS["MultiHeadAttention: unidirectional" if is_onnx else "ai.onnx: causal"]
    model = assert_fused(case.model, form, any_feeds(case.model()))
    (node,) = operators(model)
    assert node.attributes.get_int("is_causal" if is_onnx else "unidirectional", 0) == 1
    assert biases(model) == [None]
    assert only(model).steps == (Causal(ends_together=not is_onnx),)


@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (3, 6), (6, 3)])
def test_fuse_attention_causal_cross_attention_has_a_bias(queries: int, keys: int) -> None:
    """The causal attribute of operators is ambiguous for two lengths."""
    case = OPERATORS["ai.onnx: cross attention"]
    case = replace(case, body=case.body.replace("kv_num", "is_causal = 1, kv_num"))
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.standard_normal((2, length, D)).astype(np.float32)
        for name, length in (("x", queries), ("y", keys))
    }
    model = assert_fused(case.model, "multi_head", arrays)
    assert "unidirectional" not in operators(model)[0].attributes
    assert None not in biases(model)


@each_form
def test_fuse_attention_scaled_values_keep_the_output(form: FusedOperator) -> None:
    """The scale of values is applied to their weight and bias."""
    parts = {"v": PARTS["v"].replace("v = T", "v9 = T") + "\n        v = Mul(v9, inverse)"}
    assert_fused(lambda: attention(**parts), form)


@each_form
def test_fuse_attention_pruned_heads_keep_the_output(form: FusedOperator) -> None:
    for mask in ((1, 0, 1), (0, 1, 0)):
        model = assert_fused(lambda mask=mask: PruneHeads({NAME: mask})(attention()).model, form)
        assert_same_output(model, masked(attention(), {NAME: mask}))


@each_form
@pytest.mark.parametrize("same", [(), SHARED], ids=["weights of their own", "shared weights"])
def test_fuse_attention_sparse_layers_become_standard_heads(
    same: tuple[str, ...], form: FusedOperator
) -> None:
    """A query bias adds one dimension, whose query is constant."""

    def build() -> ir.Model:
        model = layers(2, same=same)
        blocks, _ = find_attention(model)
        sizes = {
            block.name: factor(blocks[0] if same else block, 2 * H, head_size=2) for block in blocks
        }
        shared = next(iter(sizes.values()))
        sizes = dict.fromkeys(sizes, shared) if same else sizes
        return Collaborate.with_factors(sizes, sparse=True)(model).model

    model = fuse(build(), form)
    assert_same_output(model, build())
    matches = read_attention(model)
    assert matches.unmatched == ()
    assert [(b.idiom, b.head_size, b.v_head_size) for b in matches.blocks] == [
        (IDIOMS[form], 3, V)
    ] * 2


@each_form
def test_fuse_attention_bfloat16_is_certified(form: FusedOperator) -> None:
    """There is no CPU kernel for bfloat16, so the block is checked by its certificate."""
    bfloat16 = {key: array.astype(ml_dtypes.bfloat16) if array.dtype == np.float16 else array
                for key, array in HALF_PRECISION.items()}  # fmt: skip
    model = fuse(
        attention(
            inputs=f"bfloat16[batch, sequence, {D}] x, bool[batch, 1, 1, sequence] mask",
            output_type=f"bfloat16[batch, sequence, {D}] out",
            constants=bfloat16 | {"low": np.array(-1e38, ml_dtypes.bfloat16)},
            mask="\n hidden = Not(mask)\n m = Where(hidden, low, s)",
        ),
        form,
    )
    (node,) = operators(model)
    assert {v.dtype for v in node.inputs if v and v.dtype} == {ir.DataType.BFLOAT16}
    matches = read_attention(model)
    assert [block.idiom for block in matches.blocks] == [IDIOMS[form]] and not matches.unmatched


def test_fuse_attention_of_consecutive_blocks_keeps_the_output() -> None:
    """The second block reads the output of the first without a residual."""
    body = "".join(PARTS.values()) + second_layer()
    output = f"float[batch, sequence, {D}] out_1"
    for form in FORMS:
        model = fuse(graph(body, output=output), form)
        assert len(operators(model)) == 2 and "Softmax" not in text_of(model)
        assert_same_output(model, graph(body, output=output))


# ---- queries without visible keys ---------------------------------------------------------------


def mean_output(x: np.ndarray) -> np.ndarray:
    """The output of queries that attend evenly to all tokens (S, D)."""
    w = weights()
    mean = (x @ w["Wv"] + w["bv"]).mean(axis=0) @ w["Wo"] + w["bo"]
    return np.broadcast_to(mean, x.shape)


@pytest.fixture
def means_without_keys(request: pytest.FixtureRequest, form: FusedOperator) -> None:
    if form == "onnx" and request.config.getoption("--on-gpu"):
        pytest.skip("ai.onnx Attention on CUDA gives zeros for a query without keys")


@pytest.mark.usefixtures("means_without_keys")
@each_form
@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("hidden", [-np.inf, float(np.finfo(np.float32).min), -1e9, -1e4])
def test_fuse_attention_hidden_keys_get_no_probability(
    hidden: float, guarded: bool, form: FusedOperator
) -> None:
    """Queries without keys attend to all keys, evenly if the mask is large."""
    parts = ALL_LAYOUTS["safe softmax"] if guarded else {}
    mask = np.where(np.arange(7) < 4, 0, hidden) * np.ones((2, 1, 1, 1))
    arrays = feeds(attention()) | {"mask": mask.astype(np.float32)}
    arrays["mask"][1] = hidden
    expected, model = run(attention(**parts), arrays), fuse(attention(**parts), form)
    got = run(model, arrays)
    np.testing.assert_allclose(got[0], expected[0], atol=EXACT, rtol=EXACT)
    assert np.isfinite(got).all()
    if hidden < -1e8:
        np.testing.assert_allclose(got[1], mean_output(arrays["x"][1]), atol=EXACT, rtol=0)
    if np.isfinite(hidden):
        np.testing.assert_allclose(got[1], expected[1], atol=EXACT, rtol=EXACT)


@each_form
def test_fuse_attention_sum_of_masks_stays_finite(form: FusedOperator) -> None:
    lowest = np.finfo(np.float32).min
    arrays = feeds(attention())
    arrays["mask"] = np.where(arrays["mask"] < 0, lowest, 0).astype(np.float32)
    parts = {"mask": "\n m1 = Add(s, mask)\n m = Add(m1, mask)"}
    model = fuse(attention(**parts), form)
    assert_same_output(model, attention(**parts), arrays)
    arrays["mask"][:] = lowest
    assert np.isfinite(run(model, arrays)).all()


@each_microsoft_form
def test_fuse_attention_causal_query_without_keys_is_finite(form: FusedOperator) -> None:
    """Left padding: the sum of the bias and the causal mask of the operator is finite."""
    case = OPERATORS["ai.onnx: mask and causal"]
    arrays = any_feeds(case.model())
    arrays["mask"][:] = True
    arrays["mask"][0, ..., :2] = False
    got = run(fuse(case.model(), form), arrays)
    assert np.isfinite(got).all()
    expected = run(case.model(), arrays)
    np.testing.assert_allclose(got[0, 2:], expected[0, 2:], atol=EXACT, rtol=EXACT)
    np.testing.assert_allclose(got[1], expected[1], atol=EXACT, rtol=EXACT)


@pytest.mark.parametrize("dtype", LOW)
def test_low_value_twice_and_a_score_is_finite(dtype: ir.DataType) -> None:
    low = np.array(LOW[dtype], dtype.numpy())
    assert np.isfinite(low + low + dtype.numpy().type(-5000))
    assert np.exp(low) == 0


@pytest.mark.usefixtures("means_without_keys")
@each_form
def test_fuse_attention_mask_without_keys_attends_evenly(form: FusedOperator) -> None:
    for fill in ("low", "infinity"):
        inputs, parts = f"{PLAIN_INPUT}, {BOOL_MASK}", {"mask": f"\n m = Where(mask, s, {fill})"}
        model = fuse(attention(inputs=inputs, **parts), form)
        arrays = feeds(model)
        arrays["mask"][1] = False
        got, expected = run(model, arrays)[1], mean_output(arrays["x"][1])
        np.testing.assert_allclose(got, expected, atol=EXACT, rtol=0)


# ---- layers -------------------------------------------------------------------------------------


@each_form
def test_fuse_attention_layers_with_one_mask_share_one_bias(form: FusedOperator) -> None:
    model = fuse(layers(3), form)
    assert len(operators(model)) == 3 and len(set(biases(model))) == 1
    assert_same_output(model, layers(3))
    blocks = read_attention(model).blocks
    assert [block.name for block in blocks] == [f"attention_{index}" for index in range(3)]
    assert (
        len({step.value for b in blocks for step in b.steps if isinstance(step, PositionBias)}) == 1
    )


def test_fuse_attention_mask_with_its_own_length_name_is_shared() -> None:
    """The key axis of the mask has another name than that of the tokens."""
    inputs = f"{PLAIN_INPUT}, float[batch, 1, 1, keys] mask"
    model = fuse(layers(3, inputs=inputs), "attention")
    assert len(set(biases(model))) == 1
    assert_same_output(model, layers(3))


def test_fuse_attention_of_one_layer_leaves_the_others() -> None:
    model = fuse(layers(3), "attention", "attention_1")
    assert_same_output(model, layers(3))
    matches = read_attention(model)
    assert [block.idiom for block in matches.blocks] == ["softmax", IDIOMS["attention"], "softmax"]
    assert [block.name for block in matches.blocks] == [f"attention_{index}" for index in range(3)]


def test_fuse_attention_layers_of_two_forms_share_one_bias() -> None:
    model = layers(2)
    FuseAttention({"attention_0": "attention", "attention_1": "multi_head"})(model)
    assert [node.op_type for node in operators(model)] == ["Attention", "MultiHeadAttention"]
    assert len(set(biases(model))) == 1
    assert_same_output(model, layers(2))


def encoder_and_decoder() -> ir.Model:
    """Self-attention of y and cross-attention of x over its output, with one mask by keys."""
    first = second_layer("_y", "y") + "\n memory = Add(y, out_y)"
    second = "".join((PARTS | {p: PARTS[p].replace("(x, ", "(memory, ") for p in "kv"}).values())
    inputs = f"{PLAIN_INPUT}, float[batch, length, {D}] y, float[batch, 1, 1, length] mask"
    return graph(first + second, inputs=inputs)


@pytest.mark.parametrize(("queries", "keys"), [(7, 4), (4, 7), (5, 5)])
def test_fuse_attention_key_mask_is_expanded_by_query_length(queries: int, keys: int) -> None:
    """An encoder and a decoder that share a mask have two biases."""
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((2, queries, D)).astype(np.float32),
        "y": rng.standard_normal((2, keys, D)).astype(np.float32),
        "mask": np.where(np.arange(keys) < 3, np.zeros((2, 1, 1, 1)), -1e9).astype(np.float32),
    }
    model = fuse(encoder_and_decoder(), "multi_head")
    assert len(set(biases(model))) == 2
    assert_same_output(model, encoder_and_decoder(), arrays)


@each_form
def test_fuse_attention_keeps_weights_shared(form: FusedOperator) -> None:
    """ALBERT: three operators still share one weight."""
    model = layers(3, same=SHARED)
    before = model_cost(model).parameters
    fuse(model, form)
    # The mask adds two scalars, and the scale becomes an attribute.
    assert model_cost(model).parameters == before + 1
    blocks = read_attention(model).blocks
    for part in ("q", "k", "v", "output"):
        assert len({getattr(block, part).weight for block in blocks}) == 1


def test_fuse_attention_multi_head_reuses_weights() -> None:
    model = fuse(attention(), "multi_head")
    (block,), _ = find_attention(model)
    assert [part.weight.value.name for part in (block.q, block.k, block.v) if part.weight] == [
        "Wq", "Wk", "Wv",
    ]  # fmt: skip
    assert block.output is not None and block.output.weight.value.name == "Wo"


# ---- the rewritten graph ------------------------------------------------------------------------


@each_form
def test_fuse_attention_writes_these_nodes(form: FusedOperator) -> None:
    nodes = [node.op_type for node in fuse(variant("no mask"), form).graph]
    assert nodes == [*PRODUCTS[form], OPERATOR[form], "MatMul", "Add"]


@each_form
def test_fuse_attention_queries_read_for_their_shape_are_removed(form: FusedOperator) -> None:
    """The length is taken from the tokens."""
    model = attention(
        output_type=f"float[batch, sequence, {D}] out, float[sequence] shown",
        output=PARTS["output"] + SHOW_LENGTH.format(value="q", axis="a2"),
    )
    fuse(model, form)
    products = [node for node in model.graph if node.op_type == "MatMul"]
    assert len(products) == 1 + PRODUCTS[form].count("MatMul")
    got = open_session(model, ONE_THREAD, SessionOptions(optimize=False)).run(
        None, feeds(attention())
    )[1]
    np.testing.assert_array_equal(got, np.arange(1, 8))


@each_microsoft_form
def test_fuse_attention_without_biases_writes_required_zeros(form: FusedOperator) -> None:
    """The CPU kernel of com.microsoft Attention crashes without a bias."""
    model = fuse(attention(**ALL_LAYOUTS["no biases at all"]), form)
    (node,) = operators(model)
    bias = node.inputs[2 if form == "attention" else 3]
    assert (bias is None) == (form != "attention")
    if bias is not None and bias.const_value is not None:
        assert bias.const_value.numpy().tolist() == [0] * (2 * H * K + H * V)


def test_fuse_attention_low_opset_is_refused() -> None:
    """Opset 22 has no Attention, and the pass does not raise the opset."""
    model = attention(opset=22)
    before = text_of(model)
    with raises(CannotRewrite, "rewrite.opset"):
        FuseAttention({NAME: "onnx"})(model)
    assert text_of(model) == before
    model = attention(opset=23)
    FuseAttention({NAME: "onnx"})(model)
    assert model.opset_imports[""] == 23
    with raises(CannotRewrite, "rewrite.opset"):
        FuseAttention({NAME: "merged"})(attention(opset=12))


@each_form
def test_fuse_attention_twice_equals_once(form: FusedOperator) -> None:
    model = fuse(layers(2), form)
    assert_unchanged(model, FuseAttention({f"attention_{index}": form for index in range(2)}))
    assert not FuseAttention({})(model).modified


def test_fuse_attention_between_forms_keeps_the_output() -> None:
    model = layers(2)
    for form in ("attention", "multi_head", "attention"):
        fuse(model, form)
    assert_same_output(model, layers(2))
    assert len(set(biases(model))) == 1


def test_fuse_attention_saved_model_keeps_names(tmp_path: Path) -> None:
    for form in FORMS:
        ir.save(fuse(layers(2), form), tmp_path / f"{form}.onnx")
        blocks, _ = find_attention(load_model(tmp_path / f"{form}.onnx"))
        assert [block.name for block in blocks] == ["attention_0", "attention_1"]


def test_fuse_attention_imports_the_operator_domain() -> None:
    model = attention()
    del model.opset_imports["com.microsoft"]
    FuseAttention({})(model)
    assert "com.microsoft" not in model.opset_imports
    fuse(model, "attention")
    assert model.opset_imports == {"": 17, "com.microsoft": 1}
    run(model, feeds(attention()))


# ---- refusals -----------------------------------------------------------------------------------


@each_form
@pytest.mark.parametrize("values", RETURNED)
def test_fuse_attention_with_returned_values_is_refused(values: str, form: FusedOperator) -> None:
    model = raised(returning(values), form)
    before, code = (
        text_of(model),
        "projections_shared" if values == "keys" else "probabilities_shared",
    )
    with raises(CannotRewrite, f"rewrite.{code}") as caught:
        fuse(model, form)
    assert "\n" not in caught.value.what
    assert text_of(model) == before


@each_microsoft_form
def test_fuse_attention_operator_with_returned_keys_is_refused(form: FusedOperator) -> None:
    """An operator whose keys are returned would be computed twice."""
    plain = OPERATORS["ai.onnx: heads side by side"]
    body = plain.body.replace("c = A", "c, nk, nv = A")
    assert codes(replace(plain, body=body).model(), form) == [""]
    kept = replace(plain, body=f"{body}\n kept = Abs(nk)").model()
    assert codes(kept, form) == [""]  # the result is unused
    kept.graph.outputs.append(next(v for n in kept.graph for v in n.outputs if v.name == "kept"))
    assert codes(kept, form) == ["probabilities_shared"]


@each_form
@pytest.mark.parametrize("mixing", ["collaborative", "sparse"])
def test_fuse_attention_heads_that_share_dimensions_are_refused(
    mixing: str, form: FusedOperator
) -> None:
    """The operator would compute H * K' columns of the queries and keys instead of R."""
    model, sparse = attention(), mixing == "sparse"
    factors = factor(only(model), 4, head_size=2 if sparse else None)
    Collaborate.with_factors({NAME: factors}, sparse=sparse)(model)
    assert (only(model).form, only(model).is_sparse) == (mixing, sparse)
    assert codes(model, form) == ["collaborative"]


@each_form
@pytest.mark.parametrize("kept", [1, 2, 3])
def test_fuse_attention_truncated_heads_cost_no_more(kept: int, form: FusedOperator) -> None:
    """Heads with dimensions of their own are fused with as many MACs, and at most one bias more."""
    before = attention()
    factors = factor(only(before), kept * H, head_size=kept)
    Collaborate.with_factors({NAME: factors}, sparse=True)(before)
    assert not only(before).is_sparse
    after = fuse(before.clone(), form)
    assert_same_output(after, before)
    for length in (1, 7, 100):
        assert count_macs(after, Workload.of(2, length)) == count_macs(
            before, Workload.of(2, length)
        )
    vectors = sum(
        value.const_value.nbytes
        for value in after.graph.initializers.values()
        if value.const_value is not None and len(value.const_value.shape) < 2
    )
    assert parameter_bytes(after) - vectors <= parameter_bytes(before)


@each_form
def test_fuse_attention_reused_probabilities_are_refused(form: FusedOperator) -> None:
    edges = {"attention_1": {head: ("attention_0", head) for head in range(H)}}
    model = ReuseAttention(edges)(layers(3)).model
    assert codes(model, form) == ["probabilities_shared", "reuses_heads", ""]


@each_form
def test_fuse_attention_double_precision_is_refused(form: FusedOperator) -> None:
    doubles = {n: a.astype(np.float64) for n, a in weights().items() if n[0] in "Wbs"}
    inputs = f"double[batch, sequence, {D}] x, double[batch, 1, 1, sequence] mask"
    output = f"double[batch, sequence, {D}] out"
    model = attention(inputs=inputs, output_type=output, constants=doubles)
    assert codes(model, form) == ["dtype"]


# ---- masks that hide no key ---------------------------------------------------------------------

SPREAD_TRUE = "\n b = Expand(all_true, of_batch)\n z = Where(b, zero, low)\n m = Add(s, z)"
TRUES = {"all_true": np.ones((1, 1, 5, 5), bool), "of_batch": np.array([2, 1, 5, 5])}


def test_fuse_attention_mask_that_hides_nothing_is_removed() -> None:
    """The dynamo exporter writes such masks for images."""
    model = attention(inputs=f"float[batch, 5, {D}] x", constants=TRUES, mask=SPREAD_TRUE)
    fuse(model, "attention")
    assert biases(model) == [None]


def test_fuse_attention_window_longer_than_probe_stays() -> None:
    """A window of 6 keys hides none of the 5 keys of the shape inference."""
    near = """
        shape = Shape(x)
        length = Gather <axis = 0> (shape, i1)
        positions = Range(i0, length, i1)
        column = Unsqueeze(positions, a1)
        distance = Sub(column, positions)
        far = Abs(distance)
        b = Less(far, six)
        z = Where(b, zero, low)
        m = Add(s, z)"""

    def build() -> ir.Model:
        return attention(inputs=PLAIN_INPUT, constants={"six": np.array(6)}, mask=near)

    model = fuse(build(), "attention")
    assert biases(model) != [None]
    assert_same_output(model, build(), feeds(build(), sequence=12))


# ---- exported models ----------------------------------------------------------------------------

EXPORTED = {
    Cell("BERT", "sdpa", "dynamo", 18): (1, 0),
    Cell("BERT", "eager", "torchscript", 17): (1, 0),
    Cell("GPT-2", "eager", "dynamo", 18): (1, 0),
    Cell("ViT", "sdpa", "dynamo", 18): (0, 0),
    Cell("T5", "eager", "torchscript", 17): (3, 1),
    Cell("BART", "sdpa", "dynamo", 18): (3, 1),
    Cell("ALBERT", "sdpa", "torchscript", 17): (3, 0),
}
"""The number of different biases and of cross-attention layers. Older exporters repeat the mask in
each layer as another value."""


def outputs(model: ir.Model | Path, arrays: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    session: Any = open_session(model, ONE_THREAD, SessionOptions(optimize=False))
    names = [value.name for value in session.get_inputs()]
    return [np.asarray(array) for array in session.run(None, {n: arrays[n] for n in names})]


def assert_same_outputs(model: ir.Model, other: ir.Model | Path, cell: Cell) -> None:
    """Padded batches of two shapes agree."""
    for lengths in (architectures.LENGTHS, architectures.OTHER_LENGTHS):
        arrays = architectures.feeds(ARCHITECTURES[cell.architecture], lengths)
        for got, expected in zip(outputs(model, arrays), outputs(other, arrays), strict=True):
            np.testing.assert_allclose(got, expected, atol=EXACT, rtol=EXACT)


@each_form
@pytest.mark.parametrize("cell", EXPORTED, ids=str)
def test_fuse_attention_exported_model_keeps_the_output(
    cell: Cell, form: FusedOperator, exported: Callable[[Cell], tuple[Path, str]]
) -> None:
    """Padded batches of two shapes agree, and each layer is certified."""
    path, reason = exported(cell)
    assert not reason
    model = load_model(path)
    blocks = find_attention(model).blocks
    names = [b.name for b, code in zip(blocks, codes(model, form), strict=True) if not code]
    count, crossed = EXPORTED[cell]
    refused = crossed if form in ("attention", "merged") else 0
    assert len(names) == len(blocks) - refused
    fuse(model, form, *names)
    assert len(set(biases(model)) - {None}) == count - refused
    assert_same_outputs(model, path, cell)
    matches = read_attention(model)
    assert matches.unmatched == ()
    assert [block.name for block in matches.blocks] == [block.name for block in blocks]
    for before, after in zip(blocks, matches.blocks, strict=True):
        if before.name in names:
            assert_same_block(after, before, form)
    if cell.architecture == "ALBERT":
        assert len({block.v.weight for block in matches.blocks}) == 1


@each_form
@pytest.mark.parametrize("cell", [*EXPORTED][:2], ids=str)
def test_fuse_attention_sequence_of_padding_is_finite(
    cell: Cell, form: FusedOperator, exported: Callable[[Cell], tuple[Path, str]]
) -> None:
    """The other sequences of the batch do not change."""
    (path, reason), architecture = exported(cell), ARCHITECTURES[cell.architecture]
    assert not reason
    arrays = architectures.feeds(architecture, architectures.OTHER_LENGTHS)
    arrays["attention_mask"][1] = 0
    (got,) = outputs(fuse(load_model(path), form), arrays)
    (expected,) = outputs(path, arrays)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(got[[0, 2]], expected[[0, 2]], atol=EXACT, rtol=EXACT)


# ---- rotary positions and grouped heads ---------------------------------------------------------

ROTARY_EXPORTS = {
    Cell("Llama", "eager", "dynamo", 18): (6, 3),
    Cell("Qwen3", "eager", "dynamo", 18): (6, 3),
    Cell("ModernBERT", "sdpa", "dynamo", 18): (3, 3),
    Cell("NomicBERT", "sdpa", "torchscript", 17): (3, 3),
}
"""The numbers of query heads and of key/value heads."""


@pytest.mark.usefixtures("means_without_keys")  # ModernBERT: padding in a window of padding
@pytest.mark.parametrize("form", ["onnx", "multi_head"])
@pytest.mark.parametrize("cell", ROTARY_EXPORTS, ids=str)
def test_fuse_attention_pruned_rotary_model_keeps_the_output(
    cell: Cell, form: FusedOperator
) -> None:
    """A key/value head and its query heads are removed, then the rest becomes one operator."""
    heads, groups = ROTARY_EXPORTS[cell]
    model = load_model(cell.committed)
    raise_opset(model, 23)
    blocks = find_attention(model).blocks
    assert {(block.num_heads, block.num_kv_heads) for block in blocks} == {(heads, groups)}
    share = heads // groups
    PruneHeads({b.name: [1] * (heads - share) + [0] * share for b in blocks})(model)
    pruned, names = model.clone(), [block.name for block in blocks]
    assert codes(model, form) == [""] * len(names)
    FuseAttention(dict.fromkeys(names, form))(model)
    assert_same_outputs(model, pruned, cell)
    matches = read_attention(model)
    assert matches.unmatched == ()
    for block in matches.blocks:
        assert (block.idiom, block.position) == (IDIOMS[form], "rope")
        assert (block.num_heads, block.num_kv_heads) == (heads - share, groups - 1)
    gathers = [n for n in model.graph if n.op_type == "Gather" and "spread" in (n.name or "")]
    assert bool(gathers) == (form == "multi_head" and share > 1)


@pytest.mark.parametrize("form", ["onnx", "multi_head"])
def test_fuse_attention_groups_of_unequal_size_are_repeated(form: FusedOperator) -> None:
    """5 query heads of 3 groups: the operators cannot divide them evenly."""
    cell = next(iter(ROTARY_EXPORTS))
    model = load_model(cell.committed)
    raise_opset(model, 23)
    names = [block.name for block in find_attention(model).blocks]
    PruneHeads({name: [1, 1, 1, 1, 1, 0] for name in names})(model)
    pruned = model.clone()
    FuseAttention(dict.fromkeys(names, form))(model)
    assert_same_outputs(model, pruned, cell)
