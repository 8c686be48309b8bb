"""Compare the precisions that a search may use: time and loss of the fused original in each one.

A search has one precision, in which single blocks may stay float32 or bfloat16. The comparison
orders the precisions, so that usually one search finds the fastest model.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from itertools import product

import onnx_ir as ir

from attnserve.checks.held_out import HeldOut
from attnserve.job import Job
from attnserve.models.search_record import PrecisionPoint
from attnserve.options import Goal
from attnserve.planning.plans.apply import apply_steps, start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.judge import ScoredTask, compare_part
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.schemes import SCHEMES, Scheme
from attnserve.runtime.times import Times
from graph_passes.analysis.workload import Workload
from graph_passes.errors import AttnserveError, CannotRewrite, InvariantBroken

__all__ = ["compare_precisions", "in_search_order"]

log = logging.getLogger(__name__)

REFERENCE = "float32"


def compare_precisions(goal: Goal, job: Job) -> list[PrecisionPoint]:
    """Measure the fused original in each precision that this machine computes, float32 first.

    Losses are those on the rows to choose. Speed-ups are over float32, each in its fastest runtime,
    in interleaved runs at the requested workloads.

    Args:
        job: Its precision is ``AUTO``.

    Raises:
        CannotRewrite: The original cannot be timed.
    """
    timer = ServedTimer(job)
    task = ScoredTask.of(goal, job)
    models = {REFERENCE: timer.served(job.original)}
    losses = {REFERENCE: 0.0}
    for scheme in _usable_schemes(job):
        try:
            models[scheme.name], losses[scheme.name] = _converted(scheme, job, task)
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            log.warning("%s is not compared: %s", scheme.name, error.what)
    runtimes = job.runtimes_for(REFERENCE)
    times = timer.time(list(models.values()), job.workloads, runtimes)
    if not times:
        raise CannotRewrite(
            "the original cannot be timed at the requested lengths in each precision",
            "give a `precision`",
            code="search.not_timed",
        )
    timed = dict(zip(product(runtimes, models), times, strict=True))

    def fastest(precision: str) -> tuple[str, Times[Workload]]:
        by_runtime = {name: timed[name, precision] for name in job.runtimes_for(precision)}
        return min(by_runtime.items(), key=lambda item: item[1].ms)

    _, reference = fastest(REFERENCE)
    points: list[PrecisionPoint] = []
    for precision in models:
        runtime, of_model = fastest(precision)
        if not math.isfinite(of_model.ms):
            log.warning("%s is not compared: no runtime runs it", precision)
            continue
        speedup = of_model.speedup_over(reference)
        points.append(
            PrecisionPoint(
                precision=precision, runtime=runtime, speedup=speedup, loss=losses[precision]
            )
        )
    return points


def in_search_order(points: list[PrecisionPoint], goal: Goal) -> list[PrecisionPoint]:
    """The precisions in the order in which they are likely to meet the goal best.

    For a quality to keep, the fastest one comes first: its search leaves blocks in float32 that
    lose too much. For a speed-up, the one with the least loss of those that reach it comes first.
    """
    if goal.keep is not None:
        return sorted(points, key=lambda point: -point.speedup.value)
    target = goal.target_speedup or 1.0

    def order(point: PrecisionPoint) -> tuple[bool, float]:
        reaches = point.speedup.value >= target
        return not reaches, point.loss if reaches else -point.speedup.value

    return sorted(points, key=order)


def _usable_schemes(job: Job) -> Iterator[Scheme]:
    """The precisions besides float32 that this machine, the runtime and the model allow."""
    device = job.context.device
    phase = job.requested_workloads[0].phase
    usable = [
        scheme
        for scheme in SCHEMES
        if scheme.name != REFERENCE
        and scheme.provider == device.provider
        and (phase == "token" or not scheme.for_tokens)
        and scheme.refusal() is None
        and scheme.has_weights(job.original)
    ]
    for scheme in usable:
        # More bits lose less at the same speed, if the machine multiplies them exactly.
        if not any((other.bits or 0) > (scheme.bits or 8) for other in usable):
            yield scheme


def _converted(scheme: Scheme, job: Job, task: ScoredTask | None) -> tuple[ir.Model, float]:
    """The fused original in a precision, and its loss on the rows to choose.

    Raises:
        AttnserveError: It cannot be converted, or does not run.
    """
    job = job.with_precision(scheme.name).on_all_threads().labeled(scheme.name)
    state = start(Plan(), job, job.original.clone())
    state.fuse(scheme.name)
    apply_steps(state.plan.conversion, state)
    return state.result, compare_part(state.result, HeldOut.CHOOSE, job, task).loss
