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
from attnserve.models.artifact import open_artifact
from attnserve.planning.blocks.loss_estimation import LossEstimator
from attnserve.runtime.interface import Batch
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons


@pytest.fixture(scope="module")
def new_meter(tiny_graph: ir.Model, tiny: Path) -> Callable[[], QualityMeter]:
    return lambda: QualityMeter(tiny_graph, open_artifact(tiny), measure="cosine")


@pytest.fixture(scope="module")
def estimator(
    tiny_graph: ir.Model, tiny_batches: list[Batch], new_meter: Callable[[], QualityMeter]
) -> LossEstimator:
    names = [
        block.name for block in (*find_attention(tiny_graph).blocks, *find_feed_forward(tiny_graph))
    ]
    return LossEstimator(tiny_graph, names, tiny_batches, new_meter, RunContext(ONE_THREAD))


def test_loss_without_changes_is_zero(estimator: LossEstimator):
    assert estimator.loss({}) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("part", ["heads", "neurons"])
def test_rows_of_zeros_are_heads_or_neurons_that_are_gone(
    part: str, estimator: LossEstimator, tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    attention, feed_forward = find_attention(tiny_graph).blocks[1], find_feed_forward(tiny_graph)[0]
    assert attention.output is not None
    name, gone, rewrite = {
        "heads": (attention.name, attention.output.rows[[0, 2]].reshape(-1),
                  PruneHeads({attention.name: [0, 1, 0, 1]})),
        "neurons": (feed_forward.name, slice(32),
                    PruneNeurons({feed_forward.name: [0] * 32 + [1] * 32})),
    }[part]  # fmt: skip
    weight, bias = (array.copy() for array in estimator.maps[name])
    weight[gone] = 0
    pruned = tiny_graph.clone()
    rewrite(pruned)
    expected = (
        1
        - compare(tiny_graph, pruned, tiny_batches, "", context=RunContext(ONE_THREAD)).mean_cosine
    )
    assert expected > 1e-4
    assert estimator.loss({name: (weight, bias)}) == pytest.approx(expected, rel=0, abs=1e-6)


def test_loss_of_changed_maps_equals_rewritten_model(
    estimator: LossEstimator, tiny_graph: ir.Model, tiny_batches: list[Batch]
):
    """Both at once, with what others take over: a full map of an attention and of a feed-forward,
    each with its constant."""
    random = np.random.default_rng(0)
    names = [find_attention(tiny_graph).blocks[0].name, find_feed_forward(tiny_graph)[1].name]
    maps: dict[str, Any] = {}
    for name in names:
        weight, bias = estimator.maps[name]
        noise = 0.3 * np.std(weight) * random.standard_normal(weight.shape)
        maps[name] = weight + noise, bias + 0.1 * random.standard_normal(bias.shape)
    changed = tiny_graph.clone()
    sites = find_sites(changed, names)
    for name in names:
        install(sites[name], *maps[name], infer_shapes_small(changed, batch=2, sequence=5))
    expected = (
        1
        - compare(tiny_graph, changed, tiny_batches, "", context=RunContext(ONE_THREAD)).mean_cosine
    )
    assert expected > 1e-2
    assert estimator.loss(maps) == pytest.approx(expected, rel=0, abs=1e-6)
    alone = [estimator.loss({name: maps[name]}) for name in names]
    assert all(1e-4 < loss < expected for loss in alone)


def test_loss_of_a_model_from_its_first_changed_block_on(
    estimator: LossEstimator, tiny_graph: ir.Model
):
    names = [block.name for block in find_attention(tiny_graph).blocks]
    for name in (*names, names[0]):
        pruned = tiny_graph.clone()
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


def test_loss_grows_with_the_change(estimator: LossEstimator, tiny_graph: ir.Model):
    name = find_feed_forward(tiny_graph)[1].name
    weight, bias = estimator.maps[name]
    losses = [estimator.loss({name: (share * weight, bias)}) for share in (0.9, 0.6, 0.1)]
    assert losses == sorted(losses) and losses[0] > 1e-5


def test_loss_estimator_leaves_the_model_unchanged(
    tiny_graph: ir.Model, tiny_batches: list[Batch], new_meter: Callable[[], QualityMeter]
):
    before = ir.to_proto(tiny_graph).SerializeToString()
    name = find_feed_forward(tiny_graph)[0].name
    estimator = LossEstimator(
        tiny_graph, [name], tiny_batches[:1], new_meter, RunContext(ONE_THREAD)
    )
    estimator.loss({name: (0 * estimator.maps[name][0], estimator.maps[name][1])})
    assert ir.to_proto(tiny_graph).SerializeToString() == before
