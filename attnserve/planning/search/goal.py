"""The goal and the input of a search for a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import onnx_ir as ir

from attnserve.checks.evaluate import TASKS, TaskName
from attnserve.choices import Precision, SearchMeasure
from attnserve.context import RunContext
from attnserve.data.datasets import Dataset
from attnserve.models.artifact import Artifact
from attnserve.models.lineage import Asked
from graph_passes.errors import InvalidArgument

__all__ = ["Allowed", "Goal", "SearchInput"]

Allowed = Literal["ffn"]


@dataclass(frozen=True)
class Goal:
    """What a plan must keep or reach, and which rewrites it may use.

    Attributes:
        keep: The value of the measure to keep, at the lower end of its 95 % interval on data that
            the fit did not see; with ``task``, the share of the task's score to keep as well.
        target_speedup: The speed-up to reach with the least loss, instead of ``keep``.
        task, eval_data: The score, and the file on which it is measured.
        measure: The measure of quality; "auto" chooses it by the kind of output, "score" limits
            the loss of the task's score alone.
        allow: Rewrites besides those of attention.
        precision: Of the weights, after all rewrites.
        recover: Minutes of training, for choices that lose more than the goal allows without it.
    """

    keep: float | None = None
    target_speedup: float | None = None
    task: TaskName | None = None
    eval_data: Path | None = None
    allow: tuple[Allowed, ...] = ()
    precision: Precision = "float32"
    measure: SearchMeasure = "auto"
    recover: float | None = None

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.target_speedup is None):
            raise InvalidArgument(
                "a search needs one goal: `keep` or `target_speedup`",
                "give exactly one of them",
                code="goal.conflict",
            )
        if self.keep is not None and not 0 < self.keep <= 1:
            raise InvalidArgument(
                f"`keep` is {self.keep}: expected a share, more than 0 and at most 1",
                "for example 0.99",
                code="goal.range",
            )
        if self.target_speedup is not None and not 1 <= self.target_speedup < 1000:
            raise InvalidArgument(
                f"`target_speedup` is {self.target_speedup}: expected a factor from 1 to 1000",
                "for example 1.5",
                code="goal.range",
            )
        if (self.task is None) != (self.eval_data is None):
            raise InvalidArgument(
                "`eval_data` and `task` belong together: the file, and the score to compute on it",
                f"give both; `task` is {' or '.join(TASKS)}",
                code="goal.conflict",
            )
        if self.measure == "score" and self.task is None:
            raise InvalidArgument(
                "`measure` is score: expected a score to measure",
                "give `eval_data` and `task` too",
                code="goal.conflict",
            )
        if self.recover is not None and not 0 < self.recover < math.inf:
            raise InvalidArgument(
                f"`recover` is {self.recover}: expected minutes of training, more than 0",
                "give for example 20",
                code="goal.recover",
            )
        for name in self.allow:
            if name not in get_args(Allowed):
                raise InvalidArgument(
                    f"`allow` names {name!r}: expected {', '.join(get_args(Allowed))}",
                    "for example ffn",
                    code="goal.allow",
                )


@dataclass(frozen=True, eq=False)
class SearchInput:
    """Everything that a search is given; no step changes it.

    Attributes:
        lengths: The sequence lengths at which the model should be fast.
        checked_lengths: All lengths at which the whole model is timed.
        shape: (batch, middle length), at which MACs are counted.
        asked: The request as plan.json records it.
    """

    goal: Goal
    artifact: Artifact
    model: ir.Model
    data: Dataset
    tokenizer: Path | None
    batch: int
    lengths: tuple[int, ...]
    checked_lengths: Sequence[int]
    shape: tuple[int, int]
    context: RunContext
    asked: Asked
