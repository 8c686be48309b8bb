"""The state that the steps of a plan change: a model, its rewrites, its training, its precision."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self

import onnx_ir as ir

from attnserve.choices import Precision
from attnserve.fusion import fuse_for
from attnserve.job import Job
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.lineage import StepRecord
from attnserve.planning.plans.rewriting import ApplyReport, Rewriting
from attnserve.precision.convert import convert
from attnserve.precision.int8 import Rounding
from attnserve.precision.products import WeightKey
from graph_passes.analyses import Analyses
from graph_passes.analysis.cost import count_macs
from graph_passes.passes.base import RewritePass, targets_of

if TYPE_CHECKING:  # it needs PyTorch
    from attnserve.recovery.labels import Labels

__all__ = ["State", "TrainingResult"]


class TrainingResult(Protocol):
    """The result of a training."""

    @property
    def steps(self) -> int: ...

    @property
    def seconds(self) -> float: ...

    @property
    def is_better(self) -> bool:
        """Whether the loss on the data to choose fell: only then are the weights changed."""
        ...


@dataclass(eq=False)
class State:
    """A model while the steps of a plan are applied to it.

    Attributes:
        job: The original, the data and the context of all steps.
        model: A float32 copy of the original that rewrites change in place.
        fit: Whether the outputs of changed blocks are refitted, if there is data.
        key: Identifies the original and the data, in names of checkpoints.
        precision, float_blocks: Arguments of the later conversion, for the steps before it.
        passes: The passes that ran, in order.
        applied: The finished rewrites, with their errors.
        converted: The model in the precision of the conversion, once it is converted.
        rounding: Rounding of int8 weights, if a training fixed it.
        labels: Labeled rows that a training learns too.
        training: The result of the last training.
    """

    job: Job
    model: ir.Model
    fit: bool = True
    key: str = ""
    precision: Precision = "float32"
    float_blocks: tuple[str, ...] = ()
    passes: list[RewritePass] = field(default_factory=list[RewritePass])
    applied: ApplyReport = field(default_factory=ApplyReport)
    converted: ir.Model | None = None
    rounding: Mapping[WeightKey, Rounding] | None = None
    labels: Labels | None = None
    training: TrainingResult | None = None
    _rewriting: Rewriting | None = None
    _scope: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._scope.close()

    @property
    def result(self) -> ir.Model:
        """The model after the last step."""
        return self.model if self.converted is None else self.converted

    def rewrite(self, rewrite: RewritePass) -> None:
        """Run a pass; see ``Rewriting``."""
        if self._rewriting is None:
            analyses = self._scope.enter_context(Analyses.of(self.model))
            fit = self.fit and self.job.data is not None
            self._rewriting = Rewriting(self.job, analyses, fit)
        self._rewriting.run(rewrite)
        self.passes.append(rewrite)

    def finish_rewrites(self) -> None:
        """Refit and certify what the passes since the last call changed."""
        if self._rewriting is not None:
            self.applied = self.applied.then(self._rewriting.finish())
            self._rewriting = None
            self._scope.close()

    def fuse(self, precision: Precision) -> None:
        """Fuse operators for a later conversion; see ``fusion.fuse_for``."""
        self.finish_rewrites()
        fused = fuse_for(self.model, precision, self.job.context.provider)
        macs = count_macs(self.model, self.job.counted)
        steps = [
            StepRecord(rewrite=rewrite.name, block=name, macs_after=macs)
            for rewrite in fused
            for name in targets_of(rewrite)
        ]
        self.applied = self.applied.then(ApplyReport(tuple(steps)))
        self.passes += fused

    def convert(self, precision: Precision, float_blocks: Collection[str] = ()) -> None:
        """Convert the model; see ``precision.convert``."""
        self.finish_rewrites()
        empty = empty_axes(self.job.original, self.model)
        rows = [shaped_for(self.model, batch, empty) for batch in self.job.calibration]
        self.converted = convert(
            self.model, precision, rows, float_blocks=float_blocks, rounding=self.rounding
        )
