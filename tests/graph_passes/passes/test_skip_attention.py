"""SkipAttention: an affine map of the input, or a constant, replaces an attention."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.analysis.cost import model_cost
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.emit.editing import remove_unused
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.skip_attention import (
    AffineMap,
    SkipAttention,
    refill,
    skip_refusal,
    skipped,
)
from tests.errors import raises
from tests.graph_passes.graphs import (
    PLAIN_INPUT,
    D,
    attention,
    feeds,
    graph,
    layers,
    run,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    SEQUENCE_FIRST,
    SHARED,
    cross_attention,
    flattened,
    half_precision,
    layout,
    variant,
)

EXACT = 1e-5
NAME = "attention_0"
rng = np.random.default_rng(3)
MAP = AffineMap(
    rng.standard_normal((D, D)).astype(np.float32), rng.standard_normal(D).astype(np.float32)
)
CONSTANT = AffineMap(None, MAP.bias)
WITHOUT_BIAS = AffineMap(MAP.weight, np.zeros(D, np.float32))
MAPS = {"a map": MAP, "a constant": CONSTANT, "a map without a bias": WITHOUT_BIAS}


def skip(model: ir.Model, affine: AffineMap, name: str = NAME) -> ir.Model:
    return SkipAttention({name: affine})(model).model


def applied(affine: AffineMap, x: np.ndarray) -> np.ndarray:
    product = 0 * x if affine.weight is None else x @ affine.weight
    return (product + affine.bias).astype(np.float32)


SOURCES: dict[str, Callable[[], ir.Model]] = {
    name: partial(layout, name)
    for name in ("plain", "no biases at all", "Gemm as the output projection")
} | {"sequence first": partial(variant, "sequence first"), "half precision": half_precision}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("source", SOURCES)
def test_skip_attention_output_equals_the_map(source: str, kind: str) -> None:
    """out = x W + b in the precision of the graph; flattened tokens too."""
    arrays = feeds(SOURCES[source]())
    model = skip(SOURCES[source](), MAPS[kind])
    expected, got = applied(MAPS[kind], arrays["x"].astype(np.float32)), run(model, arrays)
    assert got.dtype == arrays["x"].dtype
    atol = EXACT if got.dtype == np.float32 else 2e-2
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)
    assert read_attention(model).blocks == ()
    assert "Softmax" not in {node.op_type for node in model.graph}


def test_skip_attention_cross_attention_maps_the_queries() -> None:
    model = skip(cross_attention(), MAP)
    x, y = (rng.standard_normal((2, n, D)).astype(np.float32) for n in (7, 4))
    got = run(model, {"x": x, "y": y})
    np.testing.assert_allclose(got, applied(MAP, x), atol=EXACT, rtol=EXACT)


def test_skip_attention_of_one_layer_leaves_the_others() -> None:
    """The others keep their names and weights; those of the second are removed."""
    model, other = layers(3), layers(3)
    skip(model, MAP, "attention_1")
    assert [block.name for block in read_attention(model).blocks] == ["attention_0", "attention_2"]
    assert not any(name.endswith("_1") for name in model.graph.initializers)
    assert {f"{name}_{layer}" for name in SHARED for layer in (0, 2)} <= set(
        model.graph.initializers
    )
    arrays = feeds(other)
    first = run(single(0), arrays)
    x1 = arrays["x"] + first
    x2 = x1 + applied(MAP, x1)
    expected = x2 + run(single(2), {**arrays, "x": x2})
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)


def single(layer: int) -> ir.Model:
    """One layer of ``layers``, alone and without its residual."""
    return attention(constants={n: a for n, a in weights(layer).items() if n[0] in "Wb"})


def test_skip_attention_parameters_and_macs_match_formula() -> None:
    """d^2 + d and d^2 n of a map; d and nothing of a constant."""
    mapped, constant = skip(attention(), MAP), skip(attention(), CONSTANT)
    at = {"batch": 1, "sequence": 7}
    macs = [model_cost(model).macs for model in (mapped, constant)]
    assert [count(at) for count in macs if count is not None] == [D * D * 7, 0]
    assert [model_cost(model).parameters for model in (mapped, constant)] == [D * D + D, D]


def test_skip_attention_equal_maps_share_one_weight() -> None:
    model = SkipAttention({"attention_0": MAP, "attention_1": MAP})(layers(2)).model
    assert model_cost(model).parameters == D * D + D
    assert [node.op_type for node in model.graph] == ["MatMul", "Add", "Add"] * 2


def test_skip_attention_writes_these_nodes() -> None:
    texts = [[f"{n.op_type} {n.name}" for n in skip(attention(), m).graph] for m in (MAP, CONSTANT)]
    assert texts == [
        [f"MatMul {NAME}/skip/output_product", f"Add {NAME}/skip/output"],
        [
            f"Shape {NAME}/skip/shape",
            f"Slice {NAME}/skip/lengths",
            f"Concat {NAME}/skip/output_shape",
            f"Expand {NAME}/skip/output",
        ],
    ]


# ---- removed attention --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize("name", ["plain", "Gemm as the output projection"])
def test_skipped_finds_the_map_and_refill_replaces_it(name: str, kind: str) -> None:
    """The model is saved between the passes."""
    model = ir.from_proto(ir.to_proto(skip(layout(name), MAPS[kind])))
    (gap,) = skipped(model)
    assert (gap.name, gap.input.name) == (NAME, "x")
    np.testing.assert_array_equal(gap.affine.bias, MAPS[kind].bias)
    assert (gap.affine.weight is None) == (kind == "a constant")
    other = AffineMap(-np.eye(D, dtype=np.float32), 2 * MAP.bias)
    refill(gap, other, infer_shapes_small(model, batch=2, sequence=5))
    remove_unused(model)
    arrays = feeds(layout(name))
    expected = applied(other, arrays["x"])
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)
    (again,) = skipped(model)
    np.testing.assert_array_equal(again.affine.bias, other.bias)


def test_skipped_ignores_similar_node_names() -> None:
    """Exporters may use similar names, e.g. "decoder/skip/Add"."""
    model = graph("\n out = Add(x, x)")
    model.graph[0].name = "decoder/skip/Add"
    assert skipped(model) == []
    both = skip(layers(2), MAP)
    next(node for node in both.graph if node.op_type == "Softmax").name = "decoder/skip/Softmax"
    assert [gap.name for gap in skipped(both)] == [NAME]


# ---- refusals -----------------------------------------------------------------------------------

WRONG_SHAPES = {
    "of other tokens": AffineMap(np.zeros((D + 1, D), np.float32), MAP.bias),
    "to other tokens": AffineMap(np.zeros((D, D + 1), np.float32), MAP.bias),
    "with another bias": AffineMap(MAP.weight, np.zeros(D + 1, np.float32)),
    "a longer constant": AffineMap(None, np.zeros(D + 1, np.float32)),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_skip_attention_map_of_wrong_shape_is_refused(case: str) -> None:
    model = attention()
    before = text_of(model)
    with raises(InvalidArgument, "skip_attention.shape") as caught:
        skip(model, WRONG_SHAPES[case])
    assert "\n" not in caught.value.what
    assert text_of(model) == before


def test_skip_attention_without_output_projection_is_refused() -> None:
    with raises(CannotRewrite, "rewrite.no_output_projection"):
        skip(layout("no output projection"), MAP)


def test_skip_attention_flattened_tokens_are_refused() -> None:
    refusal = skip_refusal(find_attention(flattened()).blocks[0])
    assert refusal and refusal.code == "token_layout"


def test_skip_attention_changed_token_order_is_refused() -> None:
    """The input is batch first and the output is sequence first."""
    model = attention(
        inputs=PLAIN_INPUT,
        output_type=f"float[sequence, batch, {D}] out",
        mask="\n m = Identity(s)",
        context=SEQUENCE_FIRST["context"],
    )
    (block,), _ = find_attention(model)
    with raises(CannotRewrite, "rewrite.token_order"):
        PruneHeads({block.name: (0, 0, 0)})(model)
