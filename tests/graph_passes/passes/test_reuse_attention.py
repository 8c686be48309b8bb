"""ReuseAttention: probabilities go forward in depth, and what they took the place of is gone."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from graph_passes.analysis.cost import model_cost
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.editing import Inserter
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import Edges, ReuseAttention, reuse_refusal
from tests.errors import raises
from tests.graph_passes.graphs import (
    BOOL_MASK,
    FLOAT_MASK,
    FUSED,
    PARTS,
    PLAIN_INPUT,
    D,
    H,
    K,
    V,
    attention,
    feeds,
    grafted,
    graph,
    layers,
    run,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    HALF_PRECISION,
    LAID_OUT,
    LAYOUTS,
    MEMORY,
    NORM,
    ONE_KEY_HEAD,
    OPERANDS,
    PACKED_PARTS,
    ROTARY,
    SEQUENCE_FIRST,
    SHARED,
    SPLIT,
    VARIANTS,
    cross,
)

EXACT = 1e-5
FIRST, SECOND, THIRD = (f"attention_{index}" for index in range(3))


def all_of(name: str, source: str, heads: int = H) -> dict[str, dict[int, tuple[str, int]]]:
    return {name: {head: (source, head) for head in range(heads)}}


def reuse(model: ir.Model, edges: Edges) -> ir.Model:
    return ReuseAttention(edges)(model).model


def assert_is_forwarding(
    build: Callable[[], ir.Model], edges: Edges, atol: float = EXACT
) -> ir.Model:
    """The reused model writes what the grafted one does, and is certified as what it is."""
    arrays = feeds(build())
    expected = run(grafted(build(), edges), arrays)
    names = [block.name for block in find_attention(build())[0]]
    model = reuse(build(), edges)
    got = run(model, arrays)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)
    reading = read_attention(model)
    assert [miss.reason for miss in reading.unmatched] == []
    assert [block.name for block in reading.blocks] == names
    for block in reading.blocks:
        assert block.form == ("reuse" if edges.get(block.name) else "standard")
        taken = {int(head) for reused in block.reused for head in reused.heads}
        assert len(taken) == len(edges.get(block.name, ()))
        assert block.q.num_heads == block.num_heads - len(taken)
    return model


# ---- exact where the two attend alike -----------------------------------------------------------


def twins() -> ir.Model:
    """Two layers that read the same x with the same weights; their outputs are added."""
    first = "".join(PARTS.values())
    made = "|".join(node.outputs[0].name or "" for node in attention().graph)
    second = re.sub(rf"\b({made})\b", r"\1_2", first)
    return graph(f"{first}{second}\n y = Add(out, out_2)", output=f"float[batch, sequence, {D}] y")


@pytest.mark.parametrize("heads", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_heads_of_a_twin_are_exact(heads: tuple[int, ...]) -> None:
    """The same x, the same weights, the same mask: equal within 1e-6 of magnitude 1."""
    edges = {SECOND: {head: (FIRST, head) for head in heads}}
    arrays = feeds(twins())
    expected = run(twins(), arrays)
    np.testing.assert_allclose(run(reuse(twins(), edges), arrays), expected, atol=2e-6, rtol=1e-6)


def test_other_heads_of_a_twin_are_not() -> None:
    edges = {SECOND: {0: (FIRST, 1)}}
    arrays = feeds(twins())
    difference = run(reuse(twins(), edges), arrays) - run(twins(), arrays)
    assert np.abs(difference).max() > 1e-2


EDGES: dict[str, dict[str, dict[int, tuple[str, int]]]] = {
    "all of the second from the first": all_of(SECOND, FIRST),
    "all, in another order": {SECOND: {0: (FIRST, 2), 1: (FIRST, 0), 2: (FIRST, 1)}},
    "all from one head": {SECOND: dict.fromkeys(range(H), (FIRST, 1))},
    "one head": {SECOND: {1: (FIRST, 1)}},
    "one head from another": {SECOND: {2: (FIRST, 0)}},
    "two from one": {SECOND: {0: (FIRST, 1), 2: (FIRST, 1)}},
    "the last from the first": all_of(THIRD, FIRST),
    "second and third from the first": all_of(SECOND, FIRST) | all_of(THIRD, FIRST),
    "from two layers": {THIRD: {0: (FIRST, 0), 1: (SECOND, 1), 2: (SECOND, 0)}},
    "from two layers, and one head stays": {THIRD: {0: (SECOND, 2), 2: (FIRST, 0)}},
    "a chain over heads that stay": {
        SECOND: {0: (FIRST, 0)}, THIRD: {0: (SECOND, 1), 1: (SECOND, 2), 2: (FIRST, 0)},
    },
    "a chain in which one head stays": {
        SECOND: {0: (FIRST, 0), 1: (FIRST, 1)}, THIRD: {1: (SECOND, 2)},
    },
}  # fmt: skip


@pytest.mark.parametrize("case", EDGES)
def test_probabilities_are_forwarded(case: str) -> None:
    assert_is_forwarding(lambda: layers(3), EDGES[case])


@settings(max_examples=25)
@given(data=st.data())
def test_any_edges_are_forwarded(data: st.DataObject) -> None:
    """Any exact heads of earlier layers; the opset stays, and names are unique."""
    edges: dict[str, dict[int, tuple[str, int]]] = {}
    exact = [(FIRST, head) for head in range(H)]
    for name in (SECOND, THIRD):
        taken = data.draw(st.sets(st.integers(0, H - 1)))
        edges[name] = {head: data.draw(st.sampled_from(exact)) for head in sorted(taken)}
        exact += [(name, head) for head in range(H) if head not in taken]
    model = assert_is_forwarding(lambda: layers(3, opset=11), edges)
    assert model.opset_imports[""] == 11
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)


# ---- masks, biases, positions, layouts ----------------------------------------------------------

PART = {SECOND: {0: (FIRST, 2), 2: (FIRST, 1)}}


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
@pytest.mark.parametrize("case", [name for name in VARIANTS if name != "sequence first"])
def test_masks_biases_positions_and_norms(case: str, edges: Edges) -> None:
    inputs, parts = VARIANTS[case]
    constants = OPERANDS | ROTARY
    assert_is_forwarding(lambda: layers(inputs=inputs, constants=constants, **parts), edges)


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
def test_sequence_first(edges: Edges) -> None:
    inputs = f"float[sequence, batch, {D}] x, float[1, 1, 1, sequence] mask"
    assert_is_forwarding(lambda: layers(inputs=inputs, **SEQUENCE_FIRST), edges)


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
def test_half_precision(edges: Edges) -> None:
    def build() -> ir.Model:
        model = layers(constants=HALF_PRECISION)
        text = ir.to_proto(model)
        for initializer in text.graph.initializer:
            array = ir.serde.deserialize_tensor(initializer).numpy()
            if array.dtype == np.float32:
                initializer.CopyFrom(
                    ir.to_proto(ir.tensor(array.astype(np.float16), name=initializer.name))
                )
        for value in (*text.graph.input, *text.graph.output):
            value.type.tensor_type.elem_type = ir.DataType.FLOAT16
        return ir.from_proto(text)

    assert_is_forwarding(build, edges, atol=2e-2)


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
def test_packed_projections(edges: Edges) -> None:

    model = assert_is_forwarding(lambda: layers(q=SPLIT["Split"], **PACKED_PARTS), edges)
    assert "Wqkv_1" not in model.graph.initializers
    assert "Wqkv_0" in model.graph.initializers


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
def test_heads_and_batch_in_one_axis(edges: Edges) -> None:

    def build() -> ir.Model:
        parts = LAYOUTS["heads and batch in one axis"]
        return layers(inputs=PLAIN_INPUT, constants=LAID_OUT, **parts)

    arrays = feeds(build())
    model = reuse(build(), edges)
    expected = run(reuse(layers(inputs=PLAIN_INPUT, mask="\n m = Identity(s)"), edges), arrays)
    np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)
    forms = [block.form for block in read_attention(model).blocks]
    assert forms == ["standard", "reuse"]


def test_cross_attention_of_two_layers_that_read_one_memory() -> None:
    def build() -> ir.Model:
        return layers(inputs=f"{PLAIN_INPUT}, {MEMORY}", **cross())

    rng = np.random.default_rng(0)
    arrays = {n: rng.standard_normal((2, t, D)).astype(np.float32) for n, t in (("x", 7), ("y", 4))}
    for edges in (all_of(SECOND, FIRST), PART):
        expected = run(grafted(build().clone(), edges), arrays)
        model = reuse(build(), edges)
        np.testing.assert_allclose(run(model, arrays), expected, atol=EXACT, rtol=0)
        last = read_attention(model).blocks[-1]
        assert (last.form, last.kind, last.input_size) == ("reuse", "cross", D)


def test_causal_decoder() -> None:
    causal = {
        "mask": "\n rows = Shape(x)\n many = Gather <axis = 0> (rows, i1)"
                "\n count = Range(i0, many, i1)\n column = Unsqueeze(count, a1)"
                "\n seen = LessOrEqual(count, column)\n m = Where(seen, s, low)"
    }  # fmt: skip
    for edges in (all_of(SECOND, FIRST), PART):
        assert_is_forwarding(lambda: layers(inputs=PLAIN_INPUT, **causal), edges)


K_APART = PARTS["k"].replace("kT", "k").replace("0, 2, 3, 1", "0, 2, 1, 3")
OPERATOR = {
    **FUSED,
    "k": K_APART,
    "context": PARTS["context"].replace("MatMul(p, v)", "Attention <scale = 0.37> (q, k, v, mask)"),
}
BY_QUERY = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"


MASKS = {
    "no mask": (PLAIN_INPUT, "Attention <scale = 0.37> (q, k, v)"),
    "boolean mask": (BY_QUERY, "Attention <scale = 0.37> (q, k, v, mask)"),
    "causal": (PLAIN_INPUT, "Attention <scale = 0.37, is_causal = 1> (q, k, v)"),
}


@pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])
@pytest.mark.parametrize("mask", MASKS)
def test_fused_operators_are_decomposed_first(mask: str, edges: Edges) -> None:
    inputs, operator = MASKS[mask]
    context = PARTS["context"].replace("MatMul(p, v)", operator)

    def fused(*names: str) -> ir.Model:
        model = layers(inputs=inputs, opset=23, **{**OPERATOR, "context": context})
        return DecomposeAttention(frozenset(names))(model).model

    arrays = feeds(fused())
    expected = assert_is_forwarding(lambda: fused(FIRST, SECOND), edges)
    model = reuse(fused(), edges)
    assert "Attention" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, arrays), run(expected, arrays), atol=EXACT, rtol=EXACT)


# ---- what is left of a layer --------------------------------------------------------------------


def test_queries_and_keys_of_a_reused_layer_are_gone() -> None:
    model = reuse(layers(2), all_of(SECOND, FIRST))
    assert {"Wq_1", "bq_1", "Wk_1", "bk_1"}.isdisjoint(model.graph.initializers)
    untouched = {f"{name}_0" for name in SHARED} | {"Wv_1", "bv_1", "Wo_1", "bo_1"}
    assert untouched <= set(model.graph.initializers)
    assert [node.op_type for node in model.graph].count("Softmax") == 1


def test_graph_in_text_before_and_after() -> None:
    model = reuse(layers(2), {SECOND: {1: (FIRST, 0)}})
    names = [node.name for node in model.graph if (node.name or "").startswith(SECOND)]
    assert [name.removeprefix(f"{SECOND}/reuse/") for name in names if name] == [
        "query/product", "query/biased", "query/heads", "query/heads_apart",
        "key/product", "key/biased", "key/heads", "key/heads_apart",
        "keys", "scores", "biased", "softmax", "probabilities_taken", "probabilities_joined",
        "value/product", "value/biased", "value/heads", "value/heads_apart",
        "context", "by_token", "merged_heads", "output_product", "output",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_macs_and_parameters_by_formula(count: int) -> None:
    """4 d^2 n + 2 d n^2 and 4 d^2 + 4 d fall by (1 - K/2H) for K of H heads (H*K = D)."""
    heads, size = 8, 3
    width = heads * size
    build = square_layers(heads, size)
    edges = {SECOND: {head: (FIRST, (head + 1) % heads) for head in range(count)}}
    before, after = model_cost(build()), model_cost(reuse(build(), edges))
    assert before.macs is not None and after.macs is not None
    share = count / (2 * heads)
    for n in (1, 7, 100):
        at = {"batch": 1, "sequence": n}
        layer = 4 * width**2 * n + 2 * width * n**2
        assert before.macs(at) == 2 * layer
        assert after.macs(at) == layer + layer * (1 - share)
    assert before.parameters - after.parameters == 4 * (width**2 + width) * share


def square_layers(heads: int, size: int) -> Callable[[], ir.Model]:
    """Two layers whose heads are as wide together as their tokens."""
    width, rng = heads * size, np.random.default_rng(0)
    names = [f"{kind}{part}" for part in "qkvo" for kind in "Wb"]
    constants = {
        f"{name}{layer}": rng.standard_normal((width,) * (2 if name[0] == "W" else 1))
        for layer in ("", "_2")
        for name in names
    }
    arrays = {name: array.astype(np.float32) for name, array in constants.items()}
    arrays["heads"] = arrays["v_heads"] = np.array([0, 0, heads, size], np.int64)
    first = "".join((PARTS | {"mask": "\n m = Identity(s)"}).values())
    made = "|".join(node.outputs[0].name or "" for node in attention().graph)
    second = re.sub(rf"\b({made}|{'|'.join(names)})\b", r"\1_2", first)
    second = re.sub(r"\bx\b", "out", second)

    def build() -> ir.Model:
        return graph(
            first + second,
            inputs=f"float[batch, sequence, {width}] x",
            output=f"float[batch, sequence, {width}] out_2",
            constants=arrays,
        )

    return build


def test_reusing_nothing_changes_nothing() -> None:
    for edges in ({}, {SECOND: {}}):
        model = layers(2)
        before = ir.to_proto(model).SerializeToString()
        assert not ReuseAttention(edges)(model).modified
        assert ir.to_proto(model).SerializeToString() == before


def test_layers_that_share_their_weights_go_on_sharing_them() -> None:
    """ALBERT: values and output of all three layers stay one weight; nothing is added."""
    model = layers(3, same=SHARED)
    before = model_cost(model).parameters
    reuse(model, all_of(SECOND, FIRST) | all_of(THIRD, FIRST))
    assert model_cost(model).parameters == before
    assert set(SHARED) <= set(model.graph.initializers)


def test_reuse_and_prune_go_together() -> None:
    """Prune first: what is left of both layers is numbered anew."""
    masks = {FIRST: (1, 0, 1), SECOND: (0, 1, 1)}

    def build() -> ir.Model:
        return PruneHeads(masks)(layers(2)).model

    model = assert_is_forwarding(build, {SECOND: {1: (FIRST, 0)}})
    assert [block.num_heads for block in read_attention(model).blocks] == [2, 2]


def test_layers_of_other_numbers_of_heads() -> None:
    def build() -> ir.Model:
        return PruneHeads({FIRST: (0, 1, 0)})(layers(2)).model

    assert_is_forwarding(build, {SECOND: dict.fromkeys(range(H), (FIRST, 0))})


# ---- reading graphs of reuse --------------------------------------------------------------------

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
}


def reading_graph(text: str, **constants: np.ndarray) -> ir.Model:
    return graph(
        "".join(PARTS.values()) + text,
        output=f"float[batch, sequence, {D}] out, float[batch, sequence, {D}] z",
        constants=ORDER | constants,
    )


@pytest.mark.parametrize("case", READS)
def test_reuse_that_somebody_else_wrote_is_read(case: str) -> None:
    text, heads, sources = READS[case]
    reading = read_attention(reading_graph(text))
    assert [miss.reason for miss in reading.unmatched] == []
    first, second = reading.blocks
    assert (first.form, second.form) == ("standard", "reuse")
    assert second.num_heads == H
    assert [reused.heads.tolist() for reused in second.reused] == heads
    assert [reused.sources.tolist() for reused in second.reused] == sources
    assert {reused.value for reused in second.reused} == {first.probabilities}
    assert second.own_heads.tolist() == sorted(set(range(H)) - set(heads[0]))
    assert (second.x.name, second.kind, second.input_size) == ("out", "self", D)


def test_chain_of_three_is_read_in_order() -> None:
    model = reuse(layers(3), EDGES["a chain in which one head stays"])
    first, second, third = read_attention(model).blocks
    assert [block.form for block in (first, second, third)] == ["standard", "reuse", "reuse"]
    assert [reused.value for reused in third.reused] == [second.own_probabilities]


def test_graph_that_was_saved_is_read_the_same() -> None:
    """Names and forms are in the graph, not in the memory of who wrote it."""
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
    "joined with what is no softmax": (
        f"\n two = Gather <axis = 1> (p, pair)\n one_of = Gather <axis = 1> (s, a1)"
        f"\n taken = Concat <axis = 1> (two, one_of){SECOND_VALUES}{SECOND_CONTEXT}"
    ),
}


@pytest.mark.parametrize("case", NOT_READ)
def test_near_misses_are_no_attention(case: str) -> None:
    """The first layer is read; the second is nothing, or a miss with a reason: never read wrong."""
    text = NOT_READ[case]
    inputs = f"float[batch, sequence, {D}] x, {FLOAT_MASK}"
    if case == "keys in another order":
        inputs = f"float[batch, 3, {D}] x, float[batch, 1, 1, 3] mask"
    if "fed" in text:
        inputs += f", float[{H}] fed"
    model = graph(
        "".join(PARTS.values()) + text,
        inputs=inputs,
        output=f"float[batch, sequence, {D}] out, float[batch, sequence, {D}] z",
        constants=ORDER,
    )
    assert [block.form for block in read_attention(model).blocks] == ["standard"]


def test_own_heads_out_of_order_are_missed() -> None:
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
    model = reading_graph(text, **constants)
    second = read_attention(model).blocks[1]
    assert (second.num_heads, second.own_heads.tolist()) == (4, [0, 1, 2])
    wrong = reading_graph(text.replace("(own, one_of)", "(turned, one_of)"), **constants)
    reading = read_attention(wrong)
    assert [block.form for block in reading.blocks] == ["standard"]
    assert len(reading.unmatched) >= 1


def test_probabilities_of_a_layer_that_is_not_read_are_not_reused() -> None:
    text = "".join(PARTS.values()).replace(
        "s0 = MatMul(q, kT)", "s9 = Tanh(q)\n s0 = MatMul(s9, kT)"
    )
    model = graph(
        f"{text}{SECOND_VALUES}{SECOND_CONTEXT.replace('taken', 'p')}",
        output=f"float[batch, sequence, {D}] out, float[batch, sequence, {D}] z",
    )
    assert read_attention(model).blocks == ()


# ---- what is refused ----------------------------------------------------------------------------

BAD_EDGES: dict[str, tuple[Mapping[str, Mapping[int, tuple[str, int]]], str]] = {
    "forward in depth": (
        {FIRST: {0: (SECOND, 0)}},
        "reuse_attention.order",
    ),
    "from itself": (
        {SECOND: {0: (SECOND, 1)}}, "reuse_attention.order",
    ),
    "from a reused head": (
        {SECOND: {1: (FIRST, 0)}, THIRD: {0: (SECOND, 1)}},
        "reuse_attention.chain",
    ),
    "from an unknown layer": (
        {SECOND: {0: ("attention_9", 0)}}, "rewrite.unknown_block",
    ),
    "of an unknown layer": ({"layer 7": {0: (FIRST, 0)}}, "rewrite.unknown_block"),
    "from an unknown head": (
        {SECOND: {0: (FIRST, 3)}}, "reuse_attention.head",
    ),
    "of an unknown head": ({SECOND: {7: (FIRST, 0)}}, "reuse_attention.head"),
    "of a head before the first": ({SECOND: {-1: (FIRST, 0)}}, "pass.params"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_EDGES)
def test_edges_go_back_in_depth_from_exact_heads(case: str) -> None:
    edges, code = BAD_EDGES[case]
    model = layers(3)
    before = text_of(model)
    with raises(InvalidArgument, code) as caught:
        reuse(model, edges)
    assert "\n" not in caught.value.what and "\n" not in caught.value.fix
    assert text_of(model) == before


def test_head_that_is_reused_in_the_graph_is_no_source() -> None:
    model = reuse(layers(3), {SECOND: {1: (FIRST, 0)}})
    with raises(InvalidArgument, "reuse_attention.chain"):
        second = next(b for b in find_attention(model)[0] if b.name == SECOND)
        (taken,) = second.reused
        reuse(model, {THIRD: {0: (SECOND, int(taken.heads[0]))}})


def test_exact_head_of_a_layer_that_reuses_is_a_source() -> None:
    def build() -> ir.Model:
        return reuse(layers(3), {SECOND: {1: (FIRST, 0)}})

    model = build()
    second = next(b for b in find_attention(model)[0] if b.name == SECOND)
    head = int(second.own_heads[0])
    arrays = feeds(model)
    edges = {THIRD: {0: (SECOND, head), 2: (SECOND, head)}}
    expected = run(grafted(build(), edges), arrays)
    got = run(reuse(model, edges), arrays)
    np.testing.assert_allclose(got, expected, atol=EXACT, rtol=EXACT)
    assert [b.form for b in read_attention(model).blocks] == ["standard", "reuse", "reuse"]


def test_layer_is_reused_once() -> None:
    model = reuse(layers(2), {SECOND: {1: (FIRST, 0)}})
    with raises(CannotRewrite, "reuses_heads"):
        reuse(model, {SECOND: {0: (FIRST, 0)}})


def test_first_layer_has_no_source() -> None:
    assert code_of(find_attention(layers(2))[0][:1]) == "no_earlier"


def code_of(blocks: Sequence[AttentionBlock]) -> str | None:
    """Why the last block cannot reuse probabilities of those before it."""
    refusal = reuse_refusal(blocks[-1], blocks[:-1])
    return refusal and refusal.code


SECOND_MASK = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[batch, 1, 1, sequence] mask_1"
UNLIKE: dict[str, tuple[str, tuple[str, str]]] = {
    "another mask": (SECOND_MASK, ("m_1 = Add(s_1, mask)", "m_1 = Add(s_1, mask_1)")),
    "no mask": (f"{PLAIN_INPUT}, {FLOAT_MASK}", ("m_1 = Add(s_1, mask)", "m_1 = Identity(s_1)")),
    "one mask more": (
        SECOND_MASK,
        ("m_1 = Add(s_1, mask)", "m9 = Add(s_1, mask)\n m_1 = Add(m9, mask_1)"),
    ),
    "its mask subtracted": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        ("m_1 = Add(s_1, mask)", "m_1 = Sub(s_1, mask)"),
    ),
    "a bias of its own": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        ("m_1 = Add(s_1, mask)", "m9 = Add(s_1, per_head)\n m_1 = Add(m9, mask)"),
    ),
    "its mask halved": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        ("m_1 = Add(s_1, mask)", "half_mask = Mul(mask, scale)\n m_1 = Add(s_1, half_mask)"),
    ),
}


LARGE = np.random.default_rng(0).standard_normal((1, 1, 40, 40)).astype(np.float32)


@pytest.mark.parametrize("node", [False, True], ids=["initializers", "Constant nodes"])
def test_biases_too_large_to_compare_are_not_taken_for_the_same(node: bool) -> None:
    """1600 elements each, and other ones: only one tensor for both layers is the same for sure."""
    mask = "\n m = Add(s, table)"
    model = layers(inputs=f"float[batch, 40, {D}] x", mask=mask, constants={"table": LARGE})
    blocks, _ = find_attention(model)
    assert code_of(blocks) is None
    for name, sign in (("m_0", 1), ("m_1", -1)):
        add = next(n for n in model.graph if n.outputs[0].name == name)
        make = Inserter(model.graph, add, name)
        value = make.constant(sign * LARGE, "table")
        if node:
            value = make.op("Constant", [], "constant", value=value.const_value)
        add.replace_input_with(1, value)
    blocks, _ = find_attention(model)
    assert code_of(blocks) == "masks_differ"


def edited(inputs: str, change: tuple[str, str]) -> ir.Model:
    """Two layers, the second with another line."""
    first = "".join(PARTS.values())
    made = "|".join(node.outputs[0].name or "" for node in attention().graph)
    second = re.sub(rf"\b({made})\b", r"\1_1", first)
    second = re.sub(r"\bx\b", "out", second)
    assert change[0] in second
    return graph(
        first + second.replace(*change), inputs=inputs, output=f"float[batch, sequence, {D}] out_1"
    )


@pytest.mark.parametrize("case", UNLIKE)
def test_layers_that_mask_otherwise_are_refused(case: str) -> None:
    model = edited(*UNLIKE[case])
    with raises(CannotRewrite, "masks_differ"):
        reuse(model, all_of(SECOND, FIRST))


def test_mask_that_is_computed_again_is_the_same_mask() -> None:
    """Exporters repeat a mask in every layer."""
    again = "\n mask9 = Mul(mask, one)\n m = Add(s, mask9)"
    assert_is_forwarding(lambda: layers(mask=again), all_of(SECOND, FIRST))


def test_other_lengths_are_refused() -> None:
    """Two streams without masks: neither has the other's queries, though both attend alike."""
    first = "".join((PARTS | {"mask": "\n m = Identity(s)"}).values())
    made = "|".join(node.outputs[0].name or "" for node in attention().graph)
    second = re.sub(rf"\b({made})\b", r"\1_1", first)
    model = graph(
        first + re.sub(r"\bx\b", "other", second),
        inputs=f"{PLAIN_INPUT}, float[batch, frames, {D}] other",
        output=f"float[batch, sequence, {D}] out, float[batch, frames, {D}] out_1",
    )
    for edges in (all_of(SECOND, FIRST), {SECOND: {0: (FIRST, 0)}}):
        with raises(CannotRewrite, "lengths_differ"):
            reuse(model, edges)


def test_other_memory_is_refused() -> None:
    inputs = f"{PLAIN_INPUT}, {MEMORY}, float[batch, memory, {D}] z"
    model = layers(inputs=inputs, **cross())
    blocks, _ = find_attention(model)
    assert code_of(blocks) is None
    for node in model.graph:
        if node.outputs[0].name in ("k0_1", "v0_1"):
            node.replace_input_with(0, model.graph.inputs[2])
    blocks, _ = find_attention(model)
    assert code_of(blocks) == "masks_differ"


def test_cross_attention_does_not_take_from_self_attention() -> None:
    first = "".join((PARTS | {"mask": "\n m = Identity(s)"}).values())
    made = "|".join(node.outputs[0].name or "" for node in attention().graph)
    second = re.sub(rf"\b({made})\b", r"\1_1", "".join((PARTS | cross()).values()))
    model = graph(
        first + re.sub(r"\bx\b", "out", second),
        inputs=f"{PLAIN_INPUT}, {MEMORY}",
        output=f"float[batch, sequence, {D}] out_1",
    )
    blocks, _ = find_attention(model)
    assert [block.kind for block in blocks] == ["self", "cross"]
    assert code_of(blocks) == "masks_differ"


def test_some_heads_are_refused_where_the_others_cannot_be_written() -> None:
    """A norm over all heads: all heads may be reused, for then none is left to write."""
    normed = PARTS["q"].replace(
        "q2 = Reshape(q1", "q9 = LayerNormalization(q1, all_gains)\n        q2 = Reshape(q9"
    )
    gains = {"all_gains": np.ones(H * K, np.float32)}

    def build() -> ir.Model:
        return layers(q=normed, constants=gains)

    with raises(CannotRewrite, "projection_layout"):
        reuse(build(), PART)
    assert_is_forwarding(build, all_of(SECOND, FIRST))


def test_boolean_masks_and_one_key_head_and_norm_together() -> None:
    def build() -> ir.Model:
        return layers(
            inputs=f"{PLAIN_INPUT}, {BOOL_MASK}",
            constants=OPERANDS,
            **{**ONE_KEY_HEAD, "scores": NORM, "mask": "\n m = Where(mask, s, low)"},
        )

    for edges in (all_of(SECOND, FIRST), PART):
        assert_is_forwarding(build, edges)
