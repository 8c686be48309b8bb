"""Search time, quality and speed of automatically optimized sentence encoders.

    python -m benchmarks.planner --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--other TEXT]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and optimizes it with four goals: attention only,
attention and FFN, both in int8, which keep a share of the score on --dev, and attention and FFN
with the similarities of texts kept instead, without labels. Calibration uses sentences from all
parts of --train. The score is then measured on the pairs of --train that neither the calibration
nor the search used, and similarities on their sentences. With --other, the float32 goals are
repeated with calibration on another kind of text; their result file is planner_other.json.

All models are timed in one interleaved run on one thread at seven lengths, together with the
exported model, the outputs of ONNX Runtime's transformer optimizer and of onnxscript, and ONNX
Runtime's int8 of the original.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

import attnserve
from attnserve.fusion import fuse_for
from attnserve.models.artifact import open_artifact
from attnserve.models.onnx_files import load_model, save_model
from benchmarks._common import (
    LENGTHS,
    command_of,
    minilm,
    sentences,
    spread,
    sts_parser,
    sts_score,
    write_lines,
    write_result,
)
from docs.hooks.tables.searches import PLANNER_MODELS

GOALS: dict[str, dict[str, Any]] = {
    "attention": {"keep": 0.99, "measure": "score"},
    "with feed-forwards": {"keep": 0.99, "allow": ["ffn"], "measure": "score"},
    "with feed-forwards, int8": {
        "keep": 0.99, "allow": ["ffn"], "measure": "score", "precision": "int8",
    },
    "similarities": {"keep": 0.99, "allow": ["ffn"]},
}  # fmt: skip
"""Arguments of ``optimize`` by the name in the result file; those that name a measure of a score
also get the score."""

UNSEEN_ROWS = 1000
"""Sentences on which similarities are compared."""

OTHER_ROWS = 200
"""Rows of --other, which are paragraphs."""

FUSED = "fused, nothing removed"
"""Reference of all speed-ups of rewrites; operator fusion is not a gain of a rewrite."""

SHARED_128: dict[str, Any] = {"collab_dk": 128}


def main(arguments: list[str] | None = None) -> int:
    parser = sts_parser(__doc__)
    parser.add_argument("--other", type=Path, default=None, help="a text of another kind")
    parser.add_argument("--seq", type=int, default=128, help="sequence length of the search")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the other optimizers
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = folder / "original"
        attnserve.export(minilm(), original)
        calibration = write_lines(
            folder / "calibration.txt", spread(sentences(options.train, sys.maxsize), options.rows)
        )
        unseen = unseen_pairs(options.train, calibration, folder / "unseen.tsv")
        texts = write_lines(
            folder / "unseen.txt", spread(sentences(unseen, sys.maxsize), UNSEEN_ROWS)
        )
        models = other_tools(original, folder)
        bases = {pairs: sts_score(original, pairs) for pairs in (options.dev, unseen)}
        int8_kept = {
            pairs.name: score_of_file(models["ONNX Runtime's int8"], original, pairs) / base
            for pairs, base in bases.items()
        }
        plans: list[dict[str, Any]] = []
        for kind, goal, calib in _runs(options, calibration, folder):
            output = folder / f"{kind}-{goal}".replace(" ", "-")
            start = time.perf_counter()
            score: dict[str, Any] = {"eval_data": options.dev, "task": "sts"}
            report = attnserve.optimize(
                original, output, calib=calib, sequence=options.seq, threads=1, **GOALS[goal],
                **(score if "measure" in GOALS[goal] else {}),
            )  # fmt: skip
            seconds = time.perf_counter() - start
            kept = {pairs.name: sts_score(output, pairs) / base for pairs, base in bases.items()}
            search, quality = report.search, attnserve.verify(original, output, data=texts).quality
            assert search is not None and quality is not None
            plans.append({
                "calibrated_on": kind, "goal": goal, "asked": GOALS[goal], "seconds": seconds,
                "kept": kept, "mean_cosine": report.fidelity.mean_cosine,
                "verdict": search.verdict, "quality_unseen": quality.to_json(),
                "proofs": [verification.to_json() for verification in search.verifications],
                "layers": [[d.block, d.kept, d.count, d.operator] for d in search.decisions],
            })  # fmt: skip
            if kind == "--train":
                models[goal] = output
            print(f"{kind}, {goal}: {seconds:.0f} s, {search.verdict}, kept {kept}", flush=True)
        models[FUSED] = fused_file(original, folder)
        by_hand = models["R = 128 by hand"] = folder / "shared-128"
        attnserve.optimize(original, by_hand, calib=calibration, **SHARED_128)
        by_hand_kept = {
            pairs.name: sts_score(by_hand, pairs) / base for pairs, base in bases.items()
        }
        speeds = _speeds(models, options.rounds)
    _show(plans, speeds)
    baseline = {pairs.name: base for pairs, base in bases.items()}
    write_result(
        "planner", options, baseline_spearman=baseline, int8_of_onnxruntime_kept=int8_kept,
        by_hand_kept=by_hand_kept, speeds=speeds,
        plans=[plan for plan in plans if plan["calibrated_on"] == "--train"],
    )  # fmt: skip
    if options.other is not None:
        write_result(
            "planner_other", options, command=command_of("planner", options),
            baseline_spearman=baseline,
            plans=[plan for plan in plans if plan["calibrated_on"] == "--other"],
        )  # fmt: skip
    return 0


def _runs(
    options: argparse.Namespace, calibration: Path, folder: Path
) -> Iterator[tuple[str, str, Path]]:
    """Yield the option that names the calibration text, the goal, and the text."""
    for goal in GOALS:
        yield "--train", goal, calibration
    if options.other is not None:
        other = write_lines(folder / "other.txt", sentences(options.other, OTHER_ROWS))
        for goal, parameters in GOALS.items():
            if "precision" not in parameters:
                yield "--other", goal, other


def unseen_pairs(train: Path, calibration: Path, output: Path) -> Path:
    """Write the pairs of which neither sentence is in the calibration text."""
    seen = set(calibration.read_text(encoding="utf-8").splitlines())
    header, *rows = train.read_text(encoding="utf-8").splitlines()
    kept = [row for row in rows if seen.isdisjoint(row.split("\t"))]
    output.write_text("\n".join([header, *kept]) + "\n", encoding="utf-8")
    return output


def score_of_file(model: Path, original: Path, pairs: Path) -> float:
    """Return the score of an .onnx file with the tokenizer and the pooling of an artifact."""
    artifact = open_artifact(original)
    return attnserve.evaluate(
        model, task="sts", data=pairs, tokenizer=artifact.tokenizer,
        pooling=artifact.pooling, max_length=artifact.max_length,
    ).to_json()["spearman"]  # fmt: skip


def other_tools(original: Path, folder: Path) -> dict[str, Path]:
    """Return the exported model and what other tools make of it; the fourth is int8."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers import optimizer
    from onnxscript.rewriter import ort_fusions

    source = original / "model.onnx"
    made = {name: folder / f"{name}.onnx" for name in ("ort", "onnxscript", "int8")}
    fused = optimizer.optimize_model(
        str(source), model_type="bert", num_heads=12, hidden_size=384, opt_level=0
    )
    fused.save_model_to_file(str(made["ort"]))
    model = ir.load(source)
    ort_fusions.optimize_for_ort(model)
    ir.save(model, made["onnxscript"])
    quantize_dynamic(str(source), str(made["int8"]), weight_type=QuantType.QInt8)
    return {
        "as exported": source,
        "ONNX Runtime's optimizer": made["ort"],
        "onnxscript's optimize_for_ort": made["onnxscript"],
        "ONNX Runtime's int8": made["int8"],
    }


def fused_file(original: Path, folder: Path) -> Path:
    """Return the model in fused operators, which serving runs for any model."""
    model, _ = fuse_for(load_model(open_artifact(original)))
    path = folder / "fused.onnx"
    save_model(model, path)
    return path


def _speeds(models: dict[str, Path], rounds: int | None) -> list[dict[str, Any]]:
    """Time all models at each length; ``vs_best`` is relative to the best of the other tools."""
    report = attnserve.bench(list(models.values()), sequences=LENGTHS, threads=1, rounds=rounds)
    rows: list[dict[str, Any]] = []
    for start in range(0, len(report.results), len(models)):
        shape = report.results[start : start + len(models)]
        best = min(shape[:3], key=lambda result: np.median(result.samples_ms))
        for name, result in zip(models, shape, strict=True):
            exported, other, int8 = (
                float(np.median(np.divide(base.samples_ms, result.samples_ms)))
                for base in (shape[0], best, shape[3])
            )
            rows.append({
                "model": name, "sequence": result.sequence, "p50_ms": result.p50_ms,
                "vs_exported": exported, "vs_exported_ci95": list(result.speedup_ci95),
                "vs_best": other, "vs_int8": int8, "rounds": len(result.samples_ms),
            })  # fmt: skip
    return rows


def _show(plans: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> None:
    console = Console()
    table = Table("calibrated on", "goal", "seconds", "cosine", "kept")
    for row in plans:
        kept = ", ".join(f"{name} {share:.2%}" for name, share in row["kept"].items())
        table.add_row(row["calibrated_on"], row["goal"], f"{row['seconds']:.0f}",
                      f"{row['mean_cosine']:.4f}", kept)  # fmt: skip
    console.print(table)
    table = Table("speed-up (to the best other tool)", *map(str, LENGTHS))
    for name in dict.fromkeys(row["model"] for row in speeds):
        cells = [row for row in speeds if row["model"] == name]
        table.add_row(
            PLANNER_MODELS[name],
            *(f"{cell['vs_exported']:.2f} ({cell['vs_best']:.2f})" for cell in cells),
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
