"""Load test of `attnserve serve`, compared with other servers.

    python -m benchmarks.serving_load --texts STS.tsv --cache FOLDER [--only throughput,overload]

Serves all-MiniLM-L6-v2 (from the [demo] extra) with the default settings of `attnserve serve`:

- latency: time that HTTP, tokenization and batching add to a ``session.run`` of one text, for the
  graph that is served (the model with fused operators) and for the file itself;
- throughput: texts per second at saturation, compared with a plain FastAPI + ONNX Runtime handler,
  LitServe with batching, and the ONNX backend of sentence-transformers. Each peer has a virtual
  environment in FOLDER, runs the same model, and uses the fastest of several settings, which are
  measured first. The systems take turns, and their order rotates from round to round. ONNX Runtime
  sessions without a server show the gain from batches and operators alone;
- searched: the same model after ``attnserve optimize --keep 0.99 --allow ffn``, in float32 and in
  int8, in front of the same traffic: throughput beside the peers, latency at half of the own
  capacity, and two workers beside one. Calibration uses texts that are not sent;
- shadow: throughput of the searched float32 model with --shadow over that without, both servers
  measured in turns;
- overload: twice the capacity for a minute (open loop: Poisson arrivals, latency counted from the
  time a request was due), then the time until recovery;
- memory: growth of resident memory over 50,000 requests of random lengths;
- footprint: resident memory of the server and of the process that checks the model: at the start,
  when warm, and while a version is replaced;
- workers: kill -9 of one of two workers under load.

Servers are pinned to all cores but the last, and the load generator to the last core. Each section
replaces its part of benchmarks/results/serving.json, with packed raw samples (``client.unpack``).
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import psutil

import attnserve
from attnserve.checks.benchmark import describe_machine
from attnserve.context import Device
from attnserve.intervals import bootstrap_interval
from attnserve.literals import Precision
from attnserve.runtime.machine import product_flags
from benchmarks._common import RESULTS, command_of, description, minilm, write_json, write_lines
from benchmarks.serving.client import (
    Phase,
    batch_counts,
    body,
    cosines,
    embeddings,
    family_rss,
    histogram,
    operators_of,
    pack,
    percentiles,
    send_load,
)
from benchmarks.serving.peers import (
    PEERS,
    Server,
    Setup,
    attnserve_server,
    bare_session,
    console,
    fused_graph,
    litserve_server,
    peer_versions,
    plain_server,
    sentence_transformers,
)

RESULT = RESULTS / "serving.json"

IN_FLIGHT = 64
"""Requests in flight at saturation."""

BATCH = 32
"""Texts per call to sentence-transformers, and per request to attnserve in its comparison."""

CALIBRATION = 900
"""Texts for the search of section searched; they are not sent to the servers."""

TURNS = 40
"""Pairs of measurements of section shadow: single ones scatter by some percent."""

BOUNDS = {"plain": 2.0, "litserve": 1.5, "sentence-transformers": 1.2}
"""Goals: the throughput of attnserve relative to each peer."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=description(__doc__))
    parser.add_argument("--texts", type=Path, required=True, help=".tsv with sentence1")
    parser.add_argument(
        "--cache", type=Path, required=True, help="folder of the model and the peers"
    )
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma separated")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of throughput")
    parser.add_argument(
        "--seconds", type=float, default=8, help="duration of one throughput measurement"
    )
    parser.add_argument("--deadline-ms", type=int, default=1000)
    parser.add_argument("--overload-s", type=float, default=60)
    parser.add_argument(
        "--requests", type=int, default=50_000, help="requests of the memory section"
    )
    options = parser.parse_args(arguments)
    sections = options.only.split(",")
    if unknown := set(sections) - SECTIONS.keys():
        parser.error(f"--only {sorted(unknown)[0]}: expected some of {', '.join(SECTIONS)}")
    setup = prepare(options)
    results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for name in sections:
        console.print(f"[bold]{name}[/bold]")
        busy = psutil.cpu_percent(interval=2)
        if busy > 10:
            console.print(
                f"other processes use {busy:.0f} % of this machine and distort the results"
            )
        results[name] = {
            **SECTIONS[name](setup),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "busy_percent_before": busy,
            "machine": asdict(describe_machine(Device(threads=setup.threads))),
            "cpu_flags": product_flags(),
            "server_cores": setup.server_cores,
            "generator_cores": setup.generator_cores,
            "command": command_of(
                "serving_load", argparse.Namespace(**vars(options) | {"only": name})
            ),
        }
        write_json(RESULT, results)
    failed = [
        f"{name}: {goal}"
        for name in sections
        for goal, holds in results[name].get("holds", {}).items()
        if not holds
    ]
    for line in failed:
        console.print(f"not reached: {line}")
    return 1 if failed else 0


def prepare(options: argparse.Namespace) -> Setup:
    model = options.cache / "minilm"
    if not (model / "model.onnx").is_file():
        attnserve.export(minilm(), model)
    with options.texts.open(encoding="utf-8") as file:
        rows = csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        texts = [row["sentence1"] for row in rows]
    np.random.default_rng(0).shuffle(texts)
    cores = sorted(os.sched_getaffinity(0))
    return Setup(
        model=model.resolve(),
        texts=tuple(texts),
        cache=options.cache.resolve(),
        server_cores=tuple(cores[:-1] or cores),
        generator_cores=tuple(cores[-1:]),
        rounds=options.rounds,
        seconds=options.seconds,
        deadline_ms=options.deadline_ms,
        overload_s=options.overload_s,
        requests=options.requests,
    )


def single_texts(setup: Setup) -> list[str]:
    """Return request bodies of one text."""
    return [body(text) for text in setup.texts]


def chunks(setup: Setup) -> list[str]:
    """Return request bodies of ``BATCH`` texts."""
    whole = len(setup.texts) // BATCH * BATCH
    return [body(setup.texts[at : at + BATCH]) for at in range(0, whole, BATCH)]


def latency(setup: Setup) -> dict[str, Any]:
    """Compare the same texts over HTTP and in bare sessions, in turns of 50 texts.

    A run after a pause is slower than one in a loop: caches and clock cool down. The pause before
    the paced runs is about the time that a server has between two runs.
    """
    turn, pause_ms = 50, 1.0
    texts = setup.texts[: turn * 12]
    graph, comparison = fused_graph(setup)
    closed_loop = {"concurrency": 1, "requests": turn}
    with ExitStack() as stack:
        sessions = {
            "bare": stack.enter_context(bare_session(setup)),
            "bare, as served": stack.enter_context(bare_session(setup, graph)),
        }
        servers = {
            "ours": attnserve_server(setup),
            "plain": plain_server(setup, handler="sync", threads=setup.threads),
        }
        ports = {name: stack.enter_context(server)[0] for name, server in servers.items()}
        for port in ports.values():
            send_load(setup, port, single_texts(setup), closed_loop)
        for session in sessions.values():
            session.ask(texts[:turn])
        paced = "bare, as served, with pauses"
        samples: dict[str, list[float]] = {name: [] for name in (*sessions, paced, *ports)}
        split: dict[str, list[float]] = {"queue_ms": [], "tokenize_ms": [], "compute_ms": []}
        for at in range(0, len(texts), turn):
            some = texts[at : at + turn]
            for name, session in sessions.items():
                samples[name] += session.ask(some)["run_ms"]
            question = {"texts": some, "pause_ms": pause_ms}
            samples[paced] += sessions["bare, as served"].ask(question)["run_ms"]
            for name, port in ports.items():
                (phase,) = send_load(setup, port, [body(text) for text in some], closed_loop)
                samples[name] += list(phase.columns["latency_ms"])
                if name == "ours":
                    for key, values in split.items():
                        values += list(phase.columns[key])
    arrays = {name: np.array(values) for name, values in samples.items()}
    added = {
        "ours": arrays["ours"] - arrays["bare, as served"],
        "plain": arrays["plain"] - arrays["bare"],
        "ours, over the file itself": arrays["ours"] - arrays["bare"],
        "ours, over runs with pauses": arrays["ours"] - arrays[paced],
    }
    p50 = float(np.median(added["ours"]))
    console.print(f"added to one text: {p50:.2f} ms (plain: {np.median(added['plain']):.2f} ms)")
    return {
        "texts": len(texts),
        "operators": comparison,
        "bare_run_ms": {name: percentiles(arrays[name]) for name in (*sessions, paced)},
        "pause_ms": pause_ms,
        "latency_ms": {name: percentiles(arrays[name]) for name in ports},
        "added_ms": {name: percentiles(values) for name, values in added.items()},
        "headers_p50_ms": {name: float(np.median(values)) for name, values in split.items()},
        "holds": {"added p50 <= 1.2 ms": p50 <= 1.2},
        "samples_ms": {name: pack(values) for name, values in arrays.items()},
    }


def throughput(setup: Setup) -> dict[str, Any]:
    """Measure texts per second at saturation, each system with its best setting."""
    plain_settings = [
        {"handler": handler, "threads": threads}
        for handler in ("sync", "async")
        for threads in sorted({1, setup.threads})
    ]
    litserve_settings = [{"batch": batch, "timeout_s": 0.005} for batch in (4, 8, 16, 32, 64)]
    tried = {
        "plain": tune(setup, plain_server, plain_settings),
        "litserve": tune(setup, litserve_server, litserve_settings),
    }
    best = {name: max(rows, key=lambda row: row["texts_per_s"]) for name, rows in tried.items()}

    def best_setting(name: str) -> dict[str, Any]:
        return {key: value for key, value in best[name].items() if key != "texts_per_s"}

    folder = sentence_transformers_folder(setup)
    with bare_session(setup) as session:
        reference = np.array(session.ask(setup.texts[:BATCH])["vectors"])
    graph, comparison = fused_graph(setup)
    details: dict[str, Any] = {}

    def over_http(name: str, server: Server, texts: int = 1) -> float:
        bodies, in_flight = (single_texts(setup), IN_FLIGHT) if texts == 1 else (chunks(setup), 4)
        with server as (port, process):
            _, phase = send_load(
                setup, port, bodies,
                {"concurrency": in_flight, "seconds": 2},
                {"concurrency": in_flight, "seconds": setup.seconds},
            )  # fmt: skip
            answered = phase.answered
            details[name] = {
                "statuses": phase.statuses,
                "latency_ms": percentiles(answered["latency_ms"]),
                "generator_cpu_share": round(phase.cpu_share, 3),
                "rss_bytes": family_rss(process),
                "operators": operators_of(port),
                "cosine_to_bare_session": cosines(embeddings(port, setup.texts[:BATCH]), reference),
            }
            if answered["compute_ms"].any():
                for key in ("queue_ms", "compute_ms"):
                    details[name][key] = percentiles(answered[key])
                details[name]["batches"] = histogram(batch_counts(port))
                details[name]["per_text"] = per_text(answered, texts)
            return phase.answers_per_s * texts

    def encode(name: str, batch: int | None) -> float:
        with sentence_transformers(setup, folder) as program:
            program.read()
            question = {"texts": setup.texts, "batch": batch}
            program.ask({**question, "seconds": 2})
            answer = program.ask({**question, "seconds": setup.seconds})
        details[name] = {"cosine_to_bare_session": cosines(np.array(answer["vectors"]), reference)}
        return answer["texts"] / answer["seconds"]

    def session_rate(batch: int, *graph: Path) -> float:
        question = {"texts": setup.texts, "batch": batch}
        with bare_session(setup, *graph) as session:
            session.ask({**question, "seconds": 1})
            return session.ask({**question, "seconds": setup.seconds})["texts_per_s"]

    systems: dict[str, Callable[[str], float]] = {
        "attnserve": lambda name: over_http(name, attnserve_server(setup)),
        "plain": lambda name: over_http(name, plain_server(setup, **best_setting("plain"))),
        "litserve": lambda name: over_http(
            name, litserve_server(setup, **best_setting("litserve"))
        ),
        f"attnserve, {BATCH} texts a request": lambda name: over_http(
            name, attnserve_server(setup), BATCH
        ),
        "sentence-transformers": lambda name: encode(name, BATCH),
        "sentence-transformers, one call": lambda name: encode(name, None),
        "attnserve --no-rewrite": lambda name: over_http(
            name, attnserve_server(setup, "--no-rewrite")
        ),
        # Without a server: the gain from batches and from fused operators.
        "bare session, one by one": lambda _: session_rate(1),
        "bare session, 8 of like length": lambda _: session_rate(8),
        "bare session as served, one by one": lambda _: session_rate(1, graph),
        "bare session as served, 8 of like length": lambda _: session_rate(8, graph),
        "bare session as served, 16 of like length": lambda _: session_rate(16, graph),
    }
    rates = take_turns(setup, systems)
    compared = {
        "plain": "attnserve",
        "litserve": "attnserve",
        "sentence-transformers": f"attnserve, {BATCH} texts a request",
    }
    ratios = {
        peer: [a / b for a, b in zip(rates[system], rates[peer], strict=True)]
        for peer, system in compared.items()
    }
    medians = {peer: statistics.median(values) for peer, values in ratios.items()}
    for peer, ratio in medians.items():
        console.print(f"{ratio:.2f} x {peer} (goal: {BOUNDS[peer]})")
    return {
        "in_flight": IN_FLIGHT,
        "seconds": setup.seconds,
        "settings": {
            "attnserve": f"--threads {setup.threads}, all else as it comes",
            **{name: {"chosen": best[name], "tried": rows} for name, rows in tried.items()},
            "sentence-transformers": f"encode() in batches of {BATCH}, in the texts' order",
        },
        "texts_per_s": rates,
        "median_texts_per_s": {name: statistics.median(values) for name, values in rates.items()},
        "ratios": ratios,
        "median_ratio": medians,
        "operators": comparison,
        "bare_over_one_by_one": {
            name: statistics.median(
                many / one
                for one, many in zip(rates["bare session, one by one"], values, strict=True)
            )
            for name, values in rates.items()
            if name.startswith("bare")
        },
        "compared": compared,
        "last_round": details,
        "versions": {peer: peer_versions(setup, peer) for peer in PEERS},
        "holds": {f">= {BOUNDS[peer]} x {peer}": medians[peer] >= BOUNDS[peer] for peer in medians},
    }


def searched(setup: Setup) -> dict[str, Any]:
    """Serve searched artifacts: throughput, latency at half load, and two workers."""
    unsent, sent = setup.texts[:CALIBRATION], setup.texts[CALIBRATION:]
    setup = replace(setup, texts=sent)
    models = {
        "attnserve, searched": searched_model(setup, unsent, "float32"),
        "attnserve, searched in int8": searched_model(setup, unsent, "int8-full"),
    }
    quality = {name: recorded_quality(model) for name, model in models.items()}
    folder = sentence_transformers_folder(setup)
    details: dict[str, Any] = {}

    def over_http(name: str, server: Server) -> float:
        with server as (port, _):
            load = {"concurrency": IN_FLIGHT, "seconds": setup.seconds}
            _, phase = send_load(setup, port, single_texts(setup), {**load, "seconds": 2}, load)
            details[name] = {
                "statuses": phase.statuses,
                "generator_cpu_share": round(phase.cpu_share, 3),
            }
            if name in models:
                details[name]["batches"] = histogram(batch_counts(port))
                half = {"rate": phase.answers_per_s / 2, "seconds": setup.seconds}
                (calm,) = send_load(setup, port, single_texts(setup), half, connections=256)
                details[name]["half_load_ms"] = percentiles(calm.answered["latency_ms"])
            return phase.answers_per_s

    def encode(backend: str) -> float:
        with sentence_transformers(setup, folder, backend) as program:
            program.read()
            question = {"texts": sent, "batch": BATCH}
            program.ask({**question, "seconds": 2})
            answer = program.ask({**question, "seconds": setup.seconds})
        return answer["texts"] / answer["seconds"]

    systems: dict[str, Callable[[str], float]] = {
        "attnserve, the original": lambda name: over_http(name, attnserve_server(setup)),
        **{
            name: lambda name, model=model: over_http(name, attnserve_server(setup, model=model))
            for name, model in models.items()
        },
        "plain": lambda name: over_http(name, plain_server(setup, handler="async", threads=1)),
        "litserve": lambda name: over_http(name, litserve_server(setup, batch=4, timeout_s=0.005)),
        **{
            f"sentence-transformers, {backend}": lambda _, backend=backend: encode(backend)
            for backend in ("torch", "onnx", "openvino")
        },
    }
    rates = take_turns(setup, systems)
    peers = [name for name in systems if not name.startswith("attnserve")]
    fastest = max(peers, key=lambda name: statistics.median(rates[name]))
    ratios = {
        name: {
            peer: statistics.median(a / b for a, b in zip(rates[name], rates[peer], strict=True))
            for peer in peers
        }
        for name in models
    }
    scaling = two_workers(setup, models)
    best = ratios["attnserve, searched in int8"]
    console.print(f"int8: {best['plain']:.2f} x plain, {best[fastest]:.2f} x {fastest}; {scaling}")
    return {
        "in_flight": IN_FLIGHT,
        "seconds": setup.seconds,
        "quality": quality,
        "texts_per_s": rates,
        "median_ratio": ratios,
        "fastest_peer": fastest,
        "two_workers_over_one": scaling,
        "last_round": details,
        "versions": {peer: peer_versions(setup, peer) for peer in PEERS},
        "holds": {
            ">= 2.5 x plain": best["plain"] >= 2.5,
            ">= 1.8 x the fastest peer": best[fastest] >= 1.8,
            "two workers >= 1.8 x one": min(scaling.values()) >= 1.8,
        },
    }


def searched_model(setup: Setup, texts: Sequence[str], precision: Precision) -> Path:
    """Return the artifact of a search on ``texts``; it is made once for a cache folder."""
    folder = setup.cache / f"searched-{precision}"
    if not (folder / "model.onnx").is_file():
        calibration = write_lines(setup.cache / "calibration.txt", texts)
        attnserve.optimize(
            setup.model, folder, calib=calibration, keep=0.99, allow=["ffn"], precision=precision,
            threads=setup.threads, force=True,
        )  # fmt: skip
    return folder


def recorded_quality(model: Path) -> Any:
    """Return the quality that the record of an artifact states."""
    record = json.loads((model / "attnserve.json").read_text(encoding="utf-8"))
    return record["lineage"][-1]["quality"]


def two_workers(setup: Setup, models: Mapping[str, Path]) -> dict[str, float]:
    """Throughput of two workers over that of one, each with one thread, on all cores."""
    everywhere = replace(setup, server_cores=setup.server_cores + setup.generator_cores)
    one, two = (("--workers", count, "--threads", "1") for count in ("1", "2"))
    ratios: dict[str, float] = {}
    for name, model in {"attnserve, the original": setup.model, **models}.items():
        pairs: list[float] = []
        for turn in range(setup.rounds):
            rate: dict[bool, float] = {}
            for options in (one, two) if turn % 2 else (two, one):
                with attnserve_server(everywhere, *options, model=model) as (port, _):
                    rate[options is two] = short_rate(everywhere, port)
            pairs.append(rate[True] / rate[False])
        ratios[name] = statistics.median(pairs)
    return ratios


def shadow(setup: Setup) -> dict[str, Any]:
    """Measure what comparing one of 200 answers with the original costs at saturation."""
    unsent, sent = setup.texts[:CALIBRATION], setup.texts[CALIBRATION:]
    setup = replace(setup, texts=sent)
    model = searched_model(setup, unsent, "float32")
    pairs: list[float] = []
    with ExitStack() as stack:
        options = {"without": (), "with": ("--shadow", str(setup.model))}
        ports = {
            name: stack.enter_context(attnserve_server(setup, *some, model=model))[0]
            for name, some in options.items()
        }
        for port in ports.values():
            short_rate(setup, port)
        for turn in range(TURNS):
            order = list(ports) if turn % 2 else list(reversed(ports))
            rate = {name: short_rate(setup, ports[name]) for name in order}
            pairs.append(rate["with"] / rate["without"])
    ratio = statistics.median(pairs)
    low, high = bootstrap_interval(
        lambda rows: np.array(pairs)[rows].mean(axis=1), TURNS, seed=0, resamples=2000
    )
    console.print(f"with --shadow: {ratio:.4f} of the throughput [{low:.4f}, {high:.4f}]")
    return {
        "in_flight": IN_FLIGHT,
        "shadow_rate": 0.005,
        "seconds": setup.seconds / 2,
        "ratios": pairs,
        "median_ratio": ratio,
        "mean_ratio_ci95": [low, high],
        "holds": {"costs <= 1 %": ratio >= 0.99},
    }


def take_turns(
    setup: Setup, systems: Mapping[str, Callable[[str], float]]
) -> dict[str, list[float]]:
    """Measure every system once in each round; the order rotates from round to round."""
    order = list(systems)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(setup.rounds):
        first = turn % len(order)
        for name in order[first:] + order[:first]:
            rates[name].append(systems[name](name))
            console.print(f"round {turn + 1}: {name}: {rates[name][-1]:.1f} texts/s")
    return rates


def tune(
    setup: Setup, server: Callable[..., Server], settings: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Measure a short throughput at each setting of a server."""
    rows: list[dict[str, Any]] = []
    for setting in settings:
        with server(setup, **setting) as (port, _):
            rows.append({**setting, "texts_per_s": short_rate(setup, port)})
        console.print(f"tried {server.__name__}: {rows[-1]}")
    return rows


def short_rate(setup: Setup, port: int) -> float:
    half = {"concurrency": IN_FLIGHT, "seconds": setup.seconds / 2}
    _, phase = send_load(setup, port, single_texts(setup), {**half, "seconds": 1.5}, half)
    return phase.answers_per_s


def per_text(answers: Mapping[str, np.ndarray], texts: int) -> dict[str, float]:
    """Return the mean cost of a text from the headers of the answers."""
    return {
        "tokens": float(answers["tokens"].mean() / texts),
        "macs": float(answers["macs"].mean() / texts),
        "padding_waste": float(answers["padding_waste"].mean()),
    }


def sentence_transformers_folder(setup: Setup) -> Path:
    """Return the encoder as its authors saved it, with the graph that all systems run."""
    folder = setup.cache / "minilm-sentence-transformers"
    if not folder.is_dir():
        shutil.copytree(minilm(), folder)
        (folder / "onnx").mkdir()
    shutil.copyfile(setup.model / "model.onnx", folder / "onnx" / "model.onnx")
    return folder


def overload(setup: Setup) -> dict[str, Any]:
    """Offer half the capacity, then twice the capacity, then half again."""
    with attnserve_server(setup) as (port, process):
        capacity = short_rate(setup, port)
        idle = batch_counts(port)
        phases = before, during, after = send_load(
            setup, port, single_texts(setup),
            {"rate": capacity / 2, "seconds": 10},
            {"rate": 2 * capacity, "seconds": setup.overload_s},
            {"rate": capacity / 2, "seconds": 10},
            connections=8192,
            headers={"x-timeout-ms": str(setup.deadline_ms)},
        )  # fmt: skip
        batches = batch_counts(port) - idle
        healthy = embeddings(port, setup.texts[:1]).shape[0] == 1
        rss = family_rss(process)
    accepted = during.answered
    # Recovered: all requests are answered, at most twice as late as nearly all were before.
    usual = float(np.percentile(before.answered["latency_ms"], 99))
    unwell = (after.columns["status"] != 200) | (after.columns["latency_ms"] > 2 * usual)
    recovery = recovery_seconds(after.columns["due_s"], unwell)
    counts = during.statuses
    p99 = percentiles(accepted["latency_ms"])["p99"]
    console.print(
        f"capacity {capacity:.0f}/s, offered {len(during.columns['due_s']) / during.seconds:.0f}/s:"
        f" {counts}, p99 {p99:.0f} ms, recovered after {recovery:.2f} s"
    )
    return {
        "capacity_per_s": capacity,
        "deadline_ms": setup.deadline_ms,
        "phases": {
            name: summarize(phase)
            for name, phase in zip(("before", "overload", "after"), phases, strict=True)
        },
        "batches": histogram(batches),
        "recovery_s": recovery,
        "recovered_means": f"from then on all are answered, in at most {2 * usual:.0f} ms",
        "rss_bytes": rss,
        "holds": {
            "every request got an answer, 429 or 504": counts.keys() <= {"200", "429", "504"},
            "p99 of the accepted is under the deadline": p99 < setup.deadline_ms,
            "well again within 2 s": recovery <= 2,
            "answers afterwards": healthy,
        },
        "samples": {
            "latency_ms": pack(accepted["latency_ms"]),
            "due_ms": pack(accepted["due_s"] * 1e3),
            "queue_ms": pack(accepted["queue_ms"]),
        },
    }


def summarize(phase: Phase) -> dict[str, Any]:
    """Return the entry of a phase in the result file."""
    columns, answered = phase.columns, phase.answered
    return {
        "seconds": round(phase.seconds, 2),
        "offered_per_s": round(len(columns["due_s"]) / phase.seconds, 1),
        "achieved_per_s": round(len(answered["due_s"]) / phase.seconds, 1),
        "statuses": phase.statuses,
        "latency_ms": percentiles(answered["latency_ms"]),
        "refused_after_ms": {
            str(status): percentiles(columns["latency_ms"][columns["status"] == status])
            for status in (429, 504)
        },
        **{key: percentiles(answered[key]) for key in ("queue_ms", "tokenize_ms", "compute_ms")},
        "sent_late_ms": percentiles(columns["late_ms"]),
        "generator_cpu_share": round(phase.cpu_share, 3),
    }


def recovery_seconds(due_s: np.ndarray, unwell: np.ndarray) -> float:
    """Return when the last request was due that the overload still delayed.

    Single slow requests are noise, because the phase before has one in a hundred too. The recovery
    therefore ends with the first second in which at most 2 % are slow.
    """
    order = np.argsort(due_s)
    due, bad = due_s[order], unwell[order]
    for start in np.concatenate([[0.0], due[bad]]):
        window = (due > start) & (due <= start + 1)
        if window.any() and bad[window].mean() <= 0.02:
            return float(start)
    return float("inf")


def memory(setup: Setup) -> dict[str, Any]:
    """Measure the resident bytes of the server over many requests of random lengths."""
    random = np.random.default_rng(0)
    words = " ".join(setup.texts).split()
    bodies: list[str] = []
    for _ in range(5000):
        # Mostly short texts; one in a hundred is long.
        count = int(random.integers(100, 250) if random.random() < 0.01 else random.integers(1, 30))
        start = int(random.integers(0, len(words) - count))
        bodies.append(body(" ".join(words[start : start + count])))
    first = min(2000, setup.requests // 10)
    series: list[tuple[float, int]] = []
    stop = threading.Event()
    with attnserve_server(setup) as (port, process):
        loaded = family_rss(process)

        def watch() -> None:
            started = time.monotonic()
            while not stop.wait(2):
                series.append((round(time.monotonic() - started, 1), family_rss(process)))

        send_load(setup, port, bodies, {"concurrency": 32, "requests": first})
        before = family_rss(process)
        watcher = threading.Thread(target=watch)
        watcher.start()
        rest = {"concurrency": 32, "requests": setup.requests - first}
        (phase,) = send_load(setup, port, bodies, rest)
        stop.set()
        watcher.join()
        after = family_rss(process)
    growth = after / before - 1
    console.print(f"{before / 2**20:.0f} MiB before, {after / 2**20:.0f} MiB after: {growth:+.1%}")
    return {
        "requests": setup.requests,
        "in_flight": 32,
        "rss_loaded_bytes": loaded,
        "rss_before_bytes": before,
        "rss_before_means": f"after the first {first} requests",
        "rss_after_bytes": after,
        "growth": growth,
        "statuses": phase.statuses,
        "latency_ms": percentiles(phase.answered["latency_ms"]),
        "rss_series": series,
        "holds": {"memory grows less than 5 %": growth < 0.05},
    }


def footprint(setup: Setup) -> dict[str, Any]:
    """Measure the most resident bytes of a start and of a replacement, with and without the check.

    Results of earlier checks are not used: each server has an empty cache folder.
    """
    found: dict[str, Any] = {}
    for name, options in (("with the check", ()), ("without", ("--no-probe",))):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            models = Path(folder) / "models"
            shutil.copytree(setup.model, models / "minilm")
            stack.enter_context(patch.dict(os.environ, ATTNSERVE_CACHE=f"{folder}/cache"))
            start = PeakMemory()
            with start:
                server = attnserve_server(setup, *options, model=models)
                port, process = stack.enter_context(server)
            send_load(setup, port, single_texts(setup)[:500], {"concurrency": 8, "requests": 500})
            warm = process.memory_info().rss
            _write_other_version(models / "minilm" / "model.onnx")
            replacement = PeakMemory()
            with replacement:
                address = f"http://127.0.0.1:{port}/v2/repository/models/minilm/load"
                urllib.request.urlopen(urllib.request.Request(address, method="POST")).close()
            found[name] = {
                "warm_bytes": warm, "start": start.peaks, "replacement": replacement.peaks,
            }  # fmt: skip
            console.print(f"{name}: {found[name]}")
    weights = (setup.model / "model.onnx").stat().st_size
    return {"model_bytes": weights, "servers": found}


class PeakMemory:
    """Peak resident bytes of the servers that this process starts, sampled every 2 ms.

    Attributes:
        peaks: Bytes of "server", of its child processes ("check"), and of "both" at one time.
    """

    def __init__(self) -> None:
        self.peaks = dict.fromkeys(("server", "check", "both"), 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            with suppress(psutil.Error):
                for server in psutil.Process().children():
                    ours = server.memory_info().rss
                    checks = sum(p.memory_info().rss for p in server.children(recursive=True))
                    seen = {"server": ours, "check": checks, "both": ours + checks}
                    self.peaks = {name: max(self.peaks[name], seen[name]) for name in seen}


def _write_other_version(path: Path) -> None:
    """Replace a model by one with another checksum."""
    model = onnx.load(path)
    model.doc_string = "another version"
    new = path.with_suffix(".new")
    onnx.save(model, new)
    new.replace(path)


def workers(setup: Setup) -> dict[str, Any]:
    """Kill one of two workers under load with SIGKILL."""
    with attnserve_server(setup, "--workers", "2") as (port, process):
        team = {child.pid for child in worker_processes(process)}
        rate = 0.3 * short_rate(setup, port)
        replaced: list[float] = []

        def kill() -> None:
            time.sleep(5)
            victim = min(team)
            psutil.Process(victim).kill()
            killed = time.monotonic()
            while time.monotonic() < killed + 30:
                now = {child.pid for child in worker_processes(process)}
                if victim not in now and len(now) == len(team):
                    replaced.append(time.monotonic() - killed)
                    return
                time.sleep(0.05)

        killer = threading.Thread(target=kill)
        killer.start()
        (phase,) = send_load(
            setup, port, single_texts(setup), {"rate": rate, "seconds": 20}, connections=64
        )
        killer.join()
    lost = phase.statuses.get("no answer", 0)
    console.print(f"{phase.statuses}, replaced after {replaced}")
    return {
        "offered_per_s": rate,
        "statuses": phase.statuses,
        "connections": 64,
        "latency_ms": percentiles(phase.answered["latency_ms"]),
        "replaced_after_s": replaced,
        "holds": {
            "nothing but connection errors": phase.statuses.keys() <= {"200", "no answer"},
            "the others go on": lost < 64,
            "the worker is replaced": bool(replaced),
        },
    }


def worker_processes(supervisor: psutil.Process) -> list[psutil.Process]:
    """Return the children that have the model in memory."""
    serving: list[psutil.Process] = []
    for child in supervisor.children(recursive=True):
        with suppress(psutil.Error):
            if child.memory_info().rss > 64 * 2**20:
                serving.append(child)
    return serving


SECTIONS: Mapping[str, Callable[[Setup], dict[str, Any]]] = {
    "latency": latency,
    "throughput": throughput,
    "searched": searched,
    "shadow": shadow,
    "overload": overload,
    "memory": memory,
    "footprint": footprint,
    "workers": workers,
}


if __name__ == "__main__":
    sys.exit(main())
