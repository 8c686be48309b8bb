"""Speed of queries that keep an existing index, beside that of a model that embeds all texts anew.

    python -m benchmarks.index --train STSB_TRAIN.tsv --dev STSB_DEV.tsv --models FOLDER
        [--keep K ...] [--rounds N] [--resume]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and optimizes it for each K by the measures "index"
(new queries against documents of the original) and "similarity" (symmetric), in float32, in
bfloat16 where the CPU multiplies it, and in int8-full, with feed-forwards. Queries are the first
sentences of pairs of --train, documents the second ones. The result has the verification of each
search, and the index and symmetric measures on the pairs of --dev. The result file is written after
each search: ``--resume`` continues it with the models in FOLDER. Then all models are timed in one
interleaved run on one thread at lengths of queries, beside the fused original.
"""

from __future__ import annotations

import argparse
import csv
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.models.measured import Quality
from attnserve.runtime.machine import has_bfloat16_product
from benchmarks._common import (
    description,
    minilm,
    number_table,
    spread,
    stored_rows,
    write_lines,
    write_result,
)
from benchmarks.planner import fused_file
from graph_passes.errors import CheckFailed

LENGTHS = (8, 16, 32)
"""Tokens of queries. The sentences have a median of 14."""

QUERIES, DOCUMENTS = 2100, 2800
"""Rows for calibration. Of the documents, 400 are held out for each verification."""

MEASURES = ("index", "similarity")
PRECISIONS = ("float32", "bfloat16-cpu", "int8-full")

FUSED = "fused, nothing removed"
"""Reference of all speed-ups."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--models", type=Path, required=True, help="folder of the models")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.95, 0.98, 0.99])
    parser.add_argument("--rounds", type=int, default=None, help="timing rounds; default: by time")
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    folder = options.models
    folder.mkdir(parents=True, exist_ok=True)
    original = folder / "original"
    if not original.exists():
        attnserve.export(minilm(), original)
    calibration = with_roles(folder / "calibration.tsv", options.train, QUERIES, DOCUMENTS)
    unseen = with_roles(folder / "unseen.tsv", options.dev)
    rows = stored_rows("index") if options.resume else []
    done = {row["name"] for row in rows if (folder / row["name"]).exists()}
    rows = [row for row in rows if row["name"] in done]
    precisions = [p for p in PRECISIONS if p != "bfloat16-cpu" or has_bfloat16_product()]
    goals = ((k, p, m) for k in options.keep for p in precisions for m in MEASURES)
    for keep, precision, measure in goals:
        name = f"{measure}-{precision}-{keep:g}"
        if name in done:
            continue
        goal = {"keep": keep, "precision": precision, "measure": measure}
        row = optimized(original, folder / name, calibration, unseen, goal)
        rows.append({"name": name, **row})
        write_result("index", options, rows=rows, speeds=[])
        print(f"{name}: {row['seconds']:.0f} s, {row['verdict']}", flush=True)
    models = {FUSED: fused_file(original, folder)}
    models |= {row["name"]: folder / row["name"] for row in rows if row["proved"]}
    speeds = query_speeds(models, options.rounds)
    write_result("index", options, rows=rows, speeds=speeds)
    show(rows, speeds)
    return 0


def with_roles(
    path: Path, pairs: Path, queries: int | None = None, documents: int | None = None
) -> Path:
    """Write the sentences of pairs as queries and documents, evenly spaced, each in one role."""
    lines = pairs.read_text(encoding="utf-8").splitlines()
    table = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
    asked = list(dict.fromkeys(row["sentence1"] for row in table))
    found = dict.fromkeys(row["sentence2"] for row in table)
    answers = [text for text in found if text not in set(asked)]
    rows = ["role\ttext"]
    for role, texts, count in (("query", asked, queries), ("document", answers, documents)):
        chosen = spread(texts, min(count or len(texts), len(texts)))
        rows += [f"{role}\t{text}" for text in dict.fromkeys(chosen)]
    return write_lines(path, rows)


def optimized(
    original: Path, output: Path, calibration: Path, unseen: Path, goal: dict[str, Any]
) -> dict[str, Any]:
    """Optimize the encoder for queries, and measure the result on pairs that it has not seen."""
    start = time.perf_counter()
    try:
        report = attnserve.optimize(
            original, output, calib=calibration, allow=["ffn"], sequence=(LENGTHS[0], LENGTHS[-1]),
            threads=1, force=True, **goal,
        )  # fmt: skip
    except CheckFailed as error:
        # A precision may lose more than is allowed.
        seconds = time.perf_counter() - start
        return {**goal, "seconds": seconds, "verdict": error.what, "proved": None, "unseen": {}}
    search, verified = report.search, report.fidelity.quality
    assert search is not None and verified is not None
    return {
        **goal, "seconds": time.perf_counter() - start, "verdict": search.verdict,
        "proved": verified.to_json(),
        "unseen": {measure: quality(original, output, unseen, measure) for measure in MEASURES},
        "layers": [[d.block, d.kept, d.count, d.operator] for d in search.decisions],
    }  # fmt: skip


def quality(original: Path, new: Path, data: Path, measure: Any) -> dict[str, Any]:
    found: Quality | None = attnserve.verify(original, new, data=data, measure=measure).quality
    assert found is not None
    return found.to_json()


def query_speeds(models: dict[str, Path], rounds: int | None) -> list[dict[str, Any]]:
    """Time all models at each length of a query, one query at a time."""
    report = attnserve.bench(list(models.values()), sequences=LENGTHS, threads=1, rounds=rounds)
    return [
        {
            "model": name, "sequence": result.sequence, "p50_ms": result.p50_ms,
            "vs_fused": float(np.median(np.divide(shape[0].samples_ms, result.samples_ms))),
            "vs_fused_ci95": list(result.speedup_ci95), "rounds": len(result.samples_ms),
        }
        for start in range(0, len(report.results), len(models))
        for shape in [report.results[start : start + len(models)]]
        for name, result in zip(models, shape, strict=True)
    ]  # fmt: skip


def show(rows: Sequence[dict[str, Any]], speeds: Sequence[dict[str, Any]]) -> None:
    headings = ("index", "overlap", "similarity", "r2", *(f"{n} tokens" for n in LENGTHS))
    table = number_table("unseen pairs, and speed over the fused original", headings)
    for row in rows:
        if not row["proved"]:
            table.add_row(row["name"], *["-"] * len(headings))
            continue
        found = row["unseen"]["index"]
        times = [one["vs_fused"] for one in speeds if one["model"] == row["name"]]
        table.add_row(
            row["name"], *(f"{found[key]:.4f}" for key in ("value", "overlap", "similarity", "r2")),
            *(f"{ratio:.2f}x" for ratio in times),
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
