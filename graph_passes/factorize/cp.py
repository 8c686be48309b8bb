"""Factorize trained heads into collaborative heads: a CP decomposition of the stacked heads.

Equations 9 and 11 to 13 of "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv
2006.16362), with the dimensions of ``graph_passes.blocks``, P = W~Q and Q = W~K:

    W_Q^h W_K^hT  ~=  P diag(M[h]) Q^T
    score_h(x, y)  =  scale * ( (x P) diag(M[h]) (y Q)^T + y v_h ),    v_h = W_K^h b_Q^h

The scale of the layer is kept for every R. The term of b_K is constant over the keys, so it does
not change the softmax.

The method is alternating least squares (Kolda & Bader 2009, section 3.4) with three changes:

- Two deterministic starts; the better one continues after ``HEAT`` sweeps. The first start is the R
  largest singular triples over all heads: the best truncation of each head, good if heads share
  little. The second is the leading eigenvectors of ``sum_h T_h T_h^T`` and ``sum_h T_h^T T_h``,
  good if heads share much.
- Nesterov extrapolation, restarted if the objective increases (Mitchell, Ye & De Sterck, arXiv
  1810.05846). 50 sweeps reach the error of about 200 plain sweeps.
- The objective adds ``RIDGE * sum_r |m_r|^2 |p_r|^2 |q_r|^2``. Without this term, components can
  grow to a thousand times the energy of the stack and cancel, which loses digits in low precision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.head_stack import (
    RIDGE,
    Factors,
    HeadStack,
    gram,
    side_by_side,
    solve,
    unit,
)
from graph_passes.factorize.moments import TokenMoments, Whitening, validate_heads, validate_rank

if TYPE_CHECKING:
    from jaxtyping import Float
    from tensorly.cp_tensor import CPTensor  # pyright: ignore[reportMissingTypeStubs]

__all__ = [
    "MAX_SWEEPS",
    "CollaborativeFactors",
    "Sweep",
    "collaborative_factors",
    "fold_mean",
    "relative_error",
    "sweep",
]

MAX_SWEEPS = 200
"""Default maximum number of sweeps."""

HEAT = 20
"""Number of sweeps after which the worse of two starts is dropped."""

WINDOW = 10
"""Number of sweeps over which the decrease is measured: single sweeps are not monotonic."""


@dataclass(frozen=True, eq=False)
class CollaborativeFactors:
    """Collaborative heads (equations 7 and 13 of arXiv 2006.16362), in float64.

    Except in the exact form, columns of ``mixing`` (times the head weights) have norm 1, and
    columns of ``query`` and ``key`` have equal norms. Calibrated factors have equal norms after
    whitening, so activations have equal strength.

    Attributes:
        query: P = W~Q, shared by all heads.
        key: Q = W~K, shared by all heads.
        mixing: M, one row per head.
        content: v_h, one vector per head; includes the mean term if calibrated.
        relative_error: ``|T - T~| / |T|`` of the stack T (Frobenius norm; whitened if calibrated).
        iterations: Number of sweeps of alternating least squares.
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

    @property
    def factors(self) -> Factors:
        """P, Q and M."""
        return Factors(self.query, self.key, self.mixing)

    def cp_tensor(self) -> CPTensor:
        """The factors for tensorly; ``cp_to_tensor`` gives the (H, D, E) stack of equation 9."""
        # Imported here because it imports scipy, which takes half a second.
        from tensorly.cp_tensor import CPTensor  # pyright: ignore[reportMissingTypeStubs]

        return CPTensor((np.ones(self.rank), [self.mixing, self.query, self.key]))


def collaborative_factors(
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    rank: int,
    *,
    query_bias: Float[np.ndarray, "H K"] | None = None,
    moments: TokenMoments | None = None,
    max_iterations: int = MAX_SWEEPS,
    tolerance: float = 1e-3,
    progress: Callable[[int, float], None] | None = None,
) -> CollaborativeFactors:
    """Compute shared projections and a mixing matrix for trained heads.

    Args:
        queries: W_Q^h of each head.
        keys: W_K^h of each head.
        rank: R, from 1 to H * K. H * K is the exact block-of-ones form (equation 8).
        query_bias: b_Q^h of each head (default: zero).
        moments: Moments of the layer's tokens, for a calibrated decomposition.
        max_iterations: Maximum number of sweeps, at least 1.
        tolerance: Stop if ten sweeps decrease the error by less than this share of it.
        progress: Called after each sweep with its number, from 1, and the relative error.

    Raises:
        InvalidArgument: The rank is outside 1 to H * K, sweeps are below 1, or shapes disagree.
        InvalidData: The moments have another size, or a covariance has negative eigenvalues.
        InvalidModel: Weights are not finite.
    """
    queries, keys, bias, moments = validate_heads(queries, keys, query_bias, moments)
    H, _, K = queries.shape
    validate_rank(rank, H, K)
    if max_iterations < 1:
        raise InvalidArgument(
            f"`max_iterations` is {max_iterations}: expected at least 1",
            "choose a positive number of sweeps",
            code="factorize.max_iterations",
        )
    content = np.einsum("hek,hk->he", keys, bias)
    if rank == H * K:
        ones = np.repeat(np.eye(H), K, axis=1)
        query = side_by_side(queries)
        key = side_by_side(keys)
        return CollaborativeFactors(query, key, ones, content, relative_error=0.0, iterations=0)
    metric = Whitening.of(moments, H)
    stack = metric.stack(queries, keys)
    fit, iterations = _decompose(stack, rank, max_iterations, tolerance, progress)
    original = metric.unwhiten(fit.factors)
    factors = CollaborativeFactors(*original, content, fit.error, iterations)
    return fold_mean(factors, queries, keys, moments.query_mean)


def fold_mean(
    factors: CollaborativeFactors,
    queries: Float[np.ndarray, "H D K"],
    keys: Float[np.ndarray, "H E K"],
    mean: Float[np.ndarray, " D"],
) -> CollaborativeFactors:
    """Add the error at the mean of x to the content: v_h += DeltaW_h^T mu.

    Layers that share weights share P, Q and M; each adds the term of its own mean.
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
    """``|T - T~| / |T|`` of the stack, whitened by ``moments`` if given; 0 for a zero stack.

    The value is computed from Gram matrices, so errors below 1e-7 are not resolved.

    Raises:
        InvalidArgument, InvalidData, InvalidModel: In the cases of ``collaborative_factors``.
    """
    queries, keys, _, moments = validate_heads(queries, keys, None, moments)
    metric = Whitening.of(moments, len(queries))
    stack = metric.stack(queries, keys)
    return stack.residual(metric.whiten(factors.factors))


class Sweep(NamedTuple):
    """Result of one sweep.

    Attributes:
        factors: M has columns of norm 1, P and Q have columns of equal norms.
        error: The relative error.
        objective: The squared error and the energies of the components, which a sweep minimizes.
    """

    factors: Factors
    error: float
    objective: float


def _decompose(
    stack: HeadStack,
    rank: int,
    max_iterations: int,
    tolerance: float,
    progress: Callable[[int, float], None] | None,
) -> tuple[Sweep, int]:
    """The best sweep of the better start, and the number of sweeps until then."""
    paths = [_descend(stack, *start) for start in stack.starts(rank)]
    errors: list[float] = []
    while True:
        sweeps = [next(path) for path in paths]
        leader = int(np.argmin([latest.objective for latest in sweeps]))
        errors.append(sweeps[leader].error)
        iteration = len(errors)
        if progress is not None:
            progress(iteration, errors[-1])
        slow = iteration > WINDOW and errors[-1 - WINDOW] - errors[-1] <= tolerance * errors[-1]
        if slow or iteration == max_iterations:
            return sweeps[leader], iteration
        if iteration == HEAT:
            paths = [paths[leader]]


def _descend(stack: HeadStack, query: np.ndarray, key: np.ndarray) -> Iterator[Sweep]:
    """Yield the best result of ``sweep`` with Nesterov extrapolation; overshoots are undone."""
    best = Sweep(Factors(query, key, np.zeros((stack.heads, 0))), 1.0, np.inf)
    momentum = 1.0
    while True:
        latest = sweep(stack, query, key)
        if latest.objective <= best.objective:
            faster = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
            ahead = (momentum - 1.0) / faster
            new, old = latest.factors, best.factors
            query = new.query + ahead * (new.query - old.query)
            key = new.key + ahead * (new.key - old.key)
            best = latest
            momentum = faster
        else:
            query, key, _ = best.factors
            momentum = 1.0
        yield best


def sweep(
    stack: HeadStack,
    query: np.ndarray,
    key: np.ndarray,
    solve_mixing: Callable[[np.ndarray, np.ndarray], np.ndarray] = solve,
) -> Sweep:
    """Solve for M, then P, then Q, each with the columns of the other two normalized to 1.

    Args:
        solve_mixing: Computes M from its normal matrix (R, R) and the products (H, R).
    """
    query, key = unit(query), unit(key)
    WQ = stack.key.T @ key
    key_gram = gram(key)
    targets = stack.over_heads(stack.query.T @ query, WQ)
    mixing = unit(solve_mixing(gram(query) * key_gram, targets))
    query = unit(solve(gram(mixing) * key_gram, stack.over_query(mixing, WQ)))
    normal = gram(mixing) * gram(query)
    products = stack.over_key(mixing, stack.query.T @ query)
    key = solve(normal, products)
    error = stack.error(float(np.vdot(products, key)), float((normal * gram(key)).sum()))
    objective = stack.energy * error**2 + RIDGE * float(np.vdot(key, key))
    share = np.sqrt(np.linalg.norm(key, axis=0))
    return Sweep(Factors(query * share, unit(key) * share, mixing), error, objective)
