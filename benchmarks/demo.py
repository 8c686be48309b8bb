"""The whole story on one real encoder, in minutes: `make demo`.

Exports all-MiniLM-L6-v2, rewrites it into collaborative heads at two sizes, proves both on text the
fit did not see, measures them side by side, serves the smaller one over HTTP, asks it a question,
and prints one table. The exit code is 0 only if every step held.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import Measurement
from attnserve.checks.inspect import Inspection
from attnserve.planning.optimize import OptimizeReport
from benchmarks.fidelity import minilm
from graph_passes.errors import AttnserveError, CheckFailed

CALIBRATION = Path(__file__).parent / "calibration.txt"
RANKS = (192, 128)
LENGTHS = (32, 128, 512)
LEAST_COSINE = {192: 0.97, 128: 0.95}
"""Of the token outputs on sentences the fit did not see; below it the demo fails."""
PAIR = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell today.",
)


def main() -> int:
    console = Console(highlight=False)
    started = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory(prefix="attnserve-demo-") as folder:
            run(Path(folder), console)
    except AttnserveError as error:
        Console(stderr=True).print(f"error: {error.what}\n  {error.fix}", markup=False)
        return error.exit_code
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0


def run(folder: Path, console: Console) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=False) as bars:

        def step(text: str) -> Any:
            task = bars.add_task(text, total=None)

            def update(done: int, total: int) -> None:
                bars.update(task, completed=done, total=total)

            return update

        original = folder / "minilm"
        done = step("export all-MiniLM-L6-v2")
        attnserve.export(minilm(), original)
        inspection = attnserve.inspect(original)
        if len(inspection.reading.certified) != 6:
            raise CheckFailed("inspect did not certify all 6 layers", "report this")
        done(1, 1)
        paths, reports = [original], dict[int, OptimizeReport]()
        for rank in RANKS:
            update = step(f"optimize at R = {rank}, calibrated")
            paths.append(folder / f"minilm-r{rank}")
            reports[rank] = attnserve.optimize(
                original, paths[-1], collab_dk=rank, calib=CALIBRATION, sequence=128,
                min_cosine=LEAST_COSINE[rank],
                progress=lambda what, done, total, update=update: update(done, total),
            )  # fmt: skip
            update(1, 1)
        update = step(f"measure at {', '.join(map(str, LENGTHS))} tokens")
        bench = attnserve.bench(
            paths,
            batches=[1],
            sequences=LENGTHS,
            threads=1,
            progress=lambda what, done, total: update(done, total),
        )
        done = step("serve, and ask over HTTP")
        answer = ask(paths[-1])
        done(1, 1)
    console.print(summary(inspection, reports, bench.results, answer))
    show_answer(console, answer)


def summary(
    inspection: Inspection,
    reports: dict[int, OptimizeReport],
    results: tuple[Measurement, ...],
    answer: dict[str, Any],
) -> Table:
    """One table: a column a model, a row a question."""
    first = reports[RANKS[0]].before
    table = Table(title="all-MiniLM-L6-v2, one CPU thread")
    table.add_column("")
    table.add_column("original", justify="right")
    for rank in RANKS:
        table.add_column(f"collaborative R = {rank}", justify="right")
    certified = len(inspection.reading.certified)
    table.add_row(
        "attention layers",
        f"{certified} certified",
        *(f"{len({step.block for step in r.steps})} rewritten" for r in reports.values()),
    )
    table.add_row(
        "parameters",
        f"{first.parameters / 1e6:.2f} M",
        *(f"{r.after.parameters / 1e6:.2f} M" for r in reports.values()),
    )
    table.add_row(
        "MACs at 128 tokens", _giga(first.macs), *(_giga(r.after.macs) for r in reports.values())
    )
    for length in LENGTHS:
        at = [r for r in results if r.sequence == length]
        table.add_row(
            f"latency at {length} tokens", f"{at[0].p50_ms:.1f} ms",
            *(f"{r.p50_ms:.1f} ms, {r.speedup_vs_first:.2f}x" for r in at[1:]),
        )  # fmt: skip
    table.add_row(
        "fewer MACs up to",
        "",
        *(f"{(r.break_even_sequence or 0) - 1} tokens" for r in reports.values()),
    )
    table.add_row(
        "mean cosine, held-out text",
        "1",
        *(f"{r.fidelity.mean_cosine:.4f}" for r in reports.values()),
    )
    return table


def show_answer(console: Console, answer: dict[str, Any]) -> None:
    a, b, c = (np.array(vector) for vector in answer["embeddings"])
    headers = answer["headers"]
    console.print(f'served R = {RANKS[-1]}: "{PAIR[0]}"')
    console.print(f'  {a @ b:.3f}  "{PAIR[1]}"\n  {a @ c:.3f}  "{PAIR[2]}"')
    console.print(
        f"  {headers['x-tokens']} tokens, {float(headers['x-compute-ms']):.1f} ms compute, "
        f"{int(headers['x-flops']) / 1e9:.2f} GFLOPs, {int(headers['x-rss-bytes']) / 2**20:.0f} MiB"
    )
    if not a @ b > a @ c:
        raise CheckFailed("the served model finds the wrong sentence closer", "report this")


def ask(model: Path) -> dict[str, Any]:
    """Start `attnserve serve`, send one real request, stop it."""
    port = _free_port()
    command = [sys.executable, "-m", "attnserve", "serve", str(model), "--port", str(port)]
    service = subprocess.Popen([*command, "--quiet"])
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_until_ready(f"{url}/v2/health/ready", service)
        request = urllib.request.Request(f"{url}/embed", json.dumps({"inputs": PAIR}).encode())
        with urllib.request.urlopen(request, timeout=60) as response:
            return {**json.load(response), "headers": dict(response.headers.items())}
    finally:
        service.terminate()
        try:
            service.wait(timeout=10)
        except subprocess.TimeoutExpired:
            service.kill()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(url: str, service: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and service.poll() is None:
        with suppress(OSError), urllib.request.urlopen(url, timeout=5):
            return
        time.sleep(0.1)
    raise CheckFailed("the service did not become ready", "run `attnserve serve` to see why")


def _giga(macs: int | None) -> str:
    return "-" if macs is None else f"{macs / 1e9:.3f} G"


if __name__ == "__main__":
    sys.exit(main())
