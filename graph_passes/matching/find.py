"""find_attention: walk outward from every softmax and every fused operator to the projections."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.shapes import drop_length_dependent, infer_shapes_small
from graph_passes.blocks import (
    AttentionBlock,
    BroadcastLayout,
    LogitStep,
    PositionBias,
    Projection,
    Reused,
    RotaryTerm,
    Unmatched,
)
from graph_passes.context import GraphContext
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.idioms import SOFTMAXES, SoftmaxMatch
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.naming import assign_names
from graph_passes.matching.operators import FUSED_OPERATORS, OPERATORS, OperatorMatch
from graph_passes.matching.products import ContextProduct, ScoreProduct
from graph_passes.matching.reuse import head_sources, products_of, reused_heads
from graph_passes.matching.rotary import depends_on
from graph_passes.matching.scores import ContextMatch, match_context, match_logits

__all__ = ["find_attention"]

BATCH, SEQUENCE = 2, 5
"""Lengths to read at: small, and apart from each other, so that no axis is mistaken for another."""


def find_attention(model: ir.Model) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Every attention of a model, in order of execution, and what was not read.

    Bodies of If, Loop and Scan are read like the main graph; functions must have been inlined. A
    reading is a claim: ``attnserve.checks.certify`` proves it by running the graph.
    """
    with GraphContext.of(model) as context:
        info = context.get(infer_shapes_small, batch=BATCH, sequence=SEQUENCE)
        others = context.get(infer_shapes_small, batch=BATCH + 1, sequence=SEQUENCE + 2)
    reader = LayoutReader(drop_length_dependent(info, others), dict(model.opset_imports))
    blocks: list[AttentionBlock] = []
    unmatched: list[Unmatched] = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        try:
            block = _match_node(node, reader)
        except MatchFailure as unread:
            unmatched.append(Unmatched(node, unread.reason))
        except (IndexError, ValueError, MemoryError, RuntimeError) as error:
            # What graphs that are not well formed lead to; never a reason to stop reading the rest.
            unmatched.append(Unmatched(node, f"{describe(node)} could not be followed: {error}"))
        else:
            blocks += [] if block is None else [block]
    blocks, lost = _check_sources(blocks, reader)
    more, unread = _find_reusing(blocks, reader)
    return assign_names(_in_order([*blocks, *more], model)), [*unmatched, *lost, *unread]


def _match_node(node: ir.Node, reader: LayoutReader) -> AttentionBlock | None:
    """The attention around a softmax, or in an operator; None where the node is neither.

    Raises:
        MatchFailure: It could be, but was not read.
    """
    if node.op_type in FUSED_OPERATORS:
        return _match_operator(node, reader)
    for idiom in SOFTMAXES:
        if (softmax := idiom(node, reader.info, reader.opsets.get("", 1))) is not None:
            return _match_softmax(node, softmax, idiom.__name__, reader)
    return None


def _match_softmax(
    node: ir.Node, softmax: SoftmaxMatch, idiom: str, reader: LayoutReader
) -> AttentionBlock:
    """probabilities = softmax(steps(scale * q k^T)); context = probabilities v."""
    reader.shape(softmax.logits)
    logits = match_logits(softmax, reader)
    if logits is None:
        raise MatchFailure(f"{describe(node)} is not fed by a product of queries and keys")
    product = logits.product
    q = reader.match_projection(product.query, "query", axes=product.query_axes)
    k = reader.match_projection(product.key, "key", axes=product.key_axes)
    context = match_context(softmax, logits, reader)
    mixing = context.product
    reused = () if context.joined is None else _reused_beside(context, reader)
    v = reader.match_projection(mixing.value, "value", axes=mixing.value_axes)
    v = replace(v, scale=v.scale * mixing.scale)
    steps, content = _split_content(logits.steps, product, k, reader)
    steps = tuple(_mark_entangled(step, q, k) for step in steps)
    return _make_block(
        OperatorMatch(q, k, v, logits.scale, steps, mixing.node.outputs[0]),
        reader,
        product=product.node,
        content=content,
        logits=logits.scaled if content is None else _content_sum(content, logits.scaled),
        logits_axes=logits.order,
        probabilities=context.probabilities,
        context_axes=mixing.context_axes,
        nodes=(product.node, node, *context.nodes, mixing.node),
        idiom=idiom,
        reused=reused,
        own=context.own,
    )


def _reused_beside(context: ContextMatch, reader: LayoutReader) -> tuple[Reused, ...]:
    """The heads beside a softmax's own, which must all come from some probabilities."""
    assert context.joined is not None and context.own is not None
    known = {context.own, *_softmaxes(context.joined)}
    found = head_sources(context.joined.outputs[0], known, reader.info)
    if found is None:
        raise MatchFailure(f"{describe(context.joined)} joins probabilities with something else")
    return reused_heads(found, context.own, context.joined)


def _softmaxes(joined: ir.Node) -> set[ir.Value]:
    """What a Concat of probabilities reads, through Gather and Identity."""
    found: set[ir.Value] = set()
    for value in joined.inputs:
        node = None if value is None else value.producer()
        while value is not None and node is not None and node.op_type in ("Gather", "Identity"):
            value = node.inputs[0]
            node = None if value is None else value.producer()
        if value is not None:
            found.add(value)
    return found


def _by_probabilities(blocks: Sequence[AttentionBlock]) -> dict[ir.Value, AttentionBlock]:
    """The blocks by the probabilities that others may take: a block's own, and all it uses."""
    known: dict[ir.Value, AttentionBlock] = {}
    for block in blocks:
        for value in (block.probabilities, block.own_probabilities):
            if value is not None:
                known.setdefault(value, block)
    return known


def _source(value: ir.Value, known: Mapping[ir.Value, AttentionBlock]) -> AttentionBlock | None:
    """The block whose probabilities these are, (B*H, S, T) laid out as (B, H, S, T) included."""
    node = value.producer()
    return known.get(value) or (known.get(node.inputs[0]) if node and node.inputs[0] else None)


def _check_sources(
    blocks: Sequence[AttentionBlock], reader: LayoutReader
) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Blocks whose reused heads come from attention that was read; the others are misses."""
    known = _by_probabilities(blocks)
    kept: list[AttentionBlock] = []
    unmatched: list[Unmatched] = []
    for block in blocks:
        if all(_source(reused.value, known) is not None for reused in block.reused):
            kept.append(block)
        else:
            unmatched.append(
                Unmatched(block.product, "it joins heads of no attention that is read")
            )
    return kept, unmatched


def _find_reusing(
    blocks: Sequence[AttentionBlock], reader: LayoutReader
) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Attention whose heads all take the probabilities of others: it has no softmax."""
    known = _by_probabilities(blocks)
    claimed = {node for block in blocks for node in block.nodes}
    found: dict[ir.Node, AttentionBlock] = {}
    unmatched: list[Unmatched] = []
    for product, value in products_of(list(known), reader.info):
        if product.node in claimed or product.node in found:
            continue
        try:
            whole = head_sources(value, known, reader.info)
            if whole is not None:
                reused = reused_heads(whole, None, product.node)
                first = _source(reused[0].value, known)
                assert first is not None
                found[product.node] = _reusing_block(product, value, reused, first, reader)
        except MatchFailure as unread:
            unmatched.append(Unmatched(product.node, unread.reason))
    return list(found.values()), unmatched


def _reusing_block(
    product: ContextProduct,
    probabilities: ir.Value,
    reused: tuple[Reused, ...],
    source: AttentionBlock,
    reader: LayoutReader,
) -> AttentionBlock:
    """context = (probabilities of others) v, the queries and keys being nobody's."""
    v = reader.match_projection(product.value, "value", axes=product.value_axes)
    v = replace(v, scale=v.scale * product.scale)
    none = np.zeros((0, source.head_size))
    nothing = replace(v, columns=none.astype(np.int64), gain=none, offset=none, scale=1.0, nodes=())
    q = nothing
    if source.kind == "cross":  # as wide as the other's x, which may not be as wide as y
        weight, contracted = source.q.weight, source.q.contracted
        q = replace(nothing, input=source.x, weight=weight, contracted=contracted)
    between = _between(probabilities, {other.value for other in reused})
    return _make_block(
        OperatorMatch(q, nothing, v, source.scale, (), product.node.outputs[0]),
        reader,
        product=product.node,
        content=None,
        logits=None,
        logits_axes=None,
        probabilities=probabilities,
        context_axes=product.context_axes,
        nodes=(*between, product.node),
        idiom="reused_probabilities",
        reused=reused,
    )


def _between(value: ir.Value, sources: Collection[ir.Value]) -> list[ir.Node]:
    """The nodes that lay out heads of other attentions."""
    node = value.producer()
    if value in sources or node is None:
        return []
    above = [n for v in node.inputs[:1] if v is not None for n in _between(v, sources)]
    if node.op_type == "Concat":
        above = [n for v in node.inputs if v is not None for n in _between(v, sources)]
    return [*above, node]


def _in_order(blocks: Sequence[AttentionBlock], model: ir.Model) -> list[AttentionBlock]:
    """By the order in which their contexts are computed."""
    if not any(block.idiom == "reused_probabilities" for block in blocks):
        return list(blocks)
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    place = {node: index for index, node in enumerate(nodes)}
    return sorted(blocks, key=lambda b: place[node] if (node := b.context.producer()) else 0)


def _match_operator(node: ir.Node, reader: LayoutReader) -> AttentionBlock:
    """An operator that holds the whole attention, from heads to context."""
    read = OPERATORS.get((node.domain, node.op_type))
    if read is None:
        raise MatchFailure(
            f"the operator {'.'.join(filter(None, node.op_identifier()))} is not read"
        )
    fused = read(node, reader)
    return _make_block(
        fused,
        reader,
        product=node,
        content=None,
        logits=None,
        logits_axes=None,
        probabilities=None,
        context_axes=None,
        nodes=(node,),
        idiom=read.__name__,
    )


def _make_block(
    read: OperatorMatch,
    reader: LayoutReader,
    *,
    product: ir.Node,
    content: Projection | None,
    logits: ir.Value | None,
    logits_axes: tuple[int, ...] | None,
    probabilities: ir.Value | None,
    context_axes: Sequence[int] | None,
    nodes: tuple[ir.Node, ...],
    idiom: str,
    reused: tuple[Reused, ...] = (),
    own: ir.Value | None = None,
) -> AttentionBlock:
    """The block with its heads matched, its output projection and all its nodes."""
    q = read.q
    heads = q.num_heads + sum(len(part.heads) for part in reused)
    if read.k.head_size != q.head_size:
        raise MatchFailure(f"queries have head size {q.head_size}, keys {read.k.head_size}")
    if read.v.rotary_terms or read.v.norm is not None:
        raise MatchFailure(
            "positions turn the values, or a norm changes them: no reading covers that"
        )
    counts = {part.sequences(reader.shape) for part in (q, read.k, read.v)}
    if len(counts) > 1:
        raise MatchFailure("queries, keys and values do not come from the same number of sequences")
    k, v = _repeat_heads(read.k, q.num_heads, "key"), _repeat_heads(read.v, heads, "value")
    labels, order = _context_labels(
        reader.shape(read.context), (counts.pop(), heads, v.head_size), context_axes
    )
    output = reader.match_output_projection(read.context, labels, order)
    parts = (q, k, v, content, output)
    made = [node for part in parts if part is not None for node in part.nodes]
    assert isinstance(product.graph, ir.Graph)
    return AttentionBlock(
        name="",
        graph=product.graph,
        q=q,
        k=k,
        v=v,
        content=content,
        output=output,
        scale=read.scale * q.scale * k.scale,
        steps=read.steps,
        product=product,
        logits=logits,
        logits_axes=logits_axes,
        probabilities=probabilities,
        context=read.context,
        context_axes=None if context_axes is None else tuple(context_axes),
        nodes=tuple(dict.fromkeys((*nodes, *made))),
        idiom=idiom,
        position=_position(q, k, read.steps, reader),
        reused=reused,
        own_probabilities=own,
    )


def _context_labels(
    shape: tuple[int, ...], known: tuple[int, int, int], axes: Sequence[int] | None
) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """A number for each element of the context, counting (B, H, S, V), laid out like it.

    Args:
        known: B, H and V.
        axes: The order that brings the context to (B, H, S, V) or (B*H, S, V); None where the
            heads are side by side already, as a fused operator leaves them.
    """
    batch, heads, size = known
    count = math.prod(shape)
    length = count // (batch * heads * size)
    if count != batch * heads * length * size:
        raise MatchFailure(f"the context has shape {shape}, which does not hold {heads} heads")
    order = (batch, heads, length, size)
    labels = np.arange(count).reshape(order)
    if axes is None:
        merged = len(shape) == 3
        return (labels.transpose(0, 2, 1, 3).reshape(shape) if merged else labels), order
    laid_out = labels.reshape([shape[axis] for axis in axes])
    return laid_out.transpose(np.argsort(axes)), order


def _position(
    q: Projection, k: Projection, steps: Sequence[LogitStep], reader: LayoutReader
) -> Literal["none", "bias", "rope"]:
    """Rotated heads, or an additive bias that differs from head to head (masks do not)."""
    if q.rotary_terms or k.rotary_terms:
        return "rope"
    biases = (step.value for step in steps if isinstance(step, PositionBias))
    return "bias" if any(_by_head(value, reader) for value in biases) else "none"


def _by_head(bias: ir.Value, reader: LayoutReader) -> bool:
    """Whether the axis of the heads holds more than zeros, or one row many times over."""
    shape = reader.info.shape(bias)
    if shape is None or len(shape) < 3 or shape[-3] == 1:
        return False
    labels = reader.number_elements(bias)
    return bool((labels != labels.take([0], -3)).any())


def _repeat_heads(projection: Projection, heads: int, role: str) -> Projection:
    """Key/value heads that several query heads share, one a query head."""
    own = projection.num_heads
    if own == heads:
        return projection
    if own == 0 or heads % own:
        raise MatchFailure(f"{heads} query heads cannot share {own} {role} heads")
    times = heads // own
    columns, gain, offset = (
        array.repeat(times, axis=0)
        for array in (projection.columns, projection.gain, projection.offset)
    )
    return replace(
        projection,
        columns=columns,
        gain=gain,
        offset=offset,
        rotary_terms=tuple(_repeat_term(turn, times) for turn in projection.rotary_terms),
        past=None if projection.past is None else _repeat_layout(projection.past, times),
    )


def _repeat_term(turn: RotaryTerm, times: int) -> RotaryTerm:
    columns, gain, offset = (
        array.repeat(times, axis=0) for array in (turn.columns, turn.gain, turn.offset)
    )
    factor = None if turn.factor is None else _repeat_layout(turn.factor, times)
    return RotaryTerm(factor, columns, gain, offset)


def _repeat_layout(spread: BroadcastLayout, times: int) -> BroadcastLayout:
    axes = tuple(
        axis if isinstance(axis, str) else axis.repeat(times, axis=0) for axis in spread.axes
    )
    return replace(spread, axes=axes)


def _split_content(
    steps: Sequence[LogitStep], product: ScoreProduct, k: Projection, reader: LayoutReader
) -> tuple[tuple[LogitStep, ...], Projection | None]:
    """The first added value may be the content term: a projection of the keys' own tokens."""
    if steps and isinstance(steps[0], PositionBias):
        try:
            content = reader.match_projection(steps[0].value, "content", axes=product.key_axes)
        except (MatchFailure, ValueError):  # ValueError: it has fewer axes than the keys
            return tuple(steps), None
        own = content.weight is not None and content.input is k.input
        if own and content.head_size == 1:
            return tuple(steps[1:]), content
    return tuple(steps), None


def _mark_entangled(step: LogitStep, q: Projection, k: Projection) -> LogitStep:
    """Mark a bias that is made of the block's own queries or keys (DeBERTa, Transformer-XL)."""
    if not isinstance(step, PositionBias):
        return step
    made = [node.outputs[0] for part in (q, k) for node in part.nodes[:1]]
    return replace(step, entangled=any(depends_on(step.value, value) for value in made))


def _content_sum(content: Projection, scaled: ir.Value) -> ir.Value:
    """The value after scores and content are added."""
    for node, _ in scaled.uses():
        if node.op_type == "Add" and content.output in node.inputs:
            return node.outputs[0]
    raise MatchFailure("the content term is not added to the scores")
