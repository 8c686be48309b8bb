"""Zero wrong readings: graphs with something changed are read as what they are now, or missed.

A seed is a graph that is read; a mutant is a seed with one or two small changes. The judge is not
the certificate: it runs the whole mutant in ONNX Runtime, at other lengths than the certificate
does, and compares what each certified block takes in and gives out with ``attention_reference``.
Where collaborative heads apply, the rewritten mutant must compute the same outputs.

    MUTANTS=20000 python -m pytest tests/attnserve/test_mutations.py

runs more of them; the same numbers are always the same mutants.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import SHAPES, read_attention
from attnserve.runtime.session import open_session
from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.shapes import ShapeInfo, bind_axes, infer_shapes_at
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.editing import exposing
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor, sharing_refusal
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.reference import attention_reference, inputs_of, logits_reference
from tests.graph_passes.graphs import FUSED, PARTS, D, H, K, V, attention, graph, text_of
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS, SPLIT

COUNT = int(os.environ.get("MUTANTS", "400"))
CHUNKS = 4
"""The mutants are run in so many tests, each with numbers of its own."""

TOLERANCE = 1e-3
"""Largest difference of a certified block from the reference, relative above magnitude 1."""

SAME = 1e-4
"""Largest difference of the outputs of a rewritten mutant, relative above magnitude 1."""

LENGTHS = (
    {"batch": 5, "sequence": 6, "memory": 8, "past": 2},
    {"batch": 1, "sequence": 9, "memory": 5, "past": 3},
)
"""Of the runs; ``ALIKE`` where a mutant runs only at keys as many as queries, and so on."""
ALIKE = tuple(
    {"batch": batch, "sequence": length, "memory": length, "past": length}
    for batch, length in ((5, 6), (1, 9))
)
assert not {(each["batch"], each["sequence"]) for each in LENGTHS} & set(SHAPES)


# ---- seeds: attention in every form ------------------------------------------------------------

X = f"float[batch, sequence, {D}] x"
MASK = "float[batch, 1, 1, sequence] mask"
KEPT = "bool[batch, 1, sequence, sequence] mask"
CONSTANTS = {
    **LAID_OUT,
    "per_query": np.linspace(-1, 1, 9, dtype=np.float32).reshape(1, 1, 1, 9),
    "gamma": np.linspace(0.5, 1.5, K, dtype=np.float32),
    "beta": np.linspace(-0.5, 0.5, K, dtype=np.float32),
    "two": np.float32(2),
    "epsilon": np.float32(1e-5),
    "cap": np.float32(3),
    "eight_tokens": np.array([8]),
    "half": np.array([K // 2]),
    "whole": np.array([K]),
    "eight": np.array([4, 4]),
    "kv_heads": np.array([0, 0, 2, K]),
    "four_heads": np.array([0, 0, 4, K]),
    "spread": np.array([1, 1, 2, 1, 1]),
    "four_folded": np.array([0, 4, -1, K]),
}
RANDOM = {
    "Wq_heads": (D, H, K), "Wk_heads": (D, H, K), "Wv_heads": (D, H, V), "Wo_heads": (H, V, D),
    "bq_heads": (H, K), "Wq16": (D, 16), "Wk8": (D, 8), "Wv8": (D, 8), "Wo16": (16, D),
    "bq16": (16,), "Wqkv3": (D, 3 * H * K), "bqkv3": (3 * H * K,), "distances": (H, 9, 9),
    "Wup": (D, 20), "Wdown": (20, D), "gamma12": (D,), "beta12": (D,), "relative": (K, 9),
}  # fmt: skip
for index, (name, shape) in enumerate(RANDOM.items()):
    values = np.random.default_rng(100 + index).standard_normal(shape) / 2
    CONSTANTS[name] = values.astype(np.float32)

BY_HEAD = {
    part: PARTS[part].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3") for part in "qkv"
}
SIDE_BY_SIDE = {part: f"\n {part}0 = MatMul(x, W{part})\n {part} = Add({part}0, b{part})"
                for part in "qkv"}  # fmt: skip
EVEN = {**SIDE_BY_SIDE, "v": "\n v0 = MatMul(x, Wk)\n v = Add(bk, v0)",
        "output": "\n o = MatMul(c, Wo12)\n out = Add(o, bo)"}  # fmt: skip


def written(**arguments: Any) -> Callable[[], ir.Model]:
    return lambda: attention(**{"constants": CONSTANTS, **arguments})


def operator(call: str, inputs: str = X, **parts: str) -> Callable[[], ir.Model]:
    """Attention inside one operator that makes the context ``c``."""
    return written(opset=23, inputs=inputs, **{**FUSED, **parts, "context": f"\n {call}"})


def rotated(name: str) -> str:
    return f"""
        {name}_cos = Mul({name}, cos)
        {name}_low = Slice({name}, n0, half, last)
        {name}_high = Slice({name}, half, whole, last)
        {name}_minus = Neg({name}_high)
        {name}_swapped = Concat <axis = -1> ({name}_minus, {name}_low)
        {name}_sin = Mul({name}_swapped, sin)
        {name}_turned = Add({name}_cos, {name}_sin)"""


def normed(name: str) -> str:
    return f"""
        {name}_square = Pow({name}, two)
        {name}_mean = ReduceMean <axes = [-1], keepdims = 1> ({name}_square)
        {name}_more = Add({name}_mean, epsilon)
        {name}_root = Sqrt({name}_more)
        {name}_normed = Div({name}, {name}_root)
        {name}_weighted = Mul({name}_normed, gamma)"""


def cross(x: str, y: str) -> dict[str, str]:
    """Keys and values of another input."""
    return {part: PARTS[part].replace("(x,", f"({y if part in 'kv' else x},") for part in "qkv"}


def layer(index: int, x: str, out: str) -> str:
    """One whole attention of its own names, a residual sum, a feed-forward network."""
    text = "".join(PARTS.values())
    for name in re.findall(r"(\w+) =", text):
        for end in (" =", ",", ")"):
            text = text.replace(f" {name}{end}", f" {name}_{index}{end}")
            text = text.replace(f"({name}{end}", f"({name}_{index}{end}")
    text = text.replace("(x,", f"({x},")
    return f"""{text}
        sum_{index} = Add(out_{index}, {x})
        y_{index} = LayerNormalization (sum_{index}, gamma12, beta12)
        up_{index} = MatMul(y_{index}, Wup)
        act_{index} = Tanh(up_{index})
        down_{index} = MatMul(act_{index}, Wdown)
        {out} = Add(down_{index}, y_{index})"""


def collaborative() -> ir.Model:
    model = attention()
    blocks, _ = find_attention(model)
    return Collaborate.with_factors({b.name: factor(b, 5) for b in blocks})(model).model


EINSUM = {
    "q": '\n q0 = Einsum <equation = "bsd,dhk->bshk"> (x, Wq_heads)\n q = Add(q0, bq_heads)',
    "k": '\n k = Einsum <equation = "btd,dhk->bthk"> (x, Wk_heads)',
    "v": '\n v = Einsum <equation = "btd,dhv->bthv"> (x, Wv_heads)',
    "scores": '\n s0 = Einsum <equation = "bshk,bthk->bhst"> (q, k)\n s = Mul(s0, scale)',
    "context": '\n c = Einsum <equation = "bhst,bthv->bshv"> (p, v)',
    "output": '\n o = Einsum <equation = "bshv,hvd->bsd"> (c, Wo_heads)\n out = Add(o, bo)',
}
GROUPED = {
    "q": "\n q0 = MatMul(x, Wq16)\n q1 = Add(q0, bq16)\n q2 = Reshape(q1, four_heads)"
         "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
    **{part: f"""
        {part}0 = MatMul(x, W{part}8)
        {part}1 = Reshape({part}0, kv_heads)
        {part}2 = Transpose <perm = [0, 2, 1, 3]> ({part}1)
        {part}3 = Unsqueeze({part}2, a2)
        {part}4 = Expand({part}3, spread)
        {part}5 = Reshape({part}4, four_folded)
        """ for part in "kv"},
    "scores": "\n kT = Transpose <perm = [0, 1, 3, 2]> (k5)\n s0 = MatMul(q, kT)"
              "\n s = Mul(s0, scale)",
    "context": "\n c0 = MatMul(p, v5)\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)"
               "\n c = Reshape(c1, merge)",
    "output": "\n out = MatMul(c, Wo16)",
}  # fmt: skip
GROUPED["k"] += "\n spread_s = Identity(spread)"
TURNED = {
    "scores": f"{rotated('q')}{rotated('k')}"
              "\n kT = Transpose <perm = [0, 1, 3, 2]> (k_turned)"
              "\n s0 = MatMul(q_turned, kT)\n s = Mul(s0, scale)",
    "k": BY_HEAD["k"],
}  # fmt: skip
NORMED = {
    "k": BY_HEAD["k"],
    "scores": f"{normed('q')}{normed('k')}"
              "\n kT = Transpose <perm = [0, 1, 3, 2]> (k_weighted)"
              "\n s0 = MatMul(q_weighted, kT)\n s = Mul(s0, scale)",
}  # fmt: skip
NORM_OPERATOR = {
    "k": BY_HEAD["k"],
    "scores": "\n qn = LayerNormalization (q, gamma, beta)\n kn = LayerNormalization (k, gamma)"
              "\n kT = Transpose <perm = [0, 1, 3, 2]> (kn)\n s0 = MatMul(qn, kT)"
              "\n s = Mul(s0, scale)",
}  # fmt: skip
CACHED = {
    "k": BY_HEAD["k"],
    "scores": "\n keys = Concat <axis = 2> (past_key, k)\n values = Concat <axis = 2> (past_v, v)"
              "\n kT = Transpose <perm = [0, 1, 3, 2]> (keys)\n s0 = MatMul(q, kT)"
              "\n s = Mul(s0, scale)",
    "context": PARTS["context"].replace("(p, v)", "(p, values)"),
}  # fmt: skip
PAST = f"float[batch, {H}, past, {K}] past_key, float[batch, {H}, past, {V}] past_v"
SEQUENCE_FIRST = {
    "q": "\n ends = Shape <start = 0, end = 1> (x)\n rows = Concat <axis = 0> (ends, last, n_k)"
         "\n rows_v = Concat <axis = 0> (ends, last, n_v)\n q0 = MatMul(x, Wq)\n q1 = Add(q0, bq)"
         "\n q2 = Reshape(q1, rows)\n q = Transpose <perm = [1, 0, 2]> (q2)",
    "k": "\n k0 = MatMul(x, Wk)\n k2 = Reshape(k0, rows)"
         "\n kT = Transpose <perm = [1, 2, 0]> (k2)",
    "v": "\n v0 = MatMul(x, Wv)\n v2 = Reshape(v0, rows_v)"
         "\n v = Transpose <perm = [1, 0, 2]> (v2)",
    "mask": "\n m = Identity(s)",
    "context": "\n c0 = MatMul(p, v)\n c1 = Transpose <perm = [1, 0, 2]> (c0)"
               "\n both = Shape <start = 0, end = 2> (x)\n whole_c = Concat <axis = 0> (both, last)"
               "\n c = Reshape(c1, whole_c)",
}  # fmt: skip
CONSTANTS |= {"n_k": np.array([K]), "n_v": np.array([V])}

SEEDS: dict[str, Callable[[], ir.Model]] = {
    **{f"layout: {name}": written(**parts) for name, parts in LAYOUTS.items()},
    **{f"packed: {how}": written(q=text, k="", v="", output="\n out = MatMul(c, Wo12)")
       for how, text in SPLIT.items()},
    "mask by Where": written(inputs=f"{X}, {KEPT}", mask="\n m = Where(mask, s, low)"),
    "mask by Where of -inf": written(
        inputs=f"{X}, {KEPT}", mask="\n n = Not(mask)\n m = Where(n, infinity, s)"),
    "weighted mask": written(
        inputs=f"{X}, float[batch, 1, sequence, sequence] weight, {MASK}",
        mask="\n m0 = Mul(s, weight)\n m = Add(m0, mask)"),
    "soft cap": written(
        mask="\n m0 = Div(s, cap)\n m1 = Tanh(m0)\n m2 = Mul(m1, cap)\n m = Add(m2, mask)"),
    "bias by head": written(
        inputs=f"float[batch, 9, {D}] x, float[batch, 1, 1, 9] mask",
        output_type=f"float[batch, 9, {D}] out",
        mask="\n m0 = Add(s, distances)\n m = Add(m0, mask)"),
    "bias made of the queries": written(
        inputs=f"float[batch, 9, {D}] x", output_type=f"float[batch, 9, {D}] out",
        mask="\n b0 = MatMul(q, relative)\n m = Add(s, b0)"),
    "Einsum": written(**EINSUM),
    "grouped heads": written(**GROUPED),
    "one head for all": written(
        k="\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
          "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        v="\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
          "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)"),
    "cross": written(
        inputs=f"{X}, float[batch, memory, {D}] y, float[batch, 1, 1, memory] mask",
        **cross("x", "y")),
    "rotary": written(
        inputs=f"{X}, {MASK}, float[sequence, {K}] cos, float[sequence, {K}] sin", **TURNED),
    "q/k norm": written(**NORMED),
    "q/k norm by an operator": written(**NORM_OPERATOR),
    "cached keys": written(
        inputs=f"{X}, {PAST}", **{**CACHED, "mask": "\n m = Identity(s)"}),
    "sequence first": written(
        inputs=f"float[sequence, batch, {D}] x",
        output_type=f"float[sequence, batch, {D}] out", **SEQUENCE_FIRST),
    "keys by queries": written(
        scores="\n kk = Transpose <perm = [0, 1, 3, 2]> (kT)"
               "\n qT = Transpose <perm = [0, 1, 3, 2]> (q)\n s0 = MatMul(kk, qT)"
               "\n s = Mul(s0, scale)",
        inputs=X, mask="", softmax="\n p0 = Softmax <axis = 2> (s)"
                                   "\n p = Transpose <perm = [0, 1, 3, 2]> (p0)"),
    "softmax in parts": written(
        softmax="\n e0 = ReduceMax <axes = [-1]> (m)\n e1 = Sub(m, e0)\n e = Exp(e1)"
                "\n t = ReduceSum(e, last)\n p = Div(e, t)"),
    "two layers": lambda: graph(
        layer(0, "x", "h") + layer(1, "h", "out"), constants=CONSTANTS),
    "collaborative": collaborative,
    "Attention": operator(
        f"c0 = Attention <scale = 0.37> (q, k, v){PARTS['context'].partition('v)')[2]}",
        **BY_HEAD),
    "Attention that splits heads": operator(
        "c = Attention <q_num_heads = 3, kv_num_heads = 3, softcap = 2.0> (q, k, v, mask)",
        f"{X}, {KEPT}", **SIDE_BY_SIDE),
    "causal Attention": operator(
        "c = Attention <q_num_heads = 3, kv_num_heads = 3, is_causal = 1> (q, k, v)",
        **SIDE_BY_SIDE),
    "Attention with a cache": operator(
        "c, pk, pv = Attention <q_num_heads = 3, kv_num_heads = 3> (q, k, v, , past_key, past_v)",
        f"{X}, {PAST}", **SIDE_BY_SIDE),
    "grouped Attention": operator(
        "c = Attention <q_num_heads = 4, kv_num_heads = 2> (q, k, v, mask)",
        f"{X}, float[batch, 1, sequence, sequence] mask",
        q="\n q = MatMul(x, Wq16)", k="\n k = MatMul(x, Wk8)", v="\n v = MatMul(x, Wv8)",
        output="\n out = MatMul(c, Wo16)"),
    "MultiHeadAttention": operator(
        "c = com.microsoft.MultiHeadAttention <num_heads = 3, scale = 0.37> (q, k, v, bqkv)",
        **EVEN),
    "MultiHeadAttention with masks": operator(
        "c = com.microsoft.MultiHeadAttention <num_heads = 3> (q, k, v, , key_mask, mask)",
        f"{X}, int32[batch, sequence] key_mask, float[batch, 1, sequence, sequence] mask", **EVEN),
    "MultiHeadAttention, causal": operator(
        "c = com.microsoft.MultiHeadAttention <num_heads = 3, unidirectional = 1> (q, k, v)",
        **EVEN),
    "weights behind other nodes": written(
        q="\n W0 = Transpose <perm = [1, 0]> (WqT)\n W1 = Identity(W0)\n q0 = MatMul(x, W1)"
          "\n q1 = Add(q0, bq)\n q2 = Reshape(q1, heads)"
          "\n q = Transpose <perm = [0, 2, 1, 3]> (q2)",
        k="\n W2 = Mul(Wk, bk)\n k0 = MatMul(x, W2)\n k2 = Reshape(k0, heads)"
          "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)"),
    "contrib Attention": operator(
        "c = com.microsoft.Attention <num_heads = 3> (x, Wqkv, bqkv, key_mask)",
        f"{X}, int32[batch, sequence] key_mask",
        q="", k="", v="", output="\n out = MatMul(c, Wo12)"),
}  # fmt: skip

TRAPS: dict[str, Callable[[], ir.Model]] = {
    # Causal from the first key, but for the last query, which sees all of them.
    "causal MultiHeadAttention of two inputs": operator(
        "c = com.microsoft.MultiHeadAttention <num_heads = 3, unidirectional = 1> (q, k, v)",
        f"{X}, float[batch, memory, {D}] y",
        **{part: EVEN[part].replace("(x,", f"({'y' if part in 'kv' else 'x'},") for part in "qkv"},
        output=EVEN["output"]),
    "a window of the queries": written(
        scores="\n near = Slice(q, n0, eight_tokens, a2)\n s0 = MatMul(near, kT)"
               "\n s = Mul(s0, scale)"),
    "a window of the context": written(
        context="\n c0 = MatMul(p, v)\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)"
                "\n c2 = Reshape(c1, merge)\n c = Slice(c2, n0, eight_tokens, a1)"),
}  # fmt: skip
"""What looks like attention at the lengths of the certificate, and is not at others."""


# ---- mutations: each changes one thing, and says what; "" where it does not apply ---------------

Rng = np.random.Generator
Mutation = Callable[[ir.Model, Rng], str]


def nodes_of(model: ir.Model, *types: str) -> list[ir.Node]:
    return [node for node in model.graph if node.op_type in types]


def one_of(rng: Rng, things: Sequence[Any]) -> Any:
    return things[int(rng.integers(len(things)))] if things else None


def known(model: ir.Model) -> ShapeInfo:
    return infer_shapes_at(model, bind_axes(model.graph, batch=2, sequence=5))


def tensors(model: ir.Model, facts: ShapeInfo) -> list[ir.Value]:
    """What nodes make of floats, two axes or more; the tokens where nothing is."""
    made = [value for node in model.graph for value in node.outputs]
    found = [
        value
        for value in made
        if (fact := facts.known.get(value)) is not None
        and fact.dtype == ir.DataType.FLOAT
        and len(fact.shape) > 1
        and value.uses()
    ]
    return found or [model.graph.inputs[0]]


def constant(model: ir.Model, array: Any) -> ir.Value:
    name = f"mutant_{len(model.graph.initializers)}"
    value = ir.val(name, const_value=ir.tensor(np.asarray(array), name=name))
    model.graph.register_initializer(value)
    return value


def insert(
    model: ir.Model, rng: Rng, value: ir.Value, op: str, *others: ir.Value | None,
    first: bool = True, **attributes: Any
) -> str:  # fmt: skip
    """A node after a value, for all who read it or for one."""
    uses = list(value.uses())
    if not uses:
        return ""
    chosen = uses if rng.random() < 0.5 else [one_of(rng, uses)]
    inputs = [value, *others] if first else [*others, value]
    node = ir.node(op, inputs, attributes=attributes)
    node.outputs[0].name = f"mutant_{op}_{sum(1 for _ in model.graph)}"
    if (producer := value.producer()) is not None:
        model.graph.insert_after(producer, node)
    else:
        model.graph.insert_before(model.graph[0], node)
    for user, index in chosen:
        user.replace_input_with(index, node.outputs[0])
    model.graph.sort()
    return f"{op} {attributes} after {value.name}, for {len(chosen)} of {len(uses)}"


def bypass(node: ir.Node | None, index: int = 0) -> str:
    """Whoever reads the node reads one of its inputs."""
    if node is None or node.outputs[0].is_graph_output() or node.inputs[index] is None:
        return ""
    for user, at in list(node.outputs[0].uses()):
        user.replace_input_with(at, node.inputs[index])
    return f"without {node.op_type} {node.outputs[0].name}"


def activation(node: ir.Node) -> int | None:
    """The input of a node with a constant operand that is not constant."""
    free = [i for i, value in enumerate(node.inputs[:2]) if not is_constant(value)]
    return free[0] if len(free) == 1 else None


def swapped_operands(model: ir.Model, rng: Rng) -> str:
    types = ("MatMul", "Add", "Sub", "Mul", "Div", "Concat", "Where", "Einsum", "Attention",
             "MultiHeadAttention")  # fmt: skip
    node = one_of(rng, [n for n in nodes_of(model, *types) if len(n.inputs) > 1])
    if node is None:
        return ""
    last = 3 if node.op_type in ("Where", "Attention", "MultiHeadAttention") else 2
    i, j = rng.choice(min(last, len(node.inputs)), 2, replace=False)
    a, b = node.inputs[i], node.inputs[j]
    node.replace_input_with(i, b)
    node.replace_input_with(j, a)
    return f"operands {i} and {j} of {node.op_type} {node.outputs[0].name} swapped"


def other_permutation(model: ir.Model, rng: Rng) -> str:
    node = one_of(rng, nodes_of(model, "Transpose"))
    if node is None:
        return ""
    perm = list(node.attributes["perm"].as_ints())
    i = int(rng.integers(len(perm) - 1))
    perm[i], perm[i + 1] = perm[i + 1], perm[i]
    node.attributes.add(ir.AttrInt64s("perm", perm))
    return f"{node.outputs[0].name} by {perm}"


def other_split_of_heads(model: ir.Model, rng: Rng) -> str:
    node = one_of(rng, nodes_of(model, "Reshape"))
    target = None if node is None else node.inputs[1]
    if node is None or not is_constant(target):
        return ""
    shape = constant_array(target).tolist()
    places = [i for i, size in enumerate(shape) if size != 0]
    if len(places) < 2:
        return ""
    i, j = rng.choice(places, 2, replace=False)
    if rng.random() < 0.5:
        shape[i], shape[j] = shape[j], shape[i]
    else:
        shape[i], shape[j] = shape[i] * 2, max(1, shape[j] // 2)
    node.replace_input_with(1, constant(model, np.array(shape)))
    return f"{node.outputs[0].name} as {shape}"


def other_scale(model: ir.Model, rng: Rng) -> str:
    found = [v for v in model.graph.initializers.values()
             if v.dtype == ir.DataType.FLOAT and v.const_value.size == 1 and v.uses()]  # fmt: skip
    value = one_of(rng, found)
    if value is None:
        return ""
    factor = one_of(rng, [0.5, 2.0, -1.0, 0.01])
    array = np.asarray(value.const_value.numpy() * np.float32(factor))
    value.const_value = ir.tensor(array, name=value.name)
    return f"{value.name} times {factor}"


def moved_scale(model: ir.Model, rng: Rng) -> str:
    """The scale taken from where it is, and put behind another value."""
    scales = [n for n in nodes_of(model, "Mul", "Div")
              if is_constant(n.inputs[1]) and constant_array(n.inputs[1]).size == 1]  # fmt: skip
    node = one_of(rng, scales)
    if not bypass(node):
        return ""
    value = one_of(rng, tensors(model, known(model)))
    return insert(model, rng, value, node.op_type, node.inputs[1]) if value is not None else ""


def scaled_once_more(model: ir.Model, rng: Rng) -> str:
    value = one_of(rng, tensors(model, known(model)))
    return insert(model, rng, value, "Mul", constant(model, np.float32(0.7)))


def scaled_by_element(model: ir.Model, rng: Rng) -> str:
    """A constant for each element of one axis of known length."""
    facts = known(model)
    value = one_of(rng, tensors(model, facts))
    shape = facts.shape(value)
    if shape is None or len(shape) < 2:
        return ""
    axis = int(rng.integers(1, len(shape)))
    factor = np.linspace(0.5, 1.5, shape[axis], dtype=np.float32)
    factor = factor.reshape([-1] + [1] * (len(shape) - axis - 1))
    return insert(model, rng, value, one_of(rng, ["Mul", "Add"]), constant(model, factor))


def scaled_by_length(model: ir.Model, rng: Rng) -> str:
    """A scale that another batch or sequence changes."""
    value = one_of(rng, tensors(model, known(model)))
    if value is model.graph.inputs[0]:
        return ""
    axis = int(rng.integers(2))
    ends = {"start": axis, "end": axis + 1}
    length = ir.node("Shape", [model.graph.inputs[0]], attributes=ends)
    scale = ir.node("Cast", length.outputs, attributes={"to": 1})
    for node in (length, scale):
        node.outputs[0].name = f"mutant_{node.op_type}_{sum(1 for _ in model.graph)}"
        model.graph.append(node)
    return insert(model, rng, value, "Div", scale.outputs[0]) + f" by axis {axis}"


def other_axis(model: ir.Model, rng: Rng) -> str:
    types = ("Softmax", "Concat", "Gather", "Split", "ReduceSum", "ReduceMean", "ReduceMax")
    node = one_of(rng, nodes_of(model, *types))
    if node is None:
        return ""
    axis = int(rng.integers(-4, 4))
    name = "axes" if "axes" in node.attributes else "axis"
    node.attributes.add(ir.AttrInt64s(name, [axis]) if name == "axes" else ir.AttrInt64(name, axis))
    return f"{node.op_type} {node.outputs[0].name} over axis {axis}"


def masks_of(model: ir.Model) -> list[tuple[ir.Node, int]]:
    return [(node, index) for value in model.graph.inputs if "mask" in (value.name or "")
            for node, index in value.uses()]  # fmt: skip


def mask_removed(model: ir.Model, rng: Rng) -> str:
    node, index = one_of(rng, masks_of(model)) or (None, 0)
    if node is None or node.op_type not in ("Add", "Where"):
        return ""
    keep = 1 if node.op_type == "Where" else 1 - index
    return bypass(node, keep)


def mask_twice(model: ir.Model, rng: Rng) -> str:
    """The same mask, added or selected by, once more, here or elsewhere."""
    node, index = one_of(rng, masks_of(model)) or (None, 0)
    if node is None or node.op_type not in ("Add", "Where"):
        return ""
    value = node.outputs[0] if rng.random() < 0.5 else one_of(rng, tensors(model, known(model)))
    mask = node.inputs[index]
    if node.op_type == "Add":
        return insert(model, rng, value, "Add", mask)
    return insert(model, rng, value, "Where", mask, node.inputs[2], first=False)


def mask_negated(model: ir.Model, rng: Rng) -> str:
    node, index = one_of(rng, masks_of(model)) or (None, 0)
    if node is None:
        return ""
    mask = node.inputs[index]
    if mask.dtype == ir.DataType.INT32:
        return insert(model, rng, mask, "Sub", constant(model, np.int32(1)), first=False)
    return insert(model, rng, mask, "Not" if mask.dtype == ir.DataType.BOOL else "Neg")


def mask_turned(model: ir.Model, rng: Rng) -> str:
    """Its last two axes exchanged: (B, 1, T, S)."""
    node, index = one_of(rng, masks_of(model)) or (None, 0)
    mask = None if node is None else node.inputs[index]
    if mask is None or mask.shape is None or len(mask.shape) < 4:
        return ""
    return insert(model, rng, mask, "Transpose", perm=[0, 1, 3, 2])


def also_an_output(model: ir.Model, rng: Rng) -> str:
    value = one_of(rng, tensors(model, known(model)))
    if value.is_graph_output():
        return ""
    model.graph.outputs.append(value)
    return f"{value.name} is an output too"


def also_read(model: ir.Model, rng: Rng) -> str:
    """Another node reads an intermediate value, and its own result is an output."""
    value = one_of(rng, tensors(model, known(model)))
    op = one_of(rng, ["Relu", "Exp", "Neg", "Shape", "Softmax", "Identity"])
    node = ir.node(op, [value])
    node.outputs[0].name = f"mutant_{op}_{sum(1 for _ in model.graph)}"
    model.graph.append(node)
    model.graph.outputs.append(node.outputs[0])
    return f"{op} reads {value.name} too"


def weight_as_an_input(model: ir.Model, rng: Rng) -> str:
    found = [v for v in model.graph.initializers.values()
             if v.dtype == ir.DataType.FLOAT and v.uses() and v.const_value.size > 1]  # fmt: skip
    value = one_of(rng, found)
    if value is None:
        return ""
    shape, name = ir.Shape(value.const_value.shape), f"{value.name}_given"
    given = ir.Value(name=name, shape=shape, type=ir.TensorType(ir.DataType.FLOAT))
    model.graph.inputs.append(given)
    for user, index in list(value.uses()):
        user.replace_input_with(index, given)
    return f"{value.name} is an input"


def weight_changed(model: ir.Model, rng: Rng) -> str:
    found = [v for v in model.graph.initializers.values()
             if v.dtype == ir.DataType.FLOAT and v.uses() and v.const_value.size > 1]  # fmt: skip
    value = one_of(rng, found)
    if value is None:
        return ""
    array = value.const_value.numpy()
    noise = rng.standard_normal(array.shape).astype(np.float32)
    value.const_value = ir.tensor(np.asarray(array + noise), name=value.name)
    return f"{value.name} has other elements"


def transposed(model: ir.Model, rng: Rng) -> str:
    """Turned once, or twice: back, or further."""
    facts = known(model)
    value = one_of(rng, tensors(model, facts))
    perm = [int(axis) for axis in rng.permutation(len(facts.shape(value) or ()))]
    before = set(model.graph)
    said = insert(model, rng, value, "Transpose", perm=perm)
    (node,) = set(model.graph) - before
    if rng.random() < 0.3:
        return said
    again = [int(axis) for axis in np.argsort(perm)] if rng.random() < 0.6 else perm
    return f"{said}; {insert(model, rng, node.outputs[0], 'Transpose', perm=again)}"


def backwards(model: ir.Model, rng: Rng) -> str:
    """One axis counted from its end."""
    facts = known(model)
    value = one_of(rng, [*tensors(model, facts), *model.graph.inputs])
    shape = facts.shape(value)
    if not shape:
        return ""
    axis = int(rng.integers(len(shape)))
    ends = ([-1], [np.iinfo(np.int64).min], [axis], [-1])
    return insert(model, rng, value, "Slice", *(constant(model, np.array(end)) for end in ends)) + (
        f" axis {axis}"
    )


def heads_swapped(model: ir.Model, rng: Rng) -> str:
    """Elements of a short axis in another order: heads, or what is inside them."""
    facts = known(model)
    value = one_of(rng, tensors(model, facts))
    shape = facts.shape(value) or ()
    axes = [axis for axis, size in enumerate(shape) if size in (H, 4, V)]
    if not axes:
        return ""
    axis = one_of(rng, axes)
    order = rng.permutation(shape[axis])
    return insert(model, rng, value, "Gather", constant(model, order), axis=axis) + f" {order}"


def fewer(model: ir.Model, rng: Rng) -> str:
    """All but the first of one axis, tokens or heads."""
    facts = known(model)
    value = one_of(rng, tensors(model, facts))
    axis = int(rng.integers(len(facts.shape(value) or ())))
    ends = (constant(model, np.array([end])) for end in (1, np.iinfo(np.int64).max, axis))
    return insert(model, rng, value, "Slice", *ends) + f" axis {axis}"


def only_the_first(model: ir.Model, rng: Rng) -> str:
    """At most eight of one axis: no change where there are fewer, as in the certificate."""
    facts = known(model)
    value = one_of(rng, [*tensors(model, facts), model.graph.inputs[0]])
    shape = facts.shape(value) or ()
    axes = [axis for axis, size in enumerate(shape) if size in (2, 5)]
    if not axes:
        return ""
    axis = one_of(rng, axes)
    ends = (constant(model, np.array([end])) for end in (0, 8, axis))
    return insert(model, rng, value, "Slice", *ends) + f" axis {axis}"


def something_inserted(model: ir.Model, rng: Rng) -> str:
    value = one_of(rng, [*tensors(model, known(model)), model.graph.inputs[0]])
    op = one_of(rng, ["Identity", "Neg", "Neg", "Dropout", "Abs", "Relu", "Tanh", "Exp", "Cast",
                      "Softmax"])  # fmt: skip
    if op == "Cast":
        return insert(model, rng, value, op, to=one_of(rng, [1, 1, 6, 11]))
    return insert(model, rng, value, op)


def floored(model: ir.Model, rng: Rng) -> str:
    value = one_of(rng, tensors(model, known(model)))
    return insert(model, rng, value, one_of(rng, ["Max", "Min"]), constant(model, np.float32(0.1)))


def node_removed(model: ir.Model, rng: Rng) -> str:
    """A bias, a norm, a mask or anything else that keeps its shape is dropped."""
    facts = known(model)
    found = [
        (node, index)
        for node in model.graph
        for index, value in enumerate(node.inputs)
        if value is not None and value.producer() is not None and node.outputs[0].uses()
        and facts.shape(value) is not None
        and facts.shape(value) == facts.shape(node.outputs[0])
    ]  # fmt: skip
    node, index = one_of(rng, found) or (None, 0)
    return bypass(node, index)


def read_elsewhere(model: ir.Model, rng: Rng) -> str:
    """One input of one node is another value of the same shape."""
    facts = known(model)
    node = one_of(rng, [n for n in model.graph if n.inputs])
    index = int(rng.integers(len(node.inputs)))
    value = node.inputs[index]
    if value is None:
        return ""
    earlier = [v for n in model.graph for v in n.outputs][: sum(
        len(n.outputs) for n in iter_before(model, node))]  # fmt: skip
    pool = [*model.graph.inputs, *model.graph.initializers.values(), *earlier]
    alike = [
        other
        for other in pool
        if other is not value
        and facts.shape(other) is not None
        and facts.shape(other) == facts.shape(value)
        and facts.known[other].dtype == facts.known[value].dtype
    ]
    other = one_of(rng, alike)
    if other is None:
        return ""
    node.replace_input_with(index, other)
    return f"{node.op_type} {node.outputs[0].name} reads {other.name}, not {value.name}"


def iter_before(model: ir.Model, node: ir.Node) -> Iterator[ir.Node]:
    for each in model.graph:
        if each is node:
            return
        yield each


def another_source(model: ir.Model, rng: Rng) -> str:
    """One projection reads an input of its own, or the tokens turned around."""
    products = [n for n in nodes_of(model, "MatMul", "Gemm", "Einsum") if activation(n) is not None]
    node = one_of(rng, products)
    if node is None:
        return ""
    value = node.inputs[activation(node)]
    if value.shape is None:
        return ""
    given = ir.Value(name="other_x", shape=value.shape, type=ir.TensorType(ir.DataType.FLOAT))
    if any(each.name == "other_x" for each in model.graph.inputs):
        return ""
    model.graph.inputs.append(given)
    node.replace_input_with(node.inputs.index(value), given)
    return f"{node.op_type} {node.outputs[0].name} reads an input of its own"


def added_to(model: ir.Model, rng: Rng) -> str:
    """Another value of the same shape is added, subtracted or multiplied."""
    facts = known(model)
    values = [*tensors(model, facts), model.graph.inputs[0]]
    value = one_of(rng, values)
    alike = [other for other in values if facts.shape(other) == facts.shape(value)]
    other = one_of(rng, alike)
    order = {v: i for i, v in enumerate([*model.graph.inputs, *tensors(model, facts)])}
    a, b = sorted((value, other), key=order.__getitem__)
    users = [(user, index) for user, index in b.uses()]
    if not users:
        return ""
    return insert(model, rng, b, one_of(rng, ["Add", "Sub", "Mul"]), a) + f" and {a.name}"


def split_in_another_order(model: ir.Model, rng: Rng) -> str:
    node = one_of(rng, nodes_of(model, "Split"))
    if node is None:
        return ""
    i, j = rng.choice(len(node.outputs), 2, replace=False)
    a, b = list(node.outputs[i].uses()), list(node.outputs[j].uses())
    for uses, output in ((a, node.outputs[j]), (b, node.outputs[i])):
        for user, index in uses:
            user.replace_input_with(index, output)
    return f"outputs {i} and {j} of Split swapped"


def attribute_changed(model: ir.Model, rng: Rng) -> str:
    found = [(node, a) for node in model.graph for a in node.attributes.values()
             if a.type in (ir.AttributeType.INT, ir.AttributeType.FLOAT)]  # fmt: skip
    node, attribute = one_of(rng, found) or (None, None)
    if node is None:
        return ""
    if attribute.type == ir.AttributeType.FLOAT:
        value: Any = float(attribute.value * one_of(rng, [0.5, 2.0, 0.0, -1.0]))
        node.attributes.add(ir.AttrFloat32(attribute.name, value))
    else:
        value = int(attribute.value + one_of(rng, [-1, 1, 2]))
        node.attributes.add(ir.AttrInt64(attribute.name, value))
    return f"{attribute.name} of {node.op_type} is {value}"


ATTRIBUTES: dict[str, list[ir.Attr]] = {
    "Attention": [ir.AttrInt64("is_causal", 1), ir.AttrFloat32("softcap", 1.5),
                  ir.AttrFloat32("scale", 0.2), ir.AttrInt64("unidirectional", 1),
                  ir.AttrInt64("qk_matmul_output_mode", 1), ir.AttrInt64("do_rotary", 1),
                  ir.AttrInt64s("qkv_hidden_sizes", [12, 12, 12]),
                  ir.AttrFloat32("mask_filter_value", -5.0)],
    "MultiHeadAttention": [ir.AttrInt64("unidirectional", 1), ir.AttrFloat32("scale", 0.2),
                           ir.AttrFloat32("mask_filter_value", -5.0)],
    "Gemm": [ir.AttrFloat32("alpha", 0.5), ir.AttrFloat32("beta", 2.0), ir.AttrInt64("transA", 1),
             ir.AttrInt64("transB", 1)],
    "Reshape": [ir.AttrInt64("allowzero", 1)],
    "LayerNormalization": [ir.AttrFloat32("epsilon", 0.5), ir.AttrInt64("axis", -2)],
    "ReduceMean": [ir.AttrInt64("keepdims", 0)],
    "ReduceSum": [ir.AttrInt64("keepdims", 0)],
    "Split": [ir.AttrInt64("axis", 1)],
}  # fmt: skip


def attribute_added(model: ir.Model, rng: Rng) -> str:
    node = one_of(rng, nodes_of(model, *ATTRIBUTES))
    if node is None:
        return ""
    attribute = one_of(rng, ATTRIBUTES[node.op_type])
    node.attributes.add(attribute)
    return f"{attribute.name} of {node.op_type} is {attribute.value}"


def input_dropped(model: ir.Model, rng: Rng) -> str:
    """An operand that an operator can do without: a bias, a mask, a cache."""
    types = ("Attention", "MultiHeadAttention", "Gemm", "LayerNormalization")
    node = one_of(rng, [n for n in nodes_of(model, *types) if len(n.inputs) > 2])
    if node is None:
        return ""
    index = int(rng.integers(1, len(node.inputs)))
    node.replace_input_with(index, None)
    return f"{node.op_type} without input {index}"


def twice(model: ir.Model, rng: Rng) -> str:
    """A product or softmax is computed once more, and one reader takes the copy."""
    node = one_of(rng, nodes_of(model, "MatMul", "Softmax", "Einsum", "Reshape", "Attention"))
    if node is None or not (uses := list(node.outputs[0].uses())):
        return ""
    attributes = list(node.attributes.values())
    copy = ir.Node(
        node.domain, node.op_type, node.inputs, attributes, num_outputs=len(node.outputs)
    )
    for output, original in zip(copy.outputs, node.outputs, strict=True):
        output.name = f"mutant_{original.name}"
    model.graph.insert_after(node, copy)
    user, index = one_of(rng, uses)
    user.replace_input_with(index, copy.outputs[0])
    return f"{node.op_type} {node.outputs[0].name} is there twice"


MUTATIONS: tuple[Mutation, ...] = (
    swapped_operands, other_permutation, other_split_of_heads, other_scale, moved_scale,
    scaled_once_more, scaled_by_element, scaled_by_length, other_axis, mask_removed, mask_twice,
    mask_negated, mask_turned, also_an_output, also_read, weight_as_an_input, weight_changed,
    transposed, backwards, heads_swapped, fewer, only_the_first, something_inserted, floored,
    node_removed, read_elsewhere, another_source, added_to, split_in_another_order,
    attribute_changed, attribute_added, input_dropped, twice,
)  # fmt: skip


# ---- the judge ----------------------------------------------------------------------------------


def feeds_of(model: ir.Model, lengths: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Normal numbers of a size at which Exp keeps its digits.

    Of every row of a mask the first key is seen, and the second is not.
    """
    rng = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        shape = [dim if isinstance(dim, int) else lengths[str(dim.value)] for dim in value.shape]
        dtype = value.dtype.numpy()
        if "mask" not in value.name:
            arrays[value.name] = (rng.standard_normal(shape) / 2).astype(dtype)
            continue
        seen = rng.random(shape) < 0.7
        seen[..., 0], seen[..., 1] = True, False
        # Low enough to hide a key, near enough to keep the digits of what it is added to.
        arrays[value.name] = np.where(seen, 0, -30).astype(dtype) if dtype == np.float32 else (
            seen.astype(dtype))  # fmt: skip
    return arrays


Captured = dict[ir.Value, np.ndarray]


def captured(
    model: ir.Model, values: Sequence[ir.Value], feeds: Sequence[Mapping[str, np.ndarray]]
) -> list[Captured]:
    """These values in runs of the whole model, which must make every one of them in each."""
    made = [value for value in dict.fromkeys(values) if value.producer() is not None]
    with exposing(model, made):
        session = open_session(model, threads=1, optimize=False)
    runs = []
    for arrays in feeds:
        asked = {i.name: arrays[i.name] for i in session.get_inputs()}
        run = dict(zip(made, session.run(None, asked), strict=True))
        runs.append(run | {v: arrays[v.name] for v in model.graph.inputs if v.name in arrays})
    return [
        run | {value: constant_array(value) for value in values if value not in run} for run in runs
    ]


def largest(got: np.ndarray, want: np.ndarray, counted: np.ndarray) -> float:
    """The largest difference where it counts, relative above magnitude 1."""
    if got.size != want.size:
        return np.inf
    got = got.astype(np.float64).reshape(want.shape)
    off = np.abs(got - want) / np.maximum(1.0, np.abs(want))
    off = np.where(np.isnan(off), np.inf, off)
    return float(np.max(np.where(counted, off, 0.0), initial=0.0))


def disagreement(block: AttentionBlock, run: Captured) -> tuple[float, str]:
    """How far the graph is from what the block says of it, and in what.

    Rows that see no key are not compared: a softmax of nothing is NaN, and the reference says 0.
    Tokens that overflowed tell nothing.
    """
    tokens = (block.q.input, block.k.input, block.v.input)
    if not all(np.isfinite(run[value]).all() for value in tokens):
        return 0.0, "nothing"
    batch = block.q.sequences(lambda value: run[value].shape)
    with np.errstate(all="ignore"):
        expected = attention_reference(block, run, batch)
    sees = expected.probabilities.sum(axis=-1) > 0  # B H S
    worst = [(0.0, "nothing")]
    if block.logits is not None and block.logits_axes is not None:
        logits = logits_reference(block, run, batch)
        got = run[block.logits].transpose(block.logits_axes)
        worst.append((largest(got, logits, np.full(logits.shape, True)), "logits"))
    if block.probabilities is not None:
        got = run[block.probabilities]
        worst.append((largest(got, expected.probabilities, sees[..., None]), "probabilities"))
    rows = sees.all(axis=1)[..., None]  # B S 1
    if block.output is not None:
        assert expected.output is not None
        got = run[block.output.output]
        if block.output.sequence_first:
            got = got.reshape(-1, batch, expected.output.shape[-1]).swapaxes(0, 1)
        worst.append((largest(got, expected.output, rows), "output"))
    got = run[block.context]
    if block.context_axes is not None or got.ndim == 4:
        axes = block.context_axes or (0, 1, 2, 3)
        by_head = got.transpose(axes).reshape(batch, block.num_heads, -1, block.v_head_size)
        got = np.moveaxis(by_head, 1, 2)
    worst.append((largest(got, expected.context, rows), "context"))
    return max(worst)


def values_of(block: AttentionBlock) -> list[ir.Value]:
    """Everything the judge looks at."""
    output = None if block.output is None else block.output.output
    looked = (block.logits, block.probabilities, block.context, output, block.q.output)
    return [*inputs_of(block), *(value for value in looked if value is not None)]


@dataclass
class Verdicts:
    """What became of the mutants."""

    counts: Counter[str] = field(default_factory=Counter)
    by_mutation: Counter[tuple[str, str]] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def runnable(model: ir.Model, blocks: Sequence[AttentionBlock]) -> (
    tuple[list[dict[str, np.ndarray]], list[Captured]] | None
):  # fmt: skip
    """Runs of the mutant at lengths that it takes; None where it takes none of them."""
    values = [value for block in blocks for value in values_of(block)]
    for lengths in (LENGTHS, ALIKE):
        feeds = [feeds_of(model, each, seed) for seed, each in enumerate(lengths)]
        with suppress(Exception):  # onnxruntime raises a class of its own for each status
            return feeds, captured(model, [*values, *model.graph.outputs], feeds)
    return None


def may_share(block: AttentionBlock) -> bool:
    """Whether ``Collaborate`` applies, once a fused operator is decomposed."""
    return sharing_refusal(block) is None


def judge(model: ir.Model) -> Iterator[tuple[str, str]]:
    """("read" | "missed" | "refused" | "rewritten" | "wrong", what was seen) of a mutant."""
    reading = read_attention(model)
    if not all(miss.reason for miss in reading.unmatched):
        yield "wrong", "a miss without a reason"
    if not reading.blocks:
        yield "missed", ""
        return
    runs = runnable(model, reading.blocks)
    if runs is None:
        yield "refused", "ONNX Runtime does not run the whole mutant"
        return
    feeds, made = runs
    for block in reading.blocks:
        worst, where = max(disagreement(block, run) for run in made)
        if worst > TOLERANCE:
            yield "wrong", f"{block.name}: {where} differ by {worst:.1e}"
            return
    yield "read", ""
    apply = [block for block in reading.blocks if may_share(block)]
    if not apply:
        return
    before = [[run[output] for output in model.graph.outputs] for run in made]
    names = {block.name for block in apply}
    DecomposeAttention(frozenset(b.name for b in apply if b.logits is None))(model)
    blocks = [block for block in find_attention(model)[0] if block.name in names]
    Collaborate.with_factors({b.name: factor(b, b.num_heads * b.head_size) for b in blocks})(model)
    after = captured(model, list(model.graph.outputs), feeds)
    for old, run in zip(before, after, strict=True):
        for value, want in zip(model.graph.outputs, old, strict=True):
            got = run[value]
            finite = np.isfinite(want)
            if got.shape != want.shape or largest(got, want, finite) > SAME:
                yield "wrong", f"collaborative heads change the output {value.name!r}"
                return
    yield "rewritten", ""


def mutant(number: int) -> tuple[ir.Model, str]:
    """The mutant of a number: a seed and one or two changes, always the same."""
    rng = np.random.default_rng(number)
    name = list(SEEDS)[number % len(SEEDS)]
    model, said = SEEDS[name](), list[str]()
    wanted = 1 if rng.random() < 0.7 else 2
    for mutation in rng.permutation(np.array(MUTATIONS, dtype=object)):
        if len(said) == wanted:
            break
        if change := mutation(model, rng):
            said.append(f"{mutation.__name__}: {change}")
    return model, f"#{number}, {name}; {'; '.join(said)}"


def judged(numbers: Sequence[int]) -> Verdicts:
    verdicts = Verdicts()
    for number in numbers:
        model, said = mutant(number)
        text = text_of(model)
        try:
            found = list(judge(model))
        except Exception as error:
            found = [("wrong", f"crashed: {type(error).__name__}: {error}")]
        for verdict, seen in found:
            verdicts.counts[verdict] += 1
            if verdict == "wrong":
                verdicts.wrong.append(f"{said}\n{seen}\n{text}")
    return verdicts


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_mutant_is_read_wrong(chunk: int) -> None:
    numbers = range(chunk, COUNT, CHUNKS)
    verdicts = judged(numbers)
    assert not verdicts.wrong, "\n\n".join(verdicts.wrong[:3])
    # Neither all is missed nor all is read, and the judge had a say in most.
    share = {verdict: count / len(numbers) for verdict, count in verdicts.counts.items()}
    assert share["read"] > 0.3 and share["missed"] > 0.2, verdicts.counts
    assert share.get("rewritten", 0) > 0.1 and share.get("refused", 0) < 0.1, verdicts.counts


@pytest.mark.parametrize("name", TRAPS)
def test_no_trap_is_read_wrong(name: str) -> None:
    assert [seen for verdict, seen in judge(TRAPS[name]()) if verdict == "wrong"] == []


@pytest.mark.parametrize("name", SEEDS)
def test_every_seed_is_read(name: str) -> None:
    assert [verdict for verdict, _ in judge(SEEDS[name]())][:1] == ["read"]
