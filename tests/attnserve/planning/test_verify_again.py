"""The recorded verification of a model is repeated, and its guarantees are tested."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import attnserve
from attnserve.models.onnx_files import load_model, save_model
from attnserve.planning.verify_again import VerifyAgainReport
from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from tests.attnserve.cli.commands import Cli, refused
from tests.errors import raises
from tests.files import last_entry, write_lines

pytestmark = pytest.mark.usefixtures("cache")

Changed = Callable[[Callable[[dict[str, Any]], object]], Path]


@pytest.fixture(scope="session")
def pruned(
    tiny: Path, sentences: Path, made_once: Callable[[str, Callable[[Path], object]], Path]
) -> Path:
    """A tiny model without some heads, calibrated on the sentences; shared."""

    def make(folder: Path) -> None:
        attnserve.optimize(tiny, folder, calib=sentences, prune=0.25, threads=1)

    return made_once("verified-again", make)


@pytest.fixture
def changed(pruned: Path, tmp_path: Path) -> Changed:
    """A copy of the model, with a change of the last rewrite in its record."""

    def change(edit: Callable[[dict[str, Any]], object]) -> Path:
        folder = Path(shutil.copytree(pruned, tmp_path / "changed"))
        path = folder / "attnserve.json"
        record = json.loads(path.read_text(encoding="utf-8"))
        edit(record["lineage"][-1])
        path.write_text(json.dumps(record), encoding="utf-8")
        return folder

    return change


def values(report: VerifyAgainReport) -> list[float]:
    return [check.value for check in report.guarantees]


def test_recorded_rows_give_the_recorded_values(pruned: Path, tiny: Path, sentences: Path):
    report = attnserve.verify_again(pruned, tiny, data=sentences)
    (check,) = report.guarantees
    assert report.is_recorded and report.holds
    assert check.value == check.kept == pytest.approx(check.recorded, abs=1e-6)
    assert report.fidelity.quality is not None
    assert report.fidelity.quality.split == "verify" and report.not_installed == []


def test_other_data_is_measured_on_all_rows(pruned: Path, tiny: Path, sentences: Path, other: Path):
    report = attnserve.verify_again(pruned, tiny, data=other)
    assert not report.is_recorded
    assert report.fidelity.data == "other.txt"
    assert report.fidelity.quality is not None and report.fidelity.quality.rows == 40
    recorded = attnserve.verify_again(pruned, tiny, data=sentences).guarantees[0]
    assert report.guarantees[0].guarantee == recorded.guarantee


@pytest.fixture
def other(sentences: Path, tmp_path: Path) -> Path:
    """40 sentences that are none of the calibration data."""
    lines = sentences.read_text(encoding="utf-8").splitlines()[:40]
    return write_lines(tmp_path / "other.txt", (f"{line} park house" for line in lines))


def test_the_same_model_holds_on_any_data(tiny: Path, sentences: Path, tmp_path: Path, other: Path):
    attnserve.optimize(tiny, tmp_path / "same", calib=sentences, collab_dk=32, threads=1)
    assert attnserve.verify_again(tmp_path / "same", tiny, data=other).holds


@pytest.mark.timing
def test_a_goal_is_the_guarantee_on_the_rows_of_its_last_verification(
    model: Path, sentences: Path, tmp_path: Path
):
    attnserve.optimize(
        model, tmp_path / "out", calib=sentences, keep=0.9, allow=["ffn"], sequence=32, threads=1
    )
    entry = last_entry(tmp_path / "out")
    last = entry["search"]["proofs"][-1]
    assert entry["search"]["gain"] and last["part"] == "verify"
    report = attnserve.verify_again(tmp_path / "out", data=sentences)
    (check,) = report.guarantees
    assert (check.guarantee, report.holds) == (0.9, True)
    assert check.value == pytest.approx(last["quality"]["value"], abs=1e-6)
    assert check.kept == pytest.approx(1 - last["loss"], abs=1e-6)

    # Records of earlier versions do not name the part.
    path = tmp_path / "out" / "attnserve.json"
    record = json.loads(path.read_text())
    del record["lineage"][-1]["search"]["proofs"][-1]["part"]
    path.write_text(json.dumps(record))
    assert values(attnserve.verify_again(tmp_path / "out", data=sentences)) == values(report)

    record["lineage"][-1]["search"]["proofs"][-1]["part"] = "else"
    path.write_text(json.dumps(record))
    with raises(InvalidData, "verify.unknown", "'else'"):
        attnserve.verify_again(tmp_path / "out", data=sentences)


@pytest.mark.timing
def test_a_goal_of_a_score_needs_its_data(
    model: Path, sentences: Path, tmp_path: Path, sts_rows: Path
):
    attnserve.optimize(
        model, tmp_path / "out", calib=sentences, keep=0.5, allow=["ffn"], sequence=32, threads=1,
        eval_data=sts_rows, task="sts", measure="score",
    )  # fmt: skip
    again = {"new": tmp_path / "out", "data": sentences}
    with raises(InvalidArgument, "verify.eval_data", "sts score on sts.tsv"):
        attnserve.verify_again(**again)
    report = attnserve.verify_again(**again, eval_data=sts_rows)
    quality, score = report.guarantees
    assert (quality.measure, score.measure) == ("similarity", "score")
    assert score.guarantee == 0.5 and score.holds
    assert score.value == pytest.approx(score.recorded, abs=1e-6)
    copy = tmp_path / "new.tsv"
    copy.write_text(sts_rows.read_text() + "2\ta man\tthe dog\n")
    new = attnserve.verify_again(**again, eval_data=copy).guarantees[-1]
    assert (new.file, new.guarantee) == ("new.tsv", 0.5)

    # A score is kept in each runtime in which the quality was verified.
    path = tmp_path / "out" / "attnserve.json"
    record = json.loads(path.read_text())
    entry = record["lineage"][-1]
    entry["other_runtimes"] = {"openvino": {"quality": entry["quality"], **entry["fidelity"]}}
    path.write_text(json.dumps(record))
    checks = attnserve.verify_again(**again, eval_data=sts_rows).guarantees
    found = [(check.runtime, check.measure) for check in checks]
    kinds = ("similarity", "score")
    assert found == [(each, kind) for each in ("onnxruntime", "openvino") for kind in kinds]
    assert checks[-1].value > 0.5 and checks[-1].holds


@pytest.fixture
def sts_rows(tmp_path: Path) -> Path:
    words = ["a", "man", "dog", "is", "playing", "the", "guitar", "very", "happy", "house"]
    random = np.random.default_rng(0)
    lines = ["score\tsentence1\tsentence2"]
    for _ in range(80):
        first = random.choice(words, 6)
        shared = int(random.integers(0, 7))
        second = [*first[:shared], *random.choice(words, 6 - shared)]
        lines.append(f"{shared}\t{' '.join(first)}\t{' '.join(second)}")
    path = tmp_path / "sts.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_several_files_are_found_in_any_order_and_by_any_name(
    model: Path, sentences: Path, other: Path, tmp_path: Path
):
    attnserve.optimize(model, tmp_path / "out", calib=[sentences, other], calib_weights="3,1",
                       prune=0.25, threads=1)  # fmt: skip
    renamed = Path(shutil.copy(other, tmp_path / "renamed.txt"))
    report = attnserve.verify_again(tmp_path / "out", model, data=[renamed, sentences])
    assert report.is_recorded and len(report.guarantees) == 2
    for check in report.guarantees:
        assert check.value == pytest.approx(check.recorded, abs=1e-6)
    with raises(InvalidData, "verify.some_files", "sentences.txt, other.txt"):
        attnserve.verify_again(tmp_path / "out", model, data=[sentences])


def test_recorded_runtimes_are_measured_or_named(
    tiny: Path, changed: Changed, sentences: Path, monkeypatch: pytest.MonkeyPatch
):
    def edit(entry: dict[str, Any]) -> None:
        fidelity = {"quality": entry["quality"], **entry["fidelity"]}
        names = ("onnxruntime", "absent", "onnxruntime+absent", "+", "")
        entry["other_runtimes"] = dict.fromkeys(names, fidelity)

    report = attnserve.verify_again(changed(edit), tiny, data=sentences)
    assert [check.runtime for check in report.guarantees] == ["onnxruntime", "onnxruntime"]
    first, second = values(report)
    assert first == pytest.approx(second, abs=1e-6)
    assert report.not_installed == ["absent", "onnxruntime+absent", "+", ""]


def test_the_original_is_found_by_its_checksum(
    pruned: Path, tiny: Path, sentences: Path, tmp_path: Path
):
    new = Path(shutil.copytree(pruned, tmp_path / "models" / "new"))
    with raises(InvalidArgument, "verify.no_original", "model.onnx"):
        attnserve.verify_again(new, data=sentences)
    shutil.copytree(tiny, tmp_path / "models" / "a [name]")
    assert attnserve.verify_again(new, data=sentences).holds


def set_interval(entry: dict[str, Any], low: float) -> None:
    entry["quality"]["ci95"] = [low, 1.0]


@pytest.mark.parametrize(("low", "code"), [(0.5, 0), (0.9999, 1)])
def test_the_exit_code_says_whether_the_guarantee_holds(
    cli: Cli, tiny: Path, changed: Changed, sentences: Path, low: float, code: int
):
    folder = changed(lambda entry: set_interval(entry, low))
    arguments = ("verify", tiny, folder, "--again", "--data", sentences)
    done = cli(*arguments)
    assert done.code == code, done.err
    assert f"{low:.4f}" in done.out and "recorded rows" in done.out
    assert max(map(len, done.out.splitlines()[-6:])) <= 80
    assert ("guarantees 0.9999" in done.err) == bool(code)
    done = cli(*arguments, "--json")
    assert done.code == code
    content = json.loads(done.out)
    assert content["holds"] == (code == 0) and content["rows"] == "recorded"
    assert content["guarantees"][0]["guarantee"] == low
    assert {"outputs", "mean_cosine", "min_cosine", "quality"} <= content.keys()


def other_output(entry: dict[str, Any]) -> None:
    entry["quality"]["output"] = "else"


def more_outputs(entry: dict[str, Any]) -> None:
    entry["qualities"] = [entry["quality"], {**entry["quality"], "output": "else"}]


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda entry: entry.pop("calibration"), "no_guarantee"),
        (lambda entry: entry.pop("quality"), "no_guarantee"),
        (lambda entry: entry.pop("source"), "no_guarantee"),
        (lambda entry: entry["source"].update(weights="0" * 64), "original"),
        (lambda entry: entry["calibration"].update(tokens=7), "other_split"),
        (lambda entry: entry["calibration"].update(held_out_rows=[1]), "other_split"),
        (lambda entry: entry["quality"].update(measure="else"), "unknown"),
        (other_output, "other_quality"),
        (more_outputs, "other_quality"),
    ],
)
def test_records_that_do_not_fit_are_refused(
    tiny: Path, changed: Changed, sentences: Path, edit: Any, code: str
):
    folder = changed(edit)
    with pytest.raises((InvalidModel, InvalidData)) as caught:
        attnserve.verify_again(folder, tiny, data=sentences)
    assert caught.value.code == f"verify.{code}", caught.value


def test_another_measure_than_the_recorded_is_refused(pruned: Path, tiny: Path, sentences: Path):
    with raises(InvalidData, "verify.other_quality", "cosine"):
        attnserve.verify_again(pruned, tiny, data=sentences, measure="cosine")
    with raises(InvalidData, "quality.no_lists", "sentences.txt"):
        attnserve.verify_again(pruned, tiny, data=sentences, measure="tau")


def test_a_changed_model_is_refused(cli: Cli, tiny: Path, changed: Changed, sentences: Path):
    folder = changed(lambda entry: None)
    save_model(load_model(tiny / "model.onnx"), folder / "model.onnx", external=False)
    done = cli("verify", tiny, folder, "--again", "--data", sentences)
    refused(done, "sha256")


def test_usage_is_explained(cli: Cli, pruned: Path, tiny: Path, sentences: Path, tmp_path: Path):
    refused(cli("verify", tiny), "NEW is missing")
    refused(cli("verify", tiny, pruned, "--eval-data", sentences), "--again")
    refused(cli("verify", tiny, pruned, "--again"), "--data is not given.*sentences.txt")
    refused(cli("verify", tiny, tiny, "--again", "--data", sentences), "attnserve.json")
    refused(cli("verify", tiny, pruned, "--again", "--data", tmp_path / "no.txt"), "no such file")
    refused(
        cli("verify", tiny, pruned, "--again", "--data", sentences, "--eval-data", sentences),
        "guarantees no score",
    )
    refused(cli("verify", pruned, pruned, "--again", "--data", sentences), "ORIGINAL")


def test_verify_reads_several_files(tiny: Path, pruned: Path, sentences: Path, other: Path):
    fidelity = attnserve.verify(tiny, pruned, data=[sentences, other])
    assert {quality.file for quality in fidelity.qualities} == {"sentences.txt", "other.txt"}
