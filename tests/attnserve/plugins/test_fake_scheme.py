"""A precision of another package: on the command line, in a plan, in the search, and served."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

from tests.attnserve.plugins.conftest import Run, check_embeds

CODE = """
import numpy as np
import onnx_ir as ir
from attnserve.precision.schemes import SCHEMES, Scheme

def rounded(given):
    kept = {value for node in given.float_nodes for value in node.inputs}
    for value in given.model.graph.initializers.values():
        tensor = value.const_value
        if value not in kept and tensor.dtype == ir.DataType.FLOAT and len(tensor.shape) == 2:
            array = tensor.numpy().astype(np.float16).astype(np.float32)
            value.const_value = ir.tensor(array, name=value.name)
    given.model.graph.doc_string = "rounded"
    return given.model

SCHEMES.add(
    Scheme("rounded", rounded, lambda node: node.op_type == "MatMul", allows_float_blocks=True)
)
"""


def is_rounded(folder: Path) -> bool:
    return onnx.load(folder / "model.onnx").graph.doc_string == "rounded"


@pytest.mark.process
def test_precision_of_another_package(
    tiny: Path, texts: Path, tmp_path: Path, run: Run, environment: dict[str, str]
):
    by_hand = run(CODE, "optimize", tiny, "--precision", "rounded", "-o", tmp_path / "hand")
    assert by_hand["plan"]["precision"] == "rounded" and is_rounded(tmp_path / "hand")

    plan = tmp_path / "plan.json"
    asked = ("--calib", texts, "--keep", "0.5", "--seq", "8", "--precision", "rounded")
    assert run(CODE, "plan", tiny, *asked, "-o", plan)["asked"]["precision"] == "rounded"
    run(CODE, "optimize", tiny, "--plan", plan, "--calib", texts, "-o", tmp_path / "new")
    assert is_rounded(tmp_path / "new")

    check_embeds(tmp_path / "new", environment)


@pytest.mark.process
@pytest.mark.parametrize("command", ["optimize", "plan"])
def test_unknown_precision_is_refused(tiny: Path, tmp_path: Path, run: Run, command: str):
    with pytest.raises(
        AssertionError, match="error: --precision is 'none': expected float32, float16"
    ):
        run("", command, tiny, "--precision", "none", "--keep", "0.9", "--calib", tiny / "none.txt",
            "-o", tmp_path / "new.json")  # fmt: skip
