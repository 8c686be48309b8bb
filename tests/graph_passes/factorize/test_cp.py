"""Collaborative factors of stacked heads, compared with the dense stack."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tensorly as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorly.decomposition import parafac
from tensorly.tenalg import unfolding_dot_khatri_rao

from graph_passes.errors import InvalidArgument, InvalidData, InvalidModel
from graph_passes.factorize.cp import CollaborativeFactors, collaborative_factors
from graph_passes.factorize.head_stack import HeadStack
from graph_passes.factorize.moments import TokenMoments
from tests.errors import raises
from tests.graph_passes.factorize.stacks import (
    approximation,
    random_heads,
    stack_of,
    whitened_error,
)

DIMENSIONS = st.tuples(*(st.integers(1, 6) for _ in range(4)))  # H D E K
SEEDS = st.integers(0, 2**32 - 1)


def error_of(stack: np.ndarray, factors: CollaborativeFactors) -> float:
    return float(np.linalg.norm(stack - approximation(factors)) / np.linalg.norm(stack))


def tokens(width: int, seed: int) -> np.ndarray:
    """200 sequences of 8 tokens around a mean that is not zero, of decaying spectrum."""
    rng = np.random.default_rng(seed)
    axes = np.linalg.qr(rng.standard_normal((width, width)))[0] / np.arange(1, width + 1)
    sequences = rng.standard_normal((200, 1, width)) + rng.standard_normal((200, 8, width))
    return sequences @ axes.T + 2 * rng.standard_normal(width) / width


def moments_of(x: np.ndarray, y: np.ndarray) -> TokenMoments:
    x, y = x.reshape(-1, x.shape[-1]), (y - y.mean(axis=1, keepdims=True)).reshape(-1, y.shape[-1])
    mean = x.mean(axis=0)
    return TokenMoments(mean, (x - mean).T @ (x - mean) / len(x), y.T @ y / len(y))


# Algebra


@given(DIMENSIONS, st.integers(1, 5), SEEDS)
def test_head_stack_products_equal_the_dense_stack(dimensions, rank, seed):
    queries, keys = random_heads(*dimensions, seed)
    H, D, E, _ = dimensions
    rng = np.random.default_rng(seed)
    M, P, Q = (rng.standard_normal((size, rank)) for size in (H, D, E))
    stack = HeadStack(queries, keys)
    WP, WQ = stack.query.T @ P, stack.key.T @ Q
    cp = (np.ones(rank), [M, P, Q])
    for mode, product in enumerate(
        (stack.over_heads(WP, WQ), stack.over_query(M, WQ), stack.over_key(M, WP))
    ):
        expected = unfolding_dot_khatri_rao(tl.tensor(stack_of(queries, keys)), cp, mode)
        np.testing.assert_allclose(product, expected, rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(DIMENSIONS, SEEDS, st.data())
def test_relative_error_equals_the_dense_stack(dimensions, seed, data):
    H, _, _, K = dimensions
    rank = data.draw(st.integers(1, H * K))
    queries, keys = random_heads(*dimensions, seed)
    factors = collaborative_factors(queries, keys, rank, max_iterations=20)
    expected = error_of(stack_of(queries, keys), factors)
    assert factors.relative_error == pytest.approx(expected, rel=1e-6, abs=1e-7)


@settings(deadline=None, max_examples=20)
@given(DIMENSIONS, SEEDS)
def test_collaborative_factors_at_full_rank_are_the_block_of_ones(dimensions, seed):
    H, _, _, K = dimensions
    queries, keys = random_heads(*dimensions, seed)
    factors = collaborative_factors(queries, keys, H * K)
    assert (factors.relative_error, factors.iterations, factors.rank) == (0.0, 0, H * K)
    np.testing.assert_array_equal(factors.mixing, np.kron(np.eye(H), np.ones(K)))
    np.testing.assert_allclose(approximation(factors), stack_of(queries, keys), rtol=0, atol=1e-12)


def test_cp_tensor_is_read_by_tensorly():
    queries, keys = random_heads(3, 8, 6, 4)
    factors = collaborative_factors(queries, keys, 7)
    stack = tl.cp_to_tensor(factors.cp_tensor())
    np.testing.assert_allclose(stack, approximation(factors), rtol=0, atol=1e-12)


# Quality


@pytest.mark.parametrize(("H", "D", "E", "K"), [(4, 16, 16, 4), (3, 6, 9, 5), (1, 12, 12, 8)])
def test_collaborative_factors_error_decreases_with_rank(H, D, E, K):
    queries, keys = random_heads(H, D, E, K)
    errors = [
        collaborative_factors(queries, keys, rank, tolerance=1e-6).relative_error
        for rank in range(1, H * K + 1)
    ]
    assert all(after <= before + 1e-4 for before, after in pairwise(errors))
    assert errors[0] > 0.5
    assert errors[-1] == 0.0


def test_collaborative_factors_of_one_head_are_a_truncated_svd():
    queries, keys = random_heads(1, 12, 10, 8)
    values = np.linalg.svd(stack_of(queries, keys)[0], compute_uv=False)
    best = np.sqrt((values[3:] ** 2).sum() / (values**2).sum())
    factors = collaborative_factors(queries, keys, 3)
    assert factors.relative_error == pytest.approx(best, rel=1e-6)


def test_collaborative_factors_beat_truncation_of_each_head():
    queries, keys = random_heads(4, 16, 16, 4)
    values = np.linalg.svd(stack_of(queries, keys), compute_uv=False)
    dropped = np.sort(values, axis=None)[::-1][8:]
    alone = np.sqrt((dropped**2).sum() / (values**2).sum())
    assert collaborative_factors(queries, keys, 8).relative_error < alone


@pytest.mark.parametrize("seed", range(4))
def test_collaborative_factors_recover_shared_dimensions(seed):
    """Heads that mix 6 common dimensions, K = 6 each, need R = 6 and not H * K = 24."""
    rng = np.random.default_rng(seed)
    P, Q = rng.standard_normal((20, 6)), rng.standard_normal((20, 6))
    queries, keys = P * rng.standard_normal((4, 1, 6)), np.stack([Q] * 4)
    assert collaborative_factors(queries, keys, 6, tolerance=1e-5).relative_error < 1e-3


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("H", "D", "E", "K", "rank"), [(4, 18, 18, 4, 8), (3, 10, 14, 5, 9)])
def test_collaborative_factors_are_no_worse_than_parafac(H, D, E, K, rank, seed):
    queries, keys = random_heads(H, D, E, K, seed)
    ours = collaborative_factors(queries, keys, rank, tolerance=1e-5, max_iterations=400)
    _, theirs = parafac(
        tl.tensor(stack_of(queries, keys)), rank, n_iter_max=400, tol=1e-8, init="random",
        random_state=0, return_errors=True,
    )  # fmt: skip
    assert ours.relative_error <= 1.02 * theirs[-1]


def test_collaborative_factors_components_do_not_cancel():
    queries, keys = random_heads(6, 16, 16, 4)
    factors = collaborative_factors(queries, keys, 18, tolerance=1e-6, max_iterations=1000)
    norms = [np.linalg.norm(f, axis=0) for f in (factors.mixing, factors.query, factors.key)]
    energy = (np.prod(norms, axis=0) ** 2).sum()
    assert energy < 100 * np.linalg.norm(stack_of(queries, keys)) ** 2


def test_collaborative_factors_columns_are_balanced():
    factors = collaborative_factors(*random_heads(3, 8, 6, 4), 7)
    np.testing.assert_allclose(np.linalg.norm(factors.mixing, axis=0), 1, rtol=0, atol=1e-12)
    norms = np.linalg.norm(factors.query, axis=0), np.linalg.norm(factors.key, axis=0)
    np.testing.assert_allclose(*norms, rtol=1e-9)


def test_collaborative_factors_are_deterministic():
    queries, keys = random_heads(3, 8, 8, 4)
    first, second = (collaborative_factors(queries, keys, 6) for _ in range(2))
    np.testing.assert_array_equal(first.query, second.query)
    np.testing.assert_array_equal(first.mixing, second.mixing)


def test_collaborative_factors_do_not_depend_on_head_order():
    queries, keys = random_heads(4, 10, 10, 3)
    order = [2, 0, 3, 1]
    factors = collaborative_factors(queries, keys, 6, max_iterations=20)
    permuted = collaborative_factors(queries[order], keys[order], 6, max_iterations=20)
    np.testing.assert_allclose(permuted.mixing, factors.mixing[order], rtol=0, atol=1e-6)


def test_collaborative_factors_do_not_depend_on_weight_scale():
    queries, keys = random_heads(3, 8, 8, 4)
    errors = [
        collaborative_factors(queries * scale, keys * scale, 6, max_iterations=20).relative_error
        for scale in (1e-6, 1.0, 1e6)
    ]
    np.testing.assert_allclose(errors, errors[1], rtol=1e-6)


def test_collaborative_factors_report_each_sweep():
    calls: list[tuple[int, float]] = []
    factors = collaborative_factors(
        *random_heads(3, 8, 8, 4),
        6,
        progress=lambda iteration, error: calls.append((iteration, error)),
    )
    assert [iteration for iteration, _ in calls] == list(range(1, factors.iterations + 1))
    assert calls[-1][1] == factors.relative_error


# Biases and calibration


def test_collaborative_factors_content_is_keys_times_query_bias():
    queries, keys = random_heads(3, 8, 6, 4)
    bias = np.random.default_rng(1).standard_normal((3, 4))
    for rank in (5, 12):
        factors = collaborative_factors(queries, keys, rank, query_bias=bias)
        expected = [keys[h] @ bias[h] for h in range(3)]
        np.testing.assert_allclose(factors.content, expected, rtol=0, atol=1e-12)


def score_error(queries, keys, factors, x, y) -> float:
    """E over tokens and heads of what softmax sees of the error in the scores, squared."""
    original = np.einsum("nsd,hde,nte->nhst", x, stack_of(queries, keys), y, optimize=True)
    shared = np.einsum("nsd,hde,nte->nhst", x, approximation(factors), y, optimize=True)
    shared += np.einsum("he,nte->nht", factors.content, y)[:, :, None]
    difference = original - shared
    return float(((difference - difference.mean(axis=-1, keepdims=True)) ** 2).mean())


@pytest.mark.parametrize(("D", "E"), [(12, 12), (12, 9)])
def test_collaborative_factors_calibration_lowers_the_score_error(D, E):
    queries, keys = random_heads(4, D, E, 4)
    x, y = tokens(D, 1), tokens(E, 2)
    plain = collaborative_factors(queries, keys, 8)
    calibrated = collaborative_factors(queries, keys, 8, moments=moments_of(x, y))
    unfolded = replace(calibrated, content=0 * calibrated.content)
    other_sign = replace(calibrated, content=-calibrated.content)
    ours = score_error(queries, keys, calibrated, x, y)
    assert ours < 0.5 * score_error(queries, keys, plain, x, y)
    assert ours < score_error(queries, keys, unfolded, x, y)
    assert score_error(queries, keys, unfolded, x, y) < score_error(queries, keys, other_sign, x, y)


def test_fold_mean_is_exact_for_the_mean_token():
    queries, keys = random_heads(3, 8, 6, 4)
    bias = np.random.default_rng(1).standard_normal((3, 4))
    moments = moments_of(tokens(8, 1), tokens(6, 2))
    factors = collaborative_factors(queries, keys, 5, query_bias=bias, moments=moments)
    mean_query = moments.query_mean @ queries[:] + bias  # H K
    expected = np.einsum("hk,hek->he", mean_query, keys)
    shared = (factors.mixing * (moments.query_mean @ factors.query)) @ factors.key.T
    np.testing.assert_allclose(shared + factors.content, expected, rtol=0, atol=1e-9)


def test_relative_error_calibrated_equals_the_whitened_stack():
    queries, keys = random_heads(3, 8, 6, 4)
    moments = moments_of(tokens(8, 1), tokens(6, 2))
    factors = collaborative_factors(queries, keys, 5, moments=moments)
    expected = whitened_error(queries, keys, factors, moments)
    assert factors.relative_error == pytest.approx(expected, rel=1e-6)


def test_collaborative_factors_of_white_tokens_equal_the_default():
    queries, keys = random_heads(3, 8, 6, 4)
    white = TokenMoments(np.zeros(8), np.eye(8), np.eye(6))
    plain = collaborative_factors(queries, keys, 5)
    np.testing.assert_array_equal(
        collaborative_factors(queries, keys, 5, moments=white).query, plain.query
    )


@pytest.mark.parametrize("spread", [0, 1, 3])
def test_collaborative_factors_of_low_rank_covariance_are_finite(spread):
    queries, keys = random_heads(3, 8, 8, 4)
    basis = np.random.default_rng(1).standard_normal((8, spread))
    covariance = basis @ basis.T
    moments = TokenMoments(np.ones(8), covariance, covariance)
    factors = collaborative_factors(queries, keys, 6, moments=moments)
    assert all(np.isfinite(f).all() for f in (factors.query, factors.key, factors.content))
    assert factors.relative_error < 1


# Degenerate and invalid input


@pytest.mark.parametrize("zero", ["queries", "keys", "both"])
def test_collaborative_factors_of_zeros_are_zeros(zero):
    queries, keys = random_heads(3, 8, 8, 4)
    queries = queries * (zero == "keys")
    keys = keys * (zero == "queries")
    factors = collaborative_factors(queries, keys, 5)
    assert factors.relative_error == 0.0
    np.testing.assert_array_equal(approximation(factors), 0.0)


def test_collaborative_factors_of_a_zero_head_are_near_zero():
    queries, keys = random_heads(3, 8, 8, 4)
    queries[1] = 0
    factors = collaborative_factors(queries, keys, 10)
    np.testing.assert_allclose(approximation(factors)[1], 0.0, rtol=0, atol=1e-2)


@pytest.mark.parametrize(("D", "K", "rank"), [(3, 8, 13), (4, 4, 15), (1, 2, 3)])
def test_collaborative_factors_rank_may_exceed_the_width(D, K, rank):
    queries, keys = random_heads(4, D, D, K)
    factors = collaborative_factors(queries, keys, rank)
    assert factors.query.shape == (D, rank)
    assert factors.relative_error < 0.05 + error_of(
        stack_of(queries, keys), collaborative_factors(queries, keys, rank - 1)
    )


def test_collaborative_factors_are_float64():
    queries, keys = random_heads(2, 6, 6, 3)
    assert collaborative_factors(queries.astype(np.float32), keys, 4).query.dtype == np.float64
    assert collaborative_factors(np.ones((2, 3, 2), int), np.ones((2, 3, 2), int), 2)


def test_collaborative_factors_do_not_change_the_input():
    queries, keys = random_heads(2, 6, 6, 3)
    before = queries.copy(), keys.copy()
    collaborative_factors(queries, keys, 6).query[:] = 0
    np.testing.assert_array_equal((queries, keys), before)


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "rank below 1": ("factorize.rank", {"rank": 0}),
    "negative rank": ("factorize.rank", {"rank": -1}),
    "rank above H * K": ("factorize.rank", {"rank": 13}),
    "no sweeps": ("factorize.max_iterations", {"max_iterations": 0}),
    "another head size": ("factorize.shape", {"queries": np.ones((3, 8, 5))}),
    "another number of heads": ("factorize.shape", {"queries": np.ones((2, 8, 4))}),
    "two axes": ("factorize.shape", {"queries": np.ones((8, 4)), "keys": np.ones((8, 4))}),
    "a bias of another shape": ("factorize.shape", {"query_bias": np.ones(12)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_collaborative_factors_invalid_argument_is_refused(case: str) -> None:
    code, arguments = REFUSED[case]
    queries, keys = random_heads(3, 8, 8, 4)
    with raises(InvalidArgument, code, f"`{next(iter(arguments))}`"):
        collaborative_factors(**{"queries": queries, "keys": keys, "rank": 5, **arguments})


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["queries", "keys", "query_bias"])
def test_collaborative_factors_weights_that_are_not_finite_are_refused(name, value):
    queries, keys = random_heads(3, 8, 8, 4)
    arguments = {"queries": queries, "keys": keys, "query_bias": np.zeros((3, 4))}
    arguments[name].flat[0] = value
    with raises(InvalidModel, "factorize.weights", f"`{name}`"):
        collaborative_factors(**arguments, rank=5)


@pytest.mark.parametrize(
    ("moments", "values"),
    [
        ((np.ones(3), np.eye(4), np.eye(2)), ("`query_covariance`", "(4, 4)", "(3, 3)")),
        ((np.ones((2, 2)), np.eye(4), np.eye(2)), ("`query_mean`", "(2, 2)")),
        ((np.ones(4), np.eye(4), np.ones((2, 3))), ("`key_covariance`", "(2, 3)")),
        ((np.ones(4), np.eye(4), np.full((2, 2), np.nan)), ("`key_covariance`", "finite")),
        ((np.ones(4), np.triu(np.ones((4, 4))), np.eye(2)), ("`query_covariance`", "symmetric")),
    ],
)
def test_token_moments_invalid_arrays_are_refused(moments, values):
    with raises(InvalidData, "moments.invalid", *values):
        TokenMoments(*moments)


@pytest.mark.parametrize(
    ("query_covariance", "key_size", "code", "values"),
    [
        (np.eye(8), 7, "moments.size", ("(8, 7)", "(8, 6)")),
        (np.diag([1.0] * 7 + [-1.0]), 6, "moments.eigenvalue", ("`query_covariance`", "-1")),
    ],
)
def test_collaborative_factors_invalid_moments_are_refused(
    query_covariance, key_size, code, values
):
    moments = TokenMoments(np.zeros(8), query_covariance, np.eye(key_size))
    with raises(InvalidData, code, *values):
        collaborative_factors(*random_heads(3, 8, 6, 4), 5, moments=moments)
