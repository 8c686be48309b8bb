"""Multiply-accumulates (MACs) of a graph, and its cost as a whole.

The count includes matrix products, convolutions, and the mixing product of collaborative heads (an
activation broadcast over heads times a constant). Other element-wise operators count 0, as in the
papers. FLOPs are 2 x MACs. Counts are exact polynomials in the graph's named axes, interpolated
from counts at a few small lengths and checked at one more.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.axes import bind_axes, named_axes, read_axes
from graph_passes.analysis.constants import is_constant
from graph_passes.analysis.contrib_shapes import RULES, SHAPE_PRESERVING, matrix_shape
from graph_passes.analysis.operator_sets import MATRIX_PRODUCTS, MICROSOFT
from graph_passes.analysis.parameters import parameter_bytes, parameters
from graph_passes.analysis.shapes import ShapeInfo, infer_shapes_at
from graph_passes.analysis.workload import Workload
from graph_passes.errors import MALFORMED_NODE

__all__ = [
    "Cost",
    "Polynomial",
    "break_even",
    "count_macs",
    "infer_at",
    "macs_at",
    "model_cost",
    "node_macs",
]

POINTS = (2, 3, 4)
"""Interpolation points of each axis: three determine a parabola. Tables of positions are longer."""

CHECK = 5
"""The length of all axes at which the polynomial is checked."""

MAX_AXES = 4
"""Maximum number of dynamic axes: the number of counts is ``len(POINTS)`` to this power."""

UNSIZED_TYPES = frozenset({ir.DataType.STRING, ir.DataType.UNDEFINED})
"""Element types without a size in bytes."""

UNCOUNTED_OPERATORS = frozenset({"If", "Loop", "Scan", "SequenceMap", "LSTM", "GRU", "RNN"})
"""Control flow and recurrent networks."""

ELEMENTWISE_CONTRIB = SHAPE_PRESERVING | {
    "EmbedLayerNormalization",
    "QLinearAdd",
    "QLinearMul",
    "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization",
}
"""Operators of ONNX Runtime that are not in the ONNX standard and count 0."""


@dataclass(frozen=True)
class Polynomial:
    """A polynomial in the lengths of named axes: sum of coefficient x product of axis^exponent.

    Attributes:
        axes: The names of the axes.
        terms: The coefficient of each term by its exponents, one for each axis.
    """

    axes: tuple[str, ...]
    terms: Mapping[tuple[int, ...], Fraction]

    def __call__(self, lengths: Mapping[str, int]) -> int:
        """The value at these lengths, by the name of the axis."""
        total = sum(
            coefficient * math.prod(lengths[a] ** e for a, e in zip(self.axes, powers, strict=True))
            for powers, coefficient in self.terms.items()
        )
        return int(total)

    def __str__(self) -> str:
        def term(powers: tuple[int, ...], coefficient: Fraction) -> str:
            raised = [(axis, e) for axis, e in zip(self.axes, powers, strict=True) if e]
            factors = [axis if e == 1 else f"{axis}^{e}" for axis, e in raised]
            return " ".join([str(coefficient), *factors])

        ordered = sorted(self.terms.items(), key=lambda item: item[0], reverse=True)
        return " + ".join(term(powers, c) for powers, c in ordered) or "0"


@dataclass(frozen=True, eq=False)
class Cost:
    """Compute and memory cost of a graph.

    Attributes:
        macs: None if the count is not a polynomial of the axes (see ``uncounted``).
        parameters: Number of elements of all weights.
        bytes: Size of all weights.
        uncounted: Nodes whose products could not be counted, with the reason.
        inputs: Inputs of the graph by name.
        node_bytes: Size in bytes of the activations that a node reads and writes, as polynomials;
            only the nodes whose polynomial no other one exceeds. Empty if unknown.
    """

    macs: Polynomial | None
    parameters: int
    bytes: int
    uncounted: tuple[str, ...]
    inputs: Mapping[str, ir.Value]
    node_bytes: tuple[Polynomial, ...] = ()

    def macs_of(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """MACs of one run with inputs of these shapes; None if unknown."""
        if self.macs is None or self.uncounted:
            return None
        lengths = self._lengths(shapes, self.macs)
        return None if lengths is None else self.macs(lengths)

    def largest_node_bytes(self, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
        """Largest size in bytes of the activations of one node in one run; None if unknown.

        The activations of a node are the values that it reads and writes; a run needs at least this
        memory. Attention that is not fused reads and writes scores [batch, heads, length, length].
        """
        if not self.node_bytes:
            return None
        lengths = self._lengths(shapes, self.node_bytes[0])
        if lengths is None:
            return None
        return max(polynomial(lengths) for polynomial in self.node_bytes)

    def _lengths(
        self, shapes: Mapping[str, tuple[int, ...]], polynomial: Polynomial
    ) -> dict[str, int] | None:
        """The length of each axis of ``polynomial``; None if inputs do not have them all."""
        lengths = read_axes(self.inputs, shapes)
        return None if lengths is None or set(polynomial.axes) - lengths.keys() else lengths


def model_cost(model: ir.Model, *, memory: bool = True) -> Cost:
    """Compute the cost of a model as a function of its axis lengths.

    Args:
        memory: Also find ``largest_node_bytes``, which takes longer.
    """
    axes = tuple(named_axes(model.graph))
    num_parameters = parameters(model)
    num_bytes = parameter_bytes(model)
    inputs = {value.name: value for value in model.graph.inputs if value.name}
    if len(axes) > MAX_AXES:
        reason = f"the graph has {len(axes)} free axes: expected at most {MAX_AXES}"
        return Cost(None, num_parameters, num_bytes, (reason,), inputs)
    points = [*itertools.product(POINTS, repeat=len(axes)), (CHECK,) * len(axes)]
    activations = [_activations(node) for node in model.graph] if memory else []
    counts: list[int] = []
    node_bytes: list[list[int]] = []
    uncounted: tuple[str, ...] = ()
    for lengths in points:
        info = infer_shapes_at(model, dict(zip(axes, lengths, strict=True)))
        count, uncounted = macs_at(info, model.graph)
        counts.append(count)
        node_bytes.append([_known_bytes(values, info) for values in activations])
    sizes = _largest(_fit(axes, byte_counts) for byte_counts in set(zip(*node_bytes, strict=True)))
    polynomial = _fit(axes, counts)
    if polynomial is None:
        uncounted = ("the count is not a polynomial of the axes",)
    return Cost(polynomial, num_parameters, num_bytes, uncounted, inputs, sizes)


def _activations(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads and writes, without constants."""
    values = {value for value in (*node.inputs, *node.outputs) if value is not None}
    return [value for value in values if not is_constant(value)]


def _known_bytes(values: Iterable[ir.Value], info: ShapeInfo) -> int:
    """The bytes of values; values of unknown shape count 0."""
    tensors = (info.known[value] for value in values if value in info.known)
    sized = [tensor for tensor in tensors if tensor.dtype not in UNSIZED_TYPES]
    return sum(math.ceil(math.prod(tensor.shape) * tensor.dtype.itemsize) for tensor in sized)


def _largest(polynomials: Iterable[Polynomial | None]) -> tuple[Polynomial, ...]:
    """The polynomials that no other one exceeds in every term."""
    largest: list[Polynomial] = []
    for polynomial in filter(None, polynomials):
        if any(_covers(other, polynomial) for other in largest):
            continue
        largest = [other for other in largest if not _covers(polynomial, other)] + [polynomial]
    return tuple(largest)


def _covers(larger: Polynomial, smaller: Polynomial) -> bool:
    """Whether no coefficient of ``smaller`` exceeds that of ``larger``."""
    return all(
        larger.terms.get(powers, 0) >= smaller.terms.get(powers, 0)
        for powers in larger.terms.keys() | smaller.terms.keys()
    )


def infer_at(model: ir.Model, workload: Workload) -> ShapeInfo:
    """The shapes of a model in a run."""
    return infer_shapes_at(model, bind_axes(model.graph, workload))


def count_macs(model: ir.Model, workload: Workload) -> int | None:
    """MACs of one run; None if something in the graph cannot be counted."""
    total, uncounted = macs_at(Analyses.of(model).get(infer_at, workload), model.graph)
    return None if uncounted else total


def macs_at(info: ShapeInfo, nodes: Iterable[ir.Node]) -> tuple[int, tuple[str, ...]]:
    """MACs of nodes at given lengths, and the nodes that could not be counted."""
    total = 0
    uncounted: list[str] = []
    for node in nodes:
        macs = node_macs(node, info)
        if macs is None:
            uncounted.append(f"{node.op_type} {node.name!r}: {_explain(node, info)}")
        else:
            total += macs
    return total, tuple(uncounted)


def _explain(node: ir.Node, info: ShapeInfo) -> str:
    """The reason why a node is not counted, for example an unknown shape."""
    values = [value for value in (*node.inputs, *node.outputs) if value is not None]
    lacking = next((value for value in values if value not in info.known), None)
    return "the operator is not supported" if lacking is None else info.explain(lacking)


def node_macs(node: ir.Node, info: ShapeInfo) -> int | None:
    """MACs of one node; 0 for element-wise operators, None if unknown."""
    if node.op_type in UNCOUNTED_OPERATORS:
        return None
    if node.domain not in ("", "ai.onnx", "ai.onnx.ml"):
        if node.op_type in ELEMENTWISE_CONTRIB:
            return 0
        count = CONTRIB_COUNTS.get(node.op_type)
        if count is None:
            return None
    elif (count := COUNTS.get(node.op_type)) is None:
        return 0
    try:
        return count(node, info)
    except (_UnknownShape, *MALFORMED_NODE):
        return None


def break_even(before: Polynomial, after: Polynomial, limit: int = 1 << 20) -> int | None:
    """The smallest sequence length at which ``after`` has more MACs than ``before``.

    An axis with exponent 1 in all terms is a batch axis and is set to 1. Returns None if ``after``
    costs no more up to ``limit``, or if the polynomials have different axes.
    """
    if before.axes != after.axes or not before.axes:
        return None
    powers = [*before.terms, *after.terms]
    batches = {a for i, a in enumerate(before.axes) if all(power[i] == 1 for power in powers)}

    def costs_more(length: int) -> bool:
        lengths = {axis: 1 if axis in batches else length for axis in before.axes}
        return after(lengths) > before(lengths)

    if costs_more(1):
        return 1
    if not costs_more(limit):
        return None
    # There is one crossing: savings are linear in the length, costs quadratic.
    return bisect_left(range(limit), True, lo=1, key=costs_more)


class _UnknownShape(Exception):
    """A shape is unknown, so the products of a node cannot be counted."""


def _shape(value: ir.Value | None, info: ShapeInfo) -> tuple[int, ...]:
    """The shape of a value.

    Raises:
        _UnknownShape: The shape is unknown.
    """
    shape = info.shape(value)
    if shape is None:
        raise _UnknownShape
    return shape


def _matmul(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of a matrix product: the elements of the output times the length of the sum."""
    a = matrix_shape(_shape(node.inputs[0], info), node, "A")
    return math.prod(_shape(node.outputs[0], info)) * a[-1]


def _einsum(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of an Einsum: the product of the lengths of all letters, for each factor but one."""
    terms = node.attributes.get_string("equation", "").replace(" ", "").split("->")[0].split(",")
    shapes = [_shape(value, info) for value in node.inputs]
    if len(terms) < 2:
        return 0
    if any("." in term for term in terms):
        raise _UnknownShape
    lengths = {
        letter: length
        for term, shape in zip(terms, shapes, strict=True)
        for letter, length in zip(term, shape, strict=True)
    }
    return math.prod(lengths.values()) * (len(terms) - 1)


def _conv(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of a convolution: the elements of the output times those of a filter."""
    weight = _shape(node.inputs[3 if node.op_type == "QLinearConv" else 1], info)
    return math.prod(_shape(node.outputs[0], info)) * math.prod(weight[1:])


def _conv_transpose(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of a transposed convolution: the elements of the input times those of a filter."""
    weight = _shape(node.inputs[1], info)
    return math.prod(_shape(node.inputs[0], info)) * math.prod(weight[1:])


def _attention(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of scores and context of ai.onnx Attention."""
    q, k, v = (_shape(value, info) for value in node.inputs[:3])
    heads = node.attributes.get_int("q_num_heads", 0) or q[1]
    kv_heads = node.attributes.get_int("kv_num_heads", 0) or k[1]
    head_size = q[-1] // heads if len(q) == 3 else q[-1]
    value_size = v[-1] // kv_heads if len(v) == 3 else v[-1]
    past = node.inputs[4] if len(node.inputs) > 4 else None
    keys = k[-2] + (0 if past is None else _shape(past, info)[2])
    return q[0] * heads * q[-2] * keys * (head_size + value_size)


def _contributed_attention(node: ir.Node, info: ShapeInfo) -> int:
    """MACs of scores and context, and of the packed projection of com.microsoft Attention."""
    out = _shape(node.outputs[0], info)
    shapes = [None if value is None else _shape(value, info) for value in node.inputs]
    present = RULES[MICROSOFT, node.op_type](shapes, node)[1]
    assert present is not None
    keys = present[-2]
    width = node.attributes.get_int("num_heads", 0) * present[-1]
    macs = out[0] * out[1] * keys * (width + out[2])
    if node.op_type == "Attention":
        macs += math.prod(out[:2]) * math.prod(_shape(node.inputs[1], info))
    return macs


def _mixing(node: ir.Node, info: ShapeInfo) -> int:
    """Elements of x * M if a constant M broadcasts x over heads, else 0.

    Dense mixing adds an axis before a product; sparse mixing gathers from fewer elements.
    """
    out = math.prod(_shape(node.outputs[0], info))
    for activation, mixing in (node.inputs, tuple(reversed(node.inputs))):
        if activation is None or not is_constant(mixing) or is_constant(activation):
            continue
        spread = activation
        gather = activation.producer()
        if gather is not None and gather.op_type == "Gather" and is_constant(gather.inputs[1]):
            spread = gather.inputs[0]
        elif not any(reader.op_type == "MatMul" for reader, _ in node.outputs[0].uses()):
            return 0
        spreads = math.prod(_shape(spread, info)) < out
        return out if spreads and math.prod(_shape(mixing, info)) > 1 else 0
    return 0


COUNTS: dict[str, Callable[[ir.Node, ShapeInfo], int]] = {
    **dict.fromkeys(("Gemm", "MatMul", "MatMulInteger", "QLinearMatMul"), _matmul),
    **dict.fromkeys(("Conv", "ConvInteger", "DeformConv", "QLinearConv"), _conv),
    "Attention": _attention,
    "ConvTranspose": _conv_transpose,
    "Einsum": _einsum,
    "Mul": _mixing,
}
"""Functions that count the MACs of operators of the ONNX standard; other operators count 0."""

CONTRIB_COUNTS: dict[str, Callable[[ir.Node, ShapeInfo], int]] = {
    **dict.fromkeys((*MATRIX_PRODUCTS, "MatMulBnb4", "MatMulNBits", "QGemm"), _matmul),
    "Attention": _contributed_attention,
    "GroupQueryAttention": _contributed_attention,
    "MultiHeadAttention": _contributed_attention,
}
"""Functions that count the MACs of operators of ONNX Runtime; MACs of others are unknown."""


def _fit(axes: tuple[str, ...], counts: Sequence[int]) -> Polynomial | None:
    """The polynomial through these counts; None if the last one, a check, does not lie on it.

    Args:
        counts: MACs on the grid of ``POINTS`` (``itertools.product``), then at ``CHECK``.
    """
    polynomial = Polynomial(axes, _interpolate(counts[:-1], len(axes)))
    return polynomial if polynomial(dict.fromkeys(axes, CHECK)) == counts[-1] else None


def _interpolate(counts: Sequence[int], axes: int) -> dict[tuple[int, ...], Fraction]:
    """Coefficients by powers from counts on the grid of ``POINTS``, one axis after the other."""
    values = np.array(counts, dtype=object).reshape((len(POINTS),) * axes)  # exact integers
    for axis in range(axes):
        values = np.moveaxis(np.tensordot(DOUBLING_MATRIX, values, axes=(1, axis)), 0, axis)
    return {
        powers: Fraction(coefficient, 2**axes)
        for powers, coefficient in np.ndenumerate(values)
        if coefficient
    }


def _lagrange(point: int) -> list[int]:
    """The coefficients of twice the Lagrange basis polynomial of a point of ``POINTS``.

    The constant comes first. All are integers, because the points are consecutive integers.
    """
    a, b = (other for other in POINTS if other != point)
    scale = 2 // ((point - a) * (point - b))
    return [a * b * scale, -(a + b) * scale, scale]


DOUBLING_MATRIX = np.array([_lagrange(point) for point in POINTS], dtype=object).T
"""Twice the matrix from values at ``POINTS`` to coefficients."""
