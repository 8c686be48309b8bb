"""find_feed_forward in many notations; PruneNeurons gives the outputs of masked neurons."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from attnserve.context import ONE_THREAD
from attnserve.runtime.session import open_session
from graph_passes.analysis.constants import constant_array, constant_type
from graph_passes.analysis.cost import model_cost
from graph_passes.analysis.parameters import parameters
from graph_passes.blocks import FeedForwardBlock
from graph_passes.emit.editing import Inserter
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.prune_neurons import PruneNeurons, neurons_refusal
from tests.architectures import Cell
from tests.errors import raises
from tests.graph_passes.feed_forward import (
    DOWN,
    DYNAMIC,
    FORMS,
    GEGLU,
    LENGTHS,
    NAME,
    PACKED,
    RELU,
    UP,
    F,
    build,
    constants,
)
from tests.graph_passes.graphs import PLAIN_INPUT, D, assert_unchanged, feeds, graph, run, text_of

EXACT = 1e-5
"""Pruned and masked models differ in the order of sums only."""

MASK = np.arange(F) % 3 != 1
KEPT = int(MASK.sum())


def only(model: ir.Model) -> FeedForwardBlock:
    (block,) = find_feed_forward(model)
    return block


def neurons_of(model: ir.Model) -> dict[str, int]:
    return {block.name: block.num_neurons for block in find_feed_forward(model)}


def masked(model: ir.Model, masks: Mapping[str, Sequence[int] | np.ndarray]) -> ir.Model:
    """Set the rows of W_2 to zero where a mask is zero, so that these neurons have no effect."""
    for block in find_feed_forward(model):
        if block.name in masks:
            array = constant_array(block.second.weight)
            array = array.astype(constant_type(block.second.weight).numpy())
            pruned = np.asarray(masks[block.name]) == 0
            np.moveaxis(array, block.second.contracted[0], 0)[pruned] = 0
            make = Inserter(block.graph, block.product, f"{block.name}/masked")
            block.product.replace_input_with(1, make.constant(array, "weight"))
    return model


def assert_equals_masked(
    make: Callable[[], ir.Model],
    masks: Mapping[str, Sequence[int] | np.ndarray],
    arrays: Mapping[str, np.ndarray] | None = None,
    atol: float = EXACT,
) -> ir.Model:
    """Check that pruned and masked models have equal outputs, other than the original; prune."""
    given = feeds(make()) if arrays is None else arrays
    expected = run(masked(make(), masks), given)
    model = make()
    assert PruneNeurons(masks)(model).modified
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    output = run(model, given)
    assert output.dtype == expected.dtype
    np.testing.assert_allclose(output, expected, atol=atol, rtol=atol)
    assert np.abs(expected.astype(float) - run(make(), given)).max() > 10 * atol
    kept = {name: int(np.sum(mask)) for name, mask in masks.items()}
    assert neurons_of(model) == neurons_of(make()) | kept
    return model


# ---- matching ----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_find_feed_forward_form_matches_and_pruning_equals_masking(form: str) -> None:
    block = only(build(FORMS[form]))
    arrays = constants()
    assert (block.name, block.num_neurons, block.input_size) == (NAME, F, D)
    assert block.x.name == "x"
    assert len(block.first) == len(block.products) == (2 if "gated" in form else 1)
    packed = "packed" in form
    assert block.is_gated == (packed or "gated" in form)
    assert neurons_refusal(block) is None
    scale = 0.5 if form == "FusedMatMul" else 1
    np.testing.assert_allclose(block.first[0].matrix(), scale * arrays["Wgu" if packed else "W1"])
    scale = 0.5 if "transposed" in form else 1
    np.testing.assert_allclose(block.second.matrix(), scale * arrays["W2"])
    assert (block.bias is None) == ("b2" not in FORMS[form])
    assert block.output.name == (
        "o" if "Gemm" in form or "out_shape" in FORMS[form] or "each flattened" in form else "out"
    )

    def with_shapes() -> ir.Model:
        return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(build(FORMS[form]))))

    model = assert_equals_masked(with_shapes, {NAME: MASK})
    by_neuron = (len(block.first) * D + len(block.constants_by_neuron)) * (1 + packed) + D
    assert parameters(build(FORMS[form])) - parameters(model) == (F - KEPT) * by_neuron
    values = [*model.graph.initializers.values(), *(v for n in model.graph for v in n.outputs)]
    assert not any({F, 2 * F} & {*(value.shape or ())} for value in values)


def test_feed_forward_block_equation_equals_graph() -> None:
    model = build(RELU)
    block, arrays = only(model), feeds(model)
    (b1,) = block.constants_by_neuron
    assert block.bias is not None
    hidden = np.maximum(arrays["x"] @ block.first[0].matrix() + constant_array(b1.value), 0)
    expected = hidden @ block.second.matrix() + constant_array(block.bias)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert block.hidden.name == "a"
    assert [node.op_type for node in block.nodes] == ["Add", "Relu"]
    gated = only(build(FORMS["gated by GELU"]))
    assert [operand.value.name for operand in gated.constants_by_neuron] == ["b1", "bu"]


def test_find_feed_forward_layers_are_in_order_of_execution() -> None:
    blocks = find_feed_forward(layers(3))
    assert [block.name for block in blocks] == [f"feed_forward_{index}" for index in range(3)]
    assert [block.x.name for block in blocks] == ["x", "x_1", "x_2"]


def test_find_feed_forward_name_is_common_path() -> None:
    by_node = build(RELU)
    by_node.graph[0].name = "/model/layers.3/mlp/up/MatMul"
    by_node.graph[3].name = "/model/layers.3/mlp/down/MatMul"
    assert only(by_node).name == "model.layers.3.mlp"
    by_weight = build(RELU)
    for old, new in (("b1", "model.layers.3.up.bias"), ("W2", "model.layers.3.down.weight")):
        by_weight.graph.initializers[old].name = new
    assert only(by_weight).name == "model.layers.3"


def test_find_feed_forward_if_body_matches() -> None:
    body = RELU.replace("out = ", "done = ").replace("\n", "\n    ")
    text = f"""
        out = If (choice) <
            then_branch = yes () => (float[batch, sequence, {D}] done) {{{body}
            }},
            else_branch = no () => (float[batch, sequence, {D}] out_else) {{
                out_else = Identity(x)
            }}>"""

    def make() -> ir.Model:
        return build(text, inputs=f"{PLAIN_INPUT}, bool choice")

    arrays = feeds(build(RELU)) | {"choice": np.array(True)}
    assert only(make()).graph is not make().graph
    assert_equals_masked(make, {NAME: MASK}, arrays)


# ---- near misses --------------------------------------------------------------------------------

OUT = f"float[batch, sequence, {D}] out"
WIDE = f"float[batch, sequence, {F}]"
NEAR_MISSES: dict[str, tuple[str, str]] = {
    "hidden has another reader": (f"{RELU}\n shown = Neg(a)", f"{OUT}, {WIDE} shown"),
    "pre-activation has another reader": (f"{RELU}\n shown = Neg(h0)", f"{OUT}, {WIDE} shown"),
    "hidden is an output": (RELU, f"{OUT}, {WIDE} a"),
    "two products read hidden": (f"{RELU}\n shown = MatMul(a, Wn)",
                                 f"{OUT}, float[batch, sequence, 5] shown"),
    "its shape is an output": (f"{RELU}\n shown = Shape(a)", f"{OUT}, int64[3] shown"),
    "its width is used in arithmetic": (
        f"{RELU}\n s = Shape(a)\n s2 = Gather(s, last)\n shown = Mul(s2, s2)",
        f"{OUT}, int64[1] shown",
    ),
    "linear only": (UP + "\n m = Mul(h, half)\n d = Div(m, six)\n n = Neg(d)\n a = Identity(n)"
                    + DOWN, OUT),
    "a sum of two products": (UP + "\n u = MatMul(x, Wu)\n a = Add(h, u)" + DOWN, OUT),
    "LayerNormalization between": (UP + "\n r = Relu(h)\n a = LayerNormalization(r, gains, b1)"
                                   + DOWN, OUT),
    "LayerNormalization by hand": (
        UP + "\n r = Relu(h)\n m = ReduceMean(r, last)\n c = Sub(r, m)\n c2 = Mul(c, c)"
        "\n v = ReduceMean(c2, last)\n d = Sqrt(v)\n n = Div(c, d)\n a = Mul(n, gains)" + DOWN, OUT,
    ),
    "softmax between": (UP + "\n a = Softmax <axis = -1> (h)" + DOWN, OUT),
    "columns are mixed": (UP + "\n r = Relu(h)\n r1 = Reshape(r, thirds)\n r2 = Transpose"
                          "<perm = [0, 1, 3, 2]> (r1)\n a = Reshape(r2, joined)" + DOWN, OUT),
    "gate of other tokens": ("\n x1 = Neg(x)\n g = MatMul(x1, W1)\n g1 = Sigmoid(g)"
                             "\n u = MatMul(x, Wu)\n a = Mul(g1, u)" + DOWN, OUT),
    "three gates": ("\n g = MatMul(x, W1)\n g1 = Sigmoid(g)\n u = MatMul(x, Wu)"
                    "\n v = MatMul(x, W3)\n uv = Mul(u, v)\n a = Mul(g1, uv)" + DOWN, OUT),
    "gate of another width": ("\n w1 = Slice(W1, a0, n1, last)\n g = MatMul(x, w1)"
                              "\n g1 = Sigmoid(g)\n u = MatMul(x, Wu)\n a = Mul(g1, u)" + DOWN,
                              OUT),
    "activations of no product": ("\n a = Relu(x)\n o = MatMul(a, Wsquare)\n out = Add(o, b2)",
                                  OUT),
    "thirds of a packed weight": (
        "\n h = MatMul(x, Wgu)\n g = Slice(h, a0, nF, last)\n u = Slice(h, n1, nF1, last)"
        "\n a = Mul(g, u)" + DOWN, OUT,
    ),
    "the packed value has another reader": (
        f"{PACKED}\n g, u = Split <axis = -1> (h, halves){GEGLU}\n shown = Neg(h)",
        f"{OUT}, float[batch, sequence, {2 * F}] shown",
    ),
    "a gated attention": (
        "\n q = MatMul(x, W1)\n k = MatMul(x, Wu)\n kT = Transpose <perm = [0, 2, 1]> (k)"
        "\n s = MatMul(q, kT)\n p = Softmax <axis = -1> (s)\n v = MatMul(x, W3)\n c = MatMul(p, v)"
        "\n g0 = MatMul(x, Wu)\n g = Sigmoid(g0)\n a = Mul(c, g)" + DOWN, OUT,
    ),
    "dropout that may be on": (
        UP + "\n r = Relu(h)\n yes = Greater(size, half)\n a = Dropout(r, half, yes)" + DOWN, OUT,
    ),
    "reshape by the input width": (
        f"\n f = Reshape(x, flat)\n h = Gemm(f, W1)\n s{LENGTHS}\n d = Gather(s, last)"
        "\n w = Add(d, four)\n shape = Concat <axis = 0> (b, t, w)\n r = Reshape(h, shape)"
        "\n a = Relu(r)" + DOWN, OUT,
    ),
    "a bias that is an input": (UP.replace("b1", "size") + "\n a = Relu(h)" + DOWN, OUT),
    "its width is a slice end": (
        f"{RELU}\n s = Shape(a)\n n = Gather(s, last)\n shown = Slice(zeros, a0, n, a0)",
        f"{OUT}, int64[n] shown",
    ),
    "its width is another length": (
        UP + "\n s = Shape(h)\n w = Slice(s, last, end, a0)"
        "\n shape = Concat <axis = 0> (w, last, w)\n r = Reshape(h, shape)\n a = Relu(r)" + DOWN,
        OUT.replace("batch", str(F)),
    ),
    "constant by position": (
        UP + "\n p = Add(h, positions)\n a = Relu(p)" + DOWN, OUT.replace("sequence", "4"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NEAR_MISSES)
def test_find_feed_forward_near_miss_returns_none(case: str) -> None:
    body, outputs = NEAR_MISSES[case]
    own = {"Wsquare": constants()["W22"][:D, :D], "four": np.array([4], np.int64),
           "nF1": np.array([F + 1], np.int64),
           "zeros": np.zeros(20, np.int64), "positions": np.ones((4, 1), np.float32)}  # fmt: skip
    tokens = outputs.partition(" out")[0]
    model = build(body, own, output=outputs, inputs=f"{tokens} x, float size")
    assert find_feed_forward(model) == []
    run(model, feeds(model) | {"size": np.array(0, np.float32)})  # the graph is valid


POOLER = """
 token = Gather <axis = 1> (x, i0)
 h = Gemm(token, W1, b1)
 a = Tanh(h)
 out = Gemm(a, Wn)"""


@pytest.mark.parametrize("width", [D - 1, D, F])
def test_find_feed_forward_pooler_bottleneck_returns_none(width: int) -> None:
    model = build(POOLER, constants(0, width), output="float[batch, 5] out")
    assert [block.num_neurons for block in find_feed_forward(model)] == [width] * (width >= D)


# ---- pruning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form", ["ReLU", "gated by SiLU", "Gemm, transposed, flattened", "packed, Slice"]
)
def test_prune_neurons_reduces_macs_in_proportion(form: str) -> None:
    lengths = {"batch": 2, "sequence": 7}
    model = build(FORMS[form])
    PruneNeurons({NAME: MASK})(model)
    macs = [model_cost(each).macs for each in (build(FORMS[form]), model)]
    assert macs[0] is not None and macs[1] is not None
    products = 3 if "gated" in form or "packed" in form else 2
    assert macs[0](lengths) - macs[1](lengths) == 2 * 7 * products * D * (F - KEPT)


def test_prune_neurons_keeps_nodes_and_names() -> None:
    before, model = build(DYNAMIC), build(DYNAMIC)
    PruneNeurons({NAME: MASK})(model)
    assert [node.op_type for node in model.graph] == [node.op_type for node in before.graph]
    old, new = before.graph.initializers.keys(), model.graph.initializers.keys()
    assert (old - new, new - old) == ({"nF"}, {f"{NAME}/pruned/width"})
    assert {"W1", "b1", "W2", "b2"} <= new


def test_prune_neurons_shape_with_other_readers_stays() -> None:
    """Exporters compute the shape of the values of all layers once."""
    shown = "\n shown = ConstantOfShape(wide_shape)"
    model = assert_equals_masked(
        lambda: build(DYNAMIC + shown, output=f"{OUT}, {WIDE} shown"), {NAME: MASK}
    )
    assert open_session(model, ONE_THREAD).run(None, feeds(model))[1].shape == (2, 7, F)


def test_prune_neurons_zero_rows_is_exact() -> None:
    own = {"W2": constants()["W2"] * MASK[:, None]}
    model, arrays = build(RELU, own), feeds(build(RELU))
    expected = run(model, arrays)
    PruneNeurons({NAME: MASK})(model)
    np.testing.assert_allclose(run(model, arrays), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("form", ["ReLU", "a weight behind a Transpose"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_prune_neurons_half_precision_keeps_type(dtype: str, form: str) -> None:
    kind = ir.DataType[dtype.upper()]
    own = {n: a.astype(kind.numpy()) for n, a in constants().items() if a.dtype == np.float32}

    def make() -> ir.Model:
        return build(FORMS[form], own, inputs=f"{dtype}[batch, sequence, {D}] x",
                     output=f"{dtype}[batch, sequence, {D}] out")  # fmt: skip

    if dtype == "float16":
        model = assert_equals_masked(make, {NAME: MASK}, atol=2e-2)
    else:  # which ONNX Runtime does not compute
        model = PruneNeurons({NAME: MASK})(make()).model
    assert {constant_type(value) for value in model.graph.initializers.values()} == {kind}
    expected = own["W2"][MASK].astype(np.float32)
    np.testing.assert_array_equal(only(model).second.matrix(), expected)


def test_prune_neurons_twice_equals_both_masks() -> None:
    """The block has fewer neurons than input elements and matches only by its recorded name."""
    masks = [np.arange(F) < 8, np.arange(8) % 2 == 0]
    model = build(RELU)
    for mask in masks:
        PruneNeurons({NAME: mask})(model)
    both = np.isin(np.arange(F), [0, 2, 4, 6])
    arrays = feeds(build(RELU))
    expected = run(masked(build(RELU), {NAME: both}), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    assert only(model).num_neurons == 4


def test_find_feed_forward_pruned_file_matches(tmp_path: Path) -> None:
    model = layers(3)
    PruneNeurons({"feed_forward_1": np.arange(F) == 2})(model)
    ir.save(model, tmp_path / "model.onnx")
    for again in (model.clone(), ir.load(tmp_path / "model.onnx")):
        assert neurons_of(again) == {"feed_forward_0": F, "feed_forward_1": 1, "feed_forward_2": F}


def layers(count: int, *, same: Sequence[str] = (), aliases: bool = False) -> ir.Model:
    """x = x + feed_forward(x) for each layer; the layers share the weights in ``same``."""
    body, own = "", dict[str, np.ndarray]()
    for layer in range(count):
        text = RELU
        for name in ("W1", "b1", "W2", "b2"):
            if name in same:
                if aliases and layer:
                    body += f"\n {name}_alias{layer} = Identity({name})"
                    text = re.sub(rf"\b{name}\b", f"{name}_alias{layer}", text)
                continue
            own[f"{name}_{layer}"] = constants(layer)[name]
            text = re.sub(rf"\b{name}\b", f"{name}_{layer}", text)
        text = re.sub(r"\b(h0|h|a|o|out)\b", rf"\1_{layer}", text)
        text = re.sub(r"\bx\b", f"x_{layer}" if layer else "x", text)
        after, before = f"x_{layer + 1}", f"x_{layer}" if layer else "x"
        body += f"{text}\n {after} = Add({before}, out_{layer})"
    return build(body, own, output=f"float[batch, sequence, {D}] x_{count}")


def test_prune_neurons_layers_have_separate_masks() -> None:
    assert_equals_masked(
        lambda: layers(3), {"feed_forward_0": MASK, "feed_forward_2": [0, 1] * (F // 2)}
    )


def test_prune_neurons_consecutive_blocks_share_a_product() -> None:
    """W_2 of the first is W_1 of the second: it loses rows and columns."""
    body = f"{UP}\n a1 = Relu(h)\n h2 = MatMul(a1, W22)\n a = Relu(h2){DOWN}"
    masks = {NAME: MASK, "feed_forward_1": np.arange(F) % 2}
    model = assert_equals_masked(lambda: build(body), masks)
    assert model.graph.initializers["W22"].shape == (KEPT, F // 2)


SHARED = ("W1", "b1", "W2", "b2")


@pytest.mark.parametrize("aliases", [False, True])
def test_prune_neurons_shared_weights_stay_shared(aliases: bool) -> None:
    """ALBERT: three layers with one weight, which torch exports with Identity nodes."""

    make = partial(layers, 3, same=SHARED, aliases=aliases)
    model = assert_equals_masked(make, {f"feed_forward_{layer}": MASK for layer in range(3)})
    assert parameters(make()) - parameters(model) == (F - KEPT) * (2 * D + 1)
    assert set(model.graph.initializers) == set(SHARED)


@pytest.mark.parametrize("mask", [(), [0, 1] * (F // 2)], ids=["kept whole", "another mask"])
def test_prune_neurons_shared_weights_with_other_mask_raises(mask: Sequence[int]) -> None:
    model = layers(2, same=("W2",))
    before = text_of(model)
    masks = {"feed_forward_0": MASK} | ({"feed_forward_1": mask} if mask else {})
    with raises(CannotRewrite, "prune_neurons.shared_weights"):
        PruneNeurons(masks)(model)
    assert text_of(model) == before


def test_prune_neurons_shared_bias_is_copied() -> None:
    """Exporters merge equal constants, for example biases of zeros."""
    model = assert_equals_masked(lambda: layers(2, same=("b1",)), {NAME: MASK})
    assert model.graph.initializers["b1"].shape == (F,)


def test_prune_neurons_tied_weight_stays_one_initializer() -> None:
    """out = relu(x W) W^T."""
    body = "\n f = Reshape(x, flat)\n h = Gemm(f, W1)\n a = Relu(h)" \
           "\n o = Gemm <transB = 1> (a, W1)\n out = Reshape(o, whole)"  # fmt: skip
    model = assert_equals_masked(lambda: build(body), {NAME: MASK})
    assert parameters(model) == D * KEPT


# ---- refusals -----------------------------------------------------------------------------------

BAD_MASKS: dict[str, tuple[Sequence[object], str]] = {
    "too short": ((1, 0), "prune_neurons.mask_length"),
    "too many axes": ([[1]] * F, "pass.params"),
    "a share": ([0.5] * F, "pass.params"),
    "negative": ([-1] * F, "pass.params"),
    "not a number": ([float("nan")] * F, "pass.params"),
    "no neuron": ([0] * F, "prune_neurons.mask_empty"),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_prune_neurons_invalid_mask_raises(case: str) -> None:
    mask, code = BAD_MASKS[case]
    with raises(InvalidArgument, code) as caught:
        PruneNeurons({NAME: mask})(build(RELU))  # type: ignore[dict-item]
    assert "\n" not in caught.value.what


def test_prune_neurons_mask_of_ones_changes_nothing() -> None:
    model = build(RELU)
    assert_unchanged(model, PruneNeurons({NAME: [1] * F}))


def _quantized() -> ir.Model:
    body = "\n W = DequantizeLinear(bytes, half)" + RELU.replace("W1", "W")
    return build(body, {"bytes": np.full((D, F), 3, np.int8)})


def _weight_is_an_input() -> ir.Model:
    model = build(RELU)
    model.graph.inputs.append(model.graph.initializers["W1"])
    return model


REFUSED = {
    "quantized": _quantized,
    "weights_external": _weight_is_an_input,
}


@pytest.mark.parametrize("code", REFUSED)
def test_prune_neurons_unsupported_weight_raises(code: str) -> None:
    model = REFUSED[code]()
    refusal = neurons_refusal(only(model))
    assert refusal and refusal.code == code
    before = text_of(model)
    with raises(CannotRewrite, f"rewrite.{code}"):
        PruneNeurons({NAME: MASK})(model)
    assert text_of(model) == before


# ---- real exports -------------------------------------------------------------------------------

EXPORTS = {
    "BERT": ("torchscript", 17, 2), "ALBERT": ("torchscript", 17, 3),
    "Llama": ("torchscript", 17, 2), "GPT-2": ("torchscript", 17, 2),
    "ModernBERT": ("torchscript", 17, 2),
}  # fmt: skip


@pytest.mark.parametrize("architecture", EXPORTS)
def test_prune_neurons_hugging_face_export_equals_masked(
    architecture: str, exported: Callable[[Cell], tuple[Path, str]]
) -> None:
    exporter, opset, count = EXPORTS[architecture]
    path, reason = exported(Cell(architecture, "eager", exporter, opset))  # type: ignore[arg-type]
    assert not reason
    blocks = find_feed_forward(ir.load(path))
    assert len(blocks) == count
    assert {len(block.first) for block in blocks} == {2 if architecture == "Llama" else 1}
    mask = np.arange(blocks[0].num_neurons) % 3 != 1
    inputs = open_session(ir.load(path), ONE_THREAD).get_inputs()
    arrays = {i.name: np.ones((2, 7), np.int64) for i in inputs}
    arrays["input_ids"] = np.arange(14).reshape(2, 7)
    assert_equals_masked(
        lambda: ir.load(path), {block.name: mask for block in blocks}, arrays, atol=2e-5
    )


def test_second_product_that_adds_the_residual_is_not_matched():
    """Its output is more than that of the block: a fit of it would lose the residual."""
    arrays = constants()
    body = "\n f = Reshape(x, flat)\n z = Gemm(f, W1, b1)\n a = Relu(z)\n out = Gemm(a, W2, {})"
    sizes = {"plain": "b2", "residual": "f"}
    found = {
        name: len(
            find_feed_forward(graph(body.format(addend), inputs=PLAIN_INPUT, constants=arrays))
        )
        for name, addend in sizes.items()
    }
    assert found == {"plain": 1, "residual": 0}
