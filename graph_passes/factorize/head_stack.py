"""The heads of a layer as one stack of matrices, with the products for least squares.

    T_h = W_Q^h W_K^hT,   the slices of the stack T of equation 9 of arXiv 2006.16362

Each slice has rank K, so (D x HK)(HK x R) products suffice; the H x D x E stack is never formed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

__all__ = ["RIDGE", "Factors", "HeadStack", "gram", "side_by_side", "solve", "unit"]

RIDGE = 1e-5
"""Weight of the energies of the components, relative to the residual."""


class Factors(NamedTuple):
    """Factors of a stack: T_h ~= P diag(M[h]) Q^T.

    Attributes:
        query: P, (D, R).
        key: Q, (E, R).
        mixing: M, (H, R).
    """

    query: np.ndarray
    key: np.ndarray
    mixing: np.ndarray


class SingularTriples(NamedTuple):
    """The singular value decomposition of each T_h.

    Attributes:
        left: Left singular vectors, (H, D, K).
        values: Singular values, (H, K), the largest first.
        right: Right singular vectors, (H, E, K).
    """

    left: np.ndarray
    values: np.ndarray
    right: np.ndarray


class _Cores(NamedTuple):
    """T_h = X_h C_h Y_h^T with orthonormal columns of X (H, D, K) and Y (H, E, K)."""

    x_basis: np.ndarray
    core: np.ndarray
    y_basis: np.ndarray


class HeadStack:
    """The stack T in factored form.

    The three ``over`` methods are the matricized tensor times Khatri-Rao products (MTTKRP), from
    the projected factors WP = W_Q^T P and WQ = W_K^T Q, both (HK, R).

    Args:
        queries: W_Q^h of each head, (H, D, K).
        keys: W_K^h of each head, (H, E, K).
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray) -> None:
        self.heads, _, self.head_size = queries.shape
        self.query = side_by_side(queries)  # D HK
        self.key = side_by_side(keys)  # E HK
        grams = (queries.swapaxes(1, 2) @ queries) * (keys.swapaxes(1, 2) @ keys)
        self.energy = float(grams.sum())  # |T|^2

    def over_heads(self, WP: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        """sum_k WP[hk, r] WQ[hk, r], (H, R): the products of the equations for M."""
        return (WP * WQ).reshape(self.heads, self.head_size, -1).sum(axis=1)

    def over_query(self, mixing: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        """sum_h T_h Q diag(M[h]), (D, R): the products of the equations for P."""
        return self.query @ (WQ * np.repeat(mixing, self.head_size, axis=0))

    def over_key(self, mixing: np.ndarray, WP: np.ndarray) -> np.ndarray:
        """sum_h T_h^T P diag(M[h]), (E, R): the products of the equations for Q."""
        return self.key @ (WP * np.repeat(mixing, self.head_size, axis=0))

    def error(self, overlap: float, energy: float) -> float:
        """Relative error from |T - T~|^2 = |T|^2 - 2 <T, T~> + |T~|^2.

        Args:
            overlap: <T, T~>.
            energy: |T~|^2.
        """
        residual = max(self.energy - 2.0 * overlap + energy, 0.0)
        return float(np.sqrt(residual / self.energy)) if self.energy > 0.0 else 0.0

    def residual(self, factors: Factors) -> float:
        """The relative error of an approximation by factors."""
        query, key, mixing = factors
        overlap = np.vdot(mixing, self.over_heads(self.query.T @ query, self.key.T @ key))
        energy = (gram(mixing) * gram(query) * gram(key)).sum()
        return self.error(float(overlap), float(energy))

    def singular_triples(self) -> SingularTriples:
        """The K singular triples of each T_h."""
        x_basis, core, y_basis = self._cores()
        left, values, right = np.linalg.svd(core, full_matrices=False)
        return SingularTriples(x_basis @ left, values, y_basis @ right.swapaxes(1, 2))

    def starts(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Initial P and Q: singular triples, and eigenvectors if D and E are at least R."""
        left, values, right = self.singular_triples()
        largest = np.argsort(-values, axis=None, kind="stable")[:rank]
        spare = (0, 0), (0, rank - len(largest))  # fewer than HK triples if K > D
        query, key = (np.pad(side_by_side(vectors)[:, largest], spare) for vectors in (left, right))
        starts = [(query, key)]
        x_basis, core, y_basis = self._cores()
        if rank <= min(x_basis.shape[1], y_basis.shape[1]):
            roots = x_basis @ core, y_basis @ core.swapaxes(1, 2)
            query, key = (np.linalg.eigh(gram(side_by_side(root).T))[1] for root in roots)
            starts.append((query[:, : -rank - 1 : -1], key[:, : -rank - 1 : -1]))
        return starts

    def _cores(self) -> _Cores:
        """Bases of the columns and rows of each T_h, and T_h in these bases."""
        x_basis, x_triangle = np.linalg.qr(self._by_head(self.query))
        y_basis, y_triangle = np.linalg.qr(self._by_head(self.key))
        return _Cores(x_basis, x_triangle @ y_triangle.swapaxes(1, 2), y_basis)

    def _by_head(self, weight: np.ndarray) -> np.ndarray:
        """Split (D, HK) into heads (H, D, K)."""
        return np.stack(np.split(weight, self.heads, axis=1))


def solve(normal: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Solve X (normal + RIDGE I) = products for X."""
    return np.linalg.solve(normal + RIDGE * np.eye(len(normal)), products.T).T


def unit(factor: np.ndarray) -> np.ndarray:
    """Normalize columns to norm 1; columns of zeros are unchanged."""
    norms = np.linalg.norm(factor, axis=0)
    return factor / np.where(norms == 0.0, 1.0, norms)


def gram(factor: np.ndarray) -> np.ndarray:
    """The inner products of all pairs of columns."""
    return factor.T @ factor


def side_by_side(heads: np.ndarray) -> np.ndarray:
    """Concatenate heads (H, D, K) to (D, HK)."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
