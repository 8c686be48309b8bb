"""Paths that the public functions accept: strings, and path objects of every kind."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import overload

__all__ = ["StrPath", "as_path", "as_paths"]

StrPath = str | os.PathLike[str]


@overload
def as_path(path: StrPath) -> Path: ...
@overload
def as_path(path: StrPath | None) -> Path | None: ...
def as_path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)


def as_paths(paths: StrPath | Iterable[StrPath] | None) -> list[Path]:
    """A list of no, one or several paths."""
    if paths is None:
        return []
    return [Path(paths)] if isinstance(paths, str | os.PathLike) else [Path(one) for one in paths]
