"""The keywords of the Python functions, as type checkers know them."""

from __future__ import annotations

import ast
import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import attnserve
from tests.attnserve.options.make_stub import FILE, FUNCTIONS, module

ROOT = Path(attnserve.__file__).parents[1]


def test_stub_is_generated_from_the_groups():
    assert FILE.read_text(encoding="utf-8") == module()


def test_stub_declares_the_parameters_of_the_functions():
    for node in ast.parse(FILE.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            declared = [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
            assert declared == list(signature(FUNCTIONS[node.name]).parameters)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_can_be_pickled(function: Callable[..., Any]):
    assert pickle.loads(pickle.dumps(function)) is function


VALID = """
from pathlib import Path

import attnserve
from attnserve import Goal, optimize

attnserve.optimize("m", keep=0.99, calib="texts.txt", sequence="16-512", allow="ffn")
attnserve.optimize("m", "new", goal=Goal(keep=0.99), calib=[Path("a"), "b"], recover="20m")
attnserve.optimize("m", collab_dk=[128, 96], layers="0,2", threads=1, force=True)
optimize(Path("m"), prune=0.25, prune_heads={"layer": [1, 0]}, precision="int8")
attnserve.plan("m", target_speedup=1.5, calib="texts.txt", measure="score", force=True)
attnserve.recover("new", "out", teacher="m", data=["a", "b"], minutes=30, openvino=True)
attnserve.verify("m", "new", data="texts.txt", measure="r2", tokenizer=None)
attnserve.verify_again("new", data=[Path("a")], eval_data="b", runtime="auto")
attnserve.evaluate("m", task="sts", data="dev.tsv", pooling="cls", batch_size=8)
attnserve.evaluate_mteb("m", "STS17", provider="cuda")
attnserve.bench(["m"], batches=(1, 8), sequences=[32], rounds=2, threads=4)
attnserve.analyze("m", calib="texts.txt", seed=1)
"""

INVALID = """
import attnserve
from attnserve import optimize

attnserve.optimize("m", kep=0.99)
attnserve.optimize("m", keep="much")
attnserve.optimize("m", mixing="spare")
optimize("m", kep=0.99)
attnserve.plan("m", min_cosine=0.9)
attnserve.recover("new", "out", teacher="m", data="a", minute=30)
attnserve.verify("m", "new", dat="texts.txt")
attnserve.verify_again("new", measure="cosin")
attnserve.evaluate("m", task="sst", data="dev.tsv")
attnserve.evaluate_mteb("m", "STS17", task="sts")
attnserve.bench(["m"], batch=8)
attnserve.analyze("m", calib="texts.txt", sed=1)
"""


@pytest.mark.process
@pytest.mark.skipif(find_spec("pyright") is None, reason="needs pyright")
def test_type_checker_reports_wrong_keywords_only(tmp_path: Path):
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name, text in {"valid": VALID, "invalid": INVALID}.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    done = subprocess.run([*command, "-p", tmp_path], capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)["generalDiagnostics"]
    assert [one for one in found if Path(one["file"]).stem == "valid"] == []
    calls = [line for line, text in enumerate(INVALID.splitlines()) if text.endswith(")")]
    assert sorted({one["range"]["start"]["line"] for one in found}) == calls
