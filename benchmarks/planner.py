"""What the planner finds for a sentence encoder: how fast, what it keeps on pairs it never saw.

    python -m benchmarks.planner --train STSB_TRAIN.tsv --dev STSB_DEV.tsv [--other TEXT]

Exports all-MiniLM-L6-v2 (from the [demo] extra) and plans it three ways (attention only; with
feed-forwards; both in int8), calibrated on sentences from all over --train and told to keep a share
of the score on --dev. What is kept is then measured on the pairs of --train that neither the fit
nor the choice saw. With --other the same is asked calibrated on another kind of text.

Speeds are those of one interleaved run on one thread, at seven lengths, against the model as
exported, after ONNX Runtime's own transformer optimizer and after onnxscript's, and against ONNX
Runtime's int8 of the original.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import describe_machine
from benchmarks.fidelity import minilm, score, sentences

RESULT = Path(__file__).parent / "results" / "planner.json"

GOALS: dict[str, dict[str, Any]] = {
    "attention": {"keep": 0.99},
    "with feed-forwards": {"keep": 0.99, "allow": ["ffn"]},
    "with feed-forwards, int8": {"keep": 0.985, "allow": ["ffn"], "precision": "int8"},
}

OTHER_ROWS = 200
"""Of the text of another kind, whose rows are paragraphs."""

LENGTHS = (16, 32, 64, 128, 256, 384, 512)

SHARED_128 = {"collab_dk": 128}
"""Asked for by hand, in the form that is chosen by default."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--train", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--dev", type=Path, required=True, help="score, sentence1, sentence2")
    parser.add_argument("--other", type=Path, default=None, help="a text of another kind")
    parser.add_argument("--rows", type=int, default=900)
    parser.add_argument("--seq", type=int, default=128, help="length to plan for")
    parser.add_argument("--rounds", type=int, default=None, help="of each timing; by time")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the tools that are compared with
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = folder / "original"
        attnserve.export(minilm(), original)
        calibration = folder / "calibration.txt"
        calibration.write_text("\n".join(_spread(options.train, options.rows)), encoding="utf-8")
        unseen = _unseen(options.train, calibration, folder / "unseen.tsv")
        rivals = _rivals(original, folder)
        bases = {data: score(original, data) for data in (options.dev, unseen)}
        planned: dict[str, Path] = {}
        results: list[dict[str, Any]] = []
        kinds = {"--train": calibration}
        if options.other is not None:
            kinds["--other"] = folder / "other.txt"
            lines = "\n".join(sentences(options.other, OTHER_ROWS))
            kinds["--other"].write_text(lines, encoding="utf-8")
        for kind, calib in kinds.items():
            for goal, asked in GOALS.items():
                if kind == "--other" and "precision" in asked:
                    continue
                output = folder / f"{kind}-{goal}".replace(" ", "-")
                start = time.perf_counter()
                report = attnserve.optimize(
                    original, output, calib=calib, sequence=options.seq, threads=1,
                    eval_data=options.dev, task="sts", **asked,
                )  # fmt: skip
                seconds = time.perf_counter() - start
                kept = {data.name: score(output, data) / base for data, base in bases.items()}
                found = report.found
                assert found is not None
                results.append({
                    "calibrated_on": kind, "goal": goal, "asked": asked, "seconds": seconds,
                    "kept": kept, "mean_cosine": report.fidelity.mean_cosine,
                    "verdict": found.verdict,
                    "layers": [[d.block, d.kept, d.count, d.written] for d in found.decisions],
                })  # fmt: skip
                if kind != "--other":
                    planned[goal] = output
                print(f"{kind}, {goal}: {seconds:.0f} s, {found.verdict}, kept {kept}", flush=True)
        shared = folder / "shared-128"
        attnserve.optimize(original, shared, calib=calibration, **SHARED_128)
        models = {**rivals, **planned, "R = 128 by hand": shared}
        speeds = _speeds(models, options.rounds)
    _show(results, speeds)
    given = {key: value for key, value in vars(options).items() if value is not None}
    content = {
        "command": "python -m benchmarks.planner " + " ".join(
            f"--{key} {value.name if isinstance(value, Path) else value}"
            for key, value in given.items()
        ),
        "baseline_spearman": {data.name: base for data, base in bases.items()},
        "plans": results,
        "speeds": speeds,
        "machine": asdict(describe_machine()),
    }  # fmt: skip
    RESULT.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return 0


def _spread(train: Path, rows: int) -> list[str]:
    """So many first sentences, evenly over the file, which is sorted by where texts come from."""
    everything = sentences(train, sys.maxsize)
    places = np.linspace(0, len(everything) - 1, rows).round().astype(int).tolist()
    return [everything[place] for place in places]


def _unseen(train: Path, calibration: Path, output: Path) -> Path:
    """The pairs of which neither sentence was calibrated on."""
    seen = set(calibration.read_text(encoding="utf-8").splitlines())
    header, *rows = train.read_text(encoding="utf-8").splitlines()
    kept = [row for row in rows if seen.isdisjoint(row.split("\t"))]
    output.write_text("\n".join([header, *kept]) + "\n", encoding="utf-8")
    return output


def _rivals(original: Path, folder: Path) -> dict[str, Path]:
    """What others make of the same model; the first is the model as it was exported."""
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


def _speeds(models: dict[str, Path], rounds: int | None) -> list[dict[str, Any]]:
    """Each model at each length, in turns; ``vs_best`` is against the fastest float32 rival."""
    report = attnserve.bench(list(models.values()), sequences=LENGTHS, threads=1, rounds=rounds)
    by_shape = [report.results[i : i + len(models)]
                for i in range(0, len(report.results), len(models))]  # fmt: skip
    rows: list[dict[str, Any]] = []
    for shape in by_shape:
        best = np.min([np.median(each.samples_ms) for each in shape[:3]])
        rival = next(each for each in shape[:3] if np.median(each.samples_ms) == best)
        for name, each in zip(models, shape, strict=True):
            ratio = {
                base: float(np.median(np.divide(other.samples_ms, each.samples_ms)))
                for base, other in (("exported", shape[0]), ("best", rival), ("int8", shape[3]))
            }
            rows.append({
                "model": name, "sequence": each.sequence, "p50_ms": each.p50_ms,
                "vs_exported": ratio["exported"], "vs_exported_ci95": list(each.speedup_ci95),
                "vs_best": ratio["best"], "vs_int8": ratio["int8"], "rounds": len(each.samples_ms),
            })  # fmt: skip
    return rows


def _show(results: list[dict[str, Any]], speeds: list[dict[str, Any]]) -> None:
    console = Console()
    table = Table("calibrated on", "goal", "seconds", "cosine", "kept")
    for row in results:
        kept = ", ".join(f"{name} {share:.2%}" for name, share in row["kept"].items())
        table.add_row(row["calibrated_on"], row["goal"], f"{row['seconds']:.0f}",
                      f"{row['mean_cosine']:.4f}", kept)  # fmt: skip
    console.print(table)
    table = Table("model", *(f"{length}" for length in LENGTHS))
    for name in dict.fromkeys(row["model"] for row in speeds):
        mine = [row for row in speeds if row["model"] == name]
        table.add_row(name, *(f"{r['vs_exported']:.2f} ({r['vs_best']:.2f})" for r in mine))
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
