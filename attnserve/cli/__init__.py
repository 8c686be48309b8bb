"""The command line: ``attnserve COMMAND``."""

from __future__ import annotations

from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code; ``arguments`` default to those of this process."""
    from attnserve.cli.app import main as run

    return run(arguments)
