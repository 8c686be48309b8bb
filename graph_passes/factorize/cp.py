"""Collaborative heads out of trained ones: a CP decomposition of the stacked heads.

Equations 9 and 11 to 13 of "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv
2006.16362), with the dimensions of ``graph_passes.blocks``, P = W~Q and Q = W~K:

    W_Q^h W_K^hT  ~=  P diag(M[h]) Q^T
    score_h(x, y)  =  scale * ( (x P) diag(M[h]) (y Q)^T + y v_h ),    v_h = W_K^h b_Q^h

The scale is the layer's own, whatever R is; b_K adds the same to every key, so softmax drops it.

Alternating least squares (Kolda & Bader 2009, section 3.4), three ways apart from the textbook:

- It starts twice, and goes on with the better after ``HEAT`` sweeps: from the R largest singular
  triples over all heads (the best truncation of each head by itself, so the start where heads
  share little), and from the leading eigenvectors of ``sum_h T_h T_h^T`` and ``sum_h T_h^T T_h``
  (where they share much). Nothing is random.
- Nesterov extrapolation, restarted where the objective rises (Mitchell, Ye & De Sterck, arXiv
  1810.05846), reaches in 50 sweeps what plain sweeps reach in about 200.
- The objective adds ``RIDGE * sum_r |m_r|^2 |p_r|^2 |q_r|^2``. Without it components can grow to
  a thousand times the stack's energy and cancel, which costs low precision its digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.head_stack import RIDGE, HeadStack, gram, side_by_side, solve, unit
from graph_passes.factorize.moments import TokenMoments, Whitening, checked

if TYPE_CHECKING:
    from jaxtyping import Float
    from tensorly.cp_tensor import CPTensor  # pyright: ignore[reportMissingTypeStubs]

__all__ = [
    "CollaborativeFactors",
    "collaborative_factors",
    "relative_error",
    "with_mean",
]

HEAT = 20  # sweeps after which the worse of two starts is dropped
WINDOW = 10  # sweeps over which progress is measured: extrapolation is not smooth sweep by sweep


@dataclass(frozen=True, eq=False)
class CollaborativeFactors:
    """Collaborative heads (equations 7 and 13 of arXiv 2006.16362), in float64.

    Short of the exact form, columns of ``mixing`` (times the heads' weights) have norm 1, and those
    of ``query`` and ``key`` equal norms: whitened ones when calibrated, so that activations are
    equally strong.

    Attributes:
        query: P = W~Q, shared by all heads.
        key: Q = W~K, shared by all heads.
        mixing: M, one row a head.
        content: v_h, one vector a head, with the mean folded in when calibrated.
        relative_error: ``|T - T~| / |T|`` of the stack T (Frobenius; whitened when calibrated).
        iterations: Sweeps of alternating least squares that were run.
    """

    query: Float[np.ndarray, "D R"]
    key: Float[np.ndarray, "E R"]
    mixing: Float[np.ndarray, "H R"]
    content: Float[np.ndarray, "H E"]
    relative_error: float
    iterations: int

    @property
    def rank(self) -> int:
        """R, the number of shared dimensions."""
        return self.mixing.shape[1]

    def cp_tensor(self) -> CPTensor:
        """For tensorly, whose ``cp_to_tensor`` gives the (H, D, E) stack of equation 9."""
        # Imported here: it brings scipy, half a second that a rewrite does not need.
        from tensorly.cp_tensor import CPTensor  # pyright: ignore[reportMissingTypeStubs]

        return CPTensor((np.ones(self.rank), [self.mixing, self.query, self.key]))


def collaborative_factors(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    rank: int,
    *,
    query_bias: Float[np.ndarray, "H K"] | None = None,
    moments: TokenMoments | None = None,
    max_iterations: int = 200,
    tolerance: float = 1e-3,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Shared projections and a mixing matrix for trained heads.

    Args:
        queries: W_Q^h of every head.
        keys: W_K^h of every head.
        rank: R, from 1 to H * K. H * K is the exact block-of-ones form (equation 8).
        query_bias: b_Q^h of every head; none is zero.
        moments: Of the layer's tokens, for a calibrated decomposition.
        max_iterations: Sweeps of alternating least squares at most, 1 or more.
        tolerance: Stop when ten sweeps together lower the error by less than this share of it.
        progress: Called after each sweep with its number, from 1, and the relative error.

    Raises:
        InvalidArgument: A rank outside 1 to H * K, no sweeps, or shapes that disagree.
        InvalidData: Moments of another size, or a covariance with negative eigenvalues.
        InvalidModel: Weights that are not finite.
    """
    queries, keys, bias, moments = checked(queries, keys, query_bias, moments)
    H, _, K = queries.shape
    if not 1 <= rank <= H * K:
        raise InvalidArgument(
            f"The shared dimension is {rank}; expected 1 to {H * K} ({H} heads of size {K}).",
            f"Choose less than {H * K}, which is exact already.",
        )
    if max_iterations < 1:
        raise InvalidArgument(f"max_iterations is {max_iterations}; expected 1 or more.")
    content = np.einsum("hek,hk->he", keys, bias)
    if rank == H * K:
        ones = np.repeat(np.eye(H), K, axis=1)
        shared = side_by_side(queries), side_by_side(keys)
        return CollaborativeFactors(*shared, ones, content, 0.0, 0)
    metric = Whitening.of(moments, H)
    stack = metric.stack(queries, keys)
    sweep, iterations = _decompose(stack, rank, max_iterations, tolerance, progress)
    shared = metric.back(sweep.query, sweep.key, sweep.mixing)
    factors = CollaborativeFactors(*shared, content, sweep.error, iterations)
    return with_mean(factors, queries, keys, moments.query_mean)


def with_mean(
    factors: CollaborativeFactors,
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    mean: Float[np.ndarray, " D"],
) -> CollaborativeFactors:
    """The factors with the error at the mean of x folded into the content: v_h += DeltaW_h^T mu.

    Where several layers share their weights, they share P, Q and M, and each folds in its own mean.
    """
    P, Q, M = factors.query, factors.key, factors.mixing
    missed = np.einsum("hek,hk->he", keys, mean @ queries) - (M * (mean @ P)) @ Q.T
    return replace(factors, content=factors.content + missed)


def relative_error(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    factors: CollaborativeFactors,
    *,
    moments: TokenMoments | None = None,
) -> float:
    """``|T - T~| / |T|`` of the stack, or of the stack whitened by ``moments``; 0 for a zero stack.

    It comes from Gram matrices, which round: an error below 1e-7 reads as 0 to 1e-7.

    Raises:
        InvalidArgument, InvalidData, InvalidModel: As ``collaborative_factors``.
    """
    queries, keys, _, moments = checked(queries, keys, None, moments)
    metric = Whitening.of(moments, len(queries))
    stack = metric.stack(queries, keys)
    return stack.residual(*metric.into(factors.query, factors.key, factors.mixing))


class _Sweep(NamedTuple):
    """M with columns of norm 1, P and Q with columns of equal norms, and what they leave."""

    mixing: np.ndarray
    query: np.ndarray
    key: np.ndarray
    error: float
    objective: float


def _decompose(
    stack: HeadStack,
    rank: int,
    max_iterations: int,
    tolerance: float,
    progress: Callable[[int, float], None] | None,
) -> tuple[_Sweep, int]:
    """The best sweep of the better start, and how many sweeps that start took."""
    paths = [_descend(stack, *start) for start in stack.starts(rank)]
    errors: list[float] = []
    while True:
        sweeps = [next(path) for path in paths]
        leader = int(np.argmin([sweep.objective for sweep in sweeps]))
        errors.append(sweeps[leader].error)
        iteration = len(errors)
        if progress is not None:
            progress(iteration, errors[-1])
        slow = iteration > WINDOW and errors[-1 - WINDOW] - errors[-1] <= tolerance * errors[-1]
        if slow or iteration == max_iterations:
            return sweeps[leader], iteration
        if iteration == HEAT:
            paths = [paths[leader]]


def _descend(stack: HeadStack, query: np.ndarray, key: np.ndarray) -> Iterator[_Sweep]:
    """Nesterov's extrapolation of ``_sweep``, best so far; a sweep that overshot is taken back."""
    best, momentum = _Sweep(np.zeros((stack.heads, 0)), query, key, 1.0, np.inf), 1.0
    while True:
        sweep = _sweep(stack, query, key)
        if sweep.objective <= best.objective:
            faster = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
            ahead = (momentum - 1.0) / faster
            query = sweep.query + ahead * (sweep.query - best.query)
            key = sweep.key + ahead * (sweep.key - best.key)
            best, momentum = sweep, faster
        else:
            query, key, momentum = best.query, best.key, 1.0
        yield best


def _sweep(stack: HeadStack, query: np.ndarray, key: np.ndarray) -> _Sweep:
    """Least squares for M, then P, then Q, each with the columns of the other two at norm 1."""
    query, key = unit(query), unit(key)
    WQ, key_gram = stack.key.T @ key, gram(key)
    mixing = stack.over_heads(stack.query.T @ query, WQ)
    mixing = unit(solve(gram(query) * key_gram, mixing))
    query = unit(solve(gram(mixing) * key_gram, stack.over_query(mixing, WQ)))
    normal, products = gram(mixing) * gram(query), stack.over_key(mixing, stack.query.T @ query)
    key = solve(normal, products)
    error = stack.error(float(np.vdot(products, key)), float((normal * gram(key)).sum()))
    objective = stack.energy * error**2 + RIDGE * float(np.vdot(key, key))
    share = np.sqrt(np.linalg.norm(key, axis=0))
    return _Sweep(mixing, query * share, unit(key) * share, error, objective)
