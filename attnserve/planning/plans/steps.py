"""The steps of a plan: rewrites of blocks, trainings, and the conversion to another precision.

A step is an immutable value; ``apply`` changes a ``State``. Another package adds a kind of training
with ``TRAININGS.add``, a precision with ``precision.schemes.SCHEMES.add``, and a rewrite with
``graph_passes.PASSES.add`` (``graph_passes.registry``).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_args

from attnserve.literals import Measure, Precision
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.planning.plans.state import State
from attnserve.precision.convert import convert
from attnserve.precision.schemes import SCHEMES
from attnserve.runtime.checkpoint import Checkpoint
from graph_passes.errors import Refusal
from graph_passes.passes.base import RewritePass
from graph_passes.registry import Registry

if TYPE_CHECKING:
    from attnserve.recovery.distillation import Distillation

__all__ = ["TRAININGS", "Convert", "Distill", "PlanStep", "RunPass", "Train"]


class PlanStep(ABC):
    """A step of a plan: a rewrite, a training, or the conversion to a precision.

    Attributes:
        needs_data: Whether it cannot be applied without calibration data.
        needs_finished_rewrites: Whether the rewrites before it are refitted and certified first.
    """

    needs_data: ClassVar[bool] = False
    needs_finished_rewrites: ClassVar[bool] = True

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the step in plans, records and options."""

    def refusal(self) -> Refusal | None:
        """Why this machine cannot apply the step; None if it can.

        Whether a step fits the model is checked when it is applied.
        """
        return None

    @abstractmethod
    def apply(self, state: State) -> None:
        """Change the state.

        Raises:
            AttnserveError: The step does not fit the model or the data.
        """


@dataclass(frozen=True, eq=False)
class RunPass(PlanStep):
    """Run a pass on the blocks that it names."""

    needs_finished_rewrites: ClassVar[bool] = False
    graph_pass: RewritePass

    @property
    def name(self) -> str:
        return self.graph_pass.name

    def apply(self, state: State) -> None:
        state.runner().run(self.graph_pass)


@dataclass(frozen=True)
class Convert(PlanStep):
    """Convert the weights to another precision.

    Attributes:
        precision: A name in ``SCHEMES``.
        float_blocks: The blocks that stay float32; see ``precision.convert``.
    """

    precision: Precision
    float_blocks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.precision

    def refusal(self) -> Refusal | None:
        return SCHEMES[self.precision].refusal()

    def apply(self, state: State) -> None:
        empty = empty_axes(state.job.original, state.model)
        rows = [shaped_for(state.model, batch, empty) for batch in state.job.calibration]
        state.converted = convert(
            state.model,
            self.precision,
            rows,
            float_blocks=self.float_blocks,
            rounding=state.rounding,
        )


@dataclass(frozen=True)
class Train(PlanStep):
    """Train the weights. Each training method is a subclass, named by the method.

    ``apply`` sets ``State.training``, and replaces ``State.model`` only by a better one.

    Attributes:
        minutes: The time limit.
        measure: The measure of quality that chooses the weights.
    """

    minutes: float = 0.0
    measure: Measure = "auto"
    needs_data: ClassVar[bool] = True

    @abstractmethod
    def check(self, state: State) -> None:
        """Check that the model can be trained with the data.

        Raises:
            AttnserveError: The model cannot be trained with the data.
        """

    @abstractmethod
    def forget(self, key: str) -> None:
        """Delete the checkpoint of the training of a state with this key."""

    def to_json(self) -> dict[str, Any]:
        """The training as an entry of ``trainings`` in plan.json."""
        return {"step": self.name, **asdict(self)}

    def from_json(self, content: Mapping[str, Any]) -> Self:
        """The step of this kind that ``to_json`` wrote.

        Raises:
            TypeError, ValueError: The content is not such a step.
        """
        values = {name: value for name, value in content.items() if name != "step"}
        minutes: Any = values.get("minutes", 0.0)
        if not (isinstance(minutes, int | float) and 0 <= minutes < math.inf):
            raise ValueError(f"minutes is {minutes!r}: expected a number of at least 0")
        if values.get("measure", "auto") not in get_args(Measure):
            raise ValueError(f"measure is {values['measure']!r}: expected {get_args(Measure)}")
        return replace(self, **values)


@dataclass(frozen=True)
class Distill(Train):
    """Learn the outputs and hidden states of the original (``attnserve.recovery``).

    With an int8 precision, fake quantization is trained. An interrupted training continues from its
    checkpoint.
    """

    @property
    def name(self) -> str:
        return "distill"

    def check(self, state: State) -> None:
        """Check that the model can be trained: its operators, its outputs, and the data.

        Raises:
            InvalidModel: An operator cannot be trained.
            InvalidArgument: PyTorch has no CUDA device.
            InvalidData: There are too few rows, or nothing can be learned.
            CheckFailed: PyTorch does not compute what ONNX Runtime computes.
            MissingExtra: PyTorch is not installed.
        """
        from attnserve.recovery.distillation import check_trainable  # needs PyTorch

        check_trainable(replace(state.job, measure=self.measure), state.model)

    def apply(self, state: State) -> None:
        from attnserve.recovery.training import train  # needs PyTorch

        distillation = self._distillation(state)
        result = train(distillation, 60 * self.minutes, self._checkpoint(state.key))
        state.training = result
        if result.is_better:
            state.model = distillation.student
            state.rounding = distillation.rounding

    def forget(self, key: str) -> None:
        self._checkpoint(key).remove()

    def _checkpoint(self, key: str) -> Checkpoint:
        # Without the minutes: after an interruption, other minutes are left.
        return Checkpoint("recover", (key, {**self.to_json(), "minutes": None}))

    def _distillation(self, state: State) -> Distillation:
        from attnserve.recovery.distillation import Distillation  # needs PyTorch

        return Distillation(
            state.model,
            replace(state.job, measure=self.measure),
            state.plan.precision,
            state.plan.float_blocks,
            state.labels,
        )


TRAININGS = Registry[Train]("training", Distill())
"""Training steps by name; requests copy them with other values."""
