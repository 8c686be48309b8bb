"""The Pareto front of the choices for a model, and the plan of each choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from attnserve.literals import Precision
from attnserve.planning.blocks.configurations import fusion_of
from attnserve.planning.blocks.loss_curves import BlockLosses
from attnserve.planning.blocks.pareto import Choice, pareto_front
from attnserve.planning.plans.plan import Plan
from attnserve.planning.search.estimates import Estimates, Unit, UnitConfig, paired_groups
from attnserve.planning.search.model_latency import ModelLatency
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fold_biases import FoldBiases

__all__ = ["Front"]


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
            latency.latencies,
            losses.curves,
            latency.float_latencies,
            losses.conversion,
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

    def configs(self, choice: Choice) -> Iterator[tuple[Unit, UnitConfig]]:
        """Each unit with its configuration in a choice."""
        for unit, index in zip(self.units, choice.picks, strict=True):
            yield unit, unit.configs[index]

    def plan(self, choice: Choice) -> Plan:
        passes: list[RewritePass] = []
        float_blocks: list[str] = []
        for unit, unit_config in self.configs(choice):
            for place, (group, config) in enumerate(
                zip(unit.groups, unit_config.group_configs, strict=True)
            ):
                mask = config.mask(group, self.losses.curves)
                in_float = place in unit_config.in_float
                for block in group.blocks:
                    passes += config.passes(block, mask)
                    operator = self.latency.of(block, in_float=in_float).operator
                    float_blocks += [block.name] if in_float else []
                    is_source = block.name in unit_config.sources
                    needs_plain = config.plain_operators is not None or is_source
                    if operator is not None and not needs_plain:
                        passes.append(fusion_of(block.name, operator))
        if self.latency.residual_fusion is not None:
            passes += [FoldBiases(), self.latency.residual_fusion]
        return Plan.merged(passes, self.precision, float_blocks)


def _front(units: Sequence[Unit], compared: Sequence[Sequence[int]]) -> list[Choice]:
    """The Pareto front of some configurations of each unit, which are given by index."""
    front = pareto_front([
        [(unit.configs[index].loss, unit.configs[index].ms) for index in indices]
        for unit, indices in zip(units, compared, strict=True)
    ])  # fmt: skip
    return [
        replace(
            choice,
            picks=tuple(places[pick] for places, pick in zip(compared, choice.picks, strict=True)),
        )
        for choice in front
    ]
