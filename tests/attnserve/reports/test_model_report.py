"""report: pages of exported, rewritten and recovered models, and refused input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from attnserve import optimize
from attnserve.models.record import Record
from attnserve.reports.model_report import report
from graph_passes.errors import InvalidModel, InvalidOutput, MissingExtra
from tests.attnserve.reports.pages import HOSTILE, Page, hide, require_self_contained
from tests.errors import raises
from tests.files import read_record, tree

pytest.importorskip("jinja2", reason="pip install 'attnserve[report]'")
pytest.importorskip("matplotlib", reason="pip install 'attnserve[report]'")

QUALITY = {
    "measure": "similarity", "value": 0.9812, "ci95": [0.97, 0.99], "p5": 0.95,
    "constant": 0.0, "rows": 210, "split": "prove", "output": "y",
}  # fmt: skip
SPEED = {"batch": 1, "sequence": 64, "original_ms": 2.0, "ms": 1.25, "speedup": 1.6}
RECOVERED = {
    "rewrite": "recover",
    "source": {"file": "teacher.onnx"},
    "before": {"parameters": 400, "macs": 8000, "bytes": 1600},
    "after": {"parameters": 300, "macs": 6000, "bytes": 1200},
    "quality": QUALITY,
    "before_recovery": {"quality": {**QUALITY, "value": 0.9123}},
    "gain": True,
    "verdict": "similarity 0.9123 -> 0.9812",
    "training": {"steps": 12, "history": [[1.0, 0.5, 0.6], [2.0, 0.25, 0.3], [3.0, None, 0.2]]},
}


@pytest.fixture(scope="module")
def rewritten(tiny: Path, sentences: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewritten") / "small"
    optimize(tiny, folder, collab_dk=16, mixing="dense", prune=0.25, calib=sentences, threads=1)
    return folder


@pytest.fixture
def copy(rewritten: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(rewritten, tmp_path / "small"))


def page_of(path: Path) -> Page:
    content = path.read_text(encoding="utf-8")
    require_self_contained(content)
    return Page(content)


def set_lineage(folder: Path, lineage: list[Any]) -> None:
    record = read_record(folder)
    (folder / "attnserve.json").write_text(json.dumps({**record, "lineage": lineage}))


def test_report_shows_blocks_cost_quality_and_steps(copy: Path):
    (found,) = report(copy)
    assert found.output == copy / "report.html" and found.name == "small"
    page = page_of(found.output)
    (entry,) = read_record(copy)["lineage"]
    for step in entry["steps"]:
        assert step["rewrite"] in page.text and step["block"] in page.text
    assert f"{entry['quality']['value']:.4f}" in page.text
    assert f"{entry['after']['parameters']:,}" in page.text
    blocks = found.inspection.to_json()["attention"]
    assert len(blocks) == 2 and all(block["name"] in page.text for block in blocks)
    assert page.tags.count("svg") == 1  # the steps; nothing was searched or trained


def test_report_does_not_change_the_model(copy: Path):
    before = tree(copy)
    report(copy)
    after = tree(copy)
    assert after.pop("report.html") and after == before


def test_report_model_without_record(tiny: Path, tmp_path: Path):
    shutil.copy(tiny / "model.onnx", tmp_path / "mine.onnx")
    (found,) = report(tmp_path / "mine.onnx")
    assert found.output == tmp_path / "mine-report.html"
    page = page_of(found.output)
    assert "not rewritten" in page.text and page.tags.count("svg") == 0


def test_report_shows_search_and_recovery(copy: Path):
    entry = read_record(copy)["lineage"][0]
    search = {"verdict": "1.60x as fast", "speedup": 1.6, "speeds": [SPEED], "choose": QUALITY}
    set_lineage(copy, [{**entry, "search": search}, RECOVERED])
    (found,) = report(copy)
    page = page_of(found.output)
    assert page.tags.count("svg") == 3
    for text in ("1.60x as fast", "0.9123", "0.9812", "0.9700 to 0.9900", "teacher.onnx"):
        assert text in page.text
    assert page.text.index("Rewrite 2: recover") < page.text.index("Rewrite 1")


def test_report_old_record_without_fields(copy: Path):
    set_lineage(copy, [{"rewrite": "prune_heads", "unknown": [1, 2]}])
    (found,) = report(copy)
    assert "prune_heads" in page_of(found.output).text


def test_report_fields_of_the_other_command_are_unknown(copy: Path):
    unknown = {"search": 3, "speedups": 3, "other_runtimes": 3}
    set_lineage(copy, [{"rewrite": "x", "before_recovery": 3}, {**RECOVERED, **unknown}])
    (found,) = report(copy)
    assert "0.9123" in page_of(found.output).text
    assert found.artifact.other_runtimes == {}


COST = {"parameters": 1, "macs": 2, "bytes": 4}


@pytest.mark.parametrize(
    ("entry", "place"),
    [
        ({}, "lineage.0.rewrite"),
        ({"rewrite": "x", "before": {**COST, "macs": "many"}}, "lineage.0.before.macs"),
        ({"rewrite": "x", "steps": [{"rewrite": "y"}]}, "lineage.0.steps.0.block"),
        ({"rewrite": "x", "search": {"speeds": [{**SPEED, "ms": "fast"}]}}, "speeds.0.ms"),
        ({**RECOVERED, "before_recovery": 3}, "lineage.0.before_recovery is 3"),
        ({"rewrite": "recover", "training": {}}, "lineage.0.before_recovery"),
    ],
)
def test_report_invalid_record_is_refused(copy: Path, entry: dict[str, Any], place: str):
    set_lineage(copy, [entry])
    with raises(InvalidModel, "artifact.record", place):
        report(copy)
    assert not (copy / "report.html").exists()


def test_lineage_numbers_that_are_not_finite_are_refused():
    entry = {"rewrite": "x", "fidelity": {"mean_cosine": float("nan")}}
    with raises(InvalidModel, "artifact.record", "fidelity.mean_cosine"):
        Record.parse({"lineage": [entry]}, Path("attnserve.json"))


def test_report_escapes_hostile_records(copy: Path):
    step = {"rewrite": HOSTILE, "block": HOSTILE, "relative_error": 0.5}
    entry: dict[str, Any] = {
        "rewrite": HOSTILE, "source": {"file": HOSTILE}, "steps": [step, step],
        "warnings": [HOSTILE], "versions": {HOSTILE: HOSTILE},
        "quality": {**QUALITY, "measure": HOSTILE, "output": HOSTILE, "split": HOSTILE},
        "search": {"speeds": [SPEED], "machine": HOSTILE, "verdict": HOSTILE},
    }  # fmt: skip
    set_lineage(copy, [entry])
    (found,) = report(copy)
    assert page_of(found.output).text.count(HOSTILE) >= 8


def test_report_one_page_per_model_of_a_folder(tiny: Path, copy: Path, tmp_path: Path):
    models = tmp_path / "models"
    shutil.copytree(tiny, models / "original")
    shutil.copytree(copy, models / "new" / "1")
    shutil.copytree(copy, models / "new" / "2")
    found = report(models)
    assert {(each.name, each.version) for each in found} == {
        ("original", "1"), ("new", "1"), ("new", "2"),
    }  # fmt: skip
    assert all(each.output == each.artifact.folder / "report.html" for each in found)
    report(models, tmp_path / "pages")
    names = {path.name for path in (tmp_path / "pages").iterdir()}
    assert names == {"original.html", "new-1.html", "new-2.html"}


def test_report_broken_model_among_others_writes_nothing(tiny: Path, tmp_path: Path):
    models = tmp_path / "models"
    shutil.copytree(tiny, models / "a")
    (models / "b").mkdir()
    (models / "b" / "model.onnx").write_bytes(b"not a model")
    before = tree(models)
    with pytest.raises(InvalidModel):
        report(models)
    assert tree(models) == before


def test_report_existing_page_needs_force(copy: Path):
    (copy / "report.html").write_text("mine")
    with raises(InvalidOutput, "output.exists"):
        report(copy)
    assert (copy / "report.html").read_text() == "mine"
    report(copy, force=True)
    assert page_of(copy / "report.html")


def test_report_path_without_models_is_refused(tmp_path: Path):
    (tmp_path / "empty").mkdir()
    with raises(InvalidModel, "artifact.model_count"):
        report(tmp_path / "empty")
    with raises(InvalidModel, "artifact.missing"):
        report(tmp_path / "nothing")


def test_report_output_that_is_a_file_is_refused(copy: Path, tmp_path: Path):
    (tmp_path / "file").write_text("mine")
    with raises(InvalidOutput, "output.not_folder"):
        report(copy, tmp_path / "file")


@pytest.mark.parametrize("name", ["jinja2", "matplotlib"])
def test_report_without_its_extra_is_refused(
    name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    hide(monkeypatch, name)
    with raises(MissingExtra, "extra.report", name):
        report(tiny, tmp_path / "out")
    assert not (tmp_path / "out").exists()
