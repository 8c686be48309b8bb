"""ReuseAttention: the output equals grafted probabilities, without unused queries and keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.checks.certify import read_attention
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import model_cost
from graph_passes.analysis.shapes import infer_shapes_small
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
    PARTS,
    PLAIN_INPUT,
    SCALE,
    D,
    H,
    K,
    assert_unchanged,
    body_layer,
    feeds,
    fused_parts,
    grafted,
    graph,
    layers,
    run,
    second_layer,
    square_layers,
    text_of,
    weights,
)
from tests.graph_passes.layouts import (
    LAID_OUT,
    LAYOUTS,
    MEMORY,
    NORM,
    ONE_KEY_HEAD,
    OPERANDS,
    PACKED_PARTS,
    ROTARY,
    SHARED,
    SINGLE_CONTEXT,
    SINGLE_MASK,
    SPLIT,
    VARIANTS,
    cross,
)
from tests.graph_passes.reuse import EDGES, EXACT, FIRST, SECOND, THIRD, all_of, reuse


def drawn_edges(data: st.DataObject, least: int = 0) -> dict[str, dict[int, tuple[str, int]]]:
    """Any heads of the second and third layer from any exact heads of earlier layers."""
    edges: dict[str, dict[int, tuple[str, int]]] = {}
    exact = [(FIRST, head) for head in range(H)]
    for name in (SECOND, THIRD):
        taken = data.draw(st.sets(st.integers(0, H - 1), min_size=least))
        edges[name] = {head: data.draw(st.sampled_from(exact)) for head in sorted(taken)}
        exact += [(name, head) for head in range(H) if head not in taken]
    return edges


def in_half(model: ir.Model, values: Sequence[ir.Value]) -> ir.Model:
    """The model with float16 weights, and with these values in float16."""
    for value in model.graph.initializers.values():
        if value.const_value is not None and value.const_value.dtype == ir.DataType.FLOAT:
            half = value.const_value.numpy().astype(np.float16)
            value.const_value = ir.tensor(half, name=value.name)
            value.type = ir.TensorType(ir.DataType.FLOAT16)
    for value in values:
        value.type = ir.TensorType(ir.DataType.FLOAT16)
    return model


def assert_is_forwarding(
    build: Callable[[], ir.Model], edges: Edges, atol: float = EXACT
) -> ir.Model:
    """The reused model writes what the grafted one does, and is certified as what it is."""
    model = build()
    arrays = feeds(model)
    expected = run(grafted(model.clone(), edges), arrays)
    found = Analyses.of(model).get(find_attention)  # the pass reads the same blocks
    names = [block.name for block in found.blocks]
    reuse(model, edges)
    got = run(model, arrays)
    assert got.dtype == expected.dtype
    np.testing.assert_allclose(got, expected, atol=atol, rtol=atol)
    matches = read_attention(model)
    assert [miss.reason for miss in matches.unmatched] == []
    assert [block.name for block in matches.blocks] == names
    for block in matches.blocks:
        assert block.form == ("reuse" if edges.get(block.name) else "standard")
        taken = {int(head) for reused in block.reused for head in reused.heads}
        assert len(taken) == len(edges.get(block.name, ()))
        assert block.q.num_heads == block.num_heads - len(taken)
    return model


# ---- exact where the two attend alike -----------------------------------------------------------


def twins() -> ir.Model:
    """Two layers that read the same x with the same weights; their outputs are added."""
    text = "".join(PARTS.values()) + second_layer(tokens="x") + "\n y = Add(out, out_1)"
    return graph(text, output=f"float[batch, sequence, {D}] y")


@pytest.mark.parametrize("heads", [(0,), (1, 2), (0, 1, 2)], ids=str)
def test_reuse_attention_equal_heads_keep_the_output(heads: tuple[int, ...]) -> None:
    """The same x, the same weights, the same mask: equal within 1e-6 of magnitude 1."""
    edges = {SECOND: {head: (FIRST, head) for head in heads}}
    arrays = feeds(twins())
    expected = run(twins(), arrays)
    np.testing.assert_allclose(run(reuse(twins(), edges), arrays), expected, atol=2e-6, rtol=1e-6)


def test_reuse_attention_different_heads_change_the_output() -> None:
    edges = {SECOND: {0: (FIRST, 1)}}
    arrays = feeds(twins())
    difference = run(reuse(twins(), edges), arrays) - run(twins(), arrays)
    assert np.abs(difference).max() > 1e-2


@pytest.mark.parametrize("case", EDGES)
def test_reuse_attention_edges_equal_grafting(case: str) -> None:
    assert_is_forwarding(lambda: layers(3), EDGES[case])


@pytest.mark.fuzz
@settings(max_examples=25)
@given(data=st.data())
def test_reuse_attention_any_edges_equal_grafting(data: st.DataObject) -> None:
    """The opset stays, and names are unique."""
    model = assert_is_forwarding(lambda: layers(3, opset=11), drawn_edges(data))
    assert model.opset_imports[""] == 11
    names = [value.name for node in model.graph for value in node.outputs]
    assert len(set(names)) == len(names)


# ---- masks, biases, positions, layouts ----------------------------------------------------------

PART = {SECOND: {0: (FIRST, 2), 2: (FIRST, 1)}}
all_or_some = pytest.mark.parametrize("edges", [all_of(SECOND, FIRST), PART], ids=["all", "some"])

CAUSAL = (
    "\n rows = Shape(x)\n many = Gather <axis = 0> (rows, i1)\n count = Range(i0, many, i1)"
    "\n column = Unsqueeze(count, a1)\n seen = LessOrEqual(count, column)"
    "\n m = Where(seen, s, low)"
)
SOURCES: dict[str, tuple[str, dict[str, str]]] = VARIANTS | {
    "causal decoder": (PLAIN_INPUT, {"mask": CAUSAL}),
    "cross attention": (f"{PLAIN_INPUT}, float[batch, 4, {D}] y", cross()),
    "packed projections": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        {"q": SPLIT["Split"], **PACKED_PARTS},
    ),
    "one key head, q/k norm and boolean mask": (
        f"{PLAIN_INPUT}, {BOOL_MASK}",
        {**ONE_KEY_HEAD, "scores": NORM, "mask": "\n m = Where(mask, s, low)"},
    ),
    "the mask is recomputed in each layer": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}",
        {"mask": "\n mask9 = Mul(mask, one)\n m = Add(s, mask9)"},
    ),
}


@all_or_some
@pytest.mark.parametrize("case", SOURCES)
def test_reuse_attention_of_any_source_equals_grafting(case: str, edges: Edges) -> None:
    inputs, parts = SOURCES[case]
    model = assert_is_forwarding(
        lambda: layers(inputs=inputs, constants=OPERANDS | ROTARY, **parts), edges
    )
    if case == "packed projections":
        assert "Wqkv_1" not in model.graph.initializers
        assert "Wqkv_0" in model.graph.initializers
    if case == "cross attention":
        last = read_attention(model).blocks[-1]
        assert (last.form, last.kind, last.input_size) == ("reuse", "cross", D)


@all_or_some
def test_reuse_attention_heads_in_batch_axis_equal_plain_layout(edges: Edges) -> None:
    parts = LAYOUTS["heads and batch in one axis"]
    model = layers(inputs=PLAIN_INPUT, constants=LAID_OUT, **parts)
    arrays = feeds(model)
    expected = run(reuse(layers(inputs=PLAIN_INPUT, mask="\n m = Identity(s)"), edges), arrays)
    np.testing.assert_allclose(run(reuse(model, edges), arrays), expected, atol=EXACT, rtol=0)
    assert [block.form for block in read_attention(model).blocks] == ["standard", "reuse"]


BY_QUERY = f"{PLAIN_INPUT}, bool[batch, 1, sequence, sequence] mask"
MASKS = {
    "no mask": (PLAIN_INPUT, "Attention <scale = 0.37> (q, k, v)"),
    "boolean mask": (BY_QUERY, "Attention <scale = 0.37> (q, k, v, mask)"),
    "causal": (PLAIN_INPUT, "Attention <scale = 0.37, is_causal = 1> (q, k, v)"),
}


@all_or_some
@pytest.mark.parametrize("mask", MASKS)
def test_reuse_attention_fused_sources_are_decomposed(mask: str, edges: Edges) -> None:
    inputs, operator = MASKS[mask]

    def fused(*names: str) -> ir.Model:
        model = layers(inputs=inputs, opset=23, **fused_parts(operator))
        return DecomposeAttention(frozenset(names))(model).model

    arrays = feeds(fused())
    expected = assert_is_forwarding(lambda: fused(FIRST, SECOND), edges)
    model = reuse(fused(), edges)
    assert "Attention" not in {node.op_type for node in model.graph}
    np.testing.assert_allclose(run(model, arrays), run(expected, arrays), atol=EXACT, rtol=EXACT)


# ---- the rewritten graph ------------------------------------------------------------------------


def test_reuse_attention_removes_queries_and_keys() -> None:
    model = reuse(layers(2), all_of(SECOND, FIRST))
    assert {"Wq_1", "bq_1", "Wk_1", "bk_1"}.isdisjoint(model.graph.initializers)
    untouched = {f"{name}_0" for name in SHARED} | {"Wv_1", "bv_1", "Wo_1", "bo_1"}
    assert untouched <= set(model.graph.initializers)
    assert [node.op_type for node in model.graph].count("Softmax") == 1


def test_reuse_attention_writes_these_nodes() -> None:
    model = reuse(layers(2), {SECOND: {1: (FIRST, 0)}})
    names = [node.name for node in model.graph if (node.name or "").startswith(SECOND)]
    assert [name.removeprefix(f"{SECOND}/reuse/") for name in names if name] == [
        "query/product", "query/biased", "query/heads", "query/heads_apart",
        "key/product", "key/biased", "key/heads", "key/heads_apart",
        "keys", "scores", "biased", "softmax", "probabilities_taken",
        "value/product", "value/biased", "value/heads", "value/heads_apart",
        "values", "context", "values_2", "context_2", "contexts_joined",
        "by_token", "merged_heads", "output_product", "output",
    ]  # fmt: skip


@pytest.mark.parametrize("count", [1, 3, 6, 8])
def test_reuse_attention_macs_and_parameters_match_formula(count: int) -> None:
    """4 d^2 n + 2 d n^2 and 4 d^2 + 4 d fall by (1 - K/2H) for K of H heads (H*K = D)."""
    heads, size = 8, 3
    width = heads * size
    edges = {SECOND: {head: (FIRST, (head + 1) % heads) for head in range(count)}}
    before = model_cost(square_layers(heads, size, 2))
    after = model_cost(reuse(square_layers(heads, size, 2), edges))
    assert before.macs is not None and after.macs is not None
    share = count / (2 * heads)
    for n in (1, 7, 100):
        at = {"batch": 1, "sequence": n}
        layer = 4 * width**2 * n + 2 * width * n**2
        assert before.macs(at) == 2 * layer
        assert after.macs(at) == layer + layer * (1 - share)
    assert before.parameters - after.parameters == 4 * (width**2 + width) * share


def test_reuse_attention_without_edges_changes_nothing() -> None:
    for edges in ({}, {SECOND: {}}):
        model = layers(2)
        assert_unchanged(model, ReuseAttention(edges))


def test_reuse_attention_keeps_weights_shared() -> None:
    """ALBERT: all three layers still share the weights of values and output."""
    model = layers(3, same=SHARED)
    before = model_cost(model).parameters
    reuse(model, all_of(SECOND, FIRST) | all_of(THIRD, FIRST))
    assert model_cost(model).parameters == before
    assert set(SHARED) <= set(model.graph.initializers)


def test_reuse_attention_after_pruning_equals_grafting() -> None:
    """Edges use the head indices of the pruned layers."""
    masks = {FIRST: (1, 0, 1), SECOND: (0, 1, 1)}

    def build() -> ir.Model:
        return PruneHeads(masks)(layers(2)).model

    model = assert_is_forwarding(build, {SECOND: {1: (FIRST, 0)}})
    assert [block.num_heads for block in read_attention(model).blocks] == [2, 2]


def test_reuse_attention_source_with_fewer_heads_equals_grafting() -> None:
    def build() -> ir.Model:
        return PruneHeads({FIRST: (0, 1, 0)})(layers(2)).model

    assert_is_forwarding(build, {SECOND: dict.fromkeys(range(H), (FIRST, 0))})


# ---- contexts are joined, not probabilities ------------------------------------------------------


def joined_probabilities(model: ir.Model) -> list[str | None]:
    """Concat nodes whose output has the axes of queries and keys last, (..., S, T)."""
    shapes = infer_shapes_small(model, batch=2, sequence=5)
    return [
        node.name
        for node in model.graph.all_nodes()
        if node.op_type == "Concat" and (shapes.shape(node.outputs[0]) or ())[-2:] == (5, 5)
    ]


@pytest.mark.parametrize("case", EDGES)
def test_reuse_attention_joins_contexts_instead_of_probabilities(case: str) -> None:
    model = reuse(layers(3), EDGES[case])
    assert joined_probabilities(model) == []
    graphs = grafted(layers(3), EDGES[case])
    assert joined_probabilities(graphs)  # the check sees them where they are


def test_reuse_attention_all_own_heads_in_order_are_read_without_gather() -> None:
    """Own heads of a partially reused layer are one value of their own."""
    edges = {SECOND: {0: (FIRST, 0)}, THIRD: {0: (SECOND, 1), 1: (SECOND, 2), 2: (FIRST, 2)}}
    model = reuse(layers(3), edges)
    taken = [node for node in model.graph if (node.name or "").endswith("probabilities_taken")]
    assert [node.name.split("/")[0] for node in taken if node.name] == [SECOND, THIRD]
    third = read_attention(model).blocks[2]
    assert [reused.sources.tolist() for reused in third.reused] == [[0, 1], [2]]


def test_reuse_attention_macs_of_grouped_values_do_not_grow() -> None:
    """One value head for all: it is projected once, not once for each part."""
    inputs = f"{PLAIN_INPUT}, {FLOAT_MASK}"
    models = [layers(inputs=inputs, **ONE_KEY_HEAD) for _ in range(2)]
    reuse(models[1], PART)
    sizes = {"batch": 1, "sequence": 9}
    before, after = (cost.macs for cost in map(model_cost, models))
    assert before is not None and after is not None
    saved = 9 * D * 2 * K + 9 * 9 * 2 * K  # queries and scores of two heads
    assert before(sizes) - after(sizes) == saved


@pytest.mark.parametrize(
    ("parts", "edges"),
    [({}, all_of(SECOND, FIRST)), ({}, PART), (SINGLE_MASK, PART), (SINGLE_CONTEXT, PART)],
    ids=["all", "some", "softmax in float32", "softmax and context in float32"],
)
def test_reuse_attention_half_precision_equals_grafting(
    parts: Mapping[str, str], edges: Edges
) -> None:
    def build() -> ir.Model:
        model = layers(**parts)
        values = [*model.graph.inputs, *model.graph.outputs]
        return in_half(model, [v for v in values if not parts or v.name != "mask"])

    assert_is_forwarding(build, edges, atol=2e-2)


Case = Callable[[], ir.Model]
REFERENCES: dict[str, tuple[Case, Callable[[int], dict[str, np.ndarray]]]] = {
    "standard": (lambda: layers(3), weights),
    "packed": (
        lambda: layers(3, q=SPLIT["Split"], **PACKED_PARTS),
        lambda layer: packed_weights(weights(layer)),
    ),
    "fused operator": (
        lambda: layers(
            3,
            opset=23,
            inputs=f"{PLAIN_INPUT}, float[batch, 1, sequence, sequence] mask",
            **fused_parts(f"Attention <scale = {SCALE}> (q, k, v, mask)"),
        ),
        weights,
    ),
}
"""A model of three layers, and the weights of each."""


def packed_weights(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = dict(zip("qkv", np.split(arrays["Wqkv"], 3, axis=1), strict=True))
    biases = dict(zip("qkv", np.split(arrays["bqkv"], 3), strict=True))
    named = {f"W{n}": a for n, a in parts.items()} | {f"b{n}": a for n, a in biases.items()}
    return named | {"Wo": arrays["Wo12"], "bo": np.zeros(D, np.float32)}


def reference(
    x: np.ndarray,
    mask: np.ndarray,
    edges: Edges,
    weights_of: Callable[[int], dict[str, np.ndarray]],
) -> np.ndarray:
    """The residual stream after three layers, by the definition, in float64."""
    probabilities: dict[str, np.ndarray] = {}
    stream = x.astype(np.float64)
    for layer, name in enumerate((FIRST, SECOND, THIRD)):
        w = {name: array.astype(np.float64) for name, array in weights_of(layer).items()}
        q, k, v = (
            (stream @ w[f"W{part}"] + w[f"b{part}"]).reshape(*x.shape[:2], H, -1) for part in "qkv"
        )
        logits = SCALE * np.einsum("bshk,bthk->bhst", q, k) + mask
        exponents = np.exp(logits - logits.max(-1, keepdims=True))
        own = exponents / exponents.sum(-1, keepdims=True)
        for head, (source, index) in edges.get(name, {}).items():
            own[:, head] = probabilities[source][:, index]
        probabilities[name] = own
        context = np.einsum("bhst,bthv->bshv", own, v)
        stream = stream + context.reshape(*x.shape[:2], -1) @ w["Wo"] + w["bo"]
    return stream


@settings(max_examples=12)
@given(data=st.data())
@pytest.mark.parametrize("case", REFERENCES)
def test_reuse_attention_any_heads_equal_the_definition(case: str, data: st.DataObject) -> None:
    """Random heads and sources of layers in three layouts, without this package's matching."""
    build, weights_of = REFERENCES[case]
    model, edges = build(), drawn_edges(data, 1)
    arrays = feeds(model)
    got = run(reuse(model, edges), arrays)
    expected = reference(arrays["x"], arrays["mask"], edges, weights_of)
    np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)
    assert joined_probabilities(model) == []


# ---- refusals -----------------------------------------------------------------------------------

BAD_EDGES: dict[str, tuple[Mapping[str, Mapping[int, tuple[str, int]]], str]] = {
    "forward in depth": ({FIRST: {0: (SECOND, 0)}}, "reuse_attention.order"),
    "from itself": ({SECOND: {0: (SECOND, 1)}}, "reuse_attention.order"),
    "from a reused head": (
        {SECOND: {1: (FIRST, 0)}, THIRD: {0: (SECOND, 1)}},
        "reuse_attention.chain",
    ),
    "from an unknown layer": ({SECOND: {0: ("attention_9", 0)}}, "rewrite.unknown_block"),
    "of an unknown layer": ({"layer 7": {0: (FIRST, 0)}}, "rewrite.unknown_block"),
    "from an unknown head": ({SECOND: {0: (FIRST, 3)}}, "reuse_attention.head"),
    "of an unknown head": ({SECOND: {7: (FIRST, 0)}}, "reuse_attention.head"),
    "of a head before the first": ({SECOND: {-1: (FIRST, 0)}}, "pass.params"),
}


@pytest.mark.parametrize("case", BAD_EDGES)
def test_reuse_attention_invalid_edge_is_refused(case: str) -> None:
    edges, code = BAD_EDGES[case]
    model = layers(3)
    before = text_of(model)
    with raises(InvalidArgument, code) as caught:
        reuse(model, edges)
    assert "\n" not in caught.value.what and "\n" not in caught.value.fix
    assert text_of(model) == before


def test_reuse_attention_reused_source_is_refused() -> None:
    model = reuse(layers(3), {SECOND: {1: (FIRST, 0)}})
    with raises(InvalidArgument, "reuse_attention.chain"):
        second = next(b for b in find_attention(model).blocks if b.name == SECOND)
        (taken,) = second.reused
        reuse(model, {THIRD: {0: (SECOND, int(taken.heads[0]))}})


def test_reuse_attention_own_head_of_reusing_layer_is_a_source() -> None:
    def build() -> ir.Model:
        return reuse(layers(3), {SECOND: {1: (FIRST, 0)}})

    model = build()
    second = next(b for b in find_attention(model).blocks if b.name == SECOND)
    head = int(second.own_heads[0])
    arrays = feeds(model)
    edges = {THIRD: {0: (SECOND, head), 2: (SECOND, head)}}
    expected = run(grafted(build(), edges), arrays)
    got = run(reuse(model, edges), arrays)
    np.testing.assert_allclose(got, expected, atol=EXACT, rtol=EXACT)
    assert [b.form for b in read_attention(model).blocks] == ["standard", "reuse", "reuse"]


def test_reuse_attention_second_time_is_refused() -> None:
    model = reuse(layers(2), {SECOND: {1: (FIRST, 0)}})
    with raises(CannotRewrite, "rewrite.reuses_heads"):
        reuse(model, {SECOND: {0: (FIRST, 0)}})


def test_reuse_refusal_first_layer_has_no_earlier() -> None:
    assert code_of(find_attention(layers(2)).blocks[:1]) == "no_earlier"


def code_of(blocks: Sequence[AttentionBlock]) -> str | None:
    """Why the last block cannot reuse probabilities of those before it."""
    refusal = reuse_refusal(blocks[-1], blocks[:-1])
    return refusal and refusal.code


SECOND_MASK = f"{PLAIN_INPUT}, {FLOAT_MASK}, float[batch, 1, 1, sequence] mask_1"
UNLIKE: dict[str, tuple[str, str]] = {
    "another mask": (SECOND_MASK, "\n m = Add(s, mask_1)"),
    "no mask": (f"{PLAIN_INPUT}, {FLOAT_MASK}", "\n m = Identity(s)"),
    "one mask more": (SECOND_MASK, "\n m9 = Add(s, mask)\n m = Add(m9, mask_1)"),
    "its mask subtracted": (f"{PLAIN_INPUT}, {FLOAT_MASK}", "\n m = Sub(s, mask)"),
    "a bias of its own": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}", "\n m9 = Add(s, per_head)\n m = Add(m9, mask)",
    ),
    "its mask halved": (
        f"{PLAIN_INPUT}, {FLOAT_MASK}", "\n half_mask = Mul(mask, scale)\n m = Add(s, half_mask)",
    ),
}  # fmt: skip
"""The inputs, and the mask of the second layer."""


LARGE = np.random.default_rng(0).standard_normal((1, 1, 40, 40)).astype(np.float32)


@pytest.mark.parametrize("node", [False, True], ids=["initializers", "Constant nodes"])
def test_reuse_refusal_large_different_biases_differ(node: bool) -> None:
    """Biases of 1600 elements are equal only if both layers read the same tensor."""
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


@pytest.mark.parametrize("case", UNLIKE)
def test_reuse_attention_different_masks_are_refused(case: str) -> None:
    inputs, mask = UNLIKE[case]
    text = "".join(PARTS.values()) + second_layer(mask=mask)
    model = graph(text, inputs=inputs, output=f"float[batch, sequence, {D}] out_1")
    with raises(CannotRewrite, "rewrite.masks_differ"):
        reuse(model, all_of(SECOND, FIRST))


def test_reuse_attention_different_lengths_are_refused() -> None:
    """Two streams without masks have the same attention, and different lengths."""
    model = graph(
        body_layer("x") + second_layer(tokens="other", mask="\n m = Identity(s)"),
        inputs=f"{PLAIN_INPUT}, float[batch, frames, {D}] other",
        output=f"float[batch, sequence, {D}] out, float[batch, frames, {D}] out_1",
    )
    for edges in (all_of(SECOND, FIRST), {SECOND: {0: (FIRST, 0)}}):
        with raises(CannotRewrite, "rewrite.lengths_differ"):
            reuse(model, edges)


def test_reuse_refusal_different_memory_differs() -> None:
    inputs = f"{PLAIN_INPUT}, {MEMORY}, float[batch, memory, {D}] z"
    model = layers(inputs=inputs, **cross())
    blocks, _ = find_attention(model)
    assert code_of(blocks) is None
    for node in model.graph:
        if node.outputs[0].name in ("k0_1", "v0_1"):
            node.replace_input_with(0, model.graph.inputs[2])
    blocks, _ = find_attention(model)
    assert code_of(blocks) == "masks_differ"


def test_reuse_refusal_cross_from_self_attention_differs() -> None:
    model = graph(
        body_layer("x") + second_layer(**cross()),
        inputs=f"{PLAIN_INPUT}, {MEMORY}",
        output=f"float[batch, sequence, {D}] out_1",
    )
    blocks, _ = find_attention(model)
    assert [block.kind for block in blocks] == ["self", "cross"]
    assert code_of(blocks) == "masks_differ"


def test_reuse_attention_some_heads_of_unwritable_layer_are_refused() -> None:
    """A norm over all heads cannot be emitted for some heads, but all heads can be reused."""
    normed = PARTS["q"].replace(
        "q2 = Reshape(q1", "q9 = LayerNormalization(q1, all_gains)\n        q2 = Reshape(q9"
    )
    gains = {"all_gains": np.ones(H * K, np.float32)}

    def build() -> ir.Model:
        return layers(q=normed, constants=gains)

    with raises(CannotRewrite, "rewrite.projection_layout"):
        reuse(build(), PART)
    assert_is_forwarding(build, all_of(SECOND, FIRST))
