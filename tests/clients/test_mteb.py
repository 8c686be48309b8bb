"""The tests of ``attnserve evaluate --mteb`` pass in an environment that has the package mteb."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.clients.environments import environment

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests" / "attnserve" / "integrations" / "test_mteb.py"


@pytest.mark.clients
def test_no_test_with_mteb_is_skipped(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    writes = pytestconfig.getoption("--write-clients")
    with environment("mteb", tmp_path, write=writes) as (python, _):
        outside = {name: x for name, x in os.environ.items() if not name.startswith("PYTEST_")}
        done = subprocess.run(
            [python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", TESTS],
            cwd=ROOT, env=outside, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
        assert " passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-1000:]
