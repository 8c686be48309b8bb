"""Read ONNX Runtime profiles: time per operator, peak memory and attention kernels.

``SessionOptions.profile`` writes the file that ``read_profile`` reads. With the environment
variable ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1, each run of a fused attention on CUDA prints the
line that ``attention_kernels`` reads.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attnserve.runtime.profile import peak_of
from graph_passes.errors import InvalidData

FIX = "run the model at least once, then call end_profiling()"
"""The fix in errors of this module."""


@dataclass(frozen=True)
class Profile:
    """Time and memory of runs of one session.

    The first run allocates memory and is excluded if there are more runs.

    Attributes:
        shares: Share of the total time by operator type, largest first; the sum is 1.
        timed: "kernels" if the file has GPU times, else "nodes": on CUDA these are launch times,
            not run times.
        peak_bytes: The peak of the arena; see ``attnserve.runtime.profile.peak_of``.
    """

    shares: Mapping[str, float]
    timed: Literal["kernels", "nodes"]
    peak_bytes: int | None


@dataclass(frozen=True)
class AttentionKernel:
    """The kernel of a fused attention operator.

    Attributes:
        operator: "MultiHeadAttention", "Attention", ...
        node: The name of the node; may be empty.
        dtype: "fp16", "bf16" or "fp32".
        kernel: "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", ...
    """

    operator: str
    node: str
    dtype: str
    kernel: str

    @property
    def is_fused(self) -> bool:
        """Whether the kernel does not write the scores to memory."""
        return self.kernel != "MATH"


def read_profile(path: Path) -> Profile:
    """Read all runs of a profile file as one profile.

    Raises:
        InvalidData: The file is not an ONNX Runtime profile, or has no operators.
    """
    with _reading(path):
        events = _events(path)
        runs = _windows(events)
        begin = runs[0][1] if len(runs) > 1 else 0
        return _profile(path, events, begin, float("inf"))


def read_runs(path: Path) -> tuple[Profile, ...]:
    """Read each run of a profile file, in order; peaks include all previous runs.

    Raises:
        InvalidData: The file is not an ONNX Runtime profile, or has no operators.
    """
    with _reading(path):
        events = _events(path)
        return tuple(_profile(path, events, *window) for window in _windows(events))


@contextmanager
def _reading(path: Path) -> Generator[None]:
    """Raise errors of a damaged file as ``InvalidData``."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path}: not an ONNX Runtime profile: {type(error).__name__}: {error}",
            FIX,
            code="profile.invalid",
        ) from error


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def _windows(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """Start and end time of each run in microseconds, in order."""
    runs = [event for event in events if event["name"] == "model_run"]
    return sorted((run["ts"], run["ts"] + run["dur"]) for run in runs)


def _profile(path: Path, events: list[dict[str, Any]], begin: float, end: float) -> Profile:
    """The profile of the events that start in a window.

    Raises:
        InvalidData: The window contains no operators.
    """
    run_events = [event for event in events if begin <= event["ts"] <= end]
    nodes = [event for event in run_events if event.get("cat") == "Node"]
    kernels = [event for event in run_events if event.get("cat") == "Kernel"]
    spent: Counter[str] = Counter()
    for event in kernels or nodes:
        spent[event["args"].get("op_name") or event["name"]] += event["dur"]
    if not nodes:
        raise InvalidData(f"{path}: the profile has no operators", FIX, code="profile.empty")
    total = spent.total() or 1
    return Profile(
        {name: duration / total for name, duration in spent.most_common()},
        "kernels" if kernels else "nodes",
        peak_of(nodes),
    )


COLOR = re.compile(r"\x1b\[[0-9;]*m")
"""A terminal color code."""

LINE = re.compile(
    r"Operator=(?P<operator>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+)"
    r" SdpaKernel=(?P<kernel>\w+)"
)


def attention_kernels(output: str) -> tuple[AttentionKernel, ...]:
    """Parse the kernels that ONNX Runtime printed, without duplicates, in order.

    Args:
        output: The standard output of the process; other lines are ignored.
    """
    matches = (LINE.search(COLOR.sub("", line)) for line in output.splitlines())
    kernels = [AttentionKernel(**match.groupdict(default="")) for match in matches if match]
    return tuple(dict.fromkeys(kernels))
