"""Compress, compare, benchmark and serve one real encoder in a few minutes: `make demo`.

Exports all-MiniLM-L6-v2, compresses it by hand (R = 128) and with two searches (float32 and int8),
compares the outputs on text that calibration did not use, measures the latency, prints one table,
and serves the fastest model for one request. The exit code is 0 only if every step succeeded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import attnserve
from attnserve.checks.benchmark import BenchReport
from attnserve.planning.optimize import ModelCost, OptimizeReport
from benchmarks._common import free_port, is_ready, minilm, number_table
from graph_passes.errors import AttnserveError, CheckFailed

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "build" / "demo"
TEXT = Path(__file__).parent / "calibration.txt"
REPORT_ROWS = 16
SEQUENCE = 128
LENGTHS = (32, 128, 512)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "--collab-dk 128": ("collaborative", {"collab_dk": 128}),
    "--keep 0.99": ("searched", {"keep": 0.99}),
    "--int8": ("int8", {"precision": "int8"}),
}
"""Options of each model: its folder and arguments."""

LEAST_COSINE = 0.95
"""Minimum cosine on the unseen text; the demo fails below it."""

PAIR = (
    "A man is playing a guitar.",
    "Someone plays an instrument.",
    "The stock market fell today.",
)

Update = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Row:
    """One model of the final table."""

    name: str
    model: Path
    cost: ModelCost
    cosine: float


def main() -> int:
    console = Console(highlight=False)
    started = time.perf_counter()
    try:
        run(FOLDER, console)
    except AttnserveError as error:
        Console(stderr=True).print(f"error: {error.what}\n  {error.fix}", markup=False)
        return error.exit_code
    console.print(f"done in {time.perf_counter() - started:.0f} s")
    return 0


def run(folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    calibration, unseen, report_text = split_text(folder)
    original = folder / "original"
    with step("export all-MiniLM-L6-v2"):
        attnserve.export(minilm(), original, force=True)
        blocks = attnserve.inspect(original).to_json()
        if len(blocks["attention"]) != 6 or blocks["missed"]:
            raise CheckFailed("inspect did not certify all 6 attention blocks", "report this")
    reports: dict[str, OptimizeReport] = {}
    for name, (output, options) in VARIANTS.items():
        with step(f"optimize {name}") as progress:
            reports[name] = attnserve.optimize(
                original, folder / output, **options, calib=calibration,
                sequence=SEQUENCE, threads=1, force=True, progress=progress,
            )  # fmt: skip
    before = next(iter(reports.values())).record.before
    rows = [Row("original", original, before, 1.0)]
    with step("compare on unseen text") as progress:
        for name, report in reports.items():
            comparison = attnserve.verify(original, report.output, data=unseen, progress=progress)
            cost, cosine = report.record.after, comparison.mean_cosine
            rows.append(Row(name, report.output.parent, cost, cosine))
    with step("measure latency, one thread") as progress:
        bench = attnserve.bench(
            [row.model for row in rows], sequences=LENGTHS, threads=1, rounds=12, progress=progress
        )
    with step("write a report on the attention layers") as progress:
        attnserve.analyze(
            original, folder / "analysis", calib=report_text, force=True, progress=progress
        )
    best = fastest(rows, bench)
    with step("serve the fastest model, send one request"):
        answer = ask(best.model)
    console.print(summary(rows, bench, unseen))
    for warning in dict.fromkeys(w for report in reports.values() for w in report.record.warnings):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    show_answer(console, best, answer)
    page = folder / "analysis" / "report.html"
    console.print(f"report: {_relative(page)}", markup=False, soft_wrap=True)
    command = f"attnserve serve {_relative(best.model)}"
    line = f"dashboard: http://127.0.0.1:8000/ after `{command}`"
    console.print(line, markup=False, soft_wrap=True)
    if low := [row.name for row in rows if row.cosine < LEAST_COSINE]:
        raise CheckFailed(f"{', '.join(low)}: cosine below {LEAST_COSINE}", "report this")


def split_text(folder: Path) -> tuple[Path, Path, Path]:
    """Write the calibration text, the unseen text (every third line) and a short text."""
    lines = [line for line in TEXT.read_text(encoding="utf-8").splitlines() if line.strip()]
    calibration = [line for number, line in enumerate(lines) if number % 3]
    parts = {
        "calibration.txt": calibration,
        "unseen.txt": lines[::3],
        "report.txt": calibration[:REPORT_ROWS],
    }
    for name, part in parts.items():
        (folder / name).write_text("\n".join(part) + "\n", encoding="utf-8")
    calibration_file, unseen_file, report_file = (folder / name for name in parts)
    return calibration_file, unseen_file, report_file


@contextmanager
def step(title: str) -> Generator[Update]:
    """Show the stages of a step on stderr while it runs, and its time when it is done."""
    console = Console(stderr=True, highlight=False)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
    )  # fmt: skip
    started = time.perf_counter()
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=None)

        def update(stage: str, done: int, total: int) -> None:
            bars.update(task, description=f"{title}: {stage}", completed=done, total=total)

        yield update
    console.print(f"{time.perf_counter() - started:5.0f} s  {title}", markup=False)


def fastest(rows: Sequence[Row], bench: BenchReport) -> Row:
    """The model with the largest speed-up at ``SEQUENCE`` tokens."""
    speedups = [r.speedup_vs_first for r in bench.results if r.sequence == SEQUENCE]
    return rows[int(np.argmax(speedups))]


def summary(rows: Sequence[Row], bench: BenchReport, unseen: Path) -> Table:
    """One table with a row per model."""
    table = number_table(
        f"all-MiniLM-L6-v2: speed-up at {', '.join(map(str, LENGTHS))} tokens",
        ("params", "weights", "MACs", *map(str, LENGTHS), "cosine"),
        caption=f"one CPU thread; MACs at {SEQUENCE} tokens; mean cosine of the outputs on"
        f" {unseen.name}",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.columns[0].header, table.columns[0].no_wrap = "model", True
    for index, row in enumerate(rows):
        measured = {r.sequence: r for r in bench.results[index :: len(rows)]}
        table.add_row(
            row.name,
            f"{row.cost.parameters / 1e6:.2f} M",
            f"{row.cost.bytes / 2**20:.0f} MiB",
            "-" if row.cost.macs is None else f"{row.cost.macs / 1e9:.2f} G",
            *(f"{measured[length].speedup_vs_first:.2f}x" for length in LENGTHS),
            f"{row.cosine:.4f}",
        )
    return table


def show_answer(console: Console, row: Row, answer: dict[str, Any]) -> None:
    """Print the similarities of the sentences, and the costs that the server reports."""
    first, same, other = (np.array(vector) for vector in answer["embeddings"])
    headers = answer["headers"]
    console.print(f'served {row.name}; cosine to "{PAIR[0]}":', markup=False)
    console.print(f'  {first @ same:.3f}  "{PAIR[1]}"\n  {first @ other:.3f}  "{PAIR[2]}"')
    console.print(
        f"  {headers['x-tokens']} tokens, {float(headers['x-compute-ms']):.1f} ms compute, "
        f"{int(headers['x-flops']) / 1e9:.2f} GFLOPs, {int(headers['x-rss-bytes']) / 2**20:.0f} MiB"
    )
    if not first @ same > first @ other:
        raise CheckFailed("the served model ranks the unrelated sentence first", "report this")


def ask(model: Path) -> dict[str, Any]:
    """Start `attnserve serve`, send one request, and stop the server."""
    port = free_port()
    command = [sys.executable, "-m", "attnserve", "serve", str(model), "--port", str(port)]
    service = subprocess.Popen([*command, "--quiet"])
    url = f"http://127.0.0.1:{port}"
    try:
        if not is_ready(f"{url}/v2/health/ready", service, 60):
            raise CheckFailed(
                "the service did not become ready", "run `attnserve serve` to see why"
            )
        content = json.dumps({"inputs": PAIR}).encode()
        request = urllib.request.Request(f"{url}/texts/embed", content)
        with urllib.request.urlopen(request, timeout=60) as response:
            return {**json.load(response), "headers": dict(response.headers.items())}
    finally:
        service.terminate()
        try:
            service.wait(timeout=10)
        except subprocess.TimeoutExpired:
            service.kill()


def _relative(path: Path) -> Path:
    """The path relative to the current folder, if it is inside."""
    with suppress(ValueError):
        return path.relative_to(Path.cwd())
    return path


if __name__ == "__main__":
    sys.exit(main())
