"""The layers of attnserve.nn against torch.nn.MultiheadAttention."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from attnserve.nn import (
    CollaborativeAttention,
    FixedHeadAttention,
    GroupedHeadAttention,
    ReuseAttention,
    SharedKeyAttention,
    TrainedAttention,
    read_trained_attention,
)
from graph_passes.errors import InvalidArgument
from graph_passes.factorize.moments import TokenMoments
from tests.errors import raises

Layers = Callable[..., Any]

EXACT: dict[str, Callable[[TrainedAttention], Any]] = {
    "fixed": FixedHeadAttention.from_trained,
    "widened": lambda trained: FixedHeadAttention.from_trained(trained, head_size=7),
    "grouped": lambda trained: GroupedHeadAttention.from_trained(trained, num_groups=2),
    "collaborative": lambda trained: CollaborativeAttention.from_trained(trained, rank=16),
    "sparse": lambda trained: CollaborativeAttention.from_trained(trained, rank=16, head_size=4),
}
"""Conversions that do not change the function."""

PADDING = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
CAUSAL = torch.ones(5, 7, dtype=torch.bool).triu(1)

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "padding": {"key_padding_mask": PADDING},
    "float padding": {"key_padding_mask": torch.zeros(2, 7).masked_fill(PADDING, -torch.inf)},
    "causal": {"attn_mask": CAUSAL, "is_causal": True},
    "bias": {"attn_mask": torch.linspace(-2, 2, 35).view(5, 7)},
    "causal and padding": {"attn_mask": CAUSAL, "key_padding_mask": PADDING},
    "by head": {
        "attn_mask": torch.stack([CAUSAL.roll(h, 0) for h in range(8)]),
        "average_attn_weights": False,
    },
    "no weights": {"key_padding_mask": PADDING, "need_weights": False},
}


def tokens(*shape: int, **options: Any) -> Any:
    return torch.randn(*shape, **options)


def close(ours: Any, theirs: Any, tolerance: float = 1e-5) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        if other is None:
            assert mine is None
        else:
            torch.testing.assert_close(mine, other, atol=tolerance, rtol=0)


@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("convert", EXACT.values(), ids=EXACT)
def test_exact_layer_cross_attention_equals_pytorch(
    convert: Callable[[TrainedAttention], Any], masks: dict[str, Any], layer_of: Layers
):
    layer = layer_of(kdim=6, vdim=10)
    ours = convert(read_trained_attention(layer)).eval()
    x, y, values = tokens(2, 5, 16), tokens(2, 7, 6), tokens(2, 7, 10)
    close(ours(x, y, values, **masks), layer(x, y, values, **masks))


@pytest.mark.parametrize("convert", EXACT.values(), ids=EXACT)
def test_exact_layer_other_token_layouts_equal_pytorch(
    convert: Callable[[TrainedAttention], Any], layer_of: Layers
):
    layer = layer_of(batch_first=False, bias=False)
    ours = convert(read_trained_attention(layer)).eval()
    x, padding = tokens(7, 2, 16), {"key_padding_mask": PADDING}
    close(ours(x, x, x, **padding), layer(x, x, x, **padding))
    row, padding = x[:, 1], {"key_padding_mask": PADDING[1]}
    close(ours(row, row, row, **padding), layer(row, row, row, **padding))
    by_head = {"attn_mask": torch.stack([CAUSAL.new_ones(7, 7).triu(h + 1) for h in range(4)])}
    close(ours(row, row, row, **by_head), layer(row, row, row, **by_head))


@pytest.mark.parametrize("convert", EXACT.values(), ids=EXACT)
def test_dropout_is_that_of_pytorch_in_training_only(
    convert: Callable[[TrainedAttention], Any], layer_of: Layers
):
    """Its share of the probabilities is zero; the returned probabilities are those before it."""
    ours = convert(read_trained_attention(layer_of(dropout=0.4)))
    x = tokens(2, 6, 16)
    exact = ours.eval()(x, x, x)
    dropped: list[Any] = []
    ours.keep_maps = True
    ours.train()
    torch.manual_seed(1)
    out, probabilities = ours(x, x, x, average_attn_weights=False)
    dropped.append(ours.latest.maps)
    torch.manual_seed(1)
    kept = torch.nn.functional.dropout(probabilities, 0.4)
    values = ours.v_proj(x).unflatten(2, (4, -1)).transpose(1, 2)
    expected = ours.out_proj((kept @ values).transpose(1, 2).flatten(2))
    close((out, probabilities.mean(1)), (expected, exact[1]))
    close((dropped[0].probabilities,), (probabilities,), 0.0)
    assert 0.2 < float((kept == 0).float().mean()) < 0.6


@pytest.mark.parametrize(
    ("masks", "code"),
    [
        ({"key_padding_mask": PADDING.long()}, "nn.mask"),
        ({"attn_mask": CAUSAL.to(torch.uint8)}, "nn.mask"),
        ({"key_padding_mask": PADDING[:1]}, "nn.shape"),
        ({"key_padding_mask": PADDING[:, :5]}, "nn.shape"),
        ({"attn_mask": CAUSAL[:1]}, "nn.shape"),
        ({"attn_mask": CAUSAL.expand(4, 5, 7)}, "nn.shape"),
        ({"attn_mask": CAUSAL.expand(2, 4, 5, 7)}, "nn.shape"),
    ],
)
def test_masks_that_pytorch_refuses_are_an_error(
    masks: dict[str, Any], code: str, layer_of: Layers
):
    layer = layer_of()
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer)).eval()
    x, y = tokens(2, 5, 16), tokens(2, 7, 16)
    with pytest.raises((RuntimeError, AssertionError)):
        layer(x, y, y, **masks)
    with raises(InvalidArgument, code, next(iter(masks))):
        ours(x, y, y, **masks)


def test_tokens_of_other_sizes_are_an_error(layer_of: Layers):
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer_of())).eval()
    x, y = tokens(2, 5, 16), tokens(2, 7, 16)
    for key, value in ((y[:1], y[:1]), (y, y[:, 1:]), (y[..., 1:], y)):
        with raises(InvalidArgument, "nn.shape"):
            ours(x, key, value)
    for shape in ((2, 7, 12), (7,), (1, 2, 7, 16)):
        with raises(InvalidArgument, "nn.shape"):
            ours(tokens(*shape), y, y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", EXACT)
def test_half_precision_stays_within_two_percent_of_float32(
    name: str, dtype: Any, layer_of: Layers
):
    layer = layer_of()
    ours = EXACT[name](read_trained_attention(layer)).eval()
    x = tokens(2, 6, 16)
    exact = layer(x, x, x, key_padding_mask=PADDING[:, 1:])[0]
    x = x.to(dtype)
    low = ours.to(dtype)(x, x, x, key_padding_mask=PADDING[:, 1:])[0]
    assert low.dtype == dtype
    assert (low.float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_causal_flag_alone_masks_later_keys(layer_of: Layers):
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer_of())).eval()
    x = tokens(2, 5, 16)
    flagged, masked = ours(x, x, x, is_causal=True), ours(x, x, x, attn_mask=CAUSAL[:, :5])
    close(flagged, masked, 0.0)


def test_query_without_keys_is_finite(layer_of: Layers):
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer_of())).eval()
    x, nothing = tokens(2, 5, 16), torch.ones(2, 5, dtype=torch.bool)
    assert ours(x, x, x, key_padding_mask=nothing)[0].isfinite().all()
    both = ours(x, x, x, key_padding_mask=nothing, attn_mask=torch.zeros(5, 5))
    assert both[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("value", [-torch.inf, torch.finfo(torch.float32).min, -1e4])
def test_query_without_keys_is_finite_for_added_masks(value: float, dtype: Any, layer_of: Layers):
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer_of())).eval().to(dtype)
    x = 30 * tokens(2, 5, 16).to(dtype)
    left = torch.zeros(2, 5).masked_fill(torch.arange(5) < 2, value)  # no key for the first rows
    later = torch.zeros(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), value)
    out, weights = ours(x, x, x, key_padding_mask=left, attn_mask=later)
    assert out.isfinite().all()
    if value < -1e4:
        assert (weights[:, 2:, :2] == 0).all()


def test_layer_works_in_a_transformer_encoder(layer_of: Layers):
    theirs = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    ours = copy.deepcopy(theirs)
    ours.self_attn = FixedHeadAttention.from_trained(read_trained_attention(theirs.self_attn))
    x = tokens(2, 7, 16)
    both = [
        torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()(
            x, src_key_padding_mask=PADDING
        )
        for layer in (ours, theirs)
    ]
    torch.testing.assert_close(both[0][:, :4], both[1][:, :4], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("places", [(0, 1), (0,)])
def test_layer_replaced_in_an_encoder_reads_padding(places: tuple[int, ...]):
    """The encoder decides on nested tensors when it is made, before its layers are replaced."""
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x = tokens(2, 7, 16)
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=PADDING)
        for place in places:
            old = encoder.layers[place].self_attn
            encoder.layers[place].self_attn = FixedHeadAttention.from_trained(
                read_trained_attention(old)
            )
        found = encoder.eval()(x, src_key_padding_mask=PADDING)
    torch.testing.assert_close(found[~PADDING], expected[~PADDING], atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_with_the_option_to_set():
    torch.backends.mha.set_fastpath_enabled(True)  # exports in the same process disable it
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    old = encoder.layers[1].self_attn
    encoder.layers[1].self_attn = FixedHeadAttention.from_trained(read_trained_attention(old))
    with torch.no_grad(), raises(InvalidArgument, "nn.nested", "use_nested_tensor"):
        encoder(tokens(2, 7, 16), src_key_padding_mask=PADDING)
    encoder.use_nested_tensor = False
    with torch.no_grad():
        assert encoder(tokens(2, 7, 16), src_key_padding_mask=PADDING).isfinite().all()


def test_modules_instead_of_weights_are_refused(layer_of: Layers):
    layer = layer_of()
    for make in (
        FixedHeadAttention.from_trained,
        partial(CollaborativeAttention.from_trained, rank=8),
    ):
        with raises(InvalidArgument, "nn.not_trained", "read_trained_attention"):
            make(layer)
    with raises(InvalidArgument, "nn.not_multihead", "trained"):
        read_trained_attention(FixedHeadAttention(16, 4, 4))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("head_size", [None, 3])
def test_weights_load_into_a_layer_of_other_weights(head_size: int | None, layer_of: Layers):
    """R, the support and the content vectors follow the weights, also of a new layer."""
    ours = CollaborativeAttention.from_trained(
        read_trained_attention(layer_of()), rank=10, head_size=head_size
    ).eval()
    other = read_trained_attention(
        torch.nn.MultiheadAttention(16, 4, batch_first=True)
    )  # biases are 0
    for rank in (10, 7):
        new = CollaborativeAttention.from_trained(other, rank=rank, head_size=head_size).eval()
        optimizer = torch.optim.AdamW(new.parameters(), lr=1e-3)
        new.load_state_dict(ours.state_dict())
        x = tokens(2, 6, 16)
        close(new(x, x, x), ours(x, x, x), 0.0)
        new(x, x, x)[0].sum().backward()
        optimizer.step()
    x = tokens(2, 6, 16)
    expected = ours(x, x, x)
    ours.load_state_dict({"mixing": ours.mixing.detach().clone()}, strict=False)
    with pytest.raises(RuntimeError, match="Missing"):
        ours.load_state_dict({"mixing": ours.mixing.detach().clone()})
    close(ours(x, x, x), expected, 0.0)
    with pytest.raises(RuntimeError, match="size mismatch"):
        CollaborativeAttention(16, 2, 10).load_state_dict(ours.state_dict(), strict=False)


def test_unknown_mixing_is_refused():
    with raises(InvalidArgument, "nn.mixing", "learned"):
        CollaborativeAttention(16, 4, 8, mixing="learned")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("rank", [16, 8])
def test_concatenation_mixing_equals_standard_attention(rank: int):
    """Equation 8: blocks of ones, with heads of R/H."""
    ours = CollaborativeAttention(16, 4, rank, batch_first=True)
    standard = FixedHeadAttention(16, 4, rank // 4, value_head_size=4, batch_first=True)
    with torch.no_grad():
        torch.nn.init.normal_(standard.q_proj.bias)
        for mine, other in (
            (ours.q_proj, standard.q_proj), (ours.k_proj, standard.k_proj),
            (ours.v_proj, standard.v_proj), (ours.out_proj, standard.out_proj),
        ):  # fmt: skip
            mine.weight.copy_(other.weight)
        trained = standard.trained()  # v_h = W_K^h b_Q^h, equation 12
        ours.content.weight.copy_((trained.key @ trained.query_bias[:, :, None]).squeeze(2))
    x, y = tokens(2, 5, 16), tokens(2, 7, 16)
    close(ours(x, y, y), standard(x, y, y))
    assert ours.scale == standard.scale


def test_lower_rank_keeps_scale_and_approximates(layer_of: Layers):
    layer = layer_of()
    x = tokens(2, 6, 16)
    exact = layer(x, x, x)[0].detach()
    errors = []
    for rank in (4, 8, 12):
        ours = CollaborativeAttention.from_trained(read_trained_attention(layer), rank=rank).eval()
        assert ours.scale == 0.5
        errors.append(float((ours(x, x, x)[0].detach() - exact).norm()))
    assert errors == sorted(errors, reverse=True)


def test_sparse_mixing_stays_on_its_support_in_training(layer_of: Layers):
    ours = CollaborativeAttention.from_trained(
        read_trained_attention(layer_of()), rank=10, head_size=3
    )
    support = ours.mixing.detach() != 0
    assert int(support.sum()) == 12
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.1)
    before = ours.mixing.detach().clone()
    x = tokens(2, 6, 16)
    for _ in range(3):
        optimizer.zero_grad()
        ours(x, x, x)[0].square().mean().backward()
        optimizer.step()
    assert ((ours.mixing.detach() != 0) == support).all()
    assert (ours.mixing.detach()[support] != before[support]).all()


def test_widened_heads_receive_gradients(layer_of: Layers):
    ours = FixedHeadAttention.from_trained(read_trained_attention(layer_of()), head_size=6)
    x = tokens(2, 6, 16)
    ours(x, x, x)[0].square().mean().backward()
    new = ours.q_proj.weight.grad.unflatten(0, (4, 6))[:, 4:]
    assert (new != 0).all()
    assert (ours.q_proj.weight.unflatten(0, (4, 6))[:, 4:] == 0).all()


@pytest.mark.parametrize("size", [4, 16, 64])
def test_first_logits_have_the_same_spread_for_all_head_sizes(size: int):
    """That of torch.nn.MultiheadAttention: a standard deviation of 1/2 for normal tokens."""
    D, H = 128, 8
    layers: list[Any] = [FixedHeadAttention(D, H, size, batch_first=True)]
    for mixing in ("concatenation", "random"):
        layers.append(CollaborativeAttention(D, H, H * size, mixing=mixing, batch_first=True))
    tokens = torch.randn(64, 32, D)
    for layer in layers:
        assert layer.logits(tokens, tokens).std().item() == pytest.approx(0.5, abs=0.1)


def test_collaborative_from_scratch_learns():
    """Random mixing learns the output of a fixed random layer."""
    teacher = FixedHeadAttention(16, 4, 4, batch_first=True)
    ours = CollaborativeAttention(16, 4, 8, mixing="random", batch_first=True)
    optimizer = torch.optim.Adam(ours.parameters(), lr=1e-2)
    x = tokens(8, 6, 16)
    target = teacher(x, x, x)[0].detach()
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (ours(x, x, x)[0] - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]


def tiny(name: str) -> Any:
    others = {"kdim": 4, "vdim": 5, "batch_first": True}
    match name:
        case "fixed":
            return FixedHeadAttention(3, 2, 2, **others)
        case "grouped":
            return GroupedHeadAttention(3, 2, 2, num_groups=2, **others)
        case "collaborative":
            return CollaborativeAttention(3, 2, 3, mixing="random", value_head_size=2, **others)
        case "sparse":
            support = torch.tensor([[True, True, False], [False, True, False]])
            return CollaborativeAttention(3, 2, 3, support=support, value_head_size=2, **others)
        case _:
            source = FixedHeadAttention(3, 2, 2, **others)
            both = torch.nn.ModuleList(
                [source, ReuseAttention(3, 2, 2, reused_heads=1, source=source, **others)]
            )
            both.forward = lambda x, y, v, **kw: both[1](both[0](x, y, v, **kw)[0], y, v, **kw)
            return both


@pytest.mark.parametrize("name", ["fixed", "grouped", "collaborative", "sparse", "reuse"])
def test_gradients_of_inputs_and_parameters_are_correct(name: str):
    layer = tiny(name).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    x, y, values = (tokens(2, n, w, dtype=torch.float64) for n, w in ((2, 3), (3, 4), (3, 5)))
    mask = torch.tensor([[False, False, True], [False, False, False]])
    parameters = list(layer.parameters())

    def run(*inputs: Any) -> Any:
        return layer(*inputs[:3], key_padding_mask=mask)

    inputs = [x.requires_grad_(), y.requires_grad_(), values.requires_grad_(), *parameters]
    assert torch.autograd.gradcheck(run, inputs)


def test_copies_and_pickles_work_after_a_call(layer_of: Layers):
    ours = GroupedHeadAttention.from_trained(read_trained_attention(layer_of()), num_groups=2)
    x = tokens(2, 5, 16)
    expected = ours(x, x, x)
    close(copy.deepcopy(ours)(x, x, x), expected, 0.0)
    close(pickle.loads(pickle.dumps(ours))(x, x, x), expected, 0.0)


def test_invalid_sizes_are_refused(layer_of: Layers):
    trained = read_trained_attention(layer_of())
    with raises(InvalidArgument, "nn.head_size", "3", "4"):
        FixedHeadAttention.from_trained(trained, head_size=3)
    with raises(InvalidArgument, "nn.value_head_size", "10"):
        CollaborativeAttention(10, 4, 8)
    with raises(InvalidArgument, "nn.size", "rank"):
        CollaborativeAttention(16, 4, 0)
    with raises(InvalidArgument, "factorize.rank", "17"):
        CollaborativeAttention.from_trained(trained, rank=17)
    with raises(InvalidArgument, "nn.support", "4, 8"):
        CollaborativeAttention(16, 4, 8, support=torch.zeros(4, 8, dtype=torch.bool))
    with raises(InvalidArgument, "nn.appended_keys"):
        read_trained_attention(layer_of(add_zero_attn=True))


def test_shared_keys_lose_less_the_more_dimensions_they_have():
    torch.manual_seed(1)
    projections = [torch.nn.Linear(16, 16) for _ in range(4)]
    layer = TrainedAttention.of_linears(*projections, num_heads=4, scale=0.5, rotary=True)
    exact = FixedHeadAttention.from_trained(layer)
    x, angles = tokens(2, 5, 16), torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1, 1.0, 0.1])
    rotation = angles.cos()[None], angles.sin()[None]
    errors = []
    for rank in (4, 8, 12, 16):
        shared = CollaborativeAttention.from_trained(layer, rank=rank)
        assert isinstance(shared, SharedKeyAttention) and shared.k_proj.out_features == rank
        error = shared.logits(x, x, rotation) - exact.logits(x, x, rotation)
        errors.append(float(error.detach().norm()))
    assert errors[0] > errors[1] > errors[2] > 1e-2 and errors[3] < 1e-4


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
def test_moments_of_the_tokens_lower_the_error_on_them(rotary: bool):
    """Tokens of 4 of 16 directions need fewer dimensions than those of all."""
    torch.manual_seed(2)
    projections = [torch.nn.Linear(16, 16) for _ in range(4)]
    layer = TrainedAttention.of_linears(*projections, num_heads=4, scale=0.5, rotary=rotary)
    x = tokens(40, 5, 4) @ torch.randn(4, 16)
    rows = x.flatten(0, 1).double().numpy()
    gram = rows.T @ rows / len(rows)
    moments = TokenMoments(rows.mean(0), np.cov(rows.T), gram)
    exact = FixedHeadAttention.from_trained(layer)
    errors = []
    for known in (None, moments):
        ours = CollaborativeAttention.from_trained(layer, rank=8, moments=known)
        error = (
            ours(x, x, x, average_attn_weights=False)[1]
            - exact(x, x, x, average_attn_weights=False)[1]
        )
        errors.append(float(error.detach().norm()))
    assert errors[1] < 0.7 * errors[0]


def test_layers_know_that_they_came_from_rotary_positions():
    projections = [torch.nn.Linear(16, 16, bias=False) for _ in range(4)]
    layer = TrainedAttention.of_linears(*projections, num_heads=4, scale=0.5, rotary=True)
    again = FixedHeadAttention.from_trained(layer).trained()
    assert again.rotary and not again.has_bias
    grouped = GroupedHeadAttention.from_trained(layer, num_groups=2).pruned([0, 1, 1, 0])
    assert grouped.trained().rotary
    assert isinstance(CollaborativeAttention.from_trained(again, rank=8), SharedKeyAttention)


def test_fixed_heads_without_biases_are_those_of_a_layer_without(layer_of: Callable[..., Any]):
    layer, x = layer_of(bias=False), torch.randn(2, 5, 16)
    ours = FixedHeadAttention.from_trained(
        read_trained_attention(layer), head_size=6, bias=False
    ).eval()
    assert all("bias" not in name for name, _ in ours.named_parameters())
    torch.testing.assert_close(ours(x, x, x)[0], layer(x, x, x)[0], atol=1e-5, rtol=0)
    with raises(InvalidArgument, "nn.bias"):
        FixedHeadAttention.from_trained(read_trained_attention(layer_of()), bias=False)
