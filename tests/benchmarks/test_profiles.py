"""Read profiles of ONNX Runtime, and the attention kernels that it prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.runtime.interface import SessionOptions
from attnserve.runtime.session import open_session
from benchmarks.gpu.profiles import AttentionKernel, attention_kernels, read_profile, read_runs
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


def test_read_profile_shares_exclude_the_first_of_several_runs(tmp_path: Path):
    result = read_profile(profile(tmp_path, RUNS))
    assert list(result.shares.items()) == [("MatMul", 0.75), ("Softmax", 0.25), ("Shape", 0.0)]
    assert result.timed == "nodes"
    assert read_profile(profile(tmp_path, RUNS[:3])).shares == {"MatMul": 1.0}


def test_read_runs_gives_shares_and_peak_per_run(tmp_path: Path):
    first, second = read_runs(profile(tmp_path, RUNS))
    assert (first.shares, first.peak_bytes) == ({"MatMul": 1.0}, 700)
    assert (second.shares, second.peak_bytes) == (
        {"MatMul": 0.75, "Softmax": 0.25, "Shape": 0.0},
        900,
    )
    assert read_runs(profile(tmp_path, RUNS[:1])) == ()  # nothing ran


def test_read_profile_peak_is_that_of_the_gpu_if_present(tmp_path: Path):
    assert read_profile(profile(tmp_path, RUNS)).peak_bytes == 900
    on_cpu = [event for event in RUNS if "CUDA" not in json.dumps(event)]
    assert read_profile(profile(tmp_path, on_cpu)).peak_bytes == 5000
    without = [event | {"args": {k: v for k, v in event["args"].items() if k != "mem_in_use_peak"}}
            for event in RUNS]  # fmt: skip
    assert read_profile(profile(tmp_path, without)).peak_bytes is None


def test_read_profile_prefers_gpu_kernel_times(tmp_path: Path):
    kernels = [
        event("Kernel", "sm90_gemm", 1005, 300, op_name="MatMul"),
        event("Kernel", "flash_fwd", 1400, 100, op_name="MultiHeadAttention"),
        event("Kernel", "fill", 1500, 0),  # belongs to no operator
    ]
    result = read_profile(profile(tmp_path, RUNS + kernels))
    assert result.timed == "kernels"
    assert result.shares == {"MatMul": 0.75, "MultiHeadAttention": 0.25, "fill": 0.0}


def test_read_profile_of_onnx_runtime(tmp_path: Path):
    model = ir.from_onnx_text(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 64] x) => (float[n, n] z)'
        "{ y = Transpose(x)  z = MatMul(x, y) }"
    )
    session = open_session(model, options=SessionOptions(optimize=False, profile=tmp_path / "run"))
    for _ in range(3):
        session.run(None, {"x": np.ones((64, 64), np.float32)})
    result = read_profile(session.end_profiling())
    assert result.shares.keys() == {"Transpose", "MatMul"} and result.timed == "nodes"
    assert sum(result.shares.values()) == pytest.approx(1)
    assert result.peak_bytes is not None and result.peak_bytes >= 2 * 64 * 64 * 4


@pytest.mark.parametrize(
    "content", ["", "[", "{}", "[1]", '[{"name": "x"}]', '[{"name": "x", "cat": "Node"}]', "null"]
)
def test_read_profile_invalid_content_is_refused(content: str, tmp_path: Path):
    path = tmp_path / "profile.json"
    path.write_text(content)
    code = "profile.empty" if content == "{}" else "profile.invalid"
    with raises(InvalidData, code, "profile.json"):
        read_profile(path)


def test_read_profile_without_a_run_or_file_is_refused(tmp_path: Path):
    with raises(InvalidData, "profile.empty"):
        read_profile(profile(tmp_path, RUNS[:1]))
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


def test_attention_kernels_are_parsed_from_output():
    flash, efficient, plain = attention_kernels(PRINTED)
    assert flash == AttentionKernel(
        "MultiHeadAttention", "encoder.layer.0/fused/attention", "fp16", "FLASH_ATTENTION"
    )
    assert efficient == AttentionKernel("MultiHeadAttention", "", "bf16", "EFFICIENT_ATTENTION")
    assert plain == AttentionKernel("Attention", "a name of words", "fp32", "MATH")
    assert [kernel.is_fused for kernel in (flash, efficient, plain)] == [True, True, False]


@pytest.mark.parametrize(
    "line", ["", "Operator=Attention Node=x DataType=fp16", "DataType=fp16 SdpaKernel=MATH"]
)
def test_attention_kernels_other_lines_are_ignored(line: str):
    assert attention_kernels(line) == ()
