"""Read and write the files of tests."""

from __future__ import annotations

import json
from pathlib import Path


def tree(folder: Path) -> dict[str, bytes | None]:
    """The content of all files below a folder, by path; None for folders."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


def write_json(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content), encoding="utf-8")
