"""Pruning of feed-forward neurons by energy, with a refit of the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.neurons import layer_weights, masks_by_energy, neuron_energy
from attnserve.checks.compare import verify
from attnserve.checks.inspect import inspect
from attnserve.context import RunContext
from attnserve.models.artifact import load_model, open_artifact
from attnserve.models.datasets import load_inputs
from attnserve.planning.optimize import optimize
from attnserve.runtime.session import Batch, open_session
from graph_passes.blocks import FeedForwardBlock
from graph_passes.emit.editing import exposing
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.matching.feed_forward import find_feed_forward
from tests.errors import raises
from tests.graph_passes.graphs import graph

F = 64


@pytest.fixture(scope="module")
def bert(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.fixture(scope="module")
def blocks(bert: ir.Model) -> list[FeedForwardBlock]:
    return find_feed_forward(bert)


@pytest.fixture(scope="module")
def data(tiny: Path, sentences: Path, bert: ir.Model) -> list[Batch]:
    return list(load_inputs(sentences, bert, open_artifact(tiny), split=False).fit)


@pytest.fixture(scope="module")
def energies(bert: ir.Model, blocks: Any, data: list[Batch]) -> dict[str, np.ndarray]:
    return neuron_energy(bert, blocks, data, context=RunContext(threads=1))


# Energy


def test_neuron_energy_is_the_variance_of_the_output(
    bert: ir.Model, blocks: list[FeedForwardBlock], data: list[Batch], energies: Any
):
    for block in blocks:
        with exposing(bert, [block.hidden]):
            session = open_session(bert, threads=1)
        rows = [session.run(None, batch)[0][batch["attention_mask"] == 1] for batch in data]
        hidden = np.concatenate(rows).astype(np.float64)
        expected = hidden.var(axis=0) * np.square(block.second_matrix()).sum(axis=1)
        np.testing.assert_allclose(energies[block.name], expected, rtol=1e-6)


def test_neuron_energy_ignores_padding(
    bert: ir.Model, blocks: list[FeedForwardBlock], data: list[Batch], energies: Any
):
    wider = [{n: np.pad(a, ((0, 0), (0, 4))) for n, a in batch.items()} for batch in data]
    for name, energy in neuron_energy(bert, blocks, wider, context=RunContext(threads=1)).items():
        np.testing.assert_allclose(energy, energies[name], rtol=1e-4)


def test_neuron_energy_blocks_may_have_different_lengths():
    """Encoder and decoder blocks have inputs of different lengths."""
    one = "\n a0 = MatMul(x, W)\n a1 = Relu(a0)\n out = MatMul(a1, W2)"
    two = "\n b0 = MatMul(y, W)\n b1 = Relu(b0)\n other = MatMul(b1, W2)\n last = Abs(other)"
    rng = np.random.default_rng(3)
    arrays = {"W": rng.standard_normal((12, 16)), "W2": rng.standard_normal((16, 12))}
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    x, y = "float[batch, sequence, 12] x", "float[batch, memory, 12] y"
    both = graph(
        one + two, inputs=f"{x}, {y}", constants=arrays,
        output="float[batch, sequence, 12] out, float[batch, memory, 12] last",
    )  # fmt: skip
    batch = {n: rng.standard_normal((2, k, 12)).astype(np.float32) for n, k in (("x", 3), ("y", 9))}
    energies = neuron_energy(
        both, find_feed_forward(both), [batch], context=RunContext(threads=1)
    ).values()
    for name, energy in zip(("x", "y"), energies, strict=True):
        hidden = np.maximum(batch[name].astype(np.float64) @ arrays["W"], 0).reshape(-1, 16)
        expected = hidden.var(axis=0) * np.square(arrays["W2"].astype(np.float64)).sum(axis=1)
        np.testing.assert_allclose(energy, expected, rtol=1e-4)


def test_neuron_energy_of_non_finite_activations_is_refused(bert: ir.Model):
    body = "\n h0 = MatMul(x, W)\n h1 = Log(h0)\n out = MatMul(h1, W2)"
    arrays = {"W": -np.ones((12, 16), np.float32), "W2": np.ones((16, 12), np.float32)}
    model = graph(body, inputs="float[batch, sequence, 12] x", constants=arrays)
    batch = {"x": np.ones((1, 3, 12), np.float32)}
    with raises(InvalidData, "calibration.not_finite"):
        neuron_energy(model, find_feed_forward(model), [batch], context=RunContext(threads=1))


# Selection


def test_layer_weights_are_finite_and_positive(
    bert: ir.Model, blocks: list[FeedForwardBlock], data: list[Batch], energies: Any
):
    weights = layer_weights(bert, blocks, energies, data[0], context=RunContext(threads=1))
    assert weights.keys() == energies.keys()
    assert all(np.isfinite(weight) and weight > 0 for weight in weights.values())


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9, 0.999])
def test_masks_by_energy_keep_multiples_of_eight(
    share: float, blocks: list[FeedForwardBlock], energies: Any
):
    masks = masks_by_energy(blocks, energies, {block.name: 1.0 for block in blocks}, share)
    kept = [sum(masks.get(block.name, [1] * F)) for block in blocks]
    assert all(size % 8 == 0 and size >= 8 for size in kept)
    wanted = len(blocks) * F * (1 - share)
    assert wanted <= sum(kept) < wanted + 8 * len(blocks) + 1 or min(kept) == 8
    for block in blocks:
        mask = np.array(masks.get(block.name, [1] * F))
        energy = energies[block.name]
        assert not (mask == 0).any() or energy[mask == 0].max() <= energy[mask == 1].min()


def test_masks_by_energy_equal_energies_follow_layer_weights(blocks: list[FeedForwardBlock]):
    first, second = (block.name for block in blocks)
    equal = {first: np.arange(1.0, F + 1), second: np.arange(1.0, F + 1)}
    masks = masks_by_energy(blocks, equal, {first: 1.0, second: 100.0}, 0.25)
    assert sum(masks[first]) == F // 2 and second not in masks


# Models


def test_optimize_ffn_removes_neurons_and_their_cost(
    tiny: Path, sentences: Path, tmp_path: Path, blocks: list[FeedForwardBlock]
):
    report = optimize(tiny, tmp_path / "new", ffn=0.5, calib=sentences, threads=1)
    model = load_model(tmp_path / "new" / "model.onnx")
    left = {block.name: block.num_neurons for block in find_feed_forward(model)}
    assert [(step.rewrite, step.block, step.neurons) for step in report.steps] == [
        ("prune_neurons", block.name, left[block.name]) for block in blocks
    ]
    removed = sum(F - size for size in left.values())
    assert removed >= F // 2
    for block in find_feed_forward(model):
        size = left[block.name]
        assert (block.matrix().shape, block.second_matrix().shape) == ((32, size), (size, 32))
    # W_1 and W_2; one zero bias that both layers share may become two biases.
    fewer = report.before.parameters - report.after.parameters
    assert 0 <= removed * (2 * 32 + 1) - fewer <= 2 * (F + 32)
    assert report.before.macs is not None and report.after.macs is not None
    assert report.before.macs - report.after.macs == removed * 2 * 32 * report.sequence
    assert report.steps[-1].macs_after == report.after.macs
    assert len(inspect(tmp_path / "new").reading.blocks) == 2


def test_optimize_ffn_refit_improves_the_cosine(tiny: Path, sentences: Path, tmp_path: Path):
    cosines: list[float] = []
    for fit in (False, True):
        report = optimize(tiny, tmp_path / str(fit), ffn=0.5, calib=sentences, refit=fit)
        cosines.append(verify(tiny, tmp_path / str(fit), data=sentences).mean_cosine)
        errors = [(step.relative_error, step.fitted_error) for step in report.steps]
        assert all(before is not None and 0 < before < 1 for before, _ in errors)
        assert all((after is not None) == fit for _, after in errors)
    assert cosines[0] < cosines[1]


@pytest.mark.parametrize("exporter", [("sdpa", "dynamo", 18), ("eager", "torchscript", 14)])
def test_optimize_ffn_combines_with_other_rewrites(
    tiny_export: Any, sentences: Path, tmp_path: Path, exporter: tuple[Any, ...]
):
    folder = tiny_export(*exporter)
    report = optimize(
        folder, tmp_path / "new", ffn=0.25, prune=0.25, collab_dk=12, calib=sentences, threads=1
    )
    rewrites = {step.rewrite for step in report.steps}
    assert rewrites == {"prune_heads", "prune_neurons", "collaborate"}
    assert report.fidelity.mean_cosine > 0.9
    again = optimize(tmp_path / "new", tmp_path / "two", ffn=0.25, calib=sentences, threads=1)
    assert {step.block for step in again.steps} <= {
        step.block for step in report.steps if step.rewrite == "prune_neurons"
    }


def test_optimize_ffn_small_share_warns(tiny: Path, sentences: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", ffn=0.01, prune=0.25, calib=sentences, dry_run=True)
    assert any("ffn 0.01" in w for w in report.warnings)


@pytest.mark.parametrize("share", [0, 1, -0.5, 1.5, float("nan")])
def test_optimize_ffn_invalid_share_is_refused(share: float, tiny: Path, tmp_path: Path):
    with raises(InvalidArgument, "request.range", "`ffn`", share):
        optimize(tiny, tmp_path / "new", ffn=share)


def test_optimize_ffn_without_data_is_refused(tiny: Path, tmp_path: Path):
    with raises(InvalidArgument, "request.no_data", "`ffn`"):
        optimize(tiny, tmp_path / "new", ffn=0.25)


def test_optimize_ffn_with_layers_needs_prune(tiny: Path, sentences: Path, tmp_path: Path):
    """``layers`` selects attention layers: alone it is an error, with ``prune`` it limits that."""
    with raises(InvalidArgument, "request.conflict", "`layers`", "`ffn`"):
        optimize(tiny, tmp_path / "new", ffn=0.25, layers=["1"], calib=sentences)
    assert not any(tmp_path.iterdir())
    options: dict[str, Any] = {"ffn": 0.25, "prune": 0.5, "layers": ["1"], "calib": sentences}
    report = optimize(tiny, tmp_path / "new", **options, dry_run=True)
    assert any("ffn" in warning and "any layer" in warning for warning in report.warnings)
