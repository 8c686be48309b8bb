"""optimize with a goal or a precision: report, lineage and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import attnserve
from attnserve import verify
from attnserve.cli.app import main
from attnserve.models.onnx_files import load_model
from attnserve.precision.convert import check_cpu, convert
from graph_passes.errors import (
    CheckFailed,
    InvalidArgument,
)
from tests.attnserve.planning.conftest import Optimizer
from tests.errors import raises
from tests.files import last_entry, read_record

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    ("how", "code", "value"),
    [
        ({"keep": 0.9, "prune": 0.5}, "optimize.conflict", "`prune`"),
        ({"keep": 0.9, "refit": False}, "optimize.conflict", "`refit`"),
        ({"precision": "int8", "refit": False}, "request.conflict", "`refit`"),
        ({"keep": 0.9, "calib": None}, "optimize.no_data", "`calib`"),
        ({"task": "sts"}, "optimize.conflict", "`task`"),
        ({"keep": 0.9, "training": "other"}, "optimize.conflict", "`training`"),
        ({"allow": ["ffn"], "prune": 0.5}, "optimize.conflict", "`allow`"),
        ({"keep": 0.9, "plan": Path("p.json")}, "optimize.conflict", "`plan`"),
    ],
)
def test_optimize_contradicting_parameters_are_refused(
    optimized: Optimizer, how: dict[str, Any], code: str, value: str, tmp_path: Path
):
    with raises(InvalidArgument, code, value):
        optimized(**how)
    assert not (tmp_path / "out.onnx").exists()


@pytest.mark.timing
def test_optimize_keep_writes_report_and_lineage(
    optimized: Optimizer, model: Path, sentences: Path, tmp_path: Path
):
    report = optimized(keep=0.95, allow=["ffn"], sequence=(8, 32))
    assert report.fidelity.mean_cosine >= 0.95
    assert report.record.after.parameters < report.record.before.parameters
    assert report.changes[-1].macs_after == report.record.after.macs
    record = read_record(tmp_path)
    entry = record["lineage"][-1]
    assert entry["search"]["verdict"] == report.search.verdict
    assert entry["search"]["asked"]["keep"] == 0.95
    again = verify(model, tmp_path / "out.onnx", data=sentences)
    assert again.mean_cosine > 0.93


@pytest.mark.timing
def test_optimize_int8_is_part_of_the_loss(optimized: Optimizer, tmp_path: Path):
    report = optimized(keep=0.9, allow=["ffn"], precision="int8")
    assert report.fidelity.mean_cosine >= 0.9
    # The blocks of this tiny model may be slower in int8, and then stay float32.
    in_float = len(report.plan.float_blocks)
    assert report.record.after.bytes < (0.8 if in_float else 0.6) * report.record.before.bytes
    kinds = {node.op_type for node in load_model(tmp_path / "out.onnx").graph}
    assert kinds & {"MatMulIntegerToFloat", "QAttention"} or in_float == 4
    assert "DequantizeLinear" in kinds  # of the table of embeddings


def test_optimize_precision_that_loses_too_much_fails(optimized: Optimizer, tmp_path: Path):
    with raises(CheckFailed, "search.precision", "int8 weights alone keep 0."):
        optimized(keep=1.0, precision="int8")
    assert not (tmp_path / "out.onnx").exists()


def test_optimize_precision_alone_converts_only(model: Path, sentences: Path, tmp_path: Path):
    report = attnserve.optimize(model, tmp_path / "out.onnx", precision="int8", calib=sentences)
    before, after = report.record.before, report.record.after
    assert after.bytes < 0.6 * before.bytes
    # Layers of a new model share biases of zeros, which fusion gives other values.
    assert after.parameters == pytest.approx(before.parameters, rel=0.01)
    assert report.fidelity.mean_cosine > 0.9
    entry = last_entry(tmp_path)
    assert entry["plan"]["precision"] == "int8"
    assert entry["int8_weight_bits"] == report.record.int8_weight_bits == 7
    assert entry["int8_activations"] == report.record.int8_activations == "static"


@pytest.mark.parametrize("has_dot_product", [False, True])
def test_optimize_int8_full_records_8_bits(
    model: Path, tmp_path: Path, has_dot_product: bool, cpu_with: Callable[..., None]
):
    cpu_with(int8=has_dot_product)
    arguments = ["optimize", str(model), "--int8-full", "-o", str(tmp_path / "out.onnx")]
    assert main(arguments) == 0
    entry = last_entry(tmp_path)
    assert entry["plan"]["precision"] == "int8-full"
    assert entry["int8_weight_bits"] == 8
    assert entry["int8_activations"] == "per-row"  # without calibration data


def test_bfloat16_without_its_instructions_is_refused_first(
    model: Path, tmp_path: Path, cpu_with: Callable[..., None]
):
    cpu_with(bfloat16=False)
    with raises(InvalidArgument, "precision.cpu", "bfloat16-cpu"):
        attnserve.optimize(tmp_path / "none", tmp_path / "out.onnx", precision="bfloat16-cpu")
    with raises(InvalidArgument, "precision.cpu", "bfloat16-cpu"):
        attnserve.plan(tmp_path / "none", tmp_path / "p.json", calib=tmp_path / "none", keep=0.9,
                       precision="bfloat16-cpu")  # fmt: skip
    with raises(InvalidArgument, "precision.cpu", "use float32 or int8"):
        convert(load_model(model / "model.onnx"), "bfloat16-cpu")
    for precision in ("float32", "float16", "bfloat16", "int8", "int8-full"):
        check_cpu(precision)


def test_optimize_bfloat16_is_verified_on_cpu_and_warns(
    model: Path, sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    output = tmp_path / "out.onnx"
    assert main(["optimize", str(model), "-o", str(output), "--bf16", "--calib", str(sentences),
                 "--prune", "0.25", "--json"]) == 0  # fmt: skip
    report = json.loads(capsys.readouterr().out)
    assert report["fidelity"]["mean_cosine"] > 0.9
    assert report["fidelity"]["data"].endswith("bfloat16 rounded in float32")
    assert "bfloat16" in report["warnings"][-1]
    record = read_record(tmp_path)
    assert record["lineage"][-1]["rewrite"].endswith("+bfloat16")
    assert main(["verify", str(model), str(output), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_cosine"] > 0.5
    assert main(["bench", str(output), "--seq", "16"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "computes in bfloat16" in error and "cuda" in error


@pytest.mark.timing
def test_cli_unreachable_goal_exits_with_1(
    model: Path, sentences: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["optimize", str(model), "--calib", str(sentences), "-o", str(tmp_path / "o.onnx"),
                 "--target-speedup", "500", "--seq", "32"]  # fmt: skip
    assert main(arguments) == 1
    assert "--target-speedup is 500.0" in capsys.readouterr().err
    assert not (tmp_path / "o.onnx").exists()
