"""find_attention: every layout matches with the right attributes, or fails with a reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks import certify
from attnserve.checks.certify import read_attention
from graph_passes.blocks import Causal, Mask, PositionBias, Scaled, Weighted
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from tests.graph_passes.graphs import (
    BOOL_MASK,
    PARTS,
    SCALE,
    D,
    H,
    K,
    V,
    attention,
    fused_parts,
    graph,
    only,
    reasons,
)
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS, NO_PROJECTION, ONE_KEY_HEAD, SPLIT
from tests.graph_passes.operators import ONNX

PACKED = {"k": "", "v": "", "output": "\n out = MatMul(c, Wo12)"}
Q_HEADS = "\n q2 = Reshape(q0, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"
MEMORY = {
    "k": "\n k0 = MatMul(y, Wk)\n k2 = Reshape(k0, heads)"
    "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
    "v": "\n v0 = MatMul(y, Wv)\n v2 = Reshape(v0, v_heads)"
    "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
}
"""Keys and values of another input y."""

WITH_GAIN = {"factors of Gemm": 0.5}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_find_attention_layout_matches(layout: str) -> None:
    block = only(attention(constants=LAID_OUT, **LAYOUTS[layout]))
    assert (block.num_heads, block.num_kv_heads) == (H, H)
    assert (block.head_size, block.v_head_size, block.input_size) == (K, V, D)
    assert block.scale == pytest.approx(SCALE * WITH_GAIN.get(layout, 1.0), rel=1e-6)
    assert (block.form, block.kind, block.position) == ("standard", "self", "none")
    assert (block.x.name, block.y.name) == ("x", "x")
    assert (block.output is None) == (layout in NO_PROJECTION)


@pytest.mark.parametrize(
    ("node", "keep", "fill"),
    [("m = Where(mask, s, low)", True, -1e9), ("m = Where(mask, infinity, s)", False, -np.inf)],
)
def test_find_attention_where_mask_records_fill(node: str, keep: bool, fill: float) -> None:
    inputs = f"float[batch, sequence, {D}] x, {BOOL_MASK}"
    (mask,) = only(attention(inputs=inputs, mask=f"\n        {node}")).steps
    assert isinstance(mask, Mask)
    assert (mask.value.name, mask.keep, mask.fill) == ("mask", keep, fill)


@pytest.mark.parametrize(
    "softmax",
    [
        "p = com.microsoft.QLinearSoftmax <opset = 17> (m, one, zero, one, zero)",
        "m8 = QuantizeLinear(m, one, zero)\n m9 = DequantizeLinear(m8, one, zero)"
        "\n p = Softmax <axis = -1> (m9)",
    ],
    ids=["QOperator", "QDQ"],
)
def test_scores_in_integers_are_unmatched_with_what_to_do(softmax: str) -> None:
    constants = {"one": np.float32(1), "zero": np.uint8(0)}
    model = attention(softmax=f"\n        {softmax}", constants=constants)
    blocks, [unmatched] = find_attention(model)
    assert not blocks
    assert "integers" in unmatched.reason and "float model" in unmatched.reason


def test_shapes_of_the_context_are_read_beside_its_projection() -> None:
    """onnxsim leaves a Reshape whose elements nobody reads."""
    spare = "\n        spare = Reshape(c1, merge)\n        size = Shape(spare)"
    assert only(attention(context=PARTS["context"] + spare)).output is not None


@pytest.mark.parametrize("how", SPLIT)
def test_find_attention_packed_projection_shares_weight(how: str) -> None:
    block = only(attention(q=SPLIT[how], **PACKED))
    assert block.q.weight == block.k.weight == block.v.weight
    columns = np.concatenate([p.columns.ravel() for p in (block.q, block.k, block.v)])
    assert sorted(columns) == list(range(3 * H * K))


def test_find_attention_swapped_keys_and_values_swaps_columns() -> None:
    plain = only(attention(q=SPLIT["Gather"], **PACKED))
    text = SPLIT["Gather"].replace("i1)", "i9)").replace("i2)", "i1)").replace("i9)", "i2)")
    swapped = only(attention(q=text, **PACKED))
    assert (swapped.k.columns == plain.v.columns).all()
    assert (swapped.v.columns == plain.k.columns).all()


ONE_HEAD = {
    "q": "\n q0 = MatMul(x, Wk1)\n q = Add(q0, bk1)",
    "k": "\n k0 = MatMul(x, Wk1)\n kT = Transpose <perm = [0, 2, 1]> (k0)",
    "v": "\n v = MatMul(x, Wv1)",
    "context": "\n c = MatMul(p, v)",
    "output": "\n out = MatMul(c, Wo1)",
    "mask": "\n m = Identity(s)",
}
X = f"float[batch, sequence, {D}] x"
VARIANTS: dict[str, tuple[dict[str, Any], tuple[int, int], str]] = {
    "single head": (ONE_HEAD, (1, 1), "x"),
    "one key head": (ONE_KEY_HEAD, (H, 1), "x"),
    "cross attention": (
        {"inputs": f"{X}, float[batch, memory, {D}] y, float[batch, 1, 1, memory] mask"} | MEMORY,
        (H, H),
        "y",
    ),
    "other consumers": (
        {
            "output_type": f"{X[:-1]}out, float[batch, {H}, sequence, sequence] pp"
            f", float[batch, {H}, sequence, {K}] qq",
            "softmax": "\n p = Softmax <axis = -1> (m)\n pp = Identity(p)\n qq = Identity(q)",
        },
        (H, H),
        "x",
    ),
    "axes with different names": (
        {"inputs": f"{X}, float[batch_2, 1, 1, keys] mask"},
        (H, H),
        "x",
    ),
    "fixed axes": (
        {"inputs": f"float[1, 6, {D}] x, float[1, 1, 1, 6] mask",
         "output_type": f"float[1, 6, {D}] out"},
        (H, H),
        "x",
    ),
    "softmax of opset 11": (
        {"softmax": "\n p = Softmax <axis = 3> (m)", "opset": 11},
        (H, H),
        "x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_find_attention_variant_matches(variant: str) -> None:
    parts, heads, keys = VARIANTS[variant]
    block = only(attention(**parts))
    assert (block.num_heads, block.num_kv_heads) == heads
    assert (block.head_size, block.v_head_size, block.form) == (K, V, "standard")
    assert (block.x.name, block.y.name) == ("x", keys)
    assert block.kind == ("cross" if keys == "y" else "self")
    assert block.output is not None


NO_SCORES = "has no product of queries and keys as input"
UNSUPPORTED = "is not supported between the query projection and the product"

UNMATCHED: dict[str, tuple[dict[str, str], str]] = {
    "wrong permutation of the queries": (
        {"q": "\n q0 = MatMul(x, Wq)" + Q_HEADS.replace("0, 2, 1, 3", "2, 0, 1, 3")}, "",
    ),
    "keys without their permutation": (
        {"k": "\n k0 = MatMul(x, Wk)\n k2 = Reshape(k0, heads)\n kT = Identity(k2)"}, "",
    ),
    "weight is an input": ({"q": f"\n q0 = MatMul(x, fed){Q_HEADS}"}, f"MatMul {UNSUPPORTED}"),
    "weight is computed": (
        {"q": f"\n W9 = Tanh(Wq)\n q0 = MatMul(x, W9){Q_HEADS}"}, f"MatMul {UNSUPPORTED}",
    ),
    "no projection": (
        {"q": "\n q2 = Reshape(x, heads)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"},
        "the query is 'x', an input of the graph",
    ),
    "constant queries": (
        {"q": "\n q2 = Reshape(Wq, square)\n q = Transpose <perm = [0, 2, 1, 3]> (q2)"}, NO_SCORES,
    ),
    "non-linear queries": (
        {"scores": "\n q8 = Tanh(q)\n s0 = MatMul(q8, kT)\n s = Mul(s0, scale)"},
        f"Tanh {UNSUPPORTED}",
    ),
    "positions added to the queries": (
        {"scores": "\n q8 = Add(q, per_token)\n s0 = MatMul(q8, kT)\n s = Mul(s0, scale)"},
        "depends on the position of the token",
    ),
    "queries times zero": (
        {"scores": "\n q8 = Mul(q, zero)\n s = MatMul(q8, kT)"}, "Mul multiplies the query by zero",
    ),
    "scores divided by zero": ({"scores": "\n s0 = MatMul(q, kT)\n s = Div(s0, zero)"}, NO_SCORES),
    "softmax over the heads": (
        {"softmax": "\n p = Softmax <axis = 1> (m)"}, "the softmax 'p' is not over the keys",
    ),
    "zero after the mask": (
        {"mask": "\n m0 = Add(s, mask)\n m = Mul(m0, zero)"}, NO_SCORES,
    ),
    "sigmoid after the mask": ({"mask": "\n m0 = Add(s, mask)\n m = Sigmoid(m0)"}, NO_SCORES),
    "probabilities weighted by head": (
        {"softmax": "\n p0 = Softmax <axis = -1> (m)\n p = Mul(p0, per_head)"},
        "no product with values reads the probabilities 'p0'",
    ),
    "data-dependent layout": (
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
    "mask of a Dropout as queries": (
        {"scores": "\n q8, dropped = Dropout(q)\n q9 = Cast <to = 1> (dropped)"
                   "\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"},
        "output 1 of Dropout",
    ),
    "softmax of opset 11 over several axes": (
        {"softmax": "\n p = Softmax(m)", "opset": 11}, "is not over the keys",  # type: ignore[dict-item]
    ),
    "queries of one sequence, keys of a batch": (
        {"inputs": f"float[batch, sequence, {D}] y, float[1, 4, {D}] x, "
                   "float[batch, 1, 1, sequence] mask"} | MEMORY,
        "do not come from the same number of sequences",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNMATCHED)
def test_find_attention_near_miss_returns_reason(case: str) -> None:
    parts, reason = UNMATCHED[case]
    constants = LAID_OUT | {
        "square": np.array([1, D, H, K], np.int64),
        "per_token": np.arange(5, dtype=np.float32).reshape(5, 1),
        "far": np.array([99], np.int64),
    }
    inputs = f"{X}, float[batch, 1, 1, sequence] mask"
    inputs += f", float[{D}, {H * K}] fed" * (case == "weight is an input")
    (actual,) = reasons(attention(**{"inputs": inputs, "constants": constants} | parts))  # type: ignore[arg-type]
    assert actual and reason in actual


MANY_NODES = "".join(f"\n h{i + 1} = Add(h{i}, h{i})" for i in range(1500))


@pytest.mark.parametrize(
    ("body", "shape", "output", "reason"),
    [
        (
            "\n l = MatMul(x, Wfc)\n out = Softmax <axis = -1> (l)",
            f"b, s, {D}",
            "b, s, 5",
            NO_SCORES,
        ),
        ("\n out = Softmax <axis = -1> (x)", "n, 4", "n, 4", NO_SCORES),
        ("\n out = Softmax <axis = -1> (x)", "4", "4", "is not over the keys"),
        (
            f"\n h0 = Abs(x){MANY_NODES}\n out = Softmax <axis = -1> (h1500)",
            f"b, s, {D}",
            f"b, s, {D}",
            NO_SCORES,
        ),
    ],
    ids=["classification", "one row", "vector", "long chain of two operands"],
)
def test_find_attention_other_softmax_returns_reason(
    body: str, shape: str, output: str, reason: str
) -> None:
    model = graph(body, inputs=f"float[{shape}] x", output=f"float[{output}] out")
    (actual,) = reasons(model)
    assert reason in actual


def test_find_attention_scale_after_mask_is_a_step() -> None:
    block = only(attention(mask="\n m0 = Add(s, mask)\n m = Mul(m0, inverse)"))
    bias, scaled = block.steps
    assert isinstance(bias, PositionBias) and isinstance(scaled, Scaled)
    assert bias.value.name == "mask"
    assert (block.scale, scaled.factor) == pytest.approx((SCALE, 1 / SCALE), rel=1e-6)


@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0])
def test_find_attention_other_scale_is_recorded(scale: float) -> None:
    model = attention(constants={"scale": np.float32(scale)})
    assert only(model).scale == pytest.approx(scale, rel=1e-6)


LENGTH = "\n shape = Shape(x)\n length = Gather(shape, i1)"
"""The number of tokens, a scalar."""


def test_find_attention_scale_of_the_length_is_no_constant() -> None:
    """log-n scaling is equal at all lengths up to its limit, which no inference exceeds."""
    scores = f"""{LENGTH}
        real = Cast <to = 1> (length)
        log = Log(real)
        ratio = Div(log, limit)
        factor = Max(ratio, one)
        whole = Mul(factor, scale)
        s0 = MatMul(q, kT)
        s = Mul(s0, whole)"""
    model = attention(scores=scores, constants={"limit": np.float32(np.log(512))})
    block = only(model)
    assert block.scale == 1.0
    assert any(isinstance(step, Weighted) for step in block.steps)


def test_find_attention_scale_of_a_shape_is_a_constant() -> None:
    """The head size is read from a shape whose other elements are lengths."""
    scores = """
        shape = Shape(q)
        size = Slice(shape, a3, n12)
        real = Cast <to = 1> (size)
        root = Sqrt(real)
        s0 = MatMul(q, kT)
        s = Div(s0, root)"""
    assert only(attention(scores=scores)).scale == pytest.approx(K**-0.5)


@pytest.mark.parametrize(
    "condition",
    ["is_long = Greater(length, limit)", "most = Max(length, limit)  is_long = Equal(most, limit)"],
)
def test_find_attention_branch_by_length_returns_reason(condition: str) -> None:
    """The branch for short sequences is not that for long ones."""
    scores = f"""{LENGTH}
        {condition}
        turned = If (is_long) <
            then_branch = long () => (float[batch, {H}, sequence, {K}] doubled) {{
                doubled = Add(q, q) }},
            else_branch = short () => (float[batch, {H}, sequence, {K}] same) {{
                same = Identity(q) }}>
        s0 = MatMul(turned, kT)
        s = Mul(s0, scale)"""
    (reason,) = reasons(attention(scores=scores, constants={"limit": np.array(512)}))
    assert "If is not supported between the query projection" in reason


def test_find_attention_empty_or_shapeless_graph_returns_no_blocks() -> None:
    empty = graph("", inputs="float[n] x", output="float[n] x")
    assert find_attention(empty) == ([], [])
    shapeless = attention()
    for value in shapeless.graph.inputs:
        value.shape = None
    assert "could not be inferred" in reasons(shapeless)[0]


def test_assign_names_common_path_is_the_name() -> None:
    model = attention()
    assert only(model).name == "attention_0"
    for node, name in zip(model.graph, ("query", "bias", "", "", "key"), strict=False):
        node.name = f"/encoder/layer.3/{name}/MatMul" if name else node.name
    value = next(node for node in model.graph if node.outputs[0].name == "v0")
    value.name = "/encoder/layer.3/v/MatMul"
    assert only(model).name == "encoder.layer.3"


# Mutations: each change of a real graph is matched as it computes, or is unmatched.


def mutants(model: ir.Model) -> list[tuple[str, Callable[[], None]]]:
    """Small changes of one node or weight each; certification decides which still match."""
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
        lambda: attention(q=SPLIT["Gather"], **PACKED),
        8,
    ),
    "operator": (ONNX["heads apart"].model, 15),
    "collaborative": (collaborative, 15),
}


@pytest.mark.parametrize("subject", MUTATED)
def test_read_attention_mutant_matches_within_tolerance(subject: str) -> None:
    """A matched mutant computes what its block describes, within 1e-4, at two shapes."""
    build, at_least = MUTATED[subject]
    matched = 0
    for index in range(len(mutants(build()))):
        model = build()
        _, change = mutants(model)[index]
        change()
        matches = read_attention(model)
        assert len(matches.blocks) + len(matches.unmatched) == 1
        matched += len(matches.blocks)
        for certified in matches.certified:
            assert certified.max_abs_error <= 1e-4
    assert matched >= at_least  # among them: scales, weights, operands of Add and Mul swapped


def test_find_attention_output_by_time_is_certified() -> None:
    """The output is (S, B, D), as nn.MultiheadAttention returns it without ``batch_first``."""
    context = PARTS["context"].replace("0, 2, 1, 3", "2, 0, 1, 3")
    model = attention(context=context, output_type=f"float[sequence, batch, {D}] out")
    block = only(model)
    assert block.output is not None and block.output.sequence_first


def test_read_attention_lengths_that_differ_tell_causal_masks_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whether a causal mask begins or ends with the keys shows only if S is not T."""
    model = attention(
        inputs=f"float[batch, sequence, {D}] x, float[batch, memory, {D}] y",
        opset=23,
        **MEMORY
        | fused_parts(f"Attention <is_causal = 1, scale = {SCALE}> (q, k, v)")
        | {"k": MEMORY["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3")},
    )
    assert only(model).steps == (Causal(),)
    blocks, unmatched = find_attention(model)
    wrong = [replace(blocks[0], steps=(Causal(ends_together=True),))]
    monkeypatch.setattr(certify, "find_attention", lambda _: (wrong, unmatched))
    (block,) = read_attention(model).unmatched
    assert "the graph computes something else" in block.reason


@pytest.mark.parametrize(("name", "layers"), [("vit_mnist_researchase", 6), ("gpt_nano_sort", 3)])
def test_find_attention_trained_graph_matches(shared: Path, name: str, layers: int) -> None:
    path = next((shared / "models" / name).glob("*.onnx"), None)
    if path is None:
        pytest.skip(f"{name} is not here")
    matches = read_attention(ir.load(path))
    assert (len(matches.blocks), matches.unmatched) == (layers, ())
