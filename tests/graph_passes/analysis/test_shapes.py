"""Shapes are what ONNX Runtime makes them, at any lengths of the axes; the unknown is named."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import (
    ShapeInfo,
    bind_axes,
    infer_shapes_at,
    input_shape,
    named_axes,
)
from graph_passes.emit.editing import exposing
from tests.graph_passes.graphs import attention, feeds, graph
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS


def facts_of(model: ir.Model, batch: int = 2, sequence: int = 5) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, batch=batch, sequence=sequence))


def fact(model: ir.Model, name: str, **lengths: int) -> object:
    """The shape of a value by name, or None."""
    facts = facts_of(model, **lengths)
    return next((f.shape for value, f in facts.known.items() if value.name == name), None)


# Axes


def test_leading_axes_are_batches_and_all_others_sequences() -> None:
    model = attention(inputs="float[n, s, 12] x, float[m, 1, 1, t] mask")
    assert named_axes(model.graph) == {"n": 0, "s": 1, "m": 0, "t": 3}
    assert bind_axes(model.graph, batch=2, sequence=5) == {"n": 2, "s": 5, "m": 2, "t": 5}


def test_axis_that_leads_only_a_later_input_stays_a_sequence() -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x, int64[s] positions")
    assert bind_axes(model.graph, batch=2, sequence=5) == {"n": 2, "s": 5}


def test_axes_without_names_are_called_by_input_and_position() -> None:
    model = graph("\n out = Abs(x)", inputs="float[?, ?, 12] x")
    assert named_axes(model.graph) == {"x[0]": 0, "x[1]": 1}
    assert input_shape(model.graph.inputs[0], {"x[0]": 2, "x[1]": 3}) == (2, 3, 12)


def test_sums_of_axes_are_computed() -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x")
    model.graph.inputs[0].shape = ir.Shape(["n", "past + s", 12])
    assert named_axes(model.graph) == {"n": 0, "past": 1, "s": 1}
    assert fact(model, "out") == (2, 10, 12)


@pytest.mark.parametrize("name", ["batch size", "-1", "?", "I", "lambda", "a.b", "unk__0"])
def test_names_that_are_no_expressions_are_axes_all_the_same(name: str) -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x")
    model.graph.inputs[0].shape = ir.Shape(["n", name, 12])
    assert fact(model, "out") == (2, 5, 12)


@pytest.mark.parametrize("name", ["s / 2", "s - 9"])
def test_input_whose_length_does_not_exist_has_no_shape(name: str) -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x")
    model.graph.inputs[0].shape = ir.Shape(["n", name, 12])
    assert fact(model, "out") is None


def test_initializers_that_old_graphs_list_as_inputs_are_no_inputs() -> None:
    model = graph("\n out = MatMul(x, Wq)", inputs="float[n, s, 12] x")
    model.graph.inputs.append(model.graph.initializers["Wq"])
    assert named_axes(model.graph) == {"n": 0, "s": 1}
    assert fact(model, "out") == (2, 5, 12)


# Programs


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_shape_is_the_one_that_runs(layout: str) -> None:
    model = attention(constants=LAID_OUT, **LAYOUTS[layout])
    facts = facts_of(model, batch=3, sequence=4)
    assert facts.unknown == {}
    made = [node.outputs[0] for node in model.graph]
    arrays = feeds(model, batch=3, sequence=4)
    with exposing(model, made):
        for value in made:
            value.type, value.shape = ir.TensorType(facts.known[value].dtype), None
        session = open_session(model, threads=1, optimize=False)
        results = session.run(None, {i.name: arrays[i.name] for i in session.get_inputs()})
    for value, result in zip(made, results, strict=True):
        assert facts.known[value].shape == result.shape, value.name
        assert facts.known[value].dtype.numpy() == result.dtype, value.name


def test_program_of_shapes_is_run() -> None:
    body = """
        s = Shape <start = 1, end = 2> (x)
        twice = Add(s, s)
        row = Concat <axis = 0> (last, twice)
        out = Reshape(x, row)"""
    model = graph(body, inputs="float[n, s, 12] x", output="float[m, t] out")
    facts = facts_of(model, batch=2, sequence=6)
    known = {v.name: f.constant for v, f in facts.known.items() if f.constant is not None}
    numbers = {name: constant.tolist() for name, constant in known.items()}
    assert numbers == {"last": [-1], "s": [6], "twice": [12], "row": [-1, 12]}
    assert fact(model, "out", sequence=6) == (12, 12)


def test_what_depends_on_data_is_unknown_with_a_reason() -> None:
    model = graph(
        "\n at = NonZero(x)\n out = Abs(at)", inputs="float[n, 12] x", output="int64[2, k] out"
    )
    said = {node.op_type: reason for node, reason in facts_of(model).unknown.items()}
    assert said == {
        "NonZero": "the shape of NonZero depends on data",
        "Abs": "its inputs have no known shape",
    }


def test_random_numbers_are_no_constants() -> None:
    body = "\n r = RandomNormal <shape = [2, 3]> ()\n out = Abs(r)"
    model = graph(body, inputs="float[n] x", output="float[2, 3] out")
    facts = facts_of(model)
    assert fact(model, "out") == (2, 3)
    assert all(facts.constant(node.outputs[0]) is None for node in model.graph)


def test_operator_of_another_domain_is_unknown() -> None:
    model = graph("\n out = com.microsoft.Mystery(x, x)")
    assert list(facts_of(model).unknown.values()) == [
        "com.microsoft.Mystery is not an operator of ONNX"
    ]


def test_operator_of_another_domain_with_one_input_is_taken_to_keep_its_shape() -> None:
    model = graph("\n out = com.microsoft.Mystery(x)")
    assert (fact(model, "out"), dict(facts_of(model).unknown)) == ((2, 5, 12), {})


@pytest.mark.parametrize("name", ["Gelu", "FastGelu", "QuickGelu"])
def test_activations_of_onnx_runtime_keep_shapes(name: str) -> None:
    assert fact(graph(f"\n out = com.microsoft.{name}(x)"), "out") == (2, 5, 12)


def test_fused_products_and_norms_of_onnx_runtime() -> None:
    model = graph("\n out = com.microsoft.FusedMatMul <transB = 1> (x, x)")
    assert fact(model, "out") == (2, 5, 5)
    body = "\n out, mean, deviation, sum = com.microsoft.SkipLayerNormalization(x, x, bq)"
    assert fact(graph(body), "out") == fact(graph(body), "sum") == (2, 5, 12)
    assert fact(graph(body), "mean") is None


def test_wrong_shapes_are_unknown_and_no_error() -> None:
    model = graph("\n out = MatMul(x, Wo)")
    assert [node.op_type for node in facts_of(model).unknown] == ["MatMul"]


# Hostile graphs


def test_huge_constants_are_not_made() -> None:
    """An Expand to 4 TB has a shape; nobody needs its elements."""
    model = graph(
        "\n huge = Expand(one, much)\n out = Abs(huge)",
        inputs="float[n] x",
        output="float[a, b] out",
        constants={"much": np.array([10**6, 10**6], np.int64)},
    )
    assert fact(model, "out") == (10**6, 10**6)


def test_constants_of_every_kind() -> None:
    body = """
        i = Constant <value_int = 3> ()
        f = Constant <value_floats = [1.0, 2.0]> ()
        t = Constant <value = float[2, 1] {1, 2}> ()
        s = Constant <value_strings = ["a", "b", "c"]> ()
        out = Abs(x)"""
    model = graph(body)
    shapes = [fact(model, name) for name in ("i", "f", "t", "s")]
    assert shapes == [(), (2,), (2, 1), (3,)]


def test_strings_have_a_shape_and_no_elements() -> None:
    model = graph("\n s = Cast <to = 8> (one)\n out = Abs(x)")
    assert fact(model, "s") == ()
    assert all(
        f.constant is None for f in facts_of(model).known.values() if f.dtype.name == "STRING"
    )


def test_half_precision_of_both_kinds() -> None:
    for dtype in ("float16", "bfloat16"):
        model = graph(
            "\n a = Mul(x, x)\n out = Abs(a)",
            inputs=f"{dtype}[n, 12] x",
            output=f"{dtype}[n, 12] out",
        )
        assert fact(model, "out") == (2, 12)
    body = "\n h = Cast <to = 16> (scale)\n y = Cast <to = 16> (x)\n out = Mul(y, h)"
    assert fact(graph(body, output="bfloat16[n, s, 12] out"), "out") == (2, 5, 12)


def test_inputs_without_shape_or_type_are_unknown() -> None:
    model = attention()
    for value in model.graph.inputs:
        value.shape = None
    assert len(facts_of(model).unknown) == len(list(model.graph))
