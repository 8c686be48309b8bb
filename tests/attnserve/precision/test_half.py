"""Conversion to float16 and bfloat16: masks, large numbers, and kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.compare import compare
from attnserve.context import Device, RunContext
from attnserve.literals import Precision
from attnserve.models.onnx_files import load_model, save_model
from attnserve.precision.convert import context_for, convert, on_cpu, precision_of
from attnserve.precision.half import LARGEST
from attnserve.runtime.inference_precision import computes_in_bfloat16
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidArgument, InvalidModel
from tests.attnserve.precision.graphs import (
    IDS,
    D,
    converted,
    error,
    every_product,
    graph,
    normal,
    operators,
    padded,
    product,
    run,
)
from tests.errors import raises


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


def test_bfloat16_keeps_weights_beyond_float16():
    weight = np.full((D, D), 1e30, np.float32)
    made = on_cpu(convert(product(w=weight), "bfloat16"))
    x = np.eye(D, dtype=np.float32)[None]
    np.testing.assert_allclose(run(made, x=x)[0], weight, rtol=2**-8)


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
