"""The public names of ``graph_passes``."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import pytest

import graph_passes
from graph_passes import public
from tests.graph_passes.graphs import attention


@pytest.mark.parametrize("name", graph_passes.__all__)
def test_public_name_is_imported_on_first_use(name: str) -> None:
    assert getattr(graph_passes, name) is getattr(public, name)


def test_unknown_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="NoSuchPass"):
        _ = graph_passes.NoSuchPass


def test_typed_imports_are_the_public_names() -> None:
    tree = ast.parse(Path(public.__file__).read_text(encoding="utf-8"))
    imported = [
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graph_passes")
        for alias in node.names
    ]
    assert sorted(imported) == sorted({*graph_passes.__all__, "Registry"} - {"PASSES"})


def test_registered_passes_are_public() -> None:
    classes = {
        each.__name__ for each in graph_passes.PASSES if each.__module__.startswith("graph_passes.")
    }
    assert classes <= set(graph_passes.__all__)


@pytest.mark.parametrize(
    ("module", "others"),
    [("graph_passes", {"numpy", "onnx_ir"}), ("graph_passes.errors", {"graph_passes.public"})],
)
def test_import_loads_no_more_than_needed(module: str, others: set[str]) -> None:
    code = f"import sys, {module}; print(sorted({others} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_module_example_runs() -> None:
    model = attention()
    result = doctest.testmod(graph_passes, extraglobs={"model": model})
    assert result.attempted >= 5
    assert result.failed == 0
