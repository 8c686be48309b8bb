"""Quality of a rewritten model: one measure for each kind of output, with its uncertainty.

    similarity  embeddings: Spearman correlation of the pairwise cosines of texts, new to original
    index       embeddings: share of the 10 nearest documents of the original that the queries of
                both models find
    tau         scores of a reranker: mean of Kendall's tau over the documents of each query
    r2          hidden states, features, numbers: 1 - sum |a - b|^2 / sum |a - mean a|^2
    kl          class logits: 1 - KL(original, new) / KL(original, constant)
    top1        vocabulary logits: share of tokens with the same most probable next token
    cosine      any output: mean cosine of vectors; values of different models are not comparable

1 means equal outputs. A constant predictor, which returns the same output for every input, scores 0
in similarity, r2 and kl; ``Quality.constant`` holds its score. Intervals are over texts
(``intervals.mean_interval``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.checks.measures import (
    LogitsMeter,
    Meter,
    Scores,
    log_of,
    not_finite_rows,
)
from attnserve.checks.meters import new_meter
from attnserve.checks.relations import IndexMeter
from attnserve.data.datasets import Dataset
from attnserve.data.query_lists import MIN_LISTED
from attnserve.data.row_batches import RowBatch, RowInfo, row_info
from attnserve.data.splits import LEAST_SEARCHED
from attnserve.limits import ROUNDING, SELECTION_CONFIDENCE, TAIL
from attnserve.literals import Measure, SearchMeasure, Split
from attnserve.models.artifact import Artifact
from attnserve.models.embeddings import Embedding
from attnserve.models.masks import token_mask
from attnserve.models.measured import Losses, Quality, Subject
from attnserve.models.output_kinds import (
    MIN_CLASSES,
    VECTOR_NAME,
    is_cache_name,
    probability_outputs,
    resized_outputs,
    same_outputs,
    vocabulary_size,
)
from attnserve.models.rows import row_count
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidArgument, InvalidData

__all__ = [
    "QualityMeter",
    "allowed_loss",
    "check_measure",
    "largest_loss",
    "limited_losses",
]


COARSE = frozenset({"index", "top1"})
"""Measures whose value for a single text is a share of few events."""


def largest_loss(qualities: Iterable[Quality], *, bounded: bool) -> float:
    """The largest loss of the outputs, files and lengths of a comparison; see ``Losses``."""
    return max(
        (quality.losses.bounded if bounded else quality.losses.measured for quality in qualities),
        default=0.0,
    )


def limited_losses(scores: Scores) -> Losses:
    """The loss that a goal limits, measured and bounded: the largest of up to three losses.

    1. The loss of the measure itself.
    2. The loss of a second measure, for these measures:
       - "similarity": 1 - R^2 of the vectors, because neighborhoods change before ranks of all
         pairs do.
       - "index": 1 - R^2 of the vectors of queries.
       - "tau": the share of queries with another best document.
       - "top1": 1 - kl, because one frequent token is easily predicted.
    3. The loss at the 5th percentile of the texts, divided by ``TAIL``. "top1" and "index" use the
       second measure, because the agreement of a short text or of ten neighbors is coarse; all
       others use the measure itself.
    """
    second = scores.second
    conditions = [scores] if second is None else [scores, second]
    tail = (1 - (second if second and scores.measure in COARSE else scores).p5) / TAIL
    return Losses(
        _largest(tail, *(1 - condition.value for condition in conditions)),
        _largest(tail, *(1 - condition.bound(SELECTION_CONFIDENCE) for condition in conditions)),
    )


def _largest(*losses: float) -> float:
    """The largest loss, at least 0; infinite if any is not a number."""
    return math.inf if any(map(math.isnan, losses)) else max(0.0, *losses)


def allowed_loss(keep: float) -> float:
    """The largest loss of a model that keeps this quality."""
    return max(1 - keep, ROUNDING)


def check_measure(measure: SearchMeasure, data: Dataset | None) -> None:
    """Check that the data of a comparison fits a measure.

    Raises:
        InvalidData: The measure is "tau", and a file has no lists of documents of a query.
    """
    if measure != "tau" or data is None:
        return
    for file in data.files or [data]:
        if not file.has_lists:
            raise InvalidData(
                f"{file.source.file} has no lists of documents: the measure tau compares the order"
                " of the documents of a query",
                f"for a reranker, give at least {MIN_LISTED} documents of each query, and"
                f" {LEAST_SEARCHED} queries for a search, or choose another measure",
                code="quality.no_lists",
            )


OutputKind = Literal["scores", "classes", "vocabulary", "embeddings", "features"]

MEASURES: Mapping[OutputKind, Measure] = {
    "scores": "tau",
    "classes": "kl",
    "vocabulary": "top1",
    "embeddings": "similarity",
    "features": "r2",
}
"""The default measure of each kind of output."""

REQUIRED_KIND: Mapping[Measure, OutputKind] = {"tau": "scores", "index": "embeddings"}
"""Measures that apply to one kind of output; others have their own measure."""


class _Texts(NamedTuple):
    """Rows of a batch with texts of one file and one class of lengths."""

    file: str
    lengths: str
    rows: np.ndarray


class QualityMeter:
    """Compares the outputs of two models batch by batch.

    Caches are left out. The kind of each output is read from its name and its first array:

        [B, C], called logits or with less than 64 columns      classes
        [B, T, C], called logits or as wide as the vocabulary   vocabulary
        [B, D], and [B, T, D] of a model for text               embeddings
        [B, 1], if the data has lists of documents of a query   scores
        a last axis of changing length, such as [B, T]          numbers
        anything else                                           features

    Args:
        model: The original.
        artifact: Its artifact, for the pooling and the similarity of embeddings.
        measure: Overrides the measure of each kind of output, where it applies.
        data: The data of the batches; files, and short and long texts, are measured separately.
            Without it, rows have no roles and no lists.
        split: The part of the data.
    """

    def __init__(
        self,
        model: ir.Model,
        artifact: Artifact,
        *,
        measure: SearchMeasure = "auto",
        data: Dataset | None = None,
        split: Split = "data",
    ) -> None:
        self.outputs = [value.name or "" for value in model.graph.outputs]
        self.measure: Measure = "auto" if measure == "score" else measure
        self.embedding = Embedding.of(artifact)
        self._has_texts = artifact.tokenizer is not None
        self.vocabulary, self.classes = vocabulary_size(model), len(artifact.labels)
        self.data = data
        self.split: Split = split
        self._resized = resized_outputs(model)
        self._probabilities = probability_outputs(model)
        self._meters: dict[Subject, Meter] = {}
        self._same = same_outputs(model)
        self._rows = 0
        # Rows with NaN in the original, and rows that are not finite in the new model alone.
        self._not_finite: dict[Subject, tuple[list[int], list[int]]] = {}

    def add(self, before: Sequence[np.ndarray], after: Sequence[np.ndarray], batch: Batch) -> None:
        """Add the outputs of the original and of the new model for one batch."""
        texts = row_count(batch) if batch else max(map(len, before), default=0)
        for index, (original, new) in enumerate(zip(before, after, strict=True)):
            if not self._is_measured(index, original):
                continue
            if index in self._resized:
                original, new = original[..., None], new[..., None]
            not_finite = not_finite_rows(original, new, batch)
            rows_per_text = max(len(original) // max(texts, 1), 1)  # if tokens are flattened
            for file, lengths, rows in self._kinds(batch, len(original)):
                subject = Subject(self.outputs[index], file, lengths)
                numbers = self._not_finite.setdefault(subject, ([], []))
                for row_numbers, faulty in zip(numbers, not_finite, strict=True):
                    numbers_in_batch = np.unique(faulty[np.isin(faulty, rows)] // rows_per_text)
                    row_numbers += (self._rows + numbers_in_batch).tolist()
                if rows_per_text == 1:  # else NaN counts as 0
                    rows = np.setdiff1d(rows, not_finite[0])
                if len(rows):
                    self._measure(index, subject, rows, (original, new), batch)
        self._rows += texts

    def _is_measured(self, index: int, array: np.ndarray) -> bool:
        """Whether an output is measured: floats, no cache, and no repetition of another output."""
        if is_cache_name(self.outputs[index]) or index in self._same:
            return False
        return array.ndim > 0 and array.size > 0 and array.dtype.kind == "f"

    def _measure(
        self,
        index: int,
        subject: Subject,
        rows: np.ndarray,
        arrays: tuple[np.ndarray, np.ndarray],
        batch: Batch,
    ) -> None:
        """Add some rows of an output of the original and of the new model."""
        original, new = arrays
        info = RowInfo() if self.data is None else row_info(batch).of_rows(rows)
        if subject not in self._meters:
            has_lists = info.lists is not None
            self._meters[subject] = self._meter(index, original, has_lists=has_lists)
        meter, pair = self._meters[subject], (original[rows], new[rows])
        if index in self._probabilities and isinstance(meter, LogitsMeter):
            pair = log_of(pair[0]), log_of(pair[1])
        inputs = {
            name: array[rows] if array.shape[:1] == original.shape[:1] else array
            for name, array in batch.items()
        }
        meter.add(*pair, RowBatch(inputs, info))

    def additive_loss(self) -> float:
        """The additive loss: the losses of changes of different blocks nearly add up.

        The loss is 1 - R^2 of features and embeddings, the share of the KL divergence of logits,
        and the mean over outputs; ``Losses`` has maxima, which do not add up.
        """
        return float(np.mean([meter.additive_loss() for meter in self._meters.values()] or [0.0]))

    def results(self) -> list[Quality]:
        """The quality of each output, by file and by length; the lowest quality comes first.

        Raises:
            InvalidData: The original gives NaN in every row, or the measure is "index" and the data
                has less than two documents.
            InvalidArgument: The measure is "index", and no output is an embedding.
        """
        is_index = any(isinstance(meter, IndexMeter) for meter in self._meters.values())
        if self.measure == "index" and self._meters and not is_index:
            raise InvalidArgument(
                "`measure` is index, and the model has no output with embeddings of texts",
                "choose another measure, or leave it out",
                code="quality.no_embedding",
            )
        qualities: list[Quality] = []
        for subject, (excluded, wrong) in self._not_finite.items():
            if (meter := self._meters.get(subject)) is None:
                raise InvalidData(
                    f"the original gives NaN for output {subject.output!r} in every row",
                    "check the inputs, and the original model",
                    code="quality.not_finite",
                )
            index = self.outputs.index(subject.output)
            same = [self.outputs[i] for i, first in self._same.items() if first == index]
            quality = _quality(
                meter,
                split=self.split,
                output=subject.output,
                file=subject.file,
                lengths=subject.lengths,
                same_outputs=same,
                not_finite_rows=wrong,
                excluded_rows=excluded,
            )
            qualities.append(quality)
        return sorted(qualities, key=lambda quality: -quality.losses.bounded)

    def _kinds(self, batch: Batch, rows: int) -> list[_Texts]:
        """The rows of a batch of ``rows`` rows, with short and long texts separated."""
        data = None if self.data is None else self.data.file_of(batch)
        name = "" if data is None or data is self.data else data.source.file
        # An index holds documents of all lengths.
        edge = None if data is None or self.measure == "index" else data.length_edge
        array = next((x for x in batch.values() if x.ndim > 1 and len(x) == rows), None)
        if edge is None or array is None:
            return [_Texts(name, "", np.arange(rows))]
        counts = token_mask(batch, array.shape[:2]).sum(axis=1)
        kinds = (
            (f"up to {edge} tokens", counts <= edge),
            (f"more than {edge} tokens", counts > edge),
        )
        return [
            _Texts(name, kind, np.flatnonzero(chosen)) for kind, chosen in kinds if chosen.any()
        ]

    def _meter(self, index: int, array: np.ndarray, *, has_lists: bool) -> Meter:
        kind = self._kind(index, array, has_lists=has_lists)
        measure: Measure = self.measure
        if measure == "auto" or REQUIRED_KIND.get(measure, kind) != kind:
            measure = MEASURES[kind]
        is_vector = array.ndim in (2, 3) and array.shape[-1] > 1
        measure = measure if is_vector or measure in ("cosine", "tau") else "r2"
        return new_meter(measure, self.embedding)

    def _kind(self, index: int, array: np.ndarray, *, has_lists: bool) -> OutputKind:
        """The kind of an output, by its name and its first array."""
        name = self.outputs[index].lower()
        width = array.shape[-1] if array.ndim > 1 else 1
        is_logits = "logits" in name and width > 1
        if array.ndim == 2 and width == 1:
            return "scores" if has_lists else "features"
        if array.ndim == 2:
            is_known = index in self._probabilities or width == self.classes
            is_narrow = width < MIN_CLASSES and VECTOR_NAME.search(name) is None
            return "classes" if is_logits or is_known or is_narrow else "embeddings"
        if array.ndim == 3 and (is_logits or width == self.vocabulary):
            return "vocabulary"
        if array.ndim == 3 and self._has_texts and self.embedding.pooling != "none":
            return "embeddings"
        return "features"


def _quality(meter: Meter, **described: Any) -> Quality:
    """Make the quality from the result of a meter, and fields that describe what was measured."""
    scores = meter.scores()
    further: dict[str, Any] = {**described, **scores.also}
    return Quality(
        measure=scores.measure,
        value=scores.value,
        lower=scores.bound(0.95),
        ci95=scores.ci95,
        p5=scores.p5,
        constant=scores.constant,
        rows=len(scores.influence),
        documents=scores.documents or None,
        losses=limited_losses(scores) if meter.is_finite else Losses(1.0, 1.0),
        is_finite=meter.is_finite,
        **further,
    )
