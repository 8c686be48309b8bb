"""Compute the measures of quality, which ``quality`` lists.

A meter accumulates sums over the batches. The sums give the value of the measure, and the influence
of each text on the value, from which the confidence interval follows.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from attnserve.intervals import mean_interval, mean_lower_bound
from attnserve.literals import Measure
from attnserve.models.masks import flat_mask, token_mask, vector_mask
from attnserve.runtime.interface import Batch

if TYPE_CHECKING:
    from jaxtyping import Float, Int

__all__ = [
    "LEAST_PROBABILITY",
    "MIN_ROWS",
    "CosineMeter",
    "FeaturesMeter",
    "LogitsMeter",
    "Meter",
    "Scores",
    "TextSums",
    "finite",
    "log_of",
    "next_token_nats",
    "not_finite_rows",
]

MIN_ROWS = 30
"""Minimum number of texts for a confidence interval."""

LEAST_PROBABILITY = 1e-30
"""Lower bound of probabilities; its logarithm is finite in float32."""

MOST_NATS = 50.0
"""Upper bound of the KL divergence of a token, so that a single token has a finite effect."""

CHUNK = 2**22
"""Elements of the temporary arrays for logits."""


@dataclass(frozen=True, eq=False)
class Scores:
    """The result of one measure for one output.

    Attributes:
        value: The value of the measure, 1 for equal outputs.
        influence: The influence of each text on the value; their mean is the value.
        single: The measure of each single text.
        constant: The value of a constant predictor.
        also: Other measures of the same output, by name.
        second: The measure of the second condition; see ``quality.limited_losses``.
        documents: The number of documents that the texts search, if the data has a split.
    """

    measure: Measure
    value: float
    influence: Float[np.ndarray, " N"]
    single: Float[np.ndarray, " N"]
    constant: float = 0.0
    also: Mapping[str, float] = field(default_factory=dict[str, float])
    second: Scores | None = None
    documents: int = 0

    def bound(self, confidence: float) -> float:
        """The lower end of a one-sided interval; the value for less than ``MIN_ROWS`` texts."""
        if len(self.influence) < MIN_ROWS:
            return self.value
        return min(mean_lower_bound(self.influence, confidence), self.value)

    @property
    def ci95(self) -> tuple[float, float] | None:
        """The two-sided interval; None for less than ``MIN_ROWS`` texts."""
        few = len(self.influence) < MIN_ROWS
        return None if few else mean_interval(self.influence, highest=1.0)

    @property
    def p5(self) -> float:
        """The 5th percentile of single texts; 1 without texts."""
        return float(np.percentile(self.single, 5)) if len(self.single) else 1.0


class Meter(ABC):
    """One measure of one output: ``add`` for each batch, then ``scores``.

    Attributes:
        is_finite: Whether the new model is finite where the original is.
    """

    is_finite = True

    def __init__(self, window: int | None = None) -> None:
        self.sums = TextSums(window)

    @abstractmethod
    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        """Add outputs whose first axis counts texts.

        Args:
            batch: The inputs, with the lists or the role of their rows if a measure needs them
                (``RowBatch``).
        """

    def additive_loss(self) -> float:
        """The loss of the output, which nearly adds up over changes of different blocks."""
        return 1 - self.scores().value

    @abstractmethod
    def scores(self) -> Scores: ...

    def _tokens(
        self, a: np.ndarray, b: np.ndarray, batch: Batch
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Real vectors of both outputs, (tokens, D), and the text of each vector.

        Outputs are (B, D), (B, T, ..., D), or (B*T, D) if the exporter flattens tokens.
        """
        shape = a.shape if a.ndim > 1 else (a.size, 1)
        real = vector_mask(shape, batch)
        text = np.arange(len(a))
        if a.ndim == 2 and (flat := flat_mask(batch, len(a))) is not None:
            text = np.repeat(np.arange(len(flat)), flat.shape[1])
        text = np.broadcast_to(text.reshape(-1, *(1,) * (real.ndim - 1)), real.shape)
        before, after = a.reshape(shape)[real], b.reshape(shape)[real]
        self.is_finite &= not np.isfinite(before[~np.isfinite(after)]).any()
        return before, after, text[real]


def _by_text(text: Int[np.ndarray, " T"], texts: int, *values: np.ndarray) -> list[np.ndarray]:
    """For each text with tokens: their number, and the sums of their values."""
    counts = np.bincount(text, minlength=texts)
    some = counts > 0
    return [counts[some].astype(float), *(np.bincount(text, x, texts)[some] for x in values)]


def not_finite_rows(
    a: np.ndarray, b: np.ndarray, batch: Batch
) -> tuple[Int[np.ndarray, " N"], Int[np.ndarray, " M"]]:
    """Row indices with NaN in the original a, and row indices that are not finite in b alone.

    Rows of the second kind have NaN where a has none, or another infinity than a. Equal infinities
    are legal, because masks produce them. Padding is ignored.
    """
    if a.dtype.kind != "f" or a.shape != b.shape or not a.size:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    shape = a.shape if a.ndim > 1 else (len(a), 1)
    real = vector_mask(shape, batch)
    x = a.reshape(shape)
    y = b.reshape(shape)
    is_nan = np.isnan(x)
    wrong = ~is_nan & (np.isnan(y) | ((np.isinf(x) | np.isinf(y)) & (x != y)))
    original, new = (np.unique(np.nonzero(bad.any(-1) & real)[0]) for bad in (is_nan, wrong))
    return original, np.setdiff1d(new, original)


def _ratio(
    measure: Measure, losses: Float[np.ndarray, " N"], counts: Float[np.ndarray, " N"], unit: float
) -> Scores:
    """1 - sum(losses) / (unit sum(counts)): 1 minus the mean loss of a token, in units of a loss.

    The influences are those of a ratio of sums (Cochran 1977, 6.4). The measure of a single text is
    its influence if the unit is 0.

    Args:
        losses: The sum of the losses of each text.
        counts: The tokens of each text.
        unit: The loss of a token that gives 0, for example the loss of a constant predictor.
    """
    if not len(losses) or unit <= 0 or counts.sum() <= 0:
        value = 1.0 if not losses.any() else 0.0
        influence = np.full(len(losses), value)
    else:
        mean = losses.sum() / counts.sum()
        value = 1 - float(mean / unit)
        influence = value - (losses - counts * mean) / (counts.mean() * unit)
    return Scores(measure, value, influence, 1 - losses / counts / unit if unit else influence)


def finite(array: np.ndarray) -> Float[np.ndarray, ...]:
    return np.nan_to_num(array.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)


class TextSums:
    """Sums per text that grow batch by batch; with a window, sums of the last batches."""

    def __init__(self, window: int | None = None) -> None:
        self.columns: deque[tuple[np.ndarray, ...]] = deque(maxlen=window)

    def add(self, *columns: np.ndarray) -> None:
        self.columns.append(columns)

    def column(self, index: int) -> np.ndarray:
        return np.concatenate([part[index] for part in self.columns])


class FeaturesMeter(Meter):
    """R^2 about the mean vector of the original.

    The sums of each text are the number of tokens, the errors, |a|^2 and a.
    """

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        before, after, text = self._tokens(a, b, batch)
        before, after = finite(before), finite(after)
        vectors = np.zeros((len(a), before.shape[1]))
        np.add.at(vectors, text, before)
        errors, squares = ((before - after) ** 2).sum(1), (before**2).sum(1)
        self.sums.add(*_by_text(text, len(a), errors, squares), vectors[np.unique(text)])

    def scores(self) -> Scores:
        counts, errors, squares, vectors = (self.sums.column(i) for i in range(4))
        mean = vectors.sum(0) / max(counts.sum(), 1)
        total = float(squares.sum() - counts.sum() * (mean**2).sum())
        if total <= 1e-12 * float(squares.sum()):
            total = 0.0  # the output does not depend on the input
        return _ratio("r2", errors, counts, unit=total / max(counts.sum(), 1))


class CosineMeter(Meter):
    """The mean cosine of vectors. The sums of each text are its tokens and 1 - cosine."""

    def __init__(self, window: int | None = None) -> None:
        super().__init__(window)
        self.units: Any = 0.0
        self.vectors: Any = 0.0

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        before, after, text = self._tokens(a, b, batch)
        before, after = finite(before), finite(after)
        lengths, others = np.linalg.norm(before, axis=1), np.linalg.norm(after, axis=1)
        product = lengths * others
        cosines = (before * after).sum(1) / np.where(product > 0, product, 1.0)
        cosines = np.where((before == after).all(1), 1.0, cosines)
        self.units += (before / np.where(lengths > 0, lengths, 1.0)[:, None]).sum(0)
        self.vectors += before.sum(0)
        self.sums.add(*_by_text(text, len(a), 1 - cosines))

    def scores(self) -> Scores:
        counts, losses = self.sums.column(0), self.sums.column(1)
        length = float(np.linalg.norm(self.vectors))
        constant = float(self.units @ self.vectors) / (length or 1.0) / max(counts.sum(), 1)
        return replace(_ratio("cosine", losses, counts, unit=1.0), constant=constant)


class LogitsMeter(Meter):
    """KL divergence and agreement of the most probable class or token.

    The sums of each text are its tokens, KL in nats, disagreements and negative entropy in nats.
    """

    def __init__(self, measure: Measure, window: int | None = None) -> None:
        super().__init__(window)
        self.measure: Measure = measure
        # Not limited by a window: one row of each text would need much memory.
        self.probabilities: Any = 0.0
        self.winners: Any = 0
        self.next = np.zeros(3)  # tokens with a known successor, and its two losses in nats

    def add(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        if a.ndim == 3:
            self._add_perplexity(a, b, batch)
        before, after, text = self._tokens(a, b, batch)
        width = before.shape[1]
        divergence, differs, negative_entropy = np.zeros((3, len(before)))
        for start in range(0, len(before), max(CHUNK // width, 1)):
            part = slice(start, start + max(CHUNK // width, 1))
            x, y = _log_softmax(before[part]), _log_softmax(after[part])
            p = np.exp(x)
            with np.errstate(invalid="ignore"):
                apart = np.where(p > 0, p * (x - y), 0.0).sum(1)
                negative_entropy[part] = np.where(p > 0, p * x, 0.0).sum(1)
            divergence[part] = np.clip(np.nan_to_num(apart, nan=MOST_NATS), 0, MOST_NATS)
            best = x.argmax(1)
            differs[part] = best != y.argmax(1)
            self.probabilities += p.sum(0)
            self.winners += np.bincount(best, minlength=width)
        self.sums.add(*_by_text(text, len(a), divergence, differs, negative_entropy))

    def _add_perplexity(self, a: np.ndarray, b: np.ndarray, batch: Batch) -> None:
        before, after = next_token_nats(a, batch), next_token_nats(b, batch)
        if before is not None and after is not None:
            self.next += [before[1].sum(), before[0].sum(), after[0].sum()]

    def additive_loss(self) -> float:
        return 1 - self._kl().value

    def _kl(self) -> Scores:
        counts, divergence, _, negative_entropy = (self.sums.column(i) for i in range(4))
        # KL of the constant predictor
        unit = max(self._constant_nats() + negative_entropy.sum() / counts.sum(), 0.0)
        return _ratio("kl", divergence, counts, unit)

    def _constant_nats(self) -> float:
        """The entropy of the best constant prediction, in nats."""
        mean = self.probabilities / self.probabilities.sum()
        return -float(np.where(mean > 0, mean * np.log(np.maximum(mean, 1e-300)), 0.0).sum())

    def scores(self) -> Scores:
        counts, divergence, differs = (self.sums.column(i) for i in range(3))
        kl = self._kl()
        agreement = _ratio("top1", differs, counts, unit=1.0)
        extras = {"kl_nats": float(divergence.sum() / counts.sum())}
        tokens, before, after = self.next
        if tokens and before / tokens < self._constant_nats():
            extras |= {
                "perplexity_original": float(np.exp(before / tokens)),
                "perplexity": float(np.exp(min(after / tokens, MOST_NATS))),
            }
        if self.measure == "kl":
            return replace(kl, also={"top1": agreement.value, **extras})
        # The agreement of a short text is too coarse for a limit: ``limited_losses`` uses KL.
        constant = float(self.winners.max() / self.winners.sum())
        return replace(agreement, constant=constant, also={"kl": kl.value, **extras}, second=kl)


def next_token_nats(
    logits: Float[np.ndarray, "B T C"], batch: Batch
) -> tuple[Float[np.ndarray, " B"], Int[np.ndarray, " B"]] | None:
    """(negative log-likelihood of the next tokens in nats, their number) of each row.

    Returns:
        None if no input holds token ids below C.
    """
    candidates = [
        array
        for name, array in batch.items()
        if array.shape == logits.shape[:2]
        and array.dtype.kind == "i"
        and not re.search("mask|type|position", name)
    ]
    # A mask may have any name.
    ids = next(
        (x for x in candidates if not set(np.unique(x)) <= {0, 1}), next(iter(candidates), None)
    )
    width = logits.shape[-1]
    if ids is None or int(ids.max()) >= width or int(ids.min()) < 0:
        return None
    mask = token_mask(batch, ids.shape)
    pairs = mask[:, 1:] & mask[:, :-1]  # B T-1
    texts, _ = np.nonzero(pairs)
    following = ids[:, 1:][pairs]
    log_probabilities = _log_softmax(logits[:, :-1][pairs])[np.arange(len(following)), following]
    counts = np.bincount(texts, minlength=len(ids))
    return -np.bincount(texts, log_probabilities, len(ids)), counts


def log_of(probabilities: np.ndarray) -> np.ndarray:
    """Logits of probabilities, which are clipped to ``LEAST_PROBABILITY``."""
    return np.log(np.maximum(probabilities.astype(np.float32), LEAST_PROBABILITY))


def _log_softmax(logits: np.ndarray) -> Float[np.ndarray, "T C"]:
    x = np.nan_to_num(logits.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    x = x - x.max(axis=1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=1, keepdims=True))
