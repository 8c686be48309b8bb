"""Count operations instead of measuring time, so that tests give the same result everywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.models.example_inputs import example_inputs
from attnserve.models.measured import ServedSpeed, ShapeLatency
from attnserve.planning import served_speed
from attnserve.planning.search.judge import Candidate, Judge
from attnserve.planning.served_speed import ServedTimer
from attnserve.runtime.interleaved_timer import Speedup
from attnserve.runtime.part_latency import LatencyTable, Part
from graph_passes.analysis.axes import named_axes, read_axes
from graph_passes.analysis.cost import macs_at
from graph_passes.analysis.shapes import infer_shapes_at
from graph_passes.analysis.workload import Workload

TIME_MODELS = served_speed.time_models
MEASURE = ServedTimer.measure
"""What ``count_served`` replaces."""

FUSED = STANDARD = 0.9
"""The relative time of attention in one operator of ONNX Runtime, or of ai.onnx."""


def milliseconds(model: ir.Model, feed: Mapping[str, np.ndarray]) -> float:
    """The more MACs, the more time; a graph whose MACs cannot be counted has none."""
    share = FUSED if any(node.domain for node in model.graph) else 1.0
    if any((node.domain, node.op_type) == ("", "Attention") for node in model.graph):
        share = STANDARD
    return 0.01 + macs(model, feed) / 1e6 * share


def macs(model: ir.Model, feed: Mapping[str, np.ndarray]) -> int:
    """MACs of one run; 0 if they cannot be counted. Faster than ``model_cost`` at any lengths."""
    inputs = {value.name or "": value for value in model.graph.inputs}
    shapes = {name: array.shape for name, array in feed.items() if name in inputs}
    lengths = read_axes(inputs, shapes) or {}
    if not lengths.keys() >= set(named_axes(model.graph)):
        return 0
    total, uncounted = macs_at(infer_shapes_at(model, lengths), model.graph)
    return 0 if uncounted else total


class CountedTable(LatencyTable):
    """Milliseconds by the number of operations."""

    def measure(self, parts: Mapping[str, Part]) -> dict[str, tuple[float, ...]]:
        return {
            name: tuple(milliseconds(part.model, feed) for feed in part.feeds)
            for name, part in parts.items()
        }


def compare_speed(
    judge: Judge, model: ir.Model, workloads: Sequence[Workload]
) -> list[ShapeLatency]:
    job, speeds = judge.job, list[ShapeLatency]()
    for workload in workloads:
        feed = example_inputs(job.original, workload, job.context.seed)
        before, after = (milliseconds(graph, feed) for graph in (job.original, model))
        speeds.append(
            ShapeLatency(
                batch=workload.batch,
                sequence=workload.length,
                original_ms=before,
                ms=after,
                speedup=before / after,
            )
        )
    return speeds


def measure_speedup_over(judge: Judge, slow: Candidate, fast: Candidate) -> Speedup:
    before, after = (
        judge.requested_speedup(judge.compare_speed(one.model, judge.job.requested))
        for one in (slow, fast)
    )
    return Speedup(value=after / before, ci95=(after / before, after / before))


def time_models(
    models: Sequence[ir.Model],
    feeds: Mapping[Workload, Any],
    *,
    runtimes: Sequence[str] = (),
    **_: Any,
) -> dict[Workload, np.ndarray]:
    return {
        workload: np.array(
            [[milliseconds(model, feed)] * 2 for _ in runtimes or ("",) for model in models]
        )
        for workload, feed in feeds.items()
    }


def equal_times(
    models: Sequence[ir.Model],
    feeds: Mapping[Workload, Any],
    *,
    runtimes: Sequence[str] = (),
    **_: Any,
) -> dict[Workload, np.ndarray]:
    ones = np.ones((max(len(runtimes), 1) * len(models), 2))
    return dict.fromkeys(feeds, ones)


def unchanged(timer: ServedTimer, model: ir.Model, *_: Any) -> ir.Model:
    return model


def measure_unfused(timer: ServedTimer, *arguments: Any, **named: Any) -> ServedSpeed | None:
    """Report equal speeds: to fuse and to count models takes half of the time of ``optimize``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedTimer, "served", unchanged)
        patch.setattr(served_speed, "time_models", equal_times)
        return MEASURE(timer, *arguments, **named)


def count_instead_of_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LatencyTable, "measure", CountedTable.measure)
    monkeypatch.setattr(Judge, "compare_speed", compare_speed)
    monkeypatch.setattr(Judge, "measure_speedup_over", measure_speedup_over)
    count_served(monkeypatch)


def count_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not time what is served, and do not fuse it; searches still measure."""
    monkeypatch.setattr(served_speed, "time_models", time_models)
    monkeypatch.setattr(ServedTimer, "measure", measure_unfused)
