"""What each block could become, what that takes and loses, and what is chosen from.

``block_times`` measures how long each form takes on this machine, ``block_losses`` what the output
of the whole model loses by it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import origin
from graph_passes.analysis.shapes import Facts, interpret_small
from graph_passes.blocks import AttentionBlock
from graph_passes.emit import attention as emit
from graph_passes.factorize.moments import TokenMoments
from graph_passes.matching.feed_forward import FeedForwardBlock, find_feed_forward
from graph_passes.matching.find import find_attention
from graph_passes.passes import prune_neurons
from graph_passes.passes import refusals as rewrites
from graph_passes.passes.collaborate import Collaborate, factor
from graph_passes.passes.decompose_attention import DecomposeAttention
from graph_passes.passes.fuse_attention import Form
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.prune_neurons import PruneNeurons
from graph_passes.passes.reuse_attention import Edges, ReuseAttention
from graph_passes.passes.skip_attention import AffineMap, SkipAttention

__all__ = [
    "MULTIPLE",
    "NO_SLOWER",
    "SIZES",
    "Block",
    "Curve",
    "Emission",
    "Group",
    "Option",
    "Pair",
    "Size",
    "Timed",
    "Unit",
    "apply",
    "decompose",
    "group_blocks",
    "hand_on",
    "options_of",
    "sizes_of",
    "units_of",
    "worth_weighing",
]

Block = AttentionBlock | FeedForwardBlock
Kind = Literal["attention", "feed_forward"]
Emission = Form | Literal["gelu", "as exported"]

SIZES = 24
"""About how many sizes of a feed-forward, and at most of an attention, are timed."""

MULTIPLE = 8
"""Neurons stay in multiples of this: so many floats fill a vector register."""

SHARED = 2 / 3
"""The dimensions that heads share, of those that they would have together if each had its own."""

NO_SLOWER = 1.03
"""A form may take this many times what the block takes as it was exported, at every length: the
speed of a whole model may nowhere fall below 0.97 of the original's."""


class Size(NamedTuple):
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
    def is_plain(self) -> bool:
        """Whether it is written in plain operators: no other holds what it is."""
        return not self.kept or self.rank is not None or self.source is not None

    def of(self, kept: int) -> Size:
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
class Group:
    """Blocks that share their last weight, and so are rewritten alike; mostly one.

    Attributes:
        count: Heads or neurons.
        why_not: Why nothing can be taken out; empty where it can.
    """

    kind: Kind
    blocks: tuple[Block, ...]
    count: int
    why_not: str

    @property
    def names(self) -> list[str]:
        return [block.name for block in self.blocks]

    @property
    def key(self) -> str:
        """What it is called where things are kept by name."""
        return f"{self.kind} {self.names[0]}"


@dataclass(frozen=True, eq=False)
class Timed:
    """Milliseconds of one block at each shape.

    Attributes:
        original: As it was exported.
        emission: How it is written, where another way than the exporter's is faster.
        sizes: By what is left.
        forms: The whole block in each of the other ways to write it.
    """

    original: tuple[float, ...]
    emission: Emission
    sizes: Mapping[Size, tuple[float, ...]]
    forms: Mapping[Emission, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class Pair:
    """Two attentions of which the second may take the probabilities of the first, head by head.

    Attributes:
        times: Milliseconds of both together at each shape, by the heads that stay in each.
        saved_ms: Of both in their fastest form with all their heads, mean over the target shapes;
            less than nothing where reuse is slower.
        heads: For each head of the reader, the head of the source that attends most like it.
        loss: One minus the cosine of the model's output, where all do.
    """

    source: Group
    reader: Group
    times: Mapping[int, tuple[float, ...]]
    saved_ms: float
    heads: tuple[int, ...] = ()
    loss: float = float("inf")

    def masks(self, curve: Curve, kept: int) -> tuple[list[int], list[int]]:
        """Which heads of both stay: those that the source needs most, and who takes theirs."""
        source = curve.mask(kept)
        return source, [source[head] for head in self.heads]

    def edges(self, mask: Sequence[int]) -> dict[int, tuple[str, int]]:
        """Of the heads of the reader that stay."""
        name = self.source.names[0]
        return {head: (name, self.heads[head]) for head in np.flatnonzero(mask).tolist()}


Unit = tuple[Group, ...]
"""Groups that are chosen together: one, or the two of a pair."""


@dataclass(frozen=True)
class Option:
    """One form of a unit.

    Attributes:
        sizes: Of each of its groups.
        loss: Predicted, of the whole model's output: one minus the cosine.
        ms: Mean over the target shapes.
    """

    sizes: tuple[Size, ...]
    loss: float
    ms: float


@dataclass(frozen=True, eq=False)
class Curve:
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
    changed: tuple[tuple[Size, float], ...] = ()

    def of(self, size: Size) -> float | None:
        """Losses add up nearly, and heads that are gone lose nothing by being changed; None for a
        change that was not weighed."""
        if not size.kept:
            return dict(self.changed).get(size)
        kept = self.at(len(self.order) - size.kept)
        if size == Size(size.kept):
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
    def from_json(cls, content: Mapping[str, Any]) -> Curve:
        """What ``to_json`` wrote.

        Raises:
            KeyError, TypeError: It is something else.
        """
        lists = {name: tuple(content[name]) for name in ("order", "own_loss", "gone", "loss")}
        changed = tuple((Size(*size), float(loss)) for size, loss in content["changed"])
        return cls(**lists, changed=changed)


def group_blocks(model: ir.Model, attention: Sequence[AttentionBlock], *, ffn: bool) -> list[Group]:
    """Attentions that were certified, and feed-forwards, in groups.

    Blocks in the body of another node are left out: no session can look into them.
    """
    found: dict[object, list[Block]] = {}
    for block in attention:
        if block.graph is model.graph and block.output is not None:
            found.setdefault(origin(block.output.weight), []).append(block)
    for block in find_feed_forward(model):
        if block.graph is model.graph:
            found.setdefault(origin(block.second.weight), []).append(block)
    groups: list[Group] = []
    taken = {block.name for block in attention}
    for blocks in found.values():
        first = blocks[0]
        if isinstance(first, FeedForwardBlock):
            ours = [block for block in blocks if isinstance(block, FeedForwardBlock)]
            reason = next(filter(None, map(prune_neurons.why_not, ours)), "")
            if taken & {block.name for block in ours}:
                continue  # nothing could tell it from the attention of that name
            reason = reason or ("" if ffn else "neurons stay unless --allow ffn is given")
            groups.append(Group("feed_forward", tuple(blocks), first.num_neurons, reason))
            continue
        facts = interpret_small(model, batch=2, sequence=5)
        theirs = [block for block in blocks if isinstance(block, AttentionBlock)]
        reasons = [_why_not(block, attention, facts) for block in theirs]
        reason = next(filter(None, reasons), "")
        groups.append(Group("attention", tuple(blocks), first.num_heads, reason))
    return groups


def _why_not(block: AttentionBlock, others: Sequence[AttentionBlock], facts: Facts) -> str:
    if reason := rewrites.prune(block) or emit.why_not(block, facts):
        return reason
    for other in others:
        if any(reused.value is block.probabilities for reused in other.reused):
            return f"{other.name} takes its probabilities"
    return ""


# ---- sizes --------------------------------------------------------------------------------------


def sizes_of(block: Block) -> list[Size]:
    """What a block may become, the whole of it left out; not every one can be made."""
    if isinstance(block, FeedForwardBlock):
        step = max(block.num_neurons // SIZES // MULTIPLE, 1) * MULTIPLE
        return [Size(kept) for kept in range(step, block.num_neurons, step)]
    step = max(block.num_heads // SIZES, 1)
    numbers = (*range(step, block.num_heads, step), block.num_heads)
    sizes = [Size(kept) for kept in numbers[:-1]]
    if (cut := _shorter(block)) is not None:
        sizes += [Size(kept, cut) for kept in numbers]
        own = block.num_heads * (cut - 1)
        if (rank := int(SHARED * own) // MULTIPLE * MULTIPLE) and block.num_heads > 1:
            sizes.append(Size(block.num_heads, cut, rank))
    if block.k.past is None and not rewrites.skip(block):
        sizes.append(Size(0))
    return sizes


def _shorter(block: AttentionBlock) -> int | None:
    """Half of a head's dimensions, where queries and keys can be cut to so many."""
    half = block.head_size // 2
    able = half and half % MULTIPLE == 0 and block.k.past is None and not rewrites.truncate(block)
    return half if able else None


def apply(model: ir.Model, block: Block, size: Size, moments: TokenMoments | None = None) -> None:
    """Rewrite one block of ``model`` in place, the first heads or neurons staying.

    Args:
        moments: Of the tokens it sees, where queries and keys are cut.

    Raises:
        CannotRewrite: A part of its heads cannot go.
    """
    name = block.name
    if isinstance(block, FeedForwardBlock):
        PruneNeurons({name: [1] * size.kept + [0] * (block.num_neurons - size.kept)})(model)
        return
    if not size.kept:
        assert block.output is not None
        width = block.output.matrix().shape[1]
        nothing = AffineMap(np.zeros((block.input_size, width)), np.zeros(width))
        SkipAttention({name: nothing})(model)
        return
    if size.kept < block.num_heads:
        PruneHeads({name: [1] * size.kept + [0] * (block.num_heads - size.kept)})(model)
    if size.head_size is not None:  # one dimension is that of the content term
        decompose(model, [name])
        left = next(each for each in find_attention(model)[0] if each.name == name)
        rank = size.rank or left.num_heads * left.head_size
        found = factor(left, rank, head_size=size.head_size - 1, moments=moments)
        Collaborate({name: found}, mixing="sparse")(model)


def hand_on(model: ir.Model, edges: Edges, masks: Mapping[str, Sequence[int]]) -> None:
    """Let heads take the probabilities of others, in place, among those that stay.

    Args:
        edges: In the numbers of the heads that stay.

    Raises:
        CannotRewrite: See ``ReuseAttention``.
    """
    if masks:
        PruneHeads({name: list(mask) for name, mask in masks.items()})(model)
    decompose(model, {source for heads in edges.values() for source, _ in heads.values()})
    ReuseAttention(edges)(model)


def decompose(model: ir.Model, names: Collection[str]) -> None:
    """Give these attentions logits and probabilities that are values of the graph."""
    blocks = [block for block in find_attention(model)[0] if block.name in names]
    inside = [block.name for block in blocks if block.logits is None or not block.probabilities]
    if inside:
        DecomposeAttention(frozenset(inside))(model)


# ---- the choice ---------------------------------------------------------------------------------


def worth_weighing(group: Group, timed: Timed, *, target: int) -> list[Size]:
    """The changes beside fewer heads whose loss is worth knowing: sharing dimensions is of no use
    where it is no faster than giving each head as many of its own, which loses less."""
    sizes = {size: float(np.mean(ms[:target])) for size, ms in timed.sizes.items()}
    found: list[Size] = []
    for size, ms in sizes.items():
        own = sizes.get(size._replace(rank=None), ms)
        whole = size.kept in (0, group.count) and size != Size(group.count)
        if whole and (size.rank is None or ms < own):
            found.append(size)
    return found


def units_of(groups: Sequence[Group], pairs: Sequence[Pair]) -> list[tuple[Unit, Pair | None]]:
    """Groups that are chosen together, in order; no group is in two pairs, and those that lose
    least come first."""
    taken: set[Group] = set()
    chosen: dict[Group, Pair] = {}
    for pair in sorted(pairs, key=lambda pair: pair.loss):
        if np.isfinite(pair.loss) and taken.isdisjoint((pair.source, pair.reader)):
            taken |= {pair.source, pair.reader}
            chosen[pair.source] = pair
    found: list[tuple[Unit, Pair | None]] = []
    for group in groups:
        if pair := chosen.get(group):
            found.append(((pair.source, pair.reader), pair))
        elif group not in taken:
            found.append(((group,), None))
    return found


def options_of(
    unit: Unit,
    timed: Mapping[Block, Timed],
    curves: Mapping[str, Curve],
    pair: Pair | None = None,
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
        sizes = Size(kept), Size(kept, source=pair.source.names[0])
        options.append(Option(sizes, loss, float(np.mean(ms[:target]))))
    return _rising(options)


def _of_group(
    group: Group, timed: Mapping[Block, Timed], curve: Curve | None, target: int
) -> list[Option]:
    times = [timed[block] for block in group.blocks]
    original = np.sum([each.original for each in times], axis=0)
    whole = Size(group.count)
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
