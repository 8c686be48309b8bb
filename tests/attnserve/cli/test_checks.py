"""inspect, verify, evaluate and bench: tables, JSON and errors."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import parser

from tests.attnserve.cli.commands import Cli, process, refused
from tests.onnx_text import EXP, SOFTMAX


def test_inspect_prints_table_within_80_columns_and_totals(cli: Cli, tiny: Path):
    done = cli("inspect", tiny)
    assert done.code == 0 and done.err == ""
    title, *table = done.out.splitlines()[:8]
    assert title.startswith(f"{tiny}: ")  # one line, however long the path
    assert max(map(len, table)) <= 80
    assert "4 x 8" in done.out and "standard" in done.out
    assert "2 certified, 0 unmatched" in done.out


def test_inspect_json_prints_one_object(cli: Cli, tiny: Path):
    content = cli("inspect", tiny, "--batch", 2, "--seq", 16, "--json").json()
    assert {"attention", "missed", "parameters", "macs"} <= content.keys()
    assert (content["macs"]["batch"], content["macs"]["sequence"]) == (2, 16)


def test_inspect_without_attention_exits_0(cli: Cli, tmp_path: Path):
    path = tmp_path / "m.onnx"
    onnx.save(parser.parse_model(SOFTMAX), path)
    done = cli("inspect", path)
    assert done.code == 0 and "unmatched last: " in done.out
    assert cli("inspect", path, "--json").json()["attention"] == []
    refused(cli("optimize", path, "-o", tmp_path / "new", "--collab-dk", 4), "last: ")


def test_inspect_prints_brackets_in_names_literally(cli: Cli, tiny: Path, tmp_path: Path):
    copy = Path(shutil.copytree(tiny, tmp_path / "[red]x[/blue]"))
    done = cli("inspect", copy)
    assert done.code == 0 and "[red]x[/blue]" in done.out.replace("\n", "")


@pytest.mark.process
def test_lines_on_stdout_are_not_wrapped(tiny: Path):
    done = process("inspect", tiny, env={**os.environ, "COLUMNS": "40"})
    assert re.search(r"^2 certified, 0 unmatched; .* in attention$", done.stdout, re.MULTILINE)


def test_verify_different_inputs_is_refused(cli: Cli, tiny: Path, tmp_path: Path):
    onnx.save(parser.parse_model(EXP), tmp_path / "m.onnx")
    refused(cli("verify", tiny, tmp_path / "m.onnx"), "inputs")


def test_verify_not_finite_output_fails_and_names_output_and_rows(cli: Cli, tmp_path: Path):
    for name, text in (
        ("a", "y = Identity(x) again = Identity(y)"),
        ("b", "n = Sqrt(x) d = Sub(n, n) y = Add(x, d) again = Identity(y)"),
    ):
        graph = (
            f'<ir_version: 8, opset_import: ["" : 17]> g (float[n, 4] x) => '
            f"(float[n, 4] y, float[n, 4] again) {{ {text} }}"
        )
        onnx.save(parser.parse_model(graph), tmp_path / f"{name}.onnx")
    rows = np.ones((5, 4), np.float32)
    rows[[1, 3], 2] = -1  # their square root is NaN
    np.savez(tmp_path / "x.npz", x=rows)
    files = tmp_path / "a.onnx", tmp_path / "b.onnx"
    done = cli("verify", *files, "--data", tmp_path / "x.npz")
    assert done.code == 1
    assert "y = again" in done.err and "rows 1, 3" in done.err
    assert "e+308" not in done.out + done.err
    done = cli("verify", *files[::-1], "--data", tmp_path / "x.npz")
    assert done.code == 0, "rows that are NaN in the original alone are left out"
    assert "rows 1, 3" in done.err and "e+308" not in done.out + done.err


def test_evaluate_prints_score_and_json(cli: Cli, tiny: Path, tmp_path: Path):
    data = tmp_path / "sts.tsv"
    data.write_text(
        "score\tsentence1\tsentence2\n5\ta man\ta man\n1\ta dog\tthe park\n3\ta cat\ta dog\n"
    )
    content = cli("evaluate", tiny, "--task", "sts", "--data", data, "--json").json()
    assert list(content) == ["task", "rows", "spearman", "pearson", "spearman_ci95"]
    assert "spearman" in cli("evaluate", tiny, "--task", "sts", "--data", data).out


def test_evaluate_without_score_column_is_refused(cli: Cli, tiny: Path, tmp_path: Path):
    (tmp_path / "d.tsv").write_text("a\tb\n1\t2\n")
    refused(cli("evaluate", tiny, "--task", "sts", "--data", tmp_path / "d.tsv"), "score")


def test_bench_prints_table_within_80_columns(cli: Cli, tiny: Path, tmp_path: Path):
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
