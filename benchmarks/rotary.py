"""Quality of shared keys and of truncated planes under rotary positions.

    python -m benchmarks.rotary --model stories260K.onnx --tokenizer tok512.bin --text STORIES.txt

Shortens queries and keys of stories260K (8 heads in 4 groups of 8 elements), calibrated on the
first stories, and compares the next tokens on the others. Truncation and sharing are compared at
equal numbers of key elements per token; sharing needs more MACs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from attnserve.context import ONE_THREAD, RunContext
from attnserve.data.datasets import Dataset
from attnserve.job import Job
from attnserve.models.artifact import open_artifact
from attnserve.models.lineage import Calibration
from attnserve.models.onnx_files import load_model
from attnserve.options import Target
from attnserve.planning.plans.apply import apply_plan
from attnserve.planning.plans.plan import Plan
from attnserve.runtime.session import open_session
from benchmarks._common import description, number_table, write_result
from graph_passes.analysis.cost import count_macs
from graph_passes.analysis.workload import Workload
from graph_passes.matching.find import find_attention
from graph_passes.passes.collaborate import Collaborate, Mixing
from tests.stories import LENGTH, stories

GROUPS, SIZE = 4, 8
SIZES = (8, 6, 4)
FITTED = 14
"""Stories for the calibration; the others are compared."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    for name in ("model", "tokenizer", "text"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args(arguments)
    ids = stories(options.text, options.tokenizer)
    fit = [{"idx": rows[None]} for rows in ids[:FITTED]]
    data = Dataset(fit, [], [], LENGTH, Calibration())
    artifact = open_artifact(options.model)
    original = load_model(artifact)
    expected = logits(original, ids[FITTED:])
    names = [block.name for block in find_attention(original).blocks]
    results: list[dict[str, Any]] = []
    for size in SIZES:
        mixings = {
            "truncated": Mixing(rank=GROUPS * size, head_size=size),
            "shared": Mixing(rank=GROUPS * size),
        }
        for form, params in mixings.items():
            for calibrated in (True, False):
                model = original.clone()
                job = Job(
                    artifact, original, data if calibrated else None,
                    target=Target(sequence=LENGTH), context=RunContext(ONE_THREAD),
                )  # fmt: skip
                plan = Plan.merged([Collaborate(dict.fromkeys(names, params))])
                apply_plan(plan, job, model, fit=False)
                got = logits(model, ids[FITTED:])
                results.append({
                    "form": form, "key_elements": GROUPS * size, "calibrated": calibrated,
                    "top1": float((got.argmax(-1) == expected.argmax(-1)).mean()),
                    "largest_change": float(np.abs(got - expected).max()),
                    "macs": count_macs(model, Workload.of(1, LENGTH)),
                })  # fmt: skip
    table = number_table("stories260K", ("key elements", "calibrated", "top-1", "GMACs"))
    for row in results:
        cells = (row["key_elements"], row["calibrated"], f"{row['top1']:.3f}",
                 f"{row['macs'] / 1e9:.3f}")  # fmt: skip
        table.add_row(row["form"], *map(str, cells))
    Console().print(table)
    write_result("rotary", options, stories=len(ids) - FITTED, results=results)
    return 0


def logits(model: Any, ids: np.ndarray) -> np.ndarray:
    """Logits (N, 256, 512)."""
    return open_session(model, ONE_THREAD).run(None, {"idx": ids})[0]


if __name__ == "__main__":
    sys.exit(main())
