"""Rounding of weights: invariants of the numbers, and less loss of converted models."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.literals import Precision
from attnserve.precision import products as products_module
from attnserve.precision.convert import convert
from attnserve.precision.int4 import in_blocks
from attnserve.precision.int8 import quantize
from attnserve.precision.int8_grids import quantized_arrays
from attnserve.precision.products import InputMoments, collect_ranges
from attnserve.precision.rounding import Rounder
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session
from graph_passes.analysis.constants import constant_array
from graph_passes.errors import InvalidData
from tests.errors import raises
from tests.onnx_text import with_weights

LOW, HIGH = -8, 7


def problem(seed: int, rows: int, columns: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Second moments of correlated activations with outliers, and weights."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(200, rank)) @ random.normal(size=(rank, rows))
    x = x * np.exp(random.normal(size=rows)) + random.normal()
    return x.T @ x / len(x), random.normal(size=(rows, columns))


def loss(moment: np.ndarray, error: np.ndarray) -> np.ndarray:
    return np.einsum("dn,dn->n", error, moment @ error)


def nearest(matrix: np.ndarray, steps: np.ndarray) -> np.ndarray:
    return np.clip(np.round(matrix / steps), LOW, HIGH)


@given(st.integers(0, 2**31), st.integers(1, 300), st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_rounder_loses_no_more_than_the_nearest(seed: int, rows: int, columns: int, rank: int):
    moment, matrix = problem(seed, rows, columns, rank)
    steps = np.abs(matrix).max(axis=0) / HIGH
    q = Rounder(moment).round(matrix, steps, LOW, HIGH)
    assert np.array_equal(q, np.round(q)) and q.min() >= LOW and q.max() <= HIGH
    least = loss(moment, matrix - nearest(matrix, steps) * steps)
    assert (loss(moment, matrix - q * steps) <= least * (1 + 1e-9)).all()


def test_rounder_loses_less_on_correlated_activations():
    moment, matrix = problem(0, 256, 32, 40)
    steps = np.abs(matrix).max(axis=0) / HIGH
    q = Rounder(moment).round(matrix, steps, LOW, HIGH)
    least = loss(moment, matrix - nearest(matrix, steps) * steps).sum()
    assert loss(moment, matrix - q * steps).sum() < least / 5


@given(st.integers(0, 2**31), st.integers(1, 200))
@settings(max_examples=20, deadline=None)
def test_rounder_of_uncorrelated_activations_rounds_to_the_nearest(seed: int, rows: int):
    random = np.random.default_rng(seed)
    matrix = random.normal(size=(rows, 5))
    steps = np.abs(matrix).max(axis=0) / HIGH
    q = Rounder(np.diag(random.random(rows))).round(matrix, steps, LOW, HIGH)
    assert np.array_equal(q, nearest(matrix, steps))


@pytest.mark.parametrize("moment", [np.zeros((6, 6)), -np.eye(6)])
def test_rounder_without_a_usable_moment_rounds_to_the_nearest(moment: np.ndarray):
    matrix = problem(0, 6, 4, 2)[1]
    q = Rounder(moment).round(matrix, np.full(4, 0.3), LOW, HIGH)
    assert np.array_equal(q, nearest(matrix, np.full(4, 0.3)))


@given(st.integers(0, 2**31), st.integers(1, 100), st.sampled_from([16, 32, 128]))
@settings(max_examples=20, deadline=None)
def test_blocks_stay_within_their_scales(seed: int, rows: int, size: int):
    moment, matrix = problem(seed, rows, 5, 8)
    packed, scales = in_blocks(matrix, Rounder(moment), size)
    assert np.array_equal(scales, in_blocks(matrix, None, size)[1])
    assert np.array_equal(np.abs(scales).max(), np.abs(matrix).max().astype(np.float32) / 8)
    assert packed.shape == (5, -(-rows // size), size // 2)


@given(st.integers(0, 2**31), st.sampled_from([7, 8]))
@settings(max_examples=20, deadline=None)
def test_bytes_stay_within_their_bits(seed: int, bits: int):
    moment, matrix = problem(seed, 40, 5, 8)
    bytes_, scales = quantized_arrays(matrix, 7 if bits == 7 else 8, Rounder(moment))
    low, high = (-64, 63) if bits == 7 else (-127, 127)
    assert low <= bytes_.min() and bytes_.max() <= high
    assert np.array_equal(scales, quantized_arrays(matrix, 7 if bits == 7 else 8)[1])


def test_int4_to_the_nearest_equals_the_tool_of_onnx_runtime():
    tool = pytest.importorskip("onnxruntime.quantization.matmul_nbits_quantizer")
    config = tool.DefaultWeightOnlyQuantConfig(block_size=32, is_symmetric=True, bits=4)
    matrix = np.random.default_rng(0).normal(size=(128, 48)).astype(np.float32)
    packed, scales, _ = tool.DefaultWeightOnlyQuantizer(config).qbits_block_quant(matrix)
    found = in_blocks(matrix.astype(np.float64))
    assert np.array_equal(found[1], scales)
    assert (found[0] != packed).mean() < 1e-3  # ties


# ---- models --------------------------------------------------------------------------------------

D = 64
TEXT = """<ir_version: 10, opset_import: ["" : 18]> g
    (float[b, s, 64] x, int64[b, s] attention_mask) => (float[b, s, 64] y) {
    h = MatMul(x, w) r = Relu(h) p = MatMul(r, v) q = MatMul(x, u) y = Add(p, q) }"""


def network() -> ir.Model:
    random = np.random.default_rng(0)
    weights = {name: random.normal(size=(D, D)).astype(np.float32) / 8 for name in "wvu"}
    return with_weights(TEXT, **weights)


def rows(seed: int, count: int) -> list[Batch]:
    """Correlated activations; the second half of each text is large padding."""
    random, mixing = np.random.default_rng(seed), np.random.default_rng(9).normal(size=(8, D))
    batches: list[Batch] = []
    for _ in range(count):
        x = random.normal(size=(4, 20, 8)) @ mixing + random.normal(size=(4, 20, D)) / 10
        mask = np.repeat([[1] * 10 + [0] * 10], 4, axis=0)
        x[mask == 0] = 100 * random.normal(size=(40, D))
        batches.append({"x": x.astype(np.float32), "attention_mask": mask})
    return batches


def squared_error(model: ir.Model, made: ir.Model, batches: list[Batch]) -> float:
    pair = [open_session(each) for each in (model, made)]
    total = 0.0
    for batch in batches:
        a, b = (session.run(None, batch)[0][batch["attention_mask"] > 0] for session in pair)
        total += float(np.square(a - b).sum())
    return total


@pytest.mark.parametrize(("precision", "factor"), [("int8", 0.8), ("int4", 0.5)])
def test_convert_with_data_loses_less_on_unseen_rows(precision: Precision, factor: float):
    model, data, unseen = network(), rows(0, 8), rows(1, 8)
    rounded, plain = (
        squared_error(model, convert(model, precision, data, to_nearest=near), unseen)
        for near in (False, True)
    )
    assert rounded < factor * plain


def known(moment: np.ndarray | None) -> np.ndarray:
    assert moment is not None
    return moment


def test_moments_leave_out_padding_and_need_no_more_memory_than_allowed(
    monkeypatch: pytest.MonkeyPatch,
):
    model, data = network(), rows(0, 3)
    names = list(collect_ranges(model, data))
    together = [known(InputMoments(model, data).moment(name)) for name in names]
    monkeypatch.setattr(products_module, "MOMENT_BYTES", 1)
    alone = InputMoments(model, data)
    for name, expected in zip(names, together, strict=True):
        np.testing.assert_array_equal(known(alone.moment(name)), expected)
    x = np.concatenate([batch["x"][batch["attention_mask"] > 0] for batch in data])
    np.testing.assert_allclose(known(alone.moment("x")), x.T @ x / len(x), rtol=1e-3, atol=1e-3)
    covariance = known(alone.moment("x", centered=True))
    np.testing.assert_allclose(covariance, np.cov(x.T, ddof=0), rtol=1e-3, atol=1e-3)
    assert alone.moment("no activation") is None and InputMoments(model, []).moment("x") is None


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_convert_shared_weights_are_rounded_to_the_nearest(precision: Precision):
    model, data = network(), rows(0, 2)
    w, v = (model.graph.initializers[name] for name in "wv")
    v.replace_all_uses_with(w)
    pair = [convert(model, precision, data, to_nearest=near) for near in (False, True)]
    stored = [
        next(v for name, v in m.graph.initializers.items() if name.startswith("w/")) for m in pair
    ]
    rounded, plain = map(constant_array, stored)
    assert np.array_equal(rounded, plain)


def test_convert_int4_refuses_data_with_infinite_activations():
    data = rows(0, 1)
    data[0]["x"][0, 0, 0] = np.inf
    with raises(InvalidData, "calibration.not_finite"):
        convert(network(), "int4", data)


def test_quantize_without_bias_correction_rounds_for_the_moments_about_zero():
    model, data = network(), rows(0, 8)
    for batch in data:
        batch["x"] += np.linspace(0, 5, D, dtype=np.float32)
    errors: list[float] = []
    for moments in (InputMoments(model, data), None):
        made = model.clone()
        quantize(made, 7, collect_ranges(made, data), correct=False, moments=moments)
        errors.append(squared_error(model, made, data))
    assert errors[0] < errors[1]
