"""Distillation loss of the served outputs and of the hidden states."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from attnserve.checks.measures import LEAST_PROBABILITY
from attnserve.literals import Pooling
from attnserve.models.masks import vector_mask
from attnserve.models.measured import Quality
from attnserve.runtime.interface import Batch
from graph_passes.errors import InvalidData

__all__ = ["DistillationLoss", "served_vectors"]

HIDDEN_WEIGHT = 0.5
LAST_WEIGHT = 6.0
SERVED_WEIGHT = 3.0
"""Weights of the hidden states, of the last hidden state, and of embeddings or logits. Each loss is
first divided by the loss of a constant predictor, so that no weight depends on the model."""

Kind = Literal["vectors", "pooled", "logits"]


@dataclass(frozen=True)
class _Term:
    """The loss of one output or state.

    Attributes:
        index: The place among the outputs and states.
        unit: The loss of a constant predictor.
    """

    index: int
    kind: Kind
    weight: float
    unit: float


class DistillationLoss:
    """The distillation loss: 0 for equal outputs, and about 1 per weight for constant ones.

        vectors  |a - b|^2 over real tokens
        pooled   |a - b|^2 of pooled vectors of length one
        logits   KL(a, b)

    Args:
        qualities: The measured outputs: pooled vectors are learned for measures of similarity, KL
            for measures of logits, and plain vectors for all others.
        outputs: The names of the teacher's outputs, in order.
        pairs: The number of states after the outputs.
        pooling: The pooling of tokens.
        examples: Some batches, for the units.
        teacher: The outputs and states of the teacher for each example.
        dimensions: Number of embedding dimensions that are served; None for all.
        resized: Indices of outputs whose last axis counts tokens: their vectors are numbers.
        probabilities: Indices of outputs of a softmax: their logarithms are the logits.
        student_outputs: The names of the student's outputs, which may lack caches; None for the
            names of ``outputs``.

    Raises:
        InvalidData: No output or state depends on the data.
    """

    def __init__(
        self,
        qualities: Sequence[Quality],
        outputs: Sequence[str],
        pairs: int,
        pooling: Pooling,
        examples: Sequence[Batch],
        teacher: Callable[[Batch], list[np.ndarray]],
        *,
        dimensions: int | None = None,
        resized: Collection[int] = (),
        probabilities: Collection[int] = (),
        student_outputs: Sequence[str] | None = None,
    ) -> None:
        self.pooling: Pooling = pooling
        self.dimensions = dimensions
        self.resized = frozenset(resized)
        self.probabilities = frozenset(probabilities)
        names = list(outputs if student_outputs is None else student_outputs)
        self.places = {i: names.index(n) for i, n in enumerate(outputs) if n in names}
        self.places |= {len(outputs) + pair: len(names) + pair for pair in range(pairs)}
        axes = [array.ndim for array in teacher(examples[0])]
        measures = {quality.output: quality.measure for quality in qualities}
        learned: list[tuple[int, Kind, float]] = []
        for index, name in enumerate(outputs):
            measure = measures.get(name)
            if measure is None or index not in self.places:
                continue
            if measure in ("kl", "top1"):
                learned.append((index, "logits", SERVED_WEIGHT))
                continue
            is_tokens = axes[index] > 2
            is_pooled = measure in ("similarity", "index")
            if not is_pooled or is_tokens:
                learned.append((index, "vectors", LAST_WEIGHT))
            if is_pooled:
                learned.append((index, "pooled", SERVED_WEIGHT))
        for index in range(len(outputs), len(outputs) + pairs):
            learned.append((index, "vectors", HIDDEN_WEIGHT))
        units = self._units([(index, kind) for index, kind, _ in learned], examples, teacher)
        self.terms = [
            _Term(*each, unit) for each, unit in zip(learned, units, strict=True) if unit > 0
        ]
        if not self.terms:
            raise InvalidData(
                "no output of the teacher depends on the data, or all are not finite",
                "check `data` and `teacher` with `attnserve verify`",
                code="recovery.constant_teacher",
            )

    def __call__(
        self, student: Sequence[Tensor], teacher: Sequence[np.ndarray], batch: Batch
    ) -> Tensor:
        """The loss of one batch."""
        losses: list[Tensor] = []
        for term in self.terms:
            vectors = self._vectors(student[self.places[term.index]], term.index, term.kind)
            expected = torch.from_numpy(teacher[term.index]).to(vectors.device)
            expected = self._vectors(expected, term.index, term.kind)
            if term.kind == "vectors" and vectors.ndim > 1:
                loss = _mean_square(expected, vectors, batch)
            else:
                a, b = (self._rows(x, term.kind, batch) for x in (expected, vectors))
                loss = _distance(a, b, term.kind).mean()
            losses.append(term.weight / term.unit * loss)
        return torch.stack(losses).sum()

    def _vectors(self, x: Tensor, index: int, kind: Kind) -> Tensor:
        """An output in float32, whose last axis counts features; logits of probabilities."""
        if kind == "logits" and index in self.probabilities:
            return x.float().clamp(min=LEAST_PROBABILITY).log()
        return x.float()[..., None] if index in self.resized else x.float()

    def _rows(self, x: Tensor, kind: Kind, batch: Mapping[str, np.ndarray]) -> Tensor:
        """The vectors that are compared, (rows, D)."""
        if kind == "pooled":
            return served_vectors(x, batch, self.pooling, self.dimensions)
        mask = torch.tensor(vector_mask(x.shape, batch), device=x.device)
        return x[mask] if x.ndim > 1 else x[:, None]

    def _units(
        self,
        terms: Sequence[tuple[int, Kind]],
        examples: Sequence[Batch],
        teacher: Callable[[Batch], list[np.ndarray]],
    ) -> list[float]:
        """The loss of the best constant prediction of each term; 0 if it is not a number.

        Only the outputs for one batch are in memory: logits of a vocabulary are large.
        """

        def rows(batch: Batch) -> list[tuple[Kind, Tensor]]:
            arrays = teacher(batch)
            vectors = [
                self._vectors(torch.from_numpy(arrays[index]), index, kind) for index, kind in terms
            ]
            return [
                (kind, self._rows(x, kind, batch))
                for (_, kind), x in zip(terms, vectors, strict=True)
            ]

        sums: list[Any] = [0.0] * len(terms)
        squares, counts, losses = (np.zeros(len(terms)) for _ in range(3))
        for batch in examples:
            for place, (kind, x) in enumerate(rows(batch)):
                sums[place] = sums[place] + (F.softmax(x, -1) if kind == "logits" else x).sum(0)
                squares[place] += 1.0 * len(x) if kind == "logits" else float((x * x).sum())
                counts[place] += len(x)
        means = [total / max(count, 1) for total, count in zip(sums, counts, strict=True)]
        for batch in examples:
            for place, (kind, x) in enumerate(rows(batch)):
                best = means[place]
                best = best.clamp(min=1e-30).log() if kind == "logits" else best
                losses[place] += float(_distance(x, best.expand_as(x), kind).sum())
        units, scales = losses / np.maximum(counts, 1), squares / np.maximum(counts, 1)
        usable = np.isfinite(units) & (units > 1e-9 * np.maximum(scales, 1e-30))
        return np.where(usable, units, 0.0).tolist()


def served_vectors(
    x: Tensor,
    batch: Mapping[str, np.ndarray],
    pooling: Pooling,
    dimensions: int | None = None,
) -> Tensor:
    """Vectors of length one (B, D) of hidden states (B, T, D), or of pooled vectors (B, D).

    The function is ``models.embeddings.pool`` with gradients; "none" pools hidden states by their
    mean.
    """
    if x.ndim == 3:
        mask = torch.tensor(vector_mask(x.shape, batch), device=x.device)
        rows = torch.arange(len(x), device=x.device)
        if pooling == "cls":
            x = x[rows, mask.int().argmax(1)]
        elif pooling == "last":
            x = x[rows, mask.shape[1] - 1 - mask.flip(1).int().argmax(1)]
        else:
            weights = mask[..., None].to(x.dtype)
            x = (x * weights).sum(1) / weights.sum(1).clamp(min=1)
    return F.normalize(x[..., :dimensions], dim=-1)


def _mean_square(a: Tensor, b: Tensor, batch: Mapping[str, np.ndarray]) -> Tensor:
    """The mean of |a - b|^2 over real tokens; the gradient of a selection would be slow."""
    mask = torch.tensor(vector_mask(b.shape, batch), device=b.device)
    error = torch.where(mask[..., None], b - a, 0.0)
    return (error * error).sum() / mask.sum()


def _distance(a: Tensor, b: Tensor, kind: Kind) -> Any:
    """The loss of each row."""
    if kind == "logits":
        p, q = F.log_softmax(a, -1), F.log_softmax(b, -1)
        return torch.where(p > -torch.inf, p.exp() * (p - q), torch.zeros_like(p)).sum(-1)
    return ((a - b) ** 2).sum(-1)
