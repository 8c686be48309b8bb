"""Graphs of feed-forwards in many notations."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from tests.graph_passes.graphs import PLAIN_INPUT, D, graph

F = 16

NAME = "feed_forward_0"


def constants(seed: int = 0, width: int = F) -> dict[str, np.ndarray]:
    """All constants that a graph text may use."""
    rng = np.random.default_rng(seed)
    shapes = {
        "W1": (D, width), "Wu": (D, width), "W2": (width, D), "b1": (width,), "bu": (width,),
        "b2": (D,), "slopes": (width,), "W3": (D, width), "gains": (width,), "Wn": (width, 5),
        "W22": (width, width), "Wgu": (D, 2 * width), "bgu": (2 * width,),
    }  # fmt: skip
    arrays = {n: (rng.standard_normal(s) / 2).astype(np.float32) for n, s in shapes.items()}
    arrays |= {f"{name}T": np.ascontiguousarray(arrays[name].T) for name in ("W1", "W2")}
    scalars = {"root2": 2**0.5, "half": 0.5, "one": 1, "three": 3, "six": 6, "cubic": 0.044715,
               "slope": 0.797884, "lowest": -0.1, "highest": 0.4}  # fmt: skip
    arrays |= {name: np.float32(value) for name, value in scalars.items()}
    integers = {"flat": [-1, D], "wide": [0, -1, width], "whole": [0, -1, D], "i0": 0, "i1": 1,
                "last": [-1], "n1": [1], "n2": [2], "nF": [width], "nD": [D], "end": [9], "a0": [0],
                "thirds": [0, 0, 4, width // 4], "joined": [0, 0, width],
                "halves": [width, width], "n2F": [2 * width], "minus_nF": [-width],
                "far": [2**62], "wide2": [0, -1, 2 * width]}  # fmt: skip
    return arrays | {name: np.array(value, np.int64) for name, value in integers.items()}


UP = "\n h0 = MatMul(x, W1)\n h = Add(h0, b1)"

DOWN = "\n o = MatMul(a, W2)\n out = Add(o, b2)"

RELU = f"{UP}\n a = Relu(h){DOWN}"

ERF = """
 e0 = Div(h, root2)
 e1 = Erf(e0)
 e2 = Add(e1, one)
 e3 = Mul(h, e2)
 a = Mul(e3, half)"""

TANH = """
 t0 = Pow(h, three)
 t1 = Mul(t0, cubic)
 t2 = Add(h, t1)
 t3 = Mul(t2, slope)
 t4 = Tanh(t3)
 t5 = Add(one, t4)
 t6 = Mul(half, h)
 a = Mul(t6, t5)"""

LENGTHS = " = Shape(x)\n b0 = Gather(s, i0)\n t0 = Gather(s, i1)\n b = Unsqueeze(b0, a0)\n t = Unsqueeze(t0, a0)"  # noqa: E501

DYNAMIC = f"""
 s{LENGTHS}
 flat_x = Reshape(x, flat)
 h0 = Gemm(flat_x, W1, b1)
 wide_shape = Concat <axis = 0> (b, t, nF)
 h = Reshape(h0, wide_shape)
 a1 = Gelu(h)
 hidden_shape = Shape(a1)
 width = Slice(hidden_shape, last, end, a0)
 first = Gather(hidden_shape, i0)
 flat_shape = Concat <axis = 0> (last, width)
 a = Reshape(a1, flat_shape)
 o = Gemm(a, W2, b2)
 batch = Unsqueeze(first, a0)
 out_shape = Concat <axis = 0> (batch, t, nD)
 out = Reshape(o, out_shape)"""

PACKED = "\n b = MatMul(x, Wgu)\n h = Add(b, bgu)"

GEGLU = "\n g1 = Gelu(g)\n a = Mul(g1, u)" + DOWN

FORMS: dict[str, str] = {
    "ReLU": RELU,
    "no biases": "\n h = MatMul(x, W1)\n a = Relu(h)\n out = MatMul(a, W2)",
    "bias before the product": RELU.replace("Add(h0, b1)", "Add(b1, h0)"),
    "GELU by Erf": f"{UP}{ERF}{DOWN}",
    "GELU by Tanh": f"{UP}{TANH}{DOWN}",
    "Gelu": f"{UP}\n a = Gelu(h){DOWN}",
    "Gelu by com.microsoft": f"{UP}\n a = com.microsoft.Gelu(h){DOWN}",
    "FastGelu with its bias": f"\n h = MatMul(x, W1)\n a = com.microsoft.FastGelu(h, b1){DOWN}",
    "BiasGelu": f"\n h = MatMul(x, W1)\n a = com.microsoft.BiasGelu(h, b1){DOWN}",
    "QuickGelu": f"{UP}\n a = com.microsoft.QuickGelu <alpha = 1.702> (h){DOWN}",
    "a slope a neuron": f"{UP}\n a = PRelu(h, slopes){DOWN}",
    "squared ReLU with a gain": f"{UP}\n r = Relu(h)\n r2 = Mul(r, r)\n a = Mul(r2, gains){DOWN}",
    "clipped": f"{UP}\n a = Clip(h, lowest, highest){DOWN}",
    "hard sigmoid by hand": f"{UP}\n c = Add(h, three)\n d = Clip(c, lowest, six)"
                            f"\n e = Div(d, six)\n a = Mul(h, e){DOWN}",
    "chosen": f"{UP}\n y = Greater(h, half)\n z = Mul(h, half)\n a = Where(y, h, z){DOWN}",
    "dropout": f"{UP}\n r = Relu(h)\n a = Dropout(r){DOWN}",
    "gated by SiLU": "\n g = MatMul(x, W1)\n g1 = Sigmoid(g)\n g2 = Mul(g, g1)\n u = MatMul(x, Wu)"
                     "\n a = Mul(g2, u)\n out = MatMul(a, W2)",
    "gated by GELU": f"{UP}\n g = Gelu(h)\n u0 = MatMul(x, Wu)\n u = Add(u0, bu)"
                     f"\n a = Mul(g, u){DOWN}",
    "gated by nothing": f"\n g = MatMul(x, W1)\n u = MatMul(x, Wu)\n a = Mul(g, u){DOWN}",
    "gated, each flattened": "\n x1 = Reshape(x, flat)\n x2 = Reshape(x, flat)"
                             "\n g = Gemm(x1, W1, b1)\n g1 = Sigmoid(g)\n u = Gemm(x2, Wu)"
                             "\n a = Mul(g1, u)\n o = Gemm(a, W2, b2)\n out = Reshape(o, whole)",
    "packed, equal Split": f"{PACKED}\n g, u = Split <axis = -1, num_outputs = 2> (h){GEGLU}",
    "packed, Split by sizes": f"{PACKED}\n u, g = Split <axis = 2> (h, halves){GEGLU}",
    "packed, Slice": f"{PACKED}\n g = Slice(h, a0, nF, last, n1)"
                     f"\n u = Slice(h, nF, far, last){GEGLU}",
    "packed, Slice from the end": f"{PACKED}\n g = Slice(h, minus_nF, n2F, last)"
                                  f"\n u = Slice(h, a0, minus_nF, last){GEGLU}",
    "packed, computed Slice": f"{PACKED}\n s = Shape(b)\n n = Gather(s, last)\n n1m = Add(n, n1)"
                              "\n e = Div(n1m, n2)\n e2 = Mul(e, n2)\n g = Slice(h, a0, e, last)"
                              f"\n u = Slice(h, e, e2, last){GEGLU}",
    "packed, flattened": "\n f = Reshape(x, flat)\n b = Gemm(f, Wgu, bgu)\n h = Reshape(b, wide2)"
                         "\n g, u = Split <axis = -1> (h, halves)\n g1 = Relu(g)\n a = Mul(g1, u)"
                         + DOWN,
    "packed, gate before the Split": "\n b = MatMul(x, Wgu)\n h = Sigmoid(b)"
                                     f"\n g, u = Split <axis = -1> (h, halves){GEGLU}",
    "Gemm, transposed, flattened": "\n f = Reshape(x, flat)\n h = Gemm <transB = 1> (f, W1T, b1)"
                                   "\n a = Relu(h)"
                                   "\n o = Gemm <transB = 1, alpha = 0.5> (a, W2T, b2)"
                                   "\n out = Reshape(o, whole)",
    "a Reshape that names its width": "\n f = Reshape(x, flat)\n h0 = Gemm(f, W1, b1)"
                                      f"\n h = Reshape(h0, wide)\n a = Relu(h){DOWN}",
    "shapes that are computed": DYNAMIC,
    "FusedGemm": '\n f = Reshape(x, flat)\n a = com.microsoft.FusedGemm <activation = "Relu"> '
                 "(f, W1, b1)\n o = Gemm(a, W2, b2)\n out = Reshape(o, whole)",
    "FusedMatMul": "\n h0 = com.microsoft.FusedMatMul <transB = 1, alpha = 0.5> (x, W1T)"
                   f"\n h = Add(h0, b1)\n a = Relu(h){DOWN}",
    "Einsum": '\n h0 = Einsum <equation = "bsd,df->bsf"> (x, W1)\n h = Add(h0, b1)\n a = Relu(h)'
              '\n o = Einsum <equation = "bsf,fd->bsd"> (a, W2)\n out = Add(o, b2)',
    "a weight behind a Transpose": "\n W = Transpose <perm = [1, 0]> (W1T)"
                                   f"\n h0 = MatMul(x, W)\n h = Add(h0, b1)\n a = Relu(h){DOWN}",
    "a weight behind an Identity": "\n W = Identity(W2)"
                                   + RELU.replace("(a, W2)", "(a, W)"),
}  # fmt: skip


def build(body: str, own: Mapping[str, np.ndarray] | None = None, **options: str) -> ir.Model:
    return graph(
        body,
        opset=20,
        constants=constants() | dict(own or {}),
        **({"inputs": PLAIN_INPUT} | options),
    )
