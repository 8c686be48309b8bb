"""Metrics of the service: Prometheus series, the v2 statistics, and the last minute by second.

One registry holds all series of a process. Several workers use the multiprocess mode of
prometheus_client: the parent sets PROMETHEUS_MULTIPROC_DIR in their environment, every worker maps
its series to files in that folder and reads the files of all workers. The exact v2 statistics are
counters of the same registry.
"""

from __future__ import annotations

import struct
from collections import Counter as Tally
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import time
from typing import Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from service.cost import AnswerCost

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
OF_MODEL = ("model", "version")
WORK = ("rows", "tokens", "macs")

HISTOGRAMS: Mapping[str, tuple[str, Sequence[str], Sequence[float]]] = {
    "request_seconds": (
        "Time of inference requests, from the last byte of the body to the answer.",
        OF_MODEL,
        SECONDS,
    ),
    "stage_seconds": (
        "Time of inference requests by stage: queue, tokenize or compute.",
        (*OF_MODEL, "stage"),
        SECONDS,
    ),
    "request_tokens": ("Tokens of inference requests, without padding.", OF_MODEL, TOKENS),
    "batch_rows": ("Rows of a batch.", OF_MODEL, ROWS),
    "batch_tokens": ("Tokens of a batch, with padding.", OF_MODEL, TOKENS),
}
"""(text, labels, buckets) of each histogram."""

COUNTERS: Mapping[str, tuple[str, Sequence[str]]] = {
    "padding_tokens": ("Padding tokens of batches.", OF_MODEL),
    "macs": (
        "Multiply-accumulates at the shapes that ran, for graphs that can be counted.",
        OF_MODEL,
    ),
    "rejects": ("Failed inference requests by reason.", (*OF_MODEL, "reason")),
    "out_of_calibration": (
        "Rows outside of the calibration data, by reason: length or tokens.",
        (*OF_MODEL, "reason"),
    ),
    "shadow_rows": (
        "Rows taken for a comparison with the original: compared, failed, skipped, or sent to"
        " worker 0.",
        (*OF_MODEL, "result"),
    ),
    "inferences": ("Requests by result (v2 statistics).", (*OF_MODEL, "what")),
    "inference_ns": ("Time of requests by stage (v2 statistics).", (*OF_MODEL, "what")),
    "batches": ("Batches by number of rows (v2 statistics).", (*OF_MODEL, "rows")),
    "batch_ns": (
        "Time of batches by rows and stage (v2 statistics).",
        (*OF_MODEL, "rows", "what"),
    ),
}
"""(text, labels) of each counter of a version."""

GAUGES: Mapping[str, str] = {
    "last_inference_timestamp_seconds": "End of the last batch; 0 before the first.",
    "gpu_memory_peak_bytes": (
        "Peak memory in use on the GPU, by all its processes, sampled at answers of this version,"
        " at most once a second; absent before the first answer."
    ),
}
"""The text of each gauge of a version."""

UNREADABLE = (OSError, RuntimeError, ValueError, struct.error)
"""Exceptions of prometheus_client for a damaged file."""

WINDOW_S = 60
"""Seconds covered by the window of /stats.json."""

Version = tuple[str, str]
"""(model, version)."""

Series = dict[str, dict[tuple[str, ...], float]]
"""Values of one version, by the name of the series, then by its labels except model and version."""


class StageNanoseconds(NamedTuple):
    """The time of a request by stage of the v2 protocol."""

    queue: int
    compute_input: int
    compute_infer: int
    compute_output: int


STAGES = StageNanoseconds._fields


class VersionState(NamedTuple):
    """State of one loaded version.

    Attributes:
        model, version: The names of the model and the version.
        waiting: Rows that wait for a batch.
        in_flight: Requests that wait or run.
        ready: Whether the version can run.
        runtime, precision: The runtimes and data types of the version; see ``Model``.
    """

    model: str
    version: str
    waiting: int
    in_flight: int
    ready: bool
    runtime: str
    precision: str


class Metrics(Collector):
    """The series of one application, in its own registry.

    Args:
        folder: PROMETHEUS_MULTIPROC_DIR of several workers; None for a single process.

    Attributes:
        requests: The answered requests by route and status.
        histograms, counters, gauges: The series of versions, by name without namespace.
        shadow_rows: The counter of this name.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self.registry = CollectorRegistry()
        self._models: dict[Version, ModelMetrics] = {}
        counter = partial(Counter, namespace="attnserve", registry=self.registry)
        histogram = partial(Histogram, namespace="attnserve", registry=self.registry)
        gauge = partial(  # of several workers, the highest value
            Gauge, namespace="attnserve", registry=self.registry, multiprocess_mode="max"
        )
        # The order of the series in /metrics.
        self.requests = counter("requests", "Requests answered.", ("route", "status"))
        self.histograms = {
            name: histogram(name, text, labels, buckets=buckets)
            for name, (text, labels, buckets) in HISTOGRAMS.items()
        }
        self.counters = {
            name: counter(name, text, labels) for name, (text, labels) in COUNTERS.items()
        }
        self.gauges = {name: gauge(name, text, OF_MODEL) for name, text in GAUGES.items()}
        self.shadow_rows = self.counters["shadow_rows"]

    def series(self, model: str, version: str) -> ModelMetrics:
        """The series of one version; a reloaded version continues its series."""
        of = (model, version)
        if of not in self._models:
            self._models[of] = ModelMetrics(self, of)
        return self._models[of]

    def statistics(self) -> dict[Version, Series]:
        """The exact series of each version; reading them takes milliseconds per version."""
        exact = (*self.counters.values(), *self.gauges.values())
        families = (
            (family for series in exact for family in series.collect())
            if self._folder is None
            else _merged(self._folder, "counter_*.db", "gauge_*.db")
        )
        series_by_version: dict[Version, Series] = {}
        for family in families:
            for sample in family.samples:
                if sample.name.endswith("_created") or "model" not in sample.labels:
                    continue
                labels = dict(sample.labels)
                model_version = labels.pop("model"), labels.pop("version")
                key = tuple(labels[label] for label in sorted(labels))  # merged files: any order
                name = sample.name.removeprefix("attnserve_").removesuffix("_total")
                series_by_version.setdefault(model_version, {}).setdefault(name, {})[key] = (
                    sample.value
                )
        return series_by_version

    def seconds(self) -> dict[Version, dict[int, Second]]:
        """The recent seconds of each version in this process."""
        return {of: dict(model.seconds) for of, model in list(self._models.items())}

    def collect(self) -> Iterable[Metric]:
        """The series of all workers."""
        return self.registry.collect() if self._folder is None else _merged(self._folder, "*.db")


def _merged(folder: Path, *patterns: str) -> Iterator[Metric]:
    """The series of all workers, including exited workers."""
    # A worker creates its file empty and sets the size afterwards.
    files = [
        str(path) for pattern in patterns for path in folder.glob(pattern) if path.stat().st_size
    ]
    try:
        return iter(MultiProcessCollector.merge(files))
    except UNREADABLE:
        return iter(MultiProcessCollector.merge([path for path in files if _is_readable(path)]))


def _is_readable(path: str) -> bool:
    """Whether a file is complete; a full disk or a killed worker leaves incomplete files."""
    try:
        MultiProcessCollector.merge([path])
    except UNREADABLE:
        return False
    return True


@dataclass
class Second:
    """Totals of one second of one version."""

    second: int
    latencies_ms: list[float] = field(default_factory=list)
    totals: Tally[str] = field(default_factory=Tally)
    """Rows, tokens, padded_tokens and macs."""
    batch_rows: Tally[int] = field(default_factory=Tally)
    rejects: Tally[str] = field(default_factory=Tally)

    def add(self, other: Second) -> None:
        """Add the totals of another second, or of the same second in another worker."""
        self.latencies_ms += other.latencies_ms
        self.totals.update(other.totals)
        self.batch_rows.update(other.batch_rows)
        self.rejects.update(other.rejects)


class ModelMetrics:
    """The series of one model version, and its totals by second over the last minute."""

    def __init__(self, metrics: Metrics, of: Version) -> None:
        self._metrics, self._of = metrics, of
        # A lookup by labels takes 1 us, and an answer needs twenty: look them up once.
        histograms, counters = metrics.histograms, metrics.counters
        self._latency = histograms["request_seconds"].labels(*of)
        self._queue, self._tokenize, self._compute = (
            histograms["stage_seconds"].labels(*of, stage)
            for stage in ("queue", "tokenize", "compute")
        )
        self._lengths = histograms["request_tokens"].labels(*of)
        self._batch_rows = histograms["batch_rows"].labels(*of)
        self._batch_tokens = histograms["batch_tokens"].labels(*of)
        self._macs = counters["macs"].labels(*of)
        self._padding = counters["padding_tokens"].labels(*of)
        self._counts = {
            outcome: counters["inferences"].labels(*of, outcome) for outcome in ("success", "fail")
        }
        self._ns = {
            outcome: counters["inference_ns"].labels(*of, outcome)
            for outcome in ("success", "fail", *STAGES)
        }
        self._last_inference = metrics.gauges["last_inference_timestamp_seconds"].labels(*of)
        self._gpu_peak = 0
        self.seconds: dict[int, Second] = {}
        """The recorded seconds of the last minute in this process, oldest first."""

    def record_run(
        self, rows: int, tokens: int, padded_tokens: int, macs: int | None, stage_ns: Sequence[int]
    ) -> None:
        """Record one batch.

        Args:
            macs: Multiply-accumulates with padding; None if the graph cannot be counted.
            stage_ns: Nanoseconds before, in and after the session.
        """
        label = str(rows)
        self._batch_rows.observe(rows)
        self._batch_tokens.observe(padded_tokens)
        self._padding.inc(padded_tokens - tokens)
        counters = self._metrics.counters
        counters["batches"].labels(*self._of, label).inc()
        for stage, ns in zip(STAGES[1:], stage_ns, strict=True):
            counters["batch_ns"].labels(*self._of, label, stage).inc(ns)
        self._last_inference.set(time())
        self._macs.inc(macs or 0)
        second = self._current_second()
        second.totals.update(rows=rows, tokens=tokens, padded_tokens=padded_tokens, macs=macs or 0)
        second.batch_rows[rows] += 1

    def record_success(self, ns: int, stages: StageNanoseconds) -> None:
        """Record an answered request: nanoseconds in total and by stage."""
        self._counts["success"].inc()
        self._ns["success"].inc(ns)
        for stage, spent in zip(STAGES, stages, strict=True):
            self._ns[stage].inc(spent)

    def record_failure(self, ns: int, reason: str) -> None:
        self._counts["fail"].inc()
        self._ns["fail"].inc(ns)
        self._metrics.counters["rejects"].labels(*self._of, reason).inc()
        self._current_second().rejects[reason] += 1

    def record_outside(self, reason: str) -> None:
        """Record a row outside of the calibration data."""
        self._metrics.counters["out_of_calibration"].labels(*self._of, reason).inc()

    def record_request(self, cost: AnswerCost) -> None:
        """Record the cost of one inference answer, with the values of its headers."""
        self._latency.observe(cost.total_ms / 1e3)
        self._queue.observe(cost.queue_ms / 1e3)
        self._tokenize.observe(cost.tokenize_ms / 1e3)
        self._compute.observe(cost.compute_ms / 1e3)
        self._lengths.observe(cost.tokens)
        if (used := cost.gpu_bytes or 0) > self._gpu_peak:
            self._gpu_peak = used
            gauge = self._metrics.gauges["gpu_memory_peak_bytes"]
            gauge.labels(*self._of).set(used)  # creates the series at first
        self._current_second().latencies_ms.append(cost.total_ms)

    def statistics(self, series: Series) -> dict[str, Any]:
        """Exact statistics, as the v2 protocol defines them, from ``Metrics.statistics``."""
        counts, spent = series["inferences"], series["inference_ns"]
        success = int(counts["success",])

        def duration(count: float, ns: float) -> dict[str, int]:
            return {"count": int(count), "ns": int(ns)}

        sizes = {int(rows): int(count) for (rows,), count in series.get("batches", {}).items()}
        # Another worker may have counted a batch, but not yet its time.
        size_ns = Tally(series.get("batch_ns", {}))
        return {
            "name": self._of[0],
            "version": self._of[1],
            "last_inference": round(series["last_inference_timestamp_seconds"][()] * 1e3),
            "inference_count": sum(rows * count for rows, count in sizes.items()),
            "execution_count": sum(sizes.values()),
            "inference_stats": {
                "success": duration(success, spent["success",]),
                "fail": duration(counts["fail",], spent["fail",]),
                **{stage: duration(success, spent[stage,]) for stage in STAGES},
                "cache_hit": duration(0, 0),
                "cache_miss": duration(0, 0),
            },
            "batch_stats": [
                {"batch_size": rows}
                | {stage: duration(count, size_ns[str(rows), stage]) for stage in STAGES[1:]}
                for rows, count in sorted(sizes.items())
            ],
        }

    def window(self, recorded: Mapping[int, Second], delay_s: int) -> dict[str, Any]:
        """The last minute by second, oldest first, without the current second.

        Args:
            recorded: The totals of this version, by second.
            delay_s: The age in seconds of the newest second.

        Returns:
            The JSON of each second, and of the minute. Percentiles are exact milliseconds or null.
        """
        end = int(time()) - delay_s
        seconds = [recorded.get(number) or Second(number) for number in range(end - WINDOW_S, end)]
        total = Second(end)
        for second in seconds:
            total.add(second)
        tokens, padded_tokens = total.totals["tokens"], total.totals["padded_tokens"]
        return {
            "seconds": [
                {
                    "at": second.second,
                    **_percentiles(second.latencies_ms),
                    "requests": len(second.latencies_ms),
                    **{quantity: second.totals[quantity] for quantity in WORK},
                    "rejects": second.rejects.total(),
                }
                for second in seconds
            ],
            **_percentiles(total.latencies_ms),
            "requests_per_second": len(total.latencies_ms) / WINDOW_S,
            **{f"{quantity}_per_second": total.totals[quantity] / WINDOW_S for quantity in WORK},
            "padding_waste": 1 - tokens / padded_tokens if padded_tokens else 0.0,
            "batch_rows": {str(size): runs for size, runs in sorted(total.batch_rows.items())},
            "rejects": dict(sorted(total.rejects.items())),
        }

    def _current_second(self) -> Second:
        second = int(time())
        if second not in self.seconds:
            self.seconds[second] = Second(second)
            for old in [at for at in self.seconds if at < second - WINDOW_S - 1]:
                del self.seconds[old]
        return self.seconds[second]


def _percentiles(values: list[float]) -> dict[str, float | None]:
    names = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99}
    if not values:
        return dict.fromkeys(names)
    quantiles = np.percentile(values, list(names.values()))
    return {name: round(float(value), 3) for name, value in zip(names, quantiles, strict=True)}
