"""Every way to lay attention out is read right, or missed with a reason: never read wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.blocks import Causal, Mask, PositionBias, Scaled
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from tests.graph_passes.graphs import (
    BOOL_MASK,
    FUSED,
    PLAIN_INPUT,
    SCALE,
    D,
    H,
    K,
    V,
    attention,
    graph,
    only,
    reasons,
)
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS, NO_PROJECTION, SPLIT

WITH_GAIN = {"factors of Gemm": 0.5}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_is_read_and_certified(layout: str) -> None:
    block = only(attention(constants=LAID_OUT, **LAYOUTS[layout]))
    assert (block.num_heads, block.num_kv_heads) == (H, H)
    assert (block.head_size, block.v_head_size, block.input_size) == (K, V, D)
    assert block.scale == pytest.approx(SCALE * WITH_GAIN.get(layout, 1.0), rel=1e-6)
    assert (block.form, block.kind, block.position) == ("standard", "self", "none")
    assert (block.x.name, block.y.name) == ("x", "x")
    assert (block.output is None) == (layout in NO_PROJECTION)


WHERE_MASKS = {
    "keep where true": ("m = Where(mask, s, low)", True, -1e9),
    "fill where true": ("m = Where(mask, infinity, s)", False, -np.inf),
}


@pytest.mark.parametrize("written", WHERE_MASKS)
def test_mask_by_where_is_read_either_way(written: str) -> None:
    node, keep, fill = WHERE_MASKS[written]
    block = only(
        attention(
            inputs=f"float[batch, sequence, {D}] x, {BOOL_MASK}",
            mask=f"\n        {node}",
        )
    )
    (mask,) = block.steps
    assert isinstance(mask, Mask)
    assert (mask.value.name, mask.keep, mask.fill) == ("mask", keep, fill)


def test_added_mask_is_the_value_that_is_added() -> None:
    (step,) = only(attention()).steps
    assert isinstance(step, PositionBias) and step.value.name == "mask"


@pytest.mark.parametrize("how", SPLIT)
def test_packed_projection_keeps_its_identity(how: str) -> None:
    block = only(attention(q=SPLIT[how], k="", v="", output="\n        out = MatMul(c, Wo12)"))
    assert block.q.weight is block.k.weight is block.v.weight
    columns = np.concatenate([p.columns.ravel() for p in (block.q, block.k, block.v)])
    assert sorted(columns) == list(range(3 * H * K))


def test_swapped_keys_and_values_are_read_as_what_they_are() -> None:
    plain = only(attention(q=SPLIT["Gather"], k="", v="", output="\n out = MatMul(c, Wo12)"))
    text = SPLIT["Gather"].replace("i1)", "i9)").replace("i2)", "i1)").replace("i9)", "i2)")
    swapped = only(attention(q=text, k="", v="", output="\n out = MatMul(c, Wo12)"))
    assert (swapped.k.columns == plain.v.columns).all()
    assert (swapped.v.columns == plain.k.columns).all()


def test_single_head() -> None:
    block = only(
        attention(
            q="\n q0 = MatMul(x, Wk1)\n q = Add(q0, bk1)",
            k="\n k0 = MatMul(x, Wk1)\n kT = Transpose <perm = [0, 2, 1]> (k0)",
            v="\n v = MatMul(x, Wv1)",
            context="\n c = MatMul(p, v)",
            output="\n out = MatMul(c, Wo1)",
            mask="\n m = Identity(s)",
        )
    )
    assert (block.num_heads, block.head_size, block.v_head_size) == (1, K, V)
    assert block.form == "standard"


def test_one_key_head_for_all_queries() -> None:
    block = only(
        attention(
            k="\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
            "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
            v="\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
            "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
        )
    )
    assert (block.num_heads, block.num_kv_heads) == (H, 1)


def test_cross_attention_has_a_second_input_of_its_own_length() -> None:
    block = only(
        attention(
            inputs=f"float[batch, sequence, {D}] x, float[batch, memory, {D}] y, "
            "float[batch, 1, 1, memory] mask",
            k="\n k0 = MatMul(y, Wk)\n k2 = Reshape(k0, heads)"
            "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
            v="\n v0 = MatMul(y, Wv)\n v2 = Reshape(v0, v_heads)"
            "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
        )
    )
    assert (block.kind, block.x.name, block.y.name) == ("cross", "x", "y")


def test_extra_consumers_of_intermediates_do_not_hide_attention() -> None:
    block = only(
        attention(
            output_type=f"float[batch, sequence, {D}] out, float[batch, {H}, sequence, sequence] pp"
            f", float[batch, {H}, sequence, {K}] qq",
            softmax="\n p = Softmax <axis = -1> (m)\n pp = Identity(p)\n qq = Identity(q)",
        )
    )
    assert block.output is not None


# What is missed: a name, the parts that differ, and the words of the reason.
MISSED: dict[str, tuple[dict[str, str], str]] = {
    "wrong permutation of the queries": (
        {
            "q": "\n q0 = MatMul(x, Wq)\n q2 = Reshape(q0, heads)"
            "\n q = Transpose <perm = [2, 0, 1, 3]> (q2)",
            "scores": "\n s0 = MatMul(q, kT)\n s = Mul(s0, scale)",
        },
        "",
    ),
    "keys without their permutation": (
        {"k": "\n k0 = MatMul(x, Wk)\n k2 = Reshape(k0, heads)\n kT = Identity(k2)"},
        "",
    ),
    "a weight that is an input": (
        {"q": "\n q0 = MatMul(x, fed)\n q2 = Reshape(q0, heads)"
              "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
        "MatMul stands between the query projection and the product",
    ),
    "a weight that is computed": (
        {"q": "\n W9 = Tanh(Wq)\n q0 = MatMul(x, W9)\n q2 = Reshape(q0, heads)"
              "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
        "MatMul stands between the query projection and the product",
    ),
    "no projection": (
        {"q": "\n q2 = Reshape(x, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
        "the query is 'x', an input of the graph: no projection makes it",
    ),
    "learned queries": (
        {"q": "\n q2 = Reshape(Wq, square)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
        "Softmax is not fed by a product of queries and keys",
    ),
    "squashed queries": (
        {"scores": "\n q8 = Tanh(q)\n s0 = MatMul(q8, kT)\n s = Mul(s0, scale)"},
        "Tanh stands between the query projection and the product",
    ),
    "positions added to the queries": (
        {"scores": "\n q8 = Add(q, per_token)\n s0 = MatMul(q8, kT)\n s = Mul(s0, scale)"},
        "differs from token to token by more than its input",
    ),
    "queries times zero": (
        {"scores": "\n q8 = Mul(q, zero)\n s = MatMul(q8, kT)"},
        "Mul multiplies the query by zero or infinity",
    ),
    "scores divided by zero": (
        {"scores": "\n s0 = MatMul(q, kT)\n s = Div(s0, zero)"},
        "is not fed by a product of queries and keys",
    ),
    "softmax over the queries": (
        {"softmax": "\n p = Softmax <axis = 2> (m)"},
        "MatMul sums probabilities over another axis than the keys",
    ),
    "softmax over the heads": (
        {"softmax": "\n p = Softmax <axis = 1> (m)"},
        "the softmax 'p' is not over the keys of (B, H, S, T) logits",
    ),
    "two scores": (
        {"scores": "\n s0 = MatMul(q, kT)\n s1 = MatMul(q, kT)\n s = Add(s0, s1)"},
        "Add adds two products: this attention has more than one score",
    ),
    "zero after the mask": (
        {"mask": "\n m0 = Add(s, mask)\n m = Mul(m0, zero)"},
        "is not fed by a product of queries and keys",
    ),
    "squashed after the mask": (
        {"mask": "\n m0 = Add(s, mask)\n m = Sigmoid(m0)"},
        "is not fed by a product of queries and keys",
    ),
    "probabilities weighted head by head": (
        {"softmax": "\n p0 = Softmax <axis = -1> (m)\n p = Mul(p0, per_head)"},
        "no product with values reads the probabilities 'p0'",
    ),
    "a layout that data decides": (
        {"q": "\n q0 = MatMul(x, Wq)\n q1 = Add(q0, bq)\n q2 = Reshape(q1, heads)"
              "\n total = ReduceSum <keepdims = 0> (x)\n row = Cast <to = 7> (total)"
              "\n none = Mul(row, i0)\n at = Unsqueeze(none, a0)\n q3 = Slice(q2, at, far)"
              "\n q = Transpose <perm = [0, 2, 1, 3]> (q3)"},
        "could not be inferred",
    ),
    "safe softmax that fills ones": (
        {"softmax": "\n p0 = Softmax <axis = -1> (m)\n nan = IsNaN(p0)\n p = Where(nan, one, p0)"},
        "no product with values reads the probabilities 'p0'",
    ),
    "the mask of a Dropout as queries": (
        {"scores": "\n q8, dropped = Dropout(q)\n q9 = Cast <to = 1> (dropped)"
                   "\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"},
        "Dropout hands on its output 1, not its tokens",
    ),
}  # fmt: skip
CONSTANTS = LAID_OUT | {
    "square": np.array([1, D, H, K], np.int64),
    "per_token": np.arange(5, dtype=np.float32).reshape(5, 1),
    "far": np.array([99], np.int64),
}


@pytest.mark.parametrize("graph_name", MISSED)
def test_near_miss_is_missed_with_a_reason(graph_name: str) -> None:
    parts, reason = MISSED[graph_name]
    inputs = f"float[batch, sequence, {D}] x, float[batch, 1, 1, sequence] mask"
    if graph_name == "a weight that is an input":
        inputs += f", float[{D}, {H * K}] fed"
    (said,) = reasons(attention(inputs=inputs, constants=CONSTANTS, **parts))
    assert said and reason in said


def test_classification_softmax_is_missed() -> None:
    model = graph(
        "\n l = MatMul(x, Wfc)\n out = Softmax <axis = -1> (l)",
        output="float[batch, sequence, 5] out",
    )
    assert reasons(model) == ["Softmax is not fed by a product of queries and keys"]


def test_softmax_over_one_row_is_missed() -> None:
    model = graph(
        "\n out = Softmax <axis = -1> (x)", inputs="float[n, 4] x", output="float[n, 4] out"
    )
    assert reasons(model) == ["Softmax is not fed by a product of queries and keys"]


def test_softmax_over_a_vector_is_missed() -> None:
    model = graph("\n out = Softmax <axis = -1> (x)", inputs="float[4] x", output="float[4] out")
    assert reasons(model) == ["Softmax is not over the keys of (B, H, S, T) logits"]


def test_scale_after_the_mask_is_a_step_of_its_own() -> None:
    block = only(attention(mask="\n m0 = Add(s, mask)\n m = Mul(m0, inverse)"))
    bias, scaled = block.steps
    assert isinstance(bias, PositionBias) and isinstance(scaled, Scaled)
    assert (block.scale, scaled.factor) == pytest.approx((SCALE, 1 / SCALE), rel=1e-6)


def test_softmax_before_opset_13_is_over_all_axes_from_its_own_on() -> None:
    old = {"softmax": "\n p = Softmax(m)", "opset": 11}
    assert "is not over the keys" in reasons(attention(**old))[0]  # type: ignore[arg-type]
    old["softmax"] = "\n p = Softmax <axis = 3> (m)"
    assert only(attention(**old)).num_heads == H  # type: ignore[arg-type]


def operator(attributes: str = "", operands: str = "q, k, v", **parts: str) -> dict[str, str]:
    """The parts of an attention that one ai.onnx Attention holds."""
    k = """
        k0 = MatMul(x, Wk)
        k1 = Add(k0, bk)
        k2 = Reshape(k1, heads)
        k = Transpose <perm = [0, 2, 1, 3]> (k2)"""
    context = f"""
        c0 = Attention {f"<{attributes}>" if attributes else ""} ({operands})
        c1 = Transpose <perm = [0, 2, 1, 3]> (c0)
        c = Reshape(c1, merge)"""
    return {**FUSED, "k": k, "context": context, **parts}


def test_attention_operator_with_its_own_scale() -> None:
    model = attention(**operator("scale = 0.37"), opset=23, inputs=PLAIN_INPUT)
    block = only(model)
    assert block.idiom == "attention_operator"
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, V)
    assert block.scale == pytest.approx(SCALE, rel=1e-6)
    assert (block.steps, block.logits, block.probabilities) == ((), None, None)


def test_attention_operator_without_a_scale_uses_the_head_size() -> None:
    block = only(attention(**operator(), opset=23, inputs=PLAIN_INPUT))
    assert block.scale == pytest.approx(K**-0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("mask", "kind"),
    [("bool", Mask), ("float", PositionBias)],
)
def test_attention_operator_with_a_mask(mask: str, kind: type) -> None:
    inputs = f"{PLAIN_INPUT}, {mask}[batch, 1, sequence, sequence] mask"
    block = only(attention(**operator(operands="q, k, v, mask"), opset=23, inputs=inputs))
    (step,) = block.steps
    assert isinstance(step, kind)


def test_mask_without_a_declared_type_is_still_known_as_boolean() -> None:
    model = attention(
        **operator(operands="q, k, v, seen", softmax="\n seen = Greater(mask, low)"),
        opset=23,
        inputs=f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask",
    )
    (step,) = only(model).steps
    assert isinstance(step, Mask) and step.value.dtype is None


def test_causal_attention_operator() -> None:
    block = only(attention(**operator("is_causal = 1"), opset=23, inputs=PLAIN_INPUT))
    assert block.steps == (Causal(),)


def test_attention_operator_that_splits_heads_itself() -> None:
    parts = {
        "q": "\n q0 = MatMul(x, Wq)\n q = Add(q0, bq)",
        "k": "\n k = MatMul(x, Wk)",
        "v": "\n v = MatMul(x, Wv)",
        "context": "\n c = Attention <q_num_heads = 3, kv_num_heads = 3> (q, k, v)",
    }
    block = only(attention(**{**FUSED, **parts}, opset=23, inputs=PLAIN_INPUT))
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, V)
    assert (block.q.layout, block.output is None) == ("B T H*K", False)


def test_attention_operator_with_grouped_heads() -> None:
    parts = {
        "q": "\n q = MatMul(x, Wq)",
        "k": "\n k = MatMul(x, Wk1)",
        "v": "\n v = MatMul(x, Wv1)",
        "context": "\n c = Attention <q_num_heads = 3, kv_num_heads = 1> (q, k, v)",
    }
    block = only(attention(**{**FUSED, **parts}, opset=23, inputs=PLAIN_INPUT))
    assert (block.num_heads, block.num_kv_heads) == (H, 1)


def test_graph_without_nodes_and_graph_without_shapes() -> None:
    empty = graph("", inputs="float[n] x", output="float[n] x")
    assert find_attention(empty) == ([], [])
    shapeless = attention()
    for value in shapeless.graph.inputs:
        value.shape = None
    assert "could not be inferred" in reasons(shapeless)[0]


def test_axes_with_different_names_that_must_be_equal() -> None:
    inputs = f"float[batch, sequence, {D}] x, float[batch_2, 1, 1, keys] mask"
    assert only(attention(inputs=inputs)).num_heads == H


def test_fixed_axes() -> None:
    inputs = f"float[1, 6, {D}] x, float[1, 1, 1, 6] mask"
    assert only(attention(inputs=inputs, output_type=f"float[1, 6, {D}] out")).num_heads == H


def test_queries_of_one_sequence_for_a_batch_of_keys_are_missed() -> None:
    model = attention(inputs=f"float[batch, sequence, {D}] y, float[1, 4, {D}] x, "
                      "float[batch, 1, 1, sequence] mask",
                      k="\n k0 = MatMul(y, Wk)\n k2 = Reshape(k0, heads)"
                      "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
                      v="\n v0 = MatMul(y, Wv)\n v2 = Reshape(v0, v_heads)"
                      "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)")  # fmt: skip
    assert reasons(model) == [
        "queries, keys and values do not come from the same number of sequences"
    ]


def test_a_thousand_nodes_before_a_softmax_are_not_walked() -> None:
    doubled = "".join(f"\n h{i + 1} = Add(h{i}, h{i})" for i in range(1500))
    model = graph(
        f"\n h0 = Abs(x){doubled}\n out = Softmax <axis = -1> (h1500)",
    )
    assert reasons(model) == ["Softmax is not fed by a product of queries and keys"]


def test_names_come_from_the_paths_that_projections_share() -> None:
    model = attention()
    assert only(model).name == "attention_0"
    for node, name in zip(model.graph, ("query", "bias", "", "", "key"), strict=False):
        node.name = f"/encoder/layer.3/{name}/MatMul" if name else node.name
    next(
        node for node in model.graph if node.outputs[0].name == "v0"
    ).name = "/encoder/layer.3/v/MatMul"
    assert only(model).name == "encoder.layer.3"


# Mutations: what changes in a real graph is read as it is now, or missed; never certified wrong.


def mutants(model: ir.Model) -> list[tuple[str, Callable[[], None]]]:
    """Small changes of one node or weight each; the certificate, not this list, is the judge."""
    changes: list[tuple[str, Callable[[], None]]] = []

    def permuted(node: ir.Node, perm: list[int]) -> Callable[[], None]:
        return lambda: node.attributes.add(ir.AttrInt64s("perm", perm))

    def swapped(node: ir.Node) -> Callable[[], None]:
        def swap() -> None:
            a, b = node.inputs[:2]
            node.replace_input_with(0, b)
            node.replace_input_with(1, a)

        return swap

    def grown(value: ir.Value) -> Callable[[], None]:
        array = value.const_value.numpy() * np.float32(1.5)  # type: ignore[union-attr]
        return lambda: setattr(value, "const_value", ir.tensor(array, name=value.name))

    for node in model.graph:
        if node.op_type == "Transpose":
            perm = list(node.attributes["perm"].as_ints())
            for i in range(len(perm) - 1):
                other = [*perm[:i], perm[i + 1], perm[i], *perm[i + 2 :]]
                changes.append((f"{node.outputs[0].name} by {other}", permuted(node, other)))
        if node.op_type in ("MatMul", "Add", "Mul"):
            changes.append((f"swapped {node.outputs[0].name}", swapped(node)))
    for name, value in model.graph.initializers.items():
        if value.dtype == ir.DataType.FLOAT:
            changes.append((f"grown {name}", grown(value)))
    return changes


def collaborative() -> ir.Model:
    model = attention()
    blocks, _ = find_attention(model)
    return Collaborate.with_factors({block.name: factor(block, 5) for block in blocks})(model).model


MUTATED: dict[str, tuple[Callable[[], ir.Model], int]] = {
    "plain": (attention, 15),
    "packed": (
        lambda: attention(q=SPLIT["Gather"], k="", v="", output="\n out = MatMul(c, Wo12)"),
        8,
    ),
    "operator": (lambda: attention(**operator(), opset=23, inputs=PLAIN_INPUT), 15),
    "collaborative": (collaborative, 15),
}


@pytest.mark.parametrize("subject", MUTATED)
def test_no_mutant_is_certified_wrong(subject: str) -> None:
    """A mutant that is read computes what its own reading says, within 1e-4, at two shapes."""
    build, at_least = MUTATED[subject]
    read = 0
    for index in range(len(mutants(build()))):
        model = build()
        _, change = mutants(model)[index]
        change()
        reading = read_attention(model)
        assert len(reading.blocks) + len(reading.unmatched) == 1
        read += len(reading.blocks)
        for certified in reading.certified:
            assert certified.max_abs_error <= 1e-4
    assert read >= at_least  # among them: scales, weights, operands of Add and Mul swapped


def test_changed_scale_is_the_scale_that_is_read() -> None:
    for scale in (0.1, 1.0, 3.0):
        model = attention(constants={"scale": np.float32(scale)})
        assert only(model).scale == pytest.approx(scale, rel=1e-6)


def test_certificate_refuses_a_reading_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge of the mutants is itself judged: a doubled scale must not pass."""
    from dataclasses import replace

    import attnserve.checks.certify as certify

    blocks, misses = find_attention(model := attention())
    wrong = [replace(blocks[0], scale=2 * blocks[0].scale)]
    monkeypatch.setattr(certify, "find_attention", lambda _: (wrong, misses))
    (miss,) = read_attention(model).unmatched
    assert "the graph computes something else" in miss.reason


EXPORTS = [
    ("eager", "torchscript", 17),
    ("sdpa", "torchscript", 17),
    ("eager", "dynamo", 18),
    ("sdpa", "dynamo", 18),
    ("eager", "dynamo", 23),
    ("sdpa", "dynamo", 23),
]


@pytest.mark.parametrize(("written", "exporter", "opset"), EXPORTS)
def test_minilm_is_read_from_every_export(
    minilm_export: Callable[[str, str, int], Path], written: str, exporter: str, opset: int
) -> None:
    model = ir.load(minilm_export(written, exporter, opset) / "model.onnx")
    reading = read_attention(model)
    assert reading.unmatched == ()
    assert len(reading.blocks) == 6
    for index, block in enumerate(reading.blocks):
        assert f"layer.{index}" in block.name
        assert (block.num_heads, block.head_size, block.input_size) == (12, 32, 384)
        assert block.scale == pytest.approx(32**-0.5, rel=1e-5)


@pytest.mark.parametrize(("name", "layers"), [("vit_mnist_researchase", 6), ("gpt_nano_sort", 3)])
def test_trained_graphs_are_read(shared: Path, name: str, layers: int) -> None:
    path = next((shared / "models" / name).glob("*.onnx"), None)
    if path is None:
        pytest.skip(f"{name} is not here")
    reading = read_attention(ir.load(path))
    assert (len(reading.blocks), reading.unmatched) == (layers, ())
