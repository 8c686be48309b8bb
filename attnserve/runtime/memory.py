"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
from contextlib import suppress

__all__ = ["return_freed_memory"]


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    glibc keeps freed blocks of up to 32 MB for later use, and sessions free their weights in blocks
    of that size: of a session of 326 MB it kept 237 MB, which the next session did not reuse.
    """
    with suppress(OSError, AttributeError, TypeError):  # not glibc; Windows: TypeError
        ctypes.CDLL(None).malloc_trim(0)
