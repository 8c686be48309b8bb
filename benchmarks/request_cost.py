"""What a request costs beside its computation: processor time, and single texts of equal length.

    pip install 'attnserve[openvino,demo]' psutil
    python -m benchmarks.request_cost --text TEXT --cache FOLDER [--rounds N] [--seconds S]

Sends sentences of about the same length, so that all texts that wait share a run: as single texts
from eight clients, and as requests of 32 from four, to the models of ``benchmarks.throughput``
(FOLDER may be that of its models). The share is the ratio of both rates in one round. Then sends
single texts to a server of a random encoder of one small layer, and divides the processor time of
the server, with its child processes, by the number of answers. The milliseconds in the session are
those of the answers, and are part of it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from tokenizers import Tokenizer

import attnserve
from benchmarks._common import description, minilm, number_table, write_result
from benchmarks.search_time import save_random_bert
from benchmarks.serving.client import body, send_load
from benchmarks.serving.peers import Setup, all_cores, attnserve_server
from benchmarks.throughput import REQUESTS, build_own, measured, ratio, served, unseen_texts

TOKENS = range(29, 33)
"""Lengths of the texts."""

CLIENTS = (1, 8)
"""Requests in flight while processor time is measured."""

COUNTED = 2000
"""Requests of one measurement of processor time."""

TINY = (1, 64, 2)
"""Layers, width and heads of the small encoder."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--text", type=Path, required=True, help="one paragraph a line")
    parser.add_argument("--cache", type=Path, required=True, help="folder of the models")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=4.0, help="of one measurement of a rate")
    options = parser.parse_args(arguments)
    models = build_own(options.cache, options.text)
    tokenizer = Tokenizer.from_file(str(Path(minilm(), "tokenizer.json")))
    tokenizer.no_padding()
    sentences = unseen_texts(options.text)["sentences"]
    texts = [text for text in sentences if len(tokenizer.encode(text).ids) in TOKENS]
    setup = all_cores(Path(minilm()), options.cache, texts)
    cost = processor_time(setup, options.rounds)
    with ExitStack() as stack:
        ports = {
            name: stack.enter_context(attnserve_server(setup, model=path))[0]
            for name, path in models.items()
        }
        systems = {
            f"{name}, {kind}": served(setup, port, *shape)
            for name, port in ports.items()
            for kind, shape in REQUESTS.items()
        }
        rates = measured(systems, options.rounds, options.seconds)
    rows: list[dict[str, Any]] = []
    for name in models:
        whole, single = (rates[f"{name}, {kind}"] for kind in REQUESTS)
        rows.append({
            "model": name, "share": ratio(single, whole),
            "texts_per_s": {kind: rates[f"{name}, {kind}"] for kind in REQUESTS},
        })  # fmt: skip
    write_result(
        "request_cost", options, rows=rows, cost=cost, texts=len(texts),
        tokens=[TOKENS[0], TOKENS[-1]], threads=setup.threads,
    )  # fmt: skip
    table = number_table("texts of equal length", ("single texts / requests of 32",))
    for row in rows:
        table.add_row(row["model"], f"{row['share'][0]:.2f}")
    for found in cost:
        table.add_row(f"{found['clients']} clients, small model", f"{found['cpu_ms']:.2f} ms")
    Console().print(table)
    return 0


def processor_time(setup: Setup, rounds: int) -> list[dict[str, Any]]:
    """Milliseconds of processor time of a request, by the number of clients."""
    bodies = [body(text) for text in setup.texts]
    with tempfile.TemporaryDirectory() as name:
        source, model = Path(name, "source"), Path(name, "model")
        attnserve.export(str(save_random_bert(source, *TINY)), model)
        with attnserve_server(setup, model=model) as (port, process):
            send_load(setup, port, bodies, {"concurrency": max(CLIENTS), "seconds": 5.0})
            rows: list[dict[str, Any]] = []
            for clients in CLIENTS:
                costs: list[float] = []
                session_ms: list[float] = []
                for _ in range(rounds):
                    before = cpu_seconds(process)
                    sent = {"concurrency": clients, "requests": COUNTED}
                    (phase,) = send_load(setup, port, bodies, sent)
                    used = cpu_seconds(process) - before
                    costs.append(1e3 * used / len(phase.answered["status"]))
                    session_ms.append(float(phase.answered["compute_ms"].mean()))
                rows.append({
                    "clients": clients, "cpu_ms": statistics.median(costs), "rounds": costs,
                    "session_ms": statistics.median(session_ms),
                })  # fmt: skip
    return rows


def cpu_seconds(process: psutil.Process) -> float:
    """Processor time of a process and its child processes, which do not end meanwhile."""
    family = (process, *process.children(recursive=True))
    return sum(sum(member.cpu_times()[:2]) for member in family)


if __name__ == "__main__":
    sys.exit(main())
