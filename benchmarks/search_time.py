"""Time and memory of ``attnserve optimize --keep 0.99 --allow ffn`` for large encoders.

    python -m benchmarks.search_time --train STSB_TRAIN.tsv [--size BERT-base] [--resume]

Exports encoders with the layers of BERT-base and BERT-large and random weights, and searches each
one in a process of its own on all cores, calibrated on 900 sentences of --train. The time covers
the whole command with calibration, search and verification, but not the export.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

import attnserve
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

SIZES = {"BERT-base": (12, 768, 12), "BERT-large": (24, 1024, 16)}
"""Layers, width and heads."""

INITIAL = 0.04
"""Standard deviation of the random weights. With that of BERT (0.02), attention is uniform."""

ROWS = 900


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--train", type=Path, required=True, help=".tsv with sentence1")
    parser.add_argument("--size", choices=SIZES, help="one size; default: all")
    parser.add_argument("--resume", action="store_true", help="keep the rows of other sizes")
    options = parser.parse_args(arguments)
    rows = stored_rows("search_time") if options.resume else []
    for size in [options.size] if options.size else SIZES:
        with tempfile.TemporaryDirectory() as name:
            row = search(size, options.train, Path(name))
        rows = [*(old for old in rows if old["size"] != size), row]
        write_result("search_time", argparse.Namespace(train=options.train), rows=rows)
    table = number_table("search", ["minutes", "processor minutes", "peak MB"])
    for row in rows:
        peak = row["peak_rss_bytes"] / 1e6
        table.add_row(
            row["size"], f"{row['minutes']:.1f}", f"{row['cpu_minutes']:.1f}", f"{peak:.0f}"
        )
    Console().print(table)
    return 0


def search(size: str, train: Path, folder: Path) -> dict[str, Any]:
    """Export a random encoder and search it; return the row of the result file."""
    original = random_bert(size, folder)
    texts = write_lines(folder / "texts.txt", spread(sentences(train, sys.maxsize), ROWS))
    report, seconds, peak = run_measured(
        "optimize", original, "-o", folder / "new",
        "--calib", texts, "--keep", "0.99", "--allow", "ffn",
    )  # fmt: skip
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    layers, width, _ = SIZES[size]
    return {
        "size": size,
        "layers": layers,
        "width": width,
        "parameters": report["before"]["parameters"],
        "minutes": seconds / 60,
        "cpu_minutes": (used.ru_utime + used.ru_stime) / 60,
        "peak_rss_bytes": peak,
        "model_bytes": report["before"]["bytes"],
        "quality": report["quality"],
    }


def random_bert(size: str, folder: Path) -> Path:
    """Export a BERT with random weights and the tokenizer of MiniLM."""
    source = save_random_bert(folder / "source", *SIZES[size])
    attnserve.export(str(source), folder / "original")
    shutil.rmtree(source)
    return folder / "original"


def save_random_bert(folder: Path, layers: int, width: int, heads: int) -> Path:
    """Save the folder of a model of transformers, with the tokenizer of MiniLM."""
    import torch
    import transformers

    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt"):
        if (Path(minilm()) / name).is_file():
            shutil.copyfile(Path(minilm()) / name, folder / name)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=4 * width,
        initializer_range=INITIAL,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
