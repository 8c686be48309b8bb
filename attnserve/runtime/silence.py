"""Suppress the warnings of tools that report failures as exceptions."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ["silenced"]


@contextmanager
def silenced(level: int = logging.WARNING) -> Generator[None]:
    """Suppress Python warnings, and log messages of the whole process up to ``level``.

    The root logger gets a handler meanwhile, because tools that log to it would otherwise add one.
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
