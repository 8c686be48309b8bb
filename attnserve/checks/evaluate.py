"""The score of a model on a task: one number that a user trusts, and how far to trust it.

"sts" compares the cosine of two pooled sentence vectors with a human score (Cer et al. 2017, STS
Benchmark); "classification" compares the largest logit with a label. The intervals are percentile
bootstraps over the rows (Efron 1979): they say how much the score owes to these rows.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from attnserve.choices import TaskName
from attnserve.context import Provider
from attnserve.models.artifact import Artifact, Pooling, load_model, open_artifact
from attnserve.models.tokenizer import (
    Progress,
    TextEncoder,
    embed_texts,
    load_tokenizer,
    read_text,
    run_texts,
)
from attnserve.runtime.session import open_session
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData

if TYPE_CHECKING:
    import onnxruntime
    from jaxtyping import Float, Int

__all__ = [
    "ONE_SIDED",
    "TASKS",
    "ClassificationScore",
    "Share",
    "StsScore",
    "TaskName",
    "average_ranks",
    "evaluate",
    "pearson",
    "score_session",
    "share_kept",
    "spearman",
]

TASKS: tuple[TaskName, ...] = ("sts", "classification")

RESAMPLES = 1000
BLOCKS = 10
"""Into which rows are cut where two models are compared on them."""

ONE_SIDED = 1.645
"""Standard errors from a mean to the lower end of a one-sided interval of 95 %."""

INTERVAL = (2.5, 97.5)
"""Percentiles: a 95 % interval."""


@dataclass(frozen=True, eq=False)
class StsScore:
    """Correlation of the model's cosines with the scores given by people, -1 to 1.

    ``cosines`` keeps the model's raw answers, one a row, in the order of the file, and ``gold`` the
    scores given by people.
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
    """The fraction of rows whose largest logit is the label's, 0 to 1.

    ``predictions`` keeps the model's raw answers, one a row, in the order of the file, and ``gold``
    the labels.
    """

    rows: int
    accuracy: float
    accuracy_ci95: tuple[float, float]
    predictions: Int[np.ndarray, " N"] = field(repr=False)
    gold: Int[np.ndarray, " N"] = field(repr=False)

    @property
    def value(self) -> float:
        return self.accuracy

    def to_json(self) -> dict[str, Any]:
        return {
            "task": "classification",
            "rows": self.rows,
            "accuracy": self.accuracy,
            "accuracy_ci95": list(self.accuracy_ci95),
        }


def evaluate(
    model: Path,
    *,
    task: TaskName,
    data: Path,
    pooling: Pooling | None = None,
    max_length: int | None = None,
    tokenizer: Path | None = None,
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
            and text (or sentence). Order is free, other columns are ignored.
        data: The file.
        pooling: "mean", "cls" or "none"; None for the artifact's. Classification has none.
        max_length: Tokens, longer texts are truncated; None for the artifact's.
        tokenizer: A tokenizer.json; None for the one beside the model.
        provider: The execution provider.
        threads: Intra-op threads; 0 leaves the choice to ONNX Runtime.
        batch_size: Texts a batch.
        seed: Of the bootstrap.
        progress: Called with texts done and in all.

    Raises:
        InvalidModel: The model cannot be read.
        InvalidData: The file, or a line of it, is not what the task needs.
        InvalidArgument: An option cannot work with this model.
        CheckFailed: The model gives NaN, or the same cosine for every pair.
    """
    if task not in TASKS:
        raise InvalidArgument(f"--task {task}: expected {' or '.join(TASKS)}", "choose one")
    artifact = open_artifact(model)
    load_model(artifact)  # refuses what must not reach ONNX Runtime, such as data paths outside
    session = open_session(artifact.model, provider=provider, threads=threads)
    return score_session(
        session, artifact, task=task, data=data, pooling=pooling, max_length=max_length,
        tokenizer=tokenizer, batch_size=batch_size, seed=seed, progress=progress,
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
    seed: int = 0,
    progress: Progress | None = None,
) -> StsScore | ClassificationScore:
    """``evaluate`` for a session that is open, of a model with the files of ``artifact``."""
    encoder = load_tokenizer(
        tokenizer or artifact.folder, max_length=max_length or artifact.max_length
    )
    run = _Run(session, encoder, batch_size, progress)
    rng = np.random.default_rng(seed)
    if task == "sts":
        return _sts(run, data, pooling or artifact.pooling, rng)
    return _classification(run, data, artifact, rng)


@dataclass(frozen=True)
class Share:
    """How much of a score is kept, and how far chance moves that on rows such as these.

    ``standard_error`` is that of a bootstrap which draws the same rows for both models: what both
    get wrong alike does not count. It draws them in ``BLOCKS`` blocks as they lie in the file
    (Kuensch 1989): files are often sorted by where texts come from, and other texts will come in
    other proportions.
    """

    value: float
    standard_error: float

    @property
    def lower(self) -> float:
        """What is kept at least, but for one time in twenty."""
        return self.value - ONE_SIDED * self.standard_error


def share_kept(
    before: StsScore | ClassificationScore, after: StsScore | ClassificationScore, *, seed: int = 0
) -> Share:
    """The score of a model over that of the one it was made from, on the same rows.

    Raises:
        CheckFailed: The first has no positive score that could be kept.
    """
    if before.value <= 0:
        raise CheckFailed(
            f"the original's score is {before.value:.4f}: no share of it can be kept",
            "check that the data, the task and the pooling fit the model",
        )
    resampled = [_resampled(score, np.random.default_rng(seed)) for score in (before, after)]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratios = resampled[1] / resampled[0]
    ratios = ratios[np.isfinite(ratios)]
    spread = float(np.std(ratios)) if len(ratios) > 1 else 0.0
    return Share(after.value / before.value, spread)


def _resampled(
    score: StsScore | ClassificationScore, rng: np.random.Generator
) -> Float[np.ndarray, " M"]:
    block = np.arange(score.rows) * min(BLOCKS, score.rows) // score.rows
    count = int(block[-1]) + 1

    def draw(draws: int) -> np.ndarray:
        return rng.multinomial(count, np.full(count, 1 / count), draws)[:, block].astype(float)

    if isinstance(score, StsScore):
        return _resampled_spearman(score.cosines, score.gold, draw)
    right = (score.predictions == score.gold).astype(np.float64)
    parts: list[np.ndarray] = []
    for draws in _in_parts(score.rows):
        counts = draw(draws)
        parts.append(counts @ right / np.maximum(counts.sum(axis=1), 1.0))
    return np.concatenate(parts)


@dataclass(frozen=True)
class _Run:
    session: onnxruntime.InferenceSession
    encoder: TextEncoder
    batch_size: int
    progress: Progress | None


def _sts(run: _Run, data: Path, pooling: Pooling, rng: np.random.Generator) -> StsScore:
    rows = _read_table(data, ("score",), ("sentence1",), ("sentence2",))
    scores = np.array([_number(data, line, score) for line, (score, _, _) in rows])  # N
    if len(set(scores)) < 2:
        raise InvalidData(
            f"{data}: {len(rows)} rows with a single score: a correlation is undefined",
            "give at least two rows with different scores",
        )
    texts = [row[1] for _, row in rows] + [row[2] for _, row in rows]
    vectors = embed_texts(
        run.session, run.encoder, texts, pooling=pooling, normalize=True,
        batch_size=run.batch_size, progress=run.progress,
    )  # fmt: skip
    first, second = np.split(vectors.astype(np.float64), 2)  # N D
    cosines = np.einsum("nd,nd->n", first, second)  # N
    if np.ptp(cosines) == 0:
        raise CheckFailed(
            "the model gives the same cosine for every pair: a correlation is undefined",
            "check the model's weights and the pooling",
        )
    resampled = _resampled_spearman(cosines, scores, _draw_rows(len(rows), rng))
    return StsScore(
        len(rows),
        spearman(cosines, scores),
        pearson(cosines, scores),
        _interval(resampled[np.isfinite(resampled)]),
        cosines,
        scores,
    )


def _classification(
    run: _Run, data: Path, artifact: Artifact, rng: np.random.Generator
) -> ClassificationScore:
    rows = _read_table(data, ("label",), ("text", "sentence"))
    names = _label_names(artifact.folder / "config.json")
    labels = np.array([_label(data, line, label, names) for line, (label, _) in rows])  # N
    encodings = run.encoder.encode([text for _, (_, text) in rows])
    predictions = np.empty(len(rows), np.int64)
    runs = run_texts(
        run.session, run.encoder, encodings, batch_size=run.batch_size, progress=run.progress
    )
    for indices, logits, _ in runs:  # B C
        if logits.ndim != 2:
            raise InvalidArgument(
                f"--task classification expects logits [batch, classes], the model gives"
                f" {list(logits.shape)}",
                "export it with --task sequence-classification",
            )
        classes = logits.shape[1]
        if labels.max() >= classes:
            line, (label, _) = rows[int(labels.argmax())]
            raise InvalidData(
                f"{data}, line {line}: label {label!r}, and the model has {classes} classes",
                f"use labels 0 to {classes - 1}",
            )
        if not np.isfinite(logits).all():
            raise CheckFailed("the model gives NaN or infinite logits", "check its weights")
        predictions[indices] = logits.argmax(axis=1)
    accuracy = float((predictions == labels).mean())
    # Resampling rows of right and wrong answers is drawing from a binomial distribution.
    resampled = rng.binomial(len(rows), accuracy, RESAMPLES) / len(rows)
    return ClassificationScore(len(rows), accuracy, _interval(resampled), predictions, labels)


def pearson(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Pearson's correlation of two samples that are not constant."""
    return float(_correlation(x, y, np.ones((1, len(x))))[0])


def spearman(x: Float[np.ndarray, " N"], y: Float[np.ndarray, " N"]) -> float:
    """Spearman's rank correlation of two samples that are not constant; ties share their rank."""
    return pearson(average_ranks(x), average_ranks(y))


def average_ranks(x: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """Ranks from 1; equal values get the mean of the ranks they cover."""
    return _weighted_ranks(x, np.ones((1, len(x))))[0]


def _weighted_ranks(
    x: Float[np.ndarray, " N"], counts: Float[np.ndarray, "M N"]
) -> Float[np.ndarray, "M N"]:
    """Average ranks of ``x`` in M samples that hold its n-th element counts[m, n] times."""
    order = np.argsort(x, kind="stable")
    _, starts, group = np.unique(x[order], return_index=True, return_inverse=True)
    size = np.add.reduceat(counts[:, order], starts, axis=1)  # M groups of ties
    rank = np.cumsum(size, axis=1) - (size - 1) / 2
    ranks = np.empty_like(counts)
    ranks[:, order] = rank[:, group]
    return ranks


def _correlation(
    x: Float[np.ndarray, "*M N"], y: Float[np.ndarray, "*M N"], counts: Float[np.ndarray, "M N"]
) -> Float[np.ndarray, " M"]:
    """Pearson's correlation of M samples; NaN where one of the two is constant."""
    total = counts.sum(axis=-1, keepdims=True)  # M 1
    x = x - (counts * x).sum(axis=-1, keepdims=True) / total
    y = y - (counts * y).sum(axis=-1, keepdims=True) / total
    norm = np.sqrt((counts * x * x).sum(axis=-1) * (counts * y * y).sum(axis=-1))
    with np.errstate(invalid="ignore"):
        return (counts * x * y).sum(axis=-1) / norm


def _resampled_spearman(
    x: Float[np.ndarray, " N"],
    y: Float[np.ndarray, " N"],
    draw: Callable[[int], Float[np.ndarray, "M N"]],
) -> Float[np.ndarray, " M"]:
    """Spearman of ``RESAMPLES`` resamples of the rows; NaN where it is undefined.

    A resample is how often each row was drawn, so values are sorted once and not once a resample.
    """
    found: list[np.ndarray] = []
    for draws in _in_parts(len(x)):
        counts = draw(draws)  # M N
        found.append(_correlation(_weighted_ranks(x, counts), _weighted_ranks(y, counts), counts))
    return np.concatenate(found)


def _in_parts(rows: int) -> Iterator[int]:
    """``RESAMPLES`` in parts of at most 16 MiB of float64 a temporary array."""
    block = max(1, 2**21 // rows)
    for start in range(0, RESAMPLES, block):
        yield min(block, RESAMPLES - start)


def _draw_rows(rows: int, rng: np.random.Generator) -> Callable[[int], np.ndarray]:
    share = np.full(rows, 1 / rows)
    return lambda draws: rng.multinomial(rows, share, draws).astype(np.float64)


def _interval(values: Float[np.ndarray, " M"]) -> tuple[float, float]:
    low, high = np.percentile(values, INTERVAL)
    return float(low), float(high)


def _read_table(path: Path, *columns: tuple[str, ...]) -> list[tuple[int, tuple[str, ...]]]:
    """(line number from 1, the asked columns) of each row of a tab-separated file.

    Each of ``columns`` lists the names that a column may have, the first one preferred.

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
                "give each row the columns of the header; a text holds no tab",
            )
        row = tuple(fields[place].strip() for place in places)
        if not all(row):
            name = columns[row.index("")][0]
            raise InvalidData(f"{path}, line {number}: {name} is empty", "fill or remove the row")
        rows.append((number, row))
    if not rows:
        raise InvalidData(f"{path}: no rows after the header line", "add a row a line")
    return rows


def _number(path: Path, line: int, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise InvalidData(f"{path}, line {line}: score {text!r} is not a number", "correct the row")
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
        "correct the row, or put the model's config.json beside it",
    )


def _label_names(path: Path) -> dict[str, int]:
    """The names in config.json's id2label; empty where there are none."""
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8"))
        table = cast(dict[str, str], config["id2label"])
        return {name: int(index) for index, name in table.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # integers need no names
