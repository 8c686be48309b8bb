"""Order of head elimination with refit of the other heads, compared with least squares."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.calibration.elimination import RIDGE, eliminate, elimination_order
from attnserve.runtime.interface import Batch
from graph_passes.matching.find import find_attention
from tests.graph_passes.graphs import D, H, K, V, layers, observing, weights

EXACT = 1e-8
"""Rounding error of the closed form relative to the variance."""


def covariance_of(context: np.ndarray) -> np.ndarray:
    return np.atleast_2d(np.cov(context, rowvar=False, bias=True))


def random_layer(seed: int, heads: int = 4, size: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Return the covariance of correlated contexts of different sizes, and an output projection."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((200, heads * size)) @ random.standard_normal(2 * [heads * size])
    scales = np.repeat(10.0 ** random.uniform(-2, 1, heads), size)
    return covariance_of(mixed * scales), random.standard_normal((heads * size, 7))


def loss_without(
    removed: Collection[int], covariance: np.ndarray, weight: np.ndarray, heads: int
) -> float:
    """Return min over X of tr (X - W)^T (C + ridge) (X - W), X zero in the rows of these heads."""
    size = len(covariance) // heads
    unit = np.trace(covariance) / len(covariance)
    root = np.linalg.cholesky(covariance + RIDGE * unit * np.eye(len(covariance))).T
    stays = np.repeat([head not in removed for head in range(heads)], size)
    target = root @ weight
    solution = np.linalg.lstsq(root[:, stays], target, rcond=None)[0]
    left = np.sum((root[:, stays] @ solution - target) ** 2)
    return float(left / np.sum(weight * (covariance @ weight)))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), heads=st.integers(1, 5), size=st.integers(1, 4))
def test_eliminate_removes_the_head_of_least_loss(seed: int, heads: int, size: int):
    covariance, weight = random_layer(seed, heads, size)
    result = eliminate(covariance, weight, heads)
    removed: list[int] = []
    assert result.losses[0] == 0
    for n, head in enumerate(result.order.tolist(), start=1):
        losses = {
            other: loss_without({*removed, other}, covariance, weight, heads)
            for other in range(heads)
            if other not in removed
        }
        removed.append(head)
        assert losses[head] <= min(losses.values()) + EXACT
        assert result.losses[n] == pytest.approx(losses[head], abs=EXACT, rel=EXACT)
    assert sorted(removed) == list(range(heads))


@given(seed=st.integers(0, 10**6))
def test_eliminate_losses_grow_to_the_variance(seed: int):
    covariance, weight = random_layer(seed)
    losses = eliminate(covariance, weight, 4).losses
    assert np.all(np.diff(losses) >= 0)
    unit = np.trace(covariance) / len(covariance)
    ridge = RIDGE * unit * np.sum(weight**2) / np.sum(weight * (covariance @ weight))
    assert losses[-1] == pytest.approx(1 + ridge, rel=1e-6)


@pytest.mark.parametrize(
    ("heads", "weights"), [((0, 1), [1]), ((0, 2), [1]), ((0, 3), [1]), ((0, 1, 3), [1, -2])]
)
def test_eliminate_dependent_heads_lose_nothing(heads: tuple[int, ...], weights: list[int]):
    """For any output projections: the refit of the other heads replaces it."""
    random = np.random.default_rng(0)
    context = random.standard_normal((500, 4, 3))
    context[:, heads[-1]] = np.tensordot(context[:, heads[:-1]], weights, (1, 0))
    covariance = covariance_of(context.reshape(500, -1))
    result = eliminate(covariance, random.standard_normal((12, 7)), 4)
    assert result.order[0] in heads
    assert result.losses[1] < 5 * RIDGE < 0.1 * result.losses[2]


def test_eliminate_head_without_output_is_first():
    covariance, weight = random_layer(2)
    weight[6:9] = 0
    silent = eliminate(covariance, weight, 4)
    assert silent.order[0] == 2 and silent.losses[1] == pytest.approx(0, abs=EXACT)
    covariance, weight = random_layer(2)
    covariance[6:9] = covariance[:, 6:9] = 0
    constant = eliminate(covariance, weight, 4)
    assert constant.order[0] == 2
    unit = np.trace(covariance) / len(covariance)
    assert constant.losses[1] == pytest.approx(
        RIDGE * unit * np.sum(weight[6:9] ** 2) / np.sum(weight * (covariance @ weight)), rel=1e-6
    )


def test_eliminate_reproducible_head_is_first():
    """A large head that others reproduce goes before a small independent one."""
    random = np.random.default_rng(3)
    context = random.standard_normal((2000, 3, 2))
    context[:, 0] *= 5
    context[:, 1] = context[:, 0] + 0.01 * context[:, 1]
    result = eliminate(covariance_of(context.reshape(2000, -1)), np.ones((6, 1)), 3)
    assert result.order[0] in (0, 1) and result.order[1] == 2


@pytest.mark.parametrize("covariance", [np.zeros((4, 4)), np.ones((4, 4))], ids=["none", "alike"])
def test_eliminate_degenerate_covariance_is_finite(covariance: np.ndarray):
    result = eliminate(covariance, np.ones((4, 2)), 2)
    assert sorted(result.order.tolist()) == [0, 1] and np.isfinite(result.losses).all()


# Models and data


@pytest.fixture
def model() -> ir.Model:
    return layers(2)


def batches() -> list[Batch]:
    random = np.random.default_rng(0)
    return [
        {
            "x": random.standard_normal((4, length, D)).astype(np.float32),
            "mask": np.zeros((4, 1, 1, length), np.float32),
        }
        for length in (5, 9)
    ]


def test_elimination_order_uses_the_contexts_of_the_model(model: ir.Model):
    blocks = find_attention(model).blocks
    result = elimination_order(model, blocks, batches())
    assert list(result) == ["attention_0", "attention_1"]
    for layer, block in enumerate(blocks):
        assert block.output is not None
        session = observing(model, [block.output.input])
        read = [np.asarray(session.run(None, batch)[-1]) for batch in batches()]
        context = np.concatenate([c.reshape(-1, H * V) for c in read]).astype(np.float64)
        weight = weights(layer)["Wo"].astype(np.float64)
        expected = eliminate(covariance_of(context), weight, H)
        assert result[block.name].order.tolist() == expected.order.tolist()
        np.testing.assert_allclose(result[block.name].losses, expected.losses, rtol=1e-5, atol=1e-6)


def test_elimination_order_copied_head_loses_nothing(model: ir.Model):
    """Heads 0 and 2 of the second layer have equal weights: one is removed without loss."""
    arrays = weights(1)
    for name, size in (("Wq", K), ("Wk", K), ("Wv", V), ("bq", K), ("bk", K), ("bv", V)):
        array = arrays[name].copy()
        array[..., 2 * size :] = array[..., :size]
        value = model.graph.initializers[f"{name}_1"]
        value.const_value = ir.tensor(array, name=value.name)
    result = elimination_order(model, find_attention(model).blocks, batches())["attention_1"]
    assert result.order[0] in (0, 2) and result.losses[1] < 2 * RIDGE
