"""Temporary folders; a new process deletes the folders of killed processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from time import time

__all__ = ["keep_folder", "temporary_folder"]

PREFIX = "attnserve-run-"


def temporary_folder(new_s: float = 60.0) -> Path:
    """Create a folder for this process; the caller deletes the folder.

    The function also deletes the folders of killed processes.

    Args:
        new_s: Seconds for which a folder without a lock may belong to a starting process.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            if path.stat().st_mtime < time() - new_s and _lock(path, exclusive=True):
                shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    keep_folder(folder)
    return folder


def keep_folder(folder: Path) -> None:
    """Keep other processes from deleting ``folder``, until this process ends.

    systemd-tmpfiles also leaves files of any age in a locked folder.
    """
    with suppress(OSError):
        _lock(folder, exclusive=False)


def _lock(folder: Path, *, exclusive: bool) -> bool:
    """Lock a folder; False for another user's folder, without locks, or if the lock is held.

    A process id in the name would not suffice, because containers with a shared folder have
    separate ids. The kernel releases a lock when the process ends. Owners hold a shared lock; an
    exclusive lock tests for owners.
    """
    if os.name != "posix":
        return False
    import fcntl

    file = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
    if os.fstat(file).st_uid != os.geteuid():
        os.close(file)
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return False
    if exclusive:
        os.close(file)
    return True
