"""Checkpoints: files of the user's cache folder from which interrupted work continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from attnserve.runtime.cache import (
    cache_folder,
    digest,
    private_folder,
    read_private,
    remove_older,
    writing_atomically,
)

__all__ = ["Checkpoint", "Checkpoints"]

log = logging.getLogger("attnserve")

KEPT_DAYS = 30
"""Days after which a checkpoint that was not continued is deleted."""


class Checkpoint:
    """The state of unfinished work in a private file.

    A file that cannot be read, or that another user could have written, counts as missing. The
    first failure to write the file is logged as a warning.

    Args:
        folder: The name of its folder in the cache folder.
        key: All inputs of the work, as a value that JSON can represent.
    """

    def __init__(self, folder: str, key: Any) -> None:
        self._folder = cache_folder() / folder
        self._path = self._folder / digest(key)
        self._is_lost = False

    def read(self) -> bytes | None:
        """The stored state; None without a valid file."""
        remove_older(self._folder, "*", KEPT_DAYS)
        return read_private(self._path)

    def write(self, write: Callable[[IO[bytes]], object]) -> None:
        """Replace the stored state by the content that a function writes to a file."""
        try:
            if private_folder(self._folder) is None:
                raise PermissionError(f"{self._folder} cannot be written")
            with writing_atomically(self._path) as file:
                write(file)
        except (OSError, RuntimeError) as error:  # torch raises a RuntimeError for a full disk
            if not self._is_lost:
                log.warning("warning: without a checkpoint, it could not continue: %s", error)
            self._is_lost = True

    def remove(self) -> None:
        """Delete the file."""
        with suppress(OSError):
            self._path.unlink(missing_ok=True)


class Checkpoints:
    """All checkpoints of a command, which are deleted together once its result is written."""

    def __init__(self) -> None:
        self._opened: list[Checkpoint] = []

    def open(self, folder: str, key: Any) -> Checkpoint:
        """The checkpoint with this key, which may exist; see ``Checkpoint``."""
        self._opened.append(Checkpoint(folder, key))
        return self._opened[-1]

    def remove(self) -> None:
        for checkpoint in self._opened:
            checkpoint.remove()
