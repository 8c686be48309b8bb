"""What is measured of blocks: latencies (``search.block_timing``) and losses (``loss_curves``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from attnserve.planning.blocks.configurations import (
    AnyConfig,
    BlockConfig,
    BlockOperator,
    Kept,
    Replaced,
)
from attnserve.planning.blocks.groups import TiedBlocks
from graph_passes.passes.reuse_attention import SourceHead

__all__ = ["BlockLatency", "LossCurve", "ReusePair"]


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
    changed: tuple[tuple[AnyConfig, float], ...] = ()

    def loss_of(self, config: BlockConfig) -> float | None:
        """The loss of a configuration; None if its change was not measured.

        Losses of removal and of other changes are added; removed heads lose nothing by a change.
        """
        if isinstance(config, Replaced):
            return dict(self.changed).get(config)
        kept = self.at(len(self.order) - config.kept)
        if isinstance(config, Kept):
            return kept
        changes = {
            change.with_heads(config.kept): loss
            for change, loss in self.changed
            if not isinstance(change, Replaced)
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
