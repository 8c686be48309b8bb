"""Plan: the rewrites of a model, in order, and the precision of its weights."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from attnserve.choices import Precision
from attnserve.models.json_files import first_problem
from attnserve.precision.schemes import SCHEMES
from graph_passes.errors import InvalidArgument
from graph_passes.passes.base import BlockPass, RewritePass, pass_named

__all__ = ["HOW_TO_PLAN", "ORDER", "Plan", "targets_of"]

HOW_TO_PLAN = "make a new plan with `attnserve plan`"

ORDER = (
    "strip_cache",
    "skip_attention",
    "prune_heads",
    "reuse_attention",
    "prune_neurons",
    "collaborate",
    "fuse_attention",
    "fuse_gelu",
    "fold_biases",
    "fuse_residuals",
    "fuse_skip_norm",
)
"""The order in which the planner and requests apply passes; a plan.json may have any other. Passes
that are not listed come before those that fuse operators."""

Kind = TypeVar("Kind", bound=RewritePass)


@dataclass(frozen=True, eq=False)
class Plan:
    """Rewrites to apply, in order, then the precision to convert to.

    Each pass refers to blocks and heads as its predecessors leave them.

    Attributes:
        float_blocks: Blocks that stay float32 in an int8 or int4 model.
    """

    passes: tuple[RewritePass, ...] = ()
    precision: Precision = "float32"
    float_blocks: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        passes: Iterable[RewritePass],
        precision: Precision = "float32",
        float_blocks: Sequence[str] = (),
    ) -> Plan:
        """A plan of passes in any order: those of a kind are merged, and all are put in ``ORDER``.

        Args:
            passes: Those without targets are dropped.
        """
        merged: dict[type[RewritePass], RewritePass] = {}
        for rewrite in passes:
            if isinstance(rewrite, BlockPass):
                kind = type(cast("BlockPass[Any, Any]", rewrite))
                before = merged.get(kind)
                targets = {**(targets_of(before) if before else {}), **targets_of(rewrite)}
                if targets:
                    merged[kind] = kind(targets)
            else:
                merged[type(rewrite)] = rewrite
        place = {name: float(index) for index, name in enumerate(ORDER)}
        unlisted = place["fuse_attention"] - 0.5
        ordered = sorted(merged.values(), key=lambda rewrite: place.get(rewrite.name, unlisted))
        return cls(tuple(ordered), precision, tuple(float_blocks))

    def find(self, kind: type[Kind]) -> Kind | None:
        """The first pass of a kind."""
        return next((rewrite for rewrite in self.passes if isinstance(rewrite, kind)), None)

    def targets(self, kind: type[RewritePass]) -> Mapping[str, Any]:
        """The parameters of all passes of a kind, by block; empty if there is none."""
        targets: dict[str, Any] = {}
        for rewrite in self.passes:
            if isinstance(rewrite, kind):
                targets |= targets_of(rewrite)
        return targets

    @property
    def changed(self) -> list[str]:
        """Every block that a lossy pass rewrites, once, in the order of the passes."""
        names = [name for rewrite in self.passes if rewrite.lossy for name in targets_of(rewrite)]
        return list(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """The plan as plan.json holds it."""
        return {
            "passes": [rewrite.to_json() for rewrite in self.passes],
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
            pass_named(entry.name).from_json({"pass": entry.name, **(entry.model_extra or {})})
            for entry in plan.passes
        ]
        return cls(tuple(passes), plan.precision, tuple(plan.float_blocks))


class _Entry(BaseModel):
    """The JSON of a pass, which the pass itself validates."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(alias="pass")


class _PlanContent(BaseModel):
    """The JSON of a plan."""

    model_config = ConfigDict(extra="forbid")

    passes: list[_Entry] = []
    precision: Precision = "float32"
    float_blocks: list[str] = []

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.precision not in SCHEMES:
            raise ValueError(f"precision {self.precision!r} is unknown")
        if self.float_blocks and not SCHEMES[self.precision].keeps_blocks:
            raise ValueError("float_blocks apply to int8 and int4")
        return self


def targets_of(rewrite: RewritePass) -> Mapping[str, Any]:
    """The parameters of a pass by block; empty for a pass of the whole graph."""
    is_block_pass = isinstance(rewrite, BlockPass)
    return cast("BlockPass[Any, Any]", rewrite).targets if is_block_pass else {}
