"""Time the operators and the configurations of each block, interleaved with the exported block."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np
import onnx_ir as ir

from attnserve.context import Progress, ignore_progress
from attnserve.fusion import RESIDUAL_PASSES
from attnserve.literals import Precision
from attnserve.planning.blocks.configurations import (
    BlockConfig,
    BlockOperator,
    ReusePair,
    Reusing,
    apply_config,
    configs_of,
    fusion_of,
)
from attnserve.planning.blocks.groups import Block, BlockGroup
from attnserve.planning.blocks.latencies import Latencies
from attnserve.precision.convert import convert
from attnserve.precision.half import LARGEST
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.interface import Batch
from attnserve.runtime.part_latency import Cut, LatencyTable, Part, cut_out
from attnserve.runtime.session import open_session
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small, set_missing_types
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.editing import remove_unused
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.errors import IMPOSSIBLE
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes.base import RewritePass
from graph_passes.passes.fuse_attention import fusion_refusal
from graph_passes.passes.fuse_gelu import gelu_refusal
from graph_passes.passes.fuse_residuals import find_residuals
from graph_passes.passes.reuse_attention import reuse_refusal

__all__ = ["BlockLatency", "BlockTimer", "without_casts"]

log = logging.getLogger(__name__)

Key = TypeVar("Key", bound=Hashable)

OPERATORS: Sequence[FusedOperator] = get_args(FusedOperator)

NOTHING_TO_CONVERT = frozenset({"precision.already", "precision.no_weights", "precision.unchanged"})
"""Codes of the conversions that leave a part as it is; any other error is a failure."""


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


@dataclass(frozen=True, eq=False)
class BlockTimer:
    """Times blocks of a model at several shapes, as exported and rewritten.

    Attributes:
        requested, extremes: Inputs of the model at each workload; see ``Latencies``.
        precision: Precision of the model after all rewrites.
    """

    model: ir.Model
    table: LatencyTable
    requested: Sequence[Batch]
    extremes: Sequence[Batch] = ()
    precision: Precision = "float32"
    progress: Progress = ignore_progress

    @property
    def feeds(self) -> tuple[Batch, ...]:
        """Inputs of the model at all workloads."""
        return (*self.requested, *self.extremes)

    def time_whole(self, model: ir.Model) -> Latencies:
        """Time a model with the same inputs."""
        return self._time(Part(model, self.feeds), {})[None]

    def time_blocks(self, groups: Sequence[BlockGroup]) -> dict[Block, BlockLatency]:
        """Time each block with every operator, and each configuration with the fastest one.

        Blocks with equal work are timed once. Blocks whose conversion fails are left out, if the
        precision allows that they stay float32.

        Raises:
            AttnserveError: The conversion of a block fails, and the block may not stay float32.
        """
        may_fail = SCHEMES[self.precision].allows_float_blocks
        blocks = [block for group in groups for block in group.blocks]
        parts = self._cut_out(self.model, [_cut(block) for block in blocks])
        equal_work: dict[tuple[Any, ...], list[tuple[Block, Part]]] = {}
        shapes = infer_shapes_small(self.model, batch=2, sequence=5)
        frozen = {block for group in groups if group.refusal is not None for block in group.blocks}
        opsets = self.model.opset_imports
        operators_of = {block: _operators(block, shapes, opsets) for block in blocks}
        for block, part in zip(blocks, parts, strict=True):
            keys = (part.key(index) for index in range(len(self.feeds)))
            work = (*keys, operators_of[block], block in frozen)
            equal_work.setdefault(work, []).append((block, part))
        latencies: dict[Block, BlockLatency] = {}
        for done, ((*_, operators, is_frozen), equal) in enumerate(equal_work.items(), start=1):
            first, part = equal[0]
            try:
                original = self._converted(part)
            except IMPOSSIBLE as error:
                if not may_fail:
                    raise
                names = ", ".join(block.name for block, _ in equal)
                log.warning("%s: not timed in %s: %s", names, self.precision, error.what)
            else:
                latency = self._time_block(first, part, original, operators, is_frozen=is_frozen)
                latencies |= {block: latency for block, _ in equal}
            self.progress("time blocks", done, len(equal_work))
        return latencies

    def time_pairs(
        self, groups: Sequence[BlockGroup], timed: Mapping[Block, BlockLatency]
    ) -> list[ReusePair]:
        """Time pairs of attention blocks, of which the second reuses probabilities of the first.

        Reuse needs plain operators, because fused ones return no probabilities. If it is not faster
        than both fused blocks with all their heads, smaller numbers of heads are not timed.
        """
        reusable = [
            group
            for group in groups
            if group.kind == "attention" and group.refusal is None and len(group.blocks) == 1
        ]
        pairs: list[ReusePair] = []
        timed_pairs: dict[
            tuple[BlockLatency, BlockLatency], tuple[Mapping[int, Latencies], float]
        ] = {}
        for index, reader in enumerate(reusable):
            source = next((s for s in reversed(reusable[:index]) if _can_reuse(s, reader)), None)
            if source is None or not {source.blocks[0], reader.blocks[0]} <= timed.keys():
                continue
            latencies = timed[source.blocks[0]], timed[reader.blocks[0]]
            if latencies not in timed_pairs:  # blocks with equal work are timed once
                timed_pairs[latencies] = self._time_pair(source, reader, latencies)
            times, saved_ms = timed_pairs[latencies]
            if times:
                pairs.append(ReusePair(source, reader, times, saved_ms))
            self.progress("time pairs", index + 1, len(reusable))
        return pairs

    def residual_fusion(self) -> tuple[RewritePass | None, float]:
        """The fastest pass for residual additions, and the milliseconds that it saves in a run.

        Milliseconds are a mean over the requested shapes. There is no pass if the original is the
        fastest at any shape.
        """
        norms = [node for node in find_residuals(self.model) if node.graph is self.model.graph]
        cuts: list[Cut] = []
        for norm in norms:
            added = norm.inputs[0]
            node = None if added is None else added.producer()
            assert node is not None
            cuts.append(Cut(norm.outputs[0], tuple(v for v in node.inputs if v is not None)))
        best: tuple[RewritePass | None, float] = (None, 0.0)
        for residual_pass in RESIDUAL_PASSES[self.table.device.provider] if cuts else ():
            graph_pass = residual_pass()
            total = self._saved_by(graph_pass, cuts)
            if total is not None and min(total) > 0 and total.mean > best[1]:
                best = graph_pass, total.mean
        return best

    def _saved_by(self, graph_pass: RewritePass, cuts: Sequence[Cut]) -> Latencies | None:
        """Milliseconds that a pass saves over all residual additions.

        None if a conversion fails.
        """
        saved: list[Latencies] = []
        saved_by_part: dict[str, Latencies] = {}
        for part in self._cut_out(self.model, cuts):
            key = part.key(0)
            if key not in saved_by_part:
                new = part.model.clone()
                graph_pass(new)
                both = self._convertible({"old": part, "new": Part(new, part.feeds)})
                if len(both) < 2:
                    return None
                times = self._time(both.pop("old"), both)
                saved_by_part[key] = times["new"].saved_over(times[None])
            saved.append(saved_by_part[key])
        return Latencies.total(saved)

    def _time_block(
        self,
        block: Block,
        part: Part,
        original: Part,
        operators: Sequence[BlockOperator],
        *,
        is_frozen: bool,
    ) -> BlockLatency:
        """Time a block with each operator, then its configurations with the fastest one.

        Args:
            part: The block in float32.
            original: The block in the precision of the timer.
            operators: The fused operators that may be possible.
            is_frozen: Skip the configurations, because nothing can be removed.
        """
        possible: dict[BlockOperator, Part] = {
            operator: new for operator in operators if (new := _fused(part, operator)) is not None
        }
        fused: dict[BlockOperator, Part] = {
            operator: new
            for operator, new in self._convertible(possible).items()
            if self._runs(new)
        }
        times = self._time(original, fused)
        fastest: BlockOperator | None = None
        least = times[None].mean
        for operator in fused:
            is_steady = times[operator].keeps_up_with(times[None])
            if is_steady and times[operator].mean < least:
                fastest, least = operator, times[operator].mean
        fused_ms: dict[BlockOperator, Latencies] = {name: times[name] for name in fused}
        count = block.num_neurons if isinstance(block, FeedForwardBlock) else block.num_heads
        whole = BlockConfig(count)
        all_configs = [whole] if is_frozen else configs_of(block)
        # Those that must outrun others are timed with fewer heads only if they do so with all.
        conditional = [
            config
            for config in all_configs
            if config.less_lossy is not None and config.kept < count
        ]
        others = [config for config in all_configs if config not in (whole, *conditional)]
        configs = {whole: times[fastest]} | self._time_configs(part, others, fastest, original)
        if all(config.outruns(configs) for config in configs):
            configs |= self._time_configs(part, conditional, fastest, original)
        in_order = {config: configs[config] for config in all_configs if config in configs}
        return BlockLatency(times[None], fastest, in_order, fused_ms)

    def _time_configs(
        self,
        part: Part,
        possible: Sequence[BlockConfig],
        operator: BlockOperator | None,
        original: Part,
    ) -> dict[BlockConfig, Latencies]:
        """The times of the possible configurations, with an operator if it has them."""
        parts: dict[BlockConfig, Part] = {}
        for config in possible:
            smaller = _smaller(part, config)
            if smaller is not None and operator is not None and config.plain_operators is None:
                smaller = _fused(smaller, operator)
            if smaller is not None:
                parts[config] = smaller
        converted = self._convertible(parts)
        times = self._time(original, converted) if converted else {}
        return {config: times[config] for config in converted}

    def _time_pair(
        self, source: BlockGroup, reader: BlockGroup, latencies: tuple[BlockLatency, BlockLatency]
    ) -> tuple[dict[int, Latencies], float]:
        """Times of both blocks by the number of kept heads, and the time saved with all heads.

        There are no times if reuse is impossible or a conversion fails.
        """
        cuts = [_cut(source.blocks[0]), _cut(reader.blocks[0])]
        original = self._convertible({"source": self._cut_out(self.model, cuts)[0]}).get("source")
        if original is None:
            return {}, 0.0

        def timed(numbers: Sequence[int]) -> dict[int, Latencies]:
            """Time both parts for each number of heads, interleaved with the exported source."""
            parts: dict[tuple[int, int], Part] = {}
            for kept in numbers:
                for index, part in enumerate(self._reusing_parts(source, reader, kept)):
                    parts[kept, index] = part
            ms = self._time(original, self._convertible(parts))
            return {
                kept: Latencies.total([ms[kept, 0], ms[kept, 1]])
                for kept in numbers
                if {(kept, 0), (kept, 1)} <= ms.keys()
            }

        times = timed([source.count])
        if not times:
            return {}, 0.0
        whole = BlockConfig(source.count)
        saved_ms = sum(block.configs[whole].mean for block in latencies) - times[source.count].mean
        if saved_ms > 0:
            numbers = {config.kept for config in latencies[0].configs}
            times |= timed(sorted(numbers - {0, source.count}))
        return times, saved_ms

    def _reusing_parts(self, source: BlockGroup, reader: BlockGroup, kept: int) -> Sequence[Part]:
        """Both blocks with this number of heads; empty if reuse is impossible."""
        names = source.names[0], reader.names[0]
        new = self.model.clone()
        reusing = Reusing(kept, {head: head for head in range(kept)}, names[0], 0.0)
        try:
            apply_config(new, source.blocks[0], BlockConfig(kept))
            apply_config(new, reader.blocks[0], reusing)
            blocks = {block.name: block for block in find_attention(new).blocks}
            return self._cut_out(new, [_cut(blocks[name]) for name in names])
        except (*IMPOSSIBLE, KeyError):  # grouped heads, or blocks that cannot be extracted
            return ()

    def _cut_out(self, model: ir.Model, cuts: Sequence[Cut]) -> Sequence[Part]:
        return cut_out(model, cuts, self.feeds, device=self.table.device)

    def _runs(self, part: Part) -> bool:
        """Whether the provider has kernels for the operators and types of a part."""
        try:
            session = open_session(part.model, self.table.device)
            for feed in part.feeds:
                session.run(None, feed)
        except IMPOSSIBLE:
            return False
        return True

    def _time(self, original: Part, others: Mapping[Any, Part]) -> dict[Any, Latencies]:
        """The latencies of converted parts by key; None is the original."""
        parts = {None: original, **others}
        count = len(self.requested)
        return {
            key: Latencies(ms[:count], ms[count:]) for key, ms in self.table.time(parts).items()
        }

    def _convertible(self, parts: Mapping[Key, Part]) -> dict[Key, Part]:
        """The parts in the precision of the timer, without those whose conversion fails."""
        converted: dict[Key, Part] = {}
        for key, part in parts.items():
            try:
                converted[key] = self._converted(part)
            except IMPOSSIBLE as error:
                log.warning("variant %s: not timed in %s: %s", key, self.precision, error.what)
        return converted

    def _converted(self, part: Part) -> Part:
        """The part in the precision of the timer; unchanged if it has nothing to convert.

        Raises:
            AttnserveError: The conversion fails.
        """
        if self.precision == "float32":
            return part
        try:
            model = convert(part.model, self.precision, part.feeds, to_nearest=True)
        except IMPOSSIBLE as error:
            if error.code not in NOTHING_TO_CONVERT:
                raise
            return part
        converted = Part(model, part.feeds)
        # numpy has no bfloat16, so that such a part is timed with its casts.
        return without_casts(converted) if self.precision == "float16" else converted


def _operators(
    block: Block, shapes: ShapeInfo, opsets: Mapping[str, int]
) -> tuple[BlockOperator, ...]:
    """The fused operators that can compute a block of this model."""
    if isinstance(block, FeedForwardBlock):
        return () if gelu_refusal(block, shapes, opsets) else ("gelu",)
    return tuple(name for name in OPERATORS if fusion_refusal(block, name, shapes, opsets) is None)


def _cut(block: Block) -> Cut:
    if isinstance(block, FeedForwardBlock):
        return Cut(block.output, (block.x,))
    return Cut(block.required_output.output, tuple(dict.fromkeys((block.x, block.y))))


def _can_reuse(source: BlockGroup, reader: BlockGroup) -> bool:
    first, second = source.blocks[0], reader.blocks[0]
    assert isinstance(first, AttentionBlock) and isinstance(second, AttentionBlock)
    return source.count == reader.count and reuse_refusal(second, [first]) is None


def without_casts(part: Part) -> Part:
    """Remove the casts at the inputs and outputs of a float16 part.

    The whole model has them only at its own inputs and outputs. Inputs that are also read in
    float32, and outputs that are computed in float32, are unchanged.
    """
    model = part.model.clone()
    set_missing_types(model)
    halved: set[str] = set()
    for value in model.graph.inputs:
        casts = [user for user, _ in value.uses()]
        if value.dtype == ir.DataType.FLOAT and casts and all(map(_is_to_float16, casts)):
            value.type = ir.TensorType(ir.DataType.FLOAT16)
            halved.add(value.name or "")
            for cast in casts:
                cast.outputs[0].replace_all_uses_with(value)
    for place, value in enumerate(model.graph.outputs):
        cast = value.producer()
        made = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
        if made is not None and made.producer() and made.dtype == ir.DataType.FLOAT16:
            made.name, value.name = value.name, made.name
            model.graph.outputs[place] = made
    remove_unused(model)
    feeds = [{name: array.clip(-LARGEST, LARGEST).astype(np.float16) if name in halved else array
              for name, array in feed.items()} for feed in part.feeds]  # fmt: skip
    return Part(model, tuple(feeds))


def _is_to_float16(node: ir.Node) -> bool:
    made = node.outputs[0]
    return (
        node.op_type == "Cast"
        and node.attributes.get_int("to", 1) == ir.DataType.FLOAT16
        and not made.is_graph_output()
    )


def _smaller(part: Part, config: BlockConfig) -> Part | None:
    """The part with its block in a configuration; None if that is impossible."""
    small = part.model.clone()
    blocks = [*find_attention(small).blocks, *find_feed_forward(small)]
    if not blocks:
        return None
    try:
        apply_config(small, blocks[0], config)
    except IMPOSSIBLE:  # a part of grouped heads cannot be removed
        return None
    return Part(small, part.feeds)


def _fused(part: Part, operator: BlockOperator) -> Part | None:
    """The part with a fused operator for its block; None if that is impossible."""
    small = part.model.clone()
    is_gelu = operator == "gelu"
    blocks = find_feed_forward(small) if is_gelu else find_attention(small).blocks
    if not blocks:
        return None
    try:
        fusion_of(blocks[0].name, operator)(small)
    except IMPOSSIBLE:
        return None
    if is_gelu:
        return Part(small, part.feeds)
    block = next(iter(find_attention(small).blocks), None)
    if block is None or block.output is None:
        return None
    # Masks are prepared once for all layers, so that they are inputs here and not timed.
    return cut_out(small, [_cut(block)], part.feeds)[0]
