"""int8 encoders of attnserve and of OpenVINO's NNCF: speed, score and similarity.

    pip install openvino nncf
    python -m benchmarks.nncf --train STSB_TRAIN.tsv --dev STSB_DEV.tsv

Converts all-MiniLM-L6-v2 to int8 with the same calibration sentences of --train: with NNCF
(post-training quantization for transformers), with attnserve alone, and with a search of attnserve
for 99 % of the score on --dev. Scores and similarities are measured on --unseen pairs (by default
the pairs of --train with other sentences). All models run in turns on one thread.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from scipy.stats import spearmanr

import attnserve
from attnserve.checks.quality import QualityMeter
from attnserve.context import ONE_THREAD
from attnserve.data.datasets import load_inputs
from attnserve.models.artifact import open_artifact
from attnserve.models.example_inputs import example_inputs
from attnserve.models.onnx_files import load_model
from attnserve.models.tokenizer import model_inputs
from attnserve.models.tokenizer_files import load_encoder
from attnserve.runtime.interleaved_timer import BENCHMARK, time_functions
from attnserve.runtime.session import open_session
from benchmarks._common import (
    minilm,
    number_table,
    sentences,
    shortened,
    spread,
    sts_parser,
    write_lines,
    write_result,
)
from benchmarks.peers import Run, native, nncf_int8
from benchmarks.planner import unseen_pairs
from graph_passes.analysis.workload import Workload

LENGTHS = (128, 512)

ROWS = 1000
"""Sentences on which similarities are compared."""

SECONDS = 20.0
"""Time of measurements at each length."""

SEARCHES: dict[str, dict[str, Any]] = {
    "attnserve, int8": {},
    "attnserve, keep 0.99 of the score": {"keep": 0.99, "measure": "score", "allow": ["ffn"]},
}
"""Arguments of ``optimize`` besides the precision int8-full."""


def main(arguments: list[str] | None = None) -> int:
    options = sts_parser(__doc__).parse_args(arguments)
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        original = folder / "original"
        attnserve.export(minilm(), original)
        calibration = write_lines(
            folder / "calibration.txt", spread(sentences(options.train, sys.maxsize), options.rows)
        )
        pairs = unseen_pairs(options.train, calibration, folder / "unseen.tsv")
        models: dict[str, Run] = {"as exported": _session(original)}
        for label, parameters in SEARCHES.items():
            score = {"eval_data": options.dev, "task": "sts"} if "measure" in parameters else {}
            output = folder / label.replace(" ", "-")
            attnserve.optimize(
                original, output, calib=calibration, precision="int8-full", sequence=128,
                threads=1, **parameters, **score,
            )  # fmt: skip
            models[label] = _session(output)
        models |= _openvino(original, calibration)
        rows = _rows(models, original, pairs, folder)
    write_result(
        "nncf", argparse.Namespace(train=options.train, dev=options.dev), rows=rows,
        versions={package: version(package) for package in ("openvino", "nncf")},
    )  # fmt: skip
    _show(rows)
    return 0


def _session(folder: Path) -> Run:
    session = open_session(open_artifact(folder).model, ONE_THREAD)
    return lambda feed: session.run(None, feed)[0]


def _openvino(original: Path, calibration: Path) -> dict[str, Run]:
    """The original and its NNCF int8 form, in OpenVINO."""
    artifact = open_artifact(original)
    return {
        "OpenVINO": native(artifact.model),
        "OpenVINO, NNCF int8": nncf_int8(artifact, [calibration]),
    }


def _rows(
    models: dict[str, Run], original: Path, pairs: Path, folder: Path
) -> list[dict[str, Any]]:
    artifact = open_artifact(original)
    graph = load_model(artifact)
    texts = write_lines(folder / "texts.txt", spread(sentences(pairs, sys.maxsize), ROWS))
    batches = load_inputs(texts, graph, artifact, split=False).fit
    reference = [models["as exported"](batch) for batch in batches]
    times: dict[int, np.ndarray] = {}
    for length in LENGTHS:
        feed = example_inputs(graph, Workload.of(1, length))
        runs = [partial(model, feed) for model in models.values()]
        times[length] = time_functions(runs, shortened(SECONDS), BENCHMARK)
    base, rows = _score(models["as exported"], original, pairs, folder), list[dict[str, Any]]()
    for index, (name, model) in enumerate(models.items()):
        meter = QualityMeter(graph, artifact)
        for batch, before in zip(batches, reference, strict=True):
            meter.add([before], [model(batch)], batch)
        (quality,) = meter.results()
        spearman = _score(model, original, pairs, folder)
        rows.append({
            "model": name, "spearman": spearman, "kept": spearman / base,
            "quality": quality.to_json(),
            "vs_exported": {
                str(n): float(np.median(ms[0] / ms[index])) for n, ms in times.items()
            },
        })  # fmt: skip
    return rows


def _score(model: Run, original: Path, pairs: Path, folder: Path) -> float:
    """Spearman correlation of the cosines of mean-pooled embeddings with the human scores."""
    lines = [line.split("\t") for line in pairs.read_text(encoding="utf-8").splitlines()]
    header, *rows = lines
    first, second, score = (header.index(n) for n in ("sentence1", "sentence2", "score"))
    texts = list(dict.fromkeys(row[i] for row in rows for i in (first, second)))
    vectors = dict(zip(texts, _embed(model, original, texts), strict=True))
    cosines = [float(vectors[row[first]] @ vectors[row[second]]) for row in rows]
    return float(spearmanr(cosines, [float(row[score]) for row in rows])[0])


def _embed(model: Run, original: Path, texts: Sequence[str]) -> np.ndarray:  # N D
    artifact = open_artifact(original)
    encoder = load_encoder(artifact)
    inputs = model_inputs(open_session(artifact.model))
    found: dict[int, np.ndarray] = {}
    for places, feed in encoder.batches(encoder.encode(list(texts)), 32, inputs):
        mask = feed["attention_mask"].astype(float)[..., None]
        sums = (model(feed) * mask).sum(axis=1)
        vectors = sums / np.linalg.norm(sums, axis=1, keepdims=True)
        found |= dict(zip(places.tolist(), vectors, strict=True))
    return np.stack([found[place] for place in range(len(texts))])


def _show(rows: Sequence[dict[str, Any]]) -> None:
    headings = [f"{length} tokens" for length in LENGTHS]
    table = number_table("int8", (*headings, "kept", "similarity", "R^2"))
    for row in rows:
        quality = row["quality"]
        table.add_row(
            row["model"], *(f"{x:.2f}x" for x in row["vs_exported"].values()),
            f"{row['kept']:.2%}", f"{quality['value']:.4f}", f"{quality['r2']:.4f}",
        )  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
