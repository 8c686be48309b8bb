"""Functions in a child process: results, errors, crashes, time limits and environment."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from attnserve.runtime.isolation import Worker, WorkerCrashed, run_isolated
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidModel
from tests.errors import raises


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
        run_isolated(os.abort, stderr=subprocess.DEVNULL)
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
    kept = {"PATH": os.environ["PATH"], "GIVEN": "1"}
    assert run_isolated(os.getenv, "ATTNSERVE_SECRET", environment=kept) is None
    assert run_isolated(os.getenv, "GIVEN", environment=kept) == "1"


def test_working_folder_is_not_imported_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "random.py").write_text("raise SystemExit('imported from the working folder')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", os.pathsep)
    assert run_isolated(operator.add, 1, 2) == 3


def test_output_of_the_child_does_not_mix_with_answers(capfd: pytest.CaptureFixture[str]):
    assert run_isolated(os.system, "echo noise") == 0
    assert capfd.readouterr() == ("", "noise\n")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX limits")
def test_prepare_runs_first_in_the_child():
    import resource

    prepare = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (64, 64))
    assert run_isolated(resource.getrlimit, resource.RLIMIT_NOFILE, prepare=prepare) == [64, 64]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl is Linux's")
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
