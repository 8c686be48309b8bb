"""What ONNX Runtime wrote down of its runs: where the time went, memory, the kernels it chose.

``open_session(profile=...)`` makes the file that ``read_profile`` reads. With
ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO=1 in the environment of a process, each run of a fused
attention on CUDA prints the line that ``attention_kernels`` reads.
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

from graph_passes.errors import InvalidData

__all__ = ["AttentionKernel", "Profile", "attention_kernels", "read_profile", "read_runs"]

FIX = "let end_profiling() finish the file, and run the model at least once before it"


@dataclass(frozen=True)
class Profile:
    """Some runs of one session, the first left out where there are more: it allocates.

    Attributes:
        shares: Of the time of all operators, that of each kind, largest first; they sum to one.
        timed: "kernels" where the GPU's own clock is in the file, else "nodes": on CUDA that is how
            long operators take to be started, not to run.
        peak_bytes: Most memory in use in the arena of the GPU at once, weights left out that were
            reserved outside of it; that of the CPU where nothing ran on CUDA. None where the file
            does not tell.
    """

    shares: Mapping[str, float]
    timed: Literal["kernels", "nodes"]
    peak_bytes: int | None


@dataclass(frozen=True)
class AttentionKernel:
    """The kernel that a fused attention ran in.

    Attributes:
        operator: "MultiHeadAttention", "Attention", ...
        node: Its name; empty where it has none.
        dtype: "fp16", "bf16" or "fp32".
        kernel: "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH", ...
    """

    operator: str
    node: str
    dtype: str
    kernel: str

    @property
    def is_fused(self) -> bool:
        """Whether it never writes the scores to memory."""
        return self.kernel != "MATH"


def read_profile(path: Path) -> Profile:
    """All runs in a file that ONNX Runtime wrote, together.

    Raises:
        InvalidData: It is no such file, or there is no operator in it.
    """
    with _reading(path):
        events = _events(path)
        runs = _windows(events)
        begin = runs[0][1] if len(runs) > 1 else 0
        return _profile(path, events, begin, float("inf"))


def read_runs(path: Path) -> tuple[Profile, ...]:
    """Each run in such a file, in order; a peak is that of all runs so far.

    Raises:
        InvalidData: As ``read_profile``.
    """
    with _reading(path):
        events = _events(path)
        return tuple(_profile(path, events, *window) for window in _windows(events))


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidData(
            f"{path}: no profile of ONNX Runtime: {type(error).__name__}: {error}",
            FIX,
            code="profile.invalid",
        ) from error


def _events(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def _windows(events: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """When each run began and ended."""
    runs = [event for event in events if event["name"] == "model_run"]
    return sorted((run["ts"], run["ts"] + run["dur"]) for run in runs)


def _profile(path: Path, events: list[dict[str, Any]], begin: float, end: float) -> Profile:
    inside = [event for event in events if begin <= event["ts"] <= end]
    nodes = [event for event in inside if event.get("cat") == "Node"]
    kernels = [event for event in inside if event.get("cat") == "Kernel"]
    spent: Counter[str] = Counter()
    for event in kernels or nodes:
        spent[event["args"].get("op_name") or event["name"]] += event["dur"]
    if not nodes:
        raise InvalidData(f"{path}: no operator ran in this profile", FIX, code="profile.empty")
    total = spent.total() or 1
    return Profile(
        {name: duration / total for name, duration in spent.most_common()},
        "kernels" if kernels else "nodes",
        _peak([event["args"] for event in nodes]),
    )


def _peak(nodes: list[dict[str, Any]]) -> int | None:
    on_cuda = [node for node in nodes if node.get("provider") == "CUDAExecutionProvider"]
    known = [int(node["mem_in_use_peak"]) for node in on_cuda or nodes if "mem_in_use_peak" in node]
    return max(known, default=None)


COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LINE = re.compile(
    r"Operator=(?P<operator>\S+)(?: Node=(?P<node>.*?))? DataType=(?P<dtype>\w+)"
    r" SdpaKernel=(?P<kernel>\w+)"
)


def attention_kernels(output: str) -> tuple[AttentionKernel, ...]:
    """The kernels that ONNX Runtime printed, one for each node and type, as they first came.

    Args:
        output: What the process wrote to its standard output, whatever else that is.
    """
    found = (LINE.search(COLOUR.sub("", line)) for line in output.splitlines())
    kernels = [AttentionKernel(**match.groupdict(default="")) for match in found if match]
    return tuple(dict.fromkeys(kernels))
