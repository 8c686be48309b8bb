"""Task scores of a model with bootstrap confidence intervals.

"sts" correlates the cosine of two pooled sentence vectors with a human score (Cer et al. 2017, STS
Benchmark); "classification" compares the largest logit with a label. Intervals are percentile
bootstraps over the rows (Efron 1979).
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnserve.choices import TaskName
from attnserve.context import DEFAULT_CONTEXT, Progress, Provider, RunContext, ignore_progress
from attnserve.models.artifact import Artifact, Pooling, load_model, open_artifact
from attnserve.models.tokenizer import (
    TextEncoder,
    embed_texts,
    load_tokenizer,
    read_text,
    run_texts,
)
from attnserve.paths import StrPath, as_path
from attnserve.runtime.session import open_session
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData

if TYPE_CHECKING:
    import onnxruntime
    from jaxtyping import Float, Int

__all__ = [
    "TASKS",
    "ClassificationScore",
    "Share",
    "StsScore",
    "TaskName",
    "evaluate",
    "pearson",
    "score_session",
    "share_kept",
    "spearman",
]

TASKS: tuple[TaskName, ...] = ("sts", "classification")

RESAMPLES = 1000
BATCH_ELEMENTS = 2**21
"""Elements of a temporary array of the bootstrap: 16 MiB of float64."""

BLOCKS = 120
"""Number of blocks of rows in the comparison of two models."""

PARTS = (0, 1, 0, 2)
"""The part of every four blocks: half of them to choose, the others for two proofs."""

INTERVAL = (2.5, 97.5)
"""Percentiles: a 95 % interval."""


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
    """The share of rows whose largest logit is that of the label, 0 to 1.

    ``predictions`` are the predicted classes and ``gold`` the labels, one per row of the file.
    """

    rows: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    predictions: Int[np.ndarray, " N"] = field(repr=False)
    gold: Int[np.ndarray, " N"] = field(repr=False)

    @property
    def value(self) -> float:
        return self.accuracy

    def value_on(self, rows: Int[np.ndarray, "*M N"]) -> Any:
        """The accuracy on a sample of the rows."""
        return (self.predictions[rows] == self.gold[rows]).mean(axis=-1)

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "classification",
            "rows": self.rows,
            "accuracy": self.accuracy,
            "accuracy_ci95": list(self.accuracy_ci95),
        }


def evaluate(
    model: StrPath,
    *,
    task: TaskName,
    data: StrPath,
    pooling: Pooling | None = None,
    max_length: int | None = None,
    tokenizer: StrPath | None = None,
    provider: Provider = "cpu",
    threads: int = 0,
    batch_size: int = 32,
    seed: int = 0,
    progress: Progress | None = None,
) -> StsScore | ClassificationScore:
    """Score ``model`` on the rows of a tab-separated file with a header line.

    Args:
        model: An .onnx file or an artifact folder.
        task: "sts" reads the columns score, sentence1, sentence2; "classification" reads label
            and text (or sentence). Columns may have any order; others are ignored.
        data: The file.
        pooling: "mean", "cls" or "none"; None for that of the artifact. Not used by
            "classification".
        max_length: Longer texts are truncated to this many tokens; None for that of the artifact.
        tokenizer: A tokenizer.json; None for the one in the model's folder.
        provider: The execution provider.
        threads: Intra-op threads; 0 leaves the choice to ONNX Runtime.
        batch_size: Texts per batch.
        seed: The seed of the bootstrap.
        progress: Called with (stage, texts done, texts in total).

    Raises:
        InvalidModel: The model cannot be read.
        InvalidData: The file or a line of it does not fit the task.
        InvalidArgument: An argument does not fit this model.
        CheckFailed: The model returns NaN, or the same cosine for every pair.
    """
    if task not in TASKS:
        raise InvalidArgument(
            f"`task` is {task!r}: expected {' or '.join(TASKS)}", "choose one", code="evaluate.task"
        )
    artifact = open_artifact(model)
    load_model(artifact)  # refuses unsafe files, such as external data outside the folder
    session = open_session(artifact.model, provider=provider, threads=threads)
    return score_session(
        session, artifact, task=task, data=Path(data), pooling=pooling, max_length=max_length,
        tokenizer=as_path(tokenizer), batch_size=batch_size,
        context=RunContext(provider, threads, seed, progress or ignore_progress),
    )  # fmt: skip


def score_session(
    session: onnxruntime.InferenceSession,
    artifact: Artifact,
    *,
    task: TaskName,
    data: Path,
    pooling: Pooling | None = None,
    max_length: int | None = None,
    tokenizer: Path | None = None,
    batch_size: int = 32,
    context: RunContext = DEFAULT_CONTEXT,
) -> StsScore | ClassificationScore:
    """``evaluate`` for an open session; tokenizer and labels are those of ``artifact``."""
    encoder = load_tokenizer(
        tokenizer or artifact.folder, max_length=max_length or artifact.max_length
    )
    run = _Run(session, encoder, batch_size, context)
    if task == "sts":
        return _sts(run, data, pooling or artifact.pooling)
    return _classification(run, data, artifact)


@dataclass(frozen=True)
class Share:
    """The share of a score that is kept on some rows, with its standard error.

    The bootstrap draws the same rows for both models, so that common errors cancel. It draws
    ``BLOCKS`` blocks of consecutive rows (Kuensch 1989), because files are often sorted by source.
    """

    value: float
    standard_error: float
    rows: int
    blocks: int

    def bound(self, confidence: float) -> float:
        """The lower end of a one-sided interval, with Student's t over the blocks."""
        from scipy.stats import t as student

        quantile = float(student.ppf(confidence, max(self.blocks - 1, 1)))
        return self.value - quantile * self.standard_error

    def to_json(self) -> dict[str, float]:
        return {"value": self.value, "standard_error": self.standard_error, "rows": self.rows}


def share_kept(
    before: StsScore | ClassificationScore,
    after: StsScore | ClassificationScore,
    *,
    part: int | None = None,
    seed: int = 0,
) -> Share:
    """The score of a rewritten model divided by the original's, on the same rows.

    Args:
        part: Only the rows of one part: 0 to choose, 1 or 2 for a proof. All parts come from the
            whole file; files of a few rows are not split.

    Raises:
        CheckFailed: The score of the original is not positive.
    """
    blocks = np.array_split(np.arange(before.rows), min(BLOCKS, before.rows))
    if part is not None and len(blocks) >= 2 * len(PARTS):
        blocks = [b for i, b in enumerate(blocks) if PARTS[i % len(PARTS)] == min(part, max(PARTS))]
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

    ratios = _resample(len(blocks), lambda drawn: np.apply_along_axis(ratio, -1, drawn), seed)
    spread = float(np.std(ratios)) if len(ratios) > 1 else 0.0
    value = float(np.nan_to_num(after.value_on(rows) / reference))
    return Share(
        value, spread * (len(blocks) / max(len(blocks) - 1, 1)) ** 0.5, len(rows), len(blocks)
    )


@dataclass(frozen=True)
class _Run:
    session: onnxruntime.InferenceSession
    encoder: TextEncoder
    batch_size: int
    context: RunContext


def _sts(run: _Run, data: Path, pooling: Pooling) -> StsScore:
    rows = _read_table(data, ("score",), ("sentence1",), ("sentence2",))
    scores = np.array([_number(data, line, score) for line, (score, _, _) in rows])  # N
    if len(set(scores)) < 2:
        raise InvalidData(
            f"{data}: all {len(rows)} rows have the same score: the correlation is undefined",
            "provide at least two rows with different scores",
            code="evaluate.constant_scores",
        )
    texts = [row[1] for _, row in rows] + [row[2] for _, row in rows]
    vectors = embed_texts(
        run.session, run.encoder, texts, pooling=pooling, normalize=True,
        batch_size=run.batch_size, progress=run.context.stage("evaluate"),
    )  # fmt: skip
    first, second = np.split(vectors.astype(np.float64), 2)  # N D
    cosines = np.einsum("nd,nd->n", first, second)  # N
    if np.ptp(cosines) == 0:
        raise CheckFailed(
            "the model returns the same cosine for every pair: the correlation is undefined",
            "check the model's weights and the pooling",
            code="evaluate.constant_cosines",
        )
    return StsScore(
        len(rows),
        float(spearman(cosines, scores)),
        float(pearson(cosines, scores)),
        _interval(len(rows), lambda at: spearman(cosines[at], scores[at]), run.context.seed),
        cosines,
        scores,
    )


def _classification(run: _Run, data: Path, artifact: Artifact) -> ClassificationScore:
    rows = _read_table(data, ("label",), ("text", "sentence"))
    names = _label_names(artifact.folder / "config.json")
    labels = np.array([_label(data, line, label, names) for line, (label, _) in rows])  # N
    encodings = run.encoder.encode([text for _, (_, text) in rows])
    predictions = np.empty(len(rows), np.int64)
    runs = run_texts(
        run.session, run.encoder, encodings, batch_size=run.batch_size,
        progress=run.context.stage("evaluate"),
    )  # fmt: skip
    for indices, logits, _ in runs:  # B C
        if logits.ndim != 2:
            raise InvalidArgument(
                f'`task` "classification" expects logits [batch, classes], the model returns'
                f" {list(logits.shape)}",
                "export the model with the task sequence-classification",
                code="evaluate.no_logits",
            )
        classes = logits.shape[1]
        if labels.max() >= classes:
            line, (label, _) = rows[int(labels.argmax())]
            raise InvalidData(
                f"{data}, line {line}: label {label!r}, but the model has {classes} classes",
                f"use labels 0 to {classes - 1}",
                code="evaluate.label_range",
            )
        if not np.isfinite(logits).all():
            raise CheckFailed(
                "the model returns NaN or infinite logits",
                "check its weights",
                code="evaluate.not_finite",
            )
        predictions[indices] = logits.argmax(axis=1)
    correct = predictions == labels
    interval = _interval(len(rows), lambda at: correct[at].mean(axis=-1), run.context.seed)
    return ClassificationScore(len(rows), float(correct.mean()), interval, predictions, labels)


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


def _resample(
    count: int, statistic: Callable[[Int[np.ndarray, "M N"]], np.ndarray], seed: int
) -> Float[np.ndarray, " M"]:
    """The finite values of a statistic on ``RESAMPLES`` bootstrap samples of 0 .. count - 1."""
    from scipy.stats import DegenerateDataWarning, bootstrap

    if count < 2:
        return statistic(np.zeros((1, count), int))

    def resampled(rows: Int[np.ndarray, "M N"], axis: int) -> np.ndarray:
        return statistic(rows)

    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        # Constant samples have no correlation: they are removed below.
        warnings.simplefilter("ignore", DegenerateDataWarning)
        result = bootstrap(
            (np.arange(count),),
            resampled,
            n_resamples=RESAMPLES,
            batch=max(1, BATCH_ELEMENTS // count),
            vectorized=True,
            method="percentile",
            rng=seed,
        )
    values = result.bootstrap_distribution
    return values[np.isfinite(values)]


def _interval(
    count: int, statistic: Callable[[Int[np.ndarray, "M N"]], np.ndarray], seed: int
) -> tuple[float, float]:
    low, high = np.percentile(_resample(count, statistic, seed), INTERVAL)
    return float(low), float(high)


def _read_table(path: Path, *columns: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """Read (line number from 1, requested columns) of each row of a tab-separated file.

    Each of ``columns`` lists the possible names of a column, in order of preference.

    Raises:
        InvalidData: A column or a field is missing or empty, or there is no row.
    """
    lines = read_text(path).split("\n")
    header = [name.strip().lower() for name in lines[0].split("\t")]
    places: list[int] = []
    for names in columns:
        found = next((name for name in names if name in header), None)
        if found is None:
            raise InvalidData(
                f"{path}, line 1: no column {' or '.join(names)} in {header[:8]}",
                f"begin with a line of tab-separated names: {', '.join(c[0] for c in columns)}",
                code="evaluate.no_column",
            )
        places.append(header.index(found))
    rows: list[tuple[int, tuple[str, ...]]] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        fields = line.split("\t")
        if len(fields) != len(header):
            raise InvalidData(
                f"{path}, line {number}: {len(fields)} tab-separated fields, the header has"
                f" {len(header)}",
                "write the columns of the header in each row, and no tab in a text",
                code="evaluate.field_count",
            )
        row = tuple(fields[place].strip() for place in places)
        if not all(row):
            name = columns[row.index("")][0]
            raise InvalidData(
                f"{path}, line {number}: {name} is empty",
                "fill or remove the row",
                code="evaluate.empty_field",
            )
        rows.append((number, row))
    if not rows:
        raise InvalidData(
            f"{path}: no rows after the header line",
            "add one row per line",
            code="evaluate.no_rows",
        )
    return rows


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidData(
            f"{path}, line {line}: score {text!r} is not a finite number",
            "correct the row",
            code="evaluate.score_not_number",
        )
    return value


def _label(path: Path, line: int, text: str, names: Mapping[str, int]) -> int:
    if text in names:
        return names[text]
    if text.isascii() and text.isdigit():
        return int(text)
    known = ", ".join(sorted(names, key=lambda name: names[name])[:8]) or "none"
    raise InvalidData(
        f"{path}, line {line}: label {text!r}: expected an integer from 0, or a name of the"
        f" model's config.json ({known})",
        "correct the row, or put the model's config.json into its folder",
        code="evaluate.unknown_label",
    )


def _label_names(path: Path) -> dict[str, int]:
    """The names in id2label of config.json; empty if there are none."""
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        table = cast(dict[str, str], config["id2label"])
        return {name: int(index) for index, name in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # integers need no names
