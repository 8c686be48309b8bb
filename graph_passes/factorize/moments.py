"""What is known of the tokens that a layer sees, and the metric in which its scores count.

Calibrated, the error that counts is the score's, E (x^T DeltaW_h y)^2 with DeltaW = original -
approximation. With x = mu + x', mu^T DeltaW_h y is a content term. Softmax ignores what is constant
over y, and to first order a score error d moves the head's output by Cov_p(d, v W_O), where p is
what the query attends to: so y counts about its mean under p and as much as it is attended to, and
a head counts as much as what it writes varies under p. So the slices
w_h C_x^(1/2) W_Q^h W_K^hT C_y^(1/2) are decomposed, and v_h += DeltaW_h^T mu.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from graph_passes.factorize.head_stack import HeadStack

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["TokenMoments", "Whitening", "checked", "pooled"]

EIGENVALUE_FLOOR = 1e-6  # of the largest: where tokens hardly vary, weights still count a little
LEAST_WEIGHT = 0.05  # of the mean head
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


@dataclass(frozen=True, eq=False)
class Whitening:
    """The way into the metric of the moments and back.

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
        return cls(
            *_roots("query_covariance", moments.query_covariance),
            *_roots("key_covariance", moments.key_covariance),
            _head_weight(moments, heads),
        )

    def stack(
        self, queries: Float[np.ndarray, "H D K"], keys: Float[np.ndarray, "H E K"]
    ) -> HeadStack:
        """The stack whose Frobenius norm is the error that counts."""
        weighted = self.head_weight[:, None, None] * queries
        return HeadStack(self.query_root @ weighted, self.key_root @ keys)

    def into(
        self,
        query: Float[np.ndarray, "D R"],
        key: Float[np.ndarray, "E R"],
        mixing: Float[np.ndarray, "H R"],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Factors of the heads as factors of that stack."""
        return self.query_root @ query, self.key_root @ key, self.head_weight[:, None] * mixing

    def back(
        self,
        query: Float[np.ndarray, "D R"],
        key: Float[np.ndarray, "E R"],
        mixing: Float[np.ndarray, "H R"],
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """And as factors of the heads again."""
        mixing = mixing / self.head_weight[:, None]
        return self.query_inverse @ query, self.key_inverse @ key, mixing


def checked(
    queries: np.ndarray, keys: np.ndarray, bias: np.ndarray | None, moments: TokenMoments | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, TokenMoments]:
    """Heads (H, D, K) and (H, E, K), biases (H, K) and moments: in float64, of agreeing shapes; no
    moments are those of white tokens.

    Raises:
        InvalidArgument: Shapes that disagree.
        InvalidData: Moments of another size.
        InvalidModel: Weights that are not finite.
    """
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


def _roots(name: str, covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """C^(1/2) and C^(-1/2); zero, which says nothing, counts as identity."""
    values, vectors = np.linalg.eigh(np.asarray(covariance, np.float64))
    if values[0] < -1e-3 * abs(values[-1]):
        raise InvalidData(f"{name} has the negative eigenvalue {values[0]:.3g}.", MOMENTS_FIX)
    scales = np.sqrt(np.maximum(values, EIGENVALUE_FLOOR * values[-1] or 1.0))
    return (vectors * scales) @ vectors.T, (vectors / scales) @ vectors.T


def _head_weight(moments: TokenMoments, heads: int) -> np.ndarray:
    """Weights of mean 1; a head that hardly matters still counts ``LEAST_WEIGHT``."""
    weight = moments.head_weight
    if weight is None or not weight.any():
        return np.ones(heads)
    return np.maximum(weight / weight.mean(), LEAST_WEIGHT)
