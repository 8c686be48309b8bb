"""Rotary positions are read as sums of turned terms, whatever nodes write them, and certified."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.passes.collaborate import why_not
from tests.graph_passes.graphs import FLOAT_MASK, D, H, K, attention, only, reasons

HALF = K // 2
ANGLES = "float[sequence, {size}] cos, float[sequence, {size}] sin"
CONSTANTS = {
    "half": np.array([HALF], np.int64),
    "whole": np.array([K], np.int64),
    "pairs": np.array([0, 0, 0, HALF, 2], np.int64),
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


def rotary(scores: str, size: int = K):
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {ANGLES.format(size=size)}"
    return attention(scores=scores, inputs=inputs, constants=CONSTANTS)


@pytest.mark.parametrize(
    ("scores", "size"), [(ROTATE_HALF, K), (INTERLEAVED, HALF)], ids=["rotate half", "interleaved"]
)
def test_rotated_queries_are_read_and_certified(scores, size):
    block = only(rotary(scores, size))
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)
    factors = [turn.factor for turn in block.q.rotary_terms]
    assert {factor.value.name for factor in factors if factor} == {"cos", "sin"}
    assert block.k.rotary_terms == ()


def test_collaborative_heads_do_not_apply():
    assert "rotary positions" in why_not(only(rotary(ROTATE_HALF)))


def test_the_exporters_nodes_count_and_the_sign_matters():
    """Another sign is another function: it is read as such, and certified as such."""
    plus = only(rotary(ROTATE_HALF)).q.rotary_terms
    minus = only(
        rotary(ROTATE_HALF.replace("Add(q_cos, q_sin)", "Sub(q_cos, q_sin)"))
    ).q.rotary_terms
    assert np.array_equal(plus[1].gain, -minus[1].gain)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("Mul(q, cos)", "Mul(q, q)"), "is not supported between"),
        (("Neg(q_high)", "Tanh(q_high)"), "is not supported between"),
        (("Add(q_cos, q_sin)", "Add(q_cos, q_cos)"), "is not supported between"),
    ],
    ids=["squared", "squashed", "the same term twice"],
)
def test_near_misses_are_missed(change, reason):
    found = reasons(rotary(ROTATE_HALF.replace(*change)))
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize("interleaved", [0, 1])
def test_the_operator_is_read_though_it_runs_one_sequence_at_a_time(interleaved):
    """ONNX Runtime wants one row of angles a sequence; PyTorch's exporter writes a single one."""
    turned = f"RotaryEmbedding <interleaved = {interleaved}> (q, cos, sin)"
    scores = f"\n q_turned = {turned}\n s0 = MatMul(q_turned, kT)\n s = Mul(s0, scale)"
    angles = f"float[1, sequence, {HALF}] cos, float[1, sequence, {HALF}] sin"
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {angles}"
    block = only(attention(scores=scores, inputs=inputs, opset=23))
    assert block.position == "rope"
