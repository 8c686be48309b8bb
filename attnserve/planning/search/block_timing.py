"""Time the operators and the configurations of each block, interleaved with the exported block."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import onnx_ir as ir

from attnserve.calibration.linear_maps import last_map
from attnserve.planning.blocks.configurations import (
    BlockConfig,
    BlockOperator,
    Reusing,
    fusion_of,
)
from attnserve.planning.blocks.groups import (
    AttentionGroup,
    BlockGroup,
    ReusePair,
    apply_config,
    reusable_pairs,
)
from attnserve.planning.blocks.latencies import Latencies
from attnserve.planning.search.part_timing import PartTimer
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.part_latency import Cut, Part, cut_out
from graph_passes.analyses import Analyses
from graph_passes.blocks import Block
from graph_passes.errors import IMPOSSIBLE
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention

__all__ = ["BlockLatency", "BlockTimer"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class BlockLatency:
    """Latencies of one block.

    Attributes:
        original: The latencies of the block as exported.
        operator: The fastest operator of the unreduced block; None if the export is faster.
        configs: The latencies of each configuration in the order of reports, computed by
            ``operator``.
        operators: The latencies of the unreduced block, computed by each fused operator.
    """

    original: Latencies
    operator: BlockOperator | None
    configs: Mapping[BlockConfig, Latencies]
    operators: Mapping[BlockOperator, Latencies]


class _BlockPart(NamedTuple):
    """A block of a group as a part of the model.

    Attributes:
        part: The block in float32.
        operators: The fused operators that may be possible.
    """

    group: BlockGroup
    block: Block
    part: Part
    operators: tuple[BlockOperator, ...]


class BlockTimer(PartTimer):
    """Times blocks of a model, as exported and rewritten."""

    def time_blocks(self, groups: Sequence[BlockGroup]) -> dict[Block, BlockLatency]:
        """Time each block with every operator, and each configuration with the fastest one.

        Blocks with equal work are timed once. Blocks whose conversion fails are left out, if the
        precision allows that they stay float32.

        Raises:
            AttnserveError: The conversion of a block fails, and the block may not stay float32.
        """
        may_fail = SCHEMES[self.precision].allows_float_blocks
        analyses = Analyses.of(self.model)
        operators = [each for group in groups for each in group.operators(analyses)]
        members = [(group, block) for group in groups for block in group.blocks]
        parts = self.cut_out(self.model, [_cut(block) for _, block in members])
        equal_work: dict[object, list[_BlockPart]] = {}
        for (group, block), part, possible in zip(members, parts, operators, strict=True):
            keys = (part.key(index) for index in range(len(self.feeds)))
            work = (*keys, possible, group.refusal is None)
            equal_work.setdefault(work, []).append(_BlockPart(group, block, part, possible))
        latencies: dict[Block, BlockLatency] = {}
        for done, equal in enumerate(equal_work.values(), start=1):
            try:
                original = self.converted(equal[0].part)
            except IMPOSSIBLE as error:
                if not may_fail:
                    raise
                names = ", ".join(each.block.name for each in equal)
                log.warning("%s: not timed in %s: %s", names, self.precision, error.what)
            else:
                latency = self._time_block(equal[0], original)
                latencies |= {each.block: latency for each in equal}
            self.progress("time blocks", done, len(equal_work))
        return latencies

    def _time_block(self, timed: _BlockPart, original: Part) -> BlockLatency:
        """Time a block with each operator, then its configurations with the fastest one.

        Args:
            original: The block in the precision of the timer.
        """
        possible: dict[BlockOperator, Part] = {
            operator: part
            for operator in timed.operators
            if (part := _fused(timed.part, operator)) is not None
        }
        fused: dict[BlockOperator, Part] = {
            operator: part
            for operator, part in self.convertible(possible).items()
            if self.runs(part)
        }
        times = self.time(original, fused)
        fastest: BlockOperator | None = None
        for operator in fused:
            is_steady = times[operator].keeps_up_with(times[None])
            if is_steady and times[operator].mean < times[fastest].mean:
                fastest = operator
        group, whole = timed.group, timed.group.whole
        all_configs = [whole] if group.refusal else group.configs
        # Those that must outrun others are timed with fewer heads only if they do so with all.
        conditional = [
            config
            for config in all_configs
            if config.less_lossy is not None and config.kept < group.count
        ]
        others = [config for config in all_configs if config not in (whole, *conditional)]
        configs = {whole: times[fastest]} | self._time_configs(timed, others, fastest, original)
        if all(config.outruns(configs) for config in configs):
            configs |= self._time_configs(timed, conditional, fastest, original)
        in_order = {config: configs[config] for config in all_configs if config in configs}
        operators: dict[BlockOperator, Latencies] = {name: times[name] for name in fused}
        return BlockLatency(times[None], fastest, in_order, operators)

    def _time_configs(
        self,
        timed: _BlockPart,
        configs: Sequence[BlockConfig],
        operator: BlockOperator | None,
        original: Part,
    ) -> dict[BlockConfig, Latencies]:
        """The times of the possible configurations, with an operator if it has them."""
        parts: dict[BlockConfig, Part] = {}
        for config in configs:
            part = _smaller(timed, config)
            if part is not None and operator is not None and config.plain_operators is None:
                part = _fused(part, operator)
            if part is not None:
                parts[config] = part
        converted = self.convertible(parts)
        times = self.time(original, converted) if converted else {}
        return {config: times[config] for config in converted}

    def time_pairs(
        self, groups: Sequence[BlockGroup], timed: Mapping[Block, BlockLatency]
    ) -> list[ReusePair]:
        """Time pairs of attention blocks, of which the second reuses probabilities of the first.

        Reuse needs plain operators, because fused ones return no probabilities. If it is not faster
        than both fused blocks with all their heads, smaller numbers of heads are not timed.
        """
        pairs: list[ReusePair] = []
        equal_work: dict[tuple[BlockLatency, ...], ReusePair | None] = {}
        possible = reusable_pairs(groups)
        for done, (source, reader) in enumerate(possible, start=1):
            if not {source.blocks[0], reader.blocks[0]} <= timed.keys():
                continue
            latencies = timed[source.blocks[0]], timed[reader.blocks[0]]
            if latencies not in equal_work:
                equal_work[latencies] = self._time_pair(source, reader, latencies)
            pair = equal_work[latencies]
            if pair is not None:
                pairs.append(replace(pair, source=source, reader=reader))
            self.progress("time pairs", done, len(possible))
        return pairs

    def _time_pair(
        self, source: AttentionGroup, reader: AttentionGroup, latencies: Sequence[BlockLatency]
    ) -> ReusePair | None:
        """Time a pair; None if reuse is impossible or a conversion fails.

        Args:
            latencies: The latencies of both blocks.
        """
        parts = self.cut_out(self.model, [_cut(source.blocks[0]), _cut(reader.blocks[0])])
        original = self.convertible({"source": parts[0]}).get("source")
        if original is None:
            return None

        def timed(numbers: Sequence[int]) -> dict[int, Latencies]:
            """Time both parts for each number of heads, interleaved with the exported source."""
            parts = {
                (kept, index): part
                for kept in numbers
                for index, part in enumerate(self._reusing_parts(source, reader, kept))
            }
            ms = self.time(original, self.convertible(parts))
            return {
                kept: Latencies.total([ms[kept, 0], ms[kept, 1]])
                for kept in numbers
                if {(kept, 0), (kept, 1)} <= ms.keys()
            }

        whole = source.whole
        times = timed([whole.kept])
        if not times:
            return None
        saved_ms = sum(block.configs[whole].mean for block in latencies) - times[whole.kept].mean
        if saved_ms > 0:
            numbers = {config.kept for config in latencies[0].configs}
            times |= timed(sorted(numbers - {0, whole.kept}))
        return ReusePair(source, reader, times, saved_ms)

    def _reusing_parts(
        self, source: AttentionGroup, reader: AttentionGroup, kept: int
    ) -> Sequence[Part]:
        """Both blocks with this number of heads; empty if reuse is impossible."""
        names = source.names[0], reader.names[0]
        new = self.model.clone()
        reusing = Reusing(kept, {head: head for head in range(kept)}, names[0], 0.0)
        try:
            apply_config(new, source, BlockConfig(kept))
            apply_config(new, reader, reusing)
            blocks = {block.name: block for block in find_attention(new).blocks}
            return self.cut_out(new, [_cut(blocks[name]) for name in names])
        except (*IMPOSSIBLE, KeyError):  # grouped heads, or blocks that cannot be extracted
            return ()


def _cut(block: Block) -> Cut:
    return Cut(last_map(block).output, block.inputs)


def _block_of(part: ir.Model) -> Block | None:
    """The block of a part, if it is matched."""
    return next(iter(find_attention(part).blocks or find_feed_forward(part)), None)


def _rewritten(part: Part, rewrite: Callable[[ir.Model, Block], object]) -> Part | None:
    """The part after a rewrite of its block; None if that is impossible."""
    model = part.model.clone()
    block = _block_of(model)
    if block is None:
        return None
    try:
        rewrite(model, block)
    except IMPOSSIBLE:  # for example, a part of grouped heads cannot be removed
        return None
    return Part(model, part.feeds)


def _smaller(timed: _BlockPart, config: BlockConfig) -> Part | None:
    """The part with its block in a configuration; None if that is impossible."""
    return _rewritten(
        timed.part, lambda model, block: apply_config(model, timed.group, config, block)
    )


def _fused(part: Part, operator: BlockOperator) -> Part | None:
    """The part with a fused operator for its block; None if that is impossible."""
    fused = _rewritten(part, lambda model, block: fusion_of(block.name, operator)(model))
    if fused is None or operator == "gelu":
        return fused
    block = _block_of(fused.model)
    if block is None or block.output is None:
        return None
    # Masks are prepared once for all layers, so that they are inputs here and not timed.
    return cut_out(fused.model, [_cut(block)], part.feeds)[0]
