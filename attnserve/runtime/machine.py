"""Describe the machine: processors, usable cores, and whether its int8 kernels are exact.

ONNX Runtime multiplies unsigned 8-bit activations by signed 8-bit weights. On x86 CPUs without
VNNI its kernels (``vpmaddubsw``) add two products in one signed 16-bit sum that saturates. The sum
reaches 2 x 255 x 127 = 64,770, above 32,767. VNNI, AMX and the dot products of ARM add in 32 bits.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

__all__ = [
    "available_cores",
    "control_groups",
    "cpu_flags",
    "cpu_name",
    "gpu_name",
    "has_bfloat16_product",
    "has_int8_dot_product",
    "has_matrix_unit",
    "parse_cpu_flags",
    "product_flags",
]

BFLOAT16_PRODUCT = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""CPU features (Linux names) with which products in bfloat16 are faster than in float32."""

PRODUCT_FLAGS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx_vnni",
    "amx_bf16",
    "amx_int8",
    "asimddp",
    "i8mm",
    "bf16",
)
"""CPU features that determine the speed and the exactness of matrix products."""

INT8_DOT_PRODUCT = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
"""CPU features (Linux names) with which the int8 kernels of ONNX Runtime add in 32 bits."""


def available_cores(root: Path = Path("/")) -> int:
    """Number of cores that this process may use, by its affinity and its CPU quota.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS or Windows
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    for quota, period in _cpu_quotas(root):
        cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return max(1, cores)


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Folders of the version 2 control groups of this process (Linux), innermost first.

    The limits of containers and services are in these folders. The folders may not exist.
    """
    groups = root / "sys/fs/cgroup"
    own = ""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line[4:] for line in lines if line.startswith("0::/")), "")
    folders = [groups / own, *(groups / own).parents]
    return [folder for folder in folders if folder.is_relative_to(groups)]


def _cpu_quotas(root: Path) -> Iterator[tuple[int, int]]:
    """(quota, period) of the control groups of this process, in microseconds."""
    quota_files = [(folder / "cpu.max",) for folder in control_groups(root)]
    groups = root / "sys/fs/cgroup"
    version_1 = tuple(groups / "cpu" / f"cpu.cfs_{name}_us" for name in ("quota", "period"))
    for files in (*quota_files, version_1):
        with suppress(OSError, ValueError):  # no such group, or "max": no quota
            quota, period = " ".join(file.read_text() for file in files).split()
            yield int(quota), int(period)


def cpu_flags() -> frozenset[str]:
    """Return the features of this CPU by their Linux names; empty if unknown."""
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return frozenset({"asimddp"})  # all Apple processors have it
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    return parse_cpu_flags(text)


def parse_cpu_flags(cpuinfo: str) -> frozenset[str]:
    """Return the features of the first processor in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(value.split())
    return frozenset()


def product_flags() -> tuple[str, ...]:
    """Members of ``PRODUCT_FLAGS`` that this CPU has."""
    flags = cpu_flags()
    return tuple(flag for flag in PRODUCT_FLAGS if flag in flags)


@cache  # read for each text
def has_matrix_unit() -> bool:
    """Whether this CPU multiplies tiles of bfloat16 (AMX); False if unknown."""
    return "amx_bf16" in cpu_flags()


def has_int8_dot_product(flags: Collection[str] | None = None) -> bool:
    """Whether 8-bit weights are multiplied exactly; False if unknown.

    Args:
        flags: Features of the CPU; by default of this machine.
    """
    return not INT8_DOT_PRODUCT.isdisjoint(cpu_flags() if flags is None else flags)


def has_bfloat16_product(flags: Collection[str] | None = None) -> bool:
    """Whether bfloat16 is multiplied without conversion to float32; False if unknown.

    Args:
        flags: Features of the CPU; by default of this machine.
    """
    return not BFLOAT16_PRODUCT.isdisjoint(cpu_flags() if flags is None else flags)


def cpu_name() -> str:
    """The model name of the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return (
        _output_of("sysctl", "-n", "machdep.cpu.brand_string")
        or platform.processor()
        or platform.machine()
    )


def gpu_name() -> str | None:
    """The model names of the NVIDIA GPUs, separated by commas; None without one."""
    return _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def _output_of(program: str, *arguments: str) -> str | None:
    """The output of a program on one line; None if the program is missing or fails."""
    path = shutil.which(program)
    if path is None:
        return None
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    return ", ".join(done.stdout.split("\n")).strip(", ") or None
