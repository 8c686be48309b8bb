"""Quality and speed of attention reuse, head pruning and FFN pruning, with and without the refit.

    python -m benchmarks.reuse_prune --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--rows 900]

Exports all-MiniLM-L6-v2 (from the [demo] extra), compresses it with calibration on the first
sentences of --train, and compares the token outputs on 500 sentences of --dev and the score on its
pairs. Each case runs with the closed-form refit of the output projections and without it. Some
cases are timed against the original in interleaved rounds on one thread. If onnxsim is installed,
its head pruning is measured at the same numbers of heads.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console

import attnserve
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model
from benchmarks._common import Study, encoder_study, minilm, number_table, sts_parser, write_result

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
"""Arguments of ``optimize`` by the name in the result file, where layers count from 1."""

TIMED = (
    ("50 % of heads pruned", 128),
    ("50 % of heads pruned", 512),
    ("all layers but the first reuse all", 512),
    ("50 % of heads and a third of neurons pruned", 128),
    ("50 % of heads and a third of neurons pruned", 512),
)
"""Cases that are timed, and their sequence lengths."""


def main(arguments: list[str] | None = None) -> int:
    options = sts_parser(__doc__).parse_args(arguments)
    with encoder_study(options.train, options.dev, options.rows) as study:
        results = [measure_case(name, parameters, study) for name, parameters in CASES.items()]
        onnxsim = compare_with_onnxsim(study)
        speed = [measure_speed(name, length, study, options.rounds) for name, length in TIMED]
    show(results, study.baseline)
    for row in onnxsim:
        Console().print(", ".join(f"{key} {value}" for key, value in row.items()))
    for row in speed:
        Console().print(
            f"{row['case']}: {row['speedup']:.2f}x at {row['sequence']} tokens "
            f"({row['speedup_ci95'][0]:.2f} to {row['speedup_ci95'][1]:.2f}), one thread"
        )
    write_result(
        "reuse_prune",
        options,
        baseline_spearman=study.baseline,
        results=results,
        onnxsim=onnxsim or "not measured: pip install onnxsim==0.8.1",
        speed=speed,
    )
    return 0


def output_folder(name: str, study: Study) -> Path:
    return study.folder / "".join(letter if letter.isalnum() else "-" for letter in name)


def measure_case(name: str, parameters: Mapping[str, Any], study: Study) -> dict[str, Any]:
    """Measure the quality of one case without the refit and with it; the latter stays on disk."""
    row: dict[str, Any] = {"case": name}
    output = output_folder(name, study)
    for key, refit in (("without_refit", False), ("refit", True)):
        report = attnserve.optimize(
            study.original, output, calib=study.calibration, refit=refit, force=True, **parameters
        )
        row[key] = study.quality(output)
        row["parameters"] = report.record.after.parameters
        row["macs_128"] = attnserve.inspect(output / "model.onnx").total_macs
    Console(stderr=True).print(f"{name}: cosine {row['refit']['mean_cosine']:.4f}")
    return row


def compare_with_onnxsim(study: Study) -> list[dict[str, Any]]:
    """Prune heads with both tools; return no rows if onnxsim is not installed.

    onnxsim reads com.microsoft Attention, which ONNX Runtime's transformer optimizer writes.
    """
    if find_spec("onnxsim") is None:
        return []
    onnxsim = import_module("onnxsim")
    fused = fused_model(study.folder)
    artifact = open_artifact(fused)
    data = load_inputs(study.calibration, load_model(artifact), artifact, split=False)
    path, rows = str(artifact.model), list[dict[str, Any]]()
    for share in (0.25, 0.5):
        pruned = {
            "weights": onnxsim.apply_attention_head_pruning(onnx.load(path), share),
            "Wanda": onnxsim.apply_attention_head_wanda_pruning(
                onnx.load(path), calibration_data=[dict(b) for b in data.fit], sparsity=share
            ),
        }
        outputs: dict[str, Path] = {}
        for kind, model in pruned.items():
            outputs[f"onnxsim, {kind}"] = study.folder / f"onnxsim-{kind}-{share}.onnx"
            onnx.save(model, outputs[f"onnxsim, {kind}"])
        outputs["attnserve"] = study.folder / f"attnserve-{share}" / "model.onnx"
        attnserve.optimize(fused, outputs["attnserve"], prune=share, calib=study.calibration)
        for tool, output in outputs.items():
            cosine = attnserve.verify(fused, output, data=study.unseen).mean_cosine
            inspected = attnserve.inspect(output)
            heads = [block.num_heads for block in inspected.matches.blocks]
            rows.append({"tool": tool, "share": share, "heads": sum(heads),
                         "parameters": inspected.parameters, "mean_cosine": cosine})  # fmt: skip
    return rows


def fused_model(folder: Path) -> Path:
    """Export the encoder and fuse the attention of each layer into one operator."""
    from onnxruntime.transformers.optimizer import optimize_model

    plain, fused = folder / "eager", folder / "fused"
    attnserve.export(minilm(), plain, attention="eager", exporter="torchscript")
    shutil.copytree(plain, fused)
    options = {"model_type": "bert", "num_heads": 12, "hidden_size": 384, "opt_level": 0}
    optimize_model(str(plain / "model.onnx"), **options).save_model_to_file(
        str(fused / "model.onnx")
    )
    return fused / "model.onnx"


def measure_speed(name: str, sequence: int, study: Study, rounds: int | None) -> dict[str, Any]:
    models = [study.original, output_folder(name, study)]
    report = attnserve.bench(models, batches=[1], sequences=[sequence], threads=1, rounds=rounds)
    rows = report.to_json()["results"]
    return {
        "case": name,
        "batch": 1,
        "sequence": sequence,
        "threads": 1,
        "speedup": rows[1]["speedup_vs_first"],
        "speedup_ci95": rows[1]["speedup_ci95"],
        "p50_ms": [row["p50_ms"] for row in rows],
    }


def show(results: list[dict[str, Any]], baseline: float) -> None:
    table = number_table(
        f"all-MiniLM-L6-v2 on stsb_dev (Spearman {baseline:.4f})",
        ("cosine", "score kept", "no refit: cosine", "score kept", "M parameters"),
    )
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
