"""Configurations: the forms of a block that a search considers, and their losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Final, Literal, get_args

import numpy as np

from attnserve.limits import MIN_REMOVAL_GAIN
from attnserve.planning.blocks.latencies import Latencies
from graph_passes.blocks import AttentionBlock, Block
from graph_passes.emit.fused_attention import FusedOperator
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.passes.fuse_attention import FuseAttention
from graph_passes.passes.fuse_gelu import FuseGelu
from graph_passes.passes.reuse_attention import ReuseAttention
from graph_passes.passes.skip_attention import SkipAttention

__all__ = [
    "AS_EXPORTED",
    "MAX_CONFIGS",
    "MULTIPLE",
    "OPERATORS",
    "BlockConfig",
    "BlockOperator",
    "LossCurve",
    "Replaced",
    "Reusing",
    "Shared",
    "Truncated",
    "fusion_of",
]

PlainOperators = Literal["skip", "sparse", "reuse"]
BlockOperator = FusedOperator | Literal["gelu"]
"""The fused operator of a block; a block with the nodes of the export has None."""

OPERATORS: Sequence[FusedOperator] = get_args(FusedOperator)
"""The fused operators of attention."""

AS_EXPORTED: Final = "as exported"
"""The name in reports of the nodes of the export."""

MULTIPLE = 8
"""Remaining neurons are a multiple of this, the number of floats in a vector register."""

MAX_CONFIGS = 24
"""The approximate number of configurations of a feed-forward block, and the most of an attention
block, that are timed."""


@dataclass(frozen=True)
class BlockConfig:
    """A block after a rewrite; of each block, a search chooses one of several configurations.

    Here, heads or neurons are only removed; each subclass is another kind of rewrite. Callers do
    not test the class.

    Attributes:
        plain_operators: The name in plan.json of the plain operators that compute it; None if fused
            ones can.
        is_fitted: Whether one of its passes is fitted to the moments of tokens. If not, the output
            of the block is refitted before the loss of the change is measured.
        kept: The number of remaining heads or neurons.
    """

    plain_operators: ClassVar[PlainOperators | None] = None
    is_fitted: ClassVar[bool] = False
    kept: int

    @property
    def recorded(self) -> dict[str, Any]:
        """The compared attributes of the configuration by name, as in plan.json."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.compare}

    @property
    def change(self) -> str:
        """Identifies the change besides removal, for any number of heads; empty if none."""
        return self.plain_operators or ""

    @property
    def sources(self) -> tuple[str, ...]:
        """The names of the attention blocks whose probabilities it reuses."""
        return ()

    @property
    def less_lossy(self) -> BlockConfig | None:
        """A configuration that loses less, so that this one is of use only if it is faster."""
        return None

    def outruns(self, latencies: Mapping[BlockConfig, Latencies]) -> bool:
        """Whether there is no ``less_lossy``, or it takes ``MIN_REMOVAL_GAIN`` times as long."""
        other = self.less_lossy
        return other is None or (
            other in latencies and MIN_REMOVAL_GAIN * latencies[self].mean < latencies[other].mean
        )

    def mask(self, order: Sequence[int]) -> list[int]:
        """1 for each head or neuron that is kept; ``order`` is the order of their removal."""
        mask = np.ones(len(order), int)
        mask[list(order[: len(order) - self.kept])] = 0
        return mask.tolist()

    def passes(self, block: Block) -> list[BlockPass[Any, Any]]:
        """The passes that follow the removal of heads or neurons of a block."""
        return []

    def loss(self, curve: LossCurve) -> float:
        """The predicted loss at the model's output; infinite if the change was not measured.

        Losses of removal and of other changes are added; removed heads lose nothing by a change.
        """
        return curve.at(curve.count - self.kept)

    def reasons(self, noun: str, curve: LossCurve) -> list[str]:
        """What a group loses by it, in words: a clause for removed ``noun``, one for the change."""
        removed = curve.count - self.kept
        lost = f"{curve.own_loss[removed]:.1%} of its output that the others cannot reproduce"
        return [f"the {removed} removed {noun} hold {lost}"] if removed else []

    def __str__(self) -> str:
        return str(self.kept)


@dataclass(frozen=True)
class Truncated(BlockConfig):
    """Heads whose queries and keys have fewer dimensions.

    Attributes:
        head_size: The number of dimensions that each head reads, as in ``Mixing``.
    """

    is_fitted: ClassVar[bool] = True
    head_size: int

    @property
    def recorded(self) -> dict[str, Any]:
        """Its ``head_size`` is K of the rewritten block, with the dimension of the content term."""
        return {**super().recorded, "head_size": self.head_size + 1}

    @property
    def change(self) -> str:
        return f"{super().change} x {self.head_size}"

    @property
    def sharing(self) -> str:
        """How many dimensions the heads share, in words; empty if they share none."""
        return ""

    def mixing(self, block: AttentionBlock) -> Mixing:
        """The dimensions of a block's heads: with as many as before, nothing is shared."""
        return Mixing(rank=self.kept * block.head_size, head_size=self.head_size)

    def passes(self, block: Block) -> list[BlockPass[Any, Any]]:
        assert isinstance(block, AttentionBlock)
        return [Collaborate({block.name: self.mixing(block)})]

    def loss(self, curve: LossCurve) -> float:
        change = curve.changed.get(self.change, math.inf)
        return super().loss(curve) + self.kept / curve.count * change

    def reasons(self, noun: str, curve: LossCurve) -> list[str]:
        size = f"{self.recorded['head_size']} dimensions{self.sharing and self.sharing + ' ones'}"
        lost = self.loss(curve) - super().loss(curve)
        return [*super().reasons(noun, curve), f"queries and keys of {size} lose {lost:.4f}"]

    def __str__(self) -> str:
        return f"{self.kept} x {self.recorded['head_size']}{self.sharing}"


@dataclass(frozen=True)
class Shared(Truncated):
    """Heads whose queries and keys read some of R (``rank``) dimensions, which they share."""

    plain_operators: ClassVar[PlainOperators | None] = "sparse"
    rank: int

    @property
    def sharing(self) -> str:
        return f" of {self.rank} shared"

    @property
    def less_lossy(self) -> Truncated:
        return Truncated(self.kept, self.head_size)

    def mixing(self, block: AttentionBlock) -> Mixing:
        return Mixing(rank=self.rank, head_size=self.head_size)


@dataclass(frozen=True)
class Reusing(BlockConfig):
    """Heads that reuse the probabilities of another attention.

    Attributes:
        heads: Maps each kept head to its source head, numbered after the pruning of the source.
        source: The name of the other attention.
        reuse_loss: The loss at the model's output if all heads are reused.
    """

    plain_operators: ClassVar[PlainOperators | None] = "reuse"
    heads: Mapping[int, int] = field(compare=False)
    source: str
    reuse_loss: float = field(compare=False)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.source,)

    def mask(self, order: Sequence[int]) -> list[int]:
        return [int(head in self.heads) for head in range(len(order))]

    def passes(self, block: Block) -> list[BlockPass[Any, Any]]:
        reused = {place: (self.source, head) for place, head in enumerate(self.heads.values())}
        return [ReuseAttention({block.name: reused})]

    def loss(self, curve: LossCurve) -> float:
        return super().loss(curve) + self.reuse_loss * self.kept / curve.count

    def reasons(self, noun: str, curve: LossCurve) -> list[str]:
        reused = f"reusing the probabilities of {self.source} in all heads loses "
        return [*super().reasons(noun, curve), f"{reused}{self.reuse_loss:.4f}"]

    def __str__(self) -> str:
        return f"{self.kept} as {self.source}"


@dataclass(frozen=True)
class Replaced(BlockConfig):
    """An affine map in place of an attention, whose heads are not removed before."""

    plain_operators: ClassVar[PlainOperators | None] = "skip"
    kept: Literal[0] = 0

    def mask(self, order: Sequence[int]) -> list[int]:
        return [1] * len(order)

    def passes(self, block: Block) -> list[BlockPass[Any, Any]]:
        return [SkipAttention({block.name: "affine"})]

    def loss(self, curve: LossCurve) -> float:
        return curve.changed.get(self.change, math.inf)

    def reasons(self, noun: str, curve: LossCurve) -> list[str]:
        return [f"replacing it by an affine map loses {self.loss(curve):.4f}"]

    def __str__(self) -> str:
        return "none"


@dataclass(frozen=True, eq=False, kw_only=True)
class LossCurve:
    """The loss at the model's output as parts of one group are removed.

    Attributes:
        order: Heads or neurons in the order of their removal.
        own_loss: The lost share of the block's own output after n removals, n = 0 .. count.
        removed_counts, loss: Measured numbers of removals, and the loss at the model's output for
            each.
        changed: Losses of other changes (``BlockConfig.change``) of all heads.
    """

    order: tuple[int, ...]
    own_loss: tuple[float, ...]
    removed_counts: tuple[int, ...]
    loss: tuple[float, ...]
    changed: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def count(self) -> int:
        """The number of heads or neurons."""
        return len(self.order)

    def at(self, num_removed: int) -> float:
        """The loss after a number of removals, interpolated as a power of the block's own loss."""
        if num_removed == 0:
            return 0.0
        x = np.log(np.maximum([self.own_loss[n] for n in self.removed_counts], 1e-12))
        y = np.log(np.maximum(self.loss, 1e-12))
        position = float(np.log(max(self.own_loss[num_removed], 1e-12)))
        if len(x) == 1 or position <= x[0]:
            return float(np.exp(y[0] + min(position - x[0], 0.0)))  # proportionally
        place = min(int(np.searchsorted(x, position)), len(x) - 1)
        run = max(float(x[place] - x[place - 1]), 1e-9)
        slope = float(np.clip((y[place] - y[place - 1]) / run, 0.0, 4.0))
        return float(np.exp(y[place - 1] + slope * (position - x[place - 1])))


def fusion_of(name: str, operator: BlockOperator) -> RewritePass:
    """The pass that writes a block in an operator."""
    return FuseGelu([name]) if operator == "gelu" else FuseAttention({name: operator})
