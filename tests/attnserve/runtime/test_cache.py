"""Private folders in the user's cache folder."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from attnserve.runtime.cache import (
    private_folder,
    read_private,
    remove_older,
    write_atomically,
)

pytestmark = pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")


def test_private_folder_is_made_for_this_user_alone(tmp_path: Path):
    folder = private_folder(tmp_path / "made" / "private")
    assert folder is not None and stat.S_IMODE(folder.stat().st_mode) == 0o700
    write_atomically(folder / "file", b"content")
    assert stat.S_IMODE((folder / "file").stat().st_mode) == 0o600
    assert read_private(folder / "file") == b"content"
    assert [path.name for path in folder.iterdir()] == ["file"]


def test_private_folder_that_others_may_write_is_refused(tmp_path: Path):
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    assert private_folder(folder) is None
    (tmp_path / "link").symlink_to(private_folder(tmp_path / "own") or "")
    assert private_folder(tmp_path / "link") is None
    (tmp_path / "file").touch()
    assert private_folder(tmp_path / "file" / "below") is None


def test_only_old_files_of_the_pattern_are_removed(tmp_path: Path):
    for name, days in (("old.pt", 31), ("new.pt", 29), ("old.txt", 31)):
        file = tmp_path / name
        file.touch()
        then = time.time() - 86400 * days
        os.utime(file, (then, then))
    remove_older(tmp_path, "*.pt", 30)
    assert {file.name for file in tmp_path.iterdir()} == {"new.pt", "old.txt"}
    remove_older(tmp_path / "missing", "*.pt", 30)


def test_read_private_ignores_what_others_could_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "file"
    file.write_bytes(b"content")
    file.chmod(0o600)
    assert read_private(file) == b"content"
    (tmp_path / "link").symlink_to(file)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in ("link", "pipe", "missing", "."):
        assert read_private(tmp_path / name) is None
    file.chmod(0o622)
    assert read_private(file) is None
    file.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert read_private(file) is None
