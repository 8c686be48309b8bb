"""What sparse mixing keeps of a sentence encoder, and how fast it is at every length.

    python -m benchmarks.mixing --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--rows 900]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and gives it collaborative heads three ways: all
heads reading all R = 128 shared dimensions (the paper's form), each reading some of them, and each
with dimensions of its own. Compared are the token outputs on 500 sentences of --dev, the score on
its pairs, and the speed against the original, interleaved, on one thread.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import describe_machine
from benchmarks.fidelity import minilm, score, texts

RESULT = Path(__file__).parent / "results" / "mixing.json"

CASES: Mapping[str, dict[str, Any]] = {
    "R = 128, dense": {"collab_dk": 128, "mixing": "dense"},
    "R = 128": {"collab_dk": 128},
    "R = 128, 24 a head": {"collab_dk": 128, "head_dk": 24},
    "R = 128, 23 a head": {"collab_dk": 128, "head_dk": 23},
    "23 of its own a head": {"head_dk": 23},
}
"""What is asked of ``optimize``. With their content, 23 dimensions make 24, and 24 make 32."""

LENGTHS = [16, 32, 64, 128, 256, 384, 512]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--rows", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=None, help="of each timing; by time")
    options = parser.parse_args(arguments)
    progress = Console(stderr=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, unseen = texts(folder, options.train, options.dev, options.rows)
        paths = [folder / "original", *(folder / str(i) for i in range(len(CASES)))]
        attnserve.export(minilm(), paths[0])
        baseline = score(paths[0], options.dev)
        results: list[dict[str, Any]] = []
        for (case, asked), output in zip(CASES.items(), paths[1:], strict=True):
            attnserve.optimize(paths[0], output, calib=calibration, refit=False, **asked)
            cosine = attnserve.verify(paths[0], output, data=unseen).mean_cosine
            kept = score(output, options.dev) / baseline
            results.append({"case": case, "mean_cosine": cosine, "kept": kept})
            progress.print(f"{case}: {cosine:.4f}")
        report = attnserve.bench(
            paths, batches=[1], sequences=LENGTHS, threads=1, rounds=options.rounds
        )
        for row, path in zip(results, paths[1:], strict=True):
            row["speed"] = [
                {key: shown[key] for key in ("sequence", "speedup_vs_first", "speedup_ci95")}
                for shown in report.to_json()["results"]
                if shown["model"] == str(path)
            ]
    show(results, baseline)
    content = {
        "command": f"python -m benchmarks.mixing --train {options.train.name} "
        f"--dev {options.dev.name} --rows {options.rows}",
        "baseline_spearman": baseline,
        "threads": 1,
        "results": results,
        "machine": asdict(describe_machine()),
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def show(results: list[dict[str, Any]], baseline: float) -> None:
    table = Table(title=f"all-MiniLM-L6-v2 on stsb_dev (Spearman {baseline:.4f}), one thread")
    table.add_column("")
    for heading in ("cosine", "score kept", *map(str, LENGTHS)):
        table.add_column(heading, justify="right")
    for row in results:
        speed = [f"{each['speedup_vs_first']:.2f}x" for each in row["speed"]]
        table.add_row(row["case"], f"{row['mean_cosine']:.4f}", f"{row['kept']:.2%}", *speed)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
