"""The state that the steps of a plan change: a model, its rewrites, its training, its precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import onnx_ir as ir

from attnserve.fusion import fuse_for
from attnserve.job import Job
from attnserve.literals import Precision
from attnserve.models.training_result import TrainingResult
from attnserve.planning.plans.rewriting import ApplyReport, PassRunner, exact_changes
from attnserve.precision.int8_grids import Rounding
from attnserve.precision.products import WeightKey
from graph_passes.analysis.cost import count_macs

if TYPE_CHECKING:
    from attnserve.planning.plans.plan import Plan
    from attnserve.recovery.labels import Labels

__all__ = ["State"]


@dataclass(eq=False)
class State:
    """A model while the steps of a plan are applied to it; ``apply.start`` makes one.

    The steps change ``model`` and the attributes from ``applied`` on; the others stay.

    Attributes:
        plan: All steps; trainings prepare for its conversion.
        job: The original, the data and the context of all steps.
        fit: Whether the outputs of changed blocks are refitted, if there is data.
        key: Identifies the original and the data, in names of checkpoints.
        labels: Labeled rows that a training learns too.
        model: A float32 copy of the original that rewrites change in place.
        applied: The finished rewrites, with their errors.
        training: The result of the last training.
        rounding: Rounding of int8 weights, if a training fixed it.
        converted: The model in the precision of the conversion, once it is converted.
    """

    plan: Plan
    job: Job
    model: ir.Model
    fit: bool = True
    key: str = ""
    labels: Labels | None = None
    applied: ApplyReport = field(default_factory=ApplyReport)
    training: TrainingResult | None = None
    rounding: Mapping[WeightKey, Rounding] | None = None
    converted: ir.Model | None = None
    _rewriting: PassRunner | None = None

    @property
    def result(self) -> ir.Model:
        """The model after the last step."""
        return self.model if self.converted is None else self.converted

    def runner(self) -> PassRunner:
        """The passes since the last ``finish_rewrites``."""
        if self._rewriting is None:
            fit = self.fit and self.job.data is not None
            self._rewriting = PassRunner(self.job, self.model, fit)
        return self._rewriting

    def fuse(self, precision: Precision) -> None:
        """Fuse operators (``fuse_for``), and add the passes and the precision to the plan."""
        provider = self.job.context.device.provider
        self.model, passes = fuse_for(self.model, precision, provider)
        changes = exact_changes(passes, count_macs(self.model, self.job.counted_workload))
        self.applied = self.applied.then(ApplyReport(changes))
        self.plan = replace(self.plan, passes=(*self.plan.passes, *passes), precision=precision)

    def finish_rewrites(self) -> None:
        """Refit and certify the blocks that the passes since the last call changed."""
        if self._rewriting is not None:
            self.applied = self.applied.then(self._rewriting.finish())
            self._rewriting = None
