"""The fields of the groups as keywords, for type checkers.

Written by ``python -m tests.attnserve.options.make_keywords``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, TypedDict

from attnserve.context import (
    Provider,
)
from attnserve.literals import (
    Alignment,
    Importance,
    LearnedTask,
    Measure,
    MixingOption,
    Pooling,
    SearchMeasure,
    TaskName,
)
from attnserve.options.fields import (
    Allowed,
)
from graph_passes.analysis.workload import (
    Phase,
)

__all__ = [
    "ComparisonKeywords",
    "DataKeywords",
    "GoalKeywords",
    "RewritesKeywords",
    "RunKeywords",
    "ScoringKeywords",
    "TargetKeywords",
    "TimingKeywords",
    "TrainingKeywords",
    "WriteKeywords",
]


class GoalKeywords(TypedDict, total=False):
    """The fields of ``Goal``."""

    keep: float | None
    target_speedup: float | None
    eval_data: str | PathLike[str] | None
    task: TaskName | None
    measure: SearchMeasure
    allow: Sequence[Allowed] | Allowed
    recover: float | str | None
    training: str


class RewritesKeywords(TypedDict, total=False):
    """The fields of ``Rewrites``."""

    collab_dk: int | Sequence[int] | Mapping[str, int] | str | None
    mixing: MixingOption
    head_dk: int | None
    collab_cache: bool
    reuse: str | PathLike[str] | Mapping[str, Any] | None
    align: Alignment
    prune: float | None
    importance: Importance
    prune_heads: str | PathLike[str] | Mapping[str, Any] | None
    skip: Sequence[str] | str
    ffn: float | None
    strip_cache: bool
    layers: Sequence[str] | str | None
    refit: bool


class DataKeywords(TypedDict, total=False):
    """The fields of ``Data``."""

    calib: str | PathLike[str] | Sequence[str | PathLike[str]]
    also_prove: str | PathLike[str] | Sequence[str | PathLike[str]]
    calib_weights: Sequence[float] | str
    tokenizer: str | PathLike[str] | None


class TargetKeywords(TypedDict, total=False):
    """The fields of ``Target``."""

    precision: str
    batch: int
    sequence: int | tuple[int, int] | str | None
    phase: Phase | None


class RunKeywords(TypedDict, total=False):
    """The fields of ``Run``."""

    threads: int
    provider: Provider
    runtime: str
    seed: int


class WriteKeywords(TypedDict, total=False):
    """The fields of ``Write``."""

    min_cosine: float | None
    external_data: bool
    openvino: bool
    dry_run: bool
    force: bool


class TrainingKeywords(TypedDict, total=False):
    """The fields of ``Training``."""

    minutes: float
    int8: bool
    task: LearnedTask | None
    measure: Measure


class ComparisonKeywords(TypedDict, total=False):
    """The fields of ``Comparison``."""

    data: str | PathLike[str] | Sequence[str | PathLike[str]]
    measure: Measure
    tokenizer: str | PathLike[str] | None


class ScoringKeywords(TypedDict, total=False):
    """The fields of ``Scoring``."""

    task: TaskName | None
    data: str | PathLike[str] | None
    pooling: Pooling | None
    max_length: int | None
    tokenizer: str | PathLike[str] | None


class TimingKeywords(TypedDict, total=False):
    """The fields of ``Timing``."""

    batches: int | Sequence[int] | str
    sequences: int | Sequence[int] | str
    rounds: int | None
