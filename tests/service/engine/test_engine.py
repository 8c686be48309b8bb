from __future__ import annotations

import asyncio
from collections.abc import Iterator
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
from tests.service.tiny import HIDDEN, write_encoder


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


def test_engine_name_is_that_of_its_file(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "modèle 1")
    (folder / "model.onnx").rename(folder / "small.onnx")
    engine = open_engine(folder / "small.onnx")
    assert engine.name == "small"
    engine.close()
