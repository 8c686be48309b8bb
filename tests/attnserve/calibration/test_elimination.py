"""In which order heads go when the others take over what they can, held against least squares."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnserve.calibration.elimination import RIDGE, eliminate, elimination_order
from attnserve.runtime.session import Batch, open_session
from graph_passes.emit.editing import exposing
from graph_passes.matching.find import find_attention
from tests.graph_passes.graphs import D, H, K, V, layers, weights

EXACT = 1e-8
"""The closed form is the least-squares solution but for rounding, in shares of the variance."""


def covariance_of(context: np.ndarray) -> np.ndarray:
    return np.atleast_2d(np.cov(context, rowvar=False, bias=True))


def random_layer(seed: int, heads: int = 4, size: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """The covariance of correlated contexts of very different sizes, and an output projection."""
    random = np.random.default_rng(seed)
    mixed = random.standard_normal((200, heads * size)) @ random.standard_normal(2 * [heads * size])
    scales = np.repeat(10.0 ** random.uniform(-2, 1, heads), size)
    return covariance_of(mixed * scales), random.standard_normal((heads * size, 7))


def loss_without(
    gone: Collection[int], covariance: np.ndarray, weight: np.ndarray, heads: int
) -> float:
    """min over X of tr (X - W)^T (C + ridge) (X - W), X being zero in the rows of these heads."""
    size = len(covariance) // heads
    unit = np.trace(covariance) / len(covariance)
    root = np.linalg.cholesky(covariance + RIDGE * unit * np.eye(len(covariance))).T
    stays = np.repeat([head not in gone for head in range(heads)], size)
    target = root @ weight
    solution = np.linalg.lstsq(root[:, stays], target, rcond=None)[0]
    left = np.sum((root[:, stays] @ solution - target) ** 2)
    return float(left / np.sum(weight * (covariance @ weight)))


@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), heads=st.integers(1, 5), size=st.integers(1, 4))
def test_each_head_to_go_is_the_one_whose_loss_is_least(seed: int, heads: int, size: int):
    covariance, weight = random_layer(seed, heads, size)
    found = eliminate(covariance, weight, heads)
    gone: list[int] = []
    assert found.losses[0] == 0
    for n, head in enumerate(found.order.tolist(), start=1):
        losses = {
            other: loss_without({*gone, other}, covariance, weight, heads)
            for other in range(heads)
            if other not in gone
        }
        gone.append(head)
        assert losses[head] <= min(losses.values()) + EXACT
        assert found.losses[n] == pytest.approx(losses[head], abs=EXACT, rel=EXACT)
    assert sorted(gone) == list(range(heads))


@given(seed=st.integers(0, 10**6))
def test_losses_only_grow_and_end_at_all_of_the_variance(seed: int):
    covariance, weight = random_layer(seed)
    losses = eliminate(covariance, weight, 4).losses
    assert np.all(np.diff(losses) >= 0)
    unit = np.trace(covariance) / len(covariance)
    ridge = RIDGE * unit * np.sum(weight**2) / np.sum(weight * (covariance @ weight))
    assert losses[-1] == pytest.approx(1 + ridge, rel=1e-6)


@pytest.mark.parametrize("copy", range(1, 4))
def test_of_two_heads_that_write_the_same_one_goes_first_for_nothing(copy: int):
    """Whatever their output projections: the other one writes for both."""
    random = np.random.default_rng(0)
    context = random.standard_normal((500, 4, 3))
    context[:, copy] = context[:, 0]
    covariance = covariance_of(context.reshape(500, -1))
    found = eliminate(covariance, random.standard_normal((12, 7)), 4)
    assert found.order[0] in (0, copy)
    assert found.losses[1] < 2 * RIDGE < 0.02 * found.losses[2]


def test_a_head_that_is_a_sum_of_two_others_is_no_loss():
    random = np.random.default_rng(1)
    context = random.standard_normal((500, 4, 3))
    context[:, 3] = context[:, 0] - 2 * context[:, 1]
    found = eliminate(covariance_of(context.reshape(500, -1)), random.standard_normal((12, 7)), 4)
    assert found.order[0] in (0, 1, 3) and found.losses[1] < 5 * RIDGE < 0.1 * found.losses[2]


def test_a_head_that_writes_nothing_goes_first():
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


def test_what_others_can_write_is_no_reason_to_stay():
    """A loud head that others follow goes before a quiet one that stands alone."""
    random = np.random.default_rng(3)
    context = random.standard_normal((2000, 3, 2))
    context[:, 0] *= 5
    context[:, 1] = context[:, 0] + 0.01 * context[:, 1]
    found = eliminate(covariance_of(context.reshape(2000, -1)), np.ones((6, 1)), 3)
    assert found.order[0] in (0, 1) and found.order[1] == 2


@pytest.mark.parametrize("covariance", [np.zeros((4, 4)), np.ones((4, 4))], ids=["none", "alike"])
def test_degenerate_contexts_have_an_order_too(covariance: np.ndarray):
    found = eliminate(covariance, np.ones((4, 2)), 2)
    assert sorted(found.order.tolist()) == [0, 1] and np.isfinite(found.losses).all()


# Of a model, on data


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


def test_a_model_is_measured_on_its_contexts(model: ir.Model):
    blocks = find_attention(model)[0]
    found = elimination_order(model, blocks, batches())
    assert list(found) == ["attention_0", "attention_1"]
    for layer, block in enumerate(blocks):
        assert block.output is not None
        with exposing(model, [block.output.input]):
            session = open_session(model, threads=1)
        read = [np.asarray(session.run(None, batch)[-1]) for batch in batches()]
        context = np.concatenate([c.reshape(-1, H * V) for c in read]).astype(np.float64)
        weight = weights(layer)["Wo"].astype(np.float64)
        expected = eliminate(covariance_of(context), weight, H)
        assert found[block.name].order.tolist() == expected.order.tolist()
        np.testing.assert_allclose(found[block.name].losses, expected.losses, rtol=1e-5, atol=1e-6)


def test_a_copied_head_is_found(model: ir.Model):
    """Heads 0 and 2 of the second layer get the same weights: one of them goes for nothing."""
    arrays = weights(1)
    for name, size in (("Wq", K), ("Wk", K), ("Wv", V), ("bq", K), ("bk", K), ("bv", V)):
        array = arrays[name].copy()
        array[..., 2 * size :] = array[..., :size]
        value = model.graph.initializers[f"{name}_1"]
        value.const_value = ir.tensor(array, name=value.name)
    found = elimination_order(model, find_attention(model)[0], batches())["attention_1"]
    assert found.order[0] in (0, 2) and found.losses[1] < 2 * RIDGE
