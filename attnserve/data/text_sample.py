"""Collect a sample of served texts in a file, to calibrate on."""

from __future__ import annotations

import hashlib
import os
import random
import re
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["TextSample"]

MAX_BYTES = 10_000_000
"""Maximum size of the file: about 100,000 sentences."""

PRIVATE = re.compile(r"(?P<mail>(?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)++)|\d+")
"""Numbers and mail addresses, which are masked. Matching takes linear time: a name starts at a name
boundary, without backtracking."""


class TextSample:
    """Appends random texts to a file, one per line. Several processes may share the file.

    The file is opened for each write, so that it can be moved away, and writing continues when a
    full disk has space again. Only the owner of the file can read it (mode 0600).

    Args:
        path: The file; it is created if missing.
        rate: The share of texts to keep.
        mask: Replace numbers by numbers of the same length, and mail addresses. Equal numbers and
            addresses stay equal in one process; the key of the hash is random and never stored.
    """

    def __init__(self, path: Path, rate: float, *, mask: bool = False) -> None:
        self.path, self._rate = path, rate
        self._key = os.urandom(32) if mask else None

    def choose(self, texts: Iterable[object]) -> list[str]:
        """A random choice of those items that are texts."""
        return [text for text in texts if isinstance(text, str) and random.random() < self._rate]

    def write(self, texts: Sequence[str]) -> None:
        """Append texts, unless the file has reached ``MAX_BYTES``.

        Raises:
            OSError: The file cannot be written, is not a regular file, or the disk is full.
        """
        lines = (" ".join(text.split()) for text in map(self._masked, texts))
        content = "".join(f"{line}\n" for line in lines if line).encode(errors="replace")
        # O_NONBLOCK: a pipe that nobody reads must not block.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | getattr(os, "O_NONBLOCK", 0)
        file = os.open(self.path, flags, 0o600)
        try:
            state = os.fstat(file)
            if not stat.S_ISREG(state.st_mode):
                raise OSError(f"{self.path}: not a regular file")
            if state.st_mode & 0o077 and os.name == "posix":
                os.fchmod(file, 0o600)
            if content and state.st_size + len(content) <= MAX_BYTES:
                os.write(file, content)  # one call: lines of several processes do not mix
        finally:
            os.close(file)

    def _masked(self, text: str) -> str:
        return text if self._key is None else PRIVATE.sub(self._mask, text)

    def _mask(self, match: re.Match[str]) -> str:
        digest = hashlib.blake2b(match[0].encode(errors="replace"), key=self._key or b"").digest()
        if match["mail"]:
            return f"{digest.hex()[:8]}@example.com"
        digits = str(int.from_bytes(digest)).zfill(160)
        return (digits * (len(match[0]) // 160 + 1))[-len(match[0]) :]
