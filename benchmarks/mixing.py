"""Quality and speed of sparse mixing in collaborative attention.

    python -m benchmarks.mixing --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--rows 900]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and compresses it with dense mixing (every head
reads all R = 128 shared dimensions, as in the paper), with sparse mixing (every head reads some of
them), and without sharing (separate dimensions per head). Compares the token outputs on 500
sentences of --dev, the score on its pairs, and the speed relative to the original, in interleaved
rounds on one thread.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from rich.console import Console

import attnserve
from benchmarks._common import LENGTHS, encoder_study, number_table, sts_parser, write_result
from docs.hooks.tables import MIXING_CASES

CASES: Mapping[str, dict[str, Any]] = {
    "R = 128, dense": {"collab_dk": 128, "mixing": "dense"},
    "R = 128": {"collab_dk": 128},
    "R = 128, 24 per head": {"collab_dk": 128, "head_dk": 24},
    "R = 128, 23 per head": {"collab_dk": 128, "head_dk": 23},
    "23 per head, not shared": {"head_dk": 23},
}
"""Arguments of ``optimize`` by the name in the result file.

One dimension of content is added to the 23 or 24 and the sum is rounded up: 23 makes 24, 24 makes
32.
"""


def main(arguments: list[str] | None = None) -> int:
    options = sts_parser(__doc__).parse_args(arguments)
    progress = Console(stderr=True)
    results: list[dict[str, Any]] = []
    with encoder_study(options.train, options.dev, options.rows) as study:
        outputs = [study.folder / str(index) for index in range(len(CASES))]
        for (case, parameters), output in zip(CASES.items(), outputs, strict=True):
            attnserve.optimize(
                study.original, output, calib=study.calibration, refit=False, **parameters
            )
            results.append({"case": case, **study.quality(output)})
            progress.print(f"{MIXING_CASES[case]}: cosine {results[-1]['mean_cosine']:.4f}")
        report = attnserve.bench(
            [study.original, *outputs], batches=[1], sequences=LENGTHS, threads=1,
            rounds=options.rounds,
        )  # fmt: skip
        for row, output in zip(results, outputs, strict=True):
            row["speed"] = [
                {key: cell[key] for key in ("sequence", "speedup_vs_first", "speedup_ci95")}
                for cell in report.to_json()["results"]
                if cell["model"] == str(output)
            ]
    table = number_table(
        f"all-MiniLM-L6-v2 on {options.dev.name} (Spearman {study.baseline:.4f}), one thread",
        ("cosine", "score kept", *map(str, LENGTHS)),
    )
    for row in results:
        speed = [f"{cell['speedup_vs_first']:.2f}x" for cell in row["speed"]]
        table.add_row(
            MIXING_CASES[row["case"]], f"{row['mean_cosine']:.4f}", f"{row['kept']:.2%}", *speed
        )
    Console().print(table)
    write_result(
        "mixing",
        options,
        baseline_spearman=study.baseline,
        threads=1,
        results=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
