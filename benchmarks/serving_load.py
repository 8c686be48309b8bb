"""What the service does under load, beside its peers.

    python -m benchmarks.serving_load --texts STS.tsv --cache FOLDER [--only throughput,overload]

Serves all-MiniLM-L6-v2 (from the [demo] extra) with `attnserve serve` as it comes, and asks:

- latency: what HTTP, tokenizing and batching add to a bare ``session.run`` at one text, of the
  graph that is served, which is the model in its fastest exact operators, and of the file itself;
- throughput: texts a second at saturation, beside a plain FastAPI + ONNX Runtime handler, LitServe
  with batching, and sentence-transformers' ONNX backend. Each peer has a virtual environment of its
  own in FOLDER, runs the same model, and is given the best of several sensible settings, chosen by
  measurement first; the systems take turns, and the order rotates from round to round. Bare
  sessions beside them say what batches and operators could give a server without any own cost;
- overload: twice the capacity for a minute (open loop: Poisson arrivals, latency from the time a
  request was due), then how soon all is well again;
- memory: what 50,000 requests of random lengths leave behind;
- workers: kill -9 of one of two workers under load.

Servers are pinned to all cores but the last, the load generator to the last one. A section that is
run replaces its part of benchmarks/results/serving.json. Raw samples are kept: see ``unpack``.
"""

from __future__ import annotations

import argparse
import base64
import csv
import json
import os
import re
import shutil
import socket
import statistics
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console

import attnserve
from attnserve.checks.benchmark import describe_machine
from benchmarks.fidelity import minilm

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "serving"
RESULT = Path(__file__).parent / "results" / "serving.json"

IN_FLIGHT = 64
"""Requests in flight at saturation."""

BATCH = 32
"""Texts of one call to sentence-transformers, and of one request of ours beside it."""

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}

TORCH = next(
    line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch==")
)

SERVER = ("onnxruntime", "tokenizers", "numpy", "uvloop", "httptools")
PEERS: Mapping[str, tuple[str, ...]] = {
    "plain": ("fastapi", "uvicorn", "orjson", *SERVER),
    "litserve": ("litserve", *SERVER),
    "sentence-transformers": (TORCH, "sentence-transformers[onnx]"),
}
"""What is installed for each peer."""

UNCONSTRAINED = {"sentence-transformers"}
"""Its ONNX extra wants other versions of transformers than constraints.txt."""

BOUNDS = {"plain": 2.0, "litserve": 1.5, "sentence-transformers": 1.2}
"""How many times their throughput ours should be."""

console = Console(stderr=True, highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Setup:
    """What all sections share."""

    model: Path
    texts: tuple[str, ...]
    cache: Path
    server_cores: tuple[int, ...]
    generator_cores: tuple[int, ...]
    rounds: int
    seconds: float
    """How long one measurement of throughput takes."""
    deadline_ms: int
    overload_s: float
    requests: int
    """Of the memory section."""

    @property
    def threads(self) -> int:
        return len(self.server_cores)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--texts", type=Path, required=True, help=".tsv with sentence1")
    parser.add_argument("--cache", type=Path, required=True, help="the model and the peers")
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, comma separated")
    parser.add_argument("--rounds", type=int, default=5, help="of throughput")
    parser.add_argument("--seconds", type=float, default=8, help="of one throughput measurement")
    parser.add_argument("--deadline-ms", type=int, default=1000)
    parser.add_argument("--overload-s", type=float, default=60)
    parser.add_argument("--requests", type=int, default=50_000, help="of the memory section")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := set(wanted) - SECTIONS.keys():
        parser.error(f"--only {sorted(unknown)[0]}: expected some of {', '.join(SECTIONS)}")
    setup = prepare(options)
    results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    for name in wanted:
        console.print(f"[bold]{name}[/bold]")
        busy = psutil.cpu_percent(interval=2)
        if busy > 10:
            console.print(f"others keep this machine {busy:.0f} % busy: the figures will show it")
        found = SECTIONS[name](setup)
        results[name] = {
            **found,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "busy_percent_before": busy,
            "machine": asdict(describe_machine(threads=setup.threads)),
            "server_cores": setup.server_cores,
            "generator_cores": setup.generator_cores,
            "command": f"python -m benchmarks.serving_load --texts {options.texts.name}"
            f" --only {name}",
        }
        RESULT.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    broken = [
        f"{name}: {what}"
        for name in wanted
        for what, holds in results[name].get("holds", {}).items()
        if not holds
    ]
    for line in broken:
        console.print(f"does not hold: {line}")
    return 1 if broken else 0


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


# Programs


def pinned(cores: Sequence[int]) -> Callable[[], None]:
    return partial(os.sched_setaffinity, 0, cores)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def served(
    setup: Setup, command: Sequence[str], health: str, port: int
) -> Generator[psutil.Process]:
    """A server, from when it answers ``health`` until the end of the block."""
    process = subprocess.Popen(
        [str(part) for part in command],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"},
        preexec_fn=pinned(setup.server_cores),
    )
    try:
        deadline = time.monotonic() + 90
        while True:
            with suppress(OSError, urllib.error.URLError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}{health}", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"did not start: {' '.join(map(str, command))}")
            time.sleep(0.1)
        yield psutil.Process(process.pid)
    finally:
        family = [*psutil.Process(process.pid).children(recursive=True)]
        process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in family:
            with suppress(psutil.NoSuchProcess):
                child.kill()


@contextmanager
def ours(setup: Setup, *options: str) -> Generator[tuple[int, psutil.Process]]:
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "attnserve",
        "serve",
        str(setup.model),
        "--port",
        port,
    ]
    command += ["--threads", setup.threads, "--quiet", *options]
    with served(setup, [str(c) for c in command], "/v2/health/ready", port) as process:
        yield port, process


@contextmanager
def plain(setup: Setup, handler: str, threads: int) -> Generator[tuple[int, psutil.Process]]:
    port = free_port()
    command = [python_of(setup, "plain"), PROGRAMS / "peer_plain.py", setup.model, port]
    with served(setup, [*map(str, command), str(threads), handler], "/health", port) as process:
        yield port, process


@contextmanager
def litserve(setup: Setup, batch: int, timeout_s: float) -> Generator[tuple[int, psutil.Process]]:
    port = free_port()
    command = [python_of(setup, "litserve"), PROGRAMS / "peer_litserve.py", setup.model, port]
    command += [setup.threads, batch, timeout_s]
    with served(setup, [str(c) for c in command], "/health", port) as process:
        yield port, process


class Lines:
    """A program that answers a line of JSON with a line of JSON."""

    def __init__(self, setup: Setup, *command: Any) -> None:
        self.process = subprocess.Popen(
            [str(part) for part in command],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=pinned(setup.server_cores),
        )

    def read(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline() or "null")

    def ask(self, what: Any) -> Any:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def python_of(setup: Setup, peer: str) -> Path:
    """The interpreter of a peer's virtual environment, which is made where it is missing."""
    folder = setup.cache / peer
    stamp, wanted = folder / ".installed", "\n".join(PEERS[peer])
    python = folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        console.print(f"installing {peer}: some minutes, once")
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        bounds = [] if peer in UNCONSTRAINED else ["-c", str(ROOT / "constraints.txt")]
        install = [python, "-m", "pip", "install", "-q", *bounds, *PEERS[peer]]
        subprocess.run(install, check=True)
        stamp.write_text(wanted)
    return python


def versions_of(setup: Setup, peer: str) -> dict[str, str]:
    frozen = subprocess.run(
        [python_of(setup, peer), "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    kept = {name.partition("[")[0].partition("==")[0] for name in PEERS[peer]}
    kept |= {"onnxruntime", "transformers", "optimum-onnx", "fastapi", "uvicorn", "starlette"}
    return {p["name"]: p["version"] for p in json.loads(frozen) if p["name"].lower() in kept}


# Load


@dataclass(frozen=True)
class Phase:
    """What came of one phase of load: a row a request, columns by name."""

    seconds: float
    cpu_share: float
    """Of one core, that the generator took."""
    columns: Mapping[str, np.ndarray]

    @property
    def statuses(self) -> dict[str, int]:
        counts = Counter(int(status) for status in self.columns["status"])
        return {str(status) if status else "no answer": n for status, n in sorted(counts.items())}

    def answered(self) -> Mapping[str, np.ndarray]:
        kept = self.columns["status"] == 200
        return {name: column[kept] for name, column in self.columns.items()}


def load(
    setup: Setup,
    port: int,
    bodies: Sequence[str],
    phases: Sequence[Mapping[str, float]],
    *,
    connections: int = 1024,
    headers: Mapping[str, str] | None = None,
) -> list[Phase]:
    plan = {
        "port": port,
        "path": "/embed",
        "bodies": bodies,
        "headers": headers or {},
        "connections": connections,
        "phases": phases,
    }
    done = subprocess.run(
        [sys.executable, PROGRAMS / "generator.py"],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        preexec_fn=pinned(setup.generator_cores),
    )
    if done.returncode:
        raise SystemExit(f"the load generator failed:\n{done.stderr}")
    found: list[Phase] = []
    for phase in json.loads(done.stdout):
        table = np.array(phase["rows"], dtype=float).reshape(-1, len(phase["columns"]))
        columns = {name: table[:, index] for index, name in enumerate(phase["columns"])}
        found.append(Phase(phase["seconds"], phase["cpu_share"], columns))
    return found


def body(texts: str | Sequence[str]) -> str:
    return json.dumps({"inputs": texts})


def single_texts(setup: Setup) -> list[str]:
    return [body(text) for text in setup.texts]


def chunks(setup: Setup) -> list[str]:
    whole = len(setup.texts) // BATCH * BATCH
    return [body(setup.texts[at : at + BATCH]) for at in range(0, whole, BATCH)]


def embeddings(port: int, texts: Sequence[str]) -> np.ndarray:
    """The vectors of ``texts``, asked for one by one."""
    vectors: list[Any] = []
    for text in texts:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/embed",
            body(text).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            vectors += json.load(answer)["embeddings"]
    return np.array(vectors)


# Numbers


def percentiles(samples: np.ndarray) -> dict[str, float]:
    if not len(samples):
        return {}
    return {name: round(float(np.percentile(samples, at)), 3) for name, at in PERCENTILES.items()}


def pack(samples: np.ndarray) -> str:
    """Milliseconds as compact text: steps of 10 us, 32 bit little-endian, zlib, base64."""
    return base64.b64encode(
        zlib.compress(np.round(samples * 100).astype("<u4").tobytes(), 9)
    ).decode()


def unpack(text: str) -> np.ndarray:
    """The milliseconds of ``pack``."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4") / 100


def cosines(found: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    scale = np.linalg.norm(found, axis=1) * np.linalg.norm(reference, axis=1)
    each = (found * reference).sum(axis=1) / scale
    return {"texts": len(each), "min": float(each.min()), "mean": float(each.mean())}


def batch_counts(port: int) -> Counter[int]:
    """How many runs had so many rows so far, by the server's own counters."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    found = re.findall(r'^attnserve_batches_total{.*rows="(\d+)".*} (\S+)$', text, re.MULTILINE)
    return Counter({int(rows): int(float(count)) for rows, count in found})


def operators_of(port: int) -> dict[str, Any] | None:
    """What our service says of the operators that it runs the model in; None of another server."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/stats.json", timeout=30) as answer:
            return json.load(answer)["models"][0]["card"]["operators"]
    except urllib.error.HTTPError:
        return None


def histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(rows): count for rows, count in sorted(counts.items())}


def per_text(answers: Mapping[str, np.ndarray], texts: int = 1) -> dict[str, float]:
    """What a text costs on average, by the answers' headers."""
    return {
        "tokens": float(answers["tokens"].mean() / texts),
        "macs": float(answers["macs"].mean() / texts),
        "padding_waste": float(answers["padding_waste"].mean()),
    }


def family_rss(process: psutil.Process) -> int:
    """Resident bytes of a server and the processes that it started."""
    total = 0
    for each in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += each.memory_info().rss
    return total


# Sections


def bare(setup: Setup, *graph: Path) -> Lines:
    return Lines(setup, sys.executable, PROGRAMS / "bare.py", setup.model, setup.threads, *graph)


def exact(setup: Setup) -> tuple[Path, dict[str, Any]]:
    """The graph that our service runs, and how it compares with the original."""
    path = setup.cache / "exact.onnx"
    lines = Lines(
        setup, sys.executable, PROGRAMS / "exact.py", setup.model, setup.threads, path
    )  # fmt: skip
    found = lines.read()
    lines.close()
    return path, found


def latency(setup: Setup) -> dict[str, Any]:
    """Pairs: the same text by HTTP and by bare runs, in turns of 50."""
    turn = 50
    texts = setup.texts[: turn * 12]
    graph, compared = exact(setup)
    sessions = {"bare": bare(setup), "bare, as served": bare(setup, graph)}
    handler, threads = "sync", setup.threads
    with (
        ours(setup) as (port, _),
        plain(setup, handler, threads) as (plain_port, _),
    ):
        for warm in (port, plain_port):
            load(setup, warm, single_texts(setup), [{"concurrency": 1, "requests": turn}])
        for lines in sessions.values():
            lines.ask(texts[:turn])
        samples: dict[str, list[float]] = {name: [] for name in (*sessions, "ours", "plain")}
        split: dict[str, list[float]] = {"queue_ms": [], "tokenize_ms": [], "compute_ms": []}
        for at in range(0, len(texts), turn):
            some = texts[at : at + turn]
            plan = [{"concurrency": 1, "requests": turn}]
            for name, lines in sessions.items():
                samples[name] += lines.ask(some)["run_ms"]
            for name, where in (("ours", port), ("plain", plain_port)):
                (phase,) = load(setup, where, [body(text) for text in some], plan)
                samples[name] += list(phase.columns["latency_ms"])
                if name == "ours":
                    for key, values in split.items():
                        values += list(phase.columns[key])
    for lines in sessions.values():
        lines.close()
    arrays = {name: np.array(values) for name, values in samples.items()}
    added = {
        "ours": arrays["ours"] - arrays["bare, as served"],
        "plain": arrays["plain"] - arrays["bare"],
        "ours, over the file itself": arrays["ours"] - arrays["bare"],
    }
    p50 = float(np.median(added["ours"]))
    console.print(f"added at one text: {p50:.2f} ms (plain: {np.median(added['plain']):.2f} ms)")
    return {
        "texts": len(texts),
        "operators": compared,
        "bare_run_ms": {name: percentiles(arrays[name]) for name in sessions},
        "latency_ms": {name: percentiles(arrays[name]) for name in ("ours", "plain")},
        "added_ms": {name: percentiles(values) for name, values in added.items()},
        "headers_p50_ms": {name: float(np.median(values)) for name, values in split.items()},
        "holds": {"added p50 <= 1.5 ms": p50 <= 1.5},
        "samples_ms": {name: pack(values) for name, values in arrays.items()},
    }


def throughput(setup: Setup) -> dict[str, Any]:
    """Texts a second at saturation: everyone's best setting, in rotated rounds."""
    choices = {"plain": tune_plain(setup), "litserve": tune_litserve(setup)}
    best = {name: max(tried, key=lambda one: one["texts_per_s"]) for name, tried in choices.items()}
    folder = sentence_transformers_folder(setup)
    lines = bare(setup)
    reference = np.array(lines.ask(setup.texts[:BATCH])["vectors"])
    lines.close()
    graph, compared = exact(setup)
    details: dict[str, Any] = {}

    def over_http(
        name: str, start: Any, bodies: Sequence[str], in_flight: int, texts: int
    ) -> float:
        with start as (port, process):
            _, phase = load(
                setup,
                port,
                bodies,
                [
                    {"concurrency": in_flight, "seconds": 2},
                    {"concurrency": in_flight, "seconds": setup.seconds},
                ],
            )
            done = phase.answered()
            # The last answers come after the sending: their time counts as well.
            last = float((done["due_s"] + done["latency_ms"] / 1e3).max())
            details[name] = {
                "statuses": phase.statuses,
                "latency_ms": percentiles(done["latency_ms"]),
                "generator_cpu_share": round(phase.cpu_share, 3),
                "rss_bytes": family_rss(process),
                "operators": operators_of(port),
                "cosine_to_bare_session": cosines(embeddings(port, setup.texts[:BATCH]), reference),
            }
            if done["compute_ms"].any():
                details[name] |= {key: percentiles(done[key]) for key in ("queue_ms", "compute_ms")}
                details[name]["batches"] = histogram(batch_counts(port))
                details[name]["per_text"] = per_text(done, texts)
            return len(done["due_s"]) * texts / last

    def encode(name: str, batch: int | None) -> float:
        program = PROGRAMS / "peer_sentence_transformers.py"
        lines = Lines(
            setup, python_of(setup, "sentence-transformers"), program, folder, setup.threads
        )
        lines.read()
        texts = list(setup.texts)
        lines.ask({"texts": texts, "seconds": 2, "batch": batch})
        found = lines.ask({"texts": texts, "seconds": setup.seconds, "batch": batch})
        details[name] = {"cosine_to_bare_session": cosines(np.array(found["vectors"]), reference)}
        lines.close()
        return found["texts"] / found["seconds"]

    def session(name: str, batch: int, *graph: Path) -> float:
        lines = bare(setup, *graph)
        asked = {"texts": setup.texts, "batch": batch}
        lines.ask({**asked, "seconds": 1})
        found = lines.ask({**asked, "seconds": setup.seconds})
        lines.close()
        return found["texts_per_s"]

    single, chunked = single_texts(setup), chunks(setup)
    systems: dict[str, Callable[[str], float]] = {
        "attnserve": lambda name: over_http(name, ours(setup), single, IN_FLIGHT, 1),
        "plain": lambda name: over_http(
            name,
            plain(setup, best["plain"]["handler"], best["plain"]["threads"]),
            single,
            IN_FLIGHT,
            1,
        ),
        "litserve": lambda name: over_http(
            name,
            litserve(setup, best["litserve"]["batch"], best["litserve"]["timeout_s"]),
            single,
            IN_FLIGHT,
            1,
        ),
        f"attnserve, {BATCH} texts a request": lambda name: over_http(
            name, ours(setup), chunked, 4, BATCH
        ),
        "sentence-transformers": lambda name: encode(name, BATCH),
        "sentence-transformers, one call": lambda name: encode(name, None),
        "attnserve --no-rewrite": lambda name: over_http(
            name, ours(setup, "--no-rewrite"), single, IN_FLIGHT, 1
        ),
        # No server: what batches, and what operators, could gain here.
        "bare session, one by one": lambda name: session(name, 1),
        "bare session, 8 of like length": lambda name: session(name, 8),
        "bare session as served, one by one": lambda name: session(name, 1, graph),
        "bare session as served, 8 of like length": lambda name: session(name, 8, graph),
        "bare session as served, 16 of like length": lambda name: session(name, 16, graph),
    }
    order = list(systems)
    rates: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(setup.rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            rates[name].append(systems[name](name))
            console.print(f"round {turn + 1}: {name}: {rates[name][-1]:.1f} texts/s")
    against = {
        "plain": "attnserve",
        "litserve": "attnserve",
        "sentence-transformers": f"attnserve, {BATCH} texts a request",
    }
    ratios = {
        peer: [a / b for a, b in zip(rates[mine], rates[peer], strict=True)]
        for peer, mine in against.items()
    }
    medians = {peer: statistics.median(values) for peer, values in ratios.items()}
    for peer, ratio in medians.items():
        console.print(f"{ratio:.2f} x {peer} (to hold: {BOUNDS[peer]})")
    return {
        "in_flight": IN_FLIGHT,
        "seconds": setup.seconds,
        "settings": {
            "attnserve": f"--threads {setup.threads}, all else as it comes",
            **{name: {"chosen": best[name], "tried": choices[name]} for name in choices},
            "sentence-transformers": f"encode() in batches of {BATCH}, in the texts' order",
        },
        "texts_per_s": rates,
        "median_texts_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "ratios": ratios,
        "median_ratio": medians,
        "operators": compared,
        "bare_over_one_by_one": {
            name: statistics.median(
                many / one
                for one, many in zip(rates["bare session, one by one"], found, strict=True)
            )
            for name, found in rates.items()
            if name.startswith("bare")
        },
        "compared": against,
        "last_round": details,
        "versions": {peer: versions_of(setup, peer) for peer in PEERS},
        "holds": {f">= {BOUNDS[peer]} x {peer}": medians[peer] >= BOUNDS[peer] for peer in medians},
    }


def tune_plain(setup: Setup) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for handler in ("sync", "async"):
        for threads in sorted({1, setup.threads}):
            with plain(setup, handler, threads) as (port, _):
                rate = short_rate(setup, port)
            found.append({"handler": handler, "threads": threads, "texts_per_s": rate})
            console.print(f"tried plain: {found[-1]}")
    return found


def tune_litserve(setup: Setup) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for batch in (4, 8, 16, 32, 64):
        with litserve(setup, batch, 0.005) as (port, _):
            rate = short_rate(setup, port)
        found.append({"batch": batch, "timeout_s": 0.005, "texts_per_s": rate})
        console.print(f"tried litserve: {found[-1]}")
    return found


def short_rate(setup: Setup, port: int) -> float:
    half = {"concurrency": IN_FLIGHT, "seconds": setup.seconds / 2}
    _, phase = load(setup, port, single_texts(setup), [{**half, "seconds": 1.5}, half])
    done = phase.answered()
    return len(done["due_s"]) / float((done["due_s"] + done["latency_ms"] / 1e3).max())


def sentence_transformers_folder(setup: Setup) -> Path:
    """The encoder as its authors saved it, with the graph that all others run."""
    folder = setup.cache / "minilm-sentence-transformers"
    if not folder.is_dir():
        shutil.copytree(minilm(), folder)
        (folder / "onnx").mkdir()
    shutil.copyfile(setup.model / "model.onnx", folder / "onnx" / "model.onnx")
    return folder


def overload(setup: Setup) -> dict[str, Any]:
    """Half the capacity, then twice the capacity, then half again."""
    bodies = single_texts(setup)
    headers = {"x-timeout-ms": str(setup.deadline_ms)}
    with ours(setup) as (port, process):
        capacity = short_rate(setup, port)
        idle = batch_counts(port)
        before, over, after = load(
            setup,
            port,
            bodies,
            [
                {"rate": capacity / 2, "seconds": 10},
                {"rate": 2 * capacity, "seconds": setup.overload_s},
                {"rate": capacity / 2, "seconds": 10},
            ],
            connections=8192,
            headers=headers,
        )
        batches = batch_counts(port) - idle
        healthy = embeddings(port, setup.texts[:1]).shape[0] == 1
        rss = family_rss(process)
    accepted = over.answered()
    # Well again: from then on every request is answered, as fast as nearly all were before.
    usual = float(np.percentile(before.answered()["latency_ms"], 99))
    unwell = (after.columns["status"] != 200) | (after.columns["latency_ms"] > 2 * usual)
    recovery = _recovery(after.columns["due_s"], unwell)
    counts = over.statuses
    p99 = percentiles(accepted["latency_ms"])["p99"]
    console.print(
        f"capacity {capacity:.0f}/s, offered {len(over.columns['due_s']) / over.seconds:.0f}/s: "
        f"{counts}, p99 {p99:.0f} ms, well again after {recovery:.2f} s"
    )
    return {
        "capacity_per_s": capacity,
        "deadline_ms": setup.deadline_ms,
        "phases": {
            name: {
                "seconds": round(phase.seconds, 2),
                "offered_per_s": round(len(phase.columns["due_s"]) / phase.seconds, 1),
                "achieved_per_s": round(len(phase.answered()["due_s"]) / phase.seconds, 1),
                "statuses": phase.statuses,
                "latency_ms": percentiles(phase.answered()["latency_ms"]),
                "refused_after_ms": {
                    str(status): percentiles(
                        phase.columns["latency_ms"][phase.columns["status"] == status]
                    )
                    for status in (429, 504)
                },
                "queue_ms": percentiles(phase.answered()["queue_ms"]),
                "tokenize_ms": percentiles(phase.answered()["tokenize_ms"]),
                "compute_ms": percentiles(phase.answered()["compute_ms"]),
                "sent_late_ms": percentiles(phase.columns["late_ms"]),
                "generator_cpu_share": round(phase.cpu_share, 3),
            }
            for name, phase in (("before", before), ("overload", over), ("after", after))
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


def _recovery(due_s: np.ndarray, unwell: np.ndarray) -> float:
    """When the last request was due that belongs to the aftermath.

    One slow request long after a stretch of good ones is noise, which the phase before had too
    (a hundredth of it): the aftermath ends with the first second in which nearly all are well.
    """
    order = np.argsort(due_s)
    due, bad = due_s[order], unwell[order]
    for start in np.concatenate([[0.0], due[bad]]):
        window = (due > start) & (due <= start + 1)
        if window.any() and bad[window].mean() <= 0.02:
            return float(start)
    return float("inf")


def memory(setup: Setup) -> dict[str, Any]:
    """Resident bytes of the server over many requests of random lengths."""
    random = np.random.default_rng(0)
    words = " ".join(setup.texts).split()
    bodies: list[str] = []
    for _ in range(5000):
        # Mostly as short as texts are; one in a hundred is long.
        count = int(random.integers(100, 250) if random.random() < 0.01 else random.integers(1, 30))
        start = int(random.integers(0, len(words) - count))
        bodies.append(body(" ".join(words[start : start + count])))
    first = min(2000, setup.requests // 10)
    series: list[tuple[float, int]] = []
    stop = threading.Event()
    with ours(setup) as (port, process):
        loaded = family_rss(process)

        def watch() -> None:
            started = time.monotonic()
            while not stop.wait(2):
                series.append((round(time.monotonic() - started, 1), family_rss(process)))

        load(setup, port, bodies, [{"concurrency": 32, "requests": first}])
        before = family_rss(process)
        watcher = threading.Thread(target=watch)
        watcher.start()
        (phase,) = load(
            setup, port, bodies, [{"concurrency": 32, "requests": setup.requests - first}]
        )
        stop.set()
        watcher.join()
        after = family_rss(process)
    growth = after / before - 1
    console.print(f"{before / 2**20:.0f} MiB, then {after / 2**20:.0f} MiB: {growth:+.1%}")
    return {
        "requests": setup.requests,
        "in_flight": 32,
        "rss_loaded_bytes": loaded,
        "rss_before_bytes": before,
        "rss_before_means": f"after the first {first} requests",
        "rss_after_bytes": after,
        "growth": growth,
        "statuses": phase.statuses,
        "latency_ms": percentiles(phase.answered()["latency_ms"]),
        "rss_series": series,
        "holds": {"memory grows less than 5 %": growth < 0.05},
    }


def workers(setup: Setup) -> dict[str, Any]:
    """kill -9 of one of two workers under load."""
    with ours(setup, "--workers", "2") as (port, process):
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
        (phase,) = load(
            setup, port, single_texts(setup), [{"rate": rate, "seconds": 20}], connections=64
        )
        killer.join()
    lost = phase.statuses.get("no answer", 0)
    console.print(f"{phase.statuses}, replaced after {replaced}")
    return {
        "offered_per_s": rate,
        "statuses": phase.statuses,
        "connections": 64,
        "latency_ms": percentiles(phase.answered()["latency_ms"]),
        "replaced_after_s": replaced,
        "holds": {
            "nothing but connection errors": phase.statuses.keys() <= {"200", "no answer"},
            "the others go on": lost < 64,
            "the worker is replaced": bool(replaced),
        },
    }


def worker_processes(supervisor: psutil.Process) -> list[psutil.Process]:
    """The children that serve: those that have the model in memory."""
    found: list[psutil.Process] = []
    for child in supervisor.children(recursive=True):
        with suppress(psutil.Error):
            if child.memory_info().rss > 64 * 2**20:
                found.append(child)
    return found


SECTIONS: Mapping[str, Callable[[Setup], dict[str, Any]]] = {
    "latency": latency,
    "throughput": throughput,
    "overload": overload,
    "memory": memory,
    "workers": workers,
}


if __name__ == "__main__":
    sys.exit(main())
