"""Verify a converted model in other runtimes than the one it was compared in.

A model that rounds activations to integers gives other outputs in each runtime: rounding in
floating point moves some of them to the next integer. Serving runs such a model only in runtimes,
and pairs of runtimes, in which its quality was measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, median_low

import onnx_ir as ir

from attnserve.checks.quality import allowed_loss
from attnserve.context import AUTO, Device
from attnserve.job import Job
from attnserve.models.measured import Fidelity, Quality, Share, Subject
from attnserve.models.quantized import rounds_activations
from attnserve.planning.served_graph.variants import compared_runtimes, served_choices
from attnserve.runtime.by_length import LengthRunner, runtimes_by_length
from attnserve.runtime.interface import Batch, Session, row_length
from attnserve.runtime.session import open_session, runtime_of
from graph_passes.errors import AttnserveError

__all__ = ["OpenNew", "opener_in", "verify_in_other_runtimes"]

OpenNew = Callable[[ir.Model], Session]
"""Opens a model."""

CONFIDENCE = 0.95
"""Confidence of ``Quality.lower``."""


def verify_in_other_runtimes(
    job: Job,
    model: ir.Model,
    expected: Fidelity,
    keep: float | None = None,
    share_in: Callable[[OpenNew], Share] | None = None,
) -> Mapping[str, Fidelity]:
    """The comparisons on all held-out rows in other runtimes, if the quality is kept there.

    It is kept if no value is below its lower bound in the first runtime (``_lower_bounds``), and
    the goal is met. The same holds for the score of a task, if there is one. The names are those of
    ``served_choices``; of a pair, the second runtime runs texts above the median length.

    Args:
        expected: The comparison in the runtime that the model states (``runtime_of``).
        keep: The share of the quality that a goal keeps; with the measure "score", of the score.
        share_in: The share of the score of a task that is kept in sessions of another runtime.
    """
    if not rounds_activations(model):
        return {}
    device = job.context.device
    first = runtime_of(model, device)
    installed = compared_runtimes(model, replace(device, runtime=AUTO))
    others = [runtime for runtime in installed if runtime != first]
    rows = job.required_data.to_verify
    comparisons: dict[str, Fidelity] = {}
    least = _lower_bounds(expected.qualities, has_goal=keep is not None)
    quality_keep = None if job.measure == "score" else keep
    lost = share_in(opener_in(first, device, rows)).losses.bounded if share_in and others else 0.0
    most_lost = lost if keep is None else min(lost, allowed_loss(keep))

    def verify(name: str) -> None:
        open_new = opener_in(name, device, rows)
        try:
            fidelity = job.compare_held_out(model, rows, open_new=open_new)
            if not _is_kept(fidelity, least, quality_keep):
                return
            if share_in is not None and share_in(open_new).losses.measured > most_lost:
                return
        except AttnserveError:  # serving says why: the runtime refuses the model
            return
        comparisons[name] = fidelity

    for runtime in others:
        verify(runtime)
    verified = [first, *(runtime for runtime in others if runtime in comparisons)]
    if len(set(_lengths(rows))) > 1:
        for name in served_choices(model, verified)[len(verified) :]:
            verify(name)
    return comparisons


def opener_in(name: str, device: Device, rows: Sequence[Batch]) -> OpenNew:
    """Return a function that opens a model in one runtime, or in two for short and for long rows.

    Args:
        name: The runtime, or two of them (``by_length``). The second one runs rows above the median
            length.
        rows: The rows that the model will run.
    """

    def open_new(model: ir.Model) -> Session:
        sessions = [
            open_session(model, replace(device, runtime=runtime))
            for runtime in dict.fromkeys(runtimes_by_length(name))
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
