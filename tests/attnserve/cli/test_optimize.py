"""optimize: results, and one short error for every wrong input, with nothing written."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.attnserve.cli.commands import ROOT, Cli, process, refused
from tests.files import read_record, tree, write_lines

DENSE = ("--collab-dk", 16, "--mixing", "dense")
"""One form: others are not built and compared."""


def test_optimize_verify_and_inspect_work_together(
    cli: Cli, tiny: Path, sentences: Path, tmp_path: Path
):
    new = tmp_path / "new"
    done = cli("optimize", tiny, "-o", new, "--collab-dk", "24,12", "--mixing", "dense",
               "--calib", sentences, "--json")  # fmt: skip
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
    assert re.search(r"^no collaborate.* for 0-1: ", read.out, re.MULTILINE)


def test_optimize_prints_costs_fidelity_and_warnings(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", *DENSE, "--layers", 1)
    assert done.code == 0
    assert "parameters " in done.out and "cosine to the original: mean" in done.out
    assert "warning: not calibrated" in done.err
    assert "warning" not in cli("optimize", tiny, "-o", tmp_path / "quiet", *DENSE, "--quiet").err


def test_optimize_table_shows_remaining_heads(cli: Cli, tiny: Path, tmp_path: Path):
    masks = tmp_path / "masks.json"
    masks.write_text('{"1": [1, 0, 1, 1]}')
    done = cli("optimize", tiny, "--prune-heads", masks, "--no-refit", "--dry-run")
    assert done.code == 0 and "prune" in done.out and "3 heads" in done.out


def test_optimize_precision_alone_prints_no_table(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", "--fp16")
    assert done.code == 0 and "weights in float16" in done.out
    assert "rewrite" not in done.out and "\n\n" not in done.out


def test_optimize_several_calibration_files_report_each(
    cli: Cli, tiny: Path, sentences: Path, tmp_path: Path
):
    other = write_lines(tmp_path / "other.txt", ("dog is happy and " * n for n in range(1, 15)))
    done = cli(
        "optimize", tiny, "-o", tmp_path / "new", *DENSE, "--json", "--calib", sentences,
        "--calib", other, "--calib-weights", "3,1.5", "--seq", "8-64",
    )  # fmt: skip
    qualities = done.json()["qualities"]
    assert {quality["file"] for quality in qualities} == {"sentences.txt", "other.txt"}
    assert done.json()["sequence"] == 23  # the geometric mean
    record = read_record(tmp_path / "new")
    calibration = record["lineage"][-1]["calibration"]
    assert calibration["weights"] == [3, 1.5] and calibration["token_ids"]["distinct"] > 5


def test_optimize_dry_run_writes_nothing(cli: Cli, tiny: Path, tmp_path: Path):
    done = cli("optimize", tiny, "-o", tmp_path / "new", *DENSE, "--dry-run")
    assert done.code == 0 and "nothing was written" in done.out
    assert not any(tmp_path.iterdir())


def test_min_cosine_not_reached_exits_1(cli: Cli, tiny: Path, tmp_path: Path):
    new = tmp_path / "new"
    given = ["-o", new, "--mixing", "dense"]
    done = cli("optimize", tiny, *given, "--collab-dk", 1, "--min-cosine", 1)
    assert done.code == 1 and "nothing was written" in done.err and not new.exists()
    assert cli("optimize", tiny, *given, "--collab-dk", 2, "--min-cosine", -1).code == 0
    done = cli("verify", tiny, new, "--min-cosine", 1, "--json")
    assert done.code == 1 and json.loads(done.out)["mean_cosine"] < 1
    assert len(done.err.splitlines()) == 2 and "1.0" in done.err
    assert cli("verify", tiny, new, "--min-cosine", -1).code == 0


@pytest.mark.process
def test_optimize_twice_writes_same_bytes(tiny: Path, sentences: Path, tmp_path: Path):
    for name in ("one", "two"):
        done = process(
            "optimize", tiny, "-o", tmp_path / name, "--collab-dk", 12, "--mixing", "dense",
            "--calib", sentences,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (without_speeds(tmp_path / name) for name in ("one", "two"))
    assert one == two


def without_speeds(folder: Path) -> dict[str, Any]:
    """The files of a folder, the record and the card without measured speeds."""
    files: dict[str, Any] = dict(tree(folder))
    before, _, rest = files["README.md"].partition(b"## Speed")
    files["README.md"] = before + rest.partition(b"\n## ")[2]
    record = read_record(folder)
    for entry in record["lineage"]:
        assert entry.pop("served_speedup") > 0 and entry.pop("speedups")
    record.pop("files")  # checksums
    return {**files, "attnserve.json": record}


@pytest.mark.process
@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent otherwise")
def test_optimize_interrupted_writes_nothing(tiny: Path, tmp_path: Path):
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


Spoil = Callable[[Path], Sequence[object] | None]


def append(name: str, content: bytes) -> Spoil:
    return lambda model: (model / name).write_bytes(content) and None


def options(*arguments: object) -> Spoil:
    return lambda model: arguments


def text(content: str | bytes) -> Spoil:
    def spoil(model: Path) -> Sequence[object]:
        path = model / "calib.txt"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return ["--calib", path]

    return spoil


def arrays(**content: Any) -> Spoil:
    def spoil(model: Path) -> Sequence[object]:
        np.savez(model / "calib.npz", **content)
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
    (model / "config.json").unlink()
    return text("dog " * 300)(model) or ()


ROW = np.ones((3, 5), np.int64)


FEED = {"input_ids": ROW, "attention_mask": ROW, "token_type_ids": ROW * 0}


MISTAKES: dict[str, tuple[Spoil, str]] = {  # and a pattern with the value that the error names
    "text for a model": (append("model.onnx", b"hello " * 50), r"model\.onnx"),
    "jpeg for a model": (append("model.onnx", b"\xff\xd8\xff\xe0\0JFIF" * 9), r"model\.onnx"),
    "truncated model": (truncated, r"model\.onnx"),
    "folder without a model": (only_text, r"model\.onnx"),
    "bad operator": (
        edited(lambda m: setattr(m.graph.node[-1], "op_type", "Explode")),
        "Explode",
    ),
    "unknown opset": (edited(lambda m: setattr(m.opset_import[0], "version", 999)), "."),
    "no opset": (edited(lambda m: m.ClearField("opset_import")), "opset"),
    "R of 0": (options("--collab-dk", 0), "--collab-dk.* 0.* 32"),
    "R above H*K": (options("--collab-dk", 33), "--collab-dk.* 33.* 32"),
    "huge R": (options("--collab-dk", 10**30), "--collab-dk.* 32"),
    "R no number": (options("--collab-dk", "many"), "--collab-dk.*'many'"),
    "too many R": (options("--collab-dk", "8,8,8"), "--collab-dk.* 3 .* 2 "),
    "unknown layer": (options("--layers", 7), "'7'"),
    "length of 0": (options("--seq", 0), "--seq is '0'"),
    "length of too many digits": (options("--seq", "9" * 5000), "--seq is '999"),
    "calibration missing": (options("--calib", "/nowhere.txt"), "/nowhere.txt"),
    "second calibration file missing": (
        lambda model: [*(text("a")(model) or ()), "--calib", "/nowhere.txt"],
        "/nowhere.txt",
    ),
    "weights without files": (options("--calib-weights", "1,2"), "--calib-weights is 1, 2.* 0 fi"),
    "calibration empty": (text(""), r"calib\.txt"),
    "calibration blank": (text("\n \n"), r"calib\.txt"),
    "calibration binary": (text(bytes(range(256))), r"calib\.txt.*UTF-8"),
    "calibration longer than the model": (without_limits, "inputs"),
    "calibration of a path too long": (options("--calib", "/" + "x" * 5000), "name too long"),
    "arrays of other names": (arrays(a=ROW), "input_ids"),
    "arrays without tokens": (arrays(**{k: v[:, :0] for k, v in FEED.items()}), "."),
    "ids outside the vocabulary": (arrays(**(FEED | {"input_ids": ROW * 9999})), "input_ids"),
    "arrays of padding": (arrays(**(FEED | {"attention_mask": ROW * 0})), "token"),
    "tokenizer missing": (removed("tokenizer.json"), "--tokenizer"),
    "tokenizer broken": (
        lambda model: [
            (model / "tokenizer.json").write_text("{"),
            *(text("a")(model) or ()),
        ][1:],
        r"tokenizer\.json",
    ),
    "tokenizer of a path that is not there": (
        lambda model: [*(text("a")(model) or ()), "--tokenizer", model / "none.json"],
        r"none\.json",
    ),
    "record broken": (append("attnserve.json", b"{"), r"attnserve\.json"),
    "record no object": (append("attnserve.json", b"[]"), r"attnserve\.json"),
    "reuse of no form": (options("--reuse", "some"), "--reuse is 'some'"),
    "reuse of a missing file": (options("--reuse", "none.json"), r"--reuse none\.json"),
    "masks of a missing file": (options("--prune-heads", "none.json"), r"--prune-heads none\.json"),
    "rewrite without data": (options("--prune", 0.25), "--calib"),
    "output on a device": (options("-o", "/dev/null/x"), "/dev/null"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_optimize_wrong_input_is_refused_and_writes_nothing(
    cli: Cli, model: Path, tmp_path: Path, mistake: str
):
    spoil, value = MISTAKES[mistake]
    more = spoil(model) or ()
    before = tree(tmp_path)
    refused(cli("optimize", model, "-o", tmp_path / "a" / "new", *DENSE, *more), value)
    assert tree(tmp_path) == before


def test_optimize_truncates_texts_to_the_positions_of_config_json(cli: Cli, model: Path):
    """Also if nothing else says how long texts may be, as in folders of other exporters."""
    (model / "attnserve.json").unlink()
    (model / "tokenizer_config.json").unlink()
    more = text("\n".join("dog " * n for n in range(290, 310)))(model) or ()
    done = cli("optimize", model, "-o", model.parent / "new", *DENSE, *more)
    assert done.code == 0, done.err


def test_optimize_error_names_the_option_of_the_parameter(cli: Cli, tiny: Path, sentences: Path):
    done = cli("optimize", tiny, "--prune", 2, "--calib", sentences, "--dry-run")
    refused(done, "--prune.* 2")
    assert "`" not in done.err


def test_optimize_conflicting_precisions_are_refused(cli: Cli, tiny: Path):
    refused(cli("optimize", tiny, "--fp16", "--int8"), "--fp16 and --int8 ")
