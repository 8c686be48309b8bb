"""Graphs with attention in every form, from which tests/attnserve/mutations.py makes mutants."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir

from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, factor
from tests.graph_passes.graphs import FUSED, PARTS, D, H, K, V, attention, graph
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS, SPLIT

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


def composed(**arguments: Any) -> Callable[[], ir.Model]:
    return lambda: attention(**{"constants": CONSTANTS, **arguments})


def operator(call: str, inputs: str = X, **parts: str) -> Callable[[], ir.Model]:
    """Return attention in one operator, which computes the context ``c``."""
    return composed(opset=23, inputs=inputs, **{**FUSED, **parts, "context": f"\n {call}"})


def rotated(name: str) -> str:
    return f"""
        {name}_cos = Mul({name}, cos)
        {name}_low = Slice({name}, n0, half, last)
        {name}_high = Slice({name}, half, whole, last)
        {name}_minus = Neg({name}_high)
        {name}_swapped = Concat <axis = -1> ({name}_minus, {name}_low)
        {name}_sin = Mul({name}_swapped, sin)
        {name}_rotated = Add({name}_cos, {name}_sin)"""


def normed(name: str) -> str:
    return f"""
        {name}_square = Pow({name}, two)
        {name}_mean = ReduceMean <axes = [-1], keepdims = 1> ({name}_square)
        {name}_more = Add({name}_mean, epsilon)
        {name}_root = Sqrt({name}_more)
        {name}_normed = Div({name}, {name}_root)
        {name}_weighted = Mul({name}_normed, gamma)"""


def cross(x: str, y: str) -> dict[str, str]:
    """Return projections with keys and values of input ``y``."""
    return {part: PARTS[part].replace("(x,", f"({y if part in 'kv' else x},") for part in "qkv"}


def layer(index: int, x: str, out: str) -> str:
    """Return attention, a residual sum and a feed-forward network, with ``index`` in all names."""
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
ROTATED = {
    "scores": f"{rotated('q')}{rotated('k')}"
              "\n kT = Transpose <perm = [0, 1, 3, 2]> (k_rotated)"
              "\n s0 = MatMul(q_rotated, kT)\n s = Mul(s0, scale)",
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
    **{f"layout: {name}": composed(**parts) for name, parts in LAYOUTS.items()},
    **{f"packed: {how}": composed(q=text, k="", v="", output="\n out = MatMul(c, Wo12)")
       for how, text in SPLIT.items()},
    "mask by Where": composed(inputs=f"{X}, {KEPT}", mask="\n m = Where(mask, s, low)"),
    "mask by Where of -inf": composed(
        inputs=f"{X}, {KEPT}", mask="\n n = Not(mask)\n m = Where(n, infinity, s)"),
    "weighted mask": composed(
        inputs=f"{X}, float[batch, 1, sequence, sequence] weight, {MASK}",
        mask="\n m0 = Mul(s, weight)\n m = Add(m0, mask)"),
    "soft cap": composed(
        mask="\n m0 = Div(s, cap)\n m1 = Tanh(m0)\n m2 = Mul(m1, cap)\n m = Add(m2, mask)"),
    "bias by head": composed(
        inputs=f"float[batch, 9, {D}] x, float[batch, 1, 1, 9] mask",
        output_type=f"float[batch, 9, {D}] out",
        mask="\n m0 = Add(s, distances)\n m = Add(m0, mask)"),
    "bias made of the queries": composed(
        inputs=f"float[batch, 9, {D}] x", output_type=f"float[batch, 9, {D}] out",
        mask="\n b0 = MatMul(q, relative)\n m = Add(s, b0)"),
    "Einsum": composed(**EINSUM),
    "grouped heads": composed(**GROUPED),
    "one head for all": composed(
        k="\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
          "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
        v="\n v0 = MatMul(x, Wv1)\n v2 = Reshape(v0, one_v_head)"
          "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)"),
    "cross": composed(
        inputs=f"{X}, float[batch, memory, {D}] y, float[batch, 1, 1, memory] mask",
        **cross("x", "y")),
    "rotary": composed(
        inputs=f"{X}, {MASK}, float[sequence, {K}] cos, float[sequence, {K}] sin", **ROTATED),
    "q/k norm": composed(**NORMED),
    "q/k norm by an operator": composed(**NORM_OPERATOR),
    "cached keys": composed(
        inputs=f"{X}, {PAST}", **{**CACHED, "mask": "\n m = Identity(s)"}),
    "sequence first": composed(
        inputs=f"float[sequence, batch, {D}] x",
        output_type=f"float[sequence, batch, {D}] out", **SEQUENCE_FIRST),
    "keys by queries": composed(
        scores="\n kk = Transpose <perm = [0, 1, 3, 2]> (kT)"
               "\n qT = Transpose <perm = [0, 1, 3, 2]> (q)\n s0 = MatMul(kk, qT)"
               "\n s = Mul(s0, scale)",
        inputs=X, mask="", softmax="\n p0 = Softmax <axis = 2> (s)"
                                   "\n p = Transpose <perm = [0, 1, 3, 2]> (p0)"),
    "softmax in parts": composed(
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
    "weights behind other nodes": composed(
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
    # The causal mask starts at the first key, but the last query sees all keys.
    "causal MultiHeadAttention of two inputs": operator(
        "c = com.microsoft.MultiHeadAttention <num_heads = 3, unidirectional = 1> (q, k, v)",
        f"{X}, float[batch, memory, {D}] y",
        **{part: EVEN[part].replace("(x,", f"({'y' if part in 'kv' else 'x'},") for part in "qkv"},
        output=EVEN["output"]),
    "a window of the queries": composed(
        scores="\n near = Slice(q, n0, eight_tokens, a2)\n s0 = MatMul(near, kT)"
               "\n s = Mul(s0, scale)"),
    "a window of the context": composed(
        context="\n c0 = MatMul(p, v)\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)"
                "\n c2 = Reshape(c1, merge)\n c = Slice(c2, n0, eight_tokens, a1)"),
}  # fmt: skip
"""Graphs that equal attention at the lengths of the certificate, but not at others."""
