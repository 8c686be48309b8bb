"""Choose the mixing of collaborative heads by measured time, at equal error.

Dense mixing, as in the paper, defines the error bound of R. The others must not exceed it: sparse
mixing, or separate dimensions of each head (truncation), as few as possible. The fastest mixing as
served is selected, provided that it is at no length slower than the fused original. On a CPU,
models with shared dimensions usually are slower.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from attnserve.checks.compare import compare
from attnserve.job import Job
from attnserve.limits import MIN_GAIN, MIN_SPEEDUP, SAME_ERROR
from attnserve.literals import MixingKind
from attnserve.models.lineage import MixingChoice, MixingReport
from attnserve.planning.plans.plan import Plan, State
from attnserve.planning.served_speed import ServedTimer
from graph_passes.analysis.cost import count_macs
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError
from graph_passes.passes.collaborate import Collaborate

__all__ = ["MixingChoice", "MixingComparison", "choose_mixing"]

log = logging.getLogger(__name__)


STEADY = ((1, 16), (1, 512), (8, 16), (8, 128))
"""(batch, length) at which a rewritten model must not be slower either, if the model takes them."""

LARGEST_SHAPE, LARGEST_MACS = (8, 512), 20_000_000_000
"""Another such shape, for models up to this number of MACs at it."""


def is_steady(report: MixingReport) -> bool:
    """Whether a mixing is at no shape significantly slower than the fused original."""
    return report.slowest.high >= MIN_SPEEDUP


@dataclass(frozen=True, eq=False)
class MixingComparison:
    """Compares models with different mixings with the original, in error and in speed."""

    timer: ServedTimer

    @property
    def job(self) -> Job:
        return self.timer.job

    def error(self, rewritten: State) -> float:
        """The largest relative error of an output on data; of the weights without data."""
        if self.job.data is None:
            errors = [
                change.relative_error or 0.0
                for change in rewritten.applied.changes
                if change.rewrite == Collaborate.name
            ]
            return float(np.sqrt(np.mean(np.square(errors))))
        rows = self.job.data.choose or self.job.data.fit
        outputs = compare(
            self.job.original, rewritten.model, rows, "calibration data", context=self.job.context
        ).outputs
        return max(output.relative_error for output in outputs)

    def sketch(self, plan: Plan) -> ir.Model:
        """Build the graph of a plan with unfitted weights, for timing."""
        model = self.job.original.clone()
        for graph_pass in plan.passes:
            graph_pass.unfitted(model)(model)
        return model

    def reports(
        self, models: Mapping[MixingKind, ir.Model], errors: Mapping[MixingKind, float]
    ) -> dict[MixingKind, MixingReport] | None:
        """Time models as served, twice if one seems to be slower than the fused original.

        Args:
            errors: The errors of the models that are fitted.

        Returns:
            None if they cannot be timed.
        """
        phase = self.job.workloads[0].phase
        steady = [Workload.of(*shape, phase) for shape in STEADY]
        largest = Workload.of(*LARGEST_SHAPE, phase)
        macs = count_macs(self.job.original, largest)
        if macs is not None and macs <= LARGEST_MACS:
            steady.append(largest)
        workloads = list(dict.fromkeys([*self.job.workloads, *steady]))
        precision = self.job.target.precision
        try:
            served = [
                (self.timer.served(model, precision), self.job.context.device.runtime)
                for model in (self.job.original, *models.values())
            ]
            times = self.timer.time(served, workloads, min_speedup=1.0)
        except AttnserveError as error:  # for example, no memory
            log.warning("the speed was not measured: %s", error)
            return None
        if not times:
            return None
        original, *others = times
        wanted = [each for each in self.job.workloads if each in original.by_shape]
        wanted = wanted or list(original.by_shape)
        return {
            kind: MixingReport(
                kind=kind,
                error=_finite(errors.get(kind)),
                speedup=mixed.at(wanted).speedup_over(original),
                slowest=min(
                    mixed.speedups_over(original).values(), key=lambda speedup: speedup.high
                ),
            )
            for kind, mixed in zip(models, others, strict=True)
        }


def _finite(error: float | None) -> float | None:
    return error if error is not None and math.isfinite(error) else None


def choose_mixing(
    plans: Mapping[MixingKind, Sequence[Plan]],
    build: Callable[[Plan], State],
    comparison: MixingComparison,
) -> tuple[State, MixingChoice | None]:
    """Build the model with each kind of mixing, compare them, and return the fastest one.

    Sparse mixing takes longest to fit: its speed is measured first, and it is fitted if it would be
    the fastest.

    Args:
        plans: By kind; own dimensions have several plans, in ascending size.
        build: Applies a plan.

    Returns:
        The chosen model, and the report; dense mixing and None if they cannot be timed.
    """
    built: dict[MixingKind, State] = {}
    errors: dict[MixingKind, float] = {}

    def fit(kind: MixingKind, plan: Plan) -> None:
        built[kind] = build(plan)
        errors[kind] = comparison.error(built[kind])

    fit("dense", plans["dense"][0])
    bound = SAME_ERROR * errors["dense"]
    for plan in plans.get("own", ()):
        fit("own", plan)
        if errors["own"] <= bound:
            break
    models: dict[MixingKind, ir.Model] = {
        kind: state.model for kind, state in built.items() if errors[kind] <= bound
    }
    for plan in plans.get("sparse", ()):
        models["sparse"] = comparison.sketch(plan)
    reports = comparison.reports(models, errors)
    if reports is None:
        return built["dense"], None
    if _fastest(reports.values()).kind == "sparse":
        fit("sparse", plans["sparse"][0])
        error = _finite(errors["sparse"])
        reports["sparse"] = reports["sparse"].model_copy(update={"error": error})
    chosen = _fastest([reports[kind] for kind, error in errors.items() if error <= bound])
    others = [report for report in reports.values() if report.kind != chosen.kind]
    lossier = [kind for kind, error in errors.items() if error > bound]
    why = (
        f"{chosen.speedup.value:.2f}x the speed of the fused original, "
        + ("at no length measurably slower" if is_steady(chosen) else "slower at a length")
        + "".join(f"; {report.kind} {report.speedup.value:.2f}x" for report in others)
        + (f"; {' and '.join(lossier)} lost more than dense" if lossier else "")
    )
    choice = MixingChoice(chosen=chosen.kind, why=why, candidates=tuple(reports.values()))
    return built[chosen.kind], choice


def _fastest(reports: Collection[MixingReport]) -> MixingReport:
    """The fastest mixing; of those that are about as fast, the one with the smallest error.

    Mixings that are slower than the original at some shape are taken only if all are.
    """
    steady = [report for report in reports if is_steady(report)]
    eligible = steady or reports
    most = max(report.speedup.value for report in eligible)
    near = [report for report in eligible if MIN_GAIN * report.speedup.value >= most]
    return min(near, key=lambda report: math.inf if report.error is None else report.error)
