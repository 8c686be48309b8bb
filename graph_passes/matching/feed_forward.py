"""Find feed-forward blocks: two products with element-wise, non-linear operators in between."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.constants import (
    constant_array,
    constant_shape,
    constant_tensor,
    is_constant,
)
from graph_passes.analysis.evaluation import evaluate
from graph_passes.analysis.operator_sets import FLATTENS, GELUS, MICROSOFT, RESHAPES, operators
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_small
from graph_passes.blocks import FeedForwardBlock, Linear, Operand
from graph_passes.matching.naming import assign_names, common_path, pinned_name
from graph_passes.matching.products import linear
from graph_passes.matching.quantized import quantized_linear

__all__ = ["find_feed_forward", "last_entry", "slice_bounds"]

LINEAR = frozenset(
    {"Add", "Sub", "Mul", "Div", "Neg", "Where", "Cast", "CastLike", "Identity", "Dropout"}
)
"""Element-wise operators that are linear unless they combine two activations."""

NONLINEAR = operators(
    "Pow Sqrt Reciprocal Exp Log Abs Sign Erf Tanh Sigmoid HardSigmoid Relu PRelu LeakyRelu"
    " ThresholdedRelu Elu Celu Selu Gelu Softplus Softsign Swish HardSwish Mish Clip Min Max"
    " Greater GreaterOrEqual Less LessOrEqual Equal And Or Not"
)
"""Element-wise operators that are not linear."""

SHAPE_OPERATORS = frozenset(
    {"Gather", "Slice", "Squeeze", "Unsqueeze", "Cast", "Identity", "Concat"}
)
"""Operators that select and concatenate lengths of shapes."""


def find_feed_forward(model: ir.Model) -> list[FeedForwardBlock]:
    """Find all feed-forward blocks of a model, in order of execution, including bodies of nodes.

    Products may have quantized weights, which are not read.

    Two products do not match if only linear operators are in between, if a value in between (or its
    number of neurons) has another reader, or if there are fewer neurons than input elements. Such
    bottlenecks are adapters or summaries. A wide pooler with its classifier matches.
    """
    analyses = Analyses.of(model)
    runs = [analyses.get(infer_shapes_small, batch=b, sequence=s) for b, s in ((2, 5), (3, 7))]
    nodes = model.graph.all_nodes()
    matches = (_match(node, runs, model.opset_imports) for node in nodes)
    # A quantized product has several outputs, before and after scale and bias: the last one stays.
    blocks = {block.product: block for block in matches if block is not None}
    return assign_names(list(blocks.values()), "feed_forward", _name)


def _match(
    last: ir.Node, runs: Sequence[ShapeInfo], opsets: Mapping[str, int]
) -> FeedForwardBlock | None:
    """Match the feed-forward block whose second product this node computes, else None."""
    second = _linear(last, runs[0])
    graph = last.graph
    if second is None or last.op_type == "FusedGemm" or not isinstance(graph, ir.Graph):
        return None
    product = second.node
    if not _is_plain(second) or product.graph is not graph:
        return None
    upper_half = _upper_half(second, graph, runs)
    if upper_half is None:
        return None
    first = upper_half.first
    between = upper_half.between
    tokens = {_unflattened(part.tokens, runs) for part in first.values()}
    if len(first) > 2 or len(tokens) != 1 or not any(map(_is_nonlinear, (*first, *between))):
        return None
    if pinned_name(product) is None and second.width < max(p.width for p in first.values()):
        return None
    inner = {*first, *between, product}
    for value in _outputs_of((*first, *between)):
        readers = [node for node, _ in value.uses() if node.op_type != "Shape"]
        if value is second.tokens and second.is_quantized:
            continue  # its readers quantize it
        if value.is_graph_output() or not inner.issuperset(readers):
            return None
    widths = _widths(dict.fromkeys(first, 1) | between, second.width, runs[0], opsets)
    if widths is None:
        return None
    order = [node for node in graph if node in inner]
    bias = None
    output = second.output
    if not second.is_quantized:
        bias, output = _bias(product, second.columns.size)
        if bias is None and len(product.inputs) > 2 and product.inputs[2] is not None:
            return None  # a Gemm that adds the residual: its output is not that of the block
    return FeedForwardBlock(
        name="",
        graph=graph,
        x=tokens.pop(),
        first=tuple(first[node] for node in order if node in first),
        hidden=second.tokens,
        second=second,
        bias=bias,
        output=output,
        nodes=tuple(node for node in order if node in between),
        constants_by_neuron=tuple(sorted(upper_half.constants, key=lambda o: order.index(o.node))),
        widths=widths,
    )


class _UpperHalf(NamedTuple):
    """The nodes that compute the operand of the second product.

    Attributes:
        first: The first products.
        between: The nodes between the products, with the number of times that the values before
            each count the neurons: 2 before a packed gate is split, else 1.
        constants: The constants with an element per neuron.
    """

    first: dict[ir.Node, Linear]
    between: dict[ir.Node, int]
    constants: list[Operand]


def _upper_half(second: Linear, graph: ir.Graph, runs: Sequence[ShapeInfo]) -> _UpperHalf | None:
    """Search upwards from the second product to the first ones; None if the path does not match."""
    first: dict[ir.Node, Linear] = {}
    between: dict[ir.Node, int] = {}
    constants_by_neuron: list[Operand] = []
    pending = [(second.tokens, 1)]
    while pending:
        value, parts = pending.pop()
        node = value.producer()
        if node is None or node.graph is not graph:
            return None
        if node in first or node in between:
            continue
        if not _same_size(value, second.tokens, runs, parts):
            return None
        if parts == 1 and _takes_half(node, second.width, runs):
            parts = between[node] = 2
            inputs = [(0, node.inputs[0])]
        elif (part := _linear(node, runs[0])) is not None:
            first[node] = part
            inputs = [] if part.is_quantized else list(enumerate(node.inputs))[2:]
        elif (count := _elementwise(node)) > 0:
            between[node] = parts
            inputs = list(enumerate(node.inputs))[:count]
        else:
            return None
        active = [source for _, source in inputs if source is not None and not is_constant(source)]
        constants = [(i, source) for i, source in inputs if is_constant(source)]
        by_neuron = _by_neuron(node, constants, second.width, parts)
        if by_neuron is None or (node in first and not _is_plain(first[node])):
            return None
        pending += [(source, parts) for source in active]
        constants_by_neuron += by_neuron
    return _UpperHalf(first, between, constants_by_neuron)


def _linear(node: ir.Node, info: ShapeInfo) -> Linear | None:
    """A product of tokens with a constant, FusedGemm included."""
    if node.outputs and (quantized := quantized_linear(node.outputs[0], info)) is not None:
        return quantized
    return linear(node, lambda value: info.shape(value) or (), allow_activation=True)


def _is_plain(part: Linear) -> bool:
    """Whether the last axis of the output counts the columns, in order."""
    return len(part.contracted) <= 1 and part.columns.shape[-1] == part.columns.size


def _elementwise(node: ir.Node) -> int:
    """Number of element-wise inputs of a node, from the first; 0 for other operators."""
    if node.domain == MICROSOFT:
        return len(node.inputs) if node.op_type in GELUS else 0
    if node.domain or node.op_type not in LINEAR | NONLINEAR | RESHAPES:
        return 0
    if node.op_type == "Dropout" and len(node.inputs) > 2 and node.inputs[2] is not None:
        training = constant_tensor(node.inputs[2])
        return 0 if training is None or training.numpy().any() else 1
    return 1 if node.op_type in RESHAPES | {"Dropout", "CastLike"} else len(node.inputs)


def _is_nonlinear(node: ir.Node) -> bool:
    """Whether a node is not linear in the activations that it reads."""
    if node.op_type == "FusedGemm":
        return node.attributes.get_string("activation", "") != ""
    if node.op_type in ("Mul", "Div", "Where"):
        counted = {"Mul": 2, "Div": 2, "Where": 1}[node.op_type]
        chosen = node.inputs[1 if node.op_type == "Div" else 0 : counted]
        return not any(map(is_constant, chosen))
    return bool(node.domain) or node.op_type in NONLINEAR


def _same_size(
    value: ir.Value, hidden: ir.Value, runs: Sequence[ShapeInfo], parts: int = 1
) -> bool:
    """Whether the last axis and the number of elements of a value are ``parts`` times hidden's."""
    shapes = [(run.shape(value), run.shape(hidden)) for run in runs]
    return all(
        a and b and a[-1] == parts * b[-1] and math.prod(a) == parts * math.prod(b)
        for a, b in shapes
    )


def _takes_half(node: ir.Node, width: int, runs: Sequence[ShapeInfo]) -> bool:
    """Whether each output is the first or last F of 2F elements, as of a packed gate.

    Args:
        width: F.
    """
    if node.domain:
        return False
    if node.op_type == "Split":
        sizes = _split_sizes(node)
        return len(node.outputs) == 2 and (sizes is None or sizes == [width, width])
    if node.op_type != "Slice":
        return False
    bounds = {slice_bounds(node, width, info) for info in runs}
    return len(bounds) == 1 and None not in bounds


def _split_sizes(node: ir.Node) -> list[int] | None:
    """The sizes of a Split by opset 13 or older ones; None for equal sizes, [] if unknown."""
    if (attribute := node.attributes.get_ints("split")) is not None:
        return list(attribute)
    sizes = node.inputs[1] if len(node.inputs) > 1 else None
    if sizes is None:
        return None
    return constant_array(sizes).reshape(-1).tolist() if is_constant(sizes) else []


def slice_bounds(node: ir.Node, width: int, info: ShapeInfo) -> tuple[int, int] | None:
    """(0, F) or (F, 2F) if a Slice takes a half of 2F elements of one axis, else None."""
    bounds = [info.constant(value) for value in node.inputs[1:]]
    if len(bounds) < 3 or any(number is None or number.size != 1 for number in bounds):
        return None
    low, high, _, *step = [number.item() for number in bounds if number is not None]
    start, end, _ = slice(low, high).indices(2 * width)
    is_half = (start, end) in ((0, width), (width, 2 * width))
    return (start, end) if is_half and step in ([], [1]) else None


def _by_neuron(
    node: ir.Node, constants: Sequence[tuple[int, ir.Value]], width: int, parts: int
) -> list[Operand] | None:
    """The constants with ``parts * width`` elements; None if one has another size except 1."""
    operands: list[Operand] = []
    for index, value in constants:
        shape = constant_shape(value)
        if math.prod(shape) == 1:
            continue
        if math.prod(shape) != parts * width or shape[-1] != parts * width:
            return None
        operands.append(Operand(node, index, len(shape) - 1))
    return operands


def _unflattened(tokens: ir.Value, runs: Sequence[ShapeInfo]) -> ir.Value:
    """The tokens before exporters merged their leading axes."""
    node = tokens.producer()
    if node is None or node.op_type not in FLATTENS or node.inputs[0] is None:
        return tokens
    before = node.inputs[0]
    return _unflattened(before, runs) if _same_size(before, tokens, runs) else tokens


def _widths(
    nodes: Mapping[ir.Node, int], width: int, info: ShapeInfo, opsets: Mapping[str, int]
) -> tuple[ir.Node, ...] | None:
    """The nodes with constants that name F; None if F is used in another way.

    Args:
        nodes: All nodes except the second product, with the number of times that the values before
            each count the neurons.
        width: F.
    """
    marks_by_shape = _shape_marks(list(nodes), info, opsets)
    if marks_by_shape is None:
        return None
    widths: list[ir.Node] = []
    for node, parts in nodes.items():
        if node.op_type == "Slice" or (node.op_type == "Split" and _split_sizes(node)):
            widths.append(node)
        if node.op_type != "Reshape" or (shape := node.inputs[1]) is None:
            continue
        if shape in marks_by_shape:
            if marks_by_shape[shape][:-1].any():
                return None
            continue
        end = last_entry(shape)
        last = constant_array(end).reshape(-1)[-1:].tolist() if is_constant(end) else []
        if last == [parts * width]:
            widths.append(node)
        elif last != [-1]:
            return None
    return tuple(widths)


def last_entry(shape: ir.Value) -> ir.Value | None:
    """The last input of a Concat that computes a shape, else the shape."""
    node = shape.producer()
    joined = not is_constant(shape) and node is not None and node.op_type == "Concat"
    return node.inputs[-1] if joined and node is not None else shape


def _shape_marks(
    nodes: Sequence[ir.Node], info: ShapeInfo, opsets: Mapping[str, int]
) -> dict[ir.Value, np.ndarray] | None:
    """Mark the positions of F in shapes computed from values of the nodes.

    Returns None if F has a use other than Reshape nodes and bounds of Slice nodes among ``nodes``.
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
            operands = [_mark(node, value, marks, info) for value in node.inputs]
            selects_by_mark = node.op_type != "Concat" and any(v in marks for v in node.inputs[1:])
            unknown = [v for v, array in zip(node.inputs, operands, strict=True) if array is None]
            if selects_by_mark or any(value is not None for value in unknown):
                return None
            mark = evaluate(node, operands, opsets)[0].astype(bool)
        elif _bounds_halves(node, nodes):
            continue
        else:
            return None
        if mark.any():
            output = node.outputs[0]
            if output.is_graph_output():
                return None
            marks[output] = mark
            pending += [user for user, _ in output.uses()]
    return marks


def _bounds_halves(node: ir.Node, nodes: Collection[ir.Node]) -> bool:
    """Whether only Slice nodes among these read the output of a node, as their bounds."""
    for value in node.outputs:
        if value.is_graph_output():
            return False
        for user, index in value.uses():
            is_bound = user.op_type == "Slice" and index in (1, 2)
            if not (is_bound if user in nodes else _bounds_halves(user, nodes)):
                return False
    return True


def _mark(
    node: ir.Node, value: ir.Value | None, marks: Mapping[ir.Value, np.ndarray], info: ShapeInfo
) -> np.ndarray | None:
    """An operand of a shape operator, with ones for F and zeros for other lengths."""
    if value is not None and value in marks:
        return marks[value].astype(np.int64)
    if node.op_type == "Concat":
        shape = info.shape(value)
        return None if shape is None else np.zeros(shape, np.int64)
    return info.constant(value)


def _bias(product: ir.Node, width: int) -> tuple[ir.Value | None, ir.Value]:
    """The bias of a product (one element per column), if any, and the value after it."""
    output = product.outputs[0]
    bias = product.inputs[2] if len(product.inputs) > 2 else None
    if bias is not None:
        is_vector = is_constant(bias) and math.prod(constant_shape(bias)) == width
        is_unscaled = product.attributes.get_float("beta", 1.0) == 1
        return (bias, output) if is_vector and is_unscaled else (None, output)
    readers = [node for node, _ in output.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add" and not output.is_graph_output():
        for value in readers[0].inputs:
            if is_constant(value) and math.prod(shape := constant_shape(value)) == width:
                return (value, readers[0].outputs[0]) if shape[-1] == width else (None, output)
    return None, output


def _name(block: FeedForwardBlock) -> str:
    """The common path of the names of both products' nodes and constants, or an empty string."""
    added = [operand.value.name for operand in block.constants_by_neuron]
    bias = None if block.bias is None else block.bias.name
    first = [block.products[0].name, block.first[0].weight.name, *added]
    return common_path([first, [block.product.name, block.second.weight.name, bias]])


def _outputs_of(nodes: Sequence[ir.Node]) -> list[ir.Value]:
    return [value for node in nodes for value in node.outputs]
