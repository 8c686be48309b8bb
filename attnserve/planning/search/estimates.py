"""Options of each unit of blocks, with the losses and latencies that are expected of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from attnserve.limits import MAX_BLOCK_SLOWDOWN, MIN_SHARED_GAIN
from attnserve.planning.blocks.configurations import (
    Block,
    BlockConfig,
    BlockLatency,
    LossCurve,
    ReusePair,
    TiedBlocks,
)

__all__ = ["ChoiceUnit", "Estimates", "UnitOption", "changes_to_measure", "units_of"]

ChoiceUnit = tuple[TiedBlocks, ...]
"""Groups of tied blocks that are chosen together: one, or the two of a pair."""


@dataclass(frozen=True)
class UnitOption:
    """One way to change a unit: a configuration for each of its groups.

    Attributes:
        configs: The configuration of each of its groups.
        loss: The predicted loss at the model's output.
        ms: The mean latency over the requested shapes.
        float_blocks: The groups that stay float32 in an int8 or int4 model, by index.
    """

    configs: tuple[BlockConfig, ...]
    loss: float
    ms: float
    float_blocks: frozenset[int] = frozenset()

    def removes_nothing(self, unit: ChoiceUnit) -> bool:
        """Whether all of its groups stay whole."""
        return self.configs == tuple(BlockConfig(group.count) for group in unit)


def changes_to_measure(
    group: TiedBlocks, timed: BlockLatency, *, num_requested: int
) -> list[BlockConfig]:
    """The changes, besides removal, whose loss must be measured.

    Shared dimensions are left out unless they are faster, by ``MIN_SHARED_GAIN``, than as many
    separate dimensions of each head, which lose less.
    """
    configs = {config: float(np.mean(ms[:num_requested])) for config, ms in timed.configs.items()}
    changes: list[BlockConfig] = []
    for config, ms in configs.items():
        own = configs.get(config._replace(rank=None), ms)
        is_change = config.kept in (0, group.count) and config != BlockConfig(group.count)
        if is_change and (config.rank is None or MIN_SHARED_GAIN * ms < own):
            changes.append(config)
    return changes


def units_of(
    groups: Sequence[TiedBlocks], pairs: Sequence[ReusePair]
) -> list[tuple[ChoiceUnit, ReusePair | None]]:
    """The units of all groups, in order; each group is in one pair at most, best pairs first."""
    taken: set[TiedBlocks] = set()
    chosen: dict[TiedBlocks, ReusePair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.loss):
        if np.isfinite(pair.loss) and taken.isdisjoint((pair.source, pair.reader)):
            taken |= {pair.source, pair.reader}
            chosen[pair.source] = pair
    units: list[tuple[ChoiceUnit, ReusePair | None]] = []
    for group in groups:
        if pair := chosen.get(group):
            units.append(((pair.source, pair.reader), pair))
        elif group not in taken:
            units.append(((group,), None))
    return units


@dataclass(frozen=True, eq=False)
class Estimates:
    """Latencies and losses of the blocks of a model, from which options are built.

    Attributes:
        timed: Latencies in the precision of the goal, by block.
        curves: Losses by the key of a group.
        num_requested: The number of shapes at which the model should be fast.
        float_latencies: Latencies in float32, if the goal is an int8 or int4 model.
        conversion: The loss if a group alone is converted to that precision, by its key.
    """

    timed: Mapping[Block, BlockLatency]
    curves: Mapping[str, LossCurve]
    num_requested: int
    float_latencies: Mapping[Block, BlockLatency] = field(
        default_factory=dict["Block", "BlockLatency"]
    )
    conversion: Mapping[str, float] = field(default_factory=dict[str, float])

    def options(self, unit: ChoiceUnit, pair: ReusePair | None = None) -> list[UnitOption]:
        """The options of a unit by increasing loss, without those that are slower at some shape.

        Options without removal are included even if another option is faster and loses less.
        """
        options = self._fast(unit, pair)
        per_group = [[o for o in self._of_group(g) if o.removes_nothing((g,))] for g in unit]
        unreduced = [_joined(options) for options in product(*per_group)]
        return [*options, *(option for option in unreduced if option not in options)]

    def _fast(self, unit: ChoiceUnit, pair: ReusePair | None) -> list[UnitOption]:
        if pair is None:
            (group,) = unit
            return _rising(self._of_group(group))
        first, second = (_rising(self._of_group(group)) for group in unit)
        options = [_joined(both) for both in product(first, second)]
        original = sum(np.array(self.timed[group.blocks[0]].original) for group in unit)
        curve, other = (self.curves[group.key] for group in unit)
        conversion = sum(self.conversion.get(group.key, 0.0) for group in unit)
        for kept, ms in pair.times.items():
            if (np.array(ms) > MAX_BLOCK_SLOWDOWN * original).any():
                continue
            gone = pair.source.count - kept
            loss = curve.at(gone) + other.at(gone) + pair.loss * kept / pair.source.count
            configs = BlockConfig(kept), BlockConfig(kept, source=pair.source.names[0])
            options.append(UnitOption(configs, loss + conversion, self._mean(ms)))
        return _rising(options)

    def _of_group(self, group: TiedBlocks) -> list[UnitOption]:
        conversion_loss = self.conversion.get(group.key, 0.0)
        options = [
            replace(option, loss=option.loss + conversion_loss)
            for option in self._in_precision(group, self.timed)
        ]
        if all(block in self.float_latencies for block in group.blocks):
            options += [
                replace(option, float_blocks=frozenset({0}))
                for option in self._in_precision(group, self.float_latencies)
            ]
        return options

    def _in_precision(
        self, group: TiedBlocks, timed: Mapping[Block, BlockLatency]
    ) -> list[UnitOption]:
        """The options of one group by these latencies, without the loss of a conversion."""
        times = [timed[block] for block in group.blocks]
        original = np.sum([latency.original for latency in times], axis=0)
        unreduced = BlockConfig(group.count)
        curve = self.curves.get(group.key)
        options: list[UnitOption] = []
        for config in set.intersection(*(set(latency.configs) for latency in times)):
            ms = np.sum([latency.configs[config] for latency in times], axis=0)
            if config == unreduced:
                loss = 0.0
            elif curve is None or (ms > MAX_BLOCK_SLOWDOWN * original).any():
                continue
            else:
                loss = curve.loss_of(config)
            if loss is not None:
                options.append(UnitOption((config,), loss, self._mean(ms)))
        return options

    def _mean(self, times: Sequence[float] | np.ndarray) -> float:
        return float(np.mean(times[: self.num_requested]))


def _joined(options: Sequence[UnitOption]) -> UnitOption:
    """One option of each group of a unit as one option of the unit."""
    return UnitOption(
        tuple(config for option in options for config in option.configs),
        sum(option.loss for option in options),
        sum(option.ms for option in options),
        frozenset(i for i, option in enumerate(options) if option.float_blocks),
    )


def _rising(options: Sequence[UnitOption]) -> list[UnitOption]:
    """Sort options by loss, and drop dominated ones."""
    ordered = sorted(options, key=lambda option: (option.loss, option.ms))
    rising = ordered[:1]
    for option in ordered[1:]:
        if option.ms < rising[-1].ms:
            rising.append(option)
    return rising
