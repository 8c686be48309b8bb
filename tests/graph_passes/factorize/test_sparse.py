"""Sparse mixing: supports, errors, and the limit of truncated singular value decompositions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.cp import collaborative_factors
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.sparse import sparse_factors
from tests.errors import raises
from tests.graph_passes.factorize.stacks import (
    approximation,
    random_heads,
    stack_of,
    whitened_error,
)

H, D, E, K = 4, 11, 9, 5


def heads(seed: int = 0, H: int = H, shared: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random heads; with ``shared``, columns of one pool, so that sharing pays."""
    if not shared:
        return random_heads(H, D, E, K, seed)
    rng = np.random.default_rng(seed)
    queries, keys = rng.standard_normal((D, shared)), rng.standard_normal((E, shared))
    picks = [rng.choice(shared, K, replace=False) for _ in range(H)]
    mixing = [rng.uniform(0.5, 2, K) for _ in range(H)]
    return (
        np.stack([queries[:, pick] * m for pick, m in zip(picks, mixing, strict=True)]),
        np.stack([keys[:, pick] for pick in picks]),
    )


def moments(seed: int = 5) -> TokenMoments:
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((300, D)), rng.standard_normal((300, E))
    x, y = x * np.geomspace(3, 0.1, D), y * np.geomspace(2, 0.2, E)
    return TokenMoments(x.mean(0) + 0.3, np.cov(x.T), np.cov(y.T))


# The support


@given(rank=st.integers(1, H * K), size=st.integers(1, K), seed=st.integers(0, 3))
def test_sparse_factors_support_has_requested_size(rank: int, size: int, seed: int):
    factors = sparse_factors(*heads(seed), rank, size)
    read = (factors.mixing != 0).sum(axis=1)
    assert read.sum() <= H * min(size, rank)
    assert read.min() >= 1 and read.max() <= K
    assert factors.rank <= min(rank, H * size)
    assert (factors.mixing != 0).any(axis=0).all()  # dimensions without a reader are removed


@pytest.mark.parametrize("max_head_size", [2, 3, 5])
@pytest.mark.parametrize("rank", [6, H * K])
def test_sparse_factors_respect_the_maximum_head_size(max_head_size: int, rank: int):
    queries, keys = heads()
    queries[0] *= 50  # the largest entries are all in this head
    read = (sparse_factors(queries, keys, rank, 2, max_head_size=max_head_size).mixing != 0).sum(
        axis=1
    )
    assert read.max() == max_head_size if max_head_size < 5 else read[0] == 5
    assert read.sum() == 2 * H


def test_sparse_factors_larger_heads_read_more():
    queries, keys = heads()
    queries *= np.array([8, 4, 1, 0.5])[:, None, None]
    read = (sparse_factors(queries, keys, H * K, 3).mixing != 0).sum(axis=1)
    assert read.tolist() == sorted(read.tolist(), reverse=True) and read[0] > read[-1]


# The error


def test_sparse_factors_of_all_dimensions_are_exact():
    factors = sparse_factors(*heads(), H * K, K)
    assert factors.relative_error == 0.0
    np.testing.assert_allclose(approximation(factors), stack_of(*heads()), atol=1e-12, rtol=0)


def test_sparse_factors_without_sharing_are_truncated_svds():
    """Eckart and Young over all heads at once: what is left are the smallest singular values."""
    queries, keys = heads()
    values = np.linalg.svd(stack_of(queries, keys), compute_uv=False)
    left = np.sort(values[:, :K].ravel())[: H * K - 3 * H]
    factors = sparse_factors(queries, keys, 3 * H, 3)
    expected = np.linalg.norm(left) / np.linalg.norm(values)
    assert factors.relative_error == pytest.approx(expected, rel=1e-6)
    assert (np.count_nonzero(factors.mixing, axis=0) == 1).all()


def test_sparse_factors_recover_a_shared_pool():
    """Heads whose columns come of a pool of 12: 12 dimensions, 5 a head, are all there is."""
    queries, keys = heads(seed=2, shared=12)
    dense = collaborative_factors(queries, keys, 12)
    factors = sparse_factors(queries, keys, 12, K)
    assert dense.relative_error < 0.05
    assert factors.relative_error < 0.05


@pytest.mark.parametrize("calibrated", [False, True])
def test_sparse_factors_error_decreases_with_head_size(calibrated: bool):
    tokens = moments() if calibrated else None
    errors = [
        sparse_factors(*heads(), 9, size, moments=tokens).relative_error for size in range(1, K + 1)
    ]
    assert errors == sorted(errors, reverse=True)
    dense = collaborative_factors(*heads(), 9, moments=tokens).relative_error
    assert errors[-1] <= 1.25 * dense  # 5 of 9 dimensions


@pytest.mark.parametrize("rank", [7, H * K])
def test_sparse_factors_error_equals_the_whitened_stack(rank: int):
    (queries, keys), tokens = heads(), moments()
    factors = sparse_factors(queries, keys, rank, 3, moments=tokens)
    expected = whitened_error(queries, keys, factors, tokens)
    assert factors.relative_error == pytest.approx(expected, rel=1e-6)


def test_sparse_factors_beat_truncated_dense_factors():
    """The largest entries of dense mixing, as they were, leave clearly more."""
    queries, keys = heads(seed=3)
    dense = collaborative_factors(queries, keys, 10)
    weight = np.abs(dense.mixing) * np.linalg.norm(dense.query, axis=0)
    weight = weight * np.linalg.norm(dense.key, axis=0)
    least = np.sort(weight.ravel())[-3 * H]
    cut = np.where(weight >= least, dense.mixing, 0)
    left = stack_of(queries, keys) - np.einsum("hr,dr,er->hde", cut, dense.query, dense.key)
    error = np.linalg.norm(left) / np.linalg.norm(stack_of(queries, keys))
    assert sparse_factors(queries, keys, 10, 3).relative_error < 0.9 * error


# Content


@pytest.mark.parametrize("rank", [7, H * K])
def test_sparse_factors_are_exact_for_the_mean_token(rank: int):
    """With the mean folded into the content, nothing is lost where x is the mean."""
    queries, keys = heads()
    bias, known = np.random.default_rng(8).standard_normal((H, K)), moments()
    factors = sparse_factors(queries, keys, rank, 2, query_bias=bias, moments=known)
    mu = known.query_mean
    expected = np.einsum("hk,hek->he", mu @ queries + bias, keys)
    scores = (factors.mixing * (mu @ factors.query)) @ factors.key.T + factors.content
    np.testing.assert_allclose(scores, expected, atol=1e-9, rtol=0)


def test_sparse_factors_are_deterministic():
    first, second = (sparse_factors(*heads(), 7, 3, moments=moments()) for _ in range(2))
    for name in ("query", "key", "mixing", "content"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_sparse_factors_of_a_zero_head_are_finite():
    queries, keys = heads()
    queries[1] = 0
    factors = sparse_factors(queries, keys, 7, 2)
    np.testing.assert_allclose(approximation(factors)[1], 0, atol=1e-6)
    assert np.isfinite(factors.query).all() and np.isfinite(factors.key).all()


# Invalid sizes


@pytest.mark.parametrize(
    ("rank", "size", "max_head_size", "name"),
    [
        (0, 2, None, "rank"),
        (H * K + 1, 2, None, "rank"),
        (5, 0, None, "head_size"),
        (5, K + 1, None, "head_size"),
        (5, 3, 2, "max_head_size"),
        (5, 3, K + 1, "max_head_size"),
    ],
)
def test_sparse_factors_invalid_sizes_are_refused(
    rank: int, size: int, max_head_size: int | None, name: str
):
    with raises(InvalidArgument, f"factorize.{name}", f"`{name}`"):
        sparse_factors(*heads(), rank, size, max_head_size=max_head_size)
