"""Attention and feed-forwards whose weights are quantized."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import count_macs, parameter_bytes
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import QuantizedProduct
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import AttentionPass
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fuse_attention import FuseAttention, fusion_refusal
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.public import PASSES
from tests.errors import raises
from tests.graph_passes.graphs import (
    PARTS,
    SCALE,
    D,
    H,
    K,
    V,
    attention,
    feeds,
    graph,
    only,
    reasons,
    run,
)
from tests.graph_passes.operators import raised
from tests.graph_passes.quantized import PRODUCTS, product, quantized_weights

FLOAT = {
    "q": "MatMul(x, Wq)",
    "k": "MatMul(x, Wk)",
    "v": "MatMul(x, Wv)",
    "output": "MatMul(c, Wo)",
}
MADE = {"q": ("q0", "x", "Wq"), "k": ("k0", "x", "Wk"), "v": ("v0", "x", "Wv"),
        "output": ("o", "c", "Wo")}  # fmt: skip

KEPT = ("MatMul", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "MatMulNBits",
        "QGemm", "QLinearMatMul", "QuantizeLinear", "DynamicQuantizeLinear")  # fmt: skip

each_product = pytest.mark.parametrize("how", PRODUCTS)
each_form = pytest.mark.parametrize("form", ["onnx", "multi_head"])


def quantized(how: str, *parts: str, opset: int = 17, **other: str) -> ir.Model:
    """One attention with quantized products in some parts, or in all."""
    texts = {
        part: PARTS[part].replace(f"{y} = MatMul({x}, {weight})", product(how, y, x, weight))
        for part, (y, x, weight) in MADE.items()
        if part in parts or not parts
    }
    return attention(constants=quantized_weights(), opset=opset, **texts | other)


def fused(model: ir.Model, form: FusedOperator) -> ir.Model:
    new = raised(model.clone(), form)
    FuseAttention({only(model).name: form})(new)
    return new


@each_product
def test_quantized_projections_are_read_as_they_are(how: str) -> None:
    block = only(quantized(how))
    assert block.is_quantized and block.output is not None and block.output.is_quantized
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, V)
    assert (block.x.name, block.kind, block.input_size) == ("x", "self", D)
    assert block.scale == pytest.approx(SCALE)
    made = [part.source.name for part in (block.q, block.k, block.v)]
    after_biases = ["q1", "k1", "v1"] if how != "QGemm" else ["q0_p", "k0_p", "v0_p"]
    assert made == after_biases
    assert block.output.output.name == ("o_x" if how == "QGemm" else "c")


@each_form
@each_product
def test_fuse_attention_keeps_quantized_products(how: str, form: FusedOperator) -> None:
    model = quantized(how)
    new = fused(model, form)
    before, after = (Counter(node.op_type for node in one.graph) for one in (model, new))
    assert "Softmax" not in after
    scores = Counter(MatMul=2)
    assert all((before - scores)[kind] == after[kind] for kind in KEPT)
    assert count_macs(new, Workload.of(2, 9)) == count_macs(model, Workload.of(2, 9))
    assert parameter_bytes(new) <= parameter_bytes(model) + 64  # shapes and numbers of the mask
    arrays = feeds(model)
    np.testing.assert_allclose(run(new, arrays), run(model, arrays), rtol=0, atol=2e-2)
    assert only(new).is_quantized


@pytest.mark.parametrize("form", ["attention", "merged"])
def test_fuse_attention_operator_with_projections_is_refused(form: FusedOperator) -> None:
    refusal = fusion_refusal(only(quantized("QDQ")), form)
    assert refusal and refusal.code == "quantized"


@each_product
def test_lossy_rewrites_of_quantized_weights_are_refused(how: str) -> None:
    model = quantized(how)
    block = only(model)
    analyses = Analyses.of(model)
    refusals = {
        each.name: each.refusal(block, None, analyses)
        for each in PASSES
        if issubclass(each, AttentionPass) and each.lossy
    }
    assert {name: refusal and refusal.code for name, refusal in refusals.items()} == dict.fromkeys(
        refusals, "quantized"
    )
    with raises(CannotRewrite, "rewrite.quantized", "float model"):
        PruneHeads({block.name: [1, 0, 1]})(model)


@each_form
@pytest.mark.parametrize("part", MADE)
def test_one_quantized_projection_beside_float_ones(part: str, form: FusedOperator) -> None:
    model = quantized("MatMulNBits", part)
    block = only(model)
    assert block.is_quantized and block.x is block.y
    arrays = feeds(model)
    np.testing.assert_allclose(
        run(fused(model, form), arrays), run(model, arrays), rtol=0, atol=1e-5
    )


SPLITS = {
    "Split": """
        q1, k1, v1 = Split <axis = -1> (biased, thirds)
        q2 = Reshape(q1, heads)
        k2 = Reshape(k1, heads)
        v2 = Reshape(v1, heads)""",
    "heads first": """
        qkv = Reshape(biased, head_packed)
        q2 = Gather <axis = 3> (qkv, i0)
        k2 = Gather <axis = 3> (qkv, i1)
        v2 = Gather <axis = 3> (qkv, i2)""",
}


@each_form
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", ["MatMulInteger", "QGemm", "weights only"])
def test_packed_quantized_projection(how: str, split: str, form: FusedOperator) -> None:
    packed = product(how, "packed", "x", "Wqkv") + "\n biased = Add(packed, bqkv)" + SPLITS[split]
    model = quantized(
        how,
        "q",
        q=packed + "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
        k="\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        v="\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
        output=PARTS["output"].replace("Wo", "Wo12"),
    )
    block = only(model)
    assert block.q.weight == block.k.weight == block.v.weight
    assert isinstance(block.q.weight, QuantizedProduct) and block.q.weight.num_columns == 3 * H * K
    new, arrays = fused(model, form), feeds(model)
    np.testing.assert_allclose(run(new, arrays), run(model, arrays), rtol=0, atol=2e-2)


def test_scale_before_the_heads_is_that_of_the_attention() -> None:
    texts = PARTS["q"].replace("q0 = MatMul(x, Wq)", product("QDQ", "q0", "x", "Wq"))
    block = only(
        attention(
            constants=quantized_weights(),
            q=texts.replace("Reshape(q1", "Reshape(q_scaled").replace(
                "q2 =", "q_scaled = Mul(q1, scale)\n q2 ="
            ),
            scores="\n s = MatMul(q, kT)",
        )
    )
    assert block.scale == pytest.approx(SCALE)


def test_decompose_attention_with_quantized_projections() -> None:
    model = quantized("MatMulIntegerToFloat")
    new = fused(model, "multi_head")
    DecomposeAttention([only(new).name])(new)
    assert "Softmax" in {node.op_type for node in new.graph}
    arrays = feeds(model)
    np.testing.assert_allclose(run(new, arrays), run(model, arrays), rtol=0, atol=2e-2)


def test_activation_of_a_quantized_query_is_unmatched() -> None:
    texts = PARTS["q"].replace("q0 = MatMul(x, Wq)", product("QDQ", "q0", "x", "Wq"))
    model = attention(
        constants=quantized_weights(),
        q=texts.replace("Reshape(q1", "Reshape(q_relu").replace("q2 =", "q_relu = Relu(q1)\n q2 ="),
    )
    (reason,) = reasons(model)
    assert "Relu" in reason


def test_product_of_two_quantized_activations_is_no_projection() -> None:
    """QLinearMatMul of queries and keys."""
    model = quantized(
        "QLinearMatMul",
        scores="""
        q8 = QuantizeLinear(q, step, middle)
        k8 = QuantizeLinear(kT, step, middle)
        s8 = QLinearMatMul(q8, step, middle, k8, step, middle, wide, middle)
        s0 = DequantizeLinear(s8, wide, middle)
        s = Mul(s0, scale)""",
    )
    (reason,) = reasons(model)
    assert "no product of queries and keys" in reason or "integers" in reason


# ---- feed-forwards ------------------------------------------------------------------------------

GELU = """
        z1 = Add(z, b1)
        e = Div(z1, root2)
        f = Erf(e)
        g = Add(f, one)
        h0 = Mul(z1, g)
        h = Mul(h0, half)"""


def feed_forward(how: str) -> ir.Model:
    constants = quantized_weights() | {
        "b1": np.linspace(-1, 1, 20, dtype=np.float32),
        "root2": np.float32(np.sqrt(2)),
        "half": np.float32(0.5),
    }
    body = product(how, "z", "x", "W1") + GELU + product(how, "y", "h", "W2")
    body = body.replace("W2s)", "W2s_blocks)") if how == "MatMulNBits" else body
    body += "\n out = Add(y, bo)"
    return graph(
        body,
        inputs=f"float[batch, sequence, {D}] x",
        constants=constants,
    )


@each_product
def test_gelu_between_quantized_products_is_fused(how: str) -> None:
    model = feed_forward(how)
    (block,) = find_feed_forward(model)
    assert block.is_quantized and (block.num_neurons, block.input_size) == (20, D)
    flat = how == "QGemm"
    assert (block.x.name, block.hidden.name) == ("x", "y_x" if flat else "h")
    assert block.output.name == ("y_p" if flat else "out")
    new = model.clone()
    FuseGelu([block.name])(new)
    kinds = Counter(node.op_type for node in new.graph)
    assert kinds["Gelu"] == 1 and kinds["Erf"] == 0
    arrays = feeds(model)
    np.testing.assert_allclose(run(new, arrays), run(model, arrays), rtol=0, atol=2e-2)


@each_product
def test_neurons_of_quantized_products_are_not_removed(how: str) -> None:
    model = feed_forward(how)
    (block,) = find_feed_forward(model)
    with raises(CannotRewrite, "rewrite.quantized", "float model"):
        PruneNeurons({block.name: [1] * 10 + [0] * 10})(model)
