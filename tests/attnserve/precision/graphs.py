"""Graphs and numbers for the tests of precisions.

``RNG`` starts anew in each test.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.literals import Precision
from attnserve.precision.convert import convert, on_cpu
from attnserve.runtime.session import open_session
from tests.onnx_text import with_weights

RNG = np.random.default_rng(0)
D, VOCABULARY = 16, 64
HEAD = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]> g '

WEIGHT_RANGE = {"int8": (-64, 63), "int8-full": (-127, 127)}
int8 = pytest.mark.parametrize("precision", ["int8", "int8-full"])


def graph(text: str, opset: int = 18, **weights: np.ndarray) -> ir.Model:
    """A text graph whose undefined names are these weights."""
    return with_weights(HEAD.format(opset=opset) + text, **weights)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def run(model: ir.Model, **feeds: np.ndarray) -> np.ndarray:
    return open_session(model).run(None, feeds)[0]


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph.all_nodes())


def error(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


def converted(model: ir.Model, precision: Precision, bound: float, **feeds: np.ndarray) -> ir.Model:
    """The converted model, after a check that its output is within ``bound``.

    Static scales are calibrated on these feeds; without calibration the bound is the same.
    """
    expected = run(model, **feeds)
    made = convert(model, precision, [feeds])
    for each in (made, convert(model, precision)):
        assert error(expected, run(on_cpu(each), **feeds)) < bound
    return made


def rounding(precision: Precision, products: int = 1) -> float:
    """Bound of ``error`` after a chain of int8 products of standard normal numbers.

    Rounding to steps of d has a standard deviation of d / sqrt(12). The largest of some dozen to
    some hundred normal numbers is about 3, so weights have steps of 3 / 64 (7 bits) or 3 / 127, and
    activations of 6 / 255. Relative errors of both factors, and of all products of the chain, are
    independent: their squares add up. The factor of 2 is for chance.
    """
    weights, activations = 3 / -WEIGHT_RANGE[precision][0], 6 / 255
    return 2 * np.sqrt(products * (weights**2 + activations**2) / 12)


def product(**weights: np.ndarray) -> ir.Model:
    weights = weights or {"w": normal(D, D)}
    return graph("(float[b, s, 16] x) => (float[b, s, 16] y) { y = MatMul(x, w) }", **weights)


ATTENTION = "(float[b, s, 16] x, {mask}) => (float[b, s, 16] y) {{ {body} y = MatMul(c, o) }}"
MASKS = {"key": "int32[b, s] m", "bias": "float[b, 1, s, s] m"}
OPERANDS = {"key": "m", "bias": '"", "", m'}
FUSED = "c = com.microsoft.Attention <num_heads = 4{more}> (x, w, a, {operands})"
INSIDE = {mask: FUSED.format(more="", operands=operands) for mask, operands in OPERANDS.items()}
OUTSIDE = {
    mask: "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
    f"c = com.microsoft.MultiHeadAttention <num_heads = 4> (q, k, v, a, {operands})"
    for mask, operands in {"key": "m", "bias": '"", m'}.items()
}


def attention(body: str, mask: str) -> ir.Model:
    packed = RNG.normal(size=(D, 3 * D)).astype(np.float32) / 2
    wq, wk, wv = np.split(packed, 3, axis=1)
    weights = {"w": packed, "wq": wq, "wk": wk, "wv": wv, "a": normal(3 * D), "o": normal(D, D)}
    text = ATTENTION.format(mask=MASKS[mask], body=body)
    return graph(text, **weights)


def padded(mask: str) -> dict[str, np.ndarray]:
    """Two rows of five tokens, of which the second has three."""
    keys = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    bias = np.where(keys[:, None, None, :] > 0, 0.0, -3.4e38) + np.zeros((2, 1, 5, 1))
    x = np.random.default_rng(1).normal(size=(2, 5, D)).astype(np.float32)
    return {"x": x, "m": keys if mask == "key" else bias.astype(np.float32)}


EVERY_PRODUCT = """(int64[b, s] ids, int32[b, s] m) => (float[n, 16] y) {
    e = Gather(t, ids) c = com.microsoft.Attention <num_heads = 4> (e, w, a, m)
    p = MatMul(c, o) r = Reshape(p, flat) y = Gemm <transB = 1> (r, g, bias) }"""


def every_product() -> ir.Model:
    return graph(
        EVERY_PRODUCT,
        t=normal(VOCABULARY, D), w=normal(D, 3 * D), a=normal(3 * D), o=normal(D, D),
        g=normal(D, D), bias=normal(D), flat=np.array([-1, D]),
    )  # fmt: skip


IDS = {"ids": np.arange(8).reshape(2, 4), "m": np.ones((2, 4), np.int32)}
LENGTHS = (3, 9, 5, 12)


def full(model: ir.Model) -> dict[str, np.ndarray]:
    """Rows of these lengths, with zeros for all inputs other than ids and mask."""
    ids = np.zeros((len(LENGTHS), max(LENGTHS)), np.int64)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = RNG.integers(1, 50, length)
    known = {"input_ids": ids, "attention_mask": (ids > 0).astype(np.int64)}
    names = (value.name or "" for value in model.graph.inputs)
    return {name: known.get(name, np.zeros_like(ids)) for name in names}


def quantized_weights(model: ir.Model) -> list[np.ndarray]:
    tensors = [value.const_value for value in model.graph.initializers.values()]
    return [t.numpy() for t in tensors if t is not None and t.dtype == ir.DataType.INT8 and t.size]
