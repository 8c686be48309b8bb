"""What every answer cost: measured once, told in headers, in v2 parameters and to Prometheus."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import psutil
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from service.engine import Answer, Engine

__all__ = ["Metrics", "as_headers", "cost_of", "gpu_bytes", "rss_bytes"]

SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
TOKENS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def cost_of(engine: Engine, answer: Answer, total_ms: float) -> dict[str, int | float]:
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
    }
    if answer.macs is not None:
        cost |= {"macs": answer.macs, "flops": 2 * answer.macs}
    cost["rss_bytes"] = rss_bytes()
    if engine.settings.provider == "cuda" and (used := gpu_bytes()) is not None:
        cost["gpu_bytes"] = used
    return cost


def as_headers(cost: Mapping[str, int | float]) -> dict[str, str]:
    """``{"queue_ms": 0.1}`` as ``{"x-queue-ms": "0.1"}``."""
    return {f"x-{key.replace('_', '-')}": str(value) for key, value in cost.items()}


def rss_bytes() -> int:
    """Resident memory of this process."""
    return _process().memory_info().rss


def gpu_bytes() -> int | None:
    """Memory in use on the first GPU, by all its processes; None where there is none to ask."""
    nvml = _nvml()
    device, memory = ctypes.c_void_p(), (ctypes.c_ulonglong * 3)()  # total, free, used
    if (
        nvml is None
        or nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0
        or nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0
    ):
        return None
    return memory[2]


class Metrics:
    """The series of one application, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "attnserve_requests", "Requests answered.", ["route", "status"], registry=self.registry
        )
        self._latency = Histogram(
            "attnserve_request_seconds",
            "Inference requests, from the last byte of the body to the answer.",
            ["model"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._stages = Histogram(
            "attnserve_stage_seconds",
            "Where the time of inference requests went: queue, tokenize or compute.",
            ["model", "stage"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self._lengths = Histogram(
            "attnserve_request_tokens",
            "Tokens of inference requests, padding not counted.",
            ["model"],
            buckets=TOKENS,
            registry=self.registry,
        )
        self._macs = Counter(
            "attnserve_macs",
            "Multiply-accumulates at the true shapes, where the graph can be counted.",
            ["model"],
            registry=self.registry,
        )
        self._in_flight = Gauge(
            "attnserve_in_flight", "Requests that wait or run.", ["model"], registry=self.registry
        )
        rss = Gauge("process_resident_memory_bytes", "Resident memory.", registry=self.registry)
        rss.set_function(rss_bytes)

    def watch(self, engine: Engine) -> None:
        """Report the requests in flight of ``engine`` from now on."""
        self._in_flight.labels(engine.name).set_function(lambda: engine.in_flight)

    def request(self, route: str, status: int) -> None:
        """Count an answer of any kind."""
        self._requests.labels(route, status).inc()

    def inference(self, model: str, cost: Mapping[str, int | float]) -> None:
        """Record what one inference answer cost."""
        self._latency.labels(model).observe(cost["total_ms"] / 1e3)
        for stage in ("queue", "tokenize", "compute"):
            self._stages.labels(model, stage).observe(cost[f"{stage}_ms"] / 1e3)
        self._lengths.labels(model).observe(cost["tokens"])
        self._macs.labels(model).inc(cost.get("macs", 0))

    def render(self) -> bytes:
        """All series, in Prometheus' text format."""
        return generate_latest(self.registry)


@cache
def _process() -> psutil.Process:
    return psutil.Process()


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
