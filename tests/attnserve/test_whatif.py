"""What the output loses if a block wrote something else, without any rewriting."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.artifact import load_model, open_artifact
from attnserve.calibrate import Batch, load_inputs
from attnserve.verify import compare
from attnserve.whatif import WhatIf
from graph_passes.feed_forward import find_feed_forward
from graph_passes.find import find_attention
from graph_passes.prune import PruneHeads
from graph_passes.prune_neurons import PruneNeurons


@pytest.fixture(scope="module")
def bert(tiny: Path) -> ir.Model:
    return load_model(tiny / "model.onnx")


@pytest.fixture(scope="module")
def data(tiny: Path, sentences: Path, bert: ir.Model) -> list[Batch]:
    return list(load_inputs(sentences, bert, open_artifact(tiny), split=False).fit)


@pytest.fixture(scope="module")
def ask(bert: ir.Model, data: list[Batch]) -> WhatIf:
    names = [block.name for block in (*find_attention(bert)[0], *find_feed_forward(bert))]
    return WhatIf(bert, names, data, threads=1)


def test_nothing_else_loses_nothing(ask: WhatIf):
    assert ask.cosine_loss({}) == pytest.approx(0, abs=1e-6)


def test_rows_of_zeros_are_heads_that_are_gone(ask: WhatIf, bert: ir.Model, data: list[Batch]):
    block = find_attention(bert)[0][1]
    assert block.output is not None
    weight, bias = (array.copy() for array in ask.maps[block.name])
    weight[block.output.rows[[0, 2]].reshape(-1)] = 0
    pruned = bert.clone()
    PruneHeads({block.name: [0, 1, 0, 1]})(pruned)
    expected = 1 - compare(bert, pruned, data, "", threads=1).mean_cosine
    assert expected > 1e-3
    assert ask.cosine_loss({block.name: (weight, bias)}) == pytest.approx(expected, abs=1e-6)


def test_rows_of_zeros_are_neurons_that_are_gone(ask: WhatIf, bert: ir.Model, data: list[Batch]):
    block = find_feed_forward(bert)[0]
    weight, bias = (array.copy() for array in ask.maps[block.name])
    weight[:32] = 0
    pruned = bert.clone()
    PruneNeurons({block.name: [0] * 32 + [1] * 32})(pruned)
    expected = 1 - compare(bert, pruned, data, "", threads=1).mean_cosine
    assert expected > 1e-4
    assert ask.cosine_loss({block.name: (weight, bias)}) == pytest.approx(expected, abs=1e-6)


def test_more_of_a_change_loses_more(ask: WhatIf, bert: ir.Model):
    name = find_feed_forward(bert)[1].name
    weight, bias = ask.maps[name]
    losses = [ask.cosine_loss({name: (share * weight, bias)}) for share in (0.9, 0.6, 0.1)]
    assert losses == sorted(losses) and losses[0] > 1e-5


def test_the_model_itself_is_left_alone(bert: ir.Model, data: list[Batch], ask: Any):
    assert {value.name for value in bert.graph.inputs} == set(data[0])
    assert np.isfinite(ask.cosine_loss({}))
