"""Read a layout by running it on labels.

Between a projection and the scores stand reshapes, transposes, splits and scalings, in as many
orders as there are exporters. Instead of recognising orders, each column and each token of the
projection gets a number, the numbers are sent through the nodes themselves, and where they arrive
is the reading. What arrives out of place is a miss, so a reading is never a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graph_passes.attention import OutputProjection, Projection, constant_array, is_constant
from graph_passes.shapes import Facts, evaluate

__all__ = ["Reader", "Unread", "only_consumer", "say"]

LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split",
                    "Gather", "Expand", "Identity", "Cast", "Dropout"})  # fmt: skip
ARITHMETIC = frozenset({"Mul", "Div", "Add", "Sub"})
LINEAR = frozenset({"MatMul", "Gemm"})


class Unread(Exception):
    """Why a value could not be read: becomes the reason of a ``Miss``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Labels:
    """Which column and which token each element is, times and plus what: arrays of one shape."""

    columns: np.ndarray
    tokens: np.ndarray
    gain: np.ndarray
    offset: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.columns, self.tokens, self.gain, self.offset

    def at(self, index: np.ndarray) -> Labels:
        """The elements at these flat positions, laid out like them."""
        return Labels(*(array.reshape(-1)[index] for array in self.arrays()))


@dataclass(frozen=True, eq=False)
class Reader:
    """Reads projections at one choice of axis lengths.

    Args:
        facts: Shapes and small constants (see ``shapes.interpret``).
        opsets: The model's opset imports.
    """

    facts: Facts
    opsets: dict[str, int]

    def shape(self, value: ir.Value) -> tuple[int, ...]:
        shape = self.facts.shape(value)
        if shape is None:
            raise Unread(f"the shape of {value.name!r} could not be inferred")
        return shape

    def projection(
        self, operand: ir.Value, role: str, *, tokens_last: bool = False, heads: int = 0
    ) -> Projection:
        """Read ``operand``, (B, H, T, K) or (B*H, T, K), back to the product with its weight.

        Args:
            operand: What the scores or the context read.
            role: "query", "key", "value" or "content", for the reason of a miss.
            tokens_last: The operand ends in (K, T), as keys do before a plain MatMul.
            heads: Split the last axis of a three-dimensional (B, T, H*K) operand (fused operators).

        Raises:
            Unread: Something other than layout stands in between.
        """
        source, path = self._walk_back(operand, role)
        weight, transposed = _weight_of(source)
        labels = self._start(source)
        scale = 1.0
        if source.op_type == "Gemm":
            scale, labels = self._gemm(source, labels)
        value = source.outputs[0]
        for node, index in path:
            if node.op_type in LAYOUT:
                order = np.arange(labels.columns.size).reshape(labels.columns.shape)
                labels = labels.at(self._moved(node, order, index))
            else:
                scale, labels = self._arithmetic(node, value, labels, scale, role)
            value = node.outputs[index]
        tokens = math.prod(self.shape(source.outputs[0])[:-1])
        columns, gain, offset = _by_head(
            labels, tokens, tokens_last=tokens_last, heads=heads, role=role
        )
        length = labels.columns.shape[-1 if tokens_last else -2]
        source_input = self._unflattened(source)
        return Projection(
            input=source_input,
            weight=weight,
            transposed=transposed,
            columns=columns,
            gain=gain,
            offset=offset,
            scale=scale,
            output=operand,
            nodes=(source, *(node for node, _ in path)),
            by_sequence=self.shape(source_input)[:-1] == (tokens // length, length),
            layout="B T H*K" if heads else "B*H T K" if labels.columns.ndim == 3 else "B H T K",
        )

    def output_projection(
        self, context: ir.Value, num_heads: int, v_head_size: int, batch: int
    ) -> OutputProjection | None:
        """Follow the context forward to the product with W_O; None when it goes elsewhere."""
        shape = self.shape(context)
        size = math.prod(shape)
        length = size // (batch * num_heads * v_head_size)
        if size != batch * num_heads * length * v_head_size:
            raise Unread(f"the context has shape {shape}, which does not hold {num_heads} heads")
        grid = np.arange(size).reshape(batch, num_heads, length, v_head_size)
        if shape == (batch, length, num_heads * v_head_size):
            grid = grid.transpose(0, 2, 1, 3)  # a fused operator has merged the heads already
        labels = grid.reshape(shape)
        value, path = context, list[ir.Node]()
        while (node := only_consumer(value)) is not None and node.op_type in LAYOUT:
            if node.inputs[0] is not value or (len(node.outputs) > 1 and node.op_type != "Dropout"):
                return None
            try:
                labels = self._moved(node, labels, 0)
            except Unread:  # laid out for something else than a product
                return None
            value = node.outputs[0]
            path.append(node)
        if node is None or node.op_type not in LINEAR or node.inputs[0] is not value:
            return None
        if not self._is_matrix(node.inputs[1]) or labels.size != size:
            return None
        weight, transposed = _weight_of(node)
        wanted = labels.reshape(-1, labels.shape[-1])
        if wanted.shape[0] != batch * length:
            return None
        # Label l is element (b, h, s, v): every token must see its own elements in the same order.
        b, h, s, v = np.unravel_index(wanted, (batch, num_heads, length, v_head_size))
        tokens = np.arange(batch * length)[:, None]
        order = (h * v_head_size + v)[0]
        if not ((b * length + s == tokens).all() and (h * v_head_size + v == order).all()):
            return None
        if np.unique(order).size != num_heads * v_head_size:
            return None
        rows = np.argsort(order).reshape(num_heads, v_head_size)
        product = node
        output, bias = product.outputs[0], None
        if product.op_type == "Gemm":
            if _gemm_factors(product) != (1.0, 1.0) or product.attributes.get_int("transA", 0):
                return None
            bias = product.inputs[2] if len(product.inputs) > 2 else None
            if bias is not None and not (
                is_constant(bias) and math.prod(self.shape(bias)[:-1]) == 1
            ):
                return None
        elif (add := only_consumer(output)) is not None and add.op_type == "Add":
            other = add.inputs[1] if add.inputs[0] is output else add.inputs[0]
            if is_constant(other) and len(self.shape(other)) <= 1:
                bias, output = other, add.outputs[0]
                path.append(add)
        return OutputProjection(value, weight, transposed, rows, bias, output, (*path, product))

    def batch(self, projection: Projection, *, tokens_last: bool = False) -> int:
        """How many sequences the projection lays out."""
        tokens = math.prod(self.shape(projection.nodes[0].outputs[0])[:-1])
        return tokens // self.shape(projection.output)[-1 if tokens_last else -2]

    def _walk_back(self, operand: ir.Value, role: str) -> tuple[ir.Node, list[tuple[ir.Node, int]]]:
        """The linear product that makes ``operand``, and the (node, output) pairs in between."""
        path: list[tuple[ir.Node, int]] = []
        value = operand
        while True:
            node = value.producer()
            if node is None or is_constant(value):
                what = "a constant" if is_constant(value) else "an input of the graph"
                raise Unread(f"the {role} is {value.name!r}, {what}: no projection makes it")
            if node.op_type in LINEAR and len(node.inputs) > 1 and is_constant(node.inputs[1]):
                if not self._is_matrix(node.inputs[1]) or is_constant(node.inputs[0]):
                    raise Unread(f"the {role} is made by {say(node)}, not by tokens and a matrix")
                return node, path[::-1]
            data = self._data_input(node)
            if data is None:
                raise Unread(f"{say(node)} stands between the {role} projection and the product")
            path.append((node, value.index() or 0))
            value = data

    def _is_matrix(self, value: ir.Value | None) -> bool:
        return is_constant(value) and len(self.shape(value)) == 2

    def _unflattened(self, source: ir.Node) -> ir.Value:
        """The tokens as (B, S, D), where a product reads them as (B*S, D) through a Reshape."""
        tokens = source.inputs[0]
        assert tokens is not None
        node = tokens.producer()
        if node is None or node.op_type not in ("Reshape", "Flatten"):
            return tokens
        whole = node.inputs[0]
        shape = self.facts.shape(whole)
        if whole is None or shape is None or len(shape) != 3:
            return tokens
        return whole if self.shape(tokens) == (shape[0] * shape[1], shape[2]) else tokens

    def _data_input(self, node: ir.Node) -> ir.Value | None:
        """The one input of a layout or scaling node that carries the tokens."""
        if node.op_type in LAYOUT:
            return node.inputs[0]
        if node.op_type in ARITHMETIC:
            a, b = node.inputs
            if self._elements(b) is not None:
                return a
            if self._elements(a) is not None and node.op_type != "Div":
                return b
        return None

    def _elements(self, value: ir.Value | None) -> np.ndarray | None:
        if value is None:
            return None
        constant = self.facts.constant(value)
        if constant is not None:
            return constant
        return constant_array(value) if is_constant(value) else None

    def _start(self, source: ir.Node) -> Labels:
        """Number the columns and the tokens of a product."""
        shape = self.shape(source.outputs[0])
        columns = np.broadcast_to(np.arange(shape[-1]), shape)
        tokens = np.arange(int(np.prod(shape[:-1]))).reshape(*shape[:-1], 1)
        return Labels(columns, np.broadcast_to(tokens, shape), np.ones(shape), np.zeros(shape))

    def _gemm(self, source: ir.Node, labels: Labels) -> tuple[float, Labels]:
        alpha, beta = _gemm_factors(source)
        if source.attributes.get_int("transA", 0) or alpha == 0.0:
            raise Unread(f"{say(source)} transposes its tokens")
        given = source.inputs[2] if len(source.inputs) > 2 else None
        bias = np.zeros(1) if given is None else self._elements(given)
        if bias is None:
            raise Unread(f"the bias of {say(source)} is not constant")
        offset = labels.offset + bias * beta / alpha
        return alpha, Labels(labels.columns, labels.tokens, labels.gain, offset)

    def _arithmetic(
        self, node: ir.Node, value: ir.Value, labels: Labels, scale: float, role: str
    ) -> tuple[float, Labels]:
        """The scale and the labels after a constant is multiplied or added."""
        left = node.inputs[0] is value
        other = self._elements(node.inputs[1] if left else node.inputs[0])
        assert other is not None
        constant = other.astype(np.float64)
        try:
            shape = np.broadcast_shapes(labels.columns.shape, constant.shape)
        except ValueError as error:
            raise Unread(f"{say(node)} does not fit the {role}: {error}") from error
        columns, tokens, gain, offset = (np.broadcast_to(array, shape) for array in labels.arrays())
        if node.op_type in ("Mul", "Div"):
            with np.errstate(divide="ignore"):
                factor = constant if node.op_type == "Mul" else 1.0 / constant
            if not np.isfinite(factor).all() or not factor.any():
                raise Unread(f"{say(node)} multiplies the {role} by zero or infinity")
            if constant.size == 1:
                return scale * factor.item(), Labels(columns, tokens, gain, offset)
            return scale, Labels(columns, tokens, gain * factor, offset * factor)
        if node.op_type == "Sub" and not left:
            raise Unread(f"{say(node)} subtracts the {role} from a constant")
        sign = 1.0 if node.op_type == "Add" else -1.0
        return scale, Labels(columns, tokens, gain, offset + sign * constant / scale)

    def _moved(self, node: ir.Node, array: np.ndarray, index: int) -> np.ndarray:
        """An output of one layout node when its tokens are this array of labels."""
        if index and node.op_type != "Split":
            raise Unread(f"{say(node)} hands on its output {index}, not its tokens")
        if node.op_type in ("Identity", "Cast", "Dropout"):
            return array
        inputs: list[np.ndarray | None] = [array]
        for other in node.inputs[1:]:
            constant = None if other is None else self._elements(other)
            if other is not None and constant is None:
                raise Unread(f"{say(node)} lays tokens out by a value that depends on data")
            inputs.append(constant)
        try:
            return evaluate(node, inputs, self.opsets)[index]
        except Exception as error:  # whatever numpy says of shapes that do not fit
            raise Unread(f"{say(node)} could not be followed: {error}") from error


def only_consumer(value: ir.Value) -> ir.Node | None:
    """The one node that reads the elements of a value nobody else sees."""
    if value.is_graph_output():
        return None
    consumers = {node for node, _ in value.uses() if node.op_type != "Shape"}
    return consumers.pop() if len(consumers) == 1 else None


def say(node: ir.Node) -> str:
    """A node as a reason names it."""
    return f"{node.op_type} {node.name!r}" if node.name else node.op_type


def _weight_of(node: ir.Node) -> tuple[ir.Value, bool]:
    weight = node.inputs[1]
    assert weight is not None
    return weight, node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))


def _gemm_factors(node: ir.Node) -> tuple[float, float]:
    return node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)


def _by_head(
    labels: Labels,
    total: int,
    *,
    tokens_last: bool,
    heads: int,
    role: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Columns, gain and offset as (H, K) arrays, once every token is where it should be."""
    arrays = list(labels.arrays())
    if arrays[0].ndim < 2:
        raise Unread(f"the {role} is a single row")
    if tokens_last:
        arrays = [np.swapaxes(array, -1, -2) for array in arrays]
    length = arrays[0].shape[-2]
    if length == 0 or total % length:
        raise Unread(f"the {role} holds {total} tokens, which are no whole sequences of {length}")
    batch = total // length
    if heads:
        if arrays[0].size % (total * heads):
            raise Unread(f"the {role} has {arrays[0].shape[-1]} columns, not {heads} heads")
        arrays = [np.moveaxis(array.reshape(batch, length, heads, -1), 2, 1) for array in arrays]
    size = arrays[0].shape[-1]
    try:
        columns, tokens, gain, offset = (
            array.reshape(batch, -1, length, size) for array in arrays
        )  # B H T K
    except ValueError as error:
        raise Unread(f"the {role} is laid out as {arrays[0].shape}, not (B, H, T, K)") from error
    expected = np.arange(total).reshape(batch, 1, length, 1)
    if not (tokens == expected).all():
        raise Unread(f"the layout of the {role} moves tokens out of place")
    for array in (columns, gain, offset):
        if not (array == array[:1, :, :1]).all():
            raise Unread(f"the {role} differs from token to token by more than its input")
    return columns[0, :, 0], gain[0, :, 0], offset[0, :, 0]
