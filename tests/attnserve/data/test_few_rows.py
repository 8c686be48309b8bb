"""Files of few rows, over the commands that read them: a search needs rows for all of its parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import attnserve
from attnserve.cli.app import main
from attnserve.data.splits import LEAST_SEARCHED
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from attnserve.options import Data, Goal
from graph_passes.errors import InvalidData
from tests.errors import raises
from tests.files import read_record, write_lines

KINDS = ("texts", "pairs", "arrays")
Few = Callable[[str, int], tuple[Path, Path]]


@pytest.fixture
def few(model: Path, tmp_path: Path) -> Few:
    """(kind, rows) -> an artifact folder, and a file of distinct rows of this kind."""

    def write(kind: str, rows: int) -> tuple[Path, Path]:
        if kind == "arrays":
            ids = 5 + np.add.outer(np.arange(rows), np.arange(6))
            path = tmp_path / "few.npz"
            zeros = np.zeros_like(ids)
            np.savez(path, input_ids=ids, attention_mask=zeros + 1, token_type_ids=zeros)
            return model, path
        lines = [" ".join(["dog"] * count) for count in range(1, rows + 1)]
        if kind == "pairs":
            lines = [f"a cat\t{line}" for line in lines]
            record = read_record(model)
            record["task"] = "rerank"
            (model / "attnserve.json").write_text(json.dumps(record), encoding="utf-8")
        path = write_lines(tmp_path / "few.txt", lines)
        return model, path

    return write


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, LEAST_SEARCHED - 1])
def test_search_of_few_rows_is_refused(few: Few, tmp_path: Path, kind: str, rows: int):
    model, path = few(kind, rows)
    for command, given in ((attnserve.optimize, "out"), (attnserve.plan, "plan.json")):
        for goal in ({"keep": 0.99}, {"target_speedup": 1.1}):
            values = path.name, f"{rows} distinct rows", f"at least {LEAST_SEARCHED}", "`calib`"
            with raises(InvalidData, "data.few_rows", *values):
                command(model, tmp_path / given, calib=path, **goal)  # type: ignore[operator]
            assert not (tmp_path / given).exists()


@pytest.mark.parametrize("kind", KINDS)
def test_search_accepts_the_smallest_number_of_rows(few: Few, kind: str):
    model, path = few(kind, LEAST_SEARCHED)
    artifact = open_artifact(model)
    job = Job.for_search(artifact, load_model(artifact), Goal(keep=0.9), Data(calib=(path,)))
    assert job.required_data.source.distinct_rows == LEAST_SEARCHED
    assert job.required_data.source.held_out_rows == (2, 2, 2)


def test_search_counts_distinct_rows_and_the_rows_of_each_file(
    few: Few, sentences: Path, tmp_path: Path
):
    model, path = few("texts", 3)
    path.write_text(20 * (path.read_text(encoding="utf-8") + "\n"), encoding="utf-8")
    with raises(InvalidData, "data.few_rows", "few.txt", "3 distinct rows"):
        attnserve.optimize(model, tmp_path / "out", keep=0.99, calib=[sentences, path])


def test_search_of_files_that_hold_out_the_rows_of_each_other_is_refused(few: Few, tmp_path: Path):
    words = ("a", "the", "man", "dog")  # all rows have the same length
    lines = [f"{first} {second}" for first in words for second in words]
    files = list[Path]()
    for start in range(len(lines)):
        files.append(tmp_path / f"{start}.txt")
        files[-1].write_text("\n".join(lines[start:] + lines[:start]), encoding="utf-8")
    model, _ = few("texts", 1)
    artifact = open_artifact(model)
    with raises(InvalidData, "data.few_rows", "nearly the same rows"):
        Job.for_search(artifact, load_model(artifact), Goal(keep=0.9), Data(calib=tuple(files)))


def test_command_line_of_a_search_of_one_row_exits_as_for_bad_input(
    few: Few, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    model, path = few("texts", 1)
    code = main(["optimize", str(model), "--keep", "0.99", "--calib", str(path),
                 "-o", str(tmp_path / "out")])  # fmt: skip
    assert code == 2
    problem, fix = capsys.readouterr().err.splitlines()
    assert "1 distinct rows" in problem and str(LEAST_SEARCHED) in problem
    assert "--calib" in fix


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_verify_of_few_rows_measures_all_of_them(few: Few, tmp_path: Path, kind: str, rows: int):
    model, path = few(kind, rows)
    copy = shutil.copytree(model, tmp_path / "copy")
    report = attnserve.verify(model, copy, data=path)
    assert report.quality is not None
    assert (report.quality.value, report.quality.rows) == (1.0, rows)
    assert report.mean_cosine == pytest.approx(1)


@pytest.mark.export
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "is_refused"), [(1, True), (2, True), (3, True), (28, False)])
def test_recover_of_few_rows_is_refused(few: Few, kind: str, rows: int, is_refused: bool):
    pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")
    from attnserve.recovery.distillation import MIN_TEXTS, check_input

    assert MIN_TEXTS == 28
    model, path = few(kind, rows)
    artifact = open_artifact(model)
    job = Job.read(artifact, load_model(artifact), Data(calib=(path,)))
    if not is_refused:
        check_input(job)
        return
    with raises(InvalidData, "recovery.few_rows", f"{rows} distinct rows", MIN_TEXTS):
        check_input(job)
