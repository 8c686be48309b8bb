"""Stacks of heads, and what their factors make of them."""

from __future__ import annotations

from typing import Any

import numpy as np

from graph_passes.factorize.moments import TokenMoments


def random_heads(H: int, D: int, E: int, K: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Queries (H, D, K) and keys (H, E, K)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((H, D, K)), rng.standard_normal((H, E, K))


def stack_of(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The product of the queries and keys of each head, (H, D, E)."""
    return np.einsum("hdk,hek->hde", queries, keys)


def approximation(factors: Any) -> np.ndarray:
    """The stack that shared dimensions compute."""
    return np.einsum("hr,dr,er->hde", factors.mixing, factors.query, factors.key)


def whitened_error(
    queries: np.ndarray, keys: np.ndarray, factors: Any, moments: TokenMoments
) -> float:
    """The relative error of the stack, in coordinates in which the tokens are white."""
    x, y = (np.linalg.cholesky(c).T for c in (moments.query_covariance, moments.key_covariance))
    stack, shared = (x @ t @ y.T for t in (stack_of(queries, keys), approximation(factors)))
    return float(np.linalg.norm(stack - shared) / np.linalg.norm(stack))
