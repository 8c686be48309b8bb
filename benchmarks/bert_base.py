"""int8 of attnserve and of NNCF in the shape of BERT-base, with random weights: speed only.

    pip install 'attnserve[openvino,demo]' nncf
    python -m benchmarks.bert_base

All models are timed in turns, in one process, on one thread, one text at a time, as in
``benchmarks.peers``. NNCF and attnserve calibrate on the same sentences. The speed is also stated
over each model of NNCF. A model that does not run on this CPU is left out with the reason.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
from attnserve.context import ONE_THREAD
from attnserve.literals import Precision
from attnserve.models.artifact import Artifact, open_artifact
from benchmarks._common import (
    CALIBRATION,
    description,
    number_table,
    write_lines,
    write_result,
)
from benchmarks.peers import (
    EXPORT,
    LENGTHS,
    OPENVINO,
    Peers,
    Run,
    native,
    open_model,
    quantized_by_nncf,
    time_in_turns,
    versions,
)
from benchmarks.planner import fused_file
from benchmarks.shapes import random_model

ROWS = 100
"""Sentences for calibration, which has no effect on the speed."""

NNCF = {"float32": "f32", "bfloat16": "bf16"}
"""Precisions of what is not int8 in NNCF's model, and their names in OpenVINO."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        artifact = open_artifact(random_model("BERT-base", folder))
        lines = CALIBRATION.read_text(encoding="utf-8").splitlines()
        peers = models(artifact, write_lines(folder / "calibration.txt", lines[:ROWS]))
        nncf = [model for model in peers.models if model.startswith("NNCF")]
        rows = time_in_turns(peers.models, artifact, over=nncf)
    write_result(
        "bert_base", options, rows=rows, left_out=peers.left_out, choices=peers.choices,
        versions=versions("onnxruntime", "openvino", "nncf"),
    )  # fmt: skip
    show(rows)
    return 0


def models(artifact: Artifact, calibration: Path) -> Peers[Run]:
    """Convert the model; return what is timed."""
    folder, peers = artifact.folder.parent, Peers[Run]()
    add = peers.add

    @cache
    def optimized(precision: Precision) -> Path:
        output = folder / precision
        attnserve.optimize(
            artifact.folder, output, precision=precision, calib=calibration, threads=1, sequence=128
        )
        return output

    @cache
    def quantized() -> Any:
        return quantized_by_nncf(artifact, [calibration])

    add(EXPORT, lambda: open_model(artifact.model, ONE_THREAD))
    add("as exported, OpenVINO as it is", lambda: native(artifact.model))
    for rest, kind in NNCF.items():
        hint = {"INFERENCE_PRECISION_HINT": kind}
        add(f"NNCF int8, rest {rest}", lambda hint=hint: native(quantized(), hint))
    fused = partial(fused_file, artifact.folder, folder)
    add("fused, ONNX Runtime float32", lambda: open_model(fused(), ONE_THREAD))
    for name, precision, device in (
        ("fused bfloat16-cpu, OpenVINO", "bfloat16-cpu", OPENVINO),
        ("fused int8-full, ONNX Runtime", "int8-full", ONE_THREAD),
        ("fused int8-full, OpenVINO, rest float32", "int8-full", OPENVINO),
        ("fused int8-full, OpenVINO, rest bfloat16", "int8-full-bfloat16", OPENVINO),
    ):
        file = partial(optimized, precision)
        add(name, lambda file=file, device=device: open_model(open_artifact(file()).model, device))
    for precision in ("int8-full", "int8-full-bfloat16"):
        peers.add_served(f"fused {precision}", partial(optimized, precision))
    return peers


def show(rows: Sequence[dict[str, Any]]) -> None:
    table = number_table("speed over the export", [f"{length} tokens" for length in LENGTHS])
    for row in rows:
        speeds = (row["turns"][str(length)]["speedup"][0] for length in LENGTHS)
        table.add_row(row["model"], *(f"{speed:.2f}x" for speed in speeds))
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
