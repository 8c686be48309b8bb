"""FuseGelu: a decomposed GELU becomes one operator."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from benchmarks.gpu.encoder import to_half
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.errors import CannotRewrite
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.fuse_gelu import FuseGelu, gelu_refusal
from graph_passes.passes.prune_neurons import PruneNeurons
from tests.errors import raises
from tests.graph_passes.feed_forward import (
    DOWN,
    ERF,
    FORMS,
    NAME,
    TANH,
    UP,
    F,
    build,
    constants,
)
from tests.graph_passes.graphs import D, feeds, operators, run, text_of

EXACT = 2e-6


@pytest.mark.parametrize(
    ("body", "operator"),
    [
        (f"{UP}{ERF}{DOWN}", "Gelu"),
        (f"{UP}{TANH}{DOWN}", "FastGelu"),
        (FORMS["Gelu"], "Gelu"),
        (FORMS["shapes that are computed"], "Gelu"),
    ],
    ids=["erf", "tanh", "ai.onnx Gelu", "with reshapes"],
)
def test_fuse_gelu_keeps_the_output(body: str, operator: str):
    model = build(body)
    arrays = feeds(model)
    before = run(model, arrays)
    assert FuseGelu([NAME])(model).modified
    fused = [node for node in model.graph if node.domain == "com.microsoft"]
    assert [node.op_type for node in fused] == [operator]
    assert not operators(model) & Counter(["Erf", "Tanh", "Pow", "Div"])
    np.testing.assert_allclose(run(model, arrays), before, rtol=0, atol=EXACT)


@pytest.mark.parametrize("half", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
@pytest.mark.parametrize(("activation", "operator"), [(ERF, "Gelu"), (TANH, "FastGelu")])
def test_fuse_gelu_of_half_precision(half: ir.DataType, activation: str, operator: str):
    """Constants are rounded: sqrt(2) to 1.4141 in float16."""
    model = build(f"{UP}{activation}{DOWN}")
    to_half(model, half)
    FuseGelu([NAME])(model)
    assert operators(model)[operator] == 1


@pytest.mark.parametrize("half", [ir.DataType.FLOAT16, ir.DataType.BFLOAT16])
def test_fuse_gelu_of_similar_activation_in_half_precision_is_refused(half: ir.DataType):
    """z * sigmoid(1.702 z) differs from GELU by 0.02."""
    model = build(
        f"{UP}\n factor = Constant<value_float = 1.702>()\n e = Mul(h, factor)"
        f"\n s = Sigmoid(e)\n a = Mul(h, s){DOWN}"
    )
    to_half(model, half)
    with raises(CannotRewrite, "rewrite.not_gelu"):
        FuseGelu([NAME])(model)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_fuse_gelu_between_casts_has_the_type_of_the_model(half: str):
    """The activation of some exports is computed in single precision."""
    kind = ir.DataType[half.upper()]
    names = ("W1", "b1", "W2", "b2")
    own = {name: array.astype(kind.numpy()) for name, array in constants().items() if name in names}
    body = ERF.replace("h,", "h32,").replace(" a =", " a32 =")
    model = build(
        f"{UP}\n h32 = Cast<to = 1>(h){body}\n a = Cast<to = {kind.value}>(a32){DOWN}", own,
        inputs=f"{half}[batch, sequence, {D}] x", output=f"{half}[batch, sequence, {D}] out",
    )  # fmt: skip
    FuseGelu([NAME])(model)
    assert operators(model) == {"MatMul": 2, "Add": 2, "Gelu": 1}


def test_fuse_gelu_keeps_the_block_name():
    model = build(f"{UP}{ERF}{DOWN}")
    name = find_feed_forward(model)[0].name
    FuseGelu([name])(model)
    (block,) = find_feed_forward(model)
    assert (block.name, block.num_neurons) == (name, F)
    arrays = feeds(model)
    PruneNeurons({name: [1] * (F // 2) + [0] * (F - F // 2)})(model)
    assert run(model, arrays).shape == (2, 7, 12)


NEARLY = {
    "another constant": ERF.replace("root2", "three"),
    "without the half": ERF.replace("e3 = Mul(h, e2)\n a = Mul(e3, half)", "a = Mul(h, e2)"),
    "twice": ERF.replace(" a = Mul(e3, half)", " e4 = Mul(e3, half)\n a = Mul(e4, half)"),
    "sigmoid": "\n e = Sigmoid(h)\n a = Mul(h, e)",
    "ReLU": "\n a = Relu(h)",
}


@pytest.mark.parametrize("activation", NEARLY.values(), ids=NEARLY)
def test_fuse_gelu_of_similar_activation_is_refused(activation: str):
    model = build(f"{UP}{activation}{DOWN}")
    before = text_of(model)
    with raises(CannotRewrite, "rewrite.not_gelu"):
        FuseGelu([NAME])(model)
    assert text_of(model) == before


@pytest.mark.parametrize(
    ("form", "code"),
    [("gated by GELU", "gated"), ("Gelu by com.microsoft", "fused"), ("BiasGelu", "fused")],
)
def test_gelu_refusal_has_a_code(form: str, code: str):
    model = build(FORMS[form])
    (block,) = find_feed_forward(model)
    info = infer_shapes_small(model, batch=2, sequence=5)
    refusal = gelu_refusal(block, info, model.opset_imports)
    assert refusal and refusal.code == code
    with raises(CannotRewrite, f"rewrite.{code}"):
        FuseGelu([block.name])(model)
