"""The reference equals equation 5 of the paper and ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graph_passes.blocks import AttentionBlock, Causal, Mask, PositionBias
from graph_passes.passes.collaborate import Collaborate, Mixing
from graph_passes.reference import attention_reference, inputs_of, softmax
from tests.graph_passes.graphs import (
    SCALE,
    D,
    H,
    K,
    V,
    attention,
    feeds,
    observing,
    only,
    run,
    weights,
)

S = 7


def by_hand(x: np.ndarray, bias: np.ndarray | float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities and output of ``PARTS``, head after head, from the weights' names."""
    w = {name: array.astype(np.float64) for name, array in weights().items()}
    probabilities, contexts = [], []
    for h in range(H):
        own, values = slice(h * K, (h + 1) * K), slice(h * V, (h + 1) * V)
        q = x @ w["Wq"][:, own] + w["bq"][own]
        k = x @ w["Wk"][:, own] + w["bk"][own]
        v = x @ w["Wv"][:, values] + w["bv"][values]
        e = np.exp(float(np.float32(SCALE)) * q @ k.transpose(0, 2, 1) + bias)
        probabilities.append(e / e.sum(axis=-1, keepdims=True))
        contexts.append(probabilities[-1] @ v)
    return np.stack(probabilities, 1), np.concatenate(contexts, -1) @ w["Wo"] + w["bo"]


@pytest.fixture(scope="module")
def block() -> AttentionBlock:
    return only(attention())


def tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, S, D))


def test_attention_reference_equals_the_formula(block: AttentionBlock) -> None:
    """Within 1e-12: both are double precision."""
    x, mask = tokens(), np.random.default_rng(1).standard_normal((2, 1, 1, S))
    got = attention_reference(block, dict(zip(inputs_of(block), (x, mask), strict=True)), 2)
    probabilities, output = by_hand(x, mask[:, 0])
    np.testing.assert_allclose(got.probabilities, probabilities, atol=1e-12, rtol=0)
    np.testing.assert_allclose(got.output, output, atol=1e-12, rtol=0)  # type: ignore[arg-type]


def test_attention_reference_equals_onnx_runtime() -> None:
    model = attention()
    block = only(model)
    arrays = feeds(model)
    values = {value: arrays[value.name or ""] for value in inputs_of(block)}
    expected = attention_reference(block, values, 2)
    np.testing.assert_allclose(run(model, arrays), expected.output, atol=1e-5, rtol=0)  # type: ignore[arg-type]
    assert block.probabilities is not None
    got = observing(model, [block.probabilities], optimize=False).run(None, arrays)[0]
    np.testing.assert_allclose(got, expected.probabilities, atol=1e-6, rtol=0)


def test_inputs_of_are_tokens_and_masks(block: AttentionBlock) -> None:
    assert [value.name for value in inputs_of(block)] == ["x", "mask"]


def test_attention_reference_shapes(block: AttentionBlock) -> None:
    values = dict(zip(inputs_of(block), (tokens(), np.zeros((2, 1, 1, S))), strict=True))
    got = attention_reference(block, values, 2)
    assert got.probabilities.shape == (2, H, S, S)
    assert got.context.shape == (2, S, H * V)
    assert got.output is not None and got.output.shape == (2, S, D)
    assert attention_reference(replace(block, output=None), values, 2).output is None


def test_attention_reference_flattened_tokens_use_the_batch(block: AttentionBlock) -> None:
    x, mask = tokens(), np.zeros((2, 1, 1, S))
    whole = attention_reference(block, dict(zip(inputs_of(block), (x, mask), strict=True)), 2)
    flat = dict(zip(inputs_of(block), (x.reshape(2 * S, D), mask), strict=True))
    np.testing.assert_array_equal(attention_reference(block, flat, 2).context, whole.context)


def test_attention_reference_causal_mask_hides_later_keys(block: AttentionBlock) -> None:
    causal = replace(block, steps=(Causal(),))
    got = attention_reference(causal, {block.x: tokens()}, 2)
    assert (got.probabilities[..., ~np.tri(S, dtype=bool)] == 0).all()
    np.testing.assert_allclose(got.probabilities.sum(-1), 1.0, atol=1e-12, rtol=0)


@pytest.mark.parametrize("keep", [True, False])
def test_attention_reference_mask_hides_keys(block: AttentionBlock, keep: bool) -> None:
    (bias,) = block.steps
    assert isinstance(bias, PositionBias)
    masked = replace(block, steps=(Mask(bias.value, -np.inf, keep),))
    seen = np.random.default_rng(0).random((2, 1, S, S)) < 0.5
    seen[..., 0] = True
    values = {block.x: tokens(), bias.value: seen == keep}
    got = attention_reference(masked, values, 2).probabilities
    assert (got[np.broadcast_to(~seen, got.shape)] == 0).all()


def test_attention_reference_mask_with_heads_in_the_batch(block: AttentionBlock) -> None:
    (bias,) = block.steps
    assert isinstance(bias, PositionBias)
    apart = np.random.default_rng(0).standard_normal((2, H, S, S))
    folded = {block.x: tokens(), bias.value: apart.reshape(2 * H, S, S)}
    got = attention_reference(block, folded, 2).probabilities
    expected = attention_reference(block, {**folded, bias.value: apart}, 2).probabilities
    np.testing.assert_array_equal(got, expected)


def test_attention_reference_adds_the_content_term() -> None:
    """Equation 3: the content term equals the query bias."""
    exact = Collaborate({"attention_0": Mixing(rank=H * K)})
    standard, shared = only(attention()), only(exact(attention()).model)
    assert shared.content is not None
    arrays = (tokens(), np.zeros((2, 1, 1, S)))
    got, expected = (
        attention_reference(b, dict(zip(inputs_of(b), arrays, strict=True)), 2)
        for b in (shared, standard)
    )
    np.testing.assert_allclose(got.probabilities, expected.probabilities, atol=1e-5, rtol=0)
    without = replace(shared, content=None)
    other = attention_reference(without, dict(zip(inputs_of(without), arrays, strict=True)), 2)
    assert np.abs(other.probabilities - expected.probabilities).max() > 1e-2


def test_softmax_of_large_and_masked_logits() -> None:
    logits = np.array([[1e4, 1e4, -np.inf], [-np.inf, -np.inf, -np.inf]])
    assert softmax(logits).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
