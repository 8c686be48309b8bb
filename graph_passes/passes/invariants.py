"""Invariants of every rewritten graph.

Each invariant is a function from (the interface before, the model after) to a list of violations;
``check_invariants`` runs all of them after every pass. A violation is a defect of attnserve.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graph_passes.errors import InvariantBroken

__all__ = ["INVARIANTS", "Interface", "check_invariants", "interface"]


Promise = tuple[str, str, tuple[str, ...] | None]
"""The name, type and axes of an input or an output."""


@dataclass(frozen=True)
class Interface:
    """What a model promises to its callers: inputs, outputs and opsets."""

    inputs: tuple[Promise, ...]
    outputs: tuple[Promise, ...]
    opsets: tuple[tuple[str, int], ...]
    initializers: frozenset[str]

    def with_caches(self, widths: Mapping[str, int]) -> Interface:
        """The same promise, but for caches (B, H, T, K) that become (B, 1, T, width).

        Args:
            widths: By the names of the inputs and outputs that hold them; all others stay, and so
                do the names, the types, the batch and the length of these.
        """

        def promised(value: Promise) -> Promise:
            name, dtype, axes = value
            if name not in widths or axes is None:
                return value
            return name, dtype, (axes[0], "1", axes[2], str(widths[name]))

        return replace(
            self,
            inputs=tuple(map(promised, self.inputs)),
            outputs=tuple(map(promised, self.outputs)),
        )

    def with_opset(self, domain: str, version: int) -> Interface:
        """The same promise, and a domain of operators beside those that are imported already."""
        opsets = {domain: version} | dict(self.opsets)
        return replace(self, opsets=tuple(sorted(opsets.items())))


def interface(model: ir.Model) -> Interface:
    """Note what must not change."""

    def describe(value: ir.Value) -> Promise:
        axes = None if value.shape is None else tuple(map(str, value.shape))
        return value.name or "", str(value.type), axes

    return Interface(
        tuple(describe(value) for value in model.graph.inputs),
        tuple(describe(value) for value in model.graph.outputs),
        tuple(sorted(model.opset_imports.items())),
        frozenset(model.graph.initializers),
    )


def keeps_inputs_and_outputs(before: Interface, model: ir.Model) -> list[str]:
    """Names, types and axes of inputs and outputs are as promised: as they were, but for caches
    that ``Interface.with_caches`` names."""
    now = interface(model)
    changed = [
        f"{old[0]!r} became {new}"
        for was, is_ in ((before.inputs, now.inputs), (before.outputs, now.outputs))
        for old, new in zip(was, is_, strict=False)
        if old != new
    ]
    if (len(before.inputs), len(before.outputs)) != (len(now.inputs), len(now.outputs)):
        changed.append("inputs or outputs were added or removed")
    return changed


def keeps_opsets(before: Interface, model: ir.Model) -> list[str]:
    """No operator set is raised in silence."""
    now = interface(model).opsets
    return [] if now == before.opsets else [f"opsets {before.opsets} became {now}"]


def every_value_is_made_before_it_is_read(before: Interface, model: ir.Model) -> list[str]:
    """The nodes are in order of execution and read nothing that nobody makes."""
    made = {*model.graph.inputs, *model.graph.initializers.values()}
    broken: list[str] = []
    for node in model.graph:
        broken += [
            f"{node.name!r} reads {value.name!r}, which is not made before it"
            for value in node.inputs
            if value is not None and value not in made
        ]
        made.update(node.outputs)
    broken += [
        f"output {v.name!r} is made by no node" for v in model.graph.outputs if v not in made
    ]
    return broken


def names_are_unique(before: Interface, model: ir.Model) -> list[str]:
    """No two values share a name."""
    names = [v.name for v in model.graph.inputs if v.name not in model.graph.initializers]
    names += list(model.graph.initializers)
    names += [value.name for node in model.graph for value in node.outputs]
    counts = Counter(name for name in names if name)
    return [f"{name!r} names two values" for name, count in counts.items() if count > 1]


def new_weights_are_finite(before: Interface, model: ir.Model) -> list[str]:
    """A factorisation that diverged must never reach a file (a masked score may be -inf)."""
    broken: list[str] = []
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if name in before.initializers or tensor is None or not tensor.dtype.is_floating_point():
            continue
        array = tensor.numpy().astype(np.float64)
        if not (np.isfinite(array) | (array.ndim == 0 and array == -np.inf)).all():
            broken.append(f"{name!r} holds a value that is not finite")
    return broken


INVARIANTS: tuple[Callable[[Interface, ir.Model], list[str]], ...] = (
    keeps_inputs_and_outputs,
    keeps_opsets,
    every_value_is_made_before_it_is_read,
    names_are_unique,
    new_weights_are_finite,
)


def check_invariants(before: Interface, model: ir.Model, *, after: str) -> None:
    """Hold the model to every invariant.

    Raises:
        InvariantBroken: Naming the invariant, the pass (``after``) and the first violation.
    """
    for invariant in INVARIANTS:
        violations = invariant(before, model)
        if violations:
            raise InvariantBroken(
                f"{after} violates the invariant {invariant.__name__!r}: {violations[0]}",
                "this is a defect of attnserve: please report it with the model",
            )
