"""Conversion to each precision: results, interface, blocks that stay float32, and refusals."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.compare import compare
from attnserve.context import Device
from attnserve.data.datasets import load_inputs
from attnserve.literals import Precision
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.models.quantized import batch_invariant
from attnserve.planning.served_graph.equality import TOLERANCES, distance
from attnserve.precision.convert import convert, convert_alone, on_cpu, precision_of
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.session import open_session
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.invariants import interface
from tests.attnserve.precision.graphs import (
    HEAD,
    INSIDE,
    LENGTHS,
    OUTSIDE,
    VOCABULARY,
    D,
    attention,
    converted,
    error,
    full,
    graph,
    normal,
    operators,
    padded,
    product,
    rounding,
    run,
)
from tests.errors import raises


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


def test_convert_fused_export_is_close(tiny_export: Callable[..., Path], sentences: Path):
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


@pytest.mark.parametrize(
    ("bodies", "mask", "operator"),
    [(INSIDE, "key", "QAttention"), (INSIDE, "bias", "Attention"),
     (OUTSIDE, "key", "MultiHeadAttention"), (OUTSIDE, "bias", "MultiHeadAttention")],
)  # fmt: skip
@pytest.mark.parametrize("precision", ["float16", "int8", "int8-full"])
def test_convert_fused_attention_keeps_its_mask(
    bodies: dict[str, str], mask: str, operator: str, precision: Precision
):
    """QAttention has no input for attention_bias; the tool would drop it."""
    bound = 5e-3 if precision == "float16" else rounding(precision, 2)
    made = converted(attention(bodies[mask], mask), precision, bound, **padded(mask))
    assert operators(made)[operator.removeprefix("Q") if precision == "float16" else operator] == 1
    assert precision.removesuffix("-full") in precision_of(made)


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


@pytest.mark.parametrize(
    ("precision", "calibrated"),
    [("float32", False), ("float16", False), ("bfloat16", False), ("int8", True), ("int8", False),
     ("int4", True), ("int4", False),
     ("int8-full", True)],
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


@pytest.mark.parametrize("precision", ["bfloat16-cpu", "int8-full-bfloat16"])
def test_convert_text_alone_equals_text_in_any_batch_in_openvino(
    encoder: ir.Model, precision: Precision, cpu_with: Callable[..., None]
):
    """Within the bound of bfloat16, whatever the other rows and the padding are."""
    pytest.importorskip("openvino")
    cpu_with(bfloat16=True)
    batch = full(encoder)
    made = convert(encoder, precision, [batch])
    session = open_session(made, Device(threads=1, runtime="openvino"))
    assert batch_invariant(made)
    bound = TOLERANCES[ir.DataType.BFLOAT16]
    together = session.run(None, batch)[0]
    others = {name: np.roll(array, 1, axis=0)[:3] for name, array in batch.items()}
    in_others = session.run(None, others)[0]
    for row, length in enumerate(LENGTHS):
        alone = session.run(None, {n: a[row : row + 1] for n, a in batch.items()})[0][0]
        short = session.run(None, {n: a[row : row + 1, :length] for n, a in batch.items()})[0][0]
        found = [(alone, together[row]), (short, together[row, :length])]
        if row < 2:
            found.append((alone, in_others[row + 1]))
        for expected, actual in found:
            cosine, difference = distance(expected, actual)
            assert cosine >= bound.cosine and difference <= bound.error


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


# ---- blocks that stay float32 --------------------------------------------------------------------


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
def test_convert_alone_converts_one_group_and_no_table(encoder: ir.Model, precision: Precision):
    names, batch = blocks_of(encoder), full(encoder)
    groups = [[name] for name in names]
    expected = open_session(encoder).run(None, batch)[0]
    found = list(convert_alone(encoder, precision, [batch], groups))
    whole = open_session(convert(encoder, precision, [batch])).run(None, batch)[0]
    for made in found:
        assert weight_bytes(made) < weight_bytes(encoder)
        output = open_session(made).run(None, batch)[0]
        assert 0 < error(expected, output) < error(expected, whole)
    sizes = [operators(made)["DequantizeLinear"] for made in found]
    assert not any(sizes)  # the tables of embeddings stay float


def test_convert_unknown_float_block_is_refused(encoder: ir.Model):
    with raises(InvalidArgument, "precision.no_block", "layer.99"):
        convert(encoder, "int8", [full(encoder)], float_blocks=["layer.99"])


# ---- refusals ------------------------------------------------------------------------------------


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
