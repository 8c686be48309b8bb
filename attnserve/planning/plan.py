"""Plan: the rewrites of a model, in order, and the precision of its weights."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

from attnserve.choices import Precision
from graph_passes.errors import InvalidArgument
from graph_passes.passes.base import BlockPass, RewritePass, pass_named

__all__ = ["FORMAT", "HOW_TO_PLAN", "ORDER", "Plan"]

FORMAT = 2
"""Of plan.json. Format 1 (attnserve 0.1) described rewrites by other names and is refused."""

HOW_TO_PLAN = "make a new plan with `attnserve plan`"

ORDER = (
    "skip_attention",
    "prune_heads",
    "reuse_attention",
    "prune_neurons",
    "collaborate",
    "fuse_attention",
    "fuse_gelu",
    "fold_biases",
    "fuse_residuals",
)
"""The order in which the planner and requests apply passes, other passes last; a plan.json may have
any other."""

Kind = TypeVar("Kind", bound=RewritePass)


@dataclass(frozen=True, eq=False)
class Plan:
    """Rewrites to apply, in order, then the precision to convert to.

    Each pass refers to blocks and heads as its predecessors leave them.
    """

    passes: tuple[RewritePass, ...] = ()
    precision: Precision = "float32"

    @classmethod
    def of(cls, passes: Iterable[RewritePass], precision: Precision = "float32") -> Plan:
        """A plan of passes in any order: those of a kind are merged, and all are put in ``ORDER``.

        Args:
            passes: Those without targets are dropped.
        """
        merged: dict[type[RewritePass], RewritePass] = {}
        for each in passes:
            if isinstance(each, BlockPass):
                block_pass = cast("BlockPass[Any, Any]", each)
                before = cast("BlockPass[Any, Any] | None", merged.get(type(each)))
                targets = {**(before.targets if before else {}), **block_pass.targets}
                if targets:
                    merged[type(each)] = type(block_pass)(targets)
            else:
                merged[type(each)] = each
        place = {name: index for index, name in enumerate(ORDER)}
        found = sorted(merged.values(), key=lambda each: place.get(each.name, len(ORDER)))
        return cls(tuple(found), precision)

    def find(self, kind: type[Kind]) -> Kind | None:
        """The first pass of a kind."""
        return next((each for each in self.passes if isinstance(each, kind)), None)

    def targets(self, kind: type[RewritePass]) -> Mapping[str, Any]:
        """The parameters of all passes of a kind, by block; empty if there is none."""
        found: dict[str, Any] = {}
        for each in self.passes:
            if isinstance(each, kind) and isinstance(each, BlockPass):
                block_pass = cast("BlockPass[Any, Any]", each)
                found |= block_pass.targets
        return found

    @property
    def changed(self) -> list[str]:
        """Every block that a lossy pass rewrites, once, in the order of the passes."""
        lossy = [each for each in self.passes if each.lossy and isinstance(each, BlockPass)]
        names = [name for each in lossy for name in cast("BlockPass[Any, Any]", each).targets]
        return list(dict.fromkeys(names))

    def to_json(self) -> dict[str, Any]:
        """The plan as plan.json holds it."""
        return {"passes": [each.to_json() for each in self.passes], "precision": self.precision}

    @classmethod
    def from_json(cls, content: Any) -> Plan:
        """Read what ``to_json`` wrote. Blocks and parameters are checked when the plan is applied.

        Raises:
            InvalidArgument: The content is not a plan.
        """
        if not isinstance(content, Mapping):
            raise _invalid(f"plan is {reprlib.repr(content)}, expected an object")
        fields = cast(Mapping[str, Any], content)
        if unknown := sorted(map(str, fields.keys() - {"passes", "precision"})):
            raise _invalid(f"plan has the unknown key {unknown[0][:100]!r}")
        precision = fields.get("precision", "float32")
        if not isinstance(precision, str) or precision not in get_args(Precision):
            known = ", ".join(get_args(Precision))
            raise _invalid(f"precision is {reprlib.repr(precision)}, expected one of {known}")
        entries = fields.get("passes", [])
        if not isinstance(entries, list):
            raise _invalid(f"passes is {reprlib.repr(entries)}, expected a list")
        passes = [_read_pass(entry) for entry in cast(list[Any], entries)]
        return cls(tuple(passes), cast(Precision, precision))


def _read_pass(entry: Any) -> RewritePass:
    name = cast(Mapping[str, Any], entry).get("pass") if isinstance(entry, Mapping) else None
    if not isinstance(name, str):
        raise _invalid(f"an entry of passes is {reprlib.repr(entry)}, expected an object with pass")
    return pass_named(name).from_json(cast(Mapping[str, Any], entry))


def _invalid(what: str) -> InvalidArgument:
    return InvalidArgument(what, HOW_TO_PLAN, code="plan.invalid")
