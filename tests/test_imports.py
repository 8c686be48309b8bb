"""Importing the packages needs no more than the base dependencies, and goes in one direction."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tests.onnx_text import EXP

ROOT = Path(__file__).parents[1]
FROM_EXTRAS = (
    "beartype",
    "httpx",
    "hypothesis",
    "jaxtyping",
    "onnxruntime",
    "openvino",
    "pytest",
    "sentence_transformers",
    "torch",
    "transformers",
)

WITH_TORCH = ("attnserve.nn.", "attnserve.planning.recover_command.", "attnserve.recovery.")
"""Packages that need the extra [torch]."""


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def modules_of(package: str) -> list[str]:
    """Modules below a package, except commands (run on import) and those that need torch."""
    files = sorted((ROOT / package).rglob("*.py"))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    return [name for name in names if not f"{name}.".startswith(WITH_TORCH)]


@pytest.mark.process
@pytest.mark.parametrize("package", ["graph_passes", "attnserve", "service"])
def test_import_without_extras_succeeds(package: str):
    """No module imports torch or a runtime when it is imported."""
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted(name for name in sys.modules if '.' not in name)))"
    )
    done = python(code, *modules_of(package))
    assert done.returncode == 0, done.stderr
    assert not set(FROM_EXTRAS) & set(json.loads(done.stdout))


@pytest.mark.process
def test_model_in_onnx_runtime_does_not_import_openvino():
    """Also if its release is checked."""
    code = (
        "import sys, onnx_ir as ir\n"
        "from attnserve.context import AUTO, Device\n"
        "from attnserve.runtime.session import open_session, warn_of_old_runtimes\n"
        "warn_of_old_runtimes(Device(runtime=AUTO))\n"
        "open_session(ir.from_onnx_text(sys.argv[1]), Device(runtime=AUTO))\n"
        "print('onnxruntime' in sys.modules, 'openvino' in sys.modules)"
    )
    done = python(code, EXP)
    assert (done.returncode, done.stdout) == (0, "True False\n"), done.stderr


@pytest.mark.process
@pytest.mark.parametrize("package", WITH_TORCH)
def test_package_without_torch_names_the_extra(package: str):
    done = python(f"import sys; sys.modules['torch'] = None; import {package.rstrip('.')}")
    assert "MissingExtra" in done.stderr
    assert "attnserve[torch]" in done.stderr


def test_modules_import_each_other_in_one_direction():
    """No modules import each other in a circle. Imports for types count too."""
    grimp = pytest.importorskip("grimp")
    graph = grimp.build_graph("graph_passes", "attnserve", "service")
    modules = sorted(graph.modules)
    numbers = {module: number for number, module in enumerate(modules)}
    rows = [numbers[one] for one in modules for _ in graph.find_modules_directly_imported_by(one)]
    columns = [
        numbers[other] for one in modules for other in graph.find_modules_directly_imported_by(one)
    ]
    imports = coo_array((np.ones(len(rows)), (rows, columns)), shape=(len(modules),) * 2)
    _, group = connected_components(imports, connection="strong")
    circles = [
        [one for one in modules if group[numbers[one]] == found] for found in np.unique(group)
    ]
    assert [circle for circle in circles if len(circle) > 1] == []


def test_no_function_has_more_than_ten_parameters():
    """Values that travel together are a type."""
    for package in ("graph_passes", "attnserve", "service"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    given = node.args
                    every = (*given.posonlyargs, *given.args, *given.kwonlyargs)
                    counted = [one.arg for one in every if one.arg not in ("self", "cls")]
                    assert len(counted) <= 10, f"{path}: {node.name}"
