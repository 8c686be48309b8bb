"""The units of a model, and the predicted loss and time of each of their configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product

from attnserve.planning.blocks.configurations import BlockConfig, LossCurve
from attnserve.planning.blocks.groups import BlockGroup, ReusePair
from attnserve.planning.blocks.latencies import Latencies
from attnserve.planning.search.block_timing import BlockLatency
from graph_passes.blocks import Block

__all__ = ["Estimates", "Unit", "UnitConfig", "changes_to_measure", "paired_groups"]


@dataclass(frozen=True)
class UnitConfig:
    """A unit after rewrites: a configuration for each of its groups, with predicted loss and time.

    Attributes:
        group_configs: The configuration of each group.
        loss: The predicted loss at the model's output.
        ms: The mean latency over the requested shapes.
        in_float: The groups that are not converted to integers, by index.
    """

    group_configs: tuple[BlockConfig, ...]
    loss: float
    ms: float
    in_float: frozenset[int] = frozenset()

    @property
    def sources(self) -> set[str]:
        """The attention blocks whose probabilities others of the unit reuse."""
        return {name for each in self.group_configs for name in each.sources}

    def is_unreduced(self, groups: Sequence[BlockGroup]) -> bool:
        """Whether all of these groups, those of the unit, stay whole."""
        return all(
            config == group.whole for config, group in zip(self.group_configs, groups, strict=True)
        )


@dataclass(frozen=True, eq=False)
class Unit:
    """Groups whose configurations are chosen together: one, or the two of a ``ReusePair``.

    Attributes:
        configs: All configurations, by rising loss; then the unreduced ones.
    """

    groups: tuple[BlockGroup, ...]
    configs: Sequence[UnitConfig]

    @property
    def unreduced(self) -> list[int]:
        """The indices of the unreduced configurations."""
        return [
            index for index, config in enumerate(self.configs) if config.is_unreduced(self.groups)
        ]


def changes_to_measure(group: BlockGroup, latency: BlockLatency) -> list[BlockConfig]:
    """The changes, besides removal, whose loss must be measured.

    A configuration is left out unless it outruns the one that loses less (``BlockConfig.outruns``).
    """
    return [
        config
        for config in latency.configs
        if config.change and config.kept in (0, group.count) and config.outruns(latency.configs)
    ]


def paired_groups(
    groups: Sequence[BlockGroup], pairs: Sequence[ReusePair]
) -> list[BlockGroup | ReusePair]:
    """All groups in order, two of them as a pair where possible.

    Each group is in one pair at most, best pairs first.
    """
    taken: set[BlockGroup] = set()
    chosen: dict[BlockGroup, ReusePair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.loss):
        if math.isfinite(pair.loss) and taken.isdisjoint((pair.source, pair.reader)):
            taken |= {pair.source, pair.reader}
            chosen[pair.source] = pair
    return [chosen.get(group, group) for group in groups if group in chosen or group not in taken]


@dataclass(frozen=True, eq=False)
class Estimates:
    """Latencies and losses of the blocks of a model, from which units are built.

    Attributes:
        latencies: Latencies in the precision of the goal, by block; a group with a block that is
            missing stays float32.
        curves: Losses by the key of a group.
        float_latencies: Latencies in float32, if the goal is an int8 or int4 model.
        conversion: The loss if a group alone is converted to that precision, by its key.
    """

    latencies: Mapping[Block, BlockLatency]
    curves: Mapping[str, LossCurve]
    float_latencies: Mapping[Block, BlockLatency] = field(
        default_factory=dict["Block", "BlockLatency"]
    )
    conversion: Mapping[str, float] = field(default_factory=dict[str, float])

    def unit(self, part: BlockGroup | ReusePair) -> Unit:
        """The unit of a group or a pair, without configurations that are slower at some shape.

        Unreduced configurations are included even if another is faster and loses less.
        """
        if isinstance(part, ReusePair):
            groups = part.source, part.reader
            configs = self._of_pair(part)
        else:
            groups = (part,)
            configs = _rising(self._of_group(part))
        per_group = [[c for c in self._of_group(g) if c.is_unreduced((g,))] for g in groups]
        unreduced = [_joined(each) for each in product(*per_group)]
        return Unit(groups, [*configs, *(c for c in unreduced if c not in configs)])

    def _of_pair(self, pair: ReusePair) -> list[UnitConfig]:
        groups = pair.source, pair.reader
        first, second = (_rising(self._of_group(group)) for group in groups)
        configs = [_joined(both) for both in product(first, second)]
        original = Latencies.total([self.latencies[group.blocks[0]].original for group in groups])
        curve, other = (self.curves[group.key] for group in groups)
        conversion = sum(self.conversion.get(group.key, 0.0) for group in groups)
        for kept, ms in pair.times.items():
            if not ms.keeps_up_with(original):
                continue
            source, reader = BlockConfig(kept), pair.reusing(kept, curve)
            loss = source.loss(curve) + reader.loss(other) + conversion
            configs.append(UnitConfig((source, reader), loss, ms.mean))
        return _rising(configs)

    def _of_group(self, group: BlockGroup) -> list[UnitConfig]:
        conversion_loss = self.conversion.get(group.key, 0.0)
        configs = [
            replace(config, loss=config.loss + conversion_loss)
            for config in self._in_precision(group, self.latencies)
        ]
        configs += [
            replace(config, in_float=frozenset({0}))
            for config in self._in_precision(group, self.float_latencies)
        ]
        return configs

    def _in_precision(
        self, group: BlockGroup, latencies: Mapping[Block, BlockLatency]
    ) -> list[UnitConfig]:
        """The configurations of one group by these latencies, without the loss of a conversion.

        There are none if a block has no latencies.
        """
        if not all(block in latencies for block in group.blocks):
            return []
        times = [latencies[block] for block in group.blocks]
        original = Latencies.total([latency.original for latency in times])
        curve = self.curves.get(group.key)
        configs: list[UnitConfig] = []
        for config in times[0].configs:
            if not all(config in latency.configs for latency in times):
                continue
            ms = Latencies.total([latency.configs[config] for latency in times])
            if config == group.whole:
                loss = 0.0
            elif curve is None or not ms.keeps_up_with(original):
                continue
            else:
                loss = config.loss(curve)
            if math.isfinite(loss):
                configs.append(UnitConfig((config,), loss, ms.mean))
        return configs


def _joined(configs: Sequence[UnitConfig]) -> UnitConfig:
    """The configuration of a unit whose groups have these configurations, one of each group."""
    return UnitConfig(
        tuple(chain.from_iterable(config.group_configs for config in configs)),
        sum(config.loss for config in configs),
        sum(config.ms for config in configs),
        frozenset(index for index, config in enumerate(configs) if config.in_float),
    )


def _rising(configs: Sequence[UnitConfig]) -> list[UnitConfig]:
    """Sort configurations by loss, and drop dominated ones."""
    ordered = sorted(configs, key=lambda config: (config.loss, config.ms))
    rising = ordered[:1]
    for config in ordered[1:]:
        if config.ms < rising[-1].ms:
            rising.append(config)
    return rising
