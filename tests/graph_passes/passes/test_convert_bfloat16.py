"""ToBfloat16 converts to bfloat16 for GPUs; RoundInFloat32 emulates it in float32."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from attnserve.runtime.session import open_session
from graph_passes.analyses import Analyses
from graph_passes.errors import InvariantBroken
from graph_passes.passes.convert_bfloat16 import BFLOAT16, FLOAT, ToBfloat16
from graph_passes.passes.round_bfloat16 import RoundInFloat32
from tests.errors import raises
from tests.onnx_text import with_weights

RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((4, 4)).astype(np.float32)
X = RANDOM.standard_normal((3, 4)).astype(np.float32)
HALF_ULP = 2.0**-8
"""The largest relative error of one rounding to 8 bits of mantissa."""
LOWEST = float(np.finfo(np.float32).min)
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def graph(body: str, *, opset: int = 18, **weights: np.ndarray) -> ir.Model:
    """A model from x (b, 4) to y (b, 4) with these weights as initializers."""
    head = body if body.startswith("(") else f"(float[b, 4] x) => (float[b, 4] y) {{ {body} }}"
    versions = f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
    return with_weights(f"{versions} g {head}", **weights)


def converted(model: ir.Model, *float_nodes: str) -> ir.Model:
    copy = model.clone()
    ToBfloat16(frozenset(float_nodes))(copy)
    return copy


def rounded(model: ir.Model) -> ir.Model:
    copy = model.clone()
    RoundInFloat32()(copy)
    return copy


def run(model: ir.Model, **feed: np.ndarray) -> np.ndarray:
    return open_session(model).run(None, feed or {"x": X})[0]


def types(model: ir.Model) -> str:
    """All nodes with their input and output types: f for float32, h for bfloat16."""
    letters = {FLOAT: "f", BFLOAT16: "h"}

    def of(values: tuple[ir.Value | None, ...]) -> str:
        return "".join(letters.get(v.dtype, "-") if v is not None else "" for v in values)

    return " ".join(
        f"{n.op_type}:{of(tuple(n.inputs))}>{of(tuple(n.outputs))}" for n in model.graph.all_nodes()
    )


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- converted operators -------------------------------------------------------------------------


def test_to_bfloat16_product_is_cast_at_inputs_and_outputs():
    model16 = converted(graph("y = MatMul(x, w)", w=W))
    assert types(model16) == "Cast:f>h MatMul:hh>h Cast:h>f"
    assert [(v.name, v.dtype) for v in (*model16.graph.inputs, *model16.graph.outputs)] == [
        ("x", FLOAT), ("y", FLOAT)]  # fmt: skip
    constant = model16.graph.initializers["w"].const_value
    assert constant is not None
    np.testing.assert_array_equal(constant.numpy(), W.astype(ml_dtypes.bfloat16))


def test_to_bfloat16_constants_are_rounded():
    powers = np.float32([[1, 2, 0.5, 1.0078125]] * 4)
    np.testing.assert_array_equal(
        run(rounded(converted(graph("y = MatMul(x, w)", w=powers))), x=np.eye(4, dtype=np.float32)),
        powers,
    )
    close = run(rounded(converted(graph("y = MatMul(x, w)", w=W))), x=np.eye(4, dtype=np.float32))
    assert 0 < np.abs(close / W - 1).max() <= HALF_ULP


@pytest.mark.parametrize("name", ["Sin", "ReduceMean", "LeakyRelu", "other.Thing"])
def test_to_bfloat16_operator_without_kernel_stays_float32(name: str):
    attributes = "<axes = [1], keepdims = 1>" if name == "ReduceMean" else ""
    model = graph(f"z = MatMul(x, w) s = {name} {attributes} (z) y = Add(s, z)", opset=17, w=W)
    name = name.removeprefix("other.")
    assert types(converted(model)) == (
        f"Cast:f>h MatMul:hh>h Cast:h>f {name}:f>f Cast:f>h Add:hh>h Cast:h>f"
    )


@pytest.mark.parametrize(
    ("operator", "opset", "half"),
    [("Pow(z, z)", 14, False), ("Pow(z, z)", 15, True), ("Where(c, z, z)", 15, False),
     ("Where(c, z, z)", 16, True), ("MatMul(z, w)", 12, False),
     ("MatMul(z, w)", 13, True)],
)  # fmt: skip
def test_to_bfloat16_kernel_needs_its_opset(operator: str, opset: int, half: bool):
    model = graph(
        f"(float[b, 4] x, bool[b, 4] c) => (float[b, 4] y) {{ z = Neg(x) y = {operator} }}",
        opset=opset,
        w=W,
    )
    result = re.search(rf"{operator.partition('(')[0]}:-?(\w+)>", types(converted(model)))
    assert result is not None and result[1] == ("hh" if half else "ff")


def test_to_bfloat16_moves_keep_the_input_type():
    model = graph(
        """t = Transpose <perm = [0, 1]> (x) s = Sin(t) i = Identity(s) z = MatMul(i, w)
           u = Transpose <perm = [0, 1]> (z) y = Identity(u)""",
        w=W,
    )
    assert types(converted(model)) == (
        "Transpose:f>f Sin:f>f Identity:f>f Cast:f>h MatMul:hh>h Transpose:h>h Identity:h>h"
        " Cast:h>f"
    )


def test_to_bfloat16_value_is_cast_once():
    model = graph(
        "a = MatMul(x, w) b = MatMul(x, w) c = Sin(a) d = Cos(a) e = Add(c, d) y = Add(e, b)", w=W
    )
    assert types(converted(model)).count("Cast:f>h MatMul") == 1
    assert types(converted(model)).count("Cast:h>f") == 2  # of a, and of the output


def test_to_bfloat16_fused_operators_keep_statistics_in_float32():
    model = graph(
        """(float[b, s, 4] x) => (float[b, s, 4] y, float[b, s, 1] mean) {
           q = MatMul(x, w) k = MatMul(x, w)
           c = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, x)
           g = com.microsoft.Gelu(c) y, mean = LayerNormalization(g, v) }""",
        w=W,
        v=np.ones(4, np.float32),
    )
    assert types(converted(model)) == (
        "Cast:f>h MatMul:hh>h MatMul:hh>h MultiHeadAttention:hhh>h Gelu:h>h"
        " LayerNormalization:hh>hf Cast:h>f"
    )


def test_to_bfloat16_exact_nodes_stay_float32():
    model = graph("z = MatMul(x, w) y = Mul(z, z)", w=W)
    model.graph[1].name = "angle"
    assert types(converted(model, "angle")) == "Cast:f>h MatMul:hh>h Cast:h>f Mul:ff>f"
    model.graph[0].name = "product"
    assert not ToBfloat16(frozenset({"angle", "product"}))(model.clone()).modified


def test_to_bfloat16_constant_with_float32_reader_keeps_its_precision():
    model = graph("z = MatMul(x, w) s = Sin(w) y = MatMul(z, s)", w=W)
    model16 = converted(model)
    assert types(model16).startswith("Cast:f>h Cast:f>h MatMul:hh>h Sin:f>f")
    np.testing.assert_array_equal(model16.graph.initializers["w"].const_value.numpy(), W)


def test_to_bfloat16_replaceable_constant_keeps_its_type():
    model = graph("y = MatMul(x, w)", w=W)
    model.graph.inputs.append(model.graph.initializers["w"])
    model16 = converted(model)
    assert [value.dtype for value in model16.graph.inputs] == [FLOAT, FLOAT]
    assert types(model16) == "Cast:f>h Cast:f>h MatMul:hh>h Cast:h>f"


def test_to_bfloat16_bodies_have_float32_outputs():
    model = graph(
        """(float[b, 4] x, bool c) => (float[b, 4] y) { z = MatMul(x, w)
           r = If (c) <then_branch = t () => (float[b, 4] p) { a = MatMul(z, w) p = Sin(a) },
                       else_branch = e () => (float[b, 4] q) { q = Add(z, z) }>
           y = Add(r, z) }""",
        w=W,
    )
    model16 = converted(model)
    for body in model16.graph.subgraphs():
        assert [value.dtype for value in body.outputs] == [FLOAT]
    assert types(model16).count("MatMul:hh>h") == 2 and "Sin:f>f" in types(model16)
    for chosen in (True, False):
        feed = {"x": X, "c": np.array(chosen)}
        assert np.abs(run(rounded(model16), **feed) - run(model, **feed)).max() < 0.1


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(LOWEST, -LARGEST), (-LARGEST, -LARGEST), (-np.inf, -np.inf), (np.inf, np.inf), (-1e9, None)],
)
def test_to_bfloat16_constants_stay_finite_or_infinite(value: float, expected: float | None):
    model16 = converted(
        graph("z = MatMul(x, w) y = Add(z, m)", w=W, m=np.float32([value, 0, 0, 0]))
    )
    constant = model16.graph.initializers["m"].const_value.numpy()[0].astype(np.float32)
    assert constant == (expected if expected is not None else as_bfloat16(np.float32(value)))


@pytest.mark.parametrize("opset", [15, 16])
def test_to_bfloat16_selected_mask_is_finite(opset: int):
    """Where has no kernel before opset 16: the lowest float32 must not be cast to -inf."""
    model = graph(
        """(float[b, 4] x, bool[b, 4] c) => (float[b, 4] y) {
           s = MatMul(x, w) m = Where(c, zero, low) l = Add(s, m) y = Softmax <axis = 1> (l) }""",
        opset=opset, w=W, zero=np.float32(0), low=np.float32(LOWEST),
    )  # fmt: skip
    hidden = np.array([[True, True, False, False], [False] * 4, [True] * 4])
    result = run(rounded(converted(model)), x=X, c=hidden)
    assert np.isfinite(result).all()
    np.testing.assert_array_equal(result[0, 2:], 0)
    np.testing.assert_allclose(result, run(model, x=X, c=hidden), atol=0.05)


def test_to_bfloat16_constant_of_shape_mask_is_finite():
    model = graph(
        """(float[b, 4] x) => (float[b, 4] y) { s = MatMul(x, w) n = Shape(x)
           m = ConstantOfShape <value = float[1] {-3.4028235e38}> (n) y = Add(s, m) }""",
        w=W,
    )
    assert np.isfinite(run(rounded(converted(model)))).all()


# ---- numerical results ---------------------------------------------------------------------------

LAYER = """(float[b, s, 4] x) => (float[b, s, 4] y) {
    q = MatMul(x, w) t = Transpose <perm = [0, 2, 1]> (x) s0 = MatMul(q, t) s1 = Div(s0, root)
    p = Softmax <axis = -1> (s1) c = MatMul(p, x) r = Add(c, x) n = LayerNormalization(r, gain)
    e = Erf(n) o = Add(e, one) y = Mul(n, o) }"""
CONSTANTS = {"w": W, "root": np.float32(2), "one": np.float32(1), "gain": np.float32([1, 2, 3, 4])}


def test_round_in_float32_equals_the_onnx_reference():
    """The model has no sums, which the ONNX reference rounds at each step."""
    model = graph("z = Mul(x, g) a = Add(z, x) y = Neg(a)", g=W[0])
    model16 = converted(model)
    expected = ReferenceEvaluator(ir.to_proto(model16)).run(None, {"x": X})[0]
    np.testing.assert_array_equal(run(rounded(model16)), expected)


def test_to_bfloat16_layer_error_is_a_few_roundings():
    model = graph(LAYER, **CONSTANTS)
    x = RANDOM.standard_normal((2, 5, 4)).astype(np.float32)
    exact, result = run(model, x=x), run(rounded(converted(model)), x=x)
    assert 0 < np.linalg.norm(result - exact) / np.linalg.norm(exact) < 4 * HALF_ULP


def test_round_in_float32_rounds_all_results():
    model16 = rounded(converted(graph("a = MatMul(x, w) y = Tanh(a)", w=W)))
    assert types(model16).count("Cast:h>f") == 3 and not {
        t.dtype for v in model16.graph.initializers.values() if (t := v.const_value)
    } - {FLOAT}
    result = run(model16)
    np.testing.assert_array_equal(result, as_bfloat16(result))


def test_round_in_float32_converts_inputs_and_outputs():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 18]>
        g (bfloat16[b, 4] x) => (bfloat16[b, 4] y) { one = Constant <value = bfloat16[1] {16256}> ()
        z = Cast <to = 1> (x) h = Cast <to = 16> (z) y = Add(h, one) }""")
    model16 = rounded(model)
    assert [v.dtype for v in (*model16.graph.inputs, *model16.graph.outputs)] == [FLOAT, FLOAT]
    x = np.float32([[1, 2, 3.001, 1000.1]])
    np.testing.assert_array_equal(run(model16, x=x), as_bfloat16(as_bfloat16(x) + 1))


def test_round_in_float32_of_float32_graph_changes_nothing():
    model = graph(LAYER, **CONSTANTS)
    nodes = list(model.graph)
    assert not RoundInFloat32()(model).modified
    assert list(model.graph) == nodes


def test_to_bfloat16_changing_an_output_breaks_the_invariant():
    class ToBfloat16Outputs(ToBfloat16):
        def rewrite_graph(self, analyses: Analyses) -> bool:
            modified = super().rewrite_graph(analyses)
            analyses.model.graph.outputs[0].dtype = BFLOAT16
            return modified

    with raises(InvariantBroken, "internal.invariant", "ToBfloat16Outputs"):
        ToBfloat16Outputs()(graph("y = MatMul(x, w)", w=W))
