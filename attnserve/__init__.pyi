"""The functions with all their keywords, for type checkers.

Written by ``python -m tests.attnserve.options.make_stub``.
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from attnserve.checks.benchmark import BenchReport
from attnserve.checks.inspect import Inspection
from attnserve.checks.scores import Score
from attnserve.context import Progress, Provider
from attnserve.exporters.hugging_face import ExportReport
from attnserve.integrations.mteb import MtebReport
from attnserve.literals import (
    Alignment,
    Attention,
    Exporter,
    Importance,
    LearnedTask,
    Measure,
    MixingOption,
    Pooling,
    SearchMeasure,
    TaskName,
    TrainedPrecision,
)
from attnserve.models.measured import Fidelity
from attnserve.options import (
    Comparison,
    Data,
    Goal,
    Rewrites,
    Run,
    Scoring,
    Target,
    Timing,
    Training,
    Write,
)
from attnserve.options.fields import Allowed
from attnserve.paths import StrPath
from attnserve.planning.optimize import OptimizeReport
from attnserve.planning.plan_command import PlanReport
from attnserve.planning.verify_again import VerifyAgainReport
from attnserve.recovery.report import RecoverReport
from attnserve.reports.analysis import Analysis
from attnserve.reports.model_report import ModelReport
from graph_passes.analysis.workload import Phase

__all__ = [
    "Comparison",
    "Data",
    "Goal",
    "Rewrites",
    "Run",
    "Scoring",
    "Target",
    "Timing",
    "Training",
    "Write",
    "__version__",
    "analyze",
    "bench",
    "evaluate",
    "evaluate_mteb",
    "export",
    "inspect",
    "optimize",
    "plan",
    "recover",
    "report",
    "verify",
    "verify_again",
]

__version__: str

def analyze(
    model: StrPath,
    output: StrPath | None = ...,
    *,
    calib: StrPath,
    tokenizer: StrPath | None = ...,
    groups: int | None = ...,
    run: Run = ...,
    force: bool = ...,
    progress: Progress | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> Analysis: ...
def bench(
    models: Sequence[Path | str],
    *,
    timing: Timing = ...,
    run: Run = ...,
    progress: Progress | None = ...,
    batches: int | Sequence[int] | str = ...,
    sequences: int | Sequence[int] | str = ...,
    rounds: int | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> BenchReport: ...
def evaluate(
    model: StrPath,
    *,
    scoring: Scoring = ...,
    run: Run = ...,
    batch_size: int = ...,
    progress: Progress | None = ...,
    task: TaskName | None = ...,
    data: str | PathLike[str] | None = ...,
    pooling: Pooling | None = ...,
    max_length: int | None = ...,
    tokenizer: str | PathLike[str] | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> Score: ...
def evaluate_mteb(
    model: StrPath,
    tasks: str | Sequence[str],
    *,
    data: StrPath | None = ...,
    output: StrPath | None = ...,
    run: Run = ...,
    batch_size: int = ...,
    force: bool = ...,
    progress: Progress | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> MtebReport: ...
def export(
    model: StrPath,
    folder: StrPath,
    *,
    task: str | None = ...,
    exporter: Exporter = ...,
    opset: int | None = ...,
    attention: Attention = ...,
    dimensions: int | None = ...,
    openvino: bool = ...,
    seed: int = ...,
    force: bool = ...,
) -> ExportReport: ...
def inspect(
    model: StrPath,
    *,
    batch: int = ...,
    sequence: int = ...,
    seed: int = ...,
) -> Inspection: ...
def optimize(
    model: StrPath,
    output: StrPath | None = ...,
    *,
    rewrites: Rewrites = ...,
    goal: Goal = ...,
    data: Data = ...,
    target: Target = ...,
    run: Run = ...,
    write: Write = ...,
    plan: StrPath | None = ...,
    progress: Progress = ...,
    collab_dk: int | Sequence[int] | Mapping[str, int] | str | None = ...,
    mixing: MixingOption = ...,
    head_dk: int | None = ...,
    collab_cache: bool = ...,
    reuse: str | PathLike[str] | Mapping[str, Any] | None = ...,
    align: Alignment = ...,
    prune: float | None = ...,
    importance: Importance = ...,
    prune_heads: str | PathLike[str] | Mapping[str, Any] | None = ...,
    skip: Sequence[str] | str = ...,
    ffn: float | None = ...,
    strip_cache: bool = ...,
    layers: Sequence[str] | str | None = ...,
    refit: bool = ...,
    keep: float | None = ...,
    target_speedup: float | None = ...,
    eval_data: str | PathLike[str] | None = ...,
    task: TaskName | None = ...,
    measure: SearchMeasure = ...,
    allow: Sequence[Allowed] | Allowed = ...,
    recover: float | str | None = ...,
    training: str = ...,
    calib: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    also_prove: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    calib_weights: Sequence[float] | str = ...,
    tokenizer: str | PathLike[str] | None = ...,
    precision: str = ...,
    batch: int | None = ...,
    sequence: int | tuple[int, int] | str | None = ...,
    phase: Phase | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
    min_cosine: float | None = ...,
    external_data: bool = ...,
    openvino: bool = ...,
    dry_run: bool = ...,
    force: bool = ...,
) -> OptimizeReport: ...
def plan(
    model: StrPath,
    output: StrPath | None = ...,
    *,
    goal: Goal = ...,
    data: Data = ...,
    target: Target = ...,
    run: Run = ...,
    force: bool = ...,
    progress: Progress = ...,
    keep: float | None = ...,
    target_speedup: float | None = ...,
    eval_data: str | PathLike[str] | None = ...,
    task: TaskName | None = ...,
    measure: SearchMeasure = ...,
    allow: Sequence[Allowed] | Allowed = ...,
    recover: float | str | None = ...,
    training: str = ...,
    calib: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    also_prove: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    calib_weights: Sequence[float] | str = ...,
    tokenizer: str | PathLike[str] | None = ...,
    precision: str = ...,
    batch: int | None = ...,
    sequence: int | tuple[int, int] | str | None = ...,
    phase: Phase | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> PlanReport: ...
def recover(
    model: StrPath,
    output: StrPath,
    *,
    teacher: StrPath,
    data: StrPath | Sequence[StrPath],
    training: Training = ...,
    run: Run = ...,
    tokenizer: StrPath | None = ...,
    openvino: bool = ...,
    force: bool = ...,
    progress: Progress | None = ...,
    minutes: float = ...,
    precision: TrainedPrecision = ...,
    task: LearnedTask | None = ...,
    measure: Measure = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> RecoverReport: ...
def report(
    models: StrPath,
    output: StrPath | None = ...,
    *,
    seed: int = ...,
    force: bool = ...,
    progress: Progress | None = ...,
) -> list[ModelReport]: ...
def verify(
    original: StrPath,
    new: StrPath,
    *,
    comparison: Comparison = ...,
    run: Run = ...,
    progress: Progress | None = ...,
    data: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    measure: Measure = ...,
    tokenizer: str | PathLike[str] | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> Fidelity: ...
def verify_again(
    new: StrPath,
    original: StrPath | None = ...,
    *,
    comparison: Comparison = ...,
    eval_data: StrPath | None = ...,
    run: Run = ...,
    progress: Progress = ...,
    data: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    measure: Measure = ...,
    tokenizer: str | PathLike[str] | None = ...,
    threads: int = ...,
    provider: Provider = ...,
    runtime: str = ...,
    seed: int = ...,
) -> VerifyAgainReport: ...
