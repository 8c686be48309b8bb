"""Half-precision graphs are certified in single precision."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.matching.find import find_attention
from tests.graph_passes.graphs import PARTS, SCALE, D, H, K, V, attention, fused_parts, weights

TYPES = {
    "float16": (ir.DataType.FLOAT16, np.dtype(np.float16)),
    "bfloat16": (ir.DataType.BFLOAT16, np.dtype(ml_dtypes.bfloat16)),
}
SMALL = 1e-5
"""Largest error of a certificate, which is computed in single precision."""


BY_KEY, BY_QUERY = "[batch, 1, 1, sequence]", "[batch, 1, sequence, sequence]"


def half(name: str, opset: int = 17, shape: str = BY_KEY, **parts: str) -> ir.Model:
    """``PARTS`` with every weight, input and output in half precision."""
    dtype = TYPES[name][1]
    singles = {key: array for key, array in weights().items() if array.dtype == np.float32}
    del singles["low"]  # out of the range of half precision
    constants = {key: array.astype(dtype) for key, array in singles.items()}
    constants["half_ones"] = np.ones(K, dtype)
    return attention(
        inputs=f"{name}[batch, sequence, {D}] x, {name}{shape} mask",
        output_type=f"{name}[batch, sequence, {D}] out",
        constants=constants,
        opset=opset,
        **parts,
    )


SOFTMAX_IN_SINGLE = {
    "softmax": "\n m32 = Cast <to = 1> (m)\n p32 = Softmax <axis = -1> (m32)\n p = CastLike(p32, v)"
}
NORMED = {
    "scores": "\n q9 = LayerNormalization(q, half_ones)\n s0 = MatMul(q9, kT)\n s = Mul(s0, scale)"
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(
    ("parts", "opset", "shape"),
    [
        ({}, 17, BY_KEY),
        (SOFTMAX_IN_SINGLE, 17, BY_KEY),
        (NORMED, 17, BY_KEY),
        (fused_parts("Attention <scale = 0.37> (q, k, v, mask)"), 23, BY_QUERY),
    ],
    ids=["plain", "softmax in single precision", "q/k norm", "operator"],
)
def test_read_attention_half_precision_is_certified(
    name: str, parts: dict[str, str], opset: int, shape: str
) -> None:
    matches = read_attention(half(name, opset, shape, **parts))
    assert [miss.reason for miss in matches.unmatched] == []
    (certified,) = matches.certified
    assert certified.max_abs_error <= SMALL
    block = certified.block
    assert (block.num_heads, block.head_size, block.v_head_size) == (H, K, V)
    assert block.scale == pytest.approx(SCALE, rel=1e-2)  # 0.37 rounded to half precision
    assert block.q.dtype == TYPES[name][0]


@pytest.mark.parametrize("name", TYPES)
def test_read_attention_half_weights_become_single(name: str) -> None:
    (block,) = read_attention(half(name)).blocks
    assert block.q.matrix().dtype == np.float32
    expected = weights()["Wq"].astype(TYPES[name][1]).astype(np.float32)
    np.testing.assert_array_equal(block.q.matrix(), expected)


def test_read_attention_cast_half_weights_are_certified() -> None:
    """Weights are kept in half precision, and cast as they are used."""
    q = PARTS["q"].replace("MatMul(x, Wq)", "MatMul(x, W32)")
    model = attention(
        q=f"\n W32 = Cast <to = 1> (W16){q}", constants={"W16": weights()["Wq"].astype(np.float16)}
    )
    (certified,) = read_attention(model).certified
    assert certified.max_abs_error <= SMALL
    assert certified.block.q.dtype == ir.DataType.FLOAT


def test_read_attention_half_precision_wrong_scale_is_unmatched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A relative error of 1e-3 of the scale is not hidden by rounding."""
    from dataclasses import replace

    import attnserve.checks.certify as certify

    model = half("float16")
    blocks, misses = find_attention(model)
    wrong = [replace(blocks[0], scale=1.001 * blocks[0].scale)]
    monkeypatch.setattr(certify, "find_attention", lambda _: (wrong, misses))
    (miss,) = read_attention(model).unmatched
    assert "the graph computes something else" in miss.reason


def test_read_attention_does_not_change_the_graph() -> None:
    model = half("bfloat16")
    before = ir.to_onnx_text(model)
    read_attention(model)
    assert ir.to_onnx_text(model) == before
