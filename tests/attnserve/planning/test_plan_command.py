"""plan: plan.json, its plot, outputs that are refused, and the command line."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path

import pytest

from attnserve.cli.app import main
from graph_passes.errors import (
    InvalidArgument,
    InvalidOutput,
)
from tests.attnserve.planning.conftest import Planner
from tests.errors import raises

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.timing
def test_plan_json_and_plot_contain_the_report(planned: Planner, tmp_path: Path):
    report = planned("new/p.json", keep=0.95, allow=["ffn"])
    content = json.loads((tmp_path / "new" / "p.json").read_text(encoding="utf-8"))
    assert content == json.loads(json.dumps(report.to_json()))
    assert content["format"] == 2
    assert {layer["block"] for layer in content["layers"]} == {d.block for d in report.decisions}
    assert all(layer["why"] for layer in content["layers"])
    losses = [point["predicted_loss"] for point in content["front"]]
    assert losses == sorted(losses) and len(losses) > 5
    plot = (tmp_path / "new" / "p.svg").read_text(encoding="utf-8")
    assert plot.startswith("<svg xmlns") and report.verdict.partition(": ")[0] in plot


def test_plan_without_matplotlib_writes_the_plan_and_warns(
    planned: Planner,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    monkeypatch.setattr("attnserve.reports.drawing.find_spec", lambda name: None)
    planned(keep=0.95)
    assert (tmp_path / "p.json").exists() and not (tmp_path / "p.svg").exists()
    assert "attnserve[report]" in caplog.text


def test_plan_without_a_file_is_refused(planned: Planner):
    with raises(InvalidArgument, "optimize.no_data"):
        planned(calib=[])


def test_plan_existing_output_is_refused_and_unchanged(planned: Planner, tmp_path: Path):
    (tmp_path / "p.svg").write_text("mine")
    with raises(InvalidOutput, "output.exists"):
        planned()
    assert (tmp_path / "p.svg").read_text() == "mine"


@pytest.mark.parametrize("name", ["p.json", "p.svg"])
def test_plan_output_that_is_a_folder_is_refused_before_the_search(
    planned: Planner, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        import_module("attnserve.planning.plan_command"),
        "run_search",
        lambda *_, **__: pytest.fail("the search has begun"),
    )
    (tmp_path / name).mkdir()
    with raises(InvalidArgument, "plan.output", name):
        planned(force=True)


@pytest.mark.timing
def test_cli_plan_prints_table_front_and_verdict(
    model: Path, sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "p.json"
    arguments = ["plan", str(model), "--calib", str(sentences), "-o", str(output), "--keep", "0.95",
                 "--seq", "32", "--threads", "1", "--allow", "ffn"]  # fmt: skip
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    for part in ("block by block", "heads", "neurons", "fastest choices", "as fast, keeping"):
        assert part in shown
    assert str(output) in shown.replace("\n", "")
    assert max(map(len, shown.splitlines()[:12])) <= 100
    assert main([*arguments, "--json", "--force"]) == 0
    assert json.loads(capsys.readouterr().out)["gain"] is True
    assert main([*arguments, "--bf16", "--force"]) == 2
    assert "bfloat16 cannot be timed on a CPU" in capsys.readouterr().err
