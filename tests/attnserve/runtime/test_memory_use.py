"""Memory of the process and of the GPU."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from attnserve.runtime.memory_use import (
    SAMPLE_S,
    available_bytes,
    gpu_bytes,
    load_nvml,
    rss_bytes,
)
from tests.service.fake_nvml import FakeNvml, use_nvml


def test_resident_memory_is_sampled_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = [1e9], iter([5, 6])
    monkeypatch.setattr("attnserve.runtime.memory_use.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=next(samples))
    )
    assert rss_bytes() == rss_bytes() == 5
    clock[0] += SAMPLE_S
    assert rss_bytes() == 6


@pytest.mark.parametrize(
    ("visible", "device"),
    [(None, 0), ("", 0), ("3,1", 3), ("GPU-1a2b", "GPU-1a2b"), (" 2 ", 2)],
)
def test_gpu_bytes_reads_first_visible_device(
    visible: str | None, device: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = FakeNvml(used=7)
    use_nvml(monkeypatch, nvml)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_bytes() == 7 and nvml.devices == [device]


def test_gpu_bytes_of_lost_device_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    use_nvml(monkeypatch, FakeNvml(lost=True))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpu_bytes() is None


def test_gpu_bytes_without_package_or_driver_returns_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # importing it fails
    load_nvml.cache_clear()
    try:
        assert gpu_bytes() is None
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(lost=True))
        load_nvml.cache_clear()
        assert gpu_bytes() is None
    finally:
        load_nvml.cache_clear()


GIB = 1 << 30


def write_group(folder: Path, prefix: str, **files: str) -> None:
    folder.mkdir(parents=True)
    counters = f"{prefix}active_file {GIB}\n{prefix}inactive_file {GIB}\nother 5\n"
    for name, content in {**files, "memory.stat": counters}.items():
        (folder / name.replace("__", ".")).write_text(content)


@pytest.mark.parametrize(
    ("version", "own", "limit", "expected"),
    [
        (2, "", 8 * GIB, 5 * GIB),  # 8 - (5 used - 2 cached files)
        (2, "kube/pod", 8 * GIB, 5 * GIB),
        (2, "", None, 100 * GIB),
        (1, "", 8 * GIB, 5 * GIB),
        (1, "", 2**63 - 4096, 100 * GIB),
        (2, "", 1 * GIB, 0),
        (0, "", None, 100 * GIB),
    ],
)
def test_available_bytes_is_what_the_control_group_has_left(
    version: int, own: str, limit: int | None, expected: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * GIB))
    groups = tmp_path / "sys/fs/cgroup"
    used = str(5 * GIB)
    if version == 2:
        told = "max\n" if limit is None else str(limit)
        write_group(groups / own, "", memory__max=told, memory__current=used)
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(f"0::/{own}\n")
    elif version == 1:
        files = {"memory__limit_in_bytes": str(limit), "memory__usage_in_bytes": used}
        write_group(groups / "memory", "total_", **files)
    assert available_bytes(tmp_path) == expected
