"""Prometheus series, v2 statistics and /stats.json."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from starlette.testclient import TestClient

import service
from attnserve.runtime import memory_use
from service.metrics import Metrics
from tests.service.conftest import samples
from tests.service.fake_nvml import FakeNvml, use_nvml
from tests.service.tiny import ids_request, write_encoder

INFER = "/v2/models/tiny/infer"


def test_metrics_count_requests_per_application(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client, other = start(encoder), start(encoder)
    client.post("/texts/embed", json={"inputs": "a"})
    client.post(INFER, json=ids_request([2, 3]))
    client.post(INFER, json={})
    client.get("/made-up")
    values = samples(client)
    assert values["attnserve_requests_total route=/texts/embed status=200"] == 1
    assert values["attnserve_requests_total route=/v2/models/{name}/infer status=422"] == 1
    assert values["attnserve_requests_total route=unknown status=404"] == 1
    assert values["attnserve_request_seconds_count model=tiny version=1"] == 2
    for stage in ("queue", "tokenize", "compute"):
        assert values[f"attnserve_stage_seconds_count model=tiny stage={stage} version=1"] == 2
    assert values["attnserve_request_tokens_sum model=tiny version=1"] == 5
    assert values["attnserve_macs_total model=tiny version=1"] == 5 * 4 * 4
    assert values["attnserve_in_flight model=tiny version=1"] == 0
    assert values["process_resident_memory_bytes"] > 1_000_000
    assert not any("route=/embed" in key for key in samples(other))


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_metrics_name_the_runtime_and_the_precision_of_a_model(
    start: Callable[..., TestClient], encoder: Path, runtime: str
) -> None:
    pytest.importorskip(runtime)
    values = samples(start(encoder, runtime=runtime))
    labels = f"model=tiny precision=float32 runtime={runtime} version=1"
    assert [key for key in values if key.startswith("attnserve_model_info")] == [
        f"attnserve_model_info {labels}"
    ]
    assert values[f"attnserve_model_info {labels}"] == 1


def test_statistics_counts_and_times_are_exact(
    start: Callable[..., TestClient], encoder: Path
) -> None:
    client = start(encoder)
    for _ in range(3):
        client.post(INFER, json=ids_request([2, 3], [2, 4]))
    client.post(INFER, json=ids_request([99]))
    (stats,) = client.get("/v2/models/tiny/stats").json()["model_stats"]
    durations = stats["inference_stats"]
    assert (stats["name"], stats["version"]) == ("tiny", "1")
    assert (stats["inference_count"], stats["execution_count"]) == (6, 3)
    assert stats["last_inference"] > 1.7e12
    stages = ("queue", "compute_input", "compute_infer", "compute_output")
    assert all(durations[stage]["count"] == 3 for stage in ("success", *stages))
    assert durations["fail"]["count"] == 1
    assert sum(durations[stage]["ns"] for stage in stages) <= durations["success"]["ns"]
    assert all(durations[stage]["ns"] > 0 for stage in ("success", "fail", *stages))
    assert durations["cache_hit"] == durations["cache_miss"] == {"count": 0, "ns": 0}
    (batch,) = stats["batch_stats"]
    assert batch["batch_size"] == 2
    assert batch["compute_infer"]["count"] == 3
    assert 0 < batch["compute_infer"]["ns"] <= durations["compute_infer"]["ns"]


def test_stats_window_and_card_describe_the_last_minute_and_the_model(
    start: Callable[..., TestClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lineage = [
        {
            "rewrite": "prune",
            "before": {"parameters": 10, "macs": 100, "bytes": 40},
            "after": {"parameters": 8, "macs": 80, "bytes": 32},
            "fidelity": {"mean_cosine": 0.99, "min_cosine": 0.9, "data": "texts"},
            "plan": {"steps": []},
            "batch": 1,
            "sequence": 128,
        }
    ]
    client = start(
        write_encoder(tmp_path / "tiny", lineage=lineage, source="/srv/private/models/big")
    )
    clock = [1000.5]
    monkeypatch.setattr("service.metrics.time", lambda: clock[0])
    answer = client.post("/texts/embed", json={"inputs": ["", "a b c d"]})
    clock[0] += 1
    stats = client.get("/stats.json").json()
    assert stats["ready"] and stats["memory"]["rss_bytes"] > 1_000_000
    (model,) = stats["models"]
    assert (model["name"], model["version"], model["requests"]) == ("tiny", "1", 1)
    window = model["window"]
    assert len(window["seconds"]) == 60
    last = window["seconds"][-1]
    assert (last["at"], last["requests"], last["rows"], last["tokens"]) == (1000, 1, 2, 8)
    assert last["p50_ms"] == last["p99_ms"] == float(answer.headers["x-total-ms"])
    assert window["seconds"][0]["p50_ms"] is None
    assert window["macs_per_second"] * 60 == int(answer.headers["x-macs"])
    assert sum(window["batch_rows"].values()) in (1, 2)
    card = model["card"]
    assert card["parameters"] == 32 + 32 + 16
    assert card["source"] == "models/big"  # without the path of the server
    assert card["optimization"]["before"] == lineage[0]["before"]
    assert card["optimization"]["after"] == lineage[0]["after"]
    assert card["optimization"]["fidelity"] == lineage[0]["fidelity"]
    assert re.fullmatch(r"[0-9a-f]{12}", card["plan"])
    assert answer.headers["x-plan"] == card["plan"]
    clock[0] += 60
    (model,) = client.get("/stats.json").json()["models"]
    assert model["window"]["p50_ms"] is None and model["requests"] == 1


def test_gpu_memory_peak_is_kept_per_model_and_absent_before_first_answer(
    start: Callable[..., TestClient], encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = start(encoder)
    engine = client.app.state.repository.engine()  # type: ignore[attr-defined]

    def peaks() -> tuple[int | None, list[str]]:
        lines = client.get("/metrics").text.splitlines()
        series = [line for line in lines if line.startswith("attnserve_gpu_memory_peak_bytes{")]
        return client.get("/stats.json").json()["models"][0]["gpu_peak_bytes"], series

    client.post(INFER, json=ids_request([2, 3]))
    assert peaks() == (None, [])
    monkeypatch.setattr(engine, "settings", engine.settings.model_copy(update={"provider": "cuda"}))
    nvml = FakeNvml()
    use_nvml(monkeypatch, nvml)
    for second, (used, peak) in enumerate(((7, 7), (50, 50), (9, 50), (50, 50), (51, 51))):
        nvml.used = used
        monkeypatch.setattr(memory_use, "monotonic", partial(float, 1e9 + second))
        answer = client.post(INFER, json=ids_request([2, 3]))
        assert answer.headers["x-gpu-bytes"] == str(used)
        assert answer.json()["parameters"]["gpu_bytes"] == used
        series = 'attnserve_gpu_memory_peak_bytes{model="tiny",version="1"}'
        assert peaks() == (peak, [f"{series} {peak:.1f}"])
    use_nvml(monkeypatch, None)  # the driver is gone
    assert "x-gpu-bytes" not in client.post(INFER, json=ids_request([2, 3])).headers
    assert peaks()[0] == 51


def test_stats_of_many_models_read_the_series_once_and_off_the_event_loop(
    start: Callable[..., TestClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = write_encoder(tmp_path / "m0")
    for index in range(1, 40):
        shutil.copytree(first, tmp_path / f"m{index}")
    client = start(tmp_path)
    repository = client.app.state.repository  # type: ignore[attr-defined]
    reads: list[bool] = []

    def counted(read: Callable[[], object]) -> object:
        with pytest.raises(RuntimeError):  # on the event loop there would be one
            asyncio.get_running_loop()
        reads.append(True)
        return read()

    metrics = repository.metrics
    for owner, name in ((metrics, "statistics"), (repository, "seconds"), (repository, "states")):
        monkeypatch.setattr(owner, name, partial(counted, getattr(owner, name)))
    assert len(client.get("/stats.json").json()["models"]) == 40
    assert len(reads) == 3


def test_metrics_skip_a_file_that_is_cut(tmp_path: Path) -> None:
    """A worker that is killed, or a full disk, must not end the metrics of the others."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from service.metrics import Metrics\n"
        "metrics = Metrics(Path(sys.argv[1]))\n"
        "for index in range(100): metrics.requests.labels(f'/route-{index}', 200).inc()\n"
    )
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    root = Path(service.__file__).parents[1]
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], check=True, env=environment, cwd=root
    )
    (counters,) = tmp_path.glob("counter_*.db")
    content = counters.read_bytes()
    metrics = Metrics(tmp_path)
    assert b'route="/route-99"' in generate_latest(metrics)
    cut = tmp_path / "counter_9.db"
    for size in (1, 4, 7, 8, 9, 11, 100, 5001):
        cut.write_bytes(content[:size])
        counted = b'attnserve_requests_total{route="/route-99",status="200"} 1.0'
        assert counted in generate_latest(metrics)
        metrics.statistics()
    cut.write_bytes(b"\xff" * 5000)
    assert b'route="/route-99"' in generate_latest(metrics)
