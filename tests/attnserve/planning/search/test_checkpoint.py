"""A search continues after an interruption, and repeats no work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from attnserve.job import Job
from attnserve.planning.plans import apply
from attnserve.planning.search import judge, search
from attnserve.planning.search.checkpoint import SearchCheckpoint
from attnserve.runtime.checkpoint import Checkpoint
from tests.attnserve.planning.conftest import Planner

pytestmark = pytest.mark.usefixtures("cache", "counted")


@pytest.mark.timing
def test_search_continues_after_interruption(
    planned: Planner, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = planned("whole.json", keep=0.95)
    original = Job.compare_held_out
    calls: list[int] = []

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    monkeypatch.setattr(Job, "compare_held_out", interrupted)
    with pytest.raises(KeyboardInterrupt):
        planned(keep=0.95)
    assert len(list((cache / "plans").iterdir())) == 1
    assert not (tmp_path / "p.json").exists()

    def measured_again(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the losses are known")

    monkeypatch.setattr(search, "loss_curves", measured_again)
    report = planned(keep=0.95)
    assert report.to_json()["plan"] == whole.to_json()["plan"]
    assert not list((cache / "plans").iterdir())  # done: nothing is left behind


@pytest.mark.timing
@pytest.mark.parametrize("content", ["", '{"curves": {"a": 1}, "builds": []}'])
def test_search_ignores_damaged_checkpoint(
    planned: Planner, content: str, monkeypatch: pytest.MonkeyPatch
):
    def damaged(key: str) -> SearchCheckpoint:
        Checkpoint("plans", key).write(lambda file: file.write(content.encode()))
        return SearchCheckpoint(key)

    monkeypatch.setattr(search, "SearchCheckpoint", damaged)
    assert planned(keep=0.97).record.gain


@pytest.mark.timing
def test_search_builds_no_choice_twice_and_names_the_build_of_each_step(
    planned: Planner, monkeypatch: pytest.MonkeyPatch
):
    stages: dict[str, None] = {}
    built: list[str] = []

    def apply_plan(plan: Any, *args: Any, **kwargs: Any) -> Any:
        built.append(judge.digest(plan.to_json()))
        return apply.apply_plan(plan, *args, **kwargs)

    monkeypatch.setattr(judge, "apply_plan", apply_plan)
    planned(keep=0.98, progress=lambda stage, *_: stages.setdefault(stage))
    assert len(built) == len(set(built))
    steps = [stage for stage in stages if stage.endswith("verify")]
    assert {"build 1: verify", "held out: verify"} <= set(steps)
    assert all(stage.startswith(("build", "held out")) for stage in steps)
