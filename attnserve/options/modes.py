"""The exclusive modes of ``optimize``: a search, a plan file, or rewrites by hand."""

from __future__ import annotations

from pathlib import Path

from attnserve.context import AUTO
from attnserve.options.fields import fail
from attnserve.options.groups import Data, Goal, Rewrites, Target

__all__ = ["check_mode"]


def check_mode(
    goal: Goal, rewrites: Rewrites, data: Data, target: Target, plan: Path | None
) -> None:
    """Check that exactly one of a goal, a plan and rewrites by hand is given, with its data.

    Raises:
        InvalidArgument: Options of two modes or of none are given, or calibration data is missing.
    """
    if plan is not None and (goal.is_given or target.precision != "float32"):
        fail(
            "`plan` has all rewrites and the precision, but a goal or a precision is given too",
            "leave out `plan`, or the goal and the precision",
            "optimize.conflict",
        )
    if not goal.is_given and target.precision == AUTO:
        fail(
            "`precision` is auto: expected a goal that the precision is chosen for",
            "give `keep` or `target_speedup` too, or the name of a precision",
            "optimize.conflict",
        )
    if not goal.is_given and plan is None:
        if not rewrites.are_given and target.precision == "float32":
            requests = ", ".join(f"`{name}`" for name in Rewrites.requests())
            fail(
                "no rewrite is requested",
                "give `keep` or `target_speedup` to have rewrites chosen, or "
                f"{requests} or `precision`",
                "request.empty",
            )
        if not rewrites.refit and not rewrites.are_given:
            fail(
                "`refit` has no effect without a rewrite by hand",
                "leave it out, or request a rewrite",
                "request.conflict",
            )
        if rewrites.layers is not None and not rewrites.uses_layers:
            fail(
                "`layers` has no effect without `collab_dk`, `head_dk`, `prune`, or `reuse` without"
                " a file",
                "leave `layers` out, or give one of them",
                "request.conflict",
            )
        return
    if changed := next(iter(rewrites.changed()), None):
        name, _ = changed
        fail(
            f"`{name}` belongs to rewrites by hand, but a {'plan' if plan else 'search'} selects "
            "the rewrites",
            f"leave `{name}` out, or `plan`, `keep` and `target_speedup`",
            "optimize.conflict",
        )
    data.require()
