"""Invariants of every rewritten graph.

Each invariant is a function from (the expected interface, the rewritten model) to a list of
violations. ``check_invariants`` runs all of them after every pass. A violation is a defect of
attnserve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graph_passes.errors import InvariantBroken

__all__ = ["INVARIANTS", "CacheShape", "Interface", "check_invariants", "interface"]


class CacheShape(NamedTuple):
    """A cache (batch, heads, tokens, size)."""

    heads: int
    size: int


class ValueSignature(NamedTuple):
    """An input or an output; its axes are None if its rank is unknown."""

    name: str
    type: str
    axes: tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Inputs, outputs and opsets of a model, and the names of its initializers at any depth.

    Attributes:
        repeated: Names of several values. ONNX forbids them, but ONNX Runtime runs such models: the
            bodies of its generation models have inputs with the names of the outer inputs.
    """

    inputs: tuple[ValueSignature, ...]
    outputs: tuple[ValueSignature, ...]
    opsets: tuple[tuple[str, int], ...]
    initializers: frozenset[str]
    repeated: frozenset[str] = frozenset()

    def with_caches(self, caches: Mapping[str, CacheShape | None]) -> Interface:
        """The same interface with other caches.

        Args:
            caches: The shape of each changed cache, by the name of the input or output; None if it
                is removed.
        """

        def resized(value: ValueSignature) -> ValueSignature:
            axes = value.axes
            if axes is None or (shape := caches.get(value.name)) is None:
                return value
            return value._replace(axes=(axes[0], str(shape.heads), axes[2], str(shape.size)))

        removed = {name for name, shape in caches.items() if shape is None}
        inputs, outputs = (
            tuple(resized(value) for value in values if value.name not in removed)
            for values in (self.inputs, self.outputs)
        )
        return replace(self, inputs=inputs, outputs=outputs)

    def with_opset(self, domain: str, version: int) -> Interface:
        """The same interface that also imports a domain of operators."""
        opsets = {domain: version} | dict(self.opsets)
        return replace(self, opsets=tuple(sorted(opsets.items())))


def interface(model: ir.Model) -> Interface:
    """Read the inputs, outputs, opsets and initializers of a model."""

    def describe(value: ir.Value) -> ValueSignature:
        axes = None if value.shape is None else tuple(map(str, value.shape))
        return ValueSignature(value.name or "", str(value.type), axes)

    return Interface(
        inputs=tuple(describe(value) for value in model.graph.inputs),
        outputs=tuple(describe(value) for value in model.graph.outputs),
        opsets=tuple(sorted(model.opset_imports.items())),
        initializers=frozenset(name for graph in _graphs(model) for name in graph.initializers),
        repeated=frozenset(_repeated(model.graph, frozenset())),
    )


def keeps_inputs_and_outputs(expected: Interface, model: ir.Model) -> list[str]:
    """Inputs and outputs have the names, types and axes of the expected interface."""
    actual = interface(model)
    changed = [
        f"{old.name!r} became {tuple(new)}"
        for olds, news in ((expected.inputs, actual.inputs), (expected.outputs, actual.outputs))
        for old, new in zip(olds, news, strict=False)
        if old != new
    ]
    if (len(expected.inputs), len(expected.outputs)) != (len(actual.inputs), len(actual.outputs)):
        changed.append("inputs or outputs were added or removed")
    return changed


def keeps_opsets(expected: Interface, model: ir.Model) -> list[str]:
    """No opset version changes."""
    actual = interface(model).opsets
    return [] if actual == expected.opsets else [f"opsets {expected.opsets} became {actual}"]


def every_value_is_made_before_it_is_read(expected: Interface, model: ir.Model) -> list[str]:
    """The nodes are in order of execution, and each input has a producer."""
    return _unmade(model.graph, frozenset())


def _unmade(graph: ir.Graph, outer: Set[ir.Value]) -> list[str]:
    """The violations in a graph and its bodies.

    Args:
        outer: The values that outer graphs define before it.
    """
    defined = {*outer, *graph.inputs, *graph.initializers.values()}
    violations: list[str] = []
    for node in graph:
        violations += [
            f"{node.name!r} reads {value.name!r}, which is not computed before it"
            for value in node.inputs
            if value is not None and value not in defined
        ]
        for body in _bodies(node):
            violations += _unmade(body, defined)
        defined.update(node.outputs)
    violations += [
        f"output {v.name!r} is computed by no node" for v in graph.outputs if v not in defined
    ]
    return violations


def names_are_unique(expected: Interface, model: ir.Model) -> list[str]:
    """No two values newly share a name, except in bodies that do not see each other (SSA)."""
    repeated = dict.fromkeys(_repeated(model.graph, frozenset()))
    return [f"{name!r} names two values" for name in repeated if name not in expected.repeated]


def _repeated(graph: ir.Graph, outer: Set[str]) -> list[str]:
    """The names of several values in a graph and its bodies.

    Args:
        outer: The names that outer graphs define before it.
    """
    names = [v.name for v in graph.inputs if v.name not in graph.initializers]
    names += list(graph.initializers)
    visible = {*outer, *filter(None, names)}
    in_bodies: list[str] = []
    for node in graph:
        for body in _bodies(node):
            in_bodies += _repeated(body, visible)
        outputs = [value.name for value in node.outputs if value.name]
        names += outputs
        visible.update(outputs)
    counts = Counter(name for name in names if name)
    return [
        *(name for name, count in counts.items() if count > 1 or name in outer),
        *in_bodies,
    ]


def new_weights_are_finite(expected: Interface, model: ir.Model) -> list[str]:
    """New initializers are finite, except for the scalar -inf, which masks scores."""
    violations: list[str] = []
    for name, value in (item for graph in _graphs(model) for item in graph.initializers.items()):
        tensor = value.const_value
        if name in expected.initializers or tensor is None or not tensor.dtype.is_floating_point():
            continue
        array = tensor.numpy().astype(np.float64)
        if not (np.isfinite(array) | (array.ndim == 0 and array == -np.inf)).all():
            violations.append(f"{name!r} holds a value that is not finite")
    return violations


def _graphs(model: ir.Model) -> tuple[ir.Graph, ...]:
    """The graph of a model, and all bodies in it."""
    return (model.graph, *model.graph.subgraphs())


def _bodies(node: ir.Node) -> list[ir.Graph]:
    """The graphs in the attributes of a node, such as the branches of an If."""
    bodies: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            bodies.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            bodies += attribute.as_graphs()
    return bodies


INVARIANTS: tuple[Callable[[Interface, ir.Model], list[str]], ...] = (
    keeps_inputs_and_outputs,
    keeps_opsets,
    every_value_is_made_before_it_is_read,
    names_are_unique,
    new_weights_are_finite,
)


def check_invariants(expected: Interface, model: ir.Model, *, after: str) -> None:
    """Check every invariant of a rewritten model.

    Args:
        expected: The interface that the model must have.
        after: The name of the pass, for the error.

    Raises:
        InvariantBroken: An invariant is violated; the error names it and the pass.
    """
    for invariant in INVARIANTS:
        violations = invariant(expected, model)
        if violations:
            raise InvariantBroken(
                f"{after} violates the invariant {invariant.__name__!r}: {violations[0]}",
                "this is a defect of attnserve: please report it with the model",
            )
