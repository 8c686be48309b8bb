"""Models that are quantized already, by attnserve or by other tools."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.literals import Precision
from attnserve.models.quantized import batch_invariant, int8_warning, int8_weight_bits
from attnserve.precision.convert import convert, on_cpu
from graph_passes.analysis.constants import constant_array
from graph_passes.errors import InvalidArgument
from tests.attnserve.precision.graphs import D, error, graph, normal, operators, run
from tests.errors import raises


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("(float[b, s, 16] x) => (float[b, s, 16] y) { q, s1, z = DynamicQuantizeLinear(x)"
         "y = DequantizeLinear(q, s1, z) }", False),
        ("(float[1, 1, 16] x) => (float[1, 1, 16] y) { q, s1, z = DynamicQuantizeLinear(x)"
         "y = DequantizeLinear(q, s1, z) }", True),
        ("(float[b, 16] x) => (float[b, n] y)"
         "{ y = com.microsoft.DynamicQuantizeMatMul(x, i, scale) }", False),
        ("(float[b, 16] x, bool c) => (float[b, 16] y) { y = If (c) <then_branch = p () =>"
         "(float[b, 16] t) { q, s1, z = DynamicQuantizeLinear(x) t = DequantizeLinear(q, s1, z) },"
         "else_branch = n () => (float[b, 16] e) { e = Identity(x) }> }", False),
        ("(float[b, 16] x) => (float[b, 16] y) { q = QuantizeLinear(x, scale, zero)"
         "y = DequantizeLinear(q, scale, zero) }", True),
        ("(float[b, 16] x) => (float[b, 16] y) { y = MatMul(x, w) }", True),
    ],
)  # fmt: skip
def test_batch_invariant_is_false_for_scales_of_several_rows(text: str, expected: bool):
    model = graph(
        text,
        i=np.ones((D, D), np.int8),
        w=normal(D, D),
        scale=np.array(0.1, np.float32),
        zero=np.array(128, np.uint8),
    )
    assert batch_invariant(model) == expected


OTHER_TOOLS = {
    "MatMulInteger": "q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z)"
    "y = Cast <to = 1> (i)",
    "DynamicQuantizeMatMul": "y = com.microsoft.DynamicQuantizeMatMul(x, w, scale)",
    "QAttention": "q, s, z = DynamicQuantizeLinear(x)"
    "y = com.microsoft.QAttention <num_heads = 4> (q, w, bias, s, scale, '', z)",
    "pairs of DequantizeLinear": "q = QuantizeLinear(x, scale, zero) a = DequantizeLinear(q, scale,"
    "zero) d = DequantizeLinear(w, scale) y = MatMul(a, d)",
}


@pytest.mark.parametrize("body", OTHER_TOOLS.values(), ids=OTHER_TOOLS)
@pytest.mark.parametrize(("largest", "bits"), [(64, 7), (-64, 7), (65, 8), (-65, 8), (-128, 8)])
def test_int8_weight_bits_of_models_of_other_tools(
    body: str, largest: int, bits: int, cpu_with: Callable[..., None]
):
    weight = np.zeros((D, 3 * D), np.int8)
    weight[3, 5] = largest
    model = graph(
        f"(float[b, s, 16] x) => (float[b, s, n] y) {{ {body} }}".replace("''", '""'),
        w=weight,
        scale=np.array(0.1, np.float32),
        zero=np.array(128, np.uint8),
        bias=np.zeros(3 * D, np.float32),
    )
    assert int8_weight_bits(model) == bits
    for exact_cpu in (False, True):
        cpu_with(int8=exact_cpu)
        assert (int8_warning(model) is None) == (exact_cpu or bits == 7)


@pytest.mark.parametrize(
    ("body", "dtype", "bits"),
    [
        ("d = DequantizeLinear(w, scale) y = MatMul(x, d)", np.int8, None),  # in float32
        ("q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) y = Cast <to = 1> (i)",
         np.uint8, 8),
        ("y = MatMul(x, f)", np.int8, None),
    ],
    ids=["weights alone", "unsigned", "float32"],
)  # fmt: skip
def test_products_that_cannot_saturate_have_no_warning(
    body: str, dtype: type, bits: int | None, cpu_with: Callable[..., None]
):
    cpu_with(int8=False)
    model = graph(
        f"(float[b, 16] x) => (float[b, 16] y) {{ {body} }}",
        w=np.full((D, D), 127, dtype),
        f=normal(D, D),
        scale=np.array(0.1, np.float32),
    )
    assert int8_weight_bits(model) == bits
    assert int8_warning(model) is None


QUANTIZED = {
    "MatMulInteger": "q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w8, z)"
    " f = Cast <to = 1> (i) t = Mul(s, w8s) h = Mul(f, t)",
    "MatMulIntegerToFloat": "q, s, z = DynamicQuantizeLinear(x)"
    " h = com.microsoft.MatMulIntegerToFloat(q, w8, s, w8s, z)",
    "DynamicQuantizeMatMul": "h = com.microsoft.DynamicQuantizeMatMul(x, w8, w8s)",
    "QLinearMatMul": "q = QuantizeLinear(x, xs, xz)"
    " i = QLinearMatMul(q, xs, xz, w8, xs, w8z, xs, xz) h = DequantizeLinear(i, xs, xz)",
    "DequantizeLinear": "q = QuantizeLinear(x, xs, xz) a = DequantizeLinear(q, xs, xz)"
    " d = DequantizeLinear <axis = 1> (w8, w8s) h = MatMul(a, d)",
    "MatMulNBits": "h = com.microsoft.MatMulNBits <K = 16, N = 16, bits = 4, block_size = 16>"
    " (x, w4, w4s)",
}
"""Quantized products of x, by the operator of the weights."""


def partly_quantized(form: str, more: str) -> ir.Model:
    rng = np.random.default_rng(3)
    weights = {
        "w8": rng.integers(-127, 128, (D, D)).astype(np.int8),
        "w8s": np.full(D, 1 / 100, np.float32),
        "w8z": np.array(0, np.int8),
        "xs": np.array(1 / 30, np.float32),
        "xz": np.array(128, np.uint8),
        "w4": rng.integers(0, 256, (D, 1, D // 2)).astype(np.uint8),
        "w4s": np.full((D, 1), 1 / 4, np.float32),
        "w": normal(D, D),
    }
    text = f"(float[b, s, 16] x) => (float[b, s, 16] y) {{ {QUANTIZED[form]} {more} }}"
    return graph(text, opset=21, **{n: w for n, w in weights.items() if n in text})


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("form", QUANTIZED)
def test_convert_partly_quantized_model_converts_what_is_float(form: str, precision: Precision):
    model = partly_quantized(form, "y = MatMul(h, w)")
    x = np.random.default_rng(1).normal(size=(2, 5, D)).astype(np.float32)
    made = convert(model, precision, [{"x": x}])
    before, after = operators(model), operators(made)
    assert after[form] == before[form] + (
        (form, precision) in {("MatMulIntegerToFloat", "int8"), ("MatMulNBits", "int4")}
    )
    for name in {"w4", "w8"} & set(model.graph.initializers):  # what was quantized is the same
        mine, theirs = (each.graph.initializers[name] for each in (made, model))
        assert np.array_equal(constant_array(mine), constant_array(theirs))
    floats = [v.const_value for v in made.graph.initializers.values() if v.const_value]
    assert not any(
        t.dtype == ir.DataType.FLOAT and len(t.shape) > 1 and t.size == D * D for t in floats
    )
    bound = {"float16": 0.01, "bfloat16": 0.03, "int8": 0.05, "int4": 0.2}[precision]
    assert error(run(model, x=x), run(on_cpu(made), x=x)) < bound


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("form", QUANTIZED)
def test_convert_fully_quantized_model_is_refused(form: str, precision: Precision):
    with raises(InvalidArgument, "precision.already", precision):
        convert(partly_quantized(form, "y = Relu(h)"), precision)


def test_float16_of_large_integer_sums_is_finite():
    """16 products of bytes exceed the largest float16 before they are scaled."""
    model = partly_quantized("MatMulInteger", "y = MatMul(h, w)")
    x = np.ones((1, 2, D), np.float32)
    model.graph.initializers["w8"].const_value = ir.tensor(np.full((D, D), 127, np.int8), name="w8")
    assert error(run(model, x=x), run(convert(model, "float16"), x=x)) < 0.01


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_convert_quantized_model_with_half_precision_is_refused(precision: Precision):
    model = partly_quantized("MatMulInteger", "c = CastLike(w, h) y = MatMul(h, c)")
    half = constant_array(model.graph.initializers["w"]).astype(np.float16)
    model.graph.initializers["w"].const_value = ir.tensor(half, name="w")
    with raises(InvalidArgument, "precision.already", "float16"):
        convert(model, precision)
