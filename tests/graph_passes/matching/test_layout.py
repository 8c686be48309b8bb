"""LayoutReader: columns, gain, offset and scale of projections."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import permutations

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.analysis.axes import bind_axes
from graph_passes.analysis.shapes import infer_shapes_at
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import OutputProjection, Projection, Weight
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.output_projection import match_output_projection, only_consumer
from graph_passes.matching.projections import match_projection
from tests.graph_passes.graphs import D, H, K, graph, run, weights

COLUMNS = np.arange(H * K).reshape(H, K)


def reader_of(model: ir.Model) -> LayoutReader:
    info = infer_shapes_at(model, bind_axes(model.graph, Workload.of(2, 5)))
    return LayoutReader(info, dict(model.opset_imports))


def value_of(model: ir.Model, name: str) -> ir.Value:
    return next(v for node in model.graph for v in node.outputs if v.name == name)


def model_of(text: str, **constants: np.ndarray) -> ir.Model:
    return graph(
        text, inputs=f"float[b, s, {D}] x", output="float[b, h, s, k] out", constants=constants
    )


def projection(
    text: str, *, axes: Sequence[int] | None = None, **constants: np.ndarray
) -> Projection:
    model = model_of(text, **constants)
    return match_projection(reader_of(model), value_of(model, "out"), "query", axes=axes)


PLAIN = """
    q0 = MatMul(x, Wq)
    q1 = Add(q0, bq)
    q2 = Reshape(q1, heads)
    out = Transpose <perm = [0, 2, 1, 3]> (q2)"""


def test_match_projection_columns_are_adjacent_heads() -> None:
    read = projection(PLAIN)
    np.testing.assert_array_equal(read.columns, COLUMNS)
    np.testing.assert_array_equal(read.offset, weights()["bq"].reshape(H, K))
    np.testing.assert_array_equal(read.gain, np.ones((H, K)))
    assert (read.scale, read.layout, read.by_sequence) == (1.0, "B H T K", True)
    expected = weights()["Wq"].reshape(D, H, K).transpose(1, 0, 2)
    np.testing.assert_allclose(read.heads(), expected, atol=1e-7)
    assert read.num_distinct_heads == H
    assert [node.op_type for node in read.nodes] == ["MatMul", "Add", "Reshape", "Transpose"]


def test_match_projection_transposed_weight_has_same_matrix() -> None:
    read = projection(
        """
    x2 = Reshape(x, flat)
    q0 = Gemm <transB = 1> (x2, WqT)
    q2 = Reshape(q0, laid_out)
    out = Transpose <perm = [0, 2, 1, 3]> (q2)""",
        laid_out=np.array([2, 5, H, K], np.int64),
    )
    assert isinstance(read.weight, Weight) and read.weight.contracted == (1,)
    np.testing.assert_array_equal(read.matrix(), weights()["Wq"])
    assert (read.input.name, read.by_sequence) == ("x", True)  # not the flattened x2


def test_match_projection_separates_scale_gain_and_offset() -> None:
    """((q * 2 + b) * g) / 4 = 1/2 * (q * g + b g / 2)."""
    read = projection(
        """
    q0 = MatMul(x, Wq)
    q1 = Mul(q0, two)
    q2 = Add(q1, bq)
    q3 = Mul(q2, bk)
    q4 = Div(q3, four)
    q5 = Reshape(q4, heads)
    out = Transpose <perm = [0, 2, 1, 3]> (q5)""",
        two=np.array(2, np.float32),
        four=np.array([4], np.float32),
    )
    arrays = weights()
    assert read.scale == 0.5
    np.testing.assert_allclose(read.gain, arrays["bk"].reshape(H, K), rtol=1e-6)
    offset = (arrays["bq"] * arrays["bk"]).reshape(H, K) / 2
    np.testing.assert_allclose(read.offset, offset, rtol=1e-6)


def test_match_projection_added_constants_are_one_offset() -> None:
    text = PLAIN.replace("q1 = Add(q0, bq)", "q9 = Add(q0, bq)\n q1 = Sub(q9, bk)")
    expected = (weights()["bq"] - weights()["bk"]).reshape(H, K)
    np.testing.assert_allclose(projection(text).offset, expected, rtol=1e-6)


@pytest.mark.parametrize("perm", list(permutations(range(4))))
def test_match_projection_permuted_axes_match(perm: tuple[int, ...]) -> None:
    """q2 is (B, T, H, K); ``axes`` gives the positions of B, H, T and K."""
    axes = [perm.index(axis) for axis in (0, 2, 1, 3)]
    read = projection(PLAIN.replace("[0, 2, 1, 3]", str(list(perm))), axes=axes)
    np.testing.assert_array_equal(read.columns, COLUMNS)
    assert (read.axes, read.sequence_first) == (tuple(axes), False)


def test_match_projection_tokens_last_without_axes_raises() -> None:
    text = PLAIN.replace("perm = [0, 2, 1, 3]", "perm = [0, 2, 3, 1]")
    with pytest.raises(MatchFailure, match="not a multiple of the length 4"):
        projection(text)


def test_match_projection_repeated_heads_share_columns() -> None:
    read = projection(
        """
    k0 = MatMul(x, Wk1)
    k1 = Reshape(k0, one_head)
    k2 = Transpose <perm = [0, 2, 1, 3]> (k1)
    out = Expand(k2, three)""",
        three=np.array([1, 3, 1, 1], np.int64),
    )
    assert (read.num_heads, read.num_distinct_heads) == (3, 1)


@given(st.permutations(range(4)), st.permutations(range(4)))
def test_match_projection_two_permutations_match_or_raise(
    first: list[int], second: list[int]
) -> None:
    """They match only if the result is (B, H, T, K), and the columns agree with ONNX Runtime."""
    model = model_of(f"""
    q0 = MatMul(x, Wq)
    q1 = Reshape(q0, heads)
    q2 = Transpose <perm = {first}> (q1)
    out = Transpose <perm = {second}> (q2)""")
    x = np.random.default_rng(0).standard_normal((2, 5, D)).astype(np.float32)
    moved = [first[axis] for axis in second]
    try:
        read = match_projection(reader_of(model), value_of(model, "out"), "query")
    except MatchFailure:
        assert moved not in ([0, 2, 1, 3], [1, 2, 0, 3])
        return
    tokens = x.swapaxes(0, 1) if read.sequence_first else x  # the batch may be the sequence
    assert read.sequence_first == (moved[0] == 1)
    columns = (tokens @ weights()["Wq"])[:, :, read.columns]  # B T H K
    model.graph.outputs[0].shape = None
    got = run(model, {"x": x})
    np.testing.assert_allclose(got, columns.transpose(0, 2, 1, 3), atol=1e-4, rtol=0)


def test_match_projection_reshape_to_the_same_shape_changes_nothing() -> None:
    """Between a transpose of the tokens and their product, as in sequence-first layers."""
    model = model_of("""
    xt = Transpose <perm = [1, 0, 2]> (x)
    xr = Reshape(xt, merge)
    q0 = MatMul(xr, Wq)
    q1 = Reshape(q0, heads)
    out = Transpose <perm = [1, 2, 0, 3]> (q1)""")
    read = match_projection(reader_of(model), value_of(model, "out"), "query")
    np.testing.assert_array_equal(read.columns, COLUMNS)
    assert read.input.name == "x" and read.by_sequence and not read.sequence_first


UNMATCHED = {
    "tokens in another order": (
        PLAIN.replace("perm = [0, 2, 1, 3]", "perm = [2, 0, 1, 3]"),
        "the layout of the query reorders tokens",
    ),
    "one token only": (
        """
    q0 = MatMul(x, Wq)
    q2 = Reshape(q0, heads)
    q3 = Transpose <perm = [0, 2, 1, 3]> (q2)
    out = Slice(q3, n0, n1, a2)""",
        r"the query is laid out as \(2, 3, 1, 4\), not \(B, H, T, K\)",
    ),
    "reversed": (
        """
    q0 = MatMul(x, Wq)
    q2 = Reshape(q0, heads)
    q3 = Transpose <perm = [0, 2, 1, 3]> (q2)
    out = Slice(q3, last, before, a2, last)""",
        "the layout of the query reorders tokens",
    ),
    "a constant less the tokens": (
        PLAIN.replace("Add(q0, bq)", "Sub(bq, q0)"),
        "Sub subtracts the query from a constant",
    ),
    "a constant over the tokens": (
        PLAIN.replace("Add(q0, bq)", "Div(bq, q0)"),
        "Div is not supported between the query projection and the product",
    ),
    "times zero": (PLAIN.replace("Add(q0, bq)", "Mul(q0, zero)"), "by zero or infinity"),
    "over zero": (PLAIN.replace("Add(q0, bq)", "Div(q0, zero)"), "by zero or infinity"),
    "an activation": (
        PLAIN.replace("Add(q0, bq)", "Softsign(q0)"),
        "Softsign is not supported between the query projection and the product",
    ),
    "a product whose left side is the weight": (
        "\n xT = Transpose <perm = [0, 2, 1]> (x)\n q0 = MatMul(WqT, xT)\n out = Unsqueeze(q0, a1)",
        "the query is computed by MatMul, not from tokens and a matrix",
    ),
}


@pytest.mark.parametrize("case", UNMATCHED)
def test_match_projection_unsupported_node_raises(case: str) -> None:
    text, reason = UNMATCHED[case]
    with pytest.raises(MatchFailure) as refused:
        projection(text, before=np.array([-99], np.int64))
    assert re.search(reason, refused.value.reason)


def output_of(body: str, shape: str = f"b, {H}, s, {K}") -> OutputProjection | None:
    """The output projection of a context c0, (B, H, S, V)."""
    model = graph(body, inputs=f"float[{shape}] c0")
    order = (2, H, 5, K)
    labels = np.arange(np.prod(order)).reshape(order)
    return match_output_projection(reader_of(model), model.graph.inputs[0], labels, order)


MERGED = """
    c1 = Transpose <perm = {perm}> (c0)
    c = Reshape(c1, merge)
    o = MatMul(c, Wo12)
    out = Add(o, bo)"""


@pytest.mark.parametrize(
    ("perm", "rows", "sequence_first"),
    [
        ("[0, 2, 1, 3]", COLUMNS, False),
        ("[0, 2, 3, 1]", np.arange(H * K).reshape(K, H).T, False),
        ("[2, 0, 1, 3]", COLUMNS, True),
    ],
    ids=["heads side by side", "their sizes side by side", "sequences first"],
)
def test_match_output_projection_rows_by_head(
    perm: str, rows: np.ndarray, sequence_first: bool
) -> None:
    read = output_of(MERGED.format(perm=perm))
    assert read is not None
    np.testing.assert_array_equal(read.rows, rows)
    assert (read.output.name, read.sequence_first) == ("out", sequence_first)
    np.testing.assert_array_equal(read.offset(), weights()["bo"])


@pytest.mark.parametrize(
    "body",
    [
        MERGED.format(perm="[0, 3, 1, 2]"),
        MERGED.format(perm="[0, 2, 1, 3]").replace("MatMul(c, Wo12)", "Tanh(c)"),
        MERGED.format(perm="[0, 2, 1, 3]").replace("(c1, merge)", "(c1, merge)\n seen = Abs(c1)"),
        MERGED.format(perm="[0, 2, 1, 3]").replace(
            "MatMul(c", "com.microsoft.FusedMatMul <alpha = 2.0> (c"
        ),
    ],
    ids=["tokens and heads merged", "no product", "read elsewhere too", "a product with a factor"],
)
def test_match_output_projection_near_miss_returns_none(body: str) -> None:
    assert output_of(body) is None


def test_only_consumer_ignores_shape_nodes() -> None:
    model = graph("\n a = Abs(x)\n n = Shape(a)\n out = Reshape(a, n)")
    consumer = only_consumer(value_of(model, "a"))
    assert consumer is not None and consumer.op_type == "Reshape"
    assert only_consumer(value_of(model, "out")) is None  # an output of the graph
    two = graph("\n a = Abs(x)\n b = Neg(a)\n out = Add(a, b)")
    assert only_consumer(value_of(two, "a")) is None


def test_describe_returns_operator_and_name() -> None:
    node = ir.node("Abs", [])
    assert describe(node) == "Abs"
    node.name = "layer.0/abs"
    assert describe(node) == "Abs 'layer.0/abs'"
