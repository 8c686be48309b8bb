"""Output paths: defaults, existing files, and --force."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from attnserve.models.artifact import open_artifact
from tests.attnserve.cli.commands import Cli, refused
from tests.files import tree

DENSE = ["--collab-dk", "16", "--mixing", "dense"]


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("output", ["model", "model/model.onnx", "link", "link/model.onnx"])
def test_optimize_output_equal_to_input_is_refused(
    cli: Cli, model: Path, tmp_path: Path, output: str, force: list[str]
):
    (tmp_path / "link").symlink_to(model)
    before = tree(tmp_path)
    done = cli("optimize", model, "-o", tmp_path / output, *DENSE, *force)
    refused(done, "output")
    assert tree(tmp_path) == before


def test_optimize_existing_output_needs_force(cli: Cli, model: Path, tmp_path: Path):
    for output in (tmp_path / "new" / "model.onnx", model / "new.onnx"):
        output.parent.mkdir(exist_ok=True)
        if output.parent != model:
            output.write_text("precious")
        before = tree(tmp_path)
        refused(cli("optimize", model, "-o", output, *DENSE), "--force")
        assert tree(tmp_path) == before
    new = tmp_path / "new"
    assert cli("optimize", model, "-o", new, *DENSE, "--force").code == 0


DEFAULTS: dict[str, tuple[str, list[str], set[str]]] = {
    "optimize": (
        "{name}-optimized",
        DENSE,
        {
            "model.onnx",
            "attnserve.json",
            "tokenizer.json",
            "tokenizer_config.json",
            "config.json",
            "README.md",
            "modules.json",
            "config_sentence_transformers.json",
            "sentence_bert_config.json",
        },
    ),
    "analyze": ("{name}-analysis", [], {"analysis.json", "mask.json", "report.html"}),
    "plan": ("", ["--keep", "0.9"], {"plan.json", "plan.svg"}),
}


def without_output(command: str, model: Path, calib: Path) -> list[object]:
    return [command, model, *DEFAULTS[command][1], "--calib", calib, "--json"]


def work_is_refused(*_: object, **__: object) -> None:
    raise AssertionError("the output is checked before the data is read")


SEARCHING = pytest.param("plan", marks=pytest.mark.timing(seconds=20))


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("command", [*sorted(DEFAULTS.keys() - {"plan"}), SEARCHING])
def test_command_without_output_writes_beside_the_model(
    cli: Cli, model: Path, sentences: Path, tmp_path: Path, command: str
):
    before = tree(model)
    folder, _, files = DEFAULTS[command]
    written = tmp_path / folder.format(name="model")
    done = cli(*without_output(command, model, sentences)).json()
    assert tree(model) == before
    assert {path.name for path in written.iterdir() if path.is_file()} == files
    shown = Path(done["output"])
    assert shown == written if command == "analyze" else shown.parent == written and shown.is_file()


@pytest.mark.usefixtures("no_figures")
@pytest.mark.parametrize("command", [*sorted(DEFAULTS.keys() - {"plan"}), SEARCHING])
def test_default_output_that_exists_needs_force(
    cli: Cli, model: Path, sentences: Path, tmp_path: Path, command: str,
    monkeypatch: pytest.MonkeyPatch,
):  # fmt: skip
    folder, _, files = DEFAULTS[command]
    written = tmp_path / folder.format(name="model")
    written.mkdir(exist_ok=True)
    unrelated = written / "notes.txt"  # a folder that holds anything is an existing output
    unrelated.write_text("mine")
    if command == "plan":
        (written / "plan.svg").write_text("mine")
    before = tree(tmp_path)
    with monkeypatch.context() as patch:
        for module in ("job", "reports.analyze"):
            patch.setattr(import_module(f"attnserve.{module}"), "load_inputs", work_is_refused)
        refused(cli(*without_output(command, model, sentences)), "--force")
    assert tree(tmp_path) == before
    assert cli(*without_output(command, model, sentences), "--force").code == 0
    assert files <= {path.name for path in written.iterdir()}
    assert unrelated.read_text() == "mine"


def test_optimize_default_output_is_named_after_the_resolved_folder(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(model)
    done = cli("optimize", ".", *DENSE)
    assert done.code == 0
    assert done.out.startswith(f"wrote {tmp_path.resolve() / 'model-optimized' / 'model.onnx'}\n")
    assert (tmp_path / "model-optimized" / "model.onnx").is_file()


def test_optimize_default_output_of_a_file_is_beside_it_and_not_recorded(cli: Cli, model: Path):
    (model / "model.onnx").rename(model / "encoder.onnx")
    assert cli("optimize", model / "encoder.onnx", *DENSE, "--dry-run").code == 0
    assert not (model / "encoder-optimized").exists()
    done = cli("optimize", model / "encoder.onnx", *DENSE, "--json").json()
    assert done["output"] == str(model / "encoder-optimized" / "model.onnx")
    record = (model / "encoder-optimized" / "attnserve.json").read_text()
    assert str(model.parent) not in record


def test_optimize_second_model_in_a_folder_keeps_the_record_of_the_first(
    cli: Cli, model: Path, tmp_path: Path
):
    folder = tmp_path / "both"
    for name, rank in (("a", 16), ("b", 8)):
        assert cli("optimize", model, "-o", folder / f"{name}.onnx", "--collab-dk", rank,
                   "--mixing", "dense").code == 0  # fmt: skip
    for name, rank in (("a", 16), ("b", 8)):
        steps = open_artifact(folder / f"{name}.onnx").lineage[-1].to_json()["steps"]
        assert {step["rank"] for step in steps} == {rank}


def test_report_writes_a_page_beside_the_model(cli: Cli, model: Path, tmp_path: Path):
    (found,) = cli("report", model, "--json").json()["reports"]
    assert found == {
        "model": str(model / "model.onnx"), "name": "model", "version": "1",
        "output": str(model / "report.html"),
    }  # fmt: skip
    refused(cli("report", model), "--force")
    done = cli("report", model, "-o", tmp_path / "pages")
    assert done.out == f"wrote {tmp_path / 'pages' / 'model.html'}\n"
