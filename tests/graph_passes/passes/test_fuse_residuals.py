"""FuseResiduals: ONNX Runtime does not fuse the sum into its slow SkipLayerNormalization."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session
from graph_passes.passes.fuse_residuals import FuseResiduals, find_residuals
from tests.graph_passes.graphs import assert_unchanged, feeds, operators, run, text_of
from tests.graph_passes.residuals import POST, TWICE, build

PRE = """
 sum = Add(x, y)
 normed = LayerNormalization(sum, gain, shift)
 turned = MatMul(normed, W)
 out = Add(sum, turned)"""


@pytest.mark.parametrize(
    ("body", "sums"),
    [(POST, {"Sum": 1}), (PRE, {"Sum": 1}), (TWICE, {"Sum": 1, "Add": 1})],
    ids=["post-norm", "pre-norm", "two norms"],
)
def test_fuse_residuals_keeps_the_output(body: str, sums: dict[str, int]):
    model = build(body)
    arrays = feeds(model)
    before = run(model, arrays)
    assert FuseResiduals()(model).modified
    assert {name: operators(model)[name] for name in sums} == sums
    assert np.array_equal(run(model, arrays), before)
    open_session(model, ONE_THREAD)  # with all optimizations
    assert_unchanged(model, FuseResiduals())


def test_fuse_residuals_is_not_fused_by_onnx_runtime(tmp_path):
    """The graph that ONNX Runtime optimizes has a SkipLayerNormalization only before the pass."""
    optimized: list[Counter[str]] = []
    for change in (False, True):
        model = build(POST)
        if change:
            FuseResiduals()(model)
        path = tmp_path / f"{change}.onnx"
        onnx.save(ir.to_proto(model), tmp_path / "model.onnx")
        optimized.append(_optimized(tmp_path / "model.onnx", path))
    assert optimized[0]["SkipLayerNormalization"] == 1
    assert optimized[1]["SkipLayerNormalization"] == 0


def _optimized(source, target) -> Counter[str]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(target)
    options.log_severity_level = 4
    onnxruntime.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])
    return Counter(node.op_type for node in onnx.load(target).graph.node)


@pytest.mark.parametrize(
    "body",
    [
        "\n sum = Add(x, shift)\n out = LayerNormalization(sum, gain, shift)",
        "\n sum = Mul(x, y)\n out = LayerNormalization(sum, gain, shift)",
        "\n out = Add(x, y)",
    ],
    ids=["a bias", "a product", "no norm"],
)
def test_fuse_residuals_other_graph_is_unchanged(body: str):
    model = build(body)
    before = text_of(model)
    assert not find_residuals(model)
    assert not FuseResiduals()(model).modified
    assert text_of(model) == before
