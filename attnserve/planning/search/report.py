"""The report of a search, and its plot."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attnserve.models.measured import Fidelity
from attnserve.planning.plans.plan import Plan
from attnserve.planning.plans.plan_file import PlanRecord
from attnserve.reports.plots import plot_front

__all__ = ["PlanReport", "draw_front"]


@dataclass(frozen=True, eq=False)
class PlanReport:
    """The plan that a search returns, and its record.

    Attributes:
        record: The content of plan.json: the plan, the measurements and the reasons.
        plan: The plan; empty if the original is returned.
        fidelity: The verification, with the errors of each output.
        output: The file that the record was written to, if any.
    """

    record: PlanRecord
    plan: Plan
    fidelity: Fidelity
    output: Path | None = None

    def to_json(self) -> dict[str, Any]:
        return self.record.to_json()


def draw_front(record: PlanRecord) -> str:
    """The Pareto front as an SVG file.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    return plot_front(
        [(1 - point.predicted_loss, point.speedup) for point in record.front],
        [
            (1 - point.measured_loss, point.speedup)
            for point in record.front
            if point.measured_loss is not None
        ],
        (1 - record.verifications[-1].loss, record.speedup)
        if record.gain and record.verifications and record.speedup
        else None,
        title=record.verdict.partition(": ")[0] if record.gain else record.verdict,
    )
