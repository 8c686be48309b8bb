"""Ridge regression towards a prior, from moments: the data is read once, in batches."""

from __future__ import annotations

from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["FitMoments", "NormalEquations"]


@dataclass(eq=False)
class FitMoments:
    """Sums over tokens c (N) and targets t (D), for fits with any ridge and the error of any map.

    Attributes:
        count: The number of tokens.
        c: The sum of c.
        t: The sum of t.
        cc: The sum of c c^T.
        ct: The sum of c t^T.
        tt: The sum of |t|^2.
    """

    count: int
    c: Float[np.ndarray, " N"]
    t: Float[np.ndarray, " D"]
    cc: Float[np.ndarray, "N N"]
    ct: Float[np.ndarray, "N D"]
    tt: float

    @classmethod
    def of(cls, c: Float[np.ndarray, "M N"], t: Float[np.ndarray, "M D"]) -> FitMoments:
        """The sums over M tokens and their targets."""
        return cls(len(c), c.sum(0), t.sum(0), c.T @ c, c.T @ t, float(np.sum(t * t)))

    def __add__(self, other: FitMoments) -> FitMoments:
        return FitMoments(*map(add, self._sums(), other._sums()))

    def __sub__(self, other: FitMoments) -> FitMoments:
        return FitMoments(*map(sub, self._sums(), other._sums()))

    def __iadd__(self, other: FitMoments) -> FitMoments:
        """Add in place: the matrices of wide layers take longer to allocate than to add."""
        self.count += other.count
        self.c += other.c
        self.t += other.t
        self.cc += other.cc
        self.ct += other.ct
        self.tt += other.tt
        return self

    def _sums(self) -> tuple[Any, ...]:
        return self.count, self.c, self.t, self.cc, self.ct, self.tt

    def error(self, weight: Float[np.ndarray, "N D"], bias: Float[np.ndarray, " D"]) -> float:
        """The sum of |c W + b - t|^2."""
        return max(self.tt + self.error_above_zero_map(weight, bias), 0.0)

    def error_above_zero_map(
        self, weight: Float[np.ndarray, "N D"], bias: Float[np.ndarray, " D"]
    ) -> float:
        """The sum of |c W + b - t|^2 - |t|^2."""
        squares = np.sum(weight * (self.cc @ weight)) - 2 * np.sum(weight * self.ct)
        shifts = 2 * bias @ (self.c @ weight - self.t) + self.count * bias @ bias
        return float(squares + shifts)

    def projected(self, columns: Float[np.ndarray, "D E"]) -> FitMoments:
        """The moments of c and t @ columns, with ``tt`` unknown."""
        return FitMoments(
            self.count, self.c, self.t @ columns, self.cc, self.ct @ columns, tt=np.nan
        )

    @property
    def covariance(self) -> Float[np.ndarray, "N N"]:
        """The covariance of c."""
        mean = self.c / max(self.count, 1)
        return self.cc / max(self.count, 1) - np.outer(mean, mean)

    @property
    def variation(self) -> float:
        """The sum of |t - mean t|^2."""
        return max(self.tt - float(self.t @ self.t) / max(self.count, 1), 0.0)


class NormalEquations:
    """The normal equations of W - prior (N, D) on the residual of the prior."""

    def __init__(self, moments: FitMoments, prior: Float[np.ndarray, "N D"]) -> None:
        count = max(moments.count, 1)
        size = len(moments.c)
        self.c = moments.c / count  # the mean of c
        self.t = moments.t / count  # the mean of t
        self.prior = prior
        self.gram = moments.covariance
        self.left = moments.ct / count - np.outer(self.c, self.t) - self.gram @ prior
        self.unit = max(float(np.trace(self.gram)), 0.0) / max(size, 1) or 1.0
        self.rounding = 4 * size * np.finfo(float).eps * float(np.trace(moments.cc)) / count

    def solve(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        """The optimal W (N, D) and b (D,), with W regularized towards the prior.

        Args:
            ridge: Relative to the mean variance of c; infinity keeps the prior.
        """
        weight = self.prior
        if np.isfinite(ridge) and weight.size:
            gram = self.gram.copy()
            gram.flat[:: len(gram) + 1] += max(ridge * self.unit, self.rounding)
            # scipy's Cholesky was up to five times slower on busy cores, because scipy brings a
            # second BLAS with its own threads.
            weight = weight + np.linalg.solve(gram, self.left)
        return weight, self.t - self.c @ weight
