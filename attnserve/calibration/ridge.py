"""Ridge regression towards a prior, from moments: the data is read once, in parts of any size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Moments", "NormalEquations", "ridge_towards"]


@dataclass(eq=False)
class Moments:
    """Sums over tokens c (N) and targets t (D), sufficient to fit any ridge and rate any map."""

    count: int
    c: Float[np.ndarray, " N"]
    t: Float[np.ndarray, " D"]
    cc: Float[np.ndarray, "N N"]
    ct: Float[np.ndarray, "N D"]
    tt: float

    @classmethod
    def of(cls, c: Float[np.ndarray, "M N"], t: Float[np.ndarray, "M D"]) -> Moments:
        return cls(len(c), c.sum(0), t.sum(0), c.T @ c, c.T @ t, float(np.sum(t * t)))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count,
            self.c + other.c,
            self.t + other.t,
            self.cc + other.cc,
            self.ct + other.ct,
            self.tt + other.tt,
        )

    def __iadd__(self, other: Moments) -> Moments:
        """Add in place: the matrices of wide layers take longer to allocate than to add."""
        self.count += other.count
        self.tt += other.tt
        for mine, theirs in (
            (self.c, other.c), (self.t, other.t), (self.cc, other.cc), (self.ct, other.ct),
        ):  # fmt: skip
            mine += theirs
        return self

    def __sub__(self, part: Moments) -> Moments:
        return Moments(
            self.count - part.count,
            self.c - part.c,
            self.t - part.t,
            self.cc - part.cc,
            self.ct - part.ct,
            self.tt - part.tt,
        )

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

    def projected(self, columns: Float[np.ndarray, "D E"]) -> Moments:
        """The moments of c and t @ columns, with ``tt`` unknown."""
        t, ct = self.t @ columns, self.ct @ columns
        return Moments(self.count, self.c, t, self.cc, ct, np.nan)

    @property
    def covariance(self) -> Float[np.ndarray, "N N"]:
        mean = self.c / max(self.count, 1)
        return self.cc / max(self.count, 1) - np.outer(mean, mean)

    @property
    def variation(self) -> float:
        """The sum of |t - mean t|^2."""
        return max(self.tt - float(self.t @ self.t) / max(self.count, 1), 0.0)


def ridge_towards(
    moments: Moments, prior: Float[np.ndarray, "N D"], ridges: Sequence[float]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Solve W (N, D) and b (D,) for each ridge, with W regularized towards ``prior``."""
    equations = NormalEquations(moments, prior)
    return [equations.solve(ridge) for ridge in ridges]


class NormalEquations:
    """The normal equations of W - prior on the residual of the prior."""

    def __init__(self, moments: Moments, prior: np.ndarray) -> None:
        n, size = max(moments.count, 1), len(moments.c)
        self.c, self.t, self.prior = moments.c / n, moments.t / n, prior
        self.gram = moments.covariance
        self.left = moments.ct / n - np.outer(self.c, self.t) - self.gram @ prior
        self.unit = max(float(np.trace(self.gram)), 0.0) / max(size, 1) or 1.0
        self.rounding = 4 * size * np.finfo(float).eps * float(np.trace(moments.cc)) / n

    def solve(self, ridge: float) -> tuple[np.ndarray, np.ndarray]:
        weight = self.prior
        if np.isfinite(ridge) and weight.size:
            gram = self.gram.copy()
            gram.flat[:: len(gram) + 1] += max(ridge * self.unit, self.rounding)
            # scipy's Cholesky was up to five times slower on busy cores, because scipy brings a
            # second BLAS with its own threads.
            weight = weight + np.linalg.solve(gram, self.left)
        return weight, self.t - self.c @ weight
