"""Rotary positions are read as sums of turned terms, whatever nodes write them, and certified."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.passes.collaborate import sharing_refusal
from tests.graph_passes.graphs import FLOAT_MASK, D, H, K, attention, only, reasons
from tests.graph_passes.layouts import ANGLES, INTERLEAVED, ROTARY, ROTATE_HALF


def rotary(scores: str, size: int = K):
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {ANGLES.format(size=size)}"
    return attention(scores=scores, inputs=inputs, constants=ROTARY)


@pytest.mark.parametrize(
    ("scores", "size"),
    [(ROTATE_HALF, K), (INTERLEAVED, K // 2)],
    ids=["rotate half", "interleaved"],
)
def test_rotated_queries_are_read_and_certified(scores, size):
    block = only(rotary(scores, size))
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)
    factors = [turn.factor for turn in block.q.rotary_terms]
    assert {factor.value.name for factor in factors if factor} == {"cos", "sin"}
    assert block.k.rotary_terms == ()


def test_collaborative_heads_do_not_apply():
    refusal = sharing_refusal(only(rotary(ROTATE_HALF)))
    assert refusal and refusal.code == "rotary"


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
        (("Mul(q, cos)", "Mul(q, q)"), "stands between"),
        (("Neg(q_high)", "Tanh(q_high)"), "stands between"),
        (("Add(q_cos, q_sin)", "Add(q_cos, q_cos)"), "stands between"),
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
    angles = f"float[1, sequence, {K // 2}] cos, float[1, sequence, {K // 2}] sin"
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {angles}"
    block = only(attention(scores=scores, inputs=inputs, opset=23))
    assert block.position == "rope"
