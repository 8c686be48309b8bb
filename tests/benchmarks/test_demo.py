"""Run the demo."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.process
@pytest.mark.process
def test_demo_succeeds_within_four_minutes(minilm_folder: Path):
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.demo"],
        cwd=ROOT, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "6 certified" in done.stdout
    assert "served R = 128" in done.stdout
