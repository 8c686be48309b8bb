"""Computed analyses of one graph, kept until the graph changes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from functools import lru_cache
from inspect import Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar

import onnx_ir as ir

__all__ = ["Analyses"]

KEY = "attnserve.analyses"

P = ParamSpec("P")
T = TypeVar("T")


class Analyses:
    """Computed analyses of one graph, kept until the graph changes (LLVM: AnalysisManager).

    An analysis is any function whose first argument is the model. Passes invalidate all results
    when they change the graph. Call ``invalidate`` after any other edit.

    ``with Analyses.of(model) as analyses:`` shares the results among all passes in the block.

    Attributes:
        model: The model that the graph belongs to.
    """

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self._results: dict[Hashable, Any] = {}

    def get(
        self,
        analysis: Callable[Concatenate[ir.Model, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Return ``analysis(model, *args, **kwargs)``, cached; arguments must be hashable.

        An argument that equals its default shares the cache entry of a call without that argument.
        """
        bound = _signature(analysis).bind(self.model, *args, **kwargs)
        bound.apply_defaults()
        key = (analysis, bound.args[1:], *sorted(bound.kwargs.items()))
        if key not in self._results:
            self._results[key] = analysis(self.model, *args, **kwargs)
        return self._results[key]

    def invalidate(self) -> None:
        """Drop all results after a change to the graph."""
        self._results.clear()

    @classmethod
    @contextmanager
    def of(cls, model: ir.Model) -> Generator[Analyses]:
        """Yield the analyses of an outer ``with`` block for the model, or else new analyses."""
        active = model.meta.get(KEY)
        if isinstance(active, cls) and active.model is model:  # a clone copies ``meta``
            yield active
            return
        context = cls(model)
        model.meta[KEY] = context
        try:
            yield context
        finally:
            model.meta.pop(KEY, None)


@lru_cache
def _signature(analysis: Callable[..., Any]) -> Signature:
    return signature(analysis)
