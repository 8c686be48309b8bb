"""ReuseAttention: heads take the attention probabilities of heads in earlier layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
import onnx_ir as ir
from pydantic import Field

from graph_passes.analyses import Analyses
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import emission_refusal, emit_context, emit_output
from graph_passes.emit.editing import Inserter
from graph_passes.emit.head_terms import heads_refusal
from graph_passes.emit.probabilities import (
    emit_probabilities,
    probabilities_by_head,
    probabilities_type,
)
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.matching.equivalence import have_equal_masks
from graph_passes.passes.base import AttentionPass, AttentionTargets, small_shapes
from graph_passes.passes.conditions import (
    no_output_projection_refusal,
    no_probabilities_refusal,
    quantized_refusal,
    returned_refusal,
    reused_refusal,
)
from graph_passes.passes.decompose_attention import decompose_fused, decomposition_refusal

__all__ = [
    "Edges",
    "ReuseAttention",
    "ReusedHeads",
    "SourceHead",
    "check_edges",
    "renumbered",
    "reuse_refusal",
    "source_refusal",
]

_HeadIndex = Annotated[int, Field(ge=0)]

SourceHead = tuple[str, _HeadIndex]
"""A layer and one of its heads, whose probabilities are reused."""

ReusedHeads = Mapping[_HeadIndex, SourceHead]
"""For each reusing head, the head of an earlier layer whose probabilities it reuses."""

Edges = Mapping[str, ReusedHeads]
"""``ReusedHeads`` by layer."""


class ReuseAttention(AttentionPass[ReusedHeads]):
    """Reuse attention probabilities across layers (algorithm 1 of arXiv 2110.06821).

    Before: A_h = softmax(s q_h k_h^T + mask) for all H heads of a layer
    After:  A_h = A'_(h') for its K reused heads, h' being a head of an earlier layer that computes
            its own probabilities

    Queries, keys, scores and softmax of reused heads are deleted: (1 - K/2H) of the layer's
    products and parameters remain. Values and output stay, ordered so that heads with the same
    source are adjacent: each source has a product with its values, and the contexts are joined.
    Exact if both heads have equal probabilities, otherwise lossy. Masks, lengths and position
    biases of both layers must be equal. Fused operators of the sources are decomposed.

    Attributes:
        targets: For each block, its reused heads and their sources.
    """

    name: ClassVar[str] = "reuse_attention"
    lossy: ClassVar[bool] = True
    order: ClassVar[int] = 30

    @classmethod
    def changes(cls, block: AttentionBlock, params: ReusedHeads) -> bool:
        return bool(params)

    @classmethod
    def refusal(
        cls, block: AttentionBlock, params: ReusedHeads | None, analyses: Analyses
    ) -> Refusal | None:
        blocks = list(cls.find(analyses))
        if refusal := reused_refusal(block, blocks):
            return refusal
        if params is None:
            place = next(i for i, b in enumerate(blocks) if b.name == block.name)
            return reuse_refusal(block, blocks[:place])
        by_name = {b.name: b for b in blocks}
        runs = [
            small_shapes(analyses, distinct_lengths=distinct_lengths)
            for distinct_lengths in (False, True)
        ]
        for source in dict.fromkeys(source for source, _ in params.values()):
            source_block = by_name[source]
            refusal = reuse_refusal(block, [source_block])
            refusal = refusal or _lengths_refusal(block, source_block, runs)
            if refusal is not None:
                return Refusal(refusal.code, f"it cannot reuse {source_block.name}: {refusal}")
        if len(params) < block.num_heads:
            return emission_refusal(block, runs[0])
        return None

    def validate(self, analyses: Analyses) -> None:
        """Check the edges of all targets together: a source must not be reused itself.

        Raises:
            InvalidArgument: An edge does not lead to a head that an earlier layer computes.
        """
        check_edges(self.targets, self.find(analyses))
        super().validate(analyses)

    def prepare(self, analyses: Analyses) -> None:
        """Decompose fused targets and fused sources: probabilities must be values of the graph."""
        sources = {source for heads in self.targets.values() for source, _ in heads.values()}
        changed = {block.name for block, _ in self._changed(analyses)}
        decompose_fused(analyses.model, sources | changed)

    def rewrite(self, targets: AttentionTargets[ReusedHeads], analyses: Analyses) -> None:
        by_name = {block.name: block for block in self.find(analyses)}
        available = _Available(small_shapes(analyses), by_name)
        for block, heads in targets:
            _reuse(block, heads, available)


def reuse_refusal(block: AttentionBlock, earlier: Sequence[AttentionBlock]) -> Refusal | None:
    """Return why ``block`` cannot reuse probabilities of ``earlier`` blocks; None if it can."""
    refusal = (
        quantized_refusal(block)
        or returned_refusal(block)
        or no_output_projection_refusal(block)
        or heads_refusal(block.v)
    )
    if refusal is not None:
        return refusal
    if block.reused:
        return Refusal("reuses_heads", "it already reuses the probabilities of an earlier block")
    sources = [source for source in earlier if source.graph is block.graph]
    if not sources:
        return Refusal(
            "no_earlier", "it is the first attention block: there are no probabilities to reuse"
        )
    equal_sources = [source for source in sources if have_equal_masks(block, source)]
    if not equal_sources:
        return Refusal(
            "masks_differ",
            "no earlier attention has the same queries' and keys' lengths, masks and biases",
        )
    if all(map(source_refusal, equal_sources)):
        return Refusal(
            "no_source",
            f"no earlier attention has probabilities to reuse: {source_refusal(equal_sources[-1])}",
        )
    return None


def renumbered(edges: Edges, masks: Mapping[str, Sequence[int]]) -> dict[str, ReusedHeads]:
    """Convert head indices of the original model to head indices after pruning.

    Args:
        edges: Edges with head indices of the original model.
        masks: 1 for each head that stays, by layer; layers that keep all heads may be missing.
    """
    places = {
        name: {head: place for place, head in enumerate(np.flatnonzero(mask).tolist())}
        for name, mask in masks.items()
    }

    def place(name: str, head: int) -> int:
        return places[name][head] if name in places else head

    return {
        name: {place(name, h): (source, place(source, t)) for h, (source, t) in heads.items()}
        for name, heads in edges.items()
    }


def source_refusal(block: AttentionBlock) -> Refusal | None:
    """Return why the probabilities of a block cannot be reused by another; None if they can."""
    if block.softmax is None:
        return decomposition_refusal(block)
    return no_probabilities_refusal(block)


def _lengths_refusal(
    block: AttentionBlock, other: AttentionBlock, runs: Sequence[ShapeInfo]
) -> Refusal | None:
    """Return why a block cannot have the query and key lengths of ``other``; None if it can."""
    for role, mine, theirs in (("queries", block.x, other.x), ("keys", block.y, other.y)):
        for info in runs:
            shapes = [None if (s := info.shape(v)) is None else s[:-1] for v in (mine, theirs)]
            if None not in shapes and shapes[0] != shapes[1]:
                return Refusal("lengths_differ", f"the number of {role} differs")
    return None


def check_edges(edges: Edges, blocks: Sequence[AttentionBlock]) -> None:
    """Check that every edge leads from a head to a head of an earlier layer that is not reused.

    Raises:
        InvalidArgument: An edge leads elsewhere; the error names the first such edge.
    """
    place = {block.name: index for index, block in enumerate(blocks)}
    for name, heads in edges.items():
        for head, (source, source_head) in heads.items():
            edge = f"the edge {name}[{head}] <- {source}[{source_head}]"
            for layer, number in ((name, head), (source, source_head)):
                if layer not in place:
                    raise InvalidArgument(
                        f"{edge}: no attention is called {layer!r}",
                        "use names as `attnserve inspect` lists them",
                        code="rewrite.unknown_block",
                    )
                count = blocks[place[layer]].num_heads
                if not 0 <= number < count:
                    raise InvalidArgument(
                        f"{edge}: {layer} has no head {number}, expected 0 to {count - 1}",
                        "count heads from 0",
                        code="reuse_attention.head",
                    )
            if place[source] >= place[name]:
                raise InvalidArgument(
                    f"{edge}: the source must be an earlier layer than {name}",
                    "choose a source layer that is executed earlier",
                    code="reuse_attention.order",
                )
            reusing_heads = {int(h) for reuse in blocks[place[source]].reused for h in reuse.heads}
            if source_head in edges.get(source, {}) or source_head in reusing_heads:
                raise InvalidArgument(
                    f"{edge}: the source is reused itself, expected an exact head",
                    f"choose the source of {source}[{source_head}] instead",
                    code="reuse_attention.chain",
                )


class _Probabilities(NamedTuple):
    """Probabilities (B, h, S, T) of some heads of a layer.

    Attributes:
        places: The index of each of these heads on the axis h.
    """

    value: ir.Value
    places: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class _Available:
    """The probabilities of the layers emitted so far, by layer."""

    info: ShapeInfo
    blocks: Mapping[str, AttentionBlock]
    values: dict[str, _Probabilities] = field(default_factory=dict[str, _Probabilities])

    def probabilities(self, name: str, before: ir.Node) -> _Probabilities:
        """Return a layer's probabilities; nodes that emit them are inserted before ``before``."""
        if name not in self.values:
            block = self.blocks[name]
            make = Inserter(block.graph, before, f"{name}/shared")
            self.put(block, probabilities_by_head(make, block, self.info), block.own_heads)
        return self.values[name]

    def put(self, block: AttentionBlock, value: ir.Value, heads: np.ndarray) -> None:
        """Record the heads of a layer that compute probabilities, in order."""
        places = {head: place for place, head in enumerate(heads.tolist())}
        self.values[block.name] = _Probabilities(value, places)


def _reuse(block: AttentionBlock, edges: Mapping[int, SourceHead], available: _Available) -> None:
    """Emit a block with its own heads first, then the reused heads, grouped by source."""
    product = block.required_output.nodes[-1]
    make = Inserter(block.graph, product, f"{block.name}/reuse")
    own_heads = np.array([head for head in range(block.num_heads) if head not in edges], np.int64)
    parts: list[tuple[ir.Value, np.ndarray]] = []
    if len(own_heads):
        parts.append((emit_probabilities(make, block, own_heads, available.info), own_heads))
        available.put(block, *parts[0])
    for source in dict.fromkeys(source for source, _ in edges.values()):
        value, places = available.probabilities(source, product)
        index_and_head = sorted(
            (places[source_head], head)
            for head, (layer, source_head) in edges.items()
            if layer == source
        )
        index, heads = np.array(index_and_head, np.int64).T
        if not np.array_equal(index, np.arange(len(places))):
            at = make.integers(index, "source_heads")
            dtype = probabilities_type(available.blocks[source], available.info)
            value = make.op("Gather", [value, at], "probabilities_taken", axis=1, dtype=dtype)
        parts.append((value, heads))
    context = emit_context(make, block, parts, available.info)
    order = np.concatenate([heads for _, heads in parts])
    emit_output(make, block, context, order, available.info)
