"""The output of ``optimize``, ``plan`` and ``recover`` in a terminal."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnserve
from attnserve.cli.app import main
from attnserve.models.search_record import TrainingRounds
from attnserve.planning.plan_command import PlanReport
from attnserve.planning.plans.plan_file import PlanRecord


@pytest.mark.parametrize("gain", [False, True])
def test_plan_prints_why_the_training_brought_no_gain(
    gain: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rounds = TrainingRounds(rounds=(), gain=gain, verdict="the rounds of training", torch="2")
    record = PlanRecord(format=2, verdict="1.2x as fast", gain=True, recovered=rounds)
    report = PlanReport(record, tmp_path / "p.json")
    monkeypatch.setattr(attnserve, "plan", lambda *_, **__: report)
    assert main(["plan", "model.onnx", "--keep", "0.9", "--calib", "texts.txt"]) == 0
    # The verdict of the search states the training of its result.
    assert ("the rounds of training" in capsys.readouterr().out) == (not gain)
