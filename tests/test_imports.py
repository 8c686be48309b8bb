"""Imports go one way, and importing attnserve needs no more than its base dependencies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FROM_EXTRAS = (
    "beartype",
    "httpx",
    "hypothesis",
    "jaxtyping",
    "onnxruntime",
    "pytest",
    "sentence_transformers",
    "torch",
    "transformers",
)


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def lint(config: Path) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys, importlinter.cli as cli\n"
        "sys.exit(cli.lint_imports(config_filename=sys.argv[1], no_cache=True))"
    )
    return python(code, str(config))


def test_the_contract_of_pyproject_holds():
    done = lint(ROOT / "pyproject.toml")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("kept", "broken", "complaint"),
    [
        (
            '    "drawing | onnx_file | session",\n',
            '    "drawing | onnx_file",\n',
            "attnserve.session",
        ),  # a module without a place
        (
            '"text | inputs",\n    "artifact",',
            '"artifact",\n    "text | inputs",',
            "attnserve.text",
        ),
    ],
)
def test_the_contract_bites(kept: str, broken: str, complaint: str, tmp_path: Path):
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count(kept) == 1
    config = tmp_path / "pyproject.toml"
    config.write_text(text.replace(kept, broken))
    done = lint(config)
    assert done.returncode != 0 and complaint in done.stdout


@pytest.mark.parametrize(
    "modules",
    [
        ["graph_passes"],
        ["attnserve"],
        ["attnserve.cli"],
        ["service", "service.app"],
        [f"attnserve.{path.stem}" for path in sorted((ROOT / "attnserve").glob("[a-z]*.py"))],
        [f"graph_passes.{path.stem}" for path in sorted((ROOT / "graph_passes").glob("[a-z]*.py"))],
    ],
    ids=lambda modules: modules[0],
)
def test_importing_needs_no_extra(modules: list[str]):
    """Neither torch nor ONNX Runtime: a command that needs one says which extra to install."""
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"
    )
    done = python(code, *modules)
    assert done.returncode == 0, done.stderr
    assert not set(FROM_EXTRAS) & set(json.loads(done.stdout))
