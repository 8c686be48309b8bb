"""The body of GET /stats.json: the last minute, memory, and a description of each model."""

from __future__ import annotations

from typing import Any

from attnserve.runtime.memory_use import gpu_bytes
from attnserve.serving.live_quality import LiveReport
from attnserve.serving.loaded_model import Model
from service.engine.engine import Engine
from service.engine.repository import Repository
from service.metrics import Series, VersionState


def report(repository: Repository) -> dict[str, Any]:
    """The body of GET /stats.json. Milliseconds, bytes, multiply-accumulates."""
    states = {state[:2]: state for state in repository.states()}
    series = repository.metrics.statistics()
    seconds = repository.seconds()
    qualities = repository.shadow.reports()
    loaded = [(engine, (engine.name, engine.version)) for engine in repository.engines()]
    return {
        "ready": repository.ready,
        "memory": {"rss_bytes": repository.rss_bytes(), "gpu_bytes": gpu_bytes()},
        "workers": dict(zip(("wanted", "serving"), repository.workers, strict=True)),
        "models": [
            {
                **_model(engine, states[of], series[of], qualities.get(of)),
                "window": engine.metrics.window(seconds.get(of, {}), repository.delay_s),
                "card": _card(engine.model),
            }
            for engine, of in loaded
            if of in states and of in series  # others are not loaded at the moment
        ],
    }


def _model(
    engine: Engine, state: VersionState, series: Series, quality: LiveReport | None
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
        "quality": quality and quality.to_json(),
        "out_of_calibration": {
            reason: int(count) for (reason,), count in sorted(out_of_calibration.items())
        },
    }


def _card(model: Model) -> dict[str, Any]:
    """A description of a model and of its optimization."""
    artifact = model.artifact
    return {
        "parameters": model.cost.parameters,
        "max_length": model.encoder.max_length if model.encoder else None,
        "pooling": artifact.pooling,
        "normalize": artifact.normalize,
        "dimensions": artifact.dimensions,
        "prompts": artifact.prompts,
        "takes_text": model.encoder is not None,
        "classifies": model.can("classify"),
        "provider": model.provider,
        "runtime": model.runtime,
        "precision": model.precision,
        "source": artifact.source,
        "plan": artifact.plan_id,
        "operators": model.operators.to_json(),
        "optimization": artifact.optimization,
    }
