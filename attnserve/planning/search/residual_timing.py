"""Time the passes that write residual additions in another operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from attnserve.fusion import RESIDUAL_PASSES
from attnserve.planning.blocks.latencies import Latencies
from attnserve.planning.search.part_timing import PartTimer
from attnserve.runtime.part_latency import Cut, Part
from graph_passes.analysis.required import input_of, producer_of
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_residuals import find_residuals

__all__ = ["ResidualFusion", "residual_fusion"]


class ResidualFusion(NamedTuple):
    """A pass for residual additions.

    Attributes:
        saved_ms: The milliseconds that it saves in a run, mean over the requested shapes.
    """

    graph_pass: RewritePass
    saved_ms: float


def residual_fusion(timer: PartTimer) -> ResidualFusion | None:
    """The fastest pass for residual additions; None if the original is fastest at any shape."""
    norms = [node for node in find_residuals(timer.model) if node.graph is timer.model.graph]
    cuts: list[Cut] = []
    for norm in norms:
        added = producer_of(input_of(norm, 0)).inputs
        cuts.append(Cut(norm.outputs[0], tuple(value for value in added if value is not None)))
    best: ResidualFusion | None = None
    for residual_pass in RESIDUAL_PASSES[timer.table.device.provider] if cuts else ():
        graph_pass = residual_pass()
        saved = _saved_by(graph_pass, cuts, timer)
        if saved is None or min(saved) <= 0:
            continue
        if best is None or saved.mean > best.saved_ms:
            best = ResidualFusion(graph_pass, saved.mean)
    return best


def _saved_by(graph_pass: RewritePass, cuts: Sequence[Cut], timer: PartTimer) -> Latencies | None:
    """Milliseconds that a pass saves over all residual additions.

    None if a conversion fails.
    """
    saved: list[Latencies] = []
    saved_by_part: dict[str, Latencies] = {}
    for part in timer.cut_out(timer.model, cuts):
        key = part.key(0)
        if key not in saved_by_part:
            new = part.model.clone()
            graph_pass(new)
            both = timer.convertible({"old": part, "new": Part(new, part.feeds)})
            if len(both) < 2:
                return None
            times = timer.time(both.pop("old"), both)
            saved_by_part[key] = times["new"].saved_over(times[None])
        saved.append(saved_by_part[key])
    return Latencies.total(saved)
