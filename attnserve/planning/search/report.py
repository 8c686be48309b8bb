"""The report of a search: the content of plan.json, and its plot."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnserve.checks.compare import Fidelity
from attnserve.checks.evaluate import Share
from attnserve.planning.plan import FORMAT, Plan
from attnserve.planning.served_speed import ServedSpeed
from attnserve.reports.plots import pareto_front

__all__ = [
    "Decision",
    "Outcome",
    "PlanReport",
    "Point",
    "Recovered",
    "Round",
    "Speed",
    "draw_front",
    "mean_speedup",
]


@dataclass(frozen=True)
class Decision:
    """What becomes of one block, and why.

    Attributes:
        kept, count: The number of heads or neurons afterwards and before.
        head_size: The truncated size of queries and keys, if they are truncated.
        rank: The shared dimensions R, if heads share any.
        source: The attention whose probabilities are reused, if any.
        written: The implementation.
        ms_before, ms_after: Of the block alone, as mean over the requested lengths.
        predicted_loss: The loss at the model's output by this block alone: 1 - R^2 of embeddings
            and features, a share of the KL divergence of logits.
        in_float: Whether it stays float32 in an int8 or int4 model.
    """

    block: str
    kind: str
    kept: int
    count: int
    head_size: int | None
    rank: int | None
    source: str | None
    written: str
    ms_before: float
    ms_after: float
    predicted_loss: float
    why: str
    in_float: bool = False


@dataclass(frozen=True)
class Point:
    """A choice on the Pareto front, with measurements if it was built.

    Attributes:
        speedup: The predicted speed-up of the whole model at the requested lengths.
        predicted_loss: The sum of the losses of its blocks (``Decision``).
        measured_loss: The measured loss of the goal's measure.
    """

    speedup: float
    predicted_loss: float
    measured_loss: float | None = None
    cosine: float | None = None


@dataclass(frozen=True)
class Speed:
    """Latencies of the new model and the original at one length: medians of interleaved runs."""

    batch: int
    sequence: int
    original_ms: float
    ms: float
    speedup: float


def mean_speedup(speeds: Sequence[Speed], lengths: Collection[int]) -> float:
    """The geometric mean over these lengths; 1 if none of them was timed."""
    chosen = [speed.speedup for speed in speeds if speed.sequence in lengths]
    return float(np.exp(np.mean(np.log(chosen)))) if chosen else 1.0


@dataclass(frozen=True, eq=False)
class Proof:
    """The measurement of a built choice on data that no choice has seen.

    Attributes:
        share: The kept share of the task's score, if the goal has a task.
        loss: The largest of the losses that the goal limits, by their values.
    """

    fidelity: Fidelity
    share: Share | None
    loss: float

    def to_json(self) -> dict[str, Any]:
        return {
            "loss": self.loss,
            "share": self.share and self.share.to_json(),
            **self.fidelity.quality_json(),
        }


@dataclass(frozen=True)
class Round:
    """A choice that was built and trained.

    Attributes:
        predicted_speedup, predicted_loss: As in ``Point``.
        built_loss, loss: The measured loss on the data to choose, before and after the training.
        steps, seconds: Of the training.
        keeps: Whether the loss is one that the goal allows.
    """

    predicted_speedup: float
    predicted_loss: float
    built_loss: float
    loss: float
    steps: int
    seconds: float
    keeps: bool


@dataclass(frozen=True)
class Recovered:
    """What training added to a search.

    Attributes:
        gain: Whether a trained model is returned.
        verdict: One line for people.
        torch: The version of PyTorch.
    """

    rounds: tuple[Round, ...]
    gain: bool
    verdict: str
    torch: str


@dataclass(frozen=True, eq=False)
class Outcome:
    """A plan and its measured effect.

    Attributes:
        rewrites: The plan; empty if the original is returned.
        gain: Whether the plan is worth applying.
        fidelity, share: The proof: measured once, on data that no choice has seen; ``share`` is
            that of the task's score, if the goal has a task.
        speeds: Of the whole model, at all checked lengths.
        chosen: The same comparison on the data that the search looked at.
        proofs: Of choices like the returned one, in order; those before the last kept too little.
        recovered: The rounds of training; None without training.
        speed: What fusion, precision and removal gave; None if the original is returned.
    """

    rewrites: Plan
    gain: bool
    verdict: str
    fidelity: Fidelity
    share: Share | None
    speeds: Sequence[Speed]
    chosen: Fidelity | None
    proofs: Sequence[Proof]
    recovered: Recovered | None
    speed: ServedSpeed | None


@dataclass(frozen=True, eq=False)
class PlanReport(Outcome):
    """The outcome of a search and the reasons for it: the content of plan.json.

    Attributes:
        asked: The request.
        decisions: One per block.
        timed: The latencies of every distinct block.
        output: The file that the report was written to, if any; not part of the content.
    """

    model: Mapping[str, str]
    calibration: Mapping[str, Any]
    asked: Mapping[str, Any]
    decisions: Sequence[Decision]
    front: Sequence[Point]
    timed: Sequence[Mapping[str, Any]]
    versions: Mapping[str, str]
    machine: str
    output: Path | None = None

    @property
    def speedup(self) -> float:
        """The measured speed-up: the geometric mean over the requested lengths."""
        return mean_speedup(self.speeds, self.asked["sequences"])

    def summary(self) -> dict[str, Any]:
        """The part that is recorded with an optimized model."""
        whole = self.to_json()
        keys = (
            "asked", "verdict", "gain", "fidelity", "quality", "choose", "proofs", "speedup",
            "speeds", "machine", "recovered",
        )  # fmt: skip
        return {key: whole[key] for key in keys if key in whole}

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "model": dict(self.model),
            "calibration": dict(self.calibration),
            "asked": dict(self.asked),
            "verdict": self.verdict,
            "gain": self.gain,
            "fidelity": {
                "mean_cosine": self.fidelity.mean_cosine,
                "min_cosine": self.fidelity.min_cosine,
                "data": self.fidelity.data,
                "share": self.share and self.share.to_json(),
            },
            **self.fidelity.quality_json(),
            "choose": self.chosen and self.chosen.quality_json().get("quality"),
            "proofs": [proof.to_json() for proof in self.proofs],
            "speedup": self.speedup,
            "speeds": [asdict(speed) for speed in self.speeds],
            "speedups": self.speed and self.speed.to_json(),
            "layers": [asdict(decision) for decision in self.decisions],
            "plan": self.rewrites.to_json(),
            "front": [asdict(point) for point in self.front],
            "latency_ms": list(self.timed),
            "machine": self.machine,
            **({} if self.recovered is None else {"recovered": asdict(self.recovered)}),
            "versions": dict(self.versions),
        }


def draw_front(report: PlanReport) -> str:
    """The Pareto front as an SVG file.

    Raises:
        MissingExtra: Matplotlib is not installed.
    """
    built = [point for point in report.front if point.measured_loss is not None]
    return pareto_front(
        [(1 - point.predicted_loss, point.speedup) for point in report.front],
        [(1 - (point.measured_loss or 0.0), point.speedup) for point in built],
        (1 - report.proofs[-1].loss, report.speedup) if report.gain and report.proofs else None,
        title=report.verdict.partition(": ")[0] if report.gain else report.verdict,
    )
