"""find_attention: walk outward from every softmax and every fused operator to the projections."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import onnx_ir as ir

from graph_passes.attention import (
    AttentionBlock,
    LogitStep,
    Miss,
    PositionBias,
    Projection,
    Turn,
    is_constant,
)
from graph_passes.idioms import FUSED, LOGIT_IDIOMS, OPERATORS, PROBABILITY_IDIOMS
from graph_passes.shapes import bind_axes, interpret
from graph_passes.trace import Reader, Unread, say

__all__ = ["REWRITTEN", "find_attention"]

BATCH, SEQUENCE = 2, 5
"""Lengths to read at: small, and apart from each other, so that no axis is mistaken for another."""

REWRITTEN = "/collaborative/"
"""Stands in the names of what ``Collaborate`` puts into a graph, after the block's name."""

REACH = 12
"""Nodes between scores and softmax; each may have two operands to search, so few."""


def find_attention(model: ir.Model) -> tuple[list[AttentionBlock], list[Miss]]:
    """Every attention of the main graph, in order of execution, and what was not read.

    A reading is a claim: ``attnserve.certify`` proves it by running the graph.
    """
    facts = interpret(model, bind_axes(model.graph, batch=BATCH, sequence=SEQUENCE))
    reader = Reader(facts, dict(model.opset_imports))
    blocks: list[AttentionBlock] = []
    misses: list[Miss] = []
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        read = _reading_of(node)
        if read is None:
            continue
        try:
            if node.graph is not model.graph:
                raise Unread("it is in the body of another node, which is not read")
            blocks.append(read(node, model.graph, reader))
        except Unread as unread:
            misses.append(Miss(node, unread.reason))
    return _named(blocks), misses


def _reading_of(node: ir.Node) -> Callable[[ir.Node, ir.Graph, Reader], AttentionBlock] | None:
    if node.op_type == "Softmax" and not node.domain:
        return _from_softmax
    return _from_operator if node.op_type in FUSED else None


def _from_softmax(node: ir.Node, graph: ir.Graph, reader: Reader) -> AttentionBlock:
    """probabilities = softmax(steps(scale * q k^T)); context = probabilities v."""
    softmax = node.outputs[0]
    if node.inputs[0] is None:
        raise Unread("the softmax has no input")
    shape = reader.shape(softmax)
    default = -1 if reader.opsets.get("", 1) >= 13 else 1
    if len(shape) < 3 or node.attributes.get_int("axis", default) % len(shape) != len(shape) - 1:
        raise Unread(f"{say(node)} is not over the keys of (B, H, S, T) logits")
    logits = _read_logits(node.inputs[0], reader)
    if logits is None:
        raise Unread(f"{say(node)} is not fed by a product of queries and keys")
    q_value, k_value = logits.product.inputs
    assert q_value is not None and k_value is not None
    q = reader.projection(q_value, "query")
    k = reader.projection(k_value, "key", tokens_last=True)
    forwards, probabilities, product = _follow_probabilities(softmax)
    assert product.inputs[1] is not None
    v = reader.projection(product.inputs[1], "value")
    steps, content = _split_content(logits.steps, k, reader)
    block = AttentionBlock(
        name="",
        graph=graph,
        q=q,
        k=k,
        v=v,
        content=content,
        output=None,
        scale=logits.scale * q.scale * k.scale,
        steps=steps,
        product=logits.product,
        logits=logits.scaled if content is None else _content_sum(content, logits.scaled),
        probabilities=probabilities,
        context=product.outputs[0],
        nodes=(logits.product, node, *forwards, product),
        idiom="softmax",
    )
    return _completed(block, reader, keys_last=True)


def _from_operator(node: ir.Node, graph: ir.Graph, reader: Reader) -> AttentionBlock:
    """An operator that holds the whole attention, from heads to context."""
    read = OPERATORS.get((node.domain, node.op_type))
    if read is None:
        raise Unread(f"the operator {'.'.join(filter(None, node.op_identifier()))} is not read")
    fused = read(node, reader.facts)
    q = reader.projection(fused.q, "query", heads=fused.num_heads)
    k = reader.projection(fused.k, "key", heads=fused.num_kv_heads)
    v = reader.projection(fused.v, "value", heads=fused.num_kv_heads)
    block = AttentionBlock(
        name="",
        graph=graph,
        q=q,
        k=k,
        v=v,
        content=None,
        output=None,
        scale=fused.scale * q.scale * k.scale,
        steps=fused.steps,
        product=node,
        logits=None,
        probabilities=None,
        context=fused.context,
        nodes=(node,),
        idiom=read.__name__,
    )
    return _completed(block, reader, keys_last=False)


def _completed(block: AttentionBlock, reader: Reader, *, keys_last: bool) -> AttentionBlock:
    """The block with its heads matched, its output projection and all its nodes."""
    q, heads = block.q, block.num_heads
    if block.k.head_size != q.head_size:
        raise Unread(f"queries have head size {q.head_size}, keys {block.k.head_size}")
    batches = [reader.batch(q), reader.batch(block.k, tokens_last=keys_last), reader.batch(block.v)]
    if len(set(batches)) > 1:
        raise Unread("queries, keys and values do not come from the same number of sequences")
    k, v = _share(block.k, heads, "key"), _share(block.v, heads, "value")
    output = reader.output_projection(block.context, heads, v.head_size, batches[0])
    parts = (q, k, v, block, block.content, output)
    nodes = [node for part in parts if part is not None for node in part.nodes]
    if v.turns:
        raise Unread("positions turn the values, which no reading of attention covers")
    nodes = tuple(dict.fromkeys(nodes))
    position = _position(block, reader)
    return replace(block, k=k, v=v, output=output, nodes=nodes, position=position)


def _position(block: AttentionBlock, reader: Reader) -> Literal["none", "bias", "rope"]:
    """Rotated heads, or an additive bias that differs from head to head (masks do not)."""
    if block.q.turns or block.k.turns:
        return "rope"
    biases = (step.value for step in block.steps if isinstance(step, PositionBias))
    shapes = (reader.facts.shape(value) for value in biases)
    by_head = any(shape is not None and len(shape) > 2 and shape[-3] > 1 for shape in shapes)
    return "bias" if by_head else "none"


def _share(projection: Projection, heads: int, role: str) -> Projection:
    """Key/value heads that several query heads share, one a query head."""
    own = projection.num_heads
    if own == heads:
        return projection
    if own == 0 or heads % own:
        raise Unread(f"{heads} query heads cannot share {own} {role} heads")
    turns = tuple(_repeated(turn, heads // own) for turn in projection.turns)
    return replace(_repeated(projection, heads // own), turns=turns)


P = TypeVar("P", Projection, Turn)


def _repeated(part: P, times: int) -> P:
    arrays = {name: getattr(part, name) for name in ("columns", "gain", "offset")}
    if isinstance(part, Turn):
        arrays["element"] = part.element
    return replace(part, **{name: array.repeat(times, axis=0) for name, array in arrays.items()})


@dataclass(frozen=True, eq=False)
class _Logits:
    """The chain from the product of queries and keys up to the softmax."""

    product: ir.Node
    scale: float
    scaled: ir.Value
    steps: tuple[LogitStep, ...]


def _read_logits(value: ir.Value, reader: Reader, reach: int = REACH) -> _Logits | None:
    """Walk from the softmax's input up to the one product of two activations that feeds it."""
    node = value.producer()
    if node is None or reach == 0:
        return None
    if node.op_type == "MatMul" and not any(map(is_constant, node.inputs)):
        return _Logits(node, 1.0, value, ())
    for idiom in LOGIT_IDIOMS:
        reading = idiom(node, reader.facts)
        if reading is None:
            continue
        found = [
            (candidate, inner)
            for candidate in reading.candidates
            if (inner := _read_logits(candidate, reader, reach - 1)) is not None
        ]
        if len(found) > 1:
            raise Unread(f"{say(node)} adds two products: this attention has more than one score")
        if not found:
            return None
        candidate, inner = found[0]
        step = reading.step(candidate)
        if isinstance(step, float):
            if inner.steps:
                raise Unread(f"{say(node)} scales logits that are already masked")
            return replace(inner, scale=inner.scale * step, scaled=value)
        if step is None:
            return inner if inner.steps else replace(inner, scaled=value)
        return replace(inner, steps=(*inner.steps, step))
    return None


def _split_content(
    steps: Sequence[LogitStep], k: Projection, reader: Reader
) -> tuple[tuple[LogitStep, ...], Projection | None]:
    """The first added value may be the content term: a projection of the keys' own tokens."""
    if steps and isinstance(steps[0], PositionBias):
        try:
            content = reader.projection(steps[0].value, "content", tokens_last=True)
        except Unread:
            return tuple(steps), None
        if content.input is k.input and content.head_size == 1:
            return tuple(steps[1:]), content
    return tuple(steps), None


def _content_sum(content: Projection, scaled: ir.Value) -> ir.Value:
    """The value after scores and content are added."""
    for node, _ in scaled.uses():
        if node.op_type == "Add" and content.output in node.inputs:
            return node.outputs[0]
    raise Unread("the content term is not added to the scores")


def _follow_probabilities(softmax: ir.Value) -> tuple[list[ir.Node], ir.Value, ir.Node]:
    """Down to the product with the values: the nodes in between, its operand, and itself."""
    nodes: list[ir.Node] = []
    value = softmax
    while not (products := _context_products(value)):
        step = next((found for idiom in PROBABILITY_IDIOMS if (found := idiom(value))), ())
        if not step:
            raise Unread(f"no product with values reads the probabilities {value.name!r}")
        nodes += step
        value = step[-1].outputs[0]
    if len(products) > 1:
        raise Unread(f"{len(products)} products read the probabilities {value.name!r}, expected 1")
    return nodes, value, products[0]


def _context_products(probabilities: ir.Value) -> list[ir.Node]:
    return [
        node
        for node, index in probabilities.uses()
        if node.op_type == "MatMul" and index == 0 and not is_constant(node.inputs[1])
    ]


def _named(blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Names the exporter's own nodes and weights agree on, else attention_<index>."""
    names = [_common_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"attention_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def _common_name(block: AttentionBlock) -> str:
    """The dotted path that the names of the projections' nodes and constants share.

    A rewritten block has its name in the names of its weights.
    """
    rewritten, mark, _ = (block.q.weight.name or "").partition(REWRITTEN)
    if mark:
        return rewritten
    groups: list[list[str]] = []
    for projection in (block.q, block.k, block.v):
        constants = [
            value
            for node in projection.nodes[:2]
            for value in (projection.weight, *node.inputs)
            if is_constant(value)
        ]
        names = [named.name or "" for named in (projection.nodes[0], *constants)]
        groups.append([name for name in names if len(_parts(name)) > 1])
    for q in groups[0]:
        for k in groups[1]:
            for v in groups[2]:
                paths = [_parts(name) for name in (q, k, v)]
                common = _common_start(*paths, paths[0][:-1])
                if len(common) > 1 and any(c.isdigit() for part in common for c in part):
                    return ".".join(common)
    return ""


def _common_start(*paths: list[str]) -> list[str]:
    same = [len(set(parts)) == 1 for parts in zip(*paths, strict=False)]
    return paths[0][: same.index(False) if False in same else len(same)]


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[/.]", name) if part]
