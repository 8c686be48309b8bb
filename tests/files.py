"""Read and write the files of tests."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def tree(folder: Path) -> dict[str, bytes | None]:
    """The content of all files below a folder, by path; None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    """Write lines of text, the last without a line break, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")


def read_record(folder: Path) -> dict[str, Any]:
    """The record of an artifact folder."""
    return json.loads((folder / "attnserve.json").read_text(encoding="utf-8"))


def last_entry(folder: Path) -> dict[str, Any]:
    """The last entry of the lineage in the record of an artifact folder."""
    return read_record(folder)["lineage"][-1]
