"""Scores of a task with bootstrap confidence intervals, and the kept share of a score.

A larger ``value`` is better.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.checks.held_out import TASK_PARTS, HeldOut
from attnserve.intervals import bootstrap, bootstrap_interval, ratio_lower_bound
from attnserve.limits import SELECTION_CONFIDENCE
from attnserve.literals import TaskName
from attnserve.models.measured import Losses, Share
from graph_passes.errors import CheckFailed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = [
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
class Score(ABC):
    """The score of a task on the rows of a file.

    Attributes:
        seed: The seed of the bootstrap.
    """

    seed: int = field(kw_only=True)

    @property
    @abstractmethod
    def rows(self) -> int: ...

    @abstractmethod
    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        """The score of a sample of the rows; NaN if it is not defined."""

    @cached_property
    def value(self) -> float:
        return float(self.value_on(np.arange(self.rows)))

    @cached_property
    def ci95(self) -> tuple[float, float]:
        """The interval of ``value``."""
        return bootstrap_interval(self.value_on, self.rows, seed=self.seed)

    @abstractmethod
    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, eq=False)
class StsScore(Score):
    """Spearman's correlation of the model's cosines with human scores, -1 to 1.

    ``cosines`` are the model's outputs and ``gold`` the human scores, one per row of the file.
    """

    cosines: Float[np.ndarray, " N"] = field(repr=False)
    gold: Float[np.ndarray, " N"] = field(repr=False)

    @property
    def rows(self) -> int:
        return len(self.gold)

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        return spearman(self.cosines[rows], self.gold[rows])

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "sts",
            "rows": self.rows,
            "spearman": self.value,
            "pearson": float(pearson(self.cosines, self.gold)),
            "spearman_ci95": list(self.ci95),
        }


@dataclass(frozen=True, eq=False)
class RatioScore(Score):
    """A ratio of two sums over the rows, 0 to 1: a mean if each row has the weight one, or an F1.

    ``gains`` and ``weights`` have one number per row. ``others`` are further results by name.
    """

    task: TaskName
    metric: str
    gains: Float[np.ndarray, " N"] = field(repr=False)
    weights: Float[np.ndarray, " N"] = field(repr=False)
    others: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def mean(
        cls,
        task: TaskName,
        metric: str,
        values: Bool[np.ndarray, " N"] | Float[np.ndarray, " N"],
        *,
        seed: int,
        **others: float,
    ) -> RatioScore:
        """The mean of a value of each row: whether it is right, or a measure of a ranking."""
        return cls(task, metric, values.astype(float), np.ones(len(values)), others, seed=seed)

    @property
    def rows(self) -> int:
        return len(self.gains)

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
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
class PerplexityScore(Score):
    """The perplexity of the next token: the exponential of the mean negative log-likelihood.

    ``nats`` is the sum over the ``tokens`` predicted tokens of a row. ``value`` is 1 / perplexity.
    """

    nats: Float[np.ndarray, " N"] = field(repr=False)
    tokens: Float[np.ndarray, " N"] = field(repr=False)

    @property
    def rows(self) -> int:
        return len(self.nats)

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        return np.exp(-self.nats[rows].sum(axis=-1) / self.tokens[rows].sum(axis=-1))

    def to_json(self) -> dict[str, Any]:
        low, high = self.ci95
        return {
            "task": "perplexity",
            "rows": self.rows,
            "perplexity": 1 / self.value,
            "perplexity_ci95": [1 / high, 1 / low],
            "tokens": int(self.tokens.sum()),
        }


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
