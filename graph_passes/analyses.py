"""Computed analyses of one graph, kept until the graph changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from functools import lru_cache
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar
from weakref import WeakKeyDictionary

import onnx_ir as ir

__all__ = ["Analyses"]

P = ParamSpec("P")
T = TypeVar("T")


class Analyses:
    """Computed analyses of a graph as it is at ``Analyses.of(model)`` (LLVM: AnalysisManager).

    An analysis is any function whose first argument is the model. Its result must not refer to the
    model, which would then never be freed.

    Attributes:
        model: The model that the graph belongs to.
    """

    def __init__(self, model: ir.Model, content: list[Any], results: dict[Hashable, Any]) -> None:
        self.model = model
        self._content = content
        self._results = results

    @classmethod
    def of(cls, model: ir.Model) -> Analyses:
        """The analyses of the present graph. They are shared until any code changes the graph."""
        content = list(_content(model))
        latest = _latest.get(model)
        if latest is None or latest[0] != content:
            latest = _latest[model] = (content, {})
        return cls(model, *latest)

    def get(
        self,
        analysis: Callable[Concatenate[ir.Model, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return ``analysis(model, *args, **kwargs)``, cached; arguments must be hashable.

        An argument that equals its default shares the cache entry of a call without that argument.

        Raises:
            RuntimeError: The result is not cached, and the graph has changed since ``of``.
        """
        bound = _signature(analysis).bind(self.model, *args, **kwargs)
        bound.apply_defaults()
        key = (analysis, bound.args[1:], *sorted(bound.kwargs.items()))
        if key not in self._results:
            if not self.is_current:
                raise RuntimeError("the graph has changed: call Analyses.of again")
            self._results[key] = analysis(self.model, *args, **kwargs)
        return self._results[key]

    @property
    def is_current(self) -> bool:
        """Whether the graph is the same as at ``of``."""
        return self._content == list(_content(self.model))


_latest: WeakKeyDictionary[ir.Model, tuple[list[Any], dict[Hashable, Any]]] = WeakKeyDictionary()
"""The content of each model at the last call of ``Analyses.of``, and its results."""


def _content(model: ir.Model) -> Iterator[Any]:
    """What analyses read of a graph: its objects, but not the elements of its tensors."""
    yield from model.opset_imports.items()
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs):
            yield value, value.name, value.dtype, value.shape and tuple(value.shape)
        yield from ((name, value.const_value) for name, value in graph.initializers.items())
    for node in model.graph.all_nodes():
        yield node, node.name, node.domain, node.op_type
        yield node.inputs
        yield node.outputs
        yield from node.attributes.values()


@lru_cache
def _signature(analysis: Callable[..., Any]) -> Signature:
    return signature(analysis)
