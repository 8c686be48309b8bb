"""What ``--runtime auto`` chooses, beside ONNX Runtime alone and OpenVINO alone.

    pip install 'attnserve[openvino,demo]'
    python -m benchmarks.runtimes [--vit VIT_MNIST.onnx] [--threads 1 2] [--only MODEL]

The models: all-MiniLM-L6-v2, the same in int8 where the CPU multiplies bfloat16, the shapes of
BERT-base and ModernBERT-base with random weights, and an image classifier (--vit). Texts are of 16,
32, 128 and 512 tokens, or of the longest text that a model takes. Each is fused and chosen as
``attnserve serve`` does it, three times: in one runtime, in the other, and in what is the fastest
by time on this machine ("auto"). Each result runs in a process of its own, in turns, and changes
its shape at each run, as requests do. "auto" is compared at each shape with the faster of both if
it runs rows in both, and by the geometric mean of all shapes if it runs all rows in one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.context import Device
from attnserve.models.artifact import Artifact, open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model
from attnserve.planning.served_graph.lossless import fuse_lossless
from attnserve.runtime.interface import Batch, Session
from attnserve.runtime.interleaved_timer import InterleavedTimer, shape_sampler
from attnserve.runtime.isolation import Worker
from attnserve.runtime.machine import has_bfloat16_product
from attnserve.runtime.times import Times
from attnserve.serving.backends import RunnerOptions, open_runner
from benchmarks._common import (
    CALIBRATION,
    description,
    minilm,
    number_table,
    stored_rows,
    write_result,
)
from benchmarks.shapes import random_model
from graph_passes.analysis.workload import Workload
from graph_passes.errors import CannotRewrite

RUNTIMES = ("onnxruntime", "openvino", "auto")
"""The compared choices; "auto" is last."""
INT8 = "int8-full-bfloat16"
LENGTHS = (16, 32, 128, 512)
BATCHES = (1, 8)

SECONDS = 100.0
"""Time of the measurement of one model at all shapes."""

TIMER = InterleavedTimer(sample_seconds=2e-3, min_rounds=4, max_rounds=100)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--vit", type=Path, help="an image classifier, as .onnx")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="keep the rows of the others")
    options = parser.parse_args(arguments)
    stored = stored_rows("runtimes") if options.only else []
    rows = [row for row in stored if row["model"] not in options.only]
    with tempfile.TemporaryDirectory() as name:
        for model, artifact in _models(Path(name), options.vit, options.only):
            for threads in options.threads:
                rows.append({"model": model, "threads": threads, **_measure(artifact, threads)})
                print(rows[-1], flush=True)
                versions = {package: version(package) for package in ("onnxruntime", "openvino")}
                write_result("runtimes", options, rows=rows, versions=versions)
    _show(rows)
    return 0


def _models(
    folder: Path, vit: Path | None, only: Sequence[str] | None
) -> Iterator[tuple[str, Artifact]]:
    """The models by name."""
    chosen = [name for name in ("MiniLM", f"MiniLM {INT8}") if only is None or name in only]
    if chosen:
        attnserve.export(minilm(), folder / "minilm")
    if "MiniLM" in chosen:
        yield "MiniLM", open_artifact(folder / "minilm")
    if f"MiniLM {INT8}" in chosen and has_bfloat16_product():
        options: dict[str, Any] = {"calib": CALIBRATION, "threads": 1, "sequence": 128}
        attnserve.optimize(folder / "minilm", folder / INT8, precision=INT8, **options)
        yield f"MiniLM {INT8}", open_artifact(folder / INT8)
    for shape in ("BERT-base", "ModernBERT"):
        if only is None or f"{shape} shape" in only:
            place = folder / shape
            place.mkdir()
            yield f"{shape} shape", open_artifact(random_model(shape, place))
    if vit is not None and (only is None or "vit_mnist" in only):
        yield "vit_mnist", open_artifact(vit)


class Served:
    """A model as it is served in a runtime; in a child process."""

    def __init__(self, source: str, threads: int, runtime: str) -> None:
        artifact = open_artifact(source)
        self._session, self._choice = _served(artifact, Device(threads=threads, runtime=runtime))
        runs = [partial(self._session.run, None, feed) for feed in _feeds(artifact)]
        self._sample = shape_sampler(runs)

    def choice(self) -> dict[str, Any]:
        """The runtimes of its rows."""
        return self._choice

    def sample(self, repeats: int) -> list[float]:
        """Seconds per run at each shape."""
        return self._sample(repeats).tolist()


def _served(artifact: Artifact, device: Device) -> tuple[Session, dict[str, Any]]:
    """What serves a model, and the choice."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name, "served.onnx")
        try:
            report = fuse_lossless(artifact, file, device)
        except CannotRewrite as error:  # it is served as it is
            alone = replace(device, runtime=device.runtime_name)
            return open_runner(artifact.model, RunnerOptions(alone)), {"why": error.what}
        chosen = replace(device, runtime=report.runtime)
        long_rows = report.long_rows and asdict(report.long_rows)
        session = open_runner(file, RunnerOptions(chosen), long_rows=report.long_rows)
        return session, {"runtime": report.runtime, "long_rows": long_rows}


def _feeds(artifact: Artifact) -> list[Batch]:
    """Inputs of each shape; a model with fixed lengths has fewer."""
    graph = load_model(artifact)
    longest = artifact.max_length or max(LENGTHS)
    shapes = [(batch, min(length, longest)) for length in LENGTHS for batch in BATCHES]
    feeds = [example_inputs(graph, Workload.of(*shape)) for shape in dict.fromkeys(shapes)]
    by_shape = {str([array.shape for array in feed.values()]): feed for feed in feeds}
    return list(by_shape.values())


def _measure(artifact: Artifact, threads: int) -> dict[str, Any]:
    """The speed of "auto" over each runtime, by shape."""
    with ExitStack() as stack:
        workers = [
            stack.enter_context(Worker(Served, str(artifact.model), threads, runtime))
            for runtime in RUNTIMES
        ]
        choices = {
            runtime: worker.call("choice")
            for runtime, worker in zip(RUNTIMES, workers, strict=True)
        }
        samplers = [partial(worker.call, "sample") for worker in workers]
        times = TIMER.time(samplers, SECONDS)  # runtimes rounds shapes
    names = [" x ".join(map(str, next(iter(feed.values())).shape[:2])) for feed in _feeds(artifact)]
    *others, auto = (Times(dict(zip(names, ms.T, strict=True))) for ms in times)
    row: dict[str, Any] = {"choices": choices, "shapes": {}, "mean": {}}
    for runtime, other in zip(RUNTIMES[:-1], others, strict=True):
        mean = auto.speedup_over(other)
        row["mean"][runtime] = [mean.value, *mean.ci95]
        for shape, speedup in auto.speedups_over(other).items():
            row["shapes"].setdefault(shape, {})[runtime] = [speedup.value, *speedup.ci95]
    for shape, ms in auto.by_shape.items():
        row["shapes"][shape]["auto_p50_ms"] = float(np.median(ms))
    return row


def _show(rows: list[dict[str, Any]]) -> None:
    table = number_table("speed of auto over each runtime", (*RUNTIMES[:-1], "auto runs"))
    for row in rows:
        name = f"{row['model']}, {row['threads']} threads"
        choice = str(row["choices"]["auto"])
        table.add_row(name, *(f"{row['mean'][r][0]:.2f}x" for r in RUNTIMES[:-1]), choice)
        for shape, found in row["shapes"].items():
            table.add_row(f"  {shape}", *(f"{found[r][0]:.2f}x" for r in RUNTIMES[:-1]), "")
    Console(width=140).print(table)


if __name__ == "__main__":
    from benchmarks import runtimes  # child processes import its classes by this name

    sys.exit(runtimes.main())
