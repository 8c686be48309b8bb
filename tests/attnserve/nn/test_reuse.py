"""The wiring of Reuse Transformers (algorithm 1)."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnserve.nn import FixedHeadAttention, TrainedAttention, reuse_transformer
from graph_passes.errors import InvalidArgument
from tests.errors import raises


def trained(count: int) -> list[TrainedAttention]:
    return [FixedHeadAttention(16, 4, 4, batch_first=True).trained() for _ in range(count)]


@pytest.mark.parametrize(
    ("configuration", "reused"),
    [
        ("partial:2", [0, 2, 2, 2, 0]),
        ("partial:1:2", [0, 1, 1, 0, 0]),
        ("partial:3", [0, 3, 3, 3, 0]),
        ("partial:4", [0, 4, 4, 4, 0]),
        ("full:2", [0, 4, 4, 0, 0]),
        ("alternate", [0, 4, 0, 4, 0]),
        ("all-end:2", [0, 0, 4, 4, 0]),
        ("all-end", [0, 0, 4, 4, 0]),
        ("skip:2", [0, None, None, 0, 0]),
    ],
)
def test_configuration_equals_algorithm_1(configuration: str, reused: list[int | None]):
    """Against probabilities that are computed and passed on as the algorithm is written."""
    weights = trained(5)
    made = reuse_transformer(weights, configuration)
    H, scores, x = 4, None, torch.randn(2, 6, 16)
    mask = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
    for layer, weight, count in zip(made, weights, reused, strict=True):
        out, probabilities = layer(x, x, x, key_padding_mask=mask, average_attn_weights=False)
        if count is None:
            assert (out == 0).all()
            continue
        whole = FixedHeadAttention.from_trained(weight)
        expected = whole(x, x, x, key_padding_mask=mask, average_attn_weights=False)[1]
        if count:
            assert scores is not None
            expected = torch.cat([expected[:, : H - count], scores[:, :count]], 1)
        torch.testing.assert_close(probabilities, expected)
        context = expected @ whole.v_proj(x).unflatten(-1, (H, 4)).transpose(1, 2)
        torch.testing.assert_close(out, whole.out_proj(context.transpose(1, 2).flatten(2)))
        scores = expected
        x = x + out


@pytest.mark.parametrize("reused", [1, 4])
def test_reused_heads_have_no_query_and_key_parameters(reused: int):
    layers = reuse_transformer(trained(3), f"partial:{reused}")
    exact, reusing = (sum(p.numel() for p in layer.parameters()) for layer in layers[:2])
    assert exact - reusing == reused * 2 * (16 * 4 + 4)


def test_copy_reuses_its_own_source():
    model = torch.nn.ModuleList(reuse_transformer(trained(3), "partial:4"))
    other = copy.deepcopy(model)
    x, z = torch.randn(1, 5, 16), torch.randn(1, 5, 16)

    def run(layers: Any, tokens: Any) -> Any:
        for layer in layers:
            tokens = layer(tokens, tokens, tokens)[0]
        return tokens

    run(model, z)
    torch.testing.assert_close(run(other, x), run(model, x))
    assert other[1].source is other[0].passed_on


def test_head_masks_apply_to_own_heads():
    first, second, _ = reuse_transformer(trained(3), "partial:2")
    x = torch.randn(2, 5, 16)
    mask = torch.rand(8, 5, 5) < 0.3
    first(x, x, x)
    found = second(x, x, x, attn_mask=mask, average_attn_weights=False)[1].unflatten(1, (2, 2))
    assert (found[:, 0][mask.view(2, 4, 5, 5)[:, :2]] == 0).all()


def saved_bytes(layers: Any, batch: int, tokens: int) -> int:
    """Bytes of the distinct storages that the layers keep for the backward pass."""
    kept: dict[int, int] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(batch, tokens, 16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in layers:
            x = x + layer(x, x, x, need_weights=False)[0]
    assert x.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("reused", [1, 2, 3])
def test_partial_reuse_saves_no_more_than_exact_attention(reused: int, dropout: float, batch: int):
    weights = trained(4)
    exact = [FixedHeadAttention.from_trained(weight) for weight in weights]
    partial = reuse_transformer(weights, f"partial:{reused}")
    for layer in (*exact, *partial):
        layer.dropout = dropout
    saved = saved_bytes(exact, batch, 512) - saved_bytes(partial, batch, 512)
    # The reused heads of two layers, unless a batch copies the probabilities of some heads.
    heads = 2 * reused if batch == 1 and not dropout else 0
    assert saved >= heads * 512 * 512 * 4


class Stack(torch.nn.Module):
    """Layers with residual connections, with gradient checkpointing or without."""

    def __init__(self, configuration: str) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(reuse_transformer(trained(4), configuration))

    def forward(self, x: Any, **checkpointing: Any) -> Any:
        for layer in self.layers:

            def block(tokens: Any, layer: Any = layer) -> Any:
                return tokens + layer(tokens, tokens, tokens)[0]

            x = checkpoint(block, x, **checkpointing) if checkpointing else block(x)
        return x

    def gradients(self, *batches: Any, **checkpointing: Any) -> list[Any]:
        self.zero_grad()
        torch.stack([self(x, **checkpointing) for x in batches]).prod(0).sum().backward()
        return [weight.grad for weight in self.parameters()]


@pytest.mark.parametrize("configuration", ["partial:2", "partial:3", "full:2"])
def test_checkpointed_gradients_are_right_or_an_error(configuration: str):
    """The backward pass calls the layers again, when other calls may have followed."""
    model = Stack(configuration)
    x, z = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 5, 16, requires_grad=True)
    exact = model.gradients(x)
    for ours, theirs in zip(model.gradients(x, use_reentrant=False), exact, strict=True):
        torch.testing.assert_close(ours, theirs)
    with raises(InvalidArgument, "nn.checkpointing", "one call"):
        model.gradients(x, z, use_reentrant=False)
    with raises(InvalidArgument, "nn.checkpointing"):
        model.gradients(x, use_reentrant=True)
    for ours, theirs in zip(model.gradients(x), exact, strict=True):  # as if nothing had been
        torch.testing.assert_close(ours, theirs)


def test_inference_keeps_no_probabilities():
    model = Stack("full:2")
    kept: list[weakref.ref[Any]] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, __, out: kept.append(weakref.ref(out[1])))
    with torch.no_grad():
        model(torch.randn(2, 5, 16))
    assert len(kept) == 4 and all(reference() is None for reference in kept)


def test_reuse_before_its_source_is_refused():
    _, second, _ = reuse_transformer(trained(3), "full:1")
    x = torch.randn(2, 5, 16)
    with raises(InvalidArgument, "nn.no_probabilities", "order"):
        second(x, x, x)


@pytest.mark.parametrize(
    ("configuration", "code"),
    [
        ("partial:5", "nn.reused_heads"),
        ("full:3", "reuse.layers"),
        ("auto", "nn.reuse"),
        ("skip", "nn.reuse"),
        ("skip:x", "nn.reuse"),
        ("some", "nn.reuse"),
    ],
)
def test_invalid_configuration_is_refused(configuration: str, code: str):
    with raises(InvalidArgument, code):
        reuse_transformer(trained(3), configuration)
