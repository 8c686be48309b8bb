from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from attnserve.models.artifact import open_artifact
from graph_passes.errors import InvalidModel
from service.engine.engine import Engine
from service.engine.model import Model, Tensor
from service.engine.shadow import Shadow
from service.metrics import Metrics
from service.settings import Settings
from tests.service.conftest import HeldRuns
from tests.service.tiny import HIDDEN, hidden_states, write_encoder, write_model


def open_engine(path: Path, **settings: Any) -> Engine:
    model = Model(open_artifact(path))
    model.warm_up()
    chosen, metrics = Settings.model_validate({"model": path, **settings}), Metrics()
    shadow = Shadow(chosen, metrics, list)
    return Engine(model, chosen, metrics.of(model.name, model.version), lambda: model, shadow)


def tokens(*rows: list[int], mask: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int64)
    kept = np.ones_like(ids) if mask is None else np.array(mask, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": kept}


@pytest.fixture
def engine(encoder: Path) -> Iterator[Engine]:
    engine = open_engine(encoder, max_queue=2)
    yield engine
    engine.close()


def test_infer_concurrent_requests_get_their_own_answers(encoder: Path) -> None:
    engine = open_engine(encoder, concurrency=4)
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 8, (1, length)) for length in rng.integers(1, 9, 50)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(engine.infer(tokens(*ids.tolist())) for ids in requests))

    for ids, answer in zip(requests, asyncio.run(ask()), strict=True):
        np.testing.assert_array_equal(answer.outputs["last_hidden_state"], hidden_states(ids))
    assert engine.in_flight == 0
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


def test_infer_cancelled_in_queue_is_not_computed(
    engine: Engine, hold: Callable[[], HeldRuns]
) -> None:
    held = hold()

    async def script() -> None:
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

    asyncio.run(script())
    assert held.started == 2
    assert engine.in_flight == 0


def test_model_unsupported_or_missing_is_refused(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    words (string[n] x) => (string[n] y) { y = Identity(x) }
    """
    with pytest.raises(InvalidModel, match=r"'x' is a tensor\(string\)"):
        open_engine(write_model(tmp_path / "words.onnx", text))
    with pytest.raises(InvalidModel, match="no such file"):
        open_engine(tmp_path / "nothing.onnx")


def test_engine_name_is_that_of_its_file(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "modèle 1")
    (folder / "model.onnx").rename(folder / "small.onnx")
    engine = open_engine(folder / "small.onnx")
    assert engine.name == "small"
    engine.close()


def test_plan_id_is_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan may have megabytes, and every answer has the checksum in its headers."""
    plan = {"layers": [1, 2]}
    model = Model(open_artifact(write_encoder(tmp_path / "m", lineage=[{"plan": plan}])))
    first = model.artifact.plan_id
    assert first is not None
    monkeypatch.setattr(json, "dumps", lambda *_, **__: 1 / 0)
    assert model.artifact.plan_id == first
    model.close()


def test_output_bytes_counts_axes_of_unknown_size_as_one(encoder: Path) -> None:
    model, single = Model(open_artifact(encoder)), np.dtype(np.float32)
    model.inputs = (Tensor("x", single, ("batch", None)), Tensor("y", single, (None, "width")))
    model.outputs = (
        Tensor("a", single, ("batch", "width", 7)),
        Tensor("b", single, (None, 3)),
        Tensor("c", np.dtype(np.float64), ("batch", "other")),
    )
    shapes = {"x": (5, 11), "y": (11, 13)}
    assert [model.output_bytes(shapes, [name]) for name in "abc"] == [5 * 13 * 7 * 4, 12, 40]
    assert model.output_bytes(shapes, ["b", "c"]) == 52
    model.close()


def test_model_without_glibc_is_closed(encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ctypes.CDLL(None) raises TypeError on Windows."""

    def refuse(name: object) -> None:
        raise TypeError("argument of type 'NoneType' is not iterable")

    monkeypatch.setattr("attnserve.runtime.memory.ctypes.CDLL", refuse)
    Model(open_artifact(encoder)).close()


@pytest.mark.parametrize("location", ["weights.bin", "./weights.bin"])
def test_model_external_data_changed_in_place_keeps_answers(tmp_path: Path, location: str) -> None:
    """ONNX Runtime would map the file; truncating it would end this process."""
    folder = write_encoder(tmp_path / "m")
    proto = onnx.load(folder / "model.onnx")
    onnx.save(
        proto,
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    proto = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in proto.graph.initializer:
        next(each for each in tensor.external_data if each.key == "location").value = location
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    model = Model(open_artifact(folder))
    inputs = tokens([2, 4, 5, 3])
    before = model.run(inputs)
    data = folder / "weights.bin"
    with data.open("r+b") as file:
        file.write(bytes(data.stat().st_size))
    after = model.run(inputs)
    assert all(np.array_equal(after[name], array) for name, array in before.items())
    model.close()
