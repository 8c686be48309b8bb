"""Prometheus series of the present state of a repository."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from attnserve.runtime.memory_use import gpu_bytes
from attnserve.serving.live_quality import LiveReport
from service.engine.repository import Repository
from service.metrics import OF_MODEL

__all__ = ["PresentState"]

QUALITY: Mapping[str, tuple[str, Callable[[LiveReport], float | None]]] = {
    "value": (
        "Quality against the original on the last compared rows.",
        lambda report: report.value,
    ),
    "lower": ("Lower end of its 95 % interval.", lambda report: report.ci95 and report.ci95[0]),
    "upper": ("Upper end of its 95 % interval.", lambda report: report.ci95 and report.ci95[1]),
    "promise": ("Quality that the artifact guarantees.", lambda report: report.guaranteed),
    "rows": ("Number of rows of the estimate.", lambda report: report.rows),
    "broken": ("1 if the quality guarantee is violated, else 0.", lambda report: report.is_broken),
}
"""The text of each quality series, and its value; None for a report without it."""


class PresentState(Collector):
    """The series of all workers that a scrape reads from the repository."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    def collect(self) -> Iterator[Metric]:
        """Yield the series of the queues, the memory and the quality."""
        gauges = [
            GaugeMetricFamily(f"attnserve_{name}", text, labels=OF_MODEL)
            for name, text in (
                ("queue_rows", "Rows waiting for a batch."),
                ("in_flight", "Requests waiting or running."),
                ("model_ready", "1 if the model can run."),
            )
        ]
        info = InfoMetricFamily(
            "attnserve_model", "The runtime and precision of a model.", labels=OF_MODEL
        )
        for state in self._repository.states():
            of = (state.model, state.version)
            for gauge, value in zip(
                gauges, (state.waiting, state.in_flight, state.ready), strict=True
            ):
                gauge.add_metric(of, value)
            info.add_metric(of, {"runtime": state.runtime, "precision": state.precision})
        yield from gauges
        yield info
        yield from self._quality()
        yield GaugeMetricFamily(
            "process_resident_memory_bytes",
            "Resident memory of all serving processes.",
            value=self._repository.rss_bytes(),
        )
        if (bytes_in_use := gpu_bytes()) is not None:
            yield GaugeMetricFamily(
                "attnserve_gpu_memory_bytes",
                "Memory in use on the serving GPU.",
                value=bytes_in_use,
            )
        configured, serving = self._repository.workers
        if configured > 1:
            yield GaugeMetricFamily("attnserve_workers", "Serving worker processes.", value=serving)

    def _quality(self) -> Iterator[Metric]:
        reports = self._repository.shadow.reports()
        for name, (text, value_of) in QUALITY.items():
            gauge = GaugeMetricFamily(
                f"attnserve_quality_{name}", text, labels=(*OF_MODEL, "measure")
            )
            for of, report in reports.items():
                value = value_of(report)
                if value is not None:
                    gauge.add_metric((*of, report.measure), value)
            yield gauge
