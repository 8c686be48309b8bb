"""Read result files of benchmarks, and write Markdown tables of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results"


def load(name: str) -> dict[str, Any]:
    """A result file of a benchmark."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def is_measured(name: str) -> bool:
    """Whether the result file of a benchmark is committed."""
    return (RESULTS / f"{name}.json").is_file()


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str, part: str | None = None) -> str:
    """The machines, the versions and the command of a result file, in one line."""
    result = load(name)
    measured = result if part is None else result[part]
    machine = {**measured.get("versions", {}), **measured["machine"]}
    threads = str(measured.get("threads", machine["threads"]))
    threads = {"1": "1 thread", "default": "default threads"}.get(threads, f"{threads} threads")
    about = [f"{_cpu(measured)}, {threads}"]
    packages = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO", "attnserve": "attnserve"}
    about += [
        f"{shown} {machine[package]}"
        for package, shown in packages.items()
        if machine.get(package, "not installed") != "not installed"
    ]
    if "date" in measured:
        about.append(measured["date"][:10])
    others = {_cpu(row) for row in measured.get("rows", []) if "machine" in row} - {_cpu(measured)}
    if others:
        about.append(f"some rows: {', '.join(sorted(others))}")
    where = f"`benchmarks/results/{name}.json`"
    return f"*{'; '.join(about)}. Command: `{measured['command']}`. Data: {where}.*"


def _cpu(measured: Mapping[str, Any]) -> str:
    """The processor, with the features on which speeds depend where they are known."""
    flags = measured.get("cpu_flags")
    return measured["machine"]["cpu"] + (f" ({' '.join(flags)})" if flags else "")


def times(value: float) -> str:
    return f"{value:.2f}x"


def percent(value: float) -> str:
    return f"{value:.1%}"
