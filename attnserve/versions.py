"""Versions of the packages that affect results."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterable
from contextlib import suppress

__all__ = ["package_versions", "versions"]

PACKAGES = (
    "attnserve",
    "numpy",
    "onnx",
    "onnx-ir",
    "tensorly",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
)
"""Packages that affect the results of a rewrite or an analysis."""


def versions() -> dict[str, str]:
    """Versions of Python and the installed ``PACKAGES``, for reports."""
    return {"python": platform.python_version(), **package_versions(PACKAGES)}


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Versions of the given packages, if they are installed."""
    installed: dict[str, str] = {}
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed
