"""The command that measures all tables of the README and of docs."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.readme import BENCHMARKS, ROOT, main
from docs.hooks.tables import results, rewrites

ELSEWHERE = {"clients", "recovery", "pruning_rounds", "finetuning"}
"""Results of tests and of training."""

RENAMED = {"serving": "serving_load", "planner_other": "planner"}
"""Benchmarks whose result files have other names."""


def test_every_table_has_a_benchmark_and_every_benchmark_a_table():
    docs = ROOT / "docs"
    modules = (docs / "hooks" / "tables").glob("*.py")
    source = "".join(module.read_text(encoding="utf-8") for module in modules)
    page = (docs / "benchmarks.md").read_text(encoding="utf-8")
    loaded = {*re.findall(r'load\("(\w+)"\)', source), *re.findall(r" \w+/(\w+) -->", page)}
    loaded -= ELSEWHERE
    assert {RENAMED.get(name, name) for name in loaded} == set(BENCHMARKS)


@pytest.mark.parametrize("name", BENCHMARKS)
@pytest.mark.parametrize("quick", [False, True])
def test_options_are_those_of_the_benchmark(
    name: str, quick: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its parser accepts them; nothing runs after it."""

    class Parsed(Exception):
        pass

    pytest.importorskip("tensorly")
    module: Any = import_module(f"benchmarks.{name}")
    parse = argparse.ArgumentParser.parse_args

    def stop(*arguments: Any) -> None:
        parse(*arguments)
        raise Parsed

    monkeypatch.setattr("argparse.ArgumentParser.parse_args", stop)
    words = BENCHMARKS[name].words({"data": tmp_path, "cache": tmp_path}, quick=quick)
    monkeypatch.setattr("sys.argv", [name, *words])
    with pytest.raises(Parsed):
        module.main()


def test_missing_data_and_failures_are_named_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    ran: list[str] = []

    class Done:
        returncode = 0

    def run(command: list[str], **_: Any) -> Done:
        ran.append(command[2])
        Done.returncode = int(command[2] == "benchmarks.find_speed")
        return Done()

    monkeypatch.setattr(readme.subprocess, "run", run)
    monkeypatch.setattr(readme, "write_readme", lambda: ran.append("README"))
    names = ["rotary", "find_speed", "table1"]
    assert main(["--data", str(tmp_path), "--only", *names]) == 1
    assert ran == ["benchmarks.find_speed", "benchmarks.table1", "README"]
    lines = [line for line in capsys.readouterr().out.splitlines() if "not measured" in line]
    assert [re.findall(r": (\w+):", line)[0] for line in lines] == ["rotary", "find_speed"]
    assert "stories260K.onnx does not exist" in lines[0]
    assert main(["--data", str(tmp_path), "--only", "table1"]) == 0


def test_list_shows_the_minutes_and_runs_nothing(capsys: pytest.CaptureFixture[str]):
    assert main(["--list", "--only", "table1", "rotary"]) == 0
    assert re.search(r"all\s+\D*6\b", capsys.readouterr().out)


@pytest.mark.export
@pytest.mark.process
@pytest.mark.timing(seconds=60)
def test_quick_run_writes_results_that_the_tables_read(
    tmp_path: Path, minilm_folder: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")
    before = (ROOT / "README.md").read_bytes()
    names = ["fidelity", "table1"]
    assert main(["--quick", str(tmp_path / "quick"), "--only", *names]) == 0
    assert (ROOT / "README.md").read_bytes() == before
    monkeypatch.setattr(results, "RESULTS", tmp_path / "quick")
    for name in names:
        assert len(getattr(rewrites, name)().splitlines()) >= 3
        assert f"python -m benchmarks.{name}" in results.source(name)
