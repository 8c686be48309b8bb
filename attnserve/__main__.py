"""Entry point of the command line: signals are handled before anything large is imported.

Ctrl-C prints one line, not a traceback. SIGTERM ends the program also as process 1 of a container,
where it has no default action.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Import and run the command line; returns the exit code."""
    try:
        # An exception could be lost, or end an import with a crash.
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
        from attnserve.cli.app import main as run

        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        code = run(arguments)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the output is complete: keep its exit code
        return code
    except KeyboardInterrupt:
        print("interrupted: no partial output was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
