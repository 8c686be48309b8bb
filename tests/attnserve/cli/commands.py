"""Run the command line in this process or in a child process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[3]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)


Cli = Callable[..., Outcome]


def refused(outcome: Outcome, value: str) -> None:
    """Expect exit code 2, an empty stdout, and an error of 2 or 3 lines that matches ``value``."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert 2 <= len(lines) <= 3, outcome.err
    assert lines[0].startswith("error: ") and lines[1].startswith("  ")
    assert re.search(value, outcome.err), outcome.err
    assert "Traceback" not in outcome.err and "unexpected" not in outcome.err


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -c``: the code, then its arguments."""
    command = [sys.executable, "-c", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def without_torch(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command in a process in which torch cannot be imported."""
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from attnserve.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    return python(code, *arguments)


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnserve", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)
