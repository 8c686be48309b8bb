"""Names in tables, and options in place of Python parameters."""

from __future__ import annotations

import json
from inspect import signature
from typing import Any, get_type_hints

import pytest
from typer.main import get_command

import attnserve
from attnserve.cli import display
from attnserve.cli.app import app
from attnserve.cli.display import option_names, print_qualities, shorten_names, with_options
from tests.attnserve.qualities import fidelity_of, quality_of


@pytest.mark.parametrize("width", [80, 120])
def test_shorten_names_long_names_lose_common_parts(width: int):
    names = [f"network.encoder.layer.{i}.attention.self" for i in range(12)]
    short, legend = shorten_names(names, width=width - 66)
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
        (["a.b.0.self", "a.b.1.self", "ffn_0"], ["..b.0", "..b.1", "ffn_0"]),
    ],
)
def test_shorten_names_results_are_distinct(names: list[str], short: list[str]):
    assert shorten_names(names, width=3)[0] == short


@pytest.mark.parametrize(
    ("command", "text", "shown"),
    [
        ("optimize", "`prune` is 2.0", "--prune is 2.0"),
        ("optimize", "give `collab_dk` or `calib`", "give --collab-dk or --calib"),
        ("optimize", "lower `sequence`", "lower --seq"),
        ("optimize", "`precision` is float16", "--precision is float16"),
        ("optimize", "leave `refit` out", "leave --no-refit out"),
        ("bench", "`batches` and `sequences`", "--batch and --seq"),
        ("bench", "`precision` and `prune`", "`precision` and `prune`"),
        ("inspect", "run `attnserve optimize`, `nonsense`", "run `attnserve optimize`, `nonsense`"),
        ("deploy triton", "choose another `repository`", "choose another DIR"),
        ("deploy triton", "`max_batch` is 1", "--max-batch is 1"),
    ],
)
def test_with_options_parameters_become_options_of_the_command(command: str, text: str, shown: str):
    found: Any = get_command(app)
    for name in command.split():
        found = found.commands[name]
    assert with_options(text, option_names(found)) == shown


@pytest.mark.parametrize(
    "name",
    [
        "optimize",
        "plan",
        pytest.param("recover", marks=pytest.mark.export),
        "analyze",
        "verify",
        "evaluate",
        "bench",
        "report",
    ],
)
def test_option_names_cover_parameters_of_the_python_function(name: str):
    command: Any = get_command(app)
    function = getattr(attnserve, name)
    hints = get_type_hints(getattr(function, "__wrapped__", function))
    groups = {name for name, hint in hints.items() if hasattr(hint, "model_fields")}
    parameters = set(signature(function).parameters) - groups
    missing = {"progress", "batch_size"} | ({"also_prove"} if name == "plan" else set())
    assert parameters - option_names(command.commands[name]).keys() <= missing


def test_print_qualities_names_outputs_if_there_are_several(capsys: pytest.CaptureFixture[str]):
    one, two = (quality_of("r2", 0.9, rows=5, output=name) for name in ("x", "y"))
    print_qualities("quality", fidelity_of(one, data="rows.txt"))
    print_qualities("verified", fidelity_of(one, two, data="rows.txt"))
    starts = [line.partition(":")[0] for line in capsys.readouterr().out.splitlines()]
    assert starts == ["quality (rows.txt)", "verified of x (rows.txt)", "verified of y (rows.txt)"]


def test_names_of_files_do_not_control_the_terminal(capsys: pytest.CaptureFixture[str]):
    name = "a\x1b]0;title\x07\x1b[2J\x9b31mb"
    display.print_line(name)
    display.print_message(name)
    display.print_table(name, ["name"], [(name,)])
    shown = "".join(capsys.readouterr())
    assert not set("\x1b\x07\x9b") & set(shown)
    assert shown.count("\\x1b]0;title\\x07\\x1b[2J") == 4


def test_print_table_formats_values_and_shows_names_as_they_are(
    capsys: pytest.CaptureFixture[str],
):
    rows = [("1 x 8",), ("a[b]", 0.12345, None), (), ("[bold]", 2, 3)]
    display.print_table("title", ("name", ">loss:.2f", ">count"), rows, "legend")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip(" ─")]
    assert lines == [
        ["title"],
        ["name", "loss", "count"],
        ["1", "x", "8"],
        ["a[b]", "0.12", "-"],
        ["[bold]", "2.00", "3"],
        ["legend"],
    ]


def test_print_json_integers_of_more_than_64_bits(capsys: pytest.CaptureFixture[str]):
    display.print_json({"macs": 1 << 70})
    assert json.loads(capsys.readouterr().out) == {"macs": 1 << 70}
