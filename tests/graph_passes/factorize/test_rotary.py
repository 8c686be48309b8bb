"""Reduced rotary planes: exact at full size, and errors as large as reported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph_passes.errors import InvalidArgument
from graph_passes.factorize.moments import TokenMoments
from graph_passes.factorize.rotary import (
    RotaryFactors,
    RotaryHeads,
    shared_keys,
    truncated_planes,
)
from tests.errors import raises

D = 7
EXACT = 1e-9
"""Largest error of exact forms relative to the largest score."""

shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2**16))
"""Query heads per group, groups, planes, seed."""


def heads(share: int, groups: int, planes: int, seed: int) -> RotaryHeads:
    rng = np.random.default_rng(seed)

    def random(count: int) -> np.ndarray:
        pair = rng.standard_normal((2, count, D + 1, planes))
        return pair[0] + 1j * pair[1]

    return RotaryHeads(
        random(share * groups), random(groups), np.repeat(np.arange(groups), share), True
    )


def moments(heads: RotaryHeads, seed: int) -> TokenMoments:
    rng = np.random.default_rng(seed)
    roots = rng.standard_normal((2, D, D))
    weight = rng.uniform(0.5, 2, len(heads.query))
    mean = rng.standard_normal(D)
    return TokenMoments(mean, roots[0] @ roots[0].T, roots[1] @ roots[1].T, weight)


def scores(reduced: RotaryHeads | RotaryFactors, seed: int = 0) -> np.ndarray:
    """Scores (H, S, T) of random tokens at positions 0 to 5, with an angle per plane."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate([rng.standard_normal((6, D)), np.ones((6, 1))], axis=1)
    angles = rng.uniform(0, 3, 8)
    groups = reduced.groups
    count = reduced.key.shape[2]
    planes = reduced.planes if isinstance(reduced, RotaryFactors) else np.arange(count)[None]
    turns = np.exp(1j * angles[np.broadcast_to(planes, (len(reduced.key), count))])  # G N
    turns = turns[:, None] ** np.arange(6)[None, :, None]  # G T N
    q = (tokens @ reduced.query) * turns[groups]
    k = ((tokens @ reduced.key) * turns)[groups]
    return np.einsum("hsn,htn->hst", q, k.conj()).real


def assert_equal_scores(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(got, expected, atol=EXACT * np.abs(expected).max(), rtol=0)


@settings(max_examples=30, deadline=None)
@given(shape=shapes, calibrated=st.booleans())
def test_full_size_keeps_the_scores(shape: tuple[int, int, int, int], calibrated: bool) -> None:
    given = heads(*shape)
    tokens = moments(given, shape[3]) if calibrated else None
    shared = shared_keys(given, len(given.key) * given.size, tokens)
    truncated = truncated_planes(given, given.size, tokens)
    assert (shared.relative_error, truncated.relative_error) == (0, 0)
    assert shared.rank == truncated.rank == len(given.key) * given.size
    assert len(shared.key) == 1
    assert_equal_scores(scores(shared), scores(given))
    assert_equal_scores(scores(truncated), scores(given))


@settings(max_examples=30, deadline=None)
@given(shape=shapes, data=st.data())
def test_error_is_the_lost_energy(shape: tuple[int, int, int, int], data: st.DataObject) -> None:
    """Of the expected squared error of the complex scores, with independent uniform phases."""
    given = heads(*shape)
    tokens = moments(given, shape[3])
    rank = 2 * data.draw(st.integers(1, len(given.key) * given.size // 2))
    factors = shared_keys(given, rank, tokens)
    x, y = (np.zeros((D + 1, D + 1)) for _ in range(2))
    mean = np.append(tokens.query_mean, 1.0)
    x[:D, :D], y[:D, :D] = tokens.query_covariance, tokens.key_covariance
    x, y = x + np.outer(mean, mean), y + np.outer(mean, mean)
    weight = tokens.head_weight
    assert weight is not None
    lost = total = 0.0
    for head, group in enumerate(given.groups):
        for plane in range(given.size // 2):
            own = given.query[head, :, plane, None] * given.key[group, :, plane].conj()
            left = own.copy()
            for place in np.flatnonzero(factors.planes[0] == plane):
                left -= factors.query[head, :, place, None] * factors.key[0, :, place].conj()
            energies = [np.trace(x @ t @ y @ t.conj().T).real for t in (left, own)]
            lost += weight[head] ** 2 * energies[0]
            total += weight[head] ** 2 * energies[1]
    assert factors.relative_error == pytest.approx(np.sqrt(max(lost / total, 0)), abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(shape=shapes)
def test_error_decreases_with_size(shape: tuple[int, int, int, int]) -> None:
    given = heads(*shape)
    errors = [
        shared_keys(given, rank).relative_error
        for rank in range(2, len(given.key) * given.size + 1, 2)
    ]
    assert errors == sorted(errors, reverse=True)
    errors = [truncated_planes(given, n).relative_error for n in range(2, given.size + 1, 2)]
    assert errors == sorted(errors, reverse=True)


def test_shared_keys_lose_no_more_than_truncated_planes() -> None:
    """A sum of planes of single groups is one of the shared forms."""
    given = heads(2, 4, 4, 0)
    for size in (2, 4, 6):
        shared, cut = shared_keys(given, 4 * size), truncated_planes(given, size)
        assert shared.rank == cut.rank
        assert shared.relative_error <= cut.relative_error


def test_equal_keys_need_one_component_per_plane() -> None:
    given = heads(1, 3, 4, 0)
    equal = RotaryHeads(given.query, given.key[[0, 0, 0]], given.groups, True)
    factors = shared_keys(equal, equal.size)
    assert sorted(factors.planes[0]) == [0, 1, 2, 3]
    assert_equal_scores(scores(factors), scores(equal))


@pytest.mark.parametrize("size", [0, 3, 10])
def test_size_out_of_range_raises(size: int) -> None:
    given = heads(2, 1, 4, 0)
    for reduce in (shared_keys, truncated_planes):
        with raises(InvalidArgument, "factorize.rotary_size"):
            reduce(given, size)
