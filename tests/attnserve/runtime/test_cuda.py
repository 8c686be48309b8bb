"""Options of CUDA sessions and runs, checked without a GPU."""

from __future__ import annotations

import pytest

from attnserve.runtime.cuda import PARITY, ArenaShrinkPolicy, Cuda
from attnserve.runtime.io_binding import run_options
from graph_passes.errors import InvalidArgument
from tests.errors import raises


def test_provider_options_have_the_names_of_onnx_runtime():
    always = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}
    assert PARITY.provider_options() == {**always, "use_tf32": "0"}
    assert Cuda(tf32=True, memory_bytes=2**31, graphs=True).provider_options() == {
        **always,
        "use_tf32": "1",
        "gpu_mem_limit": "2147483648",
        "enable_cuda_graph": "1",
    }


def test_cuda_memory_limit_must_be_positive():
    assert Cuda(memory_bytes=1).provider_options()["gpu_mem_limit"] == "1"
    with raises(InvalidArgument, "cuda.memory", 0):
        Cuda(memory_bytes=0)


def test_run_options_name_the_graph_and_the_arena():
    assert run_options().get_run_config_entry("gpu_graph_id") == "-1"
    assert run_options(graph=3).get_run_config_entry("gpu_graph_id") == "3"
    shrinking = run_options(shrink_arena=True)
    assert shrinking.get_run_config_entry("gpu_graph_id") == "-1"
    assert shrinking.get_run_config_entry("memory.enable_memory_arena_shrinkage") == "gpu:0"


@pytest.mark.parametrize(
    ("sizes", "shrinks"),
    [
        ([1000] + [250] * 63, []),
        ([1000] + [250] * 64, [64]),
        ([1000] + [250] * 500, [64]),  # 250 is the new peak
        ([1000, *[250] * 63, 251, *[250] * 63], []),  # 251 is above a quarter of the peak
        ([1000] * 500, []),
        ([1000, *[10] * 64, 800, *[10] * 64], [64, 129]),
    ],
)
def test_arena_shrink_policy_shrinks_after_64_small_runs(sizes: list[int], shrinks: list[int]):
    policy = ArenaShrinkPolicy()
    assert [index for index, size in enumerate(sizes) if policy.after(size)] == shrinks
