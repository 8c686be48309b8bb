"""FoldBiases: biases of post-norm encoders move into the norm of the residual."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.fold_biases import FoldBiases
from tests.graph_passes.graphs import D, feeds, graph, operators, run, text_of

INPUTS = f"float[batch, sequence, {D}] x"
LAYER = """
 r = LayerNormalization(x, gain, beta)
 z = MatMul(r, W)
 hidden = Add(z, c)
 act = Relu(hidden)
 p = MatMul(act, V)
 made = Add(p, b)
 out = Add(made, r)"""
TOLERANCE = 1e-5
"""Error of float32 sums of some dozen products in another order."""


def build(body: str, **more: np.ndarray) -> ir.Model:
    random = np.random.default_rng(0)
    constants = {
        name: random.standard_normal(D).astype(np.float32) for name in ("gain", "beta", "c", "b")
    }
    constants |= {name: random.standard_normal((D, D)).astype(np.float32) for name in ("W", "V")}
    constants = {name: array for name, array in constants.items() if name in body}
    return graph(body, inputs=INPUTS, constants=constants | more)


def changed(body: str, **more: np.ndarray) -> ir.Model:
    """Apply the pass and check that the output does not change."""
    model = build(body, **more)
    arrays = feeds(model)
    before = run(model, arrays)
    assert FoldBiases()(model).modified
    np.testing.assert_allclose(run(model, arrays), before, rtol=TOLERANCE, atol=10 * TOLERANCE)
    return model


def test_fold_biases_moves_the_bias_into_the_norm():
    model = changed(LAYER)
    assert operators(model) == Counter(LayerNormalization=1, MatMul=2, Relu=1, Add=2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("made = Add(p, b)", "made = Add(b, p)"),
        ("out = Add(made, r)", "out = Add(r, made)"),
        ("hidden = Add(z, c)", "hidden = Add(c, z)"),
        ("LayerNormalization(x, gain, beta)", "LayerNormalization(x, gain)"),
        ("r = LayerNormalization(x, gain, beta)", "n = Sigmoid(x)\n r = Add(n, beta)"),
        ("act = Relu(hidden)", "s = Shape(r)\n act = Expand(hidden, s)"),
    ],
    ids=["bias first", "residual first", "other bias first", "a norm without a shift",
         "a norm in parts", "its shape is read"],
)  # fmt: skip
def test_fold_biases_of_equivalent_graphs(old: str, new: str):
    body = LAYER.replace(old, new)
    assert operators(changed(body))["Add"] == operators(build(body))["Add"] - 1


def test_fold_biases_corrects_all_maps_of_the_norm():
    body = LAYER.replace(
        " act = Relu(hidden)",
        """
 z2 = MatMul(r, V)
 hidden2 = Add(z2, beta)
 both = Mul(hidden, hidden2)
 act = Relu(both)""",
    )
    assert operators(changed(body))["Add"] == 3


def test_fold_biases_corrects_the_bias_of_fused_attention():
    body = """
 r = LayerNormalization(x, gain, beta)
 act = com.microsoft.Attention<num_heads = 2>(r, W, c)
 p = MatMul(act, V)
 made = Add(p, b)
 out = Add(made, r)"""
    random = np.random.default_rng(1)
    wide = {"W": random.standard_normal((D, 3 * D)).astype(np.float32),
            "c": random.standard_normal(3 * D).astype(np.float32)}  # fmt: skip
    assert operators(changed(body, **wide))["Add"] == 1


def test_fold_biases_of_consecutive_layers():
    second = LAYER.replace("LayerNormalization(x,", "LayerNormalization(out1,")
    for name in ("r", "z", "hidden", "act", "p", "made"):
        second = second.replace(f"{name} =", f"{name}2 =").replace(f"({name},", f"({name}2,")
        second = second.replace(f", {name})", f", {name}2)").replace(f"({name})", f"({name}2)")
    assert operators(changed(LAYER.replace("out =", "out1 =") + second))["Add"] == 4


def test_fold_biases_keeps_shared_constants():
    """One vector is the shift of the norm, the bias of the map and the folded bias."""
    body = LAYER.replace("beta", "b").replace("(z, c)", "(z, b)")
    changed(body)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("z = MatMul(r, W)", "turned = Relu(r)\n z = MatMul(turned, W)"),
        ("hidden = Add(z, c)", "hidden = Identity(z)"),
        ("act = Relu(hidden)", "act = Add(hidden, z)"),
        ("made = Add(p, b)", "made = Mul(p, b)"),
        ("act = Relu(hidden)", "more = Add(r, x)\n act = Add(hidden, more)"),
        ("out = Add(made, r)", "twice = Add(made, made)\n out = Add(twice, r)"),
        ("out = Add(made, r)", "out = Add(made, x)"),
        ("r = LayerNormalization(x, gain, beta)", "r = Relu(x)"),
    ],
    ids=["something else reads the norm", "no bias to correct", "the product is read twice",
         "no bias", "the norm is added elsewhere", "what is made is read twice",
         "the residual is not a norm", "nothing shifts the residual"],
)  # fmt: skip
def test_fold_biases_unsupported_graph_is_unchanged(old: str, new: str):
    model = build(LAYER.replace(old, new))
    before = text_of(model)
    assert not FoldBiases()(model).modified
    assert text_of(model) == before


def test_fold_biases_branch_of_one_linear_map_is_unchanged():
    """SkipAttention leaves this in a post-norm encoder: b and c_i are one constant."""
    model = build("""
 r = LayerNormalization(x, gain, beta)
 z = MatMul(r, W)
 made = Add(z, b)
 out = Add(made, r)""")
    before = text_of(model)
    assert not FoldBiases()(model).modified
    assert text_of(model) == before


def test_fold_biases_norm_as_output_is_unchanged():
    model = build(LAYER)
    norm = next(node for node in model.graph if node.op_type == "LayerNormalization")
    model.graph.outputs.append(norm.outputs[0])
    assert not FoldBiases()(model).modified


def test_fold_biases_twice_equals_once():
    model = changed(LAYER)
    before = text_of(model)
    assert not FoldBiases()(model).modified
    assert text_of(model) == before


@pytest.mark.parametrize("name", ["marian-dynamo18-sdpa", "distilbert-dynamo18-sdpa"])
def test_fold_biases_keeps_the_names_of_blocks(name: str):
    """dynamo's node names have no path: that of the bias names the block."""
    model = ir.load(Path(__file__).parents[2] / "fixtures" / "onnx" / f"{name}.onnx")

    def names() -> list[str]:
        blocks = [*find_attention(model).blocks, *find_feed_forward(model)]
        return [block.name for block in blocks]

    before = names()
    assert FoldBiases()(model).modified
    assert names() == before
