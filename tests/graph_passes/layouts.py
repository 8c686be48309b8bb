"""Graphs of attention for the tests of all passes: layouts, masks, positions, norms, precision.

``LAYOUTS`` compute the same attention in other nodes, ``VARIANTS`` compute other attention. Each is
a set of parts that replaces some of ``graphs.PARTS``.
"""

from __future__ import annotations

import re

import numpy as np
import onnx_ir as ir

from tests.graph_passes.graphs import (
    BOOL_MASK,
    FLOAT_MASK,
    PACKED,
    PARTS,
    PLAIN_INPUT,
    TENSOR,
    D,
    H,
    K,
    V,
    attention,
    weights,
)  # fmt: skip


def without_bias(part: str) -> str:
    """``PARTS[part]`` of queries, keys or values without its bias."""
    return re.sub(rf"\n *{part}1 = .*", "", PARTS[part]).replace(f"({part}1,", f"({part}0,")


def scaled_query(factor: str) -> str:
    """Queries that are multiplied by a factor before their heads are split."""
    return PARTS["q"].replace("q2 = Reshape(q1", f"q9 = Mul(q1, {factor})\n q2 = Reshape(q9")


K_HEADS = PARTS["k"].rsplit("\n", 1)[0]
"""Keys (B, T, H, K) ``k2``, without the last Transpose."""

FLAT_QUERIES = """
        x2 = Reshape(x, flat)
        q0 = Gemm{attributes} (x2, Wq, bq)
        length = Shape <start = 1, end = 2> (x)
        laid_out = Concat <axis = 0> (last, length, n3, n4)
        q2 = Reshape(q0, laid_out)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)"""

LAYOUTS: dict[str, dict[str, str]] = {
    "plain": {},
    "no query bias": {"q": without_bias("q")},
    "no biases at all": {
        "q": without_bias("q"),
        "k": without_bias("k"),
        "v": without_bias("v"),
        "output": "\n out = MatMul(c, Wo)",
    },
    "keys transposed in two steps": {
        "k": f"""{K_HEADS}
        k3 = Transpose <perm = [0, 2, 1, 3]> (k2)
        kT = Transpose <perm = [0, 1, 3, 2]> (k3)"""
    },
    "keys transposed twice and back": {
        "k": f"""{K_HEADS}
        k3 = Transpose <perm = [3, 2, 1, 0]> (k2)
        k4 = Transpose <perm = [3, 2, 1, 0]> (k3)
        kT = Transpose <perm = [0, 2, 3, 1]> (k4)"""
    },
    "scale divides the scores": {"scores": "\n s0 = MatMul(q, kT)\n s = Div(s0, inverse)"},
    "scale first": {"scores": "\n s0 = MatMul(q, kT)\n s = Mul(scale, s0)"},
    "scale on the queries": {"scores": "\n q9 = Mul(q, scale)\n s = MatMul(q9, kT)"},
    "scale on the keys, as a quotient": {
        "scores": "\n k9 = Div(kT, inverse)\n s = MatMul(q, k9)"
    },
    "scale before the query bias is laid out": {
        "q": scaled_query("scale"), "scores": "\n s = MatMul(q, kT)",
    },
    "root of the scale on both": {
        "scores": "\n q9 = Mul(q, root)\n k9 = Mul(kT, root)\n s = MatMul(q9, k9)"
    },
    "mask first": {"mask": "\n m = Add(mask, s)"},
    "no mask": {"mask": "\n m = Identity(s)"},
    "swapped operands of the scores": {
        "scores": """
        kk = Transpose <perm = [0, 1, 3, 2]> (kT)
        qT = Transpose <perm = [0, 1, 3, 2]> (q)
        s0 = MatMul(kk, qT)
        s = Mul(s0, scale)"""
    },
    "heads and batch in one axis": {
        "q": PARTS["q"].replace("q = T", "q3 = T") + """
        shape = Shape(q3)
        tokens = Slice(shape, n2, n4)
        rows = Concat <axis = 0> (last, tokens)
        q = Reshape(q3, rows)""",
        "k": f"""{K_HEADS}
        k3 = Transpose <perm = [0, 2, 1, 3]> (k2)
        k4 = Reshape(k3, rows)
        kT = Transpose <perm = [0, 2, 1]> (k4)""",
        "v": PARTS["v"].replace("v = T", "v3 = T") + """
        v_shape = Shape(v3)
        v_tokens = Slice(v_shape, n2, n4)
        v_rows = Concat <axis = 0> (last, v_tokens)
        v = Reshape(v3, v_rows)""",
        "mask": "\n m = Identity(s)",
        "context": """
        c0 = MatMul(p, v)
        c9 = Reshape(c0, v_shape)
        c1 = Transpose <perm = [0, 2, 1, 3]> (c9)
        c = Reshape(c1, merge)""",
    },
    "Gemm over flattened tokens": {
        "q": FLAT_QUERIES.format(attributes=""),
        "k": """
        k0 = Gemm <transB = 1> (x2, WkT, bk)
        k2 = Reshape(k0, laid_out)
        kT = Transpose <perm = [0, 2, 3, 1]> (k2)""",
    },
    "Gemm as the output projection": {
        "context": PARTS["context"].replace("merge", "rows_of_six"),
        "output": """
        o = Gemm <transB = 1> (c, WoT, bo)
        x_shape = Shape(x)
        out = Reshape(o, x_shape)""",
    },
    "factors of Gemm": {"q": FLAT_QUERIES.format(attributes=" <alpha = 0.5, beta = 3.0>")},
    "a factor for each column of the queries": {"q": scaled_query("bk")},
    "a factor for each head of the queries": {
        "scores": "\n q9 = Mul(q, per_head)\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"
    },
    "bias subtracted": {"q": PARTS["q"].replace("Add(bq, q0)", "Sub(q0, bq)")},
    "head size before heads": {
        "q": PARTS["q"].replace("heads", "size_first").replace("0, 2, 1, 3", "0, 3, 1, 2"),
        "k": PARTS["k"].replace("heads", "size_first").replace("0, 2, 3, 1", "0, 3, 2, 1"),
    },
    "context merged with its size before its heads": {
        "context": PARTS["context"].replace("0, 2, 1, 3", "0, 2, 3, 1")
    },
    "Dropout left in": {"softmax": "\n p0 = Softmax <axis = -1> (m)\n p, dropped = Dropout(p0)"},
    "safe softmax": {
        "softmax": "\n p0 = Softmax <axis = -1> (m)\n nan = IsNaN(p0)\n p = Where(nan, zero, p0)"
    },
    "Cast noise": {
        "scores": """
        q9 = Cast <to = 1> (q)
        s0 = MatMul(q9, kT)
        s1 = Cast <to = 1> (s0)
        s = Mul(s1, scale)""",
        "softmax": "\n p0 = Softmax <axis = 3> (m)\n p = Cast <to = 1> (p0)",
    },
    "no output projection": {"output": "\n o = Tanh(c)\n o1 = MatMul(o, Wo)\n out = Add(o1, bo)"},
}  # fmt: skip
"""Graphs of equal attention: the parts that differ from ``graphs.PARTS``."""

LAID_OUT = {
    "n2": np.array([2], np.int64),
    "n3": np.array([H], np.int64),
    "n4": np.array([K], np.int64),
    "size_first": np.array([0, 0, K, H], np.int64),
    "rows_of_six": np.array([-1, H * V], np.int64),
}

NO_PROJECTION = {"no output projection"}

SPLIT_HEADS = """
        q2 = Reshape(q1, heads)
        q = Transpose <perm = [0, 2, 1, 3]> (q2)
        k2 = Reshape(k1, heads)
        kT = Transpose <perm = [0, 2, 3, 1]> (k2)
        v2 = Reshape(v1, heads)
        v = Transpose <perm = [0, 2, 1, 3]> (v2)"""
SPLIT = {
    "Split": f"{PACKED}\n q1, k1, v1 = Split <axis = -1> (biased, thirds){SPLIT_HEADS}",
    "Slice": f"""{PACKED}
        q1 = Slice(biased, n0, n12, last)
        k1 = Slice(biased, n12, n24, last)
        v1 = Slice(biased, n24, n36, last){SPLIT_HEADS}""",
    "Gather": f"""{PACKED}
        b2 = Reshape(biased, packed_heads)
        b3 = Transpose <perm = [2, 0, 3, 1, 4]> (b2)
        q = Gather <axis = 0> (b3, i0)
        k3 = Gather <axis = 0> (b3, i1)
        kT = Transpose <perm = [0, 1, 3, 2]> (k3)
        v = Gather <axis = 0> (b3, i2)""",
    "q, k, v within each head": f"""{PACKED}
        b2 = Reshape(biased, head_packed)
        b3 = Transpose <perm = [0, 2, 1, 3, 4]> (b2)
        q = Gather <axis = 3> (b3, i0)
        k3 = Gather <axis = 3> (b3, i1)
        kT = Transpose <perm = [0, 1, 3, 2]> (k3)
        v = Gather <axis = 3> (b3, i2)""",
}


PACKED_PARTS = {"k": "", "v": "", "output": "\n        out = MatMul(c, Wo12)"}
ALL_LAYOUTS = LAYOUTS | {
    f"packed by {how}": {"q": text, **PACKED_PARTS} for how, text in SPLIT.items()
}


ANGLES = "float[sequence, {size}] cos, float[sequence, {size}] sin"
ROTARY = {
    "half": np.array([K // 2], np.int64),
    "whole": np.array([K], np.int64),
    "pairs": np.array([0, 0, 0, K // 2, 2], np.int64),
    "unpaired": np.array([0, 0, 0, K], np.int64),
}

ROTATE_HALF = """
 q_cos = Mul(q, cos)
 q_low = Slice(q, n0, half, last)  q_high = Slice(q, half, whole, last)
 q_minus = Neg(q_high)  q_swapped = Concat <axis = -1> (q_minus, q_low)
 q_sin = Mul(q_swapped, sin)
 q_turned = Add(q_cos, q_sin)
 s0 = MatMul(q_turned, kT)
 s = Mul(s0, scale)"""

INTERLEAVED = """
 q_pairs = Reshape(q, pairs)
 q_real = Gather <axis = -1> (q_pairs, i0)  q_imaginary = Gather <axis = -1> (q_pairs, i1)
 rc = Mul(q_real, cos)  is = Mul(q_imaginary, sin)  real = Sub(rc, is)
 rs = Mul(q_real, sin)  ic = Mul(q_imaginary, cos)  imaginary = Add(rs, ic)
 real1 = Unsqueeze(real, last)  imaginary1 = Unsqueeze(imaginary, last)
 joined = Concat <axis = -1> (real1, imaginary1)
 q_turned = Reshape(joined, unpaired)
 s0 = MatMul(q_turned, kT)
 s = Mul(s0, scale)"""


SEQUENCE_FIRST = {
    **{
        part: re.sub(r"0, 2, 1, 3", "1, 2, 0, 3", PARTS[part]).replace("0, 2, 3, 1", "1, 2, 3, 0")
        for part in ("q", "k", "v")
    },
    "context": PARTS["context"].replace("0, 2, 1, 3", "2, 0, 1, 3"),
}
ONE_KEY_HEAD = {
    "k": "\n k0 = MatMul(x, Wk1)\n k2 = Reshape(k0, one_head)"
         "\n kT = Transpose <perm = [0, 2, 3, 1]> (k2)",
    "v": "\n v0 = MatMul(x, Wv1)\n v1 = Add(v0, bv1)\n v2 = Reshape(v1, one_v_head)"
         "\n v = Transpose <perm = [0, 2, 1, 3]> (v2)",
}  # fmt: skip
BOTH_TURNED = ROTATE_HALF.replace("kT)", "kT_turned)").replace(
    " s0 =",
    """ k_rows = Transpose <perm = [0, 1, 3, 2]> (kT)
 k_cos = Mul(k_rows, cos)
 k_low = Slice(k_rows, n0, half, last)  k_high = Slice(k_rows, half, whole, last)
 k_minus = Neg(k_high)  k_swapped = Concat <axis = -1> (k_minus, k_low)
 k_sin = Mul(k_swapped, sin)
 k_turned = Add(k_cos, k_sin)
 kT_turned = Transpose <perm = [0, 1, 3, 2]> (k_turned)
 s0 =""",
)
NORM = "\n q9 = LayerNormalization(q, gains, shifts)\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"
RMS_NORM = """
 q_squared = Mul(q, q)
 q_mean = ReduceMean <axes = [-1]> (q_squared)
 q_safe = Add(q_mean, epsilon)
 q_root = Sqrt(q_safe)
 q_normed = Div(q, q_root)
 q9 = Mul(gains, q_normed)
 s0 = MatMul(q9, kT)
 s = Mul(s0, scale)"""
CENTRED_IN_PARTS = """
 q_middle = ReduceMean <axes = [-1]> (q)  q_even = Sub(q, q_middle)  q_again = Sub(q, q_middle)
 q_squared = Mul(q_again, q_again)  q_mean = ReduceMean <axes = [-1]> (q_squared)
 q_safe = Add(q_mean, epsilon)  q_root = Sqrt(q_safe)
 q9 = Div(q_even, q_root)
 s0 = MatMul(q9, kT)
 s = Mul(s0, scale)"""
LENGTH_NORM = """
 q_size = ReduceL2 <axes = [-1]> (q)  q_least = Max(q_size, epsilon)
 q_sizes = Expand(q_least, all_four)  q_normed = Div(q, q_sizes)
 q9 = Mul(q_normed, by_head)
 s0 = MatMul(q9, kT)
 s = Mul(s0, scale)"""
TURNED_AND_NORMED = BOTH_TURNED.replace(
    " s0 = MatMul(q_turned, kT_turned)",
    """ q_squared = Mul(q_turned, q_turned)  q_mean = ReduceMean <axes = [-1]> (q_squared)
 q_safe = Add(q_mean, epsilon)  q_root = Sqrt(q_safe)  q_inverse = Reciprocal(q_root)
 q_normed = Mul(q_turned, q_inverse)
 q9 = Mul(q_normed, by_head)
 k_size = ReduceL2 <axes = [-1]> (k_turned)  k_safe = Add(k_size, epsilon)
 k_normed = Div(k_turned, k_safe)
 k9 = Mul(k_normed, gains)
 kT9 = Transpose <perm = [0, 1, 3, 2]> (k9)
 s0 = MatMul(q9, kT9)""",
)
OPERANDS = {
    "by_head": np.array([0.5, 2, -1.5], np.float32).reshape(H, 1, 1),
    "all_four": np.array([1, 1, 1, K], np.int64),
    "gains": np.array([0.5, 2, 1.5, -1], np.float32),
    "shifts": np.array([0.1, 0.2, -0.3, 0.4], np.float32),
    "epsilon": np.float32(1e-6),
    "slopes": np.array([0.5, 0.25, 0.125], np.float32).reshape(H, 1, 1),
    "three": np.float32(3),
}
ROWS = f"float[batch, sequence, {D}] x, float[sequence, sequence] mask"

VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "no mask": (PLAIN_INPUT, {"mask": "\n m = Identity(s)"}),
    "boolean mask kept": (
        f"{PLAIN_INPUT}, {BOOL_MASK}", {"mask": "\n m = Where(mask, s, infinity)"},
    ),
    "boolean mask, weakly filled": (
        f"{PLAIN_INPUT}, {BOOL_MASK}", {"mask": "\n m = Where(mask, s, weak)"},
    ),
    "boolean mask forbidden": (
        f"{PLAIN_INPUT}, {BOOL_MASK}", {"mask": "\n a = Not(mask)\n m = Where(a, low, s)"},
    ),
    "mask of two axes": (ROWS, {}),
    "subtracted mask": (
        f"{PLAIN_INPUT}, float[batch, 1, 1, sequence] hides", {"mask": "\n m = Sub(s, hides)"},
    ),
    "mask by head": (f"{PLAIN_INPUT}, float[batch, {H}, sequence, sequence] mask", {}),
    "ALiBi: a slope a head": (
        f"{PLAIN_INPUT}, float[1, 1, 1, sequence] distance",
        {"mask": "\n alibi = Mul(distance, slopes)\n m = Add(s, alibi)"},
    ),
    "T5: a bias for every head, query and key": (
        f"{PLAIN_INPUT}, float[1, {H}, sequence, sequence] bias, {FLOAT_MASK}",
        {"mask": "\n m0 = Add(s, bias)\n m = Add(m0, mask)"},
    ),
    "a bias of three axes": (
        f"{PLAIN_INPUT}, float[{H}, sequence, sequence] bias", {"mask": "\n m = Add(s, bias)"},
    ),
    "a soft cap and a floor": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        {"mask": "\n c7 = Div(s, three)\n c8 = Tanh(c7)\n c9 = Mul(c8, three)\n m9 = Add(c9, mask)"
                 "\n m = Max(m9, weak)"},
    ),
    "weighted scores": (
        f"{PLAIN_INPUT}, float[1, {H}, 1, sequence] weight", {"mask": "\n m = Mul(s, weight)"},
    ),
    "one key/value head for all": (f"{PLAIN_INPUT}, {FLOAT_MASK}", ONE_KEY_HEAD),
    "rotary": (f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K)}", {"scores": ROTATE_HALF}),
    "rotary, interleaved": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K // 2)}", {"scores": INTERLEAVED},
    ),
    "rotary queries and keys": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K)}", {"scores": BOTH_TURNED},
    ),
    "rotary with one key head": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K)}",
        {**ONE_KEY_HEAD, "scores": BOTH_TURNED},
    ),
    "q/k norm, centred": (f"{PLAIN_INPUT}, {FLOAT_MASK}", {"scores": NORM}),
    "q/k norm by root mean square": (f"{PLAIN_INPUT}, {FLOAT_MASK}", {"scores": RMS_NORM}),
    "q/k norm, centred, in parts": (f"{PLAIN_INPUT}, {FLOAT_MASK}", {"scores": CENTRED_IN_PARTS}),
    "q/k norm by length": (f"{PLAIN_INPUT}, {FLOAT_MASK}", {"scores": LENGTH_NORM}),
    "rotary, then q/k norm": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K)}", {"scores": TURNED_AND_NORMED},
    ),
    "rotary with one key head, then q/k norm": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}, {ANGLES.format(size=K)}",
        {**ONE_KEY_HEAD, "scores": TURNED_AND_NORMED},
    ),
    "sequence first": (
        f"float[sequence, batch, {D}] x, float[1, 1, 1, sequence] mask", SEQUENCE_FIRST,
    ),
}  # fmt: skip


HALF_PRECISION = {
    n: a.astype(np.float16) for n, a in weights().items() if n[0] in "Wbs" or n == "zero"
}
SINGLE_MASK = {
    "mask": "\n s32 = Cast <to = 1> (s)\n m = Add(s32, mask)",
    "softmax": "\n p32 = Softmax <axis = -1> (m)\n p = Cast <to = 10> (p32)",
}
SINGLE_CONTEXT = {
    **SINGLE_MASK,
    "softmax": "\n p = Softmax <axis = -1> (m)",
    "context": "\n v32 = Cast <to = 1> (v)\n c0 = MatMul(p, v32)"
    "\n c1 = Transpose <perm = [0, 2, 1, 3]> (c0)\n c9 = Reshape(c1, merge)"
    "\n c = Cast <to = 10> (c9)",
}
SINGLE_OUTPUT = {**SINGLE_CONTEXT, "context": SINGLE_CONTEXT["context"].replace("c9", "c", 1)[:-24],
                 "output": "\n o = MatMul(c, Wo32)\n out32 = Add(o, bo32)"
                           "\n out = Cast <to = 10> (out32)"}  # fmt: skip


SHARED = ("Wq", "Wk", "Wv", "Wo", "bq", "bk", "bv", "bo")


MEMORY = f"float[batch, memory, {D}] y"


def cross() -> dict[str, str]:
    """Keys and values of y, without a mask."""
    own = {part: PARTS[part].replace("(x, ", "(y, ") for part in ("k", "v")}
    return {**own, "mask": "\n m = Identity(s)"}


SHOW_LENGTH = """
        lengths = Shape({value})
        length = Gather <axis = 0> (lengths, {axis})
        ones = Expand(one, length)
        shown = CumSum(ones, i0)"""
"""Return 1 to the length of an axis: exporters read lengths from the shapes of queries or keys."""

RETURNED: dict[str, tuple[str, dict[str, str]]] = {
    "keys": (
        f"sequence, {H}, {K}",
        {"k": PARTS["k"].replace("k2 =", "shown =").replace("(k2)", "(shown)")},
    ),
    "probabilities": (
        f"{H}, sequence, sequence",
        {"softmax": PARTS["softmax"].replace("p =", "shown ="),
         "context": PARTS["context"].replace("(p, v)", "(shown, v)")},
    ),
    "a function of the probabilities": (
        f"{H}, sequence, sequence", {"context": PARTS["context"] + "\n shown = Abs(p)"},
    ),
}  # fmt: skip
"""Values inside the attention that the graph returns: their axes after the batch, and the parts."""


def returning(name: str) -> ir.Model:
    """A graph that returns one of ``RETURNED``."""
    axes, parts = RETURNED[name]
    return attention(output_type=f"{TENSOR} out, float[batch, {axes}] shown", **parts)


def flattened() -> ir.Model:
    """Tokens (B*S, D) throughout, for B = 2 and S = 3."""
    lengths = {"heads": [2, 3, H, K], "v_heads": [2, 3, H, V], "merge": [6, 6]}
    return attention(
        inputs=f"float[6, {D}] x, float[2, 1, 1, 3] mask",
        output_type=f"float[6, {D}] out",
        constants={name: np.array(shape, np.int64) for name, shape in lengths.items()},
    )


def layout(name: str) -> ir.Model:
    """One of ``ALL_LAYOUTS``."""
    return attention(constants=LAID_OUT, **ALL_LAYOUTS[name])


def variant(name: str) -> ir.Model:
    """One of ``VARIANTS``."""
    inputs, parts = VARIANTS[name]
    order = "sequence, batch" if name == "sequence first" else "batch, sequence"
    return attention(
        inputs=inputs, output_type=f"float[{order}, {D}] out", constants=OPERANDS | ROTARY, **parts
    )


def half_precision(mask_type: str = "float16", **parts: str) -> ir.Model:
    """Attention in half precision; parts may compute in single."""
    return attention(
        inputs=f"float16[batch, sequence, {D}] x, {mask_type}[batch, 1, 1, sequence] mask",
        output_type=f"float16[batch, sequence, {D}] out",
        constants=HALF_PRECISION | {"Wo32": weights()["Wo"], "bo32": weights()["bo"]},
        **parts,
    )


def cross_attention() -> ir.Model:
    """Queries of x, keys and values of y, without a mask."""
    return attention(inputs=f"{PLAIN_INPUT}, {MEMORY}", **cross())


PAST = f"float[batch, {H}, past, {K}] pk, float[batch, {H}, past, {V}] pv"
PRESENT = f"float[batch, {H}, total, {K}] keys, float[batch, {H}, total, {V}] values"
KEYS = PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3")
JOIN = "\n keys = Concat <axis = 2> (pk, k)\n kT = Transpose <perm = [0, 1, 3, 2]> (keys)"
DECODER = {
    "k": KEYS + JOIN,
    "v": PARTS["v"] + "\n values = Concat <axis = -2> (pv, v)",
    "mask": "\n m = Identity(s)",
    "context": PARTS["context"].replace("(p, v)", "(p, values)"),
}
"""A decoder step: past keys and values are inputs, present ones are outputs."""


def decoder(*, past: str = PAST, present: str = PRESENT, opset: int = 17, **parts: str) -> ir.Model:
    return attention(
        inputs=f"float[batch, sequence, {D}] x, {past}",
        output_type=f"float[batch, sequence, {D}] out, {present}",
        opset=opset,
        constants={"k_ones": np.ones(K, np.float32)},
        **{**DECODER, **parts},
    )
