"""Group-constrained training and Voting-to-Stay."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnserve.nn import (
    FeatureMaps,
    FixedHeadAttention,
    GroupedHeadAttention,
    group_loss,
    keep_pillars,
    read_trained_attention,
    reuse_transformer,
    voting_to_stay,
)
from graph_passes.errors import InvalidArgument
from tests.errors import raises

Layers = Callable[..., Any]
VALUES, ATTENTION, OUTPUTS = (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)


def with_maps(groups: list[int], *, objective: Literal["metric", "categorical"] = "metric") -> Any:
    """A layer whose heads have equal maps within these groups, orthogonal between them."""
    count = len(set(groups))
    layer = GroupedHeadAttention(
        8, len(groups), 4, num_groups=count, alpha=0.7, beta=0.3, tau=(1.0, 0.5, 0.25),
        objective=objective,
    )  # fmt: skip
    units = torch.eye(4)[torch.tensor(groups)]  # H 4
    maps = units[None, :, None].expand(2, -1, 4, -1)  # B H 4 4
    real = torch.ones(2, 4, dtype=torch.bool)
    layer.latest.maps = FeatureMaps(maps, maps, maps, real, real)
    return layer


def test_metric_loss_is_minimal_for_equal_heads_in_orthogonal_groups():
    layer = with_maps([0, 1, 0, 2, 1])
    assert layer.group_loss().item() == pytest.approx(-0.7 * 1.75)
    assert layer.groups.tolist() == [0, 1, 0, 2, 1]
    layer.groups.copy_(torch.tensor([0, 0, 1, 2, 1]))  # a wrong grouping costs more
    assert layer.group_loss().item() > -0.7 * 1.75 + 0.1


def test_categorical_loss_is_zero_for_certain_groups():
    layer = with_maps([0, 1, 0, 2], objective="categorical")
    unsure = layer.group_loss().item()
    with torch.no_grad():
        layer.classifier.weight.mul_(200.0)
    assert 0.0 <= layer.group_loss().item() < 1e-6 < unsure


def test_categorical_loss_follows_its_definition():
    layer = with_maps([0, 1, 0, 2], objective="categorical")
    with torch.no_grad():
        layer.classifier.weight.normal_()
    loss = layer.group_loss().item()
    alike = 1.75 * torch.eye(3)[layer.groups]
    p = layer.classifier(alike).softmax(1)
    own = torch.eye(3)[layer.groups].bool()
    expected = -0.7 * p[own].log().mean() - 0.3 * (1 - p[~own]).log().mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def dunn_index(layer: GroupedHeadAttention, tau: tuple[float, float, float]) -> float:
    """Least distance between groups relative to the largest within one (figure 2 of the paper)."""
    maps = layer.latest.required()
    chosen = (maps.values, maps.probabilities, maps.outputs)[int(np.argmax(tau))].detach()
    points = torch.nn.functional.normalize(chosen.transpose(0, 1).flatten(1), dim=1).double()
    distance, groups = torch.cdist(points, points), layer.groups
    same = groups[:, None] == groups
    return (distance[~same].min() / distance[same].max()).item()


@pytest.mark.parametrize("objective", ["metric", "categorical"])
@pytest.mark.parametrize("tau", [VALUES, ATTENTION, OUTPUTS], ids=["values", "attention", "output"])
def test_gradient_steps_decrease_loss_and_form_compact_groups(
    tau: tuple[float, float, float], objective: Any
):
    layer = GroupedHeadAttention(
        16, 6, 4, num_groups=2, tau=tau, objective=objective, batch_first=True
    )
    optimizer = torch.optim.Adam(layer.parameters(), lr=5e-3)
    x = torch.randn(4, 6, 16)
    losses = []
    for step in range(80):
        layer(x, x, x)
        loss = layer.group_loss()
        if step == 0:
            first = dunn_index(layer, tau)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    assert dunn_index(layer, tau) > first
    assert layer.reassign() == 0  # the groups have converged


def test_padding_does_not_change_loss():
    layer = GroupedHeadAttention(16, 4, 4, num_groups=2, tau=(1, 1, 1), batch_first=True)
    x = torch.randn(2, 5, 16)
    layer(x, x, x)
    expected = layer.group_loss().item()
    longer = torch.cat([x, 9 * torch.randn(2, 3, 16)], 1)
    padding = torch.arange(8).expand(2, -1) >= 5
    layer(longer, longer, longer, key_padding_mask=padding)
    assert layer.group_loss().item() == pytest.approx(expected, abs=1e-6)


def twins(heads: list[int], **options: Any) -> Any:
    """A layer whose head i has the weights of head ``heads[i]`` of a random layer."""
    source = FixedHeadAttention(16, max(heads) + 1, 4, batch_first=True).trained()
    layer = GroupedHeadAttention(
        16, len(heads), 4, num_groups=max(heads) + 1, batch_first=True, **options
    )
    with torch.no_grad():
        for linear, weight in (
            (layer.q_proj, source.query), (layer.k_proj, source.key), (layer.v_proj, source.value),
        ):  # fmt: skip
            linear.weight.copy_(weight[heads].transpose(1, 2).flatten(0, 1))
    return layer


def test_voting_keeps_one_head_of_each_group_and_prunes_the_layer():
    heads = [0, 1, 0, 2, 1, 0]
    model = torch.nn.ModuleDict({"attention": twins(heads, tau=(1, 1, 1))}).train()
    layer = model["attention"]
    batches = [torch.randn(2, 6, 16) for _ in range(3)]
    votes = voting_to_stay(model, batches, lambda x: layer(x, x, x))["attention"]
    assert model.training
    assert votes.groups.tolist() == heads
    assert votes.votes.sum() == 3 * 3 * 3  # batches, groups and kinds of maps
    kept = np.flatnonzero(votes.mask)
    assert sorted(votes.groups[kept]) == [0, 1, 2]

    x = batches[0]
    with torch.no_grad():  # the other heads are masked out of the original
        layer.out_proj.weight.mul_(torch.tensor(votes.mask).repeat_interleave(4))
        expected = layer(x, x, x)[0]
        keep_pillars(model, {"attention": votes})
        pruned = model["attention"]
        torch.testing.assert_close(pruned(x, x, x)[0], expected)
    assert type(pruned) is FixedHeadAttention
    assert (pruned.num_heads, pruned.scale) == (3, layer.scale)


def test_voting_runs_the_model_without_dropout_and_restores_the_mode_of_each_module():
    layer = twins([0, 1, 0], dropout=0.5)
    model = torch.nn.ModuleDict({"attention": layer, "still": torch.nn.Dropout()}).train()
    model["still"].eval()
    x, seen = torch.randn(2, 6, 16), list[bool]()

    def run(x: Any) -> None:
        seen.append(layer.training)
        layer(x, x, x)

    voting_to_stay(model, [x], run)
    assert seen == [False] and layer.training and not model["still"].training
    assert layer.pruned([1, 1, 0]).dropout == 0.5


def test_units_are_constants_in_the_gradient():
    """Heads move towards the mean of their group, as it is; the mean does not move towards them."""
    layer = GroupedHeadAttention(8, 3, 4, num_groups=1, alpha=1.0, beta=0.0)
    maps = torch.randn(2, 3, 4, 4, requires_grad=True)
    real = torch.ones(2, 4, dtype=torch.bool)
    layer.latest.maps = FeatureMaps(maps, maps, maps, real, real)
    layer.group_loss().backward()
    ours, maps.grad = maps.grad, None
    heads = maps.transpose(0, 1).flatten(1)
    unit = heads.mean(0).detach()
    (-torch.cosine_similarity(heads, unit[None]).mean()).backward()
    torch.testing.assert_close(ours, maps.grad)


def test_groups_are_found_in_all_batches_since_the_last_time():
    layer, other = with_maps([0, 1, 0, 1]), with_maps([0, 0, 1, 1])
    layer.group_loss()
    strong, weak = layer.latest.maps, other.latest.maps
    assert layer.groups.tolist() == [0, 1, 0, 1]
    for factor, expected in ((0.1, [0, 1, 0, 1]), (10.0, [0, 0, 1, 1])):
        for maps in (strong, FeatureMaps(*(part * factor for part in (weak.values,
                     weak.probabilities, weak.outputs)), weak.queries, weak.keys)):  # fmt: skip
            layer.latest.maps = maps
            layer.group_loss()
        layer.reassign()
        assert layer.groups.tolist() == expected


def test_loss_of_a_model_is_the_mean_of_its_layers():
    model = torch.nn.ModuleList([with_maps([0, 1, 0, 2]), with_maps([0, 0, 1, 1])])
    losses = [layer.group_loss().item() for layer in model]
    model[0].groups.copy_(torch.tensor([0, 1, 1, 2]))
    losses[0] = model[0].group_loss().item()
    assert losses[0] != losses[1]
    assert group_loss(model).item() == pytest.approx(sum(losses) / 2)


def test_reentrant_checkpointing_is_refused():
    """The loss would have no gradient, without an error."""
    layer = twins([0, 1, 0])
    x = torch.randn(2, 6, 16, requires_grad=True)

    def run(x: Any) -> Any:
        return layer(x, x, x)[0]

    for reentrant in (False, True):
        layer.zero_grad()
        out = checkpoint(run, x, use_reentrant=reentrant)
        total = out.sum() + layer.group_loss()
        if reentrant:
            with raises(InvalidArgument, "nn.checkpointing", "use_reentrant=False"):
                total.backward()
        else:
            total.backward()
            ours = layer.v_proj.weight.grad.clone()
            layer.zero_grad()
            (run(x).sum() + layer.group_loss()).backward()
            torch.testing.assert_close(ours, layer.v_proj.weight.grad)


def test_reassign_counts_moved_heads():
    layer = with_maps([0, 1, 0, 2])
    assert layer.reassign() == 4  # the first assignment
    assert layer.reassign() == 0


def test_loss_before_the_first_call_and_without_grouped_layers_is_refused(layer_of: Layers):
    with raises(InvalidArgument, "nn.no_maps"):
        GroupedHeadAttention.from_trained(
            read_trained_attention(layer_of()), num_groups=2
        ).group_loss()
    with raises(InvalidArgument, "nn.no_groups"):
        group_loss(torch.nn.Linear(2, 2))


def test_pruned_layer_of_an_evaluated_model_drops_nothing():
    model = torch.nn.ModuleDict({"attention": twins([0, 1, 0], dropout=0.5)}).eval()
    x = torch.randn(2, 6, 16)
    votes = voting_to_stay(model, [x], lambda x: model["attention"](x, x, x))
    keep_pillars(model, votes)
    assert not model["attention"].training
    first, second = (model["attention"](x, x, x)[0] for _ in range(2))
    torch.testing.assert_close(first, second, atol=0, rtol=0)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 3)])
def test_padded_keys_of_cross_attention_do_not_hide_queries(sizes: tuple[int, int]):
    S, T = sizes
    layer = GroupedHeadAttention(16, 4, 4, num_groups=2, tau=OUTPUTS, batch_first=True)
    x, y = torch.randn(1, S, 16), torch.randn(1, T, 16)
    layer(x, y, y, key_padding_mask=torch.arange(T)[None] >= 2)
    maps = layer.latest.required()
    assert maps.queries.all()
    assert maps.keys.tolist() == [[True, True, False]]


def test_voting_without_real_tokens_is_refused():
    model = torch.nn.ModuleDict({"attention": twins([0, 1, 0])})
    x, padding = torch.randn(2, 6, 16), torch.ones(2, 6, dtype=torch.bool)

    def run(x: Any) -> Any:
        return model["attention"](x, x, x, key_padding_mask=padding)

    for batches in ([], [x]):
        with raises(InvalidArgument, "nn.no_batches"):
            voting_to_stay(model, batches, run)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"objective": "4A"}, "nn.objective"),
        ({"tau": (0, 0, 0)}, "nn.tau"),
        ({"tau": (1, 1)}, "nn.tau"),
        ({"num_groups": 7}, "nn.num_groups"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], code: str):
    with raises(InvalidArgument, code):
        GroupedHeadAttention(16, 6, 4, **{"num_groups": 2, **options})


def test_layer_that_others_reuse_keeps_its_heads(layer_of: Layers):
    layers = reuse_transformer(
        [read_trained_attention(layer_of())] * 2,
        "full:1",
        exact=lambda layer: GroupedHeadAttention.from_trained(layer, num_groups=2),
    )
    model, x = torch.nn.ModuleList(layers), torch.randn(2, 6, 16)

    def run(x: Any) -> None:
        for layer in layers:
            x = layer(x, x, x)[0]

    votes = voting_to_stay(model, [x], run)
    with raises(InvalidArgument, "nn.keep_pillars", "reused"):
        keep_pillars(model, votes)
    single = layers[0]
    votes = voting_to_stay(single, [x], lambda x: single(x, x, x))
    with raises(InvalidArgument, "nn.keep_pillars", "pruned"):
        keep_pillars(single, votes)


def test_votes_of_other_modules_are_refused():
    model = torch.nn.ModuleDict({"a": GroupedHeadAttention(16, 4, 4, num_groups=2)})
    outer, x = torch.nn.ModuleDict({"model": model}), torch.randn(2, 5, 16)
    votes = voting_to_stay(outer, [x], lambda y: model["a"](y, y, y))
    with raises(InvalidArgument, "nn.votes", "model.a"):
        keep_pillars(model, votes)
    keep_pillars(outer, votes)
    assert model["a"].num_heads == 2


def test_layer_at_two_places_is_replaced_at_both():
    layer = GroupedHeadAttention(16, 4, 4, num_groups=2)
    model, x = torch.nn.ModuleDict({"a": layer, "b": layer}), torch.randn(2, 5, 16)
    keep_pillars(model, voting_to_stay(model, [x], lambda y: layer(y, y, y)))
    assert model["a"] is model["b"] and type(model["a"]) is FixedHeadAttention


@pytest.mark.parametrize("objective", ["metric", "categorical"])
def test_loss_of_half_precision_maps_is_float32(objective: Literal["metric", "categorical"]):
    layer = GroupedHeadAttention(16, 4, 4, num_groups=2, objective=objective)
    x = torch.randn(2, 5, 16)
    with torch.autocast("cpu", torch.bfloat16):
        layer(x, x, x)
        inside = layer.group_loss()
    outside = layer.group_loss()
    assert inside.dtype == torch.float32
    torch.testing.assert_close(inside, outside, atol=0, rtol=0)
    outside.backward()
    assert layer.v_proj.weight.grad.isfinite().all()


@pytest.mark.parametrize("objective", ["metric", "categorical"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-6), (torch.bfloat16, 0.05), (torch.float16, 0.01)]
)
def test_group_loss_of_layers_in_other_types_is_that_in_float32(
    objective: Literal["metric", "categorical"], groups: int, dtype: torch.dtype, bound: float
):
    torch.manual_seed(0)
    layer = GroupedHeadAttention(
        16, 4, 4, num_groups=groups, objective=objective, tau=(1.0, 1.0, 1.0)
    )
    x = torch.randn(2, 5, 16)
    layer(x, x, x)
    expected = layer.group_loss()
    other = copy.deepcopy(layer).to(dtype)
    other(x.to(dtype), x.to(dtype), x.to(dtype))
    loss = other.group_loss()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert loss.item() == pytest.approx(expected.item(), rel=bound, abs=bound)
    loss.backward()
    trained = [other.v_proj.weight]
    if other.classifier is not None and groups > 1:  # one class has no gradient
        trained.append(other.classifier.weight)
    assert all(one.grad.dtype == dtype and one.grad.isfinite().all() for one in trained)
    assert all(one.grad.abs().max() > 0 for one in trained[1:])
    other.reassign()


@pytest.mark.parametrize("hidden", [-torch.inf, -1e9, -1e4])
def test_padding_of_added_masks_does_not_change_loss(hidden: float):
    layer = GroupedHeadAttention(16, 4, 4, num_groups=2, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5)
    padding[1, 3:] = hidden
    found = []
    for values in (x, torch.where(padding[..., None] < 0, 7.0, x)):
        layer(values, values, values, key_padding_mask=padding)
        found.append(layer.group_loss().item())
    assert found[0] == pytest.approx(found[1], abs=1e-6)


@pytest.mark.parametrize("mask", [[1, 0, 1], [0, 0, 0, 0], [0, 2, 3, 1]])
def test_masks_that_are_not_of_the_heads_are_refused(mask: list[int]):
    with raises(InvalidArgument, "nn.mask", "4 heads"):
        GroupedHeadAttention(16, 4, 4, num_groups=2).pruned(mask)
