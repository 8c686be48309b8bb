"""Entry point of the command line; Ctrl-C during imports prints one line, not a traceback."""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Import and run the command line; returns the exit code."""
    try:
        from attnserve.cli.app import main as run

        return run(arguments)
    except KeyboardInterrupt:
        print("interrupted; no partial output was written", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
