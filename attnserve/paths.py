"""Convert paths that public functions accept, and find the files of a model."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import overload

__all__ = ["StrPath", "as_path", "as_paths", "belongs_to"]

StrPath = str | os.PathLike[str]


@overload
def as_path(path: StrPath) -> Path: ...
@overload
def as_path(path: StrPath | None) -> Path | None: ...
def as_path(path: StrPath | None) -> Path | None:
    """A ``Path`` for a path of any type; None stays None."""
    return None if path is None else Path(path)


def as_paths(paths: StrPath | Iterable[StrPath] | None) -> list[Path]:
    """A list of paths, from None, one path or several paths."""
    if paths is None:
        return []
    return [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(path) for path in paths]


def belongs_to(path: Path, model: Path) -> bool:
    """Whether a file is in the folder of a model, after links are followed.

    A link to a model, as in the cache of Hugging Face, may have its files beside its target.
    """
    found = path.resolve()
    return found.parent == model.resolve().parent or found.is_relative_to(model.parent.resolve())
