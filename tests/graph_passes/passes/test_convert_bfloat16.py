"""ToBfloat16: what has a kernel on a GPU is computed in bfloat16; RoundInFloat32: without one."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

from attnserve.runtime.session import open_session
from graph_passes.errors import InvariantBroken
from graph_passes.passes.convert_bfloat16 import BFLOAT16, FLOAT, ToBfloat16
from graph_passes.passes.round_bfloat16 import RoundInFloat32

RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((4, 4)).astype(np.float32)
X = RANDOM.standard_normal((3, 4)).astype(np.float32)
HALF_ULP = 2.0**-8
"""The largest relative error of one rounding to 8 bits of mantissa."""
LOWEST = float(np.finfo(np.float32).min)
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)


def graph(body: str, *, opset: int = 18, **weights: np.ndarray) -> ir.Model:
    """A model of x to y, (b, 4) both, whose other free names are these weights."""
    head = body if body.startswith("(") else f"(float[b, 4] x) => (float[b, 4] y) {{ {body} }}"
    model = ir.from_onnx_text(
        f'<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g {head}'
    )
    for node in list(ir.traversal.RecursiveGraphIterator(model.graph)):
        for place, value in enumerate(node.inputs):
            if value is not None and value.name in weights:
                if value.name not in model.graph.initializers:
                    tensor = ir.tensor(weights[value.name], name=value.name)
                    value = ir.val(value.name, const_value=tensor)
                    model.graph.register_initializer(value)
                node.replace_input_with(place, model.graph.initializers[value.name or ""])
    return model


def turned(model: ir.Model, *exact: str) -> ir.Model:
    copy = model.clone()
    ToBfloat16(frozenset(exact))(copy)
    return copy


def rounded(model: ir.Model) -> ir.Model:
    copy = model.clone()
    RoundInFloat32()(copy)
    return copy


def run(model: ir.Model, **feed: np.ndarray) -> np.ndarray:
    return open_session(model).run(None, feed or {"x": X})[0]


def types(model: ir.Model) -> str:
    """Every node with the types that it reads and writes: f for float32, h for bfloat16."""
    letters = {FLOAT: "f", BFLOAT16: "h"}

    def of(values: tuple[ir.Value | None, ...]) -> str:
        return "".join(letters.get(v.dtype, "-") if v is not None else "" for v in values)

    return " ".join(f"{n.op_type}:{of(tuple(n.inputs))}>{of(tuple(n.outputs))}"
                    for n in ir.traversal.RecursiveGraphIterator(model.graph))  # fmt: skip


def as_bfloat16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


# ---- what becomes bfloat16 -----------------------------------------------------------------------


def test_a_product_reads_and_writes_bfloat16_between_inputs_and_outputs_in_float32():
    made = turned(graph("y = MatMul(x, w)", w=W))
    assert types(made) == "Cast:f>h MatMul:hh>h Cast:h>f"
    assert [(v.name, v.dtype) for v in (*made.graph.inputs, *made.graph.outputs)] == [
        ("x", FLOAT), ("y", FLOAT)]  # fmt: skip
    held = made.graph.initializers["w"].const_value
    assert held is not None
    np.testing.assert_array_equal(held.numpy(), W.astype(ml_dtypes.bfloat16))


def test_a_constant_that_bfloat16_holds_is_exact_and_others_are_off_by_half_a_bit_at_most():
    powers = np.float32([[1, 2, 0.5, 1.0078125]] * 4)
    np.testing.assert_array_equal(
        run(rounded(turned(graph("y = MatMul(x, w)", w=powers))), x=np.eye(4, dtype=np.float32)),
        powers,
    )
    close = run(rounded(turned(graph("y = MatMul(x, w)", w=W))), x=np.eye(4, dtype=np.float32))
    assert 0 < np.abs(close / W - 1).max() <= HALF_ULP


@pytest.mark.parametrize("name", ["Sin", "ReduceMean", "LeakyRelu", "other.Thing"])
def test_an_operator_without_a_kernel_stays_float32(name: str):
    attributes = "<axes = [1], keepdims = 1>" if name == "ReduceMean" else ""
    model = graph(f"z = MatMul(x, w) s = {name} {attributes} (z) y = Add(s, z)", opset=17, w=W)
    name = name.removeprefix("other.")
    assert types(turned(model)) == (
        f"Cast:f>h MatMul:hh>h Cast:h>f {name}:f>f Cast:f>h Add:hh>h Cast:h>f"
    )


@pytest.mark.parametrize(
    ("operator", "opset", "half"),
    [("Pow(z, z)", 14, False), ("Pow(z, z)", 15, True), ("Where(c, z, z)", 15, False),
     ("Where(c, z, z)", 16, True), ("MatMul(z, w)", 12, False),
     ("MatMul(z, w)", 13, True)],
)  # fmt: skip
def test_a_kernel_counts_from_its_opset_on(operator: str, opset: int, half: bool):
    model = graph(
        f"(float[b, 4] x, bool[b, 4] c) => (float[b, 4] y) {{ z = Neg(x) y = {operator} }}",
        opset=opset,
        w=W,
    )
    found = re.search(rf"{operator.partition('(')[0]}:-?(\w+)>", types(turned(model)))
    assert found is not None and found[1] == ("hh" if half else "ff")


def test_what_moves_numbers_moves_them_in_the_type_that_they_have():
    model = graph(
        """t = Transpose <perm = [0, 1]> (x) s = Sin(t) i = Identity(s) z = MatMul(i, w)
           u = Transpose <perm = [0, 1]> (z) y = Identity(u)""",
        w=W,
    )
    assert types(turned(model)) == (
        "Transpose:f>f Sin:f>f Identity:f>f Cast:f>h MatMul:hh>h Transpose:h>h Identity:h>h"
        " Cast:h>f"
    )


def test_a_value_is_cast_once_for_all_that_read_it():
    model = graph(
        "a = MatMul(x, w) b = MatMul(x, w) c = Sin(a) d = Cos(a) e = Add(c, d) y = Add(e, b)", w=W
    )
    assert types(turned(model)).count("Cast:f>h MatMul") == 1
    assert types(turned(model)).count("Cast:h>f") == 2  # of a, and of the output


def test_fused_attention_gelu_and_norms_are_computed_in_bfloat16_statistics_are_not():
    model = graph(
        """(float[b, s, 4] x) => (float[b, s, 4] y, float[b, s, 1] mean) {
           q = MatMul(x, w) k = MatMul(x, w)
           c = com.microsoft.MultiHeadAttention <num_heads = 2> (q, k, x)
           g = com.microsoft.Gelu(c) y, mean = LayerNormalization(g, v) }""",
        w=W, v=np.ones(4, np.float32),
    )  # fmt: skip
    assert types(turned(model)) == (
        "Cast:f>h MatMul:hh>h MatMul:hh>h MultiHeadAttention:hhh>h Gelu:h>h"
        " LayerNormalization:hh>hf Cast:h>f"
    )


def test_nodes_that_must_be_exact_stay_float32():
    model = graph("z = MatMul(x, w) y = Mul(z, z)", w=W)
    model.graph[1].name = "angle"
    assert types(turned(model, "angle")) == "Cast:f>h MatMul:hh>h Cast:h>f Mul:ff>f"
    model.graph[0].name = "product"
    assert not ToBfloat16(frozenset({"angle", "product"}))(model.clone()).modified


def test_a_constant_that_something_in_float32_reads_too_keeps_its_precision_there():
    model = graph("z = MatMul(x, w) s = Sin(w) y = MatMul(z, s)", w=W)
    made = turned(model)
    assert types(made).startswith("Cast:f>h Cast:f>h MatMul:hh>h Sin:f>f")
    np.testing.assert_array_equal(made.graph.initializers["w"].const_value.numpy(), W)


def test_a_constant_that_callers_may_replace_keeps_its_type():
    model = graph("y = MatMul(x, w)", w=W)
    model.graph.inputs.append(model.graph.initializers["w"])
    made = turned(model)
    assert [value.dtype for value in made.graph.inputs] == [FLOAT, FLOAT]
    assert types(made) == "Cast:f>h Cast:f>h MatMul:hh>h Cast:h>f"


def test_bodies_take_and_give_float32_and_compute_in_bfloat16():
    model = graph(
        """(float[b, 4] x, bool c) => (float[b, 4] y) { z = MatMul(x, w)
           r = If (c) <then_branch = t () => (float[b, 4] p) { a = MatMul(z, w) p = Sin(a) },
                       else_branch = e () => (float[b, 4] q) { q = Add(z, z) }>
           y = Add(r, z) }""",
        w=W,
    )
    made = turned(model)
    for graph_ in made.graph.subgraphs():
        assert [value.dtype for value in graph_.outputs] == [FLOAT]
    assert types(made).count("MatMul:hh>h") == 2 and "Sin:f>f" in types(made)
    for chosen in (True, False):
        feed = {"x": X, "c": np.array(chosen)}
        assert np.abs(run(rounded(made), **feed) - run(model, **feed)).max() < 0.1


# ---- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [(LOWEST, -LARGEST), (-LARGEST, -LARGEST), (-np.inf, -np.inf), (np.inf, np.inf), (-1e9, None)],
)
def test_what_is_finite_stays_finite_and_what_is_not_stays_that(
    value: float, expected: float | None
):
    made = turned(graph("z = MatMul(x, w) y = Add(z, m)", w=W, m=np.float32([value, 0, 0, 0])))
    held = made.graph.initializers["m"].const_value.numpy()[0].astype(np.float32)
    assert held == (expected if expected is not None else as_bfloat16(np.float32(value)))


@pytest.mark.parametrize("opset", [15, 16])
def test_a_mask_that_is_chosen_in_float32_is_finite_in_bfloat16(opset: int):
    """Where has no kernel before opset 16: its lowest float32 would be cast to -inf, and a row
    that sees nothing be NaN."""
    model = graph(
        """(float[b, 4] x, bool[b, 4] c) => (float[b, 4] y) {
           s = MatMul(x, w) m = Where(c, zero, low) l = Add(s, m) y = Softmax <axis = 1> (l) }""",
        opset=opset, w=W, zero=np.float32(0), low=np.float32(LOWEST),
    )  # fmt: skip
    hidden = np.array([[True, True, False, False], [False] * 4, [True] * 4])
    found = run(rounded(turned(model)), x=X, c=hidden)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found[0, 2:], 0)
    np.testing.assert_allclose(found, run(model, x=X, c=hidden), atol=0.05)


def test_a_mask_that_is_filled_in_by_a_node_is_finite_too():
    model = graph(
        """(float[b, 4] x) => (float[b, 4] y) { s = MatMul(x, w) n = Shape(x)
           m = ConstantOfShape <value = float[1] {-3.4028235e38}> (n) y = Add(s, m) }""",
        w=W,
    )
    assert np.isfinite(run(rounded(turned(model)))).all()


# ---- its numbers ---------------------------------------------------------------------------------

LAYER = """(float[b, s, 4] x) => (float[b, s, 4] y) {
    q = MatMul(x, w) t = Transpose <perm = [0, 2, 1]> (x) s0 = MatMul(q, t) s1 = Div(s0, root)
    p = Softmax <axis = -1> (s1) c = MatMul(p, x) r = Add(c, x) n = LayerNormalization(r, gain)
    e = Erf(n) o = Add(e, one) y = Mul(n, o) }"""
CONSTANTS = {"w": W, "root": np.float32(2), "one": np.float32(1), "gain": np.float32([1, 2, 3, 4])}


def test_rounding_in_float32_is_what_onnx_s_reference_computes_in_bfloat16():
    """Of what it computes a number at a time: its sums are in bfloat16."""
    model = graph("z = Mul(x, g) a = Add(z, x) y = Neg(a)", g=W[0])
    made = turned(model)
    expected = ReferenceEvaluator(ir.to_proto(made)).run(None, {"x": X})[0]
    np.testing.assert_array_equal(run(rounded(made)), expected)


def test_a_layer_is_off_by_some_roundings():
    model = graph(LAYER, **CONSTANTS)
    x = RANDOM.standard_normal((2, 5, 4)).astype(np.float32)
    exact, found = run(model, x=x), run(rounded(turned(model)), x=x)
    assert 0 < np.linalg.norm(found - exact) / np.linalg.norm(exact) < 4 * HALF_ULP


def test_every_result_is_rounded():
    made = rounded(turned(graph("a = MatMul(x, w) y = Tanh(a)", w=W)))
    assert types(made).count("Cast:h>f") == 3 and not {
        t.dtype for v in made.graph.initializers.values() if (t := v.const_value)
    } - {FLOAT}
    found = run(made)
    np.testing.assert_array_equal(found, as_bfloat16(found))


def test_a_graph_of_another_s_making_is_rounded_and_speaks_float32():
    model = ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 18]>
        g (bfloat16[b, 4] x) => (bfloat16[b, 4] y) { one = Constant <value = bfloat16[1] {16256}> ()
        z = Cast <to = 1> (x) h = Cast <to = 16> (z) y = Add(h, one) }""")
    made = rounded(model)
    assert [v.dtype for v in (*made.graph.inputs, *made.graph.outputs)] == [FLOAT, FLOAT]
    x = np.float32([[1, 2, 3.001, 1000.1]])
    np.testing.assert_array_equal(run(made, x=x), as_bfloat16(as_bfloat16(x) + 1))


def test_a_float32_graph_is_left_as_it_is():
    model = graph(LAYER, **CONSTANTS)
    nodes = list(model.graph)
    assert not RoundInFloat32()(model).modified
    assert list(model.graph) == nodes


def test_to_bfloat16_changing_an_output_breaks_the_invariant(monkeypatch: pytest.MonkeyPatch):
    from graph_passes.passes import convert_bfloat16 as bfloat16

    monkeypatch.setattr(bfloat16._Casts, "as_output", bfloat16._Casts.of)
    with pytest.raises(InvariantBroken, match="ToBfloat16 violates the invariant"):
        turned(graph("y = MatMul(x, w)", w=W))
