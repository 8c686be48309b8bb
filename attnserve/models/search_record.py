"""The search of a plan as plan.json and attnserve.json record it; ``PlanRecord`` adds the plan."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BeforeValidator, Field, FiniteFloat

from attnserve.models.measured import COSINES, Fidelity, Measured, Quality, ShapeLatency, Share
from attnserve.models.recorded import Always, Recorded
from attnserve.runtime.times import Speedup

__all__ = [
    "GoalRecord",
    "HeldOutComparison",
    "Point",
    "PrecisionPoint",
    "Round",
    "SearchFidelity",
    "SearchRecord",
    "TrainingRounds",
]


def _present_name(measure: object) -> object:
    """Current name of a measure; 0.1 wrote "mean output cosine" or "share of the X score"."""
    if isinstance(measure, str) and " " in measure:
        return "score" if measure.endswith(" score") else "cosine"
    return measure


class GoalRecord(Recorded, frozen=True):
    """The request of a search; see ``options.Goal``.

    Attributes:
        precision: The precision of the search; with ``AUTO``, the one that was chosen.
        runtime: The runtime in which losses are measured.
    """

    keep: Always[float | None] = None
    target_speedup: Always[float | None] = None
    measure: Annotated[str, BeforeValidator(_present_name)] = "auto"
    task: Always[str | None] = None
    eval_data: Always[str | None] = None
    eval_data_sha256: Always[str | None] = None
    allow: tuple[str, ...] = ()
    precision: str = "float32"
    batch: Annotated[int, Field(ge=1)] = 1
    sequences: tuple[Annotated[int, Field(ge=1)], ...] = ()
    phase: str = "sequence"
    provider: str = "cpu"
    runtime: str = "onnxruntime"
    threads: Annotated[int, Field(ge=0)] = 0
    seed: Annotated[int, Field(strict=True, ge=0)] = 0
    recover: float | None = None


class HeldOutComparison(Measured, frozen=True):
    """A comparison of a model with the original on held-out data, to choose or to verify.

    Attributes:
        fidelity: The comparison of the outputs; only its qualities are recorded.
        loss: The largest of the losses that the goal limits; see ``Losses``.
        share: The kept share of the task's score, if the goal has a task.
        part: The held-out part that it is measured on: the name of a ``checks.held_out.HeldOut``.
    """

    fidelity: Fidelity = Field(default=Fidelity(), exclude=True)
    loss: FiniteFloat
    share: Always[Share | None] = None
    part: str = ""


class Round(Recorded, frozen=True):
    """One choice that was built and trained.

    Attributes:
        predicted_speedup, predicted_loss: As in ``Point``.
        built_loss, loss: The measured loss on the data to choose, before and after the training.
        steps, seconds: Steps and time of the training.
        keeps: Whether the loss is within the goal.
    """

    predicted_speedup: float
    predicted_loss: float
    built_loss: float
    loss: float
    steps: int
    seconds: float
    keeps: bool


class TrainingRounds(Recorded, frozen=True):
    """The training rounds of a search.

    Attributes:
        gain: Whether a trained model is returned.
        verdict: One line for people.
        torch: The version of PyTorch.
    """

    rounds: tuple[Round, ...]
    gain: bool
    verdict: str
    torch: str

    def without_gain(self, reason: str) -> Self:
        """The same rounds, whose trained model is not returned."""
        verdict = f"training brings no gain: {reason}"
        return self.model_copy(update={"gain": False, "verdict": verdict})


class SearchFidelity(Fidelity, frozen=True):
    """The comparison of the returned choice, and the kept share of the task's score."""

    share: Always[Share | None] = None


class Point(Recorded, frozen=True):
    """A choice on the Pareto front, with measurements if it was built.

    Attributes:
        speedup: The predicted speed-up of the whole model at the requested lengths.
        predicted_loss: The sum of the losses of its blocks (``Decision``).
        measured_loss: The measured loss of the goal's measure.
    """

    speedup: float
    predicted_loss: float
    measured_loss: float | None
    cosine: float | None


class PrecisionPoint(Recorded, frozen=True):
    """The original in one precision, with fused operators, as a search with any precision saw it.

    Attributes:
        runtime: The runtime in which a search in this precision times models.
        speedup: The speed-up over the fused original in float32 in the default runtime.
        loss: The loss on the rows to choose; a confidence bound.
        unused: Why the result has another precision; empty if it has this one.
        front: The choices of the search in this precision, if there was one. Their speed-ups are
            over the fused original in float32, as that of the precision.
    """

    precision: str
    runtime: str
    speedup: Speedup
    loss: FiniteFloat
    unused: str = ""
    front: tuple[Point, ...] = ()


class SearchRecord(Measured, frozen=True):
    """The part of plan.json that is recorded with an optimized model; see ``PlanRecord``.

    Attributes:
        fidelity, quality, qualities: The result of the verification of the returned choice.
        goal: The goal of the search, with its workloads and its device.
        quality_to_choose: The same quality on the rows to choose, by which the plan was chosen.
        verifications: All verifications of choices, in order; all but the last missed the goal.
        speedup: The geometric mean over the requested lengths; 1 without a gain.
        speeds: The original in the default runtime, and the result in that of its precision, at
            each length; none without a gain.
        timed_runtime: The runtime in which blocks and candidates were timed.
        front: The choices on the Pareto front.
        precisions: The compared precisions; none if the request named one.
    """

    goal: Annotated[GoalRecord, Field(alias="asked")] = GoalRecord()
    verdict: str = ""
    gain: bool = False
    fidelity: Annotated[SearchFidelity, COSINES] = SearchFidelity()
    quality_to_choose: Annotated[Quality | None, Field(alias="choose")] = None
    verifications: Annotated[tuple[HeldOutComparison, ...], Field(alias="proofs")] = ()
    speedup: FiniteFloat | None = None
    speeds: tuple[ShapeLatency, ...] = ()
    timed_runtime: str = ""
    machine: str | None = None
    recovered: TrainingRounds | None = None
    front: tuple[Point, ...] = ()
    precisions: tuple[PrecisionPoint, ...] = ()

    @property
    def kept(self) -> float | None:
        """The kept quality of the result on the rows of its verification; None without a gain."""
        return 1 - self.verifications[-1].loss if self.gain and self.verifications else None

    @property
    def guaranteed(self) -> float | None:
        """The share of each quality that it guarantees; None if it guarantees a score or nothing.

        Without it, each quality has its own guarantee.
        """
        return self.goal.keep if self.gain and self.goal.measure != "score" else None
