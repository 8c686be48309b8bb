"""Temporary folders; a new process deletes the folders of killed processes."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from time import time

from attnserve.runtime.locks import open_folder, try_lock

__all__ = ["keep_folder", "temporary_folder"]

PREFIX = "attnserve-run-"


def temporary_folder(new_s: float = 60.0) -> Path:
    """Create a folder for this process; the caller deletes the folder.

    The function also deletes the folders of killed processes.

    Args:
        new_s: Seconds for which a folder without a lock may belong to a starting process.
    """
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError), open_folder(path, follow=False) as descriptor:
            is_old = path.stat().st_mtime < time() - new_s
            if is_old and _is_own(descriptor) and try_lock(descriptor, without_locks=False):
                shutil.rmtree(path, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    keep_folder(folder)
    return folder


def keep_folder(folder: Path) -> None:
    """Keep other processes from deleting ``folder``, until this process ends.

    systemd-tmpfiles also leaves files of any age in a locked folder. A process id in the name would
    not suffice, because containers with a shared folder have separate ids.
    """
    try_lock(_kept.enter_context(open_folder(folder, follow=False)), is_shared=True)


_kept = ExitStack()
"""The locked folders of this process."""


def _is_own(descriptor: int | None) -> bool:
    """Whether an open folder is this user's."""
    return descriptor is not None and os.fstat(descriptor).st_uid == os.geteuid()
