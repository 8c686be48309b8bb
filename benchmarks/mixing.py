"""Quality and speed of shared query and key dimensions, in the form that serving runs.

    python -m benchmarks.mixing --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--rows 900]

R is a half, a third and a quarter of all query and key dimensions. all-MiniLM-L6-v2 (from the
[demo] extra) is calibrated on sentences of --train and scored on the pairs of --dev; four layers in
the shape of BERT-base have random weights, for their speed alone. Each R has dense mixing (every
head reads all R dimensions, as in the paper), sparse mixing (every head reads some of them), the
fewest dimensions of each head's own whose error is that of dense mixing, and what ``--mixing auto``
takes. Speeds are over the fused original, in one interleaved run on one thread.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.limits import SAME_ERROR
from attnserve.models.onnx_files import load_model, save_model
from benchmarks._common import RESULTS, encoder_study, number_table, sts_parser, write_result
from benchmarks.gpu.collab_dk import FUSED, served_form
from benchmarks.gpu.forms import SIZES, Size
from graph_passes.emit.collaborative import max_read_size
from graph_passes.matching.find import find_attention

SHARES = {"half": 2, "third": 3, "quarter": 4}
"""Divisors of H K."""

BATCHES, LENGTHS = (1, 8), (16, 128, 512)

WIDE = Size(4, SIZES["BERT-base"].hidden, SIZES["BERT-base"].heads)
"""All layers of BERT-base have the same shape."""

ROUNDS = 16
"""The longest shape of the larger model takes seconds per round."""


def forms(
    original: Path, folder: Path, size: Size, progress: Console, calib: Path | None = None
) -> tuple[dict[str, Path], list[dict[str, Any]], dict[str, float]]:
    """All forms of all R by name, for each R what ``auto`` took and why, and the errors."""
    heads, dimensions = size.heads, size.hidden
    head_size = find_attention(load_model(original)).blocks[0].head_size
    sizes = [k for k in range(1, head_size) if max_read_size(k, head_size) == k]
    made, chosen, errors = {FUSED: original}, list[dict[str, Any]](), dict[str, float]()

    def make(name: str, arguments: Mapping[str, Any]) -> attnserve.OptimizeReport:
        path = folder / name / "model.onnx"
        report = attnserve.optimize(original, path, threads=1, calib=calib, force=True, **arguments)
        made[name], errors[name] = path, error(original, path, report, calib)
        return report

    for share, divisor in SHARES.items():
        rank = dimensions // divisor
        for mixing in ("dense", "sparse"):
            make(f"{mixing} {rank}", {"collab_dk": rank, "mixing": mixing})
        for own in (own for own in sizes if own * heads >= rank):
            make(f"own {rank}", {"head_dk": own})
            if errors[f"own {rank}"] <= SAME_ERROR * errors[f"dense {rank}"]:
                break
        choice = make(f"auto {rank}", {"collab_dk": rank}).to_json()["mixing"]
        chosen.append({"share": share, "rank": rank, **choice})
        progress.print(f"R = {rank}: {choice['chosen']}, {choice['why']}")
    return made, chosen, errors


def error(
    original: Path, path: Path, report: attnserve.OptimizeReport, calib: Path | None
) -> float:
    """The relative error of outputs on all calibration rows; of weights without texts."""
    if calib is not None:
        outputs = attnserve.verify(original, path, data=calib).outputs
        return max(output.relative_error for output in outputs)
    return float(
        np.sqrt(np.mean([(change.relative_error or 0.0) ** 2 for change in report.changes]))
    )


def speeds(
    made: Mapping[str, Path], folder: Path, rounds: int, progress: Console
) -> list[dict[str, Any]]:
    """The speed of each form over the fused original, at each shape."""
    served = {name: served_form(path, folder / f"{name}.onnx") for name, path in made.items()}
    for name, path in served.items():
        progress.print(f"{name}: served {'as it is' if path == made[name] else 'fused'}")
    report = attnserve.bench(
        list(served.values()), batches=BATCHES, sequences=LENGTHS, threads=1, rounds=rounds
    )
    names = {str(path): name for name, path in served.items()}
    keys = ("batch", "sequence", "macs", "p50_ms", "speedup_vs_first", "speedup_ci95")
    return [
        {"form": names[cell["model"]], **{key: cell[key] for key in keys}}
        for cell in report.to_json()["results"]
    ]


def summary(
    rows: Sequence[Mapping[str, Any]], ranks: Sequence[int], errors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """For each R: ``auto`` at its slowest shape, and over the best other form of equal error.

    Means are geometric, over all shapes. If ``auto`` took the best form, "auto_vs_best" compares
    two files of it, and shows the noise of the run.
    """

    def of(form: str) -> np.ndarray:
        return np.array([row["speedup_vs_first"] for row in rows if row["form"] == form])

    found: list[dict[str, Any]] = []
    for rank in ranks:
        names = {kind: f"{kind} {rank}" for kind in ("auto", "dense", "sparse", "own")}
        means = {kind: float(np.exp(np.mean(np.log(of(name))))) for kind, name in names.items()}
        bound = SAME_ERROR * errors[names["dense"]]
        equal = [kind for kind in means if kind != "auto" and errors[names[kind]] <= bound]
        best = max(equal, key=means.__getitem__)
        found.append({
            "rank": rank, "mean": means, "slowest": float(of(names["auto"]).min()),
            "best": best, "auto_vs_best": means["auto"] / means[best],
        })  # fmt: skip
    return found


def measure(
    size: Size, original: Path, folder: Path, rounds: int, progress: Console,
    calib: Path | None = None,
) -> tuple[dict[str, Path], dict[str, Any]]:  # fmt: skip
    """All forms of a model, and their choices, errors and speeds."""
    made, chosen, errors = forms(original, folder, size, progress, calib)
    rows = speeds(made, folder, rounds, progress)
    content = {"chosen": chosen, "errors": errors, "speeds": rows,
               "summary": summary(rows, [one["rank"] for one in chosen], errors)}  # fmt: skip
    return made, content


def trained(options: Any, rounds: int, progress: Console) -> dict[str, Any]:
    """Measure all-MiniLM-L6-v2 and the quality of its forms."""
    with encoder_study(options.train, options.dev, options.rows) as study:
        made, content = measure(
            SIZES["MiniLM"], study.original, study.folder, rounds, progress, study.calibration
        )
        del made[FUSED]
        quality = [{"form": name, **study.quality(path.parent)} for name, path in made.items()]
        return {**content, "quality": quality, "baseline_spearman": study.baseline}


def random_layers(options: Any, rounds: int, progress: Console) -> dict[str, Any]:
    """Layers in the shape of BERT-base."""
    with tempfile.TemporaryDirectory() as name:
        original = Path(name) / "original.onnx"
        save_model(WIDE.build(max(LENGTHS)), original)
        return measure(WIDE, original, Path(name), rounds, progress)[1]


MODELS = {"MiniLM": trained, "BERT-base": random_layers}


def main(arguments: list[str] | None = None) -> int:
    parser = sts_parser(__doc__)
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=list(MODELS),
        help="others keep their results",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    progress = Console(stderr=True)
    for model in options.models:
        content = MODELS[model](options, options.rounds or ROUNDS, progress)
        shapes = [f"{batch}x{length}" for length in LENGTHS for batch in BATCHES]
        table = number_table(f"{model}, speed over the fused original, one thread", shapes)
        for form in dict.fromkeys(row["form"] for row in content["speeds"]):
            cells = {f"{row['batch']}x{row['sequence']}": f"{row['speedup_vs_first']:.2f}"
                     for row in content["speeds"] if row["form"] == form}  # fmt: skip
            table.add_row(form, *(cells.get(shape, "") for shape in shapes))
        Console().print(table)
        stored = json.loads((RESULTS / "mixing.json").read_text(encoding="utf-8"))
        models = {**stored.get("models", {}), model: content}
        write_result("mixing", options, threads=1, models=models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
