"""What heads are worth, held against numpy and against models with a head cut out by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration import importance, voting
from attnserve.calibration.importance import (
    head_energy,
    leave_one_out,
    leave_one_out_total,
    sensitivity,
)
from attnserve.calibration.voting import Votes, voting_to_stay
from attnserve.checks.certify import read_attention
from attnserve.context import RunContext
from attnserve.runtime.interface import Batch
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from tests.errors import raises
from tests.graph_passes.graphs import (
    FUSED,
    PARTS,
    PLAIN_INPUT,
    D,
    H,
    K,
    V,
    attention,
    feeds,
    fused_parts,
    graph,
    observing,
    weights,
)
from tests.graph_passes.graphs import only as block_of
from tests.graph_passes.layouts import LAID_OUT, ONE_KEY_HEAD
from tests.graph_passes.layouts import LAYOUTS as SHARED

Measure = Callable[..., dict[str, np.ndarray]]
MEASURES: list[Measure] = [head_energy, leave_one_out, sensitivity]

SIDE_BY_SIDE = "\n        c = Attention <q_num_heads = 3, kv_num_heads = 3> (q1, k1, v1)"
TURNED = """
        c0 = Einsum <equation = "bhst,bhtv->bshv"> (p, v)
        c = Reshape(c0, merge)"""
CYCLED = """
        c0 = Einsum <equation = "bhst,bhtv->sbhv"> (p, v)
        c1 = Transpose <perm = [1, 0, 2, 3]> (c0)
        c = Reshape(c1, merge)"""
ALONE = {
    "q": "\n        q0 = MatMul(x, Wq)\n        q1 = Add(bq, q0)",
    "k": "\n        k0 = MatMul(x, Wk)\n        k1 = Add(k0, bk)",
    "v": "\n        v0 = MatMul(x, Wv)\n        v1 = Add(v0, bv)",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "heads apart": {},
    "tokens before heads": {"context": TURNED},
    "tokens before sequences": {"context": CYCLED},
    "heads in the batch": {**SHARED["heads and batch in one axis"], "inputs": PLAIN_INPUT},
    "fused, heads side by side": {
        **ALONE, **FUSED, "context": SIDE_BY_SIDE, "opset": 23, "inputs": PLAIN_INPUT,
    },
    "fused, heads apart": {
        **fused_parts("Attention <scale = 0.37> (q, k, v)"), "opset": 23, "inputs": PLAIN_INPUT,
    },
}  # fmt: skip
"""One attention whose context lies in each of the layouts."""


def layer(layout: str = "heads apart", **constants: np.ndarray) -> ir.Model:
    return attention(**LAYOUTS[layout], constants=LAID_OUT | constants)


def without(head: int) -> np.ndarray:
    """W_O without what a head writes."""
    rows = weights()["Wo"].copy()
    rows[head * V : (head + 1) * V] = 0
    return rows


def outputs(model: ir.Model, batch: Batch) -> np.ndarray:
    return np.asarray(open_session(model).run(None, batch)[0]).astype(np.float64)


def contexts(model: ir.Model, batch: Batch) -> np.ndarray:
    """Of the plain layer: (H, tokens, V)."""
    context = observing(model, [block_of(model).context]).run(None, batch)[0]
    return np.moveaxis(context, 1, 0).reshape(H, -1, V).astype(np.float64)


def padded(batch: Batch, more: int = 6) -> Batch:
    """The same texts with more padding, of tokens that mean something."""
    ends = {"input_ids": 9, "attention_mask": 0, "token_type_ids": 0}
    return {
        name: np.pad(array, ((0, 0), (0, more)), constant_values=ends[name])
        for name, array in batch.items()
    }


# Energy


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_energy_is_the_variance_of_the_head_output(layout: str):
    model = layer(layout)
    batch = feeds(model)
    plain = contexts(model, batch) if layout == "heads apart" else None
    block = block_of(model)
    got = head_energy(model, [block], [batch])[block.name]
    rows = weights()["Wo"].reshape(H, V, D)
    if plain is not None:
        written = plain @ rows
        expected = np.square(written - written.mean(1, keepdims=True)).sum(-1).mean(1)
    else:  # what the output loses with the head, about its mean
        whole = outputs(model, batch)
        lost = np.stack(
            [(whole - outputs(layer(layout, Wo=without(h)), batch)) for h in range(H)]
        ).reshape(H, -1, D)
        expected = np.square(lost - lost.mean(1, keepdims=True)).sum(-1).mean(1)
    np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_energy_does_not_depend_on_batches():
    model = layer()
    batch = feeds(model, batch=4)
    block = block_of(model)
    rows = [{name: array[i : i + 1] for name, array in batch.items()} for i in range(4)]
    one, two = (head_energy(model, [block], batches) for batches in ([batch], rows))
    np.testing.assert_allclose(one[block.name], two[block.name], rtol=1e-6)


def test_energy_without_output_projection_is_that_of_the_context():
    model = attention(
        output="\n        out = Relu(c)", output_type=f"float[batch, sequence, {H * V}] out"
    )
    block, batch = block_of(model), feeds(model)
    assert block.output is None
    written = contexts(model, batch)
    expected = np.square(written - written.mean(1, keepdims=True)).sum(-1).mean(1)
    np.testing.assert_allclose(
        head_energy(model, [block], [batch])[block.name], expected, rtol=1e-5
    )


def test_energy_of_a_constant_head_is_zero():
    """Its constant moves into a bias, however large."""
    wv, bv = weights()["Wv"], weights()["bv"]
    wv[:, V : 2 * V], bv[V : 2 * V] = 0, 100
    model = layer(Wv=wv, bv=bv)
    block = block_of(model)
    got = head_energy(model, [block], [feeds(model)])[block.name]
    assert got[1] < 1e-4 < 1e-2 < got[0]
    assert leave_one_out(model, [block], [feeds(model)])[block.name][1] > 1, "it does write"


# One head out


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_loo_equals_zeroed_rows_of_the_output_projection(layout: str):
    model = layer(layout)
    block, batch = block_of(model), feeds(model, batch=3)
    got = leave_one_out(model, [block], [batch])[block.name]
    whole = outputs(model, batch).reshape(-1, D)
    spread = np.square(whole - whole.mean(0)).sum(-1).mean()
    for head in range(H):
        lost = whole - outputs(layer(layout, Wo=without(head)), batch).reshape(-1, D)
        expected = np.square(lost).sum(-1).mean() / spread
        assert got[head] == pytest.approx(expected, rel=1e-4)


def test_loo_total_estimates_the_sum_over_heads():
    """Outputs that are linear in the gates make the estimator unbiased."""
    model = layer()
    block, batches = block_of(model), [feeds(model, batch=3)]
    expected = leave_one_out(model, [block], batches)[block.name].sum()
    estimates = [
        leave_one_out_total(model, [block], batches, context=RunContext(seed=seed))[block.name]
        for seed in range(32)
    ]
    assert np.mean(estimates) == pytest.approx(expected, rel=0.1)
    assert max(estimates) < 3 * expected


@pytest.mark.parametrize("measure", MEASURES)
def test_importance_of_a_head_without_output_is_zero(measure: Measure):
    model = layer(Wo=without(2))
    block = block_of(model)
    got = measure(model, [block], [feeds(model)])[block.name]
    assert got[2] == 0.0
    assert got[:2].min() > 1e-3


def test_loo_of_all_layers_equals_models_without_each_head(
    tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    blocks = read_attention(tiny_graph).blocks
    got = leave_one_out(tiny_graph, blocks, tiny_batches[:1])
    assert list(got) == [block.name for block in blocks]
    real = tiny_batches[0]["attention_mask"].astype(bool)
    whole = outputs(tiny_graph, tiny_batches[0])[real]
    spread = np.square(whole - whole.mean(0)).sum(-1).mean()
    for block in blocks:
        assert block.output is not None
        original = block.output.weight.value.const_value
        assert original is not None
        for head in (0, 3):
            rows = original.numpy().copy()
            rows[block.output.rows[head]] = 0
            block.output.weight.value.const_value = ir.tensor(rows)
            cut = outputs(tiny_graph, tiny_batches[0])[real]
            block.output.weight.value.const_value = original
            expected = np.square(whole - cut).sum(-1).mean() / spread
            assert got[block.name][head] == pytest.approx(expected, rel=1e-3)


def test_loo_scales_every_output_by_its_spread():
    body = "".join(PARTS.values())
    scaled = body + "\n        large = Mul(out, thousand)\n        pooled = ReduceMean <axes = [1],"
    scaled += " keepdims = 0> (out)\n        label = ArgMax <axis = 2> (out)"
    scaled += "\n        same = Mul(out, zero)"
    constants = {"thousand": np.float32(1000)}
    inputs = f"float[batch, sequence, {D}] x, float[batch, 1, 1, sequence] mask"
    shape = f"float[batch, sequence, {D}]"

    def model(*names: str) -> ir.Model:
        kinds = {"pooled": f"float[batch, {D}]", "label": "int64[batch, sequence, 1]"}
        output = ", ".join(f"{kinds.get(name, shape)} {name}" for name in names)
        return graph(scaled, inputs=inputs, output=output, constants=constants)

    def measured(*names: str) -> np.ndarray:
        made = model(*names)
        (block,) = read_attention(made).blocks
        return leave_one_out(made, [block], [feeds(made, batch=5)])[block.name]

    one, pooled = measured("out"), measured("pooled")
    np.testing.assert_allclose(measured("out", "large", "label"), one, rtol=1e-4)
    np.testing.assert_allclose(measured("out", "pooled"), (one + pooled) / 2, rtol=1e-4)
    np.testing.assert_allclose(measured("out", "same"), one / 2, rtol=1e-4)
    with raises(InvalidModel, "importance.no_output", "label"):
        measured("label")


@pytest.mark.parametrize("inner", ["k1", "v", "p"])
def test_loo_ignores_caches_and_probabilities(inner: str):
    """Caches and probabilities do not change without a head: they would dilute what does."""
    ranks = {"k1": f"[batch, sequence, {H * K}]", "v": f"[batch, {H}, sequence, {V}]"}
    shape = ranks.get(inner, f"[batch, {H}, sequence, sequence]")
    more = attention(output_type=f"float[batch, sequence, {D}] out, float{shape} {inner}")
    got = []
    for model in (layer(), more):
        (block,) = read_attention(model).blocks
        got.append(leave_one_out(model, [block], [feeds(model)])[block.name])
    np.testing.assert_allclose(*got, rtol=1e-6)


def test_loo_output_of_text_length_is_not_masked():
    """(batch, D) is not (batch, sequence), even where D tokens come."""
    body = "".join(PARTS.values()) + "\n        pooled = ReduceMax <axes = [1], keepdims = 0> (out)"
    inputs = f"float[batch, sequence, {D}] x, float[batch, 1, 1, sequence] mask"
    inputs += ", int64[batch, sequence] attention_mask"
    model = graph(body, inputs=inputs, output=f"float[batch, {D}] pooled")
    (block,) = read_attention(model).blocks
    batch = feeds(model, batch=3, sequence=D)
    whole = batch | {"attention_mask": np.ones((3, D), np.int64)}
    cut = batch | {"attention_mask": np.tril(np.ones((3, D), np.int64), D - 6)}
    one, two = (leave_one_out(model, [block], [b])[block.name] for b in (whole, cut))
    np.testing.assert_allclose(one, two, rtol=1e-6)


@pytest.mark.parametrize("measure", [leave_one_out, sensitivity])
def test_importance_fixed_length_equals_dynamic_length(measure: Measure):
    """As of images, whose patches no mask counts."""
    fixed = attention(
        inputs=f"float[batch, 7, {D}] x, float[batch, 1, 1, 7] mask",
        output_type=f"float[batch, 7, {D}] out",
    )
    got = []
    for model in (layer(), fixed):
        block = block_of(model)
        got.append(measure(model, [block], [feeds(model)])[block.name])
    np.testing.assert_allclose(*got, rtol=1e-6)


# The derivative


def test_sensitivity_of_one_layer_is_the_norm_of_the_head_output():
    """The output is linear in a gate there, and its derivative c_h W_O^h."""
    model = layer()
    block, batch = block_of(model), feeds(model, batch=3)
    written = contexts(model, batch) @ weights()["Wo"].reshape(H, V, D)
    norms = np.sqrt(np.square(written).sum(-1).reshape(H, 3, -1).mean(-1))  # of each text
    whole = outputs(model, batch).reshape(-1, D)
    spread = np.sqrt(np.square(whole - whole.mean(0)).sum(-1).mean())
    got = sensitivity(model, [block], [batch])[block.name]
    np.testing.assert_allclose(got, norms.mean(1) / spread, rtol=1e-4)


def test_sensitivity_does_not_depend_on_the_step(
    tiny_graph: ir.Model, tiny_batches: list[Batch], monkeypatch: pytest.MonkeyPatch
):
    blocks = read_attention(tiny_graph).blocks
    coarse = sensitivity(tiny_graph, blocks, tiny_batches[:1])
    monkeypatch.setattr(importance, "STEP", 1 / 256)
    fine = sensitivity(tiny_graph, blocks, tiny_batches[:1])
    for name in coarse:
        np.testing.assert_allclose(coarse[name], fine[name], rtol=1e-3)


# All of them


@pytest.mark.parametrize("measure", MEASURES)
def test_importance_ignores_padding(
    measure: Measure, tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    blocks = read_attention(tiny_graph).blocks
    one, two = (
        measure(tiny_graph, blocks, [b]) for b in (tiny_batches[0], padded(tiny_batches[0]))
    )
    for name in one:
        np.testing.assert_allclose(one[name], two[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("measure", MEASURES)
def test_importance_does_not_change_the_model(measure: Measure):
    model = layer()
    before, block = ir.to_onnx_text(model), block_of(model)
    measure(model, [block], [feeds(model)])
    assert ir.to_onnx_text(model) == before


@pytest.mark.parametrize("measure", MEASURES)
def test_importance_without_blocks_is_empty(measure: Measure):
    model = layer()
    assert measure(model, [], [feeds(model)]) == {}


@pytest.mark.parametrize(
    ("measure", "steps"), [(head_energy, 2), (leave_one_out, 2 * H), (sensitivity, 2 * H)]
)
def test_importance_progress_counts_batches_or_heads(measure: Measure, steps: int):
    model = layer()
    told: list[tuple[int, int]] = []
    batches = [feeds(model), feeds(model, sequence=4)]
    context = RunContext(progress=lambda stage, done, total: told.append((done, total)))
    measure(model, [block_of(model)], batches, context=context)
    assert told == [(i + 1, steps) for i in range(steps)]


@pytest.mark.parametrize("measure", [leave_one_out, sensitivity])
def test_importance_row_limit_selects_batches_evenly(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
):
    model = layer()
    block = block_of(model)
    batches = [feeds(model, batch=2, seed=seed) for seed in range(8)]
    monkeypatch.setattr(importance, "MOST_ROWS", 4)
    some = measure(model, [block], batches)[block.name]
    chosen = measure(model, [block], [batches[2], batches[6]])[block.name]
    np.testing.assert_array_equal(some, chosen)
    monkeypatch.setattr(importance, "MOST_ROWS", 1)
    one = measure(model, [block], batches)[block.name]
    np.testing.assert_array_equal(one, measure(model, [block], [batches[4]])[block.name])


@pytest.mark.parametrize("measure", [*MEASURES, lambda *a: voting_to_stay(*a, groups=2)])
def test_importance_of_padding_only_is_refused(
    measure: Measure, tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    empty = tiny_batches[0] | {"attention_mask": np.zeros_like(tiny_batches[0]["attention_mask"])}
    for batches in ([empty], []):
        with raises(InvalidData, "calibration.no_token"):
            measure(tiny_graph, read_attention(tiny_graph).blocks[:1], batches)


@pytest.mark.parametrize("measure", [*MEASURES, lambda *a: voting_to_stay(*a, groups=2)])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_importance_of_non_finite_activations_is_refused(measure: Measure, value: float):
    model = layer()
    batch = feeds(model)
    batch["x"][0, 0, 0] = value
    with (
        np.errstate(invalid="ignore"),
        raises(InvalidData, "calibration.not_finite"),
    ):
        measure(model, [block_of(model)], [batch])


# Voting


def repeated(*sources: int) -> dict[str, np.ndarray]:
    """Weights in which head h is a copy of head ``sources[h]``."""
    made = weights()
    for name, size in (("Wq", K), ("bq", K), ("Wk", K), ("bk", K), ("Wv", V), ("bv", V)):
        heads = made[name].reshape(-1, H, size)[:, list(sources)]
        made[name] = np.ascontiguousarray(heads.reshape(weights()[name].shape))
    return {name: made[name] for name in ("Wq", "bq", "Wk", "bk", "Wv", "bv")}


def vote(model: ir.Model, groups: Any, batches: int = 3, **options: Any) -> Votes:
    block = block_of(model)
    chosen = [feeds(model, seed=seed) for seed in range(batches)]
    return voting_to_stay(model, [block], chosen, groups=groups, **options)[block.name]


@pytest.mark.parametrize(
    ("sources", "groups", "mask"),
    [
        ((0, 0, 2), [0, 0, 1], [1, 0, 1]),
        ((0, 1, 1), [0, 1, 1], [1, 1, 0]),
        ((0, 1, 0), [0, 1, 0], [1, 1, 0]),
    ],
)
def test_voting_keeps_the_first_of_equal_heads(
    sources: tuple[int, ...], groups: list[int], mask: list[int]
):
    got = vote(layer(**repeated(*sources)), 2)
    assert got.groups.tolist() == groups
    assert got.mask.tolist() == mask
    assert (got.votes == 9 * got.mask).all(), "three batches, three kinds of maps"


def test_voting_keeps_the_head_between_two_others():
    """All attend alike, so that contexts are values; those of head 1 lie between the others'."""
    constants = repeated(0, 0, 0)
    first, second = np.random.default_rng(0).standard_normal((2, D, V)).astype(np.float32)
    heads = [first, (first + second) / 2, second]
    constants |= {"Wv": np.concatenate(heads, axis=1), "bv": np.zeros(H * V, np.float32)}
    got = vote(layer(**constants), 1)
    assert got.mask.tolist() == [0, 1, 0]
    assert got.votes.tolist() == [3, 6, 0], "of equal probabilities the first is voted for"


@pytest.mark.parametrize("count", range(1, 7))
def test_clusters_are_optimal(count: int):
    """Against every way to label six points."""
    points = np.random.default_rng(count).standard_normal((6, 2))

    def cost(labels: tuple[int, ...]) -> float:
        clusters = (points[np.array(labels) == label] for label in set(labels))
        return sum(float(np.square(cluster - cluster.mean(0)).sum()) for cluster in clusters)

    labels = voting.k_means(points, count, 0)
    ways = (way for way in product(range(count), repeat=6) if len(set(way)) == count)
    assert cost(tuple(labels.tolist())) == pytest.approx(min(map(cost, ways)), abs=1e-12)
    assert list(dict.fromkeys(labels.tolist())) == list(range(count)), "numbered as they come"


@pytest.mark.parametrize("count", range(1, 6))
def test_clusters_of_equal_points_are_not_empty(count: int):
    labels = voting.k_means(np.ones((5, 2)), count, 0)
    assert sorted(set(labels.tolist())) == list(range(count))


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_voting_keeps_one_head_per_group(groups: int):
    for model in (layer(), layer(**repeated(0, 0, 0))):
        got = vote(model, groups)
        assert sorted(set(got.groups.tolist())) == list(range(groups))
        assert got.mask.sum() == groups
        assert got.votes.sum() == 9 * groups
        assert sorted(got.groups[got.mask == 1].tolist()) == list(range(groups))


def test_voting_of_a_batch_uses_its_feature_maps(tiny_graph: ir.Model, tiny_batches: list[Batch]):
    """The cosine of each head's flattened maps with their group's mean, written out."""
    block = read_attention(tiny_graph).blocks[0]
    got = voting_to_stay(tiny_graph, [block], tiny_batches, groups=2)[block.name]
    assert block.v.output is not None and block.probabilities is not None
    session = observing(tiny_graph, [block.v.output, block.probabilities, block.context])
    votes = np.zeros(4, int)
    for batch in tiny_batches:
        real = batch["attention_mask"].astype(bool)
        for array in session.run(None, batch):
            array = np.asarray(array)
            maps = array.swapaxes(1, 2)[real].swapaxes(0, 1).reshape(4, -1)
            for group in (np.flatnonzero(got.groups == g) for g in range(2)):
                mean = maps[group].mean(0)
                cosines = maps[group] @ mean / np.linalg.norm(maps[group], axis=1)
                votes[group[np.argmax(cosines)]] += 1
    assert got.votes.tolist() == votes.tolist()


def assert_same_votes(one: dict[str, Votes], two: dict[str, Votes]) -> None:
    for name in one:
        np.testing.assert_array_equal(one[name].groups, two[name].groups)
        np.testing.assert_array_equal(one[name].votes, two[name].votes)


def test_voting_ignores_padding_and_is_deterministic_for_a_seed(
    tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    blocks, context = read_attention(tiny_graph).blocks, RunContext(seed=7)
    one, *others = (
        voting_to_stay(tiny_graph, blocks, batches, groups=2, context=context)
        for batches in (tiny_batches, tiny_batches, [padded(batch) for batch in tiny_batches])
    )
    for other in others:
        assert_same_votes(one, other)


def test_voting_number_of_groups_may_differ_per_layer(
    tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    blocks = read_attention(tiny_graph).blocks
    wanted = {block.name: count for block, count in zip(blocks, (1, 4), strict=True)}
    got = voting_to_stay(tiny_graph, blocks, tiny_batches, groups=wanted)
    assert {name: int(votes.mask.sum()) for name, votes in got.items()} == wanted


def test_value_maps_of_grouped_heads_are_equal():
    model = attention(inputs=PLAIN_INPUT, mask="\n m = Identity(s)", **ONE_KEY_HEAD)
    got = vote(model, 1)
    assert got.votes.sum() == 9 and got.votes[0] >= 3, "of equal values the first is voted for"


@pytest.mark.parametrize("groups", [0, -1, H + 1])
def test_voting_invalid_number_of_groups_is_refused(groups: int):
    with raises(InvalidArgument, "voting.groups", "1 to 3", groups):
        vote(layer(), groups)


def test_voting_block_without_groups_is_refused():
    with raises(InvalidArgument, "voting.groups_missing"):
        vote(layer(), {"another": 2})
