"""Tables of the service: throughput, latency, memory, the number of replicas, and clients."""

from __future__ import annotations

import math
import statistics

from docs.hooks.tables.results import is_measured, load, source, table, times

SYSTEMS = {
    "attnserve": "`attnserve serve`",
    "attnserve, 32 texts a request": "`attnserve serve`, 32 texts per request",
    "attnserve --no-rewrite": "`attnserve serve --no-rewrite`",
    "plain": "FastAPI handler with ONNX Runtime, no batching",
    "litserve": "LitServe with batching",
    "sentence-transformers": "sentence-transformers, `encode()` in batches of 32, no server",
    "bare session, one by one": "ONNX Runtime session, one text at a time, no server",
    "bare session as served, one by one": "the same with fused operators",
    "bare session as served, 16 of like length": "the same with fused operators, batches of 16",
}

UTILIZATION = 0.6
"""The planned share of a replica's capacity."""


def throughput() -> str:
    result = load("serving")["throughput"]
    rates, ratios = result["median_texts_per_s"], result["median_ratio"]
    names = {ours: SYSTEMS[ours].replace("`", "") for ours in result["compared"].values()}
    return table(
        ["system", "texts per second", "attnserve is faster by"],
        [
            [
                shown,
                f"{rates[system]:.0f}",
                f"{times(ratios[system])} ({names[result['compared'][system]]})"
                if system in ratios
                else "",
            ]
            for system, shown in SYSTEMS.items()
        ],
    )


def request_cost(name: str) -> str:
    """Single texts beside requests of 32 at equal lengths, and processor time of a request."""
    if not is_measured(name):
        return "No result of it is committed yet."
    result = load(name)
    shares: list[list[str]] = []
    for row in result["rows"]:
        rates = (f"{statistics.median(rates):.0f}" for rates in row["texts_per_s"].values())
        value, low, high = row["share"]
        shares.append([row["model"], *rates, f"{value:.0%} ({low:.0%} to {high:.0%})"])
    kinds = (f"texts/s, {kind}" for kind in result["rows"][0]["texts_per_s"])
    low, high = result["tokens"]
    equal = table([f"texts of {low} to {high} tokens", *kinds, "single texts"], shares)
    cost = table(
        ["clients", "processor time of a request", "of it in the session"],
        [
            [str(row["clients"]), f"{row['cpu_ms']:.2f} ms", f"{row['session_ms']:.2f} ms"]
            for row in result["cost"]
        ],
    )
    return "\n\n".join((equal, cost, source(name)))


def searched() -> str:
    result = load("serving")["searched"]
    over_plain, over_fastest = (
        {name: ratios[peer] for name, ratios in result["median_ratio"].items()}
        for peer in ("plain", result["fastest_peer"])
    )
    scaling = result["two_workers_over_one"]
    return table(
        ["system", "texts per second", "plain handler", "fastest peer", "two workers", "overlap"],
        [
            [
                name,
                f"{statistics.median(rates):.0f}",
                times(over_plain[name]) if name in over_plain else "",
                times(over_fastest[name]) if name in over_fastest else "",
                times(scaling[name]) if name in scaling else "",
                f"{result['quality'][name]['overlap']:.3f}" if name in result["quality"] else "",
            ]
            for name, rates in result["texts_per_s"].items()
        ],
    )


def latency() -> str:
    added = load("serving")["latency"]["added_ms"]
    names = {
        "ours": "`attnserve serve`",
        "plain": "FastAPI handler",
        "ours, over runs with pauses": "`attnserve serve`, over runs with 1 ms between them",
    }
    return table(
        ["added to one run of the served graph", "p50", "p90", "p99"],
        [
            [shown, *(f"{added[name][q]:.2f} ms" for q in ("p50", "p90", "p99"))]
            for name, shown in names.items()
        ],
    )


def overload() -> str:
    phases = load("serving")["overload"]["phases"]
    statuses = ("200", "429", "504")
    return table(
        ["phase", "offered per second", *(f"HTTP {code}" for code in statuses), "p50", "p99"],
        [
            [
                name,
                f"{phase['offered_per_s']:.0f}",
                *(f"{phase['statuses'].get(code, 0):,}" for code in statuses),
                f"{phase['latency_ms']['p50']:.0f} ms",
                f"{phase['latency_ms']['p99']:.0f} ms",
            ]
            for name, phase in phases.items()
        ],
    )


def footprint() -> str:
    """Resident memory of a server and of the process that checks models."""
    servers = load("serving")["footprint"]["servers"]

    def row(name: str, server: str, part: str, *, warm: bool) -> list[str]:
        found = servers[server]
        peaks = (found["start"][part], found["replacement"][part])
        cells = (found["warm_bytes"] if warm else 0, *peaks)
        return [name, *(f"{cell / 2**20:.0f} MiB" if cell else "" for cell in cells)]

    return table(
        ["MiniLM", "warm", "peak of the start", "peak of a replacement"],
        [
            row("server", "with the check", "server", warm=True),
            row("process that checks the model", "with the check", "check", warm=False),
            row("both at the same time", "with the check", "both", warm=True),
            row("server with `--no-probe`", "without", "server", warm=True),
        ],
    )


def capacity() -> str:
    """Capacity and cost of one replica."""
    result = load("serving")
    found = result["throughput"]
    rate = found["median_texts_per_s"]["attnserve"]
    cost = found["last_round"]["attnserve"]["per_text"]
    half_load = result["overload"]["phases"]["before"]["latency_ms"]
    hours = 1e6 / rate / 3600
    rows = {
        "cores": f"{len(found['server_cores'])}",
        "texts per second at saturation, one text per request": f"{rate:.0f}",
        "tokens per text": f"{cost['tokens']:.1f}",
        "MACs per text, with padding": f"{cost['macs'] / 1e9:.3f} G",
        "MACs per second at saturation": f"{cost['macs'] * rate / 1e9:.1f} G",
        "latency at half the capacity, p50 and p99": f"{half_load['p50']:.1f} ms,"
        f" {half_load['p99']:.1f} ms",
        "memory after warm-up": f"{result['memory']['rss_before_bytes'] / 2**20:.0f} MiB",
        "MACs per million texts": f"{cost['macs'] * 1e6 / 1e12:.0f} T",
        "machine-hours per million texts, fully used": f"{hours:.2f}",
        f"machine-hours per million texts, {UTILIZATION:.0%} used": f"{hours / UTILIZATION:.2f}",
    }
    return table(["one replica", "value"], [list(row) for row in rows.items()])


def replicas() -> str:
    """Number of replicas for a peak load, with one spare."""
    rate = load("serving")["throughput"]["median_texts_per_s"]["attnserve"]
    peaks = (100, 1_000, 10_000, 100_000)
    needed = [math.ceil(peak / (UTILIZATION * rate)) + 1 for peak in peaks]
    return table(
        ["peak, texts per second", *(f"{peak:,}" for peak in peaks)],
        [["replicas", *(f"{count:,}" for count in needed)]],
    )


def clients() -> str:
    """The tested clients of the service, and the libraries that load model folders."""
    rows = load("clients")["clients"].values()
    lines = ["| client | tested with | outcome | lowest cosine |", "|---|---|---|---|"]
    for row in rows:
        first, *others = (f"`{package}`" for package in row["packages"])
        cosine = f"{row['lowest_cosine']:.7f}" if "lowest_cosine" in row else ""
        lines.append(f"| {first} | {', '.join(others)} | {row['outcome']} | {cosine} |")
    return "\n".join(lines)
