"""cpu: features of the CPU that decide whether int8 kernels are exact."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import pytest

from attnserve.runtime import machine
from attnserve.runtime.machine import (
    available_cores,
    cpu_flags,
    has_bfloat16_product,
    has_int8_dot_product,
    parse_cpu_flags,
)

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: flags: avx_vnni
vmx flags\t: vnmi amx_int8
flags\t\t: fpu sse2 avx2 {more}
bugs\t\t: spectre_v1

processor\t: 1
flags\t\t: fpu
"""


@pytest.mark.parametrize(
    ("text", "exact"),
    [
        (X86.format(more=""), False),
        (X86.format(more="avx512f avx512bw avx512_vbmi2"), False),
        (X86.format(more="avx512f avx512_vnni"), True),
        (X86.format(more="avx_vnni"), True),
        (X86.format(more="amx_int8"), True),
        ("processor\t: 0\nFeatures\t: fp asimd aes crc32 asimddp\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd i8mm\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd aes crc32\n", False),
        ("processor\t: 0\n", False),
        ("", False),
    ],
)
def test_has_int8_dot_product_of_cpuinfo_text(text: str, exact: bool):
    assert has_int8_dot_product(parse_cpu_flags(text)) is exact


@pytest.mark.parametrize(
    ("more", "fast"), [("avx512_bf16", True), ("amx_bf16", True), ("avx512f avx512_vnni", False)]
)
def test_has_bfloat16_product_of_cpuinfo_text(more: str, fast: bool):
    assert has_bfloat16_product(parse_cpu_flags(X86.format(more=more))) is fast


@pytest.mark.parametrize(("more", "has_unit"), [("amx_tile amx_bf16", True), ("amx_int8", False)])
def test_matrix_unit_multiplies_bfloat16(
    more: str, has_unit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = parse_cpu_flags(X86.format(more=more))
    monkeypatch.setattr(machine, "cpu_flags", lambda: flags)
    machine.has_matrix_unit.cache_clear()
    try:
        assert machine.has_matrix_unit() is has_unit
    finally:
        machine.has_matrix_unit.cache_clear()


def test_cpu_flags_of_apple_silicon_have_the_dot_product(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert has_int8_dot_product()


def test_cpu_flags_without_cpuinfo_are_empty(monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object, **__: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(Path, "read_text", missing)
    assert cpu_flags() == frozenset()
    assert not has_int8_dot_product()


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, 8),
        ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 2),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "900000 100000\n"}, 8),
        ({"sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
        ({"sys/fs/cgroup/cpu.max": "nonsense"}, 8),
        (
            {
                "proc/self/cgroup": "0::/system.slice/one.service\n",
                "sys/fs/cgroup/system.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/system.slice/one.service/cpu.max": "max 100000\n",
            },
            3,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "400000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        (
            {
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_available_cores_is_affinity_or_quota(
    files: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores
