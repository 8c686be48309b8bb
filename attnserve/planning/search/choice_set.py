"""All choices for a model: the options of each block, their Pareto front, and their plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from attnserve.literals import Precision
from attnserve.planning.blocks.configurations import (
    AS_EXPORTED,
    BlockConfig,
    LossCurve,
    ReusePair,
    TiedBlocks,
    passes_of,
)
from attnserve.planning.blocks.loss_curves import BlockLosses
from attnserve.planning.blocks.pareto import Choice, pareto_front
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.estimates import ChoiceUnit, Estimates, UnitOption, units_of
from attnserve.planning.search.model_timing import ModelTiming
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.reuse_attention import ReuseAttention, renumbered

__all__ = ["ChoiceSet", "Picked"]


@dataclass(frozen=True, eq=False)
class Picked:
    """The selected option of one unit.

    Attributes:
        pair: The pair, if the second attention of the unit may reuse heads of the first; else None.
        options: All options of the unit, by rising loss.
        index: Index of the selected option.
    """

    unit: ChoiceUnit
    pair: ReusePair | None
    options: Sequence[UnitOption]
    index: int

    @property
    def configs(self) -> tuple[BlockConfig, ...]:
        return self.options[self.index].configs

    @property
    def reuses(self) -> bool:
        """Whether the second attention reuses the probabilities of the first."""
        return any(config.source is not None for config in self.configs)

    def in_float(self, group: TiedBlocks) -> bool:
        """Whether a group stays float32 in an int8 or int4 model."""
        return self.unit.index(group) in self.options[self.index].float_blocks

    def __iter__(self) -> Iterator[tuple[TiedBlocks, BlockConfig]]:
        return zip(self.unit, self.configs, strict=True)


@dataclass(frozen=True, eq=False)
class ChoiceSet:
    """The choices of a search.

    Attributes:
        curves: The estimated losses of each group of tied blocks, by its key.
        conversion: The loss of each group's conversion to int8 or int4.
        units: The groups that are chosen together, with their pair if they are one.
        options: The options of each unit.
        front: The choices that no other choice beats in both loss and time, by rising loss.
        precision: The precision of all models.
        nothing_removed: The Pareto front of choices without removal: fused operators, and the
            precision of each block.
    """

    timing: ModelTiming
    curves: Mapping[str, LossCurve]
    conversion: Mapping[str, float]
    units: Sequence[tuple[ChoiceUnit, ReusePair | None]]
    options: Sequence[Sequence[UnitOption]]
    front: Sequence[Choice]
    precision: Precision
    nothing_removed: Sequence[Choice] = ()

    @classmethod
    def of(cls, timing: ModelTiming, losses: BlockLosses, precision: Precision) -> ChoiceSet:
        """Build the set from latencies and losses."""
        units = units_of(timing.groups, losses.pairs)
        estimates = Estimates(
            timing.blocks,
            losses.curves,
            timing.num_requested,
            timing.float_latencies,
            losses.conversion,
        )
        options = [estimates.options(unit, pair) for unit, pair in units]
        return cls(
            timing=timing,
            curves=losses.curves,
            conversion=losses.conversion,
            units=units,
            options=options,
            front=pareto_front(options),
            precision=precision,
            nothing_removed=_front_without_removal([unit for unit, _ in units], options),
        )

    def predicted_ms(self, choice: Choice) -> float:
        """The predicted time of the whole model."""
        return self.timing.other_ms + choice.ms

    def predicted_speedup(self, choice: Choice) -> float:
        """The predicted speed-up over the original in the requested precision."""
        return self.timing.original_ms / max(self.predicted_ms(choice), 1e-9)

    def picked(self, choice: Choice) -> Iterator[Picked]:
        """The picked option of each unit."""
        for (unit, pair), options, index in zip(
            self.units, self.options, choice.picks, strict=True
        ):
            yield Picked(unit, pair, options, index)

    def plan(self, choice: Choice) -> Plan:
        """Build the plan of a choice."""
        passes: list[RewritePass] = []
        float_blocks: list[str] = []
        masks: dict[str, list[int]] = {}
        edges: dict[str, dict[int, tuple[str, int]]] = {}
        for picked in self.picked(choice):
            sources = {config.source for config in picked.configs}
            for group, config in picked:
                mask = self._mask(group, config, picked.pair)
                for block in group.blocks:
                    passes += passes_of(block, config, mask)
                    masks[block.name] = mask
                    if config.source is not None:
                        assert picked.pair is not None
                        edges[block.name] = picked.pair.edges(mask)
                    in_float = picked.in_float(group)
                    operator = self.timing.latency(block, in_float=in_float).operator
                    float_blocks += [block.name] if in_float else []
                    needs_plain = config.needs_plain_operators or block.name in sources
                    if operator == "gelu":
                        passes.append(FuseGelu([block.name]))
                    elif operator != AS_EXPORTED and not needs_plain:
                        passes.append(FuseAttention({block.name: operator}))
        passes.append(ReuseAttention(renumbered(edges, masks)))
        if self.timing.residual_fusion is not None:
            passes += [FoldBiases(), self.timing.residual_fusion]
        return Plan.merged(passes, self.precision, float_blocks)

    def _mask(self, group: TiedBlocks, config: BlockConfig, pair: ReusePair | None) -> list[int]:
        """1 for each head or neuron of a group that is kept."""
        if not config.kept or config.kept == group.count:
            return [1] * group.count
        if config.source is None:
            return self.curves[group.key].mask(config.kept)
        assert pair is not None
        return pair.masks(self.curves[pair.source.key], config.kept)[1]


def _front_without_removal(
    units: Sequence[ChoiceUnit], options: Sequence[Sequence[UnitOption]]
) -> list[Choice]:
    """The Pareto front of the options that remove nothing; picks are indices of all options."""
    unreduced = [
        [index for index, option in enumerate(of_unit) if option.removes_nothing(unit)]
        for unit, of_unit in zip(units, options, strict=True)
    ]
    front = pareto_front([
        [of_unit[index] for index in indices]
        for of_unit, indices in zip(options, unreduced, strict=True)
    ])  # fmt: skip
    return [
        replace(
            choice,
            picks=tuple(
                indices[pick] for indices, pick in zip(unreduced, choice.picks, strict=True)
            ),
        )
        for choice in front
    ]
