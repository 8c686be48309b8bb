"""Choose the form of shared query and key dimensions by measured time, at equal error.

The dense form of the paper sets the error that R stands for. The other forms need at most that
error: sparse mixing, or dimensions of their own for each head (truncation), as few as suffice. The
fastest of them is taken, in the form that serving runs, if it is at no length slower than the fused
original; shared dimensions rarely are on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, TypeVar

from attnserve.planning.plan import Plan
from attnserve.planning.requested_sharing import SharingForm
from attnserve.runtime.interleaved_timer import Speedup

__all__ = ["FormReport", "MixingChoice", "choose_mixing"]

Built = TypeVar("Built")

SAME_ERROR = 1.02
"""The largest error, relative to that of the dense form, that counts as equal."""

NO_SLOWER = 0.98
"""The lowest speed-up over the fused original at any shape; less is more than noise."""

SAME_SPEED = 1.01
"""Of two forms whose speeds differ by less, the one with the smaller error is taken."""


@dataclass(frozen=True)
class FormReport:
    """A form that was built and timed.

    Attributes:
        form: "dense", "sparse" or "own".
        error: Of the outputs on calibration data, or of the weights without.
        speedup: Over the fused original, in the form that serving runs.
        slowest: The speed-up at the slowest shape.
    """

    form: str
    error: float
    speedup: Speedup
    slowest: float

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "speedup": self.speedup.to_json()}


@dataclass(frozen=True)
class MixingChoice:
    """The chosen form, all forms that were timed, and the reason."""

    chosen: str
    forms: tuple[FormReport, ...]
    why: str

    def to_json(self) -> dict[str, Any]:
        forms = [form.to_json() for form in self.forms]
        return {"chosen": self.chosen, "why": self.why, "forms": forms}


def choose_mixing(
    plans: Mapping[SharingForm, Plan],
    build: Callable[[Plan], Built],
    error_of: Callable[[Built], float],
    speeds_of: Callable[[Sequence[Built]], Sequence[tuple[Speedup, float]] | None],
) -> tuple[Built, MixingChoice | None]:
    """Build the forms, compare them, and return the fastest one.

    Args:
        plans: By form, the dense one first; own dimensions in several sizes, ascending.
        build: Applies a plan.
        error_of: The error of a built form.
        speeds_of: Speed-ups of built forms over the fused original, the mean and the slowest; None
            if they cannot be timed.

    Returns:
        The built form, and the report; the dense form and None if forms cannot be timed.
    """
    built: dict[str, Built] = {}
    errors: dict[str, float] = {}
    for kind, forms in groupby(plans, key=lambda form: form.kind):
        for form in forms:  # the first with at most the error of the dense form
            built[kind] = build(plans[form])
            errors[kind] = error_of(built[kind])
            if errors[kind] <= SAME_ERROR * errors["dense"]:
                break
    able = [kind for kind, error in errors.items() if error <= SAME_ERROR * errors["dense"]]
    speeds = speeds_of([built[kind] for kind in able])
    if speeds is None:
        return built["dense"], None
    reports = {
        kind: FormReport(kind, errors[kind], mean, slowest)
        for kind, (mean, slowest) in zip(able, speeds, strict=True)
    }
    steady = [one for one in reports.values() if one.slowest >= NO_SLOWER]
    fastest = max(one.speedup.value for one in steady or reports.values())
    near = [one for one in steady or reports.values() if SAME_SPEED * one.speedup.value >= fastest]
    chosen = min(near, key=lambda one: one.error)
    what = "at no length slower than it" if steady else "each form is slower than it at a length"
    others = [one for one in reports.values() if one is not chosen]
    beside = ", ".join(f"{one.form} {one.speedup.value:.2f}x" for one in others)
    lossier = [kind for kind in errors if kind not in able]
    why = (
        f"{chosen.speedup.value:.2f}x the speed of the fused original, {what}"
        + (f"; {beside}" if beside else "")
        + (f"; {' and '.join(lossier)} lost more than dense" if lossier else "")
    )
    return built[chosen.form], MixingChoice(chosen.form, tuple(reports.values()), why)
