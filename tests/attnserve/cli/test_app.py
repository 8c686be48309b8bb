"""Usage errors, help, exit codes, streams and interrupts of the program."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import attnserve
from attnserve.cli.app import app
from tests.attnserve.cli.commands import Cli, Outcome, process, python, refused


@pytest.mark.parametrize(
    ("arguments", "value"),
    [
        (["inspect"], "(?i)missing argument"),
        (["inspect", "m", "--nonsense"], "(?i)no such option"),
        (["nonsense"], "(?i)no such command"),
        (["analyze", "m"], "(?i)missing option"),
        (["inspect", "m", "--seq", "-1"], "--seq"),
        (["inspect", "m", "--seq", "0"], "--seq"),
        (["inspect", "m", "--seed", "one"], "--seed"),
        (["inspect", "m", "--batch", "1.5"], "--batch"),
        (["evaluate", "m", "--task", "poetry", "--data", "d"], "--task"),
        (["evaluate", "m", "--task", "sts", "--data", "d", "--pooling", "max"], "--pooling"),
        (["export", "m", "-o", "d", "--exporter", "magic"], "--exporter"),
        (["bench", "m", "--seq", "a"], "--seq is 'a'"),
        (["bench"], "(?i)missing argument"),
        (["serve", "m", "--port", "99999"], "--port"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_wrong_usage_exits_2_and_names_the_option(cli: Cli, arguments: list[str], value: str):
    refused(cli(*arguments), value)


def test_version_prints_name_and_version(cli: Cli):
    assert cli("--version") == Outcome(0, f"attnserve {attnserve.__version__}\n", "")


@pytest.mark.process
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


@pytest.mark.process
@pytest.mark.parametrize(
    ("environment", "expected"), [({}, "1 1"), ({"OMP_NUM_THREADS": "2"}, "2 None")]
)
def test_threads_limit_the_libraries_unless_the_environment_does(
    environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code = (
        "import os, sys\n"
        "from attnserve.__main__ import main\n"
        "main(['bench', 'missing.onnx', '--threads', '1'])\n"
        "names = 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS'\n"
        "print(*map(os.environ.get, names), file=sys.stdout)"
    )
    assert python(code).stdout == f"{expected}\n"


def test_help_prints_on_stdout(cli: Cli):
    done = cli("--help")
    assert done.code == 0 and "optimize" in done.out and done.err == ""
    assert cli("optimize", "--help").code == 0


def test_no_arguments_prints_help(cli: Cli):
    done = cli()
    assert done.code in (0, 2) and "Usage" in done.out + done.err


@pytest.mark.parametrize("command", ["inspect", "serve", "bench", "verify", "optimize", "evaluate"])
def test_missing_model_is_refused(cli: Cli, tmp_path: Path, command: str):
    more = {
        "verify": [tmp_path / "other"],
        "optimize": ["-o", tmp_path / "new", "--collab-dk", 4],
        "evaluate": ["--task", "sts", "--data", tmp_path / "d.tsv"],
    }
    refused(cli(command, tmp_path / "none", *more.get(command, [])), "no such file or folder")
    assert not any(tmp_path.iterdir())


@pytest.mark.process
def test_program_prints_only_json_on_stdout(tiny: Path, tmp_path: Path):
    options = ["--collab-dk", 16, "--mixing", "dense", "--json"]
    done = process("optimize", tiny, "-o", tmp_path / "new", *options)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"]
    done = process("inspect", tmp_path / "none")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 2


def test_unexpected_error_is_short_and_verbose_prints_traceback(
    cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch
):
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("by\nnothing")

    monkeypatch.setattr("attnserve.inspect", broken)
    done = cli("inspect", tiny)
    assert done.code == 2 and done.out == "" and len(done.err.splitlines()) == 2
    assert "unexpected ZeroDivisionError: by nothing" in done.err and "--verbose" in done.err
    assert "Traceback" in cli("inspect", tiny, "--verbose").err


def test_interrupt_exits_130_with_one_line(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("attnserve.inspect", interrupted)
    done = cli("inspect", tiny)
    assert done.code == 130 and done.out == ""
    assert done.err.strip() == "interrupted: no partial output was written"


@pytest.mark.process
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


def commands() -> list[tuple[str, ...]]:
    names = list[tuple[str, ...]]()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        inner = getattr(command, "commands", None)
        names += [(name,)] if inner is None else [(name, each) for each in inner]
    return names


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_command_help_ends_with_a_valid_example(
    cli: Cli, command: tuple[str, ...], width: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", str(width))
    done = cli(*command, "--help")
    assert done.code == 0 and max(map(len, done.out.splitlines())) <= width
    example = done.out.strip().splitlines()[-1].strip()
    start = f"Example: attnserve {' '.join(command)} "
    assert example.startswith(start)
    found: Any = get_command(app)
    for name in command:
        found = found.commands[name]
    found.make_context(command[-1], shlex.split(example.removeprefix(start)))


def test_optimize_help_leads_with_keep_and_collab_dk(cli: Cli):
    shown = cli("optimize", "--help").out
    options = re.findall(r"^│ (--[a-z0-9-]+)", shown, re.MULTILINE)
    assert options[:2] == ["--keep", "--collab-dk"]
    panels = re.findall(r"^╭─ ([A-Za-z ]+) ─", shown, re.MULTILINE)
    assert panels[1:] == [
        "Options", "Automatic search", "Rewrites by hand", "Precision", "Calibration", "Output",
        "Run",
    ]  # fmt: skip


IN_A_FINALIZER = """
import os, signal, time
from attnserve.cli import app

class Late:
    def __del__(self):
        os.kill(os.getpid(), {signal})
        for _ in range(1000):
            pass

def run(arguments):
    late = Late()
    del late
    time.sleep(60)
    return 0

app.main = run
from attnserve.__main__ import main
raise SystemExit(main([]))
"""


@pytest.mark.skipif(os.name != "posix", reason="needs signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_a_finalizer_ends_the_command(number: signal.Signals):
    """Python ignores exceptions there."""
    code = IN_A_FINALIZER.format(signal=int(number))
    ended = python(code, timeout=50)
    assert ended.returncode == 128 + number
    assert "Traceback" not in ended.stderr
