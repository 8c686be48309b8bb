"""A plan, its steps, and the state that they change.

A plan is the steps from a model to the one that is served: rewrites, trainings, and a conversion.
The state of its application holds the plan, and a step changes the state.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, cast, get_args

import onnx_ir as ir
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnserve.fusion import fuse_for
from attnserve.job import Job
from attnserve.literals import Measure, Precision
from attnserve.models.cache_inputs import empty_axes, shaped_for
from attnserve.models.json_files import first_problem
from attnserve.models.training_result import TrainingResult
from attnserve.planning.plans.rewriting import ApplyReport, PassRunner, exact_changes
from attnserve.precision.convert import convert
from attnserve.precision.int8_grids import Rounding
from attnserve.precision.products import WeightKey
from attnserve.precision.schemes import SCHEMES
from graph_passes.analysis.cost import count_macs
from graph_passes.errors import InvalidArgument, Refusal
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.public import PASSES
from graph_passes.registry import Registry

if TYPE_CHECKING:
    from attnserve.recovery.distillation import Distillation
    from attnserve.recovery.labels import Labels

__all__ = [
    "HOW_TO_PLAN",
    "TRAININGS",
    "Convert",
    "Distill",
    "Plan",
    "PlanStep",
    "RunPass",
    "State",
    "Train",
]


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

    Every training is such a step, which ``apply.apply_steps`` applies: that of ``recover``, those
    of a search, and that of a plan that is applied again. The fields are its settings. ``apply``
    sets ``State.training``, the result, and replaces ``State.model`` only by a better one.

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

    def to_json(self) -> dict[str, Any]:
        """The training as an entry of ``trainings`` in plan.json."""
        return {"step": self.name, **asdict(self)}

    def from_json(self, content: Mapping[str, Any]) -> Self:
        """The step of this kind that ``to_json`` wrote.

        Raises:
            TypeError, ValueError: The content is not such a step.
        """
        values = {name: value for name, value in content.items() if name != "step"}
        minutes: Any = values.get("minutes")
        if not (isinstance(minutes, int | float) and 0 <= minutes < math.inf):
            raise ValueError(f"minutes is {minutes!r}: expected a number of at least 0")
        if values.get("measure", "auto") not in get_args(Measure):
            raise ValueError(f"measure is {values['measure']!r}: expected {get_args(Measure)}")
        return replace(self, **values)


@dataclass(frozen=True)
class Distill(Train):
    """Learn the outputs and hidden states of the original (``attnserve.recovery``).

    If the plan converts to an int8 precision, fake quantization is trained. An interrupted training
    continues from its checkpoint.
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
        self._distillation(state)

    def apply(self, state: State) -> None:
        from attnserve.recovery.training import train  # needs PyTorch

        distillation = self._distillation(state)
        # Without the minutes: after an interruption, other minutes are left.
        key = state.key, {**self.to_json(), "minutes": None}
        checkpoint = state.job.checkpoints.open("recover", key)
        state.training = train(distillation, 60 * self.minutes, checkpoint)
        if state.training.is_better:
            state.model = distillation.student
            state.rounding = distillation.rounding

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


HOW_TO_PLAN = "make a new plan with `attnserve plan`"

Kind = TypeVar("Kind", bound=RewritePass)


@dataclass(frozen=True, eq=False)
class Plan:
    """The steps from a model to the one that is served: rewrites, trainings, and a conversion.

    Block and head numbers of a pass refer to the model after the preceding passes.

    Attributes:
        passes: The passes of the rewrites, in order.
        trainings: The trainings after the rewrites, in order.
        precision: The precision of the result.
        float_blocks: Blocks that stay float32 in a precision that can keep blocks.
    """

    passes: tuple[RewritePass, ...] = ()
    trainings: tuple[Train, ...] = ()
    precision: Precision = "float32"
    float_blocks: tuple[str, ...] = ()

    @classmethod
    def merged(
        cls,
        passes: Iterable[RewritePass],
        precision: Precision = "float32",
        float_blocks: Sequence[str] = (),
    ) -> Plan:
        """Build a plan from passes, which are merged by class and sorted by their ``order``.

        Args:
            passes: The passes; passes without targets are dropped.
            precision, float_blocks: The fields of the plan.
        """
        merged: dict[type[RewritePass], RewritePass] = {}
        for graph_pass in passes:
            if isinstance(graph_pass, BlockPass):
                kind = type(cast("BlockPass[Any, Any]", graph_pass))
                before = merged.get(kind)
                targets = {**(before.targets if before else {}), **graph_pass.targets}
                if targets:
                    merged[kind] = kind(targets)
            else:
                merged[type(graph_pass)] = graph_pass
        ordered = sorted(merged.values(), key=lambda graph_pass: graph_pass.order)
        return cls(tuple(ordered), precision=precision, float_blocks=tuple(float_blocks))

    @property
    def steps(self) -> tuple[PlanStep, ...]:
        return (*map(RunPass, self.passes), *self.trainings, *self.conversion)

    @property
    def conversion(self) -> tuple[PlanStep, ...]:
        """The last step, if the plan converts to another precision."""
        if self.precision == "float32":
            return ()
        return (Convert(self.precision, self.float_blocks),)

    def find(self, kind: type[Kind]) -> Kind | None:
        """The first pass of a class; None if there is none."""
        return next(
            (graph_pass for graph_pass in self.passes if isinstance(graph_pass, kind)), None
        )

    def targets(self, kind: type[RewritePass]) -> Mapping[str, Any]:
        """The parameters of all passes of a class, by block; empty if there is none."""
        targets: dict[str, Any] = {}
        for graph_pass in self.passes:
            if isinstance(graph_pass, kind):
                targets |= graph_pass.targets
        return targets

    @property
    def lossy_blocks(self) -> list[str]:
        """Every block that a lossy pass rewrites, once, in the order of the passes."""
        names = [
            name for graph_pass in self.passes if graph_pass.lossy for name in graph_pass.targets
        ]
        return list(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """The plan as in plan.json."""
        return {
            "passes": [graph_pass.to_json() for graph_pass in self.passes],
            **(
                {"trainings": [training.to_json() for training in self.trainings]}
                if self.trainings
                else {}
            ),
            "precision": self.precision,
            **({"float_blocks": list(self.float_blocks)} if self.float_blocks else {}),
        }

    @classmethod
    def from_json(cls, content: Any) -> Plan:
        """Read what ``to_json`` wrote. Blocks and parameters are checked when the plan is applied.

        Raises:
            InvalidArgument: The content is not a plan.
        """
        try:
            plan = _PlanContent.model_validate(content)
        except ValidationError as error:
            raise InvalidArgument(
                f"plan: {first_problem(error)}", HOW_TO_PLAN, code="plan.invalid"
            ) from error
        passes = [
            PASSES[entry.name].from_json({"pass": entry.name, **(entry.model_extra or {})})
            for entry in plan.passes
        ]
        trainings = [_read_training(entry) for entry in plan.trainings]
        return cls(tuple(passes), tuple(trainings), plan.precision, tuple(plan.float_blocks))


def _read_training(content: Mapping[str, Any]) -> Train:
    """Read a training of a plan.json.

    Raises:
        InvalidArgument: Its kind is unknown, or its values are invalid.
    """
    kind = TRAININGS[str(content.get("step"))]
    try:
        return kind.from_json(content)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"plan: {kind.name}: {error}", HOW_TO_PLAN, code="plan.invalid"
        ) from error


class _Entry(BaseModel):
    """The JSON of a pass, which the pass itself validates."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(alias="pass")


class _PlanContent(BaseModel):
    """The JSON of a plan."""

    model_config = ConfigDict(extra="forbid")

    passes: list[_Entry] = []
    trainings: list[dict[str, Any]] = []
    precision: Precision = "float32"
    float_blocks: list[str] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.precision not in SCHEMES:
            raise ValueError(f"precision {self.precision!r} is unknown")
        if self.float_blocks and not SCHEMES[self.precision].allows_float_blocks:
            raise ValueError(f"precision {self.precision!r} has no float_blocks")
        return self


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
