from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from attnserve.serving.loaded_model import Model
from service.engine.engine import Engine
from service.engine.shadow import Shadow
from service.metrics import Metrics
from service.settings import Settings
from tests.service.conftest import HeldRuns
from tests.service.tiny import HIDDEN, write_encoder, write_model


def open_engine(path: Path, **settings: Any) -> Engine:
    model = Model(open_artifact(path))
    model.warm_up()
    chosen, metrics = Settings.model_validate({"model": path, **settings}), Metrics()
    shadow = Shadow(chosen, metrics, list)
    return Engine(model, chosen, metrics.series(model.name, "1"), lambda: model, shadow)


def tokens(*rows: list[int], mask: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int64)
    kept = np.ones_like(ids) if mask is None else np.array(mask, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": kept}


@pytest.fixture
def engine(encoder: Path) -> Iterator[Engine]:
    engine = open_engine(encoder, max_queue=2)
    yield engine
    engine.close()


def test_infer_counts_tokens_without_padding_and_macs_with_it(engine: Engine) -> None:
    inputs = tokens([2, 4, 3], [2, 3, 0], mask=[[1, 1, 1], [1, 1, 0]])
    answer = asyncio.run(engine.infer(inputs))
    assert answer.tokens == 5
    assert answer.macs == 2 * 3 * HIDDEN * HIDDEN


def test_infer_uncountable_graph_has_no_macs(tmp_path: Path) -> None:
    path = write_model(
        tmp_path / "branch.onnx",
        """
        <ir_version: 10, opset_import: ["": 18]>
        branch (bool[] which, float[n] x) => (float[n] y) {
            y = If (which) <
                then_branch = plus () => (float[n] p) { p = Add(x, x) },
                else_branch = same () => (float[n] s) { s = Identity(x) }
            >
        }
        """,
    )
    engine = open_engine(path)
    inputs = {"which": np.array(True), "x": np.ones(3, dtype=np.float32)}
    answer = asyncio.run(engine.infer(inputs))
    np.testing.assert_array_equal(answer.outputs["y"], [2, 2, 2])
    assert answer.macs is None
    engine.close()


async def test_infer_cancelled_in_queue_is_not_computed(
    engine: Engine, hold: Callable[[], HeldRuns]
) -> None:
    held = hold()
    first = asyncio.ensure_future(engine.infer(tokens([2, 3])))
    await asyncio.to_thread(held.wait)
    second = asyncio.ensure_future(engine.infer(tokens([2, 3])))
    await asyncio.sleep(0.01)
    assert engine.in_flight == 2
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    third = asyncio.ensure_future(engine.infer(tokens([2, 3])))
    await asyncio.sleep(0.01)
    held.go.set()
    await first
    assert (await third).result.queue_ms > 0
    assert held.started == 2
    assert engine.in_flight == 0


def test_engine_name_is_that_of_its_file(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "modèle 1")
    (folder / "model.onnx").rename(folder / "small.onnx")
    engine = open_engine(folder / "small.onnx")
    assert engine.name == "small"
    engine.close()
