"""Analyses of one model, computed once and dropped when its graph changes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

import onnx_ir as ir

__all__ = ["GraphContext"]

KEY = "attnserve.context"

P = ParamSpec("P")
T = TypeVar("T")


class GraphContext:
    """Cached analyses of a model, as in LLVM's analysis manager.

    An analysis is any function whose first argument is the model. Passes invalidate all results
    when they change the graph; whoever edits the graph in another way calls ``invalidate``.

    ``with GraphContext.of(model) as context:`` keeps one context for all passes inside the block.
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
        """The result of ``analysis(model, *args, **kwargs)``; arguments must be hashable."""
        key = (analysis, args, *sorted(kwargs.items()))
        if key not in self._results:
            self._results[key] = analysis(self.model, *args, **kwargs)
        return self._results[key]

    def invalidate(self) -> None:
        """Drop all results: the graph has changed."""
        self._results.clear()

    @classmethod
    @contextmanager
    def of(cls, model: ir.Model) -> Generator[GraphContext]:
        """The context of the model that is active, or one for as long as the block lasts."""
        active = model.meta.get(KEY)
        if isinstance(active, cls) and active.model is model:  # a clone copies the reference
            yield active
            return
        context = cls(model)
        model.meta[KEY] = context
        try:
            yield context
        finally:
            model.meta.pop(KEY, None)
