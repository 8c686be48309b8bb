"""Send load to a server, read its counters, and summarize the samples."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import psutil

from benchmarks.serving.peers import PROGRAMS, Setup, pinned

PERCENTILES = {"p50": 50, "p90": 90, "p99": 99, "p99.9": 99.9, "max": 100}


@dataclass(frozen=True)
class Phase:
    """The result of one phase of load.

    Attributes:
        cpu_share: Share of one core that the load generator used.
        columns: One entry per request, by the names of ``generator.py``.
    """

    seconds: float
    cpu_share: float
    columns: Mapping[str, np.ndarray]

    @property
    def statuses(self) -> dict[str, int]:
        counts = Counter(int(status) for status in self.columns["status"])
        return {str(status) if status else "no answer": n for status, n in sorted(counts.items())}

    @cached_property
    def answered(self) -> Mapping[str, np.ndarray]:
        """The columns of the requests with status 200."""
        kept = self.columns["status"] == 200
        return {name: column[kept] for name, column in self.columns.items()}

    @property
    def answers_per_s(self) -> float:
        """Answers per second until the last answer, which arrives after the sending ended."""
        answered = self.answered
        last = float((answered["due_s"] + answered["latency_ms"] / 1e3).max())
        return len(answered["due_s"]) / last


def send_load(
    setup: Setup,
    port: int,
    bodies: Sequence[str],
    *phases: Mapping[str, float],
    connections: int = 1024,
    headers: Mapping[str, str] | None = None,
) -> list[Phase]:
    """Run the load generator on its own core."""
    plan = {
        "port": port,
        "path": "/embed",
        "bodies": bodies,
        "headers": headers or {},
        "connections": connections,
        "phases": phases,
    }
    generator = subprocess.run(
        [sys.executable, PROGRAMS / "generator.py"],
        input=json.dumps(plan),
        capture_output=True,
        text=True,
        preexec_fn=pinned(setup.generator_cores),
    )
    if generator.returncode:
        raise SystemExit(f"the load generator failed:\n{generator.stderr}")
    results: list[Phase] = []
    for phase in json.loads(generator.stdout):
        table = np.array(phase["rows"], dtype=float).reshape(-1, len(phase["columns"]))
        columns = {name: table[:, index] for index, name in enumerate(phase["columns"])}
        results.append(Phase(phase["seconds"], phase["cpu_share"], columns))
    return results


def body(texts: str | Sequence[str]) -> str:
    """The body of a request of ``/embed``."""
    return json.dumps({"inputs": texts, "truncate": True})


def _get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=30) as response:
        return response.read().decode()


def embeddings(port: int, texts: Sequence[str]) -> np.ndarray:
    """Return the vectors of ``texts``, one request per text."""
    vectors: list[Any] = []
    for text in texts:
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/embed",
            body(text).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as response:
            answer = json.load(response)
            vectors += answer["embeddings"] if isinstance(answer, dict) else answer
    return np.array(vectors)


def batch_counts(port: int) -> Counter[int]:
    """Return the number of runs by number of rows, from the metrics of attnserve."""
    pattern = r'^attnserve_batches_total{.*rows="(\d+)".*} (\S+)$'
    rows = re.findall(pattern, _get(port, "/metrics"), re.MULTILINE)
    return Counter({int(size): int(float(count)) for size, count in rows})


def operators_of(port: int) -> dict[str, Any] | None:
    """Return the operators in the model card of attnserve; None for another server."""
    try:
        return json.loads(_get(port, "/stats.json"))["models"][0]["card"]["operators"]
    except urllib.error.HTTPError:
        return None


def family_rss(process: psutil.Process) -> int:
    """Return the resident bytes of a server and its child processes."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            total += member.memory_info().rss
    return total


def percentiles(samples: np.ndarray) -> dict[str, float]:
    if not len(samples):
        return {}
    return {name: round(float(np.percentile(samples, at)), 3) for name, at in PERCENTILES.items()}


def pack(samples: np.ndarray) -> str:
    """Encode milliseconds as text: steps of 10 us, 32 bit little-endian, zlib, base64."""
    steps = np.round(samples * 100).astype("<u4").tobytes()
    return base64.b64encode(zlib.compress(steps, 9)).decode()


def unpack(text: str) -> np.ndarray:
    """Decode the milliseconds of ``pack``."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), "<u4") / 100


def cosines(vectors: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    scale = np.linalg.norm(vectors, axis=1) * np.linalg.norm(reference, axis=1)
    cosine = (vectors * reference).sum(axis=1) / scale
    return {"texts": len(cosine), "min": float(cosine.min()), "mean": float(cosine.mean())}


def histogram(counts: Counter[int]) -> dict[str, int]:
    return {str(rows): count for rows, count in sorted(counts.items())}
