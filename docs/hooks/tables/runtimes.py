"""Tables of runtimes, precisions and GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from docs.hooks.tables.results import RESULTS, load, source, table, times

RUNTIMES = {"onnxruntime": "ONNX Runtime", "openvino": "OpenVINO"}
"""Runtimes of CPUs, and their names in the documentation."""


def runtimes(name: str) -> str:
    """The speed of the automatic choice of the runtime over each runtime alone."""
    rows: list[list[str]] = []
    for row in load(name)["rows"]:
        cells = [
            f"{times(value)} ({low:.2f} to {high:.2f})"
            for value, low, high in (row["mean"][runtime] for runtime in RUNTIMES)
        ]
        lowest = min(min(shape[each][0] for each in RUNTIMES) for shape in row["shapes"].values())
        choice = row["choices"]["auto"]
        runtime = RUNTIMES[choice.get("runtime", "onnxruntime")]
        if long := choice.get("long_rows"):
            runtime += f", {RUNTIMES[long['runtime']]} above {long['above']} tokens"
        threads = "1 thread" if row["threads"] == 1 else f"{row['threads']} threads"
        rows.append([f"{row['model']}, {threads}", *cells, times(lowest), runtime])
    over = [f"over {runtime}" for runtime in RUNTIMES.values()]
    header = ["model", *over, "lowest at a shape", "runs in"]
    return "\n\n".join((table(header, rows), source(name)))


def loading() -> str:
    """Load time and memory in one runtime and in both."""
    return table(
        ["precision", "runtimes", "first load, s", "later loads, s", "memory, MB", "file, MB"],
        [
            [
                row["precision"],
                row["runtimes"],
                f"{row['first_s']:.2f}",
                f"{row['again_s']:.2f}",
                f"{row['memory_bytes'] / 1e6:.0f}",
                f"{row['file_bytes'] / 1e6:.0f}",
            ]
            for row in load("loading")["rows"]
        ],
    )


def int8() -> str:
    """Quality, batch dependence and speed of int8 schemes."""
    result = load("int8")
    lengths = [int(key.removeprefix("speedup_")) for key in result["schemes"][0] if "speed" in key]
    return table(
        ["activations and weights", "cosine", "R^2", "Spearman", "batch difference"]
        + [f"{length} tokens" for length in lengths],
        [
            [
                row["name"],
                f"{row['cosine']:.4f}",
                f"{row['r2']:.4f}",
                f"{row['spearman']:.4f}",
                f"{row['batch_difference']:.0e}" if row["batch_difference"] else "0",
                *(f"{row[f'speedup_{length}']:.2f}x" for length in lengths),
            ]
            for row in result["schemes"]
        ],
    )


def cuda() -> str:
    """The goals on a GPU and what was measured of them, and all forms by shape, for each card."""
    parts: list[str] = []
    for path in sorted(RESULTS.glob("cuda-*.json")):
        result = load(path.stem)
        machine = result["machine"]
        parity = result["parity"]
        error = parity if isinstance(parity, str) else f"{max(parity.values()):.0e}"
        parts.append(
            f"{machine['gpu']}, ONNX Runtime {machine['onnxruntime']}. Parity in float32: largest"
            f" difference {error}."
        )
        parts += [_gpu_goals(result), *_gpu_forms(result)]
        parts.append(f"*Command: `{result['command']}`. Data: `benchmarks/results/{path.name}`.*")
    return "\n\n".join(parts) or "Nothing was measured."


def _gpu_goals(result: Mapping[str, Any]) -> str:
    rows: list[list[str]] = []
    for bound in result["bounds"]:
        low, high, value = bound["at_least"], bound["at_most"], bound["value"]
        goal = f"at least {low}" if low is not None else f"at most {high}"
        rows.append([bound["what"], goal, "not measured" if value is None else f"{value:.2f}"])
    return table(["quantity", "goal", "measured"], rows)


def _gpu_forms(result: Mapping[str, Any]) -> Iterator[str]:
    """Speed-ups over the exported model in float16, by size."""
    for label, size in result["sizes"].items():
        latency: dict[tuple[int, int], dict[str, float]] = {}
        for cell in size["cells"]:
            if "p50_ms" in cell:
                shape = cell["batch"], cell["sequence"]
                latency.setdefault(shape, {})[cell["form"]] = cell["p50_ms"]
        forms = [form for form in dict.fromkeys(chain(*latency.values())) if "fp32" not in form]
        forms = [form for form in forms if form != "fp16"]
        rows = [
            [f"{shape[0]} x {shape[1]}"]
            + [times(each["fp16"] / each[form]) if form in each else "" for form in forms]
            for shape, each in sorted(latency.items())
            if "fp16" in each
        ]
        yield f"{label}: speed-up over the exported model in float16, by texts x tokens"
        yield table(["", *(form.removesuffix(" fp16") for form in forms)], rows)
