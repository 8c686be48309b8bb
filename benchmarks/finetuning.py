"""Decompose a fine-tuned encoder, and fine-tune it again: Table 2 and Figure 5 of arXiv 2006.16362.

    python -m benchmarks.finetuning --task sts --train STSB_TRAIN.tsv --dev STSB_DEV.tsv
    python -m benchmarks.finetuning --task classification --train SST2_TRAIN.tsv --dev SST2_DEV.tsv
        [--minutes 5] [--seeds 0] [--threads 2] [--resume]

For classification, all-MiniLM-L6-v2 is fine-tuned on every other row of --train; for sts it is
taken as it is. Then its queries and keys share R dimensions (``optimize --collab-dk R``, calibrated
on 900 rows), and the result is fine-tuned again for --minutes on the other rows, or on all rows for
sts (``recover --task``: the labels, and the outputs of the first encoder). ``recover`` judges the
training by rows that it holds out. No encoder may have been trained on them, as the first
fine-tuning would do. R = 384 is exact. The row without R is the control: the first encoder,
fine-tuned again. Scores are those of --dev: Spearman's correlation, or the accuracy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import attnserve
from benchmarks import classifier
from benchmarks._common import (
    classifier_accuracy,
    description,
    labeled_sentences,
    minilm,
    sentences,
    spread,
    stored_rows,
    sts_score,
    write_lines,
    write_result,
)

RANKS = (384, 192, 128, 64, 32)
"""The query and key dimensions of a layer, which has 12 heads of 32."""

NAME = "finetuning"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--task", choices=("sts", "classification"), required=True)
    parser.add_argument("--train", type=Path, required=True, help="labels and sentences")
    parser.add_argument("--dev", type=Path, required=True, help="labels and sentences")
    parser.add_argument("--minutes", type=float, default=5.0, help="of each fine-tuning")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--threads", type=int, default=0, help="of the training; default: all")
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    for seed in options.seeds:
        missing = [
            rank
            for rank in (None, *RANKS)
            if not (options.resume and any(_is(row, rank, seed, options) for row in rows()))
        ]
        if missing:
            measure(missing, seed, options)
    return 0


def measure(ranks: list[int | None], seed: int, options: argparse.Namespace) -> None:
    """Measure each rank, None for the control; the result file is written after each."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first, second = tables(folder, options)
        tuned = fine_tuned(folder, first, seed, options)
        score = scored(tuned, options)
        print(f"{options.task}, seed {seed}: {score:.4f} before", flush=True)
        for rank in ranks:
            smaller = tuned if rank is None else folder / f"rank-{rank}"
            if rank is not None:
                calibration = calibration_texts(folder, second, options)
                attnserve.optimize(tuned, smaller, calib=calibration, collab_dk=rank)
            again = folder / f"again-{rank}"
            report = attnserve.recover(
                smaller, again, teacher=tuned, data=second, task=options.task, seed=seed,
                minutes=options.minutes, threads=options.threads,
            )  # fmt: skip
            row = {
                "task": options.task, "rank": rank, "seed": seed, "minutes": options.minutes,
                "tuned": score, "decomposed": scored(smaller, options),
                "tuned_again": scored(again, options), "gain": report.record.gain,
                "learning_rate": report.training.learning_rate, "steps": report.training.steps,
                "threads": options.threads or "all",
            }  # fmt: skip
            print(f"  R = {rank}: {row['decomposed']:.4f} -> {row['tuned_again']:.4f}", flush=True)
            key = (options.task, rank, seed)
            others = [old for old in rows() if (old["task"], old["rank"], old["seed"]) != key]
            write_result(NAME, options, rows=[*others, row])


def rows() -> list[dict[str, Any]]:
    return stored_rows(NAME)


def _is(row: dict[str, Any], rank: int | None, seed: int, options: argparse.Namespace) -> bool:
    key = (options.task, rank, seed, options.minutes)
    return (row["task"], row["rank"], row["seed"], row["minutes"]) == key


def tables(folder: Path, options: argparse.Namespace) -> tuple[Path, Path]:
    """The labeled rows of the first and of the second fine-tuning."""
    if options.task == "sts":
        return options.train, options.train
    header, *lines = options.train.read_text(encoding="utf-8").splitlines()
    return (
        write_lines(folder / "first.tsv", [header, *lines[::2]]),
        write_lines(folder / "second.tsv", [header, *lines[1::2]]),
    )


def fine_tuned(folder: Path, table: Path, seed: int, options: argparse.Namespace) -> Path:
    """The encoder to decompose, as an artifact."""
    tuned = folder / "tuned"
    if options.task == "classification":
        arguments = ["--train", table, "--dev", options.dev, "-o", tuned, "--seed", seed]
        classifier.main([*map(str, arguments), "--threads", str(options.threads)])
    else:
        attnserve.export(minilm(), tuned)
    return tuned


def calibration_texts(folder: Path, table: Path, options: argparse.Namespace) -> Path:
    texts = (
        labeled_sentences(table)[0]
        if options.task == "classification"
        else sentences(table, sys.maxsize)
    )
    return write_lines(folder / "calibration.txt", spread(texts, 900))


def scored(model: Path, options: argparse.Namespace) -> float:
    measured = classifier_accuracy if options.task == "classification" else sts_score
    return measured(model, options.dev)


if __name__ == "__main__":
    sys.exit(main())
