"""What each block could become, what that takes and loses, and what is chosen from.

``block_times`` measures how long each form takes on this machine, ``block_losses`` what the output
of the whole model loses by it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import origin
from graph_passes.blocks import AttentionBlock, FeedForwardBlock
from graph_passes.context import GraphContext
from graph_passes.emit.attention import emission_refusal
from graph_passes.errors import Refusal
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import find_feed_forward
from graph_passes.passes.base import BlockPass, small_shapes
from graph_passes.passes.collaborate import Collaborate, SharedDimensions, sharing_refusal
from graph_passes.passes.conditions import caller_reads
from graph_passes.passes.fuse_attention import FusedOperator
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons, neurons_refusal
from graph_passes.passes.reuse_attention import Edges, ReuseAttention
from graph_passes.passes.skip_attention import SkipAttention, skip_refusal

__all__ = [
    "MAX_CONFIGS",
    "MULTIPLE",
    "NO_SLOWER",
    "Block",
    "BlockConfig",
    "BlockLatency",
    "ChoiceUnit",
    "Implementation",
    "LossCurve",
    "Option",
    "ReusePair",
    "TiedBlocks",
    "apply_config",
    "changes_to_measure",
    "configs_of",
    "group_blocks",
    "options_of",
    "passes_of",
    "reuse",
    "units_of",
]

Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]
Implementation = FusedOperator | Literal["gelu", "as exported"]

MAX_CONFIGS = 24
"""About how many sizes of a feed-forward, and at most of an attention, are timed."""

MULTIPLE = 8
"""Neurons stay in multiples of this: so many floats fill a vector register."""

SHARED = 2 / 3
"""The dimensions that heads share, of those that they would have together if each had its own."""

NO_SLOWER = 1.03
"""A form may take this many times what the block takes as it was exported, at every length: the
speed of a whole model may nowhere fall below 0.97 of the original's."""


class BlockConfig(NamedTuple):
    """What is left of a block.

    Attributes:
        kept: Heads or neurons; with none, an affine map stands for an attention.
        head_size: Dimensions of queries and keys, the content term's among them, where they are
            cut to the strongest of each head; None where they are as they were.
        rank: R, where heads read so many dimensions out of dimensions that they share.
        source: The attention whose probabilities the heads take; None where they have their own.
    """

    kept: int
    head_size: int | None = None
    rank: int | None = None
    source: str | None = None

    @property
    def needs_plain_operators(self) -> bool:
        """Whether it is written in plain operators: no other holds what it is."""
        return not self.kept or self.rank is not None or self.source is not None

    def of(self, kept: int) -> BlockConfig:
        """The same of fewer heads: what they share is less in proportion."""
        rank = None
        if self.rank is not None:
            rank = max(self.rank * kept // self.kept // MULTIPLE, 1) * MULTIPLE
        return self._replace(kept=kept, rank=rank)

    def __str__(self) -> str:
        if not self.kept:
            return "none"
        text = f"{self.kept}" if self.head_size is None else f"{self.kept} x {self.head_size}"
        text += "" if self.rank is None else f" of {self.rank} shared"
        return text + ("" if self.source is None else f" as {self.source}")


@dataclass(frozen=True, eq=False)
class TiedBlocks:
    """Blocks that share their last weight, and so are rewritten alike; mostly one.

    Attributes:
        count: Heads or neurons.
        refusal: Why nothing can be taken out; empty where it can.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    count: int
    refusal: str

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """What it is called where things are kept by name."""
        return f"{self.kind} {self.names[0]}"


@dataclass(frozen=True, eq=False)
class BlockLatency:
    """Milliseconds of one block at each shape.

    Attributes:
        original: As it was exported.
        implementation: How it is written, where another way than the exporter's is faster.
        sizes: By what is left.
        forms: The whole block in each of the other ways to write it.
    """

    original: tuple[float, ...]
    implementation: Implementation
    sizes: Mapping[BlockConfig, tuple[float, ...]]
    forms: Mapping[Implementation, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class ReusePair:
    """Two attentions of which the second may take the probabilities of the first, head by head.

    Attributes:
        times: Milliseconds of both together at each shape, by the heads that stay in each.
        saved_ms: Of both in their fastest form with all their heads, mean over the target shapes;
            less than nothing where reuse is slower.
        heads: For each head of the reader, the head of the source that attends most like it.
        loss: One minus the cosine of the model's output, where all do.
    """

    source: TiedBlocks
    reader: TiedBlocks
    times: Mapping[int, tuple[float, ...]]
    saved_ms: float
    heads: tuple[int, ...] = ()
    loss: float = float("inf")

    def masks(self, curve: LossCurve, kept: int) -> tuple[list[int], list[int]]:
        """Which heads of both stay: those that the source needs most, and who takes theirs."""
        source = curve.mask(kept)
        return source, [source[head] for head in self.heads]

    def edges(self, mask: Sequence[int]) -> dict[int, tuple[str, int]]:
        """Of the heads of the reader that stay."""
        name = self.source.names[0]
        return {head: (name, self.heads[head]) for head in np.flatnonzero(mask).tolist()}


ChoiceUnit = tuple[TiedBlocks, ...]
"""Groups that are chosen together: one, or the two of a pair."""


@dataclass(frozen=True)
class Option:
    """One form of a unit.

    Attributes:
        sizes: Of each of its groups.
        loss: Predicted, of the whole model's output: one minus the cosine.
        ms: Mean over the target shapes.
    """

    sizes: tuple[BlockConfig, ...]
    loss: float
    ms: float


@dataclass(frozen=True, eq=False)
class LossCurve:
    """What the model's output loses when parts of one group go.

    Attributes:
        order: Heads or neurons, from the first to go.
        own_loss: The share of the block's own output that is lost once n are gone, n = 0 .. count.
        gone, loss: How many were taken out, and one minus the cosine of the model's output.
        changed: The loss of other changes: to all heads, or with none left.
    """

    order: tuple[int, ...]
    own_loss: tuple[float, ...]
    gone: tuple[int, ...]
    loss: tuple[float, ...]
    changed: tuple[tuple[BlockConfig, float], ...] = ()

    def of(self, size: BlockConfig) -> float | None:
        """Losses add up nearly, and heads that are gone lose nothing by being changed; None for a
        change that was not pair_losses."""
        if not size.kept:
            return dict(self.changed).get(size)
        kept = self.at(len(self.order) - size.kept)
        if size == BlockConfig(size.kept):
            return kept
        changes = {whole.of(size.kept): loss for whole, loss in self.changed if whole.kept}
        share = size.kept / len(self.order)
        return kept + share * changes[size] if size in changes else None

    def at(self, gone: int) -> float:
        """Between two probes the loss follows a power of the block's own loss."""
        if gone == 0:
            return 0.0
        x = np.log(np.maximum([self.own_loss[n] for n in self.gone], 1e-12))
        y = np.log(np.maximum(self.loss, 1e-12))
        here = float(np.log(max(self.own_loss[gone], 1e-12)))
        if len(x) == 1 or here <= x[0]:
            return float(np.exp(y[0] + min(here - x[0], 0.0)))  # in proportion
        place = min(int(np.searchsorted(x, here)), len(x) - 1)
        run = max(float(x[place] - x[place - 1]), 1e-9)
        slope = float(np.clip((y[place] - y[place - 1]) / run, 0.0, 4.0))
        return float(np.exp(y[place - 1] + slope * (here - x[place - 1])))

    def mask(self, kept: int) -> list[int]:
        """1 for each that stays."""
        stays = np.ones(len(self.order), int)
        stays[list(self.order[: len(self.order) - kept])] = 0
        return stays.tolist()

    def to_json(self) -> dict[str, Any]:
        return {"order": list(self.order), "own_loss": list(self.own_loss),
                "gone": list(self.gone), "loss": list(self.loss),
                "changed": [[list(size), loss] for size, loss in self.changed]}  # fmt: skip

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> LossCurve:
        """What ``to_json`` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        lists = {name: tuple(content[name]) for name in ("order", "own_loss", "gone", "loss")}
        changed = tuple((BlockConfig(*size), float(loss)) for size, loss in content["changed"])
        return cls(**lists, changed=changed)


def group_blocks(
    model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool
) -> list[TiedBlocks]:
    """Attentions that were certified, and feed-forwards, in groups.

    Blocks in the body of another node are left out: no session can look into them.
    """
    found: dict[object, list[Block]] = {}
    context = GraphContext(model)
    for block in attention:
        if block.graph is model.graph and block.output is not None:
            found.setdefault(origin(block.output.weight), []).append(block)
    for block in find_feed_forward(model):
        if block.graph is model.graph:
            found.setdefault(origin(block.second.weight), []).append(block)
    groups: list[TiedBlocks] = []
    taken = {block.name for block in attention}
    for blocks in found.values():
        first = blocks[0]
        if isinstance(first, FeedForwardBlock):
            ours = [block for block in blocks if isinstance(block, FeedForwardBlock)]
            reason = next((str(r) for r in map(neurons_refusal, ours) if r), "")
            if taken & {block.name for block in ours}:
                continue  # nothing could tell it from the attention of that name
            reason = reason or ("" if ffn else "neurons stay unless `allow` names ffn")
            groups.append(TiedBlocks("feed_forward", tuple(blocks), first.num_neurons, reason))
            continue
        theirs = [block for block in blocks if isinstance(block, AttentionBlock)]
        reason = next((str(r) for r in (_refusal(b, context) for b in theirs) if r), "")
        groups.append(TiedBlocks("attention", tuple(blocks), first.num_heads, reason))
    return groups


def _refusal(block: AttentionBlock, context: GraphContext) -> Refusal | None:
    return PruneHeads.refusal(block, None, context) or emission_refusal(
        block, small_shapes(context)
    )


# ---- sizes --------------------------------------------------------------------------------------


def configs_of(block: Block) -> list[BlockConfig]:
    """What a block may become, the whole of it left out; not every one can be made."""
    if isinstance(block, FeedForwardBlock):
        step = max(block.num_neurons // MAX_CONFIGS // MULTIPLE, 1) * MULTIPLE
        return [BlockConfig(kept) for kept in range(step, block.num_neurons, step)]
    step = max(block.num_heads // MAX_CONFIGS, 1)
    numbers = (*range(step, block.num_heads, step), block.num_heads)
    sizes = [BlockConfig(kept) for kept in numbers[:-1]]
    if (cut := _shorter(block)) is not None:
        sizes += [BlockConfig(kept, cut) for kept in numbers]
        own = block.num_heads * (cut - 1)
        if (rank := int(SHARED * own) // MULTIPLE * MULTIPLE) and block.num_heads > 1:
            sizes.append(BlockConfig(block.num_heads, cut, rank))
    if block.k.past is None and not (caller_reads(block) or skip_refusal(block)):
        sizes.append(BlockConfig(0))
    return sizes


def _shorter(block: AttentionBlock) -> int | None:
    """Half of a head's dimensions, where queries and keys can be cut to so many."""
    half = block.head_size // 2
    able = half and half % MULTIPLE == 0 and block.k.past is None and not sharing_refusal(block)
    return half if able else None


def passes_of(block: Block, size: BlockConfig, mask: Sequence[int]) -> list[BlockPass[Any, Any]]:
    """The passes that give a block a size; reuse, which concerns two blocks, is not one of them.

    Args:
        mask: 1 for each head or neuron that stays, ``size.kept`` of them.
    """
    name = block.name
    if isinstance(block, FeedForwardBlock):
        return [] if all(mask) else [PruneNeurons({name: mask})]
    if not size.kept:
        return [SkipAttention({name: "affine"})]
    passes: list[BlockPass[Any, Any]] = []
    if size.kept < block.num_heads:
        passes.append(PruneHeads({name: mask}))
    if size.head_size is not None:
        shared = SharedDimensions(
            rank=size.rank or size.kept * block.head_size,  # without a rank nothing is shared
            head_size=size.head_size - 1,  # one dimension is that of the content term
        )
        passes.append(Collaborate({name: shared}))
    return passes


def apply_config(
    model: ir.Model, block: Block, size: BlockConfig, moments: TokenMoments | None = None
) -> None:
    """Give one block of ``model`` a size, in place; its first heads or neurons stay.

    Args:
        moments: Of the tokens that the block sees, if queries and keys are truncated.

    Raises:
        CannotRewrite: Some of its heads cannot be removed.
    """
    count = block.num_neurons if isinstance(block, FeedForwardBlock) else block.num_heads
    mask = [1] * size.kept + [0] * (count - size.kept)
    with GraphContext.of(model) as context:
        for each in passes_of(block, size, mask):
            if isinstance(each, Collaborate) and moments is not None:
                each.factored(context, {block.name: moments})(model)
            else:
                each(model)


def reuse(model: ir.Model, edges: Edges, masks: Mapping[str, Sequence[int]]) -> None:
    """Let heads reuse the probabilities of others, in place, after pruning.

    Args:
        edges: In the numbers of the heads that stay.

    Raises:
        CannotRewrite: See ``ReuseAttention``.
    """
    with GraphContext.of(model):
        PruneHeads(masks)(model)
        ReuseAttention(edges)(model)


# ---- the choice ---------------------------------------------------------------------------------


def changes_to_measure(group: TiedBlocks, timed: BlockLatency, *, target: int) -> list[BlockConfig]:
    """The changes beside fewer heads whose loss is worth knowing: sharing dimensions is of no use
    where it is no faster than giving each head as many of its own, which loses less."""
    sizes = {size: float(np.mean(ms[:target])) for size, ms in timed.sizes.items()}
    found: list[BlockConfig] = []
    for size, ms in sizes.items():
        own = sizes.get(size._replace(rank=None), ms)
        whole = size.kept in (0, group.count) and size != BlockConfig(group.count)
        if whole and (size.rank is None or ms < own):
            found.append(size)
    return found


def units_of(
    groups: Sequence[TiedBlocks], pairs: Sequence[ReusePair]
) -> list[tuple[ChoiceUnit, ReusePair | None]]:
    """Groups that are chosen together, in order; no group is in two pairs, and those that lose
    least come first."""
    taken: set[TiedBlocks] = set()
    chosen: dict[TiedBlocks, ReusePair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.loss):
        if np.isfinite(pair.loss) and taken.isdisjoint((pair.source, pair.reader)):
            taken |= {pair.source, pair.reader}
            chosen[pair.source] = pair
    found: list[tuple[ChoiceUnit, ReusePair | None]] = []
    for group in groups:
        if pair := chosen.get(group):
            found.append(((pair.source, pair.reader), pair))
        elif group not in taken:
            found.append(((group,), None))
    return found


def options_of(
    unit: ChoiceUnit,
    timed: Mapping[Block, BlockLatency],
    curves: Mapping[str, LossCurve],
    pair: ReusePair | None = None,
    *,
    target: int,
) -> list[Option]:
    """The forms of a unit that are slower than it is now at no shape, the whole of it first."""
    if pair is None:
        (group,) = unit
        return _rising(_of_group(group, timed, curves.get(group.key), target))
    first, second = (
        _rising(_of_group(group, timed, curves.get(group.key), target)) for group in unit
    )
    options = [
        Option((*a.sizes, *b.sizes), a.loss + b.loss, a.ms + b.ms) for a in first for b in second
    ]
    original = sum(np.array(timed[group.blocks[0]].original) for group in unit)
    curve, other = (curves[group.key] for group in unit)
    for kept, ms in pair.times.items():
        if (np.array(ms) > NO_SLOWER * original).any():
            continue
        gone = pair.source.count - kept
        loss = curve.at(gone) + other.at(gone) + pair.loss * kept / pair.source.count
        sizes = BlockConfig(kept), BlockConfig(kept, source=pair.source.names[0])
        options.append(Option(sizes, loss, float(np.mean(ms[:target]))))
    return _rising(options)


def _of_group(
    group: TiedBlocks, timed: Mapping[Block, BlockLatency], curve: LossCurve | None, target: int
) -> list[Option]:
    times = [timed[block] for block in group.blocks]
    original = np.sum([each.original for each in times], axis=0)
    whole = BlockConfig(group.count)
    options: list[Option] = []
    for size in set.intersection(*(set(each.sizes) for each in times)):
        ms = np.sum([each.sizes[size] for each in times], axis=0)
        loss = 0.0 if size == whole else curve and curve.of(size)
        if loss is not None and (size == whole or (ms <= NO_SLOWER * original).all()):
            options.append(Option((size,), loss, float(np.mean(ms[:target]))))
    return options


def _rising(options: Sequence[Option]) -> list[Option]:
    """Without what loses more and is no faster."""
    ordered = sorted(options, key=lambda option: (option.loss, option.ms))
    rising = ordered[:1]
    for option in ordered[1:]:
        if option.ms < rising[-1].ms:
            rising.append(option)
    return rising
