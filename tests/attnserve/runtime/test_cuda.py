"""What a session asks of a GPU: checked without one, word by word."""

from __future__ import annotations

from attnserve.runtime.cuda import PARITY, ArenaShrinkPolicy, Cuda, run_entries
from graph_passes.errors import InvalidArgument
from tests.errors import raises


def test_parity_is_without_tf32_and_the_arena_grows_by_what_is_asked_for():
    assert PARITY.provider_options() == {
        "device_id": "0",
        "use_tf32": "0",
        "arena_extend_strategy": "kSameAsRequested",
    }


def test_every_option_has_the_name_that_onnx_runtime_knows():
    assert Cuda(tf32=True, memory_bytes=2**31, graphs=True).provider_options() == {
        "device_id": "0",
        "use_tf32": "1",
        "arena_extend_strategy": "kSameAsRequested",
        "gpu_mem_limit": "2147483648",
        "enable_cuda_graph": "1",
    }


def test_one_byte_is_a_limit_and_none_at_all_is_refused():
    assert Cuda(memory_bytes=1).provider_options()["gpu_mem_limit"] == "1"
    with raises(InvalidArgument, "cuda.memory", 0):
        Cuda(memory_bytes=0)


def test_a_run_captures_its_own_graph_or_none():
    assert run_entries() == {"gpu_graph_id": "-1"}
    assert run_entries(graph=3) == {"gpu_graph_id": "3"}
    assert run_entries(shrink_arena=True) == {
        "gpu_graph_id": "-1",
        "memory.enable_memory_arena_shrinkage": "gpu:0",
    }


def given_back(sizes: list[int]) -> list[int]:
    """After which of these runs memory was given back."""
    when = ArenaShrinkPolicy()
    return [index for index, size in enumerate(sizes) if when.after(size)]


def test_memory_is_given_back_once_runs_are_small_again():
    assert given_back([1000] + [250] * 63) == []
    assert given_back([1000] + [250] * 64) == [64]
    assert given_back([1000] + [250] * 500) == [64]  # and then 250 is what is needed


def test_a_run_that_needs_the_memory_keeps_it():
    assert given_back([1000, *[250] * 63, 251, *[250] * 63]) == []
    assert given_back([1000] * 500) == []


def test_a_second_peak_is_given_back_too():
    assert given_back([1000, *[10] * 64, 800, *[10] * 64]) == [64, 129]
