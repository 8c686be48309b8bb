"""analyze: what is measured of attention, held against what numpy computes from the definitions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import optimize
from attnserve.calibration.moments import collect_moments
from attnserve.calibration.spectra import (
    MOST_TEXTS,
    MOST_TOKENS,
    captured_variance,
    measure_ranks,
    text_lengths,
)
from attnserve.checks.certify import read_attention
from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import Dataset, load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.lineage import Calibration
from attnserve.models.onnx_files import load_model
from attnserve.reports.analysis import Analysis, analyze_graph
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from graph_passes.factorize.moments import TokenMoments
from tests import architectures
from tests.architectures import Cell
from tests.errors import raises
from tests.graph_passes.graphs import observing
from tests.graph_passes.operators import OPERATORS
from tests.onnx_text import SOFTMAX

Build = Callable[..., Path]
EXACT = {"rtol": 1e-6, "atol": 1e-9}


def graph_and_data(folder: Path, calib: Path) -> tuple[ir.Model, Dataset]:
    """A model, and all rows of the data in each part."""
    artifact = open_artifact(folder)
    graph = load_model(artifact)
    return graph, load_inputs(calib, graph, artifact, split=False)


def analysis_of(
    folder: Path, calib: Path, *, groups: int | None = None, **settings: Any
) -> Analysis:
    graph, data = graph_and_data(folder, calib)
    context = RunContext(ONE_THREAD, **settings)
    source = {"file": "model.onnx"}
    return analyze_graph(graph, data, source=source, groups=groups, context=context)


@pytest.fixture(scope="module")
def analysis(tiny: Path, sentences: Path) -> Analysis:
    return analysis_of(tiny, sentences)


@pytest.fixture(scope="module")
def content(analysis: Analysis) -> dict[str, Any]:
    return json.loads(json.dumps(analysis.to_json(), allow_nan=False))


def heads(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def covariance(seed: int, size: int) -> np.ndarray:
    root = heads(seed, (size, size)) * np.geomspace(1, 0.01, size)
    return root @ root.T


def root_of(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T


def shares(matrix: np.ndarray) -> np.ndarray:
    energy = np.linalg.svd(matrix, compute_uv=False) ** 2
    return energy.cumsum() / energy.sum()


# Captured variance


def test_captured_variance_equals_singular_values():
    q, k = heads(0, (3, 10, 2)), heads(1, (3, 8, 2))
    found = captured_variance(q, k)
    together = np.concatenate(list(q), axis=1), np.concatenate(list(k), axis=1)
    np.testing.assert_allclose(found.query.layer, shares(together[0]), **EXACT)
    np.testing.assert_allclose(found.key.layer, shares(together[1]), **EXACT)
    assert found.product is not None
    product = shares(together[0] @ together[1].T)[:6]  # of rank HK = 6
    np.testing.assert_allclose(found.product.layer, product, **EXACT)
    for head in range(3):
        np.testing.assert_allclose(found.query.heads[head], shares(q[head]), **EXACT)
        np.testing.assert_allclose(found.product.heads[head], shares(q[head] @ k[head].T)[:2])


def test_captured_variance_is_weighted_by_moments():
    q, k, x, y = heads(0, (3, 10, 2)), heads(1, (3, 8, 2)), covariance(2, 10), covariance(3, 8)
    found = captured_variance(q, k, TokenMoments(np.ones(10), x, y))
    left, right = (
        np.concatenate([root_of(c) @ head for head in side], axis=1) for c, side in ((x, q), (y, k))
    )
    assert found.product is not None
    np.testing.assert_allclose(found.query.layer, shares(left), **EXACT)
    np.testing.assert_allclose(found.key.layer, shares(right), **EXACT)
    np.testing.assert_allclose(found.product.layer, shares(left @ right.T)[:6], **EXACT)
    white = captured_variance(q, k, TokenMoments(np.zeros(10), np.eye(10), np.eye(8)))
    np.testing.assert_allclose(white.query.layer, captured_variance(q, k).query.layer, **EXACT)


def test_rank_is_least_number_of_directions_for_a_share():
    q = np.diag(np.sqrt([80.0, 15.0, 4.0, 1.0]))[None]  # one head of size 4
    query = captured_variance(q, q).query
    assert [query.rank(share) for share in (0.8, 0.9, 0.95, 0.99, 1.0)] == [1, 2, 2, 3, 4]
    assert query.head_ranks(0.9).tolist() == [2]


def test_captured_variance_rank_is_limited():
    wide = captured_variance(heads(0, (4, 6, 3)), heads(1, (4, 5, 3)))  # HK = 12, 5 inputs
    assert len(wide.query.layer) == 5 and wide.query.rank(1.0) <= 5
    copies = captured_variance(np.repeat(heads(0, (1, 10, 3)), 4, axis=0), heads(1, (4, 10, 3)))
    assert copies.query.rank(1.0) == 3 and copies.key.rank(1.0) == 10
    zeros = captured_variance(np.zeros((2, 4, 2)), np.zeros((2, 4, 2)))
    assert zeros.query.rank(0.99) == 1 and zeros.query.head_ranks(0.99).tolist() == [1, 1]


def test_analyze_spectra_use_weights_and_moments_of_the_layer(
    analysis: Analysis, tiny: Path, sentences: Path
):
    graph, data = graph_and_data(tiny, sentences)
    blocks = read_attention(graph).blocks
    moments = collect_moments(graph, blocks, data.fit, context=RunContext(ONE_THREAD))
    for layer, block in zip(analysis.layers, blocks, strict=True):
        assert layer.weights is not None and layer.calibrated is not None
        q = block.q.heads()
        plain = np.concatenate(list(q), axis=1)
        np.testing.assert_allclose(layer.weights.query.layer, shares(plain), rtol=1e-5)
        root = root_of(moments[block.name].query_covariance)
        np.testing.assert_allclose(layer.calibrated.query.layer, shares(root @ plain), rtol=1e-5)


# Lengths and ranks


def test_analyze_lengths_count_unmasked_tokens(analysis: Analysis, tiny: Path, sentences: Path):
    graph, data = graph_and_data(tiny, sentences)
    expected = np.concatenate([batch["attention_mask"].sum(1) for batch in data.fit])
    assert analysis.lengths.tolist() == expected.tolist()
    assert analysis.lengths.sum() == data.source.tokens
    (first, *_) = read_attention(graph).blocks
    assert text_lengths(graph, first, data.fit[:1]).tolist() == expected[:16].tolist()


def test_measure_ranks_equals_matrix_rank_of_the_scores(tiny: Path, tmp_path: Path):
    """Text by text, with numpy's own rank at the tolerance that is documented."""
    (tmp_path / "two.txt").write_text("a man is playing with the dog and the ball .\nthe cat\n")
    graph, data = graph_and_data(tiny, tmp_path / "two.txt")
    (block, *_) = read_attention(graph).blocks
    found = measure_ranks(graph, [block], data.fit)[block.name]
    assert block.softmax is not None and block.probabilities is not None
    session = observing(graph, [block.softmax.logits, block.probabilities])
    (batch,) = data.fit
    scores, attended = session.run(None, batch)  # B H S T
    lengths = batch["attention_mask"].sum(1)
    assert found.sizes.tolist() == lengths.tolist()
    for row, n in enumerate(lengths):
        real = scores[row, :, :n, :n].astype(np.float64)
        centred = real - real.mean(-1, keepdims=True)
        assert found.scores[row].tolist() == np.linalg.matrix_rank(centred, rtol=0.01).tolist()
        p = attended[row, :, :n, :n].astype(np.float64)
        assert found.probabilities[row].tolist() == np.linalg.matrix_rank(p, rtol=0.01).tolist()


def test_analyze_ranks_are_bounded_and_use_a_part_of_the_data(analysis: Analysis):
    for layer in analysis.layers:
        ranks = layer.ranks
        assert ranks is not None
        bound = np.minimum(ranks.sizes, layer.head_size)[:, None]
        assert (ranks.scores <= bound).all() and (ranks.scores >= 1).all()
        assert (ranks.probabilities <= ranks.sizes[:, None]).all()
        assert all((part > 0).all() and (part <= 1).all() for part in (ranks.used, ranks.spanned))
        assert len(ranks.sizes) == MOST_TEXTS < len(analysis.lengths)
        assert ranks.sizes.max() <= MOST_TOKENS
        assert len(set(ranks.sizes.tolist())) > 5  # short and long ones


# Analysis of a model


def test_analysis_json_has_documented_keys(content: dict[str, Any]):
    assert list(content) == [
        "format", "model", "calibration", "seed", "versions", "layers", "summary", "similarity",
        "lengths", "mask", "not_analyzed",
    ]  # fmt: skip
    first, second = content["layers"]
    assert list(first) == [
        "name", "index", "kind", "num_heads", "head_size", "input_size", "captured_variance",
        "ranks", "importance", "votes", "notes",
    ]  # fmt: skip
    assert [first["index"], second["index"]] == [0, 1]
    assert (first["kind"], first["num_heads"], first["head_size"]) == ("self", 4, 8)
    assert list(first["captured_variance"]) == ["weights", "calibrated"]
    product = first["captured_variance"]["calibrated"]["product"]
    assert list(product) == [
        "rank_90", "rank_99", "head_rank_90", "head_rank_99", "full_rank", "directions", "captured",
    ]  # fmt: skip
    assert product["full_rank"] == 32 and product["captured"][-1] == 1.0
    assert list(first["importance"]) == ["energy", "energy_share", "leave_one_out", "sensitivity"]
    assert all(len(values) == 4 for values in first["importance"].values())
    assert {"file": "sentences.txt", "rows": 60}.items() <= content["calibration"].items()
    assert content["not_analyzed"] == [] and "attnserve" in content["versions"]


def test_analysis_summary_agrees_with_layers(content: dict[str, Any]):
    first, second = content["summary"]
    assert first["nearest"] is None and first["similarity"] is None
    assert second["nearest"] == 0
    assert second["similarity"] == content["similarity"]["best"][1][0]
    shares = content["layers"][1]["importance"]["energy_share"]
    assert sum(shares) == pytest.approx(1, abs=1e-5)
    assert shares[second["weakest_head"]] == second["weakest_share"] == min(shares)
    variance = content["layers"][1]["captured_variance"]["calibrated"]
    assert second["rank"] == max(variance[side]["rank_99"] for side in ("query", "key"))


def test_analysis_similarity_is_symmetric_with_ones(content: dict[str, Any]):
    matrix = np.array(content["similarity"]["matrix"])
    assert matrix.shape == (8, 8) and sum(content["similarity"]["heads"]) == 8
    np.testing.assert_allclose(matrix, matrix.T, atol=1e-9)
    np.testing.assert_allclose(np.diag(matrix), 1, atol=1e-4)


def test_analyze_groups_set_the_kept_heads(analysis: Analysis, tiny: Path, sentences: Path):
    assert [sum(mask) for mask in analysis.mask.values()] == [2, 2]
    one = analysis_of(tiny, sentences, groups=1)
    assert [sum(mask) for mask in one.mask.values()] == [1, 1]
    assert all(set(mask) == {0, 1} for mask in one.mask.values())
    for layer in analysis.layers:  # one head a group
        assert sorted(layer.votes.groups[layer.votes.mask == 1].tolist()) == [0, 1]


@pytest.mark.parametrize("groups", [0, 5, -1])
def test_analyze_groups_out_of_range_are_refused_first(tiny: Path, sentences: Path, groups: int):
    stages: list[str] = []
    with raises(InvalidArgument, "analysis.groups", groups, "1 to 4"):
        analysis_of(tiny, sentences, groups=groups, progress=lambda *at: stages.append(at[0]))
    assert stages == []


def test_analyze_again_is_equal_and_progress_names_every_stage(
    content: dict[str, Any], tiny: Path, sentences: Path
):
    stages: dict[str, tuple[int, int]] = {}
    again = analysis_of(
        tiny, sentences, progress=lambda what, done, total: stages.update({what: (done, total)})
    )
    assert json.loads(json.dumps(again.to_json())) == content
    assert list(stages) == [
        "count tokens", "collect moments", "compare heads", "measure ranks", "measure energy",
        "vote on heads", "leave heads out", "measure sensitivity",
    ]  # fmt: skip
    assert all(done == total for done, total in stages.values())


@pytest.mark.parametrize(
    "export", [("sdpa", "torchscript", 17), ("sdpa", "dynamo", 23)], ids=["sdpa-17", "operator-23"]
)
def test_analyze_other_exports_give_same_numbers(
    content: dict[str, Any], tiny_export: Build, export: Sequence[Any], sentences: Path
):
    """A fused operator is decomposed first. 1e-3: the exports differ by their rounding."""
    other = analysis_of(tiny_export(*export), sentences).to_json()
    for mine, theirs in zip(content["layers"], other["layers"], strict=True):
        for measure, values in mine["importance"].items():
            np.testing.assert_allclose(theirs["importance"][measure], values, rtol=2e-3, atol=1e-5)
        for metric in ("weights", "calibrated"):
            assert (
                theirs["captured_variance"][metric]["query"]["rank_99"]
                == mine["captured_variance"][metric]["query"]["rank_99"]
            )
    np.testing.assert_allclose(
        np.array(other["similarity"]["matrix"]),
        np.array(content["similarity"]["matrix"]),
        atol=1e-3,
    )


ROPE = "captured variance of the weights only: rotary positions are applied between"
NORM = "no captured variance: q/k normalization is between"


@pytest.mark.parametrize(
    ("cell", "layers", "note"),
    [
        (Cell("Llama", "eager", "dynamo", 18), 2, ROPE),  # and grouped key/value heads
        (Cell("Qwen3", "eager", "dynamo", 18), 2, NORM),
        (Cell("BART", "eager", "dynamo", 18), 4, ""),  # cross-attention in the middle
        (Cell("BERT", "eager", "torchscript", 17, "fp16"), 2, ""),
        (Cell("ViT", "sdpa", "dynamo", 23), 2, ""),  # no text, no mask
    ],
    ids=["rope", "norm", "cross", "half precision", "images"],
)
def test_analyze_other_architectures_have_notes_where_unsupported(
    cell: Cell, layers: int, note: str, tmp_path: Path
):
    found = analysis_of(cell.committed, inputs_of(cell, tmp_path / "inputs.npz"))
    assert len(found.layers) == layers and found.not_analyzed == ()
    for layer in found.layers:
        assert "".join(layer.notes).startswith(note) and bool(layer.notes) == bool(note)
        assert (layer.calibrated is None) == bool(note) and (layer.weights is None) == (
            note == NORM
        )
        assert layer.ranks is not None and np.isfinite(layer.leave_one_out).all()
    if note == ROPE:
        assert all(x.weights is not None and x.weights.product is None for x in found.layers)
    if cell.architecture == "BART":
        cross = [layer.kind for layer in found.layers].index("cross")
        assert np.isnan(found.similarity.best()[cross, :cross]).all()
        assert found.summary()[cross].nearest is None
    json.dumps(found.to_json(), allow_nan=False)


def test_analyze_operator_that_cannot_be_decomposed_is_refused():
    nothing_to_run = Dataset((), (), (), length=8, source=Calibration())
    with raises(InvalidModel, "analysis.no_attention", "reads cached keys"):
        analyze_graph(OPERATORS["ai.onnx: past"].model(), nothing_to_run, source={})


def inputs_of(cell: Cell, path: Path) -> Path:
    """One batch of inputs of a committed graph, as .npz."""
    made = architectures.feeds(architectures.ARCHITECTURES[cell.architecture])
    for value in ir.load(cell.committed).graph.inputs:
        assert value.name is not None and value.dtype is not None
        made[value.name] = made[value.name].astype(value.dtype.numpy())
    np.savez(path, **made)
    return path


@pytest.mark.parametrize("mixing", ["dense", "sparse"])
def test_analyze_collaborative_heads_have_no_spectra(
    tiny: Path, sentences: Path, tmp_path: Path, mixing: Any
):
    optimize(tiny, tmp_path / "new", collab_dk=16, mixing=mixing, layers=["1"])
    first, second = analysis_of(tmp_path / "new", sentences).layers
    assert first.calibrated is not None and first.notes == ()
    assert second.weights is None and "already collaborative" in second.notes[0]
    assert second.ranks is not None and second.ranks.scores.max() <= second.ranks.sizes.max()


def test_analyze_without_attention_is_refused(tmp_path: Path):
    np.savez(tmp_path / "x.npz", x=np.ones((3, 4), np.float32))
    ir.save(ir.from_onnx_text(SOFTMAX), tmp_path / "m.onnx")
    with raises(InvalidModel, "analysis.no_attention", "last: "):
        analysis_of(tmp_path / "m.onnx", tmp_path / "x.npz")


def test_analyze_activations_not_finite_are_refused(tiny: Path, sentences: Path):
    graph, data = graph_and_data(tiny, sentences)
    name = next(n for n in graph.graph.initializers if "word_embeddings" in n)
    value = graph.graph.initializers[name]
    assert value.const_value is not None
    value.const_value = ir.tensor(np.full(value.const_value.shape.numpy(), np.nan, np.float32))
    with raises(InvalidData, "calibration.not_finite"):
        analyze_graph(graph, data, source={})
