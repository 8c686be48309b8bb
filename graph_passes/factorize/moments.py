"""Moments of a layer's tokens, and the metric that they define for score errors.

The calibrated objective is the score error E (x^T DeltaW_h y)^2 with DeltaW = original -
approximation. With x = mu + x', mu^T DeltaW_h y is a content term. Softmax is invariant to terms
that are constant over y. To first order, a score error d changes the head's output by
Cov_p(d, v W_O), where p is the attention probability. Therefore y is centered at its mean under p
and weighted by p, and a head is weighted by the variance of its output under p. The decomposed
slices are w_h C_x^(1/2) W_Q^h W_K^hT C_y^(1/2), and v_h += DeltaW_h^T mu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from graph_passes.factorize.head_stack import Factors, HeadStack

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["TokenMoments", "Whitening", "pool_moments", "validate_heads", "validate_rank"]

EIGENVALUE_FLOOR = 1e-6
"""Minimum eigenvalue of a covariance, relative to the largest; it keeps the metric invertible."""

LEAST_WEIGHT = 0.05
"""Minimum weight of a head, relative to the mean."""

MOMENTS_FIX = "accumulate the moments in float64 over tokens that are not padding"


@dataclass(frozen=True, eq=False)
class TokenMoments:
    """Moments of the tokens of one layer on calibration data.

    Attributes:
        query_mean: mu, the mean of the query-side tokens x.
        query_covariance: Covariance of x - mu.
        key_covariance: Covariance of y, centered per sequence or, better, centered at the mean
            under the attention probabilities and weighted by them.
        head_weight: w, the sensitivity of the layer's output to a score error of each head; None
            gives all heads the same weight.

    Raises:
        InvalidData: A moment is not finite or not symmetric, or shapes disagree.
    """

    query_mean: Float[np.ndarray, " D"]
    query_covariance: Float[np.ndarray, "D D"]
    key_covariance: Float[np.ndarray, "E E"]
    head_weight: Float[np.ndarray, " H"] | None = None

    def __post_init__(self) -> None:
        D = self.query_mean.size
        E = len(self.key_covariance)
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
                raise InvalidData(f"`{name}` {wrong}", MOMENTS_FIX, code="moments.invalid")
        weight = self.head_weight
        if weight is not None and not (np.isfinite(weight).all() and (weight >= 0).all()):
            raise InvalidData(
                "`head_weight` has negative or non-finite values",
                MOMENTS_FIX,
                code="moments.invalid",
            )


def pool_moments(uses: Sequence[TokenMoments]) -> TokenMoments:
    """Average the moments of layers that share weights, each centered at its own mean.

    The resulting mean is zero; ``fold_mean`` adds the mean term of each layer.
    """
    weights = [use.head_weight for use in uses if use.head_weight is not None]
    return TokenMoments(
        np.zeros_like(uses[0].query_mean),
        np.mean([use.query_covariance for use in uses], axis=0),
        np.mean([use.key_covariance for use in uses], axis=0),
        np.mean(weights, axis=0) if len(weights) == len(uses) else None,
    )


@dataclass(frozen=True, eq=False)
class Whitening:
    """Transformation into the metric of the moments, and its inverse.

    Attributes:
        query_root, query_inverse: C_x^(1/2) and C_x^(-1/2).
        key_root, key_inverse: C_y^(1/2) and C_y^(-1/2).
        head_weight: w, of mean 1.
    """

    query_root: Float[np.ndarray, "D D"]
    query_inverse: Float[np.ndarray, "D D"]
    key_root: Float[np.ndarray, "E E"]
    key_inverse: Float[np.ndarray, "E E"]
    head_weight: Float[np.ndarray, " H"]

    @classmethod
    def of(cls, moments: TokenMoments, heads: int) -> Whitening:
        """The metric of these moments for a layer of H heads.

        Raises:
            InvalidData: A covariance has negative eigenvalues.
        """
        return cls(
            *_roots("query_covariance", moments.query_covariance),
            *_roots("key_covariance", moments.key_covariance),
            _head_weight(moments, heads),
        )

    def stack(
        self, queries: Float[np.ndarray, "H D K"], keys: Float[np.ndarray, "H E K"]
    ) -> HeadStack:
        """The whitened stack; its Frobenius norm is the calibrated error."""
        weighted = self.head_weight[:, None, None] * queries
        return HeadStack(self.query_root @ weighted, self.key_root @ keys)

    def whiten(self, factors: Factors) -> Factors:
        """Transform factors of the heads to factors of the whitened stack."""
        query, key, mixing = factors
        return Factors(
            self.query_root @ query, self.key_root @ key, self.head_weight[:, None] * mixing
        )

    def unwhiten(self, factors: Factors) -> Factors:
        """Transform factors of the whitened stack to factors of the heads."""
        query, key, mixing = factors
        return Factors(
            self.query_inverse @ query, self.key_inverse @ key, mixing / self.head_weight[:, None]
        )


def validate_heads(
    queries: np.ndarray, keys: np.ndarray, bias: np.ndarray | None, moments: TokenMoments | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, TokenMoments]:
    """Validate heads (H, D, K) and (H, E, K), biases (H, K) and moments.

    Returns:
        The heads, biases and moments, with arrays in float64. The default bias is zero, the default
        moments are those of white tokens: mean zero, covariance identity.

    Raises:
        InvalidArgument: Shapes disagree.
        InvalidData: The moments have another size.
        InvalidModel: Weights are not finite.
    """
    if queries.ndim != 3 or keys.ndim != 3 or queries.shape[::2] != keys.shape[::2]:
        raise InvalidArgument(
            f"`queries` has shape {queries.shape} and `keys` {keys.shape}: "
            "expected (H, D, K) and (H, E, K)",
            "pass one matrix per head, with the same number and size of heads",
            code="factorize.shape",
        )
    H, D, K = queries.shape
    E = keys.shape[1]
    bias = np.zeros((H, K)) if bias is None else bias
    if bias.shape != (H, K):
        raise InvalidArgument(
            f"`query_bias` has shape {bias.shape}: expected {(H, K)}",
            "pass one bias vector per head",
            code="factorize.shape",
        )
    moments = moments or TokenMoments(np.zeros((D,)), np.eye(D), np.eye(E))
    sizes = len(moments.query_mean), len(moments.key_covariance)
    if sizes != (D, E):
        raise InvalidData(
            f"the moments have {sizes} features: expected {(D, E)}, the input sizes of the layer",
            "calibrate on the inputs of this layer",
            code="moments.size",
        )
    if moments.head_weight is not None and moments.head_weight.shape != (H,):
        raise InvalidData(
            f"`head_weight` has {moments.head_weight.size} entries: expected {H}, one per head",
            "calibrate on the inputs of this layer",
            code="moments.size",
        )
    for name, weights in {"queries": queries, "keys": keys, "query_bias": bias}.items():
        if not np.isfinite(weights).all():
            raise InvalidModel(
                f"`{name}` has values that are not finite",
                "check the weights of the model",
                code="factorize.weights",
            )
    return queries.astype(np.float64), keys.astype(np.float64), bias.astype(np.float64), moments


def validate_rank(rank: int, heads: int, size: int) -> None:
    """Check that R is from 1 to H * K.

    Raises:
        InvalidArgument: R is below 1 or above H * K.
    """
    exact = heads * size
    if not 1 <= rank <= exact:
        raise InvalidArgument(
            f"`rank` is {rank}: expected 1 to {exact} ({heads} heads of size {size})",
            f"choose a rank below {exact}, the rank of the exact form",
            code="factorize.rank",
        )


def _roots(name: str, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C^(1/2) and C^(-1/2); a zero covariance is replaced by the identity."""
    values, vectors = np.linalg.eigh(np.asarray(covariance, np.float64))
    if values[0] < -1e-3 * abs(values[-1]):
        raise InvalidData(
            f"`{name}` has the negative eigenvalue {values[0]:.3g}: expected none",
            MOMENTS_FIX,
            code="moments.eigenvalue",
        )
    scales = np.sqrt(np.maximum(values, EIGENVALUE_FLOOR * values[-1] or 1.0))
    return (vectors * scales) @ vectors.T, (vectors / scales) @ vectors.T


def _head_weight(moments: TokenMoments, heads: int) -> np.ndarray:
    """Head weights with mean 1, each at least ``LEAST_WEIGHT``."""
    weight = moments.head_weight
    if weight is None or not weight.any():
        return np.ones(heads)
    return np.maximum(weight / weight.mean(), LEAST_WEIGHT)
