"""Delay the signals that end a program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

__all__ = ["signals_delayed"]


@contextmanager
def signals_delayed() -> Generator[None]:
    """Delay Ctrl-C and SIGTERM until the end of the context, in the main thread.

    Python calls handlers in the main thread only; other threads are never interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers: dict[int, Any] = {
        number: signal.signal(number, lambda number, frame: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came:
            signal.raise_signal(number)
