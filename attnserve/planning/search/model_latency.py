"""Latencies of all blocks of a model, of pairs of blocks, and of the rest of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Self

import onnx_ir as ir

from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.example_inputs import example_inputs
from attnserve.planning.blocks.configurations import AS_EXPORTED
from attnserve.planning.blocks.groups import BlockGroup, ReusePair
from attnserve.planning.plans.plan_file import TimedBlock, TimedReuse
from attnserve.planning.search.block_timing import BlockLatency, BlockTimer
from attnserve.planning.search.residual_timing import ResidualFusion, residual_fusion
from attnserve.precision.convert import convert
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.part_latency import LatencyTable, Part, default_cache
from graph_passes.analysis.workload import Workload
from graph_passes.blocks import Block

__all__ = ["ModelLatency"]


@dataclass(frozen=True, eq=False)
class ModelLatency:
    """Latencies of the parts of a model in milliseconds.

    Attributes:
        workloads: The timed workloads: the requested ones, and two others.
        latencies: The latencies of each block with its operators and in its configurations. Blocks
            that cannot be converted to the precision of the goal are left out.
        float_latencies: The same in float32, if the goal is an int8 or int4 model; otherwise empty.
        pairs: The latencies of pairs of attention blocks that share probabilities.
        residual_fusion: The fastest pass for residual additions; None if the export is fastest.
        other_ms: Latency of the rest of the model, after residual fusion.
    """

    groups: Sequence[BlockGroup]
    workloads: Sequence[Workload]
    table: LatencyTable
    latencies: Mapping[Block, BlockLatency]
    float_latencies: Mapping[Block, BlockLatency]
    pairs: Sequence[ReusePair]
    residual_fusion: ResidualFusion | None
    other_ms: float = 0.0

    @classmethod
    def time(
        cls,
        job: Job,
        checked: Sequence[Workload],
        model: ir.Model,
        groups: Sequence[BlockGroup],
    ) -> Self:
        """Time all configurations of all blocks at the requested and at two extreme workloads.

        Args:
            checked: The workloads of which the first and the last are timed as well.
            model: The model in the newest opset that an operator of a block needs.
        """
        requested, context, precision = job.requested_workloads, job.context, job.target.precision
        others = [workload for workload in checked if workload not in requested]
        extremes = list(dict.fromkeys((*others[:1], *others[-1:])))
        feeds, extreme_feeds = (
            [example_inputs(job.original, workload, context.seed) for workload in workloads]
            for workloads in (requested, extremes)
        )
        cache = default_cache() if context.timer is None else None
        device = replace(context.device, runtime=job.runtime_for(precision))
        table = LatencyTable(cache, device, context.timer)
        timer = BlockTimer(model, table, feeds, extreme_feeds, precision, context.progress)
        latencies = timer.time_blocks(groups)
        float_latencies: Mapping[Block, BlockLatency] = {}
        if (scheme := SCHEMES[precision]).allows_float_blocks:
            float_latencies = replace(timer, precision=scheme.rest).time_blocks(groups)
        pairs = timer.time_pairs(groups, latencies)
        fusion = residual_fusion(timer)
        converted = convert(job.original, precision, job.calibration, to_nearest=True)
        total_ms = timer.time(Part(converted, timer.feeds), {})[None].mean
        parts = cls(
            groups=groups,
            workloads=[*requested, *extremes],
            table=table,
            latencies=latencies,
            float_latencies=float_latencies,
            pairs=pairs,
            residual_fusion=fusion,
        )
        # Blocks may take longer alone than in the model; the rest then counts as 0.
        return replace(parts, other_ms=max(total_ms - parts.original_ms, 0.0))

    def of(self, block: Block, *, in_float: bool) -> BlockLatency:
        """The latencies of a block that is not converted, or in the precision of the goal."""
        return (self.float_latencies if in_float else self.latencies)[block]

    def default_of(self, block: Block) -> BlockLatency:
        """The latencies in the precision of the goal, or without conversion if it is impossible."""
        return self.of(block, in_float=block not in self.latencies)

    @property
    def original_ms(self) -> float:
        """Latency of the original model, as the sum of its parts."""
        blocks = [self.default_of(block) for group in self.groups for block in group.blocks]
        in_blocks = sum(latency.original.mean for latency in blocks)
        in_residuals = 0.0 if self.residual_fusion is None else self.residual_fusion.saved_ms
        return self.other_ms + in_residuals + in_blocks

    def recorded(self, rest: Precision) -> tuple[TimedBlock | TimedReuse, ...]:
        """The latencies of each distinct block, and of each distinct pair.

        Args:
            rest: The precision of blocks that are not converted.
        """
        lengths = tuple(workload.length for workload in self.workloads)
        rows: dict[object, TimedBlock | TimedReuse] = {}
        for latencies, group in product((self.latencies, self.float_latencies), self.groups):
            for block in group.blocks:
                latency = latencies.get(block)
                if latency is None or latency in rows:
                    continue
                rows[latency] = TimedBlock(
                    block=block.name,
                    kind=group.kind,
                    precision=rest if latencies is self.float_latencies else "",
                    lengths=lengths,
                    exported=tuple(latency.original),
                    operator=latency.operator or AS_EXPORTED,
                    operators={name: tuple(ms) for name, ms in latency.operators.items()},
                    kept={str(config): tuple(ms) for config, ms in latency.configs.items()},
                )
        for pair in self.pairs:
            both = self.latencies[pair.source.blocks[0]], self.latencies[pair.reader.blocks[0]]
            if both not in rows:
                rows[both] = TimedReuse(
                    block=pair.reader.names[0],
                    kind="reuse",
                    source=pair.source.names[0],
                    lengths=lengths,
                    kept={str(kept): tuple(ms) for kept, ms in pair.times.items()},
                    saved_ms=pair.saved_ms,
                )
        return tuple(rows.values())
