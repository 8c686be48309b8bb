"""Speed against quality of a sentence encoder, on sentences and on paragraphs.

    python -m benchmarks.mixture --text TEXT [--goal GOAL ...] [--keep K ...] [--resume]

Optimizes all-MiniLM-L6-v2 for the similarities of texts, without labels, calibrated on two files:
500 sentences and 150 paragraphs of up to 256 tokens from the first half of TEXT (one paragraph a
line). Quality is measured on up to 500 sentences and 400 paragraphs of the second half. The model
is timed beside the exported one, in turns, on one thread at 128, 256 and 512 tokens. So are the
models that ONNX Runtime's tools and onnxscript make. The result file is written after each goal,
and ``--resume`` continues it.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
from attnserve.literals import Precision
from benchmarks._common import (
    description,
    minilm,
    number_table,
    stored_rows,
    write_lines,
    write_result,
)
from benchmarks.planner import FUSED, fused_file, other_tools

GOALS: dict[str, dict[str, Any]] = {
    "attention": {},
    "with feed-forwards": {"allow": ["ffn"]},
    "with feed-forwards, int8": {"allow": ["ffn"], "precision": "int8"},
    "with feed-forwards, int8-full": {"allow": ["ffn"], "precision": "int8-full"},
}
"""Arguments of ``optimize`` by the name in the result file."""

BY_HAND: dict[str, Precision] = {"int8 by hand": "int8", "int8-full by hand": "int8-full"}
"""Conversions without a search, which remove nothing."""

KEEP = (0.95, 0.98, 0.99, 0.995)

SENTENCES, PARAGRAPHS = (500, 500), (150, 400)
"""The numbers of texts for calibration and for the measurement."""

WORDS = 60, 200
"""Shorter lines are not paragraphs, longer ones are cut: 200 words have about 256 tokens."""

LENGTHS = (128, 256, 512)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("--goal", choices=GOALS, nargs="+", default=list(GOALS))
    parser.add_argument("--keep", type=float, nargs="*", default=KEEP)
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    rows = stored_rows("mixture")
    done = {(row["goal"], row["keep"]) for row in rows if options.resume}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = texts(options.text, folder)
        attnserve.export(minilm(), folder / "original")
        tools = other_tools(folder / "original", folder)
        tools.pop("as exported")
        tools[FUSED] = fused_file(folder / "original", folder)
        for tool, path in tools.items():
            if (tool, None) in done:
                continue
            row = {"goal": tool, "keep": None, **compared(folder / "original", path, files)}
            rows = _store(rows, row, options)
        for name, precision in BY_HAND.items():
            if (name, None) not in done:
                row = {"goal": name, "keep": None, **converted(folder, precision, files)}
                rows = _store(rows, row, options)
        for goal, keep in ((goal, keep) for goal in options.goal for keep in options.keep):
            if (goal, keep) in done:
                continue
            row = {"goal": goal, "keep": keep, **measure(folder, goal, keep, files)}
            rows = _store(rows, row, options)
            print(f"{goal}, {keep}: {row['seconds']:.0f} s, {row['verdict']}", flush=True)
    _show(rows)
    return 0


def _store(
    rows: list[dict[str, Any]], row: dict[str, Any], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Write the result file with a row that replaces the row of the same name."""
    others = [r for r in rows if (r["goal"], r["keep"]) != (row["goal"], row["keep"])]
    write_result("mixture", argparse.Namespace(text=options.text), rows=[*others, row])
    return [*others, row]


def texts(source: Path, folder: Path) -> dict[str, Path]:
    """Write sentences and paragraphs for calibration and for the measurement, by name."""
    files: dict[str, Path] = {}
    for index, (kind, part) in enumerate(
        zip(("calibration", "unseen"), halves(source), strict=True)
    ):
        count = PARAGRAPHS[index]
        # Sentences of other paragraphs, so that no sentence is part of a paragraph.
        short = sentences_of(part[count:])
        random.Random(index).shuffle(short)
        for name, chosen in (
            ("sentences", short[: SENTENCES[index]]), ("paragraphs", shortened(part[:count])),
        ):  # fmt: skip
            files[f"{kind} {name}"] = write_lines(folder / f"{kind}-{name}.txt", chosen)
    return files


def halves(source: Path) -> tuple[list[str], list[str]]:
    """Return the paragraphs of a text in random order, in two parts."""
    lines = source.read_text(encoding="utf-8").splitlines()
    paragraphs = [line.strip() for line in lines if len(line.split()) > WORDS[0]]
    random.Random(0).shuffle(paragraphs)
    half = len(paragraphs) // 2
    return paragraphs[:half], paragraphs[half:]


def sentences_of(paragraphs: Sequence[str]) -> list[str]:
    """Return the distinct sentences of 5 to 40 words."""
    found = [s.strip() for line in paragraphs for s in re.split(r"(?<=[.!?]) (?=[A-Z])", line)]
    return [text for text in dict.fromkeys(found) if 5 <= len(text.split()) <= 40]


def shortened(paragraphs: Sequence[str]) -> list[str]:
    return [" ".join(line.split()[: WORDS[1]]) for line in paragraphs]


def measure(folder: Path, goal: str, keep: float, files: dict[str, Path]) -> dict[str, Any]:
    """Optimize the encoder, and measure speed and quality."""
    original, output = folder / "original", folder / f"{goal}-{keep}".replace(" ", "-")
    start, cpu_start = time.perf_counter(), time.process_time()
    report = attnserve.optimize(
        original, output, keep=keep, sequence=128, threads=1, **GOALS[goal],
        calib=[files["calibration sentences"], files["calibration paragraphs"]],
    )  # fmt: skip
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    assert report.search is not None
    return {
        "verdict": report.search.verdict, "seconds": seconds, "cpu_seconds": cpu_seconds,
        "proofs": [verification.to_json() for verification in report.search.verifications],
        "layers": [
            [d.block, d.kept, d.count, d.operator, d.in_float] for d in report.search.decisions
        ],
        **compared(original, output, files),
    }  # fmt: skip


def converted(folder: Path, precision: Precision, files: dict[str, Path]) -> dict[str, Any]:
    """Convert the encoder without a search, and measure speed and quality."""
    original, output = folder / "original", folder / precision
    attnserve.optimize(
        original, output, precision=precision, threads=1, sequence=128,
        calib=[files["calibration sentences"], files["calibration paragraphs"]],
    )  # fmt: skip
    return compared(original, output, files)


def compared(original: Path, output: Path, files: dict[str, Path]) -> dict[str, Any]:
    """Measure the quality of a model on unseen texts, and its speed beside the original."""
    unseen: dict[str, Any] = {}
    for name in ("sentences", "paragraphs"):
        quality = attnserve.verify(original, output, data=files[f"unseen {name}"]).quality
        assert quality is not None
        unseen[name] = quality.to_json()
    timed = attnserve.bench([original, output], sequences=LENGTHS, threads=1).results[1::2]
    speedups = {str(r.sequence): [r.speedup_vs_first, *r.speedup_ci95] for r in timed}
    return {"unseen": unseen, "speedups": speedups}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    headings = (*(f"{length} tokens" for length in LENGTHS), "sentences", "paragraphs", "seconds")
    table = number_table("similarity, overlap@10 and R^2 on unseen texts", headings)
    for row in rows:
        table.add_row(
            row["goal"] + (f", keep {row['keep']}" if row["keep"] else ""),
            *(f"{row['speedups'][str(length)][0]:.2f}x" for length in LENGTHS),
            *("{value:.4f} {overlap:.3f} {r2:.4f}".format(**row["unseen"][name])
              for name in ("sentences", "paragraphs")),
            f"{row['seconds']:.0f}" if "seconds" in row else "",
        )  # fmt: skip
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main())
