"""Static scales of int8 activations: calibration data, smoothing and correction of biases."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.quantized import batch_invariant, int8_activations
from attnserve.precision import int8 as int8_module
from attnserve.precision import int8_grids
from attnserve.precision.convert import convert
from attnserve.precision.products import collect_ranges
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidData
from tests.attnserve.precision.graphs import (
    D,
    error,
    full,
    graph,
    normal,
    operators,
    product,
    quantized_weights,
    rounding,
    run,
)
from tests.errors import raises
from tests.graph_passes.graphs import graph as text_graph


def test_int8_activations_depend_on_calibration_data(encoder: ir.Model):
    static, per_row = convert(encoder, "int8", [full(encoder)]), convert(encoder, "int8")
    assert (int8_activations(static), int8_activations(per_row)) == ("static", "per-row")
    assert int8_activations(encoder) is None and batch_invariant(encoder)
    assert "DynamicQuantizeLinear" not in operators(static) + operators(per_row)


def test_static_scales_ignore_padding():
    model = graph(
        "(float[b, s, 16] x, int64[b, s] attention_mask) => (float[b, s, 16] y)"
        "{ z = Abs(x) y = MatMul(z, w) }",
        w=normal(D, D),
    )
    x, mask = normal(2, 5, D), np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    other = x.copy()
    other[1, 3:] = 1e6
    made = [convert(model, "int8", [{"x": a, "attention_mask": mask}]) for a in (x, other)]
    outputs = [run(each, x=x, attention_mask=mask) for each in made]
    np.testing.assert_array_equal(*outputs)
    hidden = {"x": x, "attention_mask": np.zeros_like(mask)}
    with raises(InvalidData, "calibration.no_token"):
        convert(model, "int8", [hidden])
    with raises(InvalidData, "calibration.not_finite"):
        convert(model, "int8", [{"x": np.full_like(x, np.inf), "attention_mask": mask}])


def outliers(*shape: int) -> np.ndarray:
    """Normal numbers, with one channel a hundred times as large."""
    x = normal(*shape)
    x[..., 5] *= 100
    return x


def test_smoothing_divides_outlier_channels(monkeypatch: pytest.MonkeyPatch):
    weight = normal(D, 64)
    weight[5] /= 100
    text = "(float[b, s, 16] x) => (float[b, s, 64] y) { z = Identity(x) y = MatMul(z, w) }"
    model, x = graph(text, w=weight), outliers(8, 32, D)
    plain = model.clone()
    int8_module.quantize(plain, 7, collect_ranges(plain, [{"x": x}]), smooth=False)
    smoothed = model.clone()
    monkeypatch.setattr(int8_grids, "COST", 1)
    int8_module.quantize(smoothed, 7, collect_ranges(smoothed, [{"x": x}]))
    expected = run(model, x=x)
    assert operators(smoothed)["Mul"] == 1 and operators(plain)["Mul"] == 0
    assert error(expected, run(smoothed, x=x)) < 0.2 * error(expected, run(plain, x=x))
    assert error(expected, run(smoothed, x=x)) < rounding("int8")


NORMALIZED = """(float[b, s, 16] x) => (float[b, s, 16] y) {{
    n = LayerNormalization <axis = -1> (x, gamma, beta)
    q = MatMul(n, w) k = MatMul(n, v) z = Add(q, k) {last} }}"""


@pytest.mark.parametrize(
    ("last", "products"), [("y = Relu(z)", 0), ("y = Add(z, n)", 1)], ids=["folded", "residual"]
)
def test_smoothing_is_folded_into_a_normalization_that_nothing_else_reads(
    last: str, products: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(int8_grids, "COST", 1)
    gamma = np.ones(D, np.float32)
    gamma[5] = 100
    w, v = normal(D, D), normal(D, D)
    w[5] /= 100
    v[5] /= 100
    model = graph(NORMALIZED.format(last=last), w=w, v=v, gamma=gamma, beta=normal(D))
    x = normal(8, 32, D)
    made = convert(model, "int8", [{"x": x}])
    assert operators(made)["Mul"] == products
    assert error(run(model, x=x), run(made, x=x)) < rounding("int8")


def test_shared_weights_are_stored_once():
    text = "(float[b, 16] x) => (float[b, 16] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, w) }"
    made = convert(graph(text, w=normal(D, D)), "int8", [{"x": outliers(64, D)}])
    assert len(quantized_weights(made)) == 1


def test_int8_weights_of_a_body_are_not_those_of_a_smoothed_activation():
    random = np.random.default_rng(0)
    scale = np.ones(16, np.float32)
    scale[0] = 60  # smoothed in the main graph, not in the bodies
    arrays = {
        "w": (random.standard_normal((16, 16)) * 0.3).astype(np.float32),
        "large": (random.standard_normal((16, 2000)) * 0.3).astype(np.float32),
        "scale": scale,
        "low": np.float32(-1e9),
    }
    model = text_graph(
        """
        t = Mul(x, scale)
        main = MatMul(t, w)
        other = MatMul(t, large)
        total = ReduceSum <keepdims = 0> (x)
        is_true = Greater(total, low)
        out = If (is_true) <
            then_branch = then () => (float[b, s, 16] y) { y = MatMul(t, w) },
            else_branch = else () => (float[b, s, 16] z) { z = MatMul(t, w) }
        >""",
        inputs="float[batch, sequence, 16] x",
        constants=arrays,
        output="float[batch, sequence, 16] main, float[batch, sequence, 2000] other, "
        "float[batch, sequence, 16] out",
    )
    rows = [{"x": random.standard_normal((3, 4, 16)).astype(np.float32)} for _ in range(20)]
    before, after = (
        open_session(each).run(None, rows[0]) for each in (model, convert(model, "int8", rows))
    )
    for a, b in zip(before, after, strict=True):
        assert np.abs(a - b).max() < 0.05 * np.abs(a).max()


def test_bias_correction_keeps_the_mean():
    model, x = product(w=normal(D, D)), normal(64, 32, D) + 3
    expected = run(model, x=x)
    offsets: list[float] = []
    for correct in (True, False):
        made = model.clone()
        ranges = collect_ranges(made, [{"x": x}])
        int8_module.quantize(made, 7, ranges, correct=correct)
        offsets.append(np.abs((run(made, x=x) - expected).mean(axis=(0, 1))).max())
    assert offsets[0] < 0.2 * offsets[1]
