"""Match the layout between a projection and the scores by executing it on labels.

Exporters write reshapes, transposes, splits and scalings in many orders. Instead of one pattern per
order, each column and token of the projection gets a number, and the layout nodes are executed on
these numbers. Their positions in the result determine the layout. A result that is not a
permutation by head does not match.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.analysis.constants import constant_array, is_constant
from graph_passes.analysis.evaluation import MAX_ELEMENTS, evaluate
from graph_passes.analysis.operator_sets import (
    COPIES,
    LAYOUT,
    REWRITE_FIRST,
    is_quantized,
)
from graph_passes.analysis.shapes import ShapeInfo
from graph_passes.blocks import Linear
from graph_passes.matching import reaches
from graph_passes.matching.element_map import (
    ElementMap,
    LinearTrace,
    MatchFailure,
    PositionFactor,
    UnsupportedNode,
    add_traces,
    concat_traces,
    describe,
    known_shape,
)
from graph_passes.matching.norms import NORMS, apply_norm
from graph_passes.matching.products import linear
from graph_passes.matching.quantized import quantized_linear
from graph_passes.matching.rotary import apply_position_factor, apply_rotary_operator

__all__ = ["LayoutReader"]

ELEMENTWISE = frozenset({"Add", "Sub", "Mul", "Div", "Max", "Where"})
PRODUCTS = frozenset({"MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "Einsum"})
ENDLESS_BOUND = 1 << 30
"""Slice ends of at least this value mean the end of the axis (exporters write INT64_MAX etc.)."""


@dataclass(frozen=True, eq=False)
class LayoutReader:
    """Traces values to their projections at given axis lengths.

    Attributes:
        info: Shapes and small constants (see ``infer_shapes_at``).
        opsets: The opset imports of the model.
    """

    info: ShapeInfo
    opsets: dict[str, int]

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        """The shape of a value.

        Raises:
            MatchFailure: The shape is unknown, or the value has too many elements.
        """
        shape = known_shape(value, self.info)
        if math.prod(shape) > MAX_ELEMENTS:
            raise MatchFailure(
                f"{value.name!r} has shape {shape}: more than {MAX_ELEMENTS} elements"
            )
        return shape

    def trace(self, value: ir.Value, role: str, reach: int = reaches.PROJECTION) -> LinearTrace:
        """Trace ``value`` to the product with a constant from which it is computed.

        Raises:
            MatchFailure: A node is not supported, or the value depends on several products.
        """
        node = value.producer()
        if node is None and not is_constant(value) and role in ("key", "value", "content"):
            return self.trace_past(value, role)
        if node is None or is_constant(value):
            what = "a constant" if is_constant(value) else "an input of the graph"
            raise MatchFailure(
                f"the {role} is {value.name!r}, {what}: not the output of a projection"
            )
        if (product := quantized_linear(value, self.info)) is not None:
            nodes = dict.fromkeys((product.node, node))
            return replace(self._product_trace(product, self.shape(value)), nodes=tuple(nodes))
        if node.op_type in PRODUCTS and any(map(is_constant, node.inputs[:2])):
            return self._source(node, role)
        if reach == 0:
            raise MatchFailure(f"{describe(node)} is too far from any projection of the {role}")
        if (branch := self.info.branch(node)) is not None:  # Squeeze of TorchScript
            inner = self.trace(branch.outputs[value.index() or 0], role, reach - 1)
            outer_nodes = tuple(node for node in inner.nodes if node.graph is not branch)
            return replace(inner, nodes=outer_nodes)
        first = node.inputs[0] if node.inputs else None
        if node.op_type in LAYOUT and first is not None:
            inner = self.trace(first, role, reach - 1)
            order = np.arange(math.prod(inner.shape)).reshape(inner.shape)
            index = self.apply_layout(node, order, value.index() or 0)
            return inner.map_terms(lambda term: term.take(index)).append_node(node)
        for norm in NORMS:
            if (match := norm(node, self.info)) is not None:
                inner = self.trace(match.value, role, reach - 1)
                return apply_norm(node, inner, match, role)
        if node.op_type == "RotaryEmbedding" and first is not None:
            return apply_rotary_operator(node, self.trace(first, role, reach - 1), self.info, role)
        if not node.domain and first is not None and None not in node.inputs[:2]:
            match node.op_type:
                case "Add" | "Sub" | "Mul" | "Div":
                    return self._arithmetic(node, role, reach - 1)
                case "Neg":
                    inner = self.trace(first, role, reach - 1)
                    return inner.scaled_by(-1.0).append_node(node)
                case "Concat":
                    pieces = [self.trace(value, role, reach - 1) for value in node.inputs if value]
                    return concat_traces(node, pieces, node.attributes.get_int("axis", -1), role)
                case _:
                    pass
        raise _unsupported(node, role)

    def trace_past(self, value: ir.Value, role: str, part: int | None = None) -> LinearTrace:
        """Trace cached heads, an input (B, H, P, K) of the graph or one part of (2, B, H, P, K)."""
        shape = self.shape(value)
        factor_index = np.arange(math.prod(shape)).reshape(shape)
        if part is not None and len(shape) == 5:
            factor_index = factor_index[part]
            shape = shape[1:]
        if len(shape) < 4:
            raise MatchFailure(
                f"the {role} is {value.name!r}, an input of the graph with shape {shape}: "
                "not the output of a projection, and a cache has four axes"
            )
        zeros = np.zeros(shape, np.int64)
        term = ElementMap(zeros, zeros, np.zeros(shape), np.ones(shape), factor_index)
        return LinearTrace(None, 1.0, {PositionFactor(value, past=True): term}, ())

    def _source(self, node: ir.Node, role: str) -> LinearTrace:
        """Start a trace at a product: label its columns and tokens."""
        product = linear(node, self.shape)
        if product is None:
            raise MatchFailure(
                f"the {role} is computed by {describe(node)}, not from tokens and a matrix"
            )
        trace = self._product_trace(product, self.shape(node.outputs[0]))
        if node.op_type != "Gemm" or len(node.inputs) < 3 or node.inputs[2] is None:
            return trace
        bias = self.info.elements(node.inputs[2])
        if bias is None:
            raise MatchFailure(f"the bias of {describe(node)} is not constant")
        return trace.add_offset(bias * node.attributes.get_float("beta", 1.0))

    def trace_product(self, node: ir.Node, tokens: ir.Value, weight: ir.Value) -> LinearTrace:
        """Start a trace at the product (B, S, D) @ (D, N) inside a fused operator."""
        sizes = self.shape(tokens)
        columns = self.shape(weight)
        if len(sizes) != 3 or len(columns) != 2 or sizes[-1] != columns[0]:
            raise MatchFailure(f"{describe(node)} projects {sizes} by {columns}")
        product = Linear(
            node=node,
            tokens=tokens,
            weight=weight,
            contracted=(0,),
            width=sizes[-1],
            columns=np.arange(columns[1]),
            rows=np.arange(sizes[0] * sizes[1]).reshape(*sizes[:2], 1),
            scale=1.0,
        )
        return self._product_trace(product, (*sizes[:2], columns[1]))

    def _product_trace(self, product: Linear, shape: tuple[int, ...]) -> LinearTrace:
        """The trace of a product itself: each element has its own column and token."""
        if product.scale == 0.0:
            raise MatchFailure(f"{describe(product.node)} multiplies by zero")
        gain = np.array(1.0)
        offset = np.array(0.0)
        term = ElementMap(product.columns, product.rows, gain, offset, np.array(0))
        numbered = term.broadcast_to(shape)
        return LinearTrace(product, product.scale, {None: numbered}, (product.node,))

    def _arithmetic(self, node: ir.Node, role: str, reach: int) -> LinearTrace:
        """Trace Add, Sub, Mul or Div with a constant, a position factor or another trace."""
        a, b = node.inputs
        assert a is not None and b is not None
        for value, operand, is_left in ((a, b, True), (b, a, False)):
            constant = self._constant_operand(operand)
            if constant is not None and (is_left or node.op_type != "Div"):
                inner = self.trace(value, role, reach)
                if node.op_type == "Mul" and inner.has_no_factor and _by_token(inner, constant):
                    return apply_position_factor(node, inner, operand, self.info, role)
                return self._with_constant(node, inner, constant.astype(np.float64), is_left, role)
        if node.op_type == "Div":
            raise _unsupported(node, role)
        failures: list[MatchFailure] = []
        traces = [self._attempt(value, role, reach, failures) for value in (a, b)]
        if node.op_type == "Mul":
            for inner, factor in zip(traces, (b, a), strict=True):
                if inner is not None and None in traces and inner.has_no_factor:
                    return apply_position_factor(node, inner, factor, self.info, role)
        elif None not in traces:
            return add_traces(node, [t for t in traces if t is not None], role)
        # An operator before this one may be the problem, as in both terms of a rotation.
        raise next(filter(_is_of_tokens, failures), _unsupported(node, role))

    def _attempt(
        self, value: ir.Value, role: str, reach: int, failures: list[MatchFailure]
    ) -> LinearTrace | None:
        """The trace of a projection; None if it fails, with the failure appended to the list."""
        try:
            trace = self.trace(value, role, reach)
        except MatchFailure as failure:
            failures.append(failure)
            return None
        return None if trace.source is None else trace

    def number_elements(self, value: ir.Value, reach: int = reaches.FLATTENING) -> np.ndarray:
        """Label the elements of a value; equal labels mean elements with the same inputs."""
        shape = self.shape(value)
        node = value.producer()
        constant = self.info.constant(value)
        if constant is not None:
            return np.unique(constant, return_inverse=True)[1].reshape(shape)
        if node is not None and node.op_type in LAYOUT and node.inputs[0] is not None and reach:
            try:
                return self.apply_layout(node, self.number_elements(node.inputs[0], reach - 1), 0)
            except MatchFailure:  # a layout that depends on data
                pass
        if node is not None and node.op_type in ELEMENTWISE and reach:
            together = np.zeros((), np.int64)
            for operand in node.inputs:
                if operand is not None:
                    numbers = self.number_elements(operand, reach - 1)
                    together = together * (int(numbers.max(initial=0)) + 1) + numbers
            return np.broadcast_to(together, shape)
        return np.arange(math.prod(shape)).reshape(shape)

    def _constant_operand(self, value: ir.Value) -> np.ndarray | None:
        """The elements of a weight, or of a small value that is computed from weights.

        Other arrays that are known at these lengths are tokens (zeros in DETR) or positions.
        """
        if is_constant(value):
            return constant_array(value)
        elements = self.info.constant(value)
        if elements is None or elements.size == 1 or _is_of_weights(value):
            return elements
        return None

    def _with_constant(
        self, node: ir.Node, inner: LinearTrace, constant: np.ndarray, is_left: bool, role: str
    ) -> LinearTrace:
        """Trace Add, Sub, Mul or Div of a trace with a constant.

        Args:
            is_left: Whether the trace is the first operand.
        """
        try:
            shape = np.broadcast_shapes(inner.shape, constant.shape)
        except ValueError as error:
            raise MatchFailure(f"{describe(node)} does not fit the {role}: {error}") from error
        inner = inner.map_terms(lambda term: term.broadcast_to(shape))
        if node.op_type in ("Mul", "Div"):
            with np.errstate(divide="ignore"):
                factor = constant if node.op_type == "Mul" else 1.0 / constant
            if not np.isfinite(factor).all() or not factor.any():
                raise MatchFailure(f"{describe(node)} multiplies the {role} by zero or infinity")
            if constant.size == 1:
                return inner.append_node(node, factor.item())
            return inner.scaled_by(factor).append_node(node)
        if node.op_type == "Sub" and not is_left:
            raise MatchFailure(f"{describe(node)} subtracts the {role} from a constant")
        if not inner.has_no_factor:
            holds_cache = any(factor is not None and factor.past for factor in inner.terms)
            what = "holds a cache" if holds_cache else "is rotated already"
            raise MatchFailure(f"{describe(node)} adds to a {role} that {what}")
        return inner.add_offset(constant if node.op_type == "Add" else -constant).append_node(node)

    def apply_layout(self, node: ir.Node, array: np.ndarray, index: int) -> np.ndarray:
        """Execute a layout node on an array of labels; return the output of the given index."""
        if index and node.op_type != "Split":
            raise MatchFailure(
                f"output {index} of {describe(node)} is not a layout of its first input"
            )
        if node.op_type in COPIES:
            return array
        inputs: list[np.ndarray | None] = [array]
        for other in node.inputs[1:]:
            constant = self.info.elements(other)
            if other is not None and constant is None:
                raise MatchFailure(f"{describe(node)} has a layout that depends on data")
            inputs.append(constant)
        if node.op_type == "Slice" and _is_window(inputs):
            raise MatchFailure(f"{describe(node)} keeps a fixed number of elements at every length")
        try:
            return evaluate(node, inputs, self.opsets)[index]
        except Exception as error:  # numpy raises various errors for incompatible shapes
            raise MatchFailure(f"{describe(node)} could not be evaluated: {error}") from error


def _is_of_tokens(failure: MatchFailure) -> bool:
    """Whether tracing failed at a node other than Cos and Sin, which compute position angles."""
    return isinstance(failure, UnsupportedNode) and failure.node.op_type not in ("Cos", "Sin")


def _is_of_weights(value: ir.Value) -> bool:
    """Whether a value is computed from constants alone, without the shape of an input."""
    pending = [value]
    seen = {value}
    while pending:
        reached = pending.pop()
        node = reached.producer()
        if is_constant(reached):
            continue
        if node is None or node.op_type in ("Shape", "Size") or len(seen) > 4 * reaches.PROJECTION:
            return False
        operands = [
            operand for operand in node.inputs if operand is not None and operand not in seen
        ]
        pending += operands
        seen.update(operands)
    return True


def _unsupported(node: ir.Node, role: str) -> UnsupportedNode:
    return UnsupportedNode(node, role, REWRITE_FIRST if is_quantized(node) else "")


def _is_window(inputs: Sequence[np.ndarray | None]) -> bool:
    """Whether a Slice keeps a fixed number of elements, so that longer axes would be cut."""
    data, starts, ends, axes, steps = [*inputs, None, None][:5]
    if data is None or starts is None or ends is None or (steps is not None and steps.min() < 0):
        return False
    axes = np.arange(ends.size) if axes is None else axes
    bounds = [
        (int(b), int(a)) for limits in (starts, ends) for b, a in zip(limits, axes, strict=True)
    ]
    return any(data.shape[axis] < abs(bound) < ENDLESS_BOUND for bound, axis in bounds)


def _by_token(inner: LinearTrace, constant: np.ndarray) -> bool:
    """Whether a constant factor depends on the position, as folded rotary angles do."""
    shape = inner.shape
    if constant.size == 1 or constant.ndim > len(shape):
        return False
    tokens = inner.terms[None].tokens
    factor = constant.reshape((1,) * (len(shape) - constant.ndim) + constant.shape)
    return any(
        size > 1 and _varies(factor, axis) and _varies(tokens, axis)
        for axis, size in enumerate(factor.shape)
    )


def _varies(array: np.ndarray, axis: int) -> bool:
    return bool((array != array.take([0], axis)).any())
