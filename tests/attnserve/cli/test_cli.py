"""The command line: exit codes, streams, and one short error for every mistake."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
from onnx import parser

import attnserve
from attnserve.cli.app import main
from attnserve.models.artifact import open_artifact

ROOT = Path(__file__).parents[3]


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    def json(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return json.loads(self.out)


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    # `serve` sends the log to stderr for good, which here is closed after the test.
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)

    def run(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return run


def tree(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def refused(outcome: Outcome, reason: str) -> None:
    """Exit code 2, nothing on stdout, at most three lines that say what is wrong and what to do."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    lines = outcome.err.strip().splitlines()
    assert 2 <= len(lines) <= 3, outcome.err
    assert lines[0].startswith("error: ") and lines[1].startswith("  ")
    assert re.search(reason, outcome.err), outcome.err
    assert "Traceback" not in outcome.err and "unexpected" not in outcome.err


def python(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python -c``: the code, then its arguments."""
    command = [sys.executable, "-c", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "attnserve", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, **options)


# Results


def test_inspect_prints_a_table_that_fits_and_the_sums(cli: Cli, tiny: Path):
    done = cli("inspect", tiny)
    assert done.code == 0 and done.err == ""
    title, *table = done.out.splitlines()[:8]
    assert title.startswith(f"{tiny}: ")  # one line, however long the path
    assert max(map(len, table)) <= 80
    assert "4 x 8" in done.out and "standard" in done.out
    assert "2 certified, 0 missed" in done.out


def test_inspect_prints_one_json_object(cli: Cli, tiny: Path):
    content = cli("inspect", tiny, "--batch", 2, "--seq", 16, "--json").json()
    assert {"attention", "missed", "parameters", "macs"} <= content.keys()
    assert (content["macs"]["batch"], content["macs"]["sequence"]) == (2, 16)


def test_inspect_of_a_model_without_attention_is_no_error(cli: Cli, tmp_path: Path):
    path = tmp_path / "m.onnx"
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => (float[n, 4] y)'
        " { [last] y = Softmax<axis = -1>(x) }"
    )
    onnx.save(parser.parse_model(text), path)
    done = cli("inspect", path)
    assert done.code == 0 and "missed last: " in done.out
    assert cli("inspect", path, "--json").json()["attention"] == []
    refused(cli("optimize", path, "-o", tmp_path / "new", "--collab-dk", 4), r"\(last: ")


def test_optimize_verify_and_inspect_work_together(
    cli: Cli, tiny: Path, sentences: Path, tmp_path: Path
):
    new = tmp_path / "new"
    done = cli("optimize", tiny, "-o", new, "--collab-dk", "24,12", "--calib", sentences, "--json")
    content = done.json()
    assert [step["rank"] for step in content["steps"]] == [24, 12]
    assert all(line.startswith("warning: ") for line in done.err.splitlines())
    assert content["warnings"] == [line[9:] for line in done.err.splitlines()]
    measured = cli("verify", tiny, new, "--data", sentences, "--json").json()
    assert {"outputs", "mean_cosine", "min_cosine"} <= measured.keys()
    shown = cli("verify", tiny, new)
    assert shown.code == 0 and "last_hidden_state" in shown.out
    read = cli("inspect", new)
    assert "collaborative" in read.out
    assert "no collaborate or truncate for 0-1: its heads are collaborative already" in read.out


def test_optimize_prints_what_was_done(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", "--collab-dk", 16, "--layers", 1)
    assert done.code == 0
    assert "parameters " in done.out and "cosine to the original: mean" in done.out
    assert "warning: not calibrated" in done.err
    assert "warning" not in cli(
        "optimize", tiny, "-o", tmp_path / "quiet", "--collab-dk", 16, "--quiet"
    ).err  # fmt: skip


def test_a_change_of_precision_alone_has_no_table_of_layers(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", "--fp16")
    assert done.code == 0 and "weights in float16" in done.out
    assert "rewrite" not in done.out and "\n\n" not in done.out


def test_a_dry_run_writes_nothing(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", "--collab-dk", 16, "--dry-run")
    assert done.code == 0 and "nothing was written" in done.out
    assert not any(tmp_path.iterdir())


def test_a_promise_that_is_broken_exits_1(cli: Cli, tiny: Path, tmp_path: Path):
    new = tmp_path / "new"
    done = cli("optimize", tiny, "-o", new, "--collab-dk", 1, "--min-cosine", 1)
    assert done.code == 1 and "nothing was written" in done.err and not new.exists()
    assert cli("optimize", tiny, "-o", new, "--collab-dk", 2, "--min-cosine", -1).code == 0
    done = cli("verify", tiny, new, "--min-cosine", 1, "--json")
    assert done.code == 1 and json.loads(done.out)["mean_cosine"] < 1
    assert len(done.err.splitlines()) == 2 and "expected at least 1.0" in done.err
    assert cli("verify", tiny, new, "--min-cosine", -1).code == 0


def test_evaluate_prints_a_score(cli: Cli, tiny: Path, tmp_path: Path):
    data = tmp_path / "sts.tsv"
    data.write_text(
        "score\tsentence1\tsentence2\n5\ta man\ta man\n1\ta dog\tthe park\n3\ta cat\ta dog\n"
    )
    content = cli("evaluate", tiny, "--task", "sts", "--data", data, "--json").json()
    assert list(content) == ["task", "rows", "spearman", "pearson", "spearman_ci95"]
    assert "spearman" in cli("evaluate", tiny, "--task", "sts", "--data", data).out


def test_bench_prints_a_table_that_fits(cli: Cli, tiny: Path, tmp_path: Path):
    options = ("--seq", "4,8", "--rounds", 2)
    long = Path(shutil.copytree(tiny, tmp_path / "a-folder-with-a-long-name"))
    done = cli("bench", tiny, long, *options)
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[0] == f"1: {tiny}" and lines[1] == f"2: {long}"
    assert max(map(len, lines[2:])) <= 80
    assert "1 x 4" in done.out and "1 x 8" in done.out
    content = cli("bench", tiny, *options, "--json").json()
    assert [row["sequence"] for row in content["results"]] == [4, 8]


@pytest.mark.parametrize("width", [80, 120])
def test_long_names_are_shown_by_what_tells_them_apart(width: int, monkeypatch: pytest.MonkeyPatch):
    from attnserve.cli.app import _short

    names = [f"network.encoder.layer.{i}.attention.self" for i in range(12)]
    short, legend = _short(names, room=width - 66)
    if width == 120:
        assert (short, legend) == (names, "")
    else:
        assert short == [f"..layer.{i}" for i in range(12)]
        assert legend == "..layer.0 is network.encoder.layer.0.attention.self, and so on"


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["/a/b/attn"] * 1, ["/a/b/attn"]),
        (["/enc/0/attn", "/dec/0/attn"], ["/enc", "/dec"]),
        (["x.0.self", "x.0.cross"], ["..0.self", "..0.cross"]),
        (["prefix.one", "other"], ["prefix.one", "other"]),
        (["same.name", "same.name"], ["..name", "..name"]),
    ],
)
def test_names_of_any_kind_stay_apart(names: list[str], short: list[str]):
    from attnserve.cli.app import _short

    assert _short(names, room=3)[0] == short


def test_brackets_in_names_are_no_markup(cli: Cli, tiny: Path, tmp_path: Path):
    copy = Path(shutil.copytree(tiny, tmp_path / "[red]x[/blue]"))
    done = cli("inspect", copy)
    assert done.code == 0 and "[red]x[/blue]" in done.out.replace("\n", "")


# Usage


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["inspect"], "(?i)missing argument"),
        (["inspect", "m", "--nonsense"], "(?i)no such option"),
        (["nonsense"], "(?i)no such command"),
        (["analyze", "m"], "(?i)missing option"),
        (["inspect", "m", "--seq", "-1"], "--seq"),
        (["inspect", "m", "--seq", "0"], "--seq"),
        (["inspect", "m", "--seed", "one"], "--seed"),
        (["inspect", "m", "--seed", "-1"], "--seed"),
        (["inspect", "m", "--batch", "1.5"], "--batch"),
        (["verify", "a", "b", "--provider", "tpu"], "--provider"),
        (["verify", "a", "b", "--threads", "-1"], "--threads"),
        (
            ["verify", "a", "b", "--min-cosine", "2"],
            "--min-cosine is 2.0: expected a value between -1 and 1",
        ),
        (["verify", "a", "b", "--min-cosine", "nan"], "--min-cosine is nan"),
        (["evaluate", "m", "--task", "poetry", "--data", "d"], "--task"),
        (["evaluate", "m", "--task", "sts", "--data", "d", "--pooling", "max"], "--pooling"),
        (["export", "m", "-o", "d", "--exporter", "magic"], "--exporter"),
        (["bench", "m", "--seq", "a"], "--seq 'a': expected whole numbers"),
        (["bench", "m", "--batch", "0"], "--batch '0': expected numbers from 1 up"),
        (["bench"], "(?i)missing argument"),
        (["serve", "m", "--port", "99999"], "--port"),
    ],
    ids=" ".join,
)
def test_wrong_usage_is_explained(cli: Cli, arguments: list[str], reason: str):
    refused(cli(*arguments), reason)


def test_version_is_printed(cli: Cli):
    assert cli("--version") == Outcome(0, f"attnserve {attnserve.__version__}\n", "")


def test_help_and_version_import_no_heavy_module():
    code = (
        "import sys\n"
        "from attnserve.__main__ import main\n"
        "code = main([sys.argv[1]])\n"
        "heavy = {'numpy', 'onnx', 'onnx_ir', 'scipy'} & sys.modules.keys()\n"
        "print(sorted(heavy), file=sys.stderr)\n"
        "sys.exit(code)"
    )
    for option in ("--help", "--version"):
        done = python(code, option)
        assert (done.returncode, done.stderr) == (0, "[]\n")


def test_help_is_on_stdout(cli: Cli):
    done = cli("--help")
    assert done.code == 0 and "optimize" in done.out and done.err == ""
    assert cli("optimize", "--help").code == 0


def test_no_arguments_print_the_help(cli: Cli):
    done = cli()
    assert done.code in (0, 2) and "Usage" in done.out + done.err


@pytest.mark.parametrize("command", ["inspect", "serve", "bench", "verify", "optimize", "evaluate"])
def test_a_model_that_is_not_there_is_refused(cli: Cli, tmp_path: Path, command: str):
    more = {
        "verify": [tmp_path / "other"],
        "optimize": ["-o", tmp_path / "new", "--collab-dk", 4],
        "evaluate": ["--task", "sts", "--data", tmp_path / "d.tsv"],
    }
    refused(cli(command, tmp_path / "none", *more.get(command, [])), "no such file or folder")
    assert not any(tmp_path.iterdir())


# Bad input to optimize: each a short error, and nothing written

Spoil = Callable[[Path], Sequence[object] | None]


def append(name: str, content: bytes) -> Spoil:
    return lambda model: (model / name).write_bytes(content) and None


def options(*given: object) -> Spoil:
    return lambda model: given


def text(content: str | bytes) -> Spoil:
    def spoil(model: Path) -> Sequence[object]:
        path = model / "calib.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--calib", path]

    return spoil


def arrays(**given: Any) -> Spoil:
    def spoil(model: Path) -> Sequence[object]:
        np.savez(model / "calib.npz", **given)
        return ["--calib", model / "calib.npz"]

    return spoil


def removed(name: str) -> Spoil:
    def spoil(model: Path) -> Sequence[object]:
        (model / name).unlink()
        (model / "calib.txt").write_text("a man\n")
        return ["--calib", model / "calib.txt"]

    return spoil


def edited(change: Callable[[onnx.ModelProto], object]) -> Spoil:
    def spoil(model: Path) -> None:
        proto = onnx.load(model / "model.onnx")
        change(proto)
        (model / "model.onnx").write_bytes(proto.SerializeToString())

    return spoil


def truncated(model: Path) -> None:
    path = model / "model.onnx"
    path.write_bytes(path.read_bytes()[:-1000])


def only_text(model: Path) -> None:
    (model / "model.onnx").unlink()


def without_limits(model: Path) -> Sequence[object]:
    """Nothing says how many positions the model has, and the text is longer."""
    (model / "attnserve.json").unlink()
    (model / "tokenizer_config.json").unlink()
    return text("dog " * 300)(model) or ()


ROW = np.ones((3, 5), np.int64)
FEED = {"input_ids": ROW, "attention_mask": ROW, "token_type_ids": ROW * 0}

MISTAKES: dict[str, tuple[Spoil, str]] = {
    "text for a model": (append("model.onnx", b"hello " * 50), "not an ONNX file"),
    "jpeg for a model": (append("model.onnx", b"\xff\xd8\xff\xe0\0JFIF" * 9), "not an ONNX file"),
    "truncated model": (truncated, "or truncated"),
    "folder without a model": (only_text, r"expected model\.onnx in this folder"),
    "bad operator": (
        edited(lambda m: setattr(m.graph.node[-1], "op_type", "Explode")),
        "Explode",
    ),
    "unknown opset": (edited(lambda m: setattr(m.opset_import[0], "version", 999)), "."),
    "no opset": (edited(lambda m: m.ClearField("opset_import")), "no opset is declared"),
    "R of 0": (options("--collab-dk", 0), "expected 1 to 32"),
    "negative R": (options("--collab-dk", -8), "expected 1 to 32"),
    "R above H*K": (options("--collab-dk", 33), "33: expected 1 to 32"),
    "huge R": (options("--collab-dk", 10**30), "expected 1 to 32"),
    "R no number": (options("--collab-dk", "many"), "expected whole numbers"),
    "R of 1.5": (options("--collab-dk", "1.5"), "expected whole numbers"),
    "no R": (options("--collab-dk", ""), "expected whole numbers"),
    "too many R": (options("--collab-dk", "8,8,8"), "names 3 sizes for 2 layers"),
    "unknown layer": (options("--layers", 7), "no attention is called '7'"),
    "negative length": (options("--seq", -4), "--seq"),
    "bound that is no cosine": (options("--min-cosine", 7), "--min-cosine is 7"),
    "calibration missing": (options("--calib", "/nowhere.txt"), "no such file"),
    "calibration empty": (text(""), "the file has no text"),
    "calibration blank": (text("\n \n"), "the file has no text"),
    "calibration binary": (text(bytes(range(256))), "not UTF-8 text"),
    "calibration longer than the model": (without_limits, "the model refuses the inputs"),
    "calibration of a path too long": (options("--calib", "/" + "x" * 5000), "name too long"),
    "arrays of other names": (arrays(a=ROW), r"missing .*input_ids"),
    "arrays of another type": (arrays(**(FEED | {"input_ids": ROW / 2})), "is float64"),
    "arrays of other rows": (arrays(**(FEED | {"input_ids": ROW[:2]})), "rows"),
    "arrays without rows": (arrays(**{k: v[:0] for k, v in FEED.items()}), "rows"),
    "arrays without tokens": (arrays(**{k: v[:, :0] for k, v in FEED.items()}), "."),
    "ids outside the vocabulary": (arrays(**(FEED | {"input_ids": ROW * 9999})), "refuses"),
    "arrays of padding": (arrays(**(FEED | {"attention_mask": ROW * 0})), "no unmasked token"),
    "tokenizer missing": (removed("tokenizer.json"), "--tokenizer"),
    "tokenizer broken": (
        lambda model: [
            (model / "tokenizer.json").write_text("{"),
            *(text("a")(model) or ()),
        ][1:],
        r"not a tokenizer\.json",
    ),
    "tokenizer of a path that is not there": (
        lambda model: [*(text("a")(model) or ()), "--tokenizer", model / "none.json"],
        "no such file",
    ),
    "record broken": (append("attnserve.json", b"{"), "not valid JSON"),
    "record no object": (append("attnserve.json", b"[]"), "expected a JSON object"),
    "output on a device": (options("-o", "/dev/null/x"), "not a writable folder"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_explained_and_nothing_is_written(
    cli: Cli, model: Path, tmp_path: Path, mistake: str
):
    spoil, reason = MISTAKES[mistake]
    more = spoil(model) or ()
    before = tree(tmp_path)
    refused(cli("optimize", model, "-o", tmp_path / "a" / "new", "--collab-dk", 16, *more), reason)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("force", [[], ["--force"]])
@pytest.mark.parametrize("output", ["model", "model/model.onnx", "link", "link/model.onnx"])
def test_the_input_is_no_output(
    cli: Cli, model: Path, tmp_path: Path, output: str, force: list[str]
):
    (tmp_path / "link").symlink_to(model)
    before = tree(tmp_path)
    done = cli("optimize", model, "-o", tmp_path / output, "--collab-dk", 16, *force)
    refused(done, "the output is the input")
    assert tree(tmp_path) == before


def test_an_output_that_exists_needs_force(cli: Cli, model: Path, tmp_path: Path):
    for output in (tmp_path / "new" / "model.onnx", model / "new.onnx"):
        output.parent.mkdir(exist_ok=True)
        if output.parent != model:
            output.write_text("precious")
        before = tree(tmp_path)
        refused(
            cli("optimize", model, "-o", output, "--collab-dk", 16), "exists already\n.*--force"
        )
        assert tree(tmp_path) == before
    new = tmp_path / "new"
    assert cli("optimize", model, "-o", new, "--collab-dk", 16, "--force").code == 0


def test_a_path_below_a_file_is_no_output(cli: Cli, tiny: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    for output in ("file/new.onnx", "file/a/b"):
        done = cli("optimize", tiny, "-o", tmp_path / output, "--collab-dk", 16)
        refused(done, "not a writable folder")


# Without -o

DEFAULTS: dict[str, tuple[str, list[str], set[str]]] = {
    "optimize": (
        "{name}-optimized",
        ["--collab-dk", "16"],
        {"model.onnx", "attnserve.json", "tokenizer.json", "tokenizer_config.json", "config.json"},
    ),
    "analyze": ("{name}-analysis", [], {"analysis.json", "mask.json", "report.html"}),
    "plan": ("", ["--keep", "0.9"], {"plan.json", "plan.svg"}),
}


def without_output(command: str, model: Path, calib: Path) -> list[object]:
    return [command, model, *DEFAULTS[command][1], "--calib", calib, "--json"]


def work_is_refused(*_: object, **__: object) -> None:
    raise AssertionError("the output is checked before the data is read")


SEARCHING = pytest.param("plan", marks=pytest.mark.timing(seconds=20))


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


@pytest.mark.parametrize("command", DEFAULTS)
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
        for module in ("planning.optimize", "reports.html", "planning.command"):
            patch.setattr(import_module(f"attnserve.{module}"), "load_inputs", work_is_refused)
        refused(cli(*without_output(command, model, sentences)), "exists already\n.*--force")
    assert tree(tmp_path) == before
    assert cli(*without_output(command, model, sentences), "--force").code == 0
    assert files <= {path.name for path in written.iterdir()}
    assert unrelated.read_text() == "mine"


def test_default_output_is_named_after_the_resolved_folder(
    cli: Cli, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(model)
    done = cli("optimize", ".", "--collab-dk", 16)
    assert done.code == 0
    assert done.out.startswith(f"wrote {tmp_path.resolve() / 'model-optimized' / 'model.onnx'}\n")
    assert (tmp_path / "model-optimized" / "model.onnx").is_file()


def test_default_output_of_a_file_is_beside_the_file(cli: Cli, model: Path):
    (model / "model.onnx").rename(model / "encoder.onnx")
    assert cli("optimize", model / "encoder.onnx", "--collab-dk", 16, "--dry-run").code == 0
    assert not (model / "encoder-optimized").exists()
    done = cli("optimize", model / "encoder.onnx", "--collab-dk", 16, "--json").json()
    assert done["output"] == str(model / "encoder-optimized" / "model.onnx")
    assert (model / "encoder-optimized" / "attnserve.json").is_file()


def test_output_path_is_not_recorded_in_the_artifact(cli: Cli, model: Path, tmp_path: Path):
    assert cli("optimize", model, "--collab-dk", 16).code == 0
    record = (tmp_path / "model-optimized" / "attnserve.json").read_text()
    assert str(tmp_path) not in record


def test_failed_check_without_output_leaves_no_folder(cli: Cli, model: Path, tmp_path: Path):
    done = cli("optimize", model, "--collab-dk", 1, "--min-cosine", 1)
    assert done.code == 1 and list(tmp_path.iterdir()) == [model]


def test_functions_without_output_return_where_they_wrote(
    model: Path, sentences: Path, tmp_path: Path
):
    optimized = attnserve.optimize(model, collab_dk=16)
    assert optimized.output == tmp_path / "model-optimized" / "model.onnx"
    assert attnserve.analyze(model, calib=sentences).output == tmp_path / "model-analysis"
    assert attnserve.plan(model, calib=sentences, keep=0.9).output == tmp_path / "plan.json"


def test_second_model_in_a_folder_keeps_the_record_of_the_first(
    cli: Cli, model: Path, tmp_path: Path
):
    folder = tmp_path / "both"
    for name, rank in (("a", 16), ("b", 8)):
        assert cli("optimize", model, "-o", folder / f"{name}.onnx", "--collab-dk", rank).code == 0
    for name, rank in (("a", 16), ("b", 8)):
        steps = open_artifact(folder / f"{name}.onnx").lineage[-1]["steps"]
        assert {step["rank"] for step in steps} == {rank}


def test_models_of_different_kinds_are_not_verified(cli: Cli, tiny: Path, tmp_path: Path):
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[n] x) => (float[n] y) { y = Exp(x) }'
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    refused(cli("verify", tiny, tmp_path / "m.onnx"), "different inputs")


def test_a_score_without_its_columns_is_refused(cli: Cli, tiny: Path, tmp_path: Path):
    (tmp_path / "d.tsv").write_text("a\tb\n1\t2\n")
    refused(cli("evaluate", tiny, "--task", "sts", "--data", tmp_path / "d.tsv"), "score")


def test_an_error_of_ours_is_short_and_verbose_shows_the_traceback(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("attnserve.inspect", broken)
    done = cli("inspect", tiny)
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 2
    assert "unexpected ZeroDivisionError: by nothing" in done.err and "--verbose" in done.err
    assert "Traceback" in cli("inspect", tiny, "--verbose").err


def test_an_interrupt_is_an_exit_code_and_a_line(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnserve.inspect", interrupted)
    done = cli("inspect", tiny)
    assert done.code == 130 and done.out == ""
    assert done.err.strip() == "interrupted: no partial output was written"


@pytest.mark.parametrize("module", ["typer", "rich.console", "onnx_ir", "attnserve.checks.inspect"])
def test_interrupt_during_an_import_exits_130_with_one_line(module: str, tiny: Path):
    """Ctrl-C within the first second: the modules of the command line, or of a command."""
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == sys.argv[1]: raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from attnserve.__main__ import main\n"
        "sys.exit(main(['inspect', sys.argv[2]]))"
    )
    done = python(code, module, tiny)
    assert (done.returncode, done.stdout) == (130, "")
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("interrupted")


# As a program


def test_the_program_prints_json_and_nothing_else(tiny: Path, tmp_path: Path):
    done = process("optimize", tiny, "-o", tmp_path / "new", "--collab-dk", 16, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]
    done = process("inspect", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.process
def test_sentences_are_not_wrapped_for_programs(tiny: Path):
    done = process("inspect", tiny, env={**os.environ, "COLUMNS": "40"})
    assert re.search(r"^2 certified, 0 missed; .* in attention$", done.stdout, re.MULTILINE)


@pytest.mark.process
def test_the_same_command_writes_the_same_bytes(tiny: Path, sentences: Path, tmp_path: Path):
    for name in ("one", "two"):
        done = process(
            "optimize", tiny, "-o", tmp_path / name, "--collab-dk", 12, "--calib", sentences
        )
        assert done.returncode == 0, done.stderr
    assert tree(tmp_path / "one") == tree(tmp_path / "two")


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise")
def test_a_program_that_is_interrupted_leaves_nothing(tiny: Path, tmp_path: Path):
    calib = tmp_path / "calib.txt"
    calib.write_text("the man is playing with the dog in the park\n" * 200_000)
    before = tree(tmp_path)
    command = [sys.executable, "-m", "attnserve", "optimize", str(tiny), "-o"]
    command += [str(tmp_path / "new"), "--collab-dk", "16", "--calib", str(calib)]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True,
        # A job in the background of a shell ignores Ctrl-C, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as program:  # fmt: skip
        time.sleep(4)
        program.send_signal(signal.SIGINT)
        assert program.wait(60) == 130
        assert program.stderr is not None
        assert program.stderr.read().strip().endswith("no partial output was written")
    assert tree(tmp_path) == before
