"""Checkpoints in the user's cache folder."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from attnserve.runtime.checkpoint import Checkpoint


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNSERVE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def save(checkpoint: Checkpoint, content: bytes) -> None:
    checkpoint.write(lambda file: file.write(content))


def test_checkpoint_is_read_by_an_equal_key_until_it_is_removed():
    first = Checkpoint("work", {"a": [1, 2]})
    assert first.read() is None
    save(first, b"one")
    save(first, b"two")
    assert Checkpoint("work", {"a": (1, 2)}).read() == b"two"
    assert Checkpoint("work", {"a": [1]}).read() is None
    assert Checkpoint("other", {"a": [1, 2]}).read() is None
    first.remove()
    first.remove()
    assert first.read() is None


def test_checkpoint_that_cannot_be_written_gives_one_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
):
    cache.write_text("no folder")
    checkpoint = Checkpoint("work", "a")
    with caplog.at_level("WARNING", logger="attnserve"):
        for _ in range(2):
            save(checkpoint, b"state")
    assert len(caplog.records) == 1 and "could not continue" in caplog.text
    assert checkpoint.read() is None


def test_checkpoint_keeps_the_last_state_if_a_write_fails(caplog: pytest.LogCaptureFixture):
    def fail(_: object) -> None:
        raise RuntimeError("no space left on device")

    checkpoint = Checkpoint("work", "a")
    save(checkpoint, b"state")
    checkpoint.write(fail)
    assert checkpoint.read() == b"state" and "no space left" in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="owners and modes are those of POSIX")
def test_checkpoint_that_others_may_write_or_nobody_continued_counts_as_missing(cache: Path):
    checkpoint = Checkpoint("work", "a")
    save(checkpoint, b"state")
    (file,) = (cache / "work").iterdir()
    file.chmod(0o666)
    assert checkpoint.read() is None
    file.chmod(0o600)
    assert checkpoint.read() == b"state"
    then = time.time() - 86400 * 31
    os.utime(file, (then, then))
    assert checkpoint.read() is None and not file.exists()
