"""Requests: validation, and the plans that are made of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.elimination import elimination_order
from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.similarity import measure_similarity
from attnserve.calibration.voting import voting_to_stay
from attnserve.checks.certify import read_attention, require_attention
from attnserve.data.datasets import Dataset
from attnserve.models.lineage import Calibration
from attnserve.options import Data, Goal, Rewrites, Target, check_mode
from attnserve.planning.plans.plan import Plan
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidModel
from graph_passes.passes.collaborate import Collaborate
from graph_passes.passes.prune_heads import PruneHeads
from graph_passes.passes.reuse_attention import ReuseAttention, check_edges
from graph_passes.passes.skip_attention import SkipAttention
from tests.attnserve.planning.request.requests import (
    NAMES,
    L,
    data,
    planned,
    request_of,
    stack,
)
from tests.errors import raises
from tests.graph_passes.graphs import (
    D,
    H,
    K,
    V,
    attention,
    fused_parts,
    graph,
    if_model,
    layers,
)
from tests.graph_passes.layouts import variant

SIZE = H * K


def masks_of(plan: Plan) -> dict[str, list[int]]:
    return {name: list(mask) for name, mask in plan.targets(PruneHeads).items()}


def edges_of(plan: Plan) -> dict[str, dict[int, tuple[str, int]]]:
    """The reused heads, numbered as pruning leaves them."""
    return {name: dict(heads) for name, heads in plan.targets(ReuseAttention).items()}


def ranks_of(plan: Plan) -> dict[str, int]:
    return {name: params.rank for name, params in plan.targets(Collaborate).items()}


def skipped_of(plan: Plan) -> dict[str, str]:
    return {name: params.kind for name, params in plan.targets(SkipAttention).items()}


# Validation


def test_request_without_rewrites_is_refused():
    with raises(InvalidArgument, "request.empty", "`reuse`", "`prune`"):
        check_mode(Goal(), Rewrites(layers=("1",)), Data(), Target(), None)


@pytest.mark.parametrize(
    "rewrites",
    [{}, {"skip": ("1",)}, {"ffn": 0.5}, {"strip_cache": True}, {"prune_heads": "m.json"},
     {"reuse": "edges.json"}],
    ids=["conversion", "skip", "ffn", "strip_cache", "prune_heads", "reuse"],
)  # fmt: skip
def test_layers_without_a_rewrite_that_uses_them_are_refused(rewrites: dict[str, Any]):
    request = Rewrites(layers=("1",), **rewrites)
    with raises(InvalidArgument, "request.conflict", "`layers`"):
        check_mode(Goal(), request, Data(), Target(precision="int8"), None)


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"skip": ["0"], "mixing": "dense"}, ("`collab_dk`", "`mixing`")),
        ({"skip": ["0"], "collab_cache": True}, ("`collab_dk`", "`collab_cache`")),
        ({"skip": ["0"], "importance": "loo"}, ("`prune`", "`importance`")),
        ({"skip": ["0"], "align": "index"}, ("`reuse`", "`align`")),
        ({"prune": 0.5, "prune_heads": {"0": [1, 0, 1]}}, ("`prune`", "`prune_heads`")),
    ],
)
def test_request_options_that_do_not_fit_are_refused(
    options: dict[str, Any], names: tuple[str, ...]
):
    with raises(InvalidArgument, "request.conflict", *names):
        Rewrites(**options)


def test_require_attention_without_attention_is_refused_with_reasons():
    model = graph("\n [last] out = Softmax <axis = -1> (x)")
    with raises(InvalidModel, "model.no_attention", "last: "):
        require_attention(read_attention(model))
    with raises(InvalidModel, "model.no_attention"):
        planned(model=model, prune_heads={})


# Data


@pytest.mark.parametrize(
    "request_",
    [
        {"prune_heads": {"0": [1, 0, 1]}},
        {"reuse": {"1": {"0": ["0", 2]}}},
        {"reuse": "partial:1", "align": "index"},
        {"collab_dk": 6},
    ],
    ids=lambda request: ", ".join(request),
)
def test_plan_request_explicit_rewrite_needs_no_data(request_: dict[str, Any]):
    assert planned(calibrated=False, **request_).lossy_blocks


# Each rewrite


def only(plan: Plan, name: str) -> None:
    assert [each.name for each in plan.passes] == [name]


def test_plan_request_prune_by_energy_follows_elimination_order():
    plan = planned(prune=0.25)
    only(plan, "prune_heads")
    model, matches = stack()
    orders = elimination_order(model, matches.blocks, data().fit)
    assert sum(mask.count(0) for mask in masks_of(plan).values()) == 3  # of 12
    for name, mask in masks_of(plan).items():
        removed = [head for head, stays in enumerate(mask) if not stays]
        assert removed and set(removed) == set(orders[name].order[: len(removed)].tolist())


def test_plan_request_prune_by_loo_removes_least_loss():
    plan = planned(prune=0.25, importance="loo")
    model, matches = stack()
    loss = leave_one_out(model, matches.blocks, data().fit)
    ranked = sorted((float(loss[name][h]), name, h) for name in NAMES for h in range(H))
    removed = {(name, h) for name, mask in masks_of(plan).items() for h in range(H) if not mask[h]}
    assert removed == {(name, h) for _, name, h in ranked[:3]}  # no layer loses all here


def test_plan_request_prune_by_voting_removes_equal_numbers_per_layer():
    plan = planned(prune=1 / 3, importance="voting")
    assert [mask.count(0) for mask in masks_of(plan).values()] == [1] * L
    model, matches = stack()
    votes = voting_to_stay(model, matches.blocks, data().fit, groups=dict.fromkeys(NAMES, 2))
    assert masks_of(plan) == {name: [int(x) for x in votes[name].mask] for name in NAMES}


def test_plan_request_prune_is_restricted_to_layers():
    plan = planned(prune=0.34, layers=["1", "attention_2"])
    assert set(masks_of(plan)) <= {NAMES[1], NAMES[2]}
    assert sum(mask.count(0) for mask in masks_of(plan).values()) == 2  # of 6


@pytest.mark.parametrize("importance", ["energy", "loo"])
def test_plan_request_large_prune_keeps_one_head_per_layer(importance: Any):
    result = request_of(prune=0.99, importance=importance)
    assert [sum(mask) for mask in masks_of(result.plan).values()] == [1] * L
    assert any(f"{2 * L} of {3 * L} heads" in warning for warning in result.warnings)


def test_plan_request_share_below_one_head_is_refused_or_warned_of():
    with raises(CannotRewrite, "request.nothing", "`prune` 0.01", "12 heads"):
        planned(prune=0.01)
    result = request_of(prune=0.01, collab_dk=6)
    assert not masks_of(result.plan)
    assert any("`prune` 0.01" in warning for warning in result.warnings)


def test_plan_request_prune_heads_applies_masks():
    plan = planned(prune_heads={"0": [1, 1, 1], "1": [0, 1, 0], "attention_3": [0, 0, 0]})
    only(plan, "prune_heads")
    assert masks_of(plan) == {NAMES[1]: [0, 1, 0], NAMES[3]: [0, 0, 0]}
    with raises(CannotRewrite, "request.nothing", "prune_heads"):
        planned(prune_heads={"0": [1, 1, 1]})


def test_plan_request_reuse_takes_most_similar_head():
    plan = planned(reuse="partial:1")
    only(plan, "reuse_attention")
    model, matches = stack()
    similarity = measure_similarity(model, matches.blocks, data().fit)
    (head, source), *more = edges_of(plan)[NAMES[1]].items()
    between = similarity.between(NAMES[1], NAMES[0])
    assert not more and between[head, source[1]] == between.max()
    assert list(edges_of(plan)) == [NAMES[1], NAMES[2]]


@pytest.mark.parametrize(
    ("reuse", "reused"),
    [("partial:2", [1, 2]), ("full:2", [1, 2]), ("alternate", [1, 3]), ("all-end:1", [2])],
)
@pytest.mark.parametrize("align", ["index", "similarity"])
def test_plan_request_reuse_forms_choose_layers_of_the_paper(
    reuse: str, reused: list[int], align: Any
):
    plan = planned(reuse=reuse, align=align)
    assert list(edges_of(plan)) == [NAMES[layer] for layer in reused]
    check_edges(edges_of(plan), stack()[1].blocks)
    heads = 2 if reuse.startswith("partial") else H
    assert all(len(taken) == heads for taken in edges_of(plan).values())


def test_plan_request_reuse_is_restricted_to_layers():
    assert list(edges_of(planned(reuse="full:3", layers=["2"]))) == [NAMES[2]]
    with raises(InvalidArgument, "request.conflict", "`reuse` full:1", "`layers`"):
        planned(reuse="full:1", layers=["0", "2"])


def test_plan_request_reuse_auto_reuses_equal_heads():
    """All layers attend nearly alike: their queries and keys are the same, and x changes little."""
    same = ("Wq", "Wk", "bq", "bk")
    quiet = {"Wo": np.full((H * V, D), 1e-3, np.float32), "bo": np.zeros(D, np.float32)}
    model = layers(L, same=same, constants=quiet)
    plan = planned(model=model, reuse="auto")
    assert edges_of(plan) and set(edges_of(plan)) <= {NAMES[1], NAMES[2]}
    for taken in edges_of(plan).values():
        assert all(theirs == head for head, (_, theirs) in taken.items())


def test_plan_request_layer_without_comparable_source_is_left_with_warning(
    monkeypatch: pytest.MonkeyPatch,
):
    def incomparable(*_: Any, **__: Any) -> Any:
        model, matches = stack()
        result = measure_similarity(model, matches.blocks, data().fit)
        result.matrix[: 2 * H, 2 * H :] = result.matrix[2 * H :, : 2 * H] = np.nan
        return result

    monkeypatch.setattr("attnserve.planning.request.heads.measure_similarity", incomparable)
    result = request_of(reuse="partial:1")
    assert list(edges_of(result.plan)) == [NAMES[1]]
    assert any(NAMES[2] in warning and "be compared" in warning for warning in result.warnings)


@pytest.mark.parametrize(
    ("entry", "kind"),
    [("1", "affine"), ("attention_1", "affine"), ("1:affine", "affine"),
     ("1:constant", "constant"), ("attention_1:constant", "constant")],
)  # fmt: skip
def test_plan_request_skip_reads_layer_and_kind(entry: str, kind: str):
    plan = planned(skip=[entry])
    only(plan, "skip_attention")
    assert skipped_of(plan) == {NAMES[1]: kind}


# Combined rewrites


def test_plan_request_combines_all_rewrites():
    plan = planned(skip=["2"], prune=0.25, reuse="partial:1", collab_dk=6)
    assert skipped_of(plan) == {NAMES[2]: "affine"}
    assert NAMES[2] not in masks_of(plan) and sum(m.count(0) for m in masks_of(plan).values()) == 2
    assert list(edges_of(plan)) == [NAMES[1]], "layer 2 has no heads"
    assert ranks_of(plan).keys() <= {NAMES[0], NAMES[1], NAMES[3]}
    masks = masks_of(plan)
    for name, heads in edges_of(plan).items():  # in the numbers of the heads that are kept
        for head, (source, theirs) in heads.items():
            assert head < sum(masks.get(name, [1] * H))
            assert theirs < sum(masks.get(source, [1] * H))


def test_plan_request_is_reproducible():
    request = {"skip": ["2:constant"], "prune": 0.25, "reuse": "partial:1", "collab_dk": 6}
    assert planned(**request).to_json() == planned(**request).to_json()


def test_plan_request_edges_are_numbered_as_pruning_leaves_the_heads():
    masks = {"0": [1, 0, 1], "1": [0, 1, 1]}
    plan = planned(prune_heads=masks, reuse={"1": {"2": ["0", 2]}})
    assert edges_of(plan) == {NAMES[1]: {1: (NAMES[0], 1)}}
    plan = planned(prune_heads=masks, reuse="partial:1", layers=["1"])
    ((head, (_, source)),) = edges_of(plan)[NAMES[1]].items()
    assert head in (0, 1) and source in (0, 1)


def test_plan_request_layer_without_heads_is_no_source():
    plan = planned(prune_heads={"0": [0, 0, 0]}, reuse="partial:1")
    assert (
        list(edges_of(plan)) == [NAMES[2]] and edges_of(plan)[NAMES[2]].popitem()[1][0] == NAMES[1]
    )


# Shared dimensions of the remaining heads


@pytest.mark.parametrize(("R", "factored"), [(2 * K - 1, True), (2 * K, False), (SIZE, False)])
@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [1, 0, 1]}}, {"reuse": {"1": {"1": ["0", 0]}}}],
    ids=["pruned", "reused"],
)
def test_plan_request_layer_is_factored_if_own_heads_hold_more(
    request_: dict[str, Any], R: int, factored: bool
):
    """Two of three heads are left: from 2 x K on R shares nothing among them."""
    result = request_of(collab_dk=R, **request_)
    assert (NAMES[1] in ranks_of(result.plan)) is factored
    assert ranks_of(result.plan).keys() >= {NAMES[0], NAMES[2], NAMES[3]}
    warned = [w for w in result.warnings if w.startswith(NAMES[1]) and f"R = {R}" in w]
    assert len(warned) == (not factored)


@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [0, 0, 0]}}, {"reuse": "full:1", "align": "index"}, {"skip": ["1"]},
     {"skip": ["1:constant"]}],
    ids=str,
)  # fmt: skip
def test_plan_request_layer_without_own_heads_is_not_factored(request_: dict[str, Any]):
    result = request_of(collab_dk=6, **request_)
    assert list(ranks_of(result.plan)) == [NAMES[0], NAMES[2], NAMES[3]] and not result.warnings


def test_plan_request_nothing_to_factor_beside_other_rewrites_is_no_error():
    plan = planned(collab_dk=6, skip=["1"], layers=["1"])
    assert plan.lossy_blocks == [NAMES[1]] and not ranks_of(plan)


# Refused layers


def other_mask() -> ir.Model:
    """The last of three layers has a mask of its own."""
    inputs = f"float[batch, sequence, {D}] x, float[batch, 1, 1, sequence] mask, "
    model = layers(3, inputs=inputs + "float[batch, 1, 1, sequence] own_mask")
    own = next(value for value in model.graph.inputs if value.name == "own_mask")
    next(node for node in model.graph if node.outputs[0].name == "m_2").replace_input_with(1, own)
    return model


def other_length() -> ir.Model:
    """The last of three layers attends to tokens that are handed in."""
    inputs = f"float[batch, sequence, {D}] x, float[batch, memory, {D}] y"
    model = layers(3, inputs=inputs, mask="\n m = Identity(s)")
    memory = next(value for value in model.graph.inputs if value.name == "y")
    for name in ("k0_2", "v0_2"):
        made = next(node for node in model.graph if node.outputs[0].name == name)
        made.replace_input_with(0, memory)
    return model


@pytest.mark.parametrize("build", [other_mask, other_length])
def test_plan_request_layer_with_other_mask_or_length_is_no_source(build: Callable[[], ir.Model]):
    edges = {"2": {"0": ["1", 0]}}
    with raises(CannotRewrite, "rewrite.masks_differ", "attention_2 cannot reuse attention_1"):
        planned(model=build(), calibrated=False, reuse=edges)
    result = request_of(model=build(), calibrated=False, reuse="full:2", align="index")
    assert list(edges_of(result.plan)) == [NAMES[1]]
    assert any(warning.startswith("attention_2 is left as it is") for warning in result.warnings)
    with raises(CannotRewrite, "rewrite.masks_differ", "attention_2", "`layers`"):
        planned(model=build(), calibrated=False, reuse="full:2", align="index", layers=["2"])


def returning_keys(*numbers: int, same: tuple[str, ...] = ()) -> ir.Model:
    """Layers of one operator each; those with these numbers also return their keys."""
    parts = fused_parts("Attention (q, k, v)")
    context = parts["context"].replace("c0 =", "c0, keys, values =")
    model = layers(L, opset=23, same=same, **{**parts, "context": context})
    for number in numbers:
        operator = next(n for n in model.graph if n.outputs[0].name == f"c0_{number}")
        model.graph.insert_after(operator, ir.node("Abs", [operator.outputs[1]]))
    return model


OBSERVED = "its attention probabilities cannot be observed"


@pytest.mark.parametrize(
    ("request_", "changed"),
    [
        ({"prune": 1 / 3, "importance": "voting"}, [NAMES[0], NAMES[1], NAMES[3]]),
        ({"reuse": "partial:1"}, [NAMES[1]]),
        ({"reuse": "full:3"}, [NAMES[1], NAMES[3]]),
    ],
    ids=str,
)
def test_plan_request_layer_that_cannot_be_observed_is_left(
    request_: dict[str, Any], changed: list[str]
):
    result = request_of(model=returning_keys(2), **request_)
    assert sorted(result.plan.lossy_blocks) == changed
    assert result.warnings == (f"{NAMES[2]} is left as it is: {OBSERVED}",)
    with raises(CannotRewrite, "rewrite.unobservable", NAMES[2], OBSERVED, "`layers`"):
        planned(model=returning_keys(2), layers=["1", "2"], **request_)
    assert planned(model=returning_keys(2), layers=["1"], **request_).lossy_blocks == [NAMES[1]]


def test_plan_request_layer_that_cannot_be_observed_is_pruned_and_reused_without_measuring_it():
    model = returning_keys(2)
    assert NAMES[2] in planned(model=model, prune=0.5, importance="loo").lossy_blocks
    assert NAMES[2] in planned(model=model, reuse="full:3", align="index").lossy_blocks


@pytest.mark.parametrize(
    "request_", [{"prune": 1 / 3, "importance": "voting"}, {"reuse": "auto"}], ids=str
)
def test_plan_request_without_a_layer_that_can_be_observed_says_so(request_: dict[str, Any]):
    """Not that the share is too small, or that every reuse would change the output."""
    numbers = range(L) if "prune" in request_ else (1, 2)
    result = request_of(model=returning_keys(*numbers), skip=["3"], **request_)
    assert result.plan.lossy_blocks == [NAMES[3]]
    assert result.warnings and all(OBSERVED in warning for warning in result.warnings)


def test_plan_request_layers_that_share_weights_with_an_unobservable_one_are_left():
    result = request_of(
        model=returning_keys(2, same=("Wq", "bq")), prune=1 / 3, importance="voting", skip=["0"]
    )
    assert result.plan.lossy_blocks == [NAMES[0]]
    observed, *others = result.warnings
    assert observed == f"{NAMES[2]} is left as it is: {OBSERVED}"
    assert [warning.split()[0] for warning in others] == [NAMES[1], NAMES[3]]
    assert all("shares weights" in warning for warning in others)


def test_plan_request_partial_reuse_of_two_layers_needs_a_count():
    with raises(InvalidArgument, "reuse.layers", "at most 0"):
        planned(model=layers(2), reuse="partial:1")
    with raises(InvalidArgument, "reuse.layers", "1 of 1 layers"):
        planned(model=attention(), reuse="full:1", align="index", calibrated=False)
    assert edges_of(planned(model=layers(2), reuse="partial:1:1")).keys() == {NAMES[1]}


MASKS = {"0": [1, 0, 1], "1": [1, 1, 0]}
NO_DATA: dict[str, Any] = {"calibrated": False}
IMPOSSIBLE: list[tuple[dict[str, Any], str, tuple[str, ...]]] = [
    ({"prune": 0.25, **NO_DATA}, "no_data", ("`prune`", "`prune_heads`")),
    ({"reuse": "partial:1", **NO_DATA}, "no_data", ("`reuse`", "`align`")),
    ({"reuse": "auto", "align": "index", **NO_DATA}, "no_data", ("`reuse`", "`calib`")),
    ({"skip": ["1"], **NO_DATA}, "no_data", ("`skip`", "`calib`")),
    ({"ffn": 0.5, **NO_DATA}, "no_data", ("`ffn`", "`calib`")),
    ({"prune": 0.5, "layers": ["1", "9"]}, "unknown_layer", ("`layers`", "'9'")),
    ({"collab_dk": {"9": 6}}, "unknown_layer", ("`collab_dk`", "'9'")),
    *(({"skip": [entry]}, "unknown_layer", ("`skip`",))
      for entry in ("9", "", ":", "1:", "1:linear", ":constant", "1:constant:affine")),
    *(({"skip": ["1", again]}, "twice", ("attention_1",))
      for again in ("1", "1:constant", "attention_1")),
    *(({"skip": ["1"], **other}, "conflict", ("attention_1",)) for other in (
        {"prune_heads": {"1": [1, 0, 1]}},
        {"reuse": {"1": {"0": ["0", 0]}}},
        {"reuse": {"2": {"0": ["1", 0]}}},
    )),
    ({"prune_heads": MASKS, "reuse": {"1": {"0": ["0", 1]}}}, "conflict",
     ("`reuse`", "head 1 of attention_0")),
    ({"prune_heads": MASKS, "reuse": {"1": {"2": ["0", 0]}}}, "conflict",
     ("`reuse`", "head 2 of attention_1")),
    *(({"collab_dk": R, "prune_heads": {"0": [1, 0, 1]}}, "range",
       (f"`collab_dk` is {R}", f"1 to {SIZE}", f"{H} heads x {K}"))
      for R in (0, -1, SIZE + 1, 10**12)),
    *(({"collab_dk": [6] * count}, "range", (f"{count} sizes for {L}",)) for count in (0, 3)),
    ({"collab_dk": {}}, "nothing", ("4 attention blocks",)),
    ({"reuse": "auto"}, "nothing", ("`reuse` auto",)),
    # GPT-J's keys cannot be shared, because of their rotary angles, not for want of a cache.
    ({"model": variant("rotary queries and keys"), "collab_dk": 4, **NO_DATA}, "nothing",
     ("rotary angle",)),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "code", "values"), IMPOSSIBLE, ids=str)
def test_plan_request_that_is_impossible_is_refused(
    request_: dict[str, Any], code: str, values: tuple[str, ...]
):
    error = CannotRewrite if code == "nothing" else InvalidArgument
    with raises(error, f"request.{code}", *values):
        planned(**request_)


NESTED = Dataset(
    [{"x": np.ones((2, 5, D), np.float32), "flag": np.array(True)}],
    [],
    [],
    5,
    Calibration(fit_tokens=10),
)


def test_plan_request_block_in_body_is_not_measured():
    model = if_model()
    names = [block.name for block in read_attention(model).blocks]
    with raises(CannotRewrite, "rewrite.in_body", names[0], "`skip`"):
        planned(model=model, dataset=NESTED, skip=["0"])
    with raises(CannotRewrite, "request.nothing", "body of another node"):
        planned(model=model, dataset=NESTED, prune=0.5)
    pruned = planned(model=model, calibrated=False, prune_heads={"0": [1, 0, 1]})
    assert masks_of(pruned) == {names[0]: [1, 0, 1]}
