"""Find attention blocks: match from each softmax or fused operator to the projections."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.length_dependence import drop_length_dependent
from graph_passes.analysis.operator_sets import REWRITE_FIRST, SELECTIONS
from graph_passes.analysis.required import graph_of
from graph_passes.analysis.shapes import infer_shapes_small
from graph_passes.blocks import (
    AttentionBlock,
    BroadcastLayout,
    LogitStep,
    PositionBias,
    Projection,
    Reused,
    RotaryTerm,
    Softmax,
    Unmatched,
)
from graph_passes.errors import MALFORMED_NODE, InvalidModel
from graph_passes.matching.element_map import MatchFailure, describe
from graph_passes.matching.idioms import SOFTMAXES, SoftmaxMatch
from graph_passes.matching.layout import LayoutReader
from graph_passes.matching.naming import assign_names, attention_name
from graph_passes.matching.operators import FUSED_OPERATORS, OPERATORS, OperatorMatch
from graph_passes.matching.output_projection import match_output_projection
from graph_passes.matching.products import ContextProduct, ScoreProduct
from graph_passes.matching.projections import match_projection
from graph_passes.matching.reuse import (
    IN_ORDER,
    head_sources,
    joining_node,
    products_of,
    reused_heads,
    whole_values,
)
from graph_passes.matching.rotary import depends_on
from graph_passes.matching.scores import ContextMatch, match_context, match_logits

__all__ = ["FoundAttention", "find_attention"]

PartT = TypeVar("PartT", Projection, RotaryTerm)

IN_INTEGERS = f"the scores are quantized to integers: {REWRITE_FIRST}"

BATCH, SEQUENCE = 2, 5
"""Lengths for shape inference: small and distinct, so that axes are not confused."""


class FoundAttention(NamedTuple):
    """The attention blocks of a model, and the candidates that did not match.

    Attributes:
        blocks: The matched blocks, in order of execution.
        unmatched: Candidate nodes that did not match, with reasons.
    """

    blocks: list[AttentionBlock]
    unmatched: list[Unmatched]


def find_attention(model: ir.Model) -> FoundAttention:
    """Find all attention blocks of a model.

    Bodies of If, Loop and Scan are included; functions must be inlined before.
    ``attnserve.checks.certify`` certifies a match by executing the graph.
    """
    analyses = Analyses.of(model)
    info = analyses.get(infer_shapes_small, batch=BATCH, sequence=SEQUENCE)
    other_info = analyses.get(infer_shapes_small, batch=BATCH + 1, sequence=SEQUENCE + 2)
    opsets = dict(model.opset_imports)
    reader = LayoutReader(drop_length_dependent(info, other_info, opsets), opsets)
    blocks: list[AttentionBlock] = []
    softmax_failures: list[Unmatched] = []
    for node in model.graph.all_nodes():
        try:
            block = _match_node(node, reader)
        except MatchFailure as failure:
            softmax_failures.append(Unmatched(node, failure.reason))
        except (*MALFORMED_NODE, MemoryError, RuntimeError, InvalidModel) as error:
            # Malformed graphs raise these; other blocks may still match.
            what = error.what if isinstance(error, InvalidModel) else error
            softmax_failures.append(
                Unmatched(node, f"{describe(node)} could not be evaluated: {what}")
            )
        else:
            if block is not None:
                blocks.append(block)
    blocks, source_failures = _check_sources(blocks)
    reusing_blocks, reuse_failures = _find_reusing(blocks, reader)
    blocks, join_failures = _join_parts([*blocks, *reusing_blocks], reader)
    blocks = assign_names(_blocks_in_order(blocks, model), "attention", attention_name)
    failures = [*softmax_failures, *source_failures, *reuse_failures, *join_failures]
    return FoundAttention(blocks, failures)


def _match_node(node: ir.Node, reader: LayoutReader) -> AttentionBlock | None:
    """Match the attention of a softmax or fused operator; None for other nodes.

    Raises:
        MatchFailure: The node is a candidate and does not match.
    """
    if node.op_type in FUSED_OPERATORS:
        return _match_operator(node, reader)
    if node.op_type == "QLinearSoftmax":
        raise MatchFailure(IN_INTEGERS)
    for idiom in SOFTMAXES:
        if (softmax := idiom(node, reader.info, reader.opsets.get("", 1))) is not None:
            return _match_softmax(node, softmax, idiom.__name__, reader)
    return None


def _match_softmax(
    node: ir.Node, softmax: SoftmaxMatch, idiom: str, reader: LayoutReader
) -> AttentionBlock:
    """Match the attention of a softmax.

    Raises:
        MatchFailure: The softmax is not over scores, or the context does not match.
    """
    reader.shape(softmax.logits)
    logits = match_logits(softmax, reader)
    if logits is None:
        producer = softmax.logits.producer()
        if producer is not None and producer.op_type == "DequantizeLinear":
            raise MatchFailure(IN_INTEGERS)
        raise MatchFailure(f"{describe(node)} has no product of queries and keys as input")
    product = logits.product
    q = match_projection(reader, product.query, "query", axes=product.query_axes)
    k = match_projection(reader, product.key, "key", axes=product.key_axes)
    context = match_context(softmax, logits, reader)
    mixing = context.product
    reuses = () if context.joined is None else _reused_beside(context, reader)
    v = match_projection(reader, mixing.value, "value", axes=mixing.value_axes)
    v = replace(v, scale=v.scale * mixing.scale)
    steps, content = _split_content(logits.steps, product, k, reader)
    steps = tuple(_mark_entangled(step, q, k) for step in steps)
    return _make_block(
        OperatorMatch(q, k, v, logits.scale, steps, mixing.node.outputs[0]),
        reader,
        product=product.node,
        nodes=(product.node, node, *context.nodes, mixing.node),
        idiom=idiom,
        content=content,
        softmax=Softmax(
            logits.scaled if content is None else _content_sum(content, logits.scaled),
            logits.order or (),
            context.own if reuses else context.probabilities,
        ),
        probabilities=context.probabilities,
        context_axes=mixing.context_axes,
        reused=reuses,
    )


def _reused_beside(context: ContextMatch, reader: LayoutReader) -> tuple[Reused, ...]:
    """The reused heads that are concatenated with the heads of a softmax.

    Raises:
        MatchFailure: Values other than heads of attention are concatenated with them.
    """
    assert context.joined is not None and context.own is not None
    probabilities = {context.own, *_softmaxes(context.joined)}
    sources = head_sources(context.joined.outputs[0], probabilities, reader.info)
    if sources is None:
        raise MatchFailure(
            f"{describe(context.joined)} concatenates probabilities with another value"
        )
    return reused_heads(sources, context.own, context.joined)


def _softmaxes(joined: ir.Node) -> set[ir.Value]:
    """The inputs of a Concat of probabilities, before heads are selected."""
    values: set[ir.Value] = set()
    for value in joined.inputs:
        node = None if value is None else value.producer()
        while value is not None and node is not None and node.op_type in (*SELECTIONS, "Identity"):
            value = node.inputs[0]
            node = None if value is None else value.producer()
        if value is not None:
            values.add(value)
    return values


def _by_probabilities(blocks: Sequence[AttentionBlock]) -> dict[ir.Value, AttentionBlock]:
    """Blocks by their probabilities, own and concatenated, which other blocks may reuse."""
    by_value: dict[ir.Value, AttentionBlock] = {}
    for block in blocks:
        for value in (block.probabilities, block.own_probabilities):
            if value is not None:
                by_value.setdefault(value, block)
    return by_value


def _source(value: ir.Value, by_value: Mapping[ir.Value, AttentionBlock]) -> AttentionBlock | None:
    """The block with these probabilities, also after a Reshape of (B*H, S, T)."""
    if value in by_value:
        return by_value[value]
    node = value.producer()
    operand = node.inputs[0] if node is not None else None
    return None if operand is None else by_value.get(operand)


def _check_sources(
    blocks: Sequence[AttentionBlock],
) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Keep blocks whose reused heads come from matched blocks; the others are unmatched."""
    by_value = _by_probabilities(blocks)
    matched: list[AttentionBlock] = []
    unmatched: list[Unmatched] = []
    for block in blocks:
        if all(_source(part.value, by_value) for part in block.reused):
            matched.append(block)
        else:
            reason = "it reuses probabilities of an attention block that was not matched"
            unmatched.append(Unmatched(block.product, reason))
    return matched, unmatched


def _find_reusing(
    blocks: Sequence[AttentionBlock], reader: LayoutReader
) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Find blocks without a softmax, whose heads all reuse probabilities."""
    by_value = _by_probabilities(blocks)
    matched_nodes = {node for block in blocks for node in block.nodes}
    block_by_product: dict[ir.Node, AttentionBlock] = {}
    unmatched: list[Unmatched] = []
    for product, value in products_of(list(by_value), reader.info):
        if product.node in matched_nodes or product.node in block_by_product:
            continue
        try:
            sources = head_sources(value, by_value, reader.info)
            if sources is not None:
                reuses = reused_heads(sources, None, product.node)
                source_block = _source(reuses[0].value, by_value)
                assert source_block is not None
                block_by_product[product.node] = _reusing_block(
                    product, value, reuses, source_block, reader
                )
        except MatchFailure as failure:
            unmatched.append(Unmatched(product.node, failure.reason))
    return list(block_by_product.values()), unmatched


def _reusing_block(
    product: ContextProduct,
    probabilities: ir.Value,
    reuses: tuple[Reused, ...],
    source: AttentionBlock,
    reader: LayoutReader,
) -> AttentionBlock:
    """Build a block whose heads all reuse probabilities of other blocks; it has no q and k."""
    v = match_projection(reader, product.value, "value", axes=product.value_axes)
    v = replace(v, scale=v.scale * product.scale)
    no_elements = np.zeros((0, source.head_size))
    no_columns = no_elements.astype(np.int64)
    no_heads = replace(
        v, columns=no_columns, gain=no_elements, offset=no_elements, scale=1.0, nodes=()
    )
    q = no_heads
    if source.kind == "cross":  # x of the source block may have another width than y
        q = replace(
            no_heads,
            input=source.x,
            weight=source.q.weight,
            width=source.q.width,
        )
    between = _between(probabilities, {reuse.value for reuse in reuses})
    return _make_block(
        OperatorMatch(q, no_heads, v, source.scale, (), product.node.outputs[0]),
        reader,
        product=product.node,
        nodes=(*between, product.node),
        idiom="reused_probabilities",
        probabilities=probabilities,
        context_axes=product.context_axes,
        reused=reuses,
    )


def _between(value: ir.Value, sources: Collection[ir.Value]) -> list[ir.Node]:
    """The layout nodes between reused probabilities and their product."""
    node = value.producer()
    if value in sources or node is None:
        return []
    above = [n for v in node.inputs[:1] if v is not None for n in _between(v, sources)]
    if node.op_type == "Concat":
        above = [n for v in node.inputs if v is not None for n in _between(v, sources)]
    return [*above, node]


def _join_parts(
    blocks: Sequence[AttentionBlock], reader: LayoutReader
) -> tuple[list[AttentionBlock], list[Unmatched]]:
    """Join blocks whose contexts are concatenated: own heads, and reused heads by source."""
    joins: dict[ir.Node, dict[ir.Value | None, AttentionBlock]] = {}
    for block in blocks:
        is_whole = block.output is not None or block.product.op_type in FUSED_OPERATORS
        is_joined = not is_whole and block.context_axes == IN_ORDER
        join = joining_node(block.context, reader.info) if is_joined else None
        if join is not None:
            joins.setdefault(join[0], {})[join[1]] = block
    joined_blocks: dict[AttentionBlock, AttentionBlock | None] = {}
    unmatched: list[Unmatched] = []
    for node, parts_by_context in joins.items():
        parts = [parts_by_context[value] for value in node.inputs if value in parts_by_context]
        if len(parts) < len(node.inputs) or not any(part.reused for part in parts):
            continue
        joined_blocks |= dict.fromkeys(parts)
        first = next((part for part in parts if part.q.num_heads), parts[0])
        try:
            joined_blocks[first] = _joined_block(node, first, parts, reader)
        except MatchFailure as failure:
            unmatched.append(Unmatched(first.product, failure.reason))
    new_blocks = [joined_blocks.get(block, block) for block in blocks]
    return [block for block in new_blocks if block is not None], unmatched


def _joined_block(
    node: ir.Node, first: AttentionBlock, parts: Sequence[AttentionBlock], reader: LayoutReader
) -> AttentionBlock:
    """The block of a Concat of contexts; ``first`` has the own heads, if there are any."""
    if sum(part.q.num_heads > 0 for part in parts) > 1:
        raise MatchFailure(f"{describe(node)} joins the heads of several softmaxes")
    values = [part.v.output for part in parts if part.v.output is not None]
    value = whole_values(values, reader.info)
    if value is None or len({part.v.scale for part in parts}) > 1:
        raise MatchFailure(f"{describe(node)} joins contexts of different values")
    v = replace(match_projection(reader, value, "value"), scale=first.v.scale)
    context = node.outputs[0]
    sizes = (v.sequences(reader.shape), v.num_heads, v.head_size)
    labels, order = _context_labels(reader.shape(context), sizes, IN_ORDER)
    output = match_output_projection(reader, context, labels, order)
    starts = np.cumsum([0, *(part.num_heads for part in parts)])
    reuses = tuple(
        replace(reuse, heads=reuse.heads + start)
        for part, start in zip(parts, starts, strict=False)
        for reuse in part.reused
    )
    nodes = [*first.nodes, *(n for part in parts for n in part.nodes), node]
    nodes += () if output is None else output.nodes
    return replace(
        first,
        v=v,
        output=output,
        context=context,
        probabilities=None,
        reused=reuses,
        nodes=tuple(dict.fromkeys(nodes)),
    )


def _blocks_in_order(blocks: Sequence[AttentionBlock], model: ir.Model) -> list[AttentionBlock]:
    """Sort blocks by the execution order of their contexts."""
    if not any(block.idiom == "reused_probabilities" for block in blocks):
        return list(blocks)
    nodes = model.graph.all_nodes()
    place = {node: index for index, node in enumerate(nodes)}
    return sorted(blocks, key=lambda b: place[node] if (node := b.context.producer()) else 0)


def _match_operator(node: ir.Node, reader: LayoutReader) -> AttentionBlock:
    matcher = OPERATORS.get((node.domain, node.op_type))
    if matcher is None:
        raise MatchFailure(
            f"the operator {'.'.join(filter(None, node.op_identifier()))} is not supported"
        )
    match = matcher(node, reader)
    return _make_block(match, reader, product=node, nodes=(node,), idiom=matcher.__name__)


def _make_block(
    match: OperatorMatch,
    reader: LayoutReader,
    *,
    product: ir.Node,
    nodes: tuple[ir.Node, ...],
    idiom: str,
    content: Projection | None = None,
    softmax: Softmax | None = None,
    probabilities: ir.Value | None = None,
    context_axes: tuple[int, ...] | None = None,
    reused: tuple[Reused, ...] = (),
) -> AttentionBlock:
    """Build the block: repeat key/value heads, match the output projection, collect the nodes.

    Args:
        product, idiom, content, softmax, probabilities, context_axes, reused: See
            ``AttentionBlock``.
        nodes: The nodes of the block outside of its projections.
    """
    q = match.q
    heads = q.num_heads + sum(len(part.heads) for part in reused)
    if match.k.head_size != q.head_size:
        raise MatchFailure(f"queries have head size {q.head_size}, keys {match.k.head_size}")
    if match.v.rotary_terms or match.v.norm is not None:
        raise MatchFailure("rotary embeddings or norms of values are not supported")
    counts = {part.sequences(reader.shape) for part in (q, match.k, match.v)}
    if len(counts) > 1:
        raise MatchFailure("queries, keys and values do not come from the same number of sequences")
    k = _repeat_heads(match.k, q.num_heads, "key")
    v = _repeat_heads(match.v, heads, "value")
    shape = reader.shape(match.context)
    if product.op_type in FUSED_OPERATORS and len(shape) == 4:
        context_axes = IN_ORDER
    labels, order = _context_labels(shape, (counts.pop(), heads, v.head_size), context_axes)
    output = match_output_projection(reader, match.context, labels, order)
    parts = (q, k, v, content, output)
    projection_nodes = [node for part in parts if part is not None for node in part.nodes]
    return AttentionBlock(
        name="",
        graph=graph_of(product),
        q=q,
        k=k,
        v=v,
        content=content,
        output=output,
        scale=match.scale * q.scale * k.scale,
        steps=match.steps,
        product=product,
        softmax=softmax,
        probabilities=probabilities,
        context=match.context,
        context_axes=context_axes,
        nodes=tuple(dict.fromkeys((*nodes, *projection_nodes))),
        idiom=idiom,
        position=_position(q, k, match.steps, reader),
        reused=reused,
    )


def _context_labels(
    shape: tuple[int, ...], sizes: tuple[int, int, int], axes: Sequence[int] | None
) -> tuple[np.ndarray, tuple[int, int, int, int]]:
    """Labels in (B, H, S, V) order, in the layout of the context.

    Args:
        shape: The shape of the context.
        sizes: B, H and V.
        axes: The permutation of the context to (B, H, S, V) or (B*H, S, V); None for (B, S, H*V).

    Returns:
        The labels, and B, H, S and V.
    """
    batch, heads, size = sizes
    count = math.prod(shape)
    length = count // (batch * heads * size)
    if count != batch * heads * length * size:
        raise MatchFailure(f"the context has shape {shape}, which does not hold {heads} heads")
    order = (batch, heads, length, size)
    labels = np.arange(count).reshape(order)
    if axes is None:
        return labels.transpose(0, 2, 1, 3).reshape(shape), order
    laid_out = labels.reshape([shape[axis] for axis in axes])
    return laid_out.transpose(np.argsort(axes)), order


def _position(
    q: Projection, k: Projection, steps: Sequence[LogitStep], reader: LayoutReader
) -> Literal["none", "bias", "rope"]:
    """The position encoding: rotary, an additive bias that differs between heads, or none."""
    if q.factors or k.factors:
        return "rope"
    biases = (step.value for step in steps if isinstance(step, PositionBias))
    return "bias" if any(_by_head(value, reader) for value in biases) else "none"


def _by_head(bias: ir.Value, reader: LayoutReader) -> bool:
    """Whether a bias differs between heads."""
    shape = reader.info.shape(bias)
    if shape is None or len(shape) < 3 or shape[-3] == 1:
        return False
    labels = reader.number_elements(bias)
    return bool((labels != labels.take([0], -3)).any())


def _repeat_heads(projection: Projection, heads: int, role: str) -> Projection:
    """Repeat key/value heads that several query heads share, once per query head."""
    count = projection.num_heads
    if count == heads:
        return projection
    if count == 0 or heads % count:
        raise MatchFailure(f"{heads} query heads cannot share {count} {role} heads")
    times = heads // count
    terms = [_repeat_arrays(term, times) for term in projection.rotary_terms]
    return replace(
        _repeat_arrays(projection, times),
        rotary_terms=tuple(replace(t, factor=_repeat_layout(t.factor, times)) for t in terms),
        past=_repeat_layout(projection.past, times),
    )


def _repeat_arrays(part: PartT, times: int) -> PartT:
    """Repeat the columns, gains and offsets of each head."""
    return replace(
        part,
        columns=part.columns.repeat(times, axis=0),
        gain=part.gain.repeat(times, axis=0),
        offset=part.offset.repeat(times, axis=0),
    )


def _repeat_layout(layout: BroadcastLayout | None, times: int) -> BroadcastLayout | None:
    """Repeat the elements that a layout selects for each head."""
    if layout is None:
        return None
    axes = tuple(
        axis if isinstance(axis, str) else axis.repeat(times, axis=0) for axis in layout.axes
    )
    return replace(layout, axes=axes)


def _split_content(
    steps: Sequence[LogitStep], product: ScoreProduct, k: Projection, reader: LayoutReader
) -> tuple[tuple[LogitStep, ...], Projection | None]:
    """Split off the content term: a first bias that is a projection of the keys' input."""
    if steps and isinstance(steps[0], PositionBias):
        try:
            content = match_projection(reader, steps[0].value, "content", axes=product.key_axes)
        except (MatchFailure, ValueError):  # ValueError: the bias has fewer axes than the keys
            return tuple(steps), None
        is_of_keys = content.has_weight and content.input is k.input
        if is_of_keys and content.head_size == 1:
            return tuple(steps[1:]), content
    return tuple(steps), None


def _mark_entangled(step: LogitStep, q: Projection, k: Projection) -> LogitStep:
    """Mark a bias that is computed from the block's queries or keys (DeBERTa, Transformer-XL)."""
    if not isinstance(step, PositionBias):
        return step
    products = [node.outputs[0] for part in (q, k) for node in part.nodes[:1]]
    return replace(step, entangled=any(depends_on(step.value, value) for value in products))


def _content_sum(content: Projection, scaled: ir.Value) -> ir.Value:
    """The sum of scores and content term.

    Raises:
        MatchFailure: The graph does not add them.
    """
    for node, _ in scaled.uses():
        if node.op_type == "Add" and content.output in node.inputs:
            return node.outputs[0]
    raise MatchFailure("the content term is not added to the scores")
