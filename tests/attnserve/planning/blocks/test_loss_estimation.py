"""Loss estimates equal the loss of rewritten models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.linear_maps import find_sites, install
from attnserve.checks.compare import compare
from attnserve.checks.quality import QualityMeter
from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.planning.blocks.loss_estimation import LossEstimator
from attnserve.runtime.interface import Batch
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons


@pytest.fixture(scope="module")
def bert(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.fixture(scope="module")
def data(tiny: Path, sentences: Path, bert: ir.Model) -> list[Batch]:
    return list(load_inputs(sentences, bert, open_artifact(tiny), split=False).fit)


@pytest.fixture(scope="module")
def new_meter(bert: ir.Model, tiny: Path) -> Callable[[], QualityMeter]:
    return lambda: QualityMeter(bert, open_artifact(tiny), measure="cosine")


@pytest.fixture(scope="module")
def estimator(
    bert: ir.Model, data: list[Batch], new_meter: Callable[[], QualityMeter]
) -> LossEstimator:
    names = [block.name for block in (*find_attention(bert).blocks, *find_feed_forward(bert))]
    return LossEstimator(bert, names, data, new_meter, RunContext(ONE_THREAD))


def test_loss_without_changes_is_zero(estimator: LossEstimator):
    assert estimator.loss({}) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("part", ["heads", "neurons"])
def test_rows_of_zeros_are_heads_or_neurons_that_are_gone(
    part: str, estimator: LossEstimator, bert: ir.Model, data: list[Batch]
):
    attention, feed_forward = find_attention(bert).blocks[1], find_feed_forward(bert)[0]
    assert attention.output is not None
    name, gone, rewrite = {
        "heads": (attention.name, attention.output.rows[[0, 2]].reshape(-1),
                  PruneHeads({attention.name: [0, 1, 0, 1]})),
        "neurons": (feed_forward.name, slice(32),
                    PruneNeurons({feed_forward.name: [0] * 32 + [1] * 32})),
    }[part]  # fmt: skip
    weight, bias = (array.copy() for array in estimator.maps[name])
    weight[gone] = 0
    pruned = bert.clone()
    rewrite(pruned)
    expected = 1 - compare(bert, pruned, data, "", context=RunContext(ONE_THREAD)).mean_cosine
    assert expected > 1e-4
    assert estimator.loss({name: (weight, bias)}) == pytest.approx(expected, rel=0, abs=1e-6)


def test_loss_of_changed_maps_equals_rewritten_model(
    estimator: LossEstimator, bert: ir.Model, data: list[Batch]
):
    """Both at once, with what others take over: a full map of an attention and of a feed-forward,
    each with its constant."""
    random = np.random.default_rng(0)
    names = [find_attention(bert).blocks[0].name, find_feed_forward(bert)[1].name]
    maps: dict[str, Any] = {}
    for name in names:
        weight, bias = estimator.maps[name]
        noise = 0.3 * np.std(weight) * random.standard_normal(weight.shape)
        maps[name] = weight + noise, bias + 0.1 * random.standard_normal(bias.shape)
    changed = bert.clone()
    sites = find_sites(changed, names)
    for name in names:
        install(sites[name], *maps[name], infer_shapes_small(changed, batch=2, sequence=5))
    expected = 1 - compare(bert, changed, data, "", context=RunContext(ONE_THREAD)).mean_cosine
    assert expected > 1e-2
    assert estimator.loss(maps) == pytest.approx(expected, rel=0, abs=1e-6)
    alone = [estimator.loss({name: maps[name]}) for name in names]
    assert all(1e-4 < loss < expected for loss in alone)


def test_loss_of_a_model_from_its_first_changed_block_on(estimator: LossEstimator, bert: ir.Model):
    names = [block.name for block in find_attention(bert).blocks]
    for name in (*names, names[0]):
        pruned = bert.clone()
        PruneHeads({name: [0, 1, 0, 1]})(pruned)
        whole = estimator.loss_of(pruned)
        assert whole > 1e-3
        assert estimator.loss_of(pruned, name) == pytest.approx(whole, rel=0, abs=1e-6)


def test_loss_estimator_keeps_no_state(estimator: LossEstimator):
    name = next(iter(estimator.maps))
    weight, bias = estimator.maps[name]
    first = estimator.loss({name: (0.5 * weight, bias)})
    assert first > 1e-5 and estimator.loss({}) == pytest.approx(0, abs=1e-6)
    assert estimator.loss({name: (0.5 * weight, bias)}) == pytest.approx(first, rel=0, abs=1e-9)


def test_loss_grows_with_the_change(estimator: LossEstimator, bert: ir.Model):
    name = find_feed_forward(bert)[1].name
    weight, bias = estimator.maps[name]
    losses = [estimator.loss({name: (share * weight, bias)}) for share in (0.9, 0.6, 0.1)]
    assert losses == sorted(losses) and losses[0] > 1e-5


def test_loss_estimator_leaves_the_model_unchanged(
    bert: ir.Model, data: list[Batch], new_meter: Callable[[], QualityMeter]
):
    before = ir.to_proto(bert).SerializeToString()
    name = find_feed_forward(bert)[0].name
    estimator = LossEstimator(bert, [name], data[:1], new_meter, RunContext(ONE_THREAD))
    estimator.loss({name: (0 * estimator.maps[name][0], estimator.maps[name][1])})
    assert ir.to_proto(bert).SerializeToString() == before
