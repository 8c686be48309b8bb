"""Memory of this process, its GPU and the machine."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, lru_cache
from pathlib import Path
from time import monotonic
from typing import Any, cast

import psutil

from attnserve.runtime.machine import control_groups

__all__ = ["available_bytes", "gpu_bytes", "peak_bytes", "return_freed_memory", "rss_bytes"]

GROUP_FILES = (
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
"""Files of a control group with its limit and its use, and the prefix of its counters."""

SAMPLE_S = 1.0
"""Seconds for which a sample is used: psutil takes 50 us, NVML more, per answer."""


def rss_bytes() -> int:
    """Resident memory of this process, at most ``SAMPLE_S`` old."""
    return _sample(int(monotonic() / SAMPLE_S))


@lru_cache(maxsize=1)
def _sample(interval: int) -> int:
    """Resident memory of this process, sampled once in each interval of ``SAMPLE_S``."""
    return psutil.Process().memory_info().rss


def peak_bytes() -> int:
    """Peak resident memory of this process.

    On Linux ``ru_maxrss`` survives fork and exec, so that a child starts with the peak of its
    parent; VmHWM does not.
    """
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024
    if sys.platform == "win32":
        return int(cast(Any, psutil.Process().memory_info()).peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def available_bytes(root: Path = Path("/")) -> int:
    """Memory available to new processes: of the machine, or of a control group if less.

    Files that are cached in memory count as available.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    return max(0, min([psutil.virtual_memory().available, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """Remaining memory of each control group of this process with a limit."""
    for folder in (*control_groups(root), root / "sys/fs/cgroup/memory"):
        for limit, used, prefix in GROUP_FILES:
            with suppress(OSError, ValueError):  # no such group, or "max": no limit
                left = int((folder / limit).read_text()) - int((folder / used).read_text())
                lines = (folder / "memory.stat").read_text().splitlines()
                counters = dict(line.split() for line in lines)
                cached = sum(int(counters[f"{prefix}{kind}active_file"]) for kind in ("", "in"))
                yield left + cached


def return_freed_memory() -> None:
    """Return freed memory to the system, if the C library is glibc.

    glibc keeps freed blocks of up to 32 MB for later use, and sessions free their weights in blocks
    of that size, which the next session does not reuse.
    """
    with suppress(OSError, AttributeError, TypeError):  # not glibc; Windows: TypeError
        ctypes.CDLL(None).malloc_trim(0)


def gpu_bytes() -> int | None:
    """Memory in use on the first visible GPU by all processes; None without a readable GPU.

    The first visible GPU is the first entry of CUDA_VISIBLE_DEVICES, an index or a UUID. The sample
    is at most ``SAMPLE_S`` old.
    """
    nvml = load_nvml()
    if nvml is None:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    return _gpu_sample(nvml, visible, int(monotonic() / SAMPLE_S))


@lru_cache(maxsize=1)
def _gpu_sample(nvml: Any, visible: str, interval: int) -> int | None:
    """Memory in use on a GPU, sampled once in each interval; None if it cannot be read."""
    try:
        if visible and not visible.isdecimal():
            device = nvml.nvmlDeviceGetHandleByUUID(visible)
        else:
            device = nvml.nvmlDeviceGetHandleByIndex(int(visible or 0))
        return int(nvml.nvmlDeviceGetMemoryInfo(device).used)
    except nvml.NVMLError:
        return None


@cache
def load_nvml() -> Any:
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
