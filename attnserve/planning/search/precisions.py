"""Compare the fused original in several precisions, and put them in the order of a search."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from attnserve.checks.held_out import HeldOut
from attnserve.checks.quality import allowed_loss
from attnserve.job import Job
from attnserve.limits import MIN_GAIN
from attnserve.models.search_record import PrecisionPoint
from attnserve.options import Goal
from attnserve.planning.plans.apply import apply_steps, start
from attnserve.planning.plans.plan import Plan
from attnserve.planning.scored_task import ScoredTask, compare_part
from attnserve.planning.served_speed import ServedTimer
from attnserve.precision.convert import context_for
from attnserve.precision.schemes import SCHEMES, Scheme
from attnserve.runtime.machine import has_int8_dot_product
from graph_passes.errors import AttnserveError, CannotRewrite, InvariantBroken, Refusal

__all__ = ["REFERENCE", "PrecisionComparison", "compare_precisions"]

log = logging.getLogger(__name__)

REFERENCE = "float32"

SHARE_FACTOR = 2.0
"""The ratio of the share of blocks that may be converted to the share that the mean loss of a block
allows: a search converts the blocks that lose least. With a larger value, fewer precisions are left
out, and a search takes longer."""


@dataclass(frozen=True)
class PrecisionComparison:
    """The fused original in each precision that the machine computes, float32 first.

    Attributes:
        fusion: The speed-up of the fused original over the exported one.
    """

    points: Sequence[PrecisionPoint]
    fusion: float

    def in_search_order(self, goal: Goal) -> list[PrecisionPoint]:
        """The precisions in the order in which they are likely to meet the goal best.

        For a quality to keep, it is the order of ``potential``. For a speed-up, the one with the
        least loss of those that reach it comes first. Equally fast ones are in the order of their
        losses.
        """
        target = goal.target_speedup
        potentials = {point.precision: self.potential(point, goal) for point in self.points}
        highest = max(potentials.values())

        def order(point: PrecisionPoint) -> tuple[bool, float, float]:
            speed = potentials[point.precision]
            slower = int(math.log(highest / speed) / math.log(MIN_GAIN))  # 0: about as fast
            if target is not None and self.fusion * speed >= target:
                return False, point.loss, slower
            return target is not None, slower, point.loss

        return sorted(self.points, key=order)

    def potential(self, point: PrecisionPoint, goal: Goal) -> float:
        """The speed-up over float32 that a search in a precision may reach.

        If all blocks lose too much, some of them stay in the precision ``Scheme.rest``. Time and
        loss are taken to grow in proportion to the converted share, see ``SHARE_FACTOR``.
        """
        scheme, speed = SCHEMES[point.precision], point.speedup.value
        if goal.keep is None or not scheme.allows_float_blocks:
            return speed
        points = {each.precision: each for each in self.points}
        rest = points.get(scheme.rest, points[REFERENCE])
        added = max(point.loss - rest.loss, 0.0)
        allowed = SHARE_FACTOR * max(allowed_loss(goal.keep) - rest.loss, 0.0)
        share = min(allowed / added, 1.0) if added else 1.0
        return 1 / (share / speed + (1 - share) / rest.speedup.value)


def compare_precisions(job: Job, task: ScoredTask | None) -> PrecisionComparison:
    """Measure the fused original in each precision that this machine computes.

    Speed-ups are over float32, each in its ``Job.runtime_for``, in interleaved runs at the
    requested workloads. Losses are those on the rows to choose.

    Args:
        job: Its precision is ``AUTO``.
        task: The task of the goal.

    Raises:
        CannotRewrite: The models cannot be timed.
    """
    timer = ServedTimer(job)
    models = {REFERENCE: timer.served(job.original)}
    losses = {REFERENCE: 0.0}
    schemes = list(_usable_schemes(job))
    progress = job.context.stage("convert to each precision")
    for done, scheme in enumerate(schemes):
        progress(done, len(schemes))
        try:
            models[scheme.name], losses[scheme.name] = _converted(scheme, job, task)
        except InvariantBroken:  # a defect
            raise
        except AttnserveError as error:
            log.warning("%s is not compared: %s", scheme.name, error.what)
    progress(len(schemes), len(schemes))
    timed = [
        (job.original, job.runtime_for(REFERENCE)),
        *((model, job.runtime_for(precision)) for precision, model in models.items()),
    ]
    try:
        times = timer.time(timed, job.workloads)
    except InvariantBroken:  # a defect
        raise
    except AttnserveError as error:  # for example, no memory
        raise _not_timed(error.what) from error
    if not times:
        raise _not_timed("it does not run at the requested lengths")
    exported, reference, *_ = times
    points = [
        PrecisionPoint(
            precision=precision,
            runtime=job.runtime_for(precision),
            speedup=of_model.speedup_over(reference),
            loss=losses[precision],
        )
        for precision, of_model in zip(models, times[1:], strict=True)
    ]
    return PrecisionComparison(points, reference.speedup_over(exported).value)


def _not_timed(reason: str) -> CannotRewrite:
    return CannotRewrite(
        f"the original cannot be timed in each precision: {reason}",
        "give a `precision`",
        code="search.not_timed",
    )


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
        and Refusal.of(partial(context_for, scheme.name, job.context)) is None
    ]
    most_bits = max((scheme.bits for scheme in usable if scheme.bits is not None), default=0)
    for scheme in usable:
        # With a dot product of bytes, more bits lose less at the same speed.
        if scheme.bits in (None, most_bits) or not has_int8_dot_product():
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
