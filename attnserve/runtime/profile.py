"""Read the peak memory in a profile of ONNX Runtime, which ``SessionOptions.profile`` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["peak_bytes", "peak_of"]


def peak_bytes(path: Path) -> int | None:
    """The peak of the arena in bytes, see ``peak_of``; None if the file is no profile."""
    try:
        return peak_of(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def peak_of(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The peak of the GPU arena, or of the CPU arena if no operator ran on CUDA; None if unknown.

    Weights that were allocated outside of the arena are not included. The peak of an event includes
    all earlier events.
    """
    nodes = [event["args"] for event in events if event.get("cat") == "Node"]
    on_cuda = [node for node in nodes if node.get("provider") == "CUDAExecutionProvider"]
    peaks = [int(node["mem_in_use_peak"]) for node in on_cuda or nodes if "mem_in_use_peak" in node]
    return max(peaks, default=None)
