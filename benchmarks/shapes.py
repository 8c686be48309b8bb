"""Speed of pruned rotary models in the shapes of ModernBERT-base and Qwen3-Embedding-0.6B.

    python -m benchmarks.shapes --train STSB_TRAIN.tsv [--shape Qwen3] [--resume]

Exports each shape with random weights and the vocabulary of MiniLM, removes a quarter of its heads
(or of its groups of heads) and of its neurons in a process of its own, and times the result beside
the exported model and what ONNX Runtime's and onnxscript's optimizers make of it, in turns, on one
thread. The pruned model is timed as it is and with the fused operators with which it is served.
The weights are random: this is about time and memory, not about quality.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console

import attnserve
from attnserve.context import ONE_THREAD
from attnserve.models.artifact import open_artifact
from attnserve.planning.served_graph.lossless import fuse_lossless
from benchmarks._common import (
    description,
    minilm,
    number_table,
    run_measured,
    sentences,
    spread,
    stored_rows,
    write_lines,
    write_result,
)
from graph_passes.errors import CannotRewrite

SHAPES: dict[str, dict[str, Any]] = {
    "ModernBERT": {
        "hidden_size": 768, "num_hidden_layers": 22, "num_attention_heads": 12,
        "intermediate_size": 1152, "global_attn_every_n_layers": 3, "local_attention": 128,
        "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 0,
        "cls_token_id": 0, "sep_token_id": 0, "pad_token_id": 0,
    },
    "Qwen3": {
        "hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 3072,
        "max_position_embeddings": 1024, "use_cache": False,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
}  # fmt: skip
"""Class and sizes of each configuration of transformers; the vocabulary has 30,522 tokens."""

PRUNED = 0.25
LENGTHS = (128, 512)
ROWS = 64
"""Sentences of the calibration."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--train", type=Path, required=True, help=".tsv with sentence1")
    parser.add_argument("--shape", choices=SHAPES, help="one shape; default: all")
    parser.add_argument("--rounds", type=int, default=None, help="samples of each model")
    parser.add_argument("--resume", action="store_true", help="keep the rows of other shapes")
    options = parser.parse_args(arguments)
    logging.disable(logging.WARNING)  # of the other optimizers
    rows = stored_rows("shapes") if options.resume else []
    for shape in [options.shape] if options.shape else SHAPES:
        with tempfile.TemporaryDirectory() as name:
            row = measure(shape, options.train, Path(name), options.rounds)
        rows = [*(old for old in rows if old["shape"] != shape), row]
        write_result("shapes", argparse.Namespace(train=options.train), rows=rows)
    table = number_table("pruned", [f"{n} tokens, of the best graph" for n in LENGTHS])
    for row in rows:
        table.add_row(row["shape"], *(f"{row['vs_best'][str(n)]:.2f}x" for n in LENGTHS))
    Console().print(table)
    return 0


def measure(shape: str, train: Path, folder: Path, rounds: int | None) -> dict[str, Any]:
    """Export, prune and time one shape; return the row of the result file."""
    original = random_model(shape, folder)
    texts = write_lines(folder / "texts.txt", spread(sentences(train, sys.maxsize), ROWS))
    report, seconds, peak = run_measured(
        "optimize", original, "-o", folder / "pruned",
        "--calib", texts, "--prune", PRUNED, "--ffn", PRUNED,
    )  # fmt: skip
    models, failed = other_graphs(original, folder)
    served = folder / "fused.onnx"
    try:
        fuse_lossless(open_artifact(folder / "pruned"), served, ONE_THREAD)
    except CannotRewrite:  # it is not faster: the service runs the model as it is
        served = folder / "pruned"
    ours = {"pruned": folder / "pruned", "pruned, as served": served}
    models = {**models, **ours}
    timed = attnserve.bench(list(models.values()), sequences=LENGTHS, threads=1, rounds=rounds)
    ratios: dict[str, dict[str, float]] = {}
    best: dict[str, float] = {}
    for start in range(0, len(timed.results), len(models)):
        results = dict(zip(models, timed.results[start : start + len(models)], strict=True))
        ours_ms = results["pruned, as served"].samples_ms
        length = str(timed.results[start].sequence)
        ratios[length] = {
            name: float(np.median(np.divide(other.samples_ms, ours_ms)))
            for name, other in results.items()
        }
        others = results.keys() - ours.keys()
        fastest = min(others, key=lambda name: float(np.median(results[name].samples_ms)))
        best[length] = ratios[length][fastest]
    return {
        "shape": shape,
        "parameters": [report[key]["parameters"] for key in ("before", "after")],
        "model_bytes": report["before"]["bytes"],
        "peak_rss_bytes": peak,
        "minutes": seconds / 60,
        "other_tools_failed": failed,
        "speedup_over": ratios,
        "vs_best": best,
        "rounds": len(timed.results[0].samples_ms),
    }


def random_model(shape: str, folder: Path) -> Path:
    """Export a model with random weights and the tokenizer of MiniLM.

    Args:
        shape: A name of ``SHAPES``, or "BERT-base", the default sizes of transformers.
    """
    import torch
    import transformers

    source = folder / "source"
    source.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (Path(minilm()) / name).is_file():
            shutil.copyfile(Path(minilm()) / name, source / name)
    torch.manual_seed(0)
    kinds: dict[str, Any] = {
        "BERT-base": (transformers.BertConfig, transformers.BertModel),
        "ModernBERT": (transformers.ModernBertConfig, transformers.ModernBertModel),
        "Qwen3": (transformers.Qwen3Config, transformers.Qwen3Model),
    }
    config, network = kinds[shape]
    network(config(vocab_size=30522, **SHAPES.get(shape, {}))).save_pretrained(source)
    attnserve.export(str(source), folder / "original")
    shutil.rmtree(source)
    return folder / "original"


def other_graphs(original: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the exported model and what other tools make of it, and why some make nothing."""
    from onnxruntime.transformers import optimizer
    from onnxscript.rewriter import ort_fusions

    source = original / "model.onnx"
    made, failed = {"as exported": source}, dict[str, str]()

    def onnxscript(target: Path) -> None:
        model = ir.load(source)
        ort_fusions.optimize_for_ort(model)
        ir.save(model, target, external_data=f"{target.name}.data")

    def onnxruntime(target: Path) -> None:
        fused = optimizer.optimize_model(
            str(source), model_type="bert", num_heads=0, hidden_size=0, opt_level=0
        )
        fused.save_model_to_file(str(target), use_external_data_format=True)

    for tool in (onnxscript, onnxruntime):
        target = folder / f"{tool.__name__}.onnx"
        try:
            tool(target)
            attnserve.bench([target], sequences=LENGTHS[:1], rounds=1)
        except Exception as error:  # of other projects' code: the row says what happened
            failed[tool.__name__] = str(error).splitlines()[0]
        else:
            made[tool.__name__] = target
    return made, failed


if __name__ == "__main__":
    sys.exit(main())
