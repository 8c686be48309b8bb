from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnserve.models.artifact import open_artifact
from graph_passes.errors import InvalidModel
from service.engine.engine import Engine
from service.engine.model import Model
from service.errors import NotReady, Overloaded
from service.settings import Settings
from tests.service.tiny import HIDDEN, hidden_states, write_encoder, write_model


def open_engine(path: Path, **settings: Any) -> Engine:
    model = Model(open_artifact(path))
    model.warm_up()
    return Engine(model, Settings.model_validate({"model": path, **settings}))


def tokens(*rows: list[int], mask: list[list[int]] | None = None) -> dict[str, np.ndarray]:
    ids = np.array(rows, dtype=np.int64)
    kept = np.ones_like(ids) if mask is None else np.array(mask, dtype=np.int64)
    return {"input_ids": ids, "attention_mask": kept}


@pytest.fixture
def engine(encoder: Path) -> Iterator[Engine]:
    engine = open_engine(encoder, max_queue=2)
    yield engine
    engine.close()


class Held:
    """Holds every run of an engine until it is let go."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runs, self.go, run = 0, threading.Event(), engine.model.run

        def held(inputs: Mapping[str, np.ndarray], outputs: Sequence[str] = ()) -> dict[str, Any]:
            self.runs += 1
            assert self.go.wait(10)
            return run(inputs, outputs)

        monkeypatch.setattr(engine.model, "run", held)

    async def reached(self, runs: int) -> None:
        while self.runs < runs:
            await asyncio.sleep(0.001)


def test_every_request_gets_its_own_answer(encoder: Path) -> None:
    engine = open_engine(encoder, concurrency=4)
    rng = np.random.default_rng(0)
    requests = [rng.integers(0, 8, (1, length)) for length in rng.integers(1, 9, 50)]

    async def ask() -> list[Any]:
        return await asyncio.gather(*(engine.infer(tokens(*ids.tolist())) for ids in requests))

    for ids, answer in zip(requests, asyncio.run(ask()), strict=True):
        np.testing.assert_array_equal(answer.outputs["last_hidden_state"], hidden_states(ids))
    assert engine.in_flight == 0
    engine.close()


def test_tokens_are_counted_without_padding_and_macs_with_it(engine: Engine) -> None:
    inputs = tokens([2, 4, 3], [2, 3, 0], mask=[[1, 1, 1], [1, 1, 0]])
    answer = asyncio.run(engine.infer(inputs))
    assert answer.tokens == 5
    assert answer.macs == 2 * 3 * HIDDEN * HIDDEN


def test_macs_that_cannot_be_counted_are_none(tmp_path: Path) -> None:
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


def test_past_the_queue_requests_are_refused_at_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(engine, monkeypatch)

    async def ask() -> None:
        waiting = [asyncio.ensure_future(engine.infer(tokens([2, 3]))) for _ in range(3)]
        await held.reached(1)
        assert engine.in_flight == 3  # one runs, two wait
        with pytest.raises(Overloaded, match="2 rows wait already, and at most 2 may"):
            await engine.infer(tokens([2, 3]))
        held.go.set()
        answers = await asyncio.gather(*waiting)
        assert answers[-1].queue_ms > 0
        await engine.infer(tokens([2, 3]))

    asyncio.run(ask())


def test_what_is_cancelled_while_it_waits_is_never_computed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(engine, monkeypatch)

    async def ask() -> None:
        first = asyncio.ensure_future(engine.infer(tokens([2, 3])))
        await held.reached(1)
        second = asyncio.ensure_future(engine.infer(tokens([2, 3])))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        held.go.set()
        await first
        await engine.infer(tokens([2, 3]))  # behind the cancelled one in the queue

    asyncio.run(ask())
    assert held.runs == 2
    assert engine.in_flight == 0


def test_no_memory_is_not_the_clients_fault(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Session:
        def run(self, *_: Any) -> None:
            raise RuntimeError("[ONNXRuntimeError] : 6 : Failed to allocate memory for 7 bytes")

    monkeypatch.setattr(engine.model, "_session", Session())
    with pytest.raises(NotReady, match="out of memory"):
        asyncio.run(engine.infer(tokens([2, 3])))


def test_what_cannot_be_served_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    text = """
    <ir_version: 10, opset_import: ["": 18]>
    words (string[n] x) => (string[n] y) { y = Identity(x) }
    """
    with pytest.raises(InvalidModel, match=r"'x' is a tensor\(string\)"):
        open_engine(write_model(tmp_path / "words.onnx", text))
    with pytest.raises(InvalidModel, match="no such file"):
        open_engine(tmp_path / "nothing.onnx")


def test_a_model_is_named_for_its_folder_or_its_file(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path / "modèle 1")
    (folder / "model.onnx").rename(folder / "small.onnx")
    engine = open_engine(folder / "small.onnx")
    assert engine.name == "small"
    engine.close()
