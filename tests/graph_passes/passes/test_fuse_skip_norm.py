"""FuseSkipNorm: one operator for a bias, a residual addition and a norm."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.models.example_inputs import example_inputs
from attnserve.runtime.session import open_session
from benchmarks.gpu.encoder import random_encoder, to_half
from graph_passes.analysis.workload import Workload
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_residuals import FuseResiduals
from graph_passes.passes.fuse_skip_norm import FuseSkipNorm
from tests.graph_passes.graphs import D, assert_unchanged, feeds, operators, run
from tests.graph_passes.residuals import INPUTS, POST, TWICE, build

BIASED = """
 biased = Add(shift, y)
 sum = Add(x, biased)
 out = LayerNormalization<epsilon = 0.01>(sum, gain)"""
PRE = """
 turned = MatMul(x, W)
 biased = Add(turned, shift)
 sum = Add(biased, y)
 normed = LayerNormalization<axis = 2>(sum, gain, shift)
 again = MatMul(normed, W)
 out = Add(sum, again)"""
BEFORE = """
 sum = Add(x, y)
 again = MatMul(sum, W)
 late = Constant<value_floats = [1.,2.,3.,4.,5.,6.,7.,8.,9.,10.,11.,12.]>()
 normed = LayerNormalization(sum, late, shift)
 out = Add(normed, again)"""


@pytest.mark.parametrize(
    ("body", "kinds"),
    [
        (POST, {"SkipLayerNormalization": 1}),
        (BIASED, {"SkipLayerNormalization": 1}),
        (PRE, {"SkipLayerNormalization": 1, "MatMul": 2, "Add": 1}),
        (BEFORE, {"SkipLayerNormalization": 1, "MatMul": 1, "Add": 1}),
    ],
    ids=["post-norm", "bias, no shift", "pre-norm", "sum read before"],
)
def test_fuse_skip_norm_keeps_the_output(body: str, kinds: Mapping[str, int]):
    model = build(body)
    assert_fused(model, kinds)
    assert model.opset_imports["com.microsoft"] == 1


def assert_fused(model: ir.Model, kinds: Mapping[str, int]) -> None:
    """The pass writes these operators; the output agrees within 1e-5 (sums have another order)."""
    arrays = feeds(model)
    before = run(model, arrays)
    assert FuseSkipNorm()(model).modified
    assert operators(model) == kinds
    np.testing.assert_allclose(run(model, arrays), before, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ("\n sum = Add(x, shift)\n out = LayerNormalization(sum, gain, shift)", INPUTS),
        ("\n sum = Mul(x, y)\n out = LayerNormalization(sum, gain, shift)", INPUTS),
        (POST, f"float[batch, sequence, {D}] x, float[sequence, {D}] y"),
        (POST, f"float[batch, sequence, {D}] x, float[1, sequence, {D}] y"),
        (POST, f"float[batch, 2, sequence, {D}] x, float[batch, 2, sequence, {D}] y"),
        (
            "\n sum = Add(x, y)\n out = LayerNormalization<axis = 1>(sum, matrix)",
            f"float[batch, 5, {D}] x, float[batch, 5, {D}] y",
        ),
        (
            "\n sum = Add(x, y)\n normed, mean = LayerNormalization(sum, gain)\n"
            " out = Add(normed, mean)",
            INPUTS,
        ),
        ("\n sum = Add(x, y)\n out = LayerNormalization(sum, scale)",
         f"{INPUTS}, float[{D}] scale"),
    ],
    ids=["a bias", "a product", "rank 2", "broadcast", "rank 4", "two axes", "mean is read",
         "gain is an input"],
)  # fmt: skip
def test_fuse_skip_norm_other_graph_is_unchanged(body: str, inputs: str):
    model = build(body, inputs)
    assert_unchanged(model, FuseSkipNorm())


def test_fuse_skip_norm_of_another_batch_axis_is_unchanged():
    """Position ids may have one row; the operator broadcasts only its second input."""
    inputs = "int64[rows, sequence] places, int64[batch, sequence] words"
    body = "\n p = Gather(matrix, places)\n w = Gather(matrix, words)"
    body += "\n sum = Add(p, w)\n out = LayerNormalization(sum, gain, shift)"
    model = build(body, inputs)
    assert not FuseSkipNorm()(model).modified


@pytest.mark.parametrize(
    ("body", "inputs", "left"),
    [
        ("\n biased = Add(x, shift)\n sum = Add(biased, y)\n out = LayerNormalization(sum, gain)",
         f"float[batch, sequence, 1] x, float[batch, sequence, {D}] y",
         {"Add": 1, "SkipLayerNormalization": 1}),
        ("\n biased = Add(shift, y)\n sum = Add(x, biased)\n normed = LayerNormalization(sum, gain)"
         "\n out = Add(normed, biased)", INPUTS, {"SkipLayerNormalization": 1, "Add": 2}),
    ],
    ids=["it broadcasts its product", "it is read elsewhere"],
)  # fmt: skip
def test_fuse_skip_norm_a_bias_that_is_not_only_added_stays(
    body: str, inputs: str, left: dict[str, int]
):
    assert_fused(build(body, inputs), left)


@pytest.mark.parametrize("rewrite", [FuseSkipNorm, FuseResiduals])
def test_residual_passes_accept_node_names_that_repeat_in_a_body(rewrite: type[RewritePass]):
    tensor = f"float[batch, sequence, {D}]"
    body = f"""
 s0 = Add(x, y)
 n0 = LayerNormalization(s0, gain, shift)
 o = If(flag)<
   then_branch = yes() => ({tensor} a)
     {{ s1 = Add(n0, y)  n1 = LayerNormalization(s1, gain, shift)  a = Add(n1, n0) }},
   else_branch = no() => ({tensor} c) {{ c = MatMul(n0, W) }}>
 out = Add(o, s0)"""
    model = build(body, f"{INPUTS}, bool flag")
    for node in model.graph.all_nodes():
        if (name := node.outputs[0].name) in ("s0", "s1", "n0", "n1"):
            node.name = name[0]
    x, y = np.random.default_rng(0).standard_normal((2, 2, 5, D)).astype(np.float32)
    arrays = {"x": x, "y": y, "flag": np.array(True)}
    before = run(model, arrays)
    rewrite()(model)
    onnx.checker.check_model(ir.to_proto(model), full_check=False)
    np.testing.assert_allclose(run(model, arrays), before, rtol=0, atol=1e-5)


def test_fuse_skip_norm_twice_equals_once():
    model = build(PRE)
    FuseSkipNorm()(model)
    assert_unchanged(model, FuseSkipNorm())


def test_fuse_skip_norm_of_two_norms_fuses_the_first():
    kinds = {"SkipLayerNormalization": 1, "LayerNormalization": 1, "Add": 1}
    assert_fused(build(TWICE), kinds)


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_fuse_skip_norm_of_an_encoder(half: bool, folded: bool):
    """Blocks keep their names, and can still be found."""
    model = random_encoder(layers=2, hidden=32, heads=4, positions=32)
    names = [b.name for b in (*find_attention(model).blocks, *find_feed_forward(model))]
    if half:
        to_half(model)
    arrays = example_inputs(model, Workload.of(2, 9), padded=True)
    (before,) = open_session(model, ONE_THREAD).run(None, arrays)
    if folded:
        FoldBiases()(model)
    FuseSkipNorm()(model)
    assert operators(model)["SkipLayerNormalization"] == 4
    assert [b.name for b in (*find_attention(model).blocks, *find_feed_forward(model))] == names
    (after,) = open_session(model, ONE_THREAD).run(None, arrays)
    np.testing.assert_allclose(after, before, rtol=0, atol=2e-2 if half else 1e-5)
