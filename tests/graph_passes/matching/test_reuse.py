"""Graphs that reuse probabilities: what is matched, and near misses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.checks.certify import read_attention
from graph_passes.blocks import AttentionBlock
from tests.graph_passes.graphs import (
    FLOAT_MASK,
    PARTS,
    PLAIN_INPUT,
    TENSOR,
    D,
    H,
    V,
    feeds,
    grafted,
    graph,
    layers,
    run,
    second_layer,
    weights,
)
from tests.graph_passes.reuse import EDGES, EXACT, FIRST, SECOND, THIRD, reuse

SECOND_VALUES = """
        w0 = MatMul(out, Wv)
        w1 = Add(w0, bv)
        w2 = Reshape(w1, v_heads)
        w = Transpose <perm = [0, 2, 1, 3]> (w2)"""
SECOND_QUERIES = """
        r0 = MatMul(out, Wq1)
        r2 = Reshape(r0, one_head)
        r = Transpose <perm = [0, 2, 1, 3]> (r2)
        l0 = MatMul(out, Wk1)
        l2 = Reshape(l0, one_head)
        lT = Transpose <perm = [0, 2, 3, 1]> (l2)
        t = MatMul(r, lT)
        u = Add(t, mask)
        own = Softmax <axis = -1> (u)"""
SECOND_CONTEXT = """
        d0 = MatMul(taken, w)
        d1 = Transpose <perm = [0, 2, 1, 3]> (d0)
        d = Reshape(d1, merge)
        z = MatMul(d, Wo)"""

READS: dict[str, tuple[str, list[list[int]], list[list[int]]]] = {
    "the softmax itself": (
        f"{SECOND_VALUES}{SECOND_CONTEXT.replace('taken', 'p')}", [[0, 1, 2]], [[0, 1, 2]],
    ),
    "handed on": (
        f"\n taken = Identity(p){SECOND_VALUES}{SECOND_CONTEXT}", [[0, 1, 2]], [[0, 1, 2]],
    ),
    "heads of it, in another order": (
        f"\n taken = Gather <axis = 1> (p, order){SECOND_VALUES}{SECOND_CONTEXT}",
        [[0, 1, 2]], [[2, 0, 0]],
    ),
    "heads of it, counted from the end": (
        f"\n taken = Gather <axis = -3> (p, order){SECOND_VALUES}{SECOND_CONTEXT}",
        [[0, 1, 2]], [[2, 0, 0]],
    ),
    "its own and two of it": (
        f"{SECOND_QUERIES}\n two = Gather <axis = 1> (p, pair)"
        f"\n taken = Concat <axis = 1> (own, two){SECOND_VALUES}{SECOND_CONTEXT}",
        [[1, 2]], [[2, 1]],
    ),
    "two of it and its own": (
        f"{SECOND_QUERIES}\n two = Gather <axis = 1> (p, pair)"
        f"\n taken = Concat <axis = 1> (two, own){SECOND_VALUES}{SECOND_CONTEXT}",
        [[0, 1]], [[2, 1]],
    ),
    "in two pieces": (
        "\n one_of = Gather <axis = 1> (p, a1)\n two = Gather <axis = 1> (p, pair)"
        f"\n taken = Concat <axis = 1> (one_of, two){SECOND_VALUES}{SECOND_CONTEXT}",
        [[0, 1, 2]], [[1, 2, 1]],
    ),
}  # fmt: skip
ORDER = {
    "Wq1": weights()["Wk1"] * 2,
    "order": np.array([2, 0, 0], np.int64),
    "pair": np.array([2, 1], np.int64),
    "last_two": np.array([1, 2], np.int64),
    "one_and_two": np.array([1, 2], np.int64),
    "two_and_one": np.array([2, 1], np.int64),
}


OWN_AND_TWO = (
    f"{SECOND_QUERIES}\n two = Gather <axis = 1> (p, pair)"
    f"{SECOND_VALUES}\n w_own, w_two = Split <axis = 1> (w, one_and_two)"
    "\n d_own = MatMul(own, w_own)\n d_two = MatMul(two, w_two)"
    "\n d0 = Concat <axis = 1> (d_own, d_two)"
    f"{SECOND_CONTEXT.replace('d0 = MatMul(taken, w)', '')}"
)
"""Contexts of a head of its own and of two reused heads, joined."""
JOINED: dict[str, tuple[str, list[list[int]], list[list[int]]]] = {
    "its own and two of it": (OWN_AND_TWO, [[1, 2]], [[2, 1]]),
    "two of it and its own": (
        OWN_AND_TWO.replace("w_own, w_two =", "w_two, w_own =")
        .replace("one_and_two", "two_and_one").replace("(d_own, d_two)", "(d_two, d_own)"),
        [[0, 1]], [[2, 1]],
    ),
    "sliced values and probabilities": (
        OWN_AND_TWO.replace("two = Gather <axis = 1> (p, pair)", "two = Slice(p, a1, a3, a1)")
        .replace(
            "w_own, w_two = Split <axis = 1> (w, one_and_two)",
            "w_own = Slice(w, a0, a1, a1)\n w_two = Slice(w, a1, a3, a1, a1)",
        ),
        [[1, 2]], [[1, 2]],
    ),
    "gathered values, cast contexts": (
        OWN_AND_TWO.replace(
            "w_own, w_two = Split <axis = 1> (w, one_and_two)",
            "w_own = Gather <axis = 1> (w, a0)\n w_pair = Gather <axis = 1> (w, last_two)"
            "\n w_two = Cast <to = 1> (w_pair)",
        ).replace("d_two = MatMul", "d_cast = MatMul")
        .replace("d0 = Concat", "d_two = Cast <to = 1> (d_cast)\n d0 = Concat"),
        [[1, 2]], [[2, 1]],
    ),
    "two values of it": (
        "\n one_of = Gather <axis = 1> (p, a1)\n two = Gather <axis = 1> (p, pair)"
        f"{SECOND_VALUES}\n w_own, w_two = Split <axis = 1> (w, one_and_two)"
        "\n d_own = MatMul(one_of, w_own)\n d_two = MatMul(two, w_two)"
        "\n d0 = Concat <axis = 1> (d_own, d_two)"
        f"{SECOND_CONTEXT.replace('d0 = MatMul(taken, w)', '')}",
        [[0], [1, 2]], [[1], [2, 1]],
    ),
}  # fmt: skip


def reading_graph(
    text: str,
    inputs: str = f"{PLAIN_INPUT}, {FLOAT_MASK}",
    constants: Mapping[str, np.ndarray] | None = None,
    output: str = f"{TENSOR} out, {TENSOR} z",
    **parts: str,
) -> ir.Model:
    """A first layer, ``PARTS`` with some replaced, and the text of a second one."""
    return graph(
        "".join((PARTS | parts).values()) + text,
        inputs=inputs,
        output=output,
        constants=ORDER | dict(constants or {}),
    )


def reusing_block(
    text: str, heads: Sequence[Sequence[int]], sources: Sequence[Sequence[int]]
) -> AttentionBlock:
    """The second layer, after a check of the heads that it takes from the first."""
    matches = read_attention(reading_graph(text))
    assert [miss.reason for miss in matches.unmatched] == []
    first, second = matches.blocks
    assert (first.form, second.form, second.num_heads) == ("standard", "reuse", H)
    assert [reused.heads.tolist() for reused in second.reused] == heads
    assert [reused.sources.tolist() for reused in second.reused] == sources
    assert {reused.value for reused in second.reused} == {first.probabilities}
    return second


@pytest.mark.parametrize("case", READS)
def test_find_attention_reuse_by_others_is_found(case: str) -> None:
    second = reusing_block(*READS[case])
    assert second.own_heads.tolist() == sorted(set(range(H)) - set(READS[case][1][0]))
    assert (second.x.name, second.kind, second.input_size) == ("out", "self", D)


@pytest.mark.parametrize("case", JOINED)
def test_find_attention_joined_contexts_are_found(case: str) -> None:
    text, heads, sources = JOINED[case]
    second = reusing_block(text, heads, sources)
    assert second.probabilities is None
    assert len(second.probability_values) == bool(second.q.num_heads) + len(heads)
    assert second.v.output is not None and second.v.output.name == "w"
    assert second.output is not None


NOT_JOINED = {
    "values of another projection": OWN_AND_TWO.replace(
        "w_own, w_two = Split <axis = 1> (w, one_and_two)",
        "g0 = MatMul(out, Wv1)\n g2 = Reshape(g0, one_v_head)"
        "\n w_own = Transpose <perm = [0, 2, 1, 3]> (g2)\n w_two = Gather <axis = 1> (w, last_two)",
    ),
    "one head twice": OWN_AND_TWO.replace(
        "w_own, w_two = Split <axis = 1> (w, one_and_two)",
        "w_own = Gather <axis = 1> (w, a1)\n w_two = Gather <axis = 1> (w, last_two)",
    ),
    "an order of heads that is not that of the values": OWN_AND_TWO.replace(
        "(d_own, d_two)", "(d_two, d_own)"
    ),
}


@pytest.mark.parametrize("case", NOT_JOINED)
def test_find_attention_parts_of_different_values_are_unmatched(case: str) -> None:
    matches = read_attention(reading_graph(NOT_JOINED[case]))
    assert [block.form for block in matches.blocks] == ["standard"]
    assert len(matches.unmatched) == 1


@pytest.mark.parametrize(
    "case", ["its own and two of it", "two of it and its own"], ids=["own first", "own last"]
)
@pytest.mark.parametrize("form", ["probabilities", "contexts"])
def test_reuse_attention_of_a_layer_that_reuses_equals_grafting(form: str, case: str) -> None:
    """Graphs with joined probabilities, as older versions wrote them, and with joined contexts."""
    text = (READS if form == "probabilities" else JOINED)[case][0]
    third = second_layer("_3", "z")

    def build() -> ir.Model:
        return reading_graph(text + third, output=f"{TENSOR} out_3")

    second = read_attention(build()).blocks[1]
    head = int(second.own_heads[0])
    edges = {THIRD: {0: (SECOND, head), 2: (FIRST, 1)}}
    arrays = feeds(build())
    expected = run(grafted(build(), edges), arrays)
    model = reuse(build(), edges)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=EXACT)
    found = read_attention(model).blocks
    assert [block.form for block in found] == ["standard", "reuse", "reuse"]
    assert [reused.value for reused in found[2].reused] == [
        found[1].own_probabilities,
        found[0].probabilities,
    ]


def test_find_attention_chain_of_reuse_is_in_order() -> None:
    model = reuse(layers(3), EDGES["a chain in which one head stays"])
    first, second, third = read_attention(model).blocks
    assert [block.form for block in (first, second, third)] == ["standard", "reuse", "reuse"]
    assert [reused.value for reused in third.reused] == [second.own_probabilities]


def test_find_attention_saved_reuse_is_the_same() -> None:
    """A saved model has the same names and forms."""
    model = reuse(layers(3), EDGES["from two layers, and one head stays"])
    again = ir.from_proto(ir.to_proto(model))
    for one, other in zip(read_attention(model).blocks, read_attention(again).blocks, strict=True):
        assert (one.name, one.form) == (other.name, other.form)
        assert [r.sources.tolist() for r in one.reused] == [
            r.sources.tolist() for r in other.reused
        ]


NOT_READ = {
    "a sum of two heads": (
        f"\n one_of = Gather <axis = 1> (p, order)\n taken = Add(p, one_of)"
        f"{SECOND_VALUES}{SECOND_CONTEXT}"
    ),
    "keys in another order": (
        f"\n taken = Gather <axis = 3> (p, order){SECOND_VALUES}{SECOND_CONTEXT}"
    ),
    "an order that is fed": (
        f"\n order9 = Cast <to = 7> (fed)\n taken = Gather <axis = 1> (p, order9)"
        f"{SECOND_VALUES}{SECOND_CONTEXT}"
    ),
    "joined with what is not a softmax": (
        f"\n two = Gather <axis = 1> (p, pair)\n one_of = Gather <axis = 1> (s, a1)"
        f"\n taken = Concat <axis = 1> (two, one_of){SECOND_VALUES}{SECOND_CONTEXT}"
    ),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_find_attention_near_reuse_is_unmatched(case: str) -> None:
    """The first layer is found, and the second is unmatched."""
    text = NOT_READ[case]
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}"
    if case == "keys in another order":
        inputs = f"float[batch, 3, {D}] x, float[batch, 1, 1, 3] mask"
    if "fed" in text:
        inputs += f", float[{H}] fed"
    model = reading_graph(text, inputs)
    assert [block.form for block in read_attention(model).blocks] == ["standard"]


def test_find_attention_own_heads_out_of_order_is_unmatched() -> None:
    text = (
        SECOND_QUERIES.replace("Wq1", "Wq").replace("Wk1", "Wk").replace("one_head", "heads")
        + "\n turned = Gather <axis = 1> (own, order)\n one_of = Gather <axis = 1> (p, a1)"
        "\n taken = Concat <axis = 1> (own, one_of)"
        f"{SECOND_VALUES.replace('Wv', 'Wv8').replace('bv', 'bv8').replace('v_heads', 'four')}"
        + SECOND_CONTEXT.replace("Wo", "Wo8")
    )
    rng = np.random.default_rng(0)
    constants = {
        "Wv8": rng.standard_normal((D, 4 * V)).astype(np.float32),
        "bv8": rng.standard_normal(4 * V).astype(np.float32),
        "Wo8": rng.standard_normal((4 * V, D)).astype(np.float32),
        "four": np.array([0, 0, 4, V], np.int64),
    }
    model = reading_graph(text, constants=constants)
    second = read_attention(model).blocks[1]
    assert (second.num_heads, second.own_heads.tolist()) == (4, [0, 1, 2])
    wrong = reading_graph(text.replace("(own, one_of)", "(turned, one_of)"), constants=constants)
    matches = read_attention(wrong)
    assert [block.form for block in matches.blocks] == ["standard"]
    assert len(matches.unmatched) >= 1


def test_find_attention_reuse_of_unmatched_layer_is_unmatched() -> None:
    squashed = PARTS["scores"].replace("s0 = MatMul(q, kT)", "s9 = Tanh(q)\n s0 = MatMul(s9, kT)")
    second = f"{SECOND_VALUES}{SECOND_CONTEXT.replace('taken', 'p')}"
    assert read_attention(reading_graph(second, scores=squashed)).blocks == ()
