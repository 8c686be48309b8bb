"""From what is asked for to what is done: filled in by measurement, or refused with a way out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from attnserve.calibration.elimination import elimination_order
from attnserve.calibration.importance import leave_one_out
from attnserve.calibration.similarity import measure_similarity
from attnserve.calibration.voting import voting_to_stay
from attnserve.checks.certify import MatchReport, read_attention
from attnserve.models.datasets import Dataset
from attnserve.planning.plan import Plan
from attnserve.planning.request import Request, make_plan, require_attention
from attnserve.runtime.session import Batch
from graph_passes.errors import CannotRewrite, InvalidArgument, InvalidModel
from graph_passes.passes.reuse_attention import check_edges
from tests.graph_passes.graphs import D, H, K, V, attention, graph, layers
from tests.graph_passes.test_bodies import if_model

L, SIZE = 4, H * K
NAMES = [f"attention_{layer}" for layer in range(L)]


def batches(seed: int, rows: int = 6) -> list[Batch]:
    random = np.random.default_rng(seed)
    return [
        {
            "x": random.standard_normal((rows, length, D)).astype(np.float32),
            "mask": np.zeros((rows, 1, 1, length), np.float32),
        }
        for length in (4, 7)
    ]


@cache
def data() -> Dataset:
    return Dataset(batches(0), batches(1), 7, {"fit_tokens": 66})


@cache
def stack() -> tuple[ir.Model, MatchReport]:
    """L layers, as a plan reads them; planning changes nothing."""
    model = layers(L)
    return model, read_attention(model)


def plan(
    *, model: ir.Model | None = None, calibrated: bool = True, given: Dataset | None = None,
    **request: Any,
) -> Plan:  # fmt: skip
    graph, reading = stack() if model is None else (model, read_attention(model))
    return make_plan(
        Request(**request), graph, reading, given or (data() if calibrated else None),
        threads=1, report=lambda *_: None,
    )  # fmt: skip


# What may be asked for


def test_nothing_is_no_request():
    with pytest.raises(InvalidArgument, match=r"no rewrite is asked for\n.*--reuse, --prune"):
        Request(layers=["1"], align="index", importance="loo")


def test_two_ways_to_say_which_heads_go_are_one_too_many():
    with pytest.raises(InvalidArgument, match="--prune and --prune-heads both say which heads go"):
        Request(prune=0.5, prune_heads={"0": [1, 0, 1]})


@pytest.mark.parametrize(
    "share", [0, 1, 0.0, 1.0, 1.5, -0.1, float("nan"), float("inf"), -float("inf")]
)
def test_a_share_is_more_than_none_and_less_than_all(share: float):
    with pytest.raises(
        InvalidArgument, match=r"--prune .*expected a share of the heads, more than"
    ):
        Request(prune=share)


@pytest.mark.parametrize("share", [1e-9, 0.5, 1 - 1e-9])
def test_shares_between_are_requests(share: float):
    assert Request(prune=share).prune == share


def test_a_model_without_attention_is_refused():
    model = graph("\n [last] out = Softmax <axis = -1> (x)")
    with pytest.raises(InvalidModel, match=r"no attention was found \(last: .*\)\n.*inspect"):
        require_attention(read_attention(model))
    with pytest.raises(InvalidModel, match="no attention was found"):
        plan(model=model, prune_heads={})


# What is measured is measured on data

NEEDS_DATA: dict[str, tuple[dict[str, Any], str]] = {
    "prune": ({"prune": 0.25}, r"--prune measures .*no data\n.*--calib FILE, or --prune-heads"),
    "reuse": ({"reuse": "partial:1"}, r"--reuse aligns .*no data\n.*--calib FILE, or --align inde"),
    "auto": ({"reuse": "auto", "align": "index"}, "--reuse aligns .*no data"),
    "skip": ({"skip": ["1"]}, r"--skip fits .*to data, and there is none\n.*--calib FILE"),
}


@pytest.mark.parametrize("what", NEEDS_DATA)
def test_what_is_measured_needs_data(what: str):
    request, reason = NEEDS_DATA[what]
    with pytest.raises(InvalidArgument, match=reason):
        plan(calibrated=False, **request)


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
def test_what_is_named_needs_none(request_: dict[str, Any]):
    assert plan(calibrated=False, **request_).changed


# Each kind of request


def nothing_else(found: Plan, *kinds: str) -> None:
    for kind in {"skip", "masks", "edges", "ranks"} - set(kinds):
        assert not getattr(found, kind), kind


def test_pruning_by_energy_is_by_what_others_cannot_write():
    found = plan(prune=0.25)
    nothing_else(found, "masks")
    model, reading = stack()
    orders = elimination_order(model, reading.blocks, data().fit)
    assert sum(mask.count(0) for mask in found.masks.values()) == 3  # of 12
    for name, mask in found.masks.items():
        gone = [head for head, stays in enumerate(mask) if not stays]
        assert gone and set(gone) == set(orders[name].order[: len(gone)].tolist())


def test_pruning_by_leaving_out_takes_the_least_loss():
    found = plan(prune=0.25, importance="loo")
    model, reading = stack()
    loss = leave_one_out(model, reading.blocks, data().fit)
    ranked = sorted((float(loss[name][h]), name, h) for name in NAMES for h in range(H))
    gone = {(name, h) for name, mask in found.masks.items() for h in range(H) if not mask[h]}
    assert gone == {(name, h) for _, name, h in ranked[:3]}  # no layer loses all here


def test_pruning_by_voting_takes_the_same_number_of_every_layer():
    found = plan(prune=1 / 3, importance="voting")
    assert [mask.count(0) for mask in found.masks.values()] == [1] * L
    model, reading = stack()
    votes = voting_to_stay(model, reading.blocks, data().fit, groups=dict.fromkeys(NAMES, 2))
    assert found.masks == {name: [int(x) for x in votes[name].mask] for name in NAMES}


def test_pruning_keeps_to_the_layers_that_are_named():
    found = plan(prune=0.34, layers=["1", "attention_2"])
    assert set(found.masks) <= {NAMES[1], NAMES[2]}
    assert sum(mask.count(0) for mask in found.masks.values()) == 2  # of 6


@pytest.mark.parametrize("importance", ["energy", "loo"])
def test_every_layer_keeps_a_head_however_much_goes(importance: Any):
    found = plan(prune=0.99, importance=importance)
    assert [sum(mask) for mask in found.masks.values()] == [1] * L


def test_a_share_that_is_no_head_says_so():
    with pytest.raises(CannotRewrite, match=r"as asked \(--prune 0.01 of 12 heads is none\)"):
        plan(prune=0.01)
    found = plan(prune=0.01, collab_dk=6)
    assert not found.masks and "--prune 0.01 of 12 heads is none" in found.warnings


def test_masks_that_are_given_are_taken():
    found = plan(prune_heads={"0": [1, 1, 1], "1": [0, 1, 0], "attention_3": [0, 0, 0]})
    nothing_else(found, "masks")
    assert found.masks == {NAMES[1]: [0, 1, 0], NAMES[3]: [0, 0, 0]}
    with pytest.raises(CannotRewrite, match="--prune-heads takes no head out"):
        plan(prune_heads={"0": [1, 1, 1]})


def test_reuse_takes_the_most_similar_head():
    found = plan(reuse="partial:1")
    nothing_else(found, "edges")
    model, reading = stack()
    similarity = measure_similarity(model, reading.blocks, data().fit)
    (head, source), *more = found.edges[NAMES[1]].items()
    between = similarity.between(NAMES[1], NAMES[0])
    assert not more and between[head, source[1]] == between.max()
    assert list(found.edges) == [NAMES[1], NAMES[2]]


@pytest.mark.parametrize(
    ("reuse", "reused"),
    [("partial:2", [1, 2]), ("full:2", [1, 2]), ("alternate", [1, 3]), ("all-end:1", [2])],
)
@pytest.mark.parametrize("align", ["index", "similarity"])
def test_configurations_reuse_the_layers_of_the_paper(reuse: str, reused: list[int], align: Any):
    found = plan(reuse=reuse, align=align)
    assert list(found.edges) == [NAMES[layer] for layer in reused]
    check_edges(found.edges, stack()[1].blocks)
    heads = 2 if reuse.startswith("partial") else H
    assert all(len(taken) == heads for taken in found.edges.values())


def test_reuse_keeps_to_the_layers_that_are_named():
    assert list(plan(reuse="full:3", layers=["2"]).edges) == [NAMES[2]]
    with pytest.raises(
        InvalidArgument, match="full:1 is about layers 1 to 1, of which --layers names none"
    ):
        plan(reuse="full:1", layers=["0", "2"])


def test_auto_reuses_where_it_does_no_damage():
    """All layers attend nearly alike: their queries and keys are the same, and x changes little."""
    same = ("Wq", "Wk", "bq", "bk")
    quiet = {"Wo": np.full((H * V, D), 1e-3, np.float32), "bo": np.zeros(D, np.float32)}
    model = layers(L, same=same, constants=quiet)
    found = plan(model=model, reuse="auto")
    assert found.edges and set(found.edges) <= {NAMES[1], NAMES[2]}
    for taken in found.edges.values():
        assert all(theirs == head for head, (_, theirs) in taken.items())


def test_auto_that_finds_nothing_says_so():
    with pytest.raises(CannotRewrite, match="--reuse auto: every reuse would change the output"):
        plan(reuse="auto")


def test_a_layer_with_nothing_to_compare_it_with_is_left_and_told(monkeypatch: pytest.MonkeyPatch):
    def incomparable(*_: Any, **__: Any) -> Any:
        model, reading = stack()
        found = measure_similarity(model, reading.blocks, data().fit)
        found.matrix[: 2 * H, 2 * H :] = found.matrix[2 * H :, : 2 * H] = np.nan
        return found

    monkeypatch.setattr("attnserve.planning.request.measure_similarity", incomparable)
    found = plan(reuse="partial:1")
    assert list(found.edges) == [NAMES[1]]
    assert any(NAMES[2] in warning and "be compared" in warning for warning in found.warnings)


@pytest.mark.parametrize(
    ("given", "kind"),
    [("1", "affine"), ("attention_1", "affine"), ("1:affine", "affine"),
     ("1:constant", "constant"), ("attention_1:constant", "constant")],
)  # fmt: skip
def test_a_layer_is_skipped_by_an_affine_map_or_a_constant(given: str, kind: str):
    found = plan(skip=[given])
    nothing_else(found, "skip")
    assert found.skip == {NAMES[1]: kind}


@pytest.mark.parametrize(
    "given", ["9", "", ":", "1:", "1:linear", ":constant", "1:constant:affine"]
)
def test_an_unknown_layer_or_kind_is_not_skipped(given: str):
    with pytest.raises(InvalidArgument, match="--skip: no attention is called"):
        plan(skip=[given])


# Requests together


def test_every_rewrite_in_one_plan():
    found = plan(skip=["2"], prune=0.25, reuse="partial:1", collab_dk=6)
    assert found.skip == {NAMES[2]: "affine"}
    assert NAMES[2] not in found.masks and sum(m.count(0) for m in found.masks.values()) == 2
    assert list(found.edges) == [NAMES[1]], "layer 2 is gone"
    assert found.ranks.keys() <= {NAMES[0], NAMES[1], NAMES[3]}
    for name, heads in found.edges.items():
        for head, (source, theirs) in heads.items():
            assert found.masks.get(name, [1] * H)[head], "no head that goes is reused"
            assert found.masks.get(source, [1] * H)[theirs], "nor a source"


def test_a_plan_as_json_is_a_request_again():
    found = plan(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6)
    content = found.to_json()
    again = plan(
        skip=[f"{name}:{kind}" for name, kind in content["skip"].items()],
        prune_heads=content["prune_heads"],
        reuse=content["reuse"],
        collab_dk=content["collab_dk"],
        calibrated=True,
    )
    assert again.to_json() == content
    assert (again.skip, again.masks, again.edges, again.ranks) == (
        found.skip, found.masks, found.edges, found.ranks
    )  # fmt: skip
    assert found == plan(skip=["2:constant"], prune=0.25, reuse="partial:1", collab_dk=6)


def test_a_skipped_layer_is_not_pruned_nor_reused():
    with pytest.raises(InvalidArgument, match="--prune-heads names attention_1, which --skip leav"):
        plan(skip=["1"], prune_heads={"1": [1, 0, 1]})
    with pytest.raises(InvalidArgument, match="--reuse names attention_1, which --skip leaves out"):
        plan(skip=["1"], reuse={"1": {"0": ["0", 0]}})
    with pytest.raises(InvalidArgument, match=r"needs head 0 of attention_1, which is taken out"):
        plan(skip=["1"], reuse={"2": {"0": ["1", 0]}})


@pytest.mark.parametrize(
    ("edges", "gone"),
    [({"1": {"0": ["0", 1]}}, "head 1 of attention_0"), ({"1": {"2": ["0", 0]}}, "head 2 of att")],
    ids=["source", "reused"],
)  # fmt: skip
def test_an_edge_of_a_pruned_head_is_refused(edges: dict[str, Any], gone: str):
    masks = {"0": [1, 0, 1], "1": [1, 1, 0]}
    with pytest.raises(InvalidArgument, match=f"needs {gone}.*taken out\n.*leave the head in"):
        plan(prune_heads=masks, reuse=edges)


def test_edges_between_heads_that_stay_keep_the_numbers_of_the_original():
    masks = {"0": [1, 0, 1], "1": [0, 1, 1]}
    found = plan(prune_heads=masks, reuse={"1": {"2": ["0", 2]}})
    assert found.edges == {NAMES[1]: {2: (NAMES[0], 2)}}
    found = plan(prune_heads=masks, reuse="partial:1", layers=["1"])
    ((head, (_, source)),) = found.edges[NAMES[1]].items()
    assert head in (1, 2) and source in (0, 2)


def test_a_layer_that_is_pruned_away_is_no_source():
    found = plan(prune_heads={"0": [0, 0, 0]}, reuse="partial:1")
    assert list(found.edges) == [NAMES[2]] and found.edges[NAMES[2]].popitem()[1][0] == NAMES[1]


# Shared dimensions, of the heads that are left


@pytest.mark.parametrize("R", [0, -1, SIZE + 1])
def test_a_size_out_of_range_is_refused(R: int):
    with pytest.raises(InvalidArgument, match=f"--collab-dk {R}: expected 1 to {SIZE}"):
        plan(collab_dk=R, prune_heads={"0": [1, 0, 1]})


@pytest.mark.parametrize(("R", "factored"), [(2 * K - 1, True), (2 * K, False), (SIZE, False)])
@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [1, 0, 1]}}, {"reuse": {"1": {"1": ["0", 0]}}}],
    ids=["pruned", "reused"],
)
def test_a_layer_is_factored_where_its_own_heads_hold_more(
    request_: dict[str, Any], R: int, factored: bool
):
    """Two of three heads are left: from 2 x K on R shares nothing among them."""
    found = plan(collab_dk=R, **request_)
    assert (NAMES[1] in found.ranks) is factored
    assert found.ranks.keys() >= {NAMES[0], NAMES[2], NAMES[3]}
    told = [w for w in found.warnings if "2 own heads hold 8 dimensions" in w and f"R = {R}" in w]
    assert len(told) == (not factored)


@pytest.mark.parametrize(
    "request_",
    [{"prune_heads": {"1": [0, 0, 0]}}, {"reuse": "full:1", "align": "index"}, {"skip": ["1"]},
     {"skip": ["1:constant"]}],
    ids=str,
)  # fmt: skip
def test_a_layer_without_heads_of_its_own_is_not_factored(request_: dict[str, Any]):
    found = plan(collab_dk=6, **request_)
    assert list(found.ranks) == [NAMES[0], NAMES[2], NAMES[3]] and not found.warnings


def test_nothing_left_to_factor_is_no_error_where_something_else_is_done():
    found = plan(collab_dk=6, skip=["1"], layers=["1"])
    assert found.changed == [NAMES[1]] and not found.ranks


def test_sizes_of_no_layer_are_nothing_to_do():
    with pytest.raises(CannotRewrite, match="none of the 4 attention blocks can be factored"):
        plan(collab_dk={})


# Layers that cannot be rewritten


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
def test_layers_that_attend_otherwise_are_no_source(build: Callable[[], ir.Model]):
    edges = {"2": {"0": ["1", 0]}}
    with pytest.raises(
        CannotRewrite,
        match=r"attention_2 cannot reuse attention_1: no earlier attention has the same .*lengths,",
    ):
        plan(model=build(), calibrated=False, reuse=edges)
    found = plan(model=build(), calibrated=False, reuse="full:2", align="index")
    assert list(found.edges) == [NAMES[1]]
    assert any("attention_2 is left as it is: no earlier" in warning for warning in found.warnings)
    with pytest.raises(CannotRewrite, match=r"attention_2: no earlier .*\n.*out of --layers"):
        plan(model=build(), calibrated=False, reuse="full:2", align="index", layers=["2"])


def test_a_model_of_two_layers_has_no_middle():
    with pytest.raises(InvalidArgument, match="expected at most 0: the first and the last are exa"):
        plan(model=layers(2), reuse="partial:1")
    assert plan(model=layers(2), reuse="partial:1:1").edges.keys() == {NAMES[1]}


def test_the_first_layer_has_nothing_to_take():
    with pytest.raises(InvalidArgument, match="1 layers of 1, expected at most 0"):
        plan(model=attention(), reuse="full:1", align="index", calibrated=False)


NESTED = Dataset(
    [{"x": np.ones((2, 5, D), np.float32), "flag": np.array(True)}], [], 5, {"fit_tokens": 10}
)


def test_what_lies_in_a_body_is_not_measured():
    model = if_model()
    names = [block.name for block in read_attention(model).blocks]
    with pytest.raises(CannotRewrite, match=r"in the body of another node, .*\n.*out of --skip"):
        plan(model=model, given=NESTED, skip=["0"])
    with pytest.raises(CannotRewrite, match=r"be rewritten as asked \(.* body of another node"):
        plan(model=model, given=NESTED, prune=0.5)
    assert plan(model=model, calibrated=False, prune_heads={"0": [1, 0, 1]}).masks == {
        names[0]: [1, 0, 1]
    }


def test_changed_layers_are_those_of_any_rewrite_once():
    found = Plan({"a": "affine"}, {"b": [1, 0]}, {"c": {0: ("a", 0)}}, {"b": 3, "d": 3}, {"d": 2})
    assert found.changed == ["a", "b", "c", "d"]
    content: Mapping[str, Any] = found.to_json()
    assert content == {
        "skip": {"a": "affine"},
        "prune_heads": {"b": [1, 0]},
        "reuse": {"c": {"0": ["a", 0]}},
        "collab_dk": {"b": 3, "d": 3},
        "head_dk": {"d": 2},
        "prune_neurons": {},
        "fuse": {},
        "fuse_gelu": [],
        "sum_residuals": False,
        "precision": "float32",
    }
