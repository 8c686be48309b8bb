"""Conversion to float16, bfloat16 and int8: results, interface, weight ranges and refusals."""

from __future__ import annotations

import logging
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from attnserve.checks.compare import compare
from attnserve.context import Device, RunContext
from attnserve.data.datasets import load_inputs
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model, save_model
from attnserve.models.quantized import (
    batch_invariant,
    int8_activations,
    int8_warning,
    int8_weight_bits,
)
from attnserve.precision import int8 as int8_module
from attnserve.precision import int8_grids
from attnserve.precision.convert import (
    context_for,
    convert,
    convert_alone,
    on_cpu,
    precision_of,
)
from attnserve.precision.half import LARGEST
from attnserve.precision.products import collect_ranges
from attnserve.runtime import onnx_runtime
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.machine import has_int8_dot_product
from attnserve.runtime.session import open_session
from graph_passes.analysis.constants import constant_array, origin
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidData, InvalidModel
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.invariants import interface
from tests.errors import raises
from tests.graph_passes.graphs import graph as text_graph

Build = Callable[..., Path]
RNG = np.random.default_rng(0)
STATE = RNG.bit_generator.state
D, H, VOCABULARY = 16, 4, 64
HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g '


@pytest.fixture(autouse=True)
def _reset_generator() -> None:
    RNG.bit_generator.state = STATE


def graph(text: str, opset: int = 18, **weights: np.ndarray) -> ir.Model:
    """A text graph whose undefined names are these weights."""
    model = ir.from_onnx_text(HEAD.format(opset=opset) + text)
    tensors = {name: ir.tensor(array, name=name) for name, array in weights.items()}
    for node in model.graph.all_nodes():
        for place, value in enumerate(node.inputs):
            if value is not None and value.name in tensors:
                name = value.name
                if name not in model.graph.initializers:
                    model.graph.register_initializer(ir.val(name, const_value=tensors[name]))
                node.replace_input_with(place, model.graph.initializers[name])
    return model


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def run(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    return open_session(model).run(None, feeds)[0]


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def converted(model: ir.Model, precision: Precision, bound: float, **feeds: np.ndarray) -> ir.Model:
    """The converted model, after a check that its output is within ``bound``.

    Static scales are calibrated on these feeds; without calibration the bound is the same.
    """
    expected = run(model, **feeds)
    made = convert(model, precision, [feeds])
    for each in (made, convert(model, precision)):
        assert error(expected, run(on_cpu(each), **feeds)) < bound
    return made


WEIGHT_RANGE = {"int8": (-64, 63), "int8-full": (-127, 127)}
needs_dot_product = pytest.mark.skipif(not has_int8_dot_product(), reason="saturates")
int8 = pytest.mark.parametrize(
    "precision", ["int8", pytest.param("int8-full", marks=needs_dot_product)]
)


def rounding(precision: Precision, products: int = 1) -> float:
    """Bound of ``error`` after a chain of int8 products of standard normal numbers.

    Rounding to steps of d has a standard deviation of d / sqrt(12). The largest of some dozen to
    some hundred normal numbers is about 3, so weights have steps of 3 / 64 (7 bits) or 3 / 127, and
    activations of 6 / 255. Relative errors of both factors, and of all products of the chain, are
    independent: their squares add up. The factor of 2 is for chance.
    """
    weights, activations = 3 / -WEIGHT_RANGE[precision][0], 6 / 255
    return 2 * np.sqrt(products * (weights**2 + activations**2) / 12)


def product(**weights: np.ndarray) -> ir.Model:
    weights = weights or {"w": normal(D, D)}
    return graph("(float[b, s, 16] x) => (float[b, s, 16] y) { y = MatMul(x, w) }", **weights)


ATTENTION = "(float[b, s, 16] x, {mask}) => (float[b, s, 16] y) {{ {body} y = MatMul(c, o) }}"
MASKS = {"key": "int32[b, s] m", "bias": "float[b, 1, s, s] m"}
OPERANDS = {"key": "m", "bias": '"", "", m'}
FUSED = "c = com.microsoft.Attention <num_heads = 4{more}> (x, w, a, {operands})"
INSIDE = {mask: FUSED.format(more="", operands=operands) for mask, operands in OPERANDS.items()}
OUTSIDE = {
    mask: "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
    f"c = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, a, {operands})"
    for mask, operands in {"key": "m", "bias": '"", m'}.items()
}


def attention(body: str, mask: str) -> ir.Model:
    packed = RNG.normal(size=(D, 3 * D)).astype(np.float32) / 2
    wq, wk, wv = np.split(packed, 3, axis=1)
    weights = {"w": packed, "wq": wq, "wk": wk, "wv": wv, "a": normal(3 * D), "o": normal(D, D)}
    text = ATTENTION.format(mask=MASKS[mask], body=body)
    return graph(text, **weights)


def padded(mask: str) -> dict[str, np.ndarray]:
    """Two rows of five tokens, of which the second has three."""
    keys = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    bias = np.where(keys[:, None, None, :] > 0, 0.0, -3.4e38) + np.zeros((2, 1, 5, 1))
    x = np.random.default_rng(1).normal(size=(2, 5, D)).astype(np.float32)
    return {"x": x, "m": keys if mask == "key" else bias.astype(np.float32)}


# ---- names --------------------------------------------------------------------------------------


def test_convert_float32_returns_the_model_itself():
    model = product()
    assert convert(model, "float32") is model
    with raises(InvalidArgument, "precision.unknown", "'int3'"):
        convert(model, "int3")  # type: ignore[arg-type]


BY_TYPE = {np.float16: "float16", np.int8: "int8", np.uint8: "int8", np.float64: "float64"}


@pytest.mark.parametrize(
    ("text", "weights", "name"),
    [
        *(("(float[b, 16] x) => (float[b, 16] y) { c = CastLike(w, x) y = MatMul(x, c) }",
           {"w": np.ones((D, D), dtype)}, name) for dtype, name in BY_TYPE.items()),
        ("(float[b, 16] x) => (float[b, 16] y) { y = MatMul(x, w) }",
         {"w": np.ones((D, D), np.float32)}, "float32"),
        *(("(float[b, 16] x) => (float[b, 16] y) "
           "{ c = CastLike(w, x) d = MatMul(c, v) y = MatMul(x, d) }",
           {"w": np.ones((rows, D), np.float16), "v": np.ones((90, D), np.float32)}, name)
          for rows, name in ((10, "float32+float16"), (9, "float32"))),  # from a tenth on
        ("(int64[b, s] x) => (int64[b, s, 9] y) { y = Gather(t, x) }",
         {"t": np.zeros((99, 9), np.int64)}, "float32"),
        # As the causal buffers of GPT-2 in older exports.
        ("(float[b, 4] x) => (float[b, 4] y, bool[4, 4] m) { m = Cast <to = 9> (t) "
         "y = MatMul(x, w) }",
         {"t": np.ones((4, 4), np.uint8), "w": np.eye(4, dtype=np.float32)}, "float32"),
    ],
)  # fmt: skip
def test_precision_of_is_the_data_type_of_the_weights(
    text: str, weights: dict[str, np.ndarray], name: str
):
    assert precision_of(graph(text, **weights)) == name


# ---- all precisions ------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8"])
def test_convert_keeps_interface_source_and_process_state(
    precision: Precision, capfd: pytest.CaptureFixture[str]
):
    model = product()
    model.metadata_props["who"] = "us"
    before, nodes = interface(model), list(model.graph)
    handlers, disabled = list(logging.root.handlers), logging.root.manager.disable
    files = set(Path(tempfile.gettempdir()).glob("*"))
    made = convert(model, precision)
    assert interface(model) == before
    assert list(model.graph) == nodes
    assert (interface(made).inputs, interface(made).outputs) == (before.inputs, before.outputs)
    assert dict(made.metadata_props) == {"who": "us"}
    assert precision_of(made) == precision
    assert (list(logging.root.handlers), logging.root.manager.disable) == (handlers, disabled)
    new = set(Path(tempfile.gettempdir()).glob("*")) - files
    assert not [path for path in new if path.name.startswith(("attnserve-", "ort.quant"))]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("precision", "least", "largest"),
    [("float16", 0.9999, 0.55), ("bfloat16", 0.999, 0.55), ("int8", 0.99, 0.4), ("int4", 0.9, 0.8)],
)
def test_convert_tiny_bert_is_close_and_smaller(
    tiny: Path, sentences: Path, precision: Precision, least: float, largest: float
):
    model = load_model(artifact := open_artifact(tiny))
    batches = load_inputs(sentences, model, artifact, split=False).fit
    made = convert(model, precision)
    assert compare(model, made, batches, "sentences").mean_cosine >= least
    assert weight_bytes(made) < largest * weight_bytes(model)
    for other in ("float16", "bfloat16", "int8", "int4"):
        if (precision, other) == ("int4", "int8"):  # its tables are float32 still
            assert operators(convert(made, other))["MatMulNBits"] == operators(made)["MatMulNBits"]
            continue
        with raises(InvalidArgument, "precision.already"):
            convert(made, other)


def test_convert_fused_export_is_close(tiny_export: Build, sentences: Path):
    fusions = pytest.importorskip("onnxscript.rewriter.ort_fusions")
    model = load_model(artifact := open_artifact(tiny_export("sdpa", "dynamo", 18)))
    batches = load_inputs(sentences, model, artifact, split=False).fit
    fused = fusions.optimize_for_ort(model.clone())
    fused = fused[0] if isinstance(fused, tuple) else fused
    assert operators(fused)["Attention"] == 2  # with attention_bias
    for precision, least in (("float16", 0.9999), ("bfloat16", 0.999), ("int8", 0.99)):
        made = convert(fused, precision)
        assert operators(made)["Attention"] == 2
        assert compare(model, made, batches, "sentences").mean_cosine >= least


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8"])
def test_convert_output_without_type_is_float32(precision: Precision):
    model, x = product(), normal(2, 5, D)
    expected = run(model, x=x)
    model.graph.outputs[0].type = None
    made = convert(model, precision)
    assert made.graph.outputs[0].dtype in (None, ir.DataType.FLOAT)
    bound = rounding("int8") if precision == "int8" else 0.03
    assert error(expected, run(on_cpu(made), x=x)) < bound


# ---- float16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [-3.4e38, -1e9, float("-inf")])
def test_float16_mask_hides_the_same_keys(low: float):
    text = """(float[b, s, 16] x, float[b, s] m) => (float[b, s, 16] y) {
        one = Constant <value_float = 1.0> () axes = Constant <value_ints = [1]> ()
        n = Sub(one, m) a = Mul(n, low) r = Unsqueeze(a, axes)
        k = Transpose <perm = [0, 2, 1]> (x) s0 = MatMul(x, k) s1 = Add(s0, r) s2 = Add(s1, r)
        p = Softmax <axis = -1> (s2) c = MatMul(p, x) y = MatMul(c, w) }"""
    if np.isinf(low):
        text = text.replace("a = Mul(n, low)", "h = Cast <to = 9> (n) a = Where(h, low, zero)")
    model = graph(text, low=np.array(low, np.float32), zero=np.array(0, np.float32), w=normal(D, D))
    made = convert(model, "float16")
    floor = next(v for n, v in made.graph.initializers.items() if n == "low").const_value
    assert floor is not None
    assert float(floor.numpy()) == (low if np.isinf(low) else -LARGEST)
    x = padded("key")["x"]
    keep = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.float32)
    expected, got = run(model, x=x, m=keep), run(made, x=x, m=keep)
    assert np.isfinite(got).all()
    assert error(expected, got) < 3e-3
    alone = run(made, x=x[1:, :3], m=keep[1:, :3])
    assert error(alone, got[1:, :3]) < 3e-3  # masked tokens have no effect
    if not np.isinf(low):  # a row with all keys masked is finite
        assert np.isfinite(run(made, x=x, m=np.zeros_like(keep))).all()


def test_float16_masks_within_the_limit_are_unchanged():
    model = graph(
        "(float[b, 16] x) => (float[b, 16] y) { z = MatMul(x, w) y = Add(z, m) }",
        w=normal(D, D),
        m=np.array([-LARGEST, -10_000.0, *[0.0] * 14], np.float32),
    )
    mask = convert(model, "float16").graph.initializers["m"].const_value
    assert mask is not None
    np.testing.assert_array_equal(mask.numpy()[:3], [-LARGEST, -10_000.0, 0.0])


def rotary() -> ir.Model:
    """x multiplied by cosines and sines of positions p."""
    return graph(
        "(int64[s] p, float[s, 16] x) => (float[s, 16] y) { f = Cast <to = 1> (p)"
        "axes = Constant <value_ints = [1]> () u = Unsqueeze(f, axes)"
        "a = Mul(u, freq) c = Cos(a) n = Sin(a) cn = Concat <axis = 1> (c, n)"
        "t = Mul(x, cn) y = MatMul(t, w) }",
        freq=(10_000.0 ** -np.linspace(0, 0.9, 8)).astype(np.float32)[None],
        w=np.eye(D, dtype=np.float32),
    )


@pytest.mark.parametrize(
    ("precision", "positions", "atol"),
    [("float16", [3, 2049, 4099, 70_001], 1e-3), ("bfloat16", [3, 257, 4099, 70_001], 2**-8)],
)
def test_convert_angles_of_large_positions_are_exact(
    precision: Precision, positions: list[int], atol: float
):
    """float16 represents integers up to 2048 exactly, bfloat16 up to 256."""
    model = rotary()
    made = convert(model, precision)
    assert precision_of(made) == precision
    feeds = {"p": np.array(positions), "x": np.ones((4, D), np.float32)}
    np.testing.assert_allclose(run(on_cpu(made), **feeds), run(model, **feeds), atol=atol)


def test_float16_sine_of_a_product_is_converted():
    model = graph(
        "(float[b, 16] x) => (float[b, 16] y) { z = MatMul(x, w) y = Sin(z) }", w=normal(D, D) / 9
    )
    made = convert(model, "float16")
    assert precision_of(made) == "float16"
    assert operators(made)["Cast"] == 2  # of the input and of the output


def test_float16_operators_without_kernel_stay_float32_after_unknown_operator():
    model = graph(
        "(float[b, 16] x) => (float[b, 16] y) { z = MatMul(x, w) g = com.microsoft.QuickGelu(z)"
        "m = Max(g, low) n = Min(m, high) y = MatMul(n, w) }",
        w=normal(D, D),
        low=np.array(-1, np.float32),
        high=np.array(1, np.float32),
    )
    made = converted(model, "float16", 5e-3, x=normal(3, D))
    assert operators(made)["Cast"] == 4, "no cast between Max and Min"


# ---- bfloat16 ------------------------------------------------------------------------------------


def test_open_session_bfloat16_on_cpu_is_refused(tmp_path: Path):
    made = convert(product(), "bfloat16")
    ir.save(made, tmp_path / "model.onnx")
    for source in (made, tmp_path / "model.onnx"):
        with raises(InvalidModel, "session.bfloat16_cpu") as no:
            open_session(source)
        assert "cuda" in no.value.fix and "\n" not in no.value.what


def test_open_session_other_missing_kernel_is_graph_refused():
    model = graph("(int8[b] x) => (int8[b] y) { y = Sqrt(x) }")
    with raises(InvalidModel, "session.graph_refused"):
        open_session(model)


def test_on_cpu_is_close_and_leaves_other_models_unchanged():
    model, x = product(), normal(2, 5, D)
    made = convert(model, "bfloat16")
    nodes = list(made.graph)
    assert 0 < error(run(model, x=x), run(on_cpu(made), x=x)) < 2**-7  # two factors, and a result
    assert list(made.graph) == nodes and precision_of(made) == "bfloat16"
    for other in (model, convert(model, "float16"), convert(model, "int8")):
        assert on_cpu(other) is other


def test_compare_bfloat16_on_cpu_names_the_rounding():
    model, x = product(), normal(2, 5, D)
    fidelity = compare(model, convert(model, "bfloat16"), [{"x": x}], "numbers")
    assert fidelity.data == "numbers, bfloat16 rounded in float32"
    assert 0.999 < fidelity.mean_cosine < 1
    assert compare(model, model, [{"x": x}], "numbers").data == "numbers"


@pytest.mark.parametrize(
    ("precision", "opset", "oldest"),
    [("bfloat16", 12, 13), ("int8", 10, 11), ("int8-full", 10, 11)],
)
def test_convert_old_opset_is_refused(
    precision: Precision, opset: int, oldest: int, cpu_with: Callable[..., None]
):
    cpu_with(int8=True)
    text = "(float[b, 16] x) => (float[b, 16] y) { y = MatMul(x, w) }"
    with raises(CannotRewrite, "precision.opset", opset, oldest):
        convert(graph(text, opset, w=normal(D, D)), precision)
    made = convert(graph(text, oldest, w=normal(D, D)), precision)
    assert precision_of(made) == precision.removesuffix("-full")


def test_bfloat16_keeps_weights_beyond_float16():
    weight = np.full((D, D), 1e30, np.float32)
    made = on_cpu(convert(product(w=weight), "bfloat16"))
    x = np.eye(D, dtype=np.float32)[None]
    np.testing.assert_allclose(run(made, x=x)[0], weight, rtol=2**-8)


# ---- int8 ----------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("bodies", "mask", "operator"),
    [(INSIDE, "key", "QAttention"), (INSIDE, "bias", "Attention"),
     (OUTSIDE, "key", "MultiHeadAttention"), (OUTSIDE, "bias", "MultiHeadAttention")],
)  # fmt: skip
@pytest.mark.parametrize(
    "precision", ["float16", "int8", pytest.param("int8-full", marks=needs_dot_product)]
)
def test_convert_fused_attention_keeps_its_mask(
    bodies: dict[str, str], mask: str, operator: str, precision: Precision
):
    """QAttention has no input for attention_bias; the tool would drop it."""
    bound = 5e-3 if precision == "float16" else rounding(precision, 2)
    made = converted(attention(bodies[mask], mask), precision, bound, **padded(mask))
    assert operators(made)[operator.removeprefix("Q") if precision == "float16" else operator] == 1
    assert precision.removesuffix("-full") in precision_of(made)


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


BRANCHES = """(float[b, 16] x, bool c) => (float[b, 16] y) {{
    h = MatMul(x, w) e = Gather(t, i)
    z = If (c) <then_branch = yes () => (float[b, 16] p) {{ {then} }},
                else_branch = no () => (float[b, 16] n) {{ r = MatMul(h, v) n = Add(r, e) }}>
    y = MatMul(z, w) }}"""


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_convert_subgraphs_and_their_outer_values(precision: Precision):
    model = graph(
        BRANCHES.format(then="q = MatMul(h, w) p = Add(q, e)"),
        w=normal(D, D) / 4,
        v=normal(D, D) / 4,
        t=normal(VOCABULARY, D),
        i=np.array(3),
    )
    bound, x = rounding("int8", 3) if precision == "int8" else 0.01, normal(3, D)
    for condition in (True, False):
        made = converted(model, precision, bound, x=x, c=np.array(condition))
    if precision == "int8":
        assert operators(made)["MatMulIntegerToFloat"] == 4


@int8
def test_int8_model_above_the_protobuf_limit_is_converted(
    monkeypatch: pytest.MonkeyPatch, precision: Precision
):
    monkeypatch.setattr(onnx_runtime, "PROTOBUF_LIMIT_BYTES", 100)
    converted(product(), precision, rounding(precision), x=normal(2, 5, D))


# ---- one text and its batch ----------------------------------------------------------------------

LENGTHS = (3, 9, 5, 12)


def full(model: ir.Model) -> dict[str, np.ndarray]:
    """Rows of these lengths, with zeros for all inputs other than ids and mask."""
    ids = np.zeros((len(LENGTHS), max(LENGTHS)), np.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = RNG.integers(1, 50, length)
    known = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
    names = (value.name or "" for value in model.graph.inputs)
    return {name: known.get(name, np.zeros_like(ids)) for name in names}


@pytest.fixture
def encoder(tiny: Path) -> ir.Model:
    """An encoder with one outlier channel, as trained encoders have."""
    model = load_model(open_artifact(tiny))
    norms = [node for node in model.graph if node.op_type == "LayerNormalization"]
    for scale in {origin(node.inputs[1]) for node in norms if node.inputs[1] is not None}:
        gamma = constant_array(scale).copy()
        gamma[3] *= 20
        scale.const_value = ir.tensor(gamma, name=scale.name)
    return model


@pytest.mark.parametrize(
    ("precision", "calibrated"),
    [("float32", False), ("float16", False), ("bfloat16", False), ("int8", True), ("int8", False),
     ("int4", True), ("int4", False),
     pytest.param("int8-full", True, marks=needs_dot_product)],
)  # fmt: skip
def test_convert_text_alone_equals_text_in_any_batch(
    encoder: ir.Model, precision: Precision, calibrated: bool
):
    """int8 is equal bit by bit, because 32-bit sums are exact and all else runs row by row.

    With another number of padding tokens, ONNX Runtime splits the float sums over the keys
    differently. The rounding errors of 1e-7 may move a number of an int8 model across the boundary
    of two bytes, so that a few elements differ by one step of a later activation.
    """
    batch = full(encoder)
    made = on_cpu(convert(encoder, precision, [batch] if calibrated else ()))
    session, is_int8 = open_session(made), precision.startswith("int8")
    assert batch_invariant(made)
    together = session.run(None, batch)[0]
    half = 1e-3 if precision in ("float16", "bfloat16") else 1e-5
    for row, length in enumerate(LENGTHS):
        alone = session.run(None, {n: a[row : row + 1] for n, a in batch.items()})[0][0]
        if is_int8:
            np.testing.assert_array_equal(alone, together[row])
        else:
            np.testing.assert_allclose(alone, together[row], atol=half)
        short = session.run(None, {n: a[row : row + 1, :length] for n, a in batch.items()})[0][0]
        assert error(together[row, :length], short) < (1e-2 if is_int8 else half)


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


def test_shared_weights_are_stored_once():
    text = "(float[b, 16] x) => (float[b, 16] y) { h = MatMul(x, w) r = Relu(h) y = MatMul(r, w) }"
    made = convert(graph(text, w=normal(D, D)), "int8", [{"x": outliers(64, D)}])
    assert len(quantized_weights(made)) == 1


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


def test_int8_attention_without_calibration_stays_float32():
    model, feeds = attention(INSIDE["key"], "key"), padded("key")
    for batches, operator, key in (([feeds], "QAttention", "static"), ([], "Attention", "per-row")):
        made = convert(model, "int8", batches)
        assert {"QAttention", "Attention"} & set(operators(made)) == {operator}
        assert int8_activations(made) == key


# ---- the range of int8 weights -------------------------------------------------------------------


def saturating(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Product of uint8 [N, K] and int8 [K, M] as x86 CPUs without VNNI compute it (vpmaddubsw).

    Pairs of products are added in signed 16-bit integers that saturate, and then in 32 bits.
    """
    terms = a.astype(np.int32)[:, :, None] * b.astype(np.int32)[None]  # N K M
    pairs = terms.reshape(len(a), -1, 2, b.shape[1]).sum(axis=2)
    return np.clip(pairs, -(2**15), 2**15 - 1).sum(axis=1)


def exact(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a.astype(np.int32) @ b.astype(np.int32)


def quantized_weights(model: ir.Model) -> list[np.ndarray]:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return [t.numpy() for t in tensors if t is not None and t.dtype == ir.DataType.INT8 and t.size]


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


def blocks_of(model: ir.Model) -> list[str]:
    names = [block.name for block in find_attention(model).blocks]
    return [*names, *(block.name for block in find_feed_forward(model))]


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_convert_float_blocks_stay_float32(encoder: ir.Model, precision: Precision):
    names = blocks_of(encoder)
    assert len(names) == 4  # two layers
    converted = "MatMulNBits" if precision == "int4" else "MatMulIntegerToFloat"
    counts = [
        operators(convert(encoder, precision, [full(encoder)], float_blocks=names[:some]))
        for some in range(len(names) + 1)
    ]
    products = [count[converted] for count in counts]
    assert products == sorted(set(products), reverse=True)  # each block has products of its own
    floats = [count["MatMul"] for count in counts]
    assert [p + f for p, f in zip(products, floats, strict=True)] == [products[0] + floats[0]] * 5


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_convert_alone_converts_one_part_and_no_table(encoder: ir.Model, precision: Precision):
    names, batch = blocks_of(encoder), full(encoder)
    parts = [[name] for name in names]
    expected = open_session(encoder).run(None, batch)[0]
    found = list(convert_alone(encoder, precision, [batch], parts))
    whole = open_session(convert(encoder, precision, [batch])).run(None, batch)[0]
    for made in found:
        assert weight_bytes(made) < weight_bytes(encoder)
        part = open_session(made).run(None, batch)[0]
        assert 0 < error(expected, part) < error(expected, whole)
    sizes = [operators(made)["DequantizeLinear"] for made in found]
    assert not any(sizes)  # the tables of embeddings stay float


def test_convert_unknown_float_block_is_refused(encoder: ir.Model):
    with raises(InvalidArgument, "precision.no_block", "layer.99"):
        convert(encoder, "int8", [full(encoder)], float_blocks=["layer.99"])


EVERY_PRODUCT = """(int64[b, s] ids, int32[b, s] m) => (float[n, 16] y) {
    e = Gather(t, ids) c = com.microsoft.Attention <num_heads = 4> (e, w, a, m)
    p = MatMul(c, o) r = Reshape(p, flat) y = Gemm <transB = 1> (r, g, bias) }"""


def every_product() -> ir.Model:
    return graph(
        EVERY_PRODUCT,
        t=normal(VOCABULARY, D), w=normal(D, 3 * D), a=normal(3 * D), o=normal(D, D),
        g=normal(D, D), bias=normal(D), flat=np.array([-1, D]),
    )  # fmt: skip


IDS = {"ids": np.arange(8).reshape(2, 4), "m": np.ones((2, 4), np.int32)}


def test_int8_reduces_the_weights_of_every_product_and_no_table():
    made = convert(every_product(), "int8", [IDS])
    counts = operators(made)
    assert (counts["QAttention"], counts["MatMulIntegerToFloat"], counts["Gather"]) == (1, 2, 1)
    weights = [w for w in quantized_weights(made) if w.ndim == 2]
    assert all(w.min() == -64 or w.max() == 63 for w in weights) and len(weights) == 3
    table = next(node.inputs[0] for node in made.graph if node.op_type == "Gather")
    assert table is not None and table.const_value is not None
    assert table.const_value.numpy().max() == 255


def test_int8_full_with_dot_product_uses_8_bits(cpu_with: Callable[..., None]):
    cpu_with(int8=True)
    made = convert(every_product(), "int8-full", [IDS])
    assert int8_weight_bits(made) == 8
    assert precision_of(made) == "int8"
    assert int8_warning(made) is None


@pytest.mark.parametrize("precision", ["bfloat16-cpu", "int8-full-bfloat16"])
def test_bfloat16_on_cpus_is_stated_in_the_model(
    precision: Precision, cpu_with: Callable[..., None], tmp_path: Path
) -> None:
    """ONNX Runtime computes the same file in float32; the statement survives the file."""
    cpu_with(bfloat16=True)
    model = every_product()
    made = convert(model, precision, [IDS])
    save_model(made, tmp_path / "made.onnx")
    read = load_model(tmp_path / "made.onnx")
    assert computes_in_bfloat16(read) and not computes_in_bfloat16(model)
    assert precision_of(read) == ("float32" if precision == "bfloat16-cpu" else "int8")
    cpu_with(bfloat16=False)
    with raises(InvalidArgument, "precision.cpu", precision):
        convert(product(), precision)


def test_context_for_precision_of_one_runtime_selects_it() -> None:
    auto = RunContext(Device(runtime="auto"))
    assert context_for("float32", auto) == auto
    assert context_for("bfloat16-cpu", auto).device.runtime == "openvino"
    for other in (
        RunContext(Device(runtime="onnxruntime")),
        RunContext(Device("cuda", runtime="auto")),
    ):
        assert context_for("int8", other) == other
        with raises(InvalidArgument, "precision.runtime", "openvino"):
            context_for("bfloat16-cpu", other)


OUTPUTS = {
    "initializer": "(float[b, 16] x) => (float[16, 16] w, float[b, 16] y) { y = MatMul(x, w) }",
    "initializer without readers": "(float[b, 16] x) => (float[b, 16] y, float[16, 16] v)"
    " { y = MatMul(x, w) }",
    "input": "(float[b, 16] x) => (float[b, 16] x, float[b, 16] y) { y = MatMul(x, w) }",
    "integer input": "(float[b, 16] x, int64[b] n) => (float[b, 16] y, int64[b] n)"
    " { y = MatMul(x, w) }",
    "repeated": "(float[b, 16] x) => (float[b, 16] y, float[b, 16] y) { y = MatMul(x, w) }",
    "constant": "(float[b, 16] x) => (float[b, 16] y, float c)"
    " { y = MatMul(x, w) c = Constant <value_float = 2.0> () }",
    "read inside": "(float[b, 16] x) => (float[b, 16] h, float[b, 16] y)"
    " { h = MatMul(x, w) y = Relu(h) }",
    "optional": "(float[b, 16] x) => (float[b, 16] y, optional(float[b, 16]) z)"
    " { y = MatMul(x, w) z = Optional(y) }",
    "sequence": "(float[b, 16] x) => (float[b, 16] y, seq(float[b, 16]) z)"
    " { y = MatMul(x, w) z = SequenceConstruct(y) }",
}
"""Graphs with an output that no node computes, or that is not a tensor."""


@pytest.mark.parametrize("precision", ["float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_convert_keeps_outputs_of_every_kind(kind: str, precision: Precision):
    arrays = {"w": normal(D, D), "v": normal(D, D)}
    model = ir.from_onnx_text(HEAD.format(opset=18) + OUTPUTS[kind])
    for value in (*model.graph.outputs, *(v for n in model.graph for v in n.inputs if v)):
        if value.name in arrays and value.name not in model.graph.initializers:
            value.const_value = ir.tensor(arrays[value.name], name=value.name)
            model.graph.register_initializer(value)
    if (first := model.graph.outputs[0]).name == "w":  # the text has two values of this name
        model.graph[0].replace_input_with(1, first)
    x = normal(2, D)
    feeds = {"x": x} | ({"n": np.arange(2)} if kind == "integer input" else {})
    before = interface(model)
    if (kind, precision) == ("sequence", "float16"):
        with raises(CannotRewrite, "precision.signature", "'z'"):
            convert(model, precision)
        return
    made = convert(model, precision)
    assert interface(model) == before
    assert (interface(made).inputs, interface(made).outputs) == (before.inputs, before.outputs)
    session = open_session(on_cpu(made))
    names = [value.name for value in model.graph.outputs]
    assert [output.name for output in session.get_outputs()] == names
    bound = {"float16": 0.01, "bfloat16": 0.03, "int8": 0.1, "int4": 0.3}[precision]
    exact = {**arrays, **feeds, "c": np.array(2.0, np.float32)}
    for output, array in zip(session.get_outputs(), session.run(None, feeds), strict=True):
        if output.name in exact:
            assert np.array_equal(array, exact[output.name])  # nothing is rounded
        else:
            found = array[0] if isinstance(array, list) else array
            assert error(x @ arrays["w"], found) < bound or output.name == "y"


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
    ("body", "dtype"),
    [
        ("d = DequantizeLinear(w, scale) y = MatMul(x, d)", np.int8),  # computed in float32
        ("q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) y = Cast <to = 1> (i)",
         np.uint8),
        ("y = MatMul(x, f)", np.int8),
    ],
    ids=["weights alone", "unsigned", "float32"],
)  # fmt: skip
def test_int8_weight_bits_of_products_that_cannot_saturate_are_none(body: str, dtype: type):
    model = graph(
        f"(float[b, 16] x) => (float[b, 16] y) {{ {body} }}",
        w=np.full((D, D), 127, dtype),
        f=normal(D, D),
        scale=np.array(0.1, np.float32),
    )
    assert int8_weight_bits(model) is None


# ---- refusals ------------------------------------------------------------------------------------


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


ONE = "(float[b, 16] x) => (float[b, 16] y) {{ {} }}"
HALF = {"w": np.ones((D, D), np.float16)}
BYTES = {"w": np.ones((D, D), np.int8), "s": np.array(1, np.float32)}
SQUARE = {"w": np.eye(D, dtype=np.float32), "v": np.ones(D, np.float32)}
CAST = ONE.format("c = CastLike(w, x) y = MatMul(x, c)")
BROKEN = ONE.format("z = MatMul(x, w) y = com.microsoft.Unknown(z)")
UNCONVERTED: list[tuple[Precision, str, dict[str, np.ndarray], str, str]] = [
    ("float16", ONE.format("y = Mul(x, v)"), SQUARE, "unchanged", "float32"),
    *(("int8", text, SQUARE, "no_weights", "int8") for text in (
        ONE.format("y = Mul(x, w)"),  # no product
        "(float[16, 16] x) => (float[16, 16] y) { z = Mul(x, w) y = MatMul(z, x) }",  # no weight
        "(int64[b] x) => (float[b, 16] y) { y = Gather(w, x) }",  # a table alone
        "(float[b, 16] x) => (float[b] y) { y = MatMul(x, v) }",  # a vector is not a matrix
    )),
    *((precision, text, weights, "already", value) for precision in ("float16", "int8")
      for text, weights, value in (
          (CAST, HALF, "float16"),
          (CAST, {"w": np.ones((D, D), np.float64)}, "float64"),
          (ONE.format("d = DequantizeLinear(w, s) y = MatMul(x, d)"), BYTES, "DequantizeLinear"),
      )),
    ("int8", ONE.format("y = MatMul(x, w)"), {"w": np.full((D, D), np.nan, np.float32)}, "failed",
     "int8"),
    *((precision, BROKEN, SQUARE, "does_not_run", precision)
      for precision in ("float16", "bfloat16", "int8")),
]  # fmt: skip


@pytest.mark.parametrize(("precision", "text", "weights", "code", "value"), UNCONVERTED)
def test_convert_impossible_model_is_refused(
    precision: Precision, text: str, weights: dict[str, np.ndarray], code: str, value: str
):
    error = InvalidArgument if code == "already" else CannotRewrite
    with raises(error, f"precision.{code}", value):
        convert(graph(text, **weights), precision)


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
