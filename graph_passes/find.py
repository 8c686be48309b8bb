"""find_attention: walk outward from every softmax and every fused operator to the projections."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graph_passes.attention import (
    AttentionBlock,
    LogitStep,
    Miss,
    PositionBias,
    Projection,
    distinct,
    is_constant,
)
from graph_passes.idioms import LOGIT_IDIOMS, OPERATORS, PROBABILITY_IDIOMS
from graph_passes.shapes import Facts, bind_axes, interpret
from graph_passes.trace import Reader, Unread, say

__all__ = ["find_attention", "probe"]

BATCH, SEQUENCE = 2, 5
"""Lengths to read at: small, and apart from each other, so that no axis is mistaken for another."""


def find_attention(model: ir.Model) -> tuple[list[AttentionBlock], list[Miss]]:
    """Every attention of the main graph, in order of execution, and what was not read.

    A reading is a claim: ``attnserve.certify`` proves it by running the graph.
    """
    facts = probe(model)
    reader = Reader(facts, dict(model.opset_imports))
    blocks: list[AttentionBlock] = []
    misses: list[Miss] = []
    for node in model.graph:
        try:
            if node.op_type == "Softmax" and not node.domain:
                blocks.append(_from_softmax(node, reader))
            elif (node.domain, node.op_type) in OPERATORS:
                blocks.append(_from_operator(node, reader))
        except Unread as unread:
            misses.append(Miss(node, unread.reason))
    return _named(blocks), misses


def probe(model: ir.Model) -> Facts:
    """Shapes at small lengths; when unequal axes contradict the graph, with all of them equal."""
    facts = interpret(model, bind_axes(model.graph, batch=BATCH, sequence=SEQUENCE))
    return facts


def _from_softmax(node: ir.Node, reader: Reader) -> AttentionBlock:
    """probabilities = softmax(steps(scale * q k^T)); context = probabilities v."""
    softmax = node.outputs[0]
    if node.inputs[0] is None:
        raise Unread("the softmax has no input")
    shape = reader.shape(softmax)
    default = -1 if reader.opsets.get("", 1) >= 13 else 1
    if node.attributes.get_int("axis", default) % len(shape) != len(shape) - 1 or len(shape) < 3:
        raise Unread(f"{say(node)} is not over the keys of (B, H, S, T) logits")
    logits = _read_logits(node.inputs[0], reader)
    if logits is None:
        raise Unread(f"{say(node)} is not fed by a product of queries and keys")
    q_value, k_value = logits.product.inputs
    assert q_value is not None and k_value is not None
    q = reader.projection(q_value, "query")
    k = reader.projection(k_value, "key", tokens_last=True)
    forwards, probabilities = _follow_probabilities(softmax)
    product = _context_product(probabilities)
    assert product.inputs[1] is not None
    v = reader.projection(product.inputs[1], "value")
    steps, content = _split_content(logits.steps, k, reader)
    return _block(
        reader,
        idiom="softmax",
        q=q,
        k=k,
        v=v,
        content=content,
        scale=logits.scale * q.scale * k.scale,
        steps=steps,
        product=logits.product,
        logits=logits.scaled if content is None else _content_sum(content, logits.scaled),
        probabilities=probabilities,
        context=product.outputs[0],
        nodes=(logits.product, node, *forwards, product),
    )


def _from_operator(node: ir.Node, reader: Reader) -> AttentionBlock:
    """An operator that holds the whole attention, from heads to context."""
    read = OPERATORS[node.domain, node.op_type]
    fused = read(node, reader.facts)
    q = reader.projection(fused.q, "query", heads=fused.num_heads)
    k = reader.projection(fused.k, "key", heads=fused.num_kv_heads)
    v = reader.projection(fused.v, "value", heads=fused.num_kv_heads)
    return _block(
        reader,
        idiom=read.__name__,
        q=q,
        k=k,
        v=v,
        content=None,
        scale=fused.scale * q.scale * k.scale,
        steps=fused.steps,
        product=node,
        logits=None,
        probabilities=None,
        context=fused.context,
        nodes=(node,),
    )


def _block(reader: Reader, *, q: Projection, k: Projection, v: Projection, **parts: object) -> AttentionBlock:
    heads = q.num_heads
    if k.head_size != q.head_size:
        raise Unread(f"queries have head size {q.head_size}, keys {k.head_size}")
    k, v = _share(k, heads, "key"), _share(v, heads, "value")
    context = parts["context"]
    assert isinstance(context, ir.Value)
    output = reader.output_projection(context, heads, v.head_size, reader.batch(q))
    nodes = parts.pop("nodes")
    content = parts["content"]
    every: list[ir.Node] = [*q.nodes, *k.nodes, *v.nodes, *nodes]  # type: ignore[misc]
    if isinstance(content, Projection):
        every += content.nodes
    if output is not None:
        every += output.nodes
    graph = context.graph
    assert isinstance(graph, ir.Graph)
    return AttentionBlock(
        name="", graph=graph, q=q, k=k, v=v, output=output, nodes=distinct(every), **parts  # type: ignore[arg-type]
    )


def _share(projection: Projection, heads: int, role: str) -> Projection:
    """Key/value heads that several query heads share, one a query head."""
    own = projection.num_heads
    if own == heads:
        return projection
    if own == 0 or heads % own:
        raise Unread(f"{heads} query heads cannot share {own} {role} heads")
    columns, gain, offset = (
        array.repeat(heads // own, axis=0)
        for array in (projection.columns, projection.gain, projection.offset)
    )
    return replace(projection, columns=columns, gain=gain, offset=offset)


@dataclass(frozen=True, eq=False)
class _Logits:
    """The chain from the product of queries and keys up to the softmax."""

    product: ir.Node
    scale: float
    scaled: ir.Value
    steps: tuple[LogitStep, ...]


def _read_logits(value: ir.Value, reader: Reader) -> _Logits | None:
    """Walk from the softmax's input up to the one product of two activations that feeds it."""
    node = value.producer()
    if node is None:
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
            if (inner := _read_logits(candidate, reader)) is not None
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


def _follow_probabilities(softmax: ir.Value) -> tuple[list[ir.Node], ir.Value]:
    nodes: list[ir.Node] = []
    value = softmax
    while step := next((found for idiom in PROBABILITY_IDIOMS if (found := idiom(value))), ()):
        nodes += step
        value = step[-1].outputs[0]
    return nodes, value


def _context_product(probabilities: ir.Value) -> ir.Node:
    products = [
        node
        for node, index in probabilities.uses()
        if node.op_type == "MatMul" and index == 0 and not is_constant(node.inputs[1])
    ]
    if len(products) != 1:
        raise Unread(f"{len(products)} products read the probabilities {probabilities.name!r}, expected 1")
    return products[0]


def _named(blocks: Sequence[AttentionBlock]) -> list[AttentionBlock]:
    """Names the exporter's own nodes and weights agree on, else attention_<index>."""
    names = [_common_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"attention_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def _common_name(block: AttentionBlock) -> str:
    """The dotted path that the names of the projections' nodes and constants share."""
    groups: list[list[str]] = []
    for projection in (block.q, block.k, block.v):
        names = [projection.nodes[0].name or "", projection.weight.name or ""]
        names += [value.name or "" for node in projection.nodes[:2] for value in node.inputs if value and is_constant(value)]
        groups.append([name for name in names if len(_parts(name)) > 1])
    for q in groups[0]:
        for k in groups[1]:
            for v in groups[2]:
                common = os.path.commonprefix([_parts(q), _parts(k), _parts(v)])
                if any(any(c.isdigit() for c in part) for part in common):
                    return ".".join(common)
    return ""


def _parts(name: str) -> list[str]:
    return [part for part in re.split(r"[/.]", name) if part]
