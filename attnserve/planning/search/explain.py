"""Explain a choice block by block, and sample the Pareto front for the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnserve.models.search_record import Point
from attnserve.planning.blocks.configurations import AS_EXPORTED
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.plan_file import Decision
from attnserve.planning.search.front import ConfiguredBlock, Front

__all__ = ["explain", "front_points"]

MAX_POINTS = 50
"""The number of points of the front that plan.json lists, besides candidates."""


def front_points(
    front: Front, measured: Mapping[tuple[int, ...], tuple[float, float]]
) -> list[Point]:
    """Sample the front at even steps of the index, and add all choices that were built.

    Args:
        measured: The loss and the cosine of each candidate, by the ``picks`` of its choice.
    """
    choices = front.choices
    indices = np.linspace(0, len(choices) - 1, min(len(choices), MAX_POINTS)).round().astype(int)
    sampled = set(indices.tolist())
    points: list[Point] = []
    for index, choice in enumerate(choices):
        if index not in sampled and choice.picks not in measured:
            continue
        loss, cosine = measured.get(choice.picks, (None, None))
        points.append(
            Point(
                speedup=front.predicted_speedup(choice),
                predicted_loss=choice.loss,
                measured_loss=loss,
                cosine=cosine,
            )
        )
    return points


def explain(front: Front, choice: Choice) -> list[Decision]:
    """List the decision for each block in a choice, with its reason, in order of execution."""
    decisions = [
        Decision(
            block=chosen.block.name,
            kind=chosen.group.kind,
            count=chosen.group.count,
            **chosen.config.recorded,
            operator=chosen.config.plain_operators or chosen.operator or AS_EXPORTED,
            ms_before=front.latency.default_of(chosen.block).original.mean,
            ms_after=chosen.ms,
            predicted_loss=chosen.loss,
            in_float=chosen.in_float,
            why=_reason(chosen),
        )
        for chosen in front.blocks(choice)
    ]
    names = [block.name for group in front.latency.groups for block in group.blocks]
    return sorted(decisions, key=lambda decision: names.index(decision.block))


def _reason(chosen: ConfiguredBlock) -> str:
    """State in one sentence why a block has its configuration."""
    group, curve, configs = chosen.group, chosen.curve, chosen.unit.configs
    if group.refusal is not None:
        return f"nothing can be removed: {group.refusal}"
    if curve is None:
        return f"it has too few {group.noun} to remove any"
    if len(configs) == 1:
        return f"no smaller number of {group.noun} is faster at every length"
    parts = ["it is not converted"] if chosen.in_float else list[str]()
    parts += chosen.config.reasons(group.noun, curve)
    present, following = configs[chosen.pick], next(iter(configs[chosen.pick + 1 :]), None)
    if following is not None and following.ms < present.ms:
        smaller = f"{following.group_configs[chosen.place]} {group.noun}"
        if chosen.in_float and chosen.place not in following.in_float:
            smaller += " in integers"
        pair = " and its pair" if len(chosen.unit.groups) > 1 else ""
        parts.append(
            f"{smaller}{pair} would save {present.ms - following.ms:.3f} ms more and lose "
            f"{following.loss - present.loss:.4f} more"
        )
    return "; ".join(parts)
