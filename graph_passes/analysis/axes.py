"""The dynamic axes of a graph's inputs, and their lengths."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graph_passes.analysis.convolved_axes import convolved_lengths
from graph_passes.analysis.operator_sets import MICROSOFT
from graph_passes.analysis.workload import Workload

__all__ = [
    "CachedAxes",
    "bind_axes",
    "cached_axes",
    "has_cache",
    "input_shape",
    "named_axes",
    "read_axes",
    "real_inputs",
    "search_bodies",
]


def named_axes(graph: ir.Graph) -> dict[str, int]:
    """The dynamic axes of the graph's inputs by name, each with its first position in a shape.

    Positions are those of (batch, sequence, ...): both are swapped in an input whose axes have
    names such as (sequence, batch, ...).
    A dynamic axis without a name is named ``input[position]``. Axes that can have only one length,
    such as those of images, are left out (``convolved_lengths``).
    """
    axes: dict[str, int] = {}
    fixed = convolved_lengths(graph)
    names = _dimension_names(graph)
    for value in real_inputs(graph):
        order = {0: 1, 1: 0} if _is_sequence_first(value) else {}
        for position, dim in enumerate(value.shape or ()):
            for name in _symbols(value, position, dim, names):
                if name not in fixed:
                    axes.setdefault(name, order.get(position, position))
    return axes


TOKENS = re.compile("seq|len|token")


def _is_sequence_first(value: ir.Value) -> bool:
    """Whether the names of the first two axes of an input say (sequence, batch)."""
    names = [str(dim).lower() for dim in list(value.shape or ())[:2]]
    batch = ["batch" in name for name in names]
    return batch == [False, True] and bool(TOKENS.search(names[0]))


def bind_axes(
    graph: ir.Graph, workload: Workload, *, distinct_lengths: bool = False
) -> dict[str, int]:
    """Choose a length for each axis: first axes of inputs are batches, other axes new tokens.

    The first two axes of an input are swapped if their names say so (``named_axes``).

    Axes of one kind have equal lengths, because graphs may require it. The mask of a model with a
    cache covers past and new tokens: the length of the mask is the sum of both lengths.

    Args:
        distinct_lengths: Give each token axis a different length, from that of the workload on.
    """
    axes = named_axes(graph)
    lengths = {
        name: workload.new if position else workload.batch for name, position in axes.items()
    }
    cached = cached_axes(graph, axes)
    if distinct_lengths:
        names = [name for name, position in axes.items() if position and name not in cached.totals]
        lengths |= {name: workload.new + index for index, name in enumerate(names)}
    elif cached.past:
        lengths[cached.past] = workload.past
    total = lengths.get(cached.past, workload.new) + lengths.get(cached.new, workload.new)
    return lengths | dict.fromkeys(cached.totals, total) | convolved_lengths(graph)


def read_axes(
    inputs: Mapping[str, ir.Value], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, int] | None:
    """Read the length of each dynamic axis from the shapes of input arrays.

    Returns:
        None if an array has the name of no input, or another number of axes than its input.
    """
    lengths: dict[str, int] = {}
    for name, shape in shapes.items():
        value = inputs.get(name)
        if value is None or value.shape is None or len(value.shape) != len(shape):
            return None
        for position, (dim, length) in enumerate(zip(value.shape, shape, strict=True)):
            if not isinstance(dim, int):
                lengths.setdefault(str(dim.value or f"{name}[{position}]"), length)
    return lengths


def has_cache(graph: ir.Graph) -> bool:
    """Whether an input has an axis of cached tokens."""
    return bool(cached_axes(graph, named_axes(graph)).past)


class CachedAxes(NamedTuple):
    """The token axes of a model with a cache; empty without a cache.

    Attributes:
        past: The axis of cached tokens, or an empty string.
        new: The axis of new tokens, or an empty string.
        totals: The axes of cached and new tokens together.
    """

    past: str
    new: str
    totals: set[str]


def cached_axes(graph: ir.Graph, axes: Mapping[str, int]) -> CachedAxes:
    """Find the axes of past, new and all tokens by the names of inputs and axes.

    An axis of all tokens has "total" in its name, or is the last axis of a mask and of no other
    input. Masks of an encoder's tokens do not cover a cache.
    """
    past: dict[str, None] = {}
    new: dict[str, None] = {}
    masks: dict[str, None] = {}
    names = _dimension_names(graph)
    for value in real_inputs(graph):
        name = value.name or ""
        if name.startswith(("encoder", "cross")) or ".encoder." in name:
            continue
        dims = enumerate(value.shape or ())
        symbols = [_symbols(value, position, dim, names) for position, dim in dims]
        value_axes = {axis: None for dim_axes in symbols for axis in dim_axes if axes.get(axis)}
        if "mask" in name:
            last = symbols[-1] if symbols else ()
            masks |= {axis: None for axis in last if axis in value_axes}
        elif "past" in name or any("past" in axis for axis in value_axes):
            past |= value_axes
        else:
            new |= value_axes
    if not past:
        return CachedAxes("", "", set())
    totals = {axis for axis in masks if axis not in past and axis not in new}
    totals |= {axis for axis in axes if "total" in axis}
    only_past = [axis for axis in past if axis not in new and axis not in totals]
    return CachedAxes(next(iter(only_past), ""), next(iter(new), ""), totals)


def input_shape(value: ir.Value, axes: Mapping[str, int]) -> tuple[int, ...] | None:
    """The shape of a graph input at these axis lengths; None if it has no shape."""
    if value.shape is None:
        return None
    lengths = [_length(value, i, dim, axes) for i, dim in enumerate(value.shape)]
    return None if any(length < 0 for length in lengths) else tuple(lengths)


def real_inputs(graph: ir.Graph) -> list[ir.Value]:
    """The inputs of a graph, without initializers, which old graphs list as inputs too.

    The inputs of the bodies of search nodes (``SEARCHES``) come last: they also declare shapes.
    """
    bodies = [body for node in graph for body in search_bodies(node)]
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    return [*inputs, *(value for body in bodies for value in real_inputs(body))]


SEARCHES = frozenset({"BeamSearch", "GreedySearch", "Sampling"})
"""Operators of ONNX Runtime that run a decoder, and maybe an encoder, to generate text."""


def search_bodies(node: ir.Node) -> list[ir.Graph]:
    """The bodies of a search node: its decoder and encoder; empty for other nodes."""
    if node.op_type not in SEARCHES or node.domain != MICROSOFT:
        return []
    graphs = (
        attribute
        for attribute in node.attributes.values()
        if attribute.type == ir.AttributeType.GRAPH
    )
    return [attribute.as_graph() for attribute in graphs]


EXPRESSION = re.compile(r"(?!.*(\*\*|\d{10}))[\w +*/,()-]{1,100}")
"""Dimension names that are read as expressions, if they have up to eight parentheses and products.
Others are plain names: untrusted names such as 9**9**9 or thousands of parentheses would take
unbounded time."""


NUMBER = re.compile(r"\b\d")


def _dimension_names(graph: ir.Graph) -> set[str]:
    """The names of all dynamic dimensions of the graph's inputs, including expressions."""
    dims = (dim for value in real_inputs(graph) for dim in value.shape or ())
    return {dim.value for dim in dims if not isinstance(dim, int) and dim.value}


def _symbols(
    value: ir.Value, position: int, dim: int | ir.SymbolicDim, names: Container[str]
) -> Sequence[str]:
    """The names of the axes that a dimension of an input depends on.

    A name with a hyphen is a difference only if it has a number, or if both terms are ``names`` of
    axes: "seq-len" is a plain name, "total-past" may be an expression.
    """
    if isinstance(dim, int):
        return ()
    if dim.value is None:
        return (f"{value.name}[{position}]",)
    name = dim.value
    if not EXPRESSION.fullmatch(name) or max(name.count("("), name.count("*")) > 8:
        return (dim.value,)
    try:
        symbols = sorted(dim.free_symbols()) or (dim.value,)  # past_sequence + sequence
    except Exception:  # onnx_ir and sympy raise various types for a name that is not an expression
        return (dim.value,)
    is_name = "-" in name and not NUMBER.search(name)
    return (name,) if is_name and not all(symbol in names for symbol in symbols) else symbols


def _length(
    value: ir.Value, position: int, dim: int | ir.SymbolicDim, axes: Mapping[str, int]
) -> int:
    """The length of a dimension of an input; -1 if its expression gives no length."""
    if isinstance(dim, int):
        return dim
    names = _symbols(value, position, dim, axes)
    if len(names) == 1 and names[0] == (dim.value or f"{value.name}[{position}]"):
        return axes[names[0]]
    try:
        length = dim.evaluate({name: axes[name] for name in names})
    except Exception:  # sympy raises various types, for example for a division by zero
        return -1
    # n / 2 of an odd n is not an integer
    return length if isinstance(length, int) and length < 1 << 31 else -1
