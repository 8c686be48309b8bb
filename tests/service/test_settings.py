from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from attnserve.cli import app as cli
from attnserve.runtime.cuda import Cuda
from graph_passes.errors import InvalidArgument
from service.settings import Settings
from tests.errors import raises
from tests.service.conftest import HeldRuns
from tests.service.tiny import write_encoder


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What the command line would serve."""
    seen: list[Settings] = []
    monkeypatch.setattr("service.launch.serve", seen.append)
    return seen


def test_settings_options_override_environment_and_defaults(
    told: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSERVE_PORT", "9000")
    monkeypatch.setenv("ATTNSERVE_MAX_QUEUE", "7")
    assert cli.main(["serve", "model", "--port", "9001", "--no-probe", "--no-rewrite"]) == 0
    (settings,) = told
    assert settings.model == Path("model")
    assert (settings.port, settings.max_queue) == (9001, 7)
    assert (settings.probe, settings.rewrite) == (False, False)
    assert (settings.host, settings.timeout_ms) == ("127.0.0.1", 30_000)
    assert Settings(model=Path("model")).rewrite


def test_serve_options_set_their_settings(told: list[Settings], tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": 1,
        "provider": "cuda",
        "threads": 2,
        "concurrency": 3,
        "max_batch_tokens": 4,
        "max_wait_ms": 5.0,
        "max_queue": 6,
        "timeout_ms": 7.0,
        "api_keys_file": tmp_path / "keys",
        "cors_origins": "a, b",
        "probe_timeout_s": 8.0,
        "drain_delay_s": 9.0,
    }
    given = [
        part for name, v in options.items() for part in (f"--{name.replace('_', '-')}", str(v))
    ]
    assert cli.main(["serve", "model", *given, "--quiet"]) == 0
    (settings,) = told
    options["cors_origins"] = ("a", "b")
    assert {name: getattr(settings, name) for name in options} == options
    assert settings.log_level == "error"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"provider": "tpu"}, "`provider` is 'tpu': expected auto, cpu, cuda"),
        ({"timeout_ms": 0}, "`timeout_ms` is 0: expected a number, more than 0"),
        ({"cuda_graphs": -1}, "`cuda_graphs` is -1: expected an integer, at least 0"),
        ({"gpu_memory_bytes": 0}, "set `gpu_memory_bytes` or ATTNSERVE_GPU_MEMORY_BYTES"),
        ({"max_batch_tokens": 0}, "set `max_batch_tokens` or ATTNSERVE_MAX_BATCH_TOKENS"),
    ],
)
def test_invalid_setting_is_refused(given: dict[str, Any], text: str) -> None:
    with raises(InvalidArgument, "settings.invalid", text):
        Settings(model="m", **given)


def test_batch_limits_default_to_those_of_provider(tmp_path: Path) -> None:
    cpu, cuda = (Settings(model=tmp_path, provider=name) for name in ("cpu", "cuda"))
    assert cpu.batch_tokens(4) < cuda.batch_tokens(512) == 16_384
    assert cpu.batch_tokens(4) < cpu.batch_tokens(40)
    assert cpu.overhead_tokens(None) < cuda.overhead_tokens(None)
    assert cpu.overhead_tokens(31) == 31
    chosen = Settings(model=tmp_path, max_batch_tokens=5, run_overhead_tokens=0)
    assert (chosen.batch_tokens(31), chosen.overhead_tokens(31)) == (5, 0)


def test_batch_limits_of_auto_provider_are_those_of_cpu(tmp_path: Path) -> None:
    undecided = Settings(model=tmp_path)
    assert undecided.provider == "auto"
    assert undecided.batch_tokens(4) == Settings(model=tmp_path, provider="cpu").batch_tokens(4)


def test_gpu_settings_are_read_from_environment(
    told: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"GPU_MEMORY_BYTES": "7", "CUDA_GRAPHS": "5", "TF32": "true"}.items():
        monkeypatch.setenv(f"ATTNSERVE_{name}", value)
    assert cli.main(["serve", "model"]) == 0
    (settings,) = told
    assert (settings.cuda, settings.cuda_graphs) == (Cuda(tf32=True, memory_bytes=7), 5)
    assert Settings.model_fields["cuda_graphs"].default == 0


def test_invalid_environment_variable_is_named_in_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    """No option is named that does not exist."""
    monkeypatch.setenv("ATTNSERVE_CUDA_GRAPHS", "many")
    with raises(InvalidArgument, "settings.invalid", "an integer, at least 0") as caught:
        Settings(model=Path("model"))
    assert caught.value.fix == "set ATTNSERVE_CUDA_GRAPHS"


def test_model_limits_hold_for_their_model_alone(
    start: Callable[..., TestClient], tmp_path: Path, hold: Callable[[], HeldRuns]
) -> None:
    for name in ("busy", "other"):
        write_encoder(tmp_path / name)
    limits = {"busy": {"max_queue": 0, "max_batch_tokens": 3, "threads": 1}}
    client = start(tmp_path, model_limits=limits, max_queue=7)
    busy, other = (client.app.state.repository.engine(name) for name in ("busy", "other"))  # type: ignore[attr-defined]
    assert (busy.batcher.max_queue, other.batcher.max_queue) == (0, 7)
    assert busy.batcher.queue.budget == 3 < 512 <= other.batcher.queue.budget
    loader = client.app.state.repository.loader  # type: ignore[attr-defined]
    # Graphs and runtimes are compared with the threads that serve the model.
    assert (
        loader.checker_of("busy").device.threads == 1 != loader.checker_of("other").device.threads
    )
    held = hold()
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.post, "/texts/embed", json={"inputs": "a", "model": "busy"})
        held.wait()
        assert client.post("/texts/embed", json={"inputs": "a", "model": "busy"}).status_code == 429
        second = threads.submit(client.post, "/texts/embed", json={"inputs": "a", "model": "other"})
        held.wait(2)  # the limits of one model leave the other alone
        held.go.set()
        assert first.result().status_code == second.result().status_code == 200


def test_model_limits_are_json_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNSERVE_MODEL_LIMITS", '{"one": {"concurrency": 2}}')
    settings = Settings(model=tmp_path)
    assert settings.for_model("one").concurrency == 2 and settings.for_model("two") is settings
    # Workers receive their settings as JSON.
    assert Settings(**settings.model_dump(mode="json")).for_model("one") == settings.for_model(
        "one"
    )
    for wrong in ('{"one": {"max_quue": 2}}', '{"one": {"max_queue": -1}}', "{", "3"):
        monkeypatch.setenv("ATTNSERVE_MODEL_LIMITS", wrong)
        with raises(InvalidArgument, "settings.invalid", "model_limits") as error:
            Settings(model=tmp_path)
        assert "ATTNSERVE_MODEL_LIMITS" in error.value.fix


def test_serve_takes_no_option_that_it_ignores(
    told: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "model", "--json"]) == 2
    assert "--json" in capsys.readouterr().err and not told


def test_serve_leaves_the_threads_of_libraries_to_the_environment(
    told: list[Settings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.main(["serve", "model", "--threads", "1"]) == 0
    assert "OMP_NUM_THREADS" not in os.environ and told[0].threads == 1


def test_missing_model_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNSERVE_API_KEYS", "topsecret")
    with raises(InvalidArgument, "settings.invalid", "`model` is not given") as caught:
        Settings.model_validate({})
    assert "topsecret" not in str(caught.value)
