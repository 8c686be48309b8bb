"""Fixtures of searches and plans, whose times are counted, of isolation, and the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve.planning.plans.plan_file import PlanRecord
from tests.attnserve.cli.conftest import cli
from tests.fixtures.checked_child import bert, child

__all__ = ["bert", "child", "cli"]

Planner = Callable[..., PlanRecord]
Optimizer = Callable[..., Any]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ATTNSERVE_CACHE", str(folder))
    return folder


@pytest.fixture
def planned(model: Path, sentences: Path, tmp_path: Path) -> Planner:
    """Plan the tiny model; the output is a name in ``tmp_path``."""

    def plan(output: str = "p.json", **options: Any) -> PlanRecord:
        keep = {} if "target_speedup" in options else {"keep": 0.97}
        request = {"calib": sentences, "sequence": 32, "threads": 1, **keep, **options}
        return attnserve.plan(model, tmp_path / output, **request).record

    return plan


@pytest.fixture
def optimized(model: Path, sentences: Path, tmp_path: Path) -> Optimizer:
    """Optimize the tiny model; the output is a name in ``tmp_path``."""

    def optimize(output: str = "out.onnx", **options: Any) -> Any:
        request = {"calib": sentences, "sequence": 32, "threads": 1, **options}
        return attnserve.optimize(model, tmp_path / output, **request)

    return optimize


@pytest.fixture
def replays(optimized: Optimizer, tmp_path: Path) -> Callable[[], bool]:
    """Whether applying p.json twice gives the same bytes, in a.onnx and b.onnx."""

    def replay() -> bool:
        for name in ("a.onnx", "b.onnx"):
            optimized(name, plan=tmp_path / "p.json")
        return (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()

    return replay


@pytest.fixture
def short_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model's heads have 8 dimensions: half of them is not a multiple of 8."""
    monkeypatch.setattr("attnserve.planning.blocks.groups.MULTIPLE", 4)
