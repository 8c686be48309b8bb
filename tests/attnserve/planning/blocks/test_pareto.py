"""Pareto front of loss and time."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnserve.planning.blocks.pareto import pareto_front


def test_pareto_front_choices_take_one_configuration_per_part():
    front = pareto_front([[(0.0, 3.0), (0.1, 1.0)], [(0.0, 2.0), (0.3, 1.0)]])
    assert [(choice.picks, choice.loss, choice.ms) for choice in front] == [
        ((0, 0), 0.0, 5.0),
        ((1, 0), 0.1, 3.0),
        ((1, 1), 0.4, 2.0),
    ]


def test_pareto_front_skips_dominated_configurations():
    """Seven heads that run slower than eight: a greedy step would stop there."""
    front = pareto_front([[(0.0, 4.0), (0.1, 4.5), (0.2, 2.0)]])
    assert [choice.picks for choice in front] == [(0,), (2,)]


def test_pareto_front_without_parts_is_one_empty_choice():
    (only,) = pareto_front([])
    assert only.picks == () and only.loss == only.ms == 0.0


def test_pareto_front_part_without_configurations_is_an_error():
    with pytest.raises(ValueError, match="a part without configurations"):
        pareto_front([[(0.0, 1.0)], []])


numbers = st.integers(0, 20).map(float)
parts = st.lists(st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4), max_size=4)


@given(parts)
def test_pareto_front_equals_exhaustive_search(pairs: list[list[tuple[float, float]]]):
    everything = [
        (sum(loss for loss, _ in chosen), sum(ms for _, ms in chosen)) for chosen in product(*pairs)
    ]
    best = {
        (loss, ms)
        for loss, ms in everything
        if not any((a <= loss and b < ms) or (a < loss and b <= ms) for a, b in everything)
    }
    front = pareto_front(pairs)
    assert {(choice.loss, choice.ms) for choice in front} == best
    assert all(a.loss < b.loss and a.ms > b.ms for a, b in pairwise(front))
    for choice in front:  # the picks are what the sums are of
        chosen = [configs[pick] for configs, pick in zip(pairs, choice.picks, strict=True)]
        assert choice.loss == sum(loss for loss, _ in chosen)
        assert choice.ms == sum(ms for _, ms in chosen)


def test_pareto_front_thinned_keeps_the_fastest_of_each_cell():
    """Cells are even in the logarithm of the loss, from the least to the largest."""
    logs = (0.7, 1.9, 2.5, 2.8, 3.1, 3.7)
    configs = [(10**log, 6.0 - i) for i, log in enumerate(logs)]
    assert [choice.picks for choice in pareto_front([configs], most=4)] == [(0,), (2,), (4,), (5,)]


def test_pareto_front_that_is_no_longer_than_its_limit_is_whole():
    configs = [(10.0**i, 6.0 - i) for i in (0, 0.1, 0.2, 3)]
    assert len(pareto_front([configs], most=4)) == 4 > len(pareto_front([configs], most=3))


def test_pareto_front_thinned_keeps_the_least_loss():
    """Also where a faster choice is in the same cell."""
    configs = [(10.0**i, 6.0 - i) for i in (0, 0.1, 2, 3)]
    assert pareto_front([configs], most=3)[0].picks == (0,)


def test_pareto_front_thinned_keeps_both_ends():
    many = [[(i**1.7 / 977, 50.0 - i) for i in range(40)] for _ in range(4)]
    whole, thin = pareto_front(many), pareto_front(many, most=60)
    assert len(thin) <= 60 < len(whole)
    assert thin[0] == whole[0]
    assert thin[-1].ms == whole[-1].ms
    for choice in thin:  # within five percent of the best time at no more loss
        best = min(each.ms for each in whole if each.loss <= choice.loss + 1e-12)
        assert choice.ms <= 1.05 * best
