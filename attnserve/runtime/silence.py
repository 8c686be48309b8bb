"""Suppress the warnings of tools, which report failures as exceptions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["silenced"]


@contextmanager
def silenced(level: int = logging.WARNING) -> Generator[None]:
    """Suppress Python warnings, and log messages of the whole process up to ``level``.

    Tools that log to the root logger would add a handler to it, so it has one here.
    """
    root = logging.getLogger()
    handler = logging.NullHandler()
    disabled = root.manager.disable
    root.addHandler(handler)
    logging.disable(max(disabled, level))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.removeHandler(handler)
