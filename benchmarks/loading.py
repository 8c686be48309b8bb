"""Load time and memory of a model in one runtime and in both.

    pip install 'attnserve[openvino,demo]'
    python -m benchmarks.loading --text TEXT [--rounds N]

all-MiniLM-L6-v2 with fused operators, in float32 and in int8-full-bfloat16, is opened in a new
process as serving opens it, and runs one text of 16, 128 and 512 tokens. The time is that from the
opened file to the end of these runs: OpenVINO compiles kernels in the first run of a length. The
memory is the growth of the process in this time. "first" is the load that writes the file of the
compiled model, "again" the median of N further loads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

import attnserve
from attnserve.context import Device
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.runtime.interface import AS_SERVED
from attnserve.runtime.isolation import run_isolated
from attnserve.runtime.session import open_session
from benchmarks._common import description, minilm, number_table, write_result
from benchmarks.mixture import halves, sentences_of
from graph_passes.analysis.workload import Workload

LENGTHS = (16, 128, 512)
RUNTIMES = {
    "ONNX Runtime": ["onnxruntime"],
    "OpenVINO": ["openvino"],
    "both": ["onnxruntime", "openvino"],
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="calibration texts")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        attnserve.export(minilm(), folder / "original")
        calibration = folder / "calibration.txt"
        calibration.write_text("\n".join(sentences_of(halves(options.text)[0])[:200]))
        fused = folder / "float32.onnx"
        fuse_lossless(open_artifact(folder / "original"), fused, Device(threads=1))
        int8 = attnserve.optimize(
            folder / "original", folder / "int8", precision="int8-full-bfloat16", calib=calibration
        ).output
        for precision, file in {"float32": fused, "int8-full-bfloat16": int8}.items():
            for title, runtimes in RUNTIMES.items():
                compiled = folder / f"{precision}-{title}.compiled"
                first, *others = (
                    run_isolated(load, file, runtimes, compiled) for _ in range(1 + options.rounds)
                )
                rows.append({
                    "precision": precision,
                    "runtimes": title,
                    "file_bytes": file.stat().st_size,
                    "first_s": first[0],
                    "again_s": statistics.median(seconds for seconds, _ in others),
                    "memory_bytes": statistics.median(grown for _, grown in others),
                })  # fmt: skip
    write_result("loading", options, rows=rows, lengths=LENGTHS)
    table = number_table("load of one model", ("runtimes", "first s", "again s", "MB", "file MB"))
    for row in rows:
        table.add_row(
            row["precision"], row["runtimes"],
            *(f"{row[key]:.2f}" for key in ("first_s", "again_s")),
            *(f"{row[key] / 1e6:.0f}" for key in ("memory_bytes", "file_bytes")),
        )  # fmt: skip
    Console().print(table)
    return 0


def load(file: Path, runtimes: Sequence[str], compiled: Path) -> tuple[float, int]:
    """Open a model in each runtime and run it once at each length: seconds, and bytes of memory.

    Args:
        compiled: The file of the compiled model, which is written by the first call.
    """
    model = load_model(open_artifact(file), in_place=True)
    feeds = [example_inputs(model, Workload.of(1, length), seed=0) for length in LENGTHS]
    process, served = psutil.Process(), replace(AS_SERVED, compiled=compiled)
    before, start = process.memory_info().rss, time.perf_counter()
    sessions = [
        open_session(file, Device(threads=1, runtime=runtime), served) for runtime in runtimes
    ]
    for session in sessions:
        for feed in feeds:
            session.run(None, feed)
    return time.perf_counter() - start, process.memory_info().rss - before


if __name__ == "__main__":
    from benchmarks import loading  # child processes import its function by this name

    sys.exit(loading.main())
