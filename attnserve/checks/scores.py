"""Scores of a task with bootstrap confidence intervals, and the kept share of a score.

A larger ``value`` is better.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.checks.held_out import TASK_PARTS, HeldOut
from attnserve.intervals import bootstrap, bootstrap_interval, ratio_lower_bound
from attnserve.limits import SELECTION_CONFIDENCE
from attnserve.literals import TaskName
from attnserve.models.measured import Losses, Share
from graph_passes.errors import CheckFailed

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "ClassificationScore",
    "PerplexityScore",
    "RatioScore",
    "Score",
    "StsScore",
    "pearson",
    "share_kept",
    "spearman",
]

BLOCKS = 120
"""Number of blocks of rows in the comparison of two models."""


@dataclass(frozen=True, eq=False)
class StsScore:
    """Correlation of the model's cosines with human scores, -1 to 1.

    ``cosines`` are the model's outputs and ``gold`` the human scores, one per row of the file.
    """

    rows: int
    spearman: float
    pearson: float
    spearman_ci95: tuple[float, float]
    cosines: Float[np.ndarray, " N"] = field(repr=False)
    gold: Float[np.ndarray, " N"] = field(repr=False)

    @classmethod
    def of(
        cls, cosines: Float[np.ndarray, " N"], gold: Float[np.ndarray, " N"], seed: int
    ) -> StsScore:
        """The score with its interval."""
        score = cls(
            rows=len(gold),
            spearman=float(spearman(cosines, gold)),
            pearson=float(pearson(cosines, gold)),
            spearman_ci95=(0.0, 0.0),
            cosines=cosines,
            gold=gold,
        )
        interval = bootstrap_interval(score.value_on, len(gold), seed=seed)
        return replace(score, spearman_ci95=interval)

    @property
    def value(self) -> float:
        return self.spearman

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        """Spearman's correlation on a sample of the rows; NaN if one side is constant."""
        return spearman(self.cosines[rows], self.gold[rows])

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "sts",
            "rows": self.rows,
            "spearman": self.spearman,
            "pearson": self.pearson,
            "spearman_ci95": list(self.spearman_ci95),
        }


@dataclass(frozen=True, eq=False)
class ClassificationScore:
    """The share of rows whose largest logit belongs to the label, 0 to 1.

    ``predictions`` are the predicted classes and ``gold`` the labels, one per row of the file.
    """

    rows: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    predictions: Int[np.ndarray, " N"] = field(repr=False)
    gold: Int[np.ndarray, " N"] = field(repr=False)
    task: TaskName = "classification"

    @classmethod
    def of(
        cls,
        predictions: Int[np.ndarray, " N"],
        gold: Int[np.ndarray, " N"],
        seed: int,
        task: TaskName = "classification",
    ) -> ClassificationScore:
        """The score with its interval."""
        share = float((predictions == gold).mean())
        score = cls(
            rows=len(gold),
            accuracy=share,
            accuracy_ci95=(0.0, 0.0),
            predictions=predictions,
            gold=gold,
            task=task,
        )
        return replace(
            score, accuracy_ci95=bootstrap_interval(score.value_on, len(gold), seed=seed)
        )

    @property
    def value(self) -> float:
        return self.accuracy

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        """The accuracy on a sample of the rows."""
        return (self.predictions[rows] == self.gold[rows]).mean(axis=-1)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "rows": self.rows,
            "accuracy": self.accuracy,
            "accuracy_ci95": list(self.accuracy_ci95),
        }


@dataclass(frozen=True, eq=False)
class RatioScore:
    """A ratio of two sums over the rows, 0 to 1: a mean if each row has the weight one, or an F1.

    ``gains`` and ``weights`` have one number per row. ``others`` are further results by name.
    """

    task: str
    metric: str
    ci95: tuple[float, float]
    gains: Float[np.ndarray, " N"] = field(repr=False)
    weights: Float[np.ndarray, " N"] = field(repr=False)
    others: dict[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of(
        cls,
        task: str,
        metric: str,
        gains: Float[np.ndarray, " N"],
        weights: Float[np.ndarray, " N"],
        seed: int,
        **others: float,
    ) -> RatioScore:
        """The score with its interval."""
        score = cls(
            task=task,
            metric=metric,
            ci95=(0.0, 0.0),
            gains=gains,
            weights=weights,
            others=others,
        )
        return replace(score, ci95=bootstrap_interval(score.value_on, len(gains), seed=seed))

    @property
    def rows(self) -> int:
        return len(self.gains)

    @property
    def value(self) -> float:
        return float(self.value_on(np.arange(self.rows)))

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        """The score of a sample of the rows; NaN if all weights are zero."""
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.gains[rows].sum(axis=-1) / self.weights[rows].sum(axis=-1)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": self.task,
            "rows": self.rows,
            self.metric: self.value,
            f"{self.metric}_ci95": list(self.ci95),
            **self.others,
        }


@dataclass(frozen=True, eq=False)
class PerplexityScore:
    """The perplexity of the next token: the exponential of the mean negative log-likelihood.

    ``nats`` is the sum over the ``tokens`` predicted tokens of a row. ``value`` is 1 / perplexity.
    """

    nats: Float[np.ndarray, " N"] = field(repr=False)
    tokens: Float[np.ndarray, " N"] = field(repr=False)
    perplexity_ci95: tuple[float, float]

    @classmethod
    def of(
        cls, nats: Float[np.ndarray, " N"], tokens: Float[np.ndarray, " N"], seed: int
    ) -> PerplexityScore:
        """The score with its interval."""
        score = cls(nats, tokens, (0.0, 0.0))
        low, high = bootstrap_interval(score.value_on, len(nats), seed=seed)
        return replace(score, perplexity_ci95=(1 / high, 1 / low))

    @property
    def rows(self) -> int:
        return len(self.nats)

    @property
    def value(self) -> float:
        return float(self.value_on(np.arange(self.rows)))

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        return np.exp(-self.nats[rows].sum(axis=-1) / self.tokens[rows].sum(axis=-1))

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "perplexity",
            "rows": self.rows,
            "perplexity": 1 / self.value,
            "perplexity_ci95": list(self.perplexity_ci95),
            "tokens": int(self.tokens.sum()),
        }


Score = StsScore | ClassificationScore | RatioScore | PerplexityScore


def share_kept(
    before: Score,
    after: Score,
    *,
    part: HeldOut = HeldOut.ALL,
    seed: int = 0,
) -> Share:
    """The score of a rewritten model divided by the original's, on the same rows.

    The bootstrap draws the same rows for both models, so that common errors cancel. It draws
    ``BLOCKS`` blocks of consecutive rows (Kuensch 1989), because files are often sorted by source.

    Args:
        part: The rows to use. Each part comes from the whole file; files of a few rows are not
            split.

    Raises:
        CheckFailed: The score of the original is not positive.
    """
    blocks = np.array_split(np.arange(before.rows), min(BLOCKS, before.rows))
    if part is not HeldOut.ALL and len(blocks) >= 2 * len(TASK_PARTS):
        blocks = [b for i, b in enumerate(blocks) if TASK_PARTS[i % len(TASK_PARTS)] is part]
    rows = np.concatenate(blocks)
    reference = float(before.value_on(rows))
    if not reference > 0:
        raise CheckFailed(
            f"the original's score is {reference:.4f}: expected a positive score",
            "check that the data, the task and the pooling fit the model",
            code="evaluate.score_not_positive",
        )

    def ratio(drawn: Int[np.ndarray, " N"]) -> float:
        rows = np.concatenate([blocks[i] for i in drawn])
        with np.errstate(invalid="ignore", divide="ignore"):
            return float(np.divide(after.value_on(rows), before.value_on(rows)))

    def each(drawn: Int[np.ndarray, "M N"]) -> Float[np.ndarray, " M"]:
        return np.apply_along_axis(ratio, -1, drawn)

    ratios = bootstrap(each, len(blocks), seed=seed)
    spread = float(np.std(ratios)) if len(ratios) > 1 else 0.0
    value = float(np.nan_to_num(after.value_on(rows) / reference))
    error = spread * (len(blocks) / max(len(blocks) - 1, 1)) ** 0.5
    bound = ratio_lower_bound(value, error, len(blocks), SELECTION_CONFIDENCE)
    losses = Losses(1 - value, 1 - bound)
    return Share(value=value, standard_error=error, rows=len(rows), losses=losses)


def pearson(x: Float[np.ndarray, "*M N"], y: Float[np.ndarray, "*M N"]) -> Any:
    """Pearson's correlation over the last axis; NaN if one of the samples is constant."""
    x = x - x.mean(axis=-1, keepdims=True)
    y = y - y.mean(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):
        return (x * y).sum(axis=-1) / np.sqrt((x * x).sum(axis=-1) * (y * y).sum(axis=-1))


def spearman(x: Float[np.ndarray, "*M N"], y: Float[np.ndarray, "*M N"]) -> Any:
    """Spearman's rank correlation over the last axis; ties get the mean of their ranks."""
    from scipy.stats import rankdata

    return pearson(rankdata(x, axis=-1), rankdata(y, axis=-1))
