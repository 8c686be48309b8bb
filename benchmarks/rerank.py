"""Latency and order of a reranker: 30 pairs a request, beside sentence-transformers.

    python -m benchmarks.reranker --pairs STS_TRAIN.tsv STS_DEV.tsv -o MODEL
    python -m benchmarks.rerank --model MODEL --cache FOLDER [--untimed]

MODEL is a cross-encoder with calibration.tsv, test.tsv and near.tsv. ``attnserve serve`` answers
POST /rerank for the exported model, for each precision, and for the model that a search finds with
the order as its goal (calibrated on calibration.tsv); its latency is that of the client. The peers
are the ``CrossEncoder`` of sentence-transformers in each backend, in the process: the latency is
that of ``predict``. "onnx" is an older release, the last one whose ONNX backend installs. All take
turns at each request, on the same cores. The order of each query of test.tsv, with the relevant
document and 29 random ones, is compared with that of the backend torch; documents of near.tsv share
words with the query. FOLDER keeps the models and the environment of the peers; ``--untimed``
measures the order only.
"""

from __future__ import annotations

import argparse
import json
import sys
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console

import attnserve
from attnserve.checks.rankings import Ranking, best_agrees, kendall_tau, measure_rankings
from attnserve.data.text_files import QueryDocument, read_pairs
from attnserve.intervals import bootstrap_interval
from attnserve.literals import Precision
from attnserve.runtime.times import paired_speedup
from benchmarks._common import description, number_table, write_result
from benchmarks.serving.peers import (
    Program,
    Setup,
    all_cores,
    attnserve_server,
    cross_encoder,
    peer_versions,
)

PRECISIONS: Sequence[Precision] = ("bfloat16-cpu", "int8-full", "int8-full-bfloat16")

BACKENDS = ("torch", "openvino", "openvino-float32", "onnx")
"""OpenVINO computes in bfloat16 by default where the CPU has it."""

ORIGINAL = "attnserve, the original"
REFERENCE = "sentence-transformers, torch"

TIMED = 60
"""Queries whose requests are timed."""

TAU, TOP1 = 0.97, 0.98
"""The least agreement with the original of a model that keeps its order."""

Request = list[QueryDocument]
System = Callable[[Request], tuple[float, np.ndarray]]
"""Seconds, and the scores of the documents in the order of the request."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--model", type=Path, required=True, help="folder of benchmarks.reranker")
    parser.add_argument("--cache", type=Path, required=True, help="models and environments")
    parser.add_argument("--rounds", type=int, default=3, help="requests of each timed query")
    parser.add_argument("--recover", metavar="TIME", help="search with training too, as 20m")
    parser.add_argument("--untimed", action="store_true", help="compare orders, not speeds")
    options = parser.parse_args(arguments)
    models = build(options.model, options.cache, options.recover)
    requests = lists(options.model / "test.tsv")
    setup = all_cores(options.model, options.cache)
    with ExitStack() as stack:
        systems = {
            f"sentence-transformers, {backend}": peer(stack, setup, options.model, backend)
            for backend in BACKENDS
        }
        systems |= {name: served(stack, setup, path) for name, path in models.items()}
        rows = orders(systems, requests)
        for row, near in zip(rows, orders(systems, lists(options.model / "near.tsv")), strict=True):
            row["near"] = near
        times = {} if options.untimed else timed(systems, requests, options.rounds)
    for row in rows:
        row.update(speed(row["system"], times))
    show(rows)
    if not options.untimed:
        write_result(
            "rerank", options, rows=rows, goals=goals(rows), documents=len(requests[0]),
            queries=len(requests), threads=setup.threads,
            versions=peer_versions(setup, "cross-encoder"),
            versions_onnx=peer_versions(setup, "cross-encoder-onnx"),
        )  # fmt: skip
    return 0


def build(model: Path, cache: Path, recover: str | None = None) -> dict[str, Path]:
    """Export the model, convert it to each precision, and search; models in the folder are kept."""
    original = cache / "original"
    if not original.exists():
        attnserve.export(model, original, task="rerank")
    optimize = partial(attnserve.optimize, original, calib=model / "calibration.tsv")
    search = partial(optimize, keep=TAU, precision="auto")
    builds = {
        precision: partial(optimize, precision=precision, sequence=32) for precision in PRECISIONS
    }
    builds["searched"] = search
    if recover is not None:
        builds["searched with training"] = partial(search, recover=recover)
    models = {ORIGINAL: original}
    for name, build in builds.items():
        models[f"attnserve, {name}"] = path = cache / name.replace(" ", "-")
        if not path.exists():
            build(path)
    return models


def lists(path: Path) -> list[Request]:
    """The pairs of each query."""
    found: dict[str, Request] = {}
    for pair in read_pairs(path):
        found.setdefault(pair.query, []).append(pair)
    return list(found.values())


def peer(stack: ExitStack, setup: Setup, model: Path, backend: str) -> System:
    program: Program = stack.enter_context(cross_encoder(setup, model, backend))
    program.read()

    def answer(request: Request) -> tuple[float, np.ndarray]:
        found = program.ask({"pairs": [pair[:2] for pair in request]})
        return found["seconds"], np.array(found["scores"])

    return answer


def served(stack: ExitStack, setup: Setup, model: Path) -> System:
    port, _ = stack.enter_context(attnserve_server(setup, model=model))
    url, headers = f"http://127.0.0.1:{port}/rerank", {"Content-Type": "application/json"}

    def answer(request: Request) -> tuple[float, np.ndarray]:
        texts = [pair.document for pair in request]
        body = json.dumps({"query": request[0].query, "texts": texts, "raw_scores": True})
        started = perf_counter()
        post = urllib.request.Request(url, body.encode(), headers)
        with urllib.request.urlopen(post, timeout=60) as response:
            ranks = json.load(response)
        seconds = perf_counter() - started
        scores = np.empty(len(texts))
        for rank in ranks:
            scores[rank["index"]] = rank["score"]
        return seconds, scores

    return answer


def orders(systems: dict[str, System], requests: Sequence[Request]) -> list[dict[str, Any]]:
    """The agreement of each system with the reference, and its nDCG@10, with 95 % intervals."""
    scores = {name: [run(request)[1] for request in requests] for name, run in systems.items()}
    rows: list[dict[str, Any]] = []
    for name, found in scores.items():
        row: dict[str, Any] = {"system": name}
        pairs = list(zip(scores[REFERENCE], found, strict=True))
        rankings = [
            Ranking.of_scores(new, [row.relevance for row in request])
            for request, new in zip(requests, found, strict=True)
        ]
        for measure, values in (
            ("tau", [kendall_tau(a, b) for a, b in pairs]),
            ("top1", [float(best_agrees(a, b)) for a, b in pairs]),
            ("ndcg_at_10", next(measure_rankings(rankings, "nDCG@10"))),
        ):
            row |= {measure: float(np.mean(values)), f"{measure}_ci95": _ci95(np.array(values))}
        rows.append(row)
    return rows


def _ci95(values: np.ndarray) -> tuple[float, float]:
    def mean(rows: np.ndarray) -> np.ndarray:
        return values[rows].mean(axis=-1)

    return bootstrap_interval(mean, len(values), seed=0)


def timed(
    systems: dict[str, System], requests: Sequence[Request], rounds: int
) -> dict[str, list[float]]:
    """Milliseconds of each request by system; the order of the systems alternates.

    Each system answers another query first, as a busy server has, whose weights are in the caches.
    """
    times: dict[str, list[float]] = {name: [] for name in systems}
    chosen = requests[:: max(len(requests) // TIMED, 1)]
    for index, request in enumerate([*chosen] * rounds):
        names = [*systems][:: -1 if index % 2 else 1]
        for name in names:
            systems[name](chosen[index % len(chosen) - 1])
            times[name].append(1e3 * systems[name](request)[0])
    return times


def speed(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    """The median latency of a system, and its speed-up over each peer with the interval."""
    if not times:
        return {}
    own = np.array(times[name])
    over: dict[str, list[float]] = {}
    for other in times:
        if other.startswith("sentence-transformers"):
            found = paired_speedup([np.array(times[other])], [own])
            over[other] = [found.value, *found.ci95]
    return {"p50_ms": float(np.median(own)), "p90_ms": float(np.percentile(own, 90)), "over": over}


def goals(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The fastest model of attnserve that keeps the order, and its speed over the peers."""
    peers = [row for row in rows if row["system"].startswith("sentence-transformers")]
    kept = [row for row in rows if row not in peers and row["tau"] >= TAU and row["top1"] >= TOP1]
    best = min(kept, key=lambda row: row["p50_ms"])
    fastest = min(peers, key=lambda row: row["p50_ms"])["system"]
    return {
        "best": best["system"],
        "fastest_peer": fastest,
        "over_fastest_peer": best["over"][fastest],
        "over_torch": best["over"][REFERENCE],
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    columns = ("p50 ms", "tau", "top-1", "nDCG@10", "tau, near", "top-1, near", "over torch")
    table = number_table("30 pairs a request", columns)
    for row in rows:
        measures = [f"{row[name]:.4f}" for name in ("tau", "top1", "ndcg_at_10")]
        near = row.get("near", {})
        measures += [f"{near[name]:.4f}" if near else "" for name in ("tau", "top1")]
        ms, ratio = "", ""
        if "over" in row:
            ms, ratio = f"{row['p50_ms']:.1f}", f"{row['over'][REFERENCE][0]:.2f}x"
        table.add_row(row["system"], ms, *measures, ratio)
    Console(width=120).print(table)


if __name__ == "__main__":
    sys.exit(main())
