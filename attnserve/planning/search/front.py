"""The Pareto front of the choices for a model, and the plan of each choice."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnserve.limits import MIN_GAIN
from attnserve.literals import Precision
from attnserve.planning.blocks.configurations import (
    BlockConfig,
    BlockOperator,
    LossCurve,
    fusion_of,
)
from attnserve.planning.blocks.groups import BlockGroup
from attnserve.planning.blocks.loss_curves import BlockLosses
from attnserve.planning.blocks.pareto import Choice, pareto_front
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.estimates import Estimates, Unit, paired_groups
from attnserve.planning.search.model_latency import ModelLatency
from graph_passes.blocks import Block
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases

__all__ = ["ConfiguredBlock", "Front"]


@dataclass(frozen=True, eq=False)
class ConfiguredBlock:
    """A block in a choice.

    Attributes:
        unit, pick: Its unit, and the index of the unit's configuration.
        place: The index of its group in the unit.
        curve: The losses of its group; None if nothing can be removed.
        mask: 1 for each head or neuron that is kept.
        in_float: Whether it is not converted to integers (``Scheme.rest``).
        operator: The fused operator that computes it; None if none does.
        loss: The predicted loss at the model's output by its group alone.
        ms: The latency of the block alone, mean over the requested lengths.
    """

    block: Block
    group: BlockGroup
    config: BlockConfig
    unit: Unit
    pick: int
    place: int
    curve: LossCurve | None
    mask: Sequence[int]
    in_float: bool
    operator: BlockOperator | None
    loss: float
    ms: float

    @property
    def passes(self) -> list[RewritePass]:
        """The passes that give it its configuration and its operator."""
        passes: list[RewritePass] = [*self.group.passes(self.block, self.config, self.mask)]
        if self.operator is not None:
            passes.append(fusion_of(self.block.name, self.operator))
        return passes


@dataclass(frozen=True, eq=False)
class Front:
    """The choices that no other choice beats in both predicted loss and time.

    Attributes:
        latency, losses: The measurements from which the configurations are predicted.
        units: The units of the model, in order of execution.
        choices: The front, by rising loss.
        precision: The precision of all models.
        unreduced: The front of the unreduced choices: fused operators, and the precision of each
            block.
    """

    latency: ModelLatency
    losses: BlockLosses
    units: Sequence[Unit]
    choices: Sequence[Choice]
    precision: Precision
    unreduced: Sequence[Choice] = ()

    @classmethod
    def of(cls, latency: ModelLatency, losses: BlockLosses, precision: Precision) -> Front:
        """Compute the front from latencies and losses."""
        estimates = Estimates(
            latency.latencies, losses.curves, latency.float_latencies, losses.conversion
        )
        units = [estimates.unit(part) for part in paired_groups(latency.groups, losses.pairs)]
        every = [range(len(unit.configs)) for unit in units]
        return cls(
            latency=latency,
            losses=losses,
            units=units,
            choices=_front(units, every),
            precision=precision,
            unreduced=_front(units, [unit.unreduced for unit in units]),
        )

    def predicted_ms(self, choice: Choice) -> float:
        """The predicted time of the whole model."""
        return self.latency.other_ms + choice.ms

    def predicted_speedup(self, choice: Choice) -> float:
        """The predicted speed-up over the original in the requested precision."""
        return self.latency.original_ms / max(self.predicted_ms(choice), 1e-9)

    def index_of(self, predicted_loss: float) -> int:
        """The index of the fastest choice with at most this predicted loss."""
        return bisect_right(self.choices, predicted_loss, key=lambda choice: choice.loss) - 1

    def first_within(self, ms: float) -> int:
        """The index of the least lossy choice with at most this predicted time."""
        return bisect_left(self.choices, -ms, key=lambda choice: -self.predicted_ms(choice))

    def is_near(self, low: int, high: int) -> bool:
        """Whether two choices are so close that no choice between them is worth building.

        Args:
            low, high: The choices by index.
        """
        slow, fast = (self.predicted_ms(self.choices[index]) for index in (low, high))
        return slow < MIN_GAIN * fast

    def blocks(self, choice: Choice) -> Iterator[ConfiguredBlock]:
        """Each block with its configuration in a choice, unit by unit."""
        for unit, pick in zip(self.units, choice.picks, strict=True):
            chosen = unit.configs[pick]
            for place, (group, config) in enumerate(
                zip(unit.groups, chosen.group_configs, strict=True)
            ):
                curve, in_float = self.losses.curves.get(group.key), place in chosen.in_float
                mask = config.mask(range(group.count) if curve is None else curve.order)
                loss = 0.0 if curve is None else config.loss(curve)
                if self.latency.float_latencies and not in_float:
                    loss += self.losses.conversion.get(group.key, 0.0)
                for block in group.blocks:
                    latency = self.latency.of(block, in_float=in_float)
                    is_plain = config.plain_operators or block.name in chosen.sources
                    operator = None if is_plain else latency.operator
                    # Two blocks that share probabilities are timed together: each gets half.
                    ms = chosen.ms / 2 if chosen.sources else latency.configs[config].mean
                    yield ConfiguredBlock(
                        block,
                        group,
                        config,
                        unit,
                        pick,
                        place,
                        curve,
                        mask,
                        in_float,
                        operator,
                        loss,
                        ms,
                    )

    def plan(self, choice: Choice) -> Plan:
        """The plan that makes a choice."""
        blocks = list(self.blocks(choice))
        passes = [graph_pass for chosen in blocks for graph_pass in chosen.passes]
        if self.latency.residual_fusion is not None:
            passes += [FoldBiases(), self.latency.residual_fusion.graph_pass]
        float_blocks = [chosen.block.name for chosen in blocks if chosen.in_float]
        return Plan.merged(passes, self.precision, float_blocks)


def _front(units: Sequence[Unit], compared: Sequence[Sequence[int]]) -> list[Choice]:
    """The Pareto front of some configurations of each unit, which are given by index."""
    front = pareto_front(
        [
            [(unit.configs[index].loss, unit.configs[index].ms) for index in indices]
            for unit, indices in zip(units, compared, strict=True)
        ]
    )
    return [
        replace(
            choice,
            picks=tuple(places[pick] for places, pick in zip(compared, choice.picks, strict=True)),
        )
        for choice in front
    ]
