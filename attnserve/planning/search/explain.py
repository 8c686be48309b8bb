"""Explain a choice block by block, and sample the Pareto front for the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnserve.planning.blocks.configurations import AS_EXPORTED, LossCurve
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.plan_file import Decision, Point
from attnserve.planning.search.estimates import Unit
from attnserve.planning.search.front import Front

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
    latency, losses = front.latency, front.losses
    decisions: list[Decision] = []
    for unit, index in zip(front.units, choice.picks, strict=True):
        chosen = unit.configs[index]
        for place, (group, config) in enumerate(
            zip(unit.groups, chosen.group_configs, strict=True)
        ):
            curve, in_float = losses.curves.get(group.key), place in chosen.in_float
            predicted_loss = 0.0 if curve is None else config.loss(curve)
            if latency.float_latencies and not in_float:
                predicted_loss += losses.conversion.get(group.key, 0.0)
            reason = _reason(unit, index, place, curve)
            for block in group.blocks:
                if chosen.sources:
                    ms_after = chosen.ms / 2  # half of the time of both blocks
                    operator = config.plain_operators
                else:
                    chosen_latency = latency.of(block, in_float=in_float)
                    ms_after = chosen_latency.configs[config].mean
                    operator = config.plain_operators or chosen_latency.operator
                decisions.append(
                    Decision(
                        block=block.name,
                        kind=group.kind,
                        count=group.count,
                        **config.recorded,
                        operator=operator or AS_EXPORTED,
                        ms_before=latency.default_of(block).original.mean,
                        ms_after=ms_after,
                        predicted_loss=predicted_loss,
                        in_float=in_float,
                        why=reason,
                    )
                )
    names = [block.name for group in latency.groups for block in group.blocks]
    return sorted(decisions, key=lambda decision: names.index(decision.block))


def _reason(unit: Unit, index: int, place: int, curve: LossCurve | None) -> str:
    """State in one sentence why a group of a unit has its configuration.

    Args:
        index: The index of the configuration among those of the unit.
        place: The index of the group in the unit.
        curve: The losses of the group; None if nothing can be removed.
    """
    group, chosen = unit.groups[place], unit.configs[index]
    if group.refusal is not None:
        return f"nothing can be removed: {group.refusal}"
    if curve is None:
        return f"it has too few {group.noun} to remove any"
    if len(unit.configs) == 1:
        return f"no smaller number of {group.noun} is faster at every length"
    parts = ["it is not converted"] if place in chosen.in_float else list[str]()
    parts += chosen.group_configs[place].reasons(group, curve)
    following = next(iter(unit.configs[index + 1 :]), None)
    if following is not None and following.ms < chosen.ms:
        smaller = f"{following.group_configs[place]} {group.noun}"
        if place in chosen.in_float and place not in following.in_float:
            smaller += " without float32"
        pair = " and its pair" if len(unit.groups) > 1 else ""
        parts.append(
            f"{smaller}{pair} would save {chosen.ms - following.ms:.3f} ms more and lose "
            f"{following.loss - chosen.loss:.4f} more"
        )
    return "; ".join(parts)
