"""Rotary positions of different exporters are matched and certified."""

from __future__ import annotations

import numpy as np
import pytest

from graph_passes.emit.rotary import rotary_planes
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.shared_dimensions import sharing_refusal
from tests.graph_passes.graphs import (
    FLOAT_MASK,
    D,
    H,
    K,
    attention,
    feeds,
    masked,
    only,
    reasons,
    run,
    weights,
)
from tests.graph_passes.layouts import ANGLES, INTERLEAVED, ROTARY, ROTATE_HALF


def rotary(scores: str, size: int = K):
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {ANGLES.format(size=size)}"
    return attention(scores=scores, inputs=inputs, constants=ROTARY)


@pytest.mark.parametrize(
    ("scores", "size"),
    [(ROTATE_HALF, K), (INTERLEAVED, K // 2)],
    ids=["rotate half", "interleaved"],
)
def test_find_attention_rotated_queries_are_certified(scores, size):
    block = only(rotary(scores, size))
    assert (block.position, block.num_heads, block.head_size) == ("rope", H, K)
    factors = [turn.factor for turn in block.q.rotary_terms]
    assert {factor.value.name for factor in factors if factor} == {"cos", "sin"}
    assert block.k.rotary_terms == ()


def test_rotation_of_all_elements_joined_with_none_is_pruned():
    """Phi-3 joins the rotated elements with those behind them, of which there are none."""
    joined = (
        "q_rotated = Add(q_cos, q_sin)\n q_rest = Slice(q, whole, whole, last)\n"
        " q_turned = Concat <axis = -1> (q_rotated, q_rest)"
    )
    scores = ROTATE_HALF.replace("q_turned = Add(q_cos, q_sin)", joined)
    model = rotary(scores)
    block = only(model)
    assert len(block.q.rotary_terms) == 2
    PruneHeads({block.name: [0] + [1] * (H - 1)})(model)
    assert only(model).num_heads == H - 1


def test_rotation_in_single_precision_of_half_precision_heads_is_pruned():
    """Llama rotates float16 heads in float32, so that new heads need the same casts."""
    scores = ROTATE_HALF.replace("(q,", "(q_single,").replace("q_turned = Add", "q_sum = Add")
    scores = scores.replace("s0 =", "q_turned = Cast <to = 10> (q_sum)\n s0 =")
    singles = {name: array for name, array in weights().items() if array.dtype == np.float32}
    halves = {name: array.astype(np.float16) for name, array in singles.items() if name != "low"}

    def build():
        return attention(
            scores="\n q_single = Cast <to = 1> (q)" + scores,
            inputs=f"float16[batch, sequence, {D}] x, float16[batch, 1, 1, sequence] mask, "
            + ANGLES.format(size=K),
            output_type=f"float16[batch, sequence, {D}] out",
            constants=halves | ROTARY,
        )

    model, mask = build(), [0] + [1] * (H - 1)
    block = only(model)
    arrays = feeds(model)
    PruneHeads({block.name: mask})(model)
    expected = run(masked(build(), {block.name: mask}), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, rtol=0.01, atol=0.01)


PAIRED = """
 {angles}
 cos = Reshape(cos_pairs, joined)  sin = Reshape(sin_pairs, joined)
 q_even = Slice(q, n0, whole, last, step)  q_odd = Slice(q, one, whole, last, step)
 q_minus = Neg(q_odd)  q_minus1 = Unsqueeze(q_minus, last)  q_even1 = Unsqueeze(q_even, last)
 q_stack = Concat <axis = -1> (q_minus1, q_even1)  q_swapped = Reshape(q_stack, unpaired)
 q_cos = Mul(q, cos)  q_sin = Mul(q_swapped, sin)
 q_turned = Add(q_cos, q_sin)
 s0 = MatMul(q_turned, kT)
 s = Mul(s0, scale)"""


@pytest.mark.parametrize(
    ("pairs", "is_rotation"),
    [
        ("Tile({angle}_last, twice)", True),
        ("Expand({angle}_last, twice)", True),
        ("Concat <axis = -1> ({angle}_last, {angle}_last)", True),
        ("Concat <axis = -1> ({angle}_last, other_last)", False),
        ("Concat <axis = -1> (other_last, {angle}_last)", False),
    ],
)
def test_pairs_have_one_angle_only_if_it_is_known(pairs: str, is_rotation: bool):
    """Angles that PyTorch repeats with ``repeat_interleave`` (GPT-J) or ``stack`` (RoFormer)."""
    angles = "\n ".join(
        f"{angle}_last = Unsqueeze({angle}, last)  {name}_pairs = {pairs.format(angle=angle)}"
        for name, angle in (("cos", "even"), ("sin", "odd"))
    )
    size = K // 2
    names = ("even", "odd", "other")
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}"
    inputs += "".join(f", float[sequence, {size}] {name}" for name in names)
    constants = ROTARY | {
        "joined": np.array([0, K], np.int64), "step": np.array([2], np.int64),
        "one": np.array([1], np.int64), "twice": np.array([1, 1, 2], np.int64),
    }  # fmt: skip
    scores = PAIRED.format(angles="other_last = Unsqueeze(other, last)\n " + angles)
    block = only(attention(scores=scores, inputs=inputs, constants=constants))
    planes = rotary_planes(block.q)
    assert planes is not None and planes.turned == size
    assert planes.is_rotation is is_rotation


def test_sharing_refusal_of_rotary_positions():
    refusal = sharing_refusal(only(rotary(ROTATE_HALF)))
    assert refusal and refusal.code == "rotary"


def test_find_attention_rotary_sign_is_recorded():
    """The opposite sign is certified as another function."""
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
def test_find_attention_near_rotary_is_unmatched(change, reason):
    found = reasons(rotary(ROTATE_HALF.replace(*change)))
    assert len(found) == 1
    assert reason in found[0]


@pytest.mark.parametrize("interleaved", [0, 1])
def test_find_attention_rotary_operator_is_certified(interleaved):
    """PyTorch exports one row of angles, which ONNX Runtime accepts for a batch of one only."""
    turned = f"RotaryEmbedding <interleaved = {interleaved}> (q, cos, sin)"
    scores = f"\n q_turned = {turned}\n s0 = MatMul(q_turned, kT)\n s = Mul(s0, scale)"
    angles = f"float[1, sequence, {K // 2}] cos, float[1, sequence, {K // 2}] sin"
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}, {angles}"
    block = only(attention(scores=scores, inputs=inputs, opset=23))
    assert block.position == "rope"
