"""Choice of the device, its log messages, and serving with captured CUDA graphs."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.testclient import TestClient

from attnserve.context import ONE_THREAD
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import save_model
from attnserve.runtime import openvino_runtime, session
from attnserve.runtime.cuda import Cuda
from attnserve.runtime.onnx_runtime import OnnxRuntime, require_runtime
from attnserve.runtime.session import require_cuda
from attnserve.serving import loaded_model
from attnserve.serving.backends import RunnerOptions
from attnserve.serving.buckets import Buckets
from attnserve.serving.cuda_graphs import GraphRunner
from attnserve.serving.loaded_model import Model
from benchmarks.gpu.encoder import random_encoder
from graph_passes.errors import Refusal
from service import launch
from service.engine import device
from service.engine.device import on_device
from service.settings import Settings
from tests.service.tiny import write_encoder, write_model

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str], str], None]:
    """An ONNX Runtime with these providers, on a machine that gives this reason against a GPU."""

    def install(providers: list[str], why: str) -> None:
        monkeypatch.setattr(device, "is_built_for_gpus", lambda: CUDA in providers)
        refusal = Refusal("no_gpu", why) if why else None
        monkeypatch.setattr(device, "gpu_refusal", lambda: refusal)

    return install


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


UNUSABLE = "no CUDA device can be used here."


@pytest.mark.parametrize(
    ("providers", "why", "given", "chosen", "logged"),
    [
        ([CUDA, CPU], "", {}, "cuda", None),
        ([CUDA, CPU], "", {"provider": "auto"}, "cuda", None),
        ([CUDA, CPU], UNUSABLE, {}, "cpu", UNUSABLE),
        ([CUDA, CPU], UNUSABLE, {"provider": "auto"}, "cpu", UNUSABLE),
        ([CPU], "nobody is asked", {}, "cpu", None),
        ([CPU], "nobody", {"provider": "auto"}, "cpu", "this ONNX Runtime is the build for CPUs"),
    ],
)
def test_on_device_auto_chooses_usable_gpu_and_warns_without(
    providers: list[str], why: str, given: Any, chosen: str, logged: str | None,
    tmp_path: Path, runtime: Any, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    runtime(providers, why)
    assert on_device(Settings(model=tmp_path, **given)).provider == chosen
    line = f"no GPU is used, models are served on the CPU: {logged}"
    assert lines(caplog) == ([] if logged is None else [line])


@pytest.mark.parametrize("provider", ["cpu", "cuda"])
def test_on_device_named_provider_is_unchanged(
    provider: str, tmp_path: Path, runtime: Any, caplog: pytest.LogCaptureFixture
) -> None:
    runtime([CUDA, CPU], "no GPU" if provider == "cuda" else "")
    settings = Settings(model=tmp_path, provider=provider)
    assert on_device(settings) is settings and not lines(caplog)


# ---- a served model that captures graphs, with buffers on the CPU --------------------------------


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GraphRunner, RunnerOptions]]:
    """Every runner that is opened, and what for: its session is on the CPU."""
    opened: list[tuple[GraphRunner, RunnerOptions]] = []

    def open_runner(source: Path, options: RunnerOptions, longest: int, **_: Any) -> GraphRunner:
        buckets = Buckets(options.cuda_graphs, longest=longest)
        opened.append(
            (GraphRunner(OnnxRuntime().open(source, ONE_THREAD), buckets, device="cpu"), options)
        )
        return opened[-1][0]

    monkeypatch.setattr(loaded_model, "open_runner", open_runner)
    return opened


def test_embed_with_cuda_graphs_gives_same_vectors(
    start: Callable[..., TestClient], tmp_path: Path, graphs: list[Any]
) -> None:
    encoder = write_encoder(tmp_path / "tiny")
    texts = ["a", "a b", "a b c", ["a", "b c d"], "a b c d"]
    client = start(encoder, provider="cpu", cuda_graphs=3, concurrency=2, tf32=True)
    captured = [client.post("/texts/embed", json={"inputs": text}).json() for text in texts * 3]
    ((runner, options),) = graphs
    assert (options.cuda, options.cuda_graphs) == (Cuda(tf32=True), 3)
    assert options.concurrency == 2
    assert 0 < len(runner.buckets.captured) <= 3
    graphs.clear()
    plain = start(encoder, provider="cpu")
    for told, text in zip(captured, texts * 3, strict=True):
        expected = plain.post("/texts/embed", json={"inputs": text}).json()["embeddings"]
        np.testing.assert_allclose(told["embeddings"], expected, rtol=0, atol=1e-6)
    assert not graphs[0][0].buckets.captured  # 0: none


def test_warm_up_tests_whether_padding_is_allowed(tmp_path: Path, graphs: list[Any]) -> None:
    """A mean over all tokens would change with every one that is added; attention masks it."""
    encoder = Model(open_artifact(write_encoder(tmp_path / "tiny")), RunnerOptions(cuda_graphs=2))
    encoder.warm_up()
    assert (graphs[0][0]._rows, graphs[0][0]._tokens) == (True, True)
    text = """<ir_version: 8, opset_import: ["" : 17]>
    mean (int64[n, s] input_ids, int64[n, s] attention_mask) => (float[n] y)
    { both = Add(input_ids, attention_mask)  x = Cast<to = 1>(both)
      y = ReduceMean<axes = [1], keepdims = 0>(x) }"""
    mixed = Model(
        open_artifact(write_model(tmp_path / "mean.onnx", text)), RunnerOptions(cuda_graphs=2)
    )
    mixed.warm_up()
    assert (graphs[1][0]._rows, graphs[1][0]._tokens) == (True, False)
    save_model(random_encoder(layers=1, hidden=8, heads=2, positions=16), tmp_path / "masked.onnx")
    masked = Model(open_artifact(tmp_path / "masked.onnx"), RunnerOptions(cuda_graphs=2))
    masked.warm_up()  # attention reads all tokens but those that the mask hides
    assert (graphs[2][0]._rows, graphs[2][0]._tokens) == (True, True)


@pytest.mark.gpu
@pytest.mark.skipif(Refusal.of(require_cuda) is not None, reason="this machine has no usable GPU")
def test_embed_on_a_gpu_gives_vectors_of_the_cpu(
    start: Callable[..., TestClient], tmp_path: Path
) -> None:
    encoder = write_encoder(tmp_path / "tiny")
    gpu = start(encoder, provider="cuda", cuda_graphs=3, probe=True)
    cpu = start(encoder, provider="cpu")
    for text in ["a", "a b", ["a", "b c d"], "a b c d"] * 3:
        got, expected = (one.post("/texts/embed", json={"inputs": text}) for one in (gpu, cpu))
        assert got.status_code == expected.status_code == 200, got.text
        np.testing.assert_allclose(
            got.json()["embeddings"], expected.json()["embeddings"], rtol=0, atol=1e-4
        )
        assert int(got.headers["x-gpu-bytes"]) > 0
    samples = [line.split() for line in gpu.get("/metrics").text.splitlines()]
    assert any(len(s) == 2 and s[0] == "attnserve_gpu_memory_bytes" for s in samples)


# ---- from the first line of the log to the last --------------------------------------------------


def test_create_app_auto_provider_is_logged_once(
    start: Callable[..., TestClient], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if CUDA in require_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    client = start(write_encoder(tmp_path / "tiny"), provider="auto")
    assert client.app.state.repository.settings.provider == "cpu"  # type: ignore[attr-defined]
    answer = client.post("/texts/embed", json={"inputs": "a"})
    assert answer.status_code == 200 and "x-gpu-bytes" not in answer.headers
    assert len([line for line in lines(caplog) if "no GPU" in line]) == 1


def test_serve_workers_get_resolved_provider(
    tmp_path: Path, runtime: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime([CUDA, CPU], UNUSABLE)
    told: list[Settings] = []
    monkeypatch.setattr(
        "service.workers.supervisor.supervise", lambda settings, _: told.append(settings)
    )
    launch.serve(Settings(model=tmp_path, port=0, workers=2))
    assert [settings.provider for settings in told] == ["cpu"]
    (line,) = capfd.readouterr().err.splitlines()
    assert line.endswith(f"no GPU is used, models are served on the CPU: {UNUSABLE}")


@pytest.mark.parametrize("workers", [1, 2])
def test_serve_warns_once_of_an_old_openvino(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The process that compares runtimes has no log."""
    session._warn_once.cache_clear()
    monkeypatch.setattr(openvino_runtime, "version", lambda name: "2026.1.0")
    monkeypatch.setattr(launch, "_serve", lambda settings: None)
    settings = {"model": tmp_path, "port": 0, "workers": workers, "provider": "cpu"}
    launch.serve(Settings.model_validate({**settings, "runtime": "onnxruntime"}))
    assert capfd.readouterr().err == ""
    for _ in range(2):
        launch.serve(Settings.model_validate({**settings, "runtime": "auto"}))
    (line,) = capfd.readouterr().err.splitlines()
    assert "OpenVINO 2026.1.0 is too old" in line and "pip install" in line
    session._warn_once.cache_clear()


@pytest.mark.process
def test_serve_cuda_without_provider_is_an_error(tmp_path: Path) -> None:
    if CUDA in require_runtime().get_available_providers():
        pytest.skip("this ONNX Runtime has the CUDA provider")
    command = [
        sys.executable,
        "-m",
        "attnserve",
        "serve",
        "--provider",
        "cuda",
        "--no-probe",
    ]
    done = subprocess.run(
        [*command, str(write_encoder(tmp_path / "tiny")), "--port", "0"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "this ONNX Runtime has no CUDA" in done.stderr
