"""Sparse mixing: few entries, solved again on what they are; one head a dimension is truncation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.cp import collaborative_factors, relative_error
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.sparse import sparse_factors

H, D, E, K = 4, 11, 9, 5


def heads(seed: int = 0, H: int = H, shared: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random heads; with ``shared``, columns of one pool, so that sharing pays."""
    rng = np.random.default_rng(seed)
    if not shared:
        return rng.standard_normal((H, D, K)), rng.standard_normal((H, E, K))
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


def stack(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return np.einsum("hdk,hek->hde", queries, keys)


def rebuilt(found: Any) -> np.ndarray:
    return np.einsum("hr,dr,er->hde", found.mixing, found.query, found.key)


# The support


@given(rank=st.integers(1, H * K), size=st.integers(1, K), seed=st.integers(0, 3))
def test_heads_read_the_dimensions_they_are_given(rank: int, size: int, seed: int):
    found = sparse_factors(*heads(seed), rank, size)
    read = (found.mixing != 0).sum(axis=1)
    assert read.sum() <= H * min(size, rank)
    assert read.min() >= 1 and read.max() <= K
    assert found.rank <= min(rank, H * size)
    assert (found.mixing != 0).any(axis=0).all()  # what no head reads is not kept


@pytest.mark.parametrize("max_head_size", [2, 3, 5])
@pytest.mark.parametrize("rank", [6, H * K])
def test_no_head_reads_more_than_it_may(max_head_size: int, rank: int):
    queries, keys = heads()
    queries[0] *= 50  # would take it all
    read = (sparse_factors(queries, keys, rank, 2, max_head_size=max_head_size).mixing != 0).sum(
        axis=1
    )
    assert read.max() == max_head_size if max_head_size < 5 else read[0] == 5
    assert read.sum() == 2 * H


def test_heads_of_different_weight_get_different_sizes():
    queries, keys = heads()
    queries *= np.array([8, 4, 1, 0.5])[:, None, None]
    read = (sparse_factors(queries, keys, H * K, 3).mixing != 0).sum(axis=1)
    assert read.tolist() == sorted(read.tolist(), reverse=True) and read[0] > read[-1]


# The error


def test_all_dimensions_of_all_heads_are_exact():
    found = sparse_factors(*heads(), H * K, K)
    assert found.relative_error == 0.0
    np.testing.assert_allclose(rebuilt(found), stack(*heads()), atol=1e-12, rtol=0)


def test_without_sharing_it_is_each_heads_own_truncation():
    """Eckart and Young over all heads at once: what is left are the smallest singular values."""
    queries, keys = heads()
    values = np.linalg.svd(stack(queries, keys), compute_uv=False)
    left = np.sort(values[:, :K].ravel())[: H * K - 3 * H]
    found = sparse_factors(queries, keys, 3 * H, 3)
    expected = np.linalg.norm(left) / np.linalg.norm(values)
    assert found.relative_error == pytest.approx(expected, rel=1e-6)
    assert (np.count_nonzero(found.mixing, axis=0) == 1).all()


def test_what_few_entries_can_say_is_found():
    """Heads whose columns come of a pool of 12: 12 dimensions, 5 a head, are all there is."""
    queries, keys = heads(seed=2, shared=12)
    dense = collaborative_factors(queries, keys, 12)
    found = sparse_factors(queries, keys, 12, K)
    assert dense.relative_error < 0.05
    assert found.relative_error < 0.05


@pytest.mark.parametrize("calibrated", [False, True])
def test_the_error_falls_as_heads_read_more(calibrated: bool):
    given = moments() if calibrated else None
    errors = [
        sparse_factors(*heads(), 9, size, moments=given).relative_error for size in range(1, K + 1)
    ]
    assert errors == sorted(errors, reverse=True)
    dense = collaborative_factors(*heads(), 9, moments=given).relative_error
    assert errors[-1] <= 1.25 * dense  # 5 of 9 dimensions


@pytest.mark.parametrize("rank", [7, H * K])
def test_the_error_is_that_of_the_whitened_stack(rank: int):
    found = sparse_factors(*heads(), rank, 3, moments=moments())
    assert found.relative_error == pytest.approx(
        relative_error(*heads(), found, moments=moments()), rel=1e-9
    )


def test_solving_again_beats_cutting():
    """The largest entries of dense mixing, as they were, leave clearly more."""
    queries, keys = heads(seed=3)
    dense = collaborative_factors(queries, keys, 10)
    weight = np.abs(dense.mixing) * np.linalg.norm(dense.query, axis=0)
    weight = weight * np.linalg.norm(dense.key, axis=0)
    least = np.sort(weight.ravel())[-3 * H]
    cut = np.where(weight >= least, dense.mixing, 0)
    left = stack(queries, keys) - np.einsum("hr,dr,er->hde", cut, dense.query, dense.key)
    error = np.linalg.norm(left) / np.linalg.norm(stack(queries, keys))
    assert sparse_factors(queries, keys, 10, 3).relative_error < 0.9 * error


# Content


@pytest.mark.parametrize("rank", [7, H * K])
def test_the_mean_token_scores_exactly(rank: int):
    """With the mean folded into the content, nothing is lost where x is the mean."""
    queries, keys = heads()
    bias, known = np.random.default_rng(8).standard_normal((H, K)), moments()
    found = sparse_factors(queries, keys, rank, 2, query_bias=bias, moments=known)
    mu = known.query_mean
    expected = np.einsum("hk,hek->he", mu @ queries + bias, keys)
    made = (found.mixing * (mu @ found.query)) @ found.key.T + found.content
    np.testing.assert_allclose(made, expected, atol=1e-9, rtol=0)


def test_the_same_input_gives_the_same_factors():
    first, second = (sparse_factors(*heads(), 7, 3, moments=moments()) for _ in range(2))
    for name in ("query", "key", "mixing", "content"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))


def test_a_head_of_zeros_is_no_trouble():
    queries, keys = heads()
    queries[1] = 0
    found = sparse_factors(queries, keys, 7, 2)
    np.testing.assert_allclose(rebuilt(found)[1], 0, atol=1e-6)
    assert np.isfinite(found.query).all() and np.isfinite(found.key).all()


# What cannot be


@pytest.mark.parametrize(
    ("rank", "size", "max_head_size", "text"),
    [
        (0, 2, None, "`rank` is 0: expected 1 to 20"),
        (H * K + 1, 2, None, "`rank` is 21: expected 1 to 20"),
        (5, 0, None, "`head_size` is 0: expected 1 to 5"),
        (5, K + 1, None, "`head_size` is 6: expected 1 to 5"),
        (5, 3, 2, "`max_head_size` is 2: expected 3 to 5"),
        (5, 3, K + 1, "`max_head_size` is 6: expected 3 to 5"),
    ],
)
def test_sizes_that_cannot_be_are_refused(
    rank: int, size: int, max_head_size: int | None, text: str
):
    with pytest.raises(InvalidArgument, match=re.escape(text)):
        sparse_factors(*heads(), rank, size, max_head_size=max_head_size)
