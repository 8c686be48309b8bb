"""What every answer cost: measured once, told in headers, in v2 parameters and to Prometheus.

All series of a process are made here, in one registry. The exact v2 statistics are counters like
the others: what the routes report is read back from the registry, or from the files that hold the
series of all workers (``share_series``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import Counter as Tally
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from time import time
from typing import Any

import numpy as np
import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Metric,
    generate_latest,
    values,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.engine.answer import Answer
from service.engine.batcher import Batch

__all__ = [
    "WINDOW_S",
    "Metrics",
    "ModelMetrics",
    "as_headers",
    "cost_of",
    "gpu_bytes",
    "rss_bytes",
    "share_series",
]

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
STAGES = ("queue", "compute_input", "compute_infer", "compute_output")
PAGE_BYTES = mmap.PAGESIZE
WINDOW_S = 60
"""How far back /stats.json looks."""


def cost_of(answer: Answer, total_ms: float, provider: str) -> dict[str, int | float]:
    """What ``answer`` cost, by the names of v2 parameters, which are those of the headers.

    ``macs`` and ``flops`` are left out where the graph cannot be counted, ``gpu_bytes`` without a
    GPU. Memory is that of now: of the whole process, and of the whole device.
    """
    cost: dict[str, int | float] = {
        "queue_ms": round(answer.queue_ms, 3),
        "tokenize_ms": round(answer.tokenize_ms, 3),
        "compute_ms": round(answer.compute_ms, 3),
        "total_ms": round(total_ms, 3),
        "tokens": answer.tokens,
        "padding_waste": round(answer.padding_waste, 4),
    }
    if answer.macs is not None:
        cost |= {"macs": answer.macs, "flops": 2 * answer.macs}
    cost["rss_bytes"] = rss_bytes()
    if provider == "cuda" and (used := gpu_bytes()) is not None:
        cost["gpu_bytes"] = used
    return cost


def as_headers(cost: Mapping[str, int | float]) -> dict[str, str]:
    """``{"queue_ms": 0.1}`` as ``{"x-queue-ms": "0.1"}``."""
    return {f"x-{key.replace('_', '-')}": str(value) for key, value in cost.items()}


def rss_bytes() -> int:
    """Resident memory of this process."""
    file = _statm()
    if file is None:
        return psutil.Process().memory_info().rss
    # Asked with every answer: a file that stays open takes 2 us, psutil 50.
    return int(os.pread(file, 64, 0).split()[1]) * PAGE_BYTES


def gpu_bytes() -> int | None:
    """Memory in use on the GPU that serves, by all its processes; None where there is none to ask.

    It is the first that CUDA_VISIBLE_DEVICES names, by its place or by its id.
    """
    nvml = _nvml()
    if nvml is None:
        return None
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0].strip()
    if named and not named.isdecimal():
        failed = nvml.nvmlDeviceGetHandleByUUID(named.encode(), ctypes.byref(device))
    else:
        failed = nvml.nvmlDeviceGetHandleByIndex_v2(int(named or 0), ctypes.byref(device))
    if failed or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)):
        return None
    return memory[2]


def share_series(folder: Path, worker: int) -> None:
    """Keep the series that this process makes from here on in ``folder``, as those of ``worker``.

    They are mapped into memory: they outlive a worker that is killed, and the one that takes its
    number counts on from there.
    """
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(folder)
    values.ValueClass = values.MultiProcessValue(lambda: worker)  # type: ignore[assignment]


class Metrics:
    """The series of one application, in a registry of their own.

    Args:
        folder: Where the series of all workers are (``share_series``); None for those of this
            process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.registry = CollectorRegistry()
        self._models: dict[tuple[str, str], ModelMetrics] = {}
        self._requests = self._counter("requests", "Requests answered.", "route", "status")
        of_model = ("model", "version")
        self.latency = self._histogram(
            "request_seconds",
            "Inference requests, from the last byte of the body to the answer.",
            SECONDS,
            *of_model,
        )
        self.stages = self._histogram(
            "stage_seconds",
            "Where the time of inference requests went: queue, tokenize or compute.",
            SECONDS,
            *of_model,
            "stage",
        )
        self.lengths = self._histogram(
            "request_tokens",
            "Tokens of inference requests, padding not counted.",
            TOKENS,
            *of_model,
        )
        self.batch_rows = self._histogram("batch_rows", "Rows of a run.", ROWS, *of_model)
        self.batch_tokens = self._histogram(
            "batch_tokens", "Tokens of a run, padding included.", TOKENS, *of_model
        )
        self.padding = self._counter(
            "padding_tokens", "Tokens of runs that were padding.", *of_model
        )
        self.macs = self._counter(
            "macs",
            "Multiply-accumulates at the true shapes, where the graph can be counted.",
            *of_model,
        )
        self.rejects = self._counter(
            "rejects", "Inference requests without an answer, by reason.", *of_model, "reason"
        )
        self.counts = self._counter(
            "inferences", "Requests, rows and runs: the v2 statistics.", *of_model, "what"
        )
        self.nanoseconds = self._counter(
            "inference_ns", "Time of requests by stage: the v2 statistics.", *of_model, "what"
        )
        self.sizes = self._counter(
            "batches", "Runs by their number of rows: the v2 statistics.", *of_model, "rows"
        )
        self.size_ns = self._counter(
            "batch_ns", "Time of runs by rows and stage.", *of_model, "rows", "what"
        )
        self.last_inference = Gauge(
            "attnserve_last_inference_timestamp_seconds",
            "When the last run ended; 0 where there was none.",
            of_model,
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.gpu_peak = Gauge(
            "attnserve_gpu_memory_peak_bytes",
            "Most memory in use on the GPU, by all its processes, as an answer of this version was"
            " ready; none before there was one.",
            of_model,
            registry=self.registry,
            multiprocess_mode="max",
        )
        self.watch: Callable[[], list[tuple[str, str, int, int, bool]]] = list
        """(model, version, rows waiting, requests in flight, ready) of what is loaded."""
        self.rss: Callable[[], int] = rss_bytes
        """Resident memory of all processes that serve."""
        self.workers: Callable[[], int] | None = None
        """How many processes serve; None where it is but one."""
        self.delay_s = 0
        """How old the last second of a window is."""
        self.seconds: Callable[[tuple[str, str], int, int], dict[int, Second]] = self._seconds
        """What a version did from one second to before another, in all processes."""
        if folder is None:
            self._told = self.registry
        else:
            self._told = CollectorRegistry()
            self._told.register(_Files(folder))
        self._told.register(_Now(self))

    def of(self, model: str, version: str) -> ModelMetrics:
        """The series of one version; they go on where it is loaded again."""
        key = (model, version)
        if key not in self._models:
            self._models[key] = ModelMetrics(self, model, version)
        return self._models[key]

    def request(self, route: str, status: int) -> None:
        """Count an answer of any kind."""
        self._requests.labels(route, status).inc()

    def render(self) -> bytes:
        """All series, in Prometheus' text format."""
        return generate_latest(self._told)

    def statistics(self, model: str, version: str) -> dict[str, dict[tuple[str, ...], float]]:
        """The exact series of one version, of v2 and more: name -> further labels -> value."""
        read: dict[str, dict[tuple[str, ...], float]] = {}
        ours = (
            self.counts, self.nanoseconds, self.sizes, self.size_ns, self.last_inference,
            self.gpu_peak,
        )  # fmt: skip
        families = (
            (family for series in ours for family in series.collect())
            if self._folder is None
            else _merged(self._folder, "counter_*.db", "gauge_*.db")
        )
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                labels = dict(sample.labels)
                if (labels.pop("model", None), labels.pop("version", None)) != (model, version):
                    continue
                key = tuple(labels[label] for label in sorted(labels))  # files keep no other order
                name = sample.name.removeprefix("attnserve_").removesuffix("_total")
                read.setdefault(name, {})[key] = sample.value
        return read

    def did(self, second: int) -> list[tuple[str, str, Second]]:
        """What each version did in one second, in this process; those that did nothing are left
        out."""
        return [
            (*of, did)
            for of, model in list(self._models.items())
            if (did := model.did(second)) is not None
        ]

    def _seconds(self, of: tuple[str, str], first: int, end: int) -> dict[int, Second]:
        model = self._models[of]
        return {at: did for at in range(first, end) if (did := model.did(at)) is not None}

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"attnserve_{name}", text, labels, registry=self.registry)

    def _histogram(
        self, name: str, text: str, buckets: tuple[float, ...], *labels: str
    ) -> Histogram:
        return Histogram(f"attnserve_{name}", text, labels, buckets=buckets, registry=self.registry)


def _merged(folder: Path, *patterns: str) -> Iterator[Metric]:
    """The series of all workers, alive or dead."""
    # A file is empty for the moment until it has its first size.
    files = [
        str(path) for pattern in patterns for path in folder.glob(pattern) if path.stat().st_size
    ]
    return iter(MultiProcessCollector.merge(files))


class _Files(Collector):
    """The series of all workers, from where they keep them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def collect(self) -> Iterator[Metric]:
        return _merged(self._folder, "*.db")


class _Now(Collector):
    """What is true at the moment it is asked for."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        of_model = ("model", "version")
        queue = GaugeMetricFamily(
            "attnserve_queue_rows", "Rows that wait for a run.", labels=of_model
        )
        in_flight = GaugeMetricFamily(
            "attnserve_in_flight", "Requests that wait or run.", labels=of_model
        )
        runs = GaugeMetricFamily(
            "attnserve_model_ready", "1 where the model runs.", labels=of_model
        )
        for model, version, waiting, flying, ready in self._metrics.watch():
            queue.add_metric((model, version), waiting)
            in_flight.add_metric((model, version), flying)
            runs.add_metric((model, version), ready)
        yield from (queue, in_flight, runs)
        yield GaugeMetricFamily(
            "process_resident_memory_bytes", "Of all that serve.", value=self._metrics.rss()
        )
        if (used := gpu_bytes()) is not None:
            yield GaugeMetricFamily(
                "attnserve_gpu_memory_bytes", "Memory in use on the GPU that serves.", value=used
            )
        if self._metrics.workers is not None:
            yield GaugeMetricFamily(
                "attnserve_workers", "Processes that serve.", value=self._metrics.workers()
            )


@dataclass
class Second:
    """What happened in one second."""

    second: int
    latencies_ms: list[float] = field(default_factory=list)
    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    macs: int = 0
    batch_rows: Tally[int] = field(default_factory=Tally)
    rejects: Tally[str] = field(default_factory=Tally)

    def add(self, told: Mapping[str, Any]) -> None:
        """Add what another worker did in this second, as it wrote it down."""
        self.latencies_ms += told["latencies_ms"]
        for what in ("rows", "tokens", "padded_tokens", "macs"):
            setattr(self, what, getattr(self, what) + told[what])
        self.batch_rows.update({int(rows): runs for rows, runs in told["batch_rows"].items()})
        self.rejects.update(told["rejects"])


class ModelMetrics:
    """The series of one version of a model, and what it did in the last minute."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        self._metrics, self._of = metrics, (model, version)
        of = self._of
        # A look-up by labels costs a microsecond, and there are twenty an answer: once is enough.
        self._latency = metrics.latency.labels(*of)
        self._stages = {
            stage: metrics.stages.labels(*of, stage) for stage in ("queue", "tokenize", "compute")
        }
        self._lengths = metrics.lengths.labels(*of)
        self._macs = metrics.macs.labels(*of)
        self._batch_rows = metrics.batch_rows.labels(*of)
        self._batch_tokens = metrics.batch_tokens.labels(*of)
        self._padding = metrics.padding.labels(*of)
        self._counts = {
            what: metrics.counts.labels(*of, what) for what in ("success", "fail", "rows", "runs")
        }
        self._ns = {
            what: metrics.nanoseconds.labels(*of, what) for what in ("success", "fail", *STAGES)
        }
        self._last_inference = metrics.last_inference.labels(*of)
        self._gpu_peak = 0
        self._seconds: deque[Second] = deque()

    def ran(self, batch: Batch) -> None:
        """Record a run."""
        ran, rows = batch.result, str(batch.rows)
        padding = batch.padded_tokens - batch.tokens
        self._batch_rows.observe(batch.rows)
        self._batch_tokens.observe(batch.padded_tokens)
        self._padding.inc(padding)
        self._counts["rows"].inc(batch.rows)
        self._counts["runs"].inc()
        self._metrics.sizes.labels(*self._of, rows).inc()
        for what, ns in zip(STAGES[1:], (ran.input_ns, ran.infer_ns, ran.output_ns), strict=True):
            self._metrics.size_ns.labels(*self._of, rows, what).inc(ns)
        self._last_inference.set(time())
        now = self._now()
        now.rows += batch.rows
        now.tokens += batch.tokens
        now.padded_tokens += batch.padded_tokens
        now.batch_rows[batch.rows] += 1
        if ran.macs is not None:
            self._macs.inc(ran.macs)
            now.macs += ran.macs

    def succeeded(self, ns: int, stages: Mapping[str, int]) -> None:
        """Record a request that was answered: nanoseconds in all, and by stage."""
        self._counts["success"].inc()
        self._ns["success"].inc(ns)
        for stage, spent in stages.items():
            self._ns[stage].inc(spent)

    def failed(self, ns: int, reason: str) -> None:
        """Record a request that was not answered."""
        self._counts["fail"].inc()
        self._ns["fail"].inc(ns)
        self._metrics.rejects.labels(*self._of, reason).inc()
        self._now().rejects[reason] += 1

    def told(self, cost: Mapping[str, int | float]) -> None:
        """Record what one inference answer cost, as its client is told."""
        self._latency.observe(cost["total_ms"] / 1e3)
        for stage, series in self._stages.items():
            series.observe(cost[f"{stage}_ms"] / 1e3)
        self._lengths.observe(cost["tokens"])
        if (used := int(cost.get("gpu_bytes", 0))) > self._gpu_peak:
            self._gpu_peak = used
            self._metrics.gpu_peak.labels(*self._of).set(used)  # is there from the first time on
        self._now().latencies_ms.append(cost["total_ms"])

    def statistics(self) -> dict[str, Any]:
        """Exact statistics, in the shape of the v2 protocol."""
        metrics, of = self._metrics, self._of
        read = metrics.statistics(*of)
        counts, spent = read["inferences"], read["inference_ns"]
        success = int(counts["success",])

        def told(count: float, what: str) -> dict[str, int]:
            return {"count": int(count), "ns": int(spent[what,])}

        sizes, size_ns = read.get("batches", {}), read.get("batch_ns", {})
        return {
            "name": of[0],
            "version": of[1],
            "last_inference": round(read["last_inference_timestamp_seconds"][()] * 1e3),
            "inference_count": int(counts["rows",]),
            "execution_count": int(counts["runs",]),
            "inference_stats": {
                "success": told(success, "success"),
                "fail": told(counts["fail",], "fail"),
                **{stage: told(success, stage) for stage in STAGES},
                "cache_hit": {"count": 0, "ns": 0},
                "cache_miss": {"count": 0, "ns": 0},
            },
            "batch_stats": [
                {
                    "batch_size": int(rows),
                    # Another worker counts a run just before it counts its time.
                    **{
                        what: {"count": int(count), "ns": int(size_ns.get((rows, what), 0))}
                        for what in STAGES[1:]
                    },
                }
                for (rows,), count in sorted(sizes.items(), key=lambda item: int(item[0][0]))
            ],
        }

    @property
    def gpu_peak_bytes(self) -> int | None:
        """Most memory in use on the GPU, by all its processes, as an answer was ready; None where
        no GPU told of any."""
        peak = self._metrics.statistics(*self._of).get("gpu_memory_peak_bytes")
        return None if peak is None else int(peak[()])

    def did(self, second: int) -> Second | None:
        """What happened in one of the last seconds, in this process; None for nothing."""
        return next((one for one in list(self._seconds) if one.second == second), None)

    def window(self) -> dict[str, Any]:
        """The last minute, by second, oldest first; the second that still runs is left out.

        Percentiles are exact, null where nothing was answered.
        """
        end = int(time()) - self._metrics.delay_s
        known = self._metrics.seconds(self._of, end - WINDOW_S, end)
        seconds = [known.get(at) or Second(at) for at in range(end - WINDOW_S, end)]
        every = [ms for second in seconds for ms in second.latencies_ms]
        tokens = sum(second.tokens for second in seconds)
        padded = sum(second.padded_tokens for second in seconds)
        rows, rejects = Tally[int](), Tally[str]()
        for second in seconds:
            rows.update(second.batch_rows)
            rejects.update(second.rejects)
        return {
            "seconds": [
                {
                    "at": second.second,
                    **_percentiles(second.latencies_ms),
                    "requests": len(second.latencies_ms),
                    "rows": second.rows,
                    "tokens": second.tokens,
                    "macs": second.macs,
                    "rejects": second.rejects.total(),
                }
                for second in seconds
            ],
            **_percentiles(every),
            "requests_per_second": len(every) / WINDOW_S,
            "rows_per_second": sum(second.rows for second in seconds) / WINDOW_S,
            "tokens_per_second": tokens / WINDOW_S,
            "macs_per_second": sum(second.macs for second in seconds) / WINDOW_S,
            "padding_waste": 1 - tokens / padded if padded else 0.0,
            "batch_rows": {str(size): rows[size] for size in sorted(rows)},
            "rejects": dict(sorted(rejects.items())),
        }

    def _now(self) -> Second:
        second = int(time())
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(Second(second))
            while self._seconds[0].second < second - WINDOW_S:
                self._seconds.popleft()
        return self._seconds[-1]


def _percentiles(values: list[float]) -> dict[str, float | None]:
    names = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}
    if not values:
        return dict.fromkeys(names)
    found = np.percentile(values, list(names.values()))
    return {name: round(float(value), 3) for name, value in zip(names, found, strict=True)}


@cache
def _statm() -> int | None:
    """Where Linux tells of the memory of this process, in pages; None elsewhere."""
    try:
        return os.open("/proc/self/statm", os.O_RDONLY)
    except OSError:
        return None


@cache
def _nvml() -> Any:
    """NVIDIA's management library, which comes with the driver; None without one."""
    for name in ("libnvidia-ml.so.1", "nvml.dll"):
        try:
            nvml = ctypes.CDLL(name)
        except OSError:
            continue
        return nvml if nvml.nvmlInit_v2() == 0 else None
    return None
