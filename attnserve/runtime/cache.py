"""The user's cache folder, and private folders in it whose files can be trusted."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

__all__ = [
    "cache_folder",
    "digest",
    "private_folder",
    "read_private",
    "remove_older",
    "write_atomically",
    "writing_atomically",
]

CACHE_FOLDERS = {"win32": ("LOCALAPPDATA", "AppData/Local"), "darwin": ("", "Library/Caches")}
"""The variable with the user's cache folder, and the folder in the home directory, by platform."""


def cache_folder() -> Path:
    """The folder $ATTNSERVE_CACHE, or one in the user's cache folder. The folder may not exist.

    A container may run under a user id without a home directory. The result is then a temporary
    folder, which is deleted when this process ends.
    """
    if given := os.environ.get("ATTNSERVE_CACHE"):
        return Path(given)
    variable, inside = CACHE_FOLDERS.get(sys.platform, ("XDG_CACHE_HOME", ".cache"))
    if folder := os.environ.get(variable):
        return Path(folder) / "attnserve"
    try:
        return Path.home() / inside / "attnserve"
    except RuntimeError:  # no home directory
        return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="attnserve-")


def private_folder(path: Path) -> Path | None:
    """Return ``path``, created if missing; None if it is not writable, or writable for others."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat()
    except OSError:
        return None
    usable = stat.S_ISDIR(info.st_mode) and _is_own(info) and os.access(path, os.W_OK)
    return path if usable else None


def read_private(path: Path) -> bytes | None:
    """Read a file that no other user could have written; None without such a file."""
    try:
        with open(path, "rb", opener=_without_following) as file:
            info = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(info.st_mode) and _is_own(info) else None
    except OSError:
        return None


def remove_older(folder: Path, pattern: str, days: float) -> None:
    """Delete files that were not written for this number of days."""
    oldest = time.time() - 86400 * days
    for path in folder.glob(pattern):
        with suppress(OSError):
            if path.lstat().st_mtime < oldest:
                path.unlink()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace ``path`` by a file that only this user can read; its folder must exist.

    Raises:
        OSError: The file cannot be written.
    """
    with writing_atomically(path) as file:
        file.write(content)


@contextmanager
def writing_atomically(path: Path) -> Generator[IO[bytes]]:
    """Open a file that replaces ``path`` when the context succeeds; see ``write_atomically``."""
    written = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False, suffix=".new") as file:
            written = Path(file.name)
            yield file
        written.replace(path)
    except BaseException:
        if written is not None:
            with suppress(OSError):
                written.unlink()
        raise


def _is_own(info: os.stat_result) -> bool:
    """Whether a file is this user's, and no other user may write to it."""
    if sys.platform == "win32":  # folders of a user profile are private
        return True
    return info.st_uid == os.geteuid() and not info.st_mode & 0o022


def _without_following(path: str, flags: int) -> int:
    """Open a file, but no symbolic link; do not wait for a named pipe of another user."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def digest(record: Any) -> str:
    """A short checksum of a value that JSON can represent."""
    text = json.dumps(record, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]
