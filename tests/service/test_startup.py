"""A server while its models are loaded, and its end if that fails or is stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import httpx2
import psutil
import pytest

import service
from tests.service.conftest import until
from tests.service.processes import starting
from tests.service.tiny import FOREVER, write_encoder, write_model

pytestmark = pytest.mark.process


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_sigterm_during_the_imports_ends_the_server(tmp_path: Path) -> None:
    """As process 1 of a container it has no default action: the signal would be lost."""
    model = write_encoder(tmp_path / "tiny")

    def has_handler(process: subprocess.Popen[bytes]) -> bool:
        status = Path(f"/proc/{process.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)

    for delay in (0, 0.05, 0.2, 0.5):
        with subprocess.Popen(
            [sys.executable, "-m", "attnserve", "serve", str(model), "--port", "0"],
            cwd=Path(service.__file__).parents[1],
            stderr=subprocess.PIPE,
        ) as process:
            until(lambda: has_handler(process))
            sleep(delay)
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) in (128 + signal.SIGTERM, 0)
            assert process.stderr is not None
            assert b"Traceback" not in process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_later_import_ends_the_program(tmp_path: Path, number: int) -> None:
    """An extension may crash if its import is interrupted, or report that it is missing."""
    package = tmp_path / "onnxruntime"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import os\n"
        "try:\n"
        f"    os.kill(os.getpid(), {int(number)})\n"
        "except BaseException:\n"
        "    raise ImportError('interrupted')\n"
    )
    command = [sys.executable, "-m", "attnserve", "serve", write_encoder(tmp_path / "tiny")]
    paths = {"PYTHONPATH": f"{tmp_path}:{Path(service.__file__).parents[1]}"}
    result = subprocess.run(
        command, env={**os.environ, **paths}, capture_output=True, text=True, check=False
    )
    assert result.returncode == 128 + number, result.stderr
    assert result.stderr.count("\n") == (number == signal.SIGINT)


def is_live(address: str) -> bool:
    with suppress(httpx2.TransportError):
        return httpx2.get(f"{address}/v2/health/live").status_code == 200
    return False


@pytest.mark.parametrize("workers", ["1", "2"])
def test_server_that_loads_is_live_and_not_ready_until_it_is_stopped(
    tmp_path: Path, workers: str
) -> None:
    model = tmp_path / "model.onnx"
    write_model(model, FOREVER)
    with starting(model, "--workers", workers) as (address, process):
        until(lambda: is_live(address))
        assert httpx2.get(f"{address}/v2/health/ready").status_code == 503
        for path in ("/texts/embed", "/v2/models/any/infer", "/v2/repository/models/any/load"):
            answer = httpx2.post(f"{address}{path}", json={"inputs": "a"})
            assert answer.status_code == 503 and answer.headers["retry-after"]
            assert "the models are being loaded" in answer.json()["error"]
        checks = psutil.Process(process.pid).children(recursive=True)
        stopped = monotonic()
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        assert monotonic() - stopped < 60  # not the 300 s of the check
        assert process.returncode == (128 + signal.SIGTERM if workers == "1" else 0)
        psutil.wait_procs(checks, timeout=10)
        assert not any(one.is_running() for one in checks)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("workers", ["1", "2"])
def test_server_that_cannot_load_was_live_and_exits_with_the_error(
    tmp_path: Path, workers: str
) -> None:
    model = tmp_path / "model.onnx"
    write_model(model, FOREVER)
    with starting(model, "--workers", workers, "--probe-timeout-s", "5") as (address, process):
        until(lambda: is_live(address))
        assert process.wait(60) == 2
        assert process.stderr is not None
        *_, last, fix = process.stderr.read().splitlines()
        assert last.startswith("error: ") and "did not load and run within 5 s" in last
        assert "--probe-timeout-s" in fix


def test_server_becomes_ready_after_it_was_live(tmp_path: Path) -> None:
    with starting(write_encoder(tmp_path / "tiny")) as (address, process):
        until(lambda: is_live(address))
        until(lambda: httpx2.get(f"{address}/v2/health/ready").status_code == 200)
        assert httpx2.post(f"{address}/texts/embed", json={"inputs": "a"}).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
