"""Functions in a child process: results, errors, crashes, time limits and environment."""

from __future__ import annotations

import json
import operator
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import attnserve
import graph_passes
import service
from attnserve.runtime.isolation import (
    Worker,
    WorkerCrashed,
    allowed_environment,
    limit_process,
    run_isolated,
)
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel
from tests.errors import raises

pytestmark = pytest.mark.process


def test_run_isolated_returns_the_result_of_another_process():
    assert run_isolated(operator.add, [1, "a"], [None]) == [1, "a", None]
    assert run_isolated(os.getpid) != os.getpid()


def test_worker_keeps_its_object_between_calls():
    with Worker(list, [1]) as worker:
        worker.call("append", 2)
        assert worker.call("__len__") == 2
        process = worker.process
    assert process.poll() is not None


def test_attnserve_error_is_raised_with_type_and_code(tmp_path: Path):
    with raises(InvalidModel, "session.graph_refused"):
        (tmp_path / "bad.onnx").write_bytes(b"no model")
        run_isolated(open_session, tmp_path / "bad.onnx")


def test_other_error_keeps_the_worker_alive():
    with Worker(list) as worker:
        with raises(WorkerCrashed, "isolation.crashed", "IndexError: pop from empty list"):
            worker.call("pop")
        assert worker.call("__len__") == 0


def test_crash_names_the_signal():
    with raises(WorkerCrashed, "isolation.crashed", "SIGABRT") as caught:
        run_isolated(os.abort)
    assert isinstance(caught.value, WorkerCrashed) and caught.value.status == -6


def test_exit_names_the_status():
    with raises(WorkerCrashed, "isolation.crashed", "exit status 3"):
        run_isolated(os._exit, 3)


def test_time_limit_ends_the_child():
    start = time.monotonic()
    with raises(WorkerCrashed, "isolation.timeout", "0.5 s") as caught:
        run_isolated(time.sleep, 60, timeout_s=0.5)
    assert isinstance(caught.value, WorkerCrashed) and caught.value.timed_out
    assert time.monotonic() - start < 30


def test_environment_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ATTNSERVE_SECRET", "secret")
    assert run_isolated(os.getenv, "ATTNSERVE_SECRET") == "secret"
    kept = {"PATH": os.environ["PATH"], "EXTRA": "1"}
    assert run_isolated(os.getenv, "ATTNSERVE_SECRET", environment=kept) is None
    assert run_isolated(os.getenv, "EXTRA", environment=kept) == "1"


def test_working_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    assert run_isolated(operator.add, 1, 2) == 3


@pytest.mark.parametrize(("silent", "output"), [(False, ("noise\n", "noise\n")), (True, ("", ""))])
def test_output_of_the_child_does_not_mix_with_answers(
    silent: bool, output: tuple[str, str], capfd: pytest.CaptureFixture[str]
):
    """Standard output of a child goes to standard error."""
    assert run_isolated(os.system, "echo noise", silent=silent) == 0
    assert run_isolated(os.system, "echo noise >&2", silent=silent) == 0
    assert capfd.readouterr() == ("", "".join(output))


def test_silent_crash_quotes_the_end_of_the_output():
    with raises(WorkerCrashed, "isolation.crashed", "exit status 1: ") as caught:
        run_isolated(sys.exit, "x" * 100_000 + " no driver", silent=True)
    assert isinstance(caught.value, WorkerCrashed)
    assert caught.value.what.endswith("x no driver") and len(caught.value.what) < 400


def test_answer_that_is_no_json_object_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho 3\nexit 4\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with raises(WorkerCrashed, "isolation.crashed", "exit status 4"):
        run_isolated(os.getpid)


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_prepare_runs_first_in_the_child():
    import resource

    prepare = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    assert run_isolated(resource.getrlimit, resource.RLIMIT_NOFILE, prepare=prepare) == [64, 64]


@pytest.mark.skipif(os.name != "posix", reason="signals can be blocked on POSIX only")
def test_sigint_while_the_child_starts_is_ignored():
    def interrupt(child: subprocess.Popen[bytes]) -> None:
        child.send_signal(signal.SIGINT)

    assert run_isolated(operator.add, 1, 2, on_start=interrupt) == 3


@pytest.mark.skipif(os.name != "posix", reason="signals cannot be blocked on Windows")
def test_interrupt_while_the_child_is_started_ends_it(monkeypatch: pytest.MonkeyPatch):
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        Worker(list)
    assert started[0].returncode == -signal.SIGKILL


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl exists on Linux only")
def test_child_ends_with_its_parent():
    script = (
        "import os, time\n"
        "from attnserve.runtime.isolation import Worker\n"
        "print(Worker(list).process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    pid = int(done.stdout)
    for _ in range(100):
        status = Path(f"/proc/{pid}/stat")
        if not status.exists() or status.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail("the child still runs")


IMPORTS = """
import json, random, sys
import attnserve, graph_passes, service
files = [module.__file__ for module in (random, attnserve, graph_passes, service)]
print(json.dumps([files, sys.path]))
"""


@pytest.mark.parametrize(
    "python_path", [None, "", ":", ".", "sub", "{kept}:", ":{kept}", "{kept}:/no/such"]
)
def test_allowed_environment_python_path_has_no_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python_path: str | None
) -> None:
    kept, current = tmp_path / "kept", tmp_path / "current"
    kept.mkdir()
    for folder in (current, current / "sub"):
        folder.mkdir()
        for name in ("random", "attnserve", "service"):
            (folder / f"{name}.py").write_text("raise SystemExit('executed')")
    monkeypatch.chdir(current)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if python_path is not None:
        monkeypatch.setenv("PYTHONPATH", python_path.format(kept=kept))
    command = [sys.executable, "-P", "-c", IMPORTS]
    done = subprocess.run(command, env=allowed_environment(), check=True, capture_output=True)
    files, path = json.loads(done.stdout)
    here = (random, attnserve, graph_passes, service)
    assert files == [module.__file__ for module in here]
    assert (str(kept) in path) is ("kept" in (python_path or ""))
    assert all(Path(entry).is_absolute() for entry in path)
    assert not {str(current), str(current / "sub")} & set(path)


def test_allowed_environment_other_search_paths_have_no_current_folder(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("PATH", "/usr/bin::bin")
    monkeypatch.setenv("LD_LIBRARY_PATH", ":")
    allowed = allowed_environment()
    assert allowed["PATH"] == "/usr/bin" and "LD_LIBRARY_PATH" not in allowed


def test_allowed_environment_passes_settings_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch,
):
    passed = {"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "LC_ALL", "LANG", "TMPDIR", "TZ", "HOME"}
    passed |= {"ATTNSERVE_CACHE", "XDG_CACHE_HOME", "ORT_DISABLE_TELEMETRY"}
    secret = {"AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "ATTNSERVE_API_KEYS", "HF_TOKEN"}
    for name in (*passed, *secret, "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.setenv(name, "value")
    allowed = allowed_environment()
    assert passed <= allowed.keys()
    assert not (secret | {"OTEL_EXPORTER_OTLP_HEADERS"}) & allowed.keys()
    assert allowed_environment("OTEL_").keys() - allowed.keys() == {"OTEL_EXPORTER_OTLP_HEADERS"}


MAPPED = """
import mmap
with open({path!r}, "rb") as file:
    maps = []
    for _ in range(3):
        maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
assert maps[2][-1] == 0
try:
    bytearray(1 << 30)
except MemoryError:
    raise SystemExit(7)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit maps")
def test_memory_limit_counts_allocations_and_no_files_that_are_read(tmp_path: Path):
    """Readers of ONNX files map a file once for each of its weights."""
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(1 << 30)
    code = MAPPED.format(path=str(tmp_path / "weights"))
    with pytest.raises(WorkerCrashed) as caught:
        run_isolated(exec, code, prepare=partial(limit_process, 900 << 20), silent=True)
    assert caught.value.status == 7
