"""A search continues after an interruption, and repeats no work."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest

from attnserve.job import Job
from attnserve.planning.plans import apply
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.search import judge, precision_search
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.runtime.cache import digest
from attnserve.runtime.checkpoint import Checkpoint
from graph_passes.errors import InvalidOutput
from tests.attnserve.planning.conftest import Optimizer, Planner
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.timing(seconds=7)
def test_search_continues_after_interruption(planned: Planner, tmp_path: Path, cache: Path):
    stages: set[str] = set()

    def interrupt(stage: str, done: int, total: int) -> None:
        if stage == "build 2: verify":
            raise KeyboardInterrupt

    whole = planned("whole.json", keep=0.95, progress=lambda stage, *_: stages.add(stage))
    assert {"measure block losses", "build 1: verify", "build 2: verify"} <= stages
    with pytest.raises(KeyboardInterrupt):
        planned(keep=0.95, progress=interrupt)
    assert len(list((cache / "plans").iterdir())) == 1
    assert not (tmp_path / "p.json").exists()
    stages.clear()
    report = planned(keep=0.95, progress=lambda stage, *_: stages.add(stage))
    assert stages and "measure block losses" not in stages, "the losses are known"
    assert report.to_json()["plan"] == whole.to_json()["plan"]
    assert not list((cache / "plans").iterdir())  # done: nothing is left behind


@pytest.mark.timing(seconds=7)
def test_search_whose_result_cannot_be_written_is_not_repeated(
    optimized: Optimizer, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: Any, **__: Any) -> None:
        raise InvalidOutput("the disk is full", code="output.full")

    stages: set[str] = set()
    with monkeypatch.context() as patch:
        patch.setattr(import_module("attnserve.planning.optimize"), "write_rewritten", fail)
        with raises(InvalidOutput, "output.full"):
            optimized(keep=0.9)
    assert len(list((cache / "plans").iterdir())) == 1
    optimized(keep=0.9, progress=lambda stage, *_: stages.add(stage))
    assert stages and "measure block losses" not in stages
    assert (tmp_path / "out.onnx").exists() and not list((cache / "plans").iterdir())


@pytest.mark.parametrize("content", ["", '{"curves": {"a": 1}, "builds": []}'])
def test_search_ignores_damaged_checkpoint(
    planned: Planner, content: str, monkeypatch: pytest.MonkeyPatch
):
    def damaged(file: Checkpoint) -> SearchCheckpoint:
        file.write(lambda opened: opened.write(content.encode()))
        return SearchCheckpoint(file)

    monkeypatch.setattr(precision_search, "SearchCheckpoint", damaged)
    assert planned(keep=0.97).gain


def test_search_builds_no_choice_twice_and_names_the_build_of_each_step(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
):
    stages: dict[str, None] = {}
    built: list[str] = []

    def apply_plan(plan: Plan, job: Job, model: ir.Model) -> State:
        built.append(digest(plan.to_json()))
        return apply.apply_plan(plan, job, model)

    monkeypatch.setattr(judge, "apply_plan", apply_plan)
    planned(keep=0.98, progress=lambda stage, *_: stages.setdefault(stage))
    assert len(built) == len(set(built))
    steps = [stage for stage in stages if stage.endswith("verify")]
    assert {"build 1: verify", "held out: verify"} <= set(steps)
    assert all(stage.startswith(("build", "held out")) for stage in steps)
