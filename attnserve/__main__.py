"""Entry point of the command line: signals are handled before anything large is imported.

Ctrl-C prints one line, not a traceback. SIGTERM ends the program also as process 1 of a container,
where it has no default action.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from threading import Timer
from types import FrameType

from attnserve.cli import INTERRUPTED

__all__ = ["main"]

REPEAT_S = 0.05
"""The time after which an ignored signal is repeated."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Import and run the command line; returns the exit code."""
    try:
        signal.signal(signal.SIGTERM, _end)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _end)
        sys.unraisablehook = _repeat
        from attnserve.cli.app import main as run

        code = run(arguments)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the output is complete: keep its exit code
        return code
    except KeyboardInterrupt:
        print(INTERRUPTED, file=sys.stderr)
        return 128 + signal.SIGINT


def _end(number: int, frame: FrameType | None) -> None:
    """End at once during an import: an exception could crash it, or be taken for its failure."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            if number == signal.SIGINT:
                os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(128 + number)
        frame = frame.f_back
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + number)


def _repeat(ignored: sys.UnraisableHookArgs) -> None:
    """Repeat a signal that came during a finalizer, whose exceptions Python ignores."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt | SystemExit):
        sys.__unraisablehook__(ignored)
        return
    is_interrupt = isinstance(ignored.exc_value, KeyboardInterrupt)
    number = signal.SIGINT if is_interrupt else signal.SIGTERM
    timer = Timer(REPEAT_S, os.kill, (os.getpid(), number))  # after the finalizer
    timer.daemon = True
    timer.start()


if __name__ == "__main__":
    sys.exit(main())
