"""Labels of a task, which are learned beside the outputs of the original.

- "sts": pairs of texts with a score. The loss of a batch is 1 - r, with Pearson's correlation r of
  the cosines of the served vectors and the scores, because scores have no fixed unit.
- "classification": texts with a class. The loss is the cross-entropy, divided by the entropy of the
  classes.

Both losses are 1 for the best constant predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.checks.scores import (
    ClassificationScore,
    Score,
    StsScore,
    interval,
    pearson,
    spearman,
)
from attnserve.checks.task_data import label_names, read_label, read_number, read_table
from attnserve.choices import LearnedTask, Pooling
from attnserve.models.artifact import Artifact
from attnserve.models.datasets import Dataset, wanted_inputs
from attnserve.models.tokenizer import Encoding, load_encoder
from attnserve.recovery.batches import TOKENS, row_contents
from attnserve.recovery.distillation import served_vectors
from attnserve.runtime.session import Batch
from graph_passes.errors import InvalidArgument, InvalidData

__all__ = ["LEARNED", "LabelReport", "Labels", "read_labeled"]

LEARNED: tuple[LearnedTask, ...] = get_args(LearnedTask)
"""The tasks whose labels can be learned."""

WEIGHT = 3.0
"""The weight of the loss of the task, as that of served outputs."""

MIN_ROWS = 8
"""The fewest labeled rows of each part."""


@dataclass(frozen=True)
class LabeledRow:
    """The texts of a row, one or two, and its label or score."""

    texts: tuple[str, ...]
    label: float


@dataclass(frozen=True, eq=False)
class _Labeled:
    """A batch of N labeled rows. Of pairs, all first texts come before all second ones."""

    batch: Batch
    labels: np.ndarray  # N


@dataclass(frozen=True)
class LabelReport:
    """Scores on labeled rows that the training never saw."""

    teacher: Score
    before: Score
    after: Score

    @property
    def line(self) -> str:
        """The scores for people."""
        return (
            f"score {self.before.value:.4f} -> {self.after.value:.4f} (original "
            f"{self.teacher.value:.4f})"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "teacher": self.teacher.to_json(),
            "before": self.before.to_json(),
            "after": self.after.to_json(),
        }


def read_labeled(
    files: Sequence[Path], task: LearnedTask, artifact: Artifact
) -> dict[Path, list[LabeledRow]]:
    """The labeled rows of the tables (.tsv) among the files, with the prompts of the model.

    Raises:
        InvalidArgument: The labels of this task cannot be learned, or no file is a table.
        InvalidData: A table does not fit the task.
    """
    if task not in LEARNED:
        raise InvalidArgument(
            f"`task` is {task}: labels are learned for {' and '.join(LEARNED)}",
            "leave it out to learn from the original alone",
            code="recovery.task",
        )
    tables = [path for path in files if path.suffix.lower() == ".tsv"]
    if not tables:
        raise InvalidArgument(
            f"`task` is {task}, and no file of `data` is a table (.tsv) with labels",
            "give one, with the columns that `attnserve evaluate` reads",
            code="recovery.no_table",
        )
    return {path: _read_table(path, task, artifact) for path in tables}


def _read_table(path: Path, task: LearnedTask, artifact: Artifact) -> list[LabeledRow]:
    if task == "sts":
        prompt = artifact.prompt()
        return [
            LabeledRow((prompt + first, prompt + second), read_number(path, line, score))
            for line, (score, first, second) in read_table(
                path, ("score",), ("sentence1",), ("sentence2",)
            )
        ]
    names = label_names(artifact)
    return [
        LabeledRow((text,), read_label(path, line, label, names))
        for line, (label, text) in read_table(path, ("label",), ("text", "sentence"))
    ]


class Labels:
    """Labeled rows in the parts of a dataset, with their loss and their score.

    A row belongs to the last part that holds one of its texts, so that no text of a row to fit is
    held out.

    Args:
        rows: Distinct texts of them are in ``data``.
        teacher: Its inputs take the texts.
        artifact: With the tokenizer, the pooling and the name of the output.

    Raises:
        InvalidArgument: The model has fixed shapes or no attention mask.
        InvalidData: There are too few rows, or their labels are all the same.
    """

    def __init__(
        self,
        task: LearnedTask,
        rows: Sequence[LabeledRow],
        data: Dataset,
        teacher: ir.Model,
        artifact: Artifact,
        tokenizer: Path | None = None,
    ) -> None:
        _check_shapes(teacher)
        self.task: LearnedTask = task
        self.pooling: Pooling = artifact.pooling
        self.output = artifact.output or teacher.graph.outputs[0].name or ""
        wanted, encoder = wanted_inputs(teacher), load_encoder(artifact, tokenizer)
        made = encoder.encode([text for row in rows for text in row.texts])
        count = len(rows[0].texts)
        encodings = [made[start : start + count] for start in range(0, len(made), count)]

        def inputs(some: Sequence[Encoding]) -> Batch:
            return encoder.batch_inputs(some, wanted)

        held_out = _contents(data.choose), _contents(data.held_out)
        levels = [_level(row, inputs, held_out) for row in encodings]
        parts = [[i for i, level in enumerate(levels) if level == part] for part in range(3)]
        labels = np.array([row.label for row in rows])
        self._check_rows(parts, labels)
        self.fit, self.choose, self.prove = (
            [_batch([encodings[i] for i in places], labels[places], inputs)
             for places in _grouped(part, encodings)]
            for part in parts
        )  # fmt: skip
        shares = np.unique(labels[parts[0]], return_counts=True)[1] / len(parts[0])
        self.unit = 1.0 if task == "sts" else float(-(shares * np.log(shares)).sum())

    def step(self, number: int, seed: int) -> _Labeled:
        """The batch of a training step; each epoch has its own random order."""
        epoch, place = divmod(number, len(self.fit))
        order = np.random.default_rng((seed, epoch, len(self.fit))).permutation(len(self.fit))
        return self.fit[int(order[place])]

    def loss(self, output: Tensor, labeled: _Labeled) -> Tensor:
        """The weighted loss of a batch."""
        return WEIGHT * self._loss(self._predictions(output, labeled), labeled.labels)

    def measure(
        self, run: Callable[[Batch], Mapping[str, np.ndarray]], part: Literal["choose", "prove"],
        seed: int,
    ) -> tuple[float, Score]:  # fmt: skip
        """The loss, without its weight, and the score of a model on a held-out part.

        Args:
            run: The outputs of the model by name.

        Raises:
            InvalidData: A label is not a class of the model.
        """
        batches: Sequence[_Labeled] = getattr(self, part)
        found = [
            self._predictions(torch.from_numpy(run(one.batch)[self.output]), one) for one in batches
        ]
        predictions, labels = torch.cat(found), np.concatenate([one.labels for one in batches])
        loss = float(self._loss(predictions, labels))
        count, values = len(labels), predictions.numpy()
        if self.task == "sts":
            ci = interval(count, lambda at: spearman(values[at], labels[at]), seed)
            r = float(pearson(values, labels))
            return loss, StsScore(count, float(spearman(values, labels)), r, ci, values, labels)
        classes = values.argmax(axis=1)
        right = classes == labels
        ci = interval(count, lambda at: right[at].mean(axis=-1), seed)
        gold = labels.astype(np.int64)
        return loss, ClassificationScore(count, float(right.mean()), ci, classes, gold)

    def _predictions(self, output: Tensor, labeled: _Labeled) -> Tensor:
        """The cosines of pairs (N), or the logits of texts (N, classes)."""
        if self.task == "sts":
            first, second = served_vectors(output.float(), labeled.batch, self.pooling).chunk(2)
            return (first * second).sum(-1)
        if output.ndim != 2:
            raise InvalidArgument(
                f"`task` expects logits [batch, classes], the model returns {list(output.shape)}",
                "export the model with the task of this score",
                code="recovery.no_logits",
            )
        if labeled.labels.max() >= output.shape[1]:
            raise InvalidData(
                f"`data` has the label {int(labeled.labels.max())}, but the model has"
                f" {output.shape[1]} classes",
                f"use labels 0 to {output.shape[1] - 1}",
                code="recovery.label_range",
            )
        return output.float()

    def _loss(self, predictions: Tensor, labels: np.ndarray) -> Tensor:
        gold = torch.from_numpy(labels).to(predictions.device)
        if self.task == "classification":
            return F.cross_entropy(predictions, gold.long()) / self.unit
        x, y = (values.float() - values.float().mean() for values in (predictions, gold))
        size = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
        return 1 - (x @ y) / size.clamp(min=1e-6)

    def _check_rows(self, parts: Sequence[Sequence[int]], labels: np.ndarray) -> None:
        if min(map(len, parts)) < MIN_ROWS:
            sizes = ", ".join(str(len(part)) for part in parts)
            raise InvalidData(
                f"`data` has {sizes} labeled rows to fit, to choose and to prove: expected"
                f" {MIN_ROWS} of each at least",
                "give more labeled rows",
                code="recovery.few_labels",
            )
        if any(len(set(labels[part])) < 2 for part in parts):
            raise InvalidData(
                "`data` has the same label in all rows of a part",
                "give rows of each class, or with several scores",
                code="recovery.constant_labels",
            )


def _check_shapes(model: ir.Model) -> None:
    """Check that texts of any number and length can be one batch."""
    fixed = [v.name for v in model.graph.inputs if any(isinstance(n, int) for n in v.shape or ())]
    if fixed or "attention_mask" not in wanted_inputs(model):
        reason = f"input {fixed[0]} has a fixed shape" if fixed else "there is no attention_mask"
        raise InvalidArgument(
            f"`task`: {reason}, so that texts cannot be put into batches",
            "export the model with dynamic axes and a mask, or leave `task` out",
            code="recovery.task_shape",
        )


def _contents(batches: Sequence[Batch]) -> set[bytes]:
    return {content for batch in batches for content in row_contents(batch)}


def _level(
    encodings: Sequence[Encoding],
    inputs: Callable[[Sequence[Encoding]], Batch],
    held_out: Sequence[set[bytes]],
) -> int:
    """The part of a row: 0 to fit, 1 to choose, 2 to prove."""
    contents = {content for one in encodings for content in row_contents(inputs([one]))}
    return max((n for n, part in enumerate(held_out, start=1) if contents & part), default=0)


def _grouped(part: Sequence[int], rows: Sequence[Sequence[Encoding]]) -> list[list[int]]:
    """Rows of like length with about ``TOKENS`` tokens together, and at least ``MIN_ROWS``."""
    groups: list[list[int]] = [[]]
    for place in sorted(part, key=lambda place: max(map(len, rows[place]))):
        tokens = (len(groups[-1]) + 1) * len(rows[place]) * max(map(len, rows[place]))
        if tokens > TOKENS and len(groups[-1]) >= MIN_ROWS:
            groups.append([])
        groups[-1].append(place)
    if len(groups) > 1 and len(groups[-1]) < MIN_ROWS:
        last = groups.pop()
        groups[-1] += last
    return groups


def _batch(
    rows: Sequence[Sequence[Encoding]],
    labels: np.ndarray,
    inputs: Callable[[Sequence[Encoding]], Batch],
) -> _Labeled:
    return _Labeled(inputs([one for texts in zip(*rows, strict=True) for one in texts]), labels)
