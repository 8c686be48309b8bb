"""What ONNX Runtime wrote down, read: a file of its own making, and lines as it prints them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.runtime.profile import AttentionKernel, attention_kernels, read_profile, read_runs
from attnserve.runtime.session import open_session
from graph_passes.errors import InvalidData
from tests.errors import raises


def event(cat: str, name: str, ts: int, dur: int, **args: str) -> dict[str, Any]:
    return {"cat": cat, "pid": 1, "tid": 1, "dur": dur, "ts": ts, "ph": "X", "name": name,
            "args": args}  # fmt: skip


def node(name: str, ts: int, dur: int, provider: str = "CUDA", **args: str) -> dict[str, Any]:
    op_name = name.partition("_")[0]
    return event("Node", f"{name}_kernel_time", ts, dur, op_name=op_name,
                 provider=f"{provider}ExecutionProvider", **args)  # fmt: skip


RUNS = [
    event("Session", "session_initialization", 0, 90),
    node("MatMul_0", 100, 500, mem_in_use_peak="700"),
    event("Session", "model_run", 100, 600),
    node("MatMul_0", 1000, 10, mem_in_use_peak="800"),
    node("MatMul_1", 1010, 20, mem_in_use_peak="800"),
    node("Softmax_2", 1030, 10, mem_in_use_peak="900"),
    node("Shape_3", 1040, 0, "CPU", mem_in_use_peak="5000"),
    event("Session", "model_run", 1000, 50),
]


def profile(folder: Path, events: object) -> Path:
    path = folder / "profile.json"
    path.write_text(json.dumps(events))
    return path


def test_time_is_shared_among_operators_and_the_first_run_is_left_out(tmp_path: Path):
    found = read_profile(profile(tmp_path, RUNS))
    assert list(found.shares.items()) == [("MatMul", 0.75), ("Softmax", 0.25), ("Shape", 0.0)]
    assert found.timed == "nodes"


def test_a_single_run_is_not_left_out(tmp_path: Path):
    assert read_profile(profile(tmp_path, RUNS[:3])).shares == {"MatMul": 1.0}


def test_each_run_has_its_own_shares_and_the_peak_so_far(tmp_path: Path):
    first, second = read_runs(profile(tmp_path, RUNS))
    assert (first.shares, first.peak_bytes) == ({"MatMul": 1.0}, 700)
    assert (second.shares, second.peak_bytes) == (
        {"MatMul": 0.75, "Softmax": 0.25, "Shape": 0.0},
        900,
    )
    assert read_runs(profile(tmp_path, RUNS[:1])) == ()  # nothing ran


def test_the_peak_is_that_of_the_gpu(tmp_path: Path):
    assert read_profile(profile(tmp_path, RUNS)).peak_bytes == 900
    on_cpu = [event for event in RUNS if "CUDA" not in json.dumps(event)]
    assert read_profile(profile(tmp_path, on_cpu)).peak_bytes == 5000
    told = [event | {"args": {k: v for k, v in event["args"].items() if k != "mem_in_use_peak"}}
            for event in RUNS]  # fmt: skip
    assert read_profile(profile(tmp_path, told)).peak_bytes is None


def test_where_the_gpu_s_clock_is_in_the_file_it_counts(tmp_path: Path):
    kernels = [
        event("Kernel", "sm90_gemm", 1005, 300, op_name="MatMul"),
        event("Kernel", "flash_fwd", 1400, 100, op_name="MultiHeadAttention"),
        event("Kernel", "fill", 1500, 0),  # of no operator
    ]
    found = read_profile(profile(tmp_path, RUNS + kernels))
    assert found.timed == "kernels"
    assert found.shares == {"MatMul": 0.75, "MultiHeadAttention": 0.25, "fill": 0.0}


def test_a_profile_that_the_runtime_wrote_is_read(tmp_path: Path):
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64] x) => (float[n, n] z)'
        "{ y = Transpose(x)  z = MatMul(x, y) }"
    )
    session = open_session(model, optimize=False, profile=tmp_path / "run")
    for _ in range(3):
        session.run(None, {"x": np.ones((64, 64), np.float32)})
    found = read_profile(Path(session.end_profiling()))
    assert found.shares.keys() == {"Transpose", "MatMul"} and found.timed == "nodes"
    assert sum(found.shares.values()) == pytest.approx(1)
    assert found.peak_bytes is not None and found.peak_bytes >= 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    "content", ["", "[", "{}", "[1]", '[{"name": "x"}]', '[{"name": "x", "cat": "Node"}]', "null"]
)
def test_what_is_no_profile_is_refused(content: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(content)
    code = "profile.empty" if content == "{}" else "profile.invalid"
    with raises(InvalidData, code, "profile.json"):
        read_profile(path)


def test_a_session_that_never_ran_has_no_shares(tmp_path: Path):
    with raises(InvalidData, "profile.empty"):
        read_profile(profile(tmp_path, RUNS[:1]))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with raises(InvalidData, "profile.invalid", "FileNotFoundError"):
        read_profile(tmp_path / "none.json")


PRINTED = """
\x1b[36mOperator=MultiHeadAttention Node=encoder.layer.0/fused/attention DataType=fp16\
 SdpaKernel=FLASH_ATTENTION\x1b[0m
something else, as SdpaKernel= or Operator=
\x1b[36mOperator=MultiHeadAttention DataType=bf16 SdpaKernel=EFFICIENT_ATTENTION\x1b[0m
\x1b[36mOperator=MultiHeadAttention Node=encoder.layer.0/fused/attention DataType=fp16\
 SdpaKernel=FLASH_ATTENTION\x1b[0m
{"answer": 1}Operator=Attention Node=a name of words DataType=fp32 SdpaKernel=MATH
"""


def test_the_kernels_of_attention_are_read_from_what_is_printed():
    flash, efficient, plain = attention_kernels(PRINTED)
    assert flash == AttentionKernel(
        "MultiHeadAttention", "encoder.layer.0/fused/attention", "fp16", "FLASH_ATTENTION"
    )
    assert (efficient.node, efficient.dtype, efficient.kernel) == (
        "",
        "bf16",
        "EFFICIENT_ATTENTION",
    )
    assert (plain.node, plain.kernel) == ("a name of words", "MATH")
    assert [each.is_fused for each in (flash, efficient, plain)] == [True, True, False]


@pytest.mark.parametrize(
    "line", ["", "Operator=Attention Node=x DataType=fp16", "DataType=fp16 SdpaKernel=MATH"]
)
def test_other_lines_are_no_kernels(line: str):
    assert attention_kernels(line) == ()
