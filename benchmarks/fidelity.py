"""Quality of collaborative attention with dense mixing, with and without calibration.

    python -m benchmarks.fidelity --calib TEXT --data STS.tsv [--rows 800] [--ranks 192,128,96,64]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and compresses it at each R twice: from the weights
alone, and calibrated on the first sentences of TEXT (one sentence per line, or a .tsv with
sentence1). Reports the score on the STS pairs, and the mean cosine of the token outputs on
sentences of STS.tsv, which are not part of the calibration.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
from benchmarks._common import description, encoder_study, number_table, write_result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--calib", type=Path, default=Path(__file__).parent / "calibration.txt")
    parser.add_argument("--data", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--rows", type=int, default=800, help="sentences for calibration")
    parser.add_argument("--ranks", default="192,128,96,64", help="values of R, comma separated")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    table = number_table(
        f"{options.data.name}, calibrated on {options.rows} rows of {options.calib.name}",
        ("weights only: Spearman", "kept", "cosine", "calibrated: Spearman", "kept", "cosine"),
    )
    with encoder_study(options.calib, options.data, options.rows) as study:
        for rank in map(int, options.ranks.split(",")):
            cells = [f"R = {rank}"]
            for kind, calib in (("plain", None), ("calibrated", study.calibration)):
                output = study.folder / f"{kind}-{rank}"
                # Without the refit: the quality of the decomposition alone.
                attnserve.optimize(
                    study.original, output, collab_dk=rank, mixing="dense", calib=calib,
                    refit=False,
                )  # fmt: skip
                row = study.quality(output)
                results.append({"rank": rank, "kind": kind, **row})
                cells += [
                    f"{row['spearman']:.4f}", f"{row['kept']:.2%}", f"{row['mean_cosine']:.4f}",
                ]  # fmt: skip
            table.add_row(*cells)
    Console().print(table)
    write_result(
        "fidelity",
        options,
        baseline_spearman=study.baseline,
        results=results,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
