"""Quality recovered by training: compress all-MiniLM-L6-v2, then distill from the original.

    python -m benchmarks.recovery --train STSB_TRAIN.tsv --dev STSB_DEV.tsv --text TEXT
        [--case NAME ...] [--minutes 20] [--threads 2] [--resume]

Each case makes the encoder smaller, calibrated on 900 sentences of --train or on sentences and
paragraphs of TEXT (one paragraph a line), and trains the result for --minutes on unlabeled text:
all sentences of --train, and the first half of TEXT. Before and after the training, the score on
--dev, the cosine of the tokens of 500 of its sentences, and the similarities of sentences and
paragraphs of the second half of TEXT are measured; those of int8 models both times in int8. The
trained model is timed beside the exported one and those of other tools, in turns, on one thread: it
has the graph of the smaller one, or is an int8 model. The result file is written after each case.
"""

from __future__ import annotations

import argparse
import csv
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
from benchmarks import mixture
from benchmarks._common import (
    minilm,
    number_table,
    sentences,
    spread,
    stored_rows,
    sts_parser,
    sts_score,
    write_lines,
    write_result,
)
from benchmarks.planner import other_tools
from docs.hooks.tables.recovery import vs_fastest

SEARCH: dict[str, Any] = {"allow": ["ffn"], "sequence": 128, "threads": 1}

CASES: dict[str, dict[str, Any]] = {
    "half of the heads, a third of the neurons": {"prune": 0.5, "ffn": 1 / 3},
    "2.5 times as fast": {"target_speedup": 2.5, **SEARCH},
    "2.7 times as fast, then int8": {"target_speedup": 2.7, **SEARCH, "int8": True},
    "3.1 times as fast, then int8": {"target_speedup": 3.1, **SEARCH, "int8": True},
    "int8, sentences and paragraphs": {"int8": True, "mixture": True},
    "1.65 times as fast, sentences and paragraphs": {
        "target_speedup": 1.65, **SEARCH, "mixture": True,
    },
    "1.95 times as fast, sentences and paragraphs": {
        "target_speedup": 1.95, **SEARCH, "mixture": True,
    },
}  # fmt: skip
"""Arguments of ``optimize`` by the name in the result file ("int8": of ``recover``; "mixture":
calibrate on sentences and paragraphs of TEXT). Speeds are those over the exported model."""

LENGTHS = (128, 512)


def main(arguments: list[str] | None = None) -> int:
    parser = sts_parser(__doc__)
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("--case", choices=CASES, nargs="+", default=list(CASES))
    parser.add_argument("--minutes", type=float, default=20.0, help="time of each training")
    parser.add_argument("--threads", type=int, default=0, help="of the training; default: all")
    parser.add_argument("--resume", action="store_true", help="skip what the result file has")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the other optimizers
    rows = stored_rows("recovery")
    with tempfile.TemporaryDirectory() as name:
        study = Study(Path(name), options)
        for case in options.case:
            if options.resume and any(_is(row, case, options) for row in rows):
                continue
            row = {"case": case, "minutes": options.minutes, **study.measure(case, options)}
            rows = [*(old for old in rows if not _is(old, case, options)), row]
            rows.sort(key=lambda row: (list(CASES).index(row["case"]), row["minutes"]))
            kept = argparse.Namespace(train=options.train, dev=options.dev, text=options.text)
            write_result("recovery", kept, rows=rows)
    show(rows)
    return 0


def _is(row: dict[str, Any], case: str, options: argparse.Namespace) -> bool:
    return (row["case"], row["minutes"]) == (case, options.minutes)


class Study:
    """The exported encoder, the models of other tools, and the texts.

    Attributes:
        training: Unlabeled texts to learn from.
        unseen: Texts for the measurement by kind.
    """

    def __init__(self, folder: Path, options: argparse.Namespace) -> None:
        self.folder, self.dev = folder, options.dev
        self.original = folder / "original"
        attnserve.export(minilm(), self.original)
        self.tools = other_tools(self.original, folder)
        self.tools.pop("as exported")
        self.tools.pop("ONNX Runtime's int8")
        self.files = mixture.texts(options.text, folder)
        rows = spread(sentences(options.train, sys.maxsize), options.rows)
        self.calibration = write_lines(folder / "calibration.txt", rows)
        paragraphs, _ = mixture.halves(options.text)
        short = [*both_sentences(options.train), *mixture.sentences_of(paragraphs)]
        self.training = [
            write_lines(folder / "sentences.txt", short),
            write_lines(folder / "paragraphs.txt", mixture.shortened(paragraphs)),
        ]
        self.dev_sentences = write_lines(folder / "dev.txt", sentences(options.dev, 500))
        self.baseline = sts_score(self.original, options.dev)

    def measure(self, case: str, options: argparse.Namespace) -> dict[str, Any]:
        """Make the encoder smaller, train it, and measure both; returns a row of the result."""
        smaller, rounded, trained = (self.folder / n for n in ("smaller", "rounded", "trained"))
        for path in (smaller, rounded, trained):
            shutil.rmtree(path, ignore_errors=True)
        mixed = [self.files[f"calibration {kind}"] for kind in ("sentences", "paragraphs")]
        arguments = dict(CASES[case])
        calib = mixed if arguments.pop("mixture", False) else self.calibration
        precision = "int8" if arguments.pop("int8", False) else "float32"
        if arguments:
            attnserve.optimize(self.original, smaller, calib=calib, **arguments)
        else:
            shutil.copytree(self.original, smaller)
        models = {"as exported": self.original, **self.tools, "smaller": trained}
        if precision == "int8":
            attnserve.optimize(smaller, rounded, calib=self.training, precision="int8")
        before = self.quality(rounded if precision == "int8" else smaller)
        started = time.perf_counter()
        report = attnserve.recover(
            smaller, trained, teacher=self.original, data=self.training,
            minutes=options.minutes, threads=options.threads, precision=precision,
        )  # fmt: skip
        seconds = time.perf_counter() - started
        after = self.quality(trained)
        timed = attnserve.bench(list(models.values()), sequences=LENGTHS, threads=1)
        names = [*models] * len(LENGTHS)
        speeds: dict[str, dict[str, Any]] = {}
        for name, result in zip(names, timed.results, strict=True):
            speeds.setdefault(name, {})[str(result.sequence)] = result.speedup_vs_first
        row = {
            "asked": CASES[case], "threads": options.threads or "all", "seconds": seconds,
            "before": before, "after": after, "speedups": speeds,
            "verdict": report.record.verdict, "training": report.record.to_json()["training"],
        }  # fmt: skip
        print(f"{case}: {report.record.verdict}", before, after, speeds["smaller"], flush=True)
        return row

    def quality(self, model: Path) -> dict[str, Any]:
        """Measure a model on data that neither calibration nor training has."""
        found: dict[str, Any] = {
            "kept": sts_score(model, self.dev) / self.baseline,
            "mean_cosine": self.verified(model, self.dev_sentences).mean_cosine,
        }
        for kind in ("sentences", "paragraphs"):
            quality = self.verified(model, self.files[f"unseen {kind}"]).quality
            assert quality is not None
            found[kind] = quality.to_json()
        return found

    def verified(self, model: Path, data: Path) -> Any:
        return attnserve.verify(self.original, model, data=data)


def both_sentences(pairs: Path) -> list[str]:
    """Return the distinct sentences of both columns of a .tsv."""
    lines = pairs.read_text(encoding="utf-8").splitlines()
    table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
    found = dict.fromkeys(row[key] for row in table for key in ("sentence1", "sentence2"))
    return [text for text in found if text.strip()]


def show(rows: Sequence[dict[str, Any]]) -> None:
    headings = ("128 tokens", "512", "score kept", "cosine", "sentences", "paragraphs")
    table = number_table("before and after: similarity, overlap@10 and R^2", headings)
    for row in rows:
        fastest = [vs_fastest(row["speedups"], str(length)) for length in LENGTHS]
        for part in ("before", "after"):
            quality = row[part]
            table.add_row(
                f"{row['case']}, {part} {row['minutes']:g} min",
                *(f"{speed:.2f}x" for speed in fastest),
                f"{quality['kept']:.2%}", f"{quality['mean_cosine']:.4f}",
                *("{value:.4f} {overlap:.3f} {r2:.4f}".format(**quality[kind])
                  for kind in ("sentences", "paragraphs")),
            )  # fmt: skip
    Console(width=150).print(table)


if __name__ == "__main__":
    sys.exit(main())
