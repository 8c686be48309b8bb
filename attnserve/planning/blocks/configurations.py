"""Configurations: what a search can make of a block, and what was measured of each.

``search.block_timing`` measures the latencies, ``loss_curves`` the losses at the model's output.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import origin
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.attention import emission_refusal
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.errors import Refusal
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import BlockPass, FittedPass, small_shapes
from graph_passes.passes.collaborate import Collaborate, SparseMixing, sharing_refusal
from graph_passes.passes.conditions import returned_refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons, neurons_refusal
from graph_passes.passes.reuse_attention import Edges, ReuseAttention, SourceHead
from graph_passes.passes.skip_attention import SkipAttention, skip_refusal

__all__ = [
    "AS_EXPORTED",
    "MAX_CONFIGS",
    "Block",
    "BlockConfig",
    "BlockLatency",
    "BlockOperator",
    "LossCurve",
    "ReusePair",
    "TiedBlocks",
    "apply_config",
    "apply_reuse",
    "configs_of",
    "group_blocks",
    "passes_of",
]

Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]
BlockOperator = FusedOperator | Literal["gelu", "as exported"]
"""What computes a block: one fused operator, or the nodes of the export."""

AS_EXPORTED: Final = "as exported"

MULTIPLE = 8
"""Remaining neurons are a multiple of this, the number of floats in a vector register."""

MAX_CONFIGS = 24
"""The approximate number of configurations of a feed-forward block, and the most of an attention
block, that are timed."""

SHARED_FRACTION = 2 / 3
"""Number of shared dimensions of collaborative heads, relative to separate heads."""

NOT_ALLOWED = Refusal("not_allowed", "neurons are kept unless `allow` names ffn")


class BlockConfig(NamedTuple):
    """A block after a rewrite; of each block, a search chooses one of several configurations.

    None stands for "as in the original". A new kind of rewrite adds a field.

    Attributes:
        kept: Heads or neurons; 0 replaces an attention by an affine map.
        head_size: The truncated size of queries and keys, including one dimension of the content
            term; None if they are not truncated.
        rank: R, the shared dimensions of which each head reads ``head_size``; None if heads share
            none.
        source: The attention whose probabilities the heads reuse; None if they compute their own.
    """

    kept: int
    head_size: int | None = None
    rank: int | None = None
    source: str | None = None

    @property
    def plain_operators(self) -> Literal["skip", "sparse", "reuse"] | None:
        """The name in plan.json of the plain operators that compute it; None if fused ones can."""
        if self.source is not None:
            return "reuse"
        if self.rank is not None:
            return "sparse"
        return None if self.kept else "skip"

    @property
    def needs_plain_operators(self) -> bool:
        """Whether only plain operators can compute the configuration."""
        return self.plain_operators is not None

    @property
    def is_fitted(self) -> bool:
        """Whether one of its passes is fitted to the moments of tokens (``FittedPass``)."""
        return self.head_size is not None

    @property
    def change(self) -> str:
        """What it changes in the kept heads, in words; empty if it only removes heads."""
        if self.head_size is None:
            return ""
        shared = "" if self.rank is None else f" of {self.rank} shared ones"
        return f"queries and keys of {self.head_size} dimensions{shared}"

    @property
    def size(self) -> str:
        """The size of the queries and keys of a kept head; empty if it is that of the original."""
        text = "" if self.head_size is None else f" x {self.head_size}"
        return text + ("" if self.rank is None else f" of {self.rank} shared")

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Its place in reports: by the change, then by the number of heads."""
        return self.head_size or 0, self.rank or 0, self.kept

    @property
    def less_lossy(self) -> BlockConfig | None:
        """The configuration that loses less, and that it must outrun before its loss is measured.

        For shared dimensions, as many separate ones of each head; None for other configurations.
        """
        return None if self.rank is None else self._replace(rank=None)

    def follow_ups(self, wanted: Iterable[BlockConfig]) -> list[BlockConfig]:
        """The configurations to time if it outruns ``less_lossy``: the same with fewer heads.

        Args:
            wanted: The configurations that are timed anyway.
        """
        return [
            self.with_heads(other.kept)
            for other in wanted
            if self.less_lossy is not None and other == self.less_lossy._replace(kept=other.kept)
        ]

    def with_heads(self, kept: int) -> BlockConfig:
        """The same configuration with fewer heads, which share proportionally fewer dimensions."""
        rank = None
        if self.rank is not None:
            rank = max(self.rank * kept // self.kept // MULTIPLE, 1) * MULTIPLE
        return self._replace(kept=kept, rank=rank)

    def __str__(self) -> str:
        if not self.kept:
            return "none"
        return f"{self.kept}{self.size}" + ("" if self.source is None else f" as {self.source}")


@dataclass(frozen=True, eq=False)
class TiedBlocks:
    """Blocks with the same last weight, which are rewritten alike; usually one block.

    Attributes:
        count: The number of heads or neurons.
        refusal: Why nothing can be removed; None if something can.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    count: int
    refusal: Refusal | None = None

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """Identifies the group in files and mappings."""
        return f"{self.kind} {self.names[0]}"


@dataclass(frozen=True, eq=False)
class BlockLatency:
    """Milliseconds of one block at each shape.

    Attributes:
        original: Latency as exported.
        operator: The fastest operator.
        configs: The latencies of each configuration with that operator.
        operators: The latencies of the whole block with each fused operator.
    """

    original: tuple[float, ...]
    operator: BlockOperator
    configs: Mapping[BlockConfig, tuple[float, ...]]
    operators: Mapping[BlockOperator, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class ReusePair:
    """Two attention blocks, of which the second may reuse the probabilities of the first.

    Attributes:
        times: Milliseconds of both together at each shape, by the number of kept heads.
        saved_ms: Time that reuse saves over both blocks with their fastest operators and all
            heads, mean over the target shapes; negative if reuse is slower.
        heads: The source head of each head of the reader.
        loss: The loss at the model's output if all heads of the reader reuse probabilities.
    """

    source: TiedBlocks
    reader: TiedBlocks
    times: Mapping[int, tuple[float, ...]]
    saved_ms: float
    heads: tuple[int, ...] = ()
    loss: float = float("inf")

    def masks(self, curve: LossCurve, kept: int) -> tuple[list[int], list[int]]:
        """Masks of both: the heads that the source needs most, and the heads that reuse them."""
        source = curve.mask(kept)
        return source, [source[head] for head in self.heads]

    def edges(self, mask: Sequence[int]) -> dict[int, SourceHead]:
        """The edges of the reader's kept heads."""
        name = self.source.names[0]
        return {head: (name, self.heads[head]) for head in np.flatnonzero(mask).tolist()}


@dataclass(frozen=True, eq=False, kw_only=True)
class LossCurve:
    """The loss at the model's output as parts of one group are removed.

    Attributes:
        order: Heads or neurons in the order of their removal.
        own_loss: The lost share of the block's own output after n removals, n = 0 .. count.
        gone, loss: Measured numbers of removals, and the loss at the model's output for each.
        changed: Losses of other changes: of all heads, or of the removed attention.
    """

    order: tuple[int, ...]
    own_loss: tuple[float, ...]
    gone: tuple[int, ...]
    loss: tuple[float, ...]
    changed: tuple[tuple[BlockConfig, float], ...] = ()

    def loss_of(self, config: BlockConfig) -> float | None:
        """The loss of a configuration; None if its change was not measured.

        Losses of removal and of other changes are added; removed heads lose nothing by a change.
        """
        if not config.kept:
            return dict(self.changed).get(config)
        kept = self.at(len(self.order) - config.kept)
        if config == BlockConfig(config.kept):
            return kept
        changes = {
            change.with_heads(config.kept): loss for change, loss in self.changed if change.kept
        }
        share = config.kept / len(self.order)
        return kept + share * changes[config] if config in changes else None

    def at(self, num_removed: int) -> float:
        """The loss after a number of removals, interpolated as a power of the block's own loss."""
        if num_removed == 0:
            return 0.0
        x = np.log(np.maximum([self.own_loss[n] for n in self.gone], 1e-12))
        y = np.log(np.maximum(self.loss, 1e-12))
        here = float(np.log(max(self.own_loss[num_removed], 1e-12)))
        if len(x) == 1 or here <= x[0]:
            return float(np.exp(y[0] + min(here - x[0], 0.0)))  # proportionally
        place = min(int(np.searchsorted(x, here)), len(x) - 1)
        run = max(float(x[place] - x[place - 1]), 1e-9)
        slope = float(np.clip((y[place] - y[place - 1]) / run, 0.0, 4.0))
        return float(np.exp(y[place - 1] + slope * (here - x[place - 1])))

    def mask(self, kept: int) -> list[int]:
        """1 for each head or neuron that is kept."""
        stays = np.ones(len(self.order), int)
        stays[list(self.order[: len(self.order) - kept])] = 0
        return stays.tolist()


def group_blocks(
    model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool
) -> list[TiedBlocks]:
    """Group certified attention blocks and feed-forward blocks by their last weight.

    Blocks in the body of another node are left out, because a session cannot observe them.

    Args:
        ffn: Allow the removal of neurons.
    """
    blocks_by_weight: dict[object, list[Block]] = {}
    analyses = Analyses(model)
    for block in attention:
        if block.graph is model.graph and block.output is not None:
            blocks_by_weight.setdefault(origin(block.output.weight), []).append(block)
    for block in find_feed_forward(model):
        if block.graph is model.graph:
            blocks_by_weight.setdefault(origin(block.second.weight), []).append(block)
    names = {block.name for block in attention}
    groups: list[TiedBlocks] = []
    for blocks in blocks_by_weight.values():
        first = blocks[0]
        if isinstance(first, FeedForwardBlock):
            if any(block.name in names for block in blocks):
                continue  # an attention block has the same name
            refusals = [neurons_refusal(b) for b in blocks if isinstance(b, FeedForwardBlock)]
            refusals += [] if ffn else [NOT_ALLOWED]
            kind, count = "feed_forward", first.num_neurons
        else:
            refusals = [_refusal(b, analyses) for b in blocks if isinstance(b, AttentionBlock)]
            kind, count = "attention", first.num_heads
        refusal = next((reason for reason in refusals if reason is not None), None)
        groups.append(TiedBlocks(kind, tuple(blocks), count, refusal))
    return groups


def _refusal(block: AttentionBlock, analyses: Analyses) -> Refusal | None:
    """Why no heads of a block can be removed; None if they can."""
    return PruneHeads.refusal(block, None, analyses) or emission_refusal(
        block, small_shapes(analyses)
    )


# ---- configurations ----------------------------------------------------------------------------


def configs_of(block: Block) -> list[BlockConfig]:
    """The configurations of a block besides the whole block; some may turn out impossible."""
    if isinstance(block, FeedForwardBlock):
        step = max(block.num_neurons // MAX_CONFIGS // MULTIPLE, 1) * MULTIPLE
        return [BlockConfig(kept) for kept in range(step, block.num_neurons, step)]
    step = max(block.num_heads // MAX_CONFIGS, 1)
    numbers = (*range(step, block.num_heads, step), block.num_heads)
    configs = [BlockConfig(kept) for kept in numbers[:-1]]
    if (cut := _shorter(block)) is not None:
        configs += [BlockConfig(kept, cut) for kept in numbers]
        own = block.num_heads * (cut - 1)
        if (rank := int(SHARED_FRACTION * own) // MULTIPLE * MULTIPLE) and block.num_heads > 1:
            configs.append(BlockConfig(block.num_heads, cut, rank))
    if not block.k.is_cached and not (returned_refusal(block) or skip_refusal(block)):
        configs.append(BlockConfig(0))
    return configs


def _shorter(block: AttentionBlock) -> int | None:
    """Half of the head size, if queries and keys can be truncated to it."""
    half = block.head_size // 2
    is_possible = half and half % MULTIPLE == 0 and not block.k.is_cached
    return half if is_possible and not sharing_refusal(block) else None


def passes_of(block: Block, config: BlockConfig, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
    """The passes that give a block a configuration, except reuse, which concerns two blocks.

    Args:
        mask: 1 for each head or neuron that is kept, ``config.kept`` of them.
    """
    name = block.name
    if isinstance(block, FeedForwardBlock):
        return [] if all(mask) else [PruneNeurons({name: mask})]
    if not config.kept:
        return [SkipAttention({name: "affine"})]
    passes: list[BlockPass[Any, Any]] = []
    if config.kept < block.num_heads:
        passes.append(PruneHeads({name: mask}))
    if config.head_size is not None:
        shared = SparseMixing(
            rank=config.rank or config.kept * block.head_size,  # without a rank nothing is shared
            head_size=config.head_size - 1,  # the content term has one dimension
        )
        passes.append(Collaborate({name: shared}))
    return passes


def apply_config(
    model: ir.Model, block: Block, config: BlockConfig, moments: TokenMoments | None = None
) -> None:
    """Give one block of ``model`` a configuration, in place; its first heads or neurons are kept.

    Args:
        moments: Token moments of the block's input, for passes that are fitted; without them, they
            are fitted to the weights alone.

    Raises:
        CannotRewrite: Some of its heads cannot be removed.
    """
    count = block.num_neurons if isinstance(block, FeedForwardBlock) else block.num_heads
    mask = [1] * config.kept + [0] * (count - config.kept)
    with Analyses.of(model) as analyses:
        for graph_pass in passes_of(block, config, mask):
            if isinstance(graph_pass, FittedPass) and moments is not None:
                graph_pass.require_applicable(analyses)
                graph_pass = graph_pass.fitted(analyses, {block.name: moments})
            graph_pass(model)


def apply_reuse(model: ir.Model, edges: Edges, masks: Mapping[str, Sequence[int]]) -> None:
    """Let heads reuse the probabilities of others, in place, after pruning.

    Args:
        edges: Reuse edges, in head numbers after pruning.

    Raises:
        CannotRewrite: See ``ReuseAttention``.
    """
    with Analyses.of(model):
        PruneHeads(masks)(model)
        ReuseAttention(edges)(model)
