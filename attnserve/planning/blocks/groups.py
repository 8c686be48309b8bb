"""Blocks with the same last weight, which a search rewrites in the same way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from attnserve.calibration.elimination import Elimination, eliminate_heads, eliminate_neurons
from attnserve.calibration.linear_maps import last_map
from attnserve.calibration.ridge import FitMoments
from attnserve.planning.blocks.configurations import (
    MAX_CONFIGS,
    MULTIPLE,
    OPERATORS,
    BlockConfig,
    BlockOperator,
    LossCurve,
    Replaced,
    Reusing,
    Shared,
    Truncated,
)
from attnserve.planning.blocks.latencies import Latencies
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, Block, BlockT, FeedForwardBlock
from graph_passes.emit.attention import emission_refusal
from graph_passes.errors import Refusal
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import BlockPass, small_shapes
from graph_passes.passes.conditions import returned_refusal
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons, neurons_refusal
from graph_passes.passes.reuse_attention import reuse_refusal
from graph_passes.passes.shared_dimensions import sharing_refusal
from graph_passes.passes.skip_attention import skip_refusal

__all__ = [
    "AttentionGroup",
    "BlockGroup",
    "FeedForwardGroup",
    "ReusePair",
    "apply_config",
    "feed_forward_groups",
    "group_blocks",
    "reusable_pairs",
]

SHARED_FRACTION = 2 / 3
"""Number of shared dimensions of collaborative heads, relative to separate heads."""

NOT_ALLOWED = Refusal("not_allowed", "neurons are kept unless `allow` names ffn")


@dataclass(frozen=True, eq=False)
class BlockGroup(ABC):
    """Blocks with the same last weight, which are rewritten alike; usually one block.

    Each kind of block is a subclass. Callers do not test the class.

    Attributes:
        kind: The name of the kind of block in files.
        noun: What can be removed: "heads" or "neurons".
        prune: The pass that removes them.
        refusal: Why nothing can be removed; None if something can.
    """

    kind: ClassVar[Literal["attention", "feed_forward"]]
    noun: ClassVar[str]
    prune: ClassVar[type[PruneHeads] | type[PruneNeurons]]

    blocks: tuple[Block, ...]
    refusal: Refusal | None = None

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """Identifies the group in files and mappings."""
        return f"{self.kind} {self.names[0]}"

    @property
    def count(self) -> int:
        """The number of heads or neurons."""
        return len(self.blocks[0].part_rows)

    @property
    def whole(self) -> BlockConfig:
        """The configuration that changes nothing."""
        return BlockConfig(self.count)

    @property
    @abstractmethod
    def configs(self) -> list[BlockConfig]:
        """The configurations in the order of reports; some may be impossible."""

    @abstractmethod
    def operators(self, analyses: Analyses) -> list[tuple[BlockOperator, ...]]:
        """The fused operators that can compute each block."""

    @abstractmethod
    def elimination(self, moments: FitMoments) -> Elimination:
        """The order of the removal of heads or neurons.

        Args:
            moments: Of the input and the output of the last linear map.
        """

    def passes(
        self, block: Block, config: BlockConfig, mask: Sequence[int]
    ) -> list[BlockPass[Any, Any]]:
        """The passes that give one of the blocks a configuration.

        Args:
            mask: 1 for each head or neuron that is kept.
        """
        removal = [] if all(mask) else [self.prune({block.name: mask})]
        return [*removal, *config.passes(block)]


@dataclass(frozen=True, eq=False)
class AttentionGroup(BlockGroup):
    """Attention blocks with the same output projection."""

    kind = "attention"
    noun = "heads"
    prune = PruneHeads

    blocks: tuple[AttentionBlock, ...]

    @property
    def configs(self) -> list[BlockConfig]:
        block, heads, half = self.blocks[0], self.count, self.blocks[0].head_size // 2
        step = max(heads // MAX_CONFIGS, 1)
        numbers = (*range(step, heads, step), heads)
        can_replace = not (block.k.is_cached or returned_refusal(block) or skip_refusal(block))
        configs: list[BlockConfig] = [Replaced()] if can_replace else []
        configs += [BlockConfig(kept) for kept in numbers]
        if half and half % MULTIPLE == 0 and not sharing_refusal(block):
            size = half - 1  # one dimension is left for the content term
            configs += [Truncated(kept, size) for kept in numbers]
            rank = int(SHARED_FRACTION * (heads * size)) // MULTIPLE * MULTIPLE
            if rank and heads > 1:
                ranks = [max(rank * kept // heads // MULTIPLE, 1) * MULTIPLE for kept in numbers]
                configs += map(Shared, numbers, repeat(size), ranks)
        return configs

    def operators(self, analyses: Analyses) -> list[tuple[BlockOperator, ...]]:
        return [
            tuple(name for name in OPERATORS if not FuseAttention.refusal(block, name, analyses))
            for block in self.blocks
        ]

    def elimination(self, moments: FitMoments) -> Elimination:
        return eliminate_heads(self.blocks[0], moments)


@dataclass(frozen=True, eq=False)
class FeedForwardGroup(BlockGroup):
    """Feed-forward blocks with the same second matrix."""

    kind = "feed_forward"
    noun = "neurons"
    prune = PruneNeurons

    blocks: tuple[FeedForwardBlock, ...]

    @property
    def configs(self) -> list[BlockConfig]:
        step = max(self.count // MAX_CONFIGS // MULTIPLE, 1) * MULTIPLE
        return [BlockConfig(kept) for kept in (*range(step, self.count, step), self.count)]

    def operators(self, analyses: Analyses) -> list[tuple[BlockOperator, ...]]:
        return [
            () if FuseGelu.refusal(block, None, analyses) else ("gelu",) for block in self.blocks
        ]

    def elimination(self, moments: FitMoments) -> Elimination:
        step = max(self.count // (2 * MAX_CONFIGS) // MULTIPLE, 1) * MULTIPLE
        return eliminate_neurons(moments.covariance, last_map(self.blocks[0]).weight, step)


def group_blocks(
    model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool
) -> list[BlockGroup]:
    """Group certified attention blocks and feed-forward blocks by their last weight.

    Blocks in the body of another node are left out, because a session cannot observe them.

    Args:
        ffn: Allow the removal of neurons.
    """
    analyses = Analyses.of(model)
    groups: list[BlockGroup] = []
    for blocks in _by_weight(model, [block for block in attention if block.output is not None]):
        refusals = (
            PruneHeads.refusal(block, None, analyses)
            or emission_refusal(block, small_shapes(analyses))
            for block in blocks
        )
        groups.append(AttentionGroup(tuple(blocks), next(filter(None, refusals), None)))
    for group in feed_forward_groups(model, attention):
        groups.append(group if ffn or group.refusal else replace(group, refusal=NOT_ALLOWED))
    return groups


def feed_forward_groups(
    model: ir.Model, attention: Sequence[AttentionBlock]
) -> list[FeedForwardGroup]:
    """Group feed-forward blocks, except those with the name of an attention block."""
    names = {block.name for block in attention}
    groups: list[FeedForwardGroup] = []
    for blocks in _by_weight(model, find_feed_forward(model)):
        if names.isdisjoint(block.name for block in blocks):
            refusals = map(neurons_refusal, blocks)
            groups.append(FeedForwardGroup(tuple(blocks), next(filter(None, refusals), None)))
    return groups


def _by_weight(model: ir.Model, blocks: Sequence[BlockT]) -> Iterable[list[BlockT]]:
    """The blocks of the main graph by their last weight."""
    by_weight: dict[object, list[BlockT]] = {}
    for block in blocks:
        if block.graph is model.graph:
            by_weight.setdefault(last_map(block).weight_key, []).append(block)
    return by_weight.values()


def apply_config(
    model: ir.Model,
    group: BlockGroup,
    config: BlockConfig,
    block: Block | None = None,
    moments: TokenMoments | None = None,
) -> None:
    """Give a block of ``model`` a configuration, in place; its first heads or neurons are kept.

    Args:
        block: The block, by default the first of the group.
        moments: Token moments of the block's input, for passes that are fitted; without them, they
            are fitted to the weights alone.

    Raises:
        CannotRewrite: Some of its heads cannot be removed.
    """
    block = block or group.blocks[0]
    mask = config.mask(range(group.count)[::-1])
    for graph_pass in group.passes(block, config, mask):
        if moments is not None:
            graph_pass = graph_pass.fitted(model, lambda _, __: {block.name: moments})
        graph_pass(model)


@dataclass(frozen=True, eq=False)
class ReusePair:
    """A source and a reader: attention blocks, of which the reader may reuse probabilities.

    Attributes:
        times: Latencies of both together, by the number of kept heads.
        saved_ms: Time that reuse saves over both blocks with their fastest operators and all
            heads, mean over the target workloads; negative if reuse is slower.
        heads: The source head of each head of the reader.
        loss: The loss at the model's output if all heads of the reader reuse probabilities.
    """

    source: AttentionGroup
    reader: AttentionGroup
    times: Mapping[int, Latencies]
    saved_ms: float
    heads: tuple[int, ...] = ()
    loss: float = float("inf")

    def reusing(self, kept: int, curve: LossCurve) -> BlockConfig:
        """The configuration of the reader if the source keeps its ``kept`` most important heads.

        Args:
            kept: The number of kept heads of both blocks.
            curve: The losses of the source.
        """
        sources = np.flatnonzero(BlockConfig(kept).mask(curve.order)).tolist()
        places = {head: place for place, head in enumerate(sources)}
        heads = {head: places[taken] for head, taken in enumerate(self.heads) if taken in places}
        return Reusing(kept, heads, self.source.names[0], self.loss)


def reusable_pairs(groups: Sequence[BlockGroup]) -> list[tuple[AttentionGroup, AttentionGroup]]:
    """Each attention with the nearest earlier one whose probabilities it can reuse, which is first.

    Only groups of one block, some of whose heads can be removed, are considered.
    """
    pairs: list[tuple[AttentionGroup, AttentionGroup]] = []
    earlier: list[AttentionGroup] = []
    for reader in groups:
        if not isinstance(reader, AttentionGroup) or reader.refusal or len(reader.names) > 1:
            continue
        for source in reversed(earlier):
            if source.count == reader.count and not reuse_refusal(reader.blocks[0], source.blocks):
                pairs.append((source, reader))
                break
        earlier.append(reader)
    return pairs
