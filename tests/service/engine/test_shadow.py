"""Comparison of answers with the original, and the sample of request texts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from starlette.testclient import TestClient

from attnserve import optimize
from attnserve.context import CPU, ONE_THREAD
from attnserve.models.artifact import open_artifact
from attnserve.models.checksums import sha256
from attnserve.runtime.isolation import Worker, WorkerCrashed
from attnserve.serving import comparison_process
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.comparison_process import ComparisonProcess, ServedRow
from attnserve.serving.live_quality import LiveComparison
from attnserve.serving.loaded_model import Model
from graph_passes.errors import InvalidModel
from service.engine import shadow
from service.engine.engine import Engine
from service.metrics import Metrics
from service.settings import Settings
from tests.errors import raises
from tests.fixtures.make import BERT
from tests.service.conftest import samples, until
from tests.service.tiny import ECHO, ids_request, write_classifier, write_encoder, write_model

ROWS_OF_2000_REQUESTS = 66
NOISE = 2.6
"""Noise of the weights at which the similarity of ``lowered`` is 0.95."""

OF = "measure=similarity model=served version=1"
ROWS = "attnserve_shadow_rows_total model=served result={} version=1"


def lowered(
    folder: Path,
    original: Path,
    noise: float,
    guarantee: float = 0.99,
    measure: str = "similarity",
    **record: Any,
) -> Path:
    """A copy of the original with noise in its weights, and a record that guarantees a quality."""
    entry = {
        "rewrite": "x",
        "source": {"sha256": sha256(original / "model.onnx")},
        "quality": {
            "measure": measure,
            "value": guarantee,
            "output": "last_hidden_state",
            "rows": 60,
        },
    }
    write_encoder(folder, lineage=[entry], **record)
    model = onnx.load(folder / "model.onnx")
    values = np.random.default_rng(0)
    for tensor in model.graph.initializer:
        if tensor.name == "words_table":
            array = numpy_helper.to_array(tensor)
            array = array + noise * values.standard_normal(array.shape).astype(np.float32)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    onnx.save(model, folder / "model.onnx")
    return folder


def send(client: TestClient, requests: int, *, waits: bool = False) -> None:
    """Embed random texts; ``waits`` lets the comparisons keep up."""
    values, pending = random.Random(0), shadow_of(client).pending
    for _ in range(requests):
        text = " ".join(values.choices("abcd", k=values.randint(1, 6)))
        assert client.post("/texts/embed", json={"inputs": text}).status_code == 200
        until(lambda: not waits or len(pending) < shadow.MAX_PENDING // 2)


def shadow_of(client: TestClient) -> shadow.Shadow:
    return client.app.state.repository.shadow  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def usual_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison_process, "NICE", 0)


def report(client: TestClient) -> dict[str, Any]:
    (model,) = client.get("/stats.json").json()["models"]
    return model["quality"]


def compared(client: TestClient, rows: int) -> dict[str, Any]:
    """The report once this many rows were compared."""
    until(lambda: samples(client).get(ROWS.format("compared"), 0) >= rows)
    return report(client)


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return write_encoder(tmp_path / "original")


@pytest.fixture
def equal(start: Callable[..., TestClient], original: Path, tmp_path: Path) -> TestClient:
    """A server of a model that equals the original; a row of each request is compared."""
    return start(lowered(tmp_path / "served", original, 0), shadow=original, shadow_rate=1)


@pytest.mark.process
def test_lowered_quality_is_found_with_the_rows_of_2000_requests(
    start: Callable[..., TestClient],
    original: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    """The artifact guarantees 0.99 and has 0.95."""
    client = start(lowered(tmp_path / "served", original, NOISE), shadow=original, shadow_rate=1)
    assert report(client) is None
    send(client, ROWS_OF_2000_REQUESTS, waits=True)
    found = until(lambda: (one := report(client)) and one["broken"] and one)
    assert found["promise"] == 0.99 and 0.92 < found["value"] < 0.97
    values = samples(client)
    assert values[f"attnserve_quality_broken {OF}"] == 1
    assert values[f"attnserve_quality_value {OF}"] == found["value"]
    assert values[f"attnserve_quality_upper {OF}"] < 0.99
    warnings = [one.message for one in caplog.records if "violates its quality" in one.message]
    assert len(warnings) == 1


@pytest.mark.process
def test_queries_are_compared_with_an_index_of_the_original(
    start: Callable[..., TestClient], original: Path, tmp_path: Path
):
    served = lowered(tmp_path / "served", original, 20 * NOISE, measure="index")
    client = start(served, shadow=original, shadow_rate=1)
    send(client, ROWS_OF_2000_REQUESTS, waits=True)
    found = until(lambda: (one := report(client)) and one["broken"] and one)
    assert (found["measure"], found["promise"]) == ("index", 0.99)
    assert found["value"] < 0.9 and {"overlap", "similarity"} < found["also"].keys()
    values = samples(client)
    assert values["attnserve_quality_broken measure=index model=served version=1"] == 1


@pytest.mark.process
def test_equal_model_meets_its_guarantee(equal: TestClient):
    send(equal, 20, waits=True)
    equal.post("/v2/models/served/infer", json=ids_request([2, 4, 3]))
    equal.post("/v1/embeddings", json={"model": "served", "input": "a b"})
    found = compared(equal, 20)
    assert found["value"] == pytest.approx(1) and not found["broken"]
    names = {one["name"] for one in equal.post("/v2/repository/index").json()}
    assert names == {"served"}, "the original is not served"


@pytest.mark.process
def test_original_that_does_not_fit_is_refused_at_the_start(
    start: Callable[..., TestClient], original: Path, tmp_path: Path
):
    served = lowered(tmp_path / "served", original, 0)
    echo = write_model(tmp_path / "echo.onnx", ECHO)
    with raises(InvalidModel, "shadow.inputs", "input_ids", "u64"):
        start(served, shadow=echo)
    other = lowered(tmp_path / "other", original, 1)
    with raises(InvalidModel, "quality.other_original"):
        start(served, shadow=other)
    with raises(InvalidModel, "artifact.missing"):
        start(served, shadow=tmp_path / "missing")


@pytest.mark.process
def test_failures_of_the_original_reach_no_client(
    equal: TestClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def crash(*args: Any, **options: Any) -> Any:
        raise WorkerCrashed("it has crashed")

    monkeypatch.setattr(Worker, "call", crash)
    send(equal, 30)
    until(lambda: samples(equal).get(ROWS.format("failed"), 0) >= 1)
    monkeypatch.undo()
    assert len([one for one in caplog.records if "has crashed" in one.message]) == 1
    send(equal, 10)
    until(lambda: samples(equal).get(ROWS.format("skipped"), 0) >= 1)
    later = comparison_process.RESTART_S
    monkeypatch.setattr(comparison_process, "monotonic", lambda: monotonic() + later)
    send(equal, 10)
    until(lambda: samples(equal).get(ROWS.format("compared"), 0) >= 1)


@pytest.mark.process
def test_rows_wait_for_an_empty_queue(equal: TestClient, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "waiting", 1)
        send(equal, 20)
        values = samples(equal)
        assert values[ROWS.format("skipped")] == 20 - shadow.MAX_PENDING
        assert ROWS.format("compared") not in values
    until(lambda: samples(equal).get(ROWS.format("compared"), 0) == shadow.MAX_PENDING)


def test_rows_outside_of_the_calibration_are_counted_and_marked(
    start: Callable[..., TestClient], tmp_path: Path
):
    client = start(write_encoder(tmp_path / "tiny", lineage=[calibrated(2, 3, 4, 5)]))
    inside = client.post("/texts/embed", json={"inputs": ["a", "a b"]})
    assert "x-out-of-calibration" not in inside.headers
    outside = client.post("/texts/embed", json={"inputs": ["a", "a b a", "c d", "c d c d"]})
    assert outside.headers["x-out-of-calibration"] == "3"
    infer = "/v2/models/tiny/infer"
    assert (
        "out_of_calibration"
        not in client.post(infer, json=ids_request([2, 4, 3])).json()["parameters"]
    )
    answer = client.post(infer, json=ids_request([6, 7, 3])).json()
    assert answer["parameters"]["out_of_calibration"] == 1
    padded = ids_request([2, 4, 3, 0, 0, 0])
    padded["inputs"][1]["data"] = [1, 1, 1, 0, 0, 0]
    assert "out_of_calibration" not in client.post(infer, json=padded).json()["parameters"]
    values = samples(client)
    of = "attnserve_out_of_calibration_total model=tiny reason={} version=1"
    assert values[of.format("length")] == 2
    assert values[of.format("tokens")] == 3
    (model,) = client.get("/stats.json").json()["models"]
    assert model["out_of_calibration"] == {"length": 2, "tokens": 3}


def calibrated(*ids: int) -> dict[str, Any]:
    """A lineage entry that was calibrated on these ids and at most 4 tokens."""
    import base64
    import zlib

    seen = np.zeros(max(ids) + 1, bool)
    seen[list(ids)] = True
    packed = zlib.compress(np.packbits(seen, bitorder="little").tobytes())
    tokens = {"seen": base64.b64encode(packed).decode(), "unseen_share": 0.0}
    return {"rewrite": "x", "calibration": {"lengths": [3, 3, 4, 4, 4], "token_ids": tokens}}


def test_request_texts_are_collected(
    start: Callable[..., TestClient], encoder: Path, tmp_path: Path
):
    file = tmp_path / "texts.txt"
    client = start(encoder, sample_texts=file, sample_rate=1)
    client.post("/texts/embed", json={"inputs": ["a\nb", " c\u2028d "]})
    client.post("/v1/embeddings", json={"model": "tiny", "input": [2, 4, 3]})
    client.post("/texts/similarity", json={"source": "a b c", "targets": ["d"]})
    client.post("/texts/embed", json={"inputs": "a " * 50, "truncate": False})
    lines = until(lambda: len(found := file.read_text().splitlines()) >= 4 and found)
    assert sorted(lines) == ["a b", "a b c", "c d", "d"], "refused texts are not collected"
    assert file.stat().st_mode & 0o777 == 0o600


def test_unwritable_sample_is_logged_once_and_affects_no_answer(
    start: Callable[..., TestClient],
    encoder: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
):
    client = start(encoder, sample_texts=tmp_path, sample_rate=1)
    send(client, 5)
    until(lambda: "not written" in caplog.text)
    send(client, 5)
    assert caplog.text.count("not written") == 1


@pytest.mark.process
def test_collected_texts_calibrate_a_model_that_meets_its_guarantee_on_them(
    start: Callable[..., TestClient], tmp_path: Path
):
    """The round trip: serve, collect, optimize, serve beside the original."""
    original, texts = BERT / "eager-torchscript-17-2", tmp_path / "texts.txt"
    values = random.Random(0)
    words = ["the", "man", "woman", "dog", "is", "playing", "with", "guitar", "ball"]

    def ask(client: TestClient, requests: int) -> int:
        """The number of answers that are marked as outside of the calibration."""
        marked = 0
        for _ in range(requests):
            inputs = [" ".join(values.choices(words, k=values.randint(3, 12))) for _ in range(8)]
            headers = client.post("/texts/embed", json={"inputs": inputs}).headers
            marked += "x-out-of-calibration" in headers
            until(lambda: len(shadow_of(client).pending) < shadow.MAX_PENDING // 2)
        return marked

    ask(start(original, sample_texts=texts, sample_rate=1), 20)
    until(lambda: len(texts.read_text().splitlines()) == 160)
    record = optimize(
        original, tmp_path / "served", collab_dk=16, mixing="dense", calib=texts
    ).to_json()
    client = start(tmp_path / "served", shadow=original, shadow_rate=1)
    assert ask(client, 120) == 0
    found = compared(client, 120)
    # Both ends are estimates: of the rows to verify, and of the rows that were compared.
    assert found["promise"] == record["quality"]["ci95"][0] < found["ci95"][1]
    assert not found["broken"]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "identity"])
def test_scores_of_an_equal_classifier_meet_the_guarantee(activation: str, tmp_path: Path):
    folder = write_classifier(tmp_path / "c", activation=activation)
    artifact = open_artifact(folder)
    comparison = LiveComparison(artifact, CPU)
    served = Model(artifact, RunnerOptions(ONE_THREAD))
    comparison.watch("c", artifact, served.signature.input_types, "kl")
    assert served.encoder is not None
    for place in range(40):
        inputs = served.text_inputs(served.encode(["a " * (1 + place % 5) + "b"]))
        logits = served.run(inputs, ["logits"])["logits"]
        scores = served.vectors("classify", inputs, logits)
        update = comparison.compare("c", "classify", inputs, {"logits": scores})
    assert update is not None and update["report"]["value"] == pytest.approx(1, abs=1e-6)
    assert comparison.compare("c", None, inputs, {"another": scores}) is None


def test_row_of_a_model_that_was_replaced_is_not_compared(tmp_path: Path):
    now: Any = SimpleNamespace(name="m", version="1", identity="new")
    process = ComparisonProcess(tmp_path, CPU, lambda: [now], print, timeout_s=1)
    row = ServedRow(("m", "1"), "old", None, {}, {})
    assert process.compare(row) is None


def test_row_that_cannot_be_read_is_logged_and_read_once(
    original: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    settings = Settings(model=original, shadow=original)
    found = shadow.Shadow(settings, Metrics(), list, folder=tmp_path)
    row = tmp_path / "a.row"
    row.write_bytes(b"no pickle")
    for _ in range(2):  # called in a loop that must go on
        found.collect()
    found.close()
    assert caplog.text.count("a row to compare could not be read") == 1
    assert not row.exists()
