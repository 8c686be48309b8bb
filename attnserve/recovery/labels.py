"""Loss of task labels, in addition to the distillation loss.

- "sts": pairs of texts with a score. The loss of a batch is 1 - r, with Pearson's correlation r of
  the cosines of the served vectors and the scores, because scores have no fixed unit.
- "classification": texts with a class. The loss is the cross-entropy, divided by the entropy of the
  classes.

Both losses are 1 for the best constant predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.checks.labeled_tables import LabeledRow
from attnserve.checks.scores import RatioScore, Score, StsScore
from attnserve.data.datasets import Dataset
from attnserve.data.file_rows import wanted_inputs
from attnserve.literals import LearnedTask, Pooling
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import output_name
from attnserve.models.tokenizer import Encoding
from attnserve.models.tokenizer_files import load_encoder
from attnserve.recovery.batches import grouped, place_of_step, row_contents
from attnserve.recovery.loss import served_vectors
from attnserve.runtime.interface import Batch, Session
from graph_passes.errors import CheckFailed, InvalidArgument, InvalidData

__all__ = ["LabeledBatch", "Labels", "task_loss"]

WEIGHT = 3.0
"""Weight of the task loss, equal to the weight of served outputs."""

MIN_ROWS = 8
"""Minimum number of labeled rows in each part."""

MIN_PAIRS = 4
"""Minimum number of pairs in a batch for a correlation; long texts may exceed its tokens."""


@dataclass(frozen=True, eq=False)
class LabeledBatch:
    """A batch of N labeled rows. For pairs, all first texts come before all second texts."""

    batch: Batch
    labels: np.ndarray  # N


class Labels:
    """Labeled rows in the parts of a dataset, with their loss and their score.

    A row belongs to the last part that holds one of its texts, so that no text of a row to fit is
    held out.

    Args:
        rows: Labeled rows, whose distinct texts are in ``data``.
        teacher: The original, whose inputs take the texts.
        artifact: Provides the tokenizer, the pooling and the name of the output.

    Raises:
        InvalidArgument: The model has fixed shapes or no attention mask.
        InvalidData: The rows are too few, or all labels are equal.
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
        self.dimensions = artifact.dimensions
        outputs = [value.name or "" for value in teacher.graph.outputs]
        self.output = output_name(outputs, artifact.output, scores=task != "sts")
        input_names = wanted_inputs(teacher)
        encoder = load_encoder(artifact, tokenizer)
        all_encodings = encoder.encode([text for row in rows for text in row.texts])
        count = len(rows[0].texts)
        encodings = [
            all_encodings[start : start + count] for start in range(0, len(all_encodings), count)
        ]

        def inputs(row_encodings: Sequence[Encoding]) -> Batch:
            return encoder.batch_inputs(row_encodings, input_names)

        held_out = _contents(data.choose), _contents(data.to_verify)
        parts: list[list[int]] = [[], [], []]
        for place, row in enumerate(encodings):
            contents = _contents([inputs([text]) for text in row])
            held = [number for number, part in enumerate(held_out, start=1) if contents & part]
            parts[max(held, default=0)].append(place)
        labels = np.array([row.label for row in rows])
        self._check_rows(parts, labels)
        self.largest = labels.max()
        # The numbers of rows in the JSON: "prove" are the rows to verify.
        names = ("fit", "choose", "prove")
        self.counts: dict[str, int] = dict(zip(names, map(len, parts), strict=True))
        self.fit, self.choose, self.verify = (
            [
                _batch([encodings[i] for i in places], labels[places], inputs)
                for places in _grouped(part, encodings)
            ]
            for part in parts
        )
        class_shares = np.unique(labels[parts[0]], return_counts=True)[1] / len(parts[0])
        self.unit = 1.0 if task == "sts" else float(-(class_shares * np.log(class_shares)).sum())

    def step(self, number: int, seed: int) -> LabeledBatch:
        """The batch of a training step; each epoch has its own random order."""
        count = len(self.fit)
        return self.fit[place_of_step(number, count, seed, count)]

    def outputs(
        self, session: Session, rows: Sequence[LabeledBatch], feed: Callable[[Batch], Batch]
    ) -> list[tuple[LabeledBatch, np.ndarray]]:
        """The output of the task for batches of labeled rows.

        Args:
            feed: Makes the inputs of the model from those of the original.
        """
        return [(labeled, session.run([self.output], feed(labeled.batch))[0]) for labeled in rows]

    def loss(self, output: Tensor, labeled: LabeledBatch) -> Tensor:
        """The weighted loss of a batch."""
        predictions = self._predictions(output, labeled)
        return WEIGHT * task_loss(self.task, predictions, labeled.labels, self.unit)

    def held_out_loss(self, outputs: Sequence[tuple[LabeledBatch, np.ndarray]]) -> float:
        """The loss of a held-out part, without its weight; infinite if it is not a number."""
        predictions, labels = self._joined(outputs)
        loss = float(task_loss(self.task, torch.from_numpy(predictions), labels, self.unit))
        return loss if np.isfinite(loss) else np.inf

    def score(self, outputs: Sequence[tuple[LabeledBatch, np.ndarray]], seed: int = 0) -> Score:
        """The score of a held-out part, with its interval.

        Raises:
            CheckFailed: The outputs are not finite, or equal for all pairs.
        """
        values, labels = self._joined(outputs)
        if not np.isfinite(values).all() or (self.task == "sts" and np.ptp(values) == 0):
            raise CheckFailed(
                "the model returns NaN, infinity, or the same for all labeled rows",
                "check its weights, and `task`",
                code="recovery.constant_scores",
            )
        if self.task == "sts":
            return StsScore(values, labels, seed=seed)
        is_right = values.argmax(axis=1) == labels
        return RatioScore.mean("classification", "accuracy", is_right, seed=seed)

    def _joined(
        self, outputs: Sequence[tuple[LabeledBatch, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The predictions and the labels of all batches."""
        predictions = [self._predictions(torch.from_numpy(array), one) for one, array in outputs]
        return torch.cat(predictions).numpy(), np.concatenate([one.labels for one, _ in outputs])

    def _predictions(self, output: Tensor, labeled: LabeledBatch) -> Tensor:
        """The cosines of pairs (N), or the logits of texts (N, classes)."""
        is_sts = self.task == "sts"
        if output.ndim not in ((2, 3) if is_sts else (2,)) or output.shape[-1] < 2:
            expectation = "embeddings" if is_sts else "logits [batch, classes]"
            raise InvalidArgument(
                f"`task` is {self.task}, which takes {expectation}: the model returns "
                f"{list(output.shape)}",
                "give the task of this model, or leave it out",
                code="recovery.task_output",
            )
        if is_sts:
            vectors = served_vectors(output.float(), labeled.batch, self.pooling, self.dimensions)
            first, second = vectors.chunk(2)
            return (first * second).sum(-1)
        if self.largest >= output.shape[1]:
            raise InvalidData(
                f"`data` has the label {int(self.largest)}, but the model has {output.shape[1]}"
                " classes",
                f"use labels 0 to {output.shape[1] - 1}",
                code="recovery.label_range",
            )
        return output.float()

    def _check_rows(self, parts: Sequence[Sequence[int]], labels: np.ndarray) -> None:
        if min(map(len, parts)) < MIN_ROWS:
            sizes = ", ".join(str(len(part)) for part in parts)
            raise InvalidData(
                f"`data` has {sizes} labeled rows to fit, to choose and to verify: expected"
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


def task_loss(task: LearnedTask, predictions: Tensor, labels: np.ndarray, unit: float) -> Tensor:
    """The loss of predictions; ``unit`` is the cross-entropy of the best constant classes."""
    if task == "classification":
        gold = torch.from_numpy(labels).to(predictions.device)
        return F.cross_entropy(predictions, gold.long()) / unit
    spread = float(np.std(labels)) or 1.0
    gold = torch.from_numpy((labels - labels.mean()) / spread).to(predictions.device)
    x, y = predictions.float() - predictions.float().mean(), gold.float()
    size = torch.linalg.vector_norm(x) * torch.linalg.vector_norm(y)
    return 1 - (x * y).sum() / size.clamp(min=1e-6)  # a product would be rounded by autocast


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


def _grouped(part: Sequence[int], rows: Sequence[Sequence[Encoding]]) -> list[list[int]]:
    """Rows of similar length with about ``TOKENS`` tokens together."""

    def tokens(place: int) -> int:
        return len(rows[place]) * max(map(len, rows[place]))

    least = MIN_PAIRS if len(rows[0]) > 1 else 1
    groups = grouped(sorted(part, key=tokens), tokens, least)
    if len(groups) > 1 and len(groups[-1]) < MIN_PAIRS:
        last = groups.pop()
        groups[-1] += last
    return groups


def _batch(
    rows: Sequence[Sequence[Encoding]],
    labels: np.ndarray,
    inputs: Callable[[Sequence[Encoding]], Batch],
) -> LabeledBatch:
    texts = [text for column in zip(*rows, strict=True) for text in column]
    return LabeledBatch(inputs(texts), labels)
