"""The result of a fusion of operators; the modules that fuse are imported by one process only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from attnserve.runtime.interface import LongRows
from graph_passes.errors import CannotRewrite

__all__ = ["FusionReport", "NotFaster"]


@dataclass(frozen=True, kw_only=True)
class FusionReport:
    """A fused model in comparison with the original.

    Attributes:
        attention, gelu: The numbers of fused blocks.
        min_cosine: The lowest cosine of all compared vectors.
        max_error: The largest error, relative to the largest number of the output.
        speedup: The geometric mean over the timed shapes.
        speedups: Speed-up at each shape.
        kept: Attention blocks that could be fused but are faster unfused.
        runtime: The name of the runtime that runs it.
        long_rows: The rows that another runtime computes, if any.
        refused: Why another runtime does not run it, by its name.
    """

    attention: int
    gelu: int
    min_cosine: float
    max_error: float
    speedup: float
    speedups: Mapping[str, float] = field(default_factory=dict[str, float])
    kept: Sequence[str] = ()
    runtime: str = "onnxruntime"
    long_rows: LongRows | None = None
    refused: Mapping[str, str] = field(default_factory=dict[str, str])


class NotFaster(CannotRewrite):
    """No fused graph and no other runtime is faster than the model as it is.

    Attributes:
        refused: Why another runtime does not run the model, by its name.
    """

    def __init__(
        self, what: str, fix: str = "", *, code: str = "", refused: Mapping[str, str]
    ) -> None:
        super().__init__(what, fix, code=code)
        self.refused = refused
