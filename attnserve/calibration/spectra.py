"""The number of dimensions that attention uses: in its weights and in its scores.

Captured variance is Figure 1 of "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv
2006.16362): the share of squared singular values in the first n directions, of W_Q, W_K and
W_Q W_K^T. With moments of calibration data the matrices are C_x^(1/2) W_Q and C_y^(1/2) W_K: each
direction is weighted by the variance of the tokens.

The low-rank bottleneck is Theorem 1 of "Low-Rank Bottleneck in Multi-head Attention Models" (arXiv
2002.07028): a head of size K has scores of rank at most K, so that with n > K tokens it cannot
represent every attention pattern. ``measure_ranks`` shows how close the heads come to this limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import onnx_ir as ir

from attnserve.calibration.activations import evenly, probabilities_by_head, probabilities_of
from attnserve.context import DEFAULT_CONTEXT, RunContext
from attnserve.models.masks import no_token, not_finite, token_mask
from attnserve.runtime.interface import Batch
from attnserve.runtime.observer import observe
from graph_passes.blocks import AttentionBlock, Softmax
from graph_passes.factorize.moments import TokenMoments

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

__all__ = [
    "RANK_TOLERANCE",
    "CapturedVariance",
    "ScoreRanks",
    "Spectrum",
    "captured_variance",
    "measure_ranks",
    "text_lengths",
]

RANK_TOLERANCE = 0.01
"""Smallest singular value that counts toward the rank, relative to the largest."""

MOST_TEXTS = 32
"""Maximum number of texts whose ranks are measured, spread evenly over the batches."""

MOST_TOKENS = 128
"""Maximum number of queries and keys of such a text, from its start: the cost grows with the cube
of this number."""


@dataclass(frozen=True, eq=False)
class Spectrum:
    """Cumulative shares of energy (squared singular values), largest directions first.

    A matrix of zeros counts as captured by its first direction.

    Attributes:
        layer: The share that the first n directions capture of all heads, at index n - 1. The
            matrix has the heads side by side, or is the sum of their products.
        heads: The share that the first n directions capture of each head, at index n - 1.
    """

    layer: Float[np.ndarray, " N"]
    heads: Float[np.ndarray, "H K"]

    def rank(self, share: float) -> int:
        """Number of directions that capture this share of the layer."""
        return int(_rank(self.layer, share))

    def head_ranks(self, share: float) -> Int[np.ndarray, " H"]:
        """Number of directions that capture this share of each head."""
        return _rank(self.heads, share)


@dataclass(frozen=True, eq=False)
class CapturedVariance:
    """Spectra of W_Q, W_K and W_Q W_K^T; without the product under rotary positions."""

    query: Spectrum
    key: Spectrum
    product: Spectrum | None


@dataclass(frozen=True, eq=False)
class ScoreRanks:
    """Numerical ranks on some texts (singular values above ``RANK_TOLERANCE`` of the largest).

    Attributes:
        sizes: n, the smaller number of queries and keys of each text, without padding and without
            tokens beyond ``MOST_TOKENS``.
        scores: Ranks of the scores of heads that compute their own, after subtracting each query's
            mean over the keys, which softmax ignores: at most K (K + 1 with a content term) or n.
        probabilities: Ranks of the attention probabilities of all heads: at most n.
        head_size: K.
    """

    sizes: Int[np.ndarray, " N"]
    scores: Int[np.ndarray, "N O"]
    probabilities: Int[np.ndarray, "N H"]
    head_size: int

    @property
    def used(self) -> Float[np.ndarray, " O"]:
        """The median over texts of the scores' rank, as a share of min(n, K)."""
        return np.median(self.scores / np.minimum(self.sizes, self.head_size)[:, None], axis=0)

    @property
    def spanned(self) -> Float[np.ndarray, " H"]:
        """The median over texts of the attention's rank, as a share of n."""
        return np.median(self.probabilities / self.sizes[:, None], axis=0)


def captured_variance(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    moments: TokenMoments | None = None,
    *,
    product: bool = True,
) -> CapturedVariance:
    """The spectra of trained heads, from Gram matrices of their columns.

    Args:
        queries: W_Q^h of every head.
        keys: W_K^h of every head.
        moments: Token moments of the layer; without them all directions have equal weight.
        product: Whether the scores are products of queries and keys; False under rotary positions.
    """
    H, D, K = queries.shape
    max_rank = min(D, keys.shape[1], H * K)
    query_gram = _gram(queries, None if moments is None else moments.query_covariance)
    key_gram = _gram(keys, None if moments is None else moments.key_covariance)
    query_grams = _heads(query_gram, H)
    key_grams = _heads(key_gram, H)

    def spectrum(layer: np.ndarray, heads: np.ndarray) -> Spectrum:
        return Spectrum(_captured(layer, max_rank), _captured(heads))

    of_product: Spectrum | None = None
    if product:
        of_product = spectrum(
            _of_product(query_gram, key_gram), _of_product(query_grams, key_grams)
        )
    return CapturedVariance(
        query=spectrum(np.linalg.eigvalsh(query_gram), np.linalg.eigvalsh(query_grams)),
        key=spectrum(np.linalg.eigvalsh(key_gram), np.linalg.eigvalsh(key_grams)),
        product=of_product,
    )


def measure_ranks(
    model: ir.Model,
    blocks: Sequence[AttentionBlock],
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> dict[str, ScoreRanks]:
    """The ranks of scores and probabilities on at most ``MOST_TEXTS`` texts, by block name.

    Args:
        blocks: Their scores and probabilities must be values of the graph.

    Raises:
        InvalidData: The model refuses a batch, or a score is not finite.
    """
    by_block: dict[str, list[_TextRanks]] = {block.name: [] for block in blocks}
    values = [(_softmax(block).logits, *probabilities_of(block)) for block in blocks]
    sample = evenly(batches, MOST_TEXTS)
    for batch, arrays in observe(model, values, sample, context, "measure ranks"):
        for block, (logits, *p) in zip(blocks, arrays, strict=True):
            by_block[block.name] += _ranks(block, logits, p, batch, -(-MOST_TEXTS // len(sample)))
    ranks: dict[str, ScoreRanks] = {}
    for block in blocks:
        texts = by_block[block.name][:MOST_TEXTS]
        if not texts:
            raise no_token(block.name)
        ranks[block.name] = ScoreRanks(
            np.array([text.size for text in texts]),
            np.stack([text.scores for text in texts]),
            np.stack([text.probabilities for text in texts]),
            block.head_size,
        )
    return ranks


def text_lengths(
    model: ir.Model,
    block: AttentionBlock,
    batches: Sequence[Batch],
    *,
    context: RunContext = DEFAULT_CONTEXT,
) -> Int[np.ndarray, " N"]:
    """The number of unmasked keys of each sequence in a block; cheapest for the first block.

    Raises:
        InvalidData: The model refuses a batch.
    """
    lengths: list[int] = []
    values = [probabilities_of(block)]
    for batch, [p] in observe(model, values, batches, context, "count tokens"):
        p_by_head = probabilities_by_head(block, p)
        lengths += token_mask(batch, (len(p_by_head), p_by_head.shape[-1])).sum(1).tolist()
    return np.array(lengths)


def _softmax(block: AttentionBlock) -> Softmax:
    """The softmax of a block, which must be in the graph."""
    assert block.softmax is not None, block.name
    return block.softmax


def _rank(captured: np.ndarray, share: float) -> np.ndarray:
    """Number of directions that capture this share, along the last axis."""
    return 1 + np.argmax(captured >= share - 1e-9, axis=-1)  # rounding of a sum


def _gram(heads: np.ndarray, covariance: np.ndarray | None) -> Float[np.ndarray, "HK HK"]:
    """The inner products of all columns of heads (H, D, K) in the metric of the covariance."""
    side_by_side = heads.swapaxes(0, 1).reshape(heads.shape[1], -1).astype(np.float64)  # D HK
    weighted = side_by_side if covariance is None else covariance @ side_by_side
    gram = side_by_side.T @ weighted
    return (gram + gram.T) / 2


def _heads(gram: Float[np.ndarray, "HK HK"], count: int) -> Float[np.ndarray, "H K K"]:
    """The diagonal blocks of a Gram matrix, one per head."""
    size = len(gram) // count
    own = np.arange(count)
    return gram.reshape(count, size, count, size)[own, :, own]


def _of_product(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The squared singular values of X Y^T from the Gram matrices of X and Y."""
    values, vectors = np.linalg.eigh(y)
    root = vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
    inner = root.swapaxes(-1, -2) @ x @ root
    return np.linalg.eigvalsh((inner + inner.swapaxes(-1, -2)) / 2)


def _captured(energies: np.ndarray, most: int | None = None) -> np.ndarray:
    """Cumulative shares of ascending energies, from the largest."""
    descending = np.maximum(energies[..., ::-1][..., :most], 0.0)
    total = descending.sum(-1, keepdims=True)
    shares = descending.cumsum(-1) / np.where(total > 0, total, 1.0)
    return np.where(total > 0, np.minimum(shares, 1.0), 1.0)


def _ranks(
    block: AttentionBlock,
    logits: np.ndarray,
    p: Sequence[np.ndarray],
    batch: Batch,
    max_texts: int,
) -> list[_TextRanks]:
    axes = _softmax(block).axes
    scores = logits.transpose(axes) if axes else logits
    scores = scores.reshape(-1, block.q.num_heads, *scores.shape[-2:])  # B O S T
    probabilities = probabilities_by_head(block, p)
    B, _, S, T = probabilities.shape
    query_mask = token_mask(batch, (B, S))
    key_mask = token_mask(batch, (B, T))
    real = [row for row in range(B) if query_mask[row].any() and key_mask[row].any()]
    ranks: list[_TextRanks] = []
    for row in evenly(real, max_texts):
        queries = _first_tokens(query_mask[row])
        keys = _first_tokens(key_mask[row])
        ranks.append(
            _TextRanks(
                min(queries.sum(), keys.sum()),
                _matrix_rank(_selected(scores[row], queries, keys), block.name, centered=True),
                _matrix_rank(_selected(probabilities[row], queries, keys), block.name),
            )
        )
    return ranks


class _TextRanks(NamedTuple):
    """The smaller number n of queries and keys of one text, and the ranks of its heads, (H,)."""

    size: int
    scores: np.ndarray
    probabilities: np.ndarray


def _first_tokens(real: Bool[np.ndarray, " S"]) -> Bool[np.ndarray, " S"]:
    """The mask of the first ``MOST_TOKENS`` real tokens."""
    return real & (real.cumsum() <= MOST_TOKENS)


def _selected(
    array: Float[np.ndarray, "H S T"],
    queries: Bool[np.ndarray, " S"],
    keys: Bool[np.ndarray, " T"],
) -> np.ndarray:
    """The rows and columns of these queries and keys."""
    return array[:, queries][:, :, keys].astype(np.float64)


def _matrix_rank(
    matrices: Float[np.ndarray, "H S T"], name: str, *, centered: bool = False
) -> Int[np.ndarray, " H"]:
    """The numerical rank of each matrix.

    Args:
        centered: Subtract the mean of each row first.

    Raises:
        InvalidData: An element is not finite.
    """
    if not np.isfinite(matrices).all():
        raise not_finite(name, "scores")
    if centered:
        matrices = matrices - matrices.mean(-1, keepdims=True)
    values = np.linalg.svd(matrices, compute_uv=False)
    return (values > RANK_TOLERANCE * values[:, :1]).sum(-1)
