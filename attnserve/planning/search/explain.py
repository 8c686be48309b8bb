"""Explain a choice block by block, and sample the Pareto front for the report."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnserve.planning.blocks.configurations import (
    AS_EXPORTED,
    BlockConfig,
    LossCurve,
    ReusePair,
    TiedBlocks,
)
from attnserve.planning.blocks.pareto import Choice
from attnserve.planning.plans.plan_file import Decision, Point
from attnserve.planning.search.choice_set import ChoiceSet, Picked

__all__ = ["explain", "front_points"]

MAX_POINTS = 50
"""Number of points of the front that plan.json lists, besides built ones."""


def front_points(
    choices: ChoiceSet, measured: Mapping[tuple[int, ...], tuple[float, float]]
) -> list[Point]:
    """Points of the front, evenly by their index, and all that were built.

    Args:
        measured: (loss, cosine) of the built choices, by their option indices.
    """
    front = choices.front
    indices = np.linspace(0, len(front) - 1, min(len(front), MAX_POINTS)).round().astype(int)
    chosen = {*indices.tolist(), *(i for i, c in enumerate(front) if c.picks in measured)}
    points: list[Point] = []
    for index in sorted(chosen):
        choice = front[index]
        loss, cosine = measured.get(choice.picks, (None, None))
        points.append(
            Point(
                speedup=choices.predicted_speedup(choice),
                predicted_loss=choice.loss,
                measured_loss=loss,
                cosine=cosine,
            )
        )
    return points


def explain(choices: ChoiceSet, choice: Choice) -> list[Decision]:
    """The decision for each block in a choice, with the reason, in order of execution."""
    timing = choices.timing
    decisions: list[Decision] = []
    for picked in choices.picked(choice):
        for group, config in picked:
            curve, in_float = choices.curves.get(group.key), picked.in_float(group)
            is_int8 = bool(timing.float_latencies) and not in_float
            for block in group.blocks:
                ms_after, operator = _ms_after(choices, picked, group, config, block.name)
                decisions.append(
                    Decision(
                        block=block.name,
                        kind=group.kind,
                        count=group.count,
                        **config._asdict(),
                        written=operator,
                        ms_before=timing.mean(timing.blocks[block].original),
                        ms_after=ms_after,
                        predicted_loss=_predicted_loss(curve, group, config, picked.pair)
                        + (choices.conversion.get(group.key, 0.0) if is_int8 else 0.0),
                        in_float=in_float,
                        why=_reason(picked, group, config, curve),
                    )
                )
    names = [block.name for group in timing.groups for block in group.blocks]
    return sorted(decisions, key=lambda decision: names.index(decision.block))


def _predicted_loss(
    curve: LossCurve | None, group: TiedBlocks, config: BlockConfig, pair: ReusePair | None
) -> float:
    if curve is None or config == BlockConfig(group.count):
        return 0.0
    if config.source is None:
        return curve.loss_of(config) or 0.0
    assert pair is not None
    return curve.at(group.count - config.kept) + pair.loss * config.kept / group.count


def _ms_after(
    choices: ChoiceSet, picked: Picked, group: TiedBlocks, config: BlockConfig, name: str
) -> tuple[float, str]:
    """The time of one block, and what computes it; half of both blocks of a reusing pair."""
    timing = choices.timing
    if picked.pair is not None and picked.reuses:
        both = timing.mean(picked.pair.times[config.kept])
        return both / 2, config.plain_operators or AS_EXPORTED
    block = next(block for block in group.blocks if block.name == name)
    latency = timing.latency(block, in_float=picked.in_float(group))
    return timing.mean(latency.configs[config]), config.plain_operators or latency.operator


def _reason(picked: Picked, group: TiedBlocks, config: BlockConfig, curve: LossCurve | None) -> str:
    """Why a block has its configuration, in one sentence."""
    what = "heads" if group.kind == "attention" else "neurons"
    if group.refusal is not None:
        return f"nothing can be removed: {group.refusal}"
    if curve is None:
        return f"it has too few {what} to remove any"
    if len(picked.options) == 1:
        return f"no smaller number of {what} is faster at every length"
    parts = ["it stays in float32"] if picked.in_float(group) else list[str]()
    removed = group.count - config.kept
    if not config.kept:
        parts.append(f"replacing it by an affine map loses {curve.loss_of(config) or 0:.4f}")
    elif removed:
        parts.append(
            f"the {removed} removed {what} hold {curve.own_loss[removed]:.1%} of its output that "
            "the others cannot reproduce"
        )
    if config.change:
        lost = (curve.loss_of(config) or 0.0) - (curve.loss_of(BlockConfig(config.kept)) or 0.0)
        parts.append(f"{config.change} lose {lost:.4f}")
    if config.source is not None and picked.pair is not None:
        parts.append(
            f"reusing the probabilities of {config.source} in all heads loses "
            f"{picked.pair.loss:.4f}"
        )
    now, *rest = picked.options[picked.index : picked.index + 2]
    if rest and rest[0].ms < now.ms:
        (following,) = rest
        place = picked.unit.index(group)
        smaller = f"{following.configs[place]} {what}"
        if place in now.float_blocks and place not in following.float_blocks:
            smaller += " without float32"
        pair = " and its pair" if len(picked.unit) > 1 else ""
        parts.append(
            f"{smaller}{pair} would save {now.ms - following.ms:.3f} ms more and lose "
            f"{following.loss - now.loss:.4f} more"
        )
    return "; ".join(parts)
