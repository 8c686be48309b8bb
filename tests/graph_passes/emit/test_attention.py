"""Emission of attention in plain operators for any heads in any order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emission_refusal, emit_context, emit_output
from graph_passes.emit.editing import Inserter
from graph_passes.emit.head_terms import heads_refusal
from graph_passes.emit.heads import emit_heads
from graph_passes.emit.probabilities import emit_probabilities, probabilities_by_head
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.reference import attention_reference, inputs_of
from tests.graph_passes.graphs import (
    FLOAT_MASK,
    PLAIN_INPUT,
    D,
    H,
    K,
    attention,
    feeds,
    layers,
    observing,
    run,
    weights,
)
from tests.graph_passes.layouts import (
    BOTH_TURNED,
    OPERANDS,
    ROTARY,
    VARIANTS,
    flattened,
    layout,
    variant,
)

EXACT = 1e-5
"""Largest difference of a probability, or of an output of magnitude 1 or less."""

ORDERS = ((0, 1, 2), (2, 0), (1,), (1, 1, 0))
"""All heads, some in another order, one, and one of them twice."""


def read(model: ir.Model) -> tuple[AttentionBlock, ShapeInfo]:
    (block,), _ = find_attention(model)
    return block, infer_shapes_small(model, batch=2, sequence=5)


def inserter(block: AttentionBlock) -> Inserter:
    assert block.output is not None
    return Inserter(block.graph, block.output.nodes[-1], "new")


def computed(model: ir.Model, value: ir.Value, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    return observing(model, [value], optimize=False).run(None, arrays)[0]


@pytest.mark.parametrize("heads", ORDERS, ids=str)
@pytest.mark.parametrize("case", VARIANTS)
def test_emit_probabilities_equal_the_reference(case: str, heads: Sequence[int]) -> None:
    """Masks, biases by head, rotary positions and norms are selected by head."""
    model = variant(case)
    block, info = read(model)
    arrays = feeds(model)
    wanted = [value for value in inputs_of(block) if not value.is_graph_input()]
    known = {value: arrays[str(value.name)] for value in inputs_of(block) if value.is_graph_input()}
    known |= {value: computed(model, value, arrays) for value in wanted}
    whole = attention_reference(block, known, batch=2).probabilities  # B H S T
    value = emit_probabilities(inserter(block), block, np.array(heads), info)
    got = computed(model, value, arrays)
    np.testing.assert_allclose(got, whole[:, list(heads)], atol=EXACT, rtol=0)


@pytest.mark.parametrize("heads", ORDERS[:3], ids=str)
def test_emit_output_is_the_sum_over_the_heads(heads: Sequence[int]) -> None:
    """out = sum over heads + b in any order."""
    model, arrays = attention(), feeds(attention())
    block, _ = read(model)
    alone = [run(emitted(attention(), [head]), arrays) for head in heads]
    assert block.output is not None
    expected = sum(alone) - (len(heads) - 1) * block.output.offset()
    got = run(emitted(model, heads), arrays)
    np.testing.assert_allclose(got, expected, atol=EXACT, rtol=0)
    if len(heads) == H:
        np.testing.assert_allclose(got, run(attention(), arrays), atol=EXACT, rtol=0)


def emitted(model: ir.Model, heads: Sequence[int]) -> ir.Model:
    """The model with some heads instead of its attention."""
    block, info = read(model)
    make, chosen = inserter(block), np.array(heads)
    probabilities = emit_probabilities(make, block, chosen, info)
    context = emit_context(make, block, [(probabilities, chosen)], info)
    emit_output(make, block, context, chosen, info)
    return model


def test_emit_heads_projects_shared_key_heads_once() -> None:
    inputs, parts = VARIANTS["one key/value head for all"]
    model = attention(inputs=inputs, **parts)
    block, _ = read(model)
    emit_heads(inserter(block), block.k, 1.0)
    assert model.graph.initializers["new/weight"].shape == ir.Shape([D, K])
    (spread,) = [node for node in model.graph if node.name == "new/spread"]
    assert spread.op_type == "Gather"


def test_emit_heads_with_different_factors_are_distinct() -> None:
    """One key head with a factor for each query head: columns are equal, keys are not."""
    shared = VARIANTS["one key/value head for all"][1]["k"]
    scores = "\n kG = Mul(kT, per_head)\n s0 = MatMul(q, kG)\n s = Mul(s0, scale)"
    assert_emission(lambda: attention(k=shared, scores=scores))


GAINED = BOTH_TURNED.replace("(k_rows, ", "(k_gained, ").replace(
    " k_cos =", " k_gained = Mul(k_rows, per_head)\n k_cos ="
)


@pytest.mark.parametrize(
    ("scores", "angles"),
    [(GAINED, f"sequence, {K}"), (BOTH_TURNED, f"1, {H}, sequence, {K}")],
    ids=["factors", "angles"],
)
def test_emit_heads_rotated_with_different_factors_or_angles_are_distinct(
    scores: str, angles: str
) -> None:
    """One key head, which each query head reads in another way."""
    shared = VARIANTS["one key/value head for all"][1]["k"]
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[{angles}] cos, float[{angles}] sin"
    assert_emission(lambda: attention(k=shared, scores=scores, inputs=inputs, constants=ROTARY))


def assert_emission(build: Callable[[], ir.Model]) -> None:
    """The emitted probabilities equal those of the graph for all orders of heads."""
    arrays = feeds(build())
    model = build()
    block, info = read(model)
    assert block.probabilities is not None
    whole = computed(model, block.probabilities, arrays)
    assert np.abs(whole[:, 0] - whole[:, 1]).max() > 1e-2
    for heads in ORDERS:
        value = emit_probabilities(inserter(block), block, np.array(heads), info)
        got = computed(model, value, arrays)
        np.testing.assert_allclose(got, whole[:, list(heads)], atol=EXACT, rtol=0)


def test_emit_probabilities_folds_the_scale_into_the_weights() -> None:
    """No node multiplies by the scale."""
    model = attention()
    block, info = read(model)
    emit_probabilities(inserter(block), block, np.arange(H), info)
    new = [node.op_type for node in model.graph if (node.name or "").startswith("new/")]
    assert "Mul" not in new
    weight = model.graph.initializers["new/query/weight"].const_value
    assert weight is not None
    np.testing.assert_allclose(weight.numpy(), 0.37 * weights()["Wq"], atol=1e-6)


def test_probabilities_by_head_splits_heads_from_the_batch() -> None:

    model = layout("heads and batch in one axis")
    block, info = read(model)
    arrays = feeds(model)
    assert block.probabilities is not None
    flat = computed(model, block.probabilities, arrays)
    apart = computed(model, probabilities_by_head(inserter(block), block, info), arrays)
    assert (flat.shape, apart.shape) == ((2 * H, 7, 7), (2, H, 7, 7))
    np.testing.assert_array_equal(apart.reshape(flat.shape), flat)


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 23])
@pytest.mark.parametrize("case", ["rotary", "q/k norm by root mean square", "mask by head"])
def test_emission_at_any_opset_keeps_the_output(case: str, opset: int) -> None:
    inputs, parts = VARIANTS[case]
    if opset >= 18:
        old, new = "ReduceMean <axes = [-1]> (q_squared)", "ReduceMean (q_squared, last)"
        parts = {name: text.replace(old, new) for name, text in parts.items()}

    def build() -> ir.Model:
        return attention(inputs=inputs, constants=OPERANDS | ROTARY, opset=opset, **parts)

    arrays = feeds(build())
    got = run(emitted(build(), range(H)), arrays)
    np.testing.assert_allclose(got, run(build(), arrays), atol=EXACT, rtol=EXACT)


# ---- refusals -----------------------------------------------------------------------------------


def code_of(block: AttentionBlock, info: ShapeInfo | None = None) -> str | None:
    refusal = emission_refusal(block, info)
    return refusal and refusal.code


def test_heads_refusal_of_values_with_entangled_bias_is_none() -> None:
    text = "\n sizes = ReduceSum <keepdims = 1> (q, last)\n m = Add(s, sizes)"
    block, _ = read(attention(mask=text))
    assert code_of(block) == "entangled_bias"
    assert heads_refusal(block.v) is None


def test_emission_refusal_of_collaborative_heads() -> None:

    rewrite = Collaborate({"attention_0": Mixing(rank=5)})
    block, _ = read(rewrite(attention()).model)
    assert code_of(block) == "collaborative"


def test_emission_refusal_of_mask_with_unknown_shape() -> None:
    """Without a shape, the axis of the heads is unknown."""
    block, info = read(attention())
    (step,) = block.steps
    mask = step.value  # type: ignore[union-attr]
    known = {value: fact for value, fact in info.known.items() if value is not mask}
    assert code_of(block, replace(info, known=known)) == "mask_shape"


def test_emission_refusal_of_flattened_tokens() -> None:
    assert code_of(read(flattened())[0]) == "token_layout"


def test_emission_refusal_of_heads_with_different_rotated_elements() -> None:
    block, _ = read(variant("rotary"))
    turns = list(block.q.rotary_terms)
    gain = turns[1].gain.copy()
    gain[0, 2:] = 0
    columns = turns[0].columns.copy()
    columns[0] = columns[0, 0]
    turns = [replace(turns[0], columns=columns), replace(turns[1], gain=gain * 0)]
    block = replace(block, q=replace(block.q, rotary_terms=tuple(turns)))
    assert code_of(block) == "projection_layout"


def test_second_emission_has_new_names() -> None:
    model = layers(1)
    block, info = read(model)
    for _ in range(2):
        emit_probabilities(inserter(block), block, np.arange(H), info)
    names = [node.outputs[0].name for node in model.graph]
    assert len(set(names)) == len(names)
    assert "new/softmax_2" in names
