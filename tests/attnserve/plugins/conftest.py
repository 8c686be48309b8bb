"""Packages that add parts of the product from outside, with an entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.files import write_lines
from tests.service.processes import serving

ROOT = Path(__file__).parents[3]

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of processes for which the package "fake" is installed, without code yet."""
    site = tmp_path / "site"
    (site / "fake-1.0.dist-info").mkdir(parents=True)
    (site / "fake-1.0.dist-info" / "METADATA").write_text("Name: fake\nVersion: 1.0\n")
    entry_points = "[attnserve]\nfake = fake_plugin\n"
    (site / "fake-1.0.dist-info" / "entry_points.txt").write_text(entry_points)
    return {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """200 sentences."""
    return write_lines(
        tmp_path / "texts.txt", (f"a man is playing with {n} dogs" for n in range(200))
    )


@pytest.fixture
def run(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run a command with the code of the plugin, and return its JSON."""

    def command(code: str, *arguments: object) -> dict[str, Any]:
        (tmp_path / "site" / "fake_plugin.py").write_text(code, encoding="utf-8")
        done = subprocess.run(
            [sys.executable, "-m", "attnserve", *map(str, arguments), "--json"],
            cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return command


def check_embeds(folder: Path, environment: dict[str, str]) -> None:
    """A server of a model embeds a text."""
    with serving(folder, **environment) as (address, _):
        answer = httpx2.post(f"{address}/texts/embed", json={"inputs": "a man is playing"})
        assert answer.status_code == 200
