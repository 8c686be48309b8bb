"""Shape inference agrees with ONNX Runtime at any axis lengths; unknown shapes have a reason."""

from __future__ import annotations

import tracemalloc

import numpy as np
import onnx_ir as ir
import pytest

from graph_passes.analysis.axes import bind_axes, input_shape, named_axes
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at, infer_shapes_small
from graph_passes.analysis.workload import Workload
from tests.graph_passes.graphs import PARTS, D, H, K, V, attention, feeds, graph, observing, only
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS


def infer(model: ir.Model, batch: int = 2, sequence: int = 5) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, Workload.of(batch, sequence)))


def shape_of(model: ir.Model, name: str = "out", **lengths: int) -> object:
    """The shape of a value by name, or None."""
    info = infer(model, **lengths)
    return next((t.shape for value, t in info.known.items() if value.name == name), None)


# Axes


def test_bind_axes_first_axes_are_batches() -> None:
    model = attention(inputs="float[n, s, 12] x, float[m, 1, 1, t] mask")
    assert named_axes(model.graph) == {"n": 0, "s": 1, "m": 0, "t": 3}
    assert bind_axes(model.graph, Workload.of(2, 5)) == {"n": 2, "s": 5, "m": 2, "t": 5}


@pytest.mark.parametrize(
    ("inputs", "bound"),
    [
        ("float[n, s, 12] x, int64[s] positions", {"n": 2, "s": 5}),
        ("float[n, s, 12] x, float[n, 3, p, 4] past_key, int64[n, e] encoder_attention_mask",
         {"n": 2, "s": 5, "p": 5, "e": 5}),
        ("float[seq_len, batch, 12] x, bool[batch, seq_len] mask", {"batch": 2, "seq_len": 5}),
        ("float[batch_tokens, batch, 12] x", {"batch": 5, "batch_tokens": 2}),
    ],
    ids=["kind of the first occurrence", "mask of an encoder is no total", "sequence first",
         "both names say batch"],
)  # fmt: skip
def test_bind_axes_of_several_inputs(inputs: str, bound: dict[str, int]) -> None:
    model = graph("\n out = Abs(x)", inputs=inputs)
    assert bind_axes(model.graph, Workload.of(2, 5)) == bound


@pytest.mark.parametrize(
    ("past", "total"), [("past_len", "total_len"), ("past_len", "mask_len"), ("dim_2", "dim_9")]
)
def test_bind_axes_mask_of_a_cache_has_past_and_new_length(past: str, total: str) -> None:
    """Shapes of the scores and the mask agree, with equal and with distinct lengths."""
    text = "".join((PARTS | CACHED_PARTS).values())
    cache = ", ".join(
        f"float[batch, {H}, {past}, {size}] past_{name}"
        for name, size in (("key", K), ("value", V))
    )
    inputs = f"float[batch, new, {D}] x, int64[batch, {total}] attention_mask, {cache}"
    model = graph(text, inputs=inputs)
    for distinct in (False, True):
        axes = bind_axes(model.graph, Workload.of(2, 5), distinct_lengths=distinct)
        assert axes[total] == axes[past] + axes["new"] and (axes["new"] != axes[past]) == distinct
        assert not infer_shapes_at(model, axes).unknown
    block = only(model)
    assert block.k.past is not None and block.k.past.value.name == "past_key"


CACHED_PARTS = {
    "k": """
        k0 = MatMul(x, Wk)
        k2 = Reshape(k0, heads)
        new_k = Transpose <perm = [0, 2, 1, 3]> (k2)
        k = Concat <axis = 2> (past_key, new_k)
        kT = Transpose <perm = [0, 1, 3, 2]> (k)""",
    "v": """
        v0 = MatMul(x, Wv)
        v2 = Reshape(v0, v_heads)
        new_v = Transpose <perm = [0, 2, 1, 3]> (v2)
        v = Concat <axis = 2> (past_value, new_v)""",
    "mask": """
        by_key = Unsqueeze(attention_mask, a1)
        by_head = Unsqueeze(by_key, a1)
        kept = Cast <to = 1> (by_head)
        hidden = Sub(one, kept)
        mask = Mul(hidden, low)
        m = Add(s, mask)""",
}
"""Parts of an attention over cached keys and values."""


def test_named_axes_unnamed_axis_is_named_by_input_and_position() -> None:
    model = graph("\n out = Abs(x)", inputs="float[?, ?, 12] x")
    assert named_axes(model.graph) == {"x[0]": 0, "x[1]": 1}
    assert input_shape(model.graph.inputs[0], {"x[0]": 2, "x[1]": 3}) == (2, 3, 12)


HOSTILE = ("9**9**9**9", "(" * 3000 + "s" + ")" * 3000, "Mod(1)", "s*" * 40)


@pytest.mark.parametrize(
    ("axis", "shape", "named"),
    [
        ("past + s", (2, 10, 12), {"n": 0, "past": 1, "s": 1}),
        *((name, (2, 5, 12), None)
          for name in ("batch size", "-1", "?", "I", "lambda", "a.b", "unk__0")),
        *((name, (2, 5, 12), {"n": 0, name: 1}) for name in HOSTILE),
        *((name, None, None)  # no integer, negative, too large
          for name in ("s / 2", "s - 9", "s*999999999*999999999")),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_infer_shapes_axis_expression_is_evaluated(
    axis: str, shape: tuple[int, ...] | None, named: dict[str, int] | None
) -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x")
    model.graph.inputs[0].shape = ir.Shape(["n", axis, 12])
    assert shape_of(model) == shape
    assert named is None or named_axes(model.graph) == named


@pytest.mark.parametrize(
    ("axes", "bound"),
    [
        (("batch-size", "seq-len"), {"batch-size": 2, "seq-len": 5}),
        (("n", "left-right"), {"n": 2, "left-right": 5}),
        (("n", "total-n"), {"n": 2, "total-n": 5}),
        (("n", "s-1"), {"n": 2, "s": 5}),
    ],
)
def test_bind_axes_hyphen_is_a_difference_only_of_axes_or_numbers(
    axes: tuple[str, str], bound: dict[str, int]
) -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x")
    model.graph.inputs[0].shape = ir.Shape([*axes, 12])
    assert bind_axes(model.graph, Workload.of(2, 5)) == bound
    assert shape_of(model) == (2, 4 if "s" in bound else 5, 12)


def test_bind_axes_difference_of_axes_is_evaluated() -> None:
    model = graph("\n out = Abs(x)", inputs="float[n, s, 12] x, float[n, total, past] y")
    model.graph.inputs[0].shape = ir.Shape(["n", "total-past", 12])
    assert input_shape(model.graph.inputs[0], {"n": 2, "total": 9, "past": 4}) == (2, 5, 12)
    assert named_axes(model.graph) == {"n": 0, "past": 1, "total": 1}


def test_named_axes_excludes_initializers_in_inputs() -> None:
    model = graph("\n out = MatMul(x, Wq)", inputs="float[n, s, 12] x")
    model.graph.inputs.append(model.graph.initializers["Wq"])
    assert named_axes(model.graph) == {"n": 0, "s": 1}
    assert shape_of(model) == (2, 5, 12)


# Inference


@pytest.mark.parametrize("layout", LAYOUTS)
def test_infer_shapes_equals_onnxruntime(layout: str) -> None:
    model = attention(constants=LAID_OUT, **LAYOUTS[layout])
    info = infer(model, batch=3, sequence=4)
    assert info.unknown == {}
    made = [node.outputs[0] for node in model.graph]
    arrays = feeds(model, batch=3, sequence=4)
    for value in made:
        value.type, value.shape = ir.TensorType(info.known[value].dtype), None
    session = observing(model, made, optimize=False)
    results = session.run(None, {i.name: arrays[i.name] for i in session.get_inputs()})
    for value, result in zip(made, results, strict=True):
        assert info.known[value].shape == result.shape, value.name
        assert info.known[value].dtype.numpy() == result.dtype, value.name


def test_infer_shapes_evaluates_shape_computation() -> None:
    body = """
        s = Shape <start = 1, end = 2> (x)
        twice = Add(s, s)
        row = Concat <axis = 0> (last, twice)
        out = Reshape(x, row)"""
    model = graph(body, inputs="float[n, s, 12] x", output="float[m, t] out")
    info = infer(model, batch=2, sequence=6)
    known = {v.name: f.constant for v, f in info.known.items() if f.constant is not None}
    numbers = {name: constant.tolist() for name, constant in known.items()}
    assert numbers == {"last": [-1], "s": [6], "twice": [12], "row": [-1, 12]}
    assert shape_of(model, "out", sequence=6) == (12, 12)


def test_infer_shapes_data_dependent_is_unknown() -> None:
    model = graph(
        "\n at = NonZero(x)\n out = Abs(at)", inputs="float[n, 12] x", output="int64[2, k] out"
    )
    reasons = {node.op_type: reason for node, reason in infer(model).unknown.items()}
    assert reasons == {
        "NonZero": "the shape of NonZero depends on data",
        "Abs": "its inputs have no known shape",
    }


def test_infer_shapes_random_values_are_not_constant() -> None:
    body = "\n r = RandomNormal <shape = [2, 3]> ()\n out = Abs(r)"
    model = graph(body, inputs="float[n] x", output="float[2, 3] out")
    info = infer(model)
    assert shape_of(model) == (2, 3)
    assert all(info.constant(node.outputs[0]) is None for node in model.graph)


@pytest.mark.parametrize(
    ("body", "shape"),
    [
        ("out = com.microsoft.Mystery(x)", (2, 5, 12)),  # one input: assumed to keep the shape
        ("out = com.microsoft.Gelu(x)", (2, 5, 12)),
        ("out = com.microsoft.FastGelu(x)", (2, 5, 12)),
        ("out = com.microsoft.QuickGelu(x)", (2, 5, 12)),
        ("out = com.microsoft.FusedMatMul <transB = 1> (x, x)", (2, 5, 5)),
        ("out = com.microsoft.FusedMatMul <transA = 1> (x, x)", (2, 12, 12)),
        ("out = com.microsoft.MatMulIntegerToFloat(x, Wq, scale, scale)", (2, 5, 12)),
        ("out, m, d, sum = com.microsoft.SkipLayerNormalization(x, x, bq)", (2, 5, 12)),
    ],
)
def test_infer_shapes_contributed_operator_has_shape(body: str, shape: tuple[int, ...]) -> None:
    model = graph(f"\n {body}")
    assert (shape_of(model), dict(infer(model).unknown)) == (shape, {})
    assert (shape_of(model, "sum"), shape_of(model, "m")) == (
        shape if "sum" in body else None,
        None,
    )


@pytest.mark.parametrize(
    ("body", "operator", "reason"),
    [
        ("out = com.microsoft.Mystery(x, x)", "Mystery", "Mystery is not an operator of ONNX"),
        ("out = com.microsoft.FusedMatMul(x, per_head)", "FusedMatMul", "no known shape"),
        ("out = com.microsoft.FusedMatMul(x, bq)", "FusedMatMul", "no known shape"),
        ("out = com.microsoft.FusedMatMul(x)", "FusedMatMul", "no known shape"),
        ("out = MatMul(x, Wo)", "MatMul", ""),
    ],
)
def test_infer_shapes_invalid_operator_is_unknown(body: str, operator: str, reason: str) -> None:
    ((node, actual),) = infer(graph(f"\n {body}")).unknown.items()
    assert node.op_type == operator and reason in actual


# Hostile graphs


def test_infer_shapes_large_constant_is_not_evaluated() -> None:
    """An Expand to 4 TB has a shape; its elements are not computed."""
    model = graph(
        "\n huge = Expand(one, much)\n out = Abs(huge)",
        inputs="float[n] x",
        output="float[a, b] out",
        constants={"much": np.array([10**6, 10**6], np.int64)},
    )
    assert shape_of(model) == (10**6, 10**6)


def test_infer_shapes_constant_nodes_have_shapes() -> None:
    body = """
        i = Constant <value_int = 3> ()
        f = Constant <value_floats = [1.0, 2.0]> ()
        t = Constant <value = float[2, 1] {1, 2}> ()
        s = Constant <value_strings = ["a", "b", "c"]> ()
        out = Abs(x)"""
    model = graph(body)
    assert [shape_of(model, name) for name in "ifts"] == [(), (2,), (2, 1), (3,)]


def test_infer_shapes_strings_have_no_elements() -> None:
    model = graph("\n s = Cast <to = 8> (one)\n out = Abs(x)")
    assert shape_of(model, "s") == ()
    tensors = [t for t in infer(model).known.values() if t.dtype == ir.DataType.STRING]
    assert tensors and all(tensor.constant is None for tensor in tensors)


@pytest.mark.parametrize(
    ("dtype", "body"),
    [
        *((dtype, "\n a = Mul(x, x)\n out = Abs(a)") for dtype in ("float16", "bfloat16")),
        ("float", "\n h = Cast <to = 16> (scale)\n y = Cast <to = 16> (x)\n out = Mul(y, h)"),
    ],
)
def test_infer_shapes_half_precision(dtype: str, body: str) -> None:
    output = "bfloat16" if dtype == "float" else dtype
    model = graph(body, inputs=f"{dtype}[n, 12] x", output=f"{output}[n, 12] out")
    assert shape_of(model) == (2, 12)


def test_infer_shapes_shapeless_inputs_are_unknown() -> None:
    model = attention()
    for value in model.graph.inputs:
        value.shape = None
    assert len(infer(model).unknown) == len(list(model.graph))


WINDOW = "\n size = Constant <value_int = 250000000> ()\n "
TILE = "Constant <value_ints = [1, 1, 40000, 40000]> ()"
VECTOR = "v = ConstantOfShape <value = float[1] {1}> (thousand)"
SQUARE = "one4 = Constant <value_ints = [1, 1, 1, 1]> ()\n k = Reshape(one, one4)"


@pytest.mark.parametrize(
    "body",
    [
        *(f"{WINDOW} big = {name}(size)" for name in
          ("HannWindow", "HammingWindow", "BlackmanWindow")),
        f'{VECTOR}\n big = Einsum <equation = "a,b,c->abc"> (v, v, v)',
        f'{VECTOR}\n big = Einsum <equation = "a,b,c,d,e->"> (v, v, v, v, v)',
        f"{WINDOW} l = Unsqueeze(size, zero)\n {VECTOR}\n big = CenterCropPad(v, l)",
        f"{SQUARE}\n big = ConvTranspose <output_shape = [30000, 30000]> (k, k)",
        f"{SQUARE}\n big = Conv <pads = [30000, 30000, 30000, 30000], strides = [60001, 60001]>"
        " (k, k)",
        f"{SQUARE}\n t = {TILE}\n big = Tile(k, t)",
        f"{SQUARE}\n t = {TILE}\n big = Expand(k, t)",
        f"t = {TILE}\n big = ConstantOfShape(t)",
        f"{VECTOR}\n p = Constant <value_ints = [2000000000, 0]> ()\n big = Pad(v, p)",
        "a = Constant <value = int32 {-2147483648}> ()\n b = Constant <value = int32 {2147483647}>"
        " ()\n c = Constant <value = int32 {1}> ()\n big = Range(a, b, c)",
        f"{VECTOR}\n s = Constant <value_ints = [1000, 1]> ()\n w = Reshape(v, s)\n"
        " s2 = Constant <value_ints = [1000, 1, 1]> ()\n b0 = Reshape(v, s2)\n"
        " b = Cast <to = 9> (b0)\n big = Where(b, w, v)",
    ],
)  # fmt: skip
def test_infer_shapes_large_output_is_not_evaluated(body: str) -> None:
    model = graph(
        f"\n {body}\n out = Abs(x)",
        inputs="float[n] x",
        output="float[n] out",
        constants={"thousand": np.array([1000]), "zero": np.array([0])},
    )
    tracemalloc.start()
    try:
        info = infer(model)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    big = next(value for node in model.graph for value in node.outputs if value.name == "big")
    assert info.constant(big) is None


@pytest.mark.parametrize(("attributes", "samples"), [("", 5 * 400), ("pads = [1, 1],", 5)])
def test_infer_shapes_small_of_audio_has_a_whole_window(attributes: str, samples: int) -> None:
    """A kernel is one sample longer than the input, for which ONNX infers one window."""
    model = ir.from_onnx_text(
        f"""<ir_version: 8, opset_import: ["" : 17]>
        g (float[n, 1, samples] x) => (float[n, 1, frames] y) <float[1, 1, 6] kernel = {{1, 1, 1, 1, 1, 1}}> {{
            y = Conv<{attributes} strides = [2]>(x, kernel)
        }}"""  # noqa: E501
    )
    info = infer_shapes_small(model, batch=2, sequence=5)
    assert info.axes["samples"] == samples
