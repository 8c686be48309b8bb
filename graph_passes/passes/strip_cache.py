"""StripCache: remove the key/value caches of a decoder that processes whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import onnx_ir as ir

from graph_passes.analyses import Analyses
from graph_passes.analysis.axes import cached_axes, named_axes
from graph_passes.analysis.required import input_of
from graph_passes.emit.editing import Inserter, remove_unused, replace_uses
from graph_passes.errors import CannotRewrite
from graph_passes.passes.base import RewritePass
from graph_passes.passes.invariants import CacheShape, Interface

__all__ = ["StripCache"]


class StripCache(RewritePass):
    """Remove past keys and values from the inputs, and present ones from the outputs.

    Before: out, present = f(x, mask, past), with present = Concat(past, new)
    After:  out = f(x, mask), with new in place of the Concat

    Exact for an empty past: the model then computes whole sequences, as for embeddings and scores.
    The mask has the length of the new tokens. An input is a cache if nodes only join it with new
    keys or values, or read its shape; the keys of an encoder are not a cache. The pass is refused
    if there is no cache, if another input has the length of a cache, or if all outputs are caches.
    """

    name: ClassVar[str] = "strip_cache"
    order: ClassVar[int] = 0

    def check(self, analyses: Analyses) -> None:
        graph = analyses.model.graph
        caches = _find_caches(graph)
        if not caches:
            raise _refused("no input is a cache that is only joined with new keys or values")
        if len(_presents(caches)) == len(graph.outputs):
            raise _refused("all outputs are caches")
        lengths = {str(cache.length) for cache in caches if cache.length.value}
        for value in set(graph.inputs) - {cache.past for cache in caches}:
            if lengths & {str(dim) for dim in value.shape or ()}:
                raise _refused(f"the input {value.name!r} has the length of a cache but is none")
        if _batch_source(graph, caches) is None:
            raise _refused("no other input has the batch axis of the caches")

    def expected_interface(self, before: Interface, analyses: Analyses) -> Interface:
        stripped = super().expected_interface(before, analyses)
        new = _new_lengths(analyses.model.graph)
        inputs = tuple(
            value._replace(axes=value.axes and tuple(new.get(axis, axis) for axis in value.axes))
            for value in stripped.inputs
        )
        return replace(stripped, inputs=inputs)

    def caches(self, analyses: Analyses) -> Mapping[str, CacheShape | None]:
        caches = _find_caches(analyses.model.graph)
        values = [*(cache.past for cache in caches), *_presents(caches)]
        return {value.name or "": None for value in values}

    def rewrite_graph(self, analyses: Analyses) -> bool:
        model = analyses.model
        graph = analyses.model.graph
        caches = _find_caches(graph)
        new = _new_lengths(graph)
        presents = _presents(caches)
        batch = _batch_source(graph, caches)
        assert batch is not None
        graph.outputs[:] = [value for value in graph.outputs if value not in presents]
        for cache in caches:
            for join in cache.joins:
                replace_uses(join.outputs[0], input_of(join, 1))
            make = Inserter(graph, graph[0], f"{cache.past.name}/empty")
            sizes = [0 if axis == cache.axis else size for axis, size in enumerate(cache.shape)]
            parts = [
                make.lengths(*batch) if not isinstance(size, int) else make.integers([size], "size")
                for size in sizes
            ]
            shape = make.op("Concat", parts, "shape", axis=0)
            empty = make.op("ConstantOfShape", [shape], "cache")
            if (dtype := cache.past.dtype) not in (None, ir.DataType.FLOAT):
                empty = make.op("Cast", [empty], "cast", dtype=dtype, to=dtype.value)
            replace_uses(cache.past, empty)
            graph.inputs.remove(cache.past)
        for value in graph.inputs:
            if value.shape is not None:
                value.shape = ir.Shape([new.get(str(dim), dim) for dim in value.shape])
        remove_unused(model)
        return True


@dataclass(frozen=True, eq=False)
class _Cache:
    """A cache of keys or values.

    Attributes:
        past: The input of the graph.
        axis: The token axis of the input.
        joins: The nodes that join ``past`` with new keys or values; other readers take its shape.
    """

    past: ir.Value
    axis: int
    joins: tuple[ir.Node, ...]

    @property
    def shape(self) -> ir.Shape:
        assert self.past.shape is not None
        return self.past.shape

    @property
    def length(self) -> ir.SymbolicDim:
        length = self.shape[self.axis]
        assert not isinstance(length, int)
        return length


def _refused(why: str) -> CannotRewrite:
    return CannotRewrite(why, "leave `strip_cache` out", code="strip_cache.refused")


def _find_caches(graph: ir.Graph) -> list[_Cache]:
    caches = (_cache(value, graph) for value in graph.inputs)
    return [cache for cache in caches if cache is not None]


def _cache(past: ir.Value, graph: ir.Graph) -> _Cache | None:
    """Match an input as a cache; None if it has other readers, or a fixed length."""
    if past.shape is None or past.is_graph_output():
        return None
    joins: list[ir.Node] = []
    axes: set[int] = set()
    copies = [past]
    for copy in copies:
        for node, index in copy.uses():
            if node.op_type == "Concat" and len(node.inputs) == 1:  # as TorchScript writes it
                copies.append(node.outputs[0])
            elif node.op_type == "Concat" and len(node.inputs) == 2 and not index:
                joins.append(node)
                axes.add(node.attributes.get_int("axis", 0) % len(past.shape))
            elif node.op_type != "Shape":
                return None
    if len(axes) != 1 or any(node.graph is not graph for node in joins):
        return None
    axis = axes.pop()
    free_axes = [i for i, size in enumerate(past.shape) if not isinstance(size, int)]
    return _Cache(past, axis, tuple(joins)) if axis in free_axes and len(free_axes) <= 2 else None


def _presents(caches: list[_Cache]) -> set[ir.Value]:
    """Graph outputs that are joined past and new keys or values."""
    joined = [join.outputs[0] for cache in caches for join in cache.joins]
    copies = [
        node.outputs[0]
        for present in joined
        for node, _ in present.uses()
        if node.op_type == "Identity"
    ]
    return {value for value in (*joined, *copies) if value.is_graph_output()}


class _BatchAxis(NamedTuple):
    """The axes from ``start`` to ``stop`` (excluded) of an input: its batch."""

    input: ir.Value
    start: int
    stop: int


def _batch_source(graph: ir.Graph, caches: list[_Cache]) -> _BatchAxis | None:
    """The axis of a remaining input that is the batch of the caches; None without such an axis."""
    axes = {
        str(size)
        for cache in caches
        for axis, size in enumerate(cache.shape)
        if axis != cache.axis and not isinstance(size, int)
    }
    pasts = {cache.past for cache in caches}
    for value in graph.inputs:
        for axis, size in enumerate(value.shape or ()):
            if value not in pasts and (str(size) in axes or not axes):
                return _BatchAxis(value, axis, axis + 1)
    return None


def _new_lengths(graph: ir.Graph) -> Mapping[str, str]:
    """Map each axis of past and new tokens together to the axis of the new tokens."""
    past, new, totals = cached_axes(graph, named_axes(graph))
    names = {str(dim) for value in graph.inputs for dim in value.shape or ()}
    sums = {name for name in names if name != past and past in name.replace("+", " ").split()}
    return dict.fromkeys({*totals, *sums}, new) if past and new in names else {}
