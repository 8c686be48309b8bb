"""Sparse mixing: each head reads a few of the shared dimensions, so scores cost what they did.

    score_h(x, y) = scale * ( (x P)[S_h] diag(m_h) (y Q)[S_h]^T + y v_h ),   sum_h |S_h| = entries

Dense mixing (equation 7 of arXiv 2006.16362) makes every head multiply all R dimensions. Here the
entries of M with the most weight |M[h, r]| |p_r| |q_r| stay, over all heads at once, so that heads
get different sizes. The support shrinks in steps; after each, M on its support, P and Q are solved
for again by least squares, in the metric of ``graph_passes.factorize.moments``.

Where there are entries for no more than one head a dimension (R >= entries), nothing is shared: the
best is each head's own truncated singular value decomposition, ranks shared out over the heads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors, with_mean
from graph_passes.factorize.head_stack import RIDGE, HeadStack, gram, solve, unit
from graph_passes.factorize.moments import TokenMoments, Whitening, checked

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

__all__ = ["sparse_factors"]

SHRINK = 0.8  # of the entries stay in each step
SWEEPS = 4  # of least squares in each step
LAST_SWEEPS = 40  # at most, on the last support
TOLERANCE = 1e-4  # of the error, under which a sweep is the last


def sparse_factors(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    rank: int,
    head_size: int,
    *,
    most: int | None = None,
    query_bias: Float[np.ndarray, "H K"] | None = None,
    moments: TokenMoments | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Shared projections and a mixing matrix with ``head_size`` entries a head on average.

    Args:
        queries: W_Q^h of every head.
        keys: W_K^h of every head.
        rank: R, from 1 to H * K. From H * ``head_size`` on, no dimension is shared.
        head_size: Dimensions a head reads, averaged over the heads, from 1 to K.
        most: Dimensions that one head reads at most; K by default, and no less than ``head_size``.
        query_bias: b_Q^h of every head; none is zero.
        moments: Of the layer's tokens, for a calibrated decomposition.
        progress: As of ``cp.collaborative_factors``, which comes first.

    Returns:
        Factors whose ``mixing`` is zero outside the support; dimensions that no head reads are left
        out.

    Raises:
        InvalidArgument: A rank or a head size out of range, or shapes that disagree.
        InvalidData, InvalidModel: As ``cp.collaborative_factors``.
    """
    queries, keys, bias, moments = checked(queries, keys, query_bias, moments)
    H, _, K = queries.shape
    limit = K if most is None else most
    if not 1 <= head_size <= K:
        raise InvalidArgument(
            f"The head size is {head_size}; expected 1 to {K}.", f"{K} is the size they have."
        )
    if not head_size <= limit <= K:
        raise InvalidArgument(f"At most {limit} dimensions a head; expected {head_size} to {K}.")
    if not 1 <= rank <= H * K:
        raise InvalidArgument(
            f"The shared dimension is {rank}; expected 1 to {H * K} ({H} heads of size {K}).",
            f"Choose less than {H * K}, which is exact already.",
        )
    entries = H * head_size
    if entries == H * K == rank:
        return collaborative_factors(queries, keys, rank, query_bias=bias)
    metric = Whitening.of(moments, H)
    stack = metric.stack(queries, keys)
    if rank >= entries:
        found = _truncated(stack, entries, limit)
        iterations = 0
    else:
        dense = collaborative_factors(
            queries, keys, rank, query_bias=bias, moments=moments, progress=progress
        )
        start = metric.into(dense.query, dense.key, dense.mixing)
        found, iterations = _shrunk(stack, *start, entries, limit)
        iterations += dense.iterations
    read = np.flatnonzero(found[2].any(axis=0))
    P, Q, M = (factor[:, read] for factor in found)
    content = np.einsum("hek,hk->he", keys, bias)
    error = stack.residual(P, Q, M)
    whole = CollaborativeFactors(*metric.back(P, Q, M), content, error, iterations)
    return with_mean(whole, queries, keys, moments.query_mean)


def _truncated(
    stack: HeadStack, entries: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """P, Q and M of the largest singular triples over all heads, at most ``most`` of each."""
    left, values, right = stack.singular_triples()  # H D K, H K, H E K
    head, index = np.nonzero(_strongest(values, entries, most))
    mixing = np.zeros((stack.heads, entries))
    mixing[head, np.arange(entries)] = 1.0
    root = np.sqrt(values[head, index])
    return left[head, :, index].T * root, right[head, :, index].T * root, mixing


def _shrunk(
    stack: HeadStack,
    query: np.ndarray,
    key: np.ndarray,
    mixing: np.ndarray,
    entries: int,
    most: int,
) -> tuple[tuple[np.ndarray, np.ndarray, np.ndarray], int]:
    """Factors with ``entries`` entries of M, and the sweeps that took."""
    count, iterations = mixing.size, 0
    while count > entries:
        count = max(entries, int(SHRINK * count))
        # A head's share is no harder to reach than that of all: it shrinks alike.
        limit = max(most, -(-count * most // entries))
        support = _strongest(np.abs(mixing) * _strength(query, key), count, limit)
        previous = np.inf
        for _ in range(LAST_SWEEPS if count == entries else SWEEPS):
            query, key, mixing = _sweep(stack, query, key, support)
            iterations += 1
            error = stack.residual(query, key, mixing)
            if previous - error < TOLERANCE * error:
                break
            previous = error
    return (query, key, mixing), iterations


def _strongest(weight: Float[np.ndarray, "H R"], count: int, most: int) -> Bool[np.ndarray, "H R"]:
    """Where the ``count`` largest entries are, at most ``most`` in a row and at least one."""
    order = np.argsort(-weight, axis=1, kind="stable")
    eligible = np.full(weight.shape, -1.0)
    rows = np.arange(len(weight))[:, None]
    eligible[rows, order[:, :most]] = weight[rows, order[:, :most]]
    eligible[rows, order[:, :1]] = np.inf
    chosen = np.argsort(-eligible, axis=None, kind="stable")[:count]
    support = np.zeros(weight.size, bool)
    support[chosen] = True
    return support.reshape(weight.shape)


def _strength(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    return np.linalg.norm(query, axis=0) * np.linalg.norm(key, axis=0)  # R


def _sweep(
    stack: HeadStack, query: np.ndarray, key: np.ndarray, support: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Least squares for M on its support, then P, then Q; then columns of P and Q of equal norm."""
    query, key = unit(query), unit(key)
    WQ, key_gram = stack.key.T @ key, gram(key)
    normal = gram(query) * key_gram
    targets = stack.over_heads(stack.query.T @ query, WQ)
    mixing = np.zeros(support.shape)
    for head, read in enumerate(support):
        own = normal[np.ix_(read, read)] + RIDGE * np.eye(int(read.sum()))
        mixing[head, read] = np.linalg.solve(own, targets[head, read])
    mixing = unit(mixing)
    query = unit(solve(gram(mixing) * key_gram, stack.over_query(mixing, WQ)))
    WP = stack.query.T @ query
    key = solve(gram(mixing) * gram(query), stack.over_key(mixing, WP))
    share = np.sqrt(np.linalg.norm(key, axis=0))
    return query * share, unit(key) * share, mixing
