"""Read a layout by running it on labels.

Between a projection and the scores stand reshapes, transposes, splits and scalings, in as many
orders as there are exporters. Instead of recognising orders, each column and each token of the
projection gets a number, the numbers are sent through the nodes themselves, and where they arrive
is the reading. What arrives out of place is a miss, so a reading is never a guess.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.attention import (
    OutputProjection,
    Projection,
    Turn,
    TurnAxis,
    constant_array,
    is_constant,
    origin,
)
from graph_passes.shapes import Facts, evaluate

__all__ = ["Reader", "Unread", "only_consumer", "say"]

LAYOUT = frozenset({"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split",
                    "Gather", "Expand", "Tile", "Identity", "Cast", "Dropout"})  # fmt: skip
LINEAR = frozenset({"MatMul", "Gemm"})
REACH = 40
"""Nodes between a projection and its product; rotary positions take about a dozen."""


class Unread(Exception):
    """Why a value could not be read: becomes the reason of a ``Miss``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@dataclass(frozen=True, eq=False)
class Labels:
    """Which column and which token each element is, times and plus what: arrays of one shape.

    ``turn`` is the element of the factor that multiplies it, where there is one (see ``Trace``).
    """

    columns: np.ndarray
    tokens: np.ndarray
    gain: np.ndarray
    offset: np.ndarray
    turn: np.ndarray

    def arrays(self) -> tuple[np.ndarray, ...]:
        return self.columns, self.tokens, self.gain, self.offset, self.turn

    def at(self, index: np.ndarray) -> Labels:
        """The elements at these flat positions, laid out like them."""
        return Labels(*(array.reshape(-1)[index] for array in self.arrays()))

    def times(self, factor: np.ndarray | float) -> Labels:
        return replace(self, gain=self.gain * factor, offset=self.offset * factor)

    def spread(self, shape: tuple[int, ...]) -> Labels:
        return Labels(*(np.broadcast_to(array, shape) for array in self.arrays()))


@dataclass(frozen=True, eq=False)
class Trace:
    """A value as scale * the sum over factors f of f[turn] * (gain * product[column] + offset).

    The one factor is None (1), but for rotary positions, whose factors are cosines and sines.
    """

    source: ir.Node
    scale: float
    terms: dict[ir.Value | None, Labels]
    nodes: tuple[ir.Node, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return next(iter(self.terms.values())).columns.shape

    def through(self, node: ir.Node, scale: float = 1.0) -> Trace:
        return replace(self, scale=self.scale * scale, nodes=(*self.nodes, node))

    def each(self, change: Callable[[Labels], Labels]) -> Trace:
        return replace(self, terms={f: change(labels) for f, labels in self.terms.items()})

    def unscaled(self) -> Trace:
        """The same with the scale in the gains, so that sums may have scales of their own."""
        return replace(self.each(lambda labels: labels.times(self.scale)), scale=1.0)


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
        trace = self._trace(operand, role)
        source = trace.source
        weight, transposed = _weight_of(source)
        total = math.prod(self.shape(source.outputs[0])[:-1])
        length = trace.shape[-1 if tokens_last else -2]
        read = {
            factor: _by_head(labels, total, tokens_last=tokens_last, heads=heads, role=role)
            for factor, labels in trace.terms.items()
        }
        first = next(iter(read.values()))
        source_input = self._unflattened(source)
        return Projection(
            input=source_input,
            weight=weight,
            transposed=transposed,
            columns=first.columns,
            gain=first.gain,
            offset=first.offset,
            scale=trace.scale,
            output=operand,
            nodes=trace.nodes,
            by_sequence=self.shape(source_input)[:-1] == (total // length, length),
            layout="B T H*K" if heads else "B*H T K" if len(trace.shape) == 3 else "B H T K",
            turns=() if set(read) == {None} else self._turns(read, role),
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

    def _trace(self, value: ir.Value, role: str, reach: int = REACH) -> Trace:
        """What ``value`` is of the one product behind it."""
        node = value.producer()
        if node is None or is_constant(value):
            what = "a constant" if is_constant(value) else "an input of the graph"
            raise Unread(f"the {role} is {value.name!r}, {what}: no projection makes it")
        if node.op_type in LINEAR and len(node.inputs) > 1 and is_constant(node.inputs[1]):
            return self._source(node, role)
        if reach == 0:
            raise Unread(f"{say(node)} is too far from any projection of the {role}")
        if node.op_type in LAYOUT and node.inputs[0] is not None:
            inner = self._trace(node.inputs[0], role, reach - 1)
            order = np.arange(math.prod(inner.shape)).reshape(inner.shape)
            moved = self._moved(node, order, value.index() or 0)
            return inner.each(lambda labels: labels.at(moved)).through(node)
        if not node.domain and None not in node.inputs[:2]:
            match node.op_type:
                case "Add" | "Sub" | "Mul" | "Div":
                    return self._arithmetic(node, role, reach - 1)
                case "Neg":
                    return self._negated(node, role, reach - 1)
                case "Concat":
                    return self._joined(node, role, reach - 1)
                case "RotaryEmbedding":
                    return self._rotated(node, role, reach - 1)
                case _:
                    pass
        raise Unread(f"{say(node)} stands between the {role} projection and the product")

    def _source(self, node: ir.Node, role: str) -> Trace:
        """Number the columns and the tokens of the product."""
        if not self._is_matrix(node.inputs[1]) or is_constant(node.inputs[0]):
            raise Unread(f"the {role} is made by {say(node)}, not by tokens and a matrix")
        shape = self.shape(node.outputs[0])
        columns = np.broadcast_to(np.arange(shape[-1]), shape)
        tokens = np.arange(math.prod(shape[:-1])).reshape(*shape[:-1], 1)
        none = np.zeros(shape, np.int64)
        labels = Labels(
            columns, np.broadcast_to(tokens, shape), np.ones(shape), np.zeros(shape), none
        )
        scale = 1.0
        if node.op_type == "Gemm":
            scale, labels = self._gemm(node, labels)
        return Trace(node, scale, {None: labels}, (node,))

    def _arithmetic(self, node: ir.Node, role: str, reach: int) -> Trace:
        """A constant multiplied or added, a factor multiplied, or two readings added."""
        a, b = node.inputs
        assert a is not None and b is not None
        for value, other, left in ((a, b, True), (b, a, False)):
            constant = self._constant_operand(other)
            if constant is not None and (left or node.op_type != "Div"):
                inner = self._trace(value, role, reach)
                return self._with_constant(node, inner, constant.astype(np.float64), left, role)
        if node.op_type == "Div":
            raise Unread(f"{say(node)} stands between the {role} projection and the product")
        readings = [self._attempt(value, role, reach) for value in (a, b)]
        if node.op_type == "Mul":
            for inner, factor in zip(readings, (b, a), strict=True):
                if inner is not None and None in readings and set(inner.terms) == {None}:
                    return self._turned(node, inner, factor, role)
        elif None not in readings:
            return _added(node, [r for r in readings if r is not None], role)
        raise Unread(f"{say(node)} stands between the {role} projection and the product")

    def _attempt(self, value: ir.Value, role: str, reach: int) -> Trace | None:
        try:
            return self._trace(value, role, reach)
        except Unread:
            return None

    def _negated(self, node: ir.Node, role: str, reach: int) -> Trace:
        assert node.inputs[0] is not None
        inner = self._trace(node.inputs[0], role, reach)
        return inner.each(lambda labels: labels.times(-1.0)).through(node)

    def _joined(self, node: ir.Node, role: str, reach: int) -> Trace:
        """Concat of pieces of one product; a piece without a factor counts as zero of it."""
        pieces = [self._trace(value, role, reach).unscaled() for value in node.inputs if value]
        if len({piece.source for piece in pieces}) > 1:
            raise Unread(f"{say(node)} joins the {role} of several projections")
        axis = node.attributes.get_int("axis", -1)
        factors = dict.fromkeys(factor for piece in pieces for factor in piece.terms)
        terms: dict[ir.Value | None, Labels] = {}
        for factor in factors:
            parts = [piece.terms.get(factor) or _nothing_of(piece) for piece in pieces]
            arrays = zip(*(part.arrays() for part in parts), strict=True)
            terms[factor] = Labels(*(np.concatenate(array, axis) for array in arrays))
        nodes = dict.fromkeys(n for piece in pieces for n in piece.nodes)
        return Trace(pieces[0].source, 1.0, terms, (*nodes, node))

    def _rotated(self, node: ir.Node, role: str, reach: int) -> Trace:
        """ai.onnx RotaryEmbedding (opset 23) over (B, H, T, K): the same two terms."""
        x, cos, sin = node.inputs[:3]
        assert x is not None
        inner = self._trace(x, role, reach)
        if len(inner.shape) != 4 or set(inner.terms) != {None} or cos is None or sin is None:
            raise Unread(f"{say(node)} rotates a {role} that is not laid out as (B, H, T, K)")
        if len(node.inputs) > 3 and node.inputs[3] is not None:
            raise Unread(f"{say(node)} looks its angles up by position")
        size = inner.shape[-1]
        turned = node.attributes.get_int("rotary_embedding_dim", 0) or size
        each = np.arange(turned)
        half = turned // 2
        if node.attributes.get_int("interleaved", 0):
            angle, partner, sign = each // 2, each ^ 1, np.where(each % 2, 1.0, -1.0)
        else:
            angle, partner, sign = (
                each % half,
                (each + half) % turned,
                np.where(each < half, -1.0, 1.0),
            )
        labels = inner.terms[None]
        rest = np.arange(size) >= turned
        pad = (0, size - turned)
        angle, partner, sign = np.pad(angle, pad), np.pad(partner, pad), np.pad(sign, pad)
        terms: dict[ir.Value | None, Labels] = {}
        for factor, source, gain in (
            (cos, np.arange(size), np.where(rest, 0.0, 1.0)),
            (sin, partner, sign),
        ):
            B, S, _ = np.broadcast_shapes(self.shape(factor), (1, 1, 1))
            rows = np.arange(inner.shape[0])[:, None, None, None] % B * S
            rows = rows + np.arange(inner.shape[2])[None, None, :, None] % S
            turn = np.broadcast_to(rows * self.shape(factor)[-1] + angle, inner.shape)
            picked = Labels(*(array[..., source] for array in labels.arrays()))
            terms[factor] = replace(picked.times(gain), turn=turn)
        if rest.any():
            terms[None] = labels.times(np.where(rest, 1.0, 0.0))
        return replace(inner, terms=terms).through(node)

    def _turned(self, node: ir.Node, inner: Trace, factor: ir.Value, role: str) -> Trace:
        """A value that depends on positions, not on the tokens, multiplied element by element."""
        shape = self.shape(factor)
        try:
            spread = np.broadcast_shapes(inner.shape, shape)
        except ValueError as error:
            raise Unread(f"{say(node)} does not fit the {role}: {error}") from error
        turn = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), spread)
        labels = inner.terms[None].spread(spread)
        return replace(inner, terms={factor: replace(labels, turn=turn)}).through(node)

    def _turns(self, read: dict[ir.Value | None, Heads], role: str) -> tuple[Turn, ...]:
        """Each term, and where it finds its factor: by batch, token or element of the head."""
        turns: list[Turn] = []
        for factor, heads in read.items():
            if factor is None:
                turns.append(Turn(None, heads.columns, heads.gain, heads.offset, (), heads.columns))
                continue
            shape = self.shape(factor)
            used = np.broadcast_to(heads.gain[None, :, None, :] != 0, heads.turn.shape)
            batches, _, tokens, _ = np.ogrid[tuple(map(slice, heads.turn.shape))]
            axes: list[TurnAxis] = []
            element = np.zeros_like(heads.columns)
            for size, where in zip(shape, np.unravel_index(heads.turn, shape), strict=True):
                if size == 1:
                    axes.append("one")
                elif ((where == where[:1, :, :1]) | ~used).all():
                    axes.append("element")
                    element = where[0, :, 0]
                elif ((where == tokens) | ~used).all():
                    axes.append("token")
                elif ((where == batches) | ~used).all():
                    axes.append("batch")
                else:
                    raise Unread(f"{factor.name!r} multiplies the {role} out of order")
            turns.append(
                Turn(factor, heads.columns, heads.gain, heads.offset, tuple(axes), element)
            )
        return tuple(turns)

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

    def _elements(self, value: ir.Value | None) -> np.ndarray | None:
        if value is None:
            return None
        constant = self.facts.constant(value)
        if constant is not None:
            return constant
        return constant_array(value) if is_constant(value) else None

    def _constant_operand(self, value: ir.Value) -> np.ndarray | None:
        """A weight, or a number of the shape program, whose arrays (angles) are factors."""
        if is_constant(value):
            return constant_array(value)
        constant = self.facts.constant(value)
        return constant if constant is not None and constant.size == 1 else None

    def _gemm(self, source: ir.Node, labels: Labels) -> tuple[float, Labels]:
        alpha, beta = _gemm_factors(source)
        if source.attributes.get_int("transA", 0) or alpha == 0.0:
            raise Unread(f"{say(source)} transposes its tokens")
        given = source.inputs[2] if len(source.inputs) > 2 else None
        bias = np.zeros(1) if given is None else self._elements(given)
        if bias is None:
            raise Unread(f"the bias of {say(source)} is not constant")
        return alpha, replace(labels, offset=labels.offset + bias * beta / alpha)

    def _with_constant(
        self, node: ir.Node, inner: Trace, constant: np.ndarray, left: bool, role: str
    ) -> Trace:
        try:
            shape = np.broadcast_shapes(inner.shape, constant.shape)
        except ValueError as error:
            raise Unread(f"{say(node)} does not fit the {role}: {error}") from error
        inner = inner.each(lambda labels: labels.spread(shape))
        if node.op_type in ("Mul", "Div"):
            with np.errstate(divide="ignore"):
                factor = constant if node.op_type == "Mul" else 1.0 / constant
            if not np.isfinite(factor).all() or not factor.any():
                raise Unread(f"{say(node)} multiplies the {role} by zero or infinity")
            if constant.size == 1:
                return inner.through(node, factor.item())
            return inner.each(lambda labels: labels.times(factor)).through(node)
        if node.op_type == "Sub" and not left:
            raise Unread(f"{say(node)} subtracts the {role} from a constant")
        if set(inner.terms) != {None}:
            raise Unread(f"{say(node)} adds to a {role} that is rotated already")
        added = (constant if node.op_type == "Add" else -constant) / inner.scale
        return inner.each(lambda labels: replace(labels, offset=labels.offset + added)).through(
            node
        )

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


def _nothing_of(piece: Trace) -> Labels:
    """Zero times a piece: what it holds of a factor that it does not have."""
    labels = next(iter(piece.terms.values()))
    return replace(labels.times(0.0), turn=np.zeros_like(labels.turn))


def _added(node: ir.Node, readings: list[Trace], role: str) -> Trace:
    """The sum or difference of two readings of one product, each with factors of its own."""
    a, b = (reading.unscaled() for reading in readings)
    if a.source is not b.source or a.shape != b.shape or set(a.terms) & set(b.terms):
        raise Unread(f"{say(node)} stands between the {role} projection and the product")
    if node.op_type == "Sub":
        b = b.each(lambda labels: labels.times(-1.0))
    nodes = dict.fromkeys((*a.nodes, *b.nodes, node))
    return Trace(a.source, 1.0, {**a.terms, **b.terms}, tuple(nodes))


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
    return origin(weight), node.op_type == "Gemm" and bool(node.attributes.get_int("transB", 0))


def _gemm_factors(node: ir.Node) -> tuple[float, float]:
    return node.attributes.get_float("alpha", 1.0), node.attributes.get_float("beta", 1.0)


class Heads(NamedTuple):
    """One term of a reading by head: (H, K) arrays, and the factor's elements (B, H, T, K)."""

    columns: np.ndarray
    gain: np.ndarray
    offset: np.ndarray
    turn: np.ndarray


def _by_head(
    labels: Labels,
    total: int,
    *,
    tokens_last: bool,
    heads: int,
    role: str,
) -> Heads:
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
        columns, tokens, gain, offset, turn = (
            array.reshape(batch, -1, length, size) for array in arrays
        )  # B H T K
    except ValueError as error:
        raise Unread(f"the {role} is laid out as {arrays[0].shape}, not (B, H, T, K)") from error
    expected = np.arange(total).reshape(batch, 1, length, 1)
    used = (gain != 0) | (offset != 0)
    if not ((tokens == expected) | ~used).all():
        raise Unread(f"the layout of the {role} moves tokens out of place")
    for array in (columns, gain, offset):
        if not (array == array[:1, :, :1]).all():
            raise Unread(f"the {role} differs from token to token by more than its input")
    return Heads(columns[0, :, 0], gain[0, :, 0], offset[0, :, 0], turn)
