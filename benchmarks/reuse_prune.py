"""What reuse and pruning keep of a sentence encoder, with and without the fit, and how fast it is.

    python -m benchmarks.reuse_prune --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--rows 900]

Exports all-MiniLM-L6-v2 (from the [demo] extra), rewrites it with heads reused, heads and neurons
pruned, calibrated on the first sentences of --train, and compares the token outputs on 500
sentences of --dev and the score on its pairs. Each rewrite is made with the closed-form fit of the
outputs and without it. Some of them are timed against the original, interleaved, on one thread.
Where onnxsim is installed, its head pruning runs beside ours, at the same number of heads.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import describe_machine
from attnserve.models.artifact import load_model, open_artifact
from attnserve.models.datasets import load_inputs
from benchmarks.fidelity import minilm, score, texts

RESULT = Path(__file__).parent / "results" / "reuse_prune.json"

CASES: Mapping[str, dict[str, Any]] = {
    "3 of 12 heads reused in layers 2 to 5": {"reuse": "partial:3"},
    "6 of 12 heads reused in layers 2 to 5": {"reuse": "partial:6"},
    "layer 3 reuses all": {"reuse": "full:5", "layers": ["2"]},
    "layer 4 reuses all": {"reuse": "full:5", "layers": ["3"]},
    "all layers but the first reuse all": {"reuse": "full:5"},
    "reuse chosen by measurement": {"reuse": "auto"},
    "25 % of heads pruned": {"prune": 0.25},
    "50 % of heads pruned": {"prune": 0.5},
    "25 % of neurons pruned": {"ffn": 0.25},
    "50 % of heads and a third of neurons pruned": {"prune": 0.5, "ffn": 1 / 3},
    "25 % pruned, 3 of 12 reused, R = 192": {
        "prune": 0.25,
        "reuse": "partial:3",
        "collab_dk": 192,
        "mixing": "dense",
    },
}
"""What is asked of ``optimize``; layers count from 1 in words and from 0 in code."""

TIMED = (
    ("50 % of heads pruned", 128),
    ("50 % of heads pruned", 512),
    ("all layers but the first reuse all", 512),
    ("50 % of heads and a third of neurons pruned", 128),
    ("50 % of heads and a third of neurons pruned", 512),
)
"""Which are timed, and at which length."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--rows", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=None, help="of each timing; by time")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calibration, unseen = texts(folder, options.train, options.dev, options.rows)
        original = folder / "original"
        attnserve.export(minilm(), original)
        baseline = score(original, options.dev)
        results = [
            measured(name, asked, original, folder, calibration, unseen, options.dev, baseline)
            for name, asked in CASES.items()
        ]
        beside = beside_onnxsim(folder, calibration, unseen)
        speed = [
            timed(name, original, folder / slug(name), length, options.rounds)
            for name, length in TIMED
        ]
    show(results, baseline)
    for row in beside:
        Console().print(", ".join(f"{key} {value}" for key, value in row.items()))
    for row in speed:
        Console().print(
            f"{row['case']}: {row['speedup']:.2f}x at {row['sequence']} tokens "
            f"({row['speedup_ci95'][0]:.2f} to {row['speedup_ci95'][1]:.2f}), one thread"
        )
    content = {
        "command": f"python -m benchmarks.reuse_prune --train {options.train.name} "
        f"--dev {options.dev.name} --rows {options.rows}",
        "baseline_spearman": baseline,
        "results": results,
        "onnxsim": beside or "not measured: pip install onnxsim==0.8.1",
        "speed": speed,
        "machine": asdict(describe_machine()),
    }
    RESULT.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name)


def measured(
    name: str,
    asked: Mapping[str, Any],
    original: Path,
    folder: Path,
    calibration: Path,
    unseen: Path,
    dev: Path,
    baseline: float,
) -> dict[str, Any]:
    """One rewrite, fitted and not: cosine of tokens and share of the score that is kept."""
    found: dict[str, Any] = {"case": name}
    for key, fit in (("without_refit", False), ("refit", True)):
        output = folder / slug(name)
        report = attnserve.optimize(
            original, output, calib=calibration, refit=fit, force=True, **asked
        )
        found[key] = {
            "mean_cosine": attnserve.verify(original, output, data=unseen).mean_cosine,
            "kept": score(output, dev) / baseline,
        }
        found["parameters"] = report.after.parameters
        found["macs_128"] = attnserve.inspect(output / "model.onnx").total_macs
    Console(stderr=True).print(f"{name}: {found['refit']['mean_cosine']:.4f}")
    return found


def beside_onnxsim(folder: Path, calibration: Path, unseen: Path) -> list[dict[str, Any]]:
    """Both tools on a graph that onnxsim can read: com.microsoft Attention, as ONNX Runtime's own
    optimizer fuses it. Nothing where onnxsim is not installed."""
    if find_spec("onnxsim") is None:
        return []
    onnxsim = import_module("onnxsim")
    fused = fused_model(folder)
    artifact = open_artifact(fused)
    data = load_inputs(calibration, load_model(artifact), artifact, split=False)
    path, rows = str(artifact.model), list[dict[str, Any]]()
    for share in (0.25, 0.5):
        theirs = {
            "weights": onnxsim.apply_attention_head_pruning(onnx.load(path), share),
            "Wanda": onnxsim.apply_attention_head_wanda_pruning(
                onnx.load(path), calibration_data=[dict(b) for b in data.fit], sparsity=share
            ),
        }
        made: dict[str, Path] = {}
        for kind, model in theirs.items():
            made[f"onnxsim, {kind}"] = folder / f"onnxsim-{kind}-{share}.onnx"
            onnx.save(model, made[f"onnxsim, {kind}"])
        made["attnserve"] = folder / f"ours-{share}" / "model.onnx"
        attnserve.optimize(fused, made["attnserve"], prune=share, calib=calibration)
        for tool, output in made.items():
            cosine = attnserve.verify(fused, output, data=unseen).mean_cosine
            inspected = attnserve.inspect(output)
            heads = [block.num_heads for block in inspected.reading.blocks]
            rows.append({"tool": tool, "share": share, "heads": sum(heads),
                         "parameters": inspected.parameters, "mean_cosine": cosine})  # fmt: skip
    return rows


def fused_model(folder: Path) -> Path:
    """The encoder with its attention in one operator a layer."""
    from onnxruntime.transformers.optimizer import optimize_model

    plain, fused = folder / "eager", folder / "fused"
    attnserve.export(minilm(), plain, attention="eager", exporter="torchscript")
    shutil.copytree(plain, fused)
    options = {"model_type": "bert", "num_heads": 12, "hidden_size": 384, "opt_level": 0}
    optimize_model(str(plain / "model.onnx"), **options).save_model_to_file(
        str(fused / "model.onnx")
    )
    return fused / "model.onnx"


def timed(
    name: str, original: Path, optimized: Path, sequence: int, rounds: int | None
) -> dict[str, Any]:
    report = attnserve.bench(
        [original, optimized], batches=[1], sequences=[sequence], threads=1, rounds=rounds
    )
    shown = report.to_json()["results"][1]
    return {
        "case": name,
        "batch": 1,
        "sequence": sequence,
        "threads": 1,
        "speedup": shown["speedup_vs_first"],
        "speedup_ci95": shown["speedup_ci95"],
        "p50_ms": [result["p50_ms"] for result in report.to_json()["results"]],
    }


def show(results: list[dict[str, Any]], baseline: float) -> None:
    table = Table(title=f"all-MiniLM-L6-v2 on stsb_dev (Spearman {baseline:.4f})")
    table.add_column("")
    for heading in ("cosine", "score kept", "without the fit", "score kept", "M parameters"):
        table.add_column(heading, justify="right")
    for row in results:
        cells = [
            text
            for key in ("refit", "without_refit")
            for text in (f"{row[key]['mean_cosine']:.4f}", f"{row[key]['kept']:.2%}")
        ]
        table.add_row(row["case"], *cells, f"{row['parameters'] / 1e6:.2f}")
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
