"""Control groups of this process (Linux), which hold the limits of containers and services."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

__all__ = ["control_groups"]


def control_groups(root: Path = Path("/")) -> list[Path]:
    """Folders of the version 2 groups of this process, innermost first; they may not exist.

    Args:
        root: Where ``proc`` and ``sys`` are mounted.
    """
    groups, own = root / "sys/fs/cgroup", ""
    with suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text().splitlines()
        own = next((line[4:] for line in lines if line.startswith("0::/")), "")
    folders = [groups / own, *(groups / own).parents]
    return [folder for folder in folders if folder.is_relative_to(groups)]
