"""The report of a search: the content of plan.json, and its plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.models.lineage import Calibration, Source
from attnserve.models.measured import Fidelity, ServedSpeed, ShapeLatency, Share
from attnserve.models.recorded import present
from attnserve.models.search_record import GoalRecord, TrainingRounds, Verification
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import FORMAT, Decision, PlanRecord, Point
from attnserve.reports.plots import plot_front

__all__ = [
    "PlanReport",
    "draw_front",
    "mean_speedup",
]


ITSELF = Fidelity(outputs=(), mean_cosine=1.0, min_cosine=1.0, data="the original itself")
"""The comparison of the original with itself, which needs no run."""


def mean_speedup(speeds: Sequence[ShapeLatency], lengths: Collection[int]) -> float:
    """The geometric mean over these lengths; 1 if none of them was timed."""
    chosen = [speed.speedup for speed in speeds if speed.sequence in lengths]
    return float(np.exp(np.mean(np.log(chosen)))) if chosen else 1.0


@dataclass(frozen=True, eq=False)
class PlanReport:
    """The plan that a search returns, and the reasons for it.

    ``record`` is the content of plan.json.

    Attributes:
        asked: The request.
        layers: One per block.
        latency_ms: The latencies of every distinct block.
        plan: The plan; empty if the original is returned.
        gain: Whether the plan is worth applying.
        fidelity, share: The verification on held-out data that no selection used; ``share`` is the
            kept share of the task score, if the goal has a task.
        speeds: Speed of the whole model, at all checked lengths.
        choose: The same comparison on the data to choose.
        verifications: All verifications, in order; all but the last missed the goal.
        recovered: The rounds of training; None without training.
        served_speed: What fusion, precision and removal gave; None if the original is returned.
        output: The file that the report was written to, if any; not part of the content.
    """

    model: Source
    calibration: Calibration
    asked: GoalRecord
    verdict: str
    layers: Sequence[Decision]
    front: Sequence[Point]
    latency_ms: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    machine: str
    plan: Plan = field(default_factory=Plan)
    gain: bool = False
    fidelity: Fidelity = ITSELF
    share: Share | None = None
    speeds: Sequence[ShapeLatency] = ()
    choose: Fidelity | None = None
    verifications: Sequence[Verification] = ()
    recovered: TrainingRounds | None = None
    served_speed: ServedSpeed | None = None
    output: Path | None = None

    @property
    def speedup(self) -> float:
        """The measured speed-up: the geometric mean over the requested lengths."""
        return mean_speedup(self.speeds, self.asked.sequences)

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json()

    @property
    def record(self) -> PlanRecord:
        """The content of plan.json."""
        return PlanRecord(
            format=FORMAT,
            model=self.model,
            calibration=self.calibration,
            asked=self.asked,
            verdict=self.verdict,
            gain=self.gain,
            fidelity=self.fidelity.cosines.model_copy(update={"share": self.share}),
            qualities=self.fidelity.qualities,
            choose=self.choose and self.choose.quality,
            verifications=tuple(self.verifications),
            speedup=self.speedup,
            speeds=tuple(self.speeds),
            speedups=self.served_speed,
            layers=tuple(self.layers),
            plan=self.plan.to_json(),
            front=tuple(self.front),
            latency_ms=tuple(self.latency_ms),
            machine=self.machine,
            versions=self.versions,
            **present(recovered=self.recovered),
        )


def draw_front(report: PlanReport) -> str:
    """The Pareto front as an SVG file.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    built = [point for point in report.front if point.measured_loss is not None]
    return plot_front(
        [(1 - point.predicted_loss, point.speedup) for point in report.front],
        [(1 - (point.measured_loss or 0.0), point.speedup) for point in built],
        (1 - report.verifications[-1].loss, report.speedup)
        if report.gain and report.verifications
        else None,
        title=report.verdict.partition(": ")[0] if report.gain else report.verdict,
    )
