"""Configurations: the forms of a block that a search considers, and their losses."""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, Final, Literal

import numpy as np
import onnx_ir as ir
from pydantic import ConfigDict, PositiveInt

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
from graph_passes.passes.reuse_attention import Edges, ReuseAttention, ReusedHeads
from graph_passes.passes.skip_attention import SkipAttention, skip_refusal

__all__ = [
    "AS_EXPORTED",
    "MAX_CONFIGS",
    "AnyConfig",
    "BlockConfig",
    "BlockOperator",
    "Kept",
    "LossCurve",
    "Replaced",
    "ReusePair",
    "Reusing",
    "Shared",
    "Truncated",
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
class BlockConfig(ABC):
    """A block after a rewrite; of each block, a search chooses one of several configurations.

    A new kind of rewrite adds a subclass, and the subclass to ``AnyConfig``. Other modules ask the
    configuration, and do not depend on its kind.

    Attributes:
        kept: The number of remaining heads or neurons.
        plain_operators: The name in plan.json of the plain operators that compute it; None if fused
            ones can.
        is_fitted: Whether one of its passes is fitted to the moments of tokens.
        is_refitted: Whether the block's output is refitted before the loss is measured.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # a union member is chosen by its fields

    plain_operators: ClassVar[PlainOperators | None] = None
    is_fitted: ClassVar[bool] = False
    is_refitted: ClassVar[bool] = False

    kept: PositiveInt

    @property
    def change(self) -> str:
        """The change of the kept heads in words; empty if the configuration only removes heads."""
        return ""

    @property
    def size(self) -> str:
        """The size of a kept head's queries and keys; empty if the block keeps its own size."""
        return ""

    @property
    def recorded(self) -> dict[str, Any]:
        """The compared attributes of the configuration by name, as in plan.json."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    @property
    def sort_key(self) -> tuple[int, int, int]:
        """The key that sorts configurations in reports: by change, then by number of heads."""
        return 0, 0, self.kept

    @property
    def less_lossy(self) -> BlockConfig | None:
        """The less lossy configuration that it must be faster than before its loss is measured.

        None if there is none.
        """
        return None

    def outruns(self, latencies: Mapping[BlockConfig, Latencies]) -> bool:
        """Whether it is faster, by ``MIN_REMOVAL_GAIN``, than ``less_lossy``, or there is none."""
        other = self.less_lossy
        if other is None:
            return True
        return (
            other in latencies and MIN_REMOVAL_GAIN * latencies[self].mean < latencies[other].mean
        )

    def follow_ups(self, wanted: Iterable[BlockConfig]) -> list[BlockConfig]:
        """The configurations to time if it is faster than ``less_lossy``.

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

    def mask(self, group: BlockGroup, curves: Mapping[str, LossCurve]) -> list[int]:
        """1 for each head or neuron of a group that is kept.

        Args:
            curves: The losses of each group that can be reduced, by its key.
        """
        if self.kept == group.count:
            return [1] * group.count
        return curves[group.key].mask(self.kept)

    def reused_heads(self) -> ReusedHeads:
        """The kept heads that reuse probabilities, and of which head; numbers before pruning."""
        return {}

    def loss(self, curve: LossCurve) -> float | None:
        """The predicted loss at the model's output; None if the change was not measured.

        Losses of removal and of other changes are added; removed heads lose nothing by a change.

        Args:
            curve: The losses of the block.
        """
        changes = {change.with_heads(self.kept): loss for change, loss in curve.changed}
        if self not in changes:
            return None
        return curve.at(curve.count - self.kept) + self.kept / curve.count * changes[self]

    def reasons(self, group: BlockGroup, curve: LossCurve) -> list[str]:
        """What a group loses by it, in words: a clause for the removal, and one for the change."""
        removed = group.count - self.kept
        reasons: list[str] = []
        if removed:
            reasons.append(
                f"the {removed} removed {group.noun} hold {curve.own_loss[removed]:.1%} of its "
                "output that the others cannot reproduce"
            )
        if self.change:
            lost = (self.loss(curve) or 0.0) - curve.at(removed)
            reasons.append(f"{self.change} lose {lost:.4f}")
        return reasons

    def __str__(self) -> str:
        return f"{self.kept}{self.size}"


@dataclass(frozen=True)
class Kept(BlockConfig):
    """Heads or neurons as in the original, all or some of them."""

    def loss(self, curve: LossCurve) -> float:
        return curve.at(curve.count - self.kept)


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
        return [
            self.with_heads(other.kept)
            for other in wanted
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
    """Heads that reuse the probabilities of another attention (``ReusePair.reusing``).

    The pass that makes them reuse (``apply_reuse``) concerns two blocks, so it is not in
    ``passes``.

    Attributes:
        source: The name of the other attention.
        heads: For each kept head, the head of the other attention; not recorded.
        reuse_loss: The loss at the model's output if all heads are reused; not recorded.
    """

    plain_operators: ClassVar[PlainOperators | None] = "reuse"

    source: str
    heads: Mapping[int, int] = field(default_factory=dict[int, int], compare=False)
    reuse_loss: float = field(default=float("inf"), compare=False)

    def mask(self, group: BlockGroup, curves: Mapping[str, LossCurve]) -> list[int]:
        return [int(head in self.heads) for head in range(group.count)]

    def reused_heads(self) -> ReusedHeads:
        return {head: (self.source, reused) for head, reused in self.heads.items()}

    def loss(self, curve: LossCurve) -> float:
        removed = curve.at(curve.count - self.kept)
        return removed + self.reuse_loss * self.kept / curve.count

    def reasons(self, group: BlockGroup, curve: LossCurve) -> list[str]:
        reused = f"reusing the probabilities of {self.source} in all heads loses "
        return [*super().reasons(group, curve), f"{reused}{self.reuse_loss:.4f}"]

    def __str__(self) -> str:
        return f"{self.kept} as {self.source}"


@dataclass(frozen=True)
class Replaced(BlockConfig):
    """An affine map in place of an attention."""

    plain_operators: ClassVar[PlainOperators | None] = "skip"
    is_refitted: ClassVar[bool] = True

    kept: Literal[0] = 0

    def with_heads(self, kept: int) -> Replaced:
        """This configuration, which has no heads."""
        return self

    def passes(self, block: Block, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
        return [SkipAttention({block.name: "affine"})]

    def mask(self, group: BlockGroup, curves: Mapping[str, LossCurve]) -> list[int]:
        """All heads: none is removed before the replacement."""
        return [1] * group.count

    def loss(self, curve: LossCurve) -> float | None:
        return dict(curve.changed).get(self)

    def reasons(self, group: BlockGroup, curve: LossCurve) -> list[str]:
        return [f"replacing it by an affine map loses {self.loss(curve) or 0:.4f}"]

    def __str__(self) -> str:
        return "none"


AnyConfig = Kept | Truncated | Shared | Reusing | Replaced
"""All kinds of configuration, for files."""


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
    changed: tuple[tuple[AnyConfig, float], ...] = ()

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

    def reusing(self, kept: int, curve: LossCurve) -> Reusing:
        """The reader with the heads that reuse those that the source needs most.

        Args:
            kept: The number of kept heads of both blocks.
            curve: The losses of the source.
        """
        stays = curve.mask(kept)
        heads = {head: reused for head, reused in enumerate(self.heads) if stays[reused]}
        return Reusing(kept, self.source.names[0], heads, self.loss)


def configs_of(block: Block) -> list[BlockConfig]:
    """The configurations of a block besides the whole block; some may be impossible."""
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
