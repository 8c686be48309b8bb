"""The heads of a layer as one stack of matrices, with the products for least squares.

    T_h = W_Q^h W_K^hT,   the slices of the stack T of equation 9 of arXiv 2006.16362

Each slice has rank K, so (D x HK)(HK x R) products suffice; the H x D x E stack is never formed.
"""

from __future__ import annotations

import numpy as np

__all__ = ["RIDGE", "HeadStack", "gram", "side_by_side", "solve", "unit"]

RIDGE = 1e-5  # weight of the component energies relative to the residual


class HeadStack:
    """The stack T in factored form.

    The three ``over`` methods are the matricized tensor times Khatri-Rao products (MTTKRP), from
    the projected factors WP = W_Q^T P and WQ = W_K^T Q, both (HK, R).
    """

    def __init__(self, queries: np.ndarray, keys: np.ndarray) -> None:
        self.heads, _, self.head_size = queries.shape
        self.query = side_by_side(queries)  # D HK
        self.key = side_by_side(keys)  # E HK
        grams = (queries.swapaxes(1, 2) @ queries) * (keys.swapaxes(1, 2) @ keys)
        self.energy = float(grams.sum())  # |T|^2

    def over_heads(self, WP: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        return (WP * WQ).reshape(self.heads, self.head_size, -1).sum(axis=1)  # H R

    def over_query(self, mixing: np.ndarray, WQ: np.ndarray) -> np.ndarray:
        return self.query @ (WQ * np.repeat(mixing, self.head_size, axis=0))  # D R

    def over_key(self, mixing: np.ndarray, WP: np.ndarray) -> np.ndarray:
        return self.key @ (WP * np.repeat(mixing, self.head_size, axis=0))  # E R

    def error(self, overlap: float, energy: float) -> float:
        """Relative error from |T - T~|^2 = |T|^2 - 2 <T, T~> + |T~|^2.

        Args:
            overlap: <T, T~>.
            energy: |T~|^2.
        """
        residual = max(self.energy - 2.0 * overlap + energy, 0.0)
        return float(np.sqrt(residual / self.energy)) if self.energy > 0.0 else 0.0

    def residual(self, query: np.ndarray, key: np.ndarray, mixing: np.ndarray) -> float:
        """The relative error of factors P, Q and M."""
        overlap = np.vdot(mixing, self.over_heads(self.query.T @ query, self.key.T @ key))
        energy = (gram(mixing) * gram(query) * gram(key)).sum()
        return self.error(float(overlap), float(energy))

    def singular_triples(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Left vectors (H, D, K), values (H, K) and right vectors (H, E, K) of each T_h."""
        left, core, right = self._cores()
        u, values, v = np.linalg.svd(core, full_matrices=False)
        return left @ u, values, right @ v.swapaxes(1, 2)

    def starts(self, rank: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Initial P and Q: singular triples, and eigenvectors if the widths allow R of them."""
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

    def _cores(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """T_h = X C Y^T with orthonormal X (H, D, K) and Y (H, E, K)."""
        x, y = (np.stack(np.split(w, self.heads, axis=1)) for w in (self.query, self.key))
        (x_basis, x_triangle), (y_basis, y_triangle) = np.linalg.qr(x), np.linalg.qr(y)
        return x_basis, x_triangle @ y_triangle.swapaxes(1, 2), y_basis


def solve(normal: np.ndarray, products: np.ndarray) -> np.ndarray:
    """Solve X (normal + RIDGE I) = products for X."""
    return np.linalg.solve(normal + RIDGE * np.eye(len(normal)), products.T).T


def unit(factor: np.ndarray) -> np.ndarray:
    """Normalize columns to norm 1; columns of zeros are unchanged."""
    norms = np.linalg.norm(factor, axis=0)
    return factor / np.where(norms == 0.0, 1.0, norms)


def gram(factor: np.ndarray) -> np.ndarray:
    return factor.T @ factor


def side_by_side(heads: np.ndarray) -> np.ndarray:
    """Concatenate heads (H, D, K) to (D, HK)."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
