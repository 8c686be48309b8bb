"""Round weights so that their errors cancel on the activations.

Rounding to nearest minimizes the error of every weight, not of the product. GPTQ (arXiv
2210.17323) rounds one row of the weights after the other and moves the error of each row to the
remaining rows, such that E[|x (W - Wq)|^2] grows least. It depends only on the second moments of
the activations. Rows with large activations come first, because many rows remain to correct their
errors.

Scales do not change, so the model has the same operators and speed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import cho_factor, solve_triangular

if TYPE_CHECKING:
    from jaxtyping import Float

__all__ = ["Rounder"]

DAMPING = 0.01
"""Share of the mean second moment that is added to all second moments: calibration data is finite,
and the matrix may have no inverse. A tenth and ten times this share change the KL of stories260K in
int4 by less than a twentieth."""

ROWS = 128
"""Number of rows whose errors are moved together."""

COLUMNS = 4096
"""Number of columns that are in memory together."""


class Rounder:
    """Rounds the weights of all products of one activation.

    Args:
        moment: Second moments E[x x^T], or covariances if the mean error is added to a bias.
    """

    def __init__(self, moment: Float[np.ndarray, "D D"]) -> None:
        self.moment = np.asarray(moment, np.float64)
        self.order = np.argsort(-np.diag(self.moment), kind="stable")
        self.root = _inverse_root(self.moment[np.ix_(self.order, self.order)])

    def round(
        self, matrix: Float[np.ndarray, "D N"], steps: Float[np.ndarray, "D N"], low: int, high: int
    ) -> Float[np.ndarray, "D N"]:
        """Integers that times ``steps`` approximate the matrix.

        No column has more error on the activations than with the nearest integers.

        Args:
            steps: Step sizes, in the shape of the matrix or as one row.
            low: The smallest integer.
            high: The largest integer.
        """
        steps = np.broadcast_to(steps, matrix.shape)
        slices = [slice(start, start + COLUMNS) for start in range(0, matrix.shape[1], COLUMNS)]
        rounded = [
            self._rounded(matrix[:, columns], steps[:, columns], low, high) for columns in slices
        ]
        return np.concatenate(rounded, axis=1)

    def _rounded(self, matrix: np.ndarray, steps: np.ndarray, low: int, high: int) -> np.ndarray:
        """``round`` for columns that are in memory together."""
        nearest = np.clip(np.round(matrix / steps), low, high)
        if self.root is None:
            return nearest
        ordered_rows = matrix[self.order]
        widths = steps[self.order]
        result = np.empty_like(nearest)
        for start in range(0, len(ordered_rows), ROWS):
            stop = min(start + ROWS, len(ordered_rows))
            errors = np.empty((stop - start, ordered_rows.shape[1]))
            for row in range(start, stop):
                index = row - start
                corrected = ordered_rows[row] - self.root[start:row, row] @ errors[:index]
                levels = np.clip(np.round(corrected / widths[row]), low, high)
                errors[index] = (corrected - levels * widths[row]) / self.root[row, row]
                result[self.order[row]] = levels
            ordered_rows[stop:] -= self.root[start:stop, stop:].T @ errors
        is_better = self._losses(matrix - result * steps) < self._losses(matrix - nearest * steps)
        return np.where(is_better, result, nearest)

    def _losses(self, error: Float[np.ndarray, "D N"]) -> Float[np.ndarray, " N"]:
        """The squared error of each column on the activations."""
        return np.einsum("dn,dn->n", error, self.moment @ error)


def _inverse_root(moment: Float[np.ndarray, "D D"]) -> Float[np.ndarray, "D D"] | None:
    """The upper triangular U of U^T U = (damped moment)^-1; None without an inverse."""
    damping = DAMPING * np.trace(moment) / max(len(moment), 1)
    if not damping > 0:
        return None
    # With rows and columns reversed, C C^T = moment for a lower C is R R^T for an upper R = U^-1.
    damped = moment + damping * np.eye(len(moment))
    try:
        lower = cho_factor(damped[::-1, ::-1], lower=True)[0]
    except np.linalg.LinAlgError:  # a covariance that consists of rounding errors
        return None
    return solve_triangular(np.tril(lower)[::-1, ::-1], np.eye(len(moment)))
