"""Choose head masks for pruning and edges for attention reuse.

They are computed from a share of heads or a configuration of the papers, and from measured head
similarities and losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, cast

import numpy as np

from attnserve.calibration.similarity import HeadSimilarity
from attnserve.planning.heads.files import Masks, MutableEdges, parse_count
from graph_passes.blocks import AttentionBlock
from graph_passes.errors import InvalidArgument
from graph_passes.passes.reuse_attention import SourceHead, reuse_refusal

__all__ = [
    "Removals",
    "Reuse",
    "edges_by_damage",
    "edges_of",
    "least_costly_masks",
    "parse_reuse",
    "reused_layers",
]

ReuseKind = Literal["partial", "full", "alternate", "all-end", "auto"]

REUSE_FORMS = "partial:K[:P], full:P, alternate, all-end[:P], auto or a .json file of edges"


@dataclass(frozen=True)
class Reuse:
    """A configuration of attention reuse (arXiv 2110.06821).

    Attributes:
        heads: K, the reusing heads of a layer in partial reuse; None for all heads.
        layers: P, the number of reusing layers; None for the number in the paper.
    """

    kind: ReuseKind
    heads: int | None = None
    layers: int | None = None


def parse_reuse(text: str) -> Reuse:
    """Parse ``partial:K[:P]``, ``full:P``, ``alternate``, ``all-end[:P]`` or ``auto``.

    Raises:
        InvalidArgument: The text is none of these.
    """
    kind, *texts = text.split(":")
    counts = {"partial": (1, 2), "full": (1,), "alternate": (0,), "all-end": (0, 1), "auto": (0,)}
    numbers = [parse_count(part) for part in texts]
    if kind not in counts or len(numbers) not in counts[kind] or None in numbers:
        raise InvalidArgument(
            f"`reuse` is {text[:100]!r}: expected {REUSE_FORMS}",
            "for example partial:6",
            code="reuse.form",
        )
    if 0 in numbers:
        raise InvalidArgument(
            f"`reuse` is {text!r}: expected numbers from 1",
            "for example full:2",
            code="reuse.range",
        )
    heads = numbers.pop(0) if kind == "partial" else None
    return Reuse(cast(ReuseKind, kind), heads, numbers[0] if numbers else None)


def reused_layers(reuse: Reuse, count: int) -> range:
    """The indices of the reusing layers, of ``count`` layers, as the paper defines them.

    partial: all but the first and the last; full: P after the first; alternate: every second;
    all-end: P before the last.

    Raises:
        InvalidArgument: The model has too few layers.
    """
    most = count - 2 if reuse.kind in ("partial", "all-end", "auto") else count - 1
    if reuse.kind == "partial" and reuse.layers is not None:
        most = count - 1
    wanted = reuse.layers or (max(count // 2, 1) if reuse.kind == "all-end" else most)
    if most < 1 or wanted > most:
        raise InvalidArgument(
            f"`reuse` {reuse.kind} requests {max(wanted, 1)} of {count} layers, expected at most "
            f"{max(most, 0)}: the first"
            + (" layer never reuses" if most == count - 1 else " and the last layer never reuse"),
            "reuse fewer layers",
            code="reuse.layers",
        )
    match reuse.kind:
        case "alternate":
            return range(1, count, 2)
        case "all-end":
            return range(count - 1 - wanted, count - 1)
        case _:
            return range(1, 1 + wanted)


def edges_of(
    reuse: Reuse,
    blocks: Sequence[AttentionBlock],
    chosen: Sequence[str],
    *,
    masks: Mapping[str, Sequence[int]],
    similarity: HeadSimilarity | None,
) -> MutableEdges:
    """The edges of a configuration.

    Args:
        blocks: All attention blocks of the model, in order of execution.
        chosen: The names of the reusing layers.
        masks: Pruned heads neither reuse probabilities nor are reused.
        similarity: Similarity of all heads; None aligns heads by index, as in the paper.

    Raises:
        InvalidArgument: A layer has fewer heads than requested.
    """
    heads = _Heads(masks, similarity)
    for index, block in enumerate(blocks):
        if block.name not in chosen:
            continue
        kept = heads.kept(block)
        count = len(kept) if reuse.heads is None else reuse.heads
        if count > block.num_heads:
            raise InvalidArgument(
                f"`reuse` is partial:{count}: {block.name} has {block.num_heads} heads",
                f"reuse 1 to {block.num_heads} heads",
                code="reuse.heads",
            )
        sources = [b for b in blocks[:index] if reuse_refusal(block, [b]) is None]
        if similarity is None:
            edges = heads.by_index(sources, kept[len(kept) - min(count, len(kept)) :])
        elif count >= len(kept):
            edges = heads.whole_layer(block, sources, kept)
        else:
            edges = dict(heads.nearest(block, sources, kept)[:count])
        if edges:
            heads.edges[block.name] = edges
    return heads.edges


@dataclass(frozen=True, eq=False)
class _Heads:
    """State of the selection: kept heads, their similarity, and the edges chosen so far."""

    masks: Mapping[str, Sequence[int]]
    similarity: HeadSimilarity | None
    edges: MutableEdges = field(default_factory=MutableEdges)

    def kept(self, block: AttentionBlock) -> list[int]:
        mask = self.masks.get(block.name, (1,) * block.num_heads)
        return [head for head, stays in enumerate(mask) if stays]

    def exact(self, block: AttentionBlock) -> list[int]:
        """The heads that compute their own probabilities before and after the rewrite."""
        reused = self.edges.get(block.name, {})
        own = set(block.own_heads.tolist())
        return [head for head in self.kept(block) if head not in reused and head in own]

    def between(self, block: AttentionBlock, source: AttentionBlock) -> np.ndarray:
        """The similarity of each head of a block to each head of a source."""
        assert self.similarity is not None
        return self.similarity.between(block.name, source.name)

    def nearest(
        self, block: AttentionBlock, sources: Sequence[AttentionBlock], heads: Sequence[int]
    ) -> list[tuple[int, SourceHead]]:
        """Each head and its most similar exact head, best first."""
        best: dict[int, tuple[float, SourceHead]] = {}
        for source in sources:
            between = self.between(block, source)
            for source_head in self.exact(source):
                for head in heads:
                    similarity = float(between[head, source_head])
                    if similarity > best.get(head, (-1.0,))[0]:  # false for NaN
                        best[head] = similarity, (source.name, source_head)
        ranked = sorted(best, key=lambda head: -best[head][0])
        return [(head, best[head][1]) for head in ranked]

    def whole_layer(
        self, block: AttentionBlock, sources: Sequence[AttentionBlock], heads: Sequence[int]
    ) -> dict[int, SourceHead]:
        """A one-to-one assignment to the heads of a single layer with as many exact heads, if any.

        The values can then be permuted instead of the probabilities. A copy of the probabilities
        would cost about half of the time that reuse saves (512 tokens).
        """
        # Imported here: scipy.optimize would slow down the start of every command.
        from scipy.optimize import linear_sum_assignment

        highest, best = -1.0, dict[int, SourceHead]()
        for source in sources:
            exact = self.exact(source)
            if len(exact) != len(heads) or len(exact) != len(self.kept(source)):
                continue
            between = self.between(block, source)[np.ix_(heads, exact)]
            if np.isnan(between).any():
                continue
            rows, columns = linear_sum_assignment(-between)
            similarity = float(between[rows, columns].mean())
            if similarity > highest:
                pairs = zip(rows.tolist(), columns.tolist(), strict=True)
                highest = similarity
                best = {heads[row]: (source.name, exact[column]) for row, column in pairs}
        if best:
            return best
        edges = dict(self.nearest(block, sources, heads))
        return edges if len(edges) == len(heads) else {}

    def by_index(
        self, sources: Sequence[AttentionBlock], heads: Sequence[int]
    ) -> dict[int, SourceHead]:
        """Algorithm 1 of the paper: the last K heads reuse R[1..K] of the previous layer.

        R lists its exact heads, then its reused ones; a reused head is replaced by its own source.
        """
        if not sources:
            return {}
        previous = sources[-1]
        reused = self.edges.get(previous.name, {})
        forwarded = [(previous.name, head) for head in self.exact(previous)]
        forwarded += [reused[head] for head in sorted(reused)]
        return dict(zip(heads, forwarded, strict=False))


class _Candidate(NamedTuple):
    """An edge that may be chosen; candidates are sorted by damage.

    Attributes:
        damage: The estimated change of the output.
        layer, head: The index of the reusing layer, and its head.
        source: The head whose probabilities it would reuse.
    """

    damage: float
    layer: int
    head: int
    source: SourceHead


def edges_by_damage(
    blocks: Sequence[AttentionBlock],
    chosen: Sequence[str],
    *,
    masks: Mapping[str, Sequence[int]],
    similarity: HeadSimilarity,
    effect: Mapping[str, np.ndarray],
    budget: float,
) -> MutableEdges:
    """Greedily add the least damaging edges within a budget (``reuse="auto"``).

    Reuse changes a head's attention by 1 - c in total variation, where c is the similarity. The
    output then changes by about (1 - c)^2 of the effect of removing the head. A layer reuses at
    least a quarter of its heads or none: with fewer, joining the heads costs more than it saves.

    Args:
        effect: Relative squared change of the output when a head is removed, by layer.
        budget: The largest sum of estimated changes.
    """
    heads = _Heads(masks, similarity)
    candidates: list[_Candidate] = []
    for index, block in enumerate(blocks):
        if block.name in chosen:
            sources = [b for b in blocks[:index] if reuse_refusal(block, [b]) is None]
            for source in sources:
                between = heads.between(block, source)
                for head in heads.kept(block):
                    for source_head in heads.exact(source):
                        distance = 1 - between[head, source_head]
                        damage = float(effect[block.name][head] * distance**2)
                        if np.isfinite(damage):
                            edge = (source.name, source_head)
                            candidates.append(_Candidate(damage, index, head, edge))
    edges: MutableEdges = {}
    used: set[SourceHead] = set()
    spent = 0.0
    for damage, index, head, source in sorted(candidates):
        name = blocks[index].name
        taken = head in edges.get(name, {}) or (name, head) in used
        if taken or source[1] in edges.get(source[0], {}) or spent + damage > budget:
            continue
        edges.setdefault(name, {})[head] = source
        used.add(source)
        spent += damage
    counts = {block.name: block.num_heads for block in blocks}
    return {name: reused for name, reused in edges.items() if 4 * len(reused) >= counts[name]}


class Removals(NamedTuple):
    """The heads of a layer in the order of their removal, and the cost of each."""

    order: Sequence[int]
    costs: Sequence[float]

    @classmethod
    def by_score(cls, scores: np.ndarray) -> Removals:
        """Heads with low scores are removed first; ``scores`` has the cost of each head."""
        order = np.argsort(scores, kind="stable")
        return cls(order.tolist(), scores[order].tolist())


def least_costly_masks(removals: Mapping[str, Removals], fraction: float) -> Masks:
    """Remove a share of all heads in the order of least cost; every layer keeps at least one.

    Args:
        removals: By layer. A head is removed after those before it, and costs as much as the most
            costly of them.
    """
    steps = sorted(
        (float(cost), name, step)
        for name, layer in removals.items()
        for step, cost in enumerate(np.maximum.accumulate(layer.costs)[:-1])
    )
    total = sum(len(layer.order) for layer in removals.values())
    counts = Counter(name for _, name, _ in steps[: round(fraction * total)])
    return {
        name: [int(head not in layer.order[: counts[name]]) for head in range(len(layer.order))]
        for name, layer in removals.items()
    }
