"""Compare pruning once before training with alternate pruning and training, at equal size and time.

    python -m benchmarks.pruning_rounds --train STSB_TRAIN.tsv --dev STSB_DEV.tsv --text TEXT
        [--turns 1 2] [--minutes 20] [--threads 1] [--resume]

all-MiniLM-L6-v2 loses two thirds of its heads and neurons, in equal steps. After each step it is
trained on the texts of benchmarks/recovery.py to give the outputs of the original again, for an
equal share of --minutes. Each step starts from the weights of the one before; its pruning is fitted
to them. Before and after each training, the measures of benchmarks/recovery.py are taken.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
from benchmarks._common import number_table, stored_rows, sts_parser, write_result
from benchmarks.recovery import Study

HEADS, NEURONS = (12, 4), (1536, 512)
"""Heads and neurons per layer, before and after."""


def main(arguments: list[str] | None = None) -> int:
    parser = sts_parser(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 2], choices=[1, 2, 4])
    parser.add_argument("--minutes", type=float, default=20.0, help="of training, all rounds")
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    rows = stored_rows("pruning_rounds")
    with tempfile.TemporaryDirectory() as name:
        study = Study(Path(name), options)
        for rounds in options.turns:
            asked = {"rounds": rounds, "minutes": options.minutes, "threads": options.threads}
            if options.resume and any(asked.items() <= row.items() for row in rows):
                continue
            row = {**asked, "steps": prune_and_train(study, rounds, options)}
            rows = [*(old for old in rows if not asked.items() <= old.items()), row]
            rows.sort(key=lambda row: (row["minutes"], row["rounds"]))
            kept = argparse.Namespace(train=options.train, dev=options.dev, text=options.text)
            write_result("pruning_rounds", kept, rows=rows)
    show(rows)
    return 0


def shares(rounds: int, sizes: tuple[int, int]) -> list[float]:
    """Share of the remaining parts that each of several equal steps between two sizes removes."""
    before, after = sizes
    left = [before - (before - after) * step // rounds for step in range(rounds + 1)]
    return [1 - new / old for old, new in pairwise(left)]


def prune_and_train(study: Study, rounds: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Prune the encoder and train it, in turns; returns what each round measured."""
    model, steps = study.original, list[dict[str, Any]]()
    removed = zip(shares(rounds, HEADS), shares(rounds, NEURONS), strict=True)
    for number, (heads, neurons) in enumerate(removed, start=1):
        smaller, trained = (study.folder / f"{n} {rounds} {number}" for n in ("smaller", "trained"))
        attnserve.optimize(model, smaller, calib=study.calibration, prune=heads, ffn=neurons)
        before = study.quality(smaller)
        report = attnserve.recover(
            smaller, trained, teacher=study.original, data=study.training,
            minutes=options.minutes / rounds, threads=options.threads,
        )  # fmt: skip
        after = study.quality(trained)
        course = report.record.to_json()["training"]
        steps.append({"before": before, "after": after, "training": course})
        print(f"round {number} of {rounds}: {report.record.verdict}", before, after, flush=True)
        model = trained
    return steps


def show(rows: Sequence[dict[str, Any]]) -> None:
    headings = ("score kept", "cosine", "sentences", "paragraphs")
    table = number_table("after the last training: overlap@10 of both kinds", headings)
    for row in rows:
        quality = row["steps"][-1]["after"]
        table.add_row(
            f"{row['rounds']} rounds, {row['minutes']:g} min",
            f"{quality['kept']:.2%}", f"{quality['mean_cosine']:.4f}",
            *(f"{quality[kind]['overlap']:.3f}" for kind in ("sentences", "paragraphs")),
        )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
