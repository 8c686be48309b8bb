"""ReuseAttention: heads take the probabilities of earlier layers, and compute none of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import Facts, interpret_small
from graph_passes.blocks import AttentionBlock
from graph_passes.emit.attention import (
    emit_context,
    emit_output,
    emit_probabilities,
    heads_apart,
    in_precision,
    probabilities_type,
    type_of,
)
from graph_passes.emit.attention import why_not as why_not_emit
from graph_passes.emit.editing import (
    Inserter,
    keep_shapes,
    remove_unused,
    share_constants,
)
from graph_passes.errors import CannotRewrite, InvalidArgument
from graph_passes.matching.find import find_attention
from graph_passes.matching.naming import pin_names
from graph_passes.passes import refusals as rewrites
from graph_passes.passes.invariants import check, interface

__all__ = ["Edges", "ReuseAttention", "check_edges"]

Edges = Mapping[str, Mapping[int, tuple[str, int]]]
"""By layer and head: the earlier layer, and its head, whose probabilities it takes."""


@dataclass(frozen=True, eq=False)
class ReuseAttention(ir.passes.InPlacePass):
    """Forward probabilities across layers (algorithm 1 of arXiv 2110.06821).

    Before: A_h = softmax(s q_h k_h^T + mask) for all H heads of a layer
    After:  A_h = A'_(h') for its K reused heads, h' being an exact head of an earlier layer

    Queries and keys of reused heads leave the graph, with their scores and softmax: what is left
    costs (1 - K/2H) of the layer's products and parameters. Values and output stay, in an order in
    which the heads of one source are side by side. Exact where the two attend alike, lossy
    elsewhere. Refused (``CannotRewrite``) where ``rewrites.reuse`` gives a reason: masks, lengths
    and biases of both layers must be the same.

    Attributes:
        edges: Every head to rewrite and its source (see ``Edges``).
    """

    edges: Edges

    def requires(self, model: ir.Model) -> None:
        blocks = find_attention(model)[0]
        check_edges(self.edges, blocks)
        facts, apart = (interpret_small(model, batch=2, sequence=5, apart=a) for a in (False, True))
        by_name = {block.name: block for block in blocks}
        for name, heads in self.edges.items():
            block = by_name[name]
            sources = {source: by_name[source] for source, _ in heads.values()}
            for other in sources.values():
                reason = rewrites.reuse(block, [other]) or _not_there(other)
                if reason := reason or _lengths(block, other, (facts, apart)):
                    raise CannotRewrite(
                        f"{name} cannot reuse {other.name}: {reason}", "take this edge out"
                    )
            if 0 < len(heads) < block.num_heads and (reason := why_not_emit(block, facts)):
                raise CannotRewrite(f"{name}: {reason}", "reuse all of its heads, or none")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        before, facts = interface(model), interpret_small(model, batch=2, sequence=5)
        blocks = find_attention(model)[0]
        chosen = [block for block in blocks if self.edges.get(block.name)]
        if not chosen:
            return ir.passes.PassResult(model, modified=False)
        pin_names(blocks)
        done = _Done(facts, {block.name: block for block in blocks})
        for block in chosen:
            _reuse(block, self.edges[block.name], done)
        share_constants(model, since=before.initializers)
        remove_unused(model)
        keep_shapes(model, chosen)
        check(before, model, after="ReuseAttention")
        return ir.passes.PassResult(model, modified=True)


def check_edges(edges: Edges, blocks: Sequence[AttentionBlock]) -> None:
    """Every edge goes back in depth, from a head that exists to an exact one.

    Raises:
        InvalidArgument: Naming the first that does not.
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
                    )
                count = blocks[place[layer]].num_heads
                if not 0 <= number < count:
                    raise InvalidArgument(
                        f"{edge}: {layer} has no head {number}, expected 0 to {count - 1}",
                        "count heads from 0",
                    )
            if place[source] >= place[name]:
                raise InvalidArgument(
                    f"{edge}: the source must be an earlier layer than {name}",
                    "probabilities are forwarded in depth, from a layer that ran before",
                )
            taken = {int(h) for reused in blocks[place[source]].reused for h in reused.heads}
            if source_head in edges.get(source, {}) or source_head in taken:
                raise InvalidArgument(
                    f"{edge}: the source is reused itself, expected an exact head",
                    f"take the head that {source}[{source_head}] takes",
                )


def _not_there(block: AttentionBlock) -> str:
    if block.probabilities is None:
        return "the probabilities of that layer are inside a fused operator: decompose it first"
    return ""


def _lengths(block: AttentionBlock, other: AttentionBlock, runs: Sequence[Facts]) -> str:
    """Whether two layers have other numbers of queries or keys, whatever their masks."""
    for role, mine, theirs in (("queries", block.x, other.x), ("keys", block.y, other.y)):
        for facts in runs:
            shapes = [None if (s := facts.shape(v)) is None else s[:-1] for v in (mine, theirs)]
            if None not in shapes and shapes[0] != shapes[1]:
                return f"its {role} are not as many as there"
    return ""


@dataclass(frozen=True, eq=False)
class _Done:
    """The probabilities (B, H, S, T) of layers so far, and the place of each head in them.

    ``split`` are values that hold only some heads of a layer.
    """

    facts: Facts
    blocks: Mapping[str, AttentionBlock]
    values: dict[str, tuple[ir.Value, dict[int, int]]] = field(default_factory=dict)
    split: set[str] = field(default_factory=set[str])

    def of(self, name: str, before: ir.Node) -> tuple[ir.Value, dict[int, int]]:
        """Those of a layer; ``before`` is the first node that reads them in another."""
        if name not in self.values:
            block = self.blocks[name]
            whole = heads_apart(Inserter(block.graph, before, f"{name}/shared"), block, self.facts)
            self.values[name] = whole, {head: head for head in range(block.num_heads)}
        return self.values[name]


def _reuse(block: AttentionBlock, edges: Mapping[int, tuple[str, int]], done: _Done) -> None:
    """Own heads first, then those of each source, in the order of the source."""
    assert block.output is not None
    product = block.output.nodes[-1]
    make = Inserter(block.graph, product, f"{block.name}/reuse")
    own = np.array([head for head in range(block.num_heads) if head not in edges], np.int64)
    pieces: list[ir.Value] = []
    order = own.tolist()
    if len(own):
        pieces.append(emit_probabilities(make, block, own, done.facts))
        done.values[block.name] = pieces[0], {head: i for i, head in enumerate(own.tolist())}
        done.split.add(block.name)
    for source in dict.fromkeys(source for source, _ in edges.values()):
        value, places = done.of(source, product)
        taken = sorted(
            (places[theirs], head) for head, (layer, theirs) in edges.items() if layer == source
        )
        index = np.array([place for place, _ in taken], np.int64)
        order += [head for _, head in taken]
        if source in done.split or not np.array_equal(index, np.arange(len(places))):
            at = make.constant(index, "source_heads")
            gathered = make.op("Gather", [value, at], "probabilities_taken", axis=1)
            gathered.type = ir.TensorType(probabilities_type(done.blocks[source], done.facts))
            value = gathered
        pieces.append(value)
    heads = np.array(order, np.int64)
    dtype = type_of(pieces[-1], done.facts) or block.v.dtype  # own heads give way to the others
    pieces = [in_precision(make, piece, dtype, done.facts) for piece in pieces]
    probabilities = pieces[0]
    if len(pieces) > 1:
        probabilities = make.op("Concat", pieces, "probabilities_joined", axis=1)
        probabilities.type = ir.TensorType(dtype)
    context = emit_context(make, block, probabilities, heads, done.facts)
    emit_output(make, block, context, heads, done.facts)
