"""Collaborative heads out of trained ones: a CP decomposition of the stacked heads.

Equations 9 and 11 to 13 of "Multi-Head Attention: Collaborate Instead of Concatenate" (arXiv
2006.16362), with the dimensions of ``graph_passes.attention``, P = W~Q and Q = W~K:

    W_Q^h W_K^hT  ~=  P diag(M[h]) Q^T
    score_h(x, y)  =  scale * ( (x P) diag(M[h]) (y Q)^T + y v_h ),    v_h = W_K^h b_Q^h

The scale is the layer's own, whatever R is; b_K adds the same to every key, so softmax drops it.

Alternating least squares (Kolda & Bader 2009, section 3.4), four ways apart from the textbook:

- Every slice has rank K, so (D x HK)(HK x R) products do; the H x D x E stack is never formed.
- It starts twice, and goes on with the better after ``HEAT`` sweeps: from the R largest singular
  triples over all heads (the best truncation of each head by itself, so the start where heads
  share little), and from the leading eigenvectors of ``sum_h T_h T_h^T`` and ``sum_h T_h^T T_h``
  (where they share much). Nothing is random.
- Nesterov extrapolation, restarted where the objective rises (Mitchell, Ye & De Sterck, arXiv
  1810.05846), reaches in 50 sweeps what plain sweeps reach in about 200.
- The objective adds ``RIDGE * sum_r |m_r|^2 |p_r|^2 |q_r|^2``. Without it components can grow to
  a thousand times the stack's energy and cancel, which costs low precision its digits.

Calibrated, the error that counts is the score's, E (x^T DeltaW_h y)^2 with DeltaW = original -
approximation. With x = mu + x', mu^T DeltaW_h y is a content term. Softmax ignores what is constant
over y, and to first order a score error d moves the head's output by Cov_p(d, v W_O), where p is
what the query attends to: so y counts about its mean under p and as much as it is attended to, and
a head counts as much as what it writes varies under p. So the slices
w_h C_x^(1/2) W_Q^h W_K^hT C_y^(1/2) are decomposed, and v_h += DeltaW_h^T mu.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel

if TYPE_CHECKING:
    from jaxtyping import Float
    from tensorly.cp_tensor import CPTensor  # pyright: ignore[reportMissingTypeStubs]

__all__ = [
    "CollaborativeFactors",
    "TokenMoments",
    "collaborative_factors",
    "pooled",
    "relative_error",
    "with_mean",
]

RIDGE = 1e-5  # weight of the components' energies against the residual's
HEAT = 20  # sweeps after which the worse of two starts is dropped
EIGENVALUE_FLOOR = 1e-6  # of the largest: where tokens hardly vary, weights still count a little
LEAST_WEIGHT = 0.05  # of the mean head
WINDOW = 10  # sweeps over which progress is measured: extrapolation is not smooth sweep by sweep
MOMENTS_FIX = "Accumulate the moments in float64, over tokens that are not padding."


@dataclass(frozen=True, eq=False)
class TokenMoments:
    """Moments of the tokens that one layer sees, on calibration data.

    Attributes:
        query_mean: mu, the mean of the query-side tokens x.
        query_covariance: Of x - mu.
        key_covariance: Of y about the mean that softmax takes out: its sequence's, or, better,
            that of what each query attends to, weighted by the attention.
        head_weight: w, how strongly a score error of each head moves the layer's output; None
            counts all heads alike.

    Raises:
        InvalidData: Not finite, not symmetric, or shapes that disagree.
    """

    query_mean: Float[np.ndarray, " D"]
    query_covariance: Float[np.ndarray, "D D"]
    key_covariance: Float[np.ndarray, "E E"]
    head_weight: Float[np.ndarray, " H"] | None = None

    def __post_init__(self) -> None:
        D, E = self.query_mean.size, len(self.key_covariance)
        shapes = {"query_mean": (D,), "query_covariance": (D, D), "key_covariance": (E, E)}
        for name, shape in shapes.items():
            moment: np.ndarray = getattr(self, name)
            wrong = ""
            if moment.shape != shape:
                wrong = f"has shape {moment.shape}, expected {shape}"
            elif not np.isfinite(moment).all():
                wrong = "holds values that are not finite"
            elif np.abs(moment - moment.T).max() > 1e-5 * np.abs(moment).max():
                wrong = "is not symmetric"
            if wrong:
                raise InvalidData(f"{name} {wrong}.", MOMENTS_FIX)
        weight = self.head_weight
        if weight is not None and not (np.isfinite(weight).all() and (weight >= 0).all()):
            raise InvalidData("head_weight holds negative or infinite values.", MOMENTS_FIX)


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
    queries, keys, bias, moments = _checked(queries, keys, query_bias, moments)
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
        shared = _side_by_side(queries), _side_by_side(keys)
        return CollaborativeFactors(*shared, ones, content, 0.0, 0)
    (x_root, x_inverse), (y_root, y_inverse) = _roots(moments)
    weight = _head_weight(moments, H)
    stack = _HeadStack(x_root @ (weight[:, None, None] * queries), y_root @ keys)
    sweep, iterations = _decompose(stack, rank, max_iterations, tolerance, progress)
    P, Q, M = x_inverse @ sweep.query, y_inverse @ sweep.key, sweep.mixing / weight[:, None]
    factors = CollaborativeFactors(P, Q, M, content, sweep.error, iterations)
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


def pooled(uses: Sequence[TokenMoments]) -> TokenMoments:
    """Moments for weights that several layers use, each about its own mean, all alike.

    The mean is zero: ``with_mean`` folds in that of each use.
    """
    weights = [use.head_weight for use in uses if use.head_weight is not None]
    return TokenMoments(
        np.zeros_like(uses[0].query_mean),
        np.mean([use.query_covariance for use in uses], axis=0),
        np.mean([use.key_covariance for use in uses], axis=0),
        np.mean(weights, axis=0) if len(weights) == len(uses) else None,
    )


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
    queries, keys, _, moments = _checked(queries, keys, None, moments)
    (x_root, _), (y_root, _) = _roots(moments)
    weight = _head_weight(moments, len(queries))
    stack = _HeadStack(x_root @ (weight[:, None, None] * queries), y_root @ keys)
    P, Q, M = x_root @ factors.query, y_root @ factors.key, weight[:, None] * factors.mixing
    overlap = float(np.vdot(M, stack.over_heads(stack.query.T @ P, stack.key.T @ Q)))
    return stack.error(overlap, float((_gram(M) * _gram(P) * _gram(Q)).sum()))


class _HeadStack:
    """The stack T of equation 9 as its factors, and what least squares needs of it.

    The three ``over`` methods are the matricized tensor times Khatri-Rao products (MTTKRP), from
    the projected factors WP = W_Q^T P and WQ = W_K^T Q, both (HK, R).
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray) -> None:
        self.heads, _, self.head_size = queries.shape
        self.query = _side_by_side(queries)  # D HK
        self.key = _side_by_side(keys)  # E HK
        grams = (queries.swapaxes(1, 2) @ queries) * (keys.swapaxes(1, 2) @ keys)
        self.energy = float(grams.sum())  # |T|^2

    def over_heads(self, WP: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        return (WP * WQ).reshape(self.heads, self.head_size, -1).sum(axis=1)  # H R

    def over_query(self, mixing: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        return self.query @ (WQ * np.repeat(mixing, self.head_size, axis=0))  # D R

    def over_key(self, mixing: np.ndarray, WP: np.ndarray) -> np.ndarray:
        return self.key @ (WP * np.repeat(mixing, self.head_size, axis=0))  # E R

    def error(self, overlap: float, energy: float) -> float:
        """Relative, by |T - T~|^2 = |T|^2 - 2 <T, T~> + |T~|^2; the arguments are the last two."""
        residual = max(self.energy - 2.0 * overlap + energy, 0.0)
        return float(np.sqrt(residual / self.energy)) if self.energy > 0.0 else 0.0

    def starts(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """P and Q from singular triples and, where the widths allow R of them, eigenvectors."""
        x, y = (np.stack(np.split(w, self.heads, axis=1)) for w in (self.query, self.key))  # H D K
        (x_basis, x_triangle), (y_basis, y_triangle) = np.linalg.qr(x), np.linalg.qr(y)
        core = x_triangle @ y_triangle.swapaxes(1, 2)
        left, values, right = np.linalg.svd(core, full_matrices=False)
        largest = np.argsort(-values, axis=None, kind="stable")[:rank]
        spare = (0, 0), (0, rank - len(largest))  # K > D has fewer triples than HK
        triples = [_side_by_side(x_basis @ left), _side_by_side(y_basis @ right.swapaxes(1, 2))]
        query, key = (np.pad(vectors[:, largest], spare) for vectors in triples)
        starts = [(query, key)]
        if rank <= min(x.shape[1], y.shape[1]):
            roots = x_basis @ core, y_basis @ core.swapaxes(1, 2)
            query, key = (np.linalg.eigh(_gram(_side_by_side(root).T))[1] for root in roots)
            starts.append((query[:, : -rank - 1 : -1], key[:, : -rank - 1 : -1]))
        return starts


class _Sweep(NamedTuple):
    """M with columns of norm 1, P and Q with columns of equal norms, and what they leave."""

    mixing: np.ndarray
    query: np.ndarray
    key: np.ndarray
    error: float
    objective: float


def _decompose(
    stack: _HeadStack,
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


def _descend(stack: _HeadStack, query: np.ndarray, key: np.ndarray) -> Iterator[_Sweep]:
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


def _sweep(stack: _HeadStack, query: np.ndarray, key: np.ndarray) -> _Sweep:
    """Least squares for M, then P, then Q, each with the columns of the other two at norm 1."""
    query, key = _unit(query), _unit(key)
    WQ, key_gram = stack.key.T @ key, _gram(key)
    mixing = stack.over_heads(stack.query.T @ query, WQ)
    mixing = _unit(_solve(_gram(query) * key_gram, mixing))
    query = _unit(_solve(_gram(mixing) * key_gram, stack.over_query(mixing, WQ)))
    gram, products = _gram(mixing) * _gram(query), stack.over_key(mixing, stack.query.T @ query)
    key = _solve(gram, products)
    error = stack.error(float(np.vdot(products, key)), float((gram * _gram(key)).sum()))
    objective = stack.energy * error**2 + RIDGE * float(np.vdot(key, key))
    share = np.sqrt(np.linalg.norm(key, axis=0))
    return _Sweep(mixing, query * share, _unit(key) * share, error, objective)


def _roots(moments: TokenMoments) -> list[tuple[np.ndarray, np.ndarray]]:
    """C^(1/2) and C^(-1/2) of both covariances; zero, which says nothing, counts as identity."""
    roots: list[tuple[np.ndarray, np.ndarray]] = []
    for name in ("query_covariance", "key_covariance"):
        values, vectors = np.linalg.eigh(np.asarray(getattr(moments, name), np.float64))
        if values[0] < -1e-3 * abs(values[-1]):
            raise InvalidData(f"{name} has the negative eigenvalue {values[0]:.3g}.", MOMENTS_FIX)
        scales = np.sqrt(np.maximum(values, EIGENVALUE_FLOOR * values[-1] or 1.0))
        roots.append(((vectors * scales) @ vectors.T, (vectors / scales) @ vectors.T))
    return roots


def _head_weight(moments: TokenMoments, heads: int) -> np.ndarray:
    """Weights of mean 1; a head that hardly matters still counts ``LEAST_WEIGHT``."""
    weight = moments.head_weight
    if weight is None or not weight.any():
        return np.ones(heads)
    return np.maximum(weight / weight.mean(), LEAST_WEIGHT)


def _checked(
    queries: np.ndarray, keys: np.ndarray, bias: np.ndarray | None, moments: TokenMoments | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, TokenMoments]:
    """All in float64 and of agreeing shapes; no moments are those of white tokens."""
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[::2] != keys.shape[::2]:
        raise InvalidArgument(
            f"queries have shape {queries.shape} and keys {keys.shape}; "
            "expected (H, D, K) and (H, E, K)."
        )
    (H, D, K), E = queries.shape, keys.shape[1]
    bias = np.zeros((H, K)) if bias is None else bias
    if bias.shape != (H, K):
        raise InvalidArgument(f"query_bias has shape {bias.shape}; expected {(H, K)}.")
    moments = moments or TokenMoments(np.zeros((D,)), np.eye(D), np.eye(E))
    sizes = len(moments.query_mean), len(moments.key_covariance)
    if sizes != (D, E):
        raise InvalidData(
            f"The moments are of {sizes} features; the layer reads {(D, E)}.",
            "Calibrate on the inputs of this layer.",
        )
    if moments.head_weight is not None and moments.head_weight.shape != (H,):
        raise InvalidData(
            f"The moments are of {moments.head_weight.size} heads; the layer has {H}.",
            "Calibrate on the inputs of this layer.",
        )
    for name, weights in {"queries": queries, "keys": keys, "query_bias": bias}.items():
        if not np.isfinite(weights).all():
            raise InvalidModel(f"{name} hold values that are not finite.", "Check the checkpoint.")
    return queries.astype(np.float64), keys.astype(np.float64), bias.astype(np.float64), moments


def _solve(gram: np.ndarray, products: np.ndarray) -> np.ndarray:
    """X of X (gram + RIDGE I) = products."""
    return np.linalg.solve(gram + RIDGE * np.eye(len(gram)), products.T).T


def _unit(factor: np.ndarray) -> np.ndarray:
    """Columns of norm 1; a column of zeros stays."""
    norms = np.linalg.norm(factor, axis=0)
    return factor / np.where(norms == 0.0, 1.0, norms)


def _gram(factor: np.ndarray) -> np.ndarray:
    return factor.T @ factor


def _side_by_side(heads: np.ndarray) -> np.ndarray:
    """(H, D, K) to (D, HK)."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
