"""Configurations: what a search can make of a block."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal

import onnx_ir as ir
from pydantic import ConfigDict, PositiveInt

from graph_passes.analyses import Analyses
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.factorize.moments import TokenMoments
from graph_passes.passes.base import BlockPass, FittedPass
from graph_passes.passes.collaborate import Collaborate, Mixing, sharing_refusal
from graph_passes.passes.conditions import returned_refusal
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import Edges, ReuseAttention
from graph_passes.passes.skip_attention import SkipAttention, skip_refusal

__all__ = [
    "AS_EXPORTED",
    "MAX_CONFIGS",
    "AnyConfig",
    "Block",
    "BlockConfig",
    "BlockOperator",
    "Kept",
    "Replaced",
    "Reusing",
    "Shared",
    "Truncated",
    "apply_config",
    "apply_reuse",
    "configs_of",
]

Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]
PlainOperators = Literal["skip", "sparse", "reuse"]
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


@dataclass(frozen=True)
class BlockConfig(ABC):
    """A block after a rewrite; of each block, a search chooses one of several configurations.

    A new kind of rewrite adds a subclass, and the subclass to ``AnyConfig``.

    Attributes:
        kept: The number of remaining heads or neurons.
        plain_operators: The name in plan.json of the plain operators that compute it; None if fused
            ones can.
        is_fitted: Whether one of its passes is fitted to the moments of tokens (``FittedPass``).
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # a union member is chosen by its fields

    plain_operators: ClassVar[PlainOperators | None] = None
    is_fitted: ClassVar[bool] = False

    kept: PositiveInt

    @property
    def change(self) -> str:
        """What it changes in the kept heads, in words; empty if it only removes heads."""
        return ""

    @property
    def size(self) -> str:
        """The size of the queries and keys of a kept head; empty if it is that of the original."""
        return ""

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """Its place in reports: by the change, then by the number of heads."""
        return 0, 0, self.kept

    @property
    def less_lossy(self) -> BlockConfig | None:
        """The configuration that loses less, and that it must outrun before its loss is measured.

        None if there is none.
        """
        return None

    def follow_ups(self, wanted: Iterable[BlockConfig]) -> list[BlockConfig]:
        """The configurations to time if it outruns ``less_lossy``.

        Args:
            wanted: The configurations that are timed anyway.
        """
        del wanted
        return []

    def with_heads(self, kept: int) -> BlockConfig:
        """The same configuration with fewer heads."""
        return replace(self, kept=kept)

    def passes(self, block: Block, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
        """The passes that give a block the configuration.

        Args:
            mask: 1 for each head or neuron that is kept, ``kept`` of them.
        """
        if all(mask):
            return []
        if isinstance(block, FeedForwardBlock):
            return [PruneNeurons({block.name: mask})]
        return [PruneHeads({block.name: mask})]

    def __str__(self) -> str:
        return f"{self.kept}{self.size}"


@dataclass(frozen=True)
class Kept(BlockConfig):
    """Heads or neurons as in the original, all or some of them."""


@dataclass(frozen=True)
class Truncated(BlockConfig):
    """Heads whose queries and keys have fewer dimensions.

    Attributes:
        head_size: These dimensions, including one of the content term.
    """

    is_fitted: ClassVar[bool] = True

    head_size: int

    @property
    def change(self) -> str:
        return f"queries and keys of {self.head_size} dimensions"

    @property
    def size(self) -> str:
        return f" x {self.head_size}"

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return self.head_size, 0, self.kept

    def passes(self, block: Block, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
        assert isinstance(block, AttentionBlock)
        mixing = Mixing(rank=self._rank(block), head_size=self.head_size - 1)
        return [*super().passes(block, mask), Collaborate({block.name: mixing})]

    def _rank(self, block: AttentionBlock) -> int:
        """R; with as many dimensions as the heads have, nothing is shared."""
        return self.kept * block.head_size


@dataclass(frozen=True)
class Shared(Truncated):
    """Heads that read ``head_size`` of R dimensions, which they share.

    Attributes:
        rank: R.
    """

    plain_operators: ClassVar[PlainOperators | None] = "sparse"

    rank: int

    @property
    def change(self) -> str:
        return f"{super().change} of {self.rank} shared ones"

    @property
    def size(self) -> str:
        return f"{super().size} of {self.rank} shared"

    @property
    def sort_key(self) -> tuple[int, int, int]:
        return self.head_size, self.rank, self.kept

    @property
    def less_lossy(self) -> Truncated:
        """As many separate dimensions of each head."""
        return Truncated(self.kept, self.head_size)

    def follow_ups(self, wanted: Iterable[BlockConfig]) -> list[BlockConfig]:
        """The same with each number of heads of which separate dimensions are timed."""
        separate = [other for other in wanted if isinstance(other, Truncated)]
        return [
            self.with_heads(other.kept)
            for other in separate
            if other == Truncated(other.kept, self.head_size)
        ]

    def with_heads(self, kept: int) -> Shared:
        """The same with fewer heads, which share proportionally fewer dimensions."""
        rank = max(self.rank * kept // self.kept // MULTIPLE, 1) * MULTIPLE
        return Shared(kept, self.head_size, rank)

    def _rank(self, block: AttentionBlock) -> int:
        return self.rank


@dataclass(frozen=True)
class Reusing(BlockConfig):
    """Heads that reuse the probabilities of another attention.

    The pass that makes them reuse (``apply_reuse``) concerns two blocks, so it is not in
    ``passes``.

    Attributes:
        source: The name of the other attention.
    """

    plain_operators: ClassVar[PlainOperators | None] = "reuse"

    source: str

    def __str__(self) -> str:
        return f"{self.kept} as {self.source}"


@dataclass(frozen=True)
class Replaced(BlockConfig):
    """An affine map in place of an attention."""

    plain_operators: ClassVar[PlainOperators | None] = "skip"

    kept: Literal[0] = 0

    def passes(self, block: Block, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
        return [SkipAttention({block.name: "affine"})]

    def __str__(self) -> str:
        return "none"


AnyConfig = Kept | Truncated | Shared | Reusing | Replaced
"""All kinds of configuration, for files."""


def configs_of(block: Block) -> list[BlockConfig]:
    """The configurations of a block besides the whole block; some may turn out impossible."""
    if isinstance(block, FeedForwardBlock):
        step = max(block.num_neurons // MAX_CONFIGS // MULTIPLE, 1) * MULTIPLE
        return [Kept(kept) for kept in range(step, block.num_neurons, step)]
    step = max(block.num_heads // MAX_CONFIGS, 1)
    numbers = (*range(step, block.num_heads, step), block.num_heads)
    configs: list[BlockConfig] = [Kept(kept) for kept in numbers[:-1]]
    if (cut := _shorter(block)) is not None:
        configs += [Truncated(kept, cut) for kept in numbers]
        own = block.num_heads * (cut - 1)
        if (rank := int(SHARED_FRACTION * own) // MULTIPLE * MULTIPLE) and block.num_heads > 1:
            configs.append(Shared(block.num_heads, cut, rank))
    if not block.k.is_cached and not (returned_refusal(block) or skip_refusal(block)):
        configs.append(Replaced())
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
