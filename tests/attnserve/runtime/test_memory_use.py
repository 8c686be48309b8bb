"""Memory of the process and of the GPU."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest

from attnserve.runtime.memory_use import SAMPLE_S, _nvml, _sample, gpu_bytes, rss_bytes
from tests.service.fake_nvml import FakeNvml, use_nvml


def test_resident_memory_is_sampled_once_per_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, samples = [1e9], iter([5, 6])
    monkeypatch.setattr("attnserve.runtime.memory_use.monotonic", lambda: clock[0])
    monkeypatch.setattr(
        psutil.Process, "memory_info", lambda process: SimpleNamespace(rss=next(samples))
    )
    _sample.cache_clear()
    assert rss_bytes() == rss_bytes() == 5
    clock[0] += SAMPLE_S
    assert rss_bytes() == 6
    _sample.cache_clear()


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
    _nvml.cache_clear()
    try:
        assert gpu_bytes() is None
        monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(lost=True))
        _nvml.cache_clear()
        assert gpu_bytes() is None
    finally:
        _nvml.cache_clear()
