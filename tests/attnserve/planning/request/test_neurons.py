"""Pruning of feed-forward neurons by predicted loss, with a refit of the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve import optimize, verify
from attnserve.checks.inspect import inspect
from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import Dataset, load_inputs
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.lineage import Calibration
from attnserve.models.onnx_files import load_model, save_model
from attnserve.options import Rewrites
from attnserve.planning.blocks.configurations import LossCurve
from attnserve.planning.blocks.groups import FeedForwardGroup
from attnserve.planning.request.neurons import neuron_masks
from attnserve.planning.request.rewrites import PlannedRequest, plan_request
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import FeedForwardBlock
from graph_passes.errors import InvalidArgument, InvalidData
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_name
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_neurons import PruneNeurons
from tests.architectures import GRAPHS
from tests.errors import raises

F = 64
CONTEXT = RunContext(ONE_THREAD)


@pytest.fixture
def bert(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.fixture
def blocks(bert: ir.Model) -> list[FeedForwardBlock]:
    return find_feed_forward(bert)


@pytest.fixture
def data(tiny: Path, sentences: Path, bert: ir.Model) -> Dataset:
    return load_inputs(sentences, bert, open_artifact(tiny), split=False)


# Selection


def groups_of(blocks: Sequence[FeedForwardBlock], *counts: int) -> list[FeedForwardGroup]:
    """A group of each block, as if it had that number of neurons."""
    sized = [
        replace(block, second=replace(block.second, width=count))
        for block, count in zip(blocks, counts, strict=True)
    ]
    return [FeedForwardGroup((block,)) for block in sized]


def curve_of(count: int, scale: float, power: float = 2.0) -> LossCurve:
    """A curve that removes the last neuron first; the loss is a power of their number."""
    own = [(n / count) ** power for n in range(count + 1)]
    gone = tuple(dict.fromkeys(max(round(share * count), 1) for share in (0.25, 0.5, 0.75)))
    return LossCurve(
        order=tuple(reversed(range(count))),
        own_loss=tuple(own),
        removed_counts=gone,
        loss=tuple(scale * own[n] for n in gone),
    )


def kept_by(masks: Any, groups: Sequence[FeedForwardGroup]) -> list[int]:
    return [sum(masks.get(group.names[0], [1] * group.count)) for group in groups]


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("counts", [(64, 64), (64, 44), (16, 16), (16, 4)])
def test_neuron_masks_keeps_multiples_of_eight(
    share: float, counts: tuple[int, int], blocks: list[FeedForwardBlock]
):
    groups = groups_of(blocks, *counts)
    curves = {g.key: curve_of(g.count, 1 + i) for i, g in enumerate(groups)}
    kept = kept_by(neuron_masks(groups, curves, share), groups)
    for size, count in zip(kept, counts, strict=True):
        assert size == count or (size % 8 == 0 and 8 <= size < count)
    removed, wanted = sum(counts) - sum(kept), round(share * sum(counts))
    most = sum(max(count - 8, 0) for count in counts)
    assert min(wanted - 7, most) <= removed <= wanted


def test_neuron_masks_loses_least(blocks: list[FeedForwardBlock]):
    groups = groups_of(blocks, F, F)
    curves = {g.key: curve_of(F, *form) for g, form in zip(groups, [(1, 1.5), (3, 3)], strict=True)}
    masks = neuron_masks(groups, curves, 0.5)
    first, second = (curves[group.key] for group in groups)
    best = min(range(8, F, 8), key=lambda gone: first.at(gone) + second.at(F - gone))
    assert kept_by(masks, groups) == [F - best, best]
    assert 8 < best < F - 8
    assert masks == {
        groups[0].names[0]: [1] * (F - best) + [0] * best,
        groups[1].names[0]: [1] * best + [0] * (F - best),
    }


def test_neuron_masks_layer_without_effect_is_pruned(blocks: list[FeedForwardBlock]):
    groups = groups_of(blocks, F, F)
    curves = {groups[0].key: curve_of(F, 1), groups[1].key: curve_of(F, 100)}
    assert kept_by(neuron_masks(groups, curves, 0.25), groups) == [F // 2, F]


def test_neuron_masks_unmeasurable_losses_follow_own_losses(blocks: list[FeedForwardBlock]):
    """All measured losses are 1 if a single text is pooled into one vector."""
    groups = groups_of(blocks, F, F)
    flat = [replace(curve_of(F, 1), loss=(1.0,) * 3)] * 2
    curves = {group.key: curve for group, curve in zip(groups, flat, strict=True)}
    assert kept_by(neuron_masks(groups, curves, 0.5), groups) == [F // 2, F // 2]


@pytest.mark.parametrize("measured", [(0.2, 1.0, 1.0), (0.2, 0.2, 1.0)])
def test_neuron_masks_losses_that_differ_anywhere_are_used(
    measured: tuple[float, ...], blocks: list[FeedForwardBlock]
):
    """By its own losses, the second layer would lose its neurons: a tenth of the first's."""
    groups = groups_of(blocks, F, F)
    first, second = curve_of(F, 1), curve_of(F, 1)
    own = tuple(loss / 10 for loss in second.own_loss)
    curves = {
        groups[0].key: replace(first, loss=measured),
        groups[1].key: replace(second, own_loss=own, loss=(1.0,) * 3),
    }
    assert kept_by(neuron_masks(groups, curves, 1 / 8), groups) == [F - 16, F]


def test_neuron_masks_equal_losses_remove_no_more_than_requested(
    blocks: list[FeedForwardBlock],
):
    groups = groups_of(blocks, F, F)
    free = LossCurve(
        order=tuple(range(F)),
        own_loss=(0.0,) * (F + 1),
        removed_counts=(16, 32, 48),
        loss=(1e-9,) * 3,
    )
    curves = {groups[0].key: free, groups[1].key: curve_of(F, 1)}
    assert kept_by(neuron_masks(groups, curves, 0.25), groups) == [F // 2, F]


def test_neuron_masks_group_without_curve_keeps_its_neurons(blocks: list[FeedForwardBlock]):
    groups = groups_of(blocks, F, F)
    masks = neuron_masks(groups, {groups[1].key: curve_of(F, 1)}, 0.9)
    assert kept_by(masks, groups) == [F, 8]
    assert neuron_masks(groups, {}, 0.9) == {}


def test_neuron_masks_tied_blocks_have_equal_masks(blocks: list[FeedForwardBlock]):
    group = FeedForwardGroup(tuple(blocks))
    masks = neuron_masks([group], {group.key: curve_of(F, 1)}, 0.25)
    assert masks == {block.name: [1] * 48 + [0] * 16 for block in blocks}


# Requests


def planned(tiny: Path, model: ir.Model, data: Dataset, share: float) -> PlannedRequest:
    job = Job(open_artifact(tiny), model, data, context=CONTEXT)
    return plan_request(Rewrites(ffn=share), job)


def test_neurons_are_pruned_though_no_layer_is_factored(tiny: Path, bert: ir.Model, data: Dataset):
    job = Job(open_artifact(tiny), bert, data, context=CONTEXT)
    found = plan_request(Rewrites(ffn=0.25, collab_dk={}), job)
    assert masks_of(found) and not found.plan.targets(Collaborate)


def masks_of(found: PlannedRequest) -> dict[str, list[int]]:
    return {name: list(mask) for name, mask in found.plan.targets(PruneNeurons).items()}


def neuron_energies(
    model: ir.Model, blocks: Sequence[FeedForwardBlock], batches: Sequence[Batch]
) -> list[np.ndarray]:
    """Var(h_j) |W_2[j]|^2 by block, which ignores that other neurons may repeat h_j."""
    hidden: list[list[np.ndarray]] = [[] for _ in blocks]
    for batch, arrays in observe(model, [[b.hidden] for b in blocks], batches, CONTEXT, ""):
        for rows, (array,) in zip(hidden, arrays, strict=True):
            rows.append(array[batch["attention_mask"] == 1])
    return [
        np.concatenate(rows).var(0) * np.square(block.second.matrix()).sum(1)
        for block, rows in zip(blocks, hidden, strict=True)
    ]


@pytest.mark.parametrize("layer", [0, 1])
def test_optimize_ffn_removes_redundant_neurons(
    layer: int, model: Path, bert: ir.Model, data: Dataset, sentences: Path, tmp_path: Path
):
    """Copies of other neurons are removed without loss, although their output is large."""
    block = find_feed_forward(bert)[layer]
    order = np.argsort(neuron_energies(bert, [block], data.fit)[0])
    strong, copies = order[-8:], order[24:32]
    first, second = block.first[0].matrix().copy(), block.second.matrix().copy()
    first[:, copies], second[copies] = first[:, strong], second[strong] / 2
    for value, array in ((block.first[0].weight, first), (block.second.weight, second)):
        value.const_value = ir.tensor(array.astype(np.float32), name=value.name)
    energies = neuron_energies(bert, find_feed_forward(bert), data.fit)
    assert energies[layer][copies].min() > np.percentile(energies, 25)
    save_model(bert, model / "model.onnx")
    report = optimize(model, tmp_path / "new", ffn=1 / 16, calib=sentences, threads=1)
    masks = report.plan.targets(PruneNeurons)
    assert list(masks) == [block.name]
    assert np.flatnonzero(np.equal(masks[block.name], 0)).tolist() == sorted(copies)
    assert report.fidelity.mean_cosine > 0.9999


def test_optimize_ffn_removes_neurons_of_packed_gate_and_up(tmp_path: Path):
    ids = np.random.default_rng(0).integers(3, 40, (48, 12))
    np.savez(tmp_path / "calib.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    source = GRAPHS / "modernbert-dynamo18-sdpa.onnx"
    report = optimize(source, tmp_path / "new", ffn=0.25, calib=tmp_path / "calib.npz", threads=1)
    masks = report.plan.targets(PruneNeurons)
    blocks = find_feed_forward(load_model(tmp_path / "new" / "model.onnx"))
    kept = [sum(masks[b.name]) if b.name in masks else 40 for b in blocks]
    assert [block.num_neurons for block in blocks] == kept
    assert sum(kept) == 64
    assert all(count % 8 == 0 for count in kept)
    for block in blocks:
        assert block.first[0].matrix().shape == (24, 2 * block.num_neurons)
    assert report.fidelity.mean_cosine > 0.9


def test_plan_request_ffn_of_few_texts(tiny: Path, bert: ir.Model, data: Dataset):
    whole = planned(tiny, bert, data, 0.5)
    batch = data.fit[0]
    for rows in (len(batch["input_ids"]), 1):
        few = Dataset([{name: a[:rows] for name, a in batch.items()}], [], [], 7, Calibration())
        masks = masks_of(planned(tiny, bert, few, 0.5))
        assert sum(map(sum, masks.values())) + F * (2 - len(masks)) == F
    assert masks_of(whole) and not whole.warnings


def test_plan_request_ffn_non_finite_activations_are_refused(
    tiny: Path, bert: ir.Model, data: Dataset
):
    value = find_feed_forward(bert)[1].first[0].weight
    assert value.const_value is not None
    huge = np.full_like(value.const_value.numpy(), 3e38)
    value.const_value = ir.tensor(huge, name=value.name)
    with raises(InvalidData, "calibration.not_finite"):
        planned(tiny, bert, data, 0.25)


def with_external_weights(model: ir.Model) -> None:
    model.graph.outputs.append(find_feed_forward(model)[0].second.weight)


def with_name_of_attention(model: ir.Model) -> None:
    pin_name(find_feed_forward(model)[0].product, find_attention(model).blocks[0].name)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(with_external_weights, "outputs of the graph"), (with_name_of_attention, "same name")],
)
def test_plan_request_ffn_refused_block_is_left_with_warning(
    change: Callable[[ir.Model], None], reason: str, tiny: Path, bert: ir.Model, data: Dataset
):
    change(bert)
    first, second = find_feed_forward(bert)
    found = planned(tiny, bert, data, 0.25)
    assert {name: sum(mask) for name, mask in masks_of(found).items()} == {second.name: 48}
    (warning,) = found.warnings
    assert first.name in warning and reason in warning


# Models


def test_optimize_ffn_removes_neurons_and_their_cost(
    tiny: Path, sentences: Path, tmp_path: Path, blocks: list[FeedForwardBlock]
):
    report = optimize(tiny, tmp_path / "new", ffn=0.5, calib=sentences, threads=1)
    model = load_model(tmp_path / "new" / "model.onnx")
    left = {block.name: block.num_neurons for block in find_feed_forward(model)}
    assert [(change.rewrite, change.block, change.neurons) for change in report.changes] == [
        ("prune_neurons", block.name, left[block.name]) for block in blocks
    ]
    removed = sum(F - size for size in left.values())
    assert removed >= F // 2
    for block in find_feed_forward(model):
        size = left[block.name]
        assert block.first[0].matrix().shape == (32, size)
        assert block.second.matrix().shape == (size, 32)
    # W_1 and W_2; one zero bias that both layers share may become two biases.
    fewer = report.record.before.parameters - report.record.after.parameters
    assert 0 <= removed * (2 * 32 + 1) - fewer <= 2 * (F + 32)
    before, after = report.record.before.macs, report.record.after.macs
    assert before is not None and after is not None
    assert before - after == removed * 2 * 32 * report.record.sequence
    assert report.changes[-1].macs_after == after
    assert len(inspect(tmp_path / "new").matches.blocks) == 2


def test_optimize_ffn_refit_improves_the_cosine(tiny: Path, sentences: Path, tmp_path: Path):
    cosines: list[float] = []
    for fit in (False, True):
        report = optimize(tiny, tmp_path / str(fit), ffn=0.5, calib=sentences, refit=fit)
        cosines.append(verify(tiny, tmp_path / str(fit), data=sentences).mean_cosine)
        errors = [(change.relative_error, change.fitted_error) for change in report.changes]
        assert all(before is not None and 0 < before < 1 for before, _ in errors)
        assert all((after is not None) == fit for _, after in errors)
    assert cosines[0] < cosines[1]


@pytest.mark.timing(seconds=6)
@pytest.mark.parametrize("exporter", [("sdpa", "dynamo", 18), ("eager", "torchscript", 14)])
def test_optimize_ffn_combines_with_other_rewrites(
    tiny_export: Any, sentences: Path, tmp_path: Path, exporter: tuple[Any, ...]
):
    folder = tiny_export(*exporter)
    report = optimize(
        folder,
        tmp_path / "new",
        ffn=0.25,
        prune=0.25,
        collab_dk=12,
        mixing="dense",
        calib=sentences,
        threads=1,
    )
    rewrites = {change.rewrite for change in report.changes}
    assert rewrites == {"prune_heads", "prune_neurons", "collaborate"}
    assert report.fidelity.mean_cosine > 0.9
    again = optimize(tmp_path / "new", tmp_path / "two", ffn=0.25, calib=sentences, threads=1)
    assert {change.block for change in again.changes} <= {
        change.block for change in report.changes if change.rewrite == "prune_neurons"
    }


def test_optimize_ffn_small_share_warns(tiny: Path, sentences: Path, tmp_path: Path):
    report = optimize(tiny, tmp_path / "new", ffn=0.01, prune=0.25, calib=sentences, dry_run=True)
    assert any("`ffn` 0.01" in w for w in report.record.warnings)


def test_optimize_ffn_with_layers_needs_prune(tiny: Path, sentences: Path, tmp_path: Path):
    """``layers`` selects attention layers: alone it is an error, with ``prune`` it limits that."""
    with raises(InvalidArgument, "request.conflict", "`layers`", "`prune`"):
        optimize(tiny, tmp_path / "new", ffn=0.25, layers=["1"], calib=sentences)
    assert not any(tmp_path.iterdir())
    options: dict[str, Any] = {"ffn": 0.25, "prune": 0.5, "layers": ["1"], "calib": sentences}
    report = optimize(tiny, tmp_path / "new", **options, dry_run=True)
    assert any("ffn" in warning and "any layer" in warning for warning in report.record.warnings)
