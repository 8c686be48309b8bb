"""Sparse mixing: each head reads a subset of the shared dimensions.

    score_h(x, y) = scale * ( (x P)[S_h] diag(m_h) (y Q)[S_h]^T + y v_h ),   sum_h |S_h| = entries

With dense mixing (equation 7 of arXiv 2006.16362), every head multiplies all R dimensions. Sparse
mixing keeps the entries of M with the largest weight |M[h, r]| |p_r| |q_r| over all heads, so heads
have different sizes and the scores cost no more than before. The support shrinks in steps. After
each step, least squares solves for M on its support, P and Q, in the metric of ``moments``.

If R >= entries, no dimension is shared. The optimum is then a truncated singular value
decomposition of each head, with the ranks distributed over the heads.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.cp import (
    MAX_SWEEPS,
    CollaborativeFactors,
    collaborative_factors,
    fold_mean,
    sweep,
)
from graph_passes.factorize.head_stack import RIDGE, Factors, HeadStack
from graph_passes.factorize.moments import (
    TokenMoments,
    Whitening,
    validate_heads,
    validate_rank,
)

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["sparse_factors"]

FEW_SHARE = 1 / 4
"""If heads read at most this share of the dimensions, the dense start takes ``FEW_SWEEPS``."""

FEW_SWEEPS = 10
"""Sweeps of a short dense start, instead of up to 200: most of its entries are removed afterwards,
and the errors at the end differ little."""

SHRINK = 0.8
"""Share of the entries that each step keeps."""

SWEEPS = 4
"""Number of least-squares sweeps per step."""

LAST_SWEEPS = 40
"""Maximum number of sweeps on the final support."""

TOLERANCE = 1e-4
"""Relative decrease of the error at which the sweeps stop."""


def sparse_factors(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    rank: int,
    head_size: int,
    *,
    max_head_size: int | None = None,
    query_bias: Float[np.ndarray, "H K"] | None = None,
    moments: TokenMoments | None = None,
) -> CollaborativeFactors:
    """Compute shared projections and a mixing matrix with ``head_size`` entries per head.

    ``head_size`` is the mean over the heads.

    Args:
        queries: W_Q^h of each head.
        keys: W_K^h of each head.
        rank: R, from 1 to H * K. No dimension is shared if R >= H * ``head_size``.
        head_size: Mean number of dimensions per head, from 1 to K.
        max_head_size: Maximum dimensions per head, from ``head_size`` to K (default: K).
        query_bias: b_Q^h of each head (default: zero).
        moments: Moments of the layer's tokens, for a calibrated decomposition.

    Returns:
        Factors whose ``mixing`` is zero outside the support. Dimensions without a reader are
        removed.

    Raises:
        InvalidArgument: The rank or head size is out of range, or shapes disagree.
        InvalidData: The moments have another size, or a covariance has negative eigenvalues.
        InvalidModel: Weights are not finite.
    """
    queries, keys, bias, moments = validate_heads(queries, keys, query_bias, moments)
    H, _, K = queries.shape
    limit = K if max_head_size is None else max_head_size
    if not 1 <= head_size <= K:
        raise InvalidArgument(
            f"`head_size` is {head_size}: expected 1 to {K}",
            "choose a value up to the head size of the layer",
            code="factorize.head_size",
        )
    if not head_size <= limit <= K:
        raise InvalidArgument(
            f"`max_head_size` is {limit}: expected {head_size} to {K}",
            "choose a value from `head_size` to the head size of the layer",
            code="factorize.max_head_size",
        )
    validate_rank(rank, H, K)
    entries = H * head_size
    if entries == H * K == rank:
        return collaborative_factors(queries, keys, rank, query_bias=bias)
    metric = Whitening.of(moments, H)
    stack = metric.stack(queries, keys)
    if rank >= entries:
        factors = _truncated(stack, entries, limit)
        iterations = 0
    else:
        dense = collaborative_factors(
            queries,
            keys,
            rank,
            query_bias=bias,
            moments=moments,
            max_iterations=FEW_SWEEPS if head_size <= FEW_SHARE * rank else MAX_SWEEPS,
        )
        factors, iterations = _shrunk(stack, metric.whiten(dense.factors), entries, limit)
        iterations += dense.iterations
    dimensions = np.flatnonzero(factors.mixing.any(axis=0))
    factors = Factors(*(factor[:, dimensions] for factor in factors))
    content = np.einsum("hek,hk->he", keys, bias)
    error = stack.residual(factors)
    full_factors = CollaborativeFactors(*metric.unwhiten(factors), content, error, iterations)
    return fold_mean(full_factors, queries, keys, moments.query_mean)


def _truncated(stack: HeadStack, entries: int, max_head_size: int) -> Factors:
    """The factors of the largest singular triples, at most ``max_head_size`` per head."""
    triples = stack.singular_triples()
    head, index = np.nonzero(_strongest(triples.values, entries, max_head_size))
    mixing = np.zeros((stack.heads, entries))
    mixing[head, np.arange(entries)] = 1.0
    root = np.sqrt(triples.values[head, index])
    query = triples.left[head, :, index].T * root
    key = triples.right[head, :, index].T * root
    return Factors(query, key, mixing)


def _shrunk(
    stack: HeadStack, start: Factors, entries: int, max_head_size: int
) -> tuple[Factors, int]:
    """Factors with ``entries`` entries of M, and the number of sweeps."""
    query, key, mixing = start
    count = mixing.size
    iterations = 0
    while count > entries:
        count = max(entries, int(SHRINK * count))
        # The limit per head shrinks at the same rate as the total.
        limit = max(max_head_size, -(-count * max_head_size // entries))
        strength = np.linalg.norm(query, axis=0) * np.linalg.norm(key, axis=0)  # R
        support = _strongest(np.abs(mixing) * strength, count, limit)
        previous = np.inf
        for _ in range(LAST_SWEEPS if count == entries else SWEEPS):
            (query, key, mixing), error, _ = sweep(stack, query, key, partial(_solve_on, support))
            iterations += 1
            if previous - error < TOLERANCE * error:
                break
            previous = error
    return Factors(query, key, mixing), iterations


def _strongest(
    weight: Float[np.ndarray, "H R"], count: int, max_head_size: int
) -> Bool[np.ndarray, "H R"]:
    """Mask of the ``count`` largest entries, 1 to ``max_head_size`` per row."""
    order = np.argsort(-weight, axis=1, kind="stable")
    eligible = np.full(weight.shape, -1.0)
    rows = np.arange(len(weight))[:, None]
    eligible[rows, order[:, :max_head_size]] = weight[rows, order[:, :max_head_size]]
    eligible[rows, order[:, :1]] = np.inf
    chosen = np.argsort(-eligible, axis=None, kind="stable")[:count]
    support = np.zeros(weight.size, bool)
    support[chosen] = True
    return support.reshape(weight.shape)


def _solve_on(support: np.ndarray, normal: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Solve for M, which is zero outside its support."""
    mixing = np.zeros(support.shape)
    for head, read in enumerate(support):
        system = normal[np.ix_(read, read)] + RIDGE * np.eye(int(read.sum()))
        mixing[head, read] = np.linalg.solve(system, products[head, read])
    return mixing
