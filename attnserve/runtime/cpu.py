"""CPU instruction-set features that decide whether int8 kernels are exact.

ONNX Runtime multiplies unsigned 8-bit activations by signed 8-bit weights. On x86 CPUs without
VNNI its kernels (``vpmaddubsw``) add two products in one signed 16-bit sum that saturates. The sum
reaches 2 x 255 x 127 = 64,770, above 32,767. VNNI, AMX and the dot products of ARM add in 32 bits.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Collection
from pathlib import Path

__all__ = ["cpu_flags", "has_int8_dot_product", "parse_cpu_flags"]

INT8_DOT_PRODUCT = frozenset({"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"})
"""Features (Linux names) with which the int8 kernels of ONNX Runtime add in 32 bits."""


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


def has_int8_dot_product(flags: Collection[str] | None = None) -> bool:
    """Whether 8-bit weights are multiplied exactly; False if unknown.

    Args:
        flags: Features of the CPU; by default of this machine.
    """
    return not INT8_DOT_PRODUCT.isdisjoint(cpu_flags() if flags is None else flags)
