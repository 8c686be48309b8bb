"""Memory in use by this process and by the GPU that it serves on."""

from __future__ import annotations

import os
from functools import cache
from time import monotonic
from typing import Any

import psutil

__all__ = ["gpu_bytes", "rss_bytes"]

SAMPLE_S = 1.0
"""How long a sample of the resident memory is reused: psutil takes 50 us, and every answer asks."""


class _ResidentMemory:
    """The resident memory of this process, sampled at most once per ``SAMPLE_S``."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._bytes, self._expires = 0, 0.0

    def read(self) -> int:
        if monotonic() >= self._expires:
            self._bytes = self._process.memory_info().rss
            self._expires = monotonic() + SAMPLE_S
        return self._bytes


_resident_memory = _ResidentMemory()


def rss_bytes() -> int:
    """Resident memory of this process, at most one second old."""
    return _resident_memory.read()


def gpu_bytes() -> int | None:
    """Memory in use on the serving GPU by all processes; None without a readable GPU.

    The serving GPU is the first entry of CUDA_VISIBLE_DEVICES, an index or a UUID.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
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
