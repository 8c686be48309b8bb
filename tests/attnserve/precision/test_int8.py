"""Conversion to int8: which products are quantized, and the range of their weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnserve.literals import Precision
from attnserve.models.quantized import int8_activations, int8_warning, int8_weight_bits
from attnserve.precision.convert import convert, precision_of
from attnserve.precision.int8 import quantize
from attnserve.precision.products import collect_ranges
from attnserve.runtime import onnx_runtime
from attnserve.runtime.interface import Batch
from tests.attnserve.precision.graphs import (
    ATTENTION,
    FUSED,
    IDS,
    INSIDE,
    MASKS,
    RNG,
    VOCABULARY,
    WEIGHT_RANGE,
    D,
    attention,
    converted,
    error,
    every_product,
    graph,
    int8,
    normal,
    operators,
    padded,
    product,
    quantized_weights,
    rounding,
    run,
)


@int8
def test_int8_has_one_scale_per_column(precision: Precision):
    weight = normal(D, D)
    weight[:, 0] *= 1000  # with one scale for all, the other columns would vanish
    weight[:, 1] = 0
    model, x = product(w=weight), normal(2, 5, D)
    made = convert(model, precision, [{"x": x}])
    assert operators(made)["MatMulIntegerToFloat"] == 1
    expected, got = run(model, x=x), run(made, x=x)
    assert error(expected[..., 2:], got[..., 2:]) < rounding(precision)
    np.testing.assert_array_equal(got[..., 1], 0)


@int8
@pytest.mark.parametrize("calibrated", [True, False])
def test_int8_representable_numbers_are_exact(precision: Precision, calibrated: bool):
    least, largest = WEIGHT_RANGE[precision]
    weight = RNG.integers(least, largest + 1, (D, D)).astype(np.float32)
    weight[0] = least  # the largest absolute value of a column sets its scale: 1
    x = RNG.integers(0 if calibrated else -127, 256 if calibrated else 128, (1, 2, D))
    x[..., :2] = (0, 255) if calibrated else (127, -127)
    model, feeds = product(w=weight), {"x": x.astype(np.float32)}
    made = convert(model, precision, [feeds] if calibrated else ())
    np.testing.assert_allclose(run(made, **feeds), run(model, **feeds), rtol=1e-5, atol=1e-3)


GEMM = """(float[b, 16] x) => (float[b, 16] y) {{
    g = Gemm <transB = {0}> (x, w, a) h = Gemm <transB = {0}> (g, w, a) u = MatMul(h, w)
    e = Mul(u, a) y = Add(e, u) }}"""
PRODUCTS = {
    "stacked weights": (
        "(float[b, 3, s, 16] x) => (float[b, 3, s, 16] y)"
        "{ z = MatMul(x, stack) y = MatMul(z, w) }",
        (2, 3, 5, D), 1, {"MatMul": 1, "MatMulIntegerToFloat": 1},
    ),
    "shared Gemm weights": (GEMM.format(0), (8, D), 3, {"Gemm": 0, "MatMulIntegerToFloat": 3}),
    "shared transposed Gemm weights": (
        GEMM.format(1), (8, D), 3, {"Gemm": 0, "MatMulIntegerToFloat": 3},
    ),
    "Gemm with alpha, product of activations": (
        "(float[b, 16] x) => (float[b, b] y) { g = Gemm <alpha = 0.5> (x, w, a) h = MatMul(x, w)"
        "t = Transpose <perm = [1, 0]> (g) y = MatMul(h, t) }",
        (4, D), 1, {"Gemm": 1, "MatMul": 1, "MatMulIntegerToFloat": 1},
    ),
    "weights computed from constants": (
        "(float[b, 16] x) => (float[b, 32] y) { t = Transpose <perm = [1, 0]> (w)"
        "c = Concat <axis = 1> (t, w) y = MatMul(x, c) }",
        (4, D), 1, {"MatMul": 0, "MatMulIntegerToFloat": 1},
    ),
    "Gemm with a sum that is no bias": (
        "(float[b, 16] x, float[b, 16] c) => (float[b, 16] y) { y = Gemm(x, w, c) }",
        (4, D), 1, {"MatMulIntegerToFloat": 1},
    ),
    "a table that is also multiplied": (
        "(int64[b, s] ids) => (float[b, s, 64] y) { e = Gather(words, ids)"
        "u = Transpose <perm = [1, 0]> (words) y = MatMul(e, u) }",
        (), 1, {"MatMulIntegerToFloat": 1},
    ),
}  # fmt: skip


@int8
@pytest.mark.parametrize(("text", "shape", "chain", "counts"), PRODUCTS.values(), ids=PRODUCTS)
def test_int8_quantizes_products_of_matrices_only(
    text: str,
    shape: tuple[int, ...],
    chain: int,
    counts: dict[str, int],
    precision: Precision,
):
    weights = {"w": normal(D, D) / 4, "a": normal(D), "stack": normal(3, D, D)}
    model = graph(text, **weights, words=normal(VOCABULARY, D))
    known = {"x": normal(*shape), "c": 9 * normal(*shape), "ids": np.array([[3, 1], [0, 63]])}
    feeds = {value.name or "": known[value.name or ""] for value in model.graph.inputs}
    made = converted(model, precision, rounding(precision, chain), **feeds)
    assert "int8" in precision_of(made)
    assert {name: operators(made)[name] for name in counts} == counts


@int8
@pytest.mark.parametrize(("rows", "dtype"), [(16, ir.DataType.UINT8), (15, ir.DataType.FLOAT)])
def test_int8_tables_are_quantized_from_a_twentieth_of_the_weights(
    rows: int, dtype: ir.DataType, precision: Precision
):
    text = "(int64[b, s] ids) => (float[b, s, 304] y) { e = Gather(t, ids) y = MatMul(e, w) }"
    model = graph(text, t=normal(rows, D), w=normal(D, 19 * D))
    made = converted(model, precision, rounding(precision), ids=np.array([[3, 1], [0, 14]]))
    tables = [n.inputs[0] for n in made.graph if n.op_type == "Gather"]
    assert [value.dtype for value in tables if value is not None] == [dtype]


ONNX_ATTENTION = """(float[b, s, 16] x, int32[b, s] m) => (float[b, s, 16] y) {
    q = MatMul(x, w) k = MatMul(x, w) v = MatMul(x, w)
    c = Attention <q_num_heads = 4, kv_num_heads = 4> (q, k, v) y = MatMul(c, o) }"""


@int8
def test_int8_onnx_attention_stays_float32(precision: Precision):
    model = graph(ONNX_ATTENTION, 23, w=normal(D, D) / 3, o=normal(D, D) / 3)
    made = converted(model, precision, rounding(precision, 2), **padded("key"))
    assert operators(made)["Attention"] == 1
    assert operators(made)["MatMulIntegerToFloat"] == 4


@int8
@pytest.mark.parametrize(("v", "operator"), [(16, "QAttention"), (32, "Attention")])
def test_int8_attention_with_equal_qkv_sizes_is_quantized(
    v: int, operator: str, precision: Precision
):
    more = f", qkv_hidden_sizes = [16, 16, {v}]"
    text = ATTENTION.format(mask=MASKS["key"], body=FUSED.format(more=more, operands="m"))
    model = graph(text, w=normal(D, 32 + v) / 2, a=normal(32 + v), o=normal(v, D))
    made = converted(model, precision, rounding(precision, 2), **padded("key"))
    assert operators(made)[operator] == 1


def test_int8_attention_without_calibration_stays_float32():
    model, feeds = attention(INSIDE["key"], "key"), padded("key")
    for batches, operator, key in (([feeds], "QAttention", "static"), ([], "Attention", "per-row")):
        made = convert(model, "int8", batches)
        assert {"QAttention", "Attention"} & set(operators(made)) == {operator}
        assert int8_activations(made) == key


@int8
def test_int8_model_above_the_protobuf_limit_is_converted(
    monkeypatch: pytest.MonkeyPatch, precision: Precision
):
    monkeypatch.setattr(onnx_runtime, "PROTOBUF_LIMIT_BYTES", 100)
    converted(product(), precision, rounding(precision), x=normal(2, 5, D))


def test_int8_reduces_the_weights_of_every_product_and_no_table():
    made = convert(every_product(), "int8", [IDS])
    counts = operators(made)
    assert (counts["QAttention"], counts["MatMulIntegerToFloat"], counts["Gather"]) == (1, 2, 1)
    weights = [w for w in quantized_weights(made) if w.ndim == 2]
    assert all(w.min() == -64 or w.max() == 63 for w in weights) and len(weights) == 3
    table = next(node.inputs[0] for node in made.graph if node.op_type == "Gather")
    assert table is not None and table.const_value is not None
    assert table.const_value.numpy().max() == 255


# ---- the range of weights ------------------------------------------------------------------------


def saturating(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of uint8 [N, K] and int8 [K, M] as x86 CPUs without VNNI compute it (vpmaddubsw).

    Pairs of products are added in signed 16-bit integers that saturate, and then in 32 bits.
    """
    terms = a.astype(np.int32)[:, :, None] * b.astype(np.int32)[None]  # N K M
    pairs = terms.reshape(len(a), -1, 2, b.shape[1]).sum(axis=2)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=1)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int32) @ b.astype(np.int32)


FINITE = st.floats(-(2.0**60), 2.0**60, width=32)
MATRICES = hnp.arrays(np.float32, (D, D), elements=FINITE, fill=FINITE)
BYTES = hnp.arrays(np.uint8, (3, D), fill=st.just(255))


@settings(max_examples=25)
@given(weight=MATRICES, activations=BYTES)
def test_int8_weights_of_any_values_never_saturate(weight: np.ndarray, activations: np.ndarray):
    made = convert(product(w=weight), "int8")
    (quantized,) = [w for w in quantized_weights(made) if w.shape == weight.shape]
    assert -64 <= quantized.min() <= quantized.max() <= 63
    assert int8_weight_bits(made) == 7
    for bytes_ in (activations, np.full_like(activations, 255)):
        np.testing.assert_array_equal(saturating(bytes_, quantized), exact(bytes_, quantized))


@pytest.mark.parametrize("has_dot_product", [False, True])
def test_int8_full_is_unsigned_where_signed_products_saturate(
    has_dot_product: bool, cpu_with: Callable[..., None]
):
    cpu_with(int8=has_dot_product)
    for calibration in ([IDS], []):
        made = convert(every_product(), "int8-full", calibration)
        assert bool(quantized_weights(made)) == has_dot_product
        assert int8_weight_bits(made) == 8
        assert int8_activations(made) == ("static" if calibration else "per-row")
        assert int8_warning(made) is None
        assert precision_of(made) == ("int8" if calibration else "int8+float32")  # Attention


@pytest.mark.parametrize("calibration", [[IDS], []], ids=["static", "per row"])
def test_unsigned_weights_compute_what_signed_ones_do(calibration: list[Batch]):
    """Weights have 7 bits here, so that signed ones are exact on every CPU."""
    models = [every_product()]
    models.append(models[0].clone())
    ranges = collect_ranges(models[0], calibration)
    for model, unsigned in zip(models, (False, True), strict=True):
        quantize(model, 7, ranges, unsigned=unsigned)
        assert bool(quantized_weights(model)) != unsigned
    assert "QAttention" in operators(models[1]) or not calibration
    signed, unsigned = (run(model, **IDS) for model in models)
    np.testing.assert_allclose(unsigned, signed, rtol=1e-5, atol=1e-5)
