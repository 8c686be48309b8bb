"""Plan: the steps from a model to the one that is served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnserve.literals import Precision
from attnserve.models.json_files import first_problem
from attnserve.planning.plans.steps import TRAININGS, Convert, PlanStep, RunPass, Train
from attnserve.precision.schemes import SCHEMES
from graph_passes.errors import InvalidArgument
from graph_passes.passes.base import BlockPass, RewritePass
from graph_passes.public import PASSES

__all__ = ["HOW_TO_PLAN", "Plan"]

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
