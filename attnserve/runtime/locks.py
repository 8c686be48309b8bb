"""Folder locks, which the kernel releases when the process ends."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["open_folder", "try_lock"]


@contextmanager
def open_folder(folder: Path | None, *, follow: bool = True) -> Generator[int | None]:
    """Open a folder for locking; None if the system does not support it.

    Args:
        follow: Whether the folder may be a symbolic link.
    """
    descriptor = None
    if folder is not None and os.name == "posix":
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
        with suppress(OSError):
            descriptor = os.open(folder, flags)
    try:
        yield descriptor
    finally:
        if descriptor is not None:
            os.close(descriptor)


def try_lock(folder: int | None, *, is_shared: bool = False, without_locks: bool = True) -> bool:
    """Lock an open folder; False if another process or thread holds the lock.

    Args:
        is_shared: Whether several processes may hold the lock; an exclusive lock tests for them.
        without_locks: Return value on systems without locks.
    """
    if folder is None:
        return without_locks
    import fcntl

    try:
        fcntl.flock(folder, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network file systems
        return without_locks
    return True
