"""Folder locks, which the kernel releases when the process ends."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["open_folder", "try_lock"]


@contextmanager
def open_folder(folder: Path | None) -> Generator[int | None]:
    """Open a folder for locking; None if the system does not support it."""
    descriptor = None
    if folder is not None and os.name == "posix":
        with suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(folder: int | None, *, without_locks: bool = True) -> bool:
    """Lock an open folder; False if another process or thread holds the lock.

    Args:
        without_locks: Return value on systems without locks.
    """
    if folder is None:
        return without_locks
    import fcntl

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return without_locks
    return True
