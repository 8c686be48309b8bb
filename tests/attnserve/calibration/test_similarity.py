"""Similarity of the attention of heads, compared with the definition."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.activations import probabilities_by_head
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.similarity import HeadSimilarity, measure_similarity, similarities
from attnserve.checks.certify import read_attention
from attnserve.context import RunContext
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.runtime.interface import Batch
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.matching.find import find_attention
from graph_passes.passes.reuse_attention import ReuseAttention
from tests.errors import raises
from tests.graph_passes.graphs import PLAIN_INPUT, D, H, K, V, attention, graph, observing, only
from tests.graph_passes.layouts import LAID_OUT, LAYOUTS

MASK = """
        real = Cast <to = 1> (attention_mask)
        hidden = Sub(one, real)
        low_hidden = Mul(hidden, low)
        mask = Unsqueeze(low_hidden, a12)"""
LAYER = """
        {n}q0 = MatMul({x}, Wq{n})
        {n}q1 = Reshape({n}q0, heads)
        {n}q = Transpose <perm = [0, 2, 1, 3]> ({n}q1)
        {n}k0 = MatMul({y}, Wk{n})
        {n}k1 = Reshape({n}k0, heads)
        {n}k = Transpose <perm = [0, 2, 3, 1]> ({n}k1)
        {n}v0 = MatMul({y}, Wv{n})
        {n}v1 = Reshape({n}v0, v_heads)
        {n}v = Transpose <perm = [0, 2, 1, 3]> ({n}v1)
        {n}s0 = MatMul({n}q, {n}k)
        {n}s1 = Mul({n}s0, scale)
        {n}s = {mask}
        {n}p = Softmax <axis = -1> ({n}s)
        {n}c0 = MatMul({n}p, {n}v)
        {n}c1 = Transpose <perm = [0, 2, 1, 3]> ({n}c0)
        {n}c = Reshape({n}c1, merge)
        {n}o = MatMul({n}c, Wo{n})
        {out} = Add({x}, {n}o)"""
INPUTS = f"float[batch, sequence, {D}] x, int64[batch, sequence] attention_mask"


def weights(*layers: str, alike: bool = False) -> dict[str, np.ndarray]:
    """Return separate weights for each layer, or equal ones."""
    random, shapes = np.random.default_rng(0), {"Wq": H * K, "Wk": H * K, "Wv": H * V}
    arrays: dict[str, np.ndarray] = {"a12": np.array([1, 2], np.int64)}
    for layer in layers:
        random = np.random.default_rng(0) if alike else random
        for name, width in shapes.items():
            arrays[name + layer] = random.standard_normal((D, width)).astype(np.float32)
        arrays["Wo" + layer] = random.standard_normal((H * V, D)).astype(np.float32)
    return arrays


def two_layers(alike: bool = False) -> ir.Model:
    """Self-attention twice; ``alike``: the same weights, on the same tokens."""
    first = LAYER.format(n="a", x="x", y="x", out="h", mask="Add(as1, mask)")
    tokens = "x" if alike else "h"
    second = LAYER.format(n="b", x=tokens, y=tokens, out="out", mask="Add(bs1, mask)")
    output = f"float[batch, sequence, {D}] out, float[batch, sequence, {D}] h"
    constants = weights("a", "b", alike=alike)
    return graph(MASK + first + second, inputs=INPUTS, output=output, constants=constants)


def matched(model: ir.Model | None = None) -> tuple[ir.Model, Sequence[AttentionBlock]]:
    """A model, by default of two layers, and its blocks."""
    model = two_layers() if model is None else model
    return model, read_attention(model).blocks


def texts(*lengths: int, width: int = 9, seed: int = 1) -> Batch:
    """One text of each length, padded to the width with noise."""
    x = np.random.default_rng(seed).standard_normal((len(lengths), width, D)).astype(np.float32)
    mask = np.arange(width) < np.array(lengths)[:, None]
    return {"x": x, "attention_mask": mask.astype(np.int64)}


def probabilities(model: ir.Model, blocks: Sequence[AttentionBlock], batch: Batch) -> np.ndarray:
    """Of all heads of all layers, (N, B, S, T)."""
    values = [block.probabilities for block in blocks]
    seen = observing(model, values).run(None, batch)  # type: ignore[arg-type]
    return np.concatenate([np.asarray(p) for p in seen], axis=1).swapaxes(0, 1)


def reference(model: ir.Model, blocks: Sequence[AttentionBlock], batches: Sequence[Batch]):
    """Compute eq. 2 and the mean of eq. 3 directly."""
    similarities: list[np.ndarray] = []
    for batch in batches:
        p = probabilities(model, blocks, batch).astype(np.float64)
        for text, real in enumerate(batch["attention_mask"].astype(bool)):
            rows = p[:, text][:, real]  # N Q T
            distance = np.abs(rows[:, None] - rows).sum(-1) / 2
            similarities.append(1 - distance.mean(-1))
    return np.mean(similarities, axis=0)


# Measuring


def test_measure_similarity_equals_the_definition():
    model, blocks = matched()
    batches = [texts(9, 4, 1), texts(6, 2, width=7, seed=2), texts(12, width=12, seed=3)]
    got = measure_similarity(model, blocks, batches)
    assert (got.layers, got.heads) == (tuple(block.name for block in blocks), (H, H))
    assert got.queries == 9 + 4 + 1 + 6 + 2 + 12
    # Probabilities and sums are in single precision.
    np.testing.assert_allclose(got.matrix, reference(model, blocks, batches), rtol=0, atol=1e-6)
    np.testing.assert_array_equal(got.matrix, got.matrix.T)
    np.testing.assert_allclose(np.diag(got.matrix), 1.0, rtol=0, atol=1e-6)
    assert got.matrix.min() >= 0.0
    assert got.matrix[~np.eye(2 * H, dtype=bool)].max() < 0.99, "independent heads differ"


def scaled_weights(model: ir.Model, factor: float) -> ir.Model:
    for name, value in model.graph.initializers.items():
        if name.startswith("W") and value.const_value is not None:
            value.const_value = ir.tensor(factor * value.const_value.numpy(), name=name)
    return model


def test_measure_similarity_to_uniform_attention_equals_the_definition():
    # No probability of a visible key is 0.
    model, blocks = matched(scaled_weights(two_layers(), 0.3))
    batches = [texts(9, 4, 1), texts(6, 2, width=7, seed=2)]
    got = measure_similarity(model, blocks, batches)
    found: list[np.ndarray] = []
    for batch in batches:
        p = probabilities(model, blocks, batch).astype(np.float64)
        for text, real in enumerate(batch["attention_mask"].astype(bool)):
            rows = p[:, text][:, real]  # N Q T
            distance = np.abs(rows - real / real.sum()).sum(-1) / 2  # masked keys are not seen
            found.append(1 - distance.mean(-1))
    np.testing.assert_allclose(got.uniform, np.mean(found, axis=0), rtol=0, atol=1e-6)
    np.testing.assert_allclose(
        got.baseline(), np.mean(found, axis=0).reshape(2, H).mean(1), atol=1e-6
    )


@pytest.mark.parametrize(("std", "is_above"), [(0.02, False), (0.6, True)])
def test_similarity_of_random_weights_does_not_exceed_uniform_attention(std: float, is_above: bool):
    """Two layers of small random weights are alike, but less than each is to uniform attention."""
    model = scaled_weights(two_layers(alike=is_above), std)
    got = measure_similarity(*matched(model), [texts(12, 9, 12)])
    similar, uniform = got.best()[1, 0], got.baseline()[1]
    assert (similar > uniform) == is_above
    assert is_above or similar > 0.9


def test_similarities_of_groups_equal_those_of_single_measurements():
    model, blocks = matched()
    batches = [texts(9, 4, 6), texts(3, 7, seed=2)]
    groups = [blocks, blocks[:1], blocks[1:]]
    for group, found in zip(groups, similarities(model, groups, batches), strict=True):
        assert found is not None and found.layers == tuple(block.name for block in group)
        expected = measure_similarity(model, group, batches)
        np.testing.assert_allclose(found.matrix, expected.matrix, atol=1e-6)


def test_similarities_of_padding_only_are_none():
    model, blocks = matched()
    assert [*similarities(model, [blocks], [texts(0, 0)])] == [None]


def reused_heads() -> tuple[ir.Model, Sequence[AttentionBlock]]:
    """Two layers, of which heads 0 and 2 of the second reuse heads 1 and 0 of the first."""
    model = two_layers()
    first, second = (block.name for block in find_attention(model).blocks)
    ReuseAttention({second: {0: (first, 1), 2: (first, 0)}})(model)
    return matched(model)


def test_measure_similarity_of_reused_heads_is_one():
    """Probabilities of a layer that are in several values of the graph count as one layer's."""
    model, blocks = reused_heads()
    batches = [texts(9, 4)]
    got = measure_similarity(model, blocks, batches)
    (grouped,) = similarities(model, [blocks], batches)
    assert got.heads == (H, H)
    taken = {h: s for r in blocks[1].reused for h, s in zip(r.heads, r.sources, strict=True)}
    between = got.between(*(block.name for block in reversed(blocks)))
    assert len(taken) == 2
    for head, source in taken.items():
        assert between[head, source] == pytest.approx(1.0, abs=1e-6)
    own = blocks[1].own_heads
    assert between[own].max() < 0.99
    assert grouped is not None
    np.testing.assert_allclose(grouped.matrix, got.matrix, rtol=0, atol=1e-6)


def test_probabilities_of_all_heads_give_the_context_of_a_layer_that_reuses():
    model, blocks = reused_heads()
    block, batch = blocks[1], texts(9, 4)
    assert block.v.output is not None and len(block.probability_values) == 2
    seen = [*block.probability_values, block.v.output, block.context]
    *arrays, values, context = observing(model, seen).run(None, batch)
    p = probabilities_by_head(block, arrays)
    assert p.shape == (2, H, 9, 9)
    np.testing.assert_allclose(p @ values, context, rtol=0, atol=1e-5)


def test_collect_moments_of_own_heads_are_those_before_reuse():
    """Both read the same tokens, and the reused heads do not count."""
    model, plain = reused_heads()[0], two_layers()
    before, after = (
        collect_moments(each, find_attention(each).blocks[1:], [texts(9, 4)])
        for each in (plain, model)
    )
    (old,), (new,) = before.values(), after.values()
    np.testing.assert_allclose(new.query_covariance, old.query_covariance, rtol=1e-5)
    assert new.head_weight is not None and old.head_weight is not None
    np.testing.assert_allclose(new.head_weight, old.head_weight[[1]], rtol=1e-4)


def test_measure_similarity_of_equal_layers_is_one():
    got = measure_similarity(*matched(two_layers(alike=True)), [texts(9, 5)])
    first, second = got.layers
    np.testing.assert_allclose(np.diag(got.between(first, second)), 1.0, rtol=0, atol=1e-6)
    np.testing.assert_allclose(got.best(), np.ones((2, 2)), rtol=0, atol=1e-6)


def test_measure_similarity_ignores_padding():
    model, blocks = matched()
    short = texts(9, 5)
    expected = measure_similarity(model, blocks, [short]).matrix
    for width in (9, 10, 17):
        long = texts(9, 5, width=width, seed=7)
        long["x"][:, :9] = short["x"]
        actual = measure_similarity(model, blocks, [long]).matrix
        np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-6)


def test_measure_similarity_weights_texts_equally():
    model, blocks = matched()
    together = texts(9, 3, 1)
    apart = [{name: array[i : i + 1] for name, array in together.items()} for i in range(3)]
    one, two = (measure_similarity(model, blocks, batches) for batches in ([together], apart))
    np.testing.assert_allclose(one.matrix, two.matrix, rtol=0, atol=1e-6)
    singles = [measure_similarity(model, blocks, [batch]).matrix for batch in apart]
    np.testing.assert_allclose(one.matrix, np.mean(singles, axis=0), rtol=0, atol=1e-6)


def test_measure_similarity_ignores_empty_texts():
    model, blocks = matched()
    batch = texts(9, 5)
    empty = {name: np.concatenate([array, array[:1]]) for name, array in batch.items()}
    empty["attention_mask"][-1] = 0
    one, two = (measure_similarity(model, blocks, [b]) for b in (batch, empty))
    np.testing.assert_allclose(one.matrix, two.matrix, rtol=0, atol=1e-6)
    assert two.queries == 14


def test_measure_similarity_query_limit_samples_evenly(
    tiny: Path, sentences: Path, monkeypatch: pytest.MonkeyPatch
):
    artifact = open_artifact(tiny)
    model = load_model(artifact)
    data = load_inputs(sentences, model, artifact, split=False)
    blocks = read_attention(model).blocks
    whole = measure_similarity(model, blocks, data.fit)
    monkeypatch.setattr("attnserve.calibration.similarity.MOST_QUERIES", 240)
    some, again = (measure_similarity(model, blocks, data.fit) for _ in range(2))
    assert 200 <= some.queries <= 240 < whole.queries, "four of each of 60 sentences, or all"
    np.testing.assert_array_equal(some.matrix, again.matrix)
    # A third of the queries: the mean changes in the second digit.
    np.testing.assert_allclose(some.matrix, whole.matrix, rtol=0, atol=0.03)


def test_measure_similarity_query_limit_keeps_one_query_per_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("attnserve.calibration.similarity.MOST_QUERIES", 1)
    assert measure_similarity(*matched(), [texts(9, 5, 1)]).queries == 3


def test_measure_similarity_heads_in_the_batch_axis():
    x, results = texts(5, 5, width=5)["x"], list[np.ndarray]()
    for name in ("no mask", "heads and batch in one axis"):
        model = attention(inputs=PLAIN_INPUT, constants=LAID_OUT, **LAYOUTS[name])
        block = only(model)
        assert block.probabilities is not None
        results.append(measure_similarity(model, [block], [{"x": x}]).matrix)
    np.testing.assert_allclose(*results, rtol=0, atol=1e-6)


def memories(*lengths: int) -> list[Batch]:
    """Return batches of six tokens that attend to memories of these lengths."""
    random = np.random.default_rng(0)
    return [
        {
            "x": random.standard_normal((2, 6, D)).astype(np.float32),
            "memory": random.standard_normal((2, length, D)).astype(np.float32),
        }
        for length in lengths
    ]


@pytest.mark.parametrize("lengths", [(6,), (4,), (6, 4)])
def test_measure_similarity_self_and_cross_attention_is_nan(lengths: tuple[int, ...]):
    """Not even for equal numbers of keys."""
    model = graph(
        LAYER.format(n="a", x="x", y="x", out="h", mask="Identity(as1)")
        + LAYER.format(n="b", x="h", y="memory", out="g", mask="Identity(bs1)")
        + LAYER.format(n="c", x="g", y="g", out="out", mask="Identity(cs1)"),
        inputs=f"float[batch, sequence, {D}] x, float[batch, keys, {D}] memory",
        constants=weights("a", "b", "c"),
    )
    got = measure_similarity(model, read_attention(model).blocks, memories(*lengths))
    own, cross, last = got.layers
    for layer in (own, last):
        assert np.isnan(got.between(layer, cross)).all()
        assert np.isnan(got.between(cross, layer)).all()
    assert np.isfinite(got.between(own, last)).all()
    assert np.isfinite(got.between(cross, cross)).all()
    np.testing.assert_array_equal(np.isnan(got.best()), [[0, 1, 0], [1, 0, 1], [0, 1, 0]])
    ranks = got.sequential()
    assert list(ranks) == [last], "compared with the last comparable layer before it"
    np.testing.assert_array_equal(ranks[last], np.sort(got.between(last, own).max(1)))


@pytest.mark.parametrize(("lengths", "comparable"), [((6,), True), ((4,), False), ((6, 4), False)])
def test_measure_similarity_different_lengths_are_nan(lengths: tuple[int, ...], comparable: bool):
    model = graph(
        LAYER.format(n="a", x="x", y="memory", out="h", mask="Identity(as1)")
        + LAYER.format(n="b", x="h", y="x", out="out", mask="Identity(bs1)"),
        inputs=f"float[batch, sequence, {D}] x, float[batch, keys, {D}] memory",
        constants=weights("a", "b"),
    )
    got = measure_similarity(model, read_attention(model).blocks, memories(*lengths))
    assert np.isfinite(got.between(*got.layers)).all() == comparable
    assert bool(got.sequential()) == comparable


# HeadSimilarity


def similarity(matrix: np.ndarray) -> HeadSimilarity:
    return HeadSimilarity(("a", "b"), (1, 2), matrix, 1)


def test_best_averages_the_best_match_of_each_head():
    got = similarity(np.array([[1.0, 0.2, 0.6], [0.2, 1.0, 0.5], [0.6, 0.5, 1.0]]))
    np.testing.assert_allclose(got.best(), [[1.0, 0.6], [(0.2 + 0.6) / 2, 1.0]], atol=1e-12)
    np.testing.assert_array_equal(got.between("b", "a"), [[0.2], [0.6]])


def test_sequential_ranks_are_sorted():
    got = similarity(np.array([[1.0, 0.6, 0.2], [0.6, 1.0, 0.5], [0.2, 0.5, 1.0]]))
    assert {name: ranks.tolist() for name, ranks in got.sequential().items()} == {"b": [0.2, 0.6]}


def test_between_unknown_layer_is_refused():
    with raises(InvalidArgument, "similarity.unknown_layer", "'c'", "a, b"):
        similarity(np.eye(3)).between("a", "c")


# Errors, and no side effects


def test_measure_similarity_keeps_the_graph_and_reports_progress():
    (model, blocks), progress = matched(), list[tuple[int, int]]()
    before = ir.to_onnx_text(model)
    context = RunContext(progress=lambda stage, done, total: progress.append((done, total)))
    measure_similarity(model, blocks, [texts(9), texts(4)], context=context)
    assert ir.to_onnx_text(model) == before
    assert progress == [(1, 2), (2, 2)]


def test_measure_similarity_without_blocks_is_empty():
    got = measure_similarity(two_layers(), [], [texts(9)])
    assert (got.matrix.shape, got.best().shape, got.queries) == ((0, 0), (0, 0), 0)


@pytest.mark.parametrize("batches", [[], [texts(0, 0)]], ids=["no batch", "all padding"])
def test_measure_similarity_of_padding_only_is_refused(batches: list[Batch]):
    with raises(InvalidData, "calibration.no_token"):
        measure_similarity(*matched(), batches)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_measure_similarity_of_non_finite_activations_is_refused(value: float):
    batch = texts(9, 5)
    batch["x"][0, 0, 0] = value
    with raises(InvalidData, "calibration.not_finite"):
        measure_similarity(*matched(), [batch])
