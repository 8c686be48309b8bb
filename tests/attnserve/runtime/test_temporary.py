"""Temporary folders of killed processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import attnserve
from attnserve.runtime.temporary import keep_folder, temporary_folder

pytestmark = pytest.mark.skipif(os.name != "posix", reason="folders are locked on POSIX systems")

PROGRAM = """
import sys
from attnserve.runtime.temporary import temporary_folder
print(temporary_folder(), flush=True)
sys.stdin.read()
"""


OLD = -10.0
"""Every folder counts as old."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def other_process() -> tuple[subprocess.Popen[bytes], Path]:
    """Another process and its temporary folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(attnserve.__file__).parents[1],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().decode().strip())


@pytest.mark.process
def test_temporary_folder_deletes_those_of_killed_processes_only():
    process, theirs = other_process()
    (theirs / "weights").write_bytes(b"0" * 1000)
    with process:
        mine = temporary_folder(OLD)
        assert theirs.is_dir()
        process.send_signal(signal.SIGKILL)
    again = temporary_folder(OLD)
    assert not theirs.exists() and mine.is_dir() and again.is_dir()


@pytest.mark.process
def test_kept_folder_outlives_its_maker():
    """The workers of a killed supervisor still use its folder."""
    process, theirs = other_process()
    with process:
        keep_folder(theirs)
        process.send_signal(signal.SIGKILL)
    temporary_folder(OLD)
    assert theirs.is_dir()


def test_new_and_foreign_folders_are_left(folder: Path, monkeypatch: pytest.MonkeyPatch):
    (folder / "attnserve-run-a").mkdir()
    (folder / "other").mkdir()
    (folder / "attnserve-run-link").symlink_to(folder / "other")
    temporary_folder()
    assert (folder / "attnserve-run-a").is_dir()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    temporary_folder(OLD)
    assert (folder / "attnserve-run-a").is_dir() and (folder / "other").is_dir()
    monkeypatch.undo()
