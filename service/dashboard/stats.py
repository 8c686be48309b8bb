"""The body of GET /stats.json: the last minute, memory, and a description of each model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from service.engine.engine import Engine
from service.engine.repository import Repository
from service.metrics import Second, Series, VersionState


def report(repository: Repository) -> dict[str, Any]:
    """The body of GET /stats.json. Milliseconds, bytes, multiply-accumulates."""
    metrics = repository.metrics
    states = {state[:2]: state for state in metrics.watch()}
    series = metrics.statistics()
    seconds = metrics.seconds()
    quality = metrics.quality()
    loaded = [(engine, (engine.name, engine.version)) for engine in repository.engines()]
    return {
        "ready": repository.ready,
        "memory": {"rss_bytes": metrics.rss(), "gpu_bytes": metrics.gpu()},
        "workers": dict(zip(("wanted", "serving"), repository.workers, strict=True)),
        "models": [
            _model(engine, states[of], series[of], seconds.get(of, {}), quality.get(of))
            for engine, of in loaded
            if of in states and of in series  # not loaded at the moment
        ],
    }


def _model(
    engine: Engine,
    state: VersionState,
    series: Series,
    seconds: Mapping[int, Second],
    quality: Any,
) -> dict[str, Any]:
    statistics = engine.metrics.statistics(series)
    peak = series.get("gpu_memory_peak_bytes")
    out_of_calibration = series.get("out_of_calibration", {})
    return {
        "name": engine.name,
        "version": engine.version,
        "ready": state.ready,
        "reason": engine.reason,
        "queue_rows": state.waiting,
        "in_flight": state.in_flight,
        "requests": statistics["inference_stats"]["success"]["count"],
        "failures": statistics["inference_stats"]["fail"]["count"],
        "rows": statistics["inference_count"],
        "runs": statistics["execution_count"],
        "gpu_peak_bytes": None if peak is None else int(peak[()]),
        "quality": quality,
        "out_of_calibration": {
            reason: int(count) for (reason,), count in sorted(out_of_calibration.items())
        },
        "window": engine.metrics.window(seconds),
        "card": engine.model.card,
    }
