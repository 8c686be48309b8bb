"""The runtimes that may serve a converted model: those in which it keeps its quality.

A model that rounds activations to integers gives other outputs in each runtime: rounding in
floating point moves some of them to the next integer. Serving runs such a model only in runtimes,
and pairs of runtimes, in which its quality was measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from statistics import NormalDist, median_low

import onnx_ir as ir

from attnserve.checks.quality import allowed_loss
from attnserve.context import AUTO, Device
from attnserve.job import Job
from attnserve.models.measured import Fidelity, Quality, Subject
from attnserve.models.quantized import rounds_activations
from attnserve.planning.scored_task import ScoredTask
from attnserve.planning.served_graph.variants import MANY_VARIANTS_BYTES
from attnserve.runtime.by_length import LengthRunner, RowRuntimes
from attnserve.runtime.external_data import weight_bytes
from attnserve.runtime.interface import Batch, Session, row_length
from attnserve.runtime.session import OpenNew, open_session, runtime_of, runtimes_of
from graph_passes.errors import AttnserveError

__all__ = ["opener_in", "row_runtimes", "verify_in_other_runtimes"]

CONFIDENCE = 0.95
"""Confidence of ``Quality.lower``."""


def row_runtimes(model: ir.Model, runtimes: Sequence[str]) -> list[RowRuntimes]:
    """The choices of serving: one of the runtimes for all rows, or a pair of them by length.

    Each runtime of a pair holds the weights, so a large model runs in one runtime.
    """
    choices = [RowRuntimes.one(runtime) for runtime in runtimes]
    if weight_bytes(model) <= MANY_VARIANTS_BYTES:
        choices += [RowRuntimes(*pair) for pair in permutations(runtimes, 2)]
    return choices


def verify_in_other_runtimes(
    job: Job,
    model: ir.Model,
    expected: Fidelity,
    keep: float | None = None,
    task: ScoredTask | None = None,
) -> dict[RowRuntimes, Fidelity]:
    """Compare a model with the original on all held-out rows in other runtimes.

    The quality is kept if no value is below its lower bound in the first runtime
    (``_lower_bounds``), and the goal is met. The same holds for the score of a task, if there is
    one. Of a pair of ``row_runtimes``, the second runtime runs texts above the median length.

    Args:
        expected: The comparison in the runtime that the model states (``runtime_of``).
        keep: The share of the quality that a goal keeps; with the measure "score", of the score.
        task: The task whose score the goal limits.

    Returns:
        The comparisons in other runtimes, and pairs, in which the quality is kept. There are none
        without data, or if the model gives the same outputs in every runtime, because it rounds no
        activations.
    """
    if job.data is None or not rounds_activations(model):
        return {}
    device = job.context.device
    first = runtime_of(model, device)
    others = [each for each in runtimes_of(model, replace(device, runtime=AUTO)) if each != first]
    rows = job.data.to_verify
    comparisons: dict[RowRuntimes, Fidelity] = {}
    least = _lower_bounds(expected.qualities, has_goal=keep is not None)
    quality_keep = None if job.measure == "score" else keep
    in_first = opener_in(RowRuntimes.one(first), device, rows)
    lost = task.share_in(model, job, in_first).losses.bounded if task and others else 0.0
    most_lost = lost if keep is None else min(lost, allowed_loss(keep))

    def verify(runtimes: RowRuntimes) -> None:
        open_new = opener_in(runtimes, device, rows)
        try:
            fidelity = job.compare_held_out(model, rows, open_new=open_new)
            if not _is_kept(fidelity, least, quality_keep):
                return
            if task and task.share_in(model, job, open_new).losses.measured > most_lost:
                return
        except AttnserveError:  # serving says why: the runtime refuses the model
            return
        comparisons[runtimes] = fidelity

    for runtime in others:
        verify(RowRuntimes.one(runtime))
    verified = [first, *(name for name in others if RowRuntimes.one(name) in comparisons)]
    if len(set(_lengths(rows))) > 1:
        for pair in row_runtimes(model, verified)[len(verified) :]:
            verify(pair)
    return comparisons


def opener_in(runtimes: RowRuntimes, device: Device, rows: Sequence[Batch]) -> OpenNew:
    """Return a function that opens a model in one runtime, or in two for short and for long rows.

    Args:
        runtimes: The second one runs rows above the median length.
        rows: The rows that the model will run.
    """

    def open_new(model: ir.Model) -> Session:
        sessions = [
            open_session(model, replace(device, runtime=runtime))
            for runtime in dict.fromkeys(runtimes)
        ]
        return LengthRunner(sessions[0], lambda: sessions[-1], median_low(_lengths(rows) or [0]))

    return open_new


def _lengths(rows: Sequence[Batch]) -> list[int]:
    return [length for batch in rows if (length := row_length(batch)) is not None]


def _is_kept(fidelity: Fidelity, least: Mapping[Subject, float], keep: float | None) -> bool:
    return bool(fidelity.qualities) and all(
        quality.subject in least
        and quality.value >= least[quality.subject]
        and (keep is None or quality.losses.measured <= allowed_loss(keep))
        for quality in fidelity.qualities
    )


def _lower_bounds(qualities: Sequence[Quality], *, has_goal: bool) -> dict[Subject, float]:
    """Lower bounds of the qualities that hold together with a confidence of 95 %.

    Each has an equal share of the error (Bonferroni). ``Quality.lower`` is widened as if its
    interval were normal; for skewed losses, the exact bound is lower still. A quality of few texts
    has no interval: its bound is the value, and with a goal, which limits it too, there is none.
    """
    share = (1 - CONFIDENCE) / max(len(qualities), 1)
    widening = NormalDist().inv_cdf(1 - share) / NormalDist().inv_cdf(CONFIDENCE)
    return {
        quality.subject: -math.inf
        if has_goal and quality.ci95 is None
        else quality.value - widening * (quality.value - quality.lower)
        for quality in qualities
    }
