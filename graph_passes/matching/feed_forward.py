"""The second noun, ``FeedForwardBlock``, and where it stands in a graph."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    evaluate,
    is_constant,
)
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import FeedForwardBlock, Linear, Operand
from graph_passes.context import GraphContext
from graph_passes.matching.naming import pinned_name
from graph_passes.matching.products import linear

if TYPE_CHECKING:
    pass

__all__ = ["find_feed_forward", "last_entry"]

LINEAR = frozenset({"Add", "Sub", "Mul", "Div", "Neg", "Where", "Cast", "CastLike", "Identity",
                    "Dropout"})  # fmt: skip
"""Linear in the tokens, but for products, quotients and choices of two activations."""

NONLINEAR = frozenset({"Pow", "Sqrt", "Reciprocal", "Exp", "Log", "Abs", "Sign", "Erf", "Tanh",
                  "Sigmoid", "HardSigmoid", "Relu", "PRelu", "LeakyRelu", "ThresholdedRelu", "Elu",
                  "Celu", "Selu", "Gelu", "Softplus", "Softsign", "Swish", "HardSwish", "Mish",
                  "Clip", "Min", "Max", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Equal",
                  "And", "Or", "Not"})  # fmt: skip
CONTRIB = frozenset({"Gelu", "FastGelu", "BiasGelu", "QuickGelu"})
LAID_OUT = frozenset({"Reshape", "Squeeze", "Unsqueeze", "Flatten"})
SHAPE_OPERATORS = frozenset(
    {"Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Identity", "Concat"}
)
"""What picks lengths out of shapes, and makes shapes of lengths."""


def find_feed_forward(model: ir.Model) -> list[FeedForwardBlock]:
    """Every feed-forward of a model, in order of execution, bodies of nodes included.

    Not found: two products with nothing but linear maps between them, values that anything outside
    reads, how many neurons there are included, and fewer neurons than the tokens have elements.
    Such bottlenecks (adapters, squeezed summaries) are codes, whose every column speaks of the
    whole token; a wide pooler with its classifier is a feed-forward by all that a graph tells.
    """
    with GraphContext.of(model) as context:
        runs = [context.get(infer_shapes_small, batch=b, sequence=s) for b, s in ((2, 5), (3, 7))]
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    read = (_read(node, runs, model.opset_imports) for node in nodes)
    blocks = [block for block in read if block is not None]
    names = [_name(block) for block in blocks]
    return [
        replace(block, name=name if name and names.count(name) == 1 else f"feed_forward_{index}")
        for index, (block, name) in enumerate(zip(blocks, names, strict=True))
    ]


def _read(
    product: ir.Node, runs: Sequence[ShapeInfo], opsets: Mapping[str, int]
) -> FeedForwardBlock | None:
    """The feed-forward that ends in this node; None where none does."""
    second = _linear(product, runs[0])
    if second is None or product.op_type == "FusedGemm" or not isinstance(product.graph, ir.Graph):
        return None
    if len(second.contracted) != 1 or not _is_plain(second):
        return None
    first: dict[ir.Node, Linear] = {}
    between: dict[ir.Node, None] = {}
    operands: list[Operand] = []
    pending = [second.tokens]
    while pending:
        value = pending.pop()
        node = value.producer()
        if node is None or node.graph is not product.graph:
            return None
        if node in first or node in between:
            continue
        if not _same_size(value, second.tokens, runs):
            return None
        if (part := _linear(node, runs[0])) is not None:
            first[node] = part
            given = list(enumerate(node.inputs))[2:]
        elif (count := _elementwise(node)) > 0:
            between[node] = None
            given = list(enumerate(node.inputs))[:count]
        else:
            return None
        active = [other for _, other in given if other is not None and not is_constant(other)]
        at = _by_neuron(node, [(i, other) for i, other in given if is_constant(other)], second)
        if at is None or (node in first and not _is_plain(first[node])):
            return None
        pending += active
        operands += at
    tokens = {_unflattened(part.tokens, runs) for part in first.values()}
    if len(first) > 2 or len(tokens) != 1 or not any(map(_is_nonlinear, (*first, *between))):
        return None
    if pinned_name(product) is None and second.width < max(p.width for p in first.values()):
        return None
    inner = {*first, *between, product}
    for value in _outputs_of((*first, *between)):
        readers = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if value.is_graph_output() or not inner.issuperset(readers):
            return None
    widths = _widths([*first, *between], second.width, runs[0], opsets)
    if widths is None:
        return None
    order = [node for node in product.graph if node in inner]
    bias, output = _bias(product, second.columns.size)
    return FeedForwardBlock(
        name="",
        graph=product.graph,
        x=tokens.pop(),
        first=tuple(first[node] for node in order if node in first),
        products=tuple(node for node in order if node in first),
        hidden=second.tokens,
        second=second,
        product=product,
        bias=bias,
        output=output,
        nodes=tuple(node for node in order if node in between),
        constants_by_neuron=tuple(sorted(operands, key=lambda o: order.index(o.node))),
        widths=widths,
    )


def _linear(node: ir.Node, info: ShapeInfo) -> Linear | None:
    """A product of tokens with a constant, FusedGemm included."""

    def shape_of(value: ir.Value) -> tuple[int, ...]:
        return info.shape(value) or ()

    if (node.domain, node.op_type) != ("com.microsoft", "FusedGemm"):
        return linear(node, shape_of)
    tokens, weight = node.inputs[:2]
    if tokens is None or is_constant(tokens) or not is_constant(weight):
        return None
    sizes, shape = shape_of(tokens), constant_shape(weight)
    last = node.attributes.get_int("transB", 0)
    if node.attributes.get_int("transA", 0) or len(sizes) != 2 or sizes[1] != shape[last]:
        return None
    columns, rows = np.arange(shape[1 - last])[None], np.arange(sizes[0])[:, None]
    scale = node.attributes.get_float("alpha", 1.0)
    return Linear(tokens, weight, (last,), sizes[1], columns, rows, scale)


def _is_plain(part: Linear) -> bool:
    """Whether its last axis is that of the columns, in their order."""
    return len(part.contracted) == 1 and part.columns.shape[-1] == part.columns.size


def _elementwise(node: ir.Node) -> int:
    """How many inputs of a node meet element by element, from the first; 0 for other operators."""
    if node.domain == "com.microsoft":
        return len(node.inputs) if node.op_type in CONTRIB else 0
    if node.domain or node.op_type not in LINEAR | NONLINEAR | LAID_OUT:
        return 0
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        training = constant_tensor(node.inputs[2])
        return 0 if training is None or training.numpy().any() else 1
    return 1 if node.op_type in LAID_OUT | {"Dropout", "CastLike"} else len(node.inputs)


def _is_nonlinear(node: ir.Node) -> bool:
    if node.op_type == "FusedGemm":
        return node.attributes.get_string("activation", "") != ""
    if node.op_type in ("Mul", "Div", "Where"):
        counted = {"Mul": 2, "Div": 2, "Where": 1}[node.op_type]
        chosen = node.inputs[1 if node.op_type == "Div" else 0 : counted]
        return not any(map(is_constant, chosen))
    return bool(node.domain) or node.op_type in NONLINEAR


def _same_size(value: ir.Value, hidden: ir.Value, runs: Sequence[ShapeInfo]) -> bool:
    """Whether a value has the last axis of the other, and as many elements."""
    shapes = [(run.shape(value), run.shape(hidden)) for run in runs]
    return all(a and b and a[-1] == b[-1] and math.prod(a) == math.prod(b) for a, b in shapes)


def _by_neuron(
    node: ir.Node, constants: Sequence[tuple[int, ir.Value]], second: Linear
) -> list[Operand] | None:
    """The constants with an element a neuron; None where one has neither that nor one for all."""
    found: list[Operand] = []
    for index, value in constants:
        shape = constant_shape(value)
        if math.prod(shape) == 1:
            continue
        if math.prod(shape) != second.width or shape[-1] != second.width:
            return None
        found.append(Operand(node, index, len(shape) - 1))
    return found


def _unflattened(tokens: ir.Value, runs: Sequence[ShapeInfo]) -> ir.Value:
    """The tokens as they were before exporters put their leading axes into one."""
    node = tokens.producer()
    if node is None or node.op_type not in LAID_OUT | {"Identity"} or node.inputs[0] is None:
        return tokens
    before = node.inputs[0]
    return _unflattened(before, runs) if _same_size(before, tokens, runs) else tokens


def _widths(
    nodes: Sequence[ir.Node], width: int, info: ShapeInfo, opsets: Mapping[str, int]
) -> tuple[ir.Node, ...] | None:
    """Each Reshape that is told F; None where F is told or asked in a way that is not read."""
    marks_by_shape = _shape_marks(nodes, info, opsets)
    if marks_by_shape is None:
        return None
    found: list[ir.Node] = []
    for node in nodes:
        if node.op_type != "Reshape" or (shape := node.inputs[1]) is None:
            continue
        if shape in marks_by_shape:
            if marks_by_shape[shape][:-1].any():
                return None
            continue
        end = last_entry(shape)
        last = constant_array(end).reshape(-1)[-1:].tolist() if is_constant(end) else []
        if last == [width]:
            found.append(node)
        elif last != [-1]:
            return None
    return tuple(found)


def last_entry(shape: ir.Value) -> ir.Value | None:
    """What a shape ends in: itself, or what comes last in a Concat."""
    node = shape.producer()
    joined = not is_constant(shape) and node is not None and node.op_type == "Concat"
    return node.inputs[-1] if joined and node is not None else shape


def _shape_marks(
    nodes: Sequence[ir.Node], info: ShapeInfo, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray] | None:
    """Where, in shapes and lengths that are asked of the nodes' values, F stands.

    None where anything but a Reshape among the nodes is told it.
    """
    marks: dict[ir.Value, np.ndarray] = {}
    pending = [user for v in _outputs_of(nodes) for user, _ in v.uses() if user.op_type == "Shape"]
    while pending:
        node = pending.pop()
        if node in nodes:
            continue
        if node.op_type == "Shape":
            rank = len(info.shape(node.inputs[0]) or ())
            ends = node.attributes.get_int("start", 0), node.attributes.get_int("end", rank)
            mark = (np.arange(rank) == rank - 1)[slice(*ends)]
        elif node.op_type in SHAPE_OPERATORS and not node.domain:
            given = [_mark(node, value, marks, info) for value in node.inputs]
            told = node.op_type != "Concat" and any(v in marks for v in node.inputs[1:])
            lacking = [v for v, array in zip(node.inputs, given, strict=True) if array is None]
            if told or any(value is not None for value in lacking):
                return None
            mark = evaluate(node, given, opsets)[0].astype(bool)
        else:
            return None
        if mark.any():
            made = node.outputs[0]
            if made.is_graph_output():
                return None
            marks[made] = mark
            pending += [user for user, _ in made.uses()]
    return marks


def _mark(
    node: ir.Node, value: ir.Value | None, marks: Mapping[ir.Value, np.ndarray], info: ShapeInfo
) -> np.ndarray | None:
    """An operand of a node that picks lengths, with ones for F and zeros for other lengths."""
    if value is not None and value in marks:
        return marks[value].astype(np.int64)
    if node.op_type == "Concat":
        shape = info.shape(value)
        return None if shape is None else np.zeros(shape, np.int64)
    return info.constant(value)


def _bias(product: ir.Node, width: int) -> tuple[ir.Value | None, ir.Value]:
    """What is added to a product, an element a column, and the sum."""
    made = product.outputs[0]
    given = product.inputs[2] if len(product.inputs) > 2 else None
    if given is not None:
        plain = is_constant(given) and math.prod(constant_shape(given)) == width
        beta = product.attributes.get_float("beta", 1.0)
        return (given if plain and beta == 1 else None), made
    readers = [node for node, _ in made.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add" and not made.is_graph_output():
        for value in readers[0].inputs:
            if is_constant(value) and math.prod(shape := constant_shape(value)) == width:
                return (value, readers[0].outputs[0]) if shape[-1] == width else (None, made)
    return None, made


def _name(block: FeedForwardBlock) -> str:
    """The path that the names of both products' nodes and constants share; a pruned one's own."""
    if (pinned := pinned_name(block.product)) is not None:
        return pinned
    added = [operand.value.name for operand in block.constants_by_neuron]
    bias = None if block.bias is None else block.bias.name
    one = [block.products[0].name, block.first[0].weight.name, *added]
    two = [block.product.name, block.second.weight.name, bias]
    paths = [
        [[p for p in re.split(r"[/.]", name or "") if p] for name in own] for own in (one, two)
    ]
    for a in paths[0]:
        for b in paths[1]:
            same = [x == y for x, y in zip(a[:-1], b[:-1], strict=False)]
            common = a[: [*same, False].index(False)]
            if len(common) > 1 and any(c.isdigit() for part in common for c in part):
                return ".".join(common)
    return ""


def _outputs_of(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    return [value for node in nodes for value in node.outputs]
