"""Memory in use by this process and by the GPU that it runs on."""

from __future__ import annotations

import os
from functools import cache, lru_cache
from time import monotonic
from typing import Any

import psutil

__all__ = ["gpu_bytes", "rss_bytes"]

SAMPLE_S = 1.0
"""How long a sample is reused: psutil takes 50 us, NVML more, and every answer asks."""


def rss_bytes() -> int:
    """Resident memory of this process, at most ``SAMPLE_S`` old."""
    return _sample(int(monotonic() / SAMPLE_S))


@lru_cache(maxsize=1)
def _sample(interval: int) -> int:
    return psutil.Process().memory_info().rss


def gpu_bytes() -> int | None:
    """Memory in use on the first visible GPU by all processes; None without a readable GPU.

    That is the first entry of CUDA_VISIBLE_DEVICES, an index or a UUID. The sample is at most
    ``SAMPLE_S`` old.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    return _gpu_sample(nvml, visible, int(monotonic() / SAMPLE_S))


@lru_cache(maxsize=1)
def _gpu_sample(nvml: Any, visible: str, interval: int) -> int | None:
    try:
        if visible and not visible.isdecimal():
            device = nvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            device = nvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        return int(nvml.nvmlDeviceGetMemoryInfo(device).used)
    except nvml.NVMLError:
        return None


@cache
def _nvml() -> Any:
    """The initialized ``pynvml`` module; None without the package or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
