"""The wiring of Reuse Transformers (algorithm 1)."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install 'attnserve[torch]'")

from attnserve.nn import FixedHeadAttention, TrainedAttention, reuse_transformer  # noqa: E402
from graph_passes.errors import InvalidArgument  # noqa: E402
from tests.errors import raises  # noqa: E402


def trained(count: int) -> list[TrainedAttention]:
    return [FixedHeadAttention(16, 4, 4, batch_first=True).trained() for _ in range(count)]


@pytest.mark.parametrize(
    ("configuration", "reused"),
    [
        ("partial:2", [0, 2, 2, 2, 0]),
        ("partial:1:2", [0, 1, 1, 0, 0]),
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
    assert other[1].source is other[0].latest


def test_head_masks_apply_to_own_heads():
    first, second, _ = reuse_transformer(trained(3), "partial:2")
    x = torch.randn(2, 5, 16)
    mask = torch.rand(8, 5, 5) < 0.3
    first(x, x, x)
    apart = second(x, x, x, attn_mask=mask, average_attn_weights=False)[1].unflatten(1, (2, 2))
    assert (apart[:, 0][mask.view(2, 4, 5, 5)[:, :2]] == 0).all()


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
