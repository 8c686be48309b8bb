"""Configurations: the forms of a block that a search considers, and their losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, Literal

import numpy as np
import onnx_ir as ir

from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.planning.blocks.groups import Block, BlockGroup
from attnserve.planning.blocks.latencies import Latencies
from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.factorize.moments import TokenMoments
from graph_passes.passes.base import BlockPass
from graph_passes.passes.collaborate import Collaborate, Mixing, sharing_refusal
from graph_passes.passes.conditions import returned_refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import Edges, ReuseAttention, ReusedHeads, SourceHead
from graph_passes.passes.skip_attention import SkipAttention, skip_refusal

__all__ = [
    "AS_EXPORTED",
    "MAX_CONFIGS",
    "BlockConfig",
    "BlockOperator",
    "LossCurve",
    "ReusePair",
    "apply_config",
    "apply_reuse",
    "configs_of",
]

PlainOperators = Literal["skip", "sparse", "reuse"]
BlockOperator = FusedOperator | Literal["gelu", "as exported"]
"""The implementation of a block: one fused operator, or the nodes of the export."""

AS_EXPORTED: Final = "as exported"

MULTIPLE = 8
"""Remaining neurons are a multiple of this, the number of floats in a vector register."""

MAX_CONFIGS = 24
"""The approximate number of configurations of a feed-forward block, and the most of an attention
block, that are timed."""

SHARED_FRACTION = 2 / 3
"""Number of shared dimensions of collaborative heads, relative to separate heads."""


@dataclass(frozen=True)
class BlockConfig:
    """A block after a rewrite; of each block, a search chooses one of several configurations.

    Attributes:
        kept: The number of remaining heads or neurons; 0 if an affine map replaces the attention.
        head_size: The dimensions of queries and keys, including one of the content term; None if
            they are not truncated.
        rank: R, the number of dimensions that the heads share, of which each reads ``head_size``;
            None if they share none.
        source: The name of the attention whose probabilities the heads reuse
            (``ReusePair.reusing``); None if they reuse none.
        reused_heads: The head that each kept head reuses; numbers before pruning. Not recorded.
        reuse_loss: The loss at the model's output if all heads are reused; not recorded.
    """

    kept: int
    head_size: int | None = None
    rank: int | None = None
    source: str | None = None
    reused_heads: ReusedHeads = field(default_factory=dict[int, SourceHead], compare=False)
    reuse_loss: float = field(default=float("inf"), compare=False)

    @property
    def plain_operators(self) -> PlainOperators | None:
        """The name in plan.json of the plain operators that compute it; None if fused ones can."""
        if self.is_replaced:
            return "skip"
        if self.source is not None:
            return "reuse"
        return None if self.rank is None else "sparse"

    @property
    def is_replaced(self) -> bool:
        """Whether an affine map, which is refitted, replaces the attention."""
        return self.kept == 0

    @property
    def is_fitted(self) -> bool:
        """Whether one of its passes is fitted to the moments of tokens."""
        return self.head_size is not None

    def is_unreduced(self, count: int) -> bool:
        """Whether all heads or neurons, ``count`` of them, stay as they are."""
        return self == BlockConfig(count)

    @property
    def size(self) -> str:
        """The size of a kept head's queries and keys; empty if the block keeps its own size."""
        own = "" if self.head_size is None else f" x {self.head_size}"
        return own if self.rank is None else f"{own} of {self.rank} shared"

    @property
    def recorded(self) -> dict[str, Any]:
        """The compared attributes of the configuration by name, as in plan.json."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """The key that sorts configurations in reports: by change, then by number of heads."""
        return self.head_size or 0, self.rank or 0, self.kept

    @property
    def less_lossy(self) -> BlockConfig | None:
        """For shared dimensions, the configuration with as many separate dimensions of each head.

        Its loss is smaller. So the loss of shared dimensions is measured only if they are faster.
        None for other configurations.
        """
        return None if self.rank is None else replace(self, rank=None)

    def outruns(self, latencies: Mapping[BlockConfig, Latencies]) -> bool:
        """Whether there is no ``less_lossy``, or it takes ``MIN_REMOVAL_GAIN`` times as long."""
        other = self.less_lossy
        return other is None or (
            other in latencies and MIN_REMOVAL_GAIN * latencies[self].mean < latencies[other].mean
        )

    def with_heads(self, kept: int) -> BlockConfig:
        """The same with fewer heads, which share proportionally fewer dimensions.

        Without attention, it is unchanged.
        """
        if self.is_replaced:
            return self
        rank = self.rank and max(self.rank * kept // self.kept // MULTIPLE, 1) * MULTIPLE
        return replace(self, kept=kept, rank=rank)

    def passes(self, block: Block, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
        """The passes that give a block the configuration.

        The pass that reuses probabilities (``apply_reuse``) concerns two blocks, and is not among
        them.

        Args:
            mask: 1 for each head or neuron that is kept, ``kept`` of them.
        """
        if self.is_replaced:
            return [SkipAttention({block.name: "affine"})]
        passes: list[BlockPass[Any, Any]] = []
        if not all(mask):
            prune = PruneNeurons if isinstance(block, FeedForwardBlock) else PruneHeads
            passes.append(prune({block.name: mask}))
        if self.head_size is not None:
            assert isinstance(block, AttentionBlock)
            # With as many dimensions as the heads have, nothing is shared.
            rank = self.rank or self.kept * block.head_size
            mixing = Mixing(rank=rank, head_size=self.head_size - 1)
            passes.append(Collaborate({block.name: mixing}))
        return passes

    def mask(self, group: BlockGroup, curves: Mapping[str, LossCurve]) -> list[int]:
        """1 for each head or neuron of a group that ``passes`` keep: all if it is replaced.

        Args:
            curves: The losses of each group that can be reduced, by its key.
        """
        if self.source is not None:
            return [int(head in self.reused_heads) for head in range(group.count)]
        if self.kept in (0, group.count):
            return [1] * group.count
        return curves[group.key].mask(self.kept)

    def loss(self, curve: LossCurve) -> float:
        """The predicted loss at the model's output; infinite if the change was not measured.

        Losses of removal and of other changes are added; removed heads lose nothing by a change.

        Args:
            curve: The losses of the block.
        """
        if self.is_replaced:
            return dict(curve.changed).get(self, math.inf)
        removal = curve.at(curve.count - self.kept)
        if self.source is not None:
            return removal + self.reuse_loss * self.kept / curve.count
        if self.head_size is None:
            return removal
        changes = {change.with_heads(self.kept): loss for change, loss in curve.changed}
        return removal + self.kept / curve.count * changes.get(self, math.inf)

    def reasons(self, group: BlockGroup, curve: LossCurve) -> list[str]:
        """What a group loses by it, in words: a clause for the removal, and one for the change."""
        if self.is_replaced:
            return [f"replacing it by an affine map loses {self.loss(curve):.4f}"]
        removed = group.count - self.kept
        reasons: list[str] = []
        if removed:
            reasons.append(
                f"the {removed} removed {group.noun} hold {curve.own_loss[removed]:.1%} of its "
                "output that the others cannot reproduce"
            )
        if self.head_size is not None:
            shared = "" if self.rank is None else f" of {self.rank} shared ones"
            lost = self.loss(curve) - curve.at(removed)
            reasons.append(
                f"queries and keys of {self.head_size} dimensions{shared} lose {lost:.4f}"
            )
        if self.source is not None:
            reused = f"reusing the probabilities of {self.source} in all heads loses "
            reasons.append(f"{reused}{self.reuse_loss:.4f}")
        return reasons

    def __str__(self) -> str:
        if self.is_replaced:
            return "none"
        return f"{self.kept}{self.size}" + ("" if self.source is None else f" as {self.source}")


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

    @property
    def count(self) -> int:
        """The number of heads or neurons."""
        return len(self.order)

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
        stays = np.ones(self.count, int)
        stays[list(self.order[: self.count - kept])] = 0
        return stays.tolist()


@dataclass(frozen=True, eq=False)
class ReusePair:
    """Two attention blocks, of which the second may reuse the probabilities of the first.

    Attributes:
        times: Latencies of both together, by the number of kept heads.
        saved_ms: Time that reuse saves over both blocks with their fastest operators and all
            heads, mean over the target shapes; negative if reuse is slower.
        heads: The source head of each head of the reader.
        loss: The loss at the model's output if all heads of the reader reuse probabilities.
    """

    source: BlockGroup
    reader: BlockGroup
    times: Mapping[int, Latencies]
    saved_ms: float
    heads: tuple[int, ...] = ()
    loss: float = float("inf")

    def reusing(self, kept: int, curve: LossCurve) -> BlockConfig:
        """The reader with the heads that reuse those that the source needs most.

        Args:
            kept: The number of kept heads of both blocks.
            curve: The losses of the source.
        """
        stays = curve.mask(kept)
        source = self.source.names[0]
        heads = {head: (source, reused) for head, reused in enumerate(self.heads) if stays[reused]}
        return BlockConfig(kept, source=source, reused_heads=heads, reuse_loss=self.loss)


def configs_of(block: Block) -> list[BlockConfig]:
    """The configurations of a block besides the whole block; some may be impossible."""
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
        for graph_pass in config.passes(block, mask):
            if moments is not None:
                graph_pass = graph_pass.fitted(analyses, lambda _, __: {block.name: moments})
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
